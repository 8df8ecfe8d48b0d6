"""Prediction for a service: parties align their rows once and stay connected, and rows are asked for one by one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from treaty.errors import ConfigError
from treaty.messaging.party import Party
from treaty.parallel import cores
from treaty.runs.job import Job
from treaty.runs.local_checks import check_file
from treaty.runs.meeting.connecting import connected
from treaty.runs.party import apart, find_part, predicting, to_predict
from treaty.runs.reading import among_owners
from treaty.runs.rows import open_rows
from treaty.systems.system import LabelledRows, Phase, Seat
from treaty.systems.vertical.online import Requests

Ready = Callable[[dict[str, int]], Requests]
"""``ready(numbers)``: the active party can be asked; `numbers` are those of common rows, by their canonical ids."""


def check_online(job: Job) -> None:
    """Refuse a service of what can only be predicted in batches.

    Raises
    ------
    ConfigError
    """
    if not job.system.online or job.settings()[0].hides_decisions:
        raise ConfigError(
            f"models of protocol {job.protocol!r} under these options are predicted in batches, or served by who has "
            "the whole model: a service with other parties is for linear models, and for trees whose splits each owner "
            "decides in the open"
        )
    if job.align is None:
        raise ConfigError("a service names rows by their ids: expected [align] in the job, got none")


def serve_online(job: Job, name: str, ready: Ready, phase: Phase | None = None) -> None:
    """Run one party's role of a service with its saved part, until the active party's requests end.

    Raises
    ------
    TreatyError
        Whatever ends it.
    """
    check_online(job)
    cast, (own, common), threads = predicting(job), job.settings(), cores(job.n_jobs)
    part, path = find_part(job, name), to_predict(job, name)
    check_file(name, path)

    def role(party: Party) -> None:
        with among_owners(party, cast):
            rows = open_rows(party, job, path, part.schema, threads=threads, phase=phase, in_order=True)
        assert rows.canonical is not None
        data = LabelledRows(rows.features, np.zeros(0), ids=rows.canonical)
        requests = None
        if name == job.active:
            requests = ready({one: number for number, one in enumerate(rows.canonical())})
        seat = Seat(
            party=party, options=own, common=common, cast=cast, part=part, data=data, threads=threads, phase=phase,
            apart=apart(job), requests=requests,
        )  # fmt: skip
        job.system.online[cast.roles[name]](seat)

    connected(job, name, cast, "serve", role, phase=phase)
