"""The record that each system fills in, and what its role programs are given.

A system is one folder: `options.py` with its public class, role programs, and `system.py`, whose `SYSTEM` record names
them and what each role learns. Runners (`treaty.runs`) play any system from its record. `treaty.systems.SYSTEMS` lists
those of Treaty; a job file names another by ``protocol = "package.module:NAME"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.cluster.shards import Shards
from treaty.data.columns import Category
from treaty.data.table import Schema, Table
from treaty.messaging.certificates import Signer
from treaty.models.checkpoints import Keeper
from treaty.privacy.ledger import EpsilonLimits
from treaty.systems.expected import Expected, Forecast, Shape, not_expected
from treaty.systems.leakage import Routes, Stage, learned
from treaty.systems.observers import Evidence, Observers
from treaty.systems.options import CommonOptions, SystemOptions, Term, given, public_terms

if TYPE_CHECKING:
    import typing_extensions

    from treaty.messaging.party import Party
    from treaty.systems.pooled.options import BoostingOptions

    # covariant: a function for the input of any system takes that of each; defaults cannot run before Python 3.13
    Own = typing_extensions.TypeVar("Own", bound=SystemOptions, covariant=True, default=SystemOptions)
    Common = typing_extensions.TypeVar("Common", bound=CommonOptions, covariant=True, default=BoostingOptions)
else:
    Own, Common = TypeVar("Own"), TypeVar("Common")

# name of the training rows; eval sets have their own
TRAIN = "train"

Progress = Callable[[int, Any], None]
"""``progress(rounds, state)``, called as `Observer.round_finished` is."""

Phase = Callable[[str, int, int], None]
"""``phase(title, steps_done, steps_in_all)``, called while something is set up before the first round."""


@dataclass(frozen=True, slots=True)
class LabelledRows:
    """A party's rows, with labels where it has some."""

    # the party's own columns; perhaps none
    table: Table
    # 0/1, class numbers, or the regression target. Empty at a party without labels; float64 (n_rows,)
    y: NDArray[np.float64]
    # float64 (n_rows,) or None
    weight: NDArray[np.float64] | None = None
    # of the eval set; `TRAIN` for training rows
    name: str = TRAIN
    # returns every row's id in canonical form, where rows were aligned by them
    ids: Callable[[], list[str]] | None = None
    # of which column these are, and how they were read: no others can be equal to them
    ids_of: str = ""
    # of each row in the party's own file, where rows were aligned; int64 (n_rows,) or None
    numbers: NDArray[np.int64] | None = None
    # of these rows and their order, where rows were aligned; the same in every job on them
    digest: bytes | None = None
    # margins that boosting starts from; float64 (n_rows, n_outputs) or None
    base_margin: NDArray[np.float64] | None = None


@dataclass(frozen=True, slots=True)
class PartySpec:
    """A party as the job names it, before roles are assigned."""

    role: str | None = None
    edge: str | None = None
    has_rows: bool = True


@dataclass(frozen=True, slots=True)
class Roles:
    """Who plays which role in a run."""

    # the party with the labels, the leader, or the server
    active: str
    # every party's role, in the job's order
    of: dict[str, str]
    # the parties with rows, in the job's order, which is that of the joined table
    owners: list[str]
    # the edge server of each user; empty in systems without edge servers
    edges: dict[str, str] = field(default_factory=dict)

    def having(self, *roles: str) -> list[str]:
        """Return the parties with one of these roles, in the job's order."""
        return [name for name, role in self.of.items() if role in roles]

    def holder(self, role: str) -> str | None:
        """Return the one party with this role; None if there is none."""
        return next(iter(self.having(role)), None)


@dataclass(frozen=True, slots=True)
class AuditFolder:
    """Where a party keeps a record for an audit of gradients, and how many bytes it may have."""

    folder: Path
    limit: int


