"""Prediction for new rows by a model that only its server knows, on shares among edge servers (SecPred).

Roles: the server, which has a FedXGB model; edge servers; users, who have rows and get predictions. The server sends
its terms, which the first edge server passes on to users. Users share their binned rows; holders count them, and take
them down some trees at a time. Users get shares of the sums of their rows' leaf values. With ``comparison="additive"``
there are three edge servers: the first two hold shares, the third deals random numbers to them.

Adversary: honest but curious. At most (edges - 1) // 2 edge servers collude (any one of three), with any users or with
the server. The server learns nothing. Users learn their predictions, and what all users of the training received:
quantiles of all columns, frequent categories, the classes. Paths and single trees' values are never opened.

A user who asks for made-up rows imitates the model little by little, faster and unnoticed with shares of numbers other
than bins. Hence `max_queries`: every holder of shares counts the rows of each user over all runs (`QueryRecord`), sends
each user how many are left, and leaves out users who ask for more. Rows count before anything is computed, again each
time they are asked for, and even if the prediction fails. One refusal is enough: a user needs the shares of all
holders.

Rows are shared as the bins of training: bins made of the model's own thresholds would show these to users. A split that
is not at a cut of the bins is refused.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sharing.shamir import Words
from treaty.data.binning import MOST_BINS, Bins
from treaty.errors import ConfigError, DataError, PeerError, PeerProtocolError
from treaty.files import Format
from treaty.machine.database import SealedDatabase
from treaty.messaging.messages import Array, decode_body, view
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart, RowPredictions
from treaty.systems.fedxgb import messages
from treaty.systems.fedxgb.domain import patience_of
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.pieces import Layout, exchange_counts, pieces_of, send_pieces_or_leave_out
from treaty.systems.fedxgb.roles import check_holders, holders_of
from treaty.systems.fedxgb.rows import depth_of, take_down
from treaty.systems.fedxgb.secpred import HiddenModel, HolderRows, SharedRows, layout_of, view_splits
from treaty.systems.fedxgb.shares import Dealer, Routing, Shares, shares_of
from treaty.systems.horizontal.quantiles import CommonBins, unpack_bins
from treaty.systems.horizontal.rows import schema_of
from treaty.systems.system import RoleInput

logger = logging.getLogger(__name__)

MOST_VALUE = 2.0**30  # of a prediction: it is opened with 32 fractional bits
_AT_ONCE = 1 << 16  # comparisons: their random numbers take a kilobyte each
_NUMBERS = 1 << 19  # of the splits of a level that are sent at once


def server(inputs: RoleInput[FedXGB]) -> None:
    """Have rows predicted by a FedXGB model, without learning whose.

    Raises ConfigError when edge servers are too few or, for "additive", other than three; when the model has no bins or
    trees, more or deeper ones than the options say, splits elsewhere than at cuts of the bins, or values above 2^30.
    """
    party, options, edges = inputs.party, inputs.options, inputs.roles.having("edge")
    part: ModelPart = inputs.part
    most_rounds, most_depth = inputs.common.most_rounds, inputs.common.depth
    check_holders(options.compares, len(edges))
    forest, n_features = part.forest, len(part.schema.names)
    if forest is None or not forest.trees or not part.bins:
        raise ConfigError('expected a model of protocol "fedxgb" with its bins and some trees, got another one')
    agreed = decode_body(part.bins, CommonBins, peer=party.name)
    bins = unpack_bins(agreed, part.schema, (MOST_BINS, MOST_BINS), party.name)
    depths = [depth_of(tree) for tree in forest.trees]
    if forest.rounds > most_rounds or max(depths) > most_depth:
        raise ConfigError(
            f"expected a model of at most {most_rounds} rounds and depth {most_depth}, as the options say, "
            f"got one of {forest.rounds} rounds and depth {max(depths)}: it is another job's, or of other options"
        )
    if sum(float(np.abs(tree.value).max()) for tree in forest.trees) >= MOST_VALUE:
        raise ConfigError("expected predictions below 2^30, so that they can be opened; scale the target down")
    terms = messages.PredictionTerms(
        model_id=part.model_id,
        names=list(part.schema.names),
        categories=[None if c is None else list(c) for c in part.schema.categories],
        # without the bounds of targets and weights
        bins=msgspec.structs.replace(agreed, clips=Array.of(np.empty(0)), weight_bound=0.0),
        objective=forest.objective.agreed([1.0 for _ in forest.objective.clips], 1.0),
        classes=forest.classes,
        max_queries=options.queries,
        comparison=options.compares,
        origins=part.schema.origins,
    )
    depth = max(depths)
    layout = layout_of(bins, np.ones(n_features, np.bool_))
    # so many trees at a time that the shares of a level stay within a message
    at_once = max(1, _NUMBERS // (layout.columns << max(depth - 1, 0)))
    shares = shares_of(options.compares, layout, edges)
    model = HiddenModel(party, [shares])
    for_dealer = messages.DealerTerms(
        part.model_id, list(layout.n_bins), list(layout.categorical), forest.objective.n_outputs, options.queries,
        options.compares,
    )  # fmt: skip
    for edge in edges:
        party.send(edge, terms if edge in shares.holders else for_dealer)
        party.send(edge, messages.ModelSize(len(forest.trees), depth))
    for start in range(0, len(forest.trees), at_once):
        for edge in shares.holders:
            party.receive(edge, messages.TreesRequest)
        take_down(model, forest.trees[start : start + at_once], part.splits, bins, depth)


def edge(inputs: RoleInput[FedXGB], record: QueryRecord) -> None:
    """Predict users' rows with the other edge servers.

    A user that has not shared its rows, or taken a message, within `patience` seconds gets nothing, as does one that
    asks for more rows than `record` leaves it. Raises ConfigError if the server's rules are not the options, to which
    this edge server consents, and PeerProtocolError if its model has more or deeper trees.
    """
    party, options, roles, patience = inputs.party, inputs.options, inputs.roles, patience_of(inputs)
    server, edges = roles.active, roles.having("edge")
    most_rounds, most_depth = inputs.common.most_rounds, inputs.common.depth
    deals = party.name not in holders_of(options.compares, edges)
    users = [] if deals else roles.owners
    party.may_lose(users)
    kinds: tuple[type[messages.PredictionTerms] | type[messages.DealerTerms], ...] = (
        messages.PredictionTerms,
        messages.DealerTerms,
    )
    terms = party.receive(server, *kinds)
    grown = party.receive(server, messages.ModelSize)
    _check_terms(inputs, terms, consents=True)
    if isinstance(terms, messages.DealerTerms) != deals:
        expected, got = kinds[deals].__name__, type(terms).__name__
        raise PeerProtocolError(server, f"expected {expected}, got {got} - from {server}")
    if isinstance(terms, messages.DealerTerms):
        n_outputs = terms.outputs
        layout = Layout(n_bins=terms.n_bins, categorical=terms.categorical, may_miss=[True] * len(terms.n_bins))
    else:
        n_outputs, _, layout = _columns(terms, server)
    most_trees = most_rounds * n_outputs
    if grown.trees > most_trees or grown.depth > most_depth:
        raise PeerProtocolError(
            server,
            f"expected at most {most_trees} trees of depth {most_depth}, as the options say, got {grown.trees} of "
            f"depth {grown.depth}",
            at="ModelSize",
        )
    if isinstance(terms, messages.DealerTerms):
        dealer = Dealer(party, edges, layout)
        dealer.serve()  # the mask of the rows
        dealer.serve()  # all levels and leaves
        return
    # one edge server speaks to users; all of them compare the terms with their own
    if party.name == edges[0]:
        party.send_each(dict.fromkeys(users, terms), timeout=patience)
    shares = shares_of(options.compares, layout, edges)
    counted = record.asked(terms.model_id)
    asked = {name: counted.get(name, 0) for name in users}
    left = {name: max(0, options.queries - rows) for name, rows in asked.items()}
    party.send_each({name: messages.QueriesLeft(rows) for name, rows in left.items()}, timeout=patience)
    held = HolderRows(party, server, shares, inputs.threads)
    counts = held.take(held.receive(users, options.queries, patience))
    answered = _counted(party, shares.holders, record, terms, counts, asked)
    taken = {name: messages.RowsTaken(name in answered) for name in users if name in party.peers}
    party.send_each(taken, timeout=patience)
    # from here on all holders have the same rows in the same order
    held.keep(answered)
    if not answered:
        logger.warning("%s: no user's rows have come to all edge servers in time", party.name)
    # shares of sums add up without a message to the others
    totals, done = np.zeros((n_outputs, held.n_rows, *shares.number), np.uint64), 0
    while done < grown.trees:
        party.send(server, messages.TreesRequest())
        splits, leaves = _some_trees(party, server, shares, grown.depth, grown.trees - done)
        # trees are in rounds, one for each output
        outputs = (done + np.arange(len(leaves))) % n_outputs
        length = max(1, min(_AT_ONCE // len(leaves), 4 * _AT_ONCE // (len(leaves) << grown.depth)))
        for start in range(0, held.n_rows, length):
            part = slice(start, min(start + length, held.n_rows))
            for output, found in _values(held.routing, part, splits, leaves, outputs).items():
                totals[output, part] = shares.add(totals[output, part], found)
        done += len(leaves)
    held.routing.end_batch()
    results = {name: pieces_of(messages.ValueShares, totals, rows) for name, rows in held.parts.items()}
    send_pieces_or_leave_out(party, results, patience)


def _counted(
    party: Party,
    holders: Sequence[str],
    record: QueryRecord,
    terms: messages.PredictionTerms,
    rows: dict[str, int],
    asked: dict[str, int],
) -> list[str]:
    """Count rows before they are predicted; return the users whose rows all holders have counted.

    `asked` is what all users had asked for before. Where another holder has counted more, its number is taken.
    """
    # counted before anything is computed: an aborted prediction counts, too
    most = terms.max_queries
    fit = record.count(terms.model_id, rows, most)
    for name in rows.keys() - set(fit):
        logger.warning("%s leaves out %s: fewer rows are left to it than %d", party.name, name, rows[name])
    answered, others = exchange_counts(party, holders, messages.RowCounts({name: rows[name] for name in fit}, asked))
    more = {}
    for name, had in asked.items():
        edge, highest = max(((edge, of.asked.get(name, 0)) for edge, of in others.items()), key=lambda of: of[1])
        if min(highest, most) > had:
            # the highest count holds: a record that was replaced by an older copy must not give rows back
            more[name] = min(highest, most) - had
            logger.warning(
                "%s has counted %d rows of %s where %s has %d, which it takes over: its record of queries was started "
                "again or replaced by an older copy, or another prediction is under way", party.name, had, name, edge,
                highest,
            )  # fmt: skip
    for name in set(fit) - set(answered):  # nothing is computed for it
        more[name] = more.get(name, 0) - rows[name]
    if more:
        record.add(terms.model_id, more)
    return answered


def _some_trees(
    party: Party, server: str, shares: Shares, depth: int, most: int
) -> tuple[list[tuple[Words, Words]], Words]:
    """Receive some trees: shares of weights and thresholds of each level, and of leaf values."""
    levels = [party.receive(server, messages.SplitShares) for _ in range(depth)]
    received = party.receive(server, messages.LeafShares).values
    leaves = view(received, np.uint64, (None, 1 << depth, *shares.number), peer=server, what="LeafShares.values")
    trees = len(leaves)
    if not 1 <= trees <= most:
        raise PeerProtocolError(server, f"expected 1 to {most} trees, got {trees}", at="LeafShares")
    return [view_splits(of, trees, 1 << k, shares, server) for k, of in enumerate(levels)], leaves


def _values(
    routing: Routing, part: slice, splits: Sequence[tuple[Words, Words]], leaves: Words, outputs: NDArray[np.intp]
) -> dict[int, Words]:
    """Return shares of the sums of some rows' leaf values over the trees of each output, uint64 (n, *)."""
    n_rows = part.stop - part.start
    number = leaves.shape[2:]
    # every row is at the root of every tree
    paths = np.broadcast_to(routing.one, (len(leaves), 1, n_rows, *number))
    for k, (weights, thresholds) in enumerate(splits):
        _, paths = routing.level(part, weights, thresholds, paths if k else None)
    found = {}
    for output in np.unique(outputs).tolist():
        of = np.flatnonzero(outputs == output)
        n_leaves = len(of) * leaves.shape[1]
        found[output] = routing.leaves(
            paths[of].reshape(n_leaves, n_rows, *number), leaves[of].reshape(n_leaves, *number)
        )
    return found


