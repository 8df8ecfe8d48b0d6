"""FederBoost on columns: what is sent, what is trained on it, what it costs, and what is refused."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from marks import all_but_first_slow
from noise_keys import keep_key
from systems.secureboost.test_privacy import leaks, received, secrets_of_active, secrets_of_party
from systems.vertical.lossless import assert_lossless, read, train_both, unusual_tables
from systems.vertical.playing import role_input, star_of, tables_and_labels
from tables import cut, real_table, with_categories, with_gaps
from treaty.data.binning import fit_bins
from treaty.data.table import Table, to_table
from treaty.errors import ConfigError, PeerError, PeerProtocolError, TreatyError
from treaty.messaging.exchanges import Terms, Verdict
from treaty.messaging.messages import Array
from treaty.models.checkpoints import Keeper, ledger_folder, load_checkpoint
from treaty.runs.threads import RunRecord, play
from treaty.systems.federboost_vertical import buckets as packing
from treaty.systems.federboost_vertical import federboost_vertical
from treaty.systems.federboost_vertical.buckets import Buckets, ChosenSplits, HeldBuckets, NoisyColumns, SameBuckets
from treaty.systems.federboost_vertical.options import FederBoostVertical
from treaty.systems.federboost_vertical.system import SYSTEM
from treaty.systems.options import converted
from treaty.systems.pooled.options import BoostingOptions, Pooled
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import LabelledRows, Roles
from treaty.systems.vertical import prediction
from treaty.systems.vertical import training as leading
from treaty.trees.ensemble import Walk, join_splits
from trees import plain

GROWTH = {"base_score": 0.5, "n_estimators": 3, "max_depth": 3, "min_child_samples": 1, "max_bin": 16}
NO_NOISE = {"epsilon": math.inf, "mode": "paper"}
TO_PASSIVE = {
    "Terms": Terms,
    "Verdict": Verdict,
    "HeldBuckets": HeldBuckets,
    "Start": leading.Start,
    "ChosenSplits": ChosenSplits,
    "CheckpointRequest": leading.CheckpointRequest,
    "DecideRequest": prediction.DecideRequest,
    "Finish": prediction.Finish,
}
TO_ACTIVE = {
    "Terms": Terms,
    "Verdict": Verdict,
    "Buckets": Buckets,
    "SameBuckets": SameBuckets,
    "CheckpointReceipt": leading.CheckpointReceipt,
    "RecordCount": prediction.RecordCount,
    "Decisions": prediction.Decisions,
}


def checked(**given: Any) -> FederBoostVertical:
    """Return options of the system, from plain values, that go together."""
    options = converted(given, FederBoostVertical, "FederBoostVertical")
    options.check(BoostingOptions().checked(options))
    return options


def store_of(folder: Path, name: str) -> Path:
    """Return a folder whose key of the party's noise is always the same."""
    keep_key(ledger_folder(folder, name, "noise"), hashlib.sha256(name.encode()).digest())
    return folder


def play_training(
    tables: dict[str, Table],
    y: np.ndarray,
    *,
    own: dict[str, dict[str, Any]] | None = None,
    change: dict[str, Any] | None = None,
    fields: dict[str, dict[str, Any]] | None = None,
    seen: dict[str, BaseException] | None = None,
    **options: Any,
) -> RunRecord:
    """Train with p0 active.

    `own` are options of one party alone, `fields` those of its inputs (noise is the same in every test unless a store
    is among them), `change` maps messages by name to what is sent in their place, `seen` takes every party's error.
    """
    checked(**{name: value for name, value in options.items() if name not in BoostingOptions.__struct_fields__})
    with TemporaryDirectory() as folder:
        stores = {name: store_of(Path(folder), name) for name in tables}

        def role(party):
            send, name = party.send, party.name
            party.send = lambda to, m: send(to, (change or {}).get(type(m).__name__, lambda m: m)(m))
            mine = {**GROWTH, **options, **(own or {}).get(name, {})}
            program = federboost_vertical.active if name == "p0" else federboost_vertical.passive
            given = {"store": stores[name], **(fields or {}).get(name, {})}
            try:
                return program(role_input(party, tables, y, mine, FederBoostVertical, **given))
            except BaseException as error:
                if seen is not None:
                    seen[name] = error
                raise

        return play(
            dict.fromkeys(tables, role), star_of(tables),
            job="test", protocol="federboost-vertical", timeout=30.0, record_content=True,
        )  # fmt: skip


