"""One party's share of running a job of logistic regression: training and prediction with its own table, key and part.

All parties of a training are linked with each other; the coordinator, who has ``role = "coordinator"`` and no table,
takes no part in alignment and prediction.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import load_pem_x509_certificate
from numpy.typing import NDArray

from treaty.compute import cores
from treaty.errors import ConfigError, DataError
from treaty.messaging.certificates import load_certificate
from treaty.messaging.party import Party
from treaty.models.linear import LinearPart, load_linear_part
from treaty.runs.job import Job
from treaty.runs.party import connected, part_file
from treaty.runs.report import write_report
from treaty.runs.rows import Rows, labelled, open_rows
from treaty.runs.vertical_jobs import Phase
from treaty.systems.alignment.roles import Progress as Steps
from treaty.systems.logistic import roles as quasi_newton
from treaty.systems.logistic.disclosures import linear_disclosures
from treaty.systems.logistic.prediction import predict_guest, predict_host
from treaty.systems.logistic.roles import Epochs
from treaty.systems.logistic.setup import check_roles, cipher_of


def train_linear_party(
    job: Job, name: str, progress: Epochs | None = None, *, phase: Phase | None = None
) -> LinearPart | None:
    """Run one party's role of a training against the others' addresses, and save its part and report.

    Parameters
    ----------
    progress : callable or None
        At the active party, given the losses of all epochs so far.
    phase : callable or None
        Called while rows are aligned.

    Returns
    -------
    LinearPart or None
        None at the coordinator.

    Raises
    ------
    TreatyError
        Whatever ends the job; a finished model of an earlier run stays until this one is finished.
    """
    started = time.perf_counter()
    member, options, threads = job.parties[name], job.linear_options(), cores(job.n_jobs)
    lead, table = job.coordinator, str(member.table)
    check_roles(options, job.active, job.owners, lead)
    check_identities(job)
    if member.table is None and name != lead:
        raise ConfigError(f"the job names no table of {name}: add parties.{name}.table")
    Path(job.output).mkdir(parents=True, exist_ok=True)
    aligning: Steps | None = None if phase is None else partial(phase, "aligning")
    store = Path(job.store or Path(table).parent)
    begun: list[float] = []

    def watch(losses: list[float]) -> None:
        begun.append(time.perf_counter())
        if progress is not None:
            progress(losses)

    def role(party: Party) -> LinearPart | None:
        if name == lead:
            quasi_newton.coordinate(party, options, guest=job.active, parties=job.owners, threads=threads)
            return None
        with _star(party, job):
            rows = open_rows(party, job, table, None, threads=threads, in_order=True, progress=aligning)
        if name != job.active:
            return quasi_newton.host(
                party, rows.features, options, guest=job.active, parties=job.owners, coordinator=lead,
                threads=threads, kept=store, rows_digest=rows.digest,
            )  # fmt: skip
        data, classes = labelled(rows, job, name, table, None, training=True)
        assert classes is not None
        if len(classes) != 2:
            raise DataError(
                f"{name}: expected labels of two classes in column {job.label!r}, got {len(classes)} different ones in "
                f"{len(data.y)} rows"
            )
        return quasi_newton.guest(
            party, data, options, parties=job.owners, coordinator=lead, classes=classes, threads=threads,
            progress=watch, kept=store, rows_digest=rows.digest,
        )  # fmt: skip

    part, transcript = connected(job, name, options.protocol, role, peers=_others(job, name, job.parties))
    if part is not None:
        part.save(part_file(job.output, name))
    ended = time.perf_counter()
    first = begun[0] if begun else ended
    hosts, alone = [owner for owner in job.owners if owner != job.active], None if part is None else part.alone
    learned = linear_disclosures(job.active, hosts, lead, options, cipher_of(options), alone)
    seconds = {"setup": first - started, "training": ended - first}
    write_report(job, name, transcript, learned, seconds, encryption="" if part is None else part.encryption)
    return part


def predict_linear_party(job: Job, name: str) -> tuple[Any, NDArray[np.float64] | None]:
    """Run one party's role of a prediction with its saved part.

    Returns
    -------
    ids : pyarrow.ChunkedArray or None
        Of the rows, where they were aligned.
    margins : float64 (n_rows,) or None
        At the active party.
    """
    if name == job.coordinator:
        raise ConfigError(f"{name}, the coordinator, has no part of the model and no part in predictions")
    path = job.parties[name].predict_table
    if path is None:
        raise ConfigError(f"the job names no rows of {name} to predict: add parties.{name}.predict_table")
    part = find_linear_part(job, name)
    hosts = [owner for owner in job.owners if owner != job.active]

    def role(party: Party) -> tuple[Rows, NDArray[np.float64] | None]:
        with _star(party, job):
            rows = open_rows(party, job, path, part.schema, threads=cores(job.n_jobs))
        if name == job.active:
            return rows, predict_guest(party, part, rows.features)
        predict_host(party, part, rows.features, guest=job.active, hosts=hosts)
        return rows, None

    (rows, margins), _ = connected(job, name, "logistic", role, peers=_others(job, name, job.owners))
    return rows.ids, margins


def find_linear_part(job: Job, name: str) -> LinearPart:
    """Load a party's part of a finished training."""
    return load_linear_part(part_file(job.output, name))


def check_identities(job: Job) -> None:
    """Refuse a coordinator that is one of the data parties under another name, as far as certificates tell.

    Raises
    ------
    ConfigError
    """
    certificates = {name: member.certificate for name, member in job.parties.items() if member.certificate}
    if job.coordinator not in certificates:
        return
    keys = {name: _public_key(path) for name, path in certificates.items()}
    same = [name for name, key in keys.items() if name != job.coordinator and key == keys[job.coordinator]]
    if same:
        raise ConfigError(
            f"{job.coordinator}, the coordinator, has the same key as {', '.join(same)}: who has data must not "
            "coordinate; take a third party, or coordinator = false"
        )


def _public_key(path: str) -> bytes:
    key = load_pem_x509_certificate(load_certificate(path)).public_key()
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _others(job: Job, name: str, parties: Any) -> list[str]:
    return [other for other in parties if other != name]


@contextmanager
def _star(party: Party, job: Job) -> Iterator[None]:
    """Let the active party speak with every other data party, and these with it alone, as alignment has it."""
    everyone = party.peers
    for peer in everyone:
        if peer == job.coordinator or job.active not in (party.name, peer):
            party.set_aside(peer)
    yield
    party.peers = everyone