def user(inputs: RoleInput[FedXGB]) -> RowPredictions:
    """Return the predictions of own rows, whose margins, float64 (n_rows, n_outputs), are those of the plain model.

    They agree bit for bit where the base margin is a multiple of 2^-32, as leaf values are. Raises ConfigError when the
    server says another comparison, DataError when the table has another schema, or more rows than are left to this
    user, PeerError if edge servers continue without it.
    """
    party, compares, edges = inputs.party, inputs.options.compares, inputs.roles.having("edge")
    first = edges[0]
    terms = party.receive(first, messages.PredictionTerms)
    _check_terms(inputs, terms, consents=False)
    n_outputs, bins, layout = _columns(terms, first)
    holders = holders_of(compares, edges)
    left = min(party.receive(edge, messages.QueriesLeft).rows for edge in holders)
    assert inputs.read is not None
    table = inputs.read(bins.schema)
    if table.n_rows > left:
        raise DataError(
            f"{party.name}: expected at most {left} rows to predict, got {table.n_rows}: {terms.max_queries} rows of a "
            f"user are predicted by a model over all runs, and of its own {terms.max_queries - left} have been; bring "
            "fewer, or have all parties agree on a higher max_queries",
            public="it asks for more rows than are left to it",
        )
    shared = SharedRows(party, shares_of(compares, layout, edges), bins.transform(table, threads=1))
    for edge in holders:
        if not party.receive(edge, messages.RowsTaken).taken:
            raise PeerError(
                edge,
                f"{edge} continues without {party.name}: expected its rows at all edge servers, equally many, before "
                "they stop waiting for users",
            )
    return RowPredictions(terms.objective.base_margins + shared.values({}, n_outputs).T, terms.objective, terms.classes)


