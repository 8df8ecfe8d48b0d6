"""Bin sums of numbers that are shared, under the lattice map: both parties have columns, and neither learns a sum.

A row's numbers (count, hess, grad, packed as in `lattice_sums`) are shared modulo 2^k. Each party adds up its own
shares over its own columns. It encrypts its shares as vectors of the map, whose entries are uniform numbers below 2^k,
in chunks of 20 bits. The other party answers with the sums over its columns, under masks that are uniform over the
whole ring: the answer is uniform whatever vector was sent. What is opened, the mask's negative and the local sum add up
to a sealed sum (`transfer.sealed_sums`). Vectors go both ways at once, under the same public seed; secrets and hints
are each party's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.lattice.kernels import reduced
from treaty.crypto.lattice.linear_map import LinearMapClient, LinearMapServer
from treaty.crypto.lattice.ring import pack, packed_words, uniform_digits, unpack
from treaty.crypto.parameters import DEGREE, DIGIT_BITS, Digits, Field, Parameters, SecretMatrix, choose_masked
from treaty.crypto.payload import SumsBounds, slots_of
from treaty.crypto.sums.lattice_sums import lattice_fields, split_fields
from treaty.crypto.transfer.arithmetic import Wide, resized, shifted
from treaty.crypto.transfer.stock import Steps, take
from treaty.errors import CryptoError
from treaty.machine.arrays import Codes, Int32s, Integers, Words, contiguous, pieces
from treaty.machine.kernels import kernel

_CHUNK = 20  # bits of a share in one field: all of an entry's fields together stay below every prime
_VECTOR_BYTES = 16 << 20  # of vectors that go in one step
_HINT_BYTES = 32 << 20


def shared_parameters(bounds: SumsBounds) -> Parameters:
    """Return the parameters of the map for shares; CryptoError if the sums are too large."""
    _, bits = lattice_fields(bounds, sealed=True)
    return choose_masked(bits, bounds.n_rows, sum(of.bound for of in _chunks(bits)))


def _chunks(bits: int) -> list[Field]:
    return [Field(start, (1 << min(_CHUNK, bits - start)) - 1) for start in range(0, bits, _CHUNK)]


class SharedSums:
    """One end; `codes` (n_rows, features) and `offsets` are of own columns, `others` slots are the other party's.

    `places` are the first bits of noise, count, hess and grad in a sealed sum, and the length of all. Before the first
    sums, each end takes the pieces of the other's `hint`.
    """

    def __init__(
        self, bounds: SumsBounds, codes: Codes, offsets: Int32s, others: int, seed: bytes, threads: int = 1
    ) -> None:
        fields, self.bits = lattice_fields(bounds, sealed=True)
        self.parameters, self.n_rows, self._threads = shared_parameters(bounds), bounds.n_rows, threads
        self.places = [
            0, *(self.parameters.below + of.shift for of in fields), DIGIT_BITS * self.parameters.digits
        ]  # fmt: skip
        self._columns, self._offsets, self._others = contiguous(codes.T), offsets, others
        chunks = _chunks(self.bits)
        self._client = LinearMapClient(self.parameters, chunks, seed, self.n_rows, threads=threads)
        matrix = SecretMatrix.of_bins(self._columns, offsets.astype(np.int64))
        self._server = LinearMapServer(self.parameters, matrix, seed, threads=threads)
        self._hint = np.empty((others, self.parameters.digits, self.parameters.degree), np.int16)
        self._came = 0

    @property
    def slots(self) -> int:
        return int(self._offsets[-1])

    def hint(self) -> Iterator[NDArray[np.int16]]:
        """Make the hint of own columns, piece by piece."""
        at_a_time = max(self._threads, _HINT_BYTES // (2 * self.parameters.digits * self.parameters.degree))
        return self._server.hint(at_a_time)

    def exchange_hints(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Steps[None]:
        """Send the other party the hint of own columns, and take its own, piece by piece.

        `progress` is called with the rows that were sent and came so far, and those of both hints.
        """
        own, sent = self.hint(), 0
        none = np.empty((0, *self._hint.shape[1:]), np.int16)
        done = False
        while not done:
            piece = next(own, none)
            came = yield [piece]
            left = self._others - self._came
            fine = len(came) == 1 and came[0].dtype == np.int16 and came[0].shape[1:] == none.shape[1:]
            if not fine or len(came[0]) > left:
                what = [(str(array.dtype), array.shape) for array in came]
                raise CryptoError(f"expected at most {left} rows more of a hint, got {what}")
            count = len(came[0])
            self._hint[self._came : self._came + count] = came[0]
            self._came, sent = self._came + count, sent + len(piece)
            progress(sent + self._came, self.slots + self._others)
            # both ends see both pieces, and end together
            done = len(piece) == count == 0
        if self._came < self._others:
            raise CryptoError(f"expected a hint of {self._others} rows, got {self._came}")

    def sums(
        self, values: Wide, features: Int32s | None = None, others: Integers | None = None
    ) -> Steps[tuple[Words, Words]]:
        """Return shares of fields of own columns' sums and of the other's, uint64 (v, slots, 4), topmost field first.

        `values`, (n_rows, v, 2), are own shares modulo 2^bits. Sums are of some own `features` and slots of `others`,
        both ascending; None for all. A step for each piece of the vectors, and one for the answers.
        """
        parameters, vectors = self.parameters, values.shape[1]
        own = np.arange(len(self._columns)) if features is None else features.astype(np.int64)
        others = np.arange(self._others) if others is None else others
        slots = slots_of(self._offsets, own)
        # a party without columns has nothing to answer, and is asked nothing
        asks, answers = len(others) > 0, len(slots) > 0
        query, adding = self._client.begin(vectors), None
        own_words = packed_words(parameters, DEGREE)
        for of in pieces(self.n_rows, DEGREE * max(1, _VECTOR_BYTES // (4 * own_words * vectors))):
            sent, count = [], of.stop - of.start
            if asks:
                numbers = query.encrypt([_in_chunks(values[of, v], self.bits) for v in range(vectors)])
                sent.append(pack(parameters, numbers, self._threads))
                if of.start == 0:
                    sent.append(pack(parameters, query.own, self._threads))
            expected = [(np.uint32, (vectors, packed_words(parameters, count))), (np.uint32, (vectors, own_words))]
            came = take((yield sent), *expected[: answers * (1 + (of.start == 0))])
            if answers:
                if adding is None:
                    adding = self._server.begin(unpack(parameters, came[1], DEGREE, self._threads), own)
                adding.add(unpack(parameters, came[0], count, self._threads))
        masks = uniform_digits(Keystream().raw, (vectors, len(slots), parameters.digits))
        sums = [] if adding is None else [adding.answer(masks)]
        came = take((yield sums), *[(np.uint16, (vectors, len(others), parameters.digits))] * asks)
        opened = np.zeros((vectors, 0, len(self.places) - 1), np.uint64)
        if asks:
            digits = self._client.open(self._hint, others, query.secrets, came[0])
            opened = split_fields(digits, self.places)
        return self._own_fields(values, slots, masks), opened

    def _own_fields(self, values: Wide, slots: Integers, masks: Digits) -> Words:
        """Return own shares of own columns' sums: the sums of own numbers, less the masks."""
        vectors, digits = values.shape[1], self.parameters.digits
        own = np.zeros((vectors, self.slots, 2), np.uint64)
        _add_up(self._columns, self._offsets.astype(np.int64), values, own)
        words = -(-DIGIT_BITS * digits // 64)
        whole = shifted(resized(own[:, slots], words), self.parameters.below)
        share = whole.astype("<u8", copy=False).view("<u2")[..., :digits].astype(np.int64) - masks
        # guards fields against a borrow: see `transfer.sealed_sums`
        for place in (self.places[1], self.places[2], self.places[4] - 2):
            share[..., place // DIGIT_BITS] += 1 << place % DIGIT_BITS
        return split_fields(reduced(share), self.places)


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
