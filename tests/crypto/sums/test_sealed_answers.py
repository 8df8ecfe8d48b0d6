"""What an active party opens where sums are sealed: uniform over the whole ring, whatever vectors it sends."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom, chi2

from crypto.asking import answered, asked, begun
from treaty.crypto.lattice.ring import pack, unpack
from treaty.crypto.parameters import DIGIT_BITS
from treaty.crypto.payload import SumsBounds
from treaty.crypto.sums.encrypted_sums import make_client, make_server
from treaty.crypto.sums.lattice_sums import sealed_places, sums_parameters

ROWS, COLUMNS, BINS, VECTORS, TARGET = 200, 72, 3, 11, 77
BOUNDS = SumsBounds(ROWS, 1 << 16, 1 << 14)
FALSE_ALARM = 1e-6


class Attacker:
    """An active party that knows its own vectors, hints and secrets, and reads answers digit by digit."""

    def __init__(self) -> None:
        rng = np.random.default_rng(37)
        self.codes = rng.integers(0, BINS, (ROWS, COLUMNS)).astype(np.uint8)
        self.offsets = np.arange(0, COLUMNS * BINS + 1, BINS, dtype=np.int32)
        self.client = make_client("lattice", BOUNDS, threads=1, sealed=True)
        names = [f"c{f}" for f in range(COLUMNS)]
        self.server = make_server(
            "lattice", self.client.setup(), self.codes, self.offsets, threads=1, names=names, sealed=True
        )
        for end in (self.client, self.server):
            end.settle(bytes(range(32)))
        for piece in self.server.hint():
            self.client.accept_hint("bank", piece, self.offsets)
        self.grad, self.hess = rng.integers(-1 << 16, (1 << 16) + 1, ROWS), rng.integers(0, (1 << 14) + 1, ROWS)
        start = begun(self.client, self.grad, self.hess)
        self.server.begin_tree(start, None, None)
        self.parameters = sums_parameters(BOUNDS, sealed=True)

    def ask(self, vectors: int, *, added: int = 0) -> list[np.ndarray]:
        """Ask for so many nodes without rows; add a number, modulo q, to the target's entries."""
        words, own = asked(self.client, np.empty(0, np.int32), np.zeros(vectors + 1, np.int32))
        residues = unpack(self.parameters, words, ROWS).astype(np.int64)
        primes = np.array(self.parameters.primes, np.int64)
        residues[:, :, TARGET] += [added % prime for prime in self.parameters.primes]
        self.secrets = self.client._asked["bank"].pop()[0].astype(np.int64)
        return [pack(self.parameters, (residues % primes[:, None]).astype(np.uint32)), own]

    def open(self, query: list[np.ndarray]) -> np.ndarray:
        """Return q' digits, (vectors, slots, D), of what the answer is but for what the hint hides it with."""
        hidden = np.einsum("sdn,vn->vsd", self.client._hints["bank"].astype(np.int64), self.secrets)
        left = answered(self.server, query)[1].astype(np.int64) - hidden
        for d in range(left.shape[-1] - 1):
            left[..., d + 1] += left[..., d] >> DIGIT_BITS
        return left & (1 << DIGIT_BITS) - 1


def below_messages(digits: np.ndarray, parameters) -> np.ndarray:
    """How far what is below a message is from the next messages: 1 where it is half of the distance between two."""
    bits = DIGIT_BITS * parameters.digits - parameters.message_bits
    number = sum(digits[..., d].astype(object) << DIGIT_BITS * d for d in range(-(-bits // DIGIT_BITS)))
    part = ((number & (1 << bits) - 1) / (1 << bits)).astype(float)
    return np.minimum(part, 1 - part) * 2


def uniform(digits: np.ndarray) -> bool:
    """Whether every digit's low byte and its high byte are (chi-squared)."""
    for digit in np.moveaxis(digits.reshape(-1, digits.shape[-1]), -1, 0):
        for values in (digit & 255, digit >> 8):
            counts, expected = np.bincount(values, minlength=256), len(values) / 256
            if ((counts - expected) ** 2).sum() / expected > chi2.isf(FALSE_ALARM, 255):
                return False
    return True


@pytest.fixture(scope="module")
def attacker() -> Attacker:
    return Attacker()


def test_a_crafted_vector_reads_no_bin(attacker):
    """Half a message's distance at a row's entry shows in all its bins, where only a flood is below the message."""
    half = attacker.parameters.modulus >> attacker.parameters.message_bits + 1
    opened = attacker.open(attacker.ask(VECTORS, added=half))
    distances = below_messages(opened, attacker.parameters).sum(axis=0)
    guessed = distances.reshape(COLUMNS, BINS).argmax(axis=1)
    assert np.count_nonzero(guessed == attacker.codes[TARGET]) <= binom.isf(FALSE_ALARM, COLUMNS, 1 / BINS)
    assert uniform(attacker.open(attacker.ask(80, added=half)))


def test_honest_openings_are_uniform_in_every_digit_and_alike_in_no_two_answers(attacker):
    """Of nodes without rows, so that openings are masks but for noise: each bin, vector and answer has its own."""
    query = attacker.ask(80)
    first, again = attacker.open(query), attacker.open(query)
    for digits in (first, first - again, first[1:] - first[:-1], first[:, 1:] - first[:, :-1]):
        assert uniform(digits & (1 << DIGIT_BITS) - 1)


def test_both_parties_shares_are_uniform_and_add_up_to_sums(attacker):
    rows = np.random.default_rng(1).permutation(ROWS).astype(np.int32)[:150]
    query = asked(attacker.client, rows, np.array([0, 50, 150], np.int32))
    mine = attacker.client.open_shares("bank", answered(attacker.server, query))
    theirs, places = attacker.server.shares, sealed_places(BOUNDS)
    whole = [sum(shares[..., -1 - k].astype(object) << places[k] for k in range(4)) for shares in (mine, theirs)]
    total = (whole[0] + whole[1]) % (1 << places[-1])
    noise = total & (1 << places[1]) - 1
    assert noise.max() < 1 << places[1] - 1  # guarded
    added = (1 << places[1]) + (1 << places[2]) + (1 << places[-1] - 2)
    for node, part in enumerate((rows[:50], rows[50:])):
        for slot in range(0, COLUMNS * BINS, 7):
            of = part[attacker.codes[part, slot // BINS] == slot % BINS]
            sums = len(of), int(attacker.hess[of].sum()), int(attacker.grad[of].sum())
            expected = added + sum(number << place for number, place in zip(sums, places[1:4], strict=True))
            assert total[node, slot] - noise[node, slot] == expected


@pytest.mark.parametrize(("rows", "bits"), [(20_000, 118), (10**6, 125), (10**9, 165)])
def test_masked_sums_are_sent_in_fewer_bits(rows, bits):
    """Under the flood they took 162, 179 and 217 bits a row."""
    assert sum(sums_parameters(SumsBounds(rows, 1 << 16, 1 << 14), sealed=True).widths) <= bits
