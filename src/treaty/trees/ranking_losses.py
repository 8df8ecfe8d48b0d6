"""LambdaMART: pairs of rows of one group, of which the more relevant one should come first.

Burges, "From RankNet to LambdaRank to LambdaMART: An Overview", 2010 (MSR-TR-2010-82), with XGBoost's pairs and
normalisation: of each group the `PAIRED` rows that the margins put first are paired with every row after them.

A target is float64 (n_rows, 2): relevance, and the number of the row's group. Rows of a group may stand anywhere.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from treaty.errors import DataError
from treaty.machine.arrays import Floats, Integers
from treaty.machine.kernels import kernel
from treaty.machine.shared_work import share
from treaty.trees.losses import FixedPointLoss, Takes

# rows of a group that are paired with all after them, and that count in NDCG; XGBoost's default
PAIRED = 32
# its gain is 2^relevance - 1
_MOST_RELEVANCE = 31
# added to the difference of two margins that a pair's weight is divided by
_CLOSE = 0.01


class LambdaMart(FixedPointLoss, frozen=True):
    """What losses of pairs share; the metric is the mean NDCG of groups at `PAIRED`, 1 for a group without relevance.

    A pair of rows i before j by relevance, with the weight w, has lambda = w / (1 + exp(m_i - m_j)): grad -lambda for
    i and lambda for j, and hess 2 lambda / (1 + exp(m_j - m_i)) for both. w is divided by abs(m_i - m_j) + 0.01 where
    not all margins of the group are equal. The group's sums are then multiplied by log2(1 + s) / s, with s twice the
    sum of its lambdas.
    """

    takes: ClassVar[Takes] = "groups"
    metric: ClassVar[str] = "ndcg@32"
    higher_is_better: ClassVar[bool] = True
    # a hessian is at most twice the lambdas of its pairs
    hess_limit: ClassVar[float] = 2.0
    hess_has_clip: ClassVar[bool] = True
    hess_tells_labels: ClassVar[bool] = True
    by_ndcg: ClassVar[bool]

    @classmethod
    def check_labels(cls, y: Floats, whose: str) -> None:
        wrong = int(np.count_nonzero(~np.isin(y[:, 0], np.arange(_MOST_RELEVANCE + 1.0))))
        if wrong:
            raise DataError(
                f"{whose}: expected relevance as whole numbers from 0 to {_MOST_RELEVANCE}, got {wrong} others of "
                f"{len(y)}"
            )

    @classmethod
    def check_weights(cls, y: Floats, weight: Floats) -> None:
        # the weight is the group's
        order, starts = _groups(y[:, 1])
        first = np.repeat(weight[order][starts[:-1]], np.diff(starts))
        wrong = np.unique(y[order, 1][weight[order] != first])
        if len(wrong):
            raise DataError(
                f"expected one sample weight for all rows of a group, got several in {len(wrong)} groups",
                public="its sample weights differ within groups",
            )

    def estimated_start(self, y: Floats, weight: Floats | None) -> tuple[float, ...]:
        # scores are compared within a group alone, and gradients of a pair cancel
        return (0.0,)

    def clip_of(self, y: Floats) -> float:
        # a row's lambdas add up to log2(1 + s) / 2 at most, and s to n^2 / 0.01 in a group of n rows
        largest = int(np.unique(y[:, 1], return_counts=True)[1].max(initial=1))
        return 2.0 ** math.ceil(math.log2(max(1.0, math.log2(1.0 + largest**2 / _CLOSE) / 2.0)))

    def loss(self, margins: Floats, y: Floats, weight: Floats | None) -> float:
        return mean_ndcg(margins[:, 0], y, weight, PAIRED)

    def gradients(
        self, margins: Floats, y: Floats, weight: Floats | None, threads: int = 1
    ) -> tuple[Integers, Integers, int]:
        """Return grad and hess, int64 (1, n_rows), and 0: no row is clipped."""
        starts, order = ranks(y[:, 1], margins[:, 0])
        scores, relevance = margins[order, 0], y[order, 0]
        lambdas = np.zeros((2, len(y)))

        def work(first: int, last: int) -> None:
            write_lambdas(scores, relevance, starts, self.by_ndcg, first, last, lambdas)

        rows_of_a_group = len(y) // max(1, len(starts) - 1) + 1
        share(work, len(starts) - 1, threads, least=max(1, (1 << 12) // rows_of_a_group))
        scale = 2.0**self.fractional_bits / self.weight_unit
        scales = scale if weight is None else scale * weight[order]
        grad, hess = np.empty((1, len(y)), np.int64), np.empty((1, len(y)), np.int64)
        grad[0, order] = np.rint(np.clip(lambdas[0] / self.grad_clip, -1.0, 1.0) * scales)
        hess[0, order] = np.rint(np.clip(lambdas[1] / self.grad_clip, 0.0, 2.0) * scales)
        return grad, hess, 0


class Pairwise(LambdaMart, frozen=True, tag="pairwise"):
    """RankNet's loss: every pair has the weight 1."""

    xgboost_name: ClassVar[str] = "rank:pairwise"
    by_ndcg: ClassVar[bool] = False


