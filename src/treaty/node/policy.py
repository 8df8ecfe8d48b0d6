"""Whether a proposed job may use a data set: each rule of its policy, with a sentence for a person.

A rule that cannot be decided counts as broken, with the reason: for example, if a system has no such epsilon, or if a
table cannot be read. So an option or system that is unknown to a policy never passes silently. Findings are for the
owner of the data set: they name columns and numbers of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.data.arrow_tables import as_text
from treaty.data.binning import fit_bins
from treaty.data.columns import quoted
from treaty.data.reading import open_table, table_facts
from treaty.data.table import to_table
from treaty.errors import TreatyError
from treaty.machine.process import is_code
from treaty.models.checkpoints import noise_folder
from treaty.node.settings import DataSet, Policy
from treaty.privacy.ledger import FILE, job_of, per_person, read_ledger
from treaty.runs.job import Job, Member, id_column
from treaty.runs.local_checks import CheckFinding
from treaty.systems import SYSTEMS
from treaty.systems.vertical.exact_sums import expected_share, expected_sides

# Rules that need no look at the table.
_FIRST = ("peers", "systems", "losses", "verbs")
# Ten times 0.1 must not exceed 1.
_ROUNDED = 1.0 + 1e-9
_WITHOUT_EPSILON = ("fedxgboost-smm", "fedxgb", "quasi-newton", "sgd")  # they make no noisy release


@dataclass(frozen=True, slots=True)
class PolicyVerdict:
    """The decision of a policy.

    Attributes
    ----------
    allowed : bool
        Whether the job satisfies every rule.
    needs_person : bool
        Whether a person must approve the job, too.
    findings : list of CheckFinding
        One for each rule that applies; only those on parties, system and verb if one of these is not allowed.
    own : list of CheckFinding
        Of a trial: findings on this node's tables, folders and keys, which are not sent to others.
    """

    allowed: bool
    needs_person: bool
    findings: list[CheckFinding]
    own: list[CheckFinding] = field(default_factory=list)


class Facts:
    """Facts about a party's data set, read when first needed; a query then runs once.

    Raises DataError or ConfigError if the data set cannot be read.
    """

    def __init__(self, data_set: DataSet, party: str) -> None:
        self._data_set, self._party = data_set, party

    @property
    def rows(self) -> int:
        return self._seen[0]

    @property
    def columns(self) -> list[str]:
        return list(self._seen[1].names)

    @property
    def kinds(self) -> dict[str, str]:
        """Arrow's name of each column's type: "double", "string"."""
        schema = self._seen[1]
        return {name: str(kind) for name, kind in zip(schema.names, schema.types, strict=True)}

    def codes(self, columns: list[str], max_bin: int) -> NDArray[np.uint8]:
        """Return the bins of columns, uint8 (n_rows, n_columns), as in a training; this reads all rows."""
        categorical = self._data_set.categorical
        arrow = open_table(self._path, columns=columns, text=self._text, party=self._party)
        table = to_table(as_text(arrow, categorical), party=self._party, text_as_categories=True)
        return fit_bins(table, max_bin).transform(table)

    @cached_property
    def _seen(self) -> tuple[int, Any]:
        return table_facts(self._path, text=self._text, party=self._party)

    @cached_property
    def _path(self) -> Path:
        return self._data_set.fetch()

    @property
    def _text(self) -> list[str]:
        return [*([] if self._data_set.id is None else [self._data_set.id]), *self._data_set.categorical]


def verdict(job: Job, verb: str, party: str, data_set: DataSet, facts: Facts) -> PolicyVerdict:
    """Return the verdict of a data set's policy on a proposed job.

    Parameters
    ----------
    job : Job
        As proposed.
    verb : {"train", "predict", "explain", "serve"}
    party : str
        Whose data set it is.
    data_set : DataSet
        One of the data sets that the job names for this party; each has its own verdict.
    facts : Facts
    """
    case = _Case(job, verb, party, data_set, facts)
    findings: list[CheckFinding] = []
    for rule, check in _RULES.items():
        if rule not in _FIRST and not all(finding.fine for finding in findings if finding.what in _FIRST):
            # Do not read tables for a job that is refused anyway.
            break
        try:
            found = check(case)
        except TreatyError as error:
            found = False, f"cannot be decided: {error}"
        if found is not None:
            findings.append(CheckFinding(rule, *found))
    return PolicyVerdict(all(finding.fine for finding in findings), data_set.policy.approve, findings)


def over_budget(job: Job, verb: str, party: str, data_set: DataSet, name_in_ledger: str) -> str:
    """Return why another attempt at a job would exceed the budgets of its policy; "" if it would not.

    This is checked before each attempt, as other jobs and earlier attempts may have spent since the approval.
    `name_in_ledger` is the job's name in ledgers.
    """
    case = _Case(job, verb, party, data_set, Facts(data_set, party), name_in_ledger)
    found = [each for each in (_epsilon(case), _epsilon_total(case)) if each is not None]
    return next((sentence for fine, sentence in found if not fine), "")


@dataclass(frozen=True)
class _Case:
    job: Job
    verb: str
    party: str
    data_set: DataSet
    facts: Facts
    name_in_ledger: str = ""  # of a job that has started: its name in ledgers

    @property
    def policy(self) -> Policy:
        return self.data_set.policy

    @cached_property
    def member(self) -> Member:
        """The party's part of the job, completed by the settings of the data set."""
        return self.data_set.member(self.job.parties[self.party], aligned=self.job.align is not None)

    @cached_property
    def settings(self) -> tuple[Any, Any]:
        return self.job.settings()

    @property
    def trains(self) -> bool:
        return self.verb == "train"

    @property
    def known(self) -> bool:
        """Whether the system is built in."""
        return any(self.job.protocol in systems for systems in SYSTEMS.values())

    @property
    def rounds_of_trees(self) -> int:
        """Trees per round."""
        return self.job.classes if self.job.classes > 2 else 1

    @cached_property
    def features(self) -> list[str]:
        """Columns that a model may use."""
        without = {*self.member.drop, *self.job.table_rules(self.party).labels}
        if self.job.align is not None:
            without.add(self.member.id or id_column(self.job, self.party))
        return [name for name in self.member.columns or self.facts.columns if name not in without]


