"""Attacks at random on a node that runs: does it stay up, within its memory, and serve others meanwhile?

Claim: whatever a trusted peer says, and whatever strangers send to the open port, the node's process stays up, its
memory stays bounded, another peer is answered within seconds, and what it refuses is in its log or audit log. One peer
sends notes of every kind, fair and mutated, in proposals that are signed and such that are not; strangers send first
lines of every kind, and leave connections open. The node starts with no jobs; `--minutes` is how long it lasts.

`--frames N` plays something else, without sockets: N mutated ones of all that a connection carries, by what decodes it
(`frame_fuzz.csv`). Claim: each is read, or refused by the error that callers expect, at once and without more memory. A
million take two minutes on a core.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from data import ROOT, arguments, report

sys.path.insert(0, str(ROOT / "tests"))
from node.hostile import JOB, Peer, content, dialled, mutated, rss, signed
from node.nodes import Organisation, columns_of, organisations, wait_for
from treaty.errors import PeerProtocolError
from treaty.files import decoder_of
from treaty.messaging import units
from treaty.messaging.messages import Envelope, decode_body, decode_envelope, encode, pack, unpack
from treaty.node.exchange import VERSION
from treaty.node.proposals import Back, HeadNote, Heartbeat, Hello, JobStatus, Note, Proposed, Wanted, id_of
from treaty.node.store import Store
from treaty.systems.vertical.messages import SumsRequest

NAMES = ("bank", "shop", "lab")
LINES = [b"TREATY/1 node\n", b"TREATY/1 job " + b"ab" * 32 + b"\n", b"TREATY/1 back " + b"0" * 64 + b"\n"]
HELD = 300  # connections that strangers leave open
LARGEST = 4096  # bytes of a frame that its receiver takes, without sockets
SLOWEST = 10.0  # seconds in which another peer must be answered


class Attack:
    """What has been sent to a node, by a peer and by strangers, from threads of their own."""

    def __init__(self, shop: Organisation, bank: Organisation, folder: Path) -> None:
        self.shop, self.bank, self.folder = shop, bank, folder
        self.address = f"127.0.0.1:{shop.port}"
        self.over = threading.Event()
        self.notes = self.conversations = self.connections = 0
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._talk, self._knock)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(30.0)

    def _note(self, peer: Peer, rng: random.Random, known: list[str]) -> bytes:
        """Return a note, of which one in three is mutated; or a proposal that is mutated inside, and signed."""
        fair = content({**JOB, "name": f"job {rng.random()}"})
        inside = mutated(fair, rng.randrange(1 << 32)) if rng.random() < 0.7 else fair
        proposal = Proposed(*signed(peer.own, inside))
        known[:] = [*known[-50:], id_of(inside)]
        job = rng.choice(known)
        count = rng.randrange(1 << 40)
        state = rng.choice(["proposed", "approved", "queued", "running", "waiting", "cancelled", "failed", "rejected"])
        view = JobStatus(
            job=job, state=state, reason="x" * rng.randrange(2000), asks=rng.randrange(3), runs=rng.randrange(3),
            done=rng.randrange(3), signed={"bank": rng.randbytes(64)}, count=count,
        )  # fmt: skip
        hello = Hello(VERSION, "bank", "1", rng.randbytes(16))
        notes: list[Note] = [proposal, view, view, Wanted(job), Back("0" * 64, job), Heartbeat(), hello]
        notes.append(HeadNote(rng.randrange(100), rng.randbytes(32)))
        data = msgspec.msgpack.encode(rng.choice(notes))
        return mutated(data, rng.randrange(1 << 32)) if rng.random() < 0.03 else data

    def _talk(self) -> None:
        """Hold conversations; each lasts until the node ends it, or 30 seconds."""
        rng, known = random.Random(1), ["ab" * 32]
        while not self.over.is_set():
            self.conversations += 1
            peer = Peer(
                self.bank.folder / "keys", "bank", self.shop.folder / "keys" / "shop.card",
                self.folder / f"p{self.conversations}", self.address,
            )  # fmt: skip
            talk = peer.talk(reads=rng.random() < 0.9)
            until = time.monotonic() + 30.0
            while not (talk.over.is_set() or self.over.is_set()) and time.monotonic() < until:
                talk.say(self._note(peer, rng, known))
                self.notes += 1
                self.over.wait(0.01)
            peer.close()

    def _knock(self) -> None:
        """Send first lines of every kind, and keep some of the connections open."""
        rng, held = random.Random(2), []
        while not self.over.wait(0.005):
            with suppress(OSError):
                line = rng.choice(LINES)
                first = rng.choice([b"", line, mutated(line, rng.randrange(1 << 32)), rng.randbytes(500), line * 100])
                held.append(dialled(self.address, first))
                self.connections += 1
            if len(held) > HELD:
                held.pop(rng.randrange(HELD)).close()
        for connection in held:
            connection.close()


def answered(shop: Organisation, lab: Organisation, folder: Path) -> float:
    """Return the seconds in which another peer is answered."""
    began = time.monotonic()
    keys, card = lab.folder / "keys", shop.folder / "keys" / "shop.card"
    peer = Peer(keys, "lab", card, folder, f"127.0.0.1:{shop.port}")
    try:
        peer.talk().next(HeadNote, SLOWEST)
    finally:
        peer.close()
    return time.monotonic() - began


def descriptors(pid: int) -> int:
    """Return how many files and sockets a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def fuzz(folder: Path, minutes: float) -> list[dict[str, object]]:
    """Attack a node; return how it is before, during and after."""
    made = organisations(folder, NAMES, columns_of(NAMES, 60), policy="approve = true", listening=["shop"])
    shop, rows = made["shop"], []
    attack = Attack(shop, made["bank"], folder)

    def row(minute: float) -> dict[str, object]:
        assert shop.process is not None
        assert shop.process.poll() is None, f"the node has ended: {shop.log()[-3000:]}"
        seconds = answered(shop, made["lab"], folder / f"lab{minute:g}")
        with Store(shop.state, create=False) as store:
            refused = sum('"refused"' in repr(entry).replace("'", '"') for entry in store.audit())
            jobs, whole = len(store.jobs()), not store.verify_audit()
        return {
            "minute": round(minute, 2), "MiB": rss(shop.process.pid), "descriptors": descriptors(shop.process.pid),
            "others answered in s": seconds, "notes sent": attack.notes, "conversations": attack.conversations,
            "connections": attack.connections, "jobs": jobs, "refusals in audit log": refused,
            "closed in log": shop.log().count("closed a connection") + shop.log().count("an invalid note"),
            "tracebacks in log": shop.log().count("Traceback"), "audit log whole": whole,
            "database MiB": sum(file.stat().st_size for file in shop.state.glob("node.db*")) / (1 << 20),
        }  # fmt: skip

    shop.start()
    try:
        wait_for("node", lambda: "is up" in shop.log())
        rows.append(row(0.0))
        attack.start()
        began = time.monotonic()
        steps = max(2, min(20, int(minutes * 2)))
        for step in range(1, steps + 1):
            attack.over.wait(max(0.0, began + step * 60 * minutes / steps - time.monotonic()))
            rows.append(row((time.monotonic() - began) / 60))
        attack.stop()
        time.sleep(20.0)  # until connections of strangers have been given up
        rows.append(row((time.monotonic() - began) / 60))
    finally:
        attack.over.set()
        code = shop.stop()
    assert code == 0, shop.log()[-3000:]
    return rows


