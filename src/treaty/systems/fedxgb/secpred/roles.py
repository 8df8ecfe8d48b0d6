"""Prediction for new rows by a model that only its server knows, on shares among edge servers (SecPred).

Liu et al., "Boosting Privately", ICDCS 2020. Roles: the server, which has a FedXGB model; edge servers; users, who have
rows and get predictions.

====================  ====================  ================================================  =====================
message               from -> to            content                                           protection
====================  ====================  ================================================  =====================
`PredictionTerms`     server -> each edge;  columns and bins of training, outputs, base       TLS
                      first edge -> users   margin, most rows of a user
`ModelSize`           server -> each edge   how many trees, and of what depth                 TLS
`RowShares`           user -> each edge     shares of its binned rows                         secret shares
`RowCounts`           edge <-> edge         whose shares came, and of how many rows           TLS
`TreesRequest`        each edge -> server   it is ready for more trees                        TLS
`SplitShares`         server -> each edge   shares of the splits of a level of some trees     secret shares
`LeafShares`          server -> each edge   shares of their leaf values                       secret shares
`SharedNumbers`       edge <-> edge         what `secure_routing` or `additive_routing` says  secret shares
`ValueShares`         each edge -> user     shares of its rows' sums of leaf values           for that user alone
====================  ====================  ================================================  =====================

With ``comparison="additive"`` there are three edge servers, of whom the third gets only `PredictionTerms` and
`ModelSize` and deals random numbers to the others (`dealer`).

Adversary: honest but curious. At most (edges - 1) // 2 edge servers collude (any one of three), with any users or with
the server.

**Who learns what.** Server: nothing. Edge servers: who asks and for how many rows (the dealer: for how many rows in
all); how many trees there are, and how deep the deepest is, to which all are filled up. Users: their predictions, and
what all users of the training were told: quantiles of all columns and frequent categories. No path and no tree's own
value is opened to anybody.

A user who asks for made-up rows finds out the model little by little, faster with shares of numbers other than bins,
which nobody notices. Hence `most_rows`, which holds for one run: an edge server has to count over all runs.

Rows are shared as the bins of training: bins made of the model's own thresholds would tell users these. A split that is
not at a cut of the bins is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sharing.shamir_field import Words
from treaty.data.binning import MOST_BINS, Bins
from treaty.data.table import Table
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.messaging.messages import Array, Message, decode_body, view
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart
from treaty.systems.fedxgb.authority import PATIENCE, gather_sound
from treaty.systems.fedxgb.secpred.complete_trees import complete_tree, depth_of
from treaty.systems.fedxgb.secpred.dealer import Dealer
from treaty.systems.fedxgb.secpred.routing import (
    HiddenModel,
    HiddenRows,
    LeafShares,
    RowShares,
    SharedRows,
    SplitShares,
    ValueShares,
    come_to_all,
    layout_of,
)
from treaty.systems.fedxgb.secpred.shares import Comparison, Routing, shares_of
from treaty.systems.horizontal.quantiles import CommonBins, unpack_bins
from treaty.systems.horizontal.rows import Categories, schema_of

MOST_VALUE = 2.0**30  # of a prediction: it is opened with 32 fractional bits
_AT_ONCE = 1 << 16  # comparisons: their random numbers take a kilobyte each
_NUMBERS = 1 << 19  # of the splits of a level that are sent at once
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class PredictionTerms(Message):
    """What users and edge servers know; bins as users of the training were told them."""

    names: list[str]
    categories: Categories
    bins: CommonBins
    n_outputs: Annotated[int, msgspec.Meta(ge=1, le=1 << 10)]
    base_margin: float
    most_rows: _AtLeastOne | None
    comparison: Comparison


class ModelSize(Message):
    """How many trees there are, and how many levels of splits each has, dummies included."""

    trees: _AtLeastOne
    depth: Annotated[int, msgspec.Meta(ge=0, le=24)]


class TreesRequest(Message):
    """The sender is ready for more trees."""


# ---------------------------------------------------------------- server


def server(
    party: Party,
    part: ModelPart,
    *,
    edges: Sequence[str],
    most_rows: int | None = None,
    comparison: Comparison = "shamir",
) -> None:
    """Have rows predicted by a FedXGB model, without learning whose; more than `most_rows` of a user are refused.

    Raises ConfigError when edge servers are too few or, for "additive", other than three; when the model has no bins or
    trees, splits elsewhere than at cuts of the bins, or values above 2^30.
    """
    check_edges(comparison, len(edges))
    forest, n_features = part.forest, len(part.schema.names)
    if forest is None or not forest.trees or not part.bins:
        raise ConfigError('expected a model of protocol "fedxgb" with its bins and some trees, got another one')
    agreed = decode_body(part.bins, CommonBins, peer=party.name)
    bins = unpack_bins(agreed, part.schema, MOST_BINS, party.name)
    depths = [depth_of(tree) for tree in forest.trees]
    if sum(float(np.abs(tree.value).max()) for tree in forest.trees) >= MOST_VALUE:
        raise ConfigError("expected predictions below 2^30, so that they can be opened; scale the target down")
    terms = PredictionTerms(
        names=list(part.schema.names),
        categories=[None if c is None else list(c) for c in part.schema.categories],
        bins=msgspec.structs.replace(agreed, grad_clip=0.0, weight_bound=0.0),  # which tell of targets and weights
        n_outputs=forest.objective.n_outputs,
        base_margin=forest.objective.base_margin,
        most_rows=most_rows,
        comparison=comparison,
    )
    depth = max(depths)
    layout = layout_of(bins, np.ones(n_features, np.bool_))
    at_once = max(1, _NUMBERS // (layout.columns << max(depth - 1, 0)))
    for edge in edges:
        party.send(edge, terms)
        party.send(edge, ModelSize(len(forest.trees), depth))
    model = HiddenModel(party, edges, layout, comparison)
    for start in range(0, len(forest.trees), at_once):
        complete = [complete_tree(tree, part.splits, bins, depth) for tree in forest.trees[start : start + at_once]]
        for edge in model.holders:
            party.receive(edge, TreesRequest)
        for level in range(depth):
            model.split([splits[level] for splits, _ in complete])
        model.finish(np.stack([values for _, values in complete]))


# ---------------------------------------------------------------- edge server


def edge(
    party: Party,
    *,
    server: str,
    edges: Sequence[str],
    users: Sequence[str],
    patience: float = PATIENCE,
    threads: int = 1,
    comparison: Comparison = "shamir",
) -> None:
    """Predict the rows of `users` with the other edge servers; `edges` are all of them, in the job's order.

    A user that has not shared its rows, or taken a message, within `patience` seconds gets nothing. Raises ConfigError
    when the server says a comparison other than `comparison`, to which this edge server consents.
    """
    party.may_lose(users)
    terms, grown = party.receive(server, PredictionTerms), party.receive(server, ModelSize)
    _check_comparison(comparison, terms, party.name)
    if party.name == edges[0]:
        party.send_each(dict.fromkeys(users, terms), timeout=patience)
    layout = layout_of(_bins(terms, server), np.ones(len(terms.names), np.bool_))
    shares = shares_of(comparison, layout, edges)
    if party.name == shares.dealer:
        dealer = Dealer(party, edges, layout)
        dealer.serve()  # the mask of the rows
        dealer.serve()  # all levels and leaves
        return
    held = HiddenRows(party, edges, server, layout, comparison, threads)
    came = gather_sound(party, users, RowShares, timeout=patience)
    counts = {name: came[name].shares.shape[0] for name in held.take(came)}
    most = terms.most_rows or max(counts.values(), default=0)
    held.keep(come_to_all(party, held.holders, {name: rows for name, rows in counts.items() if rows <= most}))
    totals, done = np.zeros((terms.n_outputs, held.n_rows, *shares.number), np.uint64), 0
    while done < grown.trees:
        party.send(server, TreesRequest())
        splits, leaves = _some_trees(party, server, layout.columns, shares.number, grown.depth, grown.trees - done)
        outputs = (done + np.arange(len(leaves))) % terms.n_outputs
        length = max(1, min(_AT_ONCE // len(leaves), 4 * _AT_ONCE // (len(leaves) << grown.depth)))
        for start in range(0, held.n_rows, length):
            part = slice(start, min(start + length, held.n_rows))
            for output, found in _values(held.routing, part, splits, leaves, outputs).items():
                totals[output, part] = held.routing.add(totals[output, part], found)
        done += len(leaves)
    held.routing.rest()
    party.send_each({
        name: ValueShares(Array.of(np.ascontiguousarray(totals[:, rows]))) for name, rows in held.parts.items()
    }, timeout=patience)  # fmt: skip


def _some_trees(
    party: Party, server: str, columns: int, number: tuple[int, ...], depth: int, most: int
) -> tuple[list[tuple[Words, Words]], Words]:
    """Receive some trees: shares of weights and thresholds of each level, and of leaf values."""
    levels = [party.receive(server, SplitShares) for _ in range(depth)]
    told = party.receive(server, LeafShares).values
    leaves = view(told, np.uint64, (None, 1 << depth, *number), peer=server, what="LeafShares.values")
    trees = len(leaves)
    if not 1 <= trees <= most:
        raise PeerProtocolError(server, f"expected 1 to {most} trees, got {trees} - at LeafShares from {server}")
    splits = []
    for k, level in enumerate(levels):
        shape = trees, 1 << k
        weights = view(level.weights, np.uint64, (*shape, columns, *number), peer=server, what="SplitShares.weights")
        thresholds = view(level.thresholds, np.uint64, (*shape, *number), peer=server, what="SplitShares.thresholds")
        splits.append((weights, thresholds))
    return splits, leaves


def _values(
    routing: Routing, part: slice, splits: Sequence[tuple[Words, Words]], leaves: Words, outputs: NDArray[np.intp]
) -> dict[int, Words]:
    """Return shares of the sums of some rows' leaf values over the trees of each output, uint64 (n, *)."""
    n_rows = part.stop - part.start
    paths = routing.at_root(len(leaves), n_rows)
    for k, (weights, thresholds) in enumerate(splits):
        _, paths = routing.level(part, weights, thresholds, paths if k else None)
    number = leaves.shape[2:]
    found = {}
    for output in np.unique(outputs).tolist():
        of = np.flatnonzero(outputs == output)
        n_leaves = len(of) * leaves.shape[1]
        found[output] = routing.leaves(
            paths[of].reshape(n_leaves, n_rows, *number), leaves[of].reshape(n_leaves, *number)
        )
    return found


