"""What users and edge servers tell each other of rows, in pieces of bounded size, where users may vanish in between.

`row_pieces` cuts a user's rows alike at both ends. Edge servers do not know how many a user has, so it says that in
each message (`RowPiece`). They keep what came, make no room for what is only announced, and take no piece that is
shorter than it should be: a user that wants them to hold or to wait for much must send as much, in limited time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sharing.shamir import Words
from treaty.data.binning import MOST_BINS
from treaty.errors import CryptoError, PeerProtocolError
from treaty.machine.arrays import Flags, Integers
from treaty.machine.process import concurrently
from treaty.messaging.messages import Array, Message, MessageLeakage, row_pieces, view
from treaty.messaging.party import Party
from treaty.systems.fedxgb.domain import gather_sound
from treaty.systems.fedxgb.messages import RowCounts
from treaty.systems.sizes import RowSize

logger = logging.getLogger(__name__)

_MOMENT = 0.05  # seconds that a next piece is waited for at first, so that a silent user does not hold up the others


class RowShares(Message):
    """The receiver's shares of some of a user's `n_rows` rows, uint64 (rows, columns, *), see `secpred.routing`."""

    leakage: ClassVar = MessageLeakage("how many rows the user has; shares of their bins", "masked")

    shares: Array
    n_rows: RowSize


class ComparedShares(Message):
    """The receiver's shares of what slots compare of some of a user's `n_rows` rows, uint64 (trees, rows, 2)."""

    leakage: ClassVar = MessageLeakage("shares of the values that a user's rows compare", "masked")

    shares: Array
    n_rows: RowSize


RowPiece = RowShares | ComparedShares
P = TypeVar("P", RowShares, ComparedShares)


@dataclass(frozen=True, slots=True)
class PieceForm:
    """What `RowPiece.shares` have to be.

    Attributes
    ----------
    shape : tuple
        None where rows are.
    check : callable
        ``check(shares, what)`` raises CryptoError for numbers that are no shares.
    fits : callable
        ``fits(user, n_rows)`` says whether a user may have so many rows.
    """

    shape: tuple[int | None, ...]
    check: Callable[[Words, str], None]
    fits: Callable[[str, int], bool]

    @property
    def axis(self) -> int:
        """Where rows are."""
        return self.shape.index(None)

    @property
    def bits(self) -> int:
        """Of a row."""
        return 64 * math.prod(length for length in self.shape if length is not None)


# ---------------------------------------------------------------- from users


def send_shares(party: Party, kind: type[RowPiece], shares: Mapping[str, Words], axis: int) -> None:
    """Send edge servers their shares of own rows, which are along an axis; each piece to all of them before the next.

    So that all wait equally long.
    """
    whole = next(iter(shares.values()))
    n_rows, before = whole.shape[axis], (slice(None),) * axis
    for of in row_pieces(n_rows, 64 * math.prod(whole.shape[:axis] + whole.shape[axis + 1 :])):
        for edge, own in shares.items():
            party.send(edge, kind(Array.of(np.ascontiguousarray(own[(*before, of)])), n_rows))


def gather_rows(
    party: Party, users: Iterable[str], kind: type[P], form: PieceForm, patience: float
) -> dict[str, list[Words]]:
    """Receive what users send with `send_shares`; see `gather_rest`. First pieces have `patience` seconds, too."""
    return gather_rest(party, kind, gather_sound(party, users, kind, timeout=patience), form, patience)


def gather_rest(
    party: Party, kind: type[P], first: Mapping[str, P], form: PieceForm, patience: float
) -> dict[str, list[Words]]:
    """Receive the pieces after users' first ones; return the shares in all of them, of users who sent what they should.

    The others are left out: those who sent something else, vanished, or were not done after `patience` seconds, which
    are for all pieces of all users together.
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
        waiting = [name for name, of in coming.items() if of.missing]
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
    return {name: of.pieces for name, of in coming.items() if not of.missing}


class _Coming:
    """One user's rows as they come."""

    def __init__(self, name: str, n_rows: int, form: PieceForm) -> None:
        self._name, self._n_rows, self._form = name, n_rows, form
        self._came = 0
        self.pieces: list[Words] = []

    @property
    def missing(self) -> bool:
        """Whether there are more to come."""
        return self._came < self._n_rows

    def take(self, message: RowPiece) -> None:
        """Take the next piece; PeerProtocolError or CryptoError when it is not what it should be."""
        # a user may not change how many rows it has once the first piece is here
        form, kind = self._form, type(message).__name__
        if message.n_rows != self._n_rows or not form.fits(self._name, self._n_rows):
            raise PeerProtocolError(
                self._name, f"expected as many rows as before, and as there may be, got others - at {kind}.n_rows"
            )
        shares = view(message.shares, np.uint64, form.shape, peer=self._name, what=f"{kind}.shares")
        rows, left = shares.shape[form.axis], self._n_rows - self._came
        # where a cut of one row more than came would end: known from how many came, not from how many are announced
        right = row_pieces(min(left, rows + 1), form.bits)[0].stop
        if rows != right:
            raise PeerProtocolError(
                self._name, f"expected a piece of another length, got {rows} of {left} rows - at {kind}.shares"
            )
        form.check(shares, f"{kind}.shares")
        self.pieces.append(shares)
        self._came += rows


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


def come_to_all(party: Party, edges: Sequence[str], users: Mapping[str, int]) -> list[str]:
    """Return users of whom all edge servers have equally many rows, sorted; `users` are those of this edge server."""
    return of_all(users, exchange_counts(party, edges, RowCounts(dict(users))))


def exchange_counts(party: Party, edges: Sequence[str], counts: RowCounts) -> dict[str, RowCounts]:
    """Send the other edge servers own counts; return theirs, by name."""
    others = [edge for edge in edges if edge != party.name]
    for edge in others:
        party.send(edge, counts)
    return {edge: party.receive(edge, RowCounts) for edge in others}


def of_all(users: Mapping[str, int], others: Mapping[str, RowCounts]) -> list[str]:
    """Return users of whom all others have as many rows, sorted."""
    return sorted(name for name, rows in users.items() if all(of.users.get(name) == rows for of in others.values()))


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
