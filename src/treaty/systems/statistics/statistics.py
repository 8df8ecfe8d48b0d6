"""Statistics of the columns of several parties: bins with labels, correlations, and what each column is like.

Roles: an active party (labels 0 and 1, perhaps columns), passive parties (columns). Rows are aligned. Each party cuts
its own columns into bins; the labels in the bins of passive parties, and the correlations of columns of two parties,
are inner products, computed on shares (`products`) and opened to one party.

Adversary: honest but curious; passive parties do not collude with the active one. What each learns is in `system`. A
party that follows the protocol learns counts over `min_bin_rows` rows or more. One that does not could ask about rows
of its choice by other vectors than labels and columns; the owner of columns, or of labels, limits how many vectors are
multiplied with them over all jobs (`AnsweredVectors`), which is a tenth of what it takes to solve for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np

from treaty.crypto.parameters import SecretMatrix
from treaty.data.table import Schema
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.machine.arrays import Floats
from treaty.messaging.exchanges import agree, exchange, joint_seed
from treaty.messaging.messages import Array, ColumnSize, Message, RowSize, clean, leaks, leaks_by, view
from treaty.models.statistics import StatisticsPart
from treaty.statistics import (
    ColumnBins,
    bads_in,
    bins_of_columns,
    correlations,
    inflation,
    settled,
    standardised,
    with_labels,
    with_stability,
)
from treaty.systems.statistics.options import ColumnOptions, Statistics
from treaty.systems.statistics.products import Products
from treaty.systems.system import RoleInput, Roles
from treaty.systems.vertical.exact_sums import LABELS, AnsweredVectors

StatisticsInput = RoleInput[Statistics, ColumnOptions]

# entries of hidden columns are below 2^29: of n standardised numbers none is above the root of n
ENTRY_BITS = 29
# correlations are opened in units of 2^-25 or less
OPENED_BITS = 26
# decimals of IV and stability that others learn
DECIMALS = 3


@leaks("how many rows, numeric columns and bins the sender has; rows of eval sets", "control")
class StatisticsSizes(Message):
    """Sizes of a party's table: rows, those of eval sets, bins of all columns, numeric columns."""

    n_rows: RowSize
    eval_rows: Annotated[list[RowSize], msgspec.Meta(max_length=1000)]
    n_bins: ColumnSize
    n_numeric: ColumnSize


@leaks(
    "the names of the sender's columns; of each one its kind, how many rows lack a value, how many different "
    'values there are, its stability over eval sets, to three decimals, and, with reveal="active", how many rows '
    "are in each bin",
    "aggregated",
)
class SharedColumns(Message):
    """A passive party's columns, without cuts and categories; without rows in bins with ``reveal="passive"``."""

    columns: list[ColumnBins]


@leaks_by(
    to_active=("how many bad rows are in each bin of the sender's columns", "aggregated", "reveal"),
    to_passive=("the bad rows in each bin of its own columns", "aggregated", "reveal"),
)
class CountShares(Message):
    """Shares of the number of bad rows in each bin of a passive party's columns."""

    shares: Array


@leaks("the information value of each of the passive party's columns, to three decimals", "aggregated")
class InformationValues(Message):
    """The IV of each of a passive party's columns."""

    values: Array


@leaks(
    "the correlations, to seven digits, of the sender's numeric columns with the other parties' columns and with "
    "each other",
    "aggregated",
    "correlation",
)
class CorrelationShares(Message):
    """Shares, without lower bits, of the products of two parties' columns, and the sender's own correlations."""

    own: Array
    shares: list[Array]


def run(inputs: StatisticsInput) -> StatisticsPart:
    """Play either role; return what this party learns.

    Raises DataError unless labels are of two classes, each in `min_bin_rows` rows or more, and all tables have the same
    rows; ConfigError where terms differ or too many products would be revealed; PeerError if a peer is lost or sends
    what the protocol does not allow.
    """
    party, roles, common, table = inputs.party, inputs.roles, inputs.common, inputs.rows.table
    own = bins_of_columns(table, party.name, max_bin=common.max_bin, min_bin_rows=common.min_bin_rows)
    own = [with_stability(of, table, [rows.table for rows in inputs.eval_sets]) for of in own]
    agree(party, {**inputs.public_terms, "active party": roles.active, "parties": list(roles.owners)})
    _, numbers = standardised(table, common.correlation)
    sizes = _sizes(inputs, own, 0 if common.correlation == "none" else len(numbers))
    seed = joint_seed(party, party.peers, "statistics")
    # of one bit, and a sign
    products = Products(party, seed, table.n_rows, 2, 1, inputs.threads)
    if party.name == roles.active:
        bins = _count_labels(inputs, products, own, sizes)
    else:
        # an eval set's stability is as much about bins as a vector of its rows
        asked = 1 + sum(size.n_numeric for peer, size in sizes.items() if peer != party.name and len(numbers))
        AnsweredVectors(inputs).add(
            asked + len(inputs.eval_sets), table.schema.names, "columns",
            "give the others fewer columns, set correlation='none'",
        )  # fmt: skip
        bins = {party.name: _take_labels(inputs, products, own)}
    found = None if common.correlation == "none" else _correlate(inputs, seed, numbers, sizes)
    return part_of(inputs, seed[:16].hex(), table.schema, bins, found)


