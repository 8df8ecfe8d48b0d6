"""The smallest job of each system, and its parties played in threads of this process, over TLS."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flat import option_lines
from pace import within
from tables import real_table
from treaty.errors import TreatyError
from treaty.node.identity import make_keys
from treaty.runs.job import Job
from treaty.runs.job_files import load_job
from treaty.runs.party import train_party
from treaty.runs.prediction import find_part, owners_of_model
from treaty.runs.processes import free_ports

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


def write_job(
    folder: Path, system: str, given: tuple[dict[str, Any], dict[str, str]] | None = None, rows: int = 180
) -> Job:
    """Write the tables, keys and job of a system, with its options and parties or `given` ones."""
    options, roles = SYSTEMS[system] if given is None else given
    X, y = real_table("binary", rows=rows)
    protocol, tables = option_lines(system, **options)
    lines = ['name = "test"', protocol, 'active = "a"', 'label = "y"', "timeout = 1200", "reconnect = 75", "n_jobs = 1"]
    by_row = system in ("federboost-horizontal", "fedxgb")
    with_rows = [name for name, role in roles.items() if not role and (name, system) != ("a", "fedxgb")]
    for name, port in zip(roles, free_ports(len(roles)), strict=True):
        make_keys(folder, name)
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
