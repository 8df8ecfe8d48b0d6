"""Every party of a logistic regression on this machine, in threads over the in-memory channel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.compute import cores
from treaty.data.table import Schema, Table
from treaty.models.linear import LinearPart, label_holder
from treaty.runs.threads import Role, Traffic, play, traffic_of
from treaty.systems.linear_options import LinearOptions
from treaty.systems.logistic import roles as quasi_newton
from treaty.systems.logistic.prediction import predict_guest, predict_host
from treaty.systems.logistic.setup import cipher_of
from treaty.systems.pooled.training import Labelled

COORDINATOR = "coordinator"


def coordinator_name(parties: Mapping[str, Any], options: LinearOptions) -> str | None:
    """Name the coordinator that `fit` plays: no data party's name; None without one."""
    if not options.has_coordinator:
        return None
    names = (COORDINATOR, *(f"{COORDINATOR}-{number}" for number in range(2, len(parties) + 2)))
    return next(name for name in names if name not in parties)


def mesh(parties: Mapping[str, Any]) -> dict[str, list[str]]:
    """Link every party with every other."""
    return {name: [other for other in parties if other != name] for name in parties}


def train_linear_in_threads(
    tables: Mapping[str, Table],
    data: Labelled,
    active: str,
    classes: list[Any],
    options: LinearOptions,
    n_jobs: int | None,
    progress: Callable[[list[float]], None],
    kept: Path | None,
) -> tuple[dict[str, LinearPart], Traffic]:
    """Train with every party in a thread of its own; return their parts and the traffic."""
    threads, parties, lead = cores(n_jobs), list(tables), coordinator_name(tables, options)
    roles: dict[str, Role] = {
        name: lambda party, name=name: quasi_newton.host(  # type: ignore[misc]
            party, tables[name], options, guest=active, parties=parties, coordinator=lead, threads=threads, kept=kept
        )
        for name in parties
    }
    roles[active] = lambda party: quasi_newton.guest(
        party, data, options, parties=parties, coordinator=lead, classes=classes, threads=threads,
        progress=progress, kept=kept,
    )  # fmt: skip
    if lead is not None:
        roles[lead] = lambda party: quasi_newton.coordinate(
            party, options, guest=active, parties=parties, threads=threads
        )
    played = play(roles, mesh(roles), job="fit", protocol=options.protocol)
    return {name: played.results[name] for name in parties}, traffic_of(played.transcripts.values())


def predict_linear_in_threads(parts: Mapping[str, LinearPart], tables: Mapping[str, Table]) -> NDArray[np.float64]:
    """Predict with every party in a thread of its own; return the margins (n_rows,)."""
    guest = label_holder(parts.values()).party
    hosts = [name for name in parts if name != guest]
    roles: dict[str, Role] = {
        name: lambda party, name=name: predict_host(  # type: ignore[misc]
            party, parts[name], tables[name], guest=guest, hosts=hosts
        )
        for name in hosts
    }
    roles[guest] = lambda party: predict_guest(party, parts[guest], tables[guest])
    margins: NDArray[np.float64] = play(roles, mesh(roles), job="predict", protocol="logistic").results[guest]
    return margins


def compile_linear_kernels(options: LinearOptions) -> None:
    """Compile what a training under these options needs, by one of a few rows between threads."""
    rng = np.random.default_rng(0)
    schema = Schema(("x",), (None,))
    tables = {name: Table(schema, [rng.standard_normal(40).astype(np.float32)], 40) for name in ("a", "b")}
    data = Labelled(tables["a"], np.arange(40, dtype=np.float64) % 2.0)
    small = {"max_iter": 1, "period": 1, "batch_size": 40, "tol": 0.0, "memory": 1, "key_bits": None}
    keyed = cipher_of(options) != "lattice"
    chosen = msgspec.structs.replace(options, **small, insecure_test_key_bits=768 if keyed else None)
    train_linear_in_threads(tables, data, "a", [0, 1], chosen, 1, lambda losses: None, None)
