"""FedXGB: boosting among users with a few rows each, by way of edge servers, for a server that owns the model.

Liu, Ma, Liu, Ma, Nepal, Deng, "Boosting Privately: Privacy-Preserving Federated Extreme Boosting for Mobile
Crowdsensing", ICDCS 2020 (arXiv 1907.10218).

Roles: users with rows, all columns and labels, each in the domain of an edge server; edge servers; the server, which
grows the trees; a key authority (`crowd_keys`). Output: the model, at the server alone.

====================  ====================  ================================================  =====================
message               from -> to            content                                           protection
====================  ====================  ================================================  =====================
`Offer`               user -> edge          certified keys, activity, stability               signatures
`Users`               edge -> server        the domain's users and their keys                 signatures
`Task`                server -> all         columns, classes, options, the server's keys      signatures
`Count`, `Asked`,     server -> all         as in `federboost_horizontal`: rows, probes and   TLS
`Agreed`                                    the bins
`Prepared`            server -> all         how many rows all have, which columns have gaps   TLS
`Roll`                server -> all         a tree (one for each class) begins, its columns   TLS
`Sum`, sums           users -> edge ->      bin sums of the level's slots, see `crowd_users`  masks, domain's sums
                      server                and `crowd_server`                                under further masks
`Splits`, `Values`    server -> all         (``expose="model"``) the splits; leaf values      TLS
`Rows`, `Hidden` ...  see `crowd_routing`   (otherwise) shares of rows, splits and leaves     secret shares
`Shown`, ...          see `crowd_shown`     (``expose="paper"``) columns; shares of           Shamir shares
                                            thresholds and of what they are compared with
`End`                 server -> all         training is over                                  TLS
====================  ====================  ================================================  =====================

One vector per level holds grad, hess and count of all slots, features, bins and classes. Adversary: honest but curious;
server and edge servers do not collude with each other, nor an edge server with a third of its domain. The server sees
sums over all domains' users; an edge server who takes part; a user, of its own rows, the slot at each level and the
value of the leaf (``expose="model"``: the model).

**Users that vanish.** Before a key of a sum is made, after shares are sent, or later: the sum is over those whose
vectors came, exactly. Who is lost stays out until the tree ends. A domain below two thirds of its tree's users, or
three, gives nothing to the tree. Cohorts that differ differ by `least_change` users or more (`crowd_cohorts`).

Deviations from the paper, which reuses one mask and opens every user's (PROTOCOLS, FedXGB): masks from keys of one sum,
used once; shares revealed only for signed lists of who is left; bins from secure quantiles, since the server cannot
enumerate values that it does not see. The published aggregation is `crowd_paper` (``mode="paper"``).
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import Bins
from treaty.data.columns import Category
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError
from treaty.messaging.messages import Array, Message, encode_body
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper
from treaty.models.trees import ModelPart, record_split
from treaty.systems.fedxgb.authority import Credentials, Offered
from treaty.systems.fedxgb.paper.routing import PaperModel, check_numeric
from treaty.systems.fedxgb.paper.sums import WARNING, paper_mode
from treaty.systems.fedxgb.secpred.routing import Everybody, HiddenModel, layout_of
from treaty.systems.fedxgb.server_sums import Crowd, Users
from treaty.systems.horizontal.members import Vouching
from treaty.systems.horizontal.quantiles import MOST_ROUNDS, Count, Opening, choose_bins, pack_bins
from treaty.systems.horizontal.rows import Categories, checkpoint_with, common_rows, printed_rows
from treaty.systems.pooled.training import Labelled, Progress, objective_for, watched
from treaty.systems.tree_options import TreeOptions
from treaty.trees.boosting import Forest, RoundState, draw, run_rounds
from treaty.trees.ensemble import SplitTable, Tree
from treaty.trees.objectives import Objective
from treaty.trees.slots import Cells, SlotSplits, SlotTree

logger = logging.getLogger(__name__)


class Offer(Message):
    """A user's certified keys, and how active and how steadily connected it is, from 0 to 1."""

    keys: Offered
    activity: Annotated[float, msgspec.Meta(ge=0, le=1)]
    stability: Annotated[float, msgspec.Meta(ge=0, le=1)]


