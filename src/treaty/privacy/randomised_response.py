"""Randomised response: labels and buckets are randomised once; what is computed from them costs nothing more.

A value of K classes (a label, or the bucket of a column) is kept with probability p = e^epsilon / (e^epsilon + K - 1)
and becomes each other class with r = 1 / (e^epsilon + K - 1): epsilon-local differential privacy of the value.

**Labels** are drawn once and kept in a file (`stored_noisy_labels`), so all trees of all jobs together cost `epsilon`.
The objective debiases them (`FixedPointLoss.debiasing`).

**Buckets** are private given their edges, which are not randomised themselves. A person has a value in every column, so
the columns' epsilons add up, most of all where columns are copies of each other. Noise that is drawn again for the same
values would average out. So it is not stored but computed, from a secret key and a name of the draw (`BucketLedger`).
The name is a digest of the column, its edges and epsilon, the rows' ids if there are any, and every row's bucket in its
place. A column is either sent again as it was, which reveals and costs nothing more, or drawn again for all rows and
entered in the ledger. If the noise of unchanged rows were kept while others change, everybody would see whose value has
changed; if it were drawn by the row's place alone, the same table in another order would be new noise for free. Draws
also reveal whether a whole column is unchanged.

**Rows** that were trained on are recognised later (`KnownRows`), in eval tables and rows to predict, and decided by
their noisy buckets (`RandomisedRows`): their true sides at the thresholds of many splits would reveal their true
buckets. They are recognised by their ids, where both tables have some. Without ids, only equal values can be seen, and
such a row may be another person's. Ids and values are kept as digests under a key of the model.

References: Warner, "Randomized Response", JASA 1965; Kairouz, Oh, Viswanath, "Extremal Mechanisms for Local
Differential Privacy", NeurIPS 2014, on the K-ary form; Ghazi et al., "Deep Learning with Label Differential Privacy",
NeurIPS 2021; Tian et al., FederBoost, arXiv 2011.02796, section 4, on buckets.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from treaty.errors import ConfigError, DataError
from treaty.files import Format, read_file, write_file
from treaty.machine.arrays import Bytes, Flags, Floats, Integers, Words
from treaty.machine.keyed_hash import KEY, hashes
from treaty.privacy.ledger import Ledger, LedgerEntry

FORMAT = Format("noisy-labels", 2)
Randomness = Callable[[int], bytes]
"""Returns this many uniform random bytes: `os.urandom`, or a numpy Generator's `bytes` in tests."""


def randomise_labels(
    y: NDArray[np.integer] | NDArray[np.floating], n_classes: int, epsilon: float, draw: Randomness = os.urandom
) -> Integers:
    """Send class numbers (n_rows,) below `n_classes` (K >= 2) through K-ary randomised response, `epsilon` per label.

    64-bit random integers are compared with the probability of a change, rounded up to a multiple of 2^-64: no label
    costs more than `epsilon`, and a label changes with 2^-64 at least. Raises ConfigError unless `epsilon` is finite
    and above 0 and there are two classes, DataError for a label that is no class number.
    """
    noisy = _class_numbers(y, n_classes, epsilon)
    others = n_classes - 1
    # exact, without floats
    changed = np.flatnonzero(uniform64(draw, len(noisy)) < change_limit(others, epsilon))
    # words above the last whole multiple of the number of other labels are drawn again: a remainder would favour some
    last = np.uint64(2**64 - 1 - 2**64 % others)
    words = uniform64(draw, len(changed)).copy()
    while len(again := np.flatnonzero(words > last)):
        words[again] = uniform64(draw, len(again))
    drawn = (words % np.uint64(others)).astype(np.int64)
    # skip the label itself
    noisy[changed] = drawn + (drawn >= noisy[changed])
    return noisy


