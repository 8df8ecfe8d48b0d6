"""What a node finds of a proposed job before anybody approves it: all policies that it touches, and what is learned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from treaty.data.reading import check_there
from treaty.errors import TreatyError
from treaty.node.cards import Card
from treaty.node.identity import Own
from treaty.node.policy import PolicyVerdict, facts_of, verdict
from treaty.node.proposals import Verb, data_sets, roles_of
from treaty.node.runner import local_job, tables_of
from treaty.node.settings import DataSet, Settings
from treaty.runs.expectations import Sizes
from treaty.runs.job import Job
from treaty.runs.local_checks import Finding, check_own
from treaty.runs.report import learned_by


def verdict_on(settings: Settings, trusted: Collection[str], job: Job, verb: Verb) -> PolicyVerdict:
    """Return what the policies of all data sets that a job names here say of it together.

    Parameters
    ----------
    trusted : collection of str
        The peers whose cards are trusted.

    Queries are run, and tables read, as far as rules ask for it. A party that brings no data needs a person.
    """
    name = settings.name
    strangers = [party for party in job.parties if party != name and party not in trusted]
    said = f"no trusted card, or no [peers.NAME], of {', '.join(strangers)}" if strangers else "cards of all parties"
    findings, needs_person = [Finding("keys", not strangers, said)], False
    named = data_sets(job, name, verb)
    for of in named:
        try:
            data_set = settings.data_set(of)
            if data_set.sql is None:
                check_there(data_set.path, name)
            found = verdict(job, verb, name, data_set, facts_of(data_set, name))
            main = settings.data_set(named[0])
            if _read_by(data_set) != _read_by(main):
                said = f"{of} has another id, columns, drop or categorical than {main.name}, as which it is read"
                findings.append(Finding("eval_tables", False, said))
        except TreatyError as error:
            findings.append(Finding("data", False, f"{of}: {error}"))
            continue
        where = f"{of}: " if len(named) > 1 else ""
        findings += [Finding(finding.what, finding.fine, where + finding.said) for finding in found.findings]
        needs_person |= found.needs_person
    return PolicyVerdict(all(finding.fine for finding in findings), needs_person or not named, findings)


def _read_by(data_set: DataSet) -> tuple[object, ...]:
    """Return how a data set's table is read."""
    return data_set.id, data_set.columns, data_set.drop, data_set.categorical


def checked(
    own: Own, cards: Mapping[str, Card], settings: Settings, job: Job, verb: Verb, told: Sizes | None = None
) -> list[Finding]:
    """Return what this node finds when it reads its tables as the job would, and tries folders, keys and its clock.

    `told` are sizes of other parties' tables.
    """
    tables = tables_of(job, verb, settings)
    for of in tables:
        settings.data_set(of).fetch()
    nowhere = {own.name: f"unix:{settings.folder}"}  # nobody listens there, nobody dials it
    local = local_job(job, "check", verb, own, cards, settings, tables, nowhere)
    return check_own(local, own.name, told)


def learned(job: Job, verb: Verb) -> dict[str, list[str]]:
    """Return what each party, or role, would learn, in words."""
    if verb == "train":
        return learned_by(job, roles_of(job, verb))
    lines = {party: ["which of its rows are asked for, and when"] for party in job.parties if party != job.active}
    if verb == "serve":
        lines = {party: ["which of the rows that all have are asked for, and when"] for party in lines}
    what = "predictions" if verb != "explain" else "predictions, and what each party's columns add to them in all"
    return {job.active: [f"{what}, of the rows that all parties have"], **lines}


# --------------- verdicts that jobs wait for: tables are read, and queries run, in a few threads beside the node's own

AT_ONCE = 4
"""Verdicts that are worked out at a time."""
OF_ONE = 2
"""Verdicts on jobs of one submitter that have begun, or wait for a thread, so that others' do not wait for it."""


class Verdicts:
    """The verdicts on jobs that wait to be approved here, each worked out once; `wake` is called when one is there."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._found: dict[str, Future[PolicyVerdict]] = {}
        self._under_way: list[tuple[str, Future[PolicyVerdict]]] = []  # with submitters; also on jobs that have ended
        self._readers = ThreadPoolExecutor(AT_ONCE, "treaty-verdict")

    def close(self) -> None:
        """Begin no more verdicts."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    def ask(self, job: str, submitter: str, find: Callable[[], PolicyVerdict]) -> PolicyVerdict | None:
        """Return what `find` has returned of a job, or raise what it has raised; None where it is not there yet.

        Ask again until it is: it begins when there is a place.
        """
        if job not in self._found:
            self._under_way = [each for each in self._under_way if not each[1].done()]
            if sum(of == submitter for of, _ in self._under_way) >= OF_ONE:
                return None
            self._found[job] = begun = self._readers.submit(find)
            self._under_way.append((submitter, begun))
            begun.add_done_callback(lambda _: self._wake())
        return self._found[job].result() if self._found[job].done() else None

    def there(self, job: str) -> PolicyVerdict | None:
        """Return the verdict on a job, None where there is none yet, or no more."""
        found = self._found.get(job)
        return found.result() if found is not None and found.done() and found.exception() is None else None

    def drop(self, job: str) -> None:
        """Forget a job that has ended; what has begun comes to its end all the same."""
        found = self._found.pop(job, None)
        if found is not None:
            found.cancel()
