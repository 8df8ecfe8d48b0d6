"""Security parameters of the ciphers, each with its source, and the choice of a set for the lattice map.

Nothing else in the package sets a security parameter.

*Lattice map.* Ring R_q = Z_q[X] / (X^N + 1), q a product of primes below 2^31 that are 1 modulo 2 N, ternary secrets,
centred binomial errors of deviation sqrt(21 / 2) = 3.24. The sets keep 128 bits against classical attacks by the
default model of the lattice-estimator (`benchmarks/results/lattice_security.txt` has its output, and that of other
models). By its model of quantum attacks the sets of five and six primes keep 128 bits, too, that of seven 118. Smaller
moduli of as many primes are sent in fewer bits and are safer: the same errors are larger in them. Moduli of twice the
degree are kept below what attacks on them need larger blocks for than on the set of six primes, in lattices twice as
large. A set is fitted to the server's secret matrix (`SecretMatrix`) and to the numbers in a vector (`Field`).

References: NIST SP 800-57 part 1 rev. 5, table 2 (strength of factoring moduli). Cheng et al., SecureBoost, arXiv
1901.08755 (Paillier with 512 bits, which only tests and reproductions may ask for). Coron, Naccache, Paillier,
Accelerating Okamoto-Uchiyama Public-Key Cryptosystem, Electronics Letters 35, 1999. Albrecht, Player, Scott, On the
Concrete Hardness of Learning with Errors, J. Mathematical Cryptology 2015.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray

from treaty.errors import CryptoError
from treaty.machine.arrays import Codes, Int32s, Integers

KEY_BITS = (2048, 3072, 4096)  # accepted sizes of n; 2048 is 112-bit strength; others need `insecure_test_key_bits`
OU_DEFAULT_KEY_BITS = 3072  # size of n = p^2 q: 128-bit strength (SP 800-57)
PAILLIER_DEFAULT_KEY_BITS = 3072  # size of n = p q: 128-bit strength (SP 800-57)

# u | p - 1 and v | q - 1: finding a discrete logarithm or the order takes 2^128 steps (rho)
OU_SUBGROUP_PRIME_BITS = 256
# test keys with primes below 512 bits: u and v take a fourth of the primes' bits
OU_INSECURE_SUBGROUP_SHARE = 4

# p - 1 = 2 u k with primes u and k, k of this size: a random square generates all squares but for 2^-63
PAILLIER_SMALL_PRIME_BITS = 64
# test keys with primes below 128 bits: k takes half of the prime's bits, so that some k always gives a prime
PAILLIER_INSECURE_SMALL_PRIME_SHARE = 2

# secure comparison: masks are this much longer than the numbers compared, so that N comparisons tell at most N 2^-100
COMPARISON_MASK_BITS = 100
# exponents are this much longer than the group's order: statistical distance at most 2^-80
STATISTICAL_BITS = 80
# factors that hide from a key's owner: so many random bits beyond the length of n, and so many random bases beyond two
# (`key_proofs.Randomiser`), leave a statistical distance of 2^-80, too
RANDOMISER_SPARE = 2 * STATISTICAL_BITS
# of Miller-Rabin after Baillie-PSW: error below 4^-40 even for hostile candidates (Rabin 1980)
PRIMALITY_ROUNDS = 40

SMALL_FACTOR_BOUND = 1 << 16  # a public modulus with a prime factor below this is refused
# of a key's modulus: each root proves to 2^-16 (no factor is smaller), each square root to 1/2, together to 2^-128
KEY_PROOF_ROOTS = 8
KEY_PROOF_SQUARES = 128
# so is a base whose order has no prime power beyond this: half a second at 3072 bits
SMALL_ORDER_BOUND = 1 << 16
SMALL_ORDER_INSECURE_SHARE = 16  # test keys below 256 bits: the bound has a sixteenth of the modulus's bits

# the lattice map
SECURITY_BITS = 128
ERROR_BITS = 21  # errors are the difference of the sums of so many bits each: |e| <= 21, variance 10.5

DEGREE = 8192
WIDE_DEGREE = 16384  # for messages of two nodes: its moduli hold twice the bits
LIMITS = {DEGREE: 214, WIDE_DEGREE: 341}  # degree N -> most bits of q
_LARGE = (2147352577, 2147205121, 2147074049, 2146959361, 2146713601, 2146418689)
_SMALLER = (1595539457, 1595473921, 1594982401, 1594884097, 1594687489, 1594638337, 1594408961)
# Number of primes -> those of a set: the largest below 2^31, or of seven below 2^(214 / 7), that are 1 modulo 2 N.
SETS = {5: _LARGE[:5], 6: _LARGE, 7: _SMALLER}
_WIDE_COUNTS = range(7, 12)  # of primes where N is `WIDE_DEGREE`
LEAST_PRIME = min(_SMALLER)
_LEAST_WIDTH = 24  # bits of the narrowest primes that are tried: below are too few of the form

# most that a sum may leak (total variation): 2^27 sums then stay below `LEAK_LIMIT`
LEAK_PER_SUM = 2.0**-67
# the same where primes are narrowed to send less, so that narrowing costs few of the sums allowed
LEAK_IF_NARROWED = 2.0**-72
# what all answers about a table may leak together, over all jobs, as total variation
LEAK_LIMIT = 2.0**-40
# kept below the message in a hint, of which its rounding takes at most an eighth
GUARD_BITS = 16
DIGIT_BITS = 16
Digits = NDArray[np.uint16]  # of a number: so many bits each, the lowest first
_MASKED_COUNTS = range(3, 8)  # of primes where answers are masked, which takes smaller moduli than the flood


_DERIVED = ("modulus", "widths", "digits", "below", "rounding", "noise", "noise_bits", "flood_bits")


@dataclass(frozen=True, slots=True)
class Parameters:
    """One set, fitted to a job; CryptoError if it has less than 128 bits of security or unfit primes."""

    degree: int  # N
    primes: tuple[int, ...]  # their product is q
    message_bits: int  # sums are integers modulo 2^message_bits
    weight: int  # largest 1-norm of a row of the secret matrix (of bins: the number of rows of the table)
    slack: int  # bound of a sum's error from rounding: of scales, half the sum of its fields' bounds; or of entries
    masked: bool = False  # answers are masked over the whole ring, not flooded; entries are rounded, not scales alone
    spare: int = 0  # bits by which noise is below what a guarded field takes, so that masks rarely make it carry

    # what follows from these
    modulus: int = field(init=False, repr=False, compare=False)  # q
    widths: list[int] = field(init=False, repr=False, compare=False)  # bits of a residue modulo each prime
    digits: int = field(init=False, repr=False, compare=False)  # D of 16 bits that hints and answers are scaled to
    below: int = field(init=False, repr=False, compare=False)  # bits of q' under a message, where flood and noise are
    rounding: int = field(init=False, repr=False, compare=False)  # bound of what scaling down adds, in q'
    noise: int = field(init=False, repr=False, compare=False)  # bound of what is added to a sum before flooding, mod q
    noise_bits: int = field(init=False, repr=False, compare=False)  # under a mask noise is below 2^this, in q'
    flood_bits: int = field(init=False, repr=False, compare=False)  # k of the flood; below 1: none fits

    def __post_init__(self) -> None:
        modulus = math.prod(self.primes)
        bits = LIMITS.get(self.degree)
        if bits is None or modulus.bit_length() > bits:
            raise CryptoError(
                f"parameters below {SECURITY_BITS} bits: N = {self.degree} takes a modulus of at most {bits or 0} bits,"
                f" got {modulus.bit_length()} - in the lattice map"
            )
        for prime in self.primes:
            if prime >= 1 << 31 or prime % (2 * self.degree) != 1 or not gmpy2.is_prime(prime):
                raise CryptoError(f"{prime} is not a prime below 2^31 that is 1 modulo 2 N - in the lattice map")
        if len(set(self.primes)) != len(self.primes):
            raise CryptoError("a prime is repeated - in the lattice map")
        digits = -(-(self.message_bits + GUARD_BITS + self.spare) // DIGIT_BITS)
        below = DIGIT_BITS * digits - self.message_bits
        # digits of the hint and the answer are off by less than 0.51 each, N + 1 of them
        rounding = 51 * (self.degree + 1) // 100 + 1
        # <u, e> + <r, e_0> - <e', s>, and the encoding
        noise = ERROR_BITS * (self.weight + 2 * self.degree) + self.slack
        # The flood is uniform on [-2^(k-1), 2^(k-1)), the widest that never spoils a sum: scaled to q', flood, noise
        # and `rounding` must stay below half the distance of two messages.
        room = (1 << below) // 2 - rounding
        flood_bits = max(0, (room * modulus >> (DIGIT_BITS * digits)) - noise).bit_length()
        noise_bits = below - 2 - self.spare  # `spare` and two fewer than its field has
        widths = [prime.bit_length() for prime in self.primes]
        derived = (modulus, widths, digits, below, rounding, noise, noise_bits, flood_bits)
        for name, value in zip(_DERIVED, derived, strict=True):
            object.__setattr__(self, name, value)

    def leak(self, squares: float) -> float:
        """Bound what one sum reveals beyond itself, as total variation: E |shift| / width of the flood.

        `squares` is the square of the 2-norm of the secret matrix's row (of a bin: its number of rows).
        """
        # rounded scales are not in the shift: what they add is a function of the sum's fields, which are opened
        shift = math.sqrt(ERROR_BITS / 2 * (squares + 4 * self.degree / 3))
        return shift / 2.0**self.flood_bits


@cache
def narrow_primes(bits: int, count: int, degree: int = DEGREE) -> tuple[int, ...]:
    """Return the largest primes of the form, of widths as equal as possible, with a product of `bits` bits in all."""

    def largest(width: int, count: int) -> Iterator[int]:
        candidates = range(((1 << width) - 2) // (2 * degree) * 2 * degree + 1, 1 << width - 1, -2 * degree)
        return islice(filter(gmpy2.is_prime, candidates), count)

    width = -(-bits // count)
    narrower = count * width - bits  # primes of one bit less
    return (*largest(width, count - narrower), *largest(width - 1, narrower))


@cache
def choose(
    message_bits: int, weight: int, slack: int, squares: int, entries: int = LEAST_PRIME - 1, degree: int = DEGREE
) -> Parameters:
    """Take the fewest primes that keep a sum's leak below `LEAK_PER_SUM`; CryptoError if no set does.

    `squares` is the largest square of a row's 2-norm, `entries` the largest size of a number in a vector or the matrix,
    which primes exceed; the others are as in `Parameters`.
    """
    wide = {count: narrow_primes(31 * count, count, degree) for count in _WIDE_COUNTS if degree != DEGREE}
    for count, widest in (wide or SETS).items():
        found = Parameters(degree, widest, message_bits, weight, slack)
        if found.flood_bits <= 1 or found.leak(squares) > LEAK_PER_SUM:
            continue
        # the smallest modulus of as many primes that keeps the leak small is sent in fewest bits
        for bits in range(_LEAST_WIDTH * count, found.modulus.bit_length()):
            primes = narrow_primes(bits, count, degree)
            narrow = Parameters(degree, primes, message_bits, weight, slack)
            if min(primes) > entries and narrow.flood_bits > 1 and narrow.leak(squares) <= LEAK_IF_NARROWED:
                return narrow
        return found
    raise _too_large(message_bits, weight, 'fractional_bits, or take encryption="ou"')


@cache
def choose_masked(message_bits: int, weight: int, entries: int, spare: int = 0) -> Parameters:
    """Take the smallest modulus, of the fewest primes, for answers under masks of the whole ring; CryptoError if none.

    Noise is below 2^-`spare` of a quarter of the field below the message. `entries` bounds numbers of the matrix and
    the sum of an entry's fields, which primes exceed: so each entry is rounded by less than 1.
    """
    for count in _MASKED_COUNTS:
        for bits in range(_LEAST_WIDTH * count, min(31 * count, LIMITS[DEGREE]) + 1):
            primes = narrow_primes(bits, count)
            found = Parameters(DEGREE, primes, message_bits, weight, weight, masked=True, spare=spare)
            scaled = -(-(found.noise << DIGIT_BITS * found.digits) // found.modulus) + found.rounding
            if scaled < 1 << found.noise_bits and len(primes) == count and min(primes) > entries:
                return found
    raise _too_large(message_bits, weight, "fractional_bits or weights")


def _too_large(message_bits: int, weight: int, remedy: str) -> CryptoError:
    return CryptoError(
        f"sums of {message_bits} bits over rows of weight {weight} are too large for the lattice map - lower {remedy}"
    )


@dataclass(frozen=True, slots=True)
class Field:
    """A part of a message: entries of vectors are sums of fields of size at most `bound`, shifted by `shift` bits.

    Only the topmost field of a `node` may be signed. An entry is of one node; its fields of the others are 0.
    """

    shift: int
    bound: int
    signed: bool = False
    node: int = 0


def check_fields(fields: Sequence[Field], parameters: Parameters) -> None:
    """Raise CryptoError for fields too wide for the arithmetic of `kernels.encrypt_block`."""
    top, sizes, bounds = 1 << 31, Counter[int](), Counter[int]()
    for one in fields:
        sizes[one.node] += top if one.signed else one.bound
        bounds[one.node] += one.bound
    if max(sizes.values()) > 2 * top:
        raise CryptoError("vectors of such large numbers do not fit the lattice map - lower fractional_bits or weights")
    largest = max(bounds.values()) if parameters.masked else max(one.bound for one in fields)
    if largest >= min(parameters.primes):
        raise CryptoError("expected numbers below the primes in a vector - in the lattice map; lower weights")


class SecretMatrix:
    """The server's matrix: indicators of the codes of columns, or columns themselves.

    Row s is the indicator of code_of_row[s] in columns[column_of_row[s]], or that column where the code is -1.
    `columns` is uint8 or int32 (columns, n) in C order; the others are int64 (rows,).
    """

    def __init__(self, columns: NDArray[Any], column_of_row: Integers, code_of_row: Integers) -> None:
        self.columns, self.column_of_row, self.code_of_row = columns, column_of_row, code_of_row
        self.rows, self.length = len(column_of_row), int(columns.shape[1])  # the latter is n
        self.is_bins = bool((code_of_row >= 0).all())  # every row is an indicator

    @classmethod
    def of_bins(cls, codes: Codes, offsets: Integers) -> SecretMatrix:
        """Take the bins of all features as rows: bin c of feature f, of codes (features, n), is row offsets[f] + c.

        CryptoError if a feature has no bins, or a code is not among them.
        """
        sizes = np.diff(offsets)
        if len(sizes) != len(codes) or (sizes < 1).any() or (codes.max(axis=1, initial=0) >= sizes).any():
            raise CryptoError("expected codes within the bins of their feature - in the matrix of the lattice map")
        feature = np.repeat(np.arange(len(sizes)), sizes)
        return cls(codes, feature, np.arange(int(offsets[-1])) - offsets[feature])

    @classmethod
    def of_integers(cls, values: Int32s) -> SecretMatrix:
        """Take these rows, int32 (rows, n); CryptoError if an entry is not below the smallest prime in size."""
        if len(values) and np.abs(values.astype(np.int64)).max(initial=0) >= LEAST_PRIME:
            raise CryptoError(f"expected entries below {LEAST_PRIME} in size - in the matrix of the lattice map")
        rows = np.arange(len(values))
        return cls(np.ascontiguousarray(values), rows, np.full(len(values), -1))
