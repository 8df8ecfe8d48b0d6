"""What sides of training rows tell of their buckets, where eval sets or rows to predict hold persons trained on.

The attack: sides at splits of one column are nested, so that a row's sides leave few buckets, at last one. It needs no
more than a training sends, watched by an honest party.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace

from marks import slow
from runs.job_files import train_in_threads
from systems.federboost_vertical.test_roles import decoded, messages, numbers, play_training, true_codes
from systems.role_inputs import inputs
from systems.vertical.playing import star_of
from tables import cut, real_table, with_categories, with_gaps
from treaty.data.table import Table, to_table
from treaty.errors import DataError
from treaty.messaging.channel import memory_channels
from treaty.messaging.party import Party, run_role
from treaty.models.trees import load_part
from treaty.runs import prediction as running
from treaty.runs.job import Align, Job, Member
from treaty.runs.threads import RunRecord, play
from treaty.systems.federboost_vertical.buckets import Buckets, ChosenSplits
from treaty.systems.federboost_vertical.options import FederBoostVertical
from treaty.systems.system import LabelledRows
from treaty.systems.vertical.prediction import DecideRequest, Decisions, predict_active, predict_passive

PASSIVE = ("p1", "p2")


@dataclass(frozen=True)
class Found:
    """What decisions leave of the buckets of some rows: shares of all values of passive parties."""

    exact: float  # one bucket left, and it is the true one
    beyond: float  # the same, where the noisy bucket that was told is another


@pytest.fixture(scope="module")
def data() -> tuple[dict[str, Table], np.ndarray]:
    X, y = real_table("binary", rows=300)
    X = with_categories(with_gaps(X, 0.05))
    return {name: to_table(part, party=name) for name, part in cut(X, 3).items()}, y.astype(float)


def people(rows: Any) -> Any:
    """Return the ids of rows by number."""
    return lambda: [f"person {row}" for row in rows]


def watching(tables: Mapping[str, Table], y: np.ndarray, ids: Any = None, **fields: Any) -> dict[str, dict[str, Any]]:
    """RoleInput everybody with the training rows as an eval set."""
    rows = {name: LabelledRows(t, y if name == "p0" else np.zeros(0), ids=ids) for name, t in tables.items()}
    again = {
        name: LabelledRows(t, y if name == "p0" else np.zeros(0), None, "again", ids) for name, t in tables.items()
    }
    return {name: {"data": rows[name], "eval_sets": [again[name]], **fields} for name in tables}


def told_splits(played: RunRecord, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns of a party's records, and which buckets go left, bool (records, 256)."""
    told = messages(played, ChosenSplits, name)
    features = np.concatenate([numbers(one.features) for one in told])
    return features, np.concatenate([np.unpackbits(numbers(one.left_bins), axis=1) for one in told]).astype(bool)


def sides_told(played: RunRecord, name: str, n_rows: int) -> dict[int, np.ndarray]:
    """Return the sides bool (n_rows,) that a party told, by record."""
    asked = [numbers(one.records) for one in messages(played, DecideRequest, name)]
    answered = [numbers(one.left) for one in messages(played, Decisions, name)]
    sides: dict[int, np.ndarray] = {}
    for records, packed in zip(asked, answered, strict=True):
        for record, line in zip(records.tolist(), packed, strict=True):
            sides[record] = np.unpackbits(line, count=n_rows).astype(bool)
    return sides


def attacked(tables: Mapping[str, Table], trained: RunRecord, decided: RunRecord) -> Found:
    """Leave of each value the buckets that agree with all sides told of it; `decided` is the run that told them."""
    n_values = exact = beyond = 0
    for name in PASSIVE:
        true, _ = true_codes(tables[name])
        (message,) = messages(trained, Buckets, name)
        noisy, sizes = decoded(message, len(true)), numbers(message.present) + numbers(message.missing)
        features, left = told_splits(trained, name)
        for feature, size in enumerate(sizes.tolist()):
            possible = np.ones((len(true), size), bool)
            for record, went in sides_told(decided, name, len(true)).items():
                if features[record] == feature:
                    possible &= left[record, :size] == went[:, None]
            single = (possible.sum(axis=1) == 1) & possible[np.arange(len(true)), true[:, feature]]
            exact += int(single.sum())
            beyond += int((single & (noisy[:, feature] != true[:, feature])).sum())
            n_values += len(true)
    return Found(exact / n_values, beyond / n_values)


def sides_of_noisy_buckets(tables: Mapping[str, Table], trained: RunRecord, decided: RunRecord) -> None:
    """Check that every side told is that of the noisy bucket told before: a function of it."""
    for name in PASSIVE:
        (message,) = messages(trained, Buckets, name)
        noisy = decoded(message, tables[name].n_rows)
        features, left = told_splits(trained, name)
        told = sides_told(decided, name, len(noisy))
        assert told
        for record, went in told.items():
            np.testing.assert_array_equal(went, left[record, noisy[:, features[record]]])