@dataclass(slots=True, kw_only=True)
class RoleInput(Generic[Own, Common]):
    """What a role program is given: the connected party, what all parties agree on, and what is this party's own.

    ``RoleInput[SecureBoost]`` has the options of SecureBoost, and of all boosting; ``RoleInput[SGD,
    RegressionOptions]`` those of a regression: mypy finds an option that is misspelt.
    """

    # connected with the peers that the system's `links` name
    party: Party
    options: Own
    common: Common
    roles: Roles
    # own training rows, or those to predict; None without any
    data: LabelledRows | None = None
    # labels by class number, where this party has labels; None for regression
    classes: list[Category] | None = None
    # as the job states it to all parties; with fewer than three a round has one tree
    n_classes: int = 2
    # whether all rows have different gradients from the first tree on: in regressions, and where rows have weights
    varied: bool = False
    # rows watched in training. Tables split by column: every party has its columns of each, in the same order
    eval_sets: Sequence[LabelledRows] = ()
    threads: int = 1
    # this party's cluster, which adds up its rows; None: this machine does
    shards: Shards | None = None
    # progress bars, recordings, and whatever else watches the role
    observers: Observers = field(default_factory=Observers)
    keeper: Keeper | None = None
    # folder for hints, noise keys and ledgers, which later jobs need. None: nothing is kept
    store: Path | None = None
    # this party's own limits, besides those of the job's options
    epsilon_limits: EpsilonLimits | None = None
    vouching: Signer = field(default_factory=Signer)
    # what this party adds to its messages so that it can be held to them later
    evidence: Evidence = field(default_factory=Evidence)
    # largest share of its own bins that sides of splits may reveal, over all jobs; None: no limit
    most_recoverable: float | None = None
    # monotone constraints on own columns, if tables are split by column
    directions: Mapping[str, int] = field(default_factory=dict)
    # seconds after which a silent user counts as lost; None is the system's own default
    patience: float | None = None
    # whether this party has a process of its own; False where all parties are threads of one process
    alone: bool = True
    # whether other organisations play the other parties; False where one has all keys
    apart: bool = False
    # when a simulated user drops out; see `System.absences`
    absence: Any = None
    # prediction: what training left here
    part: Any = None
    # which model is trained, noted by roles without a part of it; in a `Service`, that of this party's report
    model_id: str = ""
    # in a `Service`: returns own rows, given the model's columns, which others send
    read: Callable[[Schema], Table] | None = None
    # at the active party of a prediction row by row (`System.online`): what it is asked
    requests: Any = None

    @property
    def rows(self) -> LabelledRows:
        """`data`, at a party that must have some."""
        assert self.data is not None
        return self.data

    @property
    def n_outputs(self) -> int:
        """Outputs of a model of trees, by the job: one for each class where there are more than two."""
        return self.n_classes if self.n_classes > 2 else 1

    @property
    def trees_a_round(self) -> int:
        """Trees that a round has, by the job: `num_parallel_tree` for each output."""
        return self.n_outputs * int(getattr(self.common, "num_parallel_tree", 1))

    @property
    def given(self) -> dict[str, Any]:
        """All options by name, in plain values; of monotone constraints those on own columns."""
        plain = given(self.options, self.common)
        return plain | {"monotone_constraints": dict(self.directions)} if self.directions else plain

    @property
    def public_terms(self) -> dict[str, Term]:
        """What all parties have to agree on first: every option but the sampling seed."""
        return public_terms(self.options, self.common)

    @property
    def may_change(self) -> frozenset[str]:
        """Options that may differ between a training and its resumption."""
        return frozenset(self.options.may_change | self.common.may_change)

    @property
    def others(self) -> list[str]:
        """All owners but the active party, in the job's order."""
        return [name for name in self.roles.owners if name != self.roles.active]


Program = Callable[[RoleInput[Any, Any]], Any]


def star(roles: Roles, options: SystemOptions) -> dict[str, list[str]]:
    """Link the active party, and parties without rows, with all others; passive parties do not talk to each other."""
    helpers = [name for name in roles.of if name not in (roles.active, *roles.owners)]
    others = [name for name in roles.owners if name != roles.active]
    links = {roles.active: [*others, *helpers]}
    links |= {name: [roles.active, *helpers] for name in others}
    return links | {name: [roles.active, *others] for name in helpers}


