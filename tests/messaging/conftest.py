"""Ends of both kinds of channel, and processes that can be killed."""

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pace import within
from treaty.messaging.certificates import make_identity
from treaty.messaging.channel import memory_channels
from treaty.messaging.tls_channel import Peer, TlsChannel

QUICK = {"keepalive_time": 1.0, "keepalive_timeout": 1.0, "reconnect": 1.0}


@pytest.fixture(scope="session")
def identities():
    return {name: make_identity(name) for name in ["clinic", "lab", "shop"]}


@pytest.fixture
def tls_end(identities):
    """Make TLS ends that are closed after the test: tls_end("clinic", ["lab"], **options)."""
    with contextlib.ExitStack() as stack:

        def make(name, peers, *, identity=None, pins=None, **options):
            identity = identity or identities[name]
            pins = {peer: identities[peer].certificate for peer in peers} | (pins or {})
            channel = TlsChannel(
                name,
                "127.0.0.1:0",
                key=identity.key,
                certificate=identity.certificate,
                peers={peer: Peer(None, pins[peer]) for peer in peers},
                **(QUICK | options),
            )
            return stack.enter_context(channel)

        yield make


@pytest.fixture
def connect():
    """Connect TLS ends with each other, each in its thread, and return what each raised (or None) by name."""

    def connect(ends, addresses=None, timeout=10):
        addresses = addresses or {end.name: end.address for end in ends}
        return together(**{end.name: lambda end=end: end.connect(timeout, addresses) for end in ends})

    return connect


def together(**programs):
    """Run one function per party in threads; return the exception (or None) of each by name."""
    outcome = dict.fromkeys(programs)

    def run(name, program):
        try:
            program()
        except BaseException as error:
            outcome[name] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in programs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within(60))
    assert not any(thread.is_alive() for thread in threads), "a party hangs"
    return outcome


@pytest.fixture(name="together")
def together_fixture():
    return together


@pytest.fixture(params=["memory", "tls"])
def ends(request, tls_end, connect):
    """Channels of clinic, lab and shop, clinic being connected to both, by name."""
    if request.param == "memory":
        yield memory_channels(["clinic", "lab", "shop"])
        return
    made = [tls_end("clinic", ["lab", "shop"]), tls_end("lab", ["clinic"]), tls_end("shop", ["clinic"])]
    assert set(connect(made).values()) == {None}
    yield {end.name: end for end in made}


@pytest.fixture
def process(identities, tmp_path):
    """Start parties in processes of their own: process("lab", clinic_channel, "idle") -> Popen."""
    started = []

    def start(name, clinic, task, **options):
        spec = {
            "name": name,
            "key": identities[name].key.decode(),
            "certificate": identities[name].certificate.decode(),
            "peer": "clinic",
            "peer_address": clinic.address,
            "peer_certificate": identities["clinic"].certificate.decode(),
            "task": task,
            "options": QUICK | options,
        }
        child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("peer_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(child)
        child.stdin.write(json.dumps(spec) + "\n")
        child.stdin.flush()
        child.address = child.stdout.readline().strip()
        assert child.address, child.stderr.read()
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()
