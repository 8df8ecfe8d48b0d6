"""The open port: who gets past it, and that nobody keeps others out."""

import asyncio
import os
import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.hostile import dialled, is_hung_up, mutated, rss
from node.nodes import wait_for
from treaty.errors import ConfigError
from treaty.node import door as doors
from treaty.node.door import Door

JOB = "ab" * 32
NODE = b"TREATY/1 node\n"


@pytest.fixture
def made(tmp_path_factory):
    """Yield what makes doors, each in a folder of its own; behind each, the node's socket sends back what it gets."""
    closing = []

    def make(listen="127.0.0.1:0", addresses=None, ask_back=lambda *_: False):
        folder = tmp_path_factory.mktemp("d")
        door = Door(listen, folder, addresses or {}, ask_back)
        closing.append(door.close)
        closing.append(echo(door.node_socket))
        return door

    yield make
    for close in reversed(closing):
        close()


@pytest.fixture
def held():
    """Close at the end whatever sockets were held open."""
    with ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture
def short(monkeypatch):
    """Shorten all times."""
    monkeypatch.setattr(doors, "PATIENCE", 0.5)
    monkeypatch.setattr(doors, "DIAL_TIMEOUT", 0.5)
    monkeypatch.setattr(doors, "YOUTH", 1.0)


