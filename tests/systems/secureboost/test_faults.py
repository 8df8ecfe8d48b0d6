"""Every fault ends the job quickly, with one clear error at every party, and finished trees stay."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from pace import within
from systems.vertical.playing import OPTIONS, play_training, role_input, star_of, tables_and_labels
from treaty.errors import ConfigError, CryptoError, PeerAborted, PeerError, PeerProtocolError, TreatyError
from treaty.messaging.certificates import make_identity
from treaty.messaging.messages import Array, pack
from treaty.messaging.party import Party, run_role
from treaty.messaging.tls_channel import Peer, TlsChannel
from treaty.systems.secureboost import secureboost
from treaty.systems.vertical import column_owner
from treaty.systems.vertical.messages import (
    BinLayout,
    Hint,
    NamedRows,
    Setup,
    SplitAnswer,
    SplitRequest,
    Sums,
    SumsRequest,
    TreeStart,
)
from treaty.systems.vertical.prediction import DecideRequest
from treaty.systems.vertical.training import agree_on_terms

SEEN: dict[str, BaseException] = {}


def watched(name, role):
    """Note what a role raised, then let it go on."""

    def run(party):
        try:
            return role(party)
        except BaseException as error:
            SEEN[name] = error
            raise

    return run


def roles_of(tables, y, options):
    def role(party):
        program = secureboost.active if party.name == "p0" else secureboost.passive
        return program(role_input(party, tables, y, options))

    return {name: watched(name, role) for name in tables}


def test_a_passive_party_dying_in_the_second_tree_leaves_the_first():
    tables, y = tables_and_labels()
    kept = {}
    SEEN.clear()

    def dying(party):
        def stop(done, part):
            kept["p1"] = part
            if done == 1:
                kept["died"] = time.monotonic()
                raise KeyboardInterrupt

        return secureboost.passive(role_input(party, tables, y, OPTIONS, progress=stop))

    with pytest.raises(KeyboardInterrupt):
        play_training(tables, y, replace={"p1": dying}, progress=lambda done, part: kept.__setitem__("p0", part))
    assert time.monotonic() - kept["died"] < within(10)
    assert len(kept["p0"].forest.trees) == 1
    owned = sum(np.sum(tree.source == 1) for tree in kept["p0"].forest.trees)
    assert len(kept["p1"].splits) >= owned


def test_differing_options_are_named_at_every_party():
    tables, y = tables_and_labels()
    SEEN.clear()
    roles = roles_of(tables, y, OPTIONS)
    other = {**OPTIONS, "max_bin": 16}
    roles["p2"] = watched("p2", lambda party: secureboost.passive(role_input(party, tables, y, other)))
    with pytest.raises(ConfigError):
        play_training(tables, y, replace=roles)
    assert set(SEEN) == {"p0", "p1", "p2"}
    for error in SEEN.values():
        assert all(word in str(error) for word in ("max_bin", "16", "64", "p0", "p2")), error


def test_differing_row_counts_are_named_at_every_party():
    tables, y = tables_and_labels()
    shorter, _ = tables_and_labels(rows=200)
    SEEN.clear()
    roles = roles_of({**tables, "p1": shorter["p1"]}, y, OPTIONS)
    with pytest.raises(ConfigError):
        play_training(tables, y, replace=roles)
    assert set(SEEN) == {"p0", "p1", "p2"}
    assert all("training rows" in str(error) and "200" in str(error) for error in SEEN.values())


def hostile_passive(tables, **bad):
    """Follow the protocol as p1, but send `bad` in place of the message of that name."""

    def run(party):
        honest_send = party.send
        party.send = lambda to, message: honest_send(to, bad.get(type(message).__name__, lambda m: m)(message))
        return secureboost.passive(role_input(party, tables, np.zeros(0), OPTIONS))

    return run


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("BinLayout", lambda m: BinLayout(Array.of(np.array([0, 5, 3], np.int32)), m.categorical)),
        ("BinLayout", lambda m: BinLayout(m.offsets, Array.of(np.zeros(3)))),
        ("BinLayout", lambda m: BinLayout(Array.of(np.arange(0, 10_000, 999, dtype=np.int32)), m.categorical)),
        ("Hint", lambda m: Hint([])),
        ("Hint", lambda m: Hint(pack([np.full(3, 10**6, np.int64)]))),
        ("Sums", lambda m: Sums(m.payload[:-1])),
        ("Sums", lambda m: Sums([Array(a.dtype, a.shape, memoryview(b"\xff" * a.data.nbytes)) for a in m.payload])),
        ("Sums", lambda m: Sums([Array("object", a.shape, a.data) for a in m.payload])),
        ("SplitAnswer", lambda m: SplitAnswer(Array.of(np.array([-1], np.int32)), m.left)),
        ("SplitAnswer", lambda m: SplitAnswer(m.records, Array.of(np.zeros(1, np.uint8)))),
        ("SplitAnswer", lambda m: BinLayout(m.records, m.left)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_answers_end_the_job_at_every_party(name, change):
    tables, y = tables_and_labels()
    SEEN.clear()
    roles = roles_of(tables, y, OPTIONS)
    roles["p1"] = watched("p1", hostile_passive(tables, **{name: change}))
    started = time.monotonic()
    with pytest.raises((PeerProtocolError, CryptoError)) as caught:
        play_training(tables, y, replace=roles)
    assert time.monotonic() - started < within(10)
    assert "p1" in str(caught.value)
    assert set(SEEN) == {"p0", "p1", "p2"}
    assert all(isinstance(SEEN[name], (PeerAborted, PeerError)) for name in ("p1", "p2"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Setup", lambda m: Setup(m.model_id, m.resumed, m.records, m.rounds, m.encryption, [])),
        (
            "Setup",
            lambda m: Setup(m.model_id, m.resumed, m.records, m.rounds, m.encryption, pack([np.zeros(4, np.uint64)])),
        ),
        ("TreeStart", lambda m: TreeStart(Array.of(np.array([3, 2], np.int32)), 2, m.columns, m.commitment, m.payload)),
        ("TreeStart", lambda m: TreeStart(None, 240, Array.of(np.array([99], np.int32)), m.commitment, m.payload)),
        ("TreeStart", lambda m: TreeStart(None, 240, m.columns, m.commitment, pack([np.zeros((3, 2), np.uint64)]))),
        ("TreeStart", lambda m: TreeStart(None, 240, m.columns, m.commitment[1:], m.payload)),
        ("SumsRequest", lambda m: SumsRequest(pack([np.zeros(7, np.uint8)]), m.last)),
        ("SplitRequest", lambda m: SplitRequest(Array.of(np.array([99], np.int32)), m.left_bins)),
        ("NamedRows", lambda m: NamedRows(Array.of(np.full(240, 9, np.uint8)))),
        ("NamedRows", lambda m: NamedRows(Array.of(np.full(240, 255, np.uint8)))),
        ("NamedRows", lambda m: NamedRows(Array.of(np.zeros(239, np.uint8)))),
        ("NamedRows", lambda m: NamedRows(Array.of(np.zeros(240, np.uint16)))),
        ("SplitRequest", lambda m: SplitRequest(m.features, Array.of(np.zeros((1, 32), np.uint8)))),
        ("SplitRequest", lambda m: SplitRequest(m.features, Array.of(np.full((1, 32), 0x55, np.uint8)))),
        ("Finish", lambda m: DecideRequest(5, Array.of(np.zeros(1, np.int32)))),
        ("Finish", lambda m: DecideRequest(0, Array.of(np.array([10**6], np.int32)))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_requests_end_the_job_at_every_party(name, change):
    tables, y = tables_and_labels(parties=2)
    SEEN.clear()
    roles = roles_of(tables, y, OPTIONS)
    honest = roles["p0"]

    def hostile(party):
        honest_send = party.send
        party.send = lambda to, m: honest_send(to, change(m) if type(m).__name__ == name else m)
        part = honest(party)
        if name == "Finish":
            party.receive("p1", Sums)  # what it gets is the abort
        return part

    roles["p0"] = watched("p0", hostile)
    started = time.monotonic()
    with pytest.raises(TreatyError) as caught:
        play_training(tables, y, replace=roles)
    assert time.monotonic() - started < within(10)
    assert isinstance(SEEN["p1"], (PeerProtocolError, CryptoError)), SEEN["p1"]
    assert isinstance(SEEN["p0"], PeerError), SEEN["p0"]
    assert str(caught.value)


def test_an_own_shorter_key_is_refused_by_the_others(monkeypatch):
    tables, y = tables_and_labels(parties=2)
    honest = {name: value for name, value in OPTIONS.items() if name != "insecure_test_key_bits"}

    def trusting(party):  # agrees to anything, but accepts no weak key
        inputs = role_input(party, tables, y, honest)
        agree_on_terms(role_input(party, tables, y, OPTIONS))
        monkeypatch.setattr(
            column_owner, "agree_on_terms", lambda inputs: None
        )  # which the active one calls in `active`
        return secureboost.passive(inputs)

    with pytest.raises(CryptoError, match="512"):
        play_training(tables, y, replace={"p1": trusting})


def test_an_oversized_message_is_one_error_at_every_party():
    tables, y = tables_and_labels()
    names = list(tables)
    identities = {name: make_identity(name) for name in names}
    links = star_of(tables)
    channels = {
        name: TlsChannel(
            name, "127.0.0.1:0", key=identities[name].key, certificate=identities[name].certificate,
            peers={peer: Peer(None, identities[peer].certificate) for peer in links[name]},
            inbox_limit=8192 if name == "p2" else 1 << 30,
        )
        for name in names
    }  # fmt: skip
    addresses = {name: channel.address for name, channel in channels.items()}
    SEEN.clear()
    roles = roles_of(tables, y, OPTIONS)
    ended = {}

    def run(name):
        party = Party(name, "test", "secureboost", channels[name], links[name], timeout=30)

        def connected():
            channels[name].connect(10, addresses)
            ended["begun"] = time.monotonic()
            return roles[name](party)

        try:
            run_role(party, connected)
        except TreatyError as error:
            SEEN[name] = error
        finally:
            channels[name].close()

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert time.monotonic() - ended["begun"] < within(10)
    assert set(SEEN) == set(names), SEEN
    assert all("expected at most 6144 bytes" in str(error) for error in SEEN.values()), SEEN
