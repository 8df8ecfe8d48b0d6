"""A scorecard's regression: on the weight of evidence (WOE) of bins, whose labels are counted by encrypted products.

Each owner of columns cuts them into bins without labels. The number of events in each bin is the product of a column of
zeros and ones with the labels, so the products of training give it: the owner gets these counts of its own bins, and
the active party learns nothing of them, but limits how many there are over all jobs. Each owner then merges its bins,
and trains on their WOE as on other columns. At the end the active party sends all owners the slope of its calibration,
which makes points of their weights.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treaty.data.table import Schema, Table
from treaty.errors import CryptoError, PeerProtocolError
from treaty.linear.preparation import COLUMN_FRACTION, Calibration
from treaty.machine.arrays import Floats, Integers
from treaty.messaging.messages import Message, leaks
from treaty.models.linear import LinearPart
from treaty.models.scorecard import ScorecardPart, as_woe
from treaty.statistics import ColumnBins, bads_in, bins_of_columns, with_labels
from treaty.systems.logistic.options import RegressionOptions
from treaty.systems.logistic.setup import GlmInput, OwnData, begin, fixed_columns, masks_of
from treaty.systems.logistic.steps import products_of
from treaty.systems.vertical.exact_sums import LABELS, AnsweredVectors

UNCALIBRATED = Calibration(1.0, 0.0)


@leaks("the slope of the calibration, by which margins become log-odds", "aggregated")
class CalibrationSlope(Message):
    """What the label holder's calibration multiplies margins by."""

    slope: float


def cut(table: Table, name: str, common: RegressionOptions) -> list[ColumnBins]:
    """Cut a party's columns into bins, without labels."""
    return bins_of_columns(table, name, max_bin=common.max_bin, min_bin_rows=common.least_rows(table.n_rows))


def labelled(bins: Sequence[ColumnBins], table: Table, y: Floats, common: RegressionOptions) -> list[ColumnBins]:
    """Return bins with the events among labels y of 0 and 1 counted, as the party that has both."""
    totals = int((y < 0.5).sum()), int((y > 0.5).sum())
    return [with_labels(of, bads_in(of, table, y), totals, common.monotone) for of in bins]


def on_bins(inputs: GlmInput) -> tuple[GlmInput, list[ColumnBins]]:
    """Return a data party's input with the WOE of each value in its place, and its bins.

    Raises ConfigError or DataError as `begin`, ConfigError where labels would be counted in too many bins, CryptoError
    when counts cannot be counts.
    """
    party, common, data = inputs.party, inputs.common, inputs.rows
    bins, is_active = cut(data.table, party.name, common), party.name == inputs.roles.active
    n_rows = data.table.n_rows
    # the active party's own bins need no product, but it must have a column
    each = [of.assign(data.table)[:, np.newaxis] == np.arange(len(of.n_rows or ())) for of in bins]
    indicators = np.ones((n_rows, 1)) if is_active else np.hstack(each).astype(np.float64)
    setting = begin(inputs, indicators.shape, None)
    if is_active:
        # the owners of bins may pool what they learn
        theirs = sum(setting.n_columns[peer] for peer in setting.passives)
        AnsweredVectors(inputs).add(theirs, LABELS, "labels", "take fewer bins (max_bin) or columns", "a scorecard")
    # labels of rows, not their weights, are counted
    own = OwnData(fixed_columns(indicators), None, None)
    products = products_of(inputs, setting, own, masks_of(party, setting, "bins"))
    labels = (data.y > 0.5).astype(np.float64) if is_active else np.zeros(n_rows)
    found = products.times(np.arange(n_rows), setting.fixed(labels), counted=False)
    if is_active:
        bins = labelled(bins, data.table, labels, common)
    else:
        bins = _counted(bins, found, COLUMN_FRACTION + setting.fractional_bits, n_rows, common)
    return replace(inputs, data=replace(data, table=as_woe(bins, data.table))), bins


def _counted(
    bins: Sequence[ColumnBins], products: Sequence[int], fraction: int, n_rows: int, common: RegressionOptions
) -> list[ColumnBins]:
    """Return bins with the events that products in fixed point count: those of every bin, one column after another."""
    rows = [count for of in bins for count in of.n_rows or ()]
    whole = [number >> fraction for number in products]
    fits = all(0 <= count <= most for count, most in zip(whole, rows, strict=True))
    ends = np.cumsum([len(of.n_rows or ()) for of in bins])
    each: list[Integers] = np.split(np.array(whole if fits else [0] * len(rows), np.int64), ends[:-1])
    # every row is in one bin of each column
    found = {int(counts.sum()) for counts in each}
    bads = min(found)
    if not fits or len(found) > 1 or not 0 < bads < n_rows or any(number % (1 << fraction) for number in products):
        raise CryptoError("counts of events in bins contradict each other or the rows: malformed contribution")
    return [with_labels(of, own, (n_rows - bads, bads), common.monotone) for of, own in zip(bins, each, strict=True)]


def give_points(inputs: GlmInput, part: LinearPart, schema: Schema, bins: Sequence[ColumnBins]) -> None:
    """Make the own part of a regression on WOE a part of a scorecard, of columns with this `schema`.

    The active party sends all others the slope of its calibration.
    """
    party, active = inputs.party, inputs.roles.active
    if party.name == active:
        slope = (part.calibration or UNCALIBRATED).slope
        for peer in inputs.others:
            party.send(peer, CalibrationSlope(slope))
    else:
        slope = party.receive(active, CalibrationSlope).slope
        if not math.isfinite(slope):
            raise PeerProtocolError(active, "expected a finite slope", at="CalibrationSlope")
    put_card(part, schema, bins, part.calibration or Calibration(slope, 0.0), inputs.common)


def put_card(
    part: LinearPart, schema: Schema, bins: Sequence[ColumnBins], calibration: Calibration, common: RegressionOptions
) -> None:
    """Put points into a part of a regression on WOE; from then on it takes the columns as they came."""
    assert common.pdo is not None
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    card = ScorecardPart(
        pdo=common.pdo, base_score=common.base_score, base_odds=common.base_odds, rounded=common.round_points,
        made=today, n_rows=sum(bins[0].totals) if bins else 0, bins=list(bins),
    )  # fmt: skip
    alpha = None if part.intercept is None else calibration.slope * part.intercept + calibration.offset
    card.assign(calibration.slope * part.per_unit(part.coef), alpha)
    part.card, part.schema = card, schema