def messages(played: RunRecord, kind: type, sender: str) -> list[Any]:
    """Return what a passive party sent, or what it was sent, of one kind."""
    allowed = TO_ACTIVE if kind.__name__ in TO_ACTIVE else TO_PASSIVE
    by = "p0" if allowed is TO_ACTIVE else sender
    of_peer = [e for e in played.transcripts[by].entries if e.peer == (sender if by == "p0" else "p0")]
    return [e.message(kind) for e in of_peer if e.direction == "received" and e.step == kind.__name__]


def numbers(array: Array) -> np.ndarray:
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


def decoded(message: Buckets, n_rows: int) -> np.ndarray:
    """Read `Buckets` bit by bit, as its description says."""
    columns, bits, at = [], np.unpackbits(numbers(message.packed)), 0
    for size in numbers(message.present) + numbers(message.missing):
        width = math.ceil(math.log2(size))
        column = [sum(int(bits[at + row * width + k]) << k for k in range(width)) for row in range(n_rows)]
        columns.append(column)
        at += 8 * math.ceil(n_rows * width / 8)
    assert at == len(bits)
    return np.array(columns).T.reshape(n_rows, len(columns))


# ---------------------------------------------------------------- without noise


def both(frames: dict, y: np.ndarray, weight: np.ndarray | None = None, **options: Any) -> Any:
    return train_both(SYSTEM, frames, y, weight, **{**NO_NOISE, **GROWTH, **options})


@pytest.mark.parametrize("parties", all_but_first_slow(3, 2, 5))
@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_without_noise_trees_and_predictions_equal_the_pooled_growers(parties, task):
    X, y = real_table(task)
    parts, pooled, tables = both(cut(with_categories(with_gaps(X)), parties), y, task=task)
    assert len(parts) == parties
    assert_lossless(parts, pooled, tables)


