"""Prediction for new rows by a model that nobody but its server knows, on Shamir shares among edge servers (SecPred).

Liu et al., "Boosting Privately", ICDCS 2020. Roles: the server, which has a FedXGB model; edge servers; users, who have
rows and get predictions.

====================  ====================  ================================================  =====================
message               from -> to            content                                           protection
====================  ====================  ================================================  =====================
`Terms`               server -> each edge;  columns and bins of training, outputs, base       TLS
                      first edge -> users   margin, most rows of a user
`Grown`               server -> each edge   how many trees, and of what depth                 TLS
`Rows`                user -> each edge     shares of its binned rows                         Shamir shares
`Came`                edge <-> edge         whose shares came, and of how many rows           TLS
`Next`                each edge -> server   it is ready for more trees                        TLS
`Hidden`              server -> each edge   shares of the splits of a level of some trees     Shamir shares
`HiddenLeaves`        server -> each edge   shares of their leaf values                       Shamir shares
`Exchanged`           edge <-> edge         what `secure_routing` says                        Shamir shares
`Valued`              each edge -> user     shares of its rows' sums of leaf values           for that user alone
====================  ====================  ================================================  =====================

Adversary: honest but curious, of whom at most (edges - 1) // 2 edge servers collude.

**Who learns what.** Server: nothing. Edge servers: who asks and for how many rows; how many trees there are, and how
deep the deepest is, to which all are filled up. Users: their predictions, and what all users of the training were told:
quantiles of all columns and frequent categories. No path and no tree's own value is opened to anybody.

Whoever may ask for made-up rows finds out the model little by little, faster with shares of numbers that are no bins,
which nobody notices. Hence `most_rows`, which is of one run: whoever plays an edge server is to count over all runs.

Rows are shared as bins, which are the ones of training: cuts made of the model's own thresholds would tell users these.
A split that is not at a cut of the bins is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.crypto import shamir_field as field
from treaty.crypto.secure_comparison import Program, Setting, prepare
from treaty.crypto.secure_routing import leaf_values, route_level
from treaty.crypto.shamir_field import Words
from treaty.data.binning import MOST_BINS, Bins
from treaty.data.table import Table
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.messaging.messages import Array, Message, decode_body, view
from treaty.messaging.party import Party
from treaty.models import ModelPart
from treaty.protocols.complete_trees import complete_tree, depth_of
from treaty.protocols.crowd_keys import gather_sound
from treaty.protocols.crowd_routing import (
    Hidden,
    HiddenLeaves,
    HiddenModel,
    HiddenRows,
    Rows,
    SharedRows,
    Valued,
    come_to_all,
    layout_of,
    play_among,
    setting_of,
)
from treaty.protocols.horizontal_bins import Agreed, unpack_bins
from treaty.protocols.horizontal_rows import Categories, schema_of

PATIENCE = 60.0  # seconds that users have to share their rows
MOST_VALUE = 2.0**30  # of a prediction: it is opened with 32 fractional bits
_AT_ONCE = 1 << 16  # comparisons: their random numbers take a kilobyte each
_NUMBERS = 1 << 19  # of the splits of a level that are sent at once
_AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]


class Terms(Message):
    """What users and edge servers know; bins as users of the training were told them."""

    names: list[str]
    categories: Categories
    bins: Agreed
    n_outputs: _AtLeastOne
    base_margin: float
    most_rows: _AtLeastOne | None


class Grown(Message):
    """How many trees there are, and how many levels of splits, dummies included."""

    trees: _AtLeastOne
    depth: Annotated[int, msgspec.Meta(ge=0, le=24)]


class Next(Message):
    """The sender is ready for more trees."""


# ---------------------------------------------------------------- server


def server(party: Party, part: ModelPart, *, edges: Sequence[str], most_rows: int | None = None) -> None:
    """Have rows predicted, without learning whose.

    Parameters
    ----------
    party : Party
        Connected with all edge servers.
    part : ModelPart
        A FedXGB model, as its server has it.
    edges : sequence of str
        Three or more.
    most_rows : int or None
        More rows of one user are refused.

    Raises
    ------
    ConfigError
        When the model has no bins or trees, splits elsewhere than at cuts of the bins, or values above 2^30.
    PeerError
        When an edge server is lost, or sends what the protocol does not allow.
    """
    forest, n_features = part.forest, len(part.schema.names)
    if forest is None or not forest.trees or not part.bins:
        raise ConfigError('expected a model of protocol "fedxgb" with its bins and some trees, got another one')
    agreed = decode_body(part.bins, Agreed, peer=party.name)
    bins = unpack_bins(agreed, part.schema, MOST_BINS, party.name)
    depths = [depth_of(tree) for tree in forest.trees]
    if sum(float(np.abs(tree.value).max()) for tree in forest.trees) >= MOST_VALUE:
        raise ConfigError("expected predictions below 2^30, so that they can be opened; scale the target down")
    terms = Terms(
        names=list(part.schema.names),
        categories=[None if c is None else list(c) for c in part.schema.categories],
        bins=msgspec.structs.replace(agreed, grad_clip=0.0, weight_bound=0.0),  # which tell of targets and weights
        n_outputs=forest.objective.n_outputs,
        base_margin=forest.objective.base_margin,
        most_rows=most_rows,
    )
    depth = max(depths)
    layout = layout_of(bins, np.ones(n_features, np.bool_))
    at_once = max(1, _NUMBERS // (layout.columns << max(depth - 1, 0)))
    for edge in edges:
        party.send(edge, terms)
        party.send(edge, Grown(len(forest.trees), depth))
    model = HiddenModel(party, edges, layout)
    for start in range(0, len(forest.trees), at_once):
        complete = [complete_tree(tree, part.splits, bins, depth) for tree in forest.trees[start : start + at_once]]
        for edge in edges:
            party.receive(edge, Next)
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
) -> None:
    """Predict users' rows with the other edge servers.

    Parameters
    ----------
    party : Party
        Connected with the server, all edge servers and all users.
    edges : sequence of str
        All of them, in the job's order.
    users : sequence of str
        Who may ask.
    patience : float
        Seconds that users have to share their rows; who has not by then is not told anything.

    Raises
    ------
    CryptoError, PeerError
        When the server or another edge server is lost, or sends what the protocol does not allow.
    """
    party.may_lose(users)
    terms, grown = party.receive(server, Terms), party.receive(server, Grown)
    if party.name == edges[0]:
        party.send_each(dict.fromkeys(users, terms))
    layout = layout_of(_bins(terms, server), np.ones(len(terms.names), np.bool_))
    held = HiddenRows(party, edges, server, layout, threads)
    came = gather_sound(party, users, Rows, timeout=patience)
    counts = {name: came[name].shares.shape[0] for name in held.take(came)}
    most = terms.most_rows or max(counts.values(), default=0)
    held.keep(come_to_all(party, edges, {name: rows for name, rows in counts.items() if rows <= most}))
    setting, own = setting_of(layout, len(edges)), list(edges).index(party.name)
    totals, done = np.zeros((terms.n_outputs, len(held.rows), 2), np.uint64), 0
    while done < grown.trees:
        party.send(server, Next())
        splits, leaves = _some_trees(party, server, layout.columns, grown.depth, grown.trees - done)
        outputs = (done + np.arange(len(leaves))) % terms.n_outputs
        length = max(1, min(_AT_ONCE // len(leaves), 4 * _AT_ONCE // (len(leaves) << grown.depth)))
        for start in range(0, len(held.rows), length):
            rows = held.rows[start : start + length]
            program = _values(setting, own, rows, splits, leaves, outputs, terms.n_outputs, threads)
            totals[:, start : start + length] = field.add(
                np.ascontiguousarray(totals[:, start : start + length]), play_among(party, edges, program)
            )
        done += len(leaves)
    party.send_each({
        name: Valued(Array.of(np.ascontiguousarray(totals[:, rows]))) for name, rows in held.parts.items()
    })  # fmt: skip


def _some_trees(
    party: Party, server: str, columns: int, depth: int, most: int
) -> tuple[list[tuple[Words, Words]], Words]:
    """Receive some trees: shares of weights and thresholds of each level, and of leaf values."""
    levels = [party.receive(server, Hidden) for _ in range(depth)]
    told = party.receive(server, HiddenLeaves).values
    leaves = view(told, np.uint64, (None, 1 << depth, 2), peer=server, what="HiddenLeaves.values")
    trees = len(leaves)
    if not 1 <= trees <= most:
        raise PeerProtocolError(server, f"expected 1 to {most} trees, got {trees} - at HiddenLeaves from {server}")
    splits = []
    for k, level in enumerate(levels):
        shape = trees, 1 << k
        weights = view(level.weights, np.uint64, (*shape, columns, 2), peer=server, what="Hidden.weights")
        splits.append((weights, view(level.thresholds, np.uint64, (*shape, 2), peer=server, what="Hidden.thresholds")))
    return splits, leaves


def _values(
    setting: Setting,
    own: int,
    rows: Words,
    splits: Sequence[tuple[Words, Words]],
    leaves: Words,
    outputs: NDArray[np.intp],
    n_outputs: int,
    threads: int,
) -> Program[Words]:
    """Return shares of the sums of rows' leaf values over the trees of each output, uint64 (n_outputs, n, 2)."""
    paths = np.zeros((len(leaves), 1, len(rows), 2), np.uint64)
    paths[..., 0] = 1  # a constant is a share of itself
    for k, (weights, thresholds) in enumerate(splits):
        ready = yield from prepare(setting, own, len(leaves) * len(rows))
        before = paths if k else None
        _, paths = yield from route_level(setting, own, rows, weights, thresholds, before, ready, threads)
    found = np.zeros((n_outputs, len(rows), 2), np.uint64)
    for output in np.unique(outputs).tolist():
        of = np.flatnonzero(outputs == output)
        found[output] = yield from leaf_values(
            setting, own, paths[of].reshape(-1, len(rows), 2), leaves[of].reshape(-1, 2)
        )
    return found


