"""Noisy buckets of a passive party's columns: drawn and packed by their owner, read and trained on by the active party.

The active party keeps buckets, so that they are sent once for several trainings. A passive party's noise is a function
of its key and of what is randomised (`privacy.randomised_response`), so the same rows, columns, edges and epsilons give
the same buckets. The active party first sends each partner the SHA-256 of the buckets that it has kept from it. A
partner that finds its own among these sends only `SameBuckets`. If anything differs, the rows' order for instance, so
does the hash, and buckets are sent: columns that differ have new noise, which is paid for. For this a passive party
keeps only its key and ledger. If a file is missing or damaged, buckets are sent again, with the same noise.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import Bins
from treaty.errors import PeerProtocolError
from treaty.files import Format, read_cached, write_cached
from treaty.messaging.messages import (
    MOST_COLUMNS,
    Array,
    Message,
    decode_body,
    digests_in,
    encode,
    leaks,
    put_together,
    row_pieces,
    view,
)
from treaty.messaging.party import Party
from treaty.models.checkpoints import checkpoint_file
from treaty.privacy.randomised_response import BucketCost, BucketLedger, RandomisedColumn
from treaty.trees.columns import ColumnSource

logger = logging.getLogger(__name__)

FEW_BUCKETS = 4


@leaks(
    "each column's number of buckets and whether values are missing, and the bucket of each value, under "
    "randomised response",
    "noisy",
    guard="epsilon, epsilon_person",
)
class Buckets(Message):
    """Noisy buckets of k columns.

    For each column (k,): int32 `present`, the number of buckets of present values; bool `categorical`; bool `missing`,
    whether any value is; float64 `epsilon`. `packed`, uint8, has the rows' buckets, column after column, each in
    ceil(log2(buckets)) bits; every column starts with a new byte. Many rows are sent in several messages, in order.
    """

    present: Array
    categorical: Array
    missing: Array
    epsilon: Array
    packed: Array


Pieces = Callable[[], Iterator[Buckets]]
"""Returns the messages of a table's buckets, each time it is called."""


def noisy_buckets(
    codes: NDArray[np.uint8],
    bins: Bins,
    epsilons: Mapping[str, float],
    most: Sequence[int],
    ledger: BucketLedger,
    row_numbers: NDArray[np.int64],
    job: str,
    persons: bytes = b"",
) -> tuple[Pieces, NDArray[np.uint8], BucketCost]:
    """Randomise buckets uint8 (n_rows, n_columns) by each column's epsilon, and enter the cost in the ledger.

    `most` are the buckets that each column may have: with fewer, they are its values. Returns the messages, the noisy
    buckets in them, and the cost.
    """
    schema = bins.schema
    missing = np.array([(codes[:, f] == n).any() for f, n in enumerate(bins.n_bins)], np.bool_)
    # missing values are one more bucket; a column without any value has one, too
    sizes = np.maximum(bins.n_bins + missing, 1)
    few = [
        name for (name, epsilon), size, present, limit in zip(epsilons.items(), sizes, bins.n_bins, most, strict=True)
        if size <= FEW_BUCKETS and present < limit and epsilon < math.inf
    ]  # fmt: skip
    if few:
        logger.warning(
            "columns with at most %d different values, whose noisy bucket reveals more of the value under the "
            "same noise; leave them out if that is too much: %s", FEW_BUCKETS, ", ".join(few),
        )  # fmt: skip
    columns = [
        RandomisedColumn(name, int(size), epsilon, _edges(bins, f))
        for f, (size, (name, epsilon)) in enumerate(zip(sizes, epsilons.items(), strict=True))
    ]
    # drawn from the ledger's key: the same table gets the same noise again, at no further cost
    noisy, spent = ledger.noisy(codes, columns, row_numbers, job, persons)
    costs = np.array([column.epsilon for column in columns], np.float64)
    present, categorical, absent, epsilon = map(Array.of, (bins.n_bins, schema.categorical, missing, costs))

    def pieces() -> Iterator[Buckets]:
        for of in row_pieces(len(noisy), sum(widths_of(sizes))):
            yield Buckets(present, categorical, absent, epsilon, Array.of(pack_buckets(noisy[of], sizes)))

    return pieces, noisy, spent


def stand_ins(bins: Bins) -> list[NDArray[np.float64]]:
    """Return a value for each bucket of each column, which every split sends to the same side as the bucket.

    The last one is NaN, for missing values.
    """
    found = []
    for n_bins, cuts, of_category in zip(bins.n_bins.tolist(), bins.cuts, bins.category_bins, strict=True):
        values = np.full(n_bins + 1, np.nan)
        if of_category is not None:
            values[:n_bins] = [np.flatnonzero(of_category == bucket)[0] for bucket in range(n_bins)]
        elif cuts is not None and n_bins:
            # each bucket's lower edge: values below a cut go left
            values[:n_bins] = [-np.inf, *cuts]
        found.append(values)
    return found