def _check_terms(
    inputs: RoleInput[FedXGB], terms: messages.PredictionTerms | messages.DealerTerms, *, consents: bool
) -> None:
    """Raise ConfigError unless the server's terms are a party's own; an edge server `consents` to more of them."""
    name, own, trained = inputs.party.name, inputs.options, inputs.model_id
    if terms.comparison != own.compares:
        raise ConfigError(
            f'expected comparison="{own.compares}", to which {name} consents, got "{terms.comparison}" of the '
            "server; agree on one of them"
        )
    if trained and trained != terms.model_id:
        raise ConfigError(
            f"expected model {trained[:8]}, in whose training {name} took part by its report, got "
            f"{terms.model_id[:8]} of the server: it is another job's, or this job was trained again without {name}; "
            f"if it is the right one, move {name}.report.json away",
            public="its report is of the training of another model",
        )
    if not consents:
        return
    if not trained:
        logger.warning(
            "%s has no report of the job's training: check that model %s of the server is the job's",
            name, terms.model_id[:8],
        )  # fmt: skip
    if terms.max_queries != own.queries:
        raise ConfigError(
            f"expected max_queries={own.queries}, to which {name} consents, got {terms.max_queries} of the server; "
            "agree on one of them"
        )


def _columns(terms: messages.PredictionTerms, peer: str) -> tuple[int, Bins, Layout]:
    """Return the number of outputs, bins and their layout; PeerProtocolError if classes and outputs do not fit."""
    n_outputs, classes = terms.objective.n_outputs, terms.classes
    fits = classes is None or len(classes) == (2 if n_outputs == 1 else n_outputs)
    if not (1 <= n_outputs <= messages._MOST_OUTPUTS and fits):
        raise PeerProtocolError(
            peer, f"expected an output for each of the classes, got {n_outputs}", at="PredictionTerms"
        )
    bins = unpack_bins(
        terms.bins, schema_of(terms.names, terms.categories, terms.origins), (MOST_BINS, MOST_BINS), peer
    )
    return n_outputs, bins, layout_of(bins, np.ones(len(terms.names), np.bool_))


