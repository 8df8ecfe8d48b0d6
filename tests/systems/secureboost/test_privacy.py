"""What is in the transcripts: the declared types, and nothing a party should not have."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from systems.vertical.playing import play_training, tables_and_labels
from treaty.messaging.exchanges import Terms, Verdict
from treaty.messaging.messages import Array, Message, decode_body
from treaty.models.trees import forest_of
from treaty.systems.options import public_terms
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.vertical import column_owner, encrypted_columns, messages, prediction, setup
from treaty.trees.ensemble import Walk, join_splits
from treaty.trees.objectives import make_objective

# Everything that may reach each role, with what each array may be.
TO_PASSIVE = {
    "Terms": Terms,
    "Verdict": Verdict,
    "Setup": messages.Setup,
    "HintReceipt": messages.HintReceipt,
    "TreeStart": messages.TreeStart,
    "TreeEnd": messages.TreeEnd,
    "SumsRequest": messages.SumsRequest,
    "SplitRequest": messages.SplitRequest,
    "NamedRows": messages.NamedRows,
    "DecideRequest": prediction.DecideRequest,
    "Finish": prediction.Finish,
}
TO_ACTIVE = {
    "Terms": Terms,
    "Verdict": Verdict,
    "BinLayout": messages.BinLayout,
    "Hint": messages.Hint,
    "Sums": messages.Sums,
    "SplitAnswer": messages.SplitAnswer,
    "Decisions": prediction.Decisions,
    "RevealedShare": messages.RevealedShare,
}


def received(transcript: Any, allowed: dict[str, type[Message]]) -> Iterator[tuple[str, Message, bytes]]:
    """Decode every received message as one of the declared types; anything else raises."""
    for entry in transcript.entries:
        if entry.direction == "received":
            yield entry.step, decode_body(entry.content, allowed[entry.step], peer=entry.peer), bytes(entry.content)


def arrays(value: Any) -> Iterator[Array]:
    if isinstance(value, Array):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from arrays(item)
    elif isinstance(value, Message):
        for name in value.__struct_fields__:
            yield from arrays(getattr(value, name))


def forms_of(values: np.ndarray) -> list[bytes]:
    """Return a run of values in every element type that holds it without loss: one alone could turn up by chance."""
    run = np.asarray(values)[:12]
    kinds = ("<i8", "<i4", "<i2", "|i1", "<f8", "<f4", ">i8", ">f8")
    return [run.astype(kind).tobytes() for kind in kinds if np.array_equal(run.astype(kind), run)]


def secrets_of_active(tables: dict, y: np.ndarray, trees: int = 0, parts: Any = None) -> dict[str, list[bytes]]:
    """Return byte forms in which labels, or gradients after so many trees, would show."""
    loss = make_objective("logistic", y, None)
    margins = np.zeros((len(y), 1))
    if trees:
        whole = [parts[name] for name in tables]
        forest = forest_of(whole)
        splits = join_splits([part.splits for part in whole], [len(part.schema.names) for part in whole])
        matrix = np.concatenate([table.matrix() for table in tables.values()], axis=1)
        Walk(forest.trees[:trees], splits).add_to(margins, matrix)
    grad, hess, _ = loss.gradients(margins, y, None)
    g, h = grad[0], hess[0]
    return {
        "gradients": forms_of(g),
        "hessians": forms_of(h),
        "labels": forms_of(y),
        "real gradients": forms_of(g * loss.grad_unit),
        "interleaved gradients": forms_of(np.stack([g, h], 1).ravel()),
        "packed labels": [np.packbits(y[:96].astype(bool)).tobytes()],
    }


def secrets_of_party(tables: dict, name: str, part: Any) -> dict[str, list[bytes]]:
    """Return byte forms of a party's values, thresholds and column names."""
    table = tables[name]
    forms = {f"column name {column}": [column.encode()] for column in table.schema.names}
    for column, values in zip(table.schema.names, table.columns, strict=True):
        forms[f"values of {column}"] = [values[:6].astype(kind).tobytes() for kind in ("<f4", "<f8", ">f8")]
    # eight bytes or more: four bytes turn up in megabytes of ciphertexts by chance, in one of 700 runs
    thresholds = [value for value in part.splits.threshold if np.isfinite(value)]
    for value in thresholds:
        if value != round(value):
            forms[f"threshold {value}"] = [np.array(value, kind).tobytes() for kind in ("<f8", ">f8")]
    for pair in pairwise(thresholds):
        if all(value != round(value) for value in pair):
            forms[f"thresholds {pair}"] = [np.array(pair, "<f4").tobytes()]
    return forms


