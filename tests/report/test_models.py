"""What a fitted model's report shows, of every system: what is there, what is said to be missing, and hidden names."""

from __future__ import annotations

import functools
import html
import re

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

import treaty
from tables import cut, cut_for_active, real_table, with_categories
from treaty.errors import ConfigError, DataError
from treaty.estimators.reporting import contents_of
from treaty.report import OWN, POOLED
from treaty.report.page import _TITLES
from treaty.report.verdict import figures, verdict

pytestmark = [
    pytest.mark.filterwarnings("ignore:training ended after max_iter"),
    pytest.mark.filterwarnings("ignore:.*rows have a margin beyond 4"),
]
ROWS = 160
TREES = {"n_estimators": 3, "random_state": 0}
EPOCHS = {"max_iter": 3, "batch_size": 120, "random_state": 0}
BY_COLUMN = {
    "secureboost": treaty.SecureBoost(encryption="lattice", allow_exact_sums=True),
    "sealed": treaty.SecureBoost(),
    "fedxgboost-smm": treaty.FedXGBoostSMM(backend="dealer"),
    "fedxgboost-ldp": treaty.FedXGBoostLDP(mechanism="label_rr", epsilon=8.0),  # at 3, one in 13 has no split of p0
    "federboost-vertical": treaty.FederBoostVertical(epsilon=40.0),  # at 5, one in 25 has no split of a partner
}
BY_ROW = {
    "federboost-horizontal": treaty.FederBoostHorizontal(epsilon_total=5000.0),
    "fedxgb": treaty.FedXGB(edges=3, expose="model"),
}
LINEAR = {
    "quasi-newton": treaty.QuasiNewton(coordinator=False, encryption="lattice"),
    "sgd": treaty.SGD(coordinator=False, encryption="lattice"),
}


def table() -> tuple[pd.DataFrame, np.ndarray]:
    return real_table("binary", rows=240)


def shares(X: pd.DataFrame, y: np.ndarray, names: list[str]) -> dict[str, tuple[pd.DataFrame, np.ndarray]]:
    return {name: (X.iloc[k :: len(names)], y[k :: len(names)]) for k, name in enumerate(names)}


