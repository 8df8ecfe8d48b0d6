"""One party's share of predictions with a saved part: batches, explanations, row by row, for parties without a model.

If tables are split by column, all owners of the model work together, helpers of the training do not. If they are split
by row, a party with the whole model predicts alone, and a system may have a `Service` for parties that have rows but no
model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.data.reading import check_there
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, DataError, PeerAborted, PeerLost, PeerTimeout
from treaty.machine.process import cores
from treaty.messaging.party import Party
from treaty.messaging.transcript import Transcript
from treaty.models.checkpoints import checkpoint_file, load_checkpoint
from treaty.models.interpretation import explain_pooled
from treaty.models.linear import load_linear_part
from treaty.models.statistics import load_statistics_part
from treaty.models.trees import ModelPart, RowPredictions, check_starts, load_part, predict_pooled
from treaty.runs.connecting import check_writable, connected
from treaty.runs.job import Job, id_column, store_of
from treaty.runs.party import attempted, part_file, signer
from treaty.runs.report import trained_model, write_service_report
from treaty.runs.rows import open_rows
from treaty.runs.table_files import FileRead, margins_of, read_rows, read_to_predict
from treaty.runs.threads import Role, RunTerms, play, predicting_roles
from treaty.systems import find_system
from treaty.systems.observers import play_role
from treaty.systems.options import SystemOptions, converted
from treaty.systems.system import LabelledRows, PartySpec, Phase, RoleInput, Roles, Service
from treaty.systems.vertical.prediction import Requests, withheld_rows

Noted = Callable[[Transcript], None]
# ``ready(numbers)``: the active party can be asked; `numbers` are those of common rows, by their canonical ids, but for
# rows whose margins are not told
Ready = Callable[[dict[str, int]], Requests]

# ---------------------------------------------------------------- which parties have a model, and what they predict


def find_part(job: Job, name: str) -> Any:
    """Read a party's part: that of the last finished training, or else what an unfinished one has left."""
    finished, unfinished = part_file(job.output, name), checkpoint_file(job.checkpoints or job.output, name)
    readers: dict[str, Any] = {"regression": load_linear_part, "columns": load_statistics_part}
    read = readers.get(job.system.common.table, load_part)
    if read is load_part and unfinished.exists() and not finished.exists():
        return load_checkpoint(unfinished, name).part
    return read(finished, name)


def to_predict(job: Job, name: str) -> str:
    """Return the path of a party's rows to predict; ConfigError if the job names none."""
    path = job.parties[name].predict_table
    if path is None:
        raise ConfigError(f"the job names no rows of {name} to predict: add parties.{name}.predict_table")
    return path


def owners_of_model(job: Job) -> list[str]:
    """Return the parties with a part of the model, or with the model, in the job's order."""
    if job.by_row and job.system.has_model.issuperset(job.system.train):
        return list(job.parties)  # a job file for predictions need not name their training tables
    service = _service(job)
    if service is not None:
        # users need no training table
        roles = service.assign(_places(job), job.active, job.settings()[0])
    else:
        roles = job.roles() if job.by_row else predicting(job)
    return roles.having(*job.system.has_model)


def predicting(job: Job) -> Roles:
    """Return who plays which role in a prediction by columns: helpers of the training take no part."""
    named = job.system.named_roles
    wrong = [name for name, member in job.parties.items() if member.edge or member.role not in (None, *named)]
    if wrong:
        known = f"no role but {' and '.join(sorted(named))}" if named else "no role"
        raise ConfigError(
            f"expected {known} and no edge with protocol {job.protocol!r}, got them at {', '.join(wrong)}"
        )
    return predicting_roles(job.active, [name for name, member in job.parties.items() if member.role is None])


def service_roles(job: Job) -> Roles | None:
    """Return who plays which role for parties without the model; None if none of them has rows to predict.

    Raises ConfigError if roles are wrong or missing.
    """
    service, places = _service(job), _places(job)
    if service is None or not any(place.has_rows for name, place in places.items() if name != job.active):
        return None
    return service.assign(places, job.active, job.settings()[0])


def _service(job: Job) -> Service | None:
    service = job.system.service
    return None if service is None or service.refused(job.settings()[0]) else service


def _places(job: Job) -> dict[str, PartySpec]:
    """Return each party's role and edge server in the job, and whether it has rows to predict."""
    return {
        name: PartySpec(member.role, member.edge, member.predict_table is not None)
        for name, member in job.parties.items()
    }