def leaks(contents: list[bytes], forms: dict[str, list[bytes]]) -> set[str]:
    return {name for name, patterns in forms.items() if any(p in content for p in patterns for content in contents)}


def test_passive_transcripts_hold_only_declared_messages_without_plaintext():
    tables, y = tables_and_labels()
    played = play_training(tables, y)
    own = secrets_of_party(tables, "p0", played.results["p0"])
    for name in ("p1", "p2"):
        messages = list(received(played.transcripts[name], TO_PASSIVE))
        assert {"Setup", "TreeStart", "SumsRequest", "Finish"} <= {step for step, _, _ in messages}
        others = secrets_of_party(
            tables, "p2" if name == "p1" else "p1", played.results["p2" if name == "p1" else "p1"]
        )
        contents = [content for _, _, content in messages]
        assert not leaks(contents, own | others)
        for trees in (0, 1):
            assert not leaks(contents, secrets_of_active(tables, y, trees, played.results))
        for step, message, _ in messages:
            for array in arrays(message):
                assert array.dtype in ("uint8", "uint16", "int32", "int64", "uint64", "bool"), (step, array.dtype)


def test_active_transcript_holds_only_declared_messages_without_values_names_or_thresholds():
    tables, y = tables_and_labels()
    played = play_training(tables, y)
    messages = list(received(played.transcripts["p0"], TO_ACTIVE))
    assert {"BinLayout", "Hint", "Sums"} <= {step for step, _, _ in messages}
    for name in ("p1", "p2"):
        assert len(played.results[name].splits), "no split of this party: the search would prove nothing"
        assert not leaks([content for _, _, content in messages], secrets_of_party(tables, name, played.results[name]))


@pytest.mark.parametrize("what", ["gradients", "labels", "packed labels"])
def test_the_search_finds_a_planted_leak(monkeypatch, what):
    tables, y = tables_and_labels()
    loss = make_objective("logistic", y, None)
    planted = {
        "gradients": loss.gradients(np.zeros((len(y), 1)), y, None)[0][0],
        "labels": y.astype(np.int8),
        "packed labels": np.packbits(y.astype(bool)),
    }[what]
    pack, unpack = encrypted_columns.pack, encrypted_columns.unpack
    for module in (setup, encrypted_columns, column_owner):
        monkeypatch.setattr(module, "pack", lambda payload: pack([*payload, planted]))
    for module in (setup, encrypted_columns, column_owner):
        monkeypatch.setattr(module, "unpack", lambda payload, peer, of: unpack(payload[:-1], peer, of))
    played = play_training(tables, y)
    contents = [content for _, _, content in received(played.transcripts["p1"], TO_PASSIVE)]
    assert what in leaks(contents, secrets_of_active(tables, y))


def test_the_search_finds_planted_values_thresholds_and_a_name(monkeypatch):
    tables, y = tables_and_labels()
    name, thresholds = tables["p1"].schema.names[0], play_training(tables, y).results["p1"].splits.threshold
    forms = [np.array(thresholds, kind) for kind in ("f8", "f4")]
    planted = [Array.of(values) for values in (tables["p1"].columns[0], *forms, np.frombuffer(name.encode(), np.uint8))]
    unpack = encrypted_columns.unpack
    for module in (setup, encrypted_columns, column_owner):
        monkeypatch.setattr(module, "pack", lambda payload: [*map(Array.of, payload), *planted])
    for module in (setup, encrypted_columns, column_owner):
        monkeypatch.setattr(module, "unpack", lambda payload, peer, of: unpack(payload[: -len(planted)], peer, of))
    played = play_training(tables, y)
    contents = [content for _, _, content in received(played.transcripts["p0"], TO_ACTIVE)]
    secrets = secrets_of_party(tables, "p1", played.results["p1"])
    expected = {form for form in secrets if form.startswith("threshold")} | {f"values of {name}", f"column name {name}"}
    assert any(form.startswith("thresholds") for form in expected)
    assert leaks(contents, secrets) == expected