# None: the policy has no such rule, or it does not apply to the job.
_Found = tuple[bool, str] | None


def _peers(case: _Case) -> _Found:
    others = [name for name in case.job.parties if name != case.party]
    strangers = [name for name in others if name not in case.policy.peers]
    allowed = quoted(case.policy.peers) if case.policy.peers else "nobody"
    return not strangers, f"with {quoted(others)}; allowed: {allowed}"


def _systems(case: _Case) -> _Found:
    protocol, allowed = case.job.protocol, case.policy.systems
    if allowed is None:
        return case.known, f"system {protocol!r}; allowed: every built-in system"
    return protocol in allowed, f"system {protocol!r}; allowed: {quoted(allowed) or 'none'}"


def _losses(case: _Case) -> _Found:
    named, allowed = case.job.common.get("objective"), case.policy.losses
    return (named in allowed, f"loss {named!r}; allowed: {quoted(allowed) or 'none'}") if is_code(named) else None


def _verbs(case: _Case) -> _Found:
    allowed = case.policy.verbs
    return None if allowed is None else (case.verb in allowed, f"to {case.verb}; allowed: {', '.join(allowed)}")


def _consents(case: _Case) -> _Found:
    own, _ = case.settings
    asked = [name for name in ("allow_insecure", "allow_exact_sums") if getattr(own, name, False)]
    asked += [name for name in ("show_weights", "show_eval_margins") if getattr(own, name, False)]
    asked += ["paper"] if own.mode == "paper" else []
    asked += ["dropout"] if getattr(own, "dropout", None) == "accept" else []
    if not asked:
        return True, "no consent to broken or more revealing options"
    allowed = quoted(case.policy.consents) if case.policy.consents else "none"
    return set(asked) <= set(case.policy.consents), f"consent to {quoted(asked)}; allowed: {allowed}"