def check_has_model(job: Job, name: str) -> None:
    """Raise ConfigError if a party has no part of the model."""
    owners, role = owners_of_model(job), job.parties[name].role
    if name not in owners:
        what = f"{name}, the {role}, has no part of the model" if role else f"{name} has no part of the model"
        served = _service(job) is not None and not role
        hint = f"; or, to have rows of it predicted, parties.{name}.predict_table" if served else ""
        raise ConfigError(f"{what}: expected --as {' or '.join(owners)}{hint}")


def check_explainable(job: Job) -> None:
    """Raise ConfigError if the model has no trees, or if an explanation would show what the system hides."""
    if "explain" in job.system.cannot:
        raise ConfigError(job.system.cannot["explain"])
    if job.settings()[0].hides_decisions:
        hidden = "hidden rows have no" if job.settings()[0].hides_rows else 'inference="shared" hides the'
        raise ConfigError(f"{hidden} decisions that contributions could be made of")


def check_online(job: Job) -> None:
    """Raise ConfigError if a job's model can predict in batches only."""
    if not job.system.online:
        raise ConfigError(
            f"models of protocol {job.protocol!r} are predicted in batches, or served by a party with the whole model: "
            "a service with other parties is for linear models, and for trees whose owners of splits decide rows"
        )
    if job.align is None:
        raise ConfigError("a service names rows by their ids: expected [align] in the job, got none")


# ---------------------------------------------------------------- batches, and their explanation


def predict_party(
    job: Job, name: str, phase: Phase | None = None, noted: Noted | None = None
) -> tuple[Any, NDArray[np.float64] | None]:
    """Run one party's role of a prediction with its saved part; if rows are split, the part is the whole model.

    `noted` is called with the transcript of all messages, if there are any. Return the rows' ids, a
    `pyarrow.ChunkedArray`, if they were aligned; and margins, float64 (n_rows, n_outputs), or (n_rows,) of a logistic
    regression, at the active party, or if rows are split, at each party with the model, for its own rows.
    """
    check_has_model(job, name)
    if job.by_row:
        part, rows = _alone(job, name)
        return None, predict_pooled([part], [rows], cores(job.n_jobs))
    return _with_rows(job, name, "predict", phase, noted)


def explain_party(job: Job, name: str, phase: Phase | None = None, noted: Noted | None = None) -> dict[str, Any]:
    """Run one party's role of an explanation with its saved part; `noted` as in `predict_party`.

    Return columns, (n_rows,) each: the ids, if rows were aligned; what each own column adds to each row's margin
    (TreeSHAP); and, at the active party, the bias and the total of each other party. With more than two classes, by
    column and class.
    """
    check_explainable(job)
    check_has_model(job, name)
    ids = None
    if job.by_row:
        whole, rows = _alone(job, name)
        values = explain_pooled([whole], [rows], cores(job.n_jobs))
        columns = dict(zip([*whole.schema.names, "bias"], values.transpose(2, 0, 1), strict=True))
    else:
        ids, found = _with_rows(job, name, "explain", phase, noted)
        own = found.own if name == job.active else found
        columns = dict(zip(find_part(job, name).schema.names, own.transpose(2, 0, 1), strict=True))
        if name == job.active:
            columns |= {f"all of {peer}": found.totals[peer] for peer in found.others}
            columns["bias"] = np.repeat(found.bias[:, None], found.own.shape[1], axis=1)
    several = len(next(iter(columns.values()), ())) > 1
    by_column = {
        f"{column}, class {k}" if several else column: values
        for column, of_outputs in columns.items()
        for k, values in enumerate(of_outputs)
    }
    return by_column if ids is None else {id_column(job, name): ids, **by_column}


def _alone(job: Job, name: str) -> tuple[Any, Table]:
    """Return the whole model and a party's rows to predict."""
    part = find_part(job, name)
    return part, read_rows(job.table_rules(name), to_predict(job, name), part.schema).features


