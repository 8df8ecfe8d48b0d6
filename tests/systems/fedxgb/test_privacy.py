"""FedXGB: what reaches users, edge servers and the server, and what a lying edge server gets."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from marks import all_but_first_slow
from systems.fedxgb.playing import crowd_rows, laid_out, options_of, play_crowd, role_input, uniform
from systems.fedxgb.test_roles import SHOWN, assert_exact, assert_follow
from treaty.crypto.sharing import shamir_routing
from treaty.crypto.sharing.shamir_routing import share_integers
from treaty.data.table import Table
from treaty.messaging.messages import Array
from treaty.systems.fedxgb import secfind as crowd_users
from treaty.systems.fedxgb.messages import KnownSplits, RoundStart, SideShares, SplitShares, Values, ValueShares
from treaty.systems.fedxgb.pieces import RowShares
from treaty.systems.fedxgb.roles import domains
from treaty.systems.fedxgb.secboost import edge
from treaty.systems.horizontal.masked_sums import MaskedInput
from treaty.systems.horizontal.members import TranscriptDigest
from treaty.systems.horizontal.quantiles import ProbeRequest

TO_USERS = {
    "KeyCertificate", "Task", "Domain", "Cohort", "Call", "Count", "LabelUnits", "TrainingStart", "ProbeRequest",
    "CommonBins", "RowSummary", "RoundStart", "MaskKeys", "PassedShares", "Survivors", "Agreements", "TrainingEnd",
}  # fmt: skip


def numbers(array: Array) -> np.ndarray:
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


def two_inputs():
    """A crowd's rows, and others of the same shape."""
    parts, _, classes = crowd_rows(users=9, rows=120)
    other = {}
    for name, rows in parts.items():
        columns = [np.zeros_like(column) for column in rows.table.columns]
        table = Table(rows.table.schema, columns, rows.table.n_rows)
        other[name] = replace(rows, table=table, y=np.zeros_like(rows.y))
    return parts, other, classes


# ---------------------------------------------------------------- users


@pytest.mark.slow
def test_users_of_a_hidden_model_are_told_the_way_and_the_value_of_their_own_rows_alone():
    parts, _, classes = crowd_rows("multiclass", users=9, rows=120)
    options = options_of(max_depth=3, comparison="shamir")
    crowded = play_crowd(parts, options, classes, edges=3, record_content=True)
    assert_follow(crowded, parts, parts)
    for name, rows in parts.items():
        assert crowded.steps(name) == TO_USERS | {"RowOwners", "SideShares", "ValueShares"}
        for kind, each in ((SideShares, options.common.max_depth), (ValueShares, 1)):
            told = crowded.received(name, kind)
            assert len(told) == 3 * each * options.common.n_estimators
            assert {m.shares.shape for m in told} == {(len(classes), rows.table.n_rows, 2)}
            assert uniform(*(numbers(m.shares) for m in told))


@pytest.mark.slow
def test_model_reaches_users_where_it_is_shown_and_edge_servers_never_where_it_is_not():
    """What the other tests look for is there to be found."""
    parts, _, classes = crowd_rows(users=9, rows=120)
    shown = play_crowd(parts, options_of(**SHOWN), classes, edges=3, record_content=True)
    assert shown.steps("p0") == TO_USERS | {"KnownSplits", "Values"}
    assert shown.received("p0", KnownSplits)
    values = {v for tree in shown.model.forest.trees for v in tree.value[tree.left < 0].tolist()}
    assert values <= {v for m in shown.received("p0", Values) for v in numbers(m.values).ravel().tolist()}
    hidden = play_crowd(parts, options_of(), classes, edges=3, record_content=True)
    for k in range(3):
        assert not {"KnownSplits", "Values"} & hidden.steps(f"edge{k}")
        assert uniform(
            *(numbers(a) for m in hidden.received(f"edge{k}", SplitShares) for a in (m.weights, m.thresholds))
        )


@pytest.mark.slow
def test_messages_of_a_hidden_model_tell_nothing_of_the_shape_of_its_trees():
    """Trees of full depth, and of a leaf alone: as many messages of the same sizes reach users and edge servers."""
    parts, _, classes = crowd_rows(users=9, rows=120)
    seen = []
    for loss in (0.0, 1e6):
        crowded = play_crowd(parts, options_of(max_depth=3, min_split_loss=loss), classes, edges=3)
        depths = {len(tree.left) for tree in crowded.model.forest.trees}
        assert (depths == {1}) == (loss > 0.0)
        kinds = (
            "RoundStart", "Call", "SplitShares", "LeafShares", "SharedNumbers", "SideShares", "ValueShares", "Sum"
        )  # fmt: skip
        # the length of the options' text differs, not that of what is told of trees
        seen.append({
            name: Counter((e.step, e.nbytes) for e in crowded.transcripts[name].entries if e.step in kinds and e.round)
            for name in (*parts, "edge0", "edge1", "edge2")
        })  # fmt: skip
    assert seen[0] == seen[1]


# ---------------------------------------------------------------- edge servers