def test_a_saved_part_holds_nothing_of_the_others(tmp_path):
    tables, y = tables_and_labels()
    played = play_training(tables, y)
    for name, part in played.results.items():
        part.save(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
        for other in set(tables) - {name}:
            assert not leaks([content], secrets_of_party(tables, other, played.results[other]))
        if name != "p0":
            assert part.forest is None
            weights = played.results["p0"].forest.trees[0].value
            assert not leaks([content], {"leaf weights": [weights[weights != 0][:1].tobytes()]})


def test_the_same_gradients_are_encrypted_afresh_in_every_tree():
    tables, y = tables_and_labels()
    played = play_training(tables, y, learning_rate=1e-12)  # the second tree's gradients equal the first's
    starts = [m for step, m, _ in received(played.transcripts["p1"], TO_PASSIVE) if step == "TreeStart"]
    first, second = (np.frombuffer(start.payload[0].data, np.uint64).reshape(len(y), -1) for start in starts)
    assert not (first == second).all(axis=1).any()
    assert len(np.unique(np.concatenate([first, second]), axis=0)) == 2 * len(y)


def test_siblings_larger_half_is_never_asked_for():
    tables, y = tables_and_labels()
    played = play_training(tables, y, n_estimators=1)
    asked = [m for step, m, _ in received(played.transcripts["p1"], TO_PASSIVE) if step == "SumsRequest"]
    slots = [np.frombuffer(m.payload[0].data, np.uint8) for m in asked]
    none = np.iinfo(np.uint8).max
    assert np.count_nonzero(slots[0] != none) == len(y)  # the root
    for level in slots[1:]:
        assert 0 < np.count_nonzero(level != none) <= len(y) // 2


def test_options_hold_no_seed_in_what_is_agreed():
    terms = public_terms(SecureBoost(), BoostingOptions(n_estimators=2, random_state=7))
    assert "random_state" not in terms
    assert terms["n_estimators"] == 2


def shown_rows(transcript: Any, n_rows: int) -> list[set[int]]:
    """Return the rows of every node a passive party of SecureBoost was asked about."""
    shown = []
    for step, message, _ in received(transcript, TO_PASSIVE):
        if step == "SumsRequest":
            nodes = np.frombuffer(message.payload[0].data, message.payload[0].dtype)
            count = int(np.frombuffer(message.payload[1].data, np.int32)[0])
            assert len(nodes) == n_rows
            shown += [set(np.flatnonzero(nodes == node)) for node in range(count)]
    return shown


@pytest.mark.usefixtures("exact_sums_allowed")
def test_reduced_leakage_sends_passive_parties_nothing_of_the_first_trees():
    tables, y = tables_and_labels()
    plain, reduced = play_training(tables, y, n_estimators=3), play_training(tables, y, n_estimators=3, rl_trees=2)
    for name in ("p1", "p2"):
        starts = [
            sum(step == "TreeStart" for step, *_ in received(played.transcripts[name], TO_PASSIVE))
            for played in (plain, reduced)
        ]
        assert starts == [3, 1]


@pytest.mark.slow
@pytest.mark.parametrize("guard", [0.35, 0.5])
@pytest.mark.usefixtures("exact_sums_allowed")
def test_no_node_shown_under_the_purity_guard_is_purer(guard):
    tables, y = tables_and_labels()
    options = {"max_depth": 5, "n_estimators": 6}
    plain = play_training(tables, y, **options)
    guarded = play_training(tables, y, **options, purity_guard=guard)
    prior = y.mean()
    for name in ("p1", "p2"):
        assert any(abs(y[list(node)].mean() - prior) > guard for node in shown_rows(plain.transcripts[name], len(y)))
        shown = shown_rows(guarded.transcripts[name], len(y))
        assert len(shown) > 6  # more than the roots
        assert all(abs(y[list(node)].mean() - prior) <= guard for node in shown)