def mesh(roles: Roles, options: SystemOptions) -> dict[str, list[str]]:
    """Link every party with every other."""
    return {name: [other for other in roles.of if other != name] for name in roles.of}


def without_formula(roles: Roles, options: Any, common: Any, shape: Shape) -> Expected:
    raise not_expected("this system")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Prediction of rows whose owners have no part of the model, where rows are split, by the parties that have one."""

    # by role: owners of rows, who call `RoleInput.read` for them, return `RowPredictions`; the others return None
    programs: Mapping[str, Program]
    # ``roles(places, active, options) -> Roles``: who takes part; `PartySpec.has_rows` says who has rows to predict
    assign: Callable[[Mapping[str, PartySpec], str, Any], Roles]
    # ``links(roles, options) -> {name: peers}``. Owners of rows need not come, and may be lost
    links: Callable[[Roles, Any], dict[str, list[str]]]
    # ``conclusions(roles, options) -> {role: [sentence, ...]}``: what each role can work out besides what single
    # messages tell it
    conclusions: Callable[[Roles, Any], dict[str, list[str]]]
    # what each message reveals, to whom
    routes: Routes = ()
    # ``refused(options) -> text``: why there is no such prediction under these options; empty where there is
    refused: Callable[[Any], str] = lambda options: ""

    def disclosures(self, roles: Roles, options: Any, common: Any) -> dict[str, list[str]]:
        """Return in sentences what each role learns."""
        concluded = self.conclusions(roles, options)
        return learned({"train": self.routes}, roles, options, common, concluded, by_role=True)

    def may_be_absent(self, roles: Roles, options: Any) -> list[str]:
        """Return the parties that need not even connect: all who have rows."""
        return roles.owners


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One published system, as runners play it."""

    # as in job files and on every message
    name: str
    # its public class of options
    options: type[SystemOptions]
    # `BoostingOptions` or `RegressionOptions`
    common: Any
    # how the table is split among the owners; "none" is training in one place
    split: Literal["none", "columns", "rows"]
    # the training program of each role; for roles in `has_model` it returns the party's part of the model
    train: Mapping[str, Program]
    # ``roles(places, active, options) -> Roles``: give every party of a job its role. Raises ConfigError where roles
    # are wrong, missing, or so few that nothing would be hidden
    assign: Callable[[Mapping[str, PartySpec], str, Any], Roles]
    # ``conclusions(roles, options, common, part) -> {name: [sentence, ...]}``: what each party, or role, can work out
    # from many messages, or with others' help. `part` is its part of the model; None before training, or without one
    conclusions: Callable[[Roles, Any, Any, Any], dict[str, list[str]]]
    # roles with a part of the model, or with the whole model where rows are split
    has_model: frozenset[str]
    # what each message reveals, to whom, by stage: "train", "predict", "explain" and "online"
    routes: Mapping[Stage, Routes] = field(default_factory=dict)
    # whether what is learned is stated by role, not by party
    by_role: bool = False
    # roles without a part that keep checkpoints, or other files, until all parts of the model are saved
    until_kept: frozenset[str] = frozenset()
    # whether the trees are those of the pooled table, bit for bit
    lossless: bool = False
    # ``on_clusters(options) -> roles``: whose own cluster can add up their rows in a training (`RoleInput.shards`)
    on_clusters: Callable[[Any], frozenset[str]] = lambda options: frozenset()
    # ``helpers(owners, options) -> {name: PartySpec}``: the parties without training rows that `fit` plays besides the
    # owners. One with the role "server" becomes the active party
    helpers: Callable[[Iterable[str], Any], dict[str, PartySpec]] = lambda owners, options: {}
    # ``links(roles, options) -> {name: peers}``: who talks to whom
    links: Callable[[Roles, Any], dict[str, list[str]]] = star
    # prediction and contributions by role, where owners have to work together for them
    predict: Mapping[str, Program] = field(default_factory=dict)
    explain: Mapping[str, Program] = field(default_factory=dict)
    # prediction row by row of aligned rows, by parties that stay connected
    online: Mapping[str, Program] = field(default_factory=dict)
    # prediction for parties without a part of the model, where rows are split
    service: Service | None = None
    # ``may_lose(roles, options) -> [name, ...]``: the parties that a training between processes can continue without
    may_lose: Callable[[Roles, Any], list[str]] = lambda roles, options: []
    # likewise, the parties that need not even connect
    may_be_absent: Callable[[Roles, Any], list[str]] = lambda roles, options: []
    # ``vouched(roles, options, name) -> [name, ...]``: further parties whose certificates a party needs
    vouched: Callable[[Roles, Any, str], list[str]] = lambda roles, options, name: []
    # roles that must not be played by an organisation with data; their keys are compared with the others'
    apart: frozenset[str] = frozenset()
    # roles that a job file has to name; the others follow from `active` and who has rows
    named_roles: frozenset[str] = frozenset()
    # roles without training rows whose tables say which columns and classes there are
    shows_columns: frozenset[str] = frozenset()
    # whether another attempt at a training pays nothing for the draws that an earlier one made, which it repeats
    pays_once: bool = False
    # whether aligned rows are put in the order of their ids, so that every job on them has the same
    orders_by_id: bool = False
    # why a training cannot be resumed ("resume"), or contributions not computed ("explain"); without what can be
    cannot: Mapping[str, str] = field(default_factory=dict)
    # ``absences(roles, options, common) -> {name: absence}``: who drops out when, in a run between threads
    absences: Callable[[Roles, Any, Any], Mapping[str, Any]] | None = None
    # ``only_simulated(options) -> text``: why these options only run between threads; empty where they run anywhere
    only_simulated: Callable[[Any], str] = lambda options: ""
    # ``unaudited(options) -> text``: why no party can keep a record for an audit of gradients; empty where all can
    unaudited: Callable[[Any], str] = lambda options: "no gradients are sent that an audit could open"
    # ``warm_up(options) -> [options, ...]``: small trainings that need all kernels of one with these (None: any)
    warm_up: Callable[[Any], list[Any]] = lambda options: []
    # ``expected(roles, options, common, shape) -> Expected``: what a training takes; ConfigError without a formula
    expected: Callable[[Roles, Any, Any, Shape], Expected] = without_formula
    # ``forecast(roles, options, common, shape, epsilon) -> Forecast``: what noise costs at an epsilon (None: the
    # options'); None where that has not been measured
    forecast: Callable[[Roles, Any, Any, Shape, float | None], Forecast] | None = None
    # with ``split="none"``: ``alone(tables, inputs) -> {name: part}``, trains in one place
    alone: Callable[[Mapping[str, Table], RoleInput[Any, Any]], dict[str, Any]] | None = None

    def disclosures(self, roles: Roles, options: Any, common: Any, part: Any = None) -> dict[str, list[str]]:
        """Return in sentences what each party, or role, learns beyond its own data; `part` as for `conclusions`."""
        cipher = getattr(part, "encryption", None)
        if cipher and getattr(options, "encryption", cipher) != cipher:  # "auto": the one that was used
            options = replace(options, encryption=cipher)
        concluded = self.conclusions(roles, options, common, part)
        if not self.routes:  # all data are in one place
            return concluded
        return learned(self.routes, roles, options, common, concluded, by_role=self.by_role)


def roles_of(system: System, owners: list[str], active: str | None, options: SystemOptions) -> Roles:
    """Return who plays which role where one process plays all: the owners, and the helpers that the system needs.

    The party `active` may be one without rows; None is the first owner, or the server. Raises ConfigError when parties
    are too few, or one has the name of a role that is played besides them.
    """
    helpers = system.helpers(owners, options)
    server = next((name for name, place in helpers.items() if place.role == "server"), None)
    lead = server or active or owners[0]
    places = {name: PartySpec() for name in owners} | helpers
    places.setdefault(lead, PartySpec(has_rows=False))
    return system.assign(places, lead, options)
