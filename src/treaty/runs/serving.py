"""Prediction for parties that have rows and no part of the model, by those that do: `System.service`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.data.table import Schema, Table
from treaty.errors import ConfigError
from treaty.machine.process import cores
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart, RowPredictions
from treaty.runs.connecting import connected
from treaty.runs.job import Job, store_of
from treaty.runs.local_checks import check_file
from treaty.runs.party import find_part, places_to_predict, predicting, terms_of, to_predict
from treaty.runs.progress import check_writable
from treaty.runs.report import trained_model, write_service_report
from treaty.runs.rows import alignment_of, among_owners, open_rows
from treaty.runs.table_files import read_rows
from treaty.runs.threads import Role, RunTerms, play
from treaty.systems import find_system
from treaty.systems.observers import play_role
from treaty.systems.options import SystemOptions, converted
from treaty.systems.system import LabelledRows, PartySpec, Phase, Roles
from treaty.systems.vertical.prediction import Requests


def service_roles(job: Job) -> Roles | None:
    """Return who plays which role for parties without the model; None where none of them has rows to predict.

    Raises ConfigError where roles are wrong or missing.
    """
    service, own = job.system.service, job.settings()[0]
    if service is None or service.refused(own):
        return None
    places = places_to_predict(job)
    if not any(place.has_rows for name, place in places.items() if name != job.active):
        return None
    return service.assign(places, job.active, own)


def serve_party(job: Job, name: str, roles: Roles, phase: Phase | None = None) -> RowPredictions | None:
    """Run one party's role of such a prediction, and write its report; return what its own rows are predicted to be.

    Raises TreatyError, whatever ends it; ConfigError where this party takes no part in it.
    """
    service, (own, common) = job.system.service, job.settings()
    assert service is not None
    if name not in roles.of:
        raise ConfigError(f"{name} takes no part in predictions: expected --as to be one of {', '.join(roles.of)}")
    has_part, store = roles.of[name] in job.system.has_model, store_of(job, name) or Path(job.output)
    check_writable([Path(job.output), *([] if has_part or name in roles.owners else [store])])

    def read(schema: Schema) -> Table:
        return read_rows(job.table_rules(name), to_predict(job, name), schema).features

    def role(party: Party) -> RowPredictions | None:
        began = time.perf_counter()
        inputs = replace(
            terms_of(job, roles).inputs(party, cores(job.n_jobs)), part=find_part(job, name) if has_part else None,
            model_id="" if has_part else trained_model(job, name), store=store, patience=job.patience,
            apart=job.apart, read=read,
        )  # fmt: skip
        found: RowPredictions | None = play_role(service.programs[roles.of[name]], inputs)
        learned = service.disclosures(roles, own, common)
        write_service_report(job, party, roles.of[name], learned, time.perf_counter() - began, has_part=has_part)
        return found

    return connected(job, name, roles, "predict", role, phase=phase, service=service)


def predict_hidden(
    part: ModelPart,
    tables: Mapping[str, Table],
    options: SystemOptions,
    *,
    store: Path | None = None,
    n_jobs: int | None = None,
    **boosting: Any,
) -> dict[str, NDArray[np.float64]]:
    """Return the margins of each user's rows, every role in a thread: they and the model do not meet.

    Parameters
    ----------
    part : ModelPart
        The model, as the system's server has it.
    tables : mapping of str to Table
        Each user's rows, made with the model's schema.
    options : SystemOptions
        Of a system with a service, ``FedXGB(edges=5, comparison="additive", max_queries=100)`` say.
    store : Path or None
        Folder in which rows of each user are counted over all calls, as in a job. None: in this call alone.
    n_jobs : int or None
        Threads; None for all cores.
    **boosting
        Options of boosting that bound the model: `n_estimators` and `max_depth`, as it was trained with.

    Returns
    -------
    dict of str to float64 (n_rows, n_outputs)

    Raises
    ------
    ConfigError
        When the system or its options have no such prediction; edge servers are too few; a user is called like another
        role; the model has no bins or trees, or more or deeper ones than the options say; or a count cannot be used.
    DataError
        When a table has another schema, or a user more rows than are left to it.
    """
    system = find_system(options.system)
    common = converted(boosting, system.common, "predict_hidden").checked(options)
    options.check(common)
    service = system.service
    reason = f"system {system.name!r} has no prediction on shares" if service is None else service.refused(options)
    if service is None or reason:
        raise ConfigError(reason)
    helpers = system.helpers(tables, options)
    active = next(name for name, place in helpers.items() if place.role == "server")
    roles = service.assign({**helpers, **dict.fromkeys(tables, PartySpec())}, active, options)
    threads = max(1, cores(n_jobs) // len(roles.having("edge")))
    terms = RunTerms(system, options, common, roles)

    def program(party: Party) -> Any:
        name = party.name
        inputs = replace(
            terms.inputs(party, threads), part=part if name == active else None, store=store, alone=False,
            read=lambda schema: tables[name],
        )  # fmt: skip
        return play_role(service.programs[roles.of[name]], inputs)

    programs: dict[str, Role] = dict.fromkeys(roles.of, program)
    played = play(programs, service.links(roles, options), job="predict", protocol=system.name)
    return {name: played.results[name].margins for name in tables}


# ----------------------------------------------------------------
# Prediction for a service: parties align their rows once and stay connected, and rows are asked for one by one.

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
    roles, threads = predicting(job), cores(job.n_jobs)
    part, path = find_part(job, name), to_predict(job, name)
    check_file(name, path)

    def role(party: Party) -> None:
        with among_owners(party, roles):
            alignment = alignment_of(job, name, path, threads=threads)
            rows = open_rows(party, job.table_rules(name), path, part.schema, alignment, phase=phase, in_order=True)
        assert rows.canonical is not None
        data = LabelledRows(rows.features, np.zeros(0), ids=rows.canonical)
        requests = None
        if name == job.active:
            requests = ready({one: number for number, one in enumerate(rows.canonical())})
        inputs = terms_of(job, roles).inputs(party, threads, phase=phase)
        inputs = replace(inputs, part=part, data=data, apart=job.apart, requests=requests)
        play_role(job.system.online[roles.of[name]], inputs)

    connected(job, name, roles, "serve", role, phase=phase)