def _edges(bins: Bins, feature: int) -> bytes:
    """Return bytes that differ for different sets of buckets."""
    cuts, of_category = bins.cuts[feature], bins.category_bins[feature]
    if of_category is not None:
        return msgspec.msgpack.encode([bins.schema.categories[feature], of_category.tolist()])
    return b"" if cuts is None else cuts.tobytes()


def widths_of(sizes: NDArray[np.int32]) -> list[int]:
    """Return the bits of a bucket's number in each column, of columns with so many buckets."""
    return [(size - 1).bit_length() for size in sizes.tolist()]


def pack_buckets(codes: NDArray[np.uint8], sizes: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return the bytes of buckets uint8 (rows, columns): column after column, each bucket's lowest bit first."""
    packed = [
        np.packbits((codes[:, column, np.newaxis] >> np.arange(width, dtype=np.uint8)) & 1)
        for column, width in enumerate(widths_of(sizes))
    ]
    return np.concatenate([np.empty(0, np.uint8), *packed])


def unpack_buckets(packed: Array, sizes: NDArray[np.int32], n_rows: int, peer: str) -> NDArray[np.uint8]:
    """Return the buckets of a piece's `n_rows` rows, uint8 (rows, columns); reject numbers beyond a column's."""
    widths = widths_of(sizes)
    lengths = [-(-n_rows * width // 8) for width in widths]
    content = view(packed, np.uint8, (sum(lengths),), peer=peer, what="Buckets.packed")
    codes, start = np.empty((n_rows, len(sizes)), np.uint8), 0
    for column, (size, width, length) in enumerate(zip(sizes.tolist(), widths, lengths, strict=True)):
        bits = np.unpackbits(content[start : start + length], count=n_rows * width).reshape(n_rows, width)
        codes[:, column] = (bits << np.arange(width, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)
        start += length
        if n_rows and codes[:, column].max() >= size:
            raise PeerProtocolError(peer, f"expected buckets below {size}", at="Buckets.packed")
    return codes


MOST_KEPT = 4
"""Tables of buckets kept for each partner, for several epsilons for example; the oldest is dropped first."""

FORMAT = Format("noisy-buckets", 2)


@leaks("which of its buckets the active party has kept", "control")
class HeldBuckets(Message):
    """SHA-256 of each table of the receiver's buckets that the sender has kept, one after the other."""

    digests: bytes


@leaks("that the buckets of an earlier training are used again", "control")
class SameBuckets(Message):
    """The sender's buckets have this SHA-256."""

    digest: bytes


class _KeptBuckets(msgspec.Struct):
    """Content of the file: encoded `Buckets` of each table, the oldest first."""

    tables: list[list[bytes]]


Held = Mapping[bytes, list[bytes]]
"""Encoded `Buckets` of one partner's tables by their SHA-256, the oldest first."""


def kept_file(store: Path, party: str, peer: str) -> Path:
    """Return the file in which `party` keeps buckets of `peer`."""
    return checkpoint_file(store, party).with_suffix(".buckets") / f"{quote(peer, safe=' ')}.buckets"


def offer_held(party: Party, peer: str, store: Path | None) -> Held:
    """Send a partner the hashes of its buckets that are kept, and return these; there are none without a `store`."""
    held = {} if store is None else _read(kept_file(store, party.name, peer), party.name)
    party.send(peer, HeldBuckets(b"".join(held)))
    return held


def take_buckets(party: Party, peer: str, held: Held, sent: list[bytes] | None) -> Iterator[Buckets]:
    """Yield a partner's buckets piece by piece: those it sends, or those in `held` that it names.

    The encoded ones that it sends are appended to `sent`, unless that is None.
    """
    message = party.receive(peer, Buckets, SameBuckets)
    if isinstance(message, SameBuckets):
        if message.digest not in held:
            raise PeerProtocolError(peer, "expected buckets that were offered, got others", at="SameBuckets")
        logger.info("%s sent its buckets in an earlier training; these are used", peer)
        # the caller stops once it has all its rows; if it goes on, the kept table is of fewer rows
        yield from (decode_body(body, Buckets, peer=peer) for body in held[message.digest])
        raise PeerProtocolError(peer, "expected buckets of as many rows", at="SameBuckets")
    # piece by piece, so that no more than one message is held
    while True:
        assert isinstance(message, Buckets)
        if sent is not None:
            sent.append(encode(message))
        yield message
        message = party.receive(peer, Buckets)


def keep_buckets(party: Party, peer: str, store: Path, held: Held, sent: list[bytes]) -> None:
    """Write what a partner has sent to its file, with the buckets in `held`."""
    if _digest(sent) not in held:
        newest = [*held.values(), sent][-MOST_KEPT:]
        write_cached(kept_file(store, party.name, peer), _KeptBuckets(newest), FORMAT, party.name)


def _read(file: Path, owner: str) -> dict[bytes, list[bytes]]:
    kept = read_cached(file, _KeptBuckets, FORMAT, owner)
    return {} if kept is None else {_digest(bodies): bodies for bodies in kept.tables[-MOST_KEPT:]}


def send_buckets(party: Party, active: str, pieces: Pieces) -> None:
    """Send own buckets, or only their hash if the active party has kept them."""
    offered = party.receive(active, HeldBuckets).digests
    held = digests_in(offered, MOST_KEPT, peer=active, what="HeldBuckets")
    # encoding twice costs less than keeping all messages in memory
    digest = _digest(map(encode, pieces())) if held else b""
    for message in [SameBuckets(digest)] if digest in held else pieces():
        party.send(active, message)


def _digest(bodies: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for body in bodies:
        digest.update(body)
    return digest.digest()


SEND_EVERY = 0.25
"""Seconds between messages of chosen splits, unless a party needs them sooner: small trees take a millisecond."""

MOST_LONE = 1 << 28
"""The most rows times columns of one bucket: these take no bytes in a message, and one byte each in memory."""


@leaks("which of its columns and buckets splits use, and how often", "exact")
class ChosenSplits(Message):
    """Splits that trees use: features, int32 (k,), and packed bits of buckets left, uint8 (k, 32).

    `rounds` is the number of rounds finished before the last of these trees.
    """

    features: Array
    left_bins: Array
    rounds: Annotated[int, msgspec.Meta(ge=0)]


class NoisyColumns(ColumnSource):
    """Columns of the passive party `peer` as noisy buckets: sums are computed here, splits recorded by their owner.

    `pieces` are the peer's messages; `records` is the number of splits that it has recorded, and of those chosen since.
    Raises PeerProtocolError if the messages do not have `n_rows` rows, or do not fit the sizes that they state.
    """

    def __init__(self, party: Party, peer: str, pieces: Iterator[Buckets], n_rows: int, threads: int) -> None:
        message = next(pieces)
        present = view(message.present, np.int32, (None,), peer=peer, what="Buckets.present")
        flags = [
            view(array, np.bool_, (len(present),), peer=peer, what=f"Buckets.{name}")
            for name, array in (("categorical", message.categorical), ("missing", message.missing))
        ]
        sizes = present + flags[1]
        if np.any(present < 0) or np.any(present > 255) or np.any(sizes < 1):
            raise PeerProtocolError(peer, "expected 1 to 256 buckets of each column", at="Buckets.present")
        # buckets of a column with one bucket take no bytes in the message, but memory: bounded before it is allocated
        lone = int(np.count_nonzero(sizes == 1))
        if len(sizes) > MOST_COLUMNS or lone * n_rows > MOST_LONE:
            expected = f"expected at most {MOST_COLUMNS} columns, few of them of one bucket alone"
            raise PeerProtocolError(peer, expected, at="Buckets.present")
        epsilon = view(message.epsilon, np.float64, (len(present),), peer=peer, what="Buckets.epsilon")
        if not np.all(epsilon > 0.0):
            raise PeerProtocolError(peer, "expected epsilons above 0", at="Buckets.epsilon")
        codes = put_together([
            unpack_buckets((next(pieces) if of.start else message).packed, sizes, of.stop - of.start, peer)
            for of in row_pieces(n_rows, sum(widths_of(sizes)))
        ])  # fmt: skip
        self._party, self._peer = party, peer
        self._chosen: list[tuple[int, NDArray[np.bool_]]] = []
        self._sent, self.records = 0.0, 0
        offsets = np.concatenate([[0], np.cumsum(present + 1)]).astype(np.int32)
        super().__init__(codes, offsets, flags[0], self._choose, threads)

    def _choose(self, feature: int, left_bins: NDArray[np.bool_]) -> int:
        self._chosen.append((feature, left_bins))
        self.records += 1
        return self.records - 1

    def send_splits(self, rounds: int, *, now: bool) -> None:
        """Send the owner its splits since the last message; unless `now`, at most every `SEND_EVERY` seconds."""
        # a round trip for every small tree would cost more than the tree
        if self._chosen and (now or time.monotonic() - self._sent >= SEND_EVERY):
            features = np.array([feature for feature, _ in self._chosen], np.int32)
            packed = np.packbits(np.stack([left for _, left in self._chosen]), axis=1)
            self._party.send(self._peer, ChosenSplits(Array.of(features), Array.of(packed), rounds))
            self._chosen = []
            self._sent = time.monotonic()