OPTIONS = [
    {"subsample": 0.6, "colsample_bytree": 0.5, "random_state": 1},
    {"goss": True, "colsample_bytree": 0.6, "random_state": 5},
    {"max_depth": 6, "max_bin": 255},
    {"min_child_samples": 20, "reg_alpha": 0.2, "reg_lambda": 0.1},
    {"fractional_bits": 24, "min_split_loss": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids="-".join)
def test_without_noise_every_growth_option_gives_the_pooled_trees(options):
    X, y = real_table("binary")
    weight = np.random.default_rng(5).exponential(size=len(y)) * 3
    weight[:10] = 0.0
    assert_lossless(*both(cut(with_categories(with_gaps(X)), 3), y, weight, **options))


def test_without_noise_eval_losses_and_early_stopping_equal_the_pooled_ones():
    X, y = real_table("binary", rows=400)
    frames, held = cut(X.iloc[:200], 3), cut(X.iloc[200:300], 3)
    watched = [(frames, y[:200]), (held, y[200:300])]
    options = {"n_estimators": 40, "early_stopping_rounds": 3, "learning_rate": 1.0}
    parts, pooled, tables = both(frames, y[:200], watched=watched, **options)
    assert parts["p0"].forest.history == pooled.forest.history
    assert len(parts["p0"].forest.history["eval_1"][parts["p0"].forest.objective.metric]) < 40
    assert_lossless(parts, pooled, read(held, tables))


@pytest.mark.parametrize("case", unusual_tables())
def test_without_noise_unusual_tables_give_the_pooled_trees(case):
    _, y = real_table("binary")
    assert_lossless(*both(unusual_tables()[case], y))


def test_the_active_party_may_stand_anywhere_in_the_order():
    X, y = real_table("binary")
    parts, pooled, tables = both(cut(X, 3), y, active="p1")
    assert parts["p1"].forest is not None
    assert_lossless(parts, pooled, tables)


# ---------------------------------------------------------------- with noise


@pytest.fixture(scope="module")
def varied() -> tuple[dict[str, Table], np.ndarray]:
    """Return the tables of three parties, with gaps, categories, and at p2 a constant and an empty column."""
    X, y = real_table("binary")
    X = with_categories(with_gaps(X)).assign(constant=1.0, nothing=np.nan)
    return {name: to_table(part, party=name) for name, part in cut(X, 3).items()}, y.astype(float)


@pytest.fixture(scope="module")
def noisy(varied) -> RunRecord:
    """Return a training on them at epsilon 4."""
    return play_training(*varied)


def true_codes(table: Table) -> tuple[np.ndarray, Any]:
    bins = fit_bins(table, GROWTH["max_bin"])
    return bins.transform(table).astype(int), bins


def grown_on_buckets(
    tables: dict[str, Table], played: RunRecord, y: np.ndarray, **options: Any
) -> plain.TrainingOutcome:
    """Train the plain grower on the active party's true buckets and the others' noisy ones."""
    owners = []
    for name, table in tables.items():
        codes, bins = true_codes(table)
        if name != "p0":
            (message,) = messages(played, Buckets, name)
            codes = decoded(message, table.n_rows)
            np.testing.assert_array_equal(numbers(message.present), bins.n_bins)
        categorical = [k for k, kind in enumerate(table.schema.categories) if kind is not None]
        owners.append(plain.Codes(np.where(codes == bins.n_bins, -1, codes), bins.n_bins, categorical))
    growth = {name: value for name, value in GROWTH.items() if name != "max_bin"}
    return plain.train(owners, y, onehot_below=256, **{**growth, **options})


@pytest.mark.parametrize(
    "options", [{}, {"subsample": 0.7, "colsample_bytree": 0.5, "random_state": 2, "max_depth": 5}], ids=["", "sampled"]
)
def test_trees_are_those_of_the_grower_on_the_noisy_buckets(varied, options):
    tables, y = varied
    played = play_training(tables, y, **options)
    expected = grown_on_buckets(tables, played, y, **options)
    trees = played.results["p0"].forest.trees
    assert trees == expected.trees
    assert {0, 1, 2} <= {source for tree in trees for source in tree.source.tolist()}


def test_splits_are_recorded_in_terms_of_true_values_and_decided_by_them(varied):
    tables, y = varied
    watched = {name: {"eval_sets": [LabelledRows(table, y, None, "again")]} for name, table in tables.items()}
    played = play_training(tables, y, fields=watched)
    forest, parts = played.results["p0"].forest, [played.results[name] for name in tables]
    splits = join_splits([part.splits for part in parts], [len(part.schema.names) for part in parts])
    matrix = np.concatenate([table.matrix() for table in tables.values()], axis=1)
    margins = np.full((len(y), 1), forest.objective.base_margins)
    Walk(forest.trees, splits).add_to(margins, matrix)
    loss = forest.objective.loss(margins, y, None)
    assert forest.history["again"][forest.objective.metric][-1] == loss
    expected = grown_on_buckets(tables, played, y)
    assert np.any(np.abs(expected.margins - margins) > 0.1)  # what training itself saw
    for name in ("p1", "p2"):
        _, bins = true_codes(tables[name])
        records = played.results[name].splits
        assert len(records)
        for feature, threshold in zip(records.feature, records.threshold, strict=True):
            cuts = bins.cuts[feature]
            assert math.isnan(threshold) if cuts is None else threshold in (*cuts.tolist(), math.inf)


def test_buckets_are_sent_once_and_nothing_for_a_level(varied, noisy):
    tables, y = varied
    for name in ("p1", "p2"):
        entries = noisy.transcripts[name].entries
        assert [e.step for e in entries if e.direction == "sent"] == ["Terms", "Verdict", "Buckets", "RecordCount"]
        asked = [e.step for e in entries if e.direction == "received"]
        assert asked[:4] == ["Terms", "Verdict", "HeldBuckets", "Start"]
        assert asked[-1] == "Finish"
        assert set(asked[4:-1]) == {"ChosenSplits"}
        assert len(asked) - 5 <= GROWTH["n_estimators"]
        chosen = messages(noisy, ChosenSplits, name)
        used = sum(np.sum(tree.source == int(name[1])) for tree in noisy.results["p0"].forest.trees)
        assert sum(message.features.shape[0] for message in chosen) == used == len(noisy.results[name].splits)
    deeper = play_training(tables, y, max_depth=6)
    assert sum(e.direction == "sent" for e in deeper.transcripts["p1"].entries) == 4


@pytest.mark.parametrize("share", [False, True], ids=["per-value", "per-person"])
def test_sent_buckets_are_right_as_often_as_epsilon_says(varied, share):
    tables, y = varied
    given = {"epsilon_person": 8.0} if share else {"epsilon": 1.0}
    played = play_training(tables, y, **given, n_estimators=1)
    for name in ("p1", "p2"):
        codes, bins = true_codes(tables[name])
        (message,) = messages(played, Buckets, name)
        seen, sizes = decoded(message, len(y)), numbers(message.present) + numbers(message.missing)
        missing = (codes == bins.n_bins).any(axis=0)
        assert (seen < sizes).all()
        epsilon = 8.0 / codes.shape[1] if share else 1.0
        p = 1 / (1 + (sizes - 1) * math.exp(-epsilon))
        kept, expected = np.count_nonzero(seen == codes), len(y) * p.sum()
        deviation = math.sqrt(len(y) * (p * (1 - p)).sum())
        assert abs(kept - expected) < 6.5 * deviation  # false alarm: one run in 10^10
        assert expected < seen.size - 20 * deviation  # or all in the clear would do as well
        np.testing.assert_array_equal(numbers(message.missing), missing)


def test_transcripts_hold_declared_messages_alone_without_values_names_or_labels(varied, noisy):
    tables, y = varied
    to_active = [content for _, _, content in received(noisy.transcripts["p0"], TO_ACTIVE)]
    to_others = {
        name: [content for _, _, content in received(noisy.transcripts[name], TO_PASSIVE)] for name in ("p1", "p2")
    }
    for name in ("p1", "p2"):
        mine = secrets_of_party(tables, name, noisy.results[name])
        true, bins = true_codes(tables[name])
        for column, codes, present in zip(tables[name].schema.names, true.T, bins.n_bins, strict=True):
            width = max(1, math.ceil(math.log2(present + 1)))
            packed = np.packbits((codes[:80, None] >> np.arange(width)) & 1)
            if len(set(codes[:80].tolist())) > 2:
                mine[f"buckets of {column}"] = [codes[:80].astype(np.uint8).tobytes(), packed.tobytes()]
        assert any("buckets" in form for form in mine)
        assert not leaks(to_active, mine)
        for trees in (0, 2):
            assert not leaks(to_others[name], secrets_of_active(tables, y, trees, noisy.results))
        assert not leaks(to_others[name], secrets_of_party(tables, "p0", noisy.results["p0"]))
        assert not leaks(to_others[name], secrets_of_party(tables, "p2" if name == "p1" else "p1", noisy.results[name]))
    clear = play_training(tables, y, epsilon=math.inf, mode="paper")
    contents = [content for _, _, content in received(clear.transcripts["p0"], TO_ACTIVE)]
    assert any("buckets" in form for form in leaks(contents, mine))  # they would be found


# ---------------------------------------------------------------- packing


class Fake:
    """A party that is sent one message and notes what it sends."""

    def __init__(self, message: Any) -> None:
        self.message, self.sent = message, []

    def receive(self, peer, *kinds):
        assert isinstance(self.message, kinds)
        return self.message

    def send(self, peer, message):
        self.sent.append(message)


def buckets(
    columns: list[np.ndarray],
    present: list[int],
    missing: list[bool],
    epsilon: float = 4.0,
    categorical: list[bool] | None = None,
) -> Buckets:
    sizes = [count + flag for count, flag in zip(present, missing, strict=True)]
    codes = np.stack([c.astype(np.uint8) for c in columns], axis=1) if columns else np.empty((0, 0), np.uint8)
    return Buckets(
        Array.of(np.array(present, np.int32)),
        Array.of(np.array(categorical or [False] * len(present), np.bool_)),
        Array.of(np.array(missing, np.bool_)),
        Array.of(np.full(len(present), epsilon)),
        Array.of(packing.pack_buckets(codes, np.array(sizes, np.int32))),
    )


def columns_of(message: Buckets, n_rows: int) -> NoisyColumns:
    return NoisyColumns(Fake(message), "shop", iter([message]), n_rows, 1)  # type: ignore[arg-type]


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_packed_buckets_come_back(data):
    n_rows = data.draw(st.integers(0, 200))
    sizes = data.draw(st.lists(st.integers(1, 256), max_size=5))
    missing = [data.draw(st.booleans()) or size == 256 for size in sizes]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    codes = [rng.integers(0, size, n_rows) for size in sizes]
    message = buckets(codes, [size - flag for size, flag in zip(sizes, missing, strict=True)], missing)
    columns = [column.tolist() for column in codes]
    assert decoded(message, n_rows).T.tolist() == columns
    unpacked = packing.unpack_buckets(message.packed, np.array(sizes, np.int32), n_rows, "shop")
    assert unpacked.dtype == np.uint8
    assert unpacked.shape == (n_rows, len(sizes))
    assert unpacked.T.tolist() == columns
    assert len(columns_of(message, n_rows).categorical) == len(sizes)


def int32(*values: int) -> Array:
    return Array.of(np.array(values, np.int32))


def bools(*values: int) -> Array:
    return Array.of(np.array(values, np.bool_))


def uint8(*values: int) -> Array:
    return Array.of(np.array(values, np.uint8))


def float64(*values: float) -> Array:
    return Array.of(np.array(values, np.float64))


GOOD = Buckets(
    int32(5, 2), bools(0, 0), bools(0, 1), float64(4, 1), uint8(0o01, 0, 0)
)  # 3 and 2 bits for each of four rows


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"packed": uint8(0b11111111, 0, 0)}, "expected buckets below 5 - at Buckets.packed"),
        ({"packed": uint8(0b10100000, 0, 0)}, "expected buckets below 5 - at Buckets.packed"),
        ({"packed": uint8(0, 0, 0b11000000)}, "expected buckets below 3 - at Buckets.packed"),
        ({"packed": uint8(0, 0)}, r"expected uint8 \(3,\), got uint8 \(2,\) - at Buckets.packed"),
        ({"packed": uint8(0, 0, 0, 0)}, r"expected uint8 \(3,\), got uint8 \(4,\) - at Buckets.packed"),
        ({"packed": bools(0, 0, 0)}, "expected uint8"),
        ({"packed": Array("uint8", (3,), memoryview(b"\0"))}, "expected 3 bytes"),
        ({"present": int32(256, 2)}, "expected 1 to 256 buckets of each column"),
        ({"present": int32(2**31 - 1, 2)}, "expected 1 to 256 buckets of each column"),
        ({"present": int32(5, 2**31 - 1)}, "expected 1 to 256 buckets of each column"),
        ({"present": int32(5, -1)}, "expected 1 to 256 buckets of each column"),
        ({"present": int32(-5, 2)}, "expected 1 to 256 buckets of each column"),
        ({"present": int32(0, 2)}, "expected 1 to 256 buckets of each column"),
        ({"present": Array.of(np.array([5, 2]))}, "expected int32"),
        ({"present": int32(5, 2, 1)}, "at Buckets.categorical"),
        ({"categorical": bools(0)}, "at Buckets.categorical"),
        ({"missing": bools(0, 1, 1)}, "at Buckets.missing"),
        ({"epsilon": float64(4)}, "at Buckets.epsilon"),
        ({"epsilon": int32(4, 1)}, "expected float64"),
        ({"epsilon": float64(4, 0)}, "expected epsilons above 0 - at Buckets.epsilon"),
        ({"epsilon": float64(-4, 1)}, "expected epsilons above 0 - at Buckets.epsilon"),
        ({"epsilon": float64(math.nan, 1)}, "expected epsilons above 0 - at Buckets.epsilon"),
        ({"missing": Array("bool", (2,), memoryview(b"\0\2"))}, "expected bool bytes 0 and 1"),
    ],
)
def test_malformed_buckets_are_refused(change, text):
    assert columns_of(GOOD, 4).offsets.tolist() == [0, 6, 9]
    with pytest.raises(PeerProtocolError, match=rf"{text}.* from shop"):
        columns_of(replace(GOOD, **change), 4)


