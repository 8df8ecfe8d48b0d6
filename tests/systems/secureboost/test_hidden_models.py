"""What a model with hidden rows says of itself, and what it refuses: nobody knows its gains, covers and decisions."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import treaty
from html_pages import Parsed
from tables import cut, real_table
from treaty.attacks.auditing import audit
from treaty.errors import ConfigError
from treaty.models.interpretation import own_importances

HIDDEN = treaty.SecureBoost(membership="hidden")
OPTIONS = {"n_estimators": 2, "max_depth": 2, "max_bin": 8, "objective": "logistic_pieces", "n_jobs": 1}
X, Y = real_table("binary", rows=200)
TABLES = cut(X.iloc[:, :8], 2)


@pytest.fixture(scope="module")
def model() -> treaty.GBDTClassifier:
    return treaty.GBDTClassifier(HIDDEN, **OPTIONS).fit(TABLES, Y)


def test_importances_count_splits(model):
    pooled = treaty.GBDTClassifier("pooled", **OPTIONS).fit(TABLES, Y)
    (joined,) = pooled.importances("count").values()
    counts = [of for party in model.importances("count", None).values() for of in party.values()]
    assert counts == list(joined.values())
    counts = np.array(counts)
    np.testing.assert_allclose(model.feature_importances_, counts / counts.sum())
    for party, part in model.parts_.items():
        assert own_importances(part) == {"count": model.importances("count", None)[party]}
    with pytest.raises(ConfigError, match="nobody knows the gains of splits under hidden rows"):
        model.importances()
    with pytest.raises(ConfigError, match=r"covers .* nobody knows under hidden rows"):
        model.importances("cover")


def test_what_needs_decisions_or_covers_is_refused(model):
    for ask in (model.predict_contributions, model.contributions_frame, model.predict_leaf):
        with pytest.raises(ConfigError, match="hide which leaf"):
            ask(TABLES)
    with pytest.raises(ConfigError, match="hide which leaf"):
        next(model.staged_predict_proba(TABLES))


def test_the_xgboost_model_predicts_alike_and_warns_of_its_zeros(model):
    xgboost = pytest.importorskip("xgboost")
    with pytest.warns(UserWarning, match="under hidden rows nobody knows gains and covers"):
        booster = model.to_xgboost(list(TABLES))
    rows = X.iloc[:, :8].set_axis(booster.feature_names, axis=1)
    predicted = booster.predict(xgboost.DMatrix(rows), output_margin=True)
    outputs = model.predict_proba(TABLES)[:, 1]
    pooled = treaty.GBDTClassifier("pooled", **OPTIONS).fit(TABLES, Y)
    np.testing.assert_allclose(outputs, pooled.predict_proba(TABLES)[:, 1])
    assert np.array_equal(np.argsort(predicted, kind="stable"), np.argsort(outputs.astype(np.float32), kind="stable"))


def test_a_report_has_no_empty_panel(model, tmp_path):
    model.report(tmp_path / "out.html", TABLES, Y)
    page = (tmp_path / "out.html").read_text()
    found = Parsed(page).sections
    assert "Number of splits on a column." in found["importances"]
    assert "hide which leaf a row is in" in found["missing"]
    assert "The training kept no loss" in found["missing"]
    assert not {"shap", "curves"} & {*found}
    assert "nan" not in found["importances"].lower()
    assert "rows of nodes are hidden, estimated about" in page


def test_a_model_with_hidden_rows_is_not_used_with_open_decisions(model):
    """Sides of training rows would tell which rows were in a node."""
    open_model = treaty.GBDTClassifier(treaty.SecureBoost(), **{**OPTIONS, "n_estimators": 3})
    with pytest.raises(ConfigError, match="trained with hidden rows: expected membership="):
        open_model.fit(TABLES, Y, xgb_model=model)
    open_model.fit(TABLES, Y)
    open_model.parts_ = model.parts_
    with pytest.raises(ConfigError, match='trained with hidden rows: expected membership="hidden"'):
        open_model.predict_proba(TABLES)
    with pytest.raises(ConfigError, match='trained with hidden rows: expected membership="hidden"'):
        open_model.predict_contributions(TABLES)


@pytest.mark.parametrize("trusting", list(TABLES))
def test_either_party_refuses_to_show_sides(model, trusting):
    """It is the passive party's sides that would be shown: it does not rely on the other."""
    open_model = treaty.GBDTClassifier(treaty.SecureBoost(), **{**OPTIONS, "n_estimators": 3}).fit(TABLES, Y)
    open_model.parts_ = {
        name: msgspec.structs.replace(part, hides_rows=name != trusting) for name, part in model.parts_.items()
    }
    with pytest.raises(ConfigError, match='trained with hidden rows: expected membership="hidden"'):
        open_model.predict_proba(TABLES)
    rounds = treaty.GBDTClassifier(treaty.SecureBoost(), **{**OPTIONS, "n_estimators": 1})
    with pytest.raises(ConfigError, match='trained with hidden rows: expected membership="hidden"'):
        rounds.fit(TABLES, Y, xgb_model=open_model)


@pytest.mark.parametrize("active", ["p0", "p1"])
def test_no_attack_finds_a_bin(active):
    model = treaty.GBDTClassifier(HIDDEN, active=active, **OPTIONS)
    found = audit(model, TABLES, Y)
    of_bins = [one for one in found.findings if one.party == active]
    assert {(one.attack, one.score) for one in of_bins} == {("exact sums", 0.0), ("nested sides", 0.0)}
    assert {one.target for one in found.findings if one.party != active} == {"labels"}
    assert found.unstated == []
    assert found.in_clear[active] == [*found.in_clear["p1" if active == "p0" else "p0"], "the weight of each leaf"]
    # which the same attacks do of sealed sums
    sealed = treaty.GBDTClassifier(treaty.SecureBoost(), active=active, **OPTIONS)
    assert any(one.party == active for one in audit(sealed, TABLES, Y).findings)


def test_predictions_of_a_model_with_hidden_rows_need_no_more_than_shares(model):
    expected = model.predict_proba(TABLES)
    shared = treaty.GBDTClassifier(treaty.SecureBoost(), **OPTIONS).fit(TABLES, Y)
    shared.parts_ = model.parts_
    shared.set_params(protocol=treaty.SecureBoost(inference="shared"))
    np.testing.assert_array_equal(shared.predict_proba(TABLES), expected)
