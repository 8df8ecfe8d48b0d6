"""A data set, its policy, and the policy's verdict on a proposed job: each rule, with a sentence for a person.

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
from typing import Annotated, Any, Literal

import msgspec

from treaty.cluster.shards import Cluster
from treaty.data.arrow_tables import as_text
from treaty.data.binning import fit_bins
from treaty.data.columns import quoted
from treaty.data.reading import open_table, table_facts
from treaty.data.sql import database_uri, fetch
from treaty.data.table import to_table
from treaty.errors import TreatyError
from treaty.machine.arrays import Codes
from treaty.machine.process import is_code
from treaty.models.checkpoints import ledger_folder
from treaty.node.proposals import Verb
from treaty.privacy.discrete_gaussian import epsilon_of, rho_for
from treaty.privacy.ledger import DEFAULT_DELTA, FILE, ROUNDED, job_of, per_person, read_ledger
from treaty.runs.job import Job, Member, id_column
from treaty.runs.local_checks import CheckFinding
from treaty.systems import SYSTEMS
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.vertical.exact_sums import expected_share, expected_sides

Sums = Literal["open", "sealed"]
Consent = Literal["paper", "allow_insecure", "allow_exact_sums", "show_weights", "show_eval_margins", "dropout"]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rules for using a data set. None: the rule allows everything."""

    # All other parties of a job must be in this list. Empty: none.
    peers: list[str] = []
    # Allowed systems. None: all built-in ones; custom ones, ``package.module:NAME``, must be listed.
    systems: list[str] | None = None
    # Allowed custom losses, ``package.module:CLASS``.
    losses: list[str] = []
    verbs: list[Verb] | None = None
    # How a training may reveal sums of bins.
    sums: list[Sums] | None = None
    # "hidden": no job in which a party learns which rows are in a node of a tree, or which sides they take.
    membership: Literal["hidden"] | None = None
    # The only columns that may be used, also as label, weight or group. The id column need not be listed if the data
    # set names it.
    columns: list[str] | None = None
    # Whether a training may take labels from it.
    labels: bool = True
    # Options by which a job may make this party consent to insecure or more revealing protocols. Only listed ones are
    # allowed; "paper" is mode="paper", "dropout" is dropout="accept".
    consents: list[Consent] = []
    # Maximum alignments that a job lets one partner start within 30 days.
    most_alignments: AtLeastOne = 20
    # Minimum rows of the table.
    least_rows: AtLeastOne | None = None
    # Minimum rows of a leaf that a training may allow.
    least_min_child_samples: AtLeastOne | None = None
    # Maximum share of the table's bins that the active party may recover from open sums or sides of splits (estimated).
    most_recoverable: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    # Maximum cost of noisy releases for a person of this table: of one job, and of all jobs in the ledger.
    most_epsilon: NotNegative | None = None
    most_epsilon_total: NotNegative | None = None
    # Whether a person must approve a job that passes. False: it is approved automatically.
    approve: bool = True


class DataSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table that jobs may name: a file, a folder of Parquet files, or the result of an SQL query."""

    # Path of a .csv, .csv.gz, .parquet or .arrow file, or of a folder of Parquet files.
    table: str | None = None
    # Instead, a query: one SELECT, with ORDER BY if there is no `id`.
    sql: str | None = None
    # Where to read the URI of the PostgreSQL database: "env:NAME", an environment variable of the node, or "file:PATH",
    # a file that only the node's user can read.
    database: str | None = None
    # Timeout of the query.
    sql_seconds: Positive = 3600.0
    # Its id column.
    id: str | None = None
    # Columns to use; None: all except `drop`.
    columns: list[str] | None = None
    # Columns to leave out, and categorical columns whose cells may look like numbers.
    drop: list[str] = []
    categorical: list[str] = []
    # The cluster that adds up its rows in trainings, as in a job file; ignored by protocols that cannot use one.
    cluster: str | None = None
    cluster_workers: Annotated[int, msgspec.Meta(ge=1)] | None = None
    policy: Policy = Policy()
    # Not in the file: its name, the node's folder, and the data set of the same table whose store it shares.
    name: str = ""
    folder: str = ""
    ledgers: str = ""

    def __post_init__(self) -> None:
        if self.cluster is not None:
            Cluster(self.cluster, self.cluster_workers)

    @property
    def path(self) -> str:
        """The file that a job reads: the table, or the snapshot that `fetch` makes of a query."""
        return self.table or str(Path(self.folder) / "snapshots" / f"{self.name}.parquet")

    @property
    def store(self) -> str:
        """Folder of what later jobs need: ledgers, hints, counts of alignments."""
        return str(Path(self.folder) / "stores" / (self.ledgers or self.name))

    def member(self, given: Member, *, aligned: bool) -> Member:
        """Return a party's fields of a proposed job, completed by this data set; ids are no features."""
        unused = [] if aligned or self.id is None else [self.id]
        drop = [*self.drop, *unused, *given.drop]
        return msgspec.structs.replace(
            given, table=self.path, id=self.id or given.id,
            columns=self.columns if given.columns is None else given.columns, drop=list(dict.fromkeys(drop)),
            categorical=list(dict.fromkeys([*self.categorical, *given.categorical])),
            most_epsilon=self.policy.most_epsilon, most_epsilon_total=self.policy.most_epsilon_total,
        )  # fmt: skip

    def fetch(self, to: str | Path | None = None) -> Path:
        """Run the query and store its rows as a snapshot, at `path` or `to`; return the path. A table stays in place.

        Raises ConfigError or DataError; neither shows the URI.
        """
        if self.sql is None:
            return Path(self.path)
        place, source = Path(to or self.path), str(self.database)
        as_text = [*([] if self.id is None else [self.id]), *self.categorical]
        fetch(database_uri(source), self.sql, place, text=as_text, seconds=self.sql_seconds, what=f"data.{self.name}")
        return place


