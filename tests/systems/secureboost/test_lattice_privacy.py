"""What is in the transcripts under the lattice map: nothing of nodes, samples, gradients or labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from crypto.asking import asked, begun
from marks import all_but_first_slow
from systems.secureboost.test_privacy import (
    TO_ACTIVE,
    TO_PASSIVE,
    arrays,
    forms_of,
    leaks,
    received,
    secrets_of_active,
    secrets_of_party,
)
from systems.vertical.playing import play_training, tables_and_labels
from treaty.crypto.lattice.linear_map import LinearMapClient
from treaty.crypto.lattice.ring import packed_words, unpack
from treaty.crypto.parameters import DEGREE
from treaty.crypto.sums.encrypted_sums import SumsBounds, make_client
from treaty.crypto.sums.lattice_sums import sums_parameters
from treaty.models.trees import forest_of
from treaty.systems.vertical import column_owner, encrypted_columns, messages, setup

SEED_TO_PASSIVE = (setup.SeedOffer, setup.SeedCommitments, setup.SeedShares)
LATTICE_TO_PASSIVE = {**TO_PASSIVE, **{kind.__name__: kind for kind in SEED_TO_PASSIVE}}
SEED_TO_ACTIVE = (setup.SeedCommitment, setup.SeedShare)
LATTICE_TO_ACTIVE = {
    **TO_ACTIVE,
    "SplitColumns": messages.SplitColumns,
    **{kind.__name__: kind for kind in SEED_TO_ACTIVE},
}
pytestmark = pytest.mark.usefixtures("exact_sums_allowed")
REVEAL = pytest.mark.parametrize("reveal", ["column", "node"])
ROWS = 240
PARAMETERS = sums_parameters(SumsBounds(ROWS, 1 << 16, 1 << 14))


def train(tables, y, **options):
    """Train under the lattice map on samples of rows."""
    blind = {"encryption": "lattice", "max_bin": 6, "subsample": 0.7, "random_state": 3}
    return play_training(tables, y, **{**blind, **options})


def rows_of_nodes(played: Any, tables: dict) -> list[np.ndarray]:
    """Return the rows of every node of every tree but the roots: bool (n_rows,)."""
    n_rows, found = tables["p0"].n_rows, []
    for tree in forest_of(list(played.results.values())).trees:
        rows = {0: np.ones(n_rows, np.bool_)}
        for node in np.flatnonzero(tree.left >= 0).tolist():
            owner = list(tables)[tree.source[node]]
            packed = played.results[owner].splits.decide(tables[owner].matrix(), tree.record[[node]].astype(np.int32))
            left, child = np.unpackbits(packed[0], count=n_rows).astype(np.bool_), int(tree.left[node])
            rows |= {child: rows[node] & left, child + 1: rows[node] & ~left}
        found += [members for node, members in rows.items() if node]
    return found


def forms_of_rows(sets: list[np.ndarray]) -> dict[str, list[bytes]]:
    """Return byte forms in which sets of rows would show: their numbers, a flag or a bit for each row of the table."""
    numbers = [form for rows in sets if rows.sum() >= 12 for form in forms_of(np.flatnonzero(rows))]
    flags = [rows.astype(kind)[:48].tobytes() for rows in sets if rows[:48].any() for kind in ("|i1", "<i4", "<f8")]
    return {"numbers of rows": numbers, "flags": flags, "bits": [np.packbits(rows).tobytes() for rows in sets]}


@pytest.fixture
def samples(monkeypatch) -> list[np.ndarray]:
    """Return a list that collects the sample of rows of every tree: bool (n_rows,)."""
    collected, start_tree = [], encrypted_columns.EncryptedGradients.start_tree

    def watching(gradients, peer, grad, hess, rows, columns):
        collected.append(np.isin(np.arange(len(grad)), rows))
        return start_tree(gradients, peer, grad, hess, rows, columns)

    monkeypatch.setattr(encrypted_columns.EncryptedGradients, "start_tree", watching)
    return collected


def test_passive_transcripts_hold_nothing_of_nodes_samples_gradients_or_labels(samples):
    tables, y = tables_and_labels()
    played = train(tables, y)
    assert samples
    assert not any(rows.all() for rows in samples)
    for name in ("p1", "p2"):
        messages = list(received(played.transcripts[name], LATTICE_TO_PASSIVE))
        contents = [content for _, _, content in messages]
        assert not leaks(contents, forms_of_rows(rows_of_nodes(played, tables) + samples))
        for trees in (0, 1):
            assert not leaks(contents, secrets_of_active(tables, y, trees, played.results))
        for other in {*tables} - {name}:
            assert not leaks(contents, secrets_of_party(tables, other, played.results[other]))


@REVEAL
def test_messages_to_passive_parties_have_no_room_for_rows_but_in_ciphertexts(reveal):
    tables, y = tables_and_labels()
    played = train(tables, y, reveal=reveal)
    for name in ("p1", "p2"):
        counted = dict.fromkeys(LATTICE_TO_PASSIVE, 0)
        for step, message, _ in received(played.transcripts[name], LATTICE_TO_PASSIVE):
            counted[step] += 1
            match step:
                case "TreeStart":
                    assert message.rows is None
                    assert message.payload == []
                    assert len(message.commitment) == 32
                    assert message.columns.shape == (len(tables[name].schema.names),)
                case "SumsRequest":
                    words, own = message.payload
                    assert words.shape == (words.shape[0], packed_words(PARAMETERS, len(y)))
                    assert own.shape == (words.shape[0], packed_words(PARAMETERS, DEGREE))
                    assert {words.dtype, own.dtype} == {"uint32"}
                case "SplitRequest" if reveal == "column":
                    assert {array.shape for array in arrays(message)} == {
                        message.features.shape,
                        (*message.features.shape, 32),
                    }
                case "Setup":
                    assert message.encryption == "lattice"
                    assert np.frombuffer(message.payload[0].data, np.int64)[0] == len(y)
                case "SplitRequest":
                    pass
                case "NamedRows":
                    assert reveal == "node"
                    assert message.nodes.shape == (len(y),)
                case _:  # nothing of rows at all
                    assert list(arrays(message)) == []
        assert all(counted[step] for step in ("Setup", "TreeStart", "SumsRequest", "SplitRequest", "SeedShares"))


def test_with_nodes_revealed_a_party_sees_the_rows_of_nodes_it_splits_alone():
    tables, y = tables_and_labels()
    played = train(tables, y, reveal="node")
    trees = forest_of(list(played.results.values())).trees
    for source, name in enumerate(tables):
        if name != "p0":
            asked = [m for s, m, _ in received(played.transcripts[name], LATTICE_TO_PASSIVE) if s == "SplitRequest"]
            named = sum(message.features.shape[0] for message in asked)
            assert named == sum(np.count_nonzero((tree.source == source) & (tree.left >= 0)) for tree in trees) > 0


@REVEAL
def test_active_transcripts_hold_no_values_names_or_thresholds(reveal):
    tables, y = tables_and_labels()
    played = train(tables, y, reveal=reveal)
    messages = list(received(played.transcripts["p0"], LATTICE_TO_ACTIVE))
    steps = {step for step, _, _ in messages}
    assert {"BinLayout", "Hint", "Sums", "SeedShare"} <= steps
    assert ("SplitColumns" in steps, "SplitAnswer" in steps) == (reveal == "column", reveal == "node")
    for name in ("p1", "p2"):
        assert len(played.results[name].splits), "no split of this party: the search would prove nothing"
        assert not leaks([content for _, _, content in messages], secrets_of_party(tables, name, played.results[name]))


@pytest.mark.parametrize(
    "what", all_but_first_slow("gradients", "numbers of rows", "flags", "bits", "labels", "packed labels")
)
def test_the_search_finds_a_planted_leak(monkeypatch, samples, what):
    tables, y = tables_and_labels()
    pack, unpack, ask = encrypted_columns.pack, encrypted_columns.unpack, encrypted_columns.EncryptedGradients.ask
    asked = [np.empty(0, np.int32)]

    def asking(gradients, level, partition):
        asked.append(partition.rows(level.asked[:1], sampled=False)[0])
        ask(gradients, level, partition)

    def planted():
        rows = np.isin(np.arange(len(y)), asked[-1])
        return {
            "numbers of rows": np.flatnonzero(rows),
            "flags": rows.astype(np.int8),
            "bits": np.packbits(rows),
            "gradients": grad,
            "labels": y.astype(np.int32),
            "packed labels": np.packbits(y.astype(bool)),
        }[what]

    grad = np.frombuffer(secrets_of_active(tables, y)["gradients"][0], np.int64)
    monkeypatch.setattr(encrypted_columns.EncryptedGradients, "ask", asking)
    for module in (setup, encrypted_columns, column_owner):
        monkeypatch.setattr(module, "pack", lambda payload: pack([*payload, planted()]))
    for module in (setup, encrypted_columns, column_owner):
        monkeypatch.setattr(module, "unpack", lambda payload, peer, of: unpack(payload[:-1], peer, of))
    played = train(tables, y)
    contents = [content for _, _, content in received(played.transcripts["p1"], LATTICE_TO_PASSIVE)]
    forms = forms_of_rows([*rows_of_nodes(played, tables), *samples]) | secrets_of_active(tables, y)
    assert what in leaks(contents, forms)


# ---------------------------------------------------------------- words look uniform

BINS, FALSE_ALARM = 64, 1e-9


def looks_uniform(words: np.ndarray, prime: int) -> bool:
    """Chi-squared test of the highest and lowest six bits; wrong of uniform words once in 5e8 calls."""
    for bins in (words.astype(np.int64) * BINS // prime, words % BINS):
        counts, mean = np.bincount(bins.ravel(), minlength=BINS), words.size / BINS
        if ((counts - mean) ** 2).sum() / mean > chi2.isf(FALSE_ALARM, BINS - 1):
            return False
    return True


def words_asked(played: Any, name: str) -> list[tuple[np.ndarray, int]]:
    """Return what a party was asked: of b and of b_0, the words modulo each prime, and that prime."""
    asked = [m for step, m, _ in received(played.transcripts[name], LATTICE_TO_PASSIVE) if step == "SumsRequest"]
    found = []
    for place, entries in enumerate((ROWS, DEGREE)):
        parts = [np.frombuffer(m.payload[place].data, np.uint32).reshape(m.payload[place].shape) for m in asked]
        whole = unpack(PARAMETERS, np.concatenate(parts), entries)
        found += [(whole[:, k], prime) for k, prime in enumerate(PARAMETERS.primes)]
    return found


def test_words_of_requests_are_uniform():
    """False alarm: 20 tests of 1e-9 each."""
    tables, y = tables_and_labels()
    words = words_asked(train(tables, y, n_estimators=6), "p1")
    assert min(part.size for part, _ in words) > 5000
    assert all(looks_uniform(*part) for part in words)


def test_the_test_of_uniformity_finds_words_that_are_not_masked(monkeypatch):
    made = LinearMapClient.__init__

    def making(client, *arguments, **options):
        made(client, *arguments, **options)
        client._public[:] = 0

    monkeypatch.setattr(LinearMapClient, "__init__", making)
    client = make_client("lattice", SumsBounds(240, 1 << 16, 1 << 14), threads=1)
    client.settle(bytes(32))
    begun(client, np.full(240, 77), np.full(240, 1 << 14))
    parts = asked(client, np.arange(100, dtype=np.int32), np.array([0, 100], np.int32))
    for part, entries in zip(parts, (240, DEGREE), strict=True):
        whole = unpack(client._parameters, part, entries)
        assert not any(looks_uniform(whole[:, k], prime) for k, prime in enumerate(client._parameters.primes))


# ---------------------------------------------------------------- columns are sent once


def columns_sent(transcript: Any) -> tuple[int, int, int]:
    """Return bytes of columns, columns, and splits they decide."""
    answers = [m for step, m, _ in received(transcript, LATTICE_TO_ACTIVE) if step == "SplitColumns"]
    new = [m.new for m in answers]
    return (
        sum(array.data.nbytes for array in new),
        sum(array.shape[0] for array in new),
        sum(m.columns.shape[0] for m in answers),
    )


def test_equal_splits_are_sent_once():
    tables, y = tables_and_labels(parties=2)
    once = columns_sent(train(tables, y, n_estimators=1, subsample=1.0, learning_rate=1e-12).transcripts["p0"])
    played = train(tables, y, n_estimators=4, subsample=1.0, learning_rate=1e-12)  # four times the same tree
    assert columns_sent(played.transcripts["p0"]) == (once[0], once[1], 4 * once[2])
    assert once[0] == once[1] * (len(y) // 8)
    splits = played.results["p1"].splits
    distinct = set(zip(splits.feature, splits.threshold, splits.missing_left, strict=True))
    assert once[1] == len(distinct)
    assert len(splits) == 4 * once[2]  # but every one has its record
