"""Connections that their threads lend to the party's, which then reads small frames itself."""

import contextlib
import queue
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from messaging.test_tls_server import Caller
from pace import wait_until, within
from proxy import Proxy
from treaty.errors import LocalProtocolError, PeerProtocolError
from treaty.messaging import tls_server
from treaty.messaging.channel import OVERHEAD, Arrival
from treaty.messaging.tls import LineRefused
from treaty.messaging.tls_server import Arrivals, Loan
from treaty.messaging.units import ASK, FRAME, RECEIPT, header


class Pair:
    """A line of single bytes, each of which is a frame; b"?" is none, b"!" something else."""

    def __init__(self):
        self.mine, self.theirs = socket.socketpair()
        self.came = b""
        self.by = []

    def fileno(self):
        return self.mine.fileno()

    def pull(self):
        self.came += self.mine.recv(100)

    def take(self):
        first, self.came = self.came[:1], self.came[1:]
        if first == b"!":
            raise OSError("something else")
        self.by.append(threading.current_thread().name)
        return Arrival("lab", first) if first not in (b"", b"?") else None


@pytest.fixture
def pair():
    made = Pair()
    with made.mine, made.theirs:
        yield made


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.fixture
def arrivals():
    return Arrivals()


def lend(arrivals, pool, pair):
    """Lend a line to a party that waits; return the call of its thread, and of the party's."""
    loan = Loan(pair, pair.take)
    waits = pool.submit(arrivals.get, 30)
    wait_until(lambda: arrivals._waits or arrivals._reads)
    return pool.submit(arrivals.put, Arrival("lab", b"0"), loan), waits


def test_a_connection_is_lent_only_to_a_party_that_waits(arrivals, pair):
    arrivals.put(Arrival("lab", b"0"), Loan(pair, pair.take))
    assert arrivals._loans == ()
    assert arrivals.get(0).frame == b"0"
    with pytest.raises(queue.Empty):
        arrivals.get(0)


def test_a_party_reads_what_comes_on_loan_and_lets_go_when_it_computes(arrivals, pair, pool, monkeypatch):
    monkeypatch.setattr(tls_server, "_MOMENT", 0.5)
    lent, waits = lend(arrivals, pool, pair)
    assert waits.result(within(10)).frame == b"0"
    pair.theirs.send(b"12")
    assert [arrivals.get(30).frame for _ in range(2)] == [b"1", b"2"]
    assert set(pair.by) == {threading.current_thread().name}
    # nothing is asked for: the connection's thread goes on
    assert lent.result(within(10)) is None
    assert arrivals._loans == ()


def test_a_party_that_waits_on_keeps_the_loan_and_hears_of_other_items(arrivals, pair, pool, monkeypatch):
    monkeypatch.setattr(tls_server, "_SIGN_OF_LIFE", 1000.0)
    lent, waits = lend(arrivals, pool, pair)
    assert waits.result(within(10)).frame == b"0"
    waits = pool.submit(arrivals.get, 30)
    wait_until(lambda: arrivals._reads)
    time.sleep(3 * tls_server._MOMENT)
    assert not lent.done()
    arrivals.put(Arrival("shop", b"s"))
    assert waits.result(within(10)).sender == "shop"


def test_what_is_not_for_the_party_ends_the_loan(arrivals, pair, pool):
    lent, waits = lend(arrivals, pool, pair)
    assert waits.result(within(10)).frame == b"0"
    pair.theirs.send(b"!")
    waits = pool.submit(arrivals.get, 30)
    assert lent.result(within(10)) is None
    # and it waits for what the connection's thread puts
    wait_until(lambda: arrivals._waits)
    arrivals.put(Arrival("lab", b"1"))
    assert waits.result(within(10)).frame == b"1"


