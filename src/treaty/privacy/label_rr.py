"""Randomised response on labels: every label is randomised once, and whatever is computed from them costs no more.

A label of K classes is kept with probability p = e^epsilon / (e^epsilon + K - 1) and becomes each other class with r =
1 / (e^epsilon + K - 1). All trees of all jobs together cost `epsilon`, as long as the labels are never drawn again:
`stored_noisy_labels` ensures that. The objective debiases them (`FixedPointLoss.debiasing`).

References
----------
Warner, "Randomized Response", JASA 1965; Kairouz, Oh, Viswanath, "Extremal Mechanisms for Local Differential Privacy",
NeurIPS 2014, on the K-ary form; Ghazi et al., "Deep Learning with Label Differential Privacy", NeurIPS 2021.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.compute import Integers
from treaty.errors import ConfigError, DataError
from treaty.files import Format, read_file, write_file

FORMAT = Format("noisy-labels", 2)
Randomness = Callable[[int], bytes]
"""Returns this many uniform random bytes: `os.urandom`, or a numpy Generator's `bytes` in tests."""


def randomise_labels(
    y: NDArray[np.integer] | NDArray[np.floating], n_classes: int, epsilon: float, randomness: Randomness | None = None
) -> Integers:
    """Send class numbers (n_rows,) below `n_classes` (K >= 2) through K-ary randomised response, `epsilon` per label.

    64-bit random integers are compared with the probability of a change, rounded up to a multiple of 2^-64: no label
    costs more than `epsilon` (Mironov's attack on floating-point noise finds nothing here). From epsilon 44 on the
    rounding shows: a label changes with 2^-64 at least. Raises ConfigError unless `epsilon` is finite and above 0 and
    there are two classes, DataError for a label that is no class number.
    """
    noisy = _class_numbers(y, n_classes, epsilon)
    draw = os.urandom if randomness is None else randomness
    others = n_classes - 1
    changed = np.flatnonzero(uniform64(draw, len(noisy)) < change_limit(others, epsilon))
    drawn = uniform_below(draw, others, len(changed))
    noisy[changed] = drawn + (drawn >= noisy[changed])  # skip the label itself
    return noisy


def stored_noisy_labels(
    path: str | os.PathLike[str], y: NDArray[np.integer] | NDArray[np.floating], n_classes: int, epsilon: float
) -> Integers:
    """Return the noisy labels kept in a file, drawing them when there is no such file yet.

    Keep the file, readable by its owner alone, as long as the labels are in use: labels drawn twice cost `epsilon`
    twice. Raises ConfigError when it belongs to other labels, another order of rows, another epsilon or number of
    classes, is damaged, or cannot be read or written; it is never replaced. Otherwise as `randomise_labels`.
    """
    labels, path = _class_numbers(y, n_classes, epsilon), Path(path)
    digest = _digest(labels, n_classes, epsilon)
    if not path.exists():
        noisy = randomise_labels(labels, n_classes, epsilon)
        # without `replace`, two jobs that start at once share one draw
        write_file(path, _Kept(n_classes, epsilon, digest, noisy), FORMAT, "", replace=False)
    return _checked(read_file(path, _Kept, FORMAT), path, labels, n_classes, epsilon)


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's content; `digest` binds the noisy labels to the true ones."""

    n_classes: int
    epsilon: float
    digest: bytes
    labels: Integers


def _checked(kept: _Kept, path: Path, labels: Integers, n_classes: int, epsilon: float) -> Integers:
    remedy = (
        "labels drawn again cost their epsilon again: keep the options they were drawn with, or move this file away "
        "(in a job, name another as noisy_labels), but keep the ledger and its key (.noise), which count every draw"
    )
    for name, wanted, got in (("epsilon", epsilon, kept.epsilon), ("classes", n_classes, kept.n_classes)):
        if wanted != got:
            raise ConfigError(f"expected noisy labels of {name} {wanted}, got {name} {got} - at {path}; {remedy}")
    if kept.digest != _digest(labels, n_classes, epsilon):
        raise ConfigError(f"expected noisy labels of this table, got those of other labels - at {path}; {remedy}")
    noisy = kept.labels
    if len(noisy) != len(labels):
        raise ConfigError(f"expected {len(labels)} noisy labels, got {len(noisy)} - at {path}")
    if len(noisy) and not 0 <= noisy.min() <= noisy.max() < n_classes:
        raise ConfigError(f"expected noisy labels below {n_classes} - at {path}")
    return noisy


def _digest(labels: Integers, n_classes: int, epsilon: float) -> bytes:
    """Return SHA-256 of epsilon, K and the labels in their order."""
    return hashlib.sha256(struct.pack("<dq", epsilon, n_classes) + labels.astype("<i8").tobytes()).digest()


def _class_numbers(y: NDArray[np.integer] | NDArray[np.floating], n_classes: int, epsilon: float) -> Integers:
    if not 0.0 < epsilon < math.inf:
        raise ConfigError(f"expected a finite epsilon above 0, got {epsilon}")
    if n_classes < 2:
        raise ConfigError(f"expected at least 2 classes, got {n_classes}")
    if y.ndim != 1 or not np.all((y >= 0) & (y < n_classes) & (y == np.floor(y))):
        raise DataError(f"expected labels as class numbers from 0 to {n_classes - 1} in one dimension")
    return y.astype(np.int64)


def change_limit(others: int, epsilon: float) -> np.uint64:
    """Return how many of 2^64 words change a value into one of `others`: (K - 1) r, rounded up."""
    change = others * math.exp(-epsilon) / (1.0 + others * math.exp(-epsilon))
    return np.uint64(max(1, math.ceil(change * (1.0 + 2.0**-50) * 2.0**64)))  # the factor covers the error of floats


def uniform64(draw: Randomness, count: int) -> NDArray[np.uint64]:
    """Return uniform integers of 64 bits."""
    return np.frombuffer(draw(8 * count), np.uint64)


def uniform_below(draw: Randomness, bound: int, count: int) -> Integers:
    """Return uniform integers in [0, bound): 64-bit ones above the last whole multiple of bound are drawn again."""
    last = np.uint64(2**64 - 1 - 2**64 % bound)
    values = uniform64(draw, count).copy()
    while len(again := np.flatnonzero(values > last)):
        values[again] = uniform64(draw, len(again))
    return (values % np.uint64(bound)).astype(np.int64)