# Rules that need no look at the table.
_FIRST = ("peers", "systems", "losses", "verbs")
# Systems that make no noisy release, or only under some options and about some tables.
_MAY_BE_FREE = (
    *("fedxgboost-smm", "quasi-newton", "sgd", "statistics"),
    *("secureboost", "fedxgboost-ldp", "federboost-horizontal", "fedxgb", "federboost-vertical"),
)
_CONSENTS = ("allow_insecure", "allow_exact_sums", "show_weights", "show_eval_margins")


@dataclass(frozen=True, slots=True)
class PolicyVerdict:
    """The decision of a policy."""

    # Whether the job satisfies every rule; and whether a person must approve it, too.
    allowed: bool
    needs_person: bool
    # One for each rule that applies; only those on parties, system and verb if one of these is not allowed.
    findings: list[CheckFinding]
    # Of a trial: findings on this node's tables, folders and keys, which are not sent to others.
    own: list[CheckFinding] = field(default_factory=list)


def verdict(job: Job, verb: str, party: str, data_set: DataSet) -> PolicyVerdict:
    """Return the verdict of the policy of a data set, one of those that a job names for `party`, on this job."""
    case = Case(job, verb, party, data_set)
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
    case = Case(job, verb, party, data_set, name_in_ledger)
    found = [each for each in (_epsilon(case), _epsilon_total(case)) if each is not None]
    return next((sentence for fine, sentence in found if not fine), "")


class Case:
    """A job and a data set that it names for `party`, and facts of the table.

    The table is read when facts are first needed; a query then runs once. That raises DataError or ConfigError if it
    cannot be read. `name_in_ledger` is that of a job that has started.
    """

    def __init__(self, job: Job, verb: str, party: str, data_set: DataSet, name_in_ledger: str = "") -> None:
        self.job, self.party, self.data_set, self.policy = job, party, data_set, data_set.policy
        self.verb, self.trains, self.name_in_ledger = verb, verb == "train", name_in_ledger
        self.built_in = any(job.protocol in systems for systems in SYSTEMS.values())
        self.trees_a_round = job.classes if job.classes > 2 else 1
        # The party's part of the job, completed by the settings of the data set.
        self.member = data_set.member(job.parties[party], aligned=job.align is not None)
        self._text = [*([] if data_set.id is None else [data_set.id]), *data_set.categorical]

    @cached_property
    def settings(self) -> tuple[Any, Any]:
        return self.job.settings()

    @cached_property
    def path(self) -> Path:
        return self.data_set.fetch()

    @cached_property
    def facts(self) -> tuple[int, list[str]]:
        """The table's number of rows, and its columns."""
        rows, schema = table_facts(self.path, text=self._text, party=self.party)
        return rows, list(schema.names)

    def features(self) -> list[str]:
        """Return the columns that a model may use."""
        without = {*self.member.drop, *self.job.table_rules(self.party).labels}
        if self.job.align is not None:
            without.add(self.member.id or id_column(self.job, self.party))
        return [name for name in self.member.columns or self.facts[1] if name not in without]

    def codes(self, columns: list[str], common: BoostingOptions) -> Codes:
        """Return the bins of columns, `Bins.code_type` (n_rows, n_columns), as in a training; this reads all rows."""
        arrow = open_table(self.path, columns=columns, text=self._text, party=self.party)
        table = to_table(as_text(arrow, self.data_set.categorical), party=self.party, text_as_categories=True)
        return fit_bins(table, common.most_bins, max_categories=common.most_categories).transform(table)


# None: the policy has no such rule, or it does not apply to the job.
_Found = tuple[bool, str] | None


def _peers(case: Case) -> _Found:
    others = [name for name in case.job.parties if name != case.party]
    allowed = case.policy.peers
    return set(others) <= set(allowed), f"with {quoted(others)}; allowed: {quoted(allowed) or 'none'}"


