"""Bin sums of shared numbers under the lattice map, both ways, against plain sums; and answers to crafted vectors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.sealed.test_sealed import opened, play, shared
from crypto.sealed.watching import alike, assert_refuses_garbage, counts, garbage, noted, uniform, views
from treaty.crypto.keystream import Keystream
from treaty.crypto.lattice.kernels import reduced
from treaty.crypto.lattice.ring import packed_words, uniform_digits
from treaty.crypto.parameters import DEGREE
from treaty.crypto.payload import SumsBounds, slots_of
from treaty.crypto.sums import shared_sums
from treaty.crypto.sums.lattice_sums import lattice_fields
from treaty.crypto.sums.shared_sums import FurtherSums, ServedColumns, SharedSums, shared_parameters
from treaty.crypto.transfer.arithmetic import from_ints
from treaty.crypto.transfer.sealed_sums import Places, integer_shares
from treaty.crypto.transfer.stock import Arrays, Steps, Transfers, open_transfers
from treaty.errors import CryptoError

SEED = bytes(range(32))


def test_sums_that_do_not_fit_two_words_are_refused() -> None:
    """Rows' numbers have two: of more, what is above would be lost."""
    fits, wider = (SumsBounds(1 << 27, (1 << grad) - 1, (1 << 20) - 1) for grad in (22, 23))
    assert lattice_fields(fits, sealed=True)[1] <= 128 < lattice_fields(wider, sealed=True)[1]
    shared_parameters(fits)
    with pytest.raises(CryptoError, match="expected at most 128"):
        shared_parameters(wider)


@pytest.fixture(scope="module")
def ends() -> tuple[Transfers, Transfers]:
    return play(open_transfers(0), open_transfers(1))


class Table:
    """Both parties' columns, codes uint8 (n, features) whose last bin is missing values, and their sums."""

    def __init__(self, bounds: SumsBounds, widths: tuple[list[int], list[int]], rng: np.random.Generator) -> None:
        self.bounds, n = bounds, bounds.n_rows
        self.codes = [
            np.stack([rng.integers(0, width, n) for width in of], 1).astype(np.uint8) if of
            else np.zeros((n, 0), np.uint8) for of in widths
        ]  # fmt: skip
        self.offsets = [np.concatenate([[0], np.cumsum(of)]).astype(np.int32) for of in widths]
        slots = [int(of[-1]) for of in self.offsets]
        self.sums = [
            SharedSums(bounds, self.codes[k], self.offsets[k], [slots[1 - k]], SEED) for k in (0, 1)
        ]  # fmt: skip

    def with_hints(self) -> Table:
        play(*(end.exchange_hints() for end in self.sums))
        return self

    def packed(self, numbers: np.ndarray) -> list[int]:
        """Pack grad, hess and count, (..., 3)."""
        fields, bits = lattice_fields(self.bounds, sealed=True)
        shifts = [fields[2].shift, fields[1].shift, fields[0].shift]
        return [
            sum(int(x) << shift for x, shift in zip(row, shifts, strict=True)) % (1 << bits)
            for row in numbers.reshape(-1, 3)
        ]

    def plain(self, numbers: np.ndarray, kept: list[np.ndarray] | None = None) -> list[int]:
        """Return grad, hess and count of both parties' slots, of all vectors; of all features, or of those kept."""
        out = []
        for v in range(numbers.shape[1]):
            for k, (codes, offsets) in enumerate(zip(self.codes, self.offsets, strict=True)):
                for feature in range(codes.shape[1]) if kept is None else kept[k]:
                    first, last = offsets[feature : feature + 2].tolist()
                    out += [numbers[codes[:, feature] == code, v].sum(axis=0) for code in range(last - first)]
        return [int(x) % (1 << 128) for of in out for x in of]