def stored_noisy_labels(
    path: str | os.PathLike[str], y: NDArray[np.integer] | NDArray[np.floating], n_classes: int, epsilon: float
) -> Integers:
    """Return the noisy labels kept in a file, drawing them when there is no such file yet.

    Labels drawn twice cost `epsilon` twice, so the file is never replaced. Raises ConfigError when it belongs to other
    labels, another order of rows, another epsilon or number of classes, is damaged, or cannot be read or written.
    Otherwise as `randomise_labels`.
    """
    labels = _class_numbers(y, n_classes, epsilon)
    noisy = stored(path, labels, n_classes, epsilon, lambda: randomise_labels(labels, n_classes, epsilon))
    if len(noisy) and not 0 <= noisy.min() <= noisy.max() < n_classes:
        raise ConfigError(f"expected noisy labels below {n_classes} - at {path}")
    return noisy


class _NoisyLabels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file's content; `digest` binds the noisy labels to the true ones. Numbers have 0 classes."""

    n_classes: int
    epsilon: float
    digest: bytes
    labels: Integers


def stored(
    path: str | os.PathLike[str], labels: Integers, n_classes: int, epsilon: float, draw: Callable[[], Integers],
    terms: bytes = b"",
) -> Integers:  # fmt: skip
    """Return what a file keeps that was drawn for `labels`, under the same `terms`, or draw it and keep it there.

    Raises ConfigError as `stored_noisy_labels` does.
    """
    path = Path(path)
    what = struct.pack("<dq", epsilon, n_classes) + terms + labels.astype("<i8").tobytes()
    digest = hashlib.sha256(what).digest()
    if not path.exists():
        # without `replace`, two jobs that start at once share one draw
        write_file(path, _NoisyLabels(n_classes, epsilon, digest, draw()), FORMAT, "", replace=False)
    kept = read_file(path, _NoisyLabels, FORMAT)
    remedy = (
        "labels drawn again cost their epsilon again: keep the options they were drawn with, or move this file away "
        "(in a job, name another as noisy_labels), but keep the ledger and its key (.noise), which count every draw"
    )
    for name, wanted, got in (("epsilon", epsilon, kept.epsilon), ("classes", n_classes, kept.n_classes)):
        if wanted != got:
            raise ConfigError(f"expected noisy labels of {name} {wanted}, got {name} {got} - at {path}; {remedy}")
    if kept.digest != digest:
        raise ConfigError(f"expected noisy labels of this table, got noisy labels of another - at {path}; {remedy}")
    if len(kept.labels) != len(labels):
        raise ConfigError(f"expected {len(labels)} noisy labels, got {len(kept.labels)} - at {path}")
    return kept.labels


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
    # the factor covers the error of floats
    return np.uint64(max(1, math.ceil(change * (1.0 + 2.0**-50) * 2.0**64)))


def uniform64(draw: Randomness, count: int) -> Words:
    """Return uniform integers of 64 bits."""
    return np.frombuffer(draw(8 * count), np.uint64)


MECHANISM = "bucket_rr"


@dataclass(frozen=True, slots=True)
class RandomisedColumn:
    """How a column of `size` buckets (k) is randomised, with `epsilon` per value (infinite: no noise).

    `name` is for the ledger, which does not leave the party. `edges` identify the buckets.
    """

    name: str
    size: int
    epsilon: float
    edges: bytes


@dataclass(frozen=True, slots=True)
class BucketCost:
    """The epsilon of each column by name: of this draw (`now`), and summed over the ledger's draws (`ever`)."""

    now: dict[str, float]
    ever: dict[str, float]

    def __str__(self) -> str:
        values = sorted(set(self.now.values())) or [0.0]
        each = f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
        return (
            f"epsilon {each} per value and {sum(self.now.values()):g} per person over {len(self.now)} columns; "
            f"{sum(self.ever.values()):g} per person with all draws of these columns that the ledger knows"
        )


