"""Every system's jobs over connections that break for a while: the model is that of connections that do not."""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from marks import slow
from proxy import Proxy
from runs.small_jobs import SYSTEMS, model, played, write_job
from treaty.messaging.tls_channel import TlsChannel
from treaty.runs.job import Job
from treaty.runs.warm_up import compile_kernels
from treaty.systems.pooled import system as training


def counting_sends(monkeypatch: pytest.MonkeyPatch, at: int = -1, then: Any = None) -> Any:
    """Count what all parties send; at one number call a function first. Return a function that tells the count."""
    send, count, begun = TlsChannel.send, itertools.count(), [0]

    def counted(channel: TlsChannel, to: str, frame: bytes, timeout: float, *, receipt: bool = False) -> None:
        begun[0] = next(count)
        if begun[0] == at:
            then()
        send(channel, to, frame, timeout, receipt=receipt)

    monkeypatch.setattr(TlsChannel, "send", counted)
    return lambda: begun[0]


def behind(proxies: Mapping[str, Proxy], job: Job, name: str) -> Job:
    """Return a party's copy of the job, which dials all others by way of their proxies."""
    members = {
        other: member if other == name else msgspec.structs.replace(member, address=proxies[other].address)
        for other, member in job.parties.items()
    }
    return msgspec.structs.replace(job, parties=members)


CASES = [
    # every kind of outage, and of a minute, for every system: benchmarks/faults.py
    *(slow(system, "refuse", 3.0) for system in SYSTEMS),
    *(slow("secureboost", how, 3.0) for how in ("freeze", "hang up")),
    slow("secureboost", "reset", 25.0),  # longer than all time limits of a connection but `reconnect`
]


@pytest.mark.parametrize(("system", "how", "seconds"), CASES)
def test_an_outage_in_the_midst_of_a_training_changes_nothing(tmp_path, monkeypatch, system, how, seconds):
    job = write_job(tmp_path, system)
    compile_kernels(job.system, job.settings()[0])
    monkeypatch.setattr(training, "secrets", SimpleNamespace(token_hex=lambda n: "0" * 2 * n))  # so the same noise
    with monkeypatch.context() as patch:
        sent = counting_sends(patch)
        assert played(dict.fromkeys(job.parties, job)) == {}
    undisturbed = model(job)
    for part in Path(job.output).iterdir():
        part.unlink()
    for kept in tmp_path.rglob("*.bins"):  # or the second training would not search for them
        shutil.rmtree(kept) if kept.is_dir() else kept.unlink()
    proxies = {name: Proxy(str(member.address)) for name, member in job.parties.items()}
    failing = [threading.Thread(target=proxy.fail, args=(how, seconds), daemon=True) for proxy in proxies.values()]
    counting_sends(monkeypatch, sent() // 2, lambda: [thread.start() for thread in failing])
    try:
        assert played({name: behind(proxies, job, name) for name in job.parties}) == {}
    finally:
        for proxy in proxies.values():
            proxy.close()
    assert all(thread.ident is not None for thread in failing)
    np.testing.assert_equal(model(job), undisturbed)