_QUERIES = Format("query-record", 1)
_TABLE = """CREATE TABLE asked (model TEXT NOT NULL, user TEXT NOT NULL,
    rows INTEGER NOT NULL CHECK (typeof(rows) = 'integer' AND rows >= 0), PRIMARY KEY (model, user))"""


def queries_folder(store: Path, party: str) -> Path:
    """Return where an edge server keeps its count."""
    return store / f"{party}.queries"


class QueryRecord:
    """How many rows of each user each model has predicted, by an edge server's count.

    It is kept in `folder`, readable by the owner alone (None: in memory, for this object). Constructor and methods
    raise ConfigError if the files cannot be used, or one is missing, damaged or an older copy (`machine.database`).
    """

    def __init__(self, folder: Path | None) -> None:
        self._db = SealedDatabase(
            folder, "queries", _QUERIES, {"asked": _TABLE}, what="record of queries",
            lost="how many rows users have had predicted: they may then ask for as many once more",
        )  # fmt: skip

    def asked(self, model_id: str) -> dict[str, int]:
        """Return how many rows users have had predicted by a model."""
        with self._db.transaction() as db:
            return _asked(db, model_id)

    def count(self, model_id: str, rows: Mapping[str, int], most: int) -> list[str]:
        """Count users' rows before anything is computed for them; return the users whose rows are counted.

        Users who would exceed `most`, together with what runs at the same time have counted, are left out.
        """
        with self._db.transaction() as db:
            before = _asked(db, model_id)
            total = {user: before.get(user, 0) + more for user, more in rows.items()}
            # in one transaction with the reading: two runs at a time cannot both fit
            fit = {user: asked for user, asked in total.items() if asked <= most}
            _write(db, model_id, fit)
        return list(fit)

    def add(self, model_id: str, rows: Mapping[str, int]) -> None:
        """Add rows that were counted elsewhere, or (negative) take back rows that were counted and not predicted."""
        with self._db.transaction() as db:
            before = _asked(db, model_id)
            _write(db, model_id, {user: max(0, before.get(user, 0) + more) for user, more in rows.items()})
            db.execute("DELETE FROM asked WHERE rows = 0")


def _write(db: sqlite3.Connection, model_id: str, rows: Mapping[str, int]) -> None:
    db.executemany(
        "INSERT INTO asked VALUES (?, ?, ?) ON CONFLICT (model, user) DO UPDATE SET rows = excluded.rows",
        [(model_id, user, asked) for user, asked in rows.items()],
    )


def _asked(db: sqlite3.Connection, model_id: str) -> dict[str, int]:
    return dict(db.execute("SELECT user, rows FROM asked WHERE model = ?", (model_id,)).fetchall())