def _systems(case: Case) -> _Found:
    protocol, allowed = case.job.protocol, case.policy.systems
    if allowed is None:
        return case.built_in, f"system {protocol!r}; allowed: every built-in system"
    return protocol in allowed, f"system {protocol!r}; allowed: {quoted(allowed) or 'none'}"


def _losses(case: Case) -> _Found:
    named, allowed = case.job.common.get("objective"), case.policy.losses
    return (named in allowed, f"loss {named!r}; allowed: {quoted(allowed) or 'none'}") if is_code(named) else None


def _verbs(case: Case) -> _Found:
    allowed = case.policy.verbs
    return None if allowed is None else (case.verb in allowed, f"to {case.verb}; allowed: {', '.join(allowed)}")


def _consents(case: Case) -> _Found:
    own, _ = case.settings
    asked = [name for name in _CONSENTS if getattr(own, name, False)]
    asked += ["paper"] if own.mode == "paper" else []
    asked += ["dropout"] if getattr(own, "dropout", None) == "accept" else []
    if not asked:
        return True, "no consent to insecure or more revealing options"
    allowed = case.policy.consents
    return set(asked) <= set(allowed), f"consent to {quoted(asked)}; allowed: {quoted(allowed) or 'none'}"


def _alignments(case: Case) -> _Found:
    if case.job.align is None:
        return None
    asked, most = case.job.align.max_runs, case.policy.most_alignments
    return asked <= most, f"at most {asked} alignments with a partner in 30 days (align.max_runs); allowed: {most}"


def _labels(case: Case) -> _Found:
    if not case.trains or not (used := case.job.table_rules(case.party).labels):
        return None
    allowed = "allowed" if case.policy.labels else "its labels may not be used"
    return case.policy.labels, f"its columns {quoted(used)} as label, weight or group; {allowed}"


def _columns(case: Case) -> _Found:
    asked, data_set, allowed = case.job.parties[case.party].columns, case.data_set, case.policy.columns
    hidden = [name for name in asked or () if name in data_set.drop or name not in (data_set.columns or asked or ())]
    if hidden:
        return False, f"columns {quoted(hidden)}, which the data set excludes"
    if allowed is None:
        return None
    used = [*case.features(), *(case.job.table_rules(case.party).labels if case.trains else ())]
    if case.job.align is not None and data_set.id is None:  # the job names the id column
        used.append(id_column(case.job, case.party))
    more = [name for name in used if name not in allowed]
    return not more, f"columns {quoted(more or used) if used else 'none'}; allowed: {quoted(allowed) or 'none'}"


def _least_rows(case: Case) -> _Found:
    least = case.policy.least_rows
    return None if least is None else (case.facts[0] >= least, f"{case.facts[0]} rows; allowed: {least} or more")


def _least_child(case: Case) -> _Found:
    least = case.policy.least_min_child_samples
    if least is None or not case.trains:
        return None
    given = getattr(case.settings[1], "min_child_samples", None)
    if given is None:
        return False, f"cannot be decided: models of {case.job.protocol!r} have no leaves whose rows could be counted"
    return given >= least, f"leaves of {given} rows (min_child_samples); allowed: {least} or more"


def _sums(case: Case) -> _Found:
    allowed = case.policy.sums
    if allowed is None or not case.trains or {"open", "sealed"} <= set(allowed):
        return None
    mode = _mode_of_sums(case)
    if mode is None:
        return False, f"cannot be decided: system {case.job.protocol!r} has neither open nor sealed sums of bins"
    return mode in allowed, f"{mode} sums; allowed: {', '.join(allowed) or 'none'}"


def _membership(case: Case) -> _Found:
    if case.policy.membership is None:
        return None
    own, allowed = case.settings[0], 'allowed: "hidden"'
    if not case.built_in or not own.hides_rows:
        return False, f"rows of nodes are known; {allowed}"
    if own.rounds_margins:
        return False, f'rounded margins of training rows are revealed; {allowed} with training_rows="refused"'
    return True, f"rows of nodes are hidden from all parties; {allowed}"


def _mode_of_sums(case: Case) -> str | None:
    """Return how sums of bins are revealed; None if the system has none, or its paper mode reveals more."""
    own, _ = case.settings
    if not case.built_in or own.ciphers is None:
        return None
    return "sealed" if own.ciphers.sealed else "open"


