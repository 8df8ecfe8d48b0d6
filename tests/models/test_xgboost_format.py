from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from treaty.errors import ConfigError
from treaty.models.interpretation import to_booster
from trees.plain import random_codes, random_labels, train

xgboost = pytest.importorskip("xgboost")

NAMES = ["age", "income in €", 'say "\\d"', "city", "last"]
CASES = {
    "binary": {},
    "binary-deep": {"max_depth": 6},
    "softmax": {"objective": "softmax", "n_classes": 3},
    "softmax-base-score": {"objective": "softmax", "n_classes": 4, "base_score": 0.1},
    "softmax-estimated": {"objective": "softmax", "n_classes": 4, "base_score": None},
    "regression": {"objective": "squared_error"},
    "regression-base-score": {"objective": "squared_error", "base_score": -2.5},
    "base-score": {"base_score": 0.2},
    "logistic-pieces": {"objective": "logistic_pieces", "base_score": 0.2},
    "poisson": {"objective": "poisson", "base_score": 1.3},
    "tweedie": {"objective": "tweedie", "base_score": 1.3, "tweedie_variance_power": 1.3, "fractional_bits": 20},
    "huber": {"objective": "huber", "huber_slope": 2.5},
    "quantile": {"objective": "quantile", "quantile_alpha": 0.8},
    "missing": {"missing": 0.3, "max_depth": 5},
    "categorical": {"categorical": [0, 3], "max_depth": 4},
    "categorical-missing": {"categorical": [1, 3, 4], "missing": 0.3, "max_depth": 4},
    "categorical-softmax": {"categorical": [0, 3], "objective": "softmax", "n_classes": 3, "missing": 0.1},
    "only-leaves": {"min_split_loss": 1e9},
}


def _trained(options):
    options = {"n_estimators": 5, **options}
    rng = np.random.default_rng(8)
    table = random_codes(
        rng, 400, [12, 6, 30, 5, 3], missing=options.pop("missing", 0.0), categorical=options.pop("categorical", [])
    )
    y = random_labels(rng, table, options.get("objective", "logistic"), options.get("n_classes", 2))
    trained = train(table.cut(2), y, **options)
    fresh = random_codes(rng, 500, table.n_bins, missing=0.2, categorical=np.flatnonzero(table.categorical))
    return trained, table, fresh


def _booster(trained, table):
    return to_booster(trained.trees, trained.joined(), trained.objective, NAMES, _categories(table))


def _categories(table):
    return [list(range(n)) if of else None for n, of in zip(table.n_bins.tolist(), table.categorical, strict=True)]


