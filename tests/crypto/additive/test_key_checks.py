import gmpy2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.crypto.additive.key_proofs import check_order
from treaty.errors import CryptoError

SMALL = [2, 3**10, 13**4, 251, 65521]  # the largest prime powers below 2^16, some of them
LARGE = 65537
P = next(
    p for k in range(2**200, 2**201) if gmpy2.is_prime(p := 2 * 65536 * 3**11 * 13**5 * 251 * 65521 * LARGE * k + 1)
)
Q = (1 << 127) - 1


def element(order, seed):
    """A number of this order modulo P, of no small order modulo Q."""
    primes = [x for x in (2, 3, 13, 251, 65521, LARGE) if order % x == 0]
    while True:
        seed += 1
        x = pow(seed, (P - 1) // order, P)
        if all(pow(x, order // prime, P) != 1 for prime in primes):
            return x + P * ((pow(3, seed, Q) - x) * pow(P, -1, Q) % Q)


@settings(deadline=None, max_examples=20)
@given(st.sets(st.sampled_from(SMALL), min_size=1), st.integers(2, 2**40))
def test_base_whose_order_has_small_prime_powers_alone_is_refused(powers, seed):
    order = 1
    for power in powers:
        order *= power
    with pytest.raises(CryptoError, match="expected h of an order with large factors"):
        check_order("h", element(order, seed), P * Q)


@pytest.mark.parametrize("order", [LARGE, 2 * 65536, 3**11, 13**5, 251 * LARGE])
def test_base_whose_order_has_a_prime_power_beyond_the_bound_passes(order):
    check_order("h", element(order, 5), P * Q)


def test_order_is_looked_at_modulo_every_factor():
    for x, y in ((1, 3), (3, 1), (P - 1, 3), (3, Q - 1)):
        with pytest.raises(CryptoError, match="tiny"):
            check_order("h", x + P * ((y - x) * pow(P, -1, Q) % Q), P * Q)
    check_order("h", 3, P * Q)