# ---------------------------------------------------------------- faults


def left(*bins: int) -> Array:
    return Array.of(np.packbits(np.isin(np.arange(256), bins))[None])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (ChosenSplits(int32(99), left(0), 0), r"expected features below \d - at ChosenSplits.features from p0"),
        (ChosenSplits(int32(-1), left(0), 0), r"expected features below \d - at ChosenSplits.features from p0"),
        (ChosenSplits(int32(0), left(1), 0), "expected the lowest bins to go left - at ChosenSplits.left_bins"),
        (ChosenSplits(int32(0), left(), 0), "expected the lowest bins to go left - at ChosenSplits.left_bins"),
        (ChosenSplits(int32(0), left(200), 0), "expected the lowest bins to go left - at ChosenSplits.left_bins"),
        (ChosenSplits(int32(0, 1), left(0), 0), "at ChosenSplits.left_bins"),
        (ChosenSplits(int32(0), uint8(1), 0), "at ChosenSplits.left_bins"),
        (ChosenSplits(uint8(0), left(0), 0), "at ChosenSplits.features"),
        (ChosenSplits(int32(0), left(0), -1), "rounds"),
        (GOOD, "expected ChosenSplits"),
    ],
)
def test_what_is_no_split_ends_the_job_at_its_owner_and_everywhere(change, text):
    tables, y = tables_and_labels()
    seen = {}
    with pytest.raises(TreatyError):
        play_training(tables, y, change={"ChosenSplits": lambda m: change}, seen=seen)
    assert seen.keys() == tables.keys()
    refused = [error for error in (seen["p1"], seen["p2"]) if isinstance(error, PeerProtocolError)]
    assert any(re.search(text, str(error)) for error in refused), seen