def _alignments(case: _Case) -> _Found:
    if case.job.align is None:
        return None
    asked, most = case.job.align.max_runs, case.policy.most_alignments
    return asked <= most, f"at most {asked} alignments with a partner in 30 days (align.max_runs); allowed: {most}"


def _labels(case: _Case) -> _Found:
    if not case.trains or not (brought := case.job.table_rules(case.party).labels):
        return None
    allowed = "allowed" if case.policy.labels else "its labels may not be used"
    return case.policy.labels, f"its columns {quoted(brought)} as label, weight or group; {allowed}"


def _columns(case: _Case) -> _Found:
    asked, data_set, allowed = case.job.parties[case.party].columns, case.data_set, case.policy.columns
    hidden = [name for name in asked or () if name in data_set.drop or name not in (data_set.columns or asked or ())]
    if hidden:
        return False, f"columns {quoted(hidden)}, which the data set excludes"
    if allowed is None:
        return None
    used = [*case.features, *(case.job.table_rules(case.party).labels if case.trains else ())]
    if case.job.align is not None and data_set.id is None:  # the job names the id column
        used.append(id_column(case.job, case.party))
    more = [name for name in used if name not in allowed]
    return not more, f"columns {quoted(more or used) if used else 'none'}; allowed: {quoted(allowed) or 'none'}"


def _least_rows(case: _Case) -> _Found:
    least = case.policy.least_rows
    return None if least is None else (case.facts.rows >= least, f"{case.facts.rows} rows; allowed: {least} or more")


def _least_child(case: _Case) -> _Found:
    least = case.policy.least_min_child_samples
    if least is None or not case.trains:
        return None
    given = getattr(case.settings[1], "min_child_samples", None)
    if given is None:
        return False, f"cannot be decided: models of {case.job.protocol!r} have no leaves whose rows could be counted"
    return given >= least, f"leaves of {given} rows (min_child_samples); allowed: {least} or more"


def _sums(case: _Case) -> _Found:
    allowed = case.policy.sums
    if allowed is None or not case.trains or {"open", "sealed"} <= set(allowed):
        return None
    mode = _mode_of_sums(case)
    if mode is None:
        return False, f"cannot be decided: system {case.job.protocol!r} has neither open nor sealed sums of bins"
    return mode in allowed, f"{mode} sums; allowed: {', '.join(allowed) or 'none'}"


def _mode_of_sums(case: _Case) -> str | None:
    """Return how sums of bins are revealed; None if the system has none, or its paper mode reveals more."""
    own, _ = case.settings
    if not case.known or own.ciphers is None:
        return None
    return "sealed" if own.ciphers.sealed else "open"


def _recoverable(case: _Case) -> _Found:
    most, job = case.policy.most_recoverable, case.job
    if most is None:
        return None
    (own, common), mode = case.settings, _mode_of_sums(case)
    if not case.trains and (mode is None or own.hides_decisions):
        return None
    allowed = f"allowed: {most:.0%} of the bins of its rows"
    if mode is None or own.mode == "paper":
        return False, f"cannot be decided: what {job.protocol!r} reveals is not only sums of bins; {allowed}"
    if case.party == job.active:
        return True, f"no sum of bins of its own columns is revealed; {allowed}"
    codes = case.facts.codes(case.features, common.most_bins)
    decided = not case.trains or case.data_set.name in job.parties[case.party].eval_tables
    # Estimate from the actual bins, which is why this rule reads the table.
    owners = len([name for name, member in job.parties.items() if member.role is None])
    share = expected_sides(codes, own.ciphers, common, case.rounds_of_trees, owners, decided=decided)
    estimate = f"sides of splits reveal to {job.active} an estimated {share:.1%}"
    if case.trains and mode == "open":
        varied = job.task != "classification" or job.weight is not None
        share = max(share, expected_share(codes, common, case.rounds_of_trees, varied=varied))
        estimate = f"open sums, from which {job.active} may recover an estimated {share:.1%}"
    return share <= most, f"{estimate}; {allowed}"


