"""A partner's bins from the exact sums that an active party opens (`privacy.exact_sums`; docs/secureboost.md).

Baseline: nothing is known for certain. What is found is certain, so the score is a share of all bins.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from treaty.attacks.views import Finding, Truth, View
from treaty.privacy.exact_sums import known_bins
from treaty.systems.vertical.encrypted import Setup


def attack(view: View, truth: Truth) -> Iterator[Finding]:
    """Work out each partner's bins by elimination and by sums of one to three rows; sealed sums show none."""
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