@pytest.mark.parametrize(
    "change",
    [
        {"Buckets": lambda m: replace(m, packed=uint8(1))},
        {"Buckets": lambda m: GOOD},
        {"Buckets": lambda m: leading.CheckpointReceipt()},
    ],
)
def test_malformed_buckets_end_the_job_at_every_party(change):
    tables, y = tables_and_labels()
    seen = {}
    with pytest.raises(PeerProtocolError, match=r"p1|p2"):
        play_training(tables, y, change=change, seen=seen)
    assert seen.keys() == tables.keys()
    assert all(isinstance(error, (PeerProtocolError, PeerError)) or "p0" in str(error) for error in seen.values())


def test_records_that_are_not_there_end_the_job():
    tables, y = tables_and_labels()
    seen = {}
    with pytest.raises(PeerProtocolError, match=r"expected \d+ records, got \d+ - at RecordCount from p1"):
        play_training(tables, y, change={"RecordCount": lambda m: prediction.RecordCount(m.records - 1)}, seen=seen)
    assert isinstance(seen["p0"], PeerProtocolError)


@pytest.mark.parametrize(
    ("name", "value", "first", "second"),
    [("epsilon", 2.0, "4.0", "2.0"), ("buckets", 8, "16", "8")],
)
def test_differing_options_are_named_at_every_party_before_anything_is_sent(name, value, first, second):
    tables, y = tables_and_labels()
    seen = {}
    with pytest.raises(ConfigError):
        play_training(tables, y, epsilon=4.0, own={"p2": {name: value}}, seen=seen)
    assert seen.keys() == tables.keys()
    for error in seen.values():
        assert isinstance(error, ConfigError)
        assert all(word in str(error) for word in (f"same {name}", first, second, "p0", "p2")), error


