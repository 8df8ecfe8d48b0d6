"""FedXGB: users that die or send what no user sends, and edge servers that die."""

from __future__ import annotations

import logging
import queue
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from systems.fedxgb.domain import play_domain
from systems.fedxgb.playing import (
    STAGES,
    crowd_rows,
    dying,
    once,
    one_large,
    options_of,
    play_crowd,
    role_input,
    spoiling,
    user_program,
)
from systems.fedxgb.test_roles import BOTH, SHOWN, assert_exact, assert_follow
from treaty.errors import ConfigError, PeerAborted, PeerLost, PeerTimeout, TreatyError
from treaty.messaging.channel import MemoryChannel
from treaty.messaging.messages import Array
from treaty.messaging.party import ABORT_NOTICE_TIMEOUT, Party
from treaty.runs.threads import play
from treaty.systems.fedxgb import domain, secfind
from treaty.systems.fedxgb.domain import Credentials, certify
from treaty.systems.fedxgb.messages import Agreement, Attendance, KeyCertificate, KeyRequest, MaskKey, UserOffer
from treaty.systems.fedxgb.pieces import RowShares
from treaty.systems.fedxgb.roles import domains
from treaty.systems.fedxgb.secboost import edge
from treaty.systems.fedxgb.secfind import DomainSums
from treaty.systems.horizontal.masked_sums import MaskedInput, MaskShares, SealedShares


@pytest.fixture(scope="module")
def crowd():
    parts, _, classes = crowd_rows(users=15, rows=150)
    return parts, classes, one_large(list(parts), 3)


def assert_went_on_without(crowded, parts, gone, *, since=1):
    """Everybody else finished, sums are exact, and who is gone for good is in none of a later tree."""
    assert set(crowded.failures) <= set(gone)
    assert_exact(crowded)
    assert not any(set(gone) & set(sums.cohort) for n in range(since + 1, 4) for sums in crowded.of_tree(n))
    assert len(crowded.model.forest.trees) == 3
    assert_follow(crowded, parts, set(parts) - set(gone))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "shown"), [*((stage, SHOWN) for stage in STAGES), ("call", {}), ("prediction", {})])
def test_sums_go_on_without_a_user_that_dies(crowd, stage, shown):
    parts, classes, layout = crowd
    options = options_of(n_estimators=3, **shown)
    roles = {
        "p4": dying(
            lambda leaves: user_program(parts, options, classes, layout, "p4", leaves), once(1, stage)
        )
    }  # fmt: skip
    crowded = play_crowd(parts, options, classes, layout=layout, roles=roles)
    assert_went_on_without(crowded, parts, ["p4"])
    assert {len(sums.cohort) for sums in crowded.of_tree(3)} == {6 + 6}  # of nine, others are left out with it


@pytest.mark.slow
@BOTH
def test_a_user_that_dies_in_the_search_for_bins_is_no_user(crowd, shown):
    parts, classes, layout = crowd
    options = options_of(n_estimators=3, **shown)
    program = dying(lambda leaves: user_program(parts, options, classes, layout, "p4", leaves), once(0, "shared", 2))
    crowded = play_crowd(parts, options, classes, layout=layout, roles={"p4": program})
    assert_went_on_without(crowded, parts, ["p4"], since=0)


