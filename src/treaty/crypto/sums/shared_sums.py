"""Bin sums of numbers that are shared, under the lattice map: both parties have columns, and neither learns a sum.

A row's numbers (count, hess, grad, packed as in `lattice_sums`) are shared modulo 2^k. Each party adds up its own
shares over its own columns. It encrypts its shares as vectors of the map, whose entries are uniform numbers below 2^k,
in chunks of 20 bits. The other party answers with the sums over its columns, under masks that are uniform over the
whole ring: the answer is uniform whatever vector was sent. What is opened, the mask's negative and the local sum add up
to a sealed sum (`transfer.sealed_sums`). Vectors go both ways at once, under the same public seed; secrets and hints
are each party's own.

*Further parties* have columns and hold no shares (`FurtherSums`). The same vectors serve them, too. One answers both
ends' vectors: the one under a mask, uniform over the whole ring, the other under the mask's negative, so that what both
ends open adds up to a sealed sum. The second answer, which passes through the other end, has a pad besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.lattice.kernels import reduced
from treaty.crypto.lattice.linear_map import LinearMapClient, LinearMapServer, PartialSums
from treaty.crypto.lattice.ring import pack, packed_words, uniform_digits, unpack
from treaty.crypto.parameters import DEGREE, DIGIT_BITS, Digits, Field, Parameters, SecretMatrix, choose_masked
from treaty.crypto.payload import SumsBounds, slots_of
from treaty.crypto.sums.lattice_sums import lattice_fields, split_fields
from treaty.crypto.transfer.arithmetic import Wide, resized, shifted
from treaty.crypto.transfer.stock import Arrays, Steps, take
from treaty.errors import CryptoError
from treaty.machine.arrays import Codes, Int32s, Integers, Words, contiguous, pieces
from treaty.machine.kernels import kernel

_CHUNK = 20  # bits of a share in one field: all of an entry's fields together stay below every prime
_VECTOR_BYTES = 16 << 20  # of vectors that go in one step
_HINT_BYTES = 32 << 20


def shared_parameters(bounds: SumsBounds, further: bool = False) -> Parameters:
    """Return the parameters of the map for shares, with `further` parties or without; CryptoError for too large sums.

    Where two answers are opened to one sum, as those of further parties are, each has half of the noise.
    """
    _, bits = lattice_fields(bounds, sealed=True)
    if bits > 128:
        raise CryptoError(f"shared sums take {bits} bits, expected at most 128 - lower weights")
    return choose_masked(bits, bounds.n_rows, sum(of.bound for of in _chunks(bits)), int(further))


def _chunks(bits: int) -> list[Field]:
    return [Field(start, (1 << min(_CHUNK, bits - start)) - 1) for start in range(0, bits, _CHUNK)]


def _rows_at_once(parameters: Parameters, vectors: int) -> int:
    return DEGREE * max(1, _VECTOR_BYTES // (4 * packed_words(parameters, DEGREE) * vectors))


def _unpacked(parameters: Parameters, came: Arrays, count: int, threads: int) -> list[NDArray[np.uint32]]:
    return [unpack(parameters, words, size, threads) for words, size in zip(came, (count, DEGREE), strict=False)]


class ServedColumns:
    """A party's own columns, codes (n_rows, features) with `offsets`, as the server of vectors."""

    def __init__(
        self, bounds: SumsBounds, codes: Codes, offsets: Int32s, seed: bytes, threads: int, *, further: bool
    ) -> None:
        fields, self.bits = lattice_fields(bounds, sealed=True)
        self.parameters, self.n_rows, self.threads = shared_parameters(bounds, further), bounds.n_rows, threads
        self.places = [
            0, *(self.parameters.below + of.shift for of in fields), DIGIT_BITS * self.parameters.digits
        ]  # fmt: skip
        self.columns, self.offsets = contiguous(codes.T), offsets
        matrix = SecretMatrix.of_bins(self.columns, offsets.astype(np.int64))
        self.server = LinearMapServer(self.parameters, matrix, seed, threads=threads)

    @property
    def slots(self) -> int:
        return int(self.offsets[-1])

    def hint(self) -> Iterator[NDArray[np.int16]]:
        """Make the hint of own columns, piece by piece."""
        at_a_time = max(self.threads, _HINT_BYTES // (2 * self.parameters.digits * self.parameters.degree))
        return self.server.hint(at_a_time)

    def guarded(self, digits: NDArray[np.int64]) -> Digits:
        """Return numbers modulo q' of one share, whose fields are guarded against a borrow (`transfer.sealed_sums`)."""
        out = digits.copy()
        for place in (self.places[1], self.places[2], self.places[4] - 2):
            out[..., place // DIGIT_BITS] += 1 << place % DIGIT_BITS
        return reduced(out)


class FurtherSums:
    """A party that holds no shares: it answers one request for sums of some own `features`, of so many `vectors`."""

    def __init__(self, table: ServedColumns, vectors: int, features: Int32s) -> None:
        self._table, self._vectors, self._features = table, vectors, features.astype(np.int64)
        self._adding: list[PartialSums] = []
        self._done = 0

    def add(self, came: Arrays) -> bool:
        """Take the next piece of both ends' vectors, as `SharedSums` sends them; return whether it was the last."""
        table = self._table
        count = min(_rows_at_once(table.parameters, self._vectors), table.n_rows - self._done)
        sizes = [packed_words(table.parameters, of) for of in (count, DEGREE)[: 1 + (not self._done)]]
        came = take(came, *[(np.uint32, (self._vectors, size)) for size in sizes] * 2)
        for end, of_end in enumerate((came[: len(sizes)], came[len(sizes) :])):
            entries, *own = _unpacked(table.parameters, of_end, count, table.threads)
            self._adding += [table.server.begin(of, self._features) for of in own]
            self._adding[end].add(entries)
        self._done += count
        return self._done == table.n_rows

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of an answer."""
        slots = len(slots_of(self._table.offsets, self._features))
        return self._vectors, slots, self._table.parameters.digits

    def answers(self, pad: Digits) -> list[Digits]:
        """Return the answers to role 0's vectors and to role 1's, the latter under a pad of role 1."""
        mask = uniform_digits(Keystream().raw, self.shape)
        masks = self._table.guarded(mask.astype(np.int64)), reduced(pad.astype(np.int64) - mask)
        return [adding.answer(of) for adding, of in zip(self._adding, masks, strict=True)]


class Further(Protocol):
    """What an end does with further parties, at one request for sums or for all."""

    @property
    def relays(self) -> bool:
        """Whether this end passes on what the other sends."""

    def ask(self, slots: Sequence[int], vectors: Arrays) -> None:
        """Pass on a piece of both ends' vectors to those of whose `slots` sums are wanted."""

    def answers(self, shapes: Sequence[tuple[int, int, int]]) -> Steps[list[Digits]]:
        """Return their answers to this end, without pads."""


class SharedSums(ServedColumns):
    """One end; `codes` (n_rows, features) and `offsets` are of own columns.

    `others` are the numbers of slots of the other end, and of further parties. `places` are the first bits of noise,
    count, hess and grad in a sealed sum, and the length of all. Before the first sums, each end takes the pieces of all
    others' `hint`.
    """

    def __init__(
        self, bounds: SumsBounds, codes: Codes, offsets: Int32s, others: Sequence[int], seed: bytes, threads: int = 1
    ) -> None:
        super().__init__(bounds, codes, offsets, seed, threads, further=len(others) > 1)
        self._client = LinearMapClient(self.parameters, _chunks(self.bits), seed, self.n_rows, threads=threads)
        self._others, self._hint = (
            others,
            np.empty((sum(others), self.parameters.digits, self.parameters.degree), np.int16),
        )
        self._came = 0

    def exchange_hints(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Steps[None]:
        """Send the other party the hint of own columns, and take its own, piece by piece.

        `progress` is called with the rows that were sent and came so far, and those of both hints.
        """
        own, sent = self.hint(), 0
        none = np.empty((0, *self._hint.shape[1:]), np.int16)
        done = False
        while not done:
            piece = next(own, none)
            count = self._take((yield [piece]), self._others[0])
            sent += len(piece)
            progress(sent + self._came, self.slots + self._others[0])
            # both ends see both pieces, and end together
            done = len(piece) == count == 0
        if self._came < self._others[0]:
            raise CryptoError(f"expected a hint of {self._others[0]} rows, got {self._came}")

    def pass_hints(self, pieces: Iterator[Arrays] | None) -> Steps[None]:
        """Take further parties' hints: from their `pieces`, which are passed on, or from the end that does this."""
        while self._came < len(self._hint):
            came = [] if pieces is None else next(pieces)
            sent = yield came
            self._take(sent if pieces is None else came, len(self._hint))

    def _take(self, came: Arrays, most: int) -> int:
        """Take rows of a hint, so many in all at most; return how many came."""
        left, shape = most - self._came, self._hint.shape[1:]
        fine = len(came) == 1 and came[0].dtype == np.int16 and came[0].shape[1:] == shape
        if not fine or len(came[0]) > left:
            what = [(str(array.dtype), array.shape) for array in came]
            raise CryptoError(f"expected at most {left} rows more of a hint, got {what}")
        self._hint[self._came : self._came + len(came[0])] = came[0]
        self._came += len(came[0])
        return len(came[0])

    def sums(
        self, values: Wide, features: Int32s | None = None, others: Sequence[Integers] | None = None,
        further: Further | None = None,
    ) -> Steps[tuple[Words, Words]]:  # fmt: skip
        """Return shares of fields of own columns' sums and of others', uint64 (v, slots, 4), topmost field first.

        `values`, (n_rows, v, 2), are own shares modulo 2^bits. Sums are of some own `features` and slots of each of the
        `others`, all ascending; None for all. A step for each piece of the vectors, and one for the answers, or two if
        there are `further` parties.
        """
        parameters, vectors, threads = self.parameters, values.shape[1], self.threads
        own = np.arange(len(self.columns)) if features is None else features.astype(np.int64)
        wanted = [np.arange(count) for count in self._others] if others is None else others
        slots, counts = slots_of(self.offsets, own), [len(of) for of in wanted]
        # a party without columns has nothing to answer, and is asked nothing; one that relays is sent all
        asks, answers, beyond = counts[0] > 0, len(slots) > 0, sum(counts[1:]) > 0
        sends, takes = (asks, answers or beyond) if further and further.relays else (asks or beyond, answers)
        query, adding = self._client.begin(vectors), None
        own_words = packed_words(parameters, DEGREE)
        for of in pieces(self.n_rows, _rows_at_once(parameters, vectors)):
            sent, count = list[NDArray[np.uint32]](), of.stop - of.start
            if asks or beyond:
                numbers = query.encrypt([_in_chunks(values[of, v], self.bits) for v in range(vectors)])
                sent.append(pack(parameters, numbers, threads))
                if of.start == 0:
                    sent.append(pack(parameters, query.own, threads))
            expected = [(np.uint32, (vectors, packed_words(parameters, count))), (np.uint32, (vectors, own_words))]
            came = take((yield sent if sends else []), *expected[: takes * (1 + (of.start == 0))])
            if further and beyond:
                further.ask(counts[1:], [*sent, *came])
            if answers:
                entries, *firsts = _unpacked(parameters, came, count, threads)
                adding = self.server.begin(firsts[0], own) if adding is None else adding
                adding.add(entries)
        masks = uniform_digits(Keystream().raw, (vectors, len(slots), parameters.digits))
        sums = [] if adding is None else [adding.answer(masks)]
        shapes = [(vectors, count, parameters.digits) for count in counts]
        opened = np.zeros((vectors, 0, len(self.places) - 1), np.uint64)
        found = take((yield sums), *[(np.uint16, shapes[0])] * asks)
        if further and beyond:
            found += yield from further.answers(shapes[1:])
        if found:
            first = np.concatenate([[0], np.cumsum(self._others)])
            rows = np.concatenate([at + of for at, of in zip(first, wanted, strict=False)])
            digits = self._client.open(self._hint, rows, query.secrets, np.concatenate(found, axis=1))
            opened = split_fields(digits, self.places)
        return self._own_fields(values, slots, masks), opened

    def _own_fields(self, values: Wide, slots: Integers, masks: Digits) -> Words:
        """Return own shares of own columns' sums: the sums of own numbers, less the masks."""
        vectors, digits = values.shape[1], self.parameters.digits
        own = np.zeros((vectors, self.slots, 2), np.uint64)
        _add_up(self.columns, self.offsets.astype(np.int64), values, own)
        words = -(-DIGIT_BITS * digits // 64)
        whole = shifted(resized(own[:, slots], words), self.parameters.below)
        share = whole.astype("<u8", copy=False).view("<u2")[..., :digits].astype(np.int64) - masks
        return split_fields(self.guarded(share), self.places)


def _in_chunks(numbers: Wide, bits: int) -> NDArray[np.int32]:
    """Split numbers (n, 2) below 2^bits into chunks, int32 (chunks, n), the lowest first."""
    out = []
    for field in _chunks(bits):
        word, shift = divmod(field.shift, 64)
        value = numbers[:, word] >> np.uint64(shift)
        if shift + _CHUNK > 64 and word + 1 < numbers.shape[1]:
            value = value | numbers[:, word + 1] << np.uint64(64 - shift)
        out.append((value & np.uint64(field.bound)).astype(np.int32))
    return np.stack(out)


@kernel
def _add_up(columns: Codes, offsets: NDArray[np.int64], values: Wide, out: Wide) -> None:
    """Add rows' numbers, (n, v, 2), to the places of their bins, (v, slots, 2), modulo 2^128."""
    for feature in range(columns.shape[0]):
        for row in range(columns.shape[1]):
            slot = offsets[feature] + np.int64(columns[feature, row])
            for v in range(values.shape[1]):
                low = out[v, slot, 0] + values[row, v, 0]
                out[v, slot, 1] += values[row, v, 1] + np.uint64(low < values[row, v, 0])
                out[v, slot, 0] = low