def test_differing_row_counts_are_named_at_every_party():
    tables, y = tables_and_labels()
    seen = {}
    with pytest.raises(ConfigError):
        play_training({**tables, "p1": tables_and_labels(rows=200)[0]["p1"]}, y, seen=seen)
    assert seen.keys() == tables.keys()
    assert all("training rows" in str(error) and "200" in str(error) for error in seen.values())


# ---------------------------------------------------------------- noise drawn once


def with_stores(folder: Path) -> dict[str, dict[str, Any]]:
    return {name: {"store": folder} for name in ("p1", "p2")}


def sent(played: RunRecord, name: str) -> bytes:
    (message,) = messages(played, Buckets, name)
    return bytes(message.packed.data)


def test_training_again_on_the_same_ledger_sends_the_same_and_costs_nothing_more(tmp_path):
    tables, y = tables_and_labels()
    first = play_training(tables, y, fields=with_stores(tmp_path))
    deeper = play_training(tables, 1 - y, max_depth=5, n_estimators=2, fields=with_stores(tmp_path))
    for name in ("p1", "p2"):
        columns = len(tables[name].schema.names)
        assert sent(first, name) == sent(deeper, name)
        spent = f"epsilon 4 per value and {4 * columns} per person over {columns} columns; {4 * columns} per person"
        for played in (first, deeper):
            assert played.results[name].spent.startswith(spent)
    assert first.results["p0"].spent == ""