def part_of(
    inputs: RoleInput[Any, ColumnOptions], model_id: str, schema: Schema, bins: dict[str, list[ColumnBins]],
    correlation: Floats | None,
) -> StatisticsPart:  # fmt: skip
    """Make the part of the first party in `bins`, which is the active one where it has `correlation` (None: none)."""
    name = next(iter(bins))
    part = StatisticsPart(
        model_id=model_id, party=name, schema=schema, bins=bins,
        classes=inputs.classes if name == inputs.roles.active else None,
    )  # fmt: skip
    if correlation is not None:
        part.correlations = settled(correlation).ravel()
        vif = iter(inflation(part.correlation).tolist())
        part.bins = {
            party: [replace(of, vif=next(vif)) if of.kind == "numeric" else of for of in columns]
            for party, columns in bins.items()
        }
    return part


def class_totals(inputs: RoleInput[Any, ColumnOptions]) -> tuple[int, int]:
    """Return how many rows are good (label 0) and bad (1); DataError unless there are enough of both."""
    y, least = inputs.rows.y, inputs.common.min_bin_rows
    if inputs.rows.weight is not None or inputs.rows.base_margin is not None:
        raise ConfigError("rows of statistics all weigh the same and have no margins: leave weight and base_margin out")
    if len(inputs.classes or ()) != 2:
        raise DataError(
            f"{inputs.roles.active}: expected labels of two classes, good and bad, got {len(inputs.classes or ())}"
        )
    totals = int((y == 0).sum()), int((y == 1).sum())
    alone = inputs.party is None or inputs.options.allow_exact_sums
    if min(totals) < (1 if alone else least):
        raise DataError(
            f"{inputs.roles.active}: expected each label in at least {least} rows (min_bin_rows), got {min(totals)}: "
            "counts by bin would show the bins of single rows; allow_exact_sums=True at every party accepts it",
            public="one of the labels is in too few rows",
        )
    return totals


def _order(roles: Roles) -> list[str]:
    """Return the parties in the order in which they ask: the active one first."""
    return [roles.active, *(name for name in roles.owners if name != roles.active)]


def _sizes(inputs: StatisticsInput, own: Sequence[ColumnBins], n_numeric: int) -> dict[str, StatisticsSizes]:
    """Tell all parties the size of the own table, and check theirs."""
    party, watched = inputs.party, [rows.table.n_rows for rows in inputs.eval_sets]
    n_rows, n_bins = inputs.rows.table.n_rows, sum(len(of.n_rows or ()) for of in own)
    sizes = exchange(party, party.peers, StatisticsSizes(n_rows, watched, n_bins, n_numeric))
    for peer, size in sizes.items():
        if (size.n_rows, size.eval_rows) != (n_rows, watched):
            raise DataError(
                f"expected tables of the same rows, got {n_rows} rows and eval sets of {watched} at {party.name}, "
                f"{size.n_rows} and {size.eval_rows} at {peer}: align them",
                public="the parties' tables do not have the same number of rows; align them",
            )
    if min(watched, default=n_rows) < inputs.common.min_bin_rows and not inputs.options.allow_exact_sums:
        raise DataError(
            f"{party.name}: expected eval sets of at least {inputs.common.min_bin_rows} rows (min_bin_rows), got "
            f"{min(watched)}: stability would show bins of single rows; allow_exact_sums=True everywhere accepts it",
            public="an eval set has too few rows",
        )
    return sizes


