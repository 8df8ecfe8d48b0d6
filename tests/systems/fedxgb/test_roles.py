"""FedXGB: what is grown, what is summed, and what becomes of it when users drop out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from marks import all_but_first_slow, slow
from systems.federboost_horizontal.playing import bins_told
from systems.fedxgb.playing import (
    STAGES,
    Crowded,
    crowd_rows,
    laid_out,
    once,
    one_large,
    options_of,
    play_crowd,
    role_input,
    roles_with,
    round_of,
    spoiling,
    user_program,
)
from tables import real_table, with_categories, with_gaps
from treaty.crypto.sharing.secure_aggregation import RoundVoid
from treaty.data.table import Table, to_table
from treaty.errors import ConfigError, TreatyError
from treaty.messaging.party import Party
from treaty.models.trees import predict_pooled, record_split
from treaty.systems.fedxgb.messages import Attendance, MaskKey
from treaty.systems.fedxgb.roles import domains
from treaty.systems.fedxgb.secboost import edge
from treaty.systems.horizontal.masked_sums import MaskedInput
from treaty.systems.system import LabelledRows
from treaty.trees.boosting import TreeSample
from treaty.trees.columns import ColumnSource, SplitSearch, grow_tree
from treaty.trees.ensemble import SplitTable, Tree

SHOWN = {"expose": "model"}
BOTH = pytest.mark.parametrize("shown", [SHOWN, {}], ids=["shown", "hidden"])


def grown_pooled(
    crowded: Crowded,
    whole: LabelledRows,
    options,
    rows_of: Callable[[int], NDArray[np.int32] | None] = lambda number: None,
) -> tuple[list[Tree], SplitTable]:
    """Grow the plain grower's trees on the crowd's bins, each on some of all rows; the others follow."""
    part, name = crowded.model, next(n for n in crowded.results if n.startswith("p"))
    bins, _ = bins_told(crowded, name, whole.table.schema)
    splits, objective = SplitTable(), part.forest.objective
    categorical = bins.schema.categorical
    source = ColumnSource(
        bins.transform(whole.table, 1), bins.offsets, categorical, lambda f, left: record_split(splits, bins, f, left)
    )
    rules = options.common.rules(objective)
    margins = np.full((objective.n_outputs, len(whole.y)), objective.base_margins[:, None])
    trees = []
    for number in range(1, options.common.n_estimators + 1):
        grad, hess, _ = objective.gradients(margins.T, whole.y, whole.weight, 1)
        for output in range(objective.n_outputs):
            sample = TreeSample(
                grad[output], hess[output], rows_of(number), np.arange(len(categorical), dtype=np.int32)
            )
            tree, rows = grow_tree(SplitSearch([source], sample, rules), sample, rules)
            tree.value[:] = np.rint(tree.value * 2.0**32) / 2.0**32  # as the crowd rounds them
            leaves = np.flatnonzero(tree.left < 0).astype(np.int32)
            rows.add_to(margins[output], leaves, tree.value[leaves])
            trees.append(tree)
    return trees, splits


def described(trees: list[Tree], splits: SplitTable) -> list:
    """Return trees without the order in which their nodes were made."""

    def node(tree: Tree, k: int):
        if tree.left[k] < 0:
            return float(tree.value[k])
        r, child = tree.record[k], tree.left[k]
        said = splits.feature[r], repr(float(splits.threshold[r])), splits.missing_left[r], splits.category_left[r]
        return (*said, node(tree, child), node(tree, child + 1))

    return [node(tree, 0) for tree in trees]


def assert_follow(crowded: Crowded, parts: dict[str, LabelledRows], names) -> None:
    """Users' margins are what the server's model says of their rows, bit for bit."""
    for name in names:
        predicted = predict_pooled([crowded.model], [parts[name].table])
        np.testing.assert_array_equal(crowded.results[name].T, predicted)


def assert_exact(crowded: Crowded) -> None:
    assert crowded.opened
    for sums in crowded.opened:
        np.testing.assert_array_equal(sums.total, crowded.expected(sums))


def parted(whole: LabelledRows, parts: dict[str, int]) -> dict[str, LabelledRows]:
    """Deal rows out in order, so many to each."""
    found, start = {}, 0
    for name, n in parts.items():
        rows = slice(start, start + n)
        weight = None if whole.weight is None else whole.weight[rows]
        table = Table(whole.table.schema, [c[rows] for c in whole.table.columns], n)
        found[name], start = LabelledRows(table, whole.y[rows], weight), start + n
    assert start == whole.table.n_rows
    return found


# ---------------------------------------------------------------- what is grown


@BOTH
@pytest.mark.parametrize("task", all_but_first_slow("binary", "multiclass", "regression"))
def test_trees_are_the_plain_growers_on_the_same_bins(task, shown):
    parts, whole, classes = crowd_rows(task, users=9)
    options = options_of(max_depth=3, **shown)
    crowded = play_crowd(parts, options, classes, edges=3, record_content=True)
    trees, splits = grown_pooled(crowded, whole, options)
    grown = described(crowded.model.forest.trees, crowded.model.splits)
    assert grown == described(trees, splits)
    assert any(isinstance(tree, tuple) for tree in grown)
    assert_exact(crowded)
    assert_follow(crowded, parts, parts)
    assert not crowded.failures


@pytest.mark.slow
@pytest.mark.parametrize(("edges", "shown"), [(2, SHOWN), (3, SHOWN), (3, {}), (5, {})])
def test_three_users_a_domain_with_gaps_and_categories_one_of_them_with_a_row_and_one_with_none(edges, shown):
    X, y = real_table("binary", rows=100)
    X = with_categories(with_gaps(X))
    X.iloc[:, 1] = 1.0
    whole = LabelledRows(to_table(X), y.astype(np.float64), np.linspace(0.2, 2.0, len(y)))
    names = [f"p{k}" for k in range(3 * edges)]
    sizes = dict.fromkeys(names, 98 // (len(names) - 2)) | {"p0": 1, "p1": 0}
    sizes["p2"] += 100 - sum(sizes.values())
    parts = parted(whole, sizes)
    options = options_of(max_depth=3, **shown)
    crowded = play_crowd(parts, options, [0, 1], edges=edges, record_content=True)
    trees, splits = grown_pooled(crowded, whole, options)
    assert described(crowded.model.forest.trees, crowded.model.splits) == described(trees, splits)
    assert_exact(crowded)
    assert_follow(crowded, parts, parts)


@pytest.mark.slow
@pytest.mark.parametrize("task", all_but_first_slow("binary", "multiclass", "regression"))
def test_hidden_model_is_the_shown_one(task):
    parts, _, classes = crowd_rows(task, users=9)
    models = []
    for shown in (SHOWN, {}):
        crowded = play_crowd(parts, options_of(random_state=3, colsample_bytree=0.5, **shown), classes, edges=3)
        models.append((crowded.model, [crowded.results[name] for name in parts]))
    (one, ours), (other, theirs) = models
    assert described(one.forest.trees, one.splits) == described(other.forest.trees, other.splits)
    for mine, yours in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, yours)


@pytest.mark.slow
def test_columns_and_rows_are_sampled():
    parts, whole, classes = crowd_rows(users=6)
    told = {}
    for name, chosen in {
        "all": {}, "columns": {"feature_sample": 2}, "rows": {"subsample": 0.5}, "rows again": {"subsample": 0.5}
    }.items():  # fmt: skip
        crowded = play_crowd(parts, options_of(random_state=1, **SHOWN, **chosen), classes)
        assert_exact(crowded)
        assert_follow(crowded, parts, parts)
        told[name] = described(crowded.model.forest.trees, crowded.model.splits)
        first = crowded.of_tree(1)[0]
        if chosen.get("subsample"):
            sampled = sum(max(1, round(0.5 * parts[p].table.n_rows)) for p in parts)
            assert max(tree.count[0] for tree in crowded.model.forest.trees) == sampled
        if name == "columns":
            assert len(first.total) < 2 * 2 * 7 + 1 < len(whole.table.schema.names) * 2 * 6
    assert told["all"] != told["columns"] != told["rows"] == told["rows again"]


@pytest.mark.parametrize(
    ("edges", "shown", "words"), [(1, SHOWN, "expected 2 edge servers"), (2, {}, "expected 3 edge servers")]
)
def test_too_few_edge_servers_are_refused(edges, shown, words):
    parts, _, classes = crowd_rows(users=6)
    with pytest.raises(ConfigError, match=words):
        play_crowd(parts, options_of(**shown), classes, edges=edges)


def test_domain_of_two_is_refused():
    parts, _, classes = crowd_rows(users=6)
    layout = roles_with({"edge0": ["p0", "p1"], "edge1": ["p2", "p3", "p4", "p5"]})
    with pytest.raises(RoundVoid, match="expected 3 users or more to come to the domain of edge0, got 2"):
        play_crowd(parts, options_of(**SHOWN), classes, layout=layout)


# ---------------------------------------------------------------- users that drop out

WHEN = [(0, 1), (0, 3), (1, 2)]  # tree (0: the search for bins), and the time the stage is reached in it


@pytest.fixture(scope="module")
def crowd():
    parts, whole, classes = crowd_rows(users=12, rows=120)
    return parts, whole, classes, one_large(list(parts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "number", "at"),
    [
        (s, number, at) if k == 0 else slow(s, number, at)
        for k, (s, number, at) in enumerate(
            (s, number, at) for s in STAGES for number, at in WHEN if number or s not in ("call", "prediction")
        )
    ],
)
def test_sums_are_the_survivors_whenever_users_drop_out(stage, number, at, crowd):
    """Who drops stays out until the tree ends, and is there again in the next."""
    at = 1 if stage == "call" else at  # a tree begins once
    parts, _, classes, layout = crowd
    leaves = {"p3": once(number, stage, at)}
    crowded = play_crowd(parts, options_of(max_depth=3, **SHOWN), classes, layout=layout, leaves=leaves)
    assert not crowded.failures
    assert_exact(crowded)
    there = ["p3" in sums.cohort for sums in crowded.of_tree(number)]
    contributed = at - 1 + (stage in ("masked", "prediction"))  # its vector came before it went
    assert sum(there) == contributed
    assert there == sorted(there, reverse=True)  # once out, out
    assert all(set(domains(layout)["edge1"]) <= set(sums.cohort) for sums in crowded.opened)
    later = set.intersection(*(set(sums.cohort) for sums in crowded.of_tree(number + 1)))
    not_counted = {"p3"} if (number, at) == (0, 1) and stage in ("setup", "shared") else set()
    assert later == set(parts) - not_counted  # whose rows are not in the first sum, which bounds all others
    assert_follow(crowded, parts, parts)


@pytest.mark.slow
def test_tree_is_the_plain_growers_on_the_rows_of_those_who_came(crowd):
    """Users who miss a tree follow it, and their gradients in the next are those of everybody else."""
    parts, whole, classes, layout = crowd
    leaves = {name: (lambda n, s: n == 1 and s == "call") for name in ("p0", "p5")}
    options = options_of(n_estimators=3, **SHOWN)
    crowded = play_crowd(parts, options, classes, layout=layout, leaves=leaves, record_content=True)
    came = {number: set(crowded.of_tree(number)[0].cohort) for number in (1, 2, 3)}
    assert all(set(sums.cohort) == came[n] for n in came for sums in crowded.of_tree(n))
    assert came[2] == came[3] == set(parts) > came[1]
    owner = np.repeat(list(parts), [rows.table.n_rows for rows in parts.values()])
    trees, splits = grown_pooled(
        crowded, whole, options, lambda n: np.flatnonzero(np.isin(owner, list(came[n]))).astype(np.int32)
    )
    assert described(crowded.model.forest.trees, crowded.model.splits) == described(trees, splits)
    assert_follow(crowded, parts, parts)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("depth", all_but_first_slow(1, 2))
def test_who_drops_out_as_its_rows_go_down_is_there_in_the_next_tree(shown, depth):
    """Also after the last level, when nothing more is summed in the tree."""
    parts, _, classes = crowd_rows(users=9, rows=120)
    for time_ in range(1, depth + 1 + (not shown)):
        leaves = {"p0": once(1, "prediction", time_)}
        options = options_of(max_depth=depth, min_child_samples=1, **shown)
        crowded = play_crowd(parts, options, classes, edges=3, leaves=leaves)
        assert not crowded.failures
        assert all(set(sums.cohort) == set(parts) for sums in crowded.of_tree(2))
        assert_follow(crowded, parts, parts)


@pytest.mark.slow
def test_who_is_not_chosen_may_drop_out_and_is_there_in_the_next_tree():
    parts, _, classes = crowd_rows(users=12)
    options = options_of(n_estimators=4, max_users=3, **SHOWN)

    def unless_chosen():
        chosen = []

        def leaves(number, stage):
            if (number, stage) == (1, "setup"):
                chosen.append(stage)
            return (number, stage) == (1, "prediction") and not chosen

        return leaves

    crowded = play_crowd(parts, options, classes, leaves={name: unless_chosen() for name in parts})
    assert not crowded.failures
    assert [len(sums.cohort) for sums in crowded.of_tree(2)] == [6, 6]
    assert_follow(crowded, parts, parts)


@pytest.mark.slow
@BOTH
def test_domain_without_a_whole_group_sits_out_and_the_others_go_on(shown):
    parts, _, classes = crowd_rows(users=9)
    layout = laid_out(list(parts), 3)
    out = domains(layout)["edge1"]
    leaves = {out[0]: once(1, "shared")}
    crowded = play_crowd(parts, options_of(**shown), classes, layout=layout, leaves=leaves)
    assert not crowded.failures
    assert_exact(crowded)
    assert all(set(sums.cohort) == set(parts) - set(out) for sums in crowded.of_tree(1))
    assert all(set(sums.cohort) == set(parts) for sums in crowded.of_tree(2))
    assert_follow(crowded, parts, parts)


def test_users_may_be_lost_one_after_another_in_one_sum():
    """At each stage another; whoever is left begins the sum again, in whole groups, with as few as three users."""
    parts, _, classes = crowd_rows(users=21, rows=210)
    layout = roles_with({"edge0": list(parts)[:15], "edge1": list(parts)[15:]})
    stages = dict(zip(("p0", "p1", "p2", "p3"), ("setup", "shared", "masked", "shared"), strict=True))
    leaves = {name: once(2, stage) for name, stage in stages.items()}
    crowded = play_crowd(parts, options_of(n_estimators=3, **SHOWN), classes, layout=layout, leaves=leaves)
    assert not crowded.failures
    assert_exact(crowded)
    for sums in crowded.of_tree(2):
        of_domain = set(sums.cohort) & set(domains(layout)["edge0"])
        assert len(of_domain) >= 3
        assert not of_domain & {"p0", "p1", "p3"}
    assert all(set(sums.cohort) == set(parts) for sums in crowded.of_tree(3))
    assert_follow(crowded, parts, parts)


@pytest.mark.parametrize(
    ("stage", "shown"), [("setup", SHOWN), slow("call", SHOWN), slow("shared", {}), slow("masked", {})]
)
def test_a_round_without_enough_users_begins_again(stage, shown):
    parts, _, classes = crowd_rows(users=9)
    leaves = {name: (lambda n, s: n == 1 and s == stage) for name in parts if name != "p5"}
    crowded = play_crowd(parts, options_of(**shown), classes, edges=3, leaves=leaves)
    assert not crowded.failures
    assert [set(sums.cohort) for sums in crowded.of_tree(2)] == [set(parts)] * 2  # the first, begun again
    assert len(crowded.model.forest.trees) == 2
    assert_follow(crowded, parts, parts)


@pytest.mark.parametrize("shown", all_but_first_slow(SHOWN, {}))
def test_a_tree_ends_at_the_level_at_which_nobody_is_left(shown):
    parts, _, classes = crowd_rows(users=9, rows=180)
    leaves = {name: (lambda n, s: n == 1 and s == "prediction") for name in parts}
    crowded = play_crowd(parts, options_of(max_depth=3, **shown), classes, edges=3, leaves=leaves)
    assert not crowded.failures
    first, second = crowded.model.forest.trees
    assert len(first.left) == 3  # a root and two leaves, worth what the root's sums say
    assert first.count[0] == first.count[1:].sum() == 180
    assert len(second.left) > 3
    assert_follow(crowded, parts, parts)


@pytest.mark.parametrize("shown", all_but_first_slow(SHOWN, {}))
def test_training_ends_with_the_model_so_far_where_users_stay_away(shown, caplog):
    parts, _, classes = crowd_rows(users=9)
    leaves = {name: (lambda n, s: n > 2 and s == "call") for name in parts if name != "p5"}
    with caplog.at_level(logging.WARNING, "treaty.systems.fedxgb.conversation"):
        crowded = play_crowd(parts, options_of(n_estimators=5, **shown), classes, edges=3, leaves=leaves)
    assert not crowded.failures
    assert len(crowded.model.forest.trees) == 2
    assert_follow(crowded, parts, parts)
    assert [
        record.getMessage() for record in caplog.records if record.name == "treaty.systems.fedxgb.conversation"
    ] == [
        "training ends after 2 of 5 rounds: no domain has enough users left to open a sum: one of its groups, of three "
        "users or a few more, must be there"
    ]


def test_a_job_whose_users_all_stay_away_from_the_first_tree_says_so():
    parts, _, classes = crowd_rows(users=6)
    leaves = {name: (lambda n, s: n > 0 and s == "call") for name in parts if name != "p5"}
    told: dict[str, str] = {}

    def edge1(party: Party) -> None:
        try:
            edge(role_input(party, options_of(**SHOWN), laid_out(list(parts))))
        except TreatyError as error:
            told[party.name] = str(error)
            raise

    with pytest.raises(RoundVoid, match=r"no domain has enough users left .* one of its groups"):
        play_crowd(parts, options_of(**SHOWN), classes, leaves=leaves, roles={"edge1": edge1})
    assert "server stopped the job: no domain has enough users left" in told["edge1"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MaskKey, MaskedInput])
def test_late_message_is_dropped_and_the_round_goes_on(kind, crowd):
    parts, _, classes, layout = crowd
    options = options_of(n_estimators=3, **SHOWN)
    late = []

    def slow(party, message):
        if not late:
            late.append(1)
            time.sleep(4.0)
        return message

    roles = {"p3": spoiling(user_program(parts, options, classes, layout, "p3"), kind, slow)}
    crowded = play_crowd(parts, options, classes, layout=layout, roles=roles, patience=2.5)
    assert not crowded.failures
    assert_exact(crowded)
    assert not any("p3" in sums.cohort for sums in crowded.of_tree(1))
    assert set(crowded.of_tree(2)[-1].cohort) == set(parts)
    assert_follow(crowded, parts, parts)


@pytest.mark.slow
def test_who_was_silent_for_many_trees_is_back_when_it_answers(crowd):
    """It is waited for in three of them alone."""
    parts, _, classes, layout = crowd
    options = options_of(n_estimators=12, max_depth=1, **SHOWN)

    def silent(party, message):
        return None if 1 < party.round <= round_of(6) else message

    roles = {"p3": spoiling(user_program(parts, options, classes, layout, "p3"), Attendance, silent, tree=None)}
    crowded = play_crowd(parts, options, classes, layout=layout, roles=roles, patience=1.5)
    assert not crowded.failures
    assert_exact(crowded)
    there = ["p3" in crowded.of_tree(tree)[0].cohort for tree in range(1, 13)]
    assert not any(there[:6])
    assert any(there[6:])
    assert_follow(crowded, parts, parts)


# ---------------------------------------------------------------- who misses the search for bins


def missing_the_search(parts, classes):
    """Three of a domain, so that its cohort may be everybody later."""
    leaves = {name: once(0, "setup") for name in ("p1", "p3", "p5")}
    options = options_of(min_child_samples=1, **SHOWN)
    return play_crowd(parts, options, classes, layout=one_large(list(parts)), leaves=leaves)


@pytest.mark.slow
def test_who_is_not_in_the_first_sum_takes_part_in_no_tree_and_follows_the_model():
    """Sums are packed by the rows that the first sum has: with more of them, counts would run over."""
    parts, whole, classes = crowd_rows(users=12, rows=128)
    for rows in parts.values():
        rows.table.columns[0][:] = 1.0
    crowded = missing_the_search(parts, classes)
    assert not crowded.failures
    assert_exact(crowded)
    there = set(parts) - {"p1", "p3", "p5"}
    assert all(set(sums.cohort) == there for sums in crowded.opened)
    counted = sum(parts[name].table.n_rows for name in there)
    assert counted.bit_length() < whole.table.n_rows.bit_length()
    assert [tree.count[0] for tree in crowded.model.forest.trees] == [counted] * 2
    assert_follow(crowded, parts, parts)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["larger targets", "gaps"])
def test_who_missed_the_search_with_what_nobody_else_has_follows_the_model(what):
    parts, _, classes = crowd_rows("regression", users=12, rows=128)
    if what == "gaps":
        parts["p3"].table.columns[2][:] = np.nan
    else:
        parts["p3"].y[:] = 1e6
    crowded = missing_the_search(parts, classes)
    assert not crowded.failures
    assert_exact(crowded)
    assert_follow(crowded, parts, parts)