def randomise_buckets(codes: Bytes, size: int, epsilon: float, words: Words) -> Bytes:
    """Randomise the buckets (rows,) of one column, all below `size`, with uniform `words`, uint64 (rows, 2).

    The first word of a row decides whether its bucket changes, the second to what. The probability of a change is
    rounded up by more than the error of floats and the bias of the remainder: no value costs more than `epsilon`.
    """
    if size < 2 or epsilon == math.inf:
        return codes
    others = size - 1
    other = (words[:, 1] % np.uint64(others)).astype(np.uint8)
    return np.where(words[:, 0] < change_limit(others, epsilon), other + (other >= codes), codes).astype(np.uint8)


def chances(size: int, epsilon: float) -> tuple[float, float]:
    """Return r and p - r of k-ary randomised response: 0 and 1 without noise or with one bucket."""
    if size < 2:
        return 0.0, 1.0
    fade = math.exp(-epsilon)
    total = 1.0 + (size - 1) * fade
    return fade / total, -math.expm1(-epsilon) / total


class BucketLedger(Ledger):
    """A party's privacy ledger, which also draws its noisy buckets."""

    def noisy(
        self,
        codes: Bytes,
        columns: Sequence[RandomisedColumn],
        row_numbers: Integers,
        job: str = "",
        persons: bytes = b"",
    ) -> tuple[Bytes, BucketCost]:
        """Return noisy buckets, uint8 (rows, columns), and what they and all earlier ones cost.

        `row_numbers` are the rows' places in the party's own table, `persons` a digest of whose rows they are, if
        known.
        """
        # copies of a row share one draw, that of the first: independent draws of one value would average out
        _, first, which = np.unique(row_numbers, return_index=True, return_inverse=True)
        places = first[which].astype("<u8")
        draws = [self._draw(column, persons, places, codes[:, f]) for f, column in enumerate(columns)]
        self.spend([
            LedgerEntry(draw, job, MECHANISM, column.name, column.epsilon)
            for draw, column in zip(draws, columns, strict=True)
        ])  # fmt: skip
        noisy = np.empty_like(codes)
        for f, (draw, column) in enumerate(zip(draws, columns, strict=True)):
            noisy[:, f] = randomise_buckets(codes[:, f], column.size, column.epsilon, self._words(draw, places))
        now = {column.name: column.epsilon for column in columns}
        ever = dict.fromkeys(now, 0.0)
        for entry in self.entries():
            if entry.mechanism == MECHANISM and entry.what in ever:
                ever[entry.what] += entry.epsilon
        return noisy, BucketCost(now, ever)

    def _draw(self, column: RandomisedColumn, persons: bytes, places: Words, codes: Bytes) -> str:
        """Return the name of a column's draw: a keyed digest of column and persons, every row's place and bucket."""
        # without the persons, others with the same buckets would get the same noise: the values of the first would
        # then reveal those of the second
        what = msgspec.msgpack.encode([column.name, column.size, column.epsilon, column.edges])
        # each part is hashed first: no two different inputs give the same concatenation
        content = [hashlib.sha256(part).digest() for part in (what, persons, places.tobytes(), codes.tobytes())]
        return hmac.digest(self.key, b"treaty bucket draw" + b"".join(content), "sha256").hex()

    def _words(self, draw: str, places: Words) -> Words:
        """Return two words for every row: its place, encrypted under a key of this draw."""
        key = hashlib.sha256(b"treaty noisy buckets" + self.key + draw.encode()).digest()
        blocks = np.stack([places, np.zeros_like(places)], axis=1)
        # distinct places are distinct blocks, so ECB is a pseudorandom function here
        encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # noqa: S305 - a permutation of distinct blocks
        return np.frombuffer(encryptor.update(blocks.tobytes()), "<u8").reshape(-1, 2).astype(np.uint64)