class Task(Message):
    """What is trained: columns, classes, options; and the server's keys."""

    model_id: str
    names: list[str]
    categories: Categories
    classes: list[Category] | None
    options: bytes
    server: Offered


class Prepared(Message):
    """How many rows all users have, and bool (features,) which columns have missing values anywhere."""

    n_rows: int
    may_miss: Array


class Roll(Message):
    """A round begins: int32 columns of its trees, one after the other, and int32 (n_outputs,) where each ends."""

    columns: Array
    last_columns: Array


class Here(Message):
    """The user takes part in the round, if it is chosen."""


class Splits(Message):
    """Splits of a level: int32 features (n_outputs, n_slots), packed bits of bins left (n_outputs, n_slots, 32)."""

    features: Array
    left_bins: Array


class Values(Message):
    """Leaf values: float64 (n_outputs, n_slots) of the slots below the last level."""

    values: Array


class End(Message):
    """Training is over."""


def receive_task(party: Party, sender: str, server: str, credentials: Credentials, options: TreeOptions) -> Task:
    """Receive what is trained from the server, or from the edge server that passes it on.

    Raises
    ------
    ConfigError
        When it has other options.
    PeerProtocolError
        When the server's keys are not certified.
    """
    task = party.receive(sender, Task)
    credentials.check(server, "server", task.server, sender)
    if task.options != _terms(options):
        raise ConfigError(f"expected the options of {server}, got others at {party.name}; compare the job files")
    return task


def _terms(options: TreeOptions) -> bytes:
    """Return what everybody must agree on, in bytes."""
    public = {name: getattr(options, name) for name in options.__struct_fields__ if name != "random_state"}
    return msgspec.json.encode(public, order="sorted")


def server(
    party: Party,
    options: TreeOptions,
    schema: Schema,
    *,
    edges: Sequence[str],
    authority: str,
    classes: list[Category] | None,
    eval_sets: Sequence[Labelled] = (),
    threads: int = 1,
    progress: Progress | None = None,
    keeper: Keeper | None = None,
    vouching: Vouching,
) -> ModelPart:
    """Train as the server.

    Parameters
    ----------
    party : Party
        Connected with the authority and all edge servers.
    schema : Schema
        The columns of all users.
    edges : sequence of str
        Two or more; three or more where the model is hidden.
    authority : str
    classes : list or None
        Labels by class number; None for regression.
    eval_sets : sequence of Labelled
        Watched by the server; labels are numbers of `classes`.
    keeper : Keeper or None
        Where the model so far is kept; a training cannot be resumed from it.
    vouching : Vouching
        Whose certificates are pinned; nobody's between threads.

    Returns
    -------
    ModelPart
        The whole model.

    Raises
    ------
    ConfigError
        When there are too few edge servers.
    CryptoError, PeerError
        When no domain has enough users left, or an edge server is lost or sends what the protocol does not allow.
    """
    check_edges(options, len(edges))
    if options.expose == "paper":
        check_numeric(schema)
    if paper_mode(options):
        logger.warning("%s: %s", party.name, WARNING)
    crowd, task = _meet(party, options, schema, edges, authority, classes, vouching)
    found = _search(crowd, options, schema, classes, threads)
    agreed = pack_bins(found.bins, found.objective)
    crowd.tell(agreed)
    party.round += 1
    crowd.tell(Prepared(found.n_rows, Array.of(found.may_miss)))
    model = _model(party, options, edges, crowd, found)
    crowd.settle()
    forest = Forest(found.objective, (party.name,), classes)
    part = ModelPart(
        model_id=task.model_id, party=party.name, schema=schema, splits=SplitTable(), forest=forest,
        spent=found.spent, bins=encode_body(agreed),
    )  # fmt: skip
    cells = Cells.of(found.bins.offsets, found.may_miss, found.n_rows, found.objective)
    grower = _Grower(crowd, model, cells, found.bins, part, options, threads)
    rows = [common_rows(e, schema, classes, classes, party.name) for e in eval_sets]
    printed = b"" if keeper is None else printed_rows(rows, classes)

    def after_round(done: int) -> None:
        if keeper is not None and keeper.due:
            kept = RoundState(done, np.zeros((forest.objective.n_outputs, 0)), json.dumps(None))
            keeper.keep(lambda: checkpoint_with(part, options, printed, kept, agreed), time.perf_counter())
        if progress is not None:
            progress(done, part)

    if progress is not None:
        progress(0, part)
    evals = [watched(e, part.splits, threads) for e in rows]
    run_rounds(grower.grow, forest, after_round, options.n_estimators, evals, options.early_stopping_rounds)
    crowd.tell(End())
    return part


