"""A partner's buckets from randomised ones (FederBoost by column; Tian et al. 2020, section IV-B).

The best guess of a bucket from a randomised one is that one itself, as soon as it is kept with the highest chance; and
where noise makes that worse than the commonest bucket, which a guess without looking takes, that one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from treaty.attacks.views import Finding, Truth, View
from treaty.systems.federboost_vertical.buckets import Buckets, unpack_buckets


def attack(view: View, truth: Truth) -> Iterator[Finding]:
    """Take each row's noisy bucket for its true one."""
    for entry in view.recorded.transcript.entries:
        if entry.step != Buckets.__name__ or entry.direction != "received":
            continue
        told = entry.message(Buckets)
        assert told is not None, "contents are recorded"
        codes, offsets = truth.codes(entry.peer)
        present, missing = (np.frombuffer(of.data, of.dtype) for of in (told.present, told.missing))
        if not codes.size or not np.array_equal(present, np.diff(offsets) - 1):  # other buckets than the true table's
            continue
        sizes = np.maximum(present + missing, 1).astype(np.int32)
        noisy = unpack_buckets(told.packed, sizes, len(codes), entry.peer)
        common = [np.bincount(column).max() for column in codes.T]
        yield Finding(
            attack="noisy buckets as they are", party=view.party, target=f"buckets of {entry.peer}",
            measure="share right", score=float((noisy == codes).mean()),
            baseline=float(np.sum(common) / codes.size), error=float(0.5 / np.sqrt(codes.size)),
        )  # fmt: skip
