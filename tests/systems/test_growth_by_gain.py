"""Trees that grow by best gain (`max_leaves`): the pooled grower's in every exact system, and refusals elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

import treaty
from systems.vertical.lossless import unusual_tables
from tables import assert_same_trees, cut, real_table, with_categories, with_gaps
from treaty.attacks.views import recorded_views
from treaty.errors import ConfigError
from treaty.systems.options import converted
from treaty.systems.pooled.options import BoostingOptions

SHORT = {"insecure_test_key_bits": 512, "allow_insecure": True, "allow_exact_sums": True}
OPTIONS = {"n_estimators": 2, "max_leaves": 9, "max_depth": None, "min_child_samples": 1, "max_bin": 16, "n_jobs": 1}
SYSTEMS = {
    "lattice": treaty.SecureBoost(encryption="lattice", allow_exact_sums=True),
    "keys": treaty.SecureBoost(encryption="ou", **SHORT),
    "smm": treaty.FedXGBoostSMM(reveal="column", allow_exact_sums=True),
    "dealer": treaty.FedXGBoostSMM(backend="dealer", allow_exact_sums=True),
    "buckets": treaty.FederBoostVertical(mode="paper", allow_insecure=True, epsilon=float("inf")),
}
ESTIMATORS = {"binary": treaty.GBDTClassifier, "multiclass": treaty.GBDTClassifier, "regression": treaty.GBDTRegressor}


def fit_both(system, tables, y, task="binary", **options):
    options = {**OPTIONS, **options}
    pooled = ESTIMATORS[task]("pooled", **options).fit(tables, y)
    return ESTIMATORS[task](system, **options).fit(tables, y), pooled


def depth_of(tree) -> int:
    depths = np.zeros(len(tree.left), int)
    for node in np.flatnonzero(tree.left >= 0):
        depths[tree.left[node] : tree.left[node] + 2] = depths[node] + 1
    return int(depths.max())


@pytest.mark.filterwarnings("ignore:protocol 'pooled' joins")
@pytest.mark.parametrize("name", SYSTEMS)
def test_trees_equal_the_pooled_growers(name):
    X, y = real_table("binary")
    tables = cut(with_gaps(with_categories(X)), 3)
    federated, pooled = fit_both(SYSTEMS[name], tables, y)
    assert_same_trees(federated, pooled)
    np.testing.assert_array_equal(federated.predict_proba(tables), pooled.predict_proba(tables))
    trees = pooled.parts_["pooled"].forest.trees
    # 9 leaves, deeper than a complete tree of 8
    assert [int((tree.left < 0).sum()) for tree in trees] == [9, 9]
    assert max(map(depth_of, trees)) > 3


@pytest.mark.filterwarnings("ignore:protocol 'pooled' joins")
@pytest.mark.parametrize(
    ("task", "parties", "options"),
    [
        ("multiclass", 2, {"max_leaves": 5}),
        ("regression", 5, {"max_leaves": 12, "max_depth": 4}),
        ("binary", 2, {"subsample": 0.6, "colsample_bytree": 0.6, "random_state": 3}),
        ("binary", 2, {"min_child_samples": 40}),
        ("binary", 2, {"max_leaves": 2}),
    ],
)
def test_every_task_and_sample_gives_the_pooled_trees(task, parties, options):
    X, y = real_table(task)
    tables = cut(X, parties)
    assert_same_trees(*fit_both(SYSTEMS["lattice"], tables, y, task, **options))


@pytest.mark.filterwarnings("ignore:protocol 'pooled' joins")
@pytest.mark.parametrize("name", unusual_tables())
def test_unusual_tables_give_the_pooled_trees(name):
    _, y = real_table("binary")
    federated, pooled = fit_both(SYSTEMS["lattice"], unusual_tables()[name], y)
    assert_same_trees(federated, pooled)
    assert len(pooled.parts_["pooled"].forest.trees[0].left) > 1


def test_with_as_many_leaves_as_levels_allow_trees_are_those_by_levels():
    X, y = real_table("binary")
    by_levels, by_gain = (
        treaty.GBDTClassifier(n_estimators=3, max_depth=4, max_leaves=leaves, n_jobs=1).fit(X, y)
        for leaves in (None, 16)
    )
    assert by_levels.parts_["pooled"].forest.trees == by_gain.parts_["pooled"].forest.trees


def test_nodes_that_stay_hidden_are_split_on_own_columns_alone():
    X, y = real_table("binary")
    tables = cut(X, 3)
    guarded = [
        treaty.GBDTClassifier(
            treaty.SecureBoost(encryption="lattice", allow_exact_sums=True, purity_guard=guard),
            **{**OPTIONS, "max_leaves": 16},
        ).fit(tables, y)
        # with 0.6 all children of a split are hidden once, and a node that waits is divided next
        for guard in (None, 0.99, 0.3, 0.6)
    ]
    assert_same_trees(guarded[0], guarded[1])
    active = next(iter(tables))
    sources = list(tables)
    for tree in (tree for model in guarded[2:] for tree in model.parts_[active].forest.trees):
        assert sources.index(active) in tree.source[tree.left >= 0]


def test_systems_that_cannot_say_why():
    X, y = real_table("binary")
    tables = cut(X, 2)
    for system, words in [
        (treaty.SecureBoost(sums="sealed"), "needs max_leaves to be left out, got 9"),
        (treaty.FedXGBoostSMM(reveal="argmax"), "needs max_leaves to be left out, got 9"),
        (treaty.FedXGBoostLDP(), "max_leaves grows trees by best gain, and the order of noisy gains would cost"),
        (treaty.FedXGBoostSMM(mode="paper", allow_insecure=True), "and mode='paper' is the published protocol"),
    ]:
        with pytest.raises(ConfigError, match=words):
            treaty.GBDTClassifier(system, **OPTIONS).fit(tables, y)
    with pytest.raises(ConfigError, match="users add up the sums of all slots of a level"):
        treaty.GBDTClassifier(treaty.FedXGB(), **OPTIONS).fit({"a": (X, y), "b": (X, y)})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_depth": 0}, "max_depth=0 sets no limit: name max_leaves"),
        ({"max_depth": 3, "max_leaves": 9}, "more than the 8 leaves that max_depth=3 allows"),
        ({"max_leaves": 1}, "max_leaves=1"),
        ({"max_leaves": 5000}, "max_leaves=5000"),
        ({"max_leaves": 3.5}, "max_leaves=3.5"),
        ({"max_depth": -1}, "max_depth=-1"),
    ],
)
def test_limits_that_are_none_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        treaty.GBDTClassifier(**options).fit([[0.0], [1.0]] * 30, [0, 1] * 30)


@pytest.mark.parametrize("name", ["num_leaves", "max_leaf_nodes"])
def test_names_of_other_libraries_lead_to_max_leaves(name):
    with pytest.raises(ConfigError, match="it is called 'max_leaves' here"):
        treaty.GBDTClassifier(**{name: 31})


def test_job_files_say_0_for_no_limit():
    given = converted({"max_depth": 0, "max_leaves": 9}, BoostingOptions, "[boosting]").checked(treaty.SecureBoost())
    assert (given.depth, given.rules_of(1.0, 1.0).max_leaves) == (8, 9)
    assert given.rules_of(1.0, 1.0).full_depth == 4


def test_sums_that_would_be_sealed_are_open_with_the_reason():
    X, y = real_table("binary")
    tables = cut(X, 2)
    model = treaty.GBDTClassifier(treaty.SecureBoost(), **OPTIONS).fit(tables, y)
    assert "sums are open: they cannot be sealed with max_leaves=9" in model.parts_[next(iter(tables))].choice


def test_what_is_recorded_of_sums_is_of_the_rows_that_it_names():
    X, y = real_table("binary")
    with recorded_views() as views:
        treaty.GBDTClassifier(SYSTEMS["lattice"], **OPTIONS).fit(cut(X, 2), y)
    seen = next(iter(views.values())).recording
    ((owner, nodes),) = seen.nodes.items()
    # of each pair both are known: two trees of 9 leaves
    assert len(nodes) == 2 * 15
    for node in nodes:
        first = node.sums[: seen.offsets[owner][1]]
        assert first[:, 2].sum() == len(node.rows)
        assert first[:, 0].sum() == node.grad[node.rows].sum()
