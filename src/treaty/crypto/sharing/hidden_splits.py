"""Encoding of a tree's splits as weights and a threshold, so that one inner product serves every kind of split.

A row is encoded as integers z, a split as weights w and a threshold T; the row goes left iff w.z - T < 0. Secretly
shared weights then reveal neither the feature nor its threshold nor even the kind of feature. (The usual way, a product
each to select a value, test whether it is missing and choose its side, costs more rounds.)

=====================  =========================================  ==============================================
feature                columns of z                               split
=====================  =========================================  ==============================================
numeric                the bin code, 0 where missing              1 at the code, T = k: codes below k go left
categorical            one per bin: 1 at the row's bin            -1 at the bins that go left, T = 0
either, may miss       one more: 1 where missing                  what makes w.z - T -1 (left) or 0 (right)
none (a dummy)         -                                          w = 0, T = 0: all rows go right
=====================  =========================================  ==============================================

"All present values left" is T = 1 without a weight at the code, so that numbers stay as small as codes are.

Where features are shown and only thresholds hidden (numeric features alone), a row has one value v for each split: the
code, or if it is missing -1 (goes left) or ``n_bins`` (goes right); the row goes left iff v - T < 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.errors import CryptoError
from treaty.machine.arrays import Flags, Integers

MOST_BINS = 255  # a code is one byte, and one code means "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Public layout of encoded rows and splits; per feature `n_bins` (0 to 255), `categorical` and `may_miss`.

    Code ``n_bins[f]`` means missing. A feature that cannot miss has one column less, and no row may lack it.
    CryptoError if lengths differ or a number of bins is out of range.
    """

    n_bins: Sequence[int]
    categorical: Sequence[bool]
    may_miss: Sequence[bool]

    def __post_init__(self) -> None:
        lengths = [len(self.n_bins), len(self.categorical), len(self.may_miss)]
        if len(set(lengths)) != 1 or not lengths[0]:
            raise CryptoError(f"expected n_bins, categorical and may_miss of one or more features, got {lengths}")
        if not all(0 <= bins <= MOST_BINS for bins in self.n_bins):
            raise CryptoError(f"expected 0 to {MOST_BINS} bins of each feature, got {list(self.n_bins)}")

    @property
    def columns(self) -> int:
        """D, the length of encoded rows and splits."""
        return self._starts()[-1]

    @property
    def bits(self) -> int:
        """The least l such that -2^(l-1) < w.z - T < 2^(l-1) for every split and row."""
        # codes are at most bins - 1, indicators and missing at most 1 in size
        most = max(0 if self.categorical[f] else bins - 1 for f, bins in enumerate(self.n_bins))
        return 1 + max(most, 1).bit_length()

    @property
    def shown_bits(self) -> int:
        """The same for v - T where features are shown."""
        return 1 + (max(self.n_bins) + 1).bit_length()

    def encode_rows(self, codes: NDArray[np.uint8]) -> Integers:
        """Encode bin codes, uint8 (n, features), as int64 (n, D).

        CryptoError for another number of features, a code above ``n_bins``, or a missing value where none may be.
        """
        if codes.ndim != 2 or codes.shape[1] != len(self.n_bins):
            raise CryptoError(f"expected codes of {len(self.n_bins)} features, got shape {codes.shape}")
        z = np.zeros((len(codes), self.columns), np.int64)
        for f, start in enumerate(self._starts()[:-1]):
            own = codes[:, f]
            present = self._present(f, own)
            if self.categorical[f]:
                # a categorical feature has a column for each bin
                z[present, start + own[present].astype(np.int64)] = 1
            else:
                z[present, start] = own[present]
            # one column more says where the value is missing
            if self.may_miss[f]:
                z[:, start + self._width(f) - 1] = ~present
        return z

    def encode_shown(self, codes: NDArray[np.uint8], features: NDArray[np.integer], missing_left: Flags) -> Integers:
        """Return the value v of each row, int64 (n,), where the features of splits are shown.

        `codes` uint8 (n, features); `features` (n,), of each row's split, all numeric; `missing_left` bool (n,).
        """
        values = np.empty(len(codes), np.int64)
        for f in np.unique(features).tolist():
            self._check_numeric(f)
            rows = np.flatnonzero(features == f)
            own = codes[rows, f]
            values[rows] = np.where(self._present(f, own), own, np.where(missing_left[rows], -1, self.n_bins[f]))
        return values

    def encode_split(self, feature: int, left_bins: Flags) -> tuple[Integers, int]:
        """Encode a split as weights, int64 (D,), and a threshold; a negative feature means none, and all rows go right.

        `left_bins`, bool (256,), says which codes go left; at ``n_bins[feature]``, whether missing does; entries above
        are ignored. CryptoError for an unknown feature, or a numeric one whose bins that go left are not the lowest.
        """
        weights = np.zeros(self.columns, np.int64)
        if feature < 0:
            return weights, 0
        self._check_feature(feature)
        start, bins, threshold = self._starts()[feature], self.n_bins[feature], 0
        left = left_bins[:bins]
        if self.categorical[feature]:
            # at the row's bin a categorical feature gives -1 (left) or 0 (right)
            weights[start : start + bins] = -left.astype(np.int64)
        else:
            below = self._bins_below(feature, left_bins)
            # a numeric one gives its code less the threshold; where all present values go left, T = 1 without a weight
            weights[start] = below < bins
            threshold = below if below < bins else 1
        if self.may_miss[feature]:
            # what makes w.z - T -1 (left) or 0 (right) where the value is missing
            weights[start + self._width(feature) - 1] = threshold - bool(left_bins[bins])
        return weights, threshold

    def shown_threshold(self, feature: int, left_bins: Flags) -> int:
        """Return T of a split on a numeric feature that is shown; arguments and errors as in `encode_split`."""
        if feature < 0:
            return 0
        self._check_numeric(feature)
        return self._bins_below(feature, left_bins)

    def _present(self, feature: int, codes: NDArray[np.uint8]) -> Flags:
        """Check one feature's codes; return which are not missing."""
        bins = self.n_bins[feature]
        highest = bins if self.may_miss[feature] else bins - 1
        if (codes > highest).any():
            missing = "" if self.may_miss[feature] else ", none missing"
            raise CryptoError(f"expected codes up to {highest}{missing}, got higher ones - at feature {feature}")
        present: Flags = codes < bins
        return present

    def _bins_below(self, feature: int, left_bins: Flags) -> int:
        left = left_bins[: self.n_bins[feature]]
        below = int(left.sum())
        if not left[:below].all():
            raise CryptoError(f"expected the lowest bins to go left, got others - at feature {feature}")
        return below

    def _check_feature(self, feature: int) -> None:
        if not 0 <= feature < len(self.n_bins):
            raise CryptoError(f"expected a feature below {len(self.n_bins)}, got {feature}")

    def _check_numeric(self, feature: int) -> None:
        self._check_feature(feature)
        if self.categorical[feature]:
            raise CryptoError(f"expected a numeric feature where features are shown, got categorical feature {feature}")

    def _width(self, feature: int) -> int:
        return (self.n_bins[feature] if self.categorical[feature] else 1) + self.may_miss[feature]

    def _starts(self) -> list[int]:
        """Return each feature's first column and, last, the number of all columns."""
        starts = [0]
        for feature in range(len(self.n_bins)):
            starts.append(starts[-1] + self._width(feature))
        return starts
