"""Whole fits and jobs on noisy buckets: noise is drawn once, also where a fit is interrupted or rows are aligned."""

from __future__ import annotations

import math

import numpy as np
import pytest

import treaty
from flat import flat
from noise_keys import keep_key
from pace import wait_until
from runs.job_files import train_in_threads
from runs.test_resume import Interrupted, same
from systems.role_inputs import split_options
from tables import assert_same_trees, cut, real_table, with_categories, with_gaps
from treaty.errors import ConfigError, TreatyError
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper, checkpoint_file, ledger_folder, load_checkpoint
from treaty.privacy.ledger import read_ledger
from treaty.privacy.randomised_response import BucketLedger
from treaty.runs.job import Align, Job, Member
from treaty.runs.report import load_reports
from treaty.systems.federboost_vertical.buckets import NoisyColumns
from treaty.systems.vertical.column_owner import SplitOwner
from treaty.systems.vertical.messages import Start

TREES = 4
OPTIONS = {"n_estimators": TREES, "min_child_samples": 5, "max_bin": 16, "n_jobs": 1}


def model_of(**options):
    own, others = split_options({**OPTIONS, **options}, treaty.FederBoostVertical)
    return treaty.GBDTClassifier(own, **others)


def fit(tables, y, folder=None, **options):
    model = flat(treaty.GBDTClassifier, "federboost-vertical", **{**OPTIONS, **options})
    return model.fit(tables, y, eval_set=(tables, y), checkpoint=folder)


@pytest.fixture
def table():
    X, y = real_table("binary", rows=150)
    return cut(with_gaps(with_categories(X)), 3), y


@pytest.fixture
def drawn(monkeypatch):
    """Return a list that collects what every party draws: names of columns, numbers of rows, noisy buckets."""
    noisy, collected = BucketLedger.noisy, []

    def watching(ledger, codes, columns, row_numbers, *others):
        found = noisy(ledger, codes, columns, row_numbers, *others)
        collected.append(([column.name for column in columns], row_numbers, found[0]))
        return found

    monkeypatch.setattr(BucketLedger, "noisy", watching)
    return collected


@pytest.fixture
def folder(tmp_path):
    """Return a folder with keys of two parties' noise: the same noise in every run."""
    for name in ("p1", "p2"):
        keep_key(ledger_folder(tmp_path, name, "noise"), name.encode() * 16)
    return tmp_path


def of_column(drawn, name):
    """Return the noisy buckets of the party that has a column, draw by draw."""
    return [noisy for names, _, noisy in drawn if name in names]


def test_fits_with_a_folder_draw_once_and_others_each_time(table, drawn, tmp_path):
    tables, y = table
    kept = [fit(tables, y, tmp_path) for _ in range(2)]
    assert sorted(path.name for path in tmp_path.glob("*.noise")) == ["p1.noise", "p2.noise"]
    same(*kept)
    fresh = [fit(tables, y) for _ in range(2)]
    draws = of_column(drawn, tables["p1"].columns[0])
    np.testing.assert_array_equal(draws[0], draws[1])
    assert 0.02 < np.mean(draws[2] != draws[3])
    forests = [model.parts_["p0"].forest.trees for model in fresh]
    assert forests[0] != forests[1]
    columns = tables["p1"].shape[1]
    for model in (*kept, *fresh):
        assert model.parts_["p1"].spent.startswith(f"epsilon 4 per value and {4 * columns} per person")


def test_training_deeper_in_the_same_folder_costs_nothing_more(table, drawn, tmp_path):
    tables, y = table
    shallow, deep = fit(tables, y, tmp_path, max_depth=2), fit(tables, y, tmp_path, max_depth=5)
    assert shallow.parts_["p2"].spent == deep.parts_["p2"].spent
    np.testing.assert_array_equal(*of_column(drawn, tables["p2"].columns[0]))
    dearer = fit(tables, y, tmp_path, epsilon=1.0)
    columns = tables["p2"].shape[1]
    assert f"; {5 * columns} per person with all draws" in dearer.parts_["p2"].spent