def _with_rows(job: Job, name: str, verb: str, phase: Phase | None, noted: Noted | None) -> tuple[Any, Any]:
    """Run a role with the party's saved part and its rows to predict; return their ids, too, if they were aligned."""
    roles, path = predicting(job), to_predict(job, name)
    programs = job.system.predict if verb == "predict" else job.system.explain
    if not programs:
        raise ConfigError(f"protocol {job.protocol!r} trains no model: there is nothing to {verb}")

    def read() -> tuple[Any, FileRead]:
        part = find_part(job, name)
        check_there(path, name)
        if verb == "predict" and isinstance(part, ModelPart) and part.forest is not None:
            check_starts(part.forest, given=bool(job.base_margin))
        return part, read_to_predict(job.table_rules(name), path, part.schema)

    ahead, unready = attempted(name, read)

    def role(party: Party) -> tuple[Any, Any]:
        nonlocal ahead
        if unready is not None or ahead is None:
            raise unready or AssertionError("rows are read, or there is an error")
        (part, of_file), ahead = ahead, None
        rows = open_rows(party, job, roles, path, part.schema, phase=phase, read=of_file)
        data = LabelledRows(rows.features, np.zeros(0), ids=rows.canonical, ids_of=rows.ids_of)
        inputs = _inputs(party, job, roles, phase, part=part, data=data)
        found = play_role(programs[roles.of[name]], inputs)
        margins = margins_of(rows, job.table_rules(name), path)
        if verb == "predict" and margins is not None:
            found = found + margins
        if noted is not None:
            noted(party.transcript)
        return rows.ids, found

    try:
        return connected(job, name, roles, verb, role, phase=phase)
    except (PeerLost, PeerTimeout, PeerAborted):
        # this party's own error, which no other party was there to receive
        if unready is not None:
            raise unready from None
        raise


def _inputs(party: Party, job: Job, roles: Roles, phase: Phase | None, **own: Any) -> RoleInput[Any, Any]:
    """Return the input of a role of a prediction, of which `own` are this party's part, rows and so on."""
    terms = RunTerms(job.system, *job.settings(), roles)
    vouched = job.system.vouched(roles, terms.options, party.name) if terms.options.hides_decisions else []
    inputs = terms.inputs(party, cores(job.n_jobs), phase=phase)
    return replace(inputs, apart=job.apart, vouching=signer(job, party.name, vouched), **own)


# ---------------------------------------------------------------- for parties that have rows and no part of the model


def serve_party(job: Job, name: str, roles: Roles, phase: Phase | None = None) -> RowPredictions | None:
    """Run one party's role of a prediction by the system's `Service`, and write its report.

    Returns the predictions of its own rows, if it has any. Raises ConfigError if the party takes no part.
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
        inputs = _inputs(
            party, job, roles, None, part=find_part(job, name) if has_part else None,
            model_id="" if has_part else trained_model(job, name), store=store, patience=job.patience, read=read,
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
    """Return the margins of each user's rows, float64 (n_rows, n_outputs): users' rows and the model stay apart.

    Every role is played in a thread. `part` is the model as the system's server has it; `tables` are each user's rows,
    made with its schema; `options` are those of a system with a service, such as ``FedXGB(edges=5,
    comparison="additive", max_queries=100)``. In the folder `store`, the rows of each user are counted over all calls,
    as in a job; None: in this call alone. `boosting` are the options that bound the model: `n_estimators` and
    `max_depth`, as it was trained with.

    Raises ConfigError if the system or its options have no such prediction; if edge servers are too few; if a user has
    the name of another role; if the model has no bins or trees, or more or deeper ones than the options say; or if a
    count cannot be used. DataError if a table has another schema, or a user has more rows than its limit allows.
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


# ---------------------------------------------------------------- row by row, by parties that stay connected


def serve_online(job: Job, name: str, ready: Ready, phase: Phase | None = None) -> None:
    """Run one party's role of a service with its saved part, until the active party's requests end.

    Rows are aligned once; then the active party names them by number.
    """
    check_online(job)
    roles, path = predicting(job), to_predict(job, name)
    part = find_part(job, name)
    check_there(path, name)

    def role(party: Party) -> None:
        rows = open_rows(party, job, roles, path, part.schema, phase=phase, in_order=True)
        assert rows.canonical is not None
        data = LabelledRows(rows.features, np.zeros(0), ids=rows.canonical, ids_of=rows.ids_of)
        inputs = _inputs(party, job, roles, phase, part=part, data=data)
        if name == job.active:
            withheld, ids = withheld_rows(inputs), rows.canonical()
            if repeated := len(ids) - len(set(ids)):
                text = (
                    'a service names rows by their ids, but several rows have the same; on_duplicate="first" keeps one'
                )
                raise DataError(f"{name}: {text} - at {repeated} of {len(ids)} common rows", public=text)
            inputs.requests = ready({one: k for k, one in enumerate(ids) if not withheld[k]})
        play_role(job.system.online[roles.of[name]], inputs)

    connected(job, name, roles, "serve", role, phase=phase)