def test_a_user_has_three_times_as_long_for_the_first_sum_without_which_it_is_out_of_the_job(crowd):
    parts, classes, layout = crowd
    options, slow, patience = options_of(n_estimators=2, expose="model"), [], 3.0

    def late(tree: int, stage: str) -> bool:
        """Be late in the first sum, and as much in the first tree's first one."""
        if stage == "setup" and tree in (0, 1) and tree not in slow:
            slow.append(tree)
            time.sleep(1.7 * patience)
        return False

    crowded = play_crowd(parts, options, classes, layout=layout, leaves={"p4": late}, patience=patience)
    assert slow == [0, 1]
    counted = crowded.opened[0].cohort
    assert "p4" in counted
    assert "p4" not in crowded.of_tree(1)[0].cohort
    assert "p4" in crowded.of_tree(2)[-1].cohort


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("stage", ["shared", "prediction"])
def test_a_user_that_takes_nothing_has_no_more_time_than_one_that_sends_nothing(crowd, stage, shown, monkeypatch):
    parts, classes, layout = crowd
    options = options_of(n_estimators=3, **shown)
    stops, stopped, over, given = once(1, stage), threading.Event(), threading.Event(), set()
    send, close = MemoryChannel.send, MemoryChannel.close

    def hangs(number, stage):
        if stops(number, stage):
            stopped.set()
            return over.wait(60)
        return False

    def waiting(self, to, frame, timeout, **receipt):
        if to == "p4" and stopped.is_set():
            given.add(timeout)
            raise PeerTimeout(to, "p4 took no message")
        send(self, to, frame, timeout, **receipt)

    def noted(self):
        close(self)
        if self.name == "server":
            over.set()

    monkeypatch.setattr(MemoryChannel, "send", waiting)
    monkeypatch.setattr(MemoryChannel, "close", noted)
    program = dying(lambda leaves: user_program(parts, options, classes, layout, "p4", leaves), hangs)
    crowded = play_crowd(parts, options, classes, layout=layout, roles={"p4": program}, patience=2.5)
    assert_went_on_without(crowded, parts, ["p4"])
    assert given <= {2.5, ABORT_NOTICE_TIMEOUT}
    assert 2.5 in given


def test_users_lost_one_after_another_do_not_hold_a_sum_up_for_long(monkeypatch):
    now, each, waited = [0.0], [0.0], []
    for module in (domain, secfind):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    gather = DomainSums.gather

    def gathered(self, names, kind, patience):
        waited.append(kind)
        now[0] += each[0]
        return gather(self, names, kind, patience)

    monkeypatch.setattr(DomainSums, "gather", gathered)
    for each[0], stages in ((19.0, 5), (21.0, 4)):  # of a patience of 20 s
        waited.clear()
        _, users, _ = play_domain().opened[0]
        assert len(users) == (6 if stages == 5 else 0)
        assert len(waited) == stages  # none of another attempt


@pytest.mark.slow
def test_a_domain_that_gives_nothing_for_many_trees_warns_once(crowd, caplog):
    parts, classes, layout = crowd
    options = options_of(n_estimators=8, **SHOWN)
    program = dying(lambda leaves: user_program(parts, options, classes, layout, "p9", leaves), once(2, "call"))
    with caplog.at_level(logging.WARNING):
        crowded = play_crowd(parts, options, classes, layout=layout, roles={"p9": program})
    assert {len(sums.cohort) for sums in crowded.of_tree(8)} == {12}
    said = [record.message for record in caplog.records if record.name == domain.__name__]
    assert sorted(said) == [
        "edge1 adds nothing to the rest of a tree: no permitted cohort among 2 users",
        "edge1 continues without p9",
    ]


@pytest.mark.slow
def test_authority_waits_for_edge_servers_longer_than_for_users():
    roles = {"edge": "edge", "absent": "user"}

    def late(party):
        asked.wait(20)
        time.sleep(0.5)
        Credentials(party, "authority", "edge")

    def silent(party):
        asked.set()
        with pytest.raises(TreatyError):
            party.receive("authority", KeyCertificate)

    asked = threading.Event()
    programs = {"authority": lambda party: certify(party, roles, 0.1), "edge": late, "absent": silent}
    links = {"authority": list(roles), "edge": ["authority"], "absent": ["authority"]}
    play(programs, links, job="job", protocol="fedxgb", timeout=20.0)


def retyped(party, message):
    return MaskedInput(Array.of(np.zeros(7, np.float64)))


def shortened(party, message):
    values = np.frombuffer(message.values.data, np.uint64)
    return MaskedInput(Array.of(values[:-1]))


def another_message(party, message):
    return Attendance()


def malformed(party, message):
    party.channel.send("edge0", b"\xc1", 1)


def shares_for_others(party, message):
    return SealedShares(dict(list(message.sealed.items())[1:]))


def shares_unsealed(party, message):
    return SealedShares(dict.fromkeys(message.sealed, b"x"))


def tags_for_nobody(party, message):
    return msgspec.structs.replace(message, tags=dict.fromkeys(message.tags, b"x"))