def test_silence_ends_a_loan_and_a_slow_frame_does_not_prolong_waiting(arrivals, pair, pool, monkeypatch):
    monkeypatch.setattr(tls_server, "_SIGN_OF_LIFE", 0.05)
    lent, waits = lend(arrivals, pool, pair)
    assert waits.result(within(10)).frame == b"0"
    waits = pool.submit(arrivals.get, 30)
    assert lent.result(within(10)) is None
    wait_until(lambda: arrivals._waits)
    arrivals.put(Arrival("lab", b"1"))
    waits.result(within(10))
    monkeypatch.setattr(tls_server, "_SIGN_OF_LIFE", 1000.0)
    lent, waits = lend(arrivals, pool, pair)
    assert waits.result(within(10)).frame == b"0"
    waits = pool.submit(arrivals.get, 0.2)
    while not waits.done():
        pair.theirs.send(b"?")
        time.sleep(0.001)
    with pytest.raises(queue.Empty):
        waits.result()
    assert lent.result(within(10)) is None


def test_the_first_of_several_lines_does_not_keep_others_from_being_read(arrivals, pair, pool, monkeypatch):
    monkeypatch.setattr(tls_server, "_MOMENT", within(5))
    lent, waits = lend(arrivals, pool, pair)
    assert waits.result(within(10)).frame == b"0"
    other = Pair()
    with other.mine, other.theirs:
        waits = pool.submit(arrivals.get, 30)
        wait_until(lambda: arrivals._reads)
        also = pool.submit(arrivals.put, Arrival("shop", b"s"), Loan(other, other.take))
        assert waits.result(within(10)).sender == "shop"
        assert len(arrivals._loans) == 2
        pair.theirs.send(b"1")
        other.theirs.send(b"2")
        assert sorted(arrivals.get(30).frame for _ in range(2)) == [b"1", b"2"]
        for line in (pair, other):
            line.theirs.send(b"!")
        with pytest.raises(queue.Empty):
            arrivals.get(0.5)
        for call in (lent, also):
            call.result(within(10))


# ---------------- frames of a channel


@pytest.fixture
def clinic(tls_end):
    return tls_end("clinic", ["lab", "shop"], inbox_limit=2 * (100_000 + OVERHEAD))


@pytest.fixture
def on_loan(clinic, identities, pool, monkeypatch):
    """A caller whose frame 0 has come, and whose connection is on loan, which only other units end."""
    monkeypatch.setattr(tls_server, "_MOMENT", 1000.0)
    monkeypatch.setattr(tls_server, "_SIGN_OF_LIFE", 1000.0)
    with contextlib.ExitStack() as stack:
        lab = Caller(clinic, identities, "lab")
        stack.callback(lab.line.close)
        lab.introduce("lab")
        waits = pool.submit(clinic.receive, 30)
        wait_until(lambda: clinic._arrivals._waits)
        lab.frame(0, b"0")
        assert bytes(waits.result(within(10)).frame) == b"0"
        wait_until(lambda: clinic._arrivals._loans)
        yield lab
        for loan in clinic._arrivals._loans:
            loan.ended.set()


def test_frames_on_loan_are_read_by_the_party_and_others_by_the_connections_thread(clinic, on_loan, monkeypatch):
    taken, take = [], tls_server.Server._take_small

    def watched(self, *given):
        if (found := take(self, *given)) is not None:
            taken.append((threading.current_thread().name, len(found.frame)))
        return found

    monkeypatch.setattr(tls_server.Server, "_take_small", watched)
    sizes = [0, 1, 1 << 15, (1 << 15) + 1, 90_000]
    for number, size in enumerate(sizes, 1):
        on_loan.frame(number, bytes(size))
        arrival = clinic.receive(30)
        assert (arrival.sender, len(arrival.frame)) == ("lab", size)
        clinic.mark_read("lab", size)
    here = threading.current_thread().name
    assert taken == [(here, size) for size in sizes[:3]]


@pytest.mark.parametrize("cut", [10, 25, 26, 400])
def test_a_frame_on_loan_may_come_in_pieces(clinic, on_loan, pool, cut):
    whole = header(FRAME, 500, 1) + bytes(range(250)) * 2
    waits = pool.submit(clinic.receive, 30)
    wait_until(lambda: clinic._arrivals._reads)
    on_loan.line.send(whole[:cut])
    time.sleep(0.05)
    assert not waits.done()
    on_loan.line.send(whole[cut:])
    assert bytes(waits.result(within(10)).frame) == whole[25:]