# ---------------------------------------------------------------- user


def user(party: Party, table: Table, *, edges: Sequence[str]) -> NDArray[np.float64]:
    """Get predictions of own rows.

    Parameters
    ----------
    party : Party
        Connected with all edge servers.
    table : Table
        Made with the model's schema.
    edges : sequence of str
        All of them, in the job's order.

    Returns
    -------
    float64 (n_rows, n_outputs)
        Margins: those of the plain model; bit for bit where its base margin is a multiple of 2^-32, as leaf values are.

    Raises
    ------
    DataError
        When the table has another schema, or more rows than may be asked for.
    CryptoError, PeerError
        When an edge server is lost, or sends what the protocol does not allow.
    """
    terms = party.receive(edges[0], Terms)
    if terms.most_rows is not None and table.n_rows > terms.most_rows:
        raise DataError(f"expected at most {terms.most_rows} rows of a user, got {table.n_rows} - at {party.name}")
    bins = _bins(terms, edges[0])
    shared = SharedRows(
        party, edges, layout_of(bins, np.ones(len(terms.names), np.bool_)), bins.transform(table, threads=1)
    )
    told = party.receive(edges[0], Valued)
    return terms.base_margin + shared.values(told, edges[0], terms.n_outputs).T


def _bins(terms: Terms, peer: str) -> Bins:
    return unpack_bins(terms.bins, schema_of(terms.names, terms.categories), MOST_BINS, peer)