def stop_active(monkeypatch, tree):
    """Stop the active party at the end of a tree, with its splits untold."""
    tell, count = NoisyColumns.send_splits, iter(range(1_000))

    def stopping(self, *arguments, **now):
        if self._peer == "p1" and next(count) == tree:
            raise Interrupted
        tell(self, *arguments, **now)

    monkeypatch.setattr(NoisyColumns, "send_splits", stopping)


def stop_passive(monkeypatch, tree):
    """Stop a passive party once it has recorded a tree's splits."""
    record, count = SplitOwner.record, iter(range(1_000))

    def stopping(self, *arguments):
        record(self, *arguments)
        if self._splits.feature and len(arguments[0]) and next(count) == 2 * tree:
            raise Interrupted

    monkeypatch.setattr(SplitOwner, "record", stopping)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [stop_active, stop_passive], ids=["active", "passive"])
@pytest.mark.parametrize("tree", range(TREES))
def test_an_interrupted_fit_goes_on_with_the_same_noise_to_the_same_model(
    monkeypatch, table, drawn, folder, stop, tree
):
    tables, y = table
    options = {"subsample": 0.7, "colsample_bytree": 0.9, "random_state": 4, "epsilon": 3.0}
    options["base_score"] = 0.5  # with it, every tree has splits of passive parties, at which they are stopped
    whole = fit(tables, y, folder, **options)
    monkeypatch.setattr(Keeper, "due", True)
    with monkeypatch.context() as patch:
        stop(patch, tree)
        with pytest.raises(Interrupted):
            fit(tables, y, folder, **options)
    kept = checkpoint_file(folder, "p0")
    assert kept.exists() == (tree > 0)
    if tree:
        assert 1 <= load_checkpoint(kept).rounds <= tree
    resumed = fit(tables, y, folder, **options)
    same(resumed, whole)
    for name in ("p1", "p2"):
        assert resumed.parts_[name].spent == whole.parts_[name].spent
        first, interrupted, again = of_column(drawn, tables[name].columns[0])
        np.testing.assert_array_equal(first, interrupted)
        np.testing.assert_array_equal(first, again)
    assert not kept.exists()


def test_finished_trees_survive_a_party_that_fails_later(monkeypatch, table):
    tables, y = table
    model = treaty.GBDTClassifier(treaty.FederBoostVertical(epsilon=math.inf, mode="paper"), **OPTIONS)
    record, tell, told, recorded = SplitOwner.record, NoisyColumns.send_splits, [], []

    def recording(self, features, left_bins):
        record(self, features, left_bins)
        recorded.extend(features)

    def stopping(self, rounds, *, now):
        if len(told) == 4:  # both others' of two trees; an abort overtakes what they have not read
            wait_until(lambda: len(recorded) == sum(told) and hasattr(model, "parts_"))
            raise Interrupted
        told.append(len(self._chosen))
        tell(self, rounds, now=True)

    with monkeypatch.context() as patch:
        patch.setattr(SplitOwner, "record", recording)
        patch.setattr(NoisyColumns, "send_splits", stopping)
        with pytest.raises(Interrupted):
            model.fit(tables, y)
    assert len(model.parts_["p0"].forest.trees) == 2
    pooled = treaty.GBDTClassifier(**{**OPTIONS, "n_estimators": 2}).fit(tables, y)
    np.testing.assert_array_equal(model.predict_proba(tables), pooled.predict_proba(tables))


