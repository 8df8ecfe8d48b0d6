"""One message per secret of the lattice map, whatever breaks: two of them under one secret show what they differ in."""

import itertools
import threading
import time
from collections import defaultdict
from contextlib import suppress

import numpy as np
import pytest

from proxy import Proxy
from systems.role_inputs import inputs
from tables import cut, real_table
from treaty import GBDTClassifier
from treaty.crypto.lattice.linear_map import EncryptedQuery
from treaty.crypto.lattice.ring import pack
from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums.lattice_sums import sums_parameters
from treaty.data.table import to_table
from treaty.errors import PeerLost, PeerTimeout
from treaty.messaging import units
from treaty.messaging.channel import MemoryChannel
from treaty.messaging.messages import decode_body, decode_envelope
from treaty.messaging.party import Party, run_role
from treaty.messaging.tls import Line
from treaty.messaging.tls_link import PeerLink
from treaty.messaging.tls_server import Server
from treaty.models.checkpoints import Keeper, checkpoint_file
from treaty.runs.threads import play
from treaty.systems.secureboost import secureboost
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import LabelledRows
from treaty.systems.vertical.messages import SumsRequest

pytestmark = pytest.mark.slow

LATTICE = SecureBoost(encryption="lattice", sums="open", allow_exact_sums=True)
SETTINGS = {"n_estimators": 2, "max_depth": 3, "max_bin": 4, "min_child_samples": 5}
PARAMETERS = sums_parameters(SumsBounds(200, 1 << 16, 1 << 14))
LARGEST_ERROR = 21


def query_of(frame):
    """The arrays (b, b_0) of a frame that asks for sums, as bytes; None of another frame."""
    envelope = decode_envelope(frame, peer="test")
    if envelope.step != "SumsRequest":
        return None
    return tuple(bytes(array.data) for array in decode_body(envelope.body, SumsRequest, peer="test").payload)


@pytest.fixture
def encrypted(monkeypatch):
    """Secrets, words and own words of each query, all of whose rows are in one piece."""
    made, real = [], EncryptedQuery.encrypt

    def watched(query, vectors):
        words = real(query, vectors)
        made.append((query.secrets, words, query.own))
        return words

    monkeypatch.setattr(EncryptedQuery, "encrypt", watched)
    return made