@pytest.mark.parametrize("options", [{"max_bin": 12}, {"epsilon": 2.0}], ids="-".join)
def test_other_buckets_or_another_epsilon_cost_again(tmp_path, options):
    tables, y = tables_and_labels(parties=2)
    first = play_training(tables, y, fields={"p1": {"store": tmp_path}})
    other = play_training(tables, y, **options, fields={"p1": {"store": tmp_path}})
    assert sent(first, "p1") != sent(other, "p1")
    columns = len(tables["p1"].schema.names)
    total = columns * (4 + options.get("epsilon", 4))
    assert f"; {total:g} per person with all draws" in other.results["p1"].spent


def test_other_edges_of_as_many_buckets_have_noise_of_their_own(tmp_path):
    X, y = real_table("binary")
    X = with_categories(X)[["mean radius", "mean texture"]]  # a category and a number
    assert isinstance(X.dtypes.iloc[0], pd.CategoricalDtype)
    renamed = X.iloc[:, 0].cat.rename_categories(str.upper)
    tables = {"p0": to_table(real_table("binary")[0].iloc[:, 5:], party="p0")}
    owned = [X, X.assign(**{"mean radius": renamed}), X.assign(**{"mean texture": X["mean texture"] + 1.0})]
    tables_of = [{**tables, "p1": to_table(own, party="p1")} for own in owned]
    played = [play_training(t, y.astype(float), epsilon=2.0, fields={"p1": {"store": tmp_path}}) for t in tables_of]
    codes = [true_codes(t["p1"])[0] for t in tables_of]
    seen = [decoded(messages(p, Buckets, "p1")[0], len(y)) for p in played]
    for k in (1, 2):
        np.testing.assert_array_equal(codes[k], codes[0])
        np.testing.assert_array_equal((seen[k] != seen[0]).any(axis=0), [k == 1, k == 2])
    assert "; 8 per person with all draws" in played[2].results["p1"].spent


def test_epsilon_of_a_person_is_shared_evenly():
    tables, y = tables_and_labels()
    played = play_training(tables, y, epsilon_person=6.0)
    for name in ("p1", "p2"):
        columns = len(tables[name].schema.names)
        assert played.results[name].spent.startswith(f"epsilon {6 / columns:g} per value and 6 per person")
        (message,) = messages(played, Buckets, name)
        assert numbers(message.epsilon).tolist() == [6.0 / columns] * columns


def test_trainings_without_a_ledger_draw_different_noise():
    tables, y = tables_and_labels(parties=2)
    played = [play_training(tables, y, fields={"p1": {"store": None}}) for _ in range(2)]
    assert sent(played[0], "p1") != sent(played[1], "p1")


def test_another_order_of_rows_is_paid_anew_and_a_row_that_is_joined_twice_told_once(tmp_path):
    tables, y = tables_and_labels(parties=2)
    order = np.random.default_rng(3).integers(0, len(y), len(y))
    joined = {
        name: Table(table.schema, [column[order] for column in table.columns], table.n_rows)
        for name, table in tables.items()
    }
    play_training(tables, y, fields={"p1": {"store": tmp_path}})
    fields = {"p1": {"store": tmp_path, "numbers": order}}
    played = [play_training(joined, y[order], fields=fields) for _ in range(2)]
    first, second = (decoded(messages(p, Buckets, "p1")[0], len(y)) for p in played)
    np.testing.assert_array_equal(first, second)
    for row in range(len(y)):
        assert len(np.unique(first[order == row], axis=0)) <= 1
    columns = len(tables["p1"].schema.names)
    for each in played:
        assert f"; {8 * columns} per person with all draws" in each.results["p1"].spent