@pytest.mark.parametrize(("trees", "exact"), [slow(20, 0.15), slow(100, 0.5)])
def test_sides_of_rows_trained_on_tell_no_more_than_their_noisy_buckets(data, trees, exact):
    """Without ids, in a process that plays all parties, they told many values exactly: this measures the attack."""
    tables, y = data
    options = {"epsilon": 2.0, "n_estimators": trees, "max_depth": 4}
    plain = play_training(tables, y, fields=watching(tables, y), **options)
    open_to_all = attacked(tables, plain, plain)
    assert open_to_all.exact > exact
    assert open_to_all.beyond > 0.3 * exact
    known = play_training(tables, y, fields=watching(tables, y, people(range(len(y)))), **options)
    assert attacked(tables, known, known).beyond == 0.0
    sides_of_noisy_buckets(tables, known, known)
    trees_of = [played.results["p0"].forest.trees for played in (plain, known)]
    assert trees_of[0] == trees_of[1], "who is recognised changes nothing of training"


def predicted(parts: Mapping[str, Any], tables: Mapping[str, Table], ids: Any, **fields: Any) -> RunRecord:
    def role(party):
        program = predict_active if party.name == "p0" else predict_passive
        return program(
            inputs(
                party, FederBoostVertical(epsilon=2.0), active="p0", owners=list(tables), part=parts[party.name],
                data=LabelledRows(tables[party.name], np.zeros(0), ids=ids), **fields,
            )
        )  # fmt: skip

    return play(
        dict.fromkeys(tables, role), star_of(tables), job="test", protocol="federboost-vertical", timeout=30.0,
        record_content=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Return a training with ids, and its parts as they were saved and loaded."""
    tables, y = data
    ids, folder = people(range(len(y))), tmp_path_factory.mktemp("parts")
    fields = {
        name: {"data": LabelledRows(t, y if name == "p0" else np.zeros(0), ids=ids)} for name, t in tables.items()
    }
    played = play_training(tables, y, fields=fields, epsilon=2.0, n_estimators=20, max_depth=4)
    for name, part in played.results.items():
        part.save(folder / name)
    return played, {name: load_part(folder / name, name) for name in tables}


def test_a_saved_model_decides_persons_it_was_trained_on_by_what_was_told_of_them(data, trained):
    tables, _ = data
    played, parts = trained
    again = predicted(parts, tables, people(range(300)))
    assert attacked(tables, played, again).beyond == 0.0
    sides_of_noisy_buckets(tables, played, again)
    strangers = predicted(parts, tables, people(range(1000, 1300)))  # the same values at other persons
    assert attacked(tables, played, strangers).exact > 0.15
    assert not np.array_equal(again.results["p0"], strangers.results["p0"])


def test_persons_are_recognised_in_any_order_and_beside_others(data, trained):
    tables, _ = data
    _, parts = trained
    order = np.random.default_rng(0).permutation(300)[:100]
    some = {name: Table(t.schema, [column[order] for column in t.columns], 100) for name, t in tables.items()}
    ids = [f"person {row}" if k % 2 else f"nobody {row}" for k, row in enumerate(order)]
    mixed = predicted(parts, some, lambda: ids).results["p0"]
    known = predicted(parts, tables, people(range(300))).results["p0"][order]
    others = predicted(parts, tables, people(range(1000, 1300))).results["p0"][order]
    np.testing.assert_array_equal(mixed[1::2], known[1::2])
    np.testing.assert_array_equal(mixed[::2], others[::2])


def test_rows_without_ids_that_equal_rows_trained_on_are_refused_between_organisations(data, trained, caplog):
    tables, y = data
    words = "300 of 300 rows have the values of rows trained on, in all of its columns, and no ids"
    with pytest.raises(DataError, match=words) as caught:
        play_training(tables, y, fields=watching(tables, y, apart=True), n_estimators=1)
    assert "align by ids" in str(caught.value)
    assert caught.value.public is not None
    assert "300" not in caught.value.public
    with pytest.raises(DataError, match=words):
        predicted(trained[1], tables, None, apart=True)
    caplog.clear()
    play_training(tables, y, fields=watching(tables, y), n_estimators=1)  # one process plays all: nobody is deceived
    assert [record.getMessage() for record in caplog.records if words in record.getMessage()]
    paper = watching(tables, y, apart=True)
    play_training(tables, y, fields=paper, n_estimators=1, mode="paper", epsilon=2.0)


def test_other_rows_without_ids_are_decided_by_their_values(data):
    tables, y = data
    moved = {name: Table(t.schema, [c + np.float32(0.25) for c in t.columns], t.n_rows) for name, t in tables.items()}
    fields = watching(tables, y, apart=True)
    for name in tables:
        fields[name]["eval_sets"] = [LabelledRows(moved[name], fields[name]["data"].y, None, "held out")]
    played = play_training(tables, y, fields=fields, n_estimators=2, epsilon=2.0)
    for name in PASSIVE:
        expected = played.results[name].splits.decide(moved[name].matrix())
        for record, went in sides_told(played, name, len(y)).items():
            np.testing.assert_array_equal(went, np.unpackbits(expected[record], count=len(y)).astype(bool))


def test_nothing_is_remembered_where_nothing_was_randomised(data):
    tables, y = data
    fields = watching(tables, y, people(range(len(y))), apart=True)
    played = play_training(tables, y, fields=fields, n_estimators=2, epsilon=float("inf"), mode="paper")
    assert all(played.results[name].randomised is None for name in tables)
    assert attacked(tables, played, played).exact > 0.0


def test_a_part_keeps_neither_ids_nor_values(data, trained):
    tables, _ = data
    kept = trained[1]["p1"].randomised
    assert len(kept.known.key) == 16
    assert len(set(kept.known.ids.tolist())) == 300
    whole = b"".join([kept.known.ids.tobytes(), kept.known.values.tobytes(), kept.buckets.tobytes()])
    assert b"person" not in whole
    assert not any(column[:8].tobytes() in whole for column in tables["p1"].columns)
    assert trained[1]["p0"].randomised is None


# ---------------------------------------------------------------- jobs


@pytest.fixture
def job(data, tmp_path) -> Job:
    """Return a job of two parties with ids; eval sets and rows to predict are those trained on, or other persons."""
    X, y = real_table("binary", rows=120)
    parts = {"bank": X.iloc[:, :4].assign(y=y), "shop": X.iloc[:, 4:9]}
    for name, part in parts.items():
        for file, who in (("table", "person"), ("others", "stranger")):
            part.assign(id=[f"{who} {k}" for k in range(len(y))]).to_csv(tmp_path / f"{name}.{file}.csv", index=False)
    members = {
        name: Member(
            table=str(tmp_path / f"{name}.table.csv"),
            eval_tables=[str(tmp_path / f"{name}.{file}.csv") for file in ("table", "others")],
            predict_table=str(tmp_path / f"{name}.table.csv"), drop=["id"],
        )
        for name in parts
    }  # fmt: skip
    return Job(
        name="test", active="bank", label="y", parties=members, align=Align(on="id"), protocol="federboost-vertical",
        own={"epsilon": 2.0}, common={"n_estimators": 5, "min_child_samples": 5}, n_jobs=1,
        output=str(tmp_path / "model"), store=str(tmp_path / "store"),
    )  # fmt: skip


def predicted_in_threads(monkeypatch: pytest.MonkeyPatch, job: Job) -> tuple[list[str], np.ndarray]:
    """Predict with every party in a thread; return ids and margins of the active one."""
    channels = memory_channels(job.parties)

    def connected(job: Job, name: str, roles: Any, verb: str, role: Any, **_: Any) -> Any:
        party = Party(
            name, job.name, job.system.name, channels[name], job.system.links(roles, None)[name], timeout=20.0
        )
        return run_role(party, lambda: role(party))

    monkeypatch.setattr(running, "connected", connected)
    with ThreadPoolExecutor(len(job.parties)) as pool:
        found = list(pool.map(lambda name: running.predict_party(job, name), job.parties))
    ids, margins = found[list(job.parties).index("bank")]
    return ids.to_pylist(), margins


def test_jobs_recognise_persons_by_the_ids_they_are_aligned_by(job, monkeypatch, tmp_path):
    assert train_in_threads(monkeypatch, dict.fromkeys(job.parties, job)) == {}
    forest = running.find_part(job, "bank").forest
    labels = pd.read_csv(tmp_path / "bank.table.csv").set_index("id")["y"]
    losses = {}
    for file in ("table", "others"):
        members = {
            name: replace(member, predict_table=str(tmp_path / f"{name}.{file}.csv"))
            for name, member in job.parties.items()
        }
        ids, margins = predicted_in_threads(monkeypatch, replace(job, parties=members))
        y = labels[[one.replace("stranger", "person") for one in ids]].to_numpy(float)
        losses[file] = forest.objective.loss(margins, y, None)
    assert forest.history["eval_0"][forest.objective.metric][-1] == pytest.approx(losses["table"], rel=1e-12)
    assert forest.history["eval_1"][forest.objective.metric][-1] == pytest.approx(losses["others"], rel=1e-12)
    assert losses["table"] != losses["others"], "the same values, of persons trained on and of others"


def test_jobs_without_ids_refuse_rows_trained_on(job, monkeypatch):
    without = replace(job, align=None)
    said = train_in_threads(monkeypatch, dict.fromkeys(job.parties, without))
    assert "120 of 120 rows have the values of rows trained on" in said["shop"]
    assert "no ids; align by ids, or leave them out" in said["bank"]
    assert "120" not in said["bank"].partition("shop stopped")[2]


def test_who_has_everybodys_keys_plays_everybody(job):
    assert job.apart
    keys = {name: replace(member, key="key") for name, member in job.parties.items()}
    assert replace(job, parties={**job.parties, "bank": keys["bank"]}).apart
    assert not replace(job, parties=keys).apart
