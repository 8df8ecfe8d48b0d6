"""FedXGB with thresholds alone hidden (`expose="paper"`): the same trees, and who sees what on the way."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest

from systems.fedxgb.playing import (
    Crowded,
    crowd_rows,
    laid_out,
    options_of,
    play_crowd,
    uniform,
)
from tables import real_table, with_categories
from treaty.crypto.sharing.shamir_routing import share_integers
from treaty.data.table import Table, to_table
from treaty.errors import ConfigError, CryptoError, PeerLost
from treaty.messaging.messages import Array, view
from treaty.models.trees import ModelPart, predict_pooled
from treaty.systems.fedxgb.messages import Values
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.paper import (
    ComparedRows,
    HiddenThresholds,
    SeenRows,
    ShownSplits,
    Sides,
)
from treaty.systems.fedxgb.pieces import ComparedShares
from treaty.systems.options import converted
from treaty.systems.system import LabelledRows

pytestmark = pytest.mark.slow

USERS = 9


def shown_of(**chosen: object):
    return options_of(expose="paper", allow_insecure=True, **chosen)


def gapped(task: str = "binary", users: int = USERS) -> tuple[dict[str, LabelledRows], list | None]:
    """Rows of users, a value in three missing at random, more often in one class."""
    parts, _, classes = crowd_rows(task, users, rows=150)
    rng = np.random.default_rng(3)
    for name, part in parts.items():
        missing = rng.random((len(part.table.columns), len(part.y))) < 0.2 + 0.3 * (part.y == 1)
        columns = [np.where(gone, np.float32(np.nan), c) for c, gone in zip(part.table.columns, missing, strict=True)]
        parts[name] = replace(part, table=Table(part.table.schema, columns, part.table.n_rows))
    return parts, classes


@cache
def small() -> tuple[dict[str, LabelledRows], Crowded]:
    """Return a training whose messages are recorded."""
    parts, classes = gapped()
    return parts, play_crowd(parts, shown_of(max_depth=3), classes, edges=3, record_content=True)


def same_model(one: ModelPart, other: ModelPart) -> bool:
    a, b = one.splits, other.splits
    return (a.feature, a.threshold, a.missing_left) == (
        b.feature,
        b.threshold,
        b.missing_left,
    ) and one.forest.trees == other.forest.trees


def assert_margins(crowded: Crowded, parts: dict[str, LabelledRows], names: list[str]) -> None:
    for name in names:
        assert np.array_equal(crowded.results[name].T, predict_pooled([crowded.model], [parts[name].table])), name


# ---------------------------------------------------------------- right


@pytest.mark.parametrize(
    ("task", "edges", "other"),
    [("binary", 3, "nothing"), ("multiclass", 3, "model"), ("regression", 5, "model")],
)
def test_trees_and_margins_are_those_of_other_ways(task, edges, other):
    parts, classes = gapped(task, 3 * edges)
    paper, plain = (
        play_crowd(parts, options, classes, edges=edges) for options in (shown_of(), options_of(expose=other))
    )
    assert same_model(paper.model, plain.model)
    assert any(len(tree.left) > 3 for tree in paper.model.forest.trees)
    for name in parts:
        assert np.array_equal(paper.results[name], plain.results[name])


def test_missing_values_go_both_ways():
    """So that the test above tells where they go."""
    _, crowded = small()
    assert set(crowded.model.splits.missing_left) == {True, False}


# ---------------------------------------------------------------- users that vanish or lie


@pytest.mark.parametrize("stage", ["masked", "prediction"])
def test_rows_of_a_user_that_misses_sums_follow_the_trees(stage):
    parts, classes = gapped(users=12)
    layout = laid_out(list(parts), 3)
    leaves = {"p4": lambda number, at: number == 1 and at == stage}
    crowded = play_crowd(parts, shown_of(n_estimators=3), classes, layout=layout, leaves=leaves)
    assert not crowded.failures
    assert_margins(crowded, parts, list(parts))


def wrong(how: str):
    """Replace `ComparedRows.compare` by what goes wrong at p4, from the second level on."""
    real = ComparedRows.compare

    def compare(self: ComparedRows, told: ShownSplits, slots, n_slots: int) -> None:
        if self._party.name != "p4" or n_slots == 1:
            return real(self, told, slots, n_slots)
        if how == "dies":
            self._party.channel.close()
            raise PeerLost("p4", "p4 is gone")
        rows = slots.shape[1] + (how == "sends another number of rows")
        made = list(share_integers(self._setting, np.zeros((len(slots), rows), np.int64)))
        if how == "sends one edge server more rows":
            made[0] = np.concatenate([made[0], made[0]], axis=1)
        elif how == "sends numbers beyond the field":
            made = [np.full_like(of, 2**64 - 1) for of in made]
        for of, edge in zip(made, self._edges, strict=True):
            if how == "sends other messages":
                self._party.send(edge, Sides(Array.of(np.zeros(1, np.bool_))))
            elif how != "sends one edge server nothing" or edge != "edge0":
                self._party.send(edge, ComparedShares(Array.of(of), of.shape[1]))
        return None

    return patch.object(ComparedRows, "compare", compare)


@pytest.mark.parametrize(
    "how",
    [
        "dies",
        "sends other messages",
        "sends another number of rows",
        "sends one edge server more rows",
        "sends one edge server nothing",
        "sends numbers beyond the field",
    ],
)
def test_others_go_on_without_a_user_that(how):
    parts, classes = gapped(users=12)
    with wrong(how):
        patience = 3.0 if how.endswith("nothing") else 20.0
        crowded = play_crowd(parts, shown_of(n_estimators=1), classes, edges=3, patience=patience)
    assert set(crowded.failures) == {"p4"}
    assert_margins(crowded, parts, [name for name in parts if name != "p4"])


def test_a_user_that_shares_no_bins_ends_the_training():
    parts, classes = gapped()
    real = ComparedRows.compare

    def compare(self: ComparedRows, told: ShownSplits, slots, n_slots: int) -> None:
        if self._party.name == "p4":
            with patch.object(type(self._layout), "encode_shown", lambda *_: np.full(slots.shape[1], 10**6)):
                return real(self, told, slots, n_slots)
        return real(self, told, slots, n_slots)

    with patch.object(ComparedRows, "compare", compare), pytest.raises(CryptoError, match="bits of 0 or 1"):
        play_crowd(parts, shown_of(), classes, edges=3)


def test_a_lost_edge_server_ends_the_training():
    parts, classes = gapped()
    real = SeenRows.route

    def route(self: SeenRows, hidden: HiddenThresholds):
        if self._party.name == "edge1":
            self._party.channel.close()
            raise PeerLost("edge1", "edge1 is gone")
        return real(self, hidden)

    with patch.object(SeenRows, "route", route), pytest.raises(PeerLost, match="edge1"):
        play_crowd(parts, shown_of(), classes, edges=3)


# ---------------------------------------------------------------- what is told


def test_users_are_told_columns_and_leaf_values_but_no_threshold():
    parts, crowded = small()
    forest, splits = crowded.model.forest, crowded.model.splits
    for name in parts:
        steps = crowded.steps(name)
        assert {"ShownSplits", "Sides", "Values"} <= steps
        assert not steps & {
            "KnownSplits",
            "HiddenThresholds",
            "SharedNumbers",
            "RowCounts",
            "SideShares",
            "ValueShares",
        }
        told = [
            view(m.features, np.int32, m.features.shape, peer="x", what="") for m in crowded.received(name, ShownSplits)
        ]
        assert sorted(f for of in told for f in of.ravel().tolist() if f >= 0) == sorted(splits.feature)
        values = [view(m.values, np.float64, (1, 8), peer="x", what="") for m in crowded.received(name, Values)]
        leaves = [tree.value[tree.left < 0] for tree in forest.trees]
        assert all(set(of) <= set(found[0]) for of, found in zip(leaves, values, strict=True))


def test_edge_servers_see_comparisons_and_shares_of_what_is_compared():
    parts, crowded = small()
    for edge in ("edge0", "edge1", "edge2"):
        assert not crowded.steps(edge) & {"KnownSplits", "RowShares", "SplitShares"}
        compared = crowded.received(edge, ComparedShares)
        assert len(compared) == 2 * 3 * USERS
        values = [view(m.shares, np.uint64, m.shares.shape, peer="x", what="")[..., 0] for m in compared]
        assert uniform(*values)
        hidden = [
            view(m.thresholds, np.uint64, m.thresholds.shape, peer="x", what="")[..., 0]
            for m in crowded.received(edge, HiddenThresholds)
        ]
        assert uniform(*hidden)
        assert [of.shape for of in hidden] == [(1, 1), (1, 2), (1, 4)] * 2
    sides = [
        view(m.left, np.bool_, m.left.shape, peer="x", what="") for name in parts for m in crowded.received(name, Sides)
    ]
    assert 0.0 < np.concatenate([of.ravel() for of in sides]).mean() < 1.0  # in the clear


# ---------------------------------------------------------------- refused


def test_it_needs_consent_that_says_to_what():
    with pytest.raises(ConfigError, match=r"bisection with rows made up.*every comparison.*allow_insecure=True"):
        options_of(expose="paper")
    with pytest.raises(ConfigError, match="nothing, paper, model"):
        converted({"expose": "all"}, FedXGB, "FedXGB")


def test_categories_are_refused():
    X, y = real_table("binary", rows=90)
    table, schema = with_categories(X), to_table(with_categories(X)).schema
    parts = {
        f"p{k}": LabelledRows(to_table(table.iloc[k::USERS], schema=schema), y[k::USERS].astype(float))
        for k in range(USERS)
    }
    with pytest.raises(ConfigError, match=r'numeric columns under expose="paper".*mean radius'):
        play_crowd(parts, shown_of(), [0, 1], edges=3)


def test_two_edge_servers_are_refused():
    parts, classes = gapped()
    with pytest.raises(ConfigError, match="3 edge servers or more, got 2"):
        play_crowd(parts, shown_of(), classes, edges=2)