def cut_in_three(X: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {f"p{k}": X.iloc[:, k::3] for k in range(3)}


@functools.cache
def by_column(system: str = "secureboost") -> tuple:
    """Return a fitted model, and held-back rows with labels."""
    X, y = table()
    tables = cut_in_three(X)
    model = treaty.GBDTClassifier(BY_COLUMN[system], **TREES)
    model.fit({name: of.iloc[:ROWS] for name, of in tables.items()}, y[:ROWS])
    return model, {name: of.iloc[ROWS:] for name, of in tables.items()}, y[ROWS:]


def sections(path) -> dict[str, str]:
    """Return what each section of a page says, markup and all; of one that is not shown, the reason."""
    parts = re.split(r'<section id="(\w+)"[^>]*>', path.read_text())[1:]
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    reasons = dict(re.findall(r"<li>([^:<]+): ([^<]+)</li>", found.pop("missing", "")))
    missing = {section: reasons[title] for section, title in _TITLES.items() if title in reasons}
    assert not missing.keys() & found.keys()
    assert all(re.search("<svg|<table|<article|<p>", shown) for shown in found.values()), "an empty section is shown"
    return found | missing


def check_common(found: dict[str, str], *, alone: bool = False) -> None:
    for section in ("scores", "curves", "roc", "calibration", "importances", "seconds", "learned", "parameters"):
        assert "needs" not in found[section].lower(), section
    for section in ("curves", "roc", "calibration", "importances"):
        assert "<svg" in found[section], section
    assert "<table" in found["seconds"]
    for section in ("timeline", "messages"):
        said = "All was in one place: nothing was sent." in found[section]
        assert said == alone
        assert (("<svg" if section == "timeline" else "<table") in found[section]) == (not alone)
    assert treaty.__version__ in found["versions"]


@pytest.mark.parametrize("system", BY_COLUMN)
def test_a_system_split_by_column_has_all_and_hides_names(tmp_path, system):
    model, X, y = by_column(system)
    model.report(tmp_path / "out.html", X, y)
    found = sections(tmp_path / "out.html")
    check_common(found)
    text = tmp_path.joinpath("out.html").read_text()
    hidden = [name for party in ("p1", "p2") for name in X[party].columns]
    assert [name for name in hidden if name in html.unescape(text)] == []
    assert re.search(r"p[12] #1", found["importances"])
    assert re.search("all of p[12]", found["shap"])
    assert any(name in found["importances"] for name in X["p0"].columns)
    assert any(name in found["shap"] for name in X["p0"].columns)
    for party, facts in model.disclosures_.items():
        assert f"<h3>{party}</h3>" in found["learned"]
        assert all(fact in html.unescape(found["learned"]) for fact in facts)
    for pair, totals in model.communication_.items():
        assert pair.replace(" -> ", "\u00a0→ ") in found["messages"]
        assert f"{totals['bytes'] / 1e6:,.3f}" in found["messages"]


@pytest.mark.parametrize("system", BY_ROW)
def test_a_system_split_by_row_has_all(tmp_path, system):
    X, y = table()
    names = ["north", "south", "east"] if system == "federboost-horizontal" else [f"user{k}" for k in range(9)]
    model = treaty.GBDTClassifier(BY_ROW[system], **TREES).fit(shares(X[:ROWS], y[:ROWS], names))
    model.report(tmp_path / "out.html", X[ROWS:], y[ROWS:])
    found = sections(tmp_path / "out.html")
    check_common(found)
    if system == "federboost-horizontal":
        assert "Exact TreeSHAP" in found["shap"]  # covers are noisy sums
        spent = model.parts_[next(iter(model.parts_))].spent
        assert spent
        assert html.escape(spent) in found["noise"]


@pytest.mark.parametrize("system", LINEAR)
def test_a_linear_system_shows_own_weights_alone(tmp_path, system):
    X, y = table()
    tables = cut_for_active(X, 2)
    model = treaty.LogisticRegression(LINEAR[system], **EPOCHS)
    model.fit({name: of.iloc[:ROWS] for name, of in tables.items()}, y[:ROWS])
    held = {name: of.iloc[ROWS:] for name, of in tables.items()}
    model.report(tmp_path / "out.html", held, y[ROWS:])
    found = sections(tmp_path / "out.html")
    check_common(found)
    assert "Weights of p1 stay there" in found["importances"]
    assert [name for name in held["p1"].columns if name in tmp_path.joinpath("out.html").read_text()] == []
    assert "weight times value" in found["shap"]
    shown = contents_of(model, None, None, None, ["p1"], None).importances
    np.testing.assert_array_equal(list(shown["p1"].values()), model.standardized_coef_["p1"])


@pytest.mark.parametrize("model", [treaty.GBDTClassifier(**TREES), treaty.LogisticRegression(max_iter=5)])
def test_one_table_says_that_nothing_was_sent(tmp_path, model):
    X, y = table()
    model.fit(X[:ROWS], y[:ROWS])
    model.report(tmp_path / "out.html", X[ROWS:], y[ROWS:])
    check_common(sections(tmp_path / "out.html"), alone=True)


def test_scores_are_those_of_scikit_learn_and_the_pooled_models_beside():
    model, X, y = by_column()
    tables = {name: of.iloc[:ROWS] for name, of in cut_in_three(table()[0]).items()}
    with pytest.warns(UserWarning, match="joins the tables"):
        pooled = treaty.GBDTClassifier(**TREES, max_bin=32).fit(tables, table()[1][:ROWS])
    shown = contents_of(model, X, y, pooled, (), None)
    for name, each in (("this model", model), (POOLED, pooled)):
        p = each.predict_proba(X)[:, 1]
        values = shown.scores.values[name]
        assert values["AUC"] == pytest.approx(roc_auc_score(y, p))
        assert values["log-loss"] == pytest.approx(log_loss(y, p))
        assert values["Brier score"] == pytest.approx(brier_score_loss(y, p))
    roc = shown.scores.roc[0]
    assert np.trapezoid(roc.y, roc.x) == pytest.approx(shown.scores.values["this model"]["AUC"])
    assert [(curve.pooled, len(curve.values)) for curve in shown.curves] == [(False, 3)] * 2 + [(True, 3)] * 2
    assert [curve.name for curve in shown.curves] == ["training rows", "rows given to this report"] * 2
    assert shown.curves[1].values[-1] == pytest.approx(shown.scores.values["this model"]["log-loss"])
    assert [line.pooled for line in shown.scores.calibration] == [False, True]


def test_calibration_puts_all_rows_into_tenths():
    model, X, y = by_column()
    line = contents_of(model, X, y, None, (), None).scores.calibration[0]
    p = model.predict_proba(X)[:, 1]
    assert line.x == sorted(line.x)
    assert line.x[0] >= p.min() - 1e-12
    assert line.x[-1] <= p.max() + 1e-12
    assert all(0.0 <= share <= 1.0 for share in line.y)


def test_spreads_are_quantiles_of_the_contributions():
    model, X, _ = by_column()
    found = model.predict_contributions(X)
    spreads = {spread.name: spread for spread in contents_of(model, X, None, None, ["p1"], None).shap}
    whole = found.values["p2"].sum(axis=1)
    assert spreads["all of p2"].every == pytest.approx(np.quantile(whole, [0.05, 0.25, 0.5, 0.75, 0.95]).tolist())
    used = X["p1"].columns[np.argmax(np.abs(found.values["p1"]).mean(axis=0))]
    column, own = X["p1"][used], found.values["p1"][:, list(X["p1"].columns).index(used)]
    assert spreads[f"p1: {used}"].high[2] == pytest.approx(np.median(own[column > column.astype("float32").median()]))
    assert not any(spread.name.startswith("p2:") for spread in spreads.values())


def test_consent_names_a_partys_columns(tmp_path):
    model, X, y = by_column()
    model.report(tmp_path / "out.html", X, y, consent=None, title="A <b>title</b>")
    text = html.unescape(tmp_path.joinpath("out.html").read_text())
    assert any(name in text for name in X["p2"].columns)
    assert "A <b>title</b>" not in tmp_path.joinpath("out.html").read_text()
    with pytest.raises(ConfigError, match="expected some of the parties"):
        model.report(tmp_path / "out.html", consent=["nobody"])


def test_a_loaded_model_says_that_files_keep_no_record(tmp_path):
    model, X, y = by_column()
    model.save(tmp_path / "model")
    treaty.load(tmp_path / "model").report(tmp_path / "out.html", X, y)
    found = sections(tmp_path / "out.html")
    for section in ("timeline", "messages", "seconds"):
        assert "loaded from files" in found[section]
    said = html.unescape(found["learned"])
    assert all(fact in said for facts in model.disclosures_.values() for fact in facts)
    assert "<svg" in found["roc"]


def test_without_rows_it_says_what_is_needed(tmp_path):
    model, X, _ = by_column()
    model.report(tmp_path / "out.html")
    found = sections(tmp_path / "out.html")
    for section in ("scores", "roc", "calibration"):
        assert "Needs rows with labels" in found[section]
    assert "on training rows" in tmp_path.joinpath("out.html").read_text()
    assert "<svg" in found["curves"]  # of training rows
    assert "Needs rows: report(path, X)." in found["shap"]
    assert "no epsilon" in found["noise"]
    model.report(tmp_path / "out.html", X)
    assert "<svg" in sections(tmp_path / "out.html")["shap"]


def test_numbers_have_calibration_and_no_roc(tmp_path):
    X, y = real_table("regression")
    model = treaty.GBDTRegressor(**TREES).fit(X[:ROWS], y[:ROWS], eval_set=(X[ROWS:], y[ROWS:]))
    model.report(tmp_path / "out.html", X[ROWS:], y[ROWS:])
    found = sections(tmp_path / "out.html")
    assert "ROC needs classes" in found["roc"]
    assert "RMSE" in found["scores"]
    assert "<svg" in found["calibration"]
    with pytest.raises(DataError, match=r"a number for each of 80 rows, got an array \(79,\)"):
        model.report(tmp_path / "out.html", X[ROWS:], y[ROWS + 1 :])


def test_several_classes_each_have_a_line(tmp_path):
    X, y = real_table("multiclass", rows=178)
    X = with_categories(X)
    model = treaty.GBDTClassifier(**TREES).fit(X[:120], y[:120])
    shown = contents_of(model, X[120:], y[120:], None, (), None)
    assert [line.name for line in shown.scores.roc] == [f"{k} against the rest" for k in range(3)]
    model.report(tmp_path / "out.html", X[120:], y[120:])
    assert "mean over classes" in sections(tmp_path / "out.html")["shap"]


def test_hidden_decisions_have_no_stages_and_no_shap(tmp_path):
    X, y = table()
    tables = cut(X, 2)
    protocol = treaty.SecureBoost(
        encryption="ou", insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True, inference="shared"
    )
    model = treaty.GBDTClassifier(protocol, n_estimators=1, max_depth=2).fit(tables, y)
    model.report(tmp_path / "out.html", {name: of[:40] for name, of in tables.items()}, y[:40])
    found = sections(tmp_path / "out.html")
    assert "hide which leaf a row is in" in found["shap"]
    assert "explain" not in found["shap"]
    assert "training rows" in found["curves"]
    assert "rows given" not in found["curves"]
    assert "<svg" in found["roc"]


@pytest.mark.parametrize("whole", [False, True], ids=["tables", "one table"])
def test_what_partners_add_to_the_own_data_is_said_at_the_top(tmp_path, whole):
    model, X, y = by_column()
    tables, labels = cut_in_three(table()[0]), table()[1]
    alone = treaty.GBDTClassifier(**TREES, max_bin=32).fit(tables["p0"].iloc[:ROWS], labels[:ROWS])
    if whole:
        joined = pd.concat(tables.values(), axis=1)
        parties = {name: list(of.columns) for name, of in tables.items()}
        model = treaty.GBDTClassifier(BY_COLUMN["secureboost"], parties=parties, **TREES)
        model.fit(joined.iloc[:ROWS], labels[:ROWS])
        X = joined.iloc[ROWS:]
    shown = contents_of(model, X, y, None, (), None, alone)
    ours, theirs = (shown.scores.values[name]["AUC"] for name in ("this model", OWN))
    own = X[tables["p0"].columns] if whole else X["p0"]
    assert theirs == pytest.approx(roc_auc_score(y, alone.predict_proba(own)[:, 1]))
    assert [line.name for line in shown.scores.roc] == ["this model", OWN]
    compared = f"AUC is {ours:.4g} with it and {theirs:.4g} without."
    assert any(compared in sentence for _, sentence in verdict(shown))
    gains = {party: sum(of.values()) for party, of in model.importances("gain").items()}
    share = 1.0 - gains["p0"] / sum(gains.values())
    assert (f"{share:.0%}", "of the splits' gain is from the partners' columns") in figures(shown)
    model.report(tmp_path / "out.html", X, y, alone=alone)
    text = tmp_path.joinpath("out.html").read_text()
    assert text.index(compared) < text.index("<main>")
    assert "Comparison with" not in text
    with pytest.raises(ConfigError, match="expected alone to be a GBDTClassifier, got a GBDTRegressor"):
        model.report(tmp_path / "out.html", X, y, alone=treaty.GBDTRegressor(n_estimators=1).fit(own, y))


def test_what_does_not_go_together_is_refused(tmp_path):
    X, y = table()
    model = treaty.GBDTClassifier(**TREES).fit(X, y)
    out = tmp_path / "out.html"
    with pytest.raises(ConfigError, match="got y alone"):
        model.report(out, y=y)
    with pytest.raises(ConfigError, match="expected pooled to be an estimator of Treaty, got str"):
        model.report(out, X, y, pooled="pooled")
    regressor = treaty.GBDTRegressor(n_estimators=1, base_score=0.5).fit(X, y)
    with pytest.raises(ConfigError, match="expected pooled to be a GBDTClassifier, got a GBDTRegressor"):
        model.report(out, X, y, pooled=regressor)
    with pytest.raises(DataError, match="labels seen in training"):
        model.report(out, X, y + 7)
    with pytest.raises(ConfigError, match="there is no folder"):
        model.report(tmp_path / "no" / "out.html", X, y)
    assert not out.exists()


def test_a_ranking_has_curves_alone(tmp_path):
    X, _ = table()
    rng = np.random.default_rng(0)
    relevance, qid = rng.integers(0, 3, len(X)), np.repeat(np.arange(24), 10)
    model = treaty.GBDTRanker(**TREES).fit(X, relevance, qid=qid, eval_set=[(X, relevance)], eval_qid=[qid])
    with pytest.raises(ConfigError, match="a ranking has no ROC"):
        model.report(tmp_path / "out.html", X, relevance)
    model.report(tmp_path / "out.html", X)
    assert "<svg" in sections(tmp_path / "out.html")["curves"]


@pytest.mark.parametrize(("effect", "by_chance"), [(1.0, False), (0.0, True)])
def test_a_difference_within_two_standard_errors_may_be_chance(effect, by_chance):
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"a": rng.normal(size=1200), "b": rng.normal(size=1200)})
    y = (X["a"] + effect * X["b"] + rng.normal(size=1200) > 0).astype(int).to_numpy()
    tables = {"p0": X[["a"]], "p1": X[["b"]]}
    model = treaty.GBDTClassifier(BY_COLUMN["secureboost"], **TREES)
    model.fit({name: of.iloc[:800] for name, of in tables.items()}, y[:800])
    alone = treaty.GBDTClassifier(**TREES).fit(X[["a"]].iloc[:800], y[:800])
    tests = {name: of.iloc[800:] for name, of in tables.items()}
    shown = contents_of(model, tests, y[800:], None, (), None, alone)
    assert shown.scores.by_chance == by_chance