# ---------------------------------------------------------------- user


def user(party: Party, table: Table, *, edges: Sequence[str], comparison: Comparison = "shamir") -> NDArray[np.float64]:
    """Return the margins of own rows, float64 (n_rows, n_outputs): those of the plain model.

    They agree bit for bit where the base margin is a multiple of 2^-32, as leaf values are. `table` is made with the
    model's schema. Raises ConfigError when the server says another comparison, DataError when the table has another
    schema, or more rows than may be asked for.
    """
    terms = party.receive(edges[0], PredictionTerms)
    _check_comparison(comparison, terms, party.name)
    if terms.most_rows is not None and table.n_rows > terms.most_rows:
        raise DataError(f"expected at most {terms.most_rows} rows of a user, got {table.n_rows} - at {party.name}")
    bins = _bins(terms, edges[0])
    layout = layout_of(bins, np.ones(len(terms.names), np.bool_))
    shared = SharedRows(party, edges, layout, bins.transform(table, threads=1), comparison)
    return terms.base_margin + shared.values({}, terms.n_outputs).T


def check_edges(comparison: Comparison, edges: int) -> None:
    """Raise ConfigError when edge servers are too few, or some would have nothing to do."""
    if edges < 3:
        raise ConfigError(f"expected 3 edge servers or more, got {edges}: a hidden model is shared among them")
    if comparison == "additive" and edges != 3:
        raise ConfigError(
            f'expected 3 edge servers under comparison="additive", two that compare and a dealer, got {edges}; more '
            'hide more under "shamir" alone'
        )


def _check_comparison(own: Comparison, terms: PredictionTerms, name: str) -> None:
    if terms.comparison != own:
        raise ConfigError(
            f'expected comparison="{own}", to which {name} consents, got "{terms.comparison}" of the server; agree on '
            "one of them"
        )


def _bins(terms: PredictionTerms, peer: str) -> Bins:
    return unpack_bins(terms.bins, schema_of(terms.names, terms.categories), MOST_BINS, peer)
