"""How users' rows are encoded for hidden trees, and how they travel: in pieces, of users who may vanish in between.

**Encoding** (`Layout`). A row is encoded as integers z, a split as weights w and a threshold T; the row goes left iff
w.z - T < 0. One inner product thus serves every kind of split, and secretly shared weights reveal neither the feature
nor its threshold nor its kind. (The usual way takes more rounds: a product each to select a value, test whether it is
missing and choose its side.)

=====================  =========================================  ==============================================
feature                columns of z                               split
=====================  =========================================  ==============================================
numeric                the bin code, 0 where missing              1 at the code, T = k: codes below k go left
categorical            one per bin: 1 at the row's bin            -1 at the bins that go left, T = 0
either, may miss       one more: 1 where missing                  what makes w.z - T -1 (left) or 0 (right)
none (a dummy)         -                                          w = 0, T = 0: all rows go right
=====================  =========================================  ==============================================

"All present values left" is T = 1 without a weight at the code, so that numbers stay as small as codes are. Where
features are shown and only thresholds hidden (paper mode, numeric features alone), a row has one value v for each
split: the code, or if it is missing -1 (goes left) or ``n_bins`` (goes right). The row goes left iff v - T < 0.

**Pieces.** `row_pieces` cuts a user's rows alike at both ends. Edge servers do not know how many rows a user has, so
each message (`RowPiece`) has their number. Edge servers allocate nothing for rows that are only announced, and refuse a
piece that is too short: a user can make them hold or wait for much only by sending as much, in limited time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sharing.shamir import Words
from treaty.data.binning import MOST_BINS
from treaty.errors import CryptoError, PeerProtocolError
from treaty.machine.arrays import Flags, Integers
from treaty.machine.process import concurrently
from treaty.messaging.messages import Array, Message, RowSize, leaks, row_pieces, view
from treaty.messaging.party import Party
from treaty.systems.fedxgb.domain import gather_sound
from treaty.systems.fedxgb.messages import RowCounts

logger = logging.getLogger(__name__)

_MOMENT = 0.05  # seconds that a next piece is waited for at first, so that a silent user does not hold up the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Public layout of encoded rows and splits: by feature `n_bins` (0 to 255), `categorical` and `may_miss`.

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
        starts = self._starts()
        for f, (start, end) in enumerate(pairwise(starts)):
            own = codes[:, f]
            present = self._present(f, own)
            if self.categorical[f]:
                # a categorical feature has a column for each bin
                z[present, start + own[present].astype(np.int64)] = 1
            else:
                z[present, start] = own[present]
            # one column more says where the value is missing
            if self.may_miss[f]:
                z[:, end - 1] = ~present
        return z

    def encode_shown(self, codes: NDArray[np.uint8], features: NDArray[np.integer], missing_left: Flags) -> Integers:
        """Return the value v of each row, int64 (n,), where the features of splits are shown.

        `codes` uint8 (n, features); `features` (n,), of each row's split, all numeric; `missing_left` bool (n,).
        """
        values = np.empty(len(codes), np.int64)
        for f in np.unique(features).tolist():
            self._check_feature(f, numeric=True)
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
        (start, end), bins, threshold = self._starts()[feature : feature + 2], self.n_bins[feature], 0
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
            weights[end - 1] = threshold - bool(left_bins[bins])
        return weights, threshold

    def shown_threshold(self, feature: int, left_bins: Flags) -> int:
        """Return T of a split on a numeric feature that is shown; arguments and errors as in `encode_split`."""
        if feature < 0:
            return 0
        self._check_feature(feature, numeric=True)
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

    def _check_feature(self, feature: int, *, numeric: bool = False) -> None:
        if not 0 <= feature < len(self.n_bins):
            raise CryptoError(f"expected a feature below {len(self.n_bins)}, got {feature}")
        if numeric and self.categorical[feature]:
            raise CryptoError(f"expected a numeric feature where features are shown, got categorical feature {feature}")

    def _starts(self) -> list[int]:
        """Return each feature's first column and, last, the number of all columns."""
        of_features = zip(self.n_bins, self.categorical, self.may_miss, strict=True)
        widths = [(bins if categorical else 1) + missing for bins, categorical, missing in of_features]
        return list(accumulate(widths, initial=0))


# ---------------------------------------------------------------- pieces


@leaks("how many rows the user has; shares of their bins", "masked")
class RowShares(Message):
    """The receiver's shares of some of a user's `n_rows` rows, uint64 (rows, columns, *)."""

    shares: Array
    n_rows: RowSize


@leaks("shares of the values that a user's rows compare", "masked")
class ComparedShares(Message):
    """The receiver's shares of what slots compare of some of a user's `n_rows` rows, uint64 (trees, rows, 2)."""

    shares: Array
    n_rows: RowSize


RowPiece = RowShares | ComparedShares
P = TypeVar("P", RowShares, ComparedShares)


@dataclass(frozen=True, slots=True)
class PieceForm:
    """What `RowPiece.shares` have to be.

    `shape` has None for the number of rows. ``check(shares, what)`` raises CryptoError for numbers that are no shares,
    ``fits(user, n_rows)`` says whether a user may have so many rows.
    """

    shape: tuple[int | None, ...]
    check: Callable[[Words, str], None]
    fits: Callable[[str, int], bool]


# ---------------------------------------------------------------- from users