def _recoverable(case: Case) -> _Found:
    most, job = case.policy.most_recoverable, case.job
    if most is None:
        return None
    (own, common), mode = case.settings, _mode_of_sums(case)
    if not case.trains and (mode is None or own.hides_decisions):
        return None
    allowed = f"allowed: {most:.0%} of the bins of its rows"
    if mode is not None and own.hides_rows:
        return True, f"neither sums of bins nor sides of splits are revealed; {allowed}"
    if mode is None or own.mode == "paper":
        return False, f"cannot be decided: what {job.protocol!r} reveals is not only sums of bins; {allowed}"
    if case.party == job.active:
        return True, f"no sum of bins of its own columns is revealed; {allowed}"
    codes = case.codes(case.features(), common)
    # all rows are walked down an earlier model's trees
    decided = not case.trains or bool(job.from_model) or case.data_set.name in job.parties[case.party].eval_tables
    # Estimate from the actual bins, which is why this rule reads the table.
    owners = sum(member.role is None for member in job.parties.values())
    trees = case.trees_a_round * common.num_parallel_tree
    share = expected_sides(codes, own.ciphers, common, trees, owners, decided=decided)
    estimate = f"sides of splits reveal to {job.active} an estimated {share:.1%}"
    if case.trains and mode == "open":
        share = max(share, expected_share(codes, common, trees, varied=job.varied))
        estimate = f"open sums, from which {job.active} may recover an estimated {share:.1%}"
    return share <= most, f"{estimate}; {allowed}"


def _epsilon(case: Case) -> _Found:
    most = case.policy.most_epsilon
    if most is None or not case.trains:
        return None
    paid, why = _cost(case)
    own = _spent(case)[0] if paid and case.name_in_ledger else 0.0
    earlier = f", and epsilon {own:g} in earlier attempts" if own else ""
    return _in_all(case, own, paid) <= most * ROUNDED, f"{why}{earlier}; allowed: epsilon {most:g}"


def _epsilon_total(case: Case) -> _Found:
    most = case.policy.most_epsilon_total
    if most is None or not case.trains:
        return None
    paid, why = _cost(case)
    own, others = _spent(case)
    fine = paid == 0.0 or others + _in_all(case, own, paid) <= most * ROUNDED
    return fine, f"{why}, and epsilon {own + others:g} so far; allowed: epsilon {most:g} together"


def _spent(case: Case) -> tuple[float, float]:
    """Return what a person of the data set has paid so far: in earlier attempts at the job, and in other jobs."""
    folder = ledger_folder(case.data_set.store, case.party, "noise")
    entries = read_ledger(folder) if (folder / FILE).exists() else []
    own = [entry for entry in entries if job_of(entry) == case.name_in_ledger]
    return per_person(own), per_person([entry for entry in entries if job_of(entry) != case.name_in_ledger])


def _in_all(case: Case, own: float, paid: float) -> float:
    """Return the job's cost after one more attempt; earlier ones cost `own`, and one costs `paid`."""
    # Systems that pay once release the same noise in every attempt; others draw new noise.
    return max(own, paid) if case.job.system.pays_once else own + paid


def _cost(case: Case) -> tuple[float, str]:
    """Return the maximum that a job's noisy releases of the party's table cost a person, and what they are."""
    own, common = case.settings
    protocol, active = case.job.protocol, case.party == case.job.active
    match protocol:
        case "secureboost" | "fedxgboost-ldp" if active and own.label_epsilon is not None:
            return own.label_epsilon, f"epsilon {own.label_epsilon:g} for labels randomised once"
        case "fedxgboost-ldp" if active and own.mode == "paper":
            return math.inf, "exact sums in addition to the noise, so no epsilon holds (mode='paper')"
        case "fedxgboost-ldp" if active:
            trees = common.most_rounds * case.trees_a_round
            paid = trees * own.noise_epsilon
            # With a delta, it limits the accountant's result.
            if own.epsilon_total is not None and own.delta is None:
                paid = min(paid, own.epsilon_total)
            return paid, f"epsilon {paid:g} for noise on gradients of {trees} trees"
        case "federboost-horizontal" | "fedxgb" if own.epsilon_total is not None:
            total, delta = own.epsilon_total, own.delta or DEFAULT_DELTA
            # At a delta near 1 any noise costs nothing: the ledger's delta counts.
            paid = total if delta <= DEFAULT_DELTA else epsilon_of(rho_for(total, delta), DEFAULT_DELTA)
            return paid, f"epsilon {paid:g} for noise on sums (epsilon_total)"
        case "federboost-vertical" if not active:
            costs = own.epsilons(case.features(), case.party, list(case.job.parties))
            paid = math.fsum(costs.values())
            return paid, f"epsilon {paid:g} for randomised buckets of {len(costs)} columns"
    if protocol in _MAY_BE_FREE:
        return 0.0, "no noisy release of this table, so no epsilon is paid"
    return math.inf, f"cannot be decided: the cost of system {protocol!r} is unknown"


_RULES: dict[str, Callable[[Case], _Found]] = {
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
    "membership": _membership,
    "most_recoverable": _recoverable,
    "most_epsilon": _epsilon,
    "most_epsilon_total": _epsilon_total,
}
