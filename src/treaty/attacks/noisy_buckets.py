"""A partner's buckets from randomised ones (FederBoost by column; Tian et al. 2020, section IV-B).

The best guess weighs the chance of the noise against how common a bucket is, which the noisy buckets of all rows tell
without bias: where noise is weak it is the noisy bucket itself, where it is strong the commonest one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from treaty.attacks.views import Finding, Truth, View
from treaty.messaging.row_pieces import row_pieces
from treaty.privacy.label_rr import chances
from treaty.systems.federboost_vertical.buckets import Buckets, bits_of_row, unpack_buckets


def attack(view: View, truth: Truth) -> Iterator[Finding]:
    """Take each row's noisy bucket for its true one."""
    before: dict[str, list[NDArray[np.uint8]]] = {}  # of each peer the buckets of the rows so far
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
        came = before.setdefault(entry.peer, [])
        left = row_pieces(len(codes), bits_of_row(sizes))[len(came) :]
        came.append(unpack_buckets(told.packed, sizes, left[0].stop - left[0].start, entry.peer))
        if len(left) > 1:
            continue
        noisy = np.concatenate(before.pop(entry.peer))
        epsilons = np.frombuffer(told.epsilon.data, np.float64)
        guessed = [likeliest(of[0], int(of[1]), float(of[2])) for of in zip(noisy.T, sizes, epsilons, strict=True)]
        common = [np.bincount(column).max() for column in codes.T]
        yield Finding(
            attack="likeliest buckets", party=view.party, target=f"buckets of {entry.peer}", measure="share right",
            score=float((np.stack(guessed, axis=1) == codes).mean()), baseline=float(np.sum(common) / codes.size),
            error=float(0.5 / np.sqrt(len(codes))),
        )  # fmt: skip


def likeliest(noisy: NDArray[np.uint8], size: int, epsilon: float) -> NDArray[np.intp]:
    """Return each row's likeliest true bucket (n_rows,), given the noise and how common buckets are by its estimate."""
    other, excess = chances(size, epsilon)
    share = np.maximum((np.bincount(noisy, minlength=size) / len(noisy) - other) / excess, 0.0)
    told = np.full((size, size), other) + excess * np.eye(size)  # of a true bucket the chance of a noisy one
    guess: NDArray[np.intp] = np.argmax(told * share[:, np.newaxis], axis=0)
    return guess[noisy]