def answer_for_others(party, message):
    return MaskShares({}, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (MaskedInput, retyped),
        (MaskedInput, shortened),
        (MaskedInput, another_message),
        (MaskKey, another_message),
        (SealedShares, another_message),
        (Attendance, lambda party, message: MaskKey(b"", {})),
        (Agreement, another_message),
        (MaskShares, another_message),
    ],
)
def test_who_sends_what_no_user_sends_is_left_out_for_good(crowd, kind, change):
    parts, classes, layout = crowd
    options = options_of(n_estimators=3, **SHOWN)
    program = spoiling(user_program(parts, options, classes, layout, "p4"), kind, change)
    crowded = play_crowd(parts, options, classes, layout=layout, roles={"p4": program})
    assert_went_on_without(crowded, parts, ["p4"])


@pytest.mark.slow
def test_malformed_frame_leaves_its_sender_out_for_good(crowd):
    parts, classes, layout = crowd
    options = options_of(n_estimators=3, **SHOWN)
    program = spoiling(user_program(parts, options, classes, layout, "p4"), MaskedInput, malformed)
    crowded = play_crowd(parts, options, classes, layout=layout, roles={"p4": program})
    assert_went_on_without(crowded, parts, ["p4"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (SealedShares, shares_for_others),
        (Agreement, tags_for_nobody),
        (MaskShares, answer_for_others),
    ],
)
def test_one_user_cannot_stop_its_domain(crowd, kind, change):
    parts, classes, layout = crowd
    options = options_of(n_estimators=3, **SHOWN)
    program = spoiling(user_program(parts, options, classes, layout, "p4"), kind, change)
    crowded = play_crowd(parts, options, classes, layout=layout, roles={"p4": program})
    assert_exact(crowded)
    assert set(crowded.failures) <= {"p4"}
    assert all(set(sums.cohort) & set(domains(layout)["edge0"]) for sums in crowded.opened)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "change"), [(SealedShares, shares_unsealed), (MaskKey, tags_for_nobody)])
def test_what_only_other_users_can_check_costs_the_domain_a_tree_at_most(crowd, kind, change):
    """The edge server cannot tell who is wrong; the others refuse, and are there in the next tree."""
    parts, classes, layout = crowd
    options = options_of(n_estimators=3, **SHOWN)
    program = spoiling(user_program(parts, options, classes, layout, "p4"), kind, change)
    crowded = play_crowd(parts, options, classes, layout=layout, roles={"p4": program})
    assert not crowded.failures
    assert_exact(crowded)
    others = set(domains(layout)["edge0"]) - {"p4"}
    assert not any(others & set(sums.cohort) for sums in crowded.of_tree(1))
    assert all(others <= set(sums.cohort) for tree in (2, 3) for sums in crowded.of_tree(tree))
    assert_follow(crowded, parts, parts)


