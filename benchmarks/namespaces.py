"""Parties in network namespaces of their own, on links as slow as wanted: what `federboost_horizontal` measures there.

Every party has one interface, 10.77.0.k. Where the kernel has `sch_netem`, it is one end of a veth pair whose other end
is in a bridge, and `tc` delays and limits what leaves it. Where it has not, it is a TUN device, and a thread here
carries packets from one to the other, as late as the link says. Root on Linux; everything is taken down at the end.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from numpy.typing import NDArray

from data import cpu_of_others
from treaty.node.identity import make_keys
from treaty.runs.job import Job, Member
from treaty.runs.report import load_reports

NET, PORT = "10.77.0", 20_077
MTU = 1500
PATIENCE = 600.0  # seconds for a training


class NotPermitted(Exception):
    """This machine does not let us make network namespaces or slow links; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Took:
    """One training: seconds of set-up and boosting as the leader has them, and what made the link."""

    setup: float
    boosting: float
    by: str
    others: float


def command(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise NotPermitted(f"no command {words[0]!r} here") from None
    except subprocess.CalledProcessError as error:
        raise NotPermitted(f"{' '.join(words)!r} is not permitted here: {error.stderr.strip()}") from None


@contextmanager
def namespaces(names: list[str]) -> Iterator[dict[str, str]]:
    """Make a namespace for each party; yield what they are called."""
    made = {name: f"treaty-{os.getpid()}-{name}" for name in names}
    with ExitStack() as held:
        for space in made.values():
            command("ip", "netns", "add", space)
            held.callback(subprocess.run, ["ip", "netns", "del", space], check=False)
            command("ip", "-n", space, "link", "set", "lo", "up")
            # it does not pace, as cubic, which namespaces may not choose; BBR, the default of some systems, takes a
            # part of a round trip longer for what fits into few packets
            command("ip", "netns", "exec", space, "sysctl", "-q", "-w", "net.ipv4.tcp_congestion_control=reno")
        yield made


def has_netem() -> bool:
    """Say whether the kernel has netem, by asking for one on a device of no use."""
    name = f"ttry{os.getpid()}"[:15]
    command("ip", "link", "add", name, "type", "bridge")
    try:
        tried = subprocess.run(
            ["tc", "qdisc", "add", "dev", name, "root", "netem", "delay", "1ms"], check=False, capture_output=True
        )
    except FileNotFoundError:
        return False
    finally:
        subprocess.run(["ip", "link", "del", name], check=False)
    return tried.returncode == 0


def address(k: int) -> str:
    return f"{NET}.{k + 1}"


@contextmanager
def bridged(spaces: Mapping[str, str], slow: list[str]) -> Iterator[None]:
    """Connect namespaces by a bridge; `slow` is what `tc` is told of every party's interface."""
    bridge = f"tbr{os.getpid()}"[:15]
    with ExitStack() as held:
        command("ip", "link", "add", bridge, "type", "bridge")
        held.callback(subprocess.run, ["ip", "link", "del", bridge], check=False)
        command("ip", "link", "set", bridge, "up")
        for k, space in enumerate(spaces.values()):
            outer = f"t{os.getpid()}v{k}"[:15]
            command("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            command("ip", "link", "set", outer, "master", bridge, "up")  # goes with the namespace
            command("ip", "-n", space, "addr", "add", f"{address(k)}/24", "dev", "eth0")
            command("ip", "-n", space, "link", "set", "eth0", "up")
            if slow:
                command("tc", "-n", space, "qdisc", "add", "dev", "eth0", "root", *slow)
        yield


@contextmanager
def carried(spaces: Mapping[str, str], rate: float, delay: float, loss: float, jitter: float) -> Iterator[None]:
    """Connect namespaces by a thread that carries packets between TUN devices; netem's rate, delay, loss and jitter."""
    devices: list[int] = []
    with ExitStack() as held:
        for k, space in enumerate(spaces.values()):
            name = f"t{os.getpid()}u{k}"[:15]
            try:
                device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                held.callback(os.close, device)
                # TUNSETIFF with IFF_TUN | IFF_NO_PI: bare IP packets
                fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x0001 | 0x1000))
            except OSError as error:
                raise NotPermitted(f"the kernel has no netem, and TUN devices are not permitted: {error}") from None
            devices.append(device)
            command("ip", "link", "set", name, "netns", space)
            command("ip", "-n", space, "link", "set", name, "mtu", str(MTU), "txqueuelen", "10000", "up")
            command("ip", "-n", space, "addr", "add", f"{address(k)}/24", "dev", name)
        ended = threading.Event()
        carrier = threading.Thread(target=carry, args=(devices, rate, delay, loss, jitter, ended), daemon=True)
        carrier.start()
        try:
            yield
        finally:
            ended.set()
            carrier.join()