def summed(
    ends: Any, table: Table, numbers: np.ndarray, masks: np.ndarray | None = None, kept: list[np.ndarray] | None = None
) -> list[int]:
    """Return sums of shared numbers, as both ends find them together; of all features, or of those kept."""
    bits = table.sums[0].bits
    shape = (*numbers.shape[:2], 2)
    if masks is None:
        given = [of.reshape(shape) for of in shared(table.packed(numbers), bits)]
    else:
        plain = np.array(table.packed(numbers), object)
        given = [of.reshape(shape) for of in _shares(plain, masks, bits)]
    which: list[tuple[Any, Any]] = [(None, None)] * 2
    if kept is not None:
        slots = [slots_of(of, some.astype(np.int64)) for of, some in zip(table.offsets, kept, strict=True)]
        which = [(kept[k], [slots[1 - k]]) for k in (0, 1)]
    found = play(*(table.sums[k].sums(given[k], *which[k]) for k in (0, 1)))
    (own, theirs), (others, ours) = found
    parts = [np.concatenate(pair, axis=1) for pair in ((own, theirs), (ours, others))]
    places = Places(*(last - first for first, last in pairwise(table.sums[0].places)))
    return opened(play(*(integer_shares(ends[k], parts[k], places, k) for k in (0, 1))), 128)


def _shares(plain: np.ndarray, masks: np.ndarray, bits: int) -> list[np.ndarray]:
    return [from_ints([int(x) % (1 << bits) for x in of], 2) for of in (masks, plain - masks)]


def drawn(bounds: SumsBounds, vectors: int, rng: np.random.Generator, extreme: bool = False) -> np.ndarray:
    """Draw grad, hess and count of rows, (n, vectors, 3): 0 where a row is in another node."""
    shape = bounds.n_rows, vectors
    grad = rng.integers(-bounds.grad_bound, bounds.grad_bound + 1, shape)
    hess = rng.integers(0, bounds.hess_bound + 1, shape)
    inside = rng.integers(0, 2, shape)
    if extreme:
        grad, hess, inside = np.full(shape, rng.choice([-1, 1]) * bounds.grad_bound), hess * 0 + bounds.hess_bound, 1
    return np.stack([grad, hess, np.ones(shape, np.int64)], axis=-1) * np.reshape(inside, (*np.shape(inside), 1))


