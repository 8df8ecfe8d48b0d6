"""Statistics between parties are those of the joined table, and nothing but what is stated is sent for them."""

from __future__ import annotations

import dataclasses
import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LinearRegression

import treaty
from runs.small_jobs import played, write_job
from treaty import ColumnStatistics, Statistics
from treaty.attacks.views import recorded_views
from treaty.errors import ConfigError, CryptoError, DataError, PeerProtocolError
from treaty.messaging.messages import Array, Message
from treaty.messaging.party import Party
from treaty.models.statistics import load_statistics_part
from treaty.runs import fit as fits
from treaty.runs.job_files import load_job
from treaty.runs.prediction import predict_party
from treaty.systems.statistics.statistics import CorrelationShares, InformationValues, SharedColumns

SPEARMAN = {"correlation": "spearman", "max_bin": 8}
DECIMALS = 3  # of IV and stability, for parties that are not to know counts


def replace(of: Any, **changes: Any) -> Any:
    return (
        msgspec.structs.replace(of, **changes) if isinstance(of, msgspec.Struct) else dataclasses.replace(of, **changes)
    )


def table(n: int = 1200, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Return related columns with gaps, ties, many categories, a constant and an empty one; and labels."""
    rng = np.random.default_rng(seed)
    risk = rng.normal(size=n)
    X = pd.DataFrame(
        {
            "age": rng.integers(18, 80, n),
            "income": np.exp(8 + 0.5 * risk + rng.normal(size=n)),
            "debt": np.where(rng.random(n) < 0.15, np.nan, rng.normal(size=n) - risk),
            "orders": rng.poisson(np.exp(0.4 * risk + 0.5)),
            "city": pd.Categorical(np.char.add("c", (rng.pareto(1.0, n) * 8).clip(0, 200).astype(int).astype(str))),
            "constant": 1.0,
            "nothing": np.nan,
            "visits": rng.poisson(3, n) + (risk > 1),
            "score": risk + 0.3 * rng.normal(size=n),
        }
    )
    return X, (rng.random(n) < 1 / (1 + np.exp(1.5 + risk))).astype(int)


CUTS: dict[str, dict[str, list[str]]] = {
    "two": {"a": ["age", "income", "constant"], "b": ["debt", "orders", "city", "nothing", "visits", "score"]},
    "three, the active one without columns": {
        "a": [], "b": ["debt", "age", "nothing"], "c": ["orders", "income", "city", "constant", "visits", "score"],
    },
    "five, some with one column": {
        "a": ["age"], "b": ["debt"], "c": ["constant"], "d": ["city", "orders"],
        "e": ["income", "nothing", "visits", "score"],
    },
}  # fmt: skip


def of_parties(X: pd.DataFrame, cut: str) -> dict[str, pd.DataFrame]:
    return {name: X[columns] for name, columns in CUTS[cut].items()}


def pooled(tables: dict[str, pd.DataFrame], y: np.ndarray, **options: Any) -> ColumnStatistics:
    with warnings.catch_warnings(action="ignore"):  # that tables are joined
        return ColumnStatistics(**options).fit(tables, y)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("reveal", ["active", "passive"])
def test_federated_statistics_are_those_of_the_joined_table(cut, reveal):
    X, y = table()
    tables = of_parties(X, cut)
    options = SPEARMAN if reveal == "passive" else {}
    here = pooled(tables, y, **options)
    found = ColumnStatistics(Statistics(reveal=reveal), n_jobs=1, **options).fit(tables, y)
    exact = ["party", "column", "kind", "n_missing", "n_distinct", "iv"]
    expected = here.columns_[exact]
    hidden = expected.party != "a" if reveal == "passive" else expected.party == ""
    expected = expected.assign(iv=expected.iv.where(~hidden, expected.iv.round(DECIMALS)))
    pd.testing.assert_frame_equal(found.columns_[exact], expected, check_exact=True)
    np.testing.assert_allclose(found.columns_.vif, here.columns_.vif, rtol=1e-5)
    ours, theirs = (of.correlation_.drop(columns="column") for of in (found, here))
    assert ours.columns.tolist() == theirs.columns.tolist()
    np.testing.assert_allclose(ours, theirs, atol=2e-7)
    counts = ["party", "column", "rows", "goods", "bads", "woe", "iv"]
    known = here.bins_ if reveal == "active" else here.bins_[here.bins_.party == "a"]
    pd.testing.assert_frame_equal(found.bins_[counts], known[counts], check_exact=True, check_dtype=len(known) > 0)
    if reveal == "passive":
        for name, frame in found.transform(tables).items():
            pd.testing.assert_frame_equal(frame, here.transform(tables)[name], check_exact=True)
    else:
        with pytest.raises(DataError, match=r"b: the labels in the bins of column '.*' are not known here.*reveal='pa"):
            found.transform(tables)


@pytest.mark.parametrize("kind", ["pearson", "spearman"])
def test_correlations_and_vif_are_those_of_pandas_and_of_regressions(kind):
    X, y = table()
    numbers = X.drop(columns=["city", "constant", "nothing"])
    found = ColumnStatistics("statistics", correlation=kind, n_jobs=1).fit(of_parties(X, "two"), y)
    matrix = found.correlation_.set_index("column")
    names = {f"{party}.{column}": column for party, columns in CUTS["two"].items() for column in columns}
    # a missing value counts as the mean: of values, or of ranks
    filled = (numbers.rank() if kind == "spearman" else numbers).apply(lambda of: of.fillna(of.mean()))
    expected = filled.corr()
    for one, column in names.items():
        if column in numbers:
            row = matrix.loc[one, [name for name, of in names.items() if of in numbers]]
            np.testing.assert_allclose(row, expected.loc[column, [names[name] for name in row.index]], atol=2e-7)
        elif column != "city":
            assert matrix.loc[one].isna().all()
    vif = found.columns_.set_index("column").vif
    for column in numbers:
        others = filled.drop(columns=column)
        r2 = LinearRegression().fit(others, filled[column]).score(others, filled[column])
        assert vif[column] == pytest.approx(1 / (1 - r2), rel=1e-5)
    assert vif[["city", "constant", "nothing"]].isna().all()


def test_a_column_that_follows_from_others_has_an_infinite_vif():
    X, y = table()
    X = X[["age", "income", "visits", "score"]].assign(sum=X.age + 2.0 * X.visits)
    tables = {"a": X[["age", "income"]], "b": X[["visits", "score", "sum"]]}
    vif = ColumnStatistics("statistics", n_jobs=1).fit(tables, y).columns_.set_index("column").vif
    assert np.isinf(vif[["age", "visits", "sum"]]).all()
    assert np.isfinite(vif[["income", "score"]]).all()


@pytest.mark.filterwarnings("ignore:b. column 'city'")  # unseen categories of later rows
def test_stability_compares_shares_of_bins():
    X, y = table()
    later, y_later = table(500, seed=1)
    later["age"] += 10
    found = ColumnStatistics("statistics", monotone="none", n_jobs=1).fit(
        of_parties(X, "two"), y, eval_set=[(of_parties(later, "two"), y_later), (of_parties(X, "two"), y)]
    )
    psi = found.columns_.set_index("column").psi_eval_0
    cuts = [-np.inf, *next(of for of in found.column_bins_["a"] if of.column == "age").cuts, np.inf]
    e, a = (np.histogram(of.age, cuts)[0] / len(of) for of in (X, later))
    a = np.where(a == 0, 0.5 / len(later), a)
    assert psi["age"] == pytest.approx(((a - e) * np.log(a / e)).sum())
    assert psi["age"] > 0.25 > psi["score"]
    assert found.columns_.psi_eval_1.tolist() == [0.0] * X.shape[1]


# ---------------------------------------------------------------- what is sent


KINDS = {of.__name__: of for of in (SharedColumns, InformationValues, CorrelationShares)}


def transcripts(model: ColumnStatistics, tables: dict[str, pd.DataFrame], *given: Any) -> dict[str, Any]:
    """Fit; return the messages of each party."""
    with recorded_views() as views:
        model.fit(tables, *given)
    return {name: view.transcript.entries for name, view in views.items()}


@pytest.mark.parametrize("reveal", ["active", "passive"])
def test_transcripts_hold_counts_names_and_masked_numbers_alone(reveal):
    X, y = table()
    tables = of_parties(X, "three, the active one without columns")
    seen = transcripts(ColumnStatistics(Statistics(reveal=reveal), n_jobs=1), tables, y)
    to_active = [entry for entry in seen["a"] if entry.direction == "received"]
    assert {entry.step for entry in to_active} == {
        "Terms", "Verdict", "StatisticsSizes", "JointSeedCommitment", "JointSeedShare", "SharedColumns",
        "StatisticsHint", "MaskedAnswer", "CorrelationShares",
        "CountShares" if reveal == "active" else "InformationValues",
    }  # fmt: skip
    for entry in to_active:
        if entry.step == "SharedColumns":
            for of in entry.message(SharedColumns).columns:
                assert (of.cuts, of.groups, of.n_bads) == (None, None, None)
                assert (of.n_rows is None) == (reveal == "passive")
                assert of.n_rows is None or min(of.n_rows) >= 20
    between = [entry for entry in seen["b"] if entry.peer == "c" and entry.direction == "received"]
    assert {entry.step for entry in between} <= {
        "Terms", "Verdict", "StatisticsSizes", "JointSeedCommitment", "JointSeedShare", "StatisticsHint",
        "HiddenVector", "MaskedAnswer",
    }  # fmt: skip


def test_correlations_are_opened_without_lower_bits():
    """Two tables whose correlation differs by less than a unit open to the same number."""
    X, y = table()
    model = ColumnStatistics(Statistics(), n_jobs=1)
    (entry,) = [of for of in transcripts(model, of_parties(X, "two"), y)["a"] if of.step == "CorrelationShares"]
    (share,) = entry.message(CorrelationShares).shares
    sent = np.frombuffer(share.data, np.uint64).reshape(share.shape)
    found = model.parts_["a"].correlation
    # products of n standardised numbers in units of 2^less: 26 bits and a sign remain of what is opened
    assert np.abs(found[np.isfinite(found)]).max() <= 1.0
    assert len(np.unique(sent)) > 1
    units = found[:2, 3:5] * len(X) / 2.0 ** (len(X).bit_length() - 26)
    np.testing.assert_allclose(units, np.rint(units), atol=1e-6)


@pytest.mark.parametrize("reveal", ["active", "passive"])
def test_what_is_told_in_place_of_counts_has_few_digits(reveal):
    """With all digits, IV, stability and correlations of columns of two values tell how many rows have which."""
    X, y = table()
    X = X.assign(two=(X.score > 0.3) * 1.0, too=(X.visits > 3) * 1.0)
    tables, later = ({"a": of[["age"]], "b": of[["two", "too"]]} for of in (X, X[100:400]))
    model = ColumnStatistics(Statistics(reveal=reveal), n_jobs=1)
    seen = transcripts(model, tables, y, (later, y[100:400]))
    entries = [of for entries in seen.values() for of in entries if of.direction == "sent"]
    told = {of.step: of.message(KINDS[of.step]) for of in entries if of.step in KINDS}
    values = np.frombuffer(told["InformationValues"].values.data)
    exact = pooled(tables, y).columns_.iv[1:]
    assert (values == exact.round(DECIMALS)).all()
    assert (values != exact).all()
    psi = [of.psi[0] for of in told["SharedColumns"].columns]
    assert psi == np.round(psi, DECIMALS).tolist() != [0.0, 0.0]
    own = np.frombuffer(told["CorrelationShares"].own.data).reshape(2, 2)
    assert own[0, 1] * 2.0**25 == np.rint(own[0, 1] * 2.0**25)
    assert own[0, 1] == pytest.approx(X.two.corr(X.too), abs=2.0**-25)
    assert own[0, 1] != X.two.corr(X.too)


# ---------------------------------------------------------------- limits and faults


def test_bins_of_nearly_the_same_rows_tell_few_labels(tmp_path):
    """The counts of two bins that differ in one row tell its label: an active party limits them over all jobs."""
    y = (np.random.default_rng(0).random(400) < 0.3).astype(int)
    steps = pd.DataFrame({f"c{k}": (np.arange(400) < 20 + k) * 1.0 for k in range(30)})

    def run(columns: int, **options: Any) -> ColumnStatistics:
        model = ColumnStatistics(Statistics(reveal="passive", **options), correlation="none", n_jobs=1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("treaty.estimators.statistics.train", lambda run, **given: fits.train(
                run, **{**given, "checkpoint": tmp_path}
            ))  # fmt: skip
            return model.fit({"a": steps[["c0"]], "b": steps.iloc[:, :columns]}, y)

    found = run(15)
    counts = [of.n_bads[1] for of in found.column_bins_["b"]]
    assert np.diff(counts).tolist() == y[20:34].tolist()
    with pytest.raises(
        ConfigError, match=r"a: .* 12 vectors .* its labels, after 30 in earlier jobs, expected at most 40"
    ):
        run(6)
    run(5)
    run(30, allow_exact_sums=True)


def test_eval_sets_of_few_rows_are_refused():
    X, y = table(300)
    tables, one = of_parties(X, "two"), of_parties(X[:1], "two")
    with pytest.raises(DataError, match=r"expected eval sets of at least 20 rows .*got 1: stability would show bins"):
        ColumnStatistics(Statistics(), n_jobs=1).fit(tables, y, eval_set=(one, y[:1]))
    found = ColumnStatistics(Statistics(allow_exact_sums=True), n_jobs=1).fit(tables, y, eval_set=(one, y[:1]))
    assert (found.columns_.psi_eval_0 > 0).any()
    # each counts as a vector of its rows
    with pytest.raises(ConfigError, match="32 vectors of the others with its columns, after 0 in earlier jobs"):
        ColumnStatistics(Statistics(), n_jobs=1).fit(tables, y, eval_set=[(tables, y)] * 28)


def test_counts_that_are_not_a_peers_to_tell_are_left_out(monkeypatch):
    send = Party.send

    def changed(self: Party, peer: str, message: Message, **more: Any) -> None:
        if isinstance(message, SharedColumns):
            message = first(message, n_rows=(), n_bads=(5,), vif=3.0)
        send(self, peer, message, **more)

    monkeypatch.setattr(Party, "send", changed)
    X, y = table(300)
    options: dict[str, Any] = {"max_bin": 3, "correlation": "none", "n_jobs": 1}
    found = ColumnStatistics(Statistics(reveal="passive"), **options).fit(of_parties(X, "two"), y)
    assert set(found.bins_.party) == {"a"}
    assert found.columns_.vif.isna().all()


def test_a_party_counts_what_it_answers_over_all_jobs(tmp_path):
    X, y = table(200)
    tables = of_parties(X, "two")

    def run(**options: Any) -> None:
        model = ColumnStatistics(Statistics(**options), n_jobs=1)
        with pytest.MonkeyPatch.context() as patch:
            # fits keep nothing from one to the next; jobs have a folder
            patch.setattr("treaty.estimators.statistics.train", lambda run, **given: fits.train(
                run, **{**given, "checkpoint": tmp_path}
            ))  # fmt: skip
            model.fit(tables, y)

    for _ in range(5):  # the label and three columns each time
        run()
    with pytest.raises(ConfigError, match=r"b: .* 4 vectors .* after 20 in earlier jobs, expected at most 20, one fo"):
        run()
    run(allow_exact_sums=True)


def test_wide_tables_of_few_rows_are_refused_before_a_product_is_made():
    X, y = table(200)
    wide = pd.concat([X[["score"]]] * 30, axis=1, ignore_index=True).rename(columns=str)
    with pytest.raises(ConfigError, match="31 vectors of the others with its columns, after 0 in earlier jobs, expec"):
        ColumnStatistics("statistics", n_jobs=1).fit({"a": wide, "b": X[["age"]]}, y)
    found = ColumnStatistics("statistics", correlation="none", n_jobs=1).fit({"a": wide, "b": X[["age"]]}, y)
    assert found.correlation_ is None
    assert found.columns_.vif.isna().all()


@pytest.mark.parametrize("labels", [3, 10])
def test_labels_of_too_few_rows_are_refused(labels):
    X, y = table()
    y = (np.arange(len(y)) < 5).astype(int) if labels == 10 else np.arange(len(y)) % 3
    expected = "at least 20 rows .*got 5" if labels == 10 else "expected labels of two classes, good and bad, got 3"
    with pytest.raises(DataError, match=expected):
        ColumnStatistics("statistics", n_jobs=1).fit(of_parties(X, "two"), y)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_bin": 1}, "max_bin=1"),
        ({"monotone": "up"}, "monotone='up'"),
        ({"correlation": "kendall"}, "expected one of"),
        ({"protocol": Statistics(mode="paper")}, "statistics have no published form"),
        ({"protocol": treaty.Pooled(loss="taylor")}, "statistics have no loss"),
        ({"protocol": "secureboost"}, "a system of GBDTClassifier"),
    ],
)
def test_wrong_options_are_refused(options, words):
    X, y = table(200)
    with pytest.raises(ConfigError, match=words):
        ColumnStatistics(**{"protocol": "statistics", **options}).fit(of_parties(X, "two"), y)
    with pytest.raises(ConfigError, match="has no parameter 'sample_weight'"):
        ColumnStatistics("statistics").fit(of_parties(X, "two"), y, sample_weight=y)


def first(m: SharedColumns, **changes: Any) -> SharedColumns:
    return SharedColumns([replace(m.columns[0], **changes), *m.columns[1:]])


def filled(array: Array, dtype: Any, value: Any) -> Array:
    return Array.of(np.full(array.shape, value, dtype))


GARBAGE: dict[str, tuple[str, Any, str]] = {
    "rows in bins": (
        "SharedColumns",
        lambda m: first(m, n_rows=(7, *m.columns[0].n_rows[1:])),
        "sizes that were announced",
    ),
    "huge numbers": (
        "SharedColumns",
        lambda m: first(m, n_rows=(2**63, *m.columns[0].n_rows[1:])),
        "sizes that were announced",
    ),
    "fewer columns": ("SharedColumns", lambda m: SharedColumns(m.columns[1:]), "sizes that were announced"),
    "a name twice": ("SharedColumns", lambda m: first(m, column=m.columns[1].column), "sizes that were announced"),
    "stability": ("SharedColumns", lambda m: first(m, psi=(0.1,)), "sizes that were announced"),
    "its bin": ("SharedColumns", lambda m: first(m, alone=True, missing=0), "sizes that were announced"),
    "shares": ("CountShares", lambda m: replace(m, shares=filled(m.shares, np.uint64, 5)), "counts of labels within"),
    "wide shares": ("CountShares", lambda m: replace(m, shares=filled(m.shares, np.uint64, 2**63)), "shares below 2"),
    "short shares": (
        "CountShares",
        lambda m: replace(m, shares=Array.of(np.zeros((1, 1), np.uint64))),
        "expected uint",
    ),
    "own": ("CorrelationShares", lambda m: replace(m, own=filled(m.own, np.float64, np.nan)), "correlations with 1"),
    "no shares": ("CorrelationShares", lambda m: replace(m, shares=[]), "expected correlations with 1 parties"),
    "rows": ("StatisticsSizes", lambda m: replace(m, n_rows=7), "expected tables of the same rows, got 300 rows"),
    "a hint": ("StatisticsHint", lambda m: replace(m, columns=Array.of(np.zeros(3, np.int16))), "expected int16"),
    "a vector": ("HiddenVector", lambda m: replace(m, words=Array.of(np.zeros(3, np.uint32))), "expected uint32"),
    "an answer": ("MaskedAnswer", lambda m: replace(m, payload=[]), "expected 1 array"),
    "IV": ("InformationValues", lambda m: replace(m, values=filled(m.values, np.float64, -1.0)), "values of 0 or more"),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_what_a_peer_sends_is_checked(what, monkeypatch):
    step, change, words = GARBAGE[what]
    send, sender = Party.send, "a" if step == "HiddenVector" else "b"

    def changed(self: Party, peer: str, message: Message, **more: Any) -> None:
        send(self, peer, change(message) if self.name == sender and type(message).__name__ == step else message, **more)

    monkeypatch.setattr(Party, "send", changed)
    X, y = table(300)
    with pytest.raises((PeerProtocolError, DataError, CryptoError), match=words):
        ColumnStatistics(Statistics(reveal="passive" if what == "IV" else "active"), max_bin=3, n_jobs=1).fit(
            of_parties(X, "two"), y
        )


def test_columns_are_selected_by_iv_correlation_and_permutation():
    X, y = table()
    tables = of_parties(X, "two")
    found = ColumnStatistics("statistics", n_jobs=1).fit(tables, y)
    every = found.select(min_iv=0.02)
    iv = found.columns_.set_index("column").iv
    assert sorted(itertools.chain(*every.values())) == sorted(iv[iv >= 0.02].index)
    few = found.select(min_iv=0.02, max_correlation=0.3)
    assert "score" in few["b"]
    matrix = found.correlation_.set_index("column")
    taken = [f"{party}.{column}" for party, columns in few.items() for column in columns if column != "city"]
    assert all(abs(matrix.loc[one, other]) <= 0.3 for one in taken for other in taken if one != other)
    model = treaty.GBDTClassifier("secureboost", n_estimators=3, n_jobs=1).fit(tables, y)
    importance = treaty.permutation_importance(model, tables, y, random_state=0, n_repeats=2)
    sizes = importance.set_index("column").importance
    assert sizes["score"] == sizes.max() > 0 == sizes["constant"]
    chosen = itertools.chain(*found.select(min_iv=0.0, importance=importance).values())
    assert set(chosen) <= set(sizes[sizes > 0].index)


# ---------------------------------------------------------------- between processes


def test_a_job_between_parties_writes_parts_and_tables(tmp_path: Path):
    job = write_job(tmp_path, "statistics", ({"reveal": "passive", "min_bin_rows": 10}, {"a": "", "b": "", "c": ""}))
    assert played(dict.fromkeys(job.parties, job)) == {}
    tables = {name: pd.read_csv(tmp_path / f"{name}.csv") for name in job.parties}
    y = tables["a"].pop("y")
    here = pooled(tables, y.to_numpy(), min_bin_rows=10)
    for name in job.parties:
        part = load_statistics_part(Path(job.output) / f"{name}.part", name)
        assert set(part.bins) == (set(tables) if name == "a" else {name})
        assert ("bad is label 1" in part.summary()) == (name == "a")
        written = pd.read_csv(Path(job.output) / f"{name}.bins.csv")
        expected = here.bins_[here.bins_.party == name].reset_index(drop=True)
        pd.testing.assert_frame_equal(written, expected, check_dtype=False)
        exact = dict(zip(*here.columns_.loc[here.columns_.party == name, ["column", "iv"]].to_numpy().T, strict=True))
        assert {of.column: of.iv for of in part.bins[name]} == exact


def test_a_job_writes_correlations_and_has_no_predictions(tmp_path: Path):
    job = write_job(tmp_path, "statistics", ({"min_bin_rows": 10}, {"a": "", "b": ""}))
    assert played(dict.fromkeys(job.parties, job)) == {}
    matrix = pd.read_csv(Path(job.output) / "a.correlations.csv", index_col="column")
    tables = [pd.read_csv(tmp_path / f"{name}.csv").drop(columns="y", errors="ignore") for name in job.parties]
    np.testing.assert_allclose(matrix, pd.concat(tables, axis=1).corr(), atol=2e-7)
    assert not (Path(job.output) / "b.correlations.csv").exists()
    members = {
        name: msgspec.structs.replace(member, predict_table=member.table) for name, member in job.parties.items()
    }
    with pytest.raises(ConfigError, match="protocol 'statistics' trains no model: there is nothing to predict"):
        predict_party(msgspec.structs.replace(job, parties=members), "a")


def test_processes_find_the_same_as_threads():
    X, y = table(400)
    tables = of_parties(X[["age", "income", "debt", "orders", "city", "constant", "nothing", "visits", "score"]], "two")
    options = {"min_bin_rows": 10}
    one, other = (
        ColumnStatistics("statistics", transport=transport, n_jobs=1, **options).fit(tables, y, eval_set=(tables, y))
        for transport in ("memory", "tls")
    )
    pd.testing.assert_frame_equal(one.columns_, other.columns_)
    pd.testing.assert_frame_equal(one.bins_, other.bins_)
    assert other.classes_.tolist() == [0, 1]


def test_what_was_found_is_saved_and_loaded(tmp_path: Path):
    X, y = table(400)
    tables = of_parties(X, "two")
    found = ColumnStatistics(Statistics(reveal="passive"), min_bin_rows=10, max_bin=4, n_jobs=1).fit(tables, y)
    found.save(tmp_path / "found")
    again = treaty.load(tmp_path / "found")
    assert again.get_params(deep=False) == found.get_params(deep=False)
    for name in ("columns_", "bins_", "correlation_"):
        pd.testing.assert_frame_equal(getattr(again, name), getattr(found, name))
    pd.testing.assert_frame_equal(again.transform(tables)["b"], found.transform(tables)["b"])
    with pytest.raises(ConfigError, match="a report is of a model, which statistics have none of"):
        found.report(tmp_path / "report.html")


def test_a_job_of_three_classes_is_refused(tmp_path: Path):
    job = write_job(tmp_path, "statistics", ({}, {"a": "", "b": ""}))
    text = (tmp_path / "job.toml").read_text().replace('label = "y"', 'label = "y"\nclasses = 3')
    (tmp_path / "job.toml").write_text(text)
    said = played(dict.fromkeys(job.parties, load_job(tmp_path / "job.toml")))
    assert "expected labels of 3 classes in column 'y', got 2" in said["a"]


def test_a_table_of_a_bank():
    """On 30,000 clients, with columns of few values and long tails, IV is the same and correlations are pandas'."""
    path = Path(os.environ.get("TREATY_DATA", Path(__file__).parents[4] / "shared/data")) / "credit2.parquet"
    if not path.exists():
        pytest.skip("no credit2.parquet in $TREATY_DATA")
    X = pd.read_parquet(path).drop(columns="ID")
    y = X.pop("default.payment.next.month")
    tables = {"bank": X.iloc[:, :11], "shop": X.iloc[:, 11:]}
    found = ColumnStatistics("statistics").fit(tables, y)
    here = pooled(tables, y.to_numpy(), correlation="none")
    pd.testing.assert_series_equal(found.columns_.iv, here.columns_.iv, check_exact=True)
    np.testing.assert_allclose(found.correlation_.drop(columns="column"), X.corr(), atol=2e-7)
    np.testing.assert_allclose(found.columns_.vif, np.diag(np.linalg.inv(X.corr())), rtol=1e-6)
    assert found.columns_.column[found.columns_.iv.argmax()] == "PAY_0"