def carry(
    devices: list[int], rate: float, delay: float, loss: float, jitter: float, ended: threading.Event
) -> None:  # fmt: skip
    """Take packets from devices and hand them over when they are due, but for a share `loss` of them, until `ended`."""
    chance = random.Random(1)
    free = [0.0] * len(devices)  # when each sender's line is free again
    under_way: list[tuple[float, int, int, bytes]] = []
    number = 0
    while not ended.is_set():
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, to, packet = heapq.heappop(under_way)
            try:
                os.write(devices[to], packet)
            except OSError:  # not up yet, or gone: a packet is lost, as packets are
                pass
        wait = min(0.05, under_way[0][0] - now) if under_way else 0.05
        ready, _, _ = select.select(devices, [], [], max(0.0, wait))
        for device in ready:
            k = devices.index(device)
            for _ in range(64):
                try:
                    packet = os.read(device, 65536)
                except (BlockingIOError, OSError):
                    break
                if packet[0] >> 4 != 4 or packet[16:19] != bytes(map(int, NET.split("."))):
                    continue
                to = packet[19] - 1
                if 0 <= to < len(devices) and chance.random() >= loss:
                    free[k] = max(free[k], time.monotonic()) + 8 * len(packet) / rate
                    number += 1
                    late = delay + jitter * chance.random()
                    heapq.heappush(under_way, (free[k] + late, number, to, packet))


@contextmanager
def network(
    names: list[str], rate: float | None, delay: float, loss: float = 0.0, jitter: float = 0.0
) -> Iterator[tuple[dict[str, str], str]]:
    """Make namespaces and links (bits per second or None for all there is, seconds one way, share of packets lost).

    Packets take up to `jitter` seconds longer, by chance, and overtake each other.

    Yields
    ------
    dict of str to str
        The namespace of each party.
    str
        What makes the link slow.

    Raises
    ------
    NotPermitted
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NotPermitted("network namespaces need root on Linux")
    with namespaces(names) as spaces:
        if rate is None:
            with bridged(spaces, []):
                yield spaces, ""
        elif has_netem():
            # netem's are deviations both ways
            late = [f"{1000 * (delay + jitter / 2):g}ms", f"{500 * jitter:g}ms"]
            slow = ["delay", *late, "loss", f"{100 * loss:g}%", "rate", f"{rate:.0f}bit"]
            with bridged(spaces, ["netem", *slow, "limit", "100000"]):
                yield spaces, "tc netem"
        else:
            with carried(spaces, rate, delay, loss, jitter):
                yield spaces, "TUN devices (no netem in this kernel)"


def train_in_namespaces(
    rows: Mapping[str, tuple[NDArray[np.float32], NDArray[np.int64] | None]],
    protocol: str,
    common: dict[str, Any],
    rate: float | None,
    delay: float,
    **more: Any,
) -> Took:
    """Train between the holders of rows, the first one leading, each a process in a namespace of its own.

    Each has columns of its own if only the first one has labels. `more` is what the job says besides.

    Raises
    ------
    NotPermitted
    """
    names = list(rows)
    with tempfile.TemporaryDirectory(prefix="treaty-") as place, network(names, rate, delay) as (spaces, by):
        folder = Path(place)
        parties = {}
        for k, (name, (x, y)) in enumerate(rows.items()):
            prefix = name if rows[names[-1]][1] is None else "f"
            columns = {f"{prefix}{j}": column for j, column in enumerate(x.T)}
            table = pa.table(columns | ({} if y is None else {"label": y}))
            parquet.write_table(table, folder / f"{name}.parquet")
            make_keys(folder, name)
            parties[name] = Member(
                table=f"{name}.parquet", address=f"{address(k)}:{PORT}",
                key=f"{name}.key.pem", certificate=f"{name}.cert.pem",
            )  # fmt: skip
        job = Job(
            name="namespaces", active=names[0], label="label", parties=parties, protocol=protocol, common=common,
            output=str(folder / "model"), **more,
        )  # fmt: skip
        (folder / "job.json").write_bytes(job.encoded())
        before, start = cpu_of_others(), time.perf_counter()
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", spaces[name], sys.executable, "-m", "treaty", "train",
                 str(folder / "job.json"), "--as", name],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for name in names
        ]  # fmt: skip
        try:
            said = [process.communicate(timeout=PATIENCE)[1] for process in started]
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if any(process.returncode for process in started):
            ends = zip(names, started, said, strict=True)
            told = [f"{name} ended with {process.returncode}: {text.strip()}" for name, process, text in ends]
            raise RuntimeError("expected a training, got:\n" + "\n".join(told))
        others = max(0.0, (cpu_of_others() - before) / (time.perf_counter() - start))
        took = load_reports(job)[names[0]].seconds
    return Took(took["setup"], took["boosting"], by, round(others, 2))