def _matrix(table, codes):
    types = ["c" if categorical else "float" for categorical in table.categorical]
    return xgboost.DMatrix(codes.matrix, feature_names=NAMES, feature_types=types, enable_categorical=True)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_booster_predicts_the_same_margins_and_means(case):
    trained, table, fresh = _trained(case)
    booster = _booster(trained, table)
    for codes in (table, fresh):
        margins = trained.walk(codes.matrix)
        shape = margins.shape if margins.shape[1] > 1 else margins[:, 0].shape
        predicted = booster.predict(_matrix(table, codes), output_margin=True)
        np.testing.assert_allclose(predicted, margins.reshape(shape), rtol=0, atol=1e-5)
        means = trained.objective.predictions(margins)
        np.testing.assert_allclose(booster.predict(_matrix(table, codes)), means.reshape(shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("format_", ["json", "ubj"])
@pytest.mark.parametrize("case", ["softmax-base-score", "categorical-missing"])
def test_booster_predicts_the_same_after_saving_and_loading(case, format_, tmp_path):
    trained, table, fresh = _trained(CASES[case])
    path = tmp_path / f"model.{format_}"
    _booster(trained, table).save_model(path)
    loaded = xgboost.Booster(model_file=path)
    margins = loaded.predict(_matrix(table, fresh), output_margin=True)
    np.testing.assert_allclose(margins, trained.walk(fresh.matrix).reshape(margins.shape), rtol=0, atol=1e-5)
    assert loaded.feature_names == NAMES


def test_booster_has_feature_names_types_and_rounds():
    trained, table, fresh = _trained(CASES["categorical-softmax"])
    booster = _booster(trained, table)
    assert booster.feature_names == NAMES
    assert booster.feature_types == ["c", "float", "float", "c", "float"]
    assert booster.num_boosted_rounds() == 5
    assert booster.num_features() == 5
    with pytest.raises(ValueError, match="feature_names mismatch"):
        booster.predict(xgboost.DMatrix(fresh.matrix, feature_names=NAMES[::-1]))


def test_booster_keeps_gains_and_covers():
    trained, table, _ = _trained({})
    booster = _booster(trained, table)
    tree = trained.trees[0]
    dumped = booster.get_dump(with_stats=True, dump_format="json")[0]
    assert f'"gain": {tree.gain[0]:.4f}'[:12] in dumped
    total = sum(float(tree.gain.sum()) for tree in trained.trees)
    assert sum(booster.get_score(importance_type="total_gain").values()) == pytest.approx(total, rel=1e-5)
    splits = sum(int((tree.left >= 0).sum()) for tree in trained.trees)
    assert sum(booster.get_score(importance_type="weight").values()) == splits


@pytest.mark.parametrize("rounds", [(0, 2), (2, 5)], ids=["first-two", "last-three"])
def test_booster_predicts_from_a_range_of_rounds(rounds):
    trained, table, fresh = _trained(CASES["softmax"])
    margins = _booster(trained, table).predict(_matrix(table, fresh), output_margin=True, iteration_range=rounds)
    part = _trained({**CASES["softmax"], "n_estimators": rounds[1]})[0]
    expected = part.walk(fresh.matrix)
    if rounds[0]:
        expected = expected - _trained({**CASES["softmax"], "n_estimators": rounds[0]})[0].walk(fresh.matrix) + 0.5
    np.testing.assert_allclose(margins, expected, rtol=0, atol=1e-5)


def test_booster_sends_values_beyond_the_training_range_the_same_way():
    trained, table, _ = _trained(CASES["missing"])
    assert any(np.isinf(part.splits.threshold).any() for part in trained.parts)
    rng = np.random.default_rng(0)
    matrix = rng.choice(np.float32([-1e30, -7.5, 0.5, 1e30, np.nan]), (300, 5))
    predicted = _booster(trained, table).predict(xgboost.DMatrix(matrix, feature_names=NAMES), output_margin=True)
    np.testing.assert_allclose(predicted, trained.walk(matrix)[:, 0], rtol=0, atol=1e-5)


def test_booster_sends_every_category_left_and_missing_right():
    rng = np.random.default_rng(1)
    table = random_codes(rng, 300, [3, 2], missing=0.4, categorical=[0, 1])
    y = (table.codes[:, 0] == 3).astype(np.float64)  # missing tells all
    trained = train(table, y, max_depth=2, n_estimators=2)
    assert trained.parts[0].splits.category_left[0] == b"\1\1\1\0"
    booster = to_booster(trained.trees, trained.joined(), trained.objective, ["a", "b"], [["x"], ["y", "z"]])
    matrix = xgboost.DMatrix(table.matrix, feature_names=["a", "b"], feature_types=["c", "c"], enable_categorical=True)
    predicted = booster.predict(matrix, output_margin=True)
    np.testing.assert_allclose(predicted, trained.margins[:, 0], rtol=0, atol=1e-5)


def test_booster_of_no_trees_predicts_the_base_score():
    trained, table, fresh = _trained({"base_score": 0.3})
    booster = to_booster([], trained.joined(), trained.objective, NAMES, _categories(table))
    np.testing.assert_allclose(booster.predict(_matrix(table, fresh)), 0.3, rtol=1e-6)


def test_booster_continues_training():
    trained, table, _ = _trained({"objective": "squared_error"})
    y = np.arange(400.0)
    booster = _booster(trained, table)
    more = xgboost.train(
        {"objective": "reg:squarederror", "base_score": 0.5, "tree_method": "hist"},
        xgboost.DMatrix(table.matrix, y, feature_names=NAMES, feature_types=["float"] * 5),
        2,
        xgb_model=booster,
    )
    assert more.num_boosted_rounds() == 7


def test_missing_xgboost_names_the_extra(monkeypatch):
    trained, table, _ = _trained({"n_estimators": 1})
    monkeypatch.setitem(sys.modules, "xgboost", None)
    with pytest.raises(ConfigError, match=r"treaty-learn\[xgboost\]"):
        _booster(trained, table)


def test_booster_carries_the_categories_of_training():
    trained, table, _ = _trained({"categorical": [1, 3]})
    booster = _booster(trained, table)
    assert json.loads(booster.attr("categories")) == {NAMES[k]: list(range(int(table.n_bins[k]))) for k in (1, 3)}
    plain, table, _ = _trained({})
    assert _booster(plain, table).attr("categories") is None