def test_a_column_of_few_buckets_is_named_in_a_warning(caplog):
    X, y = real_table("binary")
    few = pd.DataFrame({"smoker": np.arange(len(X)) % 2.0, "age": X.iloc[:, 5]})
    tables = {"p0": to_table(X.iloc[:, :3], party="p0"), "p1": to_table(few, party="p1")}
    play_training(tables, y.astype(float), n_estimators=1)
    (said,) = [record.getMessage() for record in caplog.records if "noisy bucket" in record.getMessage()]
    assert "smoker" in said
    assert "age" not in said
    caplog.clear()
    play_training(tables, y.astype(float), n_estimators=1, mode="paper", epsilon=math.inf)
    assert not [record for record in caplog.records if "noisy bucket" in record.getMessage()]


def test_checkpoints_are_kept_by_all(monkeypatch, tmp_path):
    tables, y = tables_and_labels()
    monkeypatch.setattr(Keeper, "due", True)
    keepers = {name: {"keeper": Keeper(tmp_path / name)} for name in tables}
    played = play_training(tables, y, fields=keepers)
    assert len(messages(played, leading.CheckpointReceipt, "p1")) == GROWTH["n_estimators"]
    for name in tables:
        assert load_checkpoint(tmp_path / name).part.model_id == played.results["p0"].model_id


# ---------------------------------------------------------------- options, and what is said


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"epsilon": 1.0, "epsilon_person": 8.0}, "epsilon_person .* got both"),
        ({"epsilon": math.inf}, 'needs mode="paper"'),
        ({"epsilon": "inf"}, 'needs mode="paper"'),
        ({"epsilon": 0.0}, "option epsilon=0.0"),
        ({"epsilon": -1.0}, "option epsilon=-1.0"),
        ({"epsilon": math.nan, "mode": "paper"}, "epsilon=nan"),
        ({"epsilon_person": math.inf, "mode": "paper"}, "option epsilon_person=inf: expected a finite number"),
        ({"epsilon_person": 0.0}, "option epsilon_person=0.0"),
        ({"encryption": "ou"}, "has no option 'encryption'"),
        ({"reveal": "node"}, "has no option 'reveal'"),
        ({"key_bits": 3072}, "has no option 'key_bits'"),
        ({"mechanism": "label_rr", "epsilon": 1.0}, "has no option 'mechanism'"),
        ({"purity_guard": 0.2}, "has no option 'purity_guard'"),
        ({"inference": "shared"}, "has no option 'inference'"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_options_that_do_not_go_together_are_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        checked(**options)


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (SecureBoost, {"epsilon_person": 1.0}, "has no option 'epsilon_person'"),
        (Pooled, {"epsilon": 1.0}, "has no option 'epsilon'"),
        (SecureBoost, {"mechanism": "label_rr", "epsilon": math.inf, "mode": "paper"}, "finite number"),
    ],
    ids=str,
)
def test_other_systems_have_no_such_noise(kind, options, text):
    with pytest.raises(ConfigError, match=text):
        converted(options, kind, kind.__name__)


def test_no_noise_may_be_asked_for_in_words():
    assert checked(mode="paper", epsilon="inf").epsilon == math.inf


def learned(options: FederBoostVertical) -> dict[str, list[str]]:
    roles = Roles("bank", {"bank": "active", "shop": "passive"}, ["bank", "shop"])
    return SYSTEM.disclosures(roles, options, BoostingOptions(), None)


@pytest.mark.parametrize(
    ("options", "per_value", "per_person"),
    [
        ({}, "epsilon 4 per value", "per person this times the party's number of columns"),
        ({"epsilon": 0.5}, "epsilon 0.5 per value", "per person this times the party's number of columns"),
        ({"epsilon_person": 8.0}, "shared by the party's columns", "epsilon 8 per person"),
    ],
    ids=lambda value: "-".join(value) or "default" if isinstance(value, dict) else "",
)
def test_disclosures_state_epsilon_per_value_and_per_person(options, per_value, per_person):
    said = learned(checked(**options))
    assert per_value in said["bank"][0]
    assert per_person in said["bank"][0]
    assert "data about each aligned person" in said["bank"][0]
    assert any("nothing about labels" in fact for fact in said["shop"])


def test_disclosures_of_no_noise_say_in_the_clear():
    said = learned(checked(**NO_NOISE))
    assert "order of all values in every column" in said["bank"][0]
    assert "in the clear" in said["bank"][0]