@pytest.mark.parametrize("late", [False, True])
def test_trees_whose_splits_an_owner_has_not_heard_of_are_left_out(monkeypatch, table, late):
    tables, y = table
    model = treaty.GBDTClassifier(treaty.FederBoostVertical(epsilon=math.inf, mode="paper"), **OPTIONS)
    record, tell, chosen, recorded = SplitOwner.record, NoisyColumns.send_splits, [], []

    def recording(self, features, left_bins):
        record(self, features, left_bins)
        recorded.extend(features)

    def telling(self, rounds, *, now):
        chosen.append(len(self._chosen))
        if len(chosen) == 6:  # both others' of three trees
            wait_until(lambda: len(recorded) == sum(chosen[:2]) and hasattr(model, "parts_"))
            raise Interrupted
        if len(chosen) <= 2:
            tell(self, rounds, now=True)

    receive = Party.receive

    def receiving(self, frm, *kinds, **how):
        message = receive(self, frm, *kinds, **how)
        if late and isinstance(message, Start):  # it begins when the active party is two rounds ahead
            wait_until(lambda: len(chosen) >= 5)
        return message

    with monkeypatch.context() as patch:
        patch.setattr(SplitOwner, "record", recording)
        patch.setattr(NoisyColumns, "send_splits", telling)
        patch.setattr(Party, "receive", receiving)
        with pytest.raises(Interrupted):
            model.fit(tables, y)
    assert len(model.parts_["p0"].forest.trees) == 1
    pooled = treaty.GBDTClassifier(**{**OPTIONS, "n_estimators": 1}).fit(tables, y)
    np.testing.assert_array_equal(model.predict_proba(tables), pooled.predict_proba(tables))


@pytest.mark.slow
def test_fits_between_processes_without_noise_equal_the_pooled_ones(table, tmp_path):
    tables, y = {name: table[0][name] for name in ("p0", "p1")}, table[1]
    model = fit(tables, y, tmp_path, transport="tls", epsilon=math.inf, mode="paper", n_estimators=2)
    pooled = treaty.GBDTClassifier(**{**OPTIONS, "n_estimators": 2}).fit(tables, y, eval_set=(tables, y))
    assert_same_trees(model, pooled)
    assert model.evals_result_ == pooled.evals_result_
    assert model.parts_["p1"].spent.startswith("epsilon inf per value and inf per person")
    assert model.communication_["p1 -> p0"]["by_type"]["Buckets"] > len(y)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p0.buckets", "p1.noise", "p1.noise.kept"]


# ---------------------------------------------------------------- jobs


def run_job(job, monkeypatch):
    """Train all parties in threads of this process; return their reports."""
    assert train_in_threads(monkeypatch, dict.fromkeys(job.parties, job)) == {}
    return load_reports(job)


@pytest.mark.slow
def test_aligned_jobs_give_the_same_noise_to_the_same_person_and_send_it_once(monkeypatch, drawn, tmp_path):
    X, y = real_table("binary", rows=80)
    X = X.assign(patient=[f"p{number}" for number in range(len(X))])
    own_order = np.random.default_rng(1).permutation(len(X))
    shop = X.iloc[own_order, 4:]
    bank = X.iloc[:70, [0, 1, 2, 3, 12]].assign(y=y[:70])
    shop.to_csv(tmp_path / "shop.csv", index=False)
    parties = {name: Member(table=str(tmp_path / f"{name}.csv")) for name in ("bank", "shop")}
    spent, sent = [], []
    for run in range(3):
        bank.sample(70 - 5 * (run > 1), random_state=run).to_csv(tmp_path / "bank.csv", index=False)
        job = Job(
            name="test", active="bank", label="y", parties=parties, align=Align(on="patient"),
            protocol="federboost-vertical", common={"n_estimators": 1, "min_child_samples": 5},
            output=str(tmp_path / f"model{run}"), store=str(tmp_path / "store"), n_jobs=1,
        )  # fmt: skip
        report = run_job(job, monkeypatch)["shop"]
        spent.append(report.spent)
        sent.append(report.sent["bank"]["by_type"].get("Buckets", 0))
    (_, first_rows, first), (_, rows, noisy), (_, fewer_rows, _) = drawn
    assert set(shop["patient"].iloc[rows]) == set(bank["patient"])
    assert first_rows.tolist() == rows.tolist()  # in the order of ids, whatever that of alignment
    np.testing.assert_array_equal(noisy, first)
    assert len(fewer_rows) == 65
    assert min(sent[0], sent[2]) > 200
    assert sent[1] == 0
    once = "epsilon 4 per value and 32 per person over 8 columns; {} per person with all draws of these columns that"
    assert all(words.startswith(once.format(cost)) for words, cost in zip(spent, (32, 32, 64), strict=True))
    kept = {path.name for path in (tmp_path / "store").iterdir() if ".runs" not in path.name}  # those of alignments
    assert kept == {"bank.buckets", "shop.noise", "shop.noise.kept"}


