"""A party in a process of its own, for tests that kill, stop or measure it. Started by conftest.process."""

import contextlib
import ctypes
import json
import resource
import sys
import time
from pathlib import Path

from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party, run_role
from treaty.messaging.tls_channel import Peer, TlsChannel


class Rows(Message):
    rows: Array


def peak_bytes():
    """High-water mark of this program; ru_maxrss would include what the parent had before exec."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main():
    spec = json.loads(sys.stdin.readline())
    peer = spec["peer"]
    if "descriptors" in spec["options"]:
        files = spec["options"].pop("descriptors")
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    channel = TlsChannel(
        spec["name"],
        "127.0.0.1:0",
        key=spec["key"].encode(),
        certificate=spec["certificate"].encode(),
        peers={peer: Peer(spec["peer_address"], spec["peer_certificate"].encode())},
        **spec["options"],
    )
    print(channel.address, flush=True)
    channel.connect(20)
    party = Party(spec["name"], job="j", protocol="p", channel=channel, peers=[peer], timeout=60)
    print("connected", flush=True)
    TASKS[spec["task"]](party, channel)


def idle(party, channel):
    time.sleep(60)


def goodbye(party, channel):
    run_role(party, lambda: party.send("clinic", Rows(Array.of(peak_array()))))
    print("done", flush=True)


def peak_array():
    import numpy as np

    return np.arange(3)


def hold_lock(party, channel):
    party.receive("clinic", Rows)
    ctypes.PyDLL(None).sleep(5)  # PyDLL keeps Python's lock during the call
    run_role(party, lambda: party.send("clinic", Rows(Array.of(peak_array()))))


def open_files(party, channel):
    """Answer each message, with 100 files open at once."""
    for _ in range(2):
        party.receive("clinic", Rows)
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(Path(__file__).open()) for _ in range(100)]
            party.send("clinic", Rows(Array.of(peak_array()[: len(files)])))
    party.close()


def receive(party, channel):
    before = peak_bytes()
    rows = view(party.receive("clinic", Rows).rows, "uint8", (None,), peer="clinic", what="Rows.rows")
    print(len(rows), int(rows[0]), int(rows[-1]), peak_bytes() - before, flush=True)
    party.close()


TASKS = {"idle": idle, "goodbye": goodbye, "hold_lock": hold_lock, "receive": receive, "open_files": open_files}

if __name__ == "__main__":
    main()