def _take_columns(inputs: StatisticsInput, peer: str, size: StatisticsSizes) -> list[ColumnBins]:
    """Receive what a passive party shows of its columns."""
    sent, counted = inputs.party.receive(peer, SharedColumns).columns, inputs.options.reveal == "active"
    bins = [
        replace(of, party=peer, column=clean(of.column, 200), cuts=None, groups=None, n_bads=None, vif=np.nan)
        for of in sent
    ]
    counts = [of.n_rows or () for of in bins]
    fits = (
        len({of.column for of in bins}) == len(bins)
        and all((min(of, default=0) >= 0 and sum(of) == size.n_rows) if counted else not of for of in counts)
        and sum(map(len, counts)) == (size.n_bins if counted else 0)
        and size.n_numeric in (0, sum(of.kind == "numeric" for of in bins))
        and all(len(of.psi) == len(size.eval_rows) and np.isfinite(of.psi).all() for of in bins)
        and all(not of.alone or not counted or of.missing == len(of.n_rows or ()) - 1 for of in bins)
    )
    if not fits:
        raise PeerProtocolError(peer, "expected columns of the sizes that were announced", at="SharedColumns")
    return bins


def _count_labels(
    inputs: StatisticsInput, products: Products, own: list[ColumnBins], sizes: Mapping[str, StatisticsSizes]
) -> dict[str, list[ColumnBins]]:
    """Count the bad rows in all bins, as the active party; return all parties' bins with what is learned of them."""
    party, labels, totals = inputs.party, inputs.rows.y, class_totals(inputs)
    own_bads = [bads_in(of, inputs.rows.table, labels) for of in own]
    found = {
        party.name: [with_labels(of, n, totals, inputs.common.monotone) for of, n in zip(own, own_bads, strict=True)]
    }
    shown = {peer: _take_columns(inputs, peer, sizes[peer]) for peer in inputs.others}
    if inputs.options.reveal == "passive":
        # the owners of bins may pool what they learn
        n_bins = sum(sizes[peer].n_bins for peer in shown)
        AnsweredVectors(inputs).add(n_bins, LABELS, "labels", "have the others make fewer bins (max_bin)")
    shares = products.ask({peer: sizes[peer].n_bins for peer in shown}, labels.astype(np.int64)[np.newaxis])
    for peer, bins in shown.items():
        if inputs.options.reveal == "active":
            found[peer] = _labelled(inputs, products, bins, shares[peer], peer, totals)
            party.send(peer, _values(found[peer]))
        else:
            party.send(peer, CountShares(products.words(shares[peer])))
            found[peer] = _with_values(inputs, bins, peer)
    return found


def _take_labels(inputs: StatisticsInput, products: Products, own: list[ColumnBins]) -> list[ColumnBins]:
    """Show own columns and have the bad rows in their bins counted, as a passive party; return what is learned."""
    party, active, table = inputs.party, inputs.roles.active, inputs.rows.table
    shown = [
        replace(of, cuts=None, groups=None, other=None, psi=tuple(np.round(of.psi, DECIMALS).tolist())) for of in own
    ]
    if inputs.options.reveal == "passive":
        shown = [replace(of, n_rows=None) for of in shown]
    party.send(active, SharedColumns(shown))
    codes = np.stack([of.assign(table) for of in own]).astype(np.uint8)
    offsets = np.cumsum([0, *(len(of.n_rows or ()) for of in own)])
    shares = products.answer(active, SecretMatrix.of_bins(codes, offsets), 1)
    if inputs.options.reveal == "active":
        party.send(active, CountShares(products.words(shares)))
        return _with_values(inputs, own, active)
    found = _labelled(inputs, products, own, shares, active, None)
    party.send(active, _values(found))
    return found


def _labelled(
    inputs: StatisticsInput, products: Products, bins: list[ColumnBins], shares: Sequence[int], peer: str,
    totals: tuple[int, int] | None,
) -> list[ColumnBins]:  # fmt: skip
    """Open counts, and merge bins until WOE is monotone; `totals` are known to the party with labels alone."""
    theirs = products.read(peer, inputs.party.receive(peer, CountShares).shares, len(shares), "CountShares.shares")
    starts = np.cumsum([len(of.n_rows or ()) for of in bins])
    counts = np.split(products.add(shares, theirs), starts[:-1])
    good, bad = totals or (inputs.rows.table.n_rows - int(counts[0].sum()), int(counts[0].sum()))
    for of, part in zip(bins, counts, strict=True):
        if (part < 0).any() or (part > np.array(of.n_rows)).any() or part.sum() != bad or min(good, bad) < 1:
            raise PeerProtocolError(peer, "expected counts of labels within bins", at="CountShares")
    return [with_labels(of, n, (good, bad), inputs.common.monotone) for of, n in zip(bins, counts, strict=True)]


