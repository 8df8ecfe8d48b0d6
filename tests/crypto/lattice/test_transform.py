import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from crypto.lattice.oracle import coefficient, coefficients, fingerprints, mirrored, multiply, transform
from marks import NEEDS_WIDE_VECTORS
from pace import within
from treaty.crypto.lattice.kernels import forward_transform, inverse_transform
from treaty.crypto.lattice.ring import shoup_quotients, tables
from treaty.crypto.parameters import DEGREE, SETS

PRIMES = SETS[6] + SETS[7]


def forward(p, prime):
    table, out = tables(prime, len(p)), np.array(p, np.uint32)
    forward_transform(out, 0, len(p), table.forward, table.forward_shoup, table.prime)
    return out


def backward(values, prime):
    """Undo `forward`, the factor N included."""
    table, out = tables(prime, len(values)), np.array(values, np.uint32)
    inverse_transform(out, 0, len(values), table.inverse, table.inverse_shoup, table.prime)
    return (out.astype(object) * pow(len(values), -1, prime) % prime).astype(np.uint32)


@st.composite
def prime_and_polynomials(draw, count=1):
    """One of the primes, and polynomials of degree 64 or 128: of any, of small or of extreme coefficients."""
    prime, degree = draw(st.sampled_from(PRIMES)), draw(st.sampled_from([64, 128]))
    extreme = st.sampled_from([0, 1, prime // 2, prime - 2, prime - 1])
    kinds = st.sampled_from([st.integers(0, prime - 1), st.integers(0, 2), extreme])
    return prime, *(draw(arrays(np.int64, degree, elements=draw(kinds), fill=draw(kinds))) for _ in range(count))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(prime_and_polynomials())
def test_transform_holds_the_values_at_odd_powers_of_the_root_and_is_undone(drawn):
    prime, p = drawn
    values = forward(p, prime)
    assert values.tolist() == transform(p.tolist(), prime)
    assert backward(values, prime).tolist() == p.tolist()
    assert coefficients(values.tolist(), prime) == p.tolist()


@settings(deadline=None, max_examples=60)
@given(prime_and_polynomials(2))
def test_product_of_transforms_is_the_transform_of_the_product(drawn):
    prime, a, b = drawn
    values = forward(a, prime).astype(object) * forward(b, prime) % prime
    assert backward(values, prime).tolist() == multiply(a.tolist(), b.tolist(), prime)


@pytest.mark.parametrize("prime", PRIMES)
@pytest.mark.parametrize("degree", [64, 128, 256, DEGREE])
def test_extreme_and_random_values_come_back_at_every_degree(prime, degree):
    rng = np.random.default_rng(degree)
    constants = [np.full(degree, value) for value in (0, 1, prime - 1)]
    for p in [*constants, rng.integers(0, prime, degree), rng.integers(0, 2, degree) * (prime - 1)]:
        values = forward(p, prime)
        assert values.max() < prime
        assert np.array_equal(backward(values, prime), p)
    assert not forward(constants[0], prime).any()


@pytest.mark.parametrize("prime", PRIMES)
def test_coefficients_of_a_product_are_right_at_the_full_degree(prime):
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, prime, (2, DEGREE))
    product = backward(forward(a, prime).astype(object) * forward(b, prime) % prime, prime)
    for k in (0, 1, 4095, DEGREE - 1):
        assert product[k] == coefficient(a.tolist(), b.tolist(), k) % prime


@pytest.mark.parametrize("degree", [64, 128, DEGREE])
def test_transform_of_the_mirrored_polynomial_is_read_backwards(degree):
    for prime in PRIMES:
        p = np.random.default_rng(degree).integers(0, prime, degree)
        assert np.array_equal(forward(np.array(mirrored(p.tolist())) % prime, prime), forward(p, prime)[::-1])


@pytest.mark.parametrize("degree", [64, DEGREE])
def test_factors_are_powers_of_a_primitive_root(degree):
    for prime in PRIMES:
        table = tables(prime, degree)
        (root,) = {int(forward(np.eye(1, degree, 1)[0], prime)[0])}  # the value of X at the first point
        assert pow(root, degree, prime) == prime - 1
        assert table.forward[1] == pow(root, degree // 2, prime)
        assert table.inverse[1] == pow(root, -(degree // 2), prime)


def test_part_of_an_array_is_transformed_and_the_rest_left_alone():
    prime, degree = PRIMES[0], 64
    p = np.random.default_rng(2).integers(0, prime, 3 * degree).astype(np.uint32)
    table, out = tables(prime, degree), p.copy()
    forward_transform(out, degree, degree, table.forward, table.forward_shoup, table.prime)
    assert np.array_equal(out[degree : 2 * degree], forward(p[degree : 2 * degree], prime))
    assert np.array_equal(np.delete(out, slice(degree, 2 * degree)), np.delete(p, slice(degree, 2 * degree)))


@settings(deadline=None)
@given(st.sampled_from(PRIMES).flatmap(lambda p: st.tuples(st.just(p), st.integers(0, p - 1))))
def test_shoup_quotient_is_the_floor(drawn):
    prime, value = drawn
    assert shoup_quotients(np.array([value, prime - 1], np.uint32), prime).tolist() == [
        (value << 32) // prime,
        ((prime - 1) << 32) // prime,
    ]


@NEEDS_WIDE_VECTORS
@pytest.mark.slow
def test_builds_with_and_without_vector_instructions_agree_bit_for_bit(tmp_path):
    script = (
        "import json; from crypto.lattice.oracle import fingerprints; from treaty.crypto.lattice import kernels;"
        "found = fingerprints(); code = ''.join(kernels.forward_transform.inspect_asm().values());"
        "print(json.dumps([found, 'ymm' in code or 'zmm' in code]))"
    )
    tests = Path(__file__).parents[2]
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    environment = {**os.environ, **plain, "PYTHONPATH": os.pathsep.join([str(tests), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=within(200),
    )
    assert done.returncode == 0, done.stderr
    found, has_wide_vectors = json.loads(done.stdout)
    assert not has_wide_vectors
    assert found == fingerprints()


@pytest.mark.parametrize(
    ("degree", "digest"),
    [
        (128, "44cfec1bf265d9c287a54433e35bd3f9ee7adc2952febafcc2e069213b2d44ce"),
        (8192, "5cfec2f65a0008fdc4c2b7e15032d95bbcba24f6dbb9072edba0a15996be78d3"),
    ],
)
def test_the_transform_of_a_known_polynomial_is_known(degree, digest):
    """Kept hints and the words on the wire hang on it: of k^2 * 12345, modulo each prime in turn."""
    said = hashlib.sha256()
    for prime in PRIMES:
        polynomial = [k * k * 12345 % prime for k in range(degree)]
        said.update(forward(polynomial, prime).astype("<u4").tobytes())
    assert said.hexdigest() == digest


def test_the_first_values_of_a_known_polynomial_are_those_at_odd_powers_of_the_root():
    prime, degree = PRIMES[0], 128
    base = next(x for x in range(2, prime) if pow(x, (prime - 1) // 2, prime) == prime - 1)
    root = pow(base, (prime - 1) // (2 * degree), prime)
    polynomial = [k * k * 12345 % prime for k in range(degree)]
    places = [int(format(k, "07b")[::-1], 2) for k in range(4)]
    found = [sum(c * pow(root, (2 * e + 1) * k, prime) for k, c in enumerate(polynomial)) % prime for e in places]
    assert found == forward(polynomial, prime)[:4].tolist() == [1323220990, 798264688, 1993139515, 1243523180]