# ---------------------------------------------------------------- epsilons and buckets of single columns


def test_a_column_has_an_epsilon_of_its_own_and_the_ledger_adds_up(table, tmp_path):
    tables, y = table
    first, *others = tables["p1"].columns
    model = model_of(n_estimators=1, epsilon=2.0, column_epsilon={f"p1.{first}": 0.5})
    model.fit(tables, y, checkpoint=tmp_path)
    paid = {entry.what: entry.epsilon for entry in read_ledger(tmp_path / "p1.noise")}
    assert paid == {first: 0.5, **dict.fromkeys(others, 2.0)}
    total = 0.5 + 2.0 * len(others)
    said = f"epsilon 0.5 to 2 per value and {total:g} per person over {1 + len(others)} columns"
    assert model.parts_["p1"].spent.startswith(said)
    assert {entry.epsilon for entry in read_ledger(tmp_path / "p2.noise")} == {2.0}
    assert f"column_epsilon) p1.{first} 0.5" in " ".join(model.disclosures_["p0"])


def test_what_a_column_takes_of_a_persons_epsilon_the_others_do_not_have():
    own = treaty.FederBoostVertical(epsilon_person=4.0, column_epsilon={"shop.age": 1.0, "shop.eu.x": 3.5})
    owners = ["bank", "shop", "shop.eu"]
    assert own.epsilons(["age", "a", "b"], "shop", owners) == {"age": 1.0, "a": 1.5, "b": 1.5}
    assert sum(own.epsilons(["x", "y"], "shop.eu", owners).values()) == 4.0
    assert own.epsilons([], "bank", owners) == {}
    for names, party in ((["x", "y"], "shop"), ([], "shop.eu")):
        with pytest.raises(ConfigError, match=r"column_epsilon names 'shop\..*: expected party\.column"):
            own.epsilons(names, party, owners)
    alone = treaty.FederBoostVertical(epsilon_person=1.0, column_epsilon={"shop.age": 1.0})
    assert alone.epsilons(["age"], "shop", owners) == {"age": 1.0}
    for names in (["age", "a"], ["age"]):
        more = treaty.FederBoostVertical(epsilon_person=1.0, column_epsilon={"shop.age": 1.0 + len(names) % 2})
        with pytest.raises(ConfigError, match=r"column_epsilon takes . of epsilon_person=1 at shop"):
            more.epsilons(names, "shop", owners)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"p9.a": 1.0}, "column_epsilon names 'p9.a': expected party.column"),
        ({"p0.x": 1.0}, "column_epsilon names 'p0.x': expected party.column, a column of a party without labels"),
        ({"p1.nothing": 1.0}, "column_epsilon names 'p1.nothing'"),
        ({"age": 1.0}, "for party.column, got 'age'"),
        ({"p1.a": math.inf}, "expected column_epsilon to have a finite number above 0"),
        ({"p1.a": 0.0}, "option column_epsilon"),
    ],
    ids=str,
)
def test_an_epsilon_of_no_column_is_refused(table, given, text):
    tables, y = table
    with pytest.raises(TreatyError, match=text):
        model_of(n_estimators=1, column_epsilon=given).fit(tables, y)


@pytest.mark.parametrize(
    ("own", "common", "buckets"),
    [
        ({"epsilon": 0.5}, {}, 4),
        ({"epsilon": 2.0}, {}, 5),
        ({}, {}, 8),
        ({"epsilon": 100.0}, {}, 8),
        ({"epsilon": 0.5}, {"max_bin": 24}, 24),
        ({"epsilon": 0.5, "buckets": 6}, {"max_bin": 24}, 6),
        ({"mode": "paper", "epsilon": math.inf}, {}, 16),
    ],
    ids=str,
)
def test_buckets_follow_from_epsilon_unless_their_number_is_named(own, common, buckets):
    settled = treaty.GBDTClassifier(treaty.FederBoostVertical(**own), **common)._settings()
    assert settled[1].most_buckets(settled[1].value_epsilon) == buckets
    assert settled[2].max_bin == (common.get("max_bin") or (16 if "mode" in own else 32))  # the active party's own