def _meet(
    party: Party,
    options: TreeOptions,
    schema: Schema,
    edges: Sequence[str],
    authority: str,
    classes: list[Category] | None,
    vouching: Vouching,
) -> tuple[Crowd, Task]:
    """Check all users' keys, and tell the edge servers the task."""
    credentials = Credentials(party, authority, "server")
    users = {edge: party.receive(edge, Users).of for edge in edges}
    for edge, of in users.items():
        for name, offered in of.items():
            credentials.check(name, "user", offered, edge)
    task = Task(
        secrets.token_hex(16), list(schema.names), [None if c is None else list(c) for c in schema.categories],
        classes, _terms(options), credentials.offered,
    )  # fmt: skip
    for edge in edges:
        party.send(edge, task)
    return Crowd(party, edges, credentials, users, vouching, task, masked=options.mode != "paper"), task


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of everybody's rows before trees grow.

    Attributes
    ----------
    bins : Bins
    objective : Objective
        With the bounds of everybody's gradients.
    n_rows : int
    may_miss : bool (features,)
        Which features have rows without a value.
    spent : str
        In words: what the search for bins parted.
    """

    bins: Bins
    objective: Objective
    n_rows: int
    may_miss: NDArray[np.bool_]
    spent: str


def _search(crowd: Crowd, options: TreeOptions, schema: Schema, classes: list[Category] | None, threads: int) -> _Found:
    """Open how many rows there are and what bounds gradients, then search for bins."""
    none = Labelled(Table(schema, [np.empty(0, np.float32)] * len(schema.names), 0), np.empty(0))
    objective = objective_for(none, classes, options)
    opening = Opening(schema, bounds=True)
    crowd.tell(Count())
    opened = crowd.total(opening.length)
    n_rows, objective = opening.rows(opened), opening.bounded(opened, objective)
    objective.check_sums(n_rows)
    bins, smallest = choose_bins(
        lambda own, length: crowd.total(length), crowd.tell, opening, opened, schema, options.max_bin,
        own=None, least_rows=options.fewest_rows, most_rounds=MOST_ROUNDS, threads=threads,
    )  # fmt: skip
    fewest = int(smallest[smallest > 0].min(initial=n_rows))
    spent = f"the search for quantiles parted groups of as few as {fewest} rows"
    return _Found(bins, objective, n_rows, _may_miss(opening, opened, len(schema.names), n_rows), spent)


def _may_miss(opening: Opening, opened: NDArray[np.int64], n_features: int, n_rows: int) -> NDArray[np.bool_]:
    """Return which features have rows without a value."""
    may_miss = np.zeros(n_features, np.bool_)
    may_miss[opening.numeric] = opening.present(opened) < n_rows
    for f, counts in opening.categories(opened).items():
        may_miss[f] = counts.sum() < n_rows
    return may_miss


def _model(
    party: Party, options: TreeOptions, edges: Sequence[str], crowd: Crowd, found: _Found
) -> HiddenModel | PaperModel | ShownModel:
    """Return what has everybody's rows go down the trees, for those who may know all, some or nothing of them."""
    shown = ShownModel(crowd)
    if not options.hides_model:
        return shown
    layout = layout_of(found.bins, found.may_miss)
    if options.expose == "paper":
        return PaperModel(party, edges, layout, crowd.tell, shown.finish)
    hidden = HiddenModel(party, edges, layout, options.compares, turns=True)
    crowd.tell(Everybody(hidden.everybody()))
    return hidden


