"""Attacks on sums that the active party, or the leader, opens in the clear: they show which bins rows are in.

The sums are exact, or noisy in FederBoost. Also attacked are the sides of splits, which every protocol reveals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from treaty.attacks.views import Finding, Truth, View
from treaty.machine.arrays import Flags, Int32s, Integers
from treaty.privacy.exact_sums import known_bins
from treaty.privacy.histogram_inversion import OpenedTree, RebuiltRows, agreement, invert, rebuild
from treaty.systems.vertical.messages import Setup


def exact_sums(view: View, truth: Truth) -> Iterator[Finding]:
    """Work out each partner's bins by elimination and by sums of one to three rows; sealed sums show none.

    A partner's bins from the exact sums that an active party opens (`privacy.exact_sums`; docs/secureboost.md).

    Baseline: nothing is known for certain. What is found is certain, so the score is a share of all bins.
    """
    if not view.is_active or not view.steps(Setup):
        return
    recording = view.recorded.recording
    for owner in [name for name in truth.owners if name != view.party]:
        codes, _ = truth.codes(owner)
        nodes = recording.nodes.get(owner, [])
        found = known_bins(nodes, recording.offsets[owner], len(codes)) if nodes else np.full(codes.shape, -1)
        yield Finding(
            attack="exact sums", party=view.party, target=f"bins of {owner}", measure="share known",
            score=float(((found >= 0) & (found == codes)).mean()), baseline=0.0,
        )  # fmt: skip


MOST = 1000
"""Splits that are grouped, those of the largest nodes: the work grows with their square."""
# rows that a way would have by chance, from which its being empty counts
_EXPECTED = 8.0

Sides = Sequence[tuple[Int32s, Flags]]
"""Of each split the rows whose sides were shown, and which of them go left."""


def nested_sides(view: View, truth: Truth) -> Iterator[Finding]:
    """Work out each partner's bins from the sides that it showed of its splits.

    A partner's bins from sides of its splits, which every protocol shows the active party (docs/sealed.md).

    Cuts of one column are nested: of two, one of the four ways in which rows may fall is empty. Splits whose nodes have
    rows in common are put into groups by that, without record numbers, however sums are hidden; a group is a column. A
    row's bin is known for certain once every other bin of the column is on the other side of a split at which the row's
    side was shown. Which column a group is, and which bin lies between two cuts, follows from how many rows are there,
    and is taken from the owner's table here; a split that was put to others of another column counts for nothing.

    Baseline: nothing is known for certain. What is found is certain, so the score is a share of all bins.
    """
    if not view.is_active or not view.steps(Setup):
        return
    for owner in [name for name in truth.owners if name != view.party]:
        codes, offsets = truth.codes(owner)
        sides = sorted(view.recorded.recording.sides.get(owner, []), key=lambda split: -len(split[0]))[:MOST]
        yield Finding(
            attack="nested sides", party=view.party, target=f"bins of {owner}", measure="share known",
            score=known_share(sides, codes, np.diff(offsets) - 1), baseline=0.0,
        )  # fmt: skip


def known_share(sides: Sides, codes: NDArray[np.uint8], n_bins: Integers) -> float:
    """Return the share of bins, rows times columns, that sides tell for certain; a column's last code is missing."""
    groups = grouped(sides, len(codes))
    fits = [_columns_of(rows, left, codes) for rows, left in sides]
    possible = [np.ones((len(codes), int(of) + 1), np.bool_) for of in n_bins]
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        column = int(np.sum([fits[k] for k in members], axis=0).argmax())
        for rows, left in [sides[k] for k in members.tolist() if fits[k][column]]:
            of_rows, missing = codes[rows, column], int(n_bins[column])
            for side in (left, ~left):
                other = np.unique(of_rows[~side])
                possible[column][np.ix_(rows[side], other)] = False
                present, own = other[other < missing], of_rows[side & (of_rows < missing)]
                if len(present) and len(own) and present.max() < own.min():
                    possible[column][rows[side], : present.max() + 1] = False
                elif len(present) and len(own) and present.min() > own.max():
                    possible[column][rows[side], present.min() : missing] = False
    known = 0
    for column, may in enumerate(possible):
        there = np.bincount(codes[:, column], minlength=may.shape[1]) > 0
        known += int((may[:, there].sum(axis=1) == 1).sum()) if there.sum() > 1 else 0
    return known / max(1, codes.size)


def _columns_of(rows: Int32s, left: Flags, codes: NDArray[np.uint8]) -> Flags:
    """Return which columns a split may be of: no bin has rows on either side."""
    of_rows = codes[rows]
    return np.array([not np.intersect1d(of[left], of[~left]).size for of in of_rows.T], np.bool_)


def grouped(sides: Sides, n_rows: int) -> Integers:
    """Return each split's group, int64 (k,), the largest nodes first: nested with some of it, crossing none."""
    count = len(sides)
    there, left = np.zeros((2, count, n_rows), np.float32)
    for k, (rows, going) in enumerate(sides):
        there[k, rows], left[k, rows[going]] = 1.0, 1.0
    right = there - left
    ways = np.stack([left @ left.T, left @ right.T, right @ left.T, right @ right.T])
    both = np.maximum(ways.sum(axis=0), 1.0)
    ll, lr, rl, rr = ways
    first, second = np.stack([ll + lr, rl + rr]), np.stack([ll + rl, lr + rr])
    expected = np.stack([first[a] * second[b] / both for a in (0, 1) for b in (0, 1)])
    nested = np.asarray(((ways == 0) & (expected >= _EXPECTED)).any(axis=0))
    crossing = np.asarray((ways > 0).all(axis=0))
    groups, found = np.full(count, -1, np.int64), 0
    for k in range(count):
        score = [
            0 if crossing[k, groups == group].any() else int(nested[k, groups == group].sum()) for group in range(found)
        ]
        groups[k] = int(np.argmax(score)) if max(score, default=0) else found
        found = max(found, int(groups[k]) + 1)
    return groups


# rows are matched one to one, which takes their square of memory
MOST_ROWS = 4000


def inverted_histograms(view: View, truth: Truth) -> Iterator[Finding]:
    """Invert the histograms of a binary classifier's trees.

    Rows rebuilt from opened histograms, at the leader of tables split by row (`privacy.histogram_inversion`).

    Score: the mean share of right bins of a rebuilt table, its rows matched with true ones to agree best. Baseline: the
    same of a table with every column drawn independently from the rows of each class in each bin. These counts are
    given to both; the first histogram shows them, unless it carries noise: then the attacker has more than it could.
    """
    recording = view.recorded.recording
    bins, y = recording.bins, truth.targets.astype(np.int64)
    if not recording.trees or bins is None or view.inputs.n_classes != 2 or len(y) > MOST_ROWS:
        return
    codes, offsets = truth.all_codes(bins), bins.offsets
    if codes is None:
        return
    slots = codes + offsets[:-1]
    by_class = np.stack([np.bincount(slots[y == k].ravel(), minlength=offsets[-1]) for k in (0, 1)])
    trees = [OpenedTree(asked, left) for asked, left in recording.trees if 0 in asked]
    if not trees:
        return
    found = invert(trees, offsets)
    nothing = RebuiltRows(found.possible[:0], found.labels[:0])
    base, got = (agreement(*rebuild(of, by_class, offsets), codes, y) for of in (nothing, found))
    yield Finding(
        attack="histogram inversion", party=view.party, target="bins of all rows", measure="share right",
        score=got.mean, baseline=base.mean, error=float(0.5 / np.sqrt(len(codes))),
    )  # fmt: skip