def send_shares(party: Party, kind: type[RowPiece], shares: Mapping[str, Words], axis: int) -> None:
    """Send edge servers their shares of own rows, which are along an axis.

    All of them get a piece before the next is sent, so that all wait equally long.
    """
    whole = next(iter(shares.values()))
    n_rows, before = whole.shape[axis], (slice(None),) * axis
    for of in row_pieces(n_rows, 64 * math.prod(whole.shape[:axis] + whole.shape[axis + 1 :])):
        for edge, own in shares.items():
            party.send(edge, kind(Array.of(np.ascontiguousarray(own[(*before, of)])), n_rows))


def gather_rest(
    party: Party, kind: type[P], first: Mapping[str, P], form: PieceForm, patience: float
) -> dict[str, list[Words]]:
    """Receive the pieces after users' first ones; return the shares in all pieces, by user.

    Users who send anything else, vanish, or are not done after `patience` seconds, which are for all pieces of all
    users together, are left out.
    """
    # nothing is allocated for rows that are only announced
    coming = {name: _Coming(name, message.n_rows, form) for name, message in first.items()}
    sent, until, moment = dict(first), time.monotonic() + patience, _MOMENT
    while True:
        for name, message in sent.items():
            try:
                coming[name].take(message)
            except (PeerProtocolError, CryptoError) as error:
                _leave_out(party, name, str(error))
                del coming[name]
        waiting = [name for name, of in coming.items() if of.left]
        asked = time.monotonic()
        wait = min(moment, until - asked)
        if not waiting or wait <= 0.0:
            break
        sent = gather_sound(party, waiting, kind, timeout=wait)
        # a silent user must not hold up the others' pieces: wait a little longer each time nothing comes
        moment = _MOMENT if sent else 2 * moment
        if time.monotonic() - asked < 0.9 * wait:  # nothing of the others can come any more
            for name in set(waiting) - sent.keys():
                _leave_out(party, name, "it has gone before its last rows came")
                del coming[name]
    for name in waiting:
        _leave_out(party, name, f"its last rows have not come within {patience:g} s")
    return {name: of.pieces for name, of in coming.items() if not of.left}


class _Coming:
    """One user's rows as they come; `left` are still to come."""

    def __init__(self, name: str, n_rows: int, form: PieceForm) -> None:
        self._name, self._n_rows, self._form, self.left = name, n_rows, form, n_rows
        self._bits = 64 * math.prod(length for length in form.shape if length is not None)  # of a row
        self.pieces: list[Words] = []

    def take(self, message: RowPiece) -> None:
        """Take the next piece; PeerProtocolError or CryptoError when it is not what it should be."""
        form, kind = self._form, type(message).__name__
        # a user may not change how many rows it has once the first piece is here
        if message.n_rows != self._n_rows or not form.fits(self._name, self._n_rows):
            raise PeerProtocolError(
                self._name, f"expected as many rows as before, and as there may be, got others - at {kind}.n_rows"
            )
        shares = view(message.shares, np.uint64, form.shape, peer=self._name, what=f"{kind}.shares")
        rows = shares.shape[form.shape.index(None)]
        # where a cut of one row more than came would end: known from how many came, not from how many are announced
        if rows != row_pieces(min(self.left, rows + 1), self._bits)[0].stop:
            raise PeerProtocolError(
                self._name, f"expected a piece of another length, got {rows} of {self.left} rows - at {kind}.shares"
            )
        form.check(shares, f"{kind}.shares")
        self.pieces.append(shares)
        self.left -= rows


# ---------------------------------------------------------------- to users


def pieces_of(kind: Callable[[Array], Message], whole: NDArray[Any], rows: slice) -> Iterator[Message]:
    """Yield messages with a user's `rows` of an array (trees, n, *) of all users' rows."""
    # pieces are cut as the user expects them, from its number of rows
    own, numbers = whole[:, rows], len(whole) * math.prod(whole.shape[2:])
    for of in row_pieces(own.shape[1], 8 * whole.itemsize * numbers):
        yield kind(Array.of(np.ascontiguousarray(own[:, of])))


def send_pieces_or_leave_out(party: Party, pieces: Mapping[str, Iterable[Message]], patience: float) -> None:
    """Send users their messages; leave out those who are gone, or have not taken all within `patience` seconds."""

    def reach(name: str) -> bool:
        # all pieces of a user have this time together
        left, until = patience, time.monotonic() + patience
        for message in pieces[name]:
            if not party.send_each({name: message}, timeout=left):
                return False
            left = max(0.0, until - time.monotonic())
        return True

    reached = concurrently(reach, pieces, len(pieces) if party.channel.waits else 1)
    for name, was in zip(pieces, reached, strict=True):
        if not was:
            _leave_out(party, name, "it has not taken the results of its rows")


def _leave_out(party: Party, name: str, why: str) -> None:
    logger.warning("%s continues without %s: %s", party.name, name, why)
    party.leave_out(name)


# ---------------------------------------------------------------- whose rows came to all edge servers


def exchange_counts(party: Party, edges: Sequence[str], counts: RowCounts) -> tuple[list[str], dict[str, RowCounts]]:
    """Send the other edge servers own counts; return the users of whom all have as many rows, sorted, and theirs."""
    others = [edge for edge in edges if edge != party.name]
    for edge in others:
        party.send(edge, counts)
    theirs = {edge: party.receive(edge, RowCounts) for edge in others}
    own = counts.users.items()
    return sorted(name for name, rows in own if all(of.users.get(name) == rows for of in theirs.values())), theirs