def test_several_frames_of_one_record_come_one_after_the_other(clinic, on_loan):
    on_loan.line.send(b"".join(header(FRAME, 1, number) + b"%d" % number for number in range(1, 8)))
    assert [bytes(clinic.receive(30).frame) for _ in range(7)] == [b"%d" % number for number in range(1, 8)]


def test_a_receipt_asked_for_on_loan_is_sent(clinic, on_loan, pool):
    on_loan.frame(1, b"1")
    on_loan.line.send(header(ASK))
    waits = [pool.submit(clinic.receive, 30)]
    assert bytes(waits[0].result(within(10)).frame) == b"1"
    pool.submit(clinic.receive, 1)
    assert on_loan.next() == (RECEIPT, 0, 0, 2)


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        (header(FRAME, 1, 3) + b"3", "expected frame number 1, got unit"),
        (header(FRAME, 1, 0) + b"0", "expected frame number 1, got unit"),
        (header(RECEIPT), "expected frame number 1, got unit"),
        (header(FRAME, 1 << 40, 1), "expected at most"),
    ],
    ids=["left out", "repeated", "another unit", "too large"],
)
def test_an_offence_on_loan_is_one_at_both_sides(clinic, on_loan, unit, text):
    on_loan.line.send(unit)
    with pytest.raises(PeerProtocolError, match=text):
        clinic.receive(30)
    with pytest.raises(LineRefused, match=text):
        on_loan.next()


@pytest.mark.parametrize("how", ["a kind that does not exist", "no record of TLS", "the end"])
def test_a_connection_that_breaks_on_loan_is_taken_up_again(clinic, on_loan, identities, pool, how):
    waits = pool.submit(clinic.receive, 30)
    wait_until(lambda: clinic._arrivals._reads)
    if how == "the end":
        on_loan.line.break_off()
    elif how == "no record of TLS":
        on_loan.line._socket.send(b"\x17\x03\x03\x00\x20" + bytes(32))
    else:
        on_loan.line.send(bytes([200]) + bytes(24))
    again = Caller(clinic, identities, "lab")
    with contextlib.closing(again.line):
        assert again.introduce("lab") == 1
        again.frame(1, b"1")
        assert bytes(waits.result(within(10)).frame) == b"1"


def test_frames_on_loan_wait_for_room(clinic, on_loan, pool):
    for number in range(1, 4):
        on_loan.frame(number, bytes(30_000))
        assert len(clinic.receive(30).frame) == 30_000
    on_loan.frame(4, bytes(30_000))
    waits = pool.submit(clinic.receive, 30)
    wait_until(lambda: clinic._arrivals._waits)
    time.sleep(0.05)
    assert not waits.done()
    clinic.mark_read("lab", 30_000)
    assert len(waits.result(within(10)).frame) == 30_000
    assert clinic._credit._unread["lab"] == 3 * (30_000 + OVERHEAD) + 1 + OVERHEAD


def test_closing_wakes_a_party_that_reads(clinic, on_loan, pool):
    waits = pool.submit(clinic.receive, 30)
    wait_until(lambda: clinic._arrivals._reads)
    clinic.close()
    with pytest.raises(LocalProtocolError, match="clinic has closed"):
        waits.result(within(10))