def stream(data: bytes) -> None:
    """Read units of a connection in pieces, and their contents up to what a receiver would take."""
    reader, at = units.UnitReader(), 0
    while True:
        while (found := reader.header()) is not None:
            if found.size > LARGEST:
                raise ConnectionError("refused by a receiver's credit")
            while reader.content(found) is None:
                if not (taken := _given(reader, data[at:])):
                    return
                at += taken
        if not (taken := _given(reader, data[at:])):
            return
        at += taken


def _given(reader: units.UnitReader, data: bytes) -> int:
    room = reader.room()
    nbytes = min(len(room), len(data), 100)
    room[:nbytes] = data[:nbytes]
    reader.came(nbytes)
    return nbytes


def methods() -> dict[str, tuple[bytes, Callable[[bytes], object], tuple[type[Exception], ...]]]:
    """Return what is mutated, what reads it, and its only error, by the method that is fuzzed."""
    hello = units.encode(units.Introduction(units.VERSION, "bank", bytes(16), "job"))
    welcome = units.encode(units.Welcome(bytes(16), {"name": "'job'", "parties": "bank, shop"}))
    request = SumsRequest(pack([np.arange(20), np.zeros((3, 4), np.uint8)]), last=True)
    frame = encode(Envelope("job", "secureboost", 1, "SumsRequest", "bank", "shop", 7, request))
    whole = b"".join(
        units.header(kind, len(content), 1, 2) + content
        for kind, content in ((units.HELLO, hello), (units.FRAME, frame), (units.PING, b""), (units.LOAD, bytes(300)))
    )

    def message(data: bytes) -> None:
        body = decode_envelope(data, peer="bank").body
        unpack(decode_body(body, SumsRequest, peer="bank").payload, "bank", "SumsRequest")

    return {
        "units": (whole, stream, (ConnectionError,)),
        "Introduction": (hello, lambda data: units.decode(memoryview(data), units.Introduction), (ValueError,)),
        "Welcome": (welcome, lambda data: units.decode(memoryview(data), units.Welcome), (ValueError,)),
        "Envelope and message": (frame, message, (PeerProtocolError,)),
        "Note": (msgspec.msgpack.encode(Wanted("ab" * 32)), decoder_of(Note).decode, (ValueError, RecursionError)),
    }


def frames(count: int) -> list[dict[str, object]]:
    """Decode so many mutated ones by each method."""
    rows = []
    for name, (fair, read, expected) in methods().items():
        read(fair)
        gc.collect()
        before, refused, others, longest = rss(os.getpid()), 0, dict[str, int](), 0.0
        began = time.perf_counter()
        for seed in range(count):
            data = mutated(fair, seed)
            start = time.thread_time()
            try:
                read(data)
            except expected:
                refused += 1
            except Exception as error:
                others[type(error).__name__] = others.get(type(error).__name__, 0) + 1
            longest = max(longest, time.thread_time() - start)
        rows.append({
            "method": name, "mutated": count, "refused": refused, "other errors": str(others or ""),
            "longest ms of processor": 1e3 * longest, "MiB more": rss(os.getpid()) - before,
            "seconds": time.perf_counter() - began,
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long the node is attacked")
    parser.add_argument("--frames", type=int, default=0, help="decode so many mutated frames by each method instead")
    options = parser.parse_args()
    if options.frames:
        rows = frames(options.frames)
        report("frame_fuzz", rows, quick=options.quick)
        sys.exit(any(row["other errors"] for row in rows))
    with tempfile.TemporaryDirectory() as folder:
        rows = fuzz(Path(folder), 0.5 if options.quick else options.minutes)
    report("node_fuzz", rows, quick=options.quick)


if __name__ == "__main__":
    main()