@settings(max_examples=15)
@given(
    st.sampled_from([1, 2, 3, 50, 1000]), st.lists(st.integers(1, 9), max_size=3),
    st.lists(st.integers(1, 9), max_size=3), st.integers(1, 4),
    st.sampled_from([(1, 0), (1 << 16, 17040), (1 << 16, 1 << 14)]), st.integers(0, 1 << 32),
)  # fmt: skip
def test_sums_are_the_plain_ones(
    ends: Any, n: int, mine: list[int], theirs: list[int], vectors: int, most: tuple[int, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    theirs = theirs if mine or theirs else [3]
    table = Table(SumsBounds(n, *most), (mine, theirs), rng).with_hints()
    numbers = drawn(table.bounds, vectors, rng, extreme=seed % 3 == 0)
    assert summed(ends, table, numbers) == table.plain(numbers)
    kept = [np.flatnonzero(rng.integers(0, 2, len(of))).astype(np.int32) for of in (mine, theirs)]
    if sum(map(len, kept)):
        assert summed(ends, table, numbers, kept=kept) == table.plain(numbers, kept)


@pytest.mark.parametrize("share", [0, 1, -1])
def test_sums_of_extreme_shares_are_the_plain_ones(ends: Any, share: int) -> None:
    """One party's shares are all zeros, ones, or all bits."""
    rng = np.random.default_rng(4)
    table = Table(SumsBounds(300, 1 << 16, 17040), ([5, 1], [9]), rng).with_hints()
    for extreme in (False, True):
        numbers = drawn(table.bounds, 2, rng, extreme)
        masks = np.full(600, share, object)
        assert summed(ends, table, numbers, masks) == table.plain(numbers)


def test_vectors_and_hints_in_several_pieces_give_the_same_sums(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    table = Table(SumsBounds(2 * DEGREE + 77, 1 << 16, 17040), ([8, 3], [6]), rng)
    monkeypatch.setattr(shared_sums, "_HINT_BYTES", 1)  # a row at a time, and one party has more of them
    steps = [seen for seen, _ in views(lambda k: table.sums[k].exchange_hints())]
    assert [len(came) for (came,) in steps[0]] == [1] * 6 + [0] * 6
    assert [len(came) for (came,) in steps[1]] == [1] * 11 + [0]
    numbers = drawn(table.bounds, 2, rng)
    monkeypatch.setattr(shared_sums, "_VECTOR_BYTES", 1)
    assert summed(ends, table, numbers) == table.plain(numbers)
    given = [of.reshape(-1, 2, 2) for of in shared(table.packed(numbers), table.sums[0].bits)]
    assert len(views(lambda k: table.sums[k].sums(given[k]))[0][0]) == 3 + 1  # three blocks, and the answers


def test_a_party_without_columns_is_asked_nothing_and_answers_nothing(ends: Any) -> None:
    rng = np.random.default_rng(6)
    table = Table(SumsBounds(100, 1 << 16, 17040), ([], [4, 2]), rng).with_hints()
    numbers = drawn(table.bounds, 1, rng)
    given = [of.reshape(-1, 1, 2) for of in shared(table.packed(numbers), table.sums[0].bits)]
    (first, _), (second, _) = views(lambda k: table.sums[k].sums(given[k]))
    assert [len(came) for came in first] == [0, 1]  # the answer alone
    assert [len(came) for came in second] == [2, 0]
    assert summed(ends, table, numbers) == table.plain(numbers)


# ---------------------------------------------------------------- what an asker learns


def crafted(table: Table, words: Any, vectors: int, seen: list[Arrays]) -> Steps[Any]:
    """Ask, as role 0, with vectors of these words; answer the other party with noughts."""
    parameters, n = table.sums[0].parameters, table.bounds.n_rows
    sizes = packed_words(parameters, n), packed_words(parameters, DEGREE)
    came = yield [words((vectors, size)) for size in sizes]
    seen.append(came)
    came = yield [np.zeros((vectors, table.sums[0].slots, parameters.digits), np.uint16)]
    seen.append(came)


WORDS = {
    "zeros": lambda shape: np.zeros(shape, np.uint32),
    "one entry": lambda shape: np.eye(*shape, dtype=np.uint32),
    "large": lambda shape: np.full(shape, 0x00010001, np.uint32),
}


@pytest.mark.parametrize("case", WORDS)
def test_an_answer_is_uniform_whatever_vector_was_sent(case: str) -> None:
    """And so is the difference of two answers to one vector, and what they open to."""
    vectors, rng = 8, np.random.default_rng(7)
    table = Table(SumsBounds(64, 1 << 16, 17040), ([2], [50, 50]), rng).with_hints()
    answers, shares = [], []
    for value in (0, 0, 1):  # the answerer's own shares do not show, either
        seen: list[Arrays] = []
        values = np.full((64, vectors, 2), value * 12345, np.uint64)
        _, (own, _) = play(crafted(table, WORDS[case], vectors, seen), table.sums[1].sums(values))
        answers.append(seen[1][0])
        shares.append(own)
    for of in (*answers, answers[0] - answers[1], answers[1] - answers[2]):
        assert uniform(of)
    for of in shares:
        # the lowest bits of each field; a table of fixed numbers would have the same again
        assert uniform((of & np.uint64(0xFF)).astype(np.uint8))
    assert uniform(((shares[0] - shares[1]) & np.uint64(0xFF)).astype(np.uint8))


def test_vectors_do_not_show_what_is_in_them() -> None:
    table = Table(SumsBounds(2000, 1 << 16, 17040), ([2], [3]), np.random.default_rng(8)).with_hints()
    found = []
    for value in (0, (1 << table.sums[0].bits) - 1):
        words = [value & (2**64 - 1), value >> 64]
        seen: list[Arrays] = []
        values = np.tile(np.array(words, np.uint64), (2000, 4, 1))
        play(table.sums[0].sums(values), noted(table.sums[1].sums(values), seen))
        found.append(np.stack([counts(array) for array in seen[0]]))
    for one, other in zip(*found, strict=True):
        assert alike(one, other)


# ---------------------------------------------------------------- further parties


def further(n: int, widths: list[int], seed: int = 11) -> ServedColumns:
    rng = np.random.default_rng(seed)
    codes = np.stack([rng.integers(0, width, n) for width in widths], 1).astype(np.uint8)
    offsets = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)
    return ServedColumns(SumsBounds(n, 1 << 16, 17040), codes, offsets, SEED, 1, further=True)


def asked(table: ServedColumns, words: Any, vectors: int, pad: np.ndarray | None = None) -> list[np.ndarray]:
    """Return the answers to vectors of these words, of both ends, and the second one without its pad."""
    request = FurtherSums(table, vectors, np.arange(len(table.columns), dtype=np.int32))
    pad = uniform_digits(Keystream().raw, request.shape) if pad is None else pad
    sizes = packed_words(table.parameters, table.n_rows), packed_words(table.parameters, DEGREE)
    assert request.add([words((vectors, size)) for size in sizes] * 2)
    own, passed = request.answers(pad)
    return [own, passed, reduced(passed.astype(np.int64) - pad)]


@pytest.mark.parametrize("case", WORDS)
def test_a_further_partys_answers_are_uniform_whatever_vectors_were_sent(case: str) -> None:
    """Each of them, what the active party can add up of both, and differences of answers to the same vectors."""
    table = further(64, [50, 50])
    one, other = asked(table, WORDS[case], 8), asked(table, WORDS[case], 8)
    for of in (*one, one[0] + one[1], *(first - second for first, second in zip(one, other, strict=True))):
        assert uniform(of)


def test_without_its_mask_or_its_pad_an_answer_is_not_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    table = further(64, [50, 50])
    shape = 8, 100, table.parameters.digits
    own, passed, opened = asked(table, WORDS["zeros"], 8, np.zeros(shape, np.uint16))
    assert not uniform(own + passed)
    monkeypatch.setattr(shared_sums, "uniform_digits", lambda _, shape: np.zeros(shape, np.uint16))
    own, passed, opened = asked(table, WORDS["zeros"], 8, np.ones(shape, np.uint16))
    assert not uniform(own)
    assert not uniform(opened)


def test_a_further_party_refuses_vectors_of_other_types_and_shapes() -> None:
    table = further(20, [3, 2])
    sizes = packed_words(table.parameters, 20), packed_words(table.parameters, DEGREE)
    honest = [np.zeros((2, size), np.uint32) for size in sizes] * 2
    for came in garbage(honest):
        with pytest.raises(CryptoError):
            FurtherSums(table, 2, np.arange(2, dtype=np.int32)).add(came)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("role", [0, 1])
def test_messages_of_other_types_and_shapes_are_refused(role: int) -> None:
    table = Table(SumsBounds(20, 1 << 16, 17040), ([3], [2, 2]), np.random.default_rng(9)).with_hints()
    values = np.zeros((20, 2, 2), np.uint64)
    assert_refuses_garbage(lambda k: table.sums[k].sums(values), role)


def hints(of: SharedSums, *messages: Arrays) -> None:
    steps = of.exchange_hints()
    next(steps)
    for message in messages:
        steps.send(message)


def test_hints_of_other_types_and_shapes_are_refused() -> None:
    def fresh() -> SharedSums:
        return Table(SumsBounds(20, 1 << 16, 17040), ([3], [2, 2]), np.random.default_rng(10)).sums[0]

    (piece,) = next(Table(SumsBounds(20, 1 << 16, 17040), ([2, 2], [3]), np.random.default_rng(10)).sums[0]
                    .exchange_hints())  # fmt: skip
    hints(fresh(), [piece])
    for came in garbage([piece]):
        # fewer rows are no mistake: more may come
        if len(came) == 1 and came[0].dtype == piece.dtype and came[0].ndim == 3 and len(came[0]) < len(piece):
            continue
        with pytest.raises(CryptoError, match="hint"):
            hints(fresh(), came)
    with pytest.raises(CryptoError, match="expected a hint of 4 rows, got 3"):
        hints(fresh(), [piece[:3]], [piece[:0]])
    with pytest.raises(CryptoError, match="at most 1 rows more of a hint"):
        hints(fresh(), [piece[:3]], [piece[:2]])
