"""The verdict of a node's policies on a proposed job, and what the job would reveal, before anybody approves it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from treaty.data.reading import check_there
from treaty.errors import TreatyError
from treaty.node.cards import Card
from treaty.node.identity import Own
from treaty.node.policy import Facts, PolicyVerdict, verdict
from treaty.node.proposals import Verb, data_sets, roles_of
from treaty.node.runner import local_job, tables_of
from treaty.node.settings import Settings
from treaty.runs.expectations import Sizes
from treaty.runs.job import Job
from treaty.runs.local_checks import CheckFinding, check_own
from treaty.runs.report import learned_by

_HOW_READ = ("id", "columns", "drop", "categorical")


def verdict_on(settings: Settings, trusted: Collection[str], job: Job, verb: Verb) -> PolicyVerdict:
    """Return the joint verdict of the policies of all data sets that a job uses at this node.

    Parameters
    ----------
    trusted : collection of str
        The peers whose cards are trusted.

    Queries are run and tables are read if rules need it. If this party brings no data, a person must approve.
    """
    name = settings.name
    strangers = [party for party in job.parties if party != name and party not in trusted]
    cards = f"no trusted card, or no [peers.NAME], of {', '.join(strangers)}" if strangers else "cards of all parties"
    findings, needs_person = [CheckFinding("keys", not strangers, cards)], False
    named = data_sets(job, name, verb)
    for of in named:
        try:
            data_set = settings.data_set(of)
            if data_set.sql is None:
                check_there(data_set.path, name)
            found = verdict(job, verb, name, data_set, Facts(data_set, name))
            main = settings.data_set(named[0])
            if any(getattr(data_set, name) != getattr(main, name) for name in _HOW_READ):
                differ = f"{of} needs the id, columns, drop and categorical of {main.name}, as which it is read"
                findings.append(CheckFinding("eval_tables", False, differ))
        except TreatyError as error:
            findings.append(CheckFinding("data", False, f"{of}: {error}"))
            continue
        where = f"{of}: " if len(named) > 1 else ""
        findings += [CheckFinding(finding.what, finding.fine, where + finding.said) for finding in found.findings]
        needs_person |= found.needs_person
    return PolicyVerdict(all(finding.fine for finding in findings), needs_person or not named, findings)


def checked(
    own: Own, cards: Mapping[str, Card], settings: Settings, job: Job, verb: Verb, told: Sizes | None = None
) -> list[CheckFinding]:
    """Read this node's tables as the job would, and check folders, keys and the clock; return the findings.

    `told` are the table sizes that other parties sent.
    """
    tables = tables_of(job, verb, settings)
    for of in tables:
        settings.data_set(of).fetch()
    # An address at which nobody listens, and which nobody dials.
    nowhere = {own.name: f"unix:{settings.folder}"}
    local = local_job(job, "check", verb, own, cards, settings, tables, nowhere)
    return check_own(local, own.name, told)


def learned(job: Job, verb: Verb) -> dict[str, list[str]]:
    """Return what each party, or role, would learn, in sentences."""
    if verb == "train":
        return learned_by(job, roles_of(job, verb))
    rows = "the rows that all have" if verb == "serve" else "its rows"
    lines = {party: [f"which of {rows} are asked for, and when"] for party in job.parties if party != job.active}
    what = "predictions" if verb != "explain" else "predictions, and what each party's columns add to them in all"
    return {job.active: [f"{what}, of the rows that all parties have"], **lines}


AT_ONCE = 4
"""Verdicts that are computed at the same time."""
OF_ONE = 2
"""Verdicts on jobs of one submitter that are started and not finished, so that it cannot block the others."""


class Verdicts:
    """Computes verdicts on jobs that wait for approval, each once, in a few threads; `wake` is called after each."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._found: dict[str, Future[PolicyVerdict]] = {}
        # With submitters; includes jobs that have ended.
        self._under_way: list[tuple[str, Future[PolicyVerdict]]] = []
        self._readers = ThreadPoolExecutor(AT_ONCE, "treaty-verdict")

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)

    def ask(self, job: str, submitter: str, find: Callable[[], PolicyVerdict]) -> PolicyVerdict | None:
        """Return or raise the result of `find` for a job; None if it is not finished.

        Call again until it is: it starts when there is a free thread.
        """
        if job not in self._found:
            self._under_way = [each for each in self._under_way if not each[1].done()]
            # A slow query of one submitter must not block the verdicts on others' jobs.
            if sum(of == submitter for of, _ in self._under_way) >= OF_ONE:
                return None
            self._found[job] = begun = self._readers.submit(find)
            self._under_way.append((submitter, begun))
            begun.add_done_callback(lambda _: self._wake())
        return self._found[job].result() if self._found[job].done() else None

    def there(self, job: str) -> PolicyVerdict | None:
        """Return the verdict on a job; None if there is none yet, or no longer."""
        found = self._found.get(job)
        return found.result() if found is not None and found.done() and found.exception() is None else None

    def drop(self, job: str) -> None:
        """Forget a job that has ended; a verdict that has started runs to its end."""
        found = self._found.pop(job, None)
        if found is not None:
            found.cancel()
