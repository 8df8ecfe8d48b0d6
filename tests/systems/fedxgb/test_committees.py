"""Committees of edge servers that compute on shares of users' rows: who is in which, what each has, what it costs."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from systems.fedxgb.playing import crowd_rows, laid_out, options_of, play_crowd, uniform
from treaty.crypto.sharing import additive_routing
from treaty.crypto.sharing.additive_routing import open_integers
from treaty.messaging.messages import view
from treaty.models.trees import predict_pooled
from treaty.systems.fedxgb import shares as of_committees
from treaty.systems.fedxgb.messages import LeafShares, SplitShares
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.roles import committee_of, committees_of, holders_of, links
from treaty.systems.fedxgb.secpred import HolderRows
from treaty.trees.slots import VALUE_BITS

SIZES = st.sampled_from([("additive", None), ("shamir", None), ("shamir", 3), ("shamir", 5)])


@given(SIZES, st.integers(3, 12))
def test_each_domain_has_one_committee_and_each_edge_server_as_many_as_members(form, edges):
    comparison, committee = form
    options, names = FedXGB(comparison=comparison, committee=committee), [f"edge{k}" for k in range(edges)]
    if edges < (committee or 3):
        return
    found, size = committees_of(options, names), options.committee_size(edges)
    assert sorted(domain for of in found for domain in of.domains) == sorted(names)
    assert all(len(set(of.edges)) == size for of in found)
    whole = (comparison, size) == ("shamir", edges)
    assert whole or all(of.domains == [of.edges[0]] for of in found)
    times = Counter(edge for of in found for edge in of.edges)
    assert set(times.values()) == {1 if whole else size}
    roles = laid_out([f"u{k}" for k in range(3 * edges)], edges)
    talks = links(roles, options)
    for user, edge in roles.edges.items():
        holders = holders_of(comparison, committee_of(options, names, edge).edges)
        assert edge in holders
        assert set(talks[user]) == {"authority", *holders}
        assert all((user in talks[name]) == (name in holders) for name in names)


@given(SIZES, st.integers(3, 12))
def test_committees_that_share_no_edge_server_play_at_the_same_time(form, edges):
    """Each edge server plays its committees in the common order: nobody waits in a circle, and few wait at all."""
    comparison, committee = form
    options, names = FedXGB(comparison=comparison, committee=committee), [f"edge{k}" for k in range(edges)]
    if edges < (committee or 3):
        return
    ready, last = dict.fromkeys(names, 0), 0
    for of in committees_of(options, names):
        ready |= dict.fromkeys(of.edges, 1 + max(ready[edge] for edge in of.edges))
        last = max(last, *ready.values())
    size = options.committee_size(edges)
    assert last <= 2 * size - 1


@pytest.fixture(scope="module")
def crowd():
    return crowd_rows(users=12, rows=160)


@pytest.mark.parametrize("own", [{}, {"comparison": "shamir", "committee": 3}], ids=str)
def test_trees_and_margins_do_not_depend_on_committees(crowd, own):
    parts, _, classes = crowd
    shown = play_crowd(parts, options_of(expose="model"), classes, edges=4)
    hidden = play_crowd(parts, options_of(**own), classes, edges=4)
    assert not hidden.failures
    for ours, theirs in zip(hidden.model.forest.trees, shown.model.forest.trees, strict=True):
        assert all(np.array_equal(getattr(ours, f), getattr(theirs, f)) for f in ours.__slots__)
    for name, rows in parts.items():
        assert np.array_equal(hidden.results[name].T, predict_pooled([hidden.model], [rows.table]))


@pytest.mark.parametrize("alike", [False, True], ids=["shared anew", "shared once"])
def test_an_edge_server_of_two_committees_has_nothing_of_splits_and_leaf_values(crowd, alike):
    """Its shares are of two sharings; were these one, it would have both of its shares (the planted fault)."""
    parts, _, classes = crowd
    share = additive_routing.share_integers

    def once(values, key):
        return share(values, key or bytes(32))

    with patch.object(of_committees.additive_routing, "share_integers", once if alike else share):
        crowded = play_crowd(parts, options_of(n_estimators=1), classes, edges=4, record_content=True)
    for edge in ("edge0", "edge1", "edge2", "edge3"):
        weights = [view(m.weights, np.uint64, m.weights.shape, peer="", what="")
                   for m in crowded.received(edge, SplitShares)]  # fmt: skip
        assert len(weights) == 2 * 2  # levels, committees
        for one, other in zip(weights[::2], weights[1::2], strict=True):
            # a weight of each slot's column is small, whatever the split
            opened = open_integers(np.stack([one, other]))
            assert bool(np.all(np.abs(opened) < 1 << 20)) == alike
        assert alike or uniform(*weights)
        values = [view(m.values, np.uint64, m.values.shape, peer="", what="")
                  for m in crowded.received(edge, LeafShares)]  # fmt: skip
        # and so is a leaf value of log odds, in the fixed point
        assert bool(np.all(np.abs(open_integers(np.stack(values))) < 11 << VALUE_BITS)) == alike


def test_a_user_of_whom_holders_have_different_numbers_of_rows_takes_no_part(crowd, monkeypatch):
    parts, _, classes = crowd
    take = HolderRows.take

    def one_more(self, users):
        found = take(self, users)
        return {name: rows + (name == "p0" and self._party.name == "edge1") for name, rows in found.items()}

    monkeypatch.setattr(HolderRows, "take", one_more)
    crowded = play_crowd(parts, options_of(n_estimators=1), classes, edges=4)
    assert "expected p0 among the users whose rows all holders of shares have" in str(crowded.failures.pop("p0"))
    assert not crowded.failures


def test_an_edge_servers_bytes_fall_with_the_number_of_edge_servers():
    """Between edge servers, and from users: the busiest of 4, and of 8, with the same users and rows."""
    parts, _, classes = crowd_rows(users=24, rows=560)
    busiest = []
    for edges in (4, 8):
        crowded = play_crowd(parts, options_of(n_estimators=1), classes, edges=edges)
        names = [f"edge{k}" for k in range(edges)]
        shared = ("SharedNumbers", "DealtCorrections", "RowShares")
        busiest.append(max(
            sum(entry.nbytes for entry in crowded.transcripts[name].entries if entry.step in shared) for name in names
        ))  # fmt: skip
    assert busiest[1] < 0.6 * busiest[0]