ROWS = {
    "another message": lambda party, message: Attendance(),
    "other shape": lambda party, message: RowShares(Array.of(np.zeros((3, 1, 2), np.uint64)), 3),
    "other type": lambda party, message: RowShares(Array.of(np.zeros(3, np.float32)), 3),
    "no numbers of the field": lambda party, message: RowShares(
        msgspec.structs.replace(message.shares, data=b"\xff" * len(message.shares.data)), message.n_rows
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", ROWS)
def test_who_shares_no_rows_is_left_out_for_good(crowd, fault):
    parts, classes, layout = crowd
    options = options_of(n_estimators=3, comparison="shamir")
    program = spoiling(user_program(parts, options, classes, layout, "p4"), RowShares, ROWS[fault], tree=None)
    crowded = play_crowd(parts, options, classes, layout=layout, roles={"p4": program})
    assert_went_on_without(crowded, parts, ["p4"], since=0)
    assert not any("p4" in sums.cohort for sums in crowded.of_tree(1))


# ---------------------------------------------------------------- who is who


@pytest.mark.slow
def test_missing_user_is_left_out(crowd, caplog):
    parts, classes, layout = crowd
    options = options_of(n_estimators=3, **SHOWN)
    with caplog.at_level(logging.WARNING):
        crowded = play_crowd(parts, options, classes, layout=layout, roles={"p4": lambda party: party.channel.close()})
    assert_went_on_without(crowded, parts, ["p4"], since=-1)
    assert "authority does not certify p4, which did not ask as user" in caplog.text
    assert "edge0 begins without p4, which has sent no keys" in caplog.text


def own_certificate(party: Party, message: UserOffer) -> UserOffer:
    """Keys that the sender itself certifies."""
    keys = msgspec.structs.replace(message.keys, certificate=message.keys.signature)
    return msgspec.structs.replace(message, keys=keys)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["certified by itself", "of another user"])
def test_keys_that_are_not_certified_for_the_user_are_no_users(crowd, fault, caplog):
    parts, classes, layout = crowd
    options = options_of(n_estimators=3, **SHOWN)
    offers: queue.Queue[UserOffer] = queue.Queue()

    def noted(party: Party, message: UserOffer) -> UserOffer:
        offers.put(message)
        return message

    def copied(party: Party, message: UserOffer) -> UserOffer:
        return offers.get(timeout=5)

    first, second = (user_program(parts, options, classes, layout, name) for name in ("p1", "p4"))
    roles = {"p4": spoiling(second, UserOffer, own_certificate, tree=None)}
    if fault == "of another user":
        roles = {
            "p1": spoiling(first, UserOffer, noted, tree=None),
            "p4": spoiling(second, UserOffer, copied, tree=None),
        }
    with caplog.at_level(logging.WARNING):
        crowded = play_crowd(parts, options, classes, layout=layout, roles=roles)
    assert_went_on_without(crowded, parts, ["p4"], since=-1)
    assert "expected keys of p4 as user that the authority certified, got others - from p4" in caplog.text


@pytest.mark.slow
def test_who_asks_for_another_role_is_not_certified(crowd, caplog):
    parts, classes, layout = crowd
    options = options_of(n_estimators=3, **SHOWN)

    def as_edge(party, message):
        return msgspec.structs.replace(message, role="edge")

    program = spoiling(user_program(parts, options, classes, layout, "p4"), KeyRequest, as_edge, tree=None)
    with caplog.at_level(logging.WARNING):
        crowded = play_crowd(parts, options, classes, layout=layout, roles={"p4": program}, patience=2.5)
    assert_went_on_without(crowded, parts, ["p4"], since=-1)
    assert "authority does not certify p4, which did not ask as user" in caplog.text


@pytest.mark.slow
def test_other_options_at_a_user_are_told_from_the_servers(crowd):
    parts, classes, layout = crowd
    options = options_of(n_estimators=3, **SHOWN)
    program = user_program(parts, options_of(n_estimators=4, **SHOWN), classes, layout, "p4")
    crowded = play_crowd(parts, options, classes, layout=layout, roles={"p4": program})
    assert_went_on_without(crowded, parts, ["p4"], since=-1)
    assert isinstance(crowded.failures["p4"], ConfigError)
    assert "expected the options of server, got others at p4" in str(crowded.failures["p4"])


# ---------------------------------------------------------------- edge servers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shown"), [("Task", SHOWN), ("RowSummary", SHOWN), ("Sum", SHOWN), ("Sum", {}), ("RoundStart", {})]
)
def test_edge_server_that_dies_ends_the_job_for_all(crowd, kind, shown):
    parts, classes, layout = crowd
    options = options_of(n_estimators=3, **shown)

    def dies(party: Party) -> None:
        receive = party.receive

        def until(frm, *kinds, **how):
            said = receive(frm, *kinds, **how)
            if type(said).__name__ == kind:
                raise SystemError
            return said

        party.receive = until
        try:
            edge(role_input(party, options, layout))
        except SystemError:
            party.channel.close()

    crowded = play_crowd(
        parts, options, classes, layout=layout, roles={"edge1": dies}, tolerate=["server", "edge0", "edge2"]
    )
    assert set(crowded.failures) == {*parts, "server", "edge0", "edge2"}
    assert all(isinstance(error, PeerLost | PeerAborted) for error in crowded.failures.values())
    assert "edge1 is lost" in str(crowded.failures["server"]) or "edge" in str(crowded.failures["server"])
    assert any("edge1 is lost" in str(error) for error in crowded.failures.values())