class KnownRows(msgspec.Struct):
    """Which rows were trained on: digests uint64 (n_rows,) of values and, if there are any, of ids.

    Of 2^20 rows two collide once in 2^24 tables; such rows cannot be searched for without the key. `ids_of` is as in
    `LabelledRows`, "" if that is not known.
    """

    key: bytes
    values: Words
    ids: Words
    ids_of: str = ""

    def __post_init__(self) -> None:
        # digests under another hash would recognise nobody, and true sides would be sent
        if len(self.key) != KEY:
            raise ValueError("expected digests of rows as this version makes them: train the model again")

    @classmethod
    def of(cls, matrix: NDArray[Any], ids: Sequence[str] | None, ids_of: str = "") -> KnownRows:
        """Return the digests of rows (n_rows, n_features), NaN where missing, and of their canonical ids."""
        key = secrets.token_bytes(KEY)
        return cls(key, _of_values(key, matrix), _of_ids(key, ids or ()), ids_of)

    def recognise(self, ids_of: str) -> bool:
        """Return whether rows can be recognised by their ids: by such of another column nobody could."""
        return len(self.ids) > 0 and self.ids_of in ("", ids_of)

    def places(self, ids: Sequence[str]) -> Integers:
        """Return each id's first place among the training rows, int64 (n,); -1 where it has none."""
        known, first = np.unique(self.ids, return_index=True)
        asked = _of_ids(self.key, ids)
        at = np.minimum(np.searchsorted(known, asked), len(known) - 1)
        return np.where(known[at] == asked, first[at], -1).astype(np.int64)

    def with_equal_values(self, matrix: NDArray[Any]) -> Flags:
        """Return which rows have the values of a training row in all columns, bool (n,)."""
        if matrix.shape[1] == 0:
            return np.zeros(len(matrix), np.bool_)
        return np.isin(_of_values(self.key, matrix), self.values)

    def joined(self, matrix: NDArray[Any], ids: Sequence[str] | None, ids_of: str = "") -> KnownRows:
        """Return the digests of these rows and of further ones; by ids, if all of them have ids of one column."""
        fit = ids is not None and self.recognise(ids_of)
        of_ids = np.union1d(self.ids, _of_ids(self.key, ids or ())) if fit else self.ids[:0]
        return KnownRows(self.key, np.union1d(self.values, _of_values(self.key, matrix)), of_ids, self.ids_of)


class RandomisedRows(msgspec.Struct):
    """Training rows with their noisy `buckets`, uint8 (n_rows * n_features,), row by row.

    ``stand_ins[f]`` has for each bucket of column f a value that every split of the model sends to the same side as the
    bucket; the last is that of missing values.
    """

    known: KnownRows
    buckets: Bytes
    stand_ins: list[Floats]

    def in_place_of_values(self, matrix: NDArray[Any], ids: Sequence[str]) -> NDArray[Any]:
        """Return rows (n, n_features) with stand-ins for the noisy buckets of those trained on, found by `ids`."""
        places = self.known.places(ids)
        here = np.flatnonzero(places >= 0)
        if not len(here) or not self.stand_ins:
            return matrix
        shown, noisy = matrix.copy(), self.buckets.reshape(-1, len(self.stand_ins))[places[here]]
        for feature, values in enumerate(self.stand_ins):
            shown[here, feature] = values[noisy[:, feature]]
        return shown


def _of_values(key: bytes, matrix: NDArray[Any]) -> Words:
    """Digest rows; all missing values are equal, and so are zero and minus zero."""
    rows = np.ascontiguousarray(np.where(np.isnan(matrix), matrix.dtype.type(np.nan), matrix + np.float32(0.0)))
    ends = np.arange(len(rows) + 1) * rows.shape[1] * rows.itemsize
    return _digests(key, b"values", np.frombuffer(rows.data, np.uint8), ends)


def _of_ids(key: bytes, ids: Sequence[str]) -> Words:
    texts = [text.encode() for text in ids]
    return _digests(key, b"ids", np.frombuffer(b"".join(texts), np.uint8), np.cumsum([0, *map(len, texts)]))


def _digests(key: bytes, kind: bytes, data: Bytes, ends: Integers) -> Words:
    # under a key of the model: digests of two models, or of guessed ids, cannot be compared
    of_kind = hashlib.blake2b(kind, key=key, digest_size=KEY).digest()
    return np.ascontiguousarray(hashes(data, ends.astype(np.int64), of_kind)[:, 0])
