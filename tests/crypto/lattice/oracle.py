"""The linear map's steps with plain big integers: schoolbook products, no transforms, no residues, any degree."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import pytest

from treaty.crypto import parameters
from treaty.crypto.keystream import Keystream
from treaty.crypto.lattice import linear_map
from treaty.crypto.lattice.linear_map import LinearMapClient, LinearMapServer
from treaty.crypto.lattice.ring import public_ring_elements
from treaty.crypto.parameters import SETS, Field, Parameters, SecretMatrix

SEED = b"all parties made this seed, say."
SMALL = 128
"""Least degree that the compiled steps take."""

FALSE_ALARM = 1e-6
"""Of every statistical test here: what it refuses happens that often to a sound program."""


def small_parameters(monkeypatch, degree: int, primes: int, message_bits: int, weight: int, slack: int) -> Parameters:
    """A set of a degree far below any security: tests alone get it, by bending the table."""
    monkeypatch.setitem(parameters.LIMITS, degree, 31 * max(SETS))
    return Parameters(degree, SETS[max(primes, min(SETS))][:primes], message_bits, weight, slack)


def multiply(a: Sequence[int], b: Sequence[int], modulus: int) -> list[int]:
    """Product modulo X^N + 1."""
    out = [0] * len(a)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            if i + j < len(a):
                out[i + j] += x * y
            else:
                out[i + j - len(a)] -= x * y
    return [x % modulus for x in out]


def coefficient(a: Sequence[int], b: Sequence[int], k: int) -> int:
    """One coefficient of the product modulo X^N + 1, as an integer."""
    return sum(x * b[k - i] if i <= k else -x * b[len(a) + k - i] for i, x in enumerate(a))


def add(*terms: Sequence[int]) -> list[int]:
    return [sum(column) for column in zip(*terms, strict=True)]


def inner(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def mirrored(p: Sequence[int]) -> list[int]:
    """p(1 / X)."""
    return [p[0], *(-x for x in p[:0:-1])]


def points(prime: int, degree: int) -> list[int]:
    """Where a transform evaluates: odd powers of the 2 N-th root of unity from the least non-residue, bits reversed."""
    base = next(x for x in range(2, prime) if pow(x, (prime - 1) // 2, prime) == prime - 1)
    root = pow(base, (prime - 1) // (2 * degree), prime)
    bits = degree.bit_length() - 1
    return [pow(root, 2 * int(format(i, f"0{bits}b")[::-1], 2) + 1, prime) for i in range(degree)]


def transform(p: Sequence[int], prime: int) -> list[int]:
    """Its values at all points."""
    return [sum(c * pow(x, k, prime) for k, c in enumerate(p)) % prime for x in points(prime, len(p))]


def coefficients(values: Sequence[int], prime: int) -> list[int]:
    """The polynomial of a transform."""
    inverses, scale = [pow(x, -1, prime) for x in points(prime, len(values))], pow(len(values), -1, prime)
    return [
        sum(v * pow(x, k, prime) for v, x in zip(values, inverses, strict=True)) * scale % prime
        for k in range(len(values))
    ]


def lift(residues: Sequence[Sequence[int]], primes: Sequence[int]) -> list[int]:
    """Integers below the primes' product from their residues, one row for each prime."""
    modulus = math.prod(primes)
    units = [modulus // p * pow(modulus // p, -1, p) for p in primes]
    return [inner([int(x) for x in column], units) % modulus for column in zip(*residues, strict=True)]


def centred(x: int, modulus: int) -> int:
    return (x + modulus // 2) % modulus - modulus // 2


def ring_elements(seed: bytes, count: int, primes: Sequence[int], degree: int) -> list[list[int]]:
    """Coefficients of a~_0, a~_1, ..."""
    out = []
    for number in range(count):
        values = public_ring_elements(seed, number, tuple(primes), degree)
        out.append(lift([coefficients(row.tolist(), p) for row, p in zip(values, primes, strict=True)], primes))
    return out


def blocks_of(entries: Sequence[int], degree: int) -> list[list[int]]:
    """Blocks of N entries, the last one filled up with zeros."""
    padded = [*entries, *[0] * (-len(entries) % degree)]
    return [padded[start : start + degree] for start in range(0, len(padded), degree)]


def message(fields: Sequence[Field], vector: np.ndarray, modulus: int, message_bits: int) -> list[int]:
    """sum over fields of field * round(q 2^shift / 2^bits), a number for each entry."""
    scales = [((modulus << field.shift + 1) + (1 << message_bits)) >> message_bits + 1 for field in fields]
    return [inner([int(x) for x in entry], scales) for entry in vector.T]


def query(
    public: Sequence[Sequence[int]], secret: Sequence[int], errors: Sequence[int], numbers: Sequence[int], modulus: int
) -> list[list[int]]:
    """b_0, b_1, ...: `errors` begin with those of b_0."""
    degree = len(secret)
    plain = [[0] * degree, *blocks_of(numbers, degree)]
    return [
        [x % modulus for x in add(multiply(mirrored(a), secret, modulus), e, m)]
        for a, e, m in zip(public, blocks_of(errors, degree), plain, strict=True)
    ]


def hint(
    public: Sequence[Sequence[int]], row: Sequence[int], random: Sequence[int], errors: Sequence[int], modulus: int
) -> list[int]:
    """sum over j of u_j a~_j, plus r a~_0 + e'."""
    terms = [multiply(u, a, modulus) for u, a in zip([random, *blocks_of(row, len(random))], public, strict=True)]
    return [x % modulus for x in add(errors, *terms)]


def answer(row: Sequence[int], random: Sequence[int], b: Sequence[Sequence[int]], flood: int, modulus: int) -> int:
    """<u, b> + <r, b_0> + f."""
    return (sum(map(inner, [random, *blocks_of(row, len(random))], b)) + flood) % modulus


def opened(y: int, hint: Sequence[int], secret: Sequence[int], modulus: int, message_bits: int) -> int:
    """The product modulo 2^bits, without scaling down in between."""
    return ((((y - inner(hint, secret)) % modulus << message_bits + 1) + modulus) // (2 * modulus)) % (
        1 << message_bits
    )


def number(digits: Sequence[int]) -> int:
    """Of digits of 16 bits, the lowest first."""
    return sum(int(digit) << 16 * d for d, digit in enumerate(digits))


def scaling_error(scaled: int, x: int, modulus: int, digits: int) -> float:
    """By how much `scaled` misses x q' / q modulo q'."""
    return abs(centred(scaled * modulus - (x << 16 * digits), modulus << 16 * digits)) / modulus


def bin_sums(codes: np.ndarray, offsets: np.ndarray, vectors: Sequence[np.ndarray]) -> list[list[list[int]]]:
    """Sums over each bin: fields, vectors, bins."""
    sizes = np.diff(offsets)
    return [
        [
            [x for column, size in zip(codes, sizes, strict=True) for x in exact_bincount(column, field, int(size))]
            for field in (vector[f] for vector in vectors)
        ]
        for f in range(len(vectors[0]))
    ]


def exact_bincount(codes: np.ndarray, values: np.ndarray, size: int) -> list[int]:
    """Halves of 16 bits, so that float64 adds them up exactly."""
    low, high = (np.bincount(codes, weights=half, minlength=size) for half in (values & 0xFFFF, values >> 16))
    return [int(x) + (int(y) << 16) for x, y in zip(low, high, strict=True)]


class Job:
    """Both ends of a map over one matrix."""

    def __init__(self, parameters: Parameters, fields: Sequence[Field], matrix: SecretMatrix, threads: int = 1) -> None:
        self.parameters, self.fields, self.matrix = parameters, fields, matrix
        self.client = LinearMapClient(parameters, fields, SEED, matrix.length, threads=threads)
        self.server = LinearMapServer(parameters, matrix, SEED, threads=threads)
        self.columns = np.arange(len(matrix.columns))

    def make_hint(self, at_a_time: int = 64) -> np.ndarray:
        return np.concatenate(list(self.server.hint(at_a_time)))

    def products(self, vectors: Sequence[np.ndarray], columns: np.ndarray | None = None) -> np.ndarray:
        """Products with all rows of these columns, as the client reads them: (vectors, rows) of integers."""
        columns = self.columns if columns is None else columns
        hint = self.make_hint()
        secrets, words, own = self.client.encrypt(vectors)
        answers = self.server.answer(words, own, columns)
        rows = np.flatnonzero(np.isin(self.matrix.column_of_row, columns))
        return self.integers(self.client.open(hint, rows, secrets, answers))

    @staticmethod
    def integers(opened: np.ndarray) -> np.ndarray:
        return sum(opened[..., d].astype(object) << 16 * d for d in range(opened.shape[-1]))

    def sums(self, products: np.ndarray) -> list[np.ndarray]:
        """The fields of products, each (vectors, rows)."""
        out, ends = [], [*(field.shift for field in self.fields[1:]), self.parameters.message_bits]
        for field, end in zip(self.fields, ends, strict=True):
            bits = end - field.shift
            values = (products >> field.shift) & ((1 << bits) - 1)
            if field.signed:
                values = values - ((values >> bits - 1) << bits)
            out.append(values)
        return out


def errors_of_query(drawn: Sequence[np.ndarray], vectors: int) -> np.ndarray:
    """Errors of a query, (vectors, N + n), from what was drawn for it: vector by vector, of b_0 and of each block."""
    of_each = len(drawn) // vectors
    return np.stack([np.concatenate(drawn[v * of_each : (v + 1) * of_each]) for v in range(vectors)])


def fixed_keystream(key: bytes = b"k" * 32, number: int = 0) -> Keystream:
    return Keystream(key, number)


def fingerprints() -> dict[str, str]:
    """SHA-256 of whatever the compiled steps make of a fixed job of bins."""
    rng = np.random.default_rng(3)
    length, digest = 300, {}
    codes, offsets = rng.integers(0, 5, (2, length)).astype(np.uint8), np.array([0, 5, 10])
    fields = [Field(0, 1), Field(8, 1 << 16), Field(32, 1 << 16, True)]
    vectors = [np.stack([rng.integers(0, 2, length), *rng.integers(0, 1 << 16, (2, length))]).astype(np.int32)]
    vectors[0][2] -= 1 << 15
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_map, "Keystream", fixed_keystream)
        job = Job(
            small_parameters(patch, SMALL, 3, 58, length, length << 17), fields, SecretMatrix.of_bins(codes, offsets)
        )
        made = {"hint": job.make_hint()}
        made["secrets"], made["words"], made["own"] = job.client.encrypt(vectors)
        made["answers"] = job.server.answer(made["words"], made["own"], job.columns)
        made["opened"] = job.client.open(made["hint"], np.arange(10), made["secrets"], made["answers"])
    assert [x.tolist() for x in job.sums(job.integers(made["opened"]))] == bin_sums(codes, offsets, vectors)
    for name, array in made.items():
        digest[name] = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return digest
