"""How a job that has ended is forgotten: what it has left in the node's folder is removed, and the audit log says so.

Ledgers, in ``stores``, count for later jobs as well, and are never touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from treaty.errors import ConfigError, TreatyError
from treaty.node.proposals import Proposal, data_sets
from treaty.node.rules.settings import Settings
from treaty.node.state.job_files import checkpoints_of, log_of, remove_checkpoints, results_of
from treaty.node.state.store import FINAL, TRANSITIONS, JobRow, Store


def is_forgotten(store: Store, job: str) -> bool:
    """Tell whether a job was forgotten here."""
    return any(event.get("what") == "forgotten" for event in store.events_of(job))


def kept_for(store: Store, row: JobRow) -> str:
    """Return why a job cannot be forgotten now, "" where it can."""
    if row.state not in FINAL:
        return f"job {row.id[:12]} is {row.state}: only jobs that have ended can be forgotten; treaty cancel ends it"
    for other, proposal in _open(store):
        if proposal.model == row.id:
            return (
                f"job {other.id[:12]}, which is {other.state}, needs the model of job {row.id[:12]} ({proposal.verb}): "
                "wait for its end, or cancel it"
            )
    return ""


def left_of(settings: Settings, store: Store, row: JobRow) -> list[Path]:
    """Return the files, and the folder of checkpoints, that a job has left here.

    Predictions by a training's model are the predictions', and left alone; a query's rows that are kept for its next
    verdict are a job's as long as no open job names the same data set.
    """
    folder, proposal = Path(settings.folder), _proposal(row)
    of_model = results_of(folder, row.id, "" if proposal is None else proposal.model)
    if proposal is not None and proposal.model:
        found = [of_model / f"{settings.name}.{proposal.verb}-{row.id[:16]}.csv"]
    else:
        predictions = [f"{settings.name}.{verb}-*.csv" for verb in ("predict", "explain")]
        found = [file for file in sorted(of_model.glob("*")) if not any(map(file.match, predictions))]
    found += [checkpoints_of(folder, row.id), log_of(folder, row.id)]
    named = _queries(settings, proposal)
    named -= {of for _, other in _open(store) for of in _queries(settings, other)}
    found += [Path(settings.data[of].path) for of in sorted(named)]
    return [path for path in found if path.exists()]


def forget(settings: Settings, store: Store, row: JobRow, by: str) -> list[Path]:
    """Remove what a job has left here, and note what that was and who has asked for it; return what was removed.

    Raises
    ------
    ConfigError
        If the job has not ended, an open job needs its model, or something cannot be removed.
    """
    why = kept_for(store, row)
    if why:
        raise ConfigError(why)
    folder, left = Path(settings.folder), left_of(settings, store, row)
    if left:  # noted first: nothing is ever gone without an entry
        removed = [str(path.relative_to(folder)) for path in left]
        store.note({"what": "forgotten", "job": row.id, "by": by, "removed": removed})
    for path in left:
        try:
            if path == checkpoints_of(folder, row.id):
                remove_checkpoints(folder, row.id)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot remove {path}: {error.strerror}; mend that, and forget the job again") from None
        with suppress(OSError):  # there is more in it
            if path.parent.parent == folder / "models":
                path.parent.rmdir()
    return left


def _open(store: Store) -> Iterator[tuple[JobRow, Proposal]]:
    for row in store.jobs(TRANSITIONS.keys() - FINAL):
        proposal = _proposal(row)
        if proposal is not None:
            yield row, proposal


def _proposal(row: JobRow) -> Proposal | None:
    """Return a job's proposal; None of one of another version of Treaty."""
    try:
        return msgspec.json.decode(row.proposal, type=Proposal)
    except msgspec.MsgspecError:
        return None


def _queries(settings: Settings, proposal: Proposal | None) -> set[str]:
    """Return the data sets of a job here that are the result of a query."""
    try:
        named = [] if proposal is None else data_sets(proposal.described(), settings.name, proposal.verb)
    except (TreatyError, KeyError):  # of another version of Treaty
        return set()
    return {of for of in named if of in settings.data and settings.data[of].sql is not None}
