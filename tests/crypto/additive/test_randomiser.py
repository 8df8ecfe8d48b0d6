import math
from types import SimpleNamespace

import numpy as np
import pytest

from crypto.asking import answered, asked, begun
from treaty.crypto.additive.key_proofs import Randomiser, _table_size
from treaty.crypto.additive.montgomery import Modulus
from treaty.crypto.payload import from_words, to_words
from treaty.crypto.sums.encrypted_sums import SumsBounds, make_client, make_server


@pytest.fixture
def drawn(monkeypatch):
    """Every exponent drawn for a factor."""
    seen = []
    factors = Randomiser.factors
    monkeypatch.setattr(Randomiser, "factors", lambda self, e: seen.extend(from_words(e)) or factors(self, e))
    return seen


@pytest.mark.parametrize(("n", "squared"), [(19 * 19 * 31, False), (11 * 17, True)], ids=["p^2 q", "p q, modulo n^2"])
def test_factors_are_uniform_among_all_nth_powers(n, squared):
    """And so is a product of one of them with any other, whichever it is."""
    size = n * n if squared else n
    randomiser = Randomiser(SimpleNamespace(n=n, modulus=Modulus(size)), 1)
    powers = sorted({pow(x, n, size) for x in range(n) if math.gcd(x, n) == 1})
    assert len(powers) == (10 * 16 if squared else 18 * 30)
    modulus = randomiser._powers._modulus
    factors = modulus.multiply(randomiser.factors(randomiser.exponents(40_000)), modulus.working([1]))
    found, counts = np.unique(modulus.pack(factors), return_counts=True)
    assert found.tolist() == powers
    expected, freedom = counts.mean(), len(powers) - 1
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 6 * np.sqrt(2 * freedom)  # alarms: below 1e-6


@pytest.mark.parametrize("bits", [512, 2048, 3072, 4096])
def test_bases_and_exponents_are_as_many_as_the_bound_of_the_text_needs(bits):
    windows, bases = _table_size(bits)
    w = 6 * windows
    assert w * bases >= bits + 160
    assert bases >= 162
    d, tail = np.arange(3, 1 << min(w, 12), dtype=float), 3 * w + bases * np.log2(1.25 / 4096) if w > 12 else -np.inf
    small = 2 * np.log2(d) + bases * (np.log2(1 + d * d / 4 ** (w + 1)) - np.log2(d))
    total = np.logaddexp2.reduce([bits - w * bases, np.log2(3) - bases, *small, tail])
    assert total / 2 - 1 < -80


def as_numbers(public, factors):
    return from_words(public.modulus.pack(factors.copy()))


@pytest.mark.parametrize("cipher", ["ou", "paillier"])
def test_answers_are_multiplied_by_encryptions_of_zero_of_which_no_two_share_an_exponent(drawn, cipher):
    """Over trees and levels; and every exponent is of full length."""
    rng = np.random.default_rng(8)
    codes, offsets = rng.integers(0, 9, (200, 3)).astype(np.uint8), np.array([0, 10, 20, 30], np.int32)
    size = {"threads": 1, "insecure_test_key_bits": 256}
    client = make_client(cipher, SumsBounds(200, 1 << 10, 1 << 8), **size)
    server = make_server(cipher, client.setup(), codes, offsets, **size)
    client.accept_hint("peer", next(server.hint()), offsets)
    used, of_server = [], server._randomiser
    make = of_server.factors
    of_server.factors = lambda exponents: (used.append(make(exponents)), used[-1])[1]
    made = 0
    for _ in range(3):
        payload = begun(client, rng.integers(-9, 9, 200), rng.integers(0, 9, 200))
        server.begin_tree(payload, np.arange(200, dtype=np.int32))
        for nodes in (1, 2):
            starts = np.linspace(0, 200, nodes + 1).astype(np.int32)
            made += len(answered(server, asked(client, np.arange(200, dtype=np.int32), starts))[1])
        server.end_tree()
    public = client._key.public
    factors = [x for batch in used for x in as_numbers(public, batch)]
    assert len(set(factors)) == len(factors) == made
    assert set(from_words(client._key.decrypt(to_words(factors, public.modulus.words), 1))) == {0}
    assert len(set(drawn)) == len(drawn) >= made
    bits = of_server.exponent_bits
    assert bits >= 256 + 160
    assert bits - 12 <= max(drawn).bit_length() <= bits