def assert_one_message_per_secret(queries, encrypted):
    """Of frames that went out: each holds one result of an encryption as it was made, and no secret comes twice."""
    assert len(encrypted) >= 2
    secrets = [secret.tobytes() for made, _, _ in encrypted for secret in made]
    assert len(set(secrets)) == len(secrets)
    made = {tuple(pack(PARAMETERS, of).tobytes() for of in (words, own)): own for _, words, own in encrypted}
    assert set(queries) <= set(made)
    # And without a look at secrets: b_0 = a_0 s + e_0 of two vectors under one s differ by errors alone.
    first, prime = [made[query][:, 0] for query in set(queries)], PARAMETERS.primes[0]
    for one, other in itertools.combinations(np.concatenate(first).astype(np.int64), 2):
        apart = np.abs((one - other + prime // 2) % prime - prime // 2)
        assert apart.max() > 2 * LARGEST_ERROR


# ---------------------------------------------------------------- a broken connection


def part_of(line, found):
    """Read on; return the content of a unit if all of it has come."""
    with suppress(TimeoutError):
        return line.content(found, time.monotonic() + 0.05)


class Wire:
    """What clinic sent and the others took in, attempt by attempt, by receiver and number of the frame."""

    def __init__(self):
        self.sent, self.seen = defaultdict(list), defaultdict(list)
        self.came = threading.Event()  # a part of the query that is to be broken off, at lab
        self.dialled_again = threading.Event()
        self.broken = None  # receiver and number of that query
        self.when, self.cut = "", None

    def is_to_break(self, frame):
        """Whether it is lab's second query, for the first time."""
        queries = [key for key, (first, *_) in self.sent.items() if key[0] == "lab" and query_of(first) is not None]
        return self.broken is None and query_of(frame) is not None and len(queries) == 2


@pytest.fixture
def wire(monkeypatch):
    """Watch the frames of clinic, and break the query in the midst or, once it has come, before it has a receipt."""
    wire, send, content, carry = Wire(), Line.send, Server._content, PeerLink._carry

    def sending(line, unit, frame=b"", deadline=None):
        envelope = decode_envelope(frame, peer="test") if unit[0] == units.FRAME else None
        if envelope and envelope.sender == "lab" and wire.broken and wire.when == "after":
            # or its answer would be the receipt
            assert wire.dialled_again.wait(20)
        if envelope is None or envelope.sender != "clinic":
            return send(line, unit, frame, deadline)
        key = envelope.receiver, units._HEADER.unpack(unit)[2]
        wire.sent[key].append(bytes(frame))
        if key[0] == "lab" and wire.is_to_break(frame):
            wire.broken = key
            if wire.when == "within":
                half = len(frame) // 2
                send(line, unit, frame[:half], deadline)
                assert wire.came.wait(20)
                wire.cut()
                return send(line, b"", frame[half:], deadline)
        return send(line, unit, frame, deadline)

    def taking(server, line, sender, found):
        if server._name == "clinic":
            return content(server, line, sender, found)
        key = server._name, found.number
        try:
            while (frame := part_of(line, found)) is None:
                if key == wire.broken and line._units._filled:
                    wire.came.set()
        except ConnectionError:
            wire.seen[key].append(bytes(line._units._content[: line._units._filled]))
            raise
        wire.seen[key].append(bytes(frame))
        if key == wire.broken and wire.when == "after":
            wire.cut()
        return frame

    def carrying(link, line, received):
        if link.peer == "lab" and wire.broken:
            wire.dialled_again.set()
        carry(link, line, received)

    monkeypatch.setattr(PeerLink, "_carry", carrying)
    monkeypatch.setattr(Server, "_content", taking)
    monkeypatch.setattr(Line, "send", sending)
    return wire


@pytest.fixture
def linked(wire, tls_end, connect):
    """Clinic, lab and shop; clinic dials lab through a proxy."""
    ends = [tls_end("clinic", ["lab", "shop"]), tls_end("lab", ["clinic"]), tls_end("shop", ["clinic"])]
    proxy = Proxy(ends[1].address)
    addresses = {end.name: end.address for end in ends} | {"lab": proxy.address}
    assert set(connect(ends, addresses).values()) == {None}
    yield {end.name: end for end in ends}, proxy
    proxy.close()


def roles_of_training():
    X, y = real_table("binary", rows=200)
    tables = {
        name: to_table(part, party=name)
        for name, part in zip(["clinic", "lab", "shop"], cut(X, 3).values(), strict=True)
    }

    def role(party):
        program = secureboost.active if party.name == "clinic" else secureboost.passive
        labels = {"classes": [0, 1]} if party.name == "clinic" else {}
        data = LabelledRows(tables[party.name], y.astype(float) if labels else np.zeros(0))
        return program(inputs(party, LATTICE, SETTINGS, active="clinic", owners=list(tables), data=data, **labels))

    links = {"clinic": ["lab", "shop"], "lab": ["clinic"], "shop": ["clinic"]}
    return dict.fromkeys(tables, role), links


@pytest.mark.parametrize("when", ["within", "after"])
def test_a_query_whose_connection_breaks_goes_out_again_with_the_same_bytes_unless_it_has_come(
    linked, wire, encrypted, together, when
):
    channels, proxy = linked
    wire.when, wire.cut = when, proxy.cut
    roles, links = roles_of_training()
    results = {}

    def program(name):
        party = Party(name, "j", "secureboost", channels[name], links[name], timeout=30)
        results[name] = run_role(party, lambda: roles[name](party))

    outcome = together(**{name: lambda name=name: program(name) for name in roles})
    assert set(outcome.values()) == {None}

    sent, seen = wire.sent[wire.broken], wire.seen[wire.broken]
    if when == "within":
        assert len(sent) >= 2  # more where it was not dialled again yet
        part, whole = seen
        assert 0 < len(part) < len(whole)
        assert whole.startswith(part)
    else:
        assert len(sent) == 1
        (whole,) = seen
    assert set(sent) == {whole}
    # a frame that was on its way when clinic did not know yet of the break goes out again as well
    assert all(len(set(frames)) == 1 for frames in wire.sent.values())
    assert all(frames == wire.sent[key][:1] for key, frames in wire.seen.items() if key != wire.broken)

    queries = [query for frames in wire.sent.values() for frame in frames if (query := query_of(frame))]
    assert_one_message_per_secret(queries, encrypted)
    assert len(set(queries)) == len(encrypted)  # lab and shop are asked alike
    undisturbed = play(roles, links, job="j", protocol="secureboost").results["clinic"]
    assert results["clinic"].forest.trees == undisturbed.forest.trees


# ---------------------------------------------------------------- a peer that is given up


@pytest.mark.parametrize("error", [PeerLost, PeerTimeout])
def test_a_query_that_could_not_be_delivered_is_not_put_again_by_this_job_or_its_resumption(
    monkeypatch, tmp_path, encrypted, error
):
    frames, real = [], MemoryChannel.send
    X, y = real_table("binary", rows=200)
    tables = cut(X, 3)
    active, _, unreachable = tables

    def sending(channel, to, frame, timeout, *, receipt=False):
        if channel.name != active or query_of(frame) is None:
            return real(channel, to, frame, timeout, receipt=receipt)
        frames.append(bytes(frame))
        if failing and to == unreachable and checkpoint_file(tmp_path, active).exists():
            failing.clear()
            raise error(to, "its connection broke")
        return real(channel, to, frame, timeout, receipt=receipt)

    failing = [True]
    monkeypatch.setattr(MemoryChannel, "send", sending)
    monkeypatch.setattr(Keeper, "due", True)
    with pytest.raises(error, match="its connection broke"):
        GBDTClassifier(LATTICE, **SETTINGS).fit(tables, y, checkpoint=tmp_path)
    before, calls = {query_of(frame) for frame in frames}, len(encrypted)
    assert len(before) == calls
    GBDTClassifier(LATTICE, **SETTINGS).fit(tables, y, checkpoint=tmp_path)
    queries = [query_of(frame) for frame in frames]
    assert len(set(queries)) == len(encrypted) > calls
    assert before.isdisjoint(queries[2 * calls :])
    assert_one_message_per_secret(queries, encrypted)