def _epsilon(case: _Case) -> _Found:
    most = case.policy.most_epsilon
    if most is None or not case.trains:
        return None
    paid, why = _cost(case)
    own = _spent(case)[0] if paid and case.name_in_ledger else 0.0
    earlier = f", and epsilon {own:g} in earlier attempts" if own else ""
    return _in_all(case, own, paid) <= most * _ROUNDED, f"{why}{earlier}; allowed: epsilon {most:g}"


def _epsilon_total(case: _Case) -> _Found:
    most = case.policy.most_epsilon_total
    if most is None or not case.trains:
        return None
    paid, why = _cost(case)
    own, others = _spent(case)
    fine = paid == 0.0 or others + _in_all(case, own, paid) <= most * _ROUNDED
    return fine, f"{why}, and epsilon {own + others:g} so far; allowed: epsilon {most:g} together"


def _spent(case: _Case) -> tuple[float, float]:
    """Return what a person of the data set has paid so far: in earlier attempts at the job, and in other jobs."""
    folder = noise_folder(case.data_set.store, case.party)
    entries = read_ledger(folder) if (folder / FILE).exists() else []
    own = [entry for entry in entries if job_of(entry) == case.name_in_ledger]
    return per_person(own), per_person([entry for entry in entries if job_of(entry) != case.name_in_ledger])


def _in_all(case: _Case, own: float, paid: float) -> float:
    """Return the job's cost after one more attempt; earlier ones cost `own`, and one costs `paid`."""
    # Systems that pay once release the same noise in every attempt; others draw new noise.
    return max(own, paid) if case.job.system.pays_once else own + paid


def _cost(case: _Case) -> tuple[float, str]:
    """Return the maximum that a job's noisy releases of the party's table cost a person, and what they are."""
    own = case.settings[0]
    protocol, active = case.job.protocol, case.party == case.job.active
    nothing = 0.0, "no noisy release of this table, so no epsilon is paid"
    if protocol in _WITHOUT_EPSILON or (protocol in ("secureboost", "fedxgboost-ldp") and not active):
        return nothing
    if protocol in ("secureboost", "fedxgboost-ldp") and (labels := own.label_epsilon) is not None:
        return labels, f"epsilon {labels:g} for labels randomised once"
    if protocol == "secureboost":
        return nothing
    if protocol == "fedxgboost-ldp":
        return _cost_of_gradients(case)
    if protocol == "federboost-horizontal":
        total = own.epsilon_total
        return nothing if total is None else (total, f"epsilon {total:g} for noise on sums (epsilon_total)")
    if protocol == "federboost-vertical":
        if active:
            return nothing
        costs = own.epsilons(case.features)
        paid = math.fsum(costs.values())
        return paid, f"epsilon {paid:g} for randomised buckets of {len(costs)} columns"
    return math.inf, f"cannot be decided: the cost of system {protocol!r} is unknown"


def _cost_of_gradients(case: _Case) -> tuple[float, str]:
    own, common = case.settings
    if own.mode == "paper":
        return math.inf, "exact sums in addition to the noise, so no epsilon holds (mode='paper')"
    trees = common.n_estimators * case.rounds_of_trees
    paid = trees * own.noise_epsilon
    # With a delta, it limits the accountant's result.
    if own.epsilon_total is not None and own.delta is None:
        paid = min(paid, own.epsilon_total)
    return paid, f"epsilon {paid:g} for noise on gradients of {trees} trees"


_RULES: dict[str, Callable[[_Case], _Found]] = {
    "peers": _peers,
    "systems": _systems,
    "losses": _losses,
    "verbs": _verbs,
    "consents": _consents,
    "labels": _labels,
    "columns": _columns,
    "most_alignments": _alignments,
    "least_rows": _least_rows,
    "least_min_child_samples": _least_child,
    "sums": _sums,
    "most_recoverable": _recoverable,
    "most_epsilon": _epsilon,
    "most_epsilon_total": _epsilon_total,
}
