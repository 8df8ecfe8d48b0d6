"""Rows rebuilt from opened histograms, at the leader of tables split by row (`privacy.histogram_inversion`).

Score: the mean share of right bins of a rebuilt table, its rows matched with true ones to agree best. Baseline: the
same of a table with every column drawn by itself from the rows of each class in each bin. These counts are given to
both; the first histogram shows them, unless it carries noise: then the attacker has more than it could.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from treaty.attacks.views import Finding, Truth, View
from treaty.privacy.histogram_inversion import OpenedTree, RebuiltRows, agreement, invert, rebuild

MOST_ROWS = 4000  # rows are matched one to one, which takes their square of memory


def attack(view: View, truth: Truth) -> Iterator[Finding]:
    """Invert the histograms of a binary classifier's trees."""
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