@pytest.mark.slow
@pytest.mark.parametrize(("edges", "colluding"), [(3, 1), (5, 2)])
def test_shares_of_rows_are_uniform_to_as_many_edge_servers_as_may_collude(edges, colluding, monkeypatch):
    parts, other, classes = two_inputs()
    users = 3 * edges
    if users > len(parts):
        parts = {f"p{k}": parts[f"p{k % 9}"] for k in range(users)}
        other = {f"p{k}": other[f"p{k % 9}"] for k in range(users)}

    def received(inputs):
        options = options_of(n_estimators=1, max_depth=1, comparison="shamir")
        others = ["server", *(f"edge{k}" for k in range(edges))]
        crowded = play_crowd(inputs, options, classes, edges=edges, record_content=True, tolerate=others)
        found = []
        for k in range(colluding):
            of_user = {
                e.peer: numbers(e.message(RowShares).shares)
                for e in crowded.transcripts[f"edge{k}"].entries
                if e.direction == "received" and e.step == "RowShares"
            }
            found.append(np.concatenate([of_user[name].ravel() for name in inputs]))
        return found

    for inputs in (parts, other):
        found = received(inputs)
        assert uniform(*found)
        assert colluding == 1 or uniform(found[0] ^ found[1])

    def planted(setting, values, *drawn, **options):
        shares = share_integers(setting, values, *drawn, **options)
        for share in shares:
            share[..., 0], share[..., 1] = values & 1, 0
        return shares

    monkeypatch.setattr(shamir_routing, "share_integers", planted)
    assert not uniform(*received(other))


@pytest.mark.parametrize("shown", all_but_first_slow({}, SHOWN), ids=["hidden", "shown"])
def test_what_edge_servers_receive_and_open_is_uniform_and_a_planted_leak_is_not(shown, monkeypatch):
    parts, other, classes = two_inputs()
    options = options_of(n_estimators=1, **shown)
    for inputs in (parts, other):
        crowded = play_crowd(inputs, options, classes, edges=3, record_content=True)
        assert_exact(crowded)
        for k in range(3):
            assert uniform(*(numbers(m.values) for m in crowded.received(f"edge{k}", MaskedInput)))
        assert uniform(*(total.view(np.uint64) for total in crowded.of_domains))
        assert uniform(*(numbers(m.values) for m in crowded.received("server", MaskedInput)))
    monkeypatch.setattr(crowd_users, "add_masks", lambda values, added, subtracted: None)  # the server's mask
    leaking = play_crowd(other, options, classes, edges=3, tolerate=["server", "edge0", "edge1", "edge2"])
    assert not uniform(*(total.view(np.uint64) for total in leaking.of_domains[:3]))


# ---------------------------------------------------------------- edge servers that tell users something else


def altered(told):
    """Return another probe, other columns, another way at a split."""
    match told:
        case ProbeRequest() if told.keys.data:
            keys = numbers(told.keys).copy()
            keys[-1] ^= 1
            return msgspec.structs.replace(told, keys=Array.of(keys))
        case RoundStart():
            return RoundStart(Array.of(np.sort((numbers(told.columns) + 1) % 12)), told.last_columns)
        case KnownSplits():
            return KnownSplits(told.features, Array.of(numbers(told.left_bins) ^ 255))
    return told


def lying(options, layout, kind, to, monkeypatch):
    """Return edge1's program, which tells the users `to` (None: all, and goes by it itself) something else."""
    truths, update = {}, TranscriptDigest.update
    # among edge servers it says what it was told, so that their masks cancel
    monkeypatch.setattr(
        TranscriptDigest, "update", lambda self, told: update(self, truths.get(id(told), (told, told))[1])
    )

    def run(party):
        receive, send_each = party.receive, party.send_each

        def received(frm, *kinds, **how):
            told = receive(frm, *kinds, **how)
            if to is None and frm == "server" and isinstance(told, kind):
                lie = altered(told)
                truths[id(lie)] = (lie, told)
                return lie
            return told

        def sent_each(messages, **how):
            return send_each({
                name: altered(m) if to is not None and name in to and isinstance(m, kind) else m
                for name, m in messages.items()
            }, **how)  # fmt: skip

        party.receive, party.send_each = received, sent_each
        edge(role_input(party, options, layout))

    return run


LIES = pytest.mark.parametrize("kind", all_but_first_slow(RoundStart, ProbeRequest, KnownSplits))


@LIES
def test_edge_server_that_tells_its_users_something_else_spoils_the_sum_and_learns_nothing(kind, monkeypatch):
    parts, _, classes = crowd_rows(users=6)
    layout, options = laid_out(list(parts)), options_of(n_estimators=1, feature_sample=2, **SHOWN)
    roles = {"edge1": lying(options, layout, kind, None, monkeypatch)}
    crowded = play_crowd(parts, options, classes, layout=layout, roles=roles, tolerate=["server", "edge0", "edge1"])
    spoilt = [s for s in crowded.opened if s.number in crowded.given and not matches(crowded, s)]
    assert spoilt
    assert any(uniform(s.total.view(np.uint64)) for s in spoilt if len(s.total) > 5)
    honest = crowded.opened[: crowded.opened.index(spoilt[0])]
    assert honest  # until it lies
    assert uniform(*(total.view(np.uint64) for total in crowded.of_domains if total.any()))


def matches(crowded, sums) -> bool:
    given = [crowded.given[sums.number][name] for name in sums.cohort]
    return all(len(g) == len(sums.total) for g in given) and np.array_equal(sums.total, np.sum(given, axis=0))


@pytest.mark.slow
@LIES
def test_edge_server_that_tells_one_user_something_else_opens_nothing(kind, monkeypatch, caplog):
    """Keys are tagged for what their owner was told, and nobody goes on with keys for something else."""
    parts, _, classes = crowd_rows(users=6)
    layout, options = laid_out(list(parts)), options_of(n_estimators=1, feature_sample=2, **SHOWN)
    roles = {"edge1": lying(options, layout, kind, {"p1"}, monkeypatch)}
    crowded = play_crowd(parts, options, classes, layout=layout, roles=roles)
    domain = set(domains(layout)["edge1"])
    assert "takes no part in this tree: expected keys by members of this round, got others" in caplog.text
    assert_exact(crowded)
    assert set(crowded.opened[0].cohort) == set(parts)
    assert set(crowded.opened[-1].cohort) == set(parts) - domain
    assert_follow(crowded, parts, set(parts) - domain)