class Ndcg(LambdaMart, frozen=True, tag="ndcg"):
    """A pair's weight is the change of NDCG if the two rows changed places."""

    xgboost_name: ClassVar[str] = "rank:ndcg"
    by_ndcg: ClassVar[bool] = True


def ranks(group: Floats, score: Floats) -> tuple[Integers, Integers]:
    """Order rows by group and then by descending score; return where groups start, and end, and the order."""
    order, starts = np.lexsort((-score, group)), _groups(group)[1]
    return starts, order


def mean_ndcg(scores: Floats, y: Floats, weight: Floats | None, most: int) -> float:
    """Return the mean NDCG of groups by the first `most` rows of each; 1 for a group without relevance."""
    if not len(y):
        return float("nan")
    gains, (starts, ranked), (_, ideal) = np.exp2(y[:, 0]) - 1.0, ranks(y[:, 1], scores), ranks(*y.T[::-1])
    place = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
    discount = np.where(place < most, 1.0 / np.log2(place + 2.0), 0.0)
    reached, best = (np.add.reduceat(gains[order] * discount, starts[:-1]) for order in (ranked, ideal))
    return _mean_share(reached, best, weight, ranked, starts)


def mean_average_precision(scores: Floats, y: Floats, weight: Floats | None, most: int) -> float:
    """Return the mean of groups' average precision by the first `most` rows, as XGBoost; 1 where none is relevant.

    Relevance is 0 or 1. A group's precisions at its relevant rows are divided by as many of these as there could be.
    """
    if not len(y):
        return float("nan")
    starts, ranked = ranks(y[:, 1], scores)
    relevant, place = y[ranked, 0], np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
    so_far = np.cumsum(relevant)
    before = (so_far - relevant)[starts[:-1]]
    precision = (so_far - np.repeat(before, np.diff(starts))) / (place + 1.0)
    reached = np.add.reduceat(np.where(place < most, precision * relevant, 0.0), starts[:-1])
    best = np.minimum(np.add.reduceat(relevant, starts[:-1]), most)
    return _mean_share(reached, best, weight, ranked, starts)


def _mean_share(reached: Floats, best: Floats, weight: Floats | None, ranked: Integers, starts: Integers) -> float:
    shares = np.divide(reached, best, out=np.ones_like(best), where=best > 0.0)
    return float(np.average(shares, weights=None if weight is None else weight[ranked][starts[:-1]]))


def _groups(group: Floats) -> tuple[Integers, Integers]:
    """Return the rows in the order of their groups, and where each group starts, and the last ends."""
    order = np.argsort(group, kind="stable")
    changes = np.flatnonzero(np.diff(group[order]) != 0.0) + 1
    return order, np.concatenate([[0], changes, [len(group)]]).astype(np.int64)


@kernel
def write_lambdas(scores: Any, relevance: Any, starts: Any, by_ndcg: bool, first: int, last: int, lambdas: Any) -> None:
    """Write the derivatives of groups ``first..last``, whose rows stand in descending order of `scores`.

    `lambdas` is float64 (2, n_rows): grad and hess, 0 before.
    """
    for group in range(first, last):
        start, stop = starts[group], starts[group + 1]
        ideal = 0.0
        if by_ndcg:
            best = np.sort(relevance[start:stop])
            for place in range(min(PAIRED, stop - start)):
                ideal += (2.0 ** best[stop - start - 1 - place] - 1.0) / np.log2(place + 2.0)
            if ideal == 0.0:
                continue
        # of equal margins XGBoost does not divide by their differences
        differ = scores[start] != scores[stop - 1]
        total = 0.0
        for i in range(start, min(start + PAIRED, stop)):
            for j in range(i + 1, stop):
                if relevance[i] == relevance[j]:
                    continue
                high, low = (i, j) if relevance[i] > relevance[j] else (j, i)
                weight = 1.0
                if by_ndcg:
                    discounts = 1.0 / np.log2(i - start + 2.0) - 1.0 / np.log2(j - start + 2.0)
                    weight = (2.0 ** relevance[high] - 2.0 ** relevance[low]) * discounts / ideal
                difference = scores[high] - scores[low]
                if differ:
                    weight /= abs(difference) + _CLOSE
                p = 1.0 / (1.0 + np.exp(-difference))
                pull = (1.0 - p) * weight
                bend = 2.0 * p * pull
                lambdas[0, high] -= pull
                lambdas[0, low] += pull
                lambdas[1, high] += bend
                lambdas[1, low] += bend
                total += 2.0 * pull
        if total > 0.0:
            # a group's pull grows with the logarithm of its lambdas alone
            norm = np.log2(1.0 + total) / total
            for i in range(start, stop):
                lambdas[0, i] *= norm
                lambdas[1, i] *= norm