class ShownModel:
    """Tells all users the trees."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd

    def split(self, chosen: Sequence[SlotSplits]) -> None:
        """Have everybody's rows go down a level, by the splits of each tree."""
        features = np.stack([splits.features for splits in chosen])
        packed = np.packbits(np.stack([splits.left_bins for splits in chosen]), axis=2)
        self._crowd.tell(Splits(Array.of(features), Array.of(packed)))

    def finish(self, values: NDArray[np.float64]) -> None:
        """Tell the values of all leaves, float64 (trees, slots)."""
        self._crowd.tell(Values(Array.of(values)))


class _Grower:
    """Grows a round's trees on the crowd's sums: `grow` is what `run_rounds` takes."""

    def __init__(
        self,
        crowd: Crowd,
        model: HiddenModel | PaperModel | ShownModel,
        cells: Cells,
        bins: Bins,
        part: ModelPart,
        options: TreeOptions,
        threads: int,
    ) -> None:
        assert part.forest is not None
        self._crowd, self._model, self._cells, self._bins, self._part = crowd, model, cells, bins, part
        self._hidden = options.hides_model
        self._rules, self._depth = options.rules(part.forest.objective), options.max_depth
        self._n_outputs = part.forest.objective.n_outputs
        self._share, self._threads = options.column_share(len(bins.n_bins)), threads
        self._rng = np.random.default_rng(options.random_state)
        self._categorical = bins.schema.categorical

    def grow(self) -> list[Tree]:
        """Grow a tree per output, level by level in step."""
        n_columns = len(self._bins.n_bins)
        every = np.arange(n_columns, dtype=np.int32)
        columns = [
            every if self._share >= 1.0 else draw(self._rng, n_columns, self._share) for _ in range(self._n_outputs)
        ]
        ends = np.cumsum([len(c) for c in columns], dtype=np.int32)
        self._crowd.begin_tree(Roll(Array.of(np.concatenate(columns)), Array.of(ends)))
        trees = [SlotTree(self._rules, self._cells, c, self._categorical, self._record, self._threads) for c in columns]
        depth = 0
        while depth < self._depth and (self._hidden or any(tree.growing for tree in trees)):
            lengths = [self._cells.length(1 << depth, c) for c in columns]
            parts = np.split(self._crowd.total(sum(lengths)), np.cumsum(lengths)[:-1])
            chosen = [tree.split(opened, depth) for tree, opened in zip(trees, parts, strict=True)]
            self._model.split(chosen)
            depth += 1
        finished = [tree.finish(depth) for tree in trees]
        self._model.finish(np.stack([values for _, values in finished]))
        return [tree for tree, _ in finished]

    def _record(self, feature: int, left_bins: NDArray[np.bool_]) -> int:
        return record_split(self._part.splits, self._bins, feature, left_bins)


def check_edges(options: TreeOptions, edges: int) -> None:
    """Refuse too few edge servers.

    Raises
    ------
    ConfigError
    """
    least = 3 if options.hides_model else 2
    if edges < least:
        raise ConfigError(
            f"expected {least} edge servers or more, got {edges}: "
            + (
                "one would see its domain's sums as the server does"
                if least == 2
                else "a hidden model is shared among them"
            )
        )
