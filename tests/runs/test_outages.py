"""Every system's jobs over connections that break for a while: the model is that of connections that do not."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from flat import option_lines
from marks import slow
from pace import within
from proxy import Proxy
from tables import real_table
from treaty.errors import TreatyError
from treaty.messaging.certificates import write_identity
from treaty.messaging.grpc_channel import GrpcChannel
from treaty.runs.job import Job, load_job
from treaty.runs.party import find_part, owners_of_model, train_party
from treaty.runs.processes import free_ports
from treaty.runs.warm_up import compile_kernels
from treaty.systems.pooled import training

TREES = {"n_estimators": 2, "min_child_samples": 5}
EPOCHS = {"batch_size": 120, "max_iter": 2, "period": 1, "tol": 0.0, "random_state": 3}
USERS = {f"user{k}": "" for k in range(6)}
SYSTEMS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "secureboost": ({"encryption": "lattice"} | TREES, {"a": "", "b": "", "c": ""}),
    "fedxgboost-smm": ({"backend": "dealer"} | TREES, {"a": "", "b": "", "c": "dealer"}),
    "fedxgboost-ldp": ({"mechanism": "label_rr", "epsilon": 50.0} | TREES, {"a": "", "b": ""}),
    "federboost-vertical": ({"epsilon": 50.0} | TREES, {"a": "", "b": "", "c": ""}),
    "federboost-horizontal": (TREES, {"a": "", "b": "", "c": ""}),
    "fedxgb": (
        {"expose": "model", "max_bin": 8} | TREES,
        {"a": "", "berlin": "edge", "tokyo": "edge", "notary": "authority"} | USERS,
    ),
    "quasi-newton": (EPOCHS, {"a": "", "b": "", "notary": "coordinator"}),
    "sgd": (EPOCHS, {"a": "", "b": "", "notary": "coordinator"}),
}
"""Options, and parties with their roles, of each system's smallest job."""


def write_job(folder: Path, system: str) -> Job:
    """Write the tables, keys and job of a system."""
    options, roles = SYSTEMS[system]
    X, y = real_table("binary", rows=180)
    protocol, tables = option_lines(system, **options)
    lines = ['name = "test"', protocol, 'active = "a"', 'label = "y"', "timeout = 1200", "reconnect = 75", "n_jobs = 1"]
    by_row = system in ("federboost-horizontal", "fedxgb")
    with_rows = [name for name, role in roles.items() if not role and (name, system) != ("a", "fedxgb")]
    for name, port in zip(roles, free_ports(len(roles)), strict=True):
        write_identity(folder, name)
        lines += [f"[parties.{name}]", f'address = "127.0.0.1:{port}"', f'certificate = "{name}.cert.pem"']
        lines += [f'key = "{name}.key.pem"', *([f'role = "{roles[name]}"'] if roles[name] else [])]
        if name in with_rows:
            k, share = with_rows.index(name), len(with_rows)
            edges = [0, *range(X.shape[1] - 3 * (share - 1), X.shape[1] + 1, 3)]  # few columns need no large batches
            table = X.assign(y=y).iloc[k::share] if by_row else X.iloc[:, edges[k] : edges[k + 1]]
            (table if by_row or k else table.assign(y=y)).to_csv(folder / f"{name}.csv", index=False)
            lines += [f'table = "{name}.csv"']
        elif name == "a":
            X.assign(y=y).iloc[:20].to_csv(folder / "a.csv", index=False)
            lines += ['eval_tables = ["a.csv"]']
    (folder / "job.toml").write_text("\n".join([*lines, *tables]))
    return load_job(folder / "job.toml")


def played(jobs: Mapping[str, Job]) -> dict[str, str]:
    """Train every party with its copy of the job in a thread; return what those that failed said."""
    said = {}

    def train(name: str) -> None:
        try:
            train_party(jobs[name], name)
        except TreatyError as error:
            said[name] = str(error)

    threads = [threading.Thread(target=train, args=(name,), daemon=True) for name in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within(200))
    assert not any(thread.is_alive() for thread in threads), "a party hangs"
    return said


def model(job: Job) -> dict[str, Any]:
    """Return what is to be the same in all parties' parts."""
    found = {}
    for name in owners_of_model(job):
        part = find_part(job, name)
        if job.system.common.table == "regression":
            found[name] = (part.coef.tolist(), part.intercept, part.losses)
        else:
            found[name] = (None if part.forest is None else part.forest.trees, repr(part.splits))
    return found


def counting_sends(monkeypatch: pytest.MonkeyPatch, at: int = -1, then: Any = None) -> Any:
    """Count what all parties send; at one number call a function first. Return a function that tells the count."""
    send, count, begun = GrpcChannel.send, itertools.count(), [0]

    def counted(channel: GrpcChannel, to: str, frame: bytes, timeout: float) -> None:
        begun[0] = next(count)
        if begun[0] == at:
            then()
        send(channel, to, frame, timeout)

    monkeypatch.setattr(GrpcChannel, "send", counted)
    return lambda: begun[0]


def behind(proxies: Mapping[str, Proxy], job: Job, name: str) -> Job:
    """Return a party's copy of the job, which dials all others by way of their proxies."""
    members = {
        other: member if other == name else msgspec.structs.replace(member, address=proxies[other].address)
        for other, member in job.parties.items()
    }
    return msgspec.structs.replace(job, parties=members)


CASES = [
    ("secureboost", "refuse", 3.0),
    *(slow(system, how, 3.0) for system in SYSTEMS for how in ("refuse", "freeze", "hang up") if how != "refuse"),
    *(slow(system, "refuse", 3.0) for system in SYSTEMS if system != "secureboost"),
    *(slow(system, "reset", 60.0) for system in SYSTEMS),
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