def echo(path):
    """Send back what comes to a socket of this machine; return what ends that."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(1000)

    def answer(connection):
        with connection, suppress(ConnectionError):
            while data := connection.recv(65536):
                connection.sendall(data)

    def serve():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return lambda: (server.shutdown(socket.SHUT_RDWR), server.close())


def answers(address, first=NODE):
    """Whether what is behind a door sends back what it gets."""
    with dialled(address, first + b"hello") as connection:
        connection.settimeout(5.0)
        try:
            return connection.recv(5, socket.MSG_WAITALL) == b"hello"
        except (TimeoutError, ConnectionError):
            return False


def test_bytes_go_through_both_ways_also_those_sent_with_the_first_line(made):
    assert answers(made().address)


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\n",
        b"\n",
        b"TREATY/1\n",
        b"TREATY/2 node\n",
        b"TREATY/1 node \n",
        b"TREATY/1 node\r\n",
        b"treaty/1 node\n",
        b"TREATY/1 job \n",
        b"TREATY/1 job port\n",
        b"TREATY/1 job peers\n",
        b"TREATY/1 job ../node\n",
        b"TREATY/1 job " + b"cd" * 32 + b"\n",
        b"TREATY/1 job " + JOB.encode() + b" x\n",
        b"TREATY/1 job " + JOB[:16].encode() + b"\n",
        b"TREATY/1 back " + b"0" * 64 + b"\n",
        b"TREATY/1 back \n",
        b"TREATY/1 \xff\xfe\n",
        "TREATY/1 n\u043ede\n".encode(),
        b"TREATY/1 node" + b" " * 300 + b"\n",
        b"A" * 100_000,
        b"\0" * 300,
    ],
    ids=range(22),
)
def test_whatever_else_a_first_line_says_is_hung_up_on_at_once(made, first):
    door = made()
    door.open_job(JOB, [])
    closing = echo(door.job_socket(JOB))
    began = time.monotonic()
    with dialled(door.address, first) as connection:
        assert is_hung_up(connection)
    assert time.monotonic() - began < doors.PATIENCE
    closing()


def test_a_job_is_reached_while_it_is_open_and_not_after(made):
    door = made()
    line = f"TREATY/1 job {JOB}\n".encode()
    assert not answers(door.address, line)
    door.open_job(JOB, [])
    closing = echo(door.job_socket(JOB))
    assert answers(door.address, line)
    door.close_job(JOB)
    assert not answers(door.address, line)
    closing()


def test_a_caller_that_is_slow_to_say_what_it_wants_is_hung_up_on(made, short):
    door = made()
    with dialled(door.address, b"TREATY/1 ") as slow, dialled(door.address) as silent:
        for letter in b"node":  # a byte now and then buys no time
            time.sleep(0.15)
            try:
                slow.sendall(bytes([letter]))
            except ConnectionError:
                break
        assert is_hung_up(slow)
        assert is_hung_up(silent)


def test_a_connection_through_which_nothing_goes_is_closed(made, held, monkeypatch):
    monkeypatch.setattr(doors, "IDLE", 1.5)
    door = made()
    silent, talking = (held(dialled(door.address, NODE)) for _ in range(2))
    while not is_hung_up(silent, 0.02):  # until it is; the test's own time limit ends a wait in vain
        talking.sendall(b"x")
        assert talking.recv(1) == b"x"


def test_callers_that_say_nothing_keep_nobody_out(made, held):
    """The flood is from the same address as the honest caller, which is the worst case."""
    door = made()
    silent = [held(dialled(door.address)) for _ in range(doors.MOST_OF_A_HOST + 100)]
    assert all(answers(door.address) for _ in range(20))
    assert all(is_hung_up(connection) for connection in silent[:100])  # the oldest went


def test_callers_that_hang_in_a_handshake_keep_nobody_out(made, held):
    """Whoever says "node" gets to TLS, and no further; it counts as a stranger for so long."""
    door = made()
    for _ in range(doors.MOST_OF_A_HOST + 100):
        held(dialled(door.address, NODE))
    assert all(answers(door.address) for _ in range(20))


def test_strangers_of_one_address_do_not_cost_another_its(made, held, monkeypatch):
    monkeypatch.setattr(doors, "MOST_YOUNG", 10)
    door = made("0.0.0.0:0")
    port = door.address.rpartition(":")[2]
    other = held(dialled(f"127.0.0.1:{port}", NODE))
    strangers = [held(socket.socket()) for _ in range(50)]
    for connection in strangers:
        connection.bind(("127.0.0.2", 0))
        connection.connect(("127.0.0.1", int(port)))
    assert all(is_hung_up(connection) for connection in strangers[:40])
    other.sendall(b"still here")
    assert other.recv(10) == b"still here"


def test_connections_that_have_stood_are_not_given_up_for_new_ones(made, held, short, monkeypatch):
    monkeypatch.setattr(doors, "MOST_YOUNG", 10)
    door = made()
    standing = [held(dialled(door.address, NODE)) for _ in range(5)]
    wait_for("end of their youth", lambda: door._hosts.total() == 5 and not door._young)
    for _ in range(50):
        held(dialled(door.address))
    for connection in standing:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"


def test_one_address_has_its_share_of_standing_connections(made, held, short, monkeypatch):
    monkeypatch.setattr(doors, "MOST_OF_A_HOST", 5)
    door = made()
    standing = [held(dialled(door.address, NODE)) for _ in range(5)]
    assert not answers(door.address)
    standing.pop().close()
    wait_for("place", lambda: answers(door.address))


def test_who_does_not_read_is_not_read_for(made, held):
    """A sender is made to wait when a receiver does not read: nothing piles up in the node."""
    door = made()
    before = rss(os.getpid())
    sent = 0
    for _ in range(20):
        connection = held(dialled(door.address, NODE))
        connection.settimeout(0.2)
        try:
            for _ in range(32):  # MiB
                connection.sendall(b"x" * (1 << 20))
                sent += 1
        except TimeoutError:
            pass
    assert sent < 20 * 32
    assert rss(os.getpid()) - before < 20 * 8
    assert answers(door.address)


class Backs:
    """Two doors: `shut` has no address for `open`, and asks it to dial back."""

    def __init__(self, made, held):
        self.asked, self.held = [], held
        self.shut = made(addresses={}, ask_back=lambda *asked: (self.asked.append(asked), True)[1])
        (self.socket,) = self.shut.open_job(JOB, ["shop"]).values()

    def wanted(self):
        """A process of `shut` dials its peer; return its end, and the token."""
        end = self.held(socket.socket(socket.AF_UNIX))
        end.connect(str(self.socket))
        wait_for("wish to be dialled back", lambda: self.asked)
        return end, self.asked.pop()[1]


def test_a_token_is_good_for_one_connection(made, held):
    backs = Backs(made, held)
    end, token = backs.wanted()
    line = f"TREATY/1 back {token}\n".encode()
    first = held(dialled(backs.shut.address, line))
    first.sendall(b"hello")
    assert end.recv(5) == b"hello"
    with dialled(backs.shut.address, line) as second:
        assert is_hung_up(second)


def test_a_guessed_token_gets_nowhere_and_the_true_one_still_does(made, held):
    backs = Backs(made, held)
    end, token = backs.wanted()
    assert len(token) == 64
    for guess in ["0" * 64, token[:-1], token + "0", token.upper() if token.upper() != token else "x", "", JOB]:
        with dialled(backs.shut.address, f"TREATY/1 back {guess}\n".encode()) as connection:
            assert is_hung_up(connection)
    with dialled(backs.shut.address, f"TREATY/1 back {token}\n".encode()) as connection:
        connection.sendall(b"x")
        assert end.recv(1) == b"x"


def test_a_token_that_comes_late_is_none(made, held, short):
    backs = Backs(made, held)
    end, token = backs.wanted()
    wait_for("end of the token", lambda: token not in backs.shut._awaited)
    with dialled(backs.shut.address, f"TREATY/1 back {token}\n".encode()) as connection:
        assert is_hung_up(connection)
    assert is_hung_up(end)  # and the process that waits is told


def test_a_wish_to_be_dialled_back_is_met_for_open_jobs_of_peers_with_an_address_alone(made, held):
    listener = held(socket.create_server(("127.0.0.1", 0)))
    listener.settimeout(0.5)
    door = made(addresses={"shop": f"127.0.0.1:{listener.getsockname()[1]}"})
    for peer, job in [("shop", JOB), ("shop", "port"), ("shop", "peers"), ("nobody", JOB)]:
        door.dial_back(peer, "0" * 64, job)
    with pytest.raises(TimeoutError):
        listener.accept()
    door.open_job(JOB, [])
    closing = echo(door.job_socket(JOB))
    listener.settimeout(10.0)
    door.dial_back("shop", "0" * 64, JOB)
    connection = held(listener.accept()[0])
    assert connection.recv(100) == f"TREATY/1 back {'0' * 64}\n".encode()
    closing()


def test_a_flood_of_wishes_to_be_dialled_back_opens_few_connections(made, held, monkeypatch):
    monkeypatch.setattr(doors, "DIAL_TIMEOUT", 1.0)
    listener = held(socket.create_server(("127.0.0.1", 0), backlog=1))
    door = made(addresses={"shop": f"127.0.0.1:{listener.getsockname()[1]}"})
    door.open_job(JOB, [])
    for _ in range(4):  # so that later connections hang
        connection = held(socket.socket())
        connection.setblocking(False)
        connection.connect_ex(listener.getsockname())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(1000):
        door.dial_back("shop", "0" * 64, JOB)
    door._run(asyncio.sleep(0.1))  # after all that was asked for before
    assert len(os.listdir("/proc/self/fd")) - before <= doors.MOST_BACKS + 1


def test_refusals_are_counted_in_the_log_and_do_not_fill_it(made, caplog):
    began = time.monotonic()
    door = made()
    for _ in range(300):
        dialled(door.address, b"GET / HTTP/1.1\n").close()
    said: list = []
    # A busy machine answers the 300 late: what was not yet counted is told with a later refusal.
    while sum(args[2] for args in said) <= 300 and time.monotonic() - began < 60:
        time.sleep(1.1)
        with dialled(door.address, b"x\n") as connection:
            assert is_hung_up(connection)
        said = [record.args for record in caplog.records if "closed a connection from" in record.getMessage()]
    assert sum(args[2] for args in said) > 300
    assert 2 <= len(said) <= 1 + (time.monotonic() - began)
    assert any("names nothing here" in args[1] for args in said)


def test_a_peer_that_is_early_for_a_job_of_the_node_is_refused_without_a_warning(made, caplog):
    door = made()
    door.jobs = {JOB}
    with dialled(door.address, f"TREATY/1 job {JOB}\n".encode()) as connection:  # no process has begun
        assert is_hung_up(connection)
    door.open_job(JOB, [])  # it has begun and does not listen yet
    with dialled(door.address, f"TREATY/1 job {JOB}\n".encode()) as connection:
        assert is_hung_up(connection)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    with dialled(door.address, f"TREATY/1 job {'cd' * 32}\n".encode()) as connection:
        assert is_hung_up(connection)
    assert [record.levelname for record in caplog.records if "closed a connection" in record.getMessage()] == [
        "WARNING"
    ]


def test_a_port_that_is_taken_is_said_in_plain_words(made, tmp_path):
    door = made()
    with pytest.raises(ConfigError, match=f"cannot listen at {door.address}"):
        Door(door.address, tmp_path, {}, lambda *_: False)


@settings(max_examples=120)
@given(st.integers(0, 2**32), st.sampled_from([NODE, f"TREATY/1 job {JOB}\n".encode(), b"TREATY/1 back " + b"0" * 64]))
def test_whatever_a_first_line_is_the_door_stays_open(fuzzed, seed, first):
    line = mutated(first, seed)
    with dialled(fuzzed.address, line) as connection:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        assert is_hung_up(connection, 3.0)
    if seed % 10 == 0:
        assert answers(fuzzed.address)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    door = Door("127.0.0.1:0", tmp_path_factory.mktemp("d"), {}, lambda *_: False)
    closing = echo(door.node_socket)
    yield door
    closing()
    door.close()