def _values(bins: Sequence[ColumnBins]) -> InformationValues:
    """Return IVs for a party that is not to know counts: with all digits, those of few bins follow from them."""
    return InformationValues(Array.of(np.round([of.iv for of in bins], DECIMALS)))


def _with_values(inputs: StatisticsInput, bins: list[ColumnBins], peer: str) -> list[ColumnBins]:
    """Receive the IV of each column."""
    sent = inputs.party.receive(peer, InformationValues).values
    ivs = view(sent, np.float64, (len(bins),), peer=peer, what="InformationValues.values")
    if not np.all(np.isfinite(ivs) & (ivs >= 0.0)):
        raise PeerProtocolError(peer, "expected values of 0 or more", at="InformationValues")
    return [replace(of, iv=iv) for of, iv in zip(bins, ivs.tolist(), strict=True)]


def _correlate(
    inputs: StatisticsInput, seed: bytes, numbers: Floats, sizes: Mapping[str, StatisticsSizes]
) -> Floats | None:
    """Correlate all numeric columns; return the correlations, in the order of `_order`, at the active party alone."""
    party, n_rows, order = inputs.party, inputs.rows.table.n_rows, _order(inputs.roles)
    fraction = ENTRY_BITS - int(np.ceil(np.log2(np.sqrt(n_rows) + 1.0)))
    columns = np.rint(numbers * 2.0**fraction).astype(np.int64)
    products = Products(party, seed, n_rows, ENTRY_BITS + 2, 1 << ENTRY_BITS, inputs.threads)
    # what is cut off leaves a product of two columns, n 2^(2 fraction) at most, with `OPENED_BITS` bits
    less = max(0, 2 * fraction + n_rows.bit_length() - OPENED_BITS)
    mine = order.index(party.name)
    shares: dict[str, list[int]] = {}
    for place, asker in enumerate(order[:-1]):
        if place == mine:
            shares |= products.ask({peer: sizes[peer].n_numeric for peer in order[place + 1 :]}, columns)
        elif place < mine:
            shares[asker] = products.answer(asker, columns, sizes[asker].n_numeric)
    own = correlations(numbers, numbers)
    if mine:
        sent = [products.words(shares[peer], less) for peer in order if peer != party.name]
        # all digits would tell counts of columns of few values
        own = np.round(own * 2.0 ** (OPENED_BITS - 1)) / 2.0 ** (OPENED_BITS - 1)
        party.send(inputs.roles.active, CorrelationShares(Array.of(own), sent))
        return None
    return _joined(inputs, products, shares, own, sizes, 2.0 ** (less - 2 * fraction) / n_rows, less)


def _joined(
    inputs: StatisticsInput, products: Products, shares: Mapping[str, list[int]], own: Floats,
    sizes: Mapping[str, StatisticsSizes], unit: float, less: int,
) -> Floats:  # fmt: skip
    """Open all correlations as the active party, and put them into one matrix."""
    party, order, what = inputs.party, _order(inputs.roles), "CorrelationShares.shares"
    starts = np.cumsum([0, *(sizes[name].n_numeric for name in order)])
    spans = {name: slice(first, last) for name, (first, last) in zip(order, pairwise(starts), strict=True)}
    found = np.zeros((starts[-1], starts[-1]))
    found[spans[party.name], spans[party.name]] = own
    # of each pair of parties, the first to come; of pairs with this one, its own
    held = {(party.name, peer): [share >> less for share in of_peer] for peer, of_peer in shares.items()}
    for place, peer in enumerate(order[1:], 1):
        sent, k = party.receive(peer, CorrelationShares), sizes[peer].n_numeric
        others = order[:place] + order[place + 1 :]
        within = view(sent.own, np.float64, (k, k), peer=peer, what="CorrelationShares.own")
        if len(sent.shares) != len(others) or not np.isfinite(within).all():
            raise PeerProtocolError(peer, f"expected correlations with {len(others)} parties", at=what)
        found[spans[peer], spans[peer]] = within
        for number, (other, array) in enumerate(zip(others, sent.shares, strict=True)):
            pair = (other, peer) if number < place else (peer, other)
            shape = sizes[pair[0]].n_numeric, sizes[pair[1]].n_numeric
            theirs = products.read(peer, array, shape[0] * shape[1], what, less)
            if pair not in held:
                held[pair] = theirs
                continue
            block = products.add(held[pair], theirs, less).reshape(shape) * unit
            found[spans[pair[0]], spans[pair[1]]], found[spans[pair[1]], spans[pair[0]]] = block, block.T
    return found
