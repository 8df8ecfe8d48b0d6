"""SecureBoost gives the pooled grower's trees and predictions, bit for bit."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import treaty
from marks import all_but_first_slow, slow
from systems.vertical.lossless import unusual_tables
from tables import assert_same_trees, cut, real_table, with_categories, with_gaps
from treaty.crypto.parameters import DEGREE
from treaty.crypto.sums import additive_sums, lattice_sums
from treaty.machine import arrays
from treaty.systems.secureboost.options import SecureBoost

ESTIMATORS = {"binary": treaty.GBDTClassifier, "multiclass": treaty.GBDTClassifier, "regression": treaty.GBDTRegressor}
FAST_KEY = SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True)
OPTIONS = {"n_estimators": 3, "max_depth": 3, "min_child_samples": 1, "max_bin": 16}


def fit_both(task: str, tables: dict, y: np.ndarray, weight=None, eval_set=None, cipher=FAST_KEY, **options):
    options = {**OPTIONS, **options}
    pooled = ESTIMATORS[task]("pooled", **options).fit(tables, y, sample_weight=weight, eval_set=eval_set)
    federated = ESTIMATORS[task](cipher, n_jobs=1, **options)
    return federated.fit(tables, y, sample_weight=weight, eval_set=eval_set), pooled


def assert_lossless(federated, pooled, tables: dict) -> None:
    assert_same_trees(federated, pooled)
    predict = "predict_proba" if hasattr(pooled, "predict_proba") else "predict"
    np.testing.assert_array_equal(getattr(federated, predict)(tables), getattr(pooled, predict)(tables))


CHANGES = {"categories": with_categories, "missing": with_gaps, "plain": lambda X: X}


@pytest.mark.parametrize(
    ("parties", "change"),
    [(3, "categories"), slow(3, "missing"), slow(3, "plain"), slow(2, "missing"), slow(5, "categories")],
)
@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_trees_and_predictions_equal_the_pooled_growers(parties, task, change):
    X, y = real_table(task)
    tables = cut(CHANGES[change](X), parties)
    federated, pooled = fit_both(task, tables, y)
    assert len(federated.parts_) == parties
    assert_lossless(federated, pooled, tables)


@pytest.mark.slow
def test_ten_parties_give_the_pooled_trees():
    X, y = real_table("binary")
    tables = {f"p{k}": X.iloc[:, k : k + (3 if k == 9 else 1)] for k in range(10)}
    assert_lossless(*fit_both("binary", tables, y), tables)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_one_side_sampling_with_weights_gives_the_pooled_trees(task):
    X, y = real_table(task)
    weight = np.random.default_rng(6).exponential(size=len(y))
    tables = cut(with_gaps(X), 2)
    assert_lossless(*fit_both(task, tables, y, weight, goss=True, random_state=1), tables)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_sample_weights_give_the_pooled_trees(task):
    X, y = real_table(task)
    weight = np.random.default_rng(5).exponential(size=len(y)) * 3
    weight[:10] = 0.0
    tables = cut(with_gaps(X), 3)
    assert_lossless(*fit_both(task, tables, y, weight), tables)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"subsample": 0.6, "random_state": 1},
        {"colsample_bytree": 0.5, "random_state": 2},
        {"subsample": 0.7, "colsample_bytree": 0.4, "random_state": 3},
        {"goss": True, "random_state": 4},
        {"goss": True, "top_rate": 0.3, "other_rate": 0.5, "colsample_bytree": 0.6, "random_state": 5},
        {"max_depth": 6},
        {"min_split_loss": 0.5, "reg_lambda": 0.1, "reg_alpha": 0.2},
        {"min_child_samples": 20},
        {"fractional_bits": 24, "max_bin": 255},
        {"max_depth": 1, "learning_rate": 1.0},
    ],
    ids=lambda o: "-".join(o),
)
def test_every_growth_option_gives_the_pooled_trees(options):
    X, y = real_table("binary")
    tables = cut(with_categories(with_gaps(X)), 3)
    assert_lossless(*fit_both("binary", tables, y, **options), tables)


@pytest.mark.slow
def test_eval_losses_and_early_stopping_equal_the_pooled_ones():
    X, y = real_table("binary", rows=400)
    tables, held = cut(X.iloc[:200], 3), cut(X.iloc[200:300], 3)
    watched = [(tables, y[:200]), (held, y[200:300])]
    options = {"n_estimators": 40, "early_stopping_rounds": 3, "learning_rate": 1.0}
    federated, pooled = fit_both("binary", tables, y[:200], eval_set=watched, **options)
    assert federated.evals_result_ == pooled.evals_result_
    assert federated.best_iteration_ == pooled.best_iteration_ < 39
    assert_lossless(federated, pooled, held)


def test_an_active_party_without_features_trains():
    X, y = real_table("binary")
    tables = {"bank": X.iloc[:, :0], "shop": X.iloc[:, :5], "telco": X.iloc[:, 5:]}
    assert_lossless(*fit_both("binary", tables, y), tables)


def test_the_active_party_may_stand_anywhere_in_the_order():
    X, y = real_table("binary")
    tables = cut(X, 3)
    federated, pooled = fit_both("binary", tables, y, active="p1")
    assert federated.parts_["p1"].forest is not None
    assert_lossless(federated, pooled, tables)


def test_a_passive_party_with_one_column_takes_part():
    X, y = real_table("binary")
    tables = {"bank": X.iloc[:, 2:], "shop": X.iloc[:, :1]}
    assert_lossless(*fit_both("binary", tables, y), tables)


def test_constant_and_all_missing_columns_do_no_harm():
    X, y = real_table("binary")
    X = X.assign(constant=1.0, nothing=np.nan, half=np.where(np.arange(len(X)) % 2, 1.0, np.nan))
    tables = {"bank": X[["mean radius", "nothing"]], "shop": X[["constant"]], "telco": X[["mean texture", "half"]]}
    assert_lossless(*fit_both("binary", tables, y), tables)


def test_passive_parties_with_nothing_to_split_leave_the_active_ones_trees():
    X, y = real_table("binary")
    tables = {"bank": X, "shop": pd.DataFrame({"constant": np.ones(len(X))})}
    assert_lossless(*fit_both("binary", tables, y), tables)


def test_leaves_of_one_row_give_the_pooled_trees():
    X, y = real_table("binary", rows=60)
    federated, pooled = fit_both("binary", cut(X, 2), y, max_depth=8, min_child_weight=0.0, reg_lambda=0.0)
    assert min(tree.count.min() for tree in pooled.parts_["pooled"].forest.trees) == 1
    assert_lossless(federated, pooled, cut(X, 2))


def test_imbalanced_labels_give_the_pooled_trees():
    X, y = real_table("binary", rows=400)
    keep = np.flatnonzero((y == 1) | (np.cumsum(y == 0) <= 5))
    X, y = X.iloc[keep].reset_index(drop=True), y[keep]
    tables = cut(X, 2)
    assert_lossless(*fit_both("binary", tables, y, min_child_weight=0.1), tables)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_small_tables_give_the_pooled_trees(data):
    n = data.draw(st.integers(8, 60))
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    columns = data.draw(st.integers(2, 5))
    X = pd.DataFrame({f"x{k}": rng.integers(0, data.draw(st.integers(1, 9)), n).astype(float) for k in range(columns)})
    X = with_gaps(X, data.draw(st.sampled_from([0.0, 0.3])), seed)
    X.iloc[0] = 1.0
    y = (X["x0"].fillna(3) + rng.normal(size=n) > np.median(X["x0"].fillna(3))).to_numpy().astype(int)
    y[:2] = [0, 1]
    tables = {"a": X.iloc[:, :1], "b": X.iloc[:, 1:]}
    options = {"min_child_weight": 0.0, "max_depth": data.draw(st.integers(1, 4)), "n_estimators": 2}
    federated, pooled = fit_both("binary", tables, y, **options)
    np.testing.assert_array_equal(federated.predict_proba(tables), pooled.predict_proba(tables))
    for ours, theirs in zip(federated.parts_["a"].forest.trees, pooled.parts_["pooled"].forest.trees, strict=True):
        np.testing.assert_array_equal(ours.left, theirs.left)
        np.testing.assert_array_equal(ours.value, theirs.value)


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_reduced_leakage_gives_the_active_partys_own_trees_first(task):
    X, y = real_table(task)
    tables = cut(X, 2)
    options = {**OPTIONS, "n_estimators": 4}
    reduced = treaty.GBDTClassifier(
        SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True, rl_trees=2), **options
    ).fit(tables, y)
    alone = treaty.GBDTClassifier("pooled", **options).fit(tables["p0"], y)
    forest = reduced.parts_["p0"].forest
    first = 2 * forest.objective.n_outputs
    assert all(set(tree.source[tree.left >= 0]) == {0} for tree in forest.trees[:first])
    for ours, theirs in zip(forest.trees[:first], alone.parts_["pooled"].forest.trees[:first], strict=True):
        np.testing.assert_array_equal(ours.value, theirs.value)
    assert any(set(tree.source[tree.left >= 0]) > {0} for tree in forest.trees[first:])


def test_reduced_leakage_without_own_columns_is_refused():
    X, y = real_table("binary")
    with pytest.raises(treaty.ConfigError, match="rl_trees needs columns at the active party"):
        treaty.GBDTClassifier(
            SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True, rl_trees=1)
        ).fit({"bank": None, "shop": X}, y)


def test_a_purity_guard_on_a_regression_is_refused():
    X, y = real_table("regression")
    with pytest.raises(treaty.ConfigError, match="purity_guard is about classes"):
        treaty.GBDTRegressor(
            SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True, purity_guard=0.4)
        ).fit(cut(X, 2), y)


# ---------------------------------------------------------------- the lattice map

SMALL = {"max_bin": 6}  # a bin of a hint takes a millisecond or two


def lattice_both(task: str, tables: dict, y: np.ndarray, weight=None, eval_set=None, reveal=None, **options):
    cipher = SecureBoost(encryption="lattice", sums="open", allow_exact_sums=True, reveal=reveal)
    return fit_both(task, tables, y, weight, eval_set, cipher, **{**SMALL, **options})


REVEAL = pytest.mark.parametrize("reveal", all_but_first_slow("column", "node"))


@REVEAL
@pytest.mark.parametrize(
    ("task", "parties", "change"),
    [
        ("binary", 2, lambda X: with_categories(with_gaps(X))),
        ("multiclass", 5, with_gaps),
        ("regression", 3, with_categories),
    ],
    ids=["binary-2", "multiclass-5", "regression-3"],
)
def test_the_lattice_map_gives_the_pooled_trees_and_predictions(task, parties, change, reveal):
    X, y = real_table(task)
    tables = cut(change(X), parties)
    federated, pooled = lattice_both(task, tables, y, reveal=reveal)
    sent = federated.communication_["p1 -> p0"]["by_type"]
    assert ("SplitColumns" in sent, "SplitAnswer" in sent) == (reveal == "column", reveal == "node")
    assert_lossless(federated, pooled, tables)


LATTICE_OPTIONS = [
    {"subsample": 0.6, "random_state": 1},
    {"colsample_bytree": 0.3, "random_state": 2},
    {"goss": True, "colsample_bytree": 0.6, "random_state": 5},
    {"max_depth": 6, "min_split_loss": 0.1},
    {"min_child_samples": 20},
    {"fractional_bits": 20, "n_estimators": 2},
    {"fractional_bits": 4},
    {"max_depth": 1, "learning_rate": 1.0},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", LATTICE_OPTIONS, ids="-".join)
def test_the_lattice_map_gives_the_pooled_trees_under_every_growth_option(options):
    X, y = real_table("binary")
    weight = np.random.default_rng(5).exponential(size=len(y)) * 3
    weight[:10] = 0.0
    tables = cut(with_categories(with_gaps(X)), 3)
    assert_lossless(*lattice_both("binary", tables, y, weight, **options), tables)


@pytest.mark.slow
@REVEAL
@pytest.mark.parametrize(
    ("guard", "options"),
    [({"purity_guard": 0.35}, {"max_depth": 5, "n_estimators": 5}), ({"rl_trees": 1}, {})],
    ids=["purity_guard", "rl_trees"],
)
def test_the_lattice_map_gives_the_trees_of_the_conventional_cipher_under_guards(guard, options, reveal):
    X, y = real_table("binary")
    tables, options = cut(with_gaps(X), 3), {**OPTIONS, **SMALL, **options, "n_jobs": 1}
    conventional = treaty.GBDTClassifier(
        SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True, **guard), **options
    ).fit(tables, y)
    lattice = treaty.GBDTClassifier(
        SecureBoost(encryption="lattice", sums="open", allow_exact_sums=True, reveal=reveal, **guard), **options
    )
    assert_lossless(lattice.fit(tables, y), conventional, tables)
    unguarded = treaty.GBDTClassifier("pooled", **options).fit(tables, y)
    assert not np.array_equal(lattice.predict_proba(tables), unguarded.predict_proba(tables))


@pytest.mark.slow
@REVEAL
def test_eval_losses_and_early_stopping_under_the_lattice_map_equal_the_pooled_ones(reveal):
    X, y = real_table("binary", rows=400)
    tables, held = cut(X.iloc[:200], 3), cut(X.iloc[200:300], 3)
    watched = [(tables, y[:200]), (held, y[200:300])]
    options = {"n_estimators": 40, "early_stopping_rounds": 3, "learning_rate": 1.0}
    federated, pooled = lattice_both("binary", tables, y[:200], eval_set=watched, reveal=reveal, **options)
    assert federated.evals_result_ == pooled.evals_result_
    assert federated.best_iteration_ == pooled.best_iteration_ < 39
    assert_lossless(federated, pooled, held)


@pytest.mark.slow
@pytest.mark.parametrize("case", unusual_tables())
def test_the_lattice_map_gives_the_pooled_trees_of_unusual_tables(case):
    tables, (_, y) = unusual_tables()[case], real_table("binary")
    assert_lossless(*lattice_both("binary", tables, y), tables)


def test_trees_without_any_column_of_a_party_equal_the_pooled_ones():
    X, y = real_table("binary")
    tables = {"bank": X.iloc[:, 3:9], "shop": X.iloc[:, :1], "telco": X.iloc[:, 1:3]}
    options = {"colsample_bytree": 0.2, "random_state": 1, "n_estimators": 5}
    assert_lossless(*lattice_both("binary", tables, y, **options), tables)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 3])
def test_levels_asked_for_in_several_messages_give_the_pooled_trees(monkeypatch, nodes):
    X, y = real_table("regression")
    tables, asked, query = cut(X, 3), [], lattice_sums.LatticeSumsClient.query

    def watched(client, positions, starts):
        asked.append(len(starts) - 1)
        return query(client, positions, starts)

    monkeypatch.setattr(lattice_sums, "PIECE_BYTES", nodes * 4 * 5 * (len(X) + DEGREE))
    monkeypatch.setattr(lattice_sums.LatticeSumsClient, "query", watched)
    federated, pooled = lattice_both("regression", tables, y, max_depth=5, n_estimators=2)
    assert max(asked) == nodes
    assert len(asked) > 2 * 5  # more messages than levels
    assert_lossless(federated, pooled, tables)


@pytest.mark.parametrize("cipher", ["lattice", "ou"])
def test_what_grows_with_rows_comes_in_pieces(monkeypatch, cipher):
    X, y = real_table("binary")
    options = {"insecure_test_key_bits": 512, "allow_insecure": True}
    if cipher == "lattice":
        times, options = 1 + 2 * DEGREE // len(X), {"encryption": "lattice", "sums": "open"}
        X, y = pd.concat([X] * times, ignore_index=True), np.tile(y, times)
    for module in (additive_sums, lattice_sums):
        monkeypatch.setattr(module, "PIECE_BYTES", 2 * 4 * 5 * DEGREE if cipher == "lattice" else 9000)
    monkeypatch.setattr(arrays, "PIECE_BYTES", 1)
    tables = cut(with_gaps(X), 3)
    federated, pooled = fit_both("binary", tables, y, cipher=SecureBoost(**options), subsample=0.8, random_state=1)
    sent = federated.communication_["p0 -> p1"]["by_type"]
    assert sent["TreeRows" if cipher == "ou" else "SumsPiece"] > 0
    assert_lossless(federated, pooled, tables)
    np.testing.assert_array_equal(federated.predict_proba(tables), pooled.predict_proba(tables))


def test_hints_sent_in_several_pieces_give_the_pooled_trees(monkeypatch):
    X, y = real_table("binary")
    tables = cut(X, 3)
    monkeypatch.setattr(lattice_sums, "_HINT_BYTES", 1 << 19)
    assert_lossless(*lattice_both("binary", tables, y), tables)
