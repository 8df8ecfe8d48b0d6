import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.crypto.additive.montgomery import Modulus, PrimeSquare, Residues
from treaty.crypto.payload import from_words, to_words
from treaty.errors import CryptoError

P, Q = (1 << 89) - 1, (1 << 127) - 1


def plain(modulus, rows):
    """Working Montgomery forms as ordinary integers."""
    return from_words(modulus.pack(modulus.multiply(rows, modulus.working([1]))))


@pytest.mark.parametrize("divisors", [(P, Q), (Q, P), (P * P, Q), (Q, P * P), (P * P, Q * Q), (3, Q * Q), (Q * Q, 3)])
@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 1 << 700), min_size=1, max_size=4))
def test_parts_of_a_number_are_reduced_and_joined(divisors, numbers):
    whole = Modulus(divisors[0] * divisors[1])
    numbers = [x % whole.value for x in numbers]
    packed = whole.pack(whole.montgomery(numbers))
    first, second = (Residues(whole, d) for d in divisors)
    for part, divisor in ((first, divisors[0]), (second, divisors[1])):
        assert plain(part.modulus, part.reduce(packed)) == [x % divisor for x in numbers]
    joined = whole.add(first.lift(first.reduce(packed)), second.lift(second.reduce(packed)))
    assert plain(whole, joined) == numbers


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, P - 1), min_size=1, max_size=4), st.integers(0, 2**80 - 1), st.integers(1, 2**60))
def test_messages_come_back_from_the_square_of_a_prime(messages, exponent, factor):
    whole, base = Modulus(P * P * Q), pow(7, P, P * P)  # 7^P has an order that divides P - 1
    square = PrimeSquare(whole, P, factor=factor, base=base, order_bits=80, exponent=P - 1, window=5)
    lifted = square.encrypt(to_words(messages, 2), to_words([exponent] * len(messages), 2))
    expected = [(1 + factor * m * P) * pow(base, exponent, P * P) % (P * P) for m in messages]
    assert [x % (P * P) for x in plain(whole, lifted)] == expected
    assert [x % Q for x in plain(whole, lifted)] == [0] * len(messages)
    others = whole.add(lifted, Residues(whole, Q).lift(Modulus(Q).montgomery([5])))  # any number modulo q
    assert square.decrypt(whole.pack(others)) == messages


def test_multiple_of_the_prime_is_no_ciphertext():
    whole = Modulus(P * P * Q)
    square = PrimeSquare(whole, P, factor=1, base=pow(7, P, P * P), order_bits=8, exponent=P - 1, window=4)
    with pytest.raises(CryptoError, match="at decryption"):
        square.decrypt(whole.pack(whole.montgomery([4 * P])))