def test_an_interrupted_party_keeps_no_connection(arrivals, pair, pool, monkeypatch):
    lent, waits = lend(arrivals, pool, pair)
    waits.result(within(10))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(arrivals, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        arrivals.get(30)
    assert lent.result(within(10)) is None


@pytest.mark.parametrize("breaks", [False, True], ids=["whole line", "line that breaks"])
@pytest.mark.parametrize("seed", range(3))
def test_frames_of_all_sizes_and_times_come_once_and_in_order(tls_end, connect, pool, seed, breaks):
    clinic, others = tls_end("clinic", ["lab", "shop"]), [tls_end(name, ["clinic"]) for name in ("lab", "shop")]
    addresses, proxy = {end.name: end.address for end in (clinic, *others)}, Proxy(clinic.address)
    count, draw = 150, random.Random(seed)
    with contextlib.closing(proxy.listener):
        assert set(connect([clinic, *others], addresses | {"clinic": proxy.address}).values()) == {None}
        lengths = [8, 200, 5000, 32_760, 32_770, 70_000]
        sizes = {end.name: [draw.choice(lengths) for _ in range(count)] for end in others}

        def sends(end):
            rests = random.Random(end.name)
            for number, size in enumerate(sizes[end.name]):
                end.send("clinic", number.to_bytes(8) + bytes(size - 8), 30)
                # an answer now and then, or a rest in which loans end
                if rests.random() < 0.5:
                    assert int.from_bytes(bytes(end.receive(30).frame)) <= number
                elif rests.random() < 0.1:
                    time.sleep(0.05)

        sending = [pool.submit(sends, end) for end in others]
        seen = {end.name: [] for end in others}
        for turn in range(2 * count):
            arrival = clinic.receive(30)
            frame = bytes(arrival.frame)
            clinic.mark_read(arrival.sender, len(frame))
            seen[arrival.sender].append((int.from_bytes(frame[:8]), len(frame)))
            clinic.send(arrival.sender, frame[:8], 30)
            if breaks and turn % 40 == 20:
                proxy.cut()
            elif turn % 30 == 10:
                time.sleep(0.05)
        for call in sending:
            call.result(within(30))
        assert seen == {name: list(enumerate(of)) for name, of in sizes.items()}


def test_polling_has_the_files_of_the_lines_on_loan(arrivals, pair, pool, monkeypatch):
    """A number that was closed and given to another file would be polled in place of the line."""
    monkeypatch.setattr(tls_server, "_MOMENT", within(5))
    lent, waits = lend(arrivals, pool, pair)
    waits.result(within(10))
    pair.theirs.send(b"1!")
    assert arrivals.get(30).frame == b"1"
    with pytest.raises(queue.Empty):
        arrivals.get(0.05)
    lent.result(within(10))
    again = Pair()
    with again.mine, again.theirs:
        lent, waits = lend(arrivals, pool, again)
        waits.result(within(10))
        again.theirs.send(b"2")
        assert arrivals.get(30).frame == b"2"
        again.theirs.send(b"!")
        with pytest.raises(queue.Empty):
            arrivals.get(0.05)
        lent.result(within(10))


def test_an_end_that_closes_takes_what_came_on_loan_and_sends_its_receipt(clinic, on_loan, pool):
    on_loan.frame(1, b"goodbye")
    on_loan.line.send(header(ASK))
    pool.submit(clinic.close)
    assert on_loan.next() == (RECEIPT, 0, 0, 2)


def test_parties_that_wait_for_each_others_receipts_do_not_wait_for_loans(tls_end, connect, pool, monkeypatch):
    monkeypatch.setattr(tls_server, "_MOMENT", 1000.0)
    monkeypatch.setattr(tls_server, "_SIGN_OF_LIFE", 1000.0)
    ends = [tls_end("clinic", ["lab"]), tls_end("lab", ["clinic"])]
    assert set(connect(ends).values()) == {None}
    for one, other in (ends, ends[::-1]):
        waits = pool.submit(one.receive, 30)
        wait_until(lambda one=one: one._arrivals._waits or one._arrivals._reads)
        other.send(one.name, b"a", 30)
        assert bytes(waits.result(within(10)).frame) == b"a"
        wait_until(lambda one=one: one._arrivals._loans)
    goodbyes = [pool.submit(ends[k].send, ends[1 - k].name, b"goodbye", 30, receipt=True) for k in range(2)]
    for call in goodbyes:
        call.result(within(20))
    assert [bytes(end.receive(30).frame) for end in ends] == [b"goodbye", b"goodbye"]
