from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from crypto.lattice import oracle
from crypto.lattice.oracle import FALSE_ALARM, SEED, SMALL, Job, bin_sums, fixed_keystream, small_parameters
from treaty.crypto.keystream import Keystream
from treaty.crypto.lattice import linear_map, ring
from treaty.crypto.lattice.kernels import inverse_transform
from treaty.crypto.lattice.linear_map import EncryptedQuery, LinearMapClient, LinearMapServer
from treaty.crypto.lattice.ring import public_ring_elements, tables
from treaty.crypto.parameters import DEGREE, LEAST_PRIME, SETS, Field, SecretMatrix, choose, choose_masked
from treaty.errors import CryptoError

GRAD, HESS = 1 << 16, 1 << 14
BY_SET = pytest.mark.parametrize(("message_bits", "primes"), [(70, 5), (100, 6), (130, 7)], ids=["5", "6", "7"])


def job_of_bins(codes, sizes, *, message_bits=0, grad=GRAD, hess=HESS, threads=1):
    """Counts, hessians and gradients over the bins of each feature, under the smallest set for them."""
    rows = codes.shape[1]
    shifts = np.cumsum([0, rows.bit_length(), (rows * hess).bit_length(), (2 * rows * grad + 1).bit_length()]).tolist()
    fields = [Field(shifts[0], 1), Field(shifts[1], hess), Field(shifts[2], grad, True)]
    parameters = choose(max(shifts[3], message_bits), rows, rows * (grad + hess + 1) // 2 + 1, rows)
    return Job(parameters, fields, SecretMatrix.of_bins(codes, np.cumsum([0, *sizes])), threads)


def random_vectors(rng, rows, count, *, grad=GRAD, hess=HESS, extreme=False):
    def entries(low, high):
        return rng.choice([low, high], rows) if extreme else rng.integers(low, high + 1, rows)

    return [np.stack([entries(0, 1), entries(0, hess), entries(-grad, grad)]).astype(np.int32) for _ in range(count)]


def assert_sums_exact(job, codes, sizes, vectors, features=None):
    features = np.arange(len(codes)) if features is None else features
    found = job.sums(job.products(vectors, features))
    offsets = np.cumsum([0, *(sizes[f] for f in features)])
    assert [x.tolist() for x in found] == bin_sums(codes[features], offsets, vectors)


def small_job(patch, *, primes=3, message_bits=58, of_integers=False):
    """Three blocks, the last one short: little enough for the naive model."""
    rng, rows = np.random.default_rng(8), 2 * SMALL + 40
    if of_integers:
        values, bound = rng.integers(-100, 101, (4, rows)).astype(np.int32), 1 << 8
        matrix, fields = SecretMatrix.of_integers(values), [Field(0, bound, True)]
        vectors = [rng.integers(-bound, bound + 1, (1, rows)).astype(np.int32) for _ in range(2)]
        weight = int(np.abs(values).sum(axis=1).max())
    else:
        codes, bound = rng.integers(0, 3, (2, rows)).astype(np.uint8), GRAD + HESS + 1
        matrix, weight = SecretMatrix.of_bins(codes, np.array([0, 3, 6])), rows
        fields = [Field(0, 1), Field(9, HESS), Field(9 + 23, GRAD, True)]
        vectors = random_vectors(rng, rows, 2)
    parameters = small_parameters(patch, SMALL, primes, message_bits, weight, weight * bound // 2 + 1)
    return Job(parameters, fields, matrix), vectors


def matrix_rows(matrix):
    """Rows of the matrix, lists of integers."""
    return [
        (column == code if code >= 0 else column).astype(int).tolist()
        for column, code in zip(matrix.columns[matrix.column_of_row], matrix.code_of_row, strict=True)
    ]


def record(patch, name):
    """Have both ends of the map write down, in one list, what one of their samplers returns."""
    real, drawn = getattr(ring, name), []

    def draw(*args):
        drawn.append(real(*args))
        return drawn[-1]

    patch.setattr(ring, name, draw)
    return drawn


# ---------------------------------------------------------------- products are exact


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(st.data())
def test_bin_sums_are_exact(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    rows = data.draw(st.one_of(st.integers(1, 40), st.integers(1, 3000)))
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    skew = data.draw(st.sampled_from([0.0, 1.0, 8.0]))  # 8: nearly all rows in the first bin, the last ones empty
    codes = np.stack([(rng.random(rows) ** (1 + skew) * size).astype(np.uint8) for size in sizes])
    vectors = random_vectors(rng, rows, data.draw(st.integers(1, 3)), extreme=data.draw(st.booleans()))
    for vector in vectors:
        if data.draw(st.booleans()):
            vector[:, rng.random(rows) < 0.9] = 0
    job = job_of_bins(codes, sizes, message_bits=data.draw(st.sampled_from([0, 100, 130])))
    wanted = data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))
    assert_sums_exact(job, codes, sizes, vectors, np.array(sorted(wanted)))


@BY_SET
@pytest.mark.parametrize("rows", [1, DEGREE - 1, DEGREE, DEGREE + 1, 2 * DEGREE + 5])
def test_bin_sums_are_exact_around_full_blocks_under_every_set(rows, message_bits, primes):
    rng = np.random.default_rng(rows)
    codes, sizes = rng.integers(0, 2, (2, rows)).astype(np.uint8), [3, 2]  # the third bin is empty
    job = job_of_bins(codes, sizes, message_bits=message_bits)
    assert len(job.parameters.primes) == primes
    assert_sums_exact(job, codes, sizes, random_vectors(rng, rows, 2))


def test_fields_of_one_value_everywhere_add_up_to_their_bounds():
    rows = 3000
    codes, sizes = np.zeros((1, rows), np.uint8), [1]
    vectors = [
        np.tile(np.array([[count], [hess], [grad]], np.int32), rows)
        for count, hess, grad in [(1, HESS, GRAD), (1, HESS, -GRAD), (0, 0, 0), (1, 0, -1)]
    ]
    assert_sums_exact(job_of_bins(codes, sizes), codes, sizes, vectors)


def test_fields_as_wide_as_the_arithmetic_takes_stay_exact():
    rng, rows, top = np.random.default_rng(4), 700, SETS[6][-1] - 1
    codes, sizes = rng.integers(0, 3, (1, rows)).astype(np.uint8), [3]
    job = job_of_bins(codes, sizes, grad=top, hess=top)
    assert_sums_exact(job, codes, sizes, random_vectors(rng, rows, 2, grad=top, hess=top, extreme=True))
    assert_sums_exact(job, codes, sizes, random_vectors(rng, rows, 1, grad=top, hess=top))


@pytest.mark.slow
def test_all_256_codes_of_a_column_are_told_apart():
    codes = np.random.default_rng(0).permutation(np.arange(1024) % 256).astype(np.uint8)[np.newaxis]
    assert_sums_exact(job_of_bins(codes, [256]), codes, [256], random_vectors(np.random.default_rng(1), 1024, 1))


def test_bin_sums_of_a_million_rows_are_exact():
    rng, rows = np.random.default_rng(5), 1 << 20
    codes, sizes = rng.integers(0, 2, (2, rows)).astype(np.uint8), [2, 3]
    job = job_of_bins(codes, sizes, hess=GRAD, threads=2)
    assert len(job.parameters.primes) == 6
    assert_sums_exact(job, codes, sizes, random_vectors(rng, rows, 1, hess=GRAD))


def dense_job(values, bound):
    exact = values.astype(object)
    weight, squares = int(abs(exact).sum(axis=1).max()), int((exact**2).sum(axis=1).max())
    parameters = choose(max(1, (2 * weight * bound).bit_length()), weight, weight * bound // 2 + 1, squares)
    return Job(parameters, [Field(0, bound, True)], SecretMatrix.of_integers(values))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_products_with_integer_matrices_are_exact(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    rows, entries = data.draw(st.integers(1, 5)), data.draw(st.one_of(st.integers(1, 40), st.integers(1, 9000)))
    largest, bound = data.draw(st.sampled_from([1, 255, 1 << 20])), data.draw(st.sampled_from([1, 1 << 16, 1 << 24]))
    extreme = data.draw(st.booleans())

    def draw(size, top):
        return (rng.choice([-top, top], size) if extreme else rng.integers(-top, top + 1, size)).astype(np.int32)

    values = draw((rows, entries), largest)
    values[rng.random(values.shape) < data.draw(st.sampled_from([0, 0.95]))] = 0
    values[0, 0] = largest
    vectors = [draw((1, entries), bound) for _ in range(data.draw(st.integers(1, 3)))]
    wanted = np.array(sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1))))
    job = dense_job(values, bound)
    (found,) = job.sums(job.products(vectors, wanted))
    assert found.tolist() == [(values[wanted].astype(object) @ vector[0].astype(object)).tolist() for vector in vectors]


def test_largest_integers_of_a_matrix_stay_exact():
    largest = LEAST_PRIME - 1
    values = np.array([[largest, -largest, largest, 1], [largest] * 4, [-largest] * 4], np.int32)
    job = dense_job(values, 1000)
    vector = np.array([[1000, -1000, 999, -7]], np.int32)
    (found,) = job.sums(job.products([vector]))
    assert found.tolist() == [(values.astype(object) @ vector[0].astype(object)).tolist()]


@pytest.mark.parametrize("sign", [1, -1])
@BY_SET
def test_sums_survive_the_worst_noise_and_not_a_wider_flood(monkeypatch, message_bits, primes, sign):
    rng, rows = np.random.default_rng(7), 500
    codes, sizes = np.zeros((1, rows), np.uint8), [1]
    job = job_of_bins(codes, sizes, message_bits=message_bits)
    vectors, bits = random_vectors(rng, rows, 1, extreme=True), job.parameters.flood_bits
    expected = bin_sums(codes, np.array([0, 1]), vectors)

    def opened(flood):
        """<u, e>, <r, e_0>, -<e', s> and the flood all as far from zero as can be, on the same side."""
        with monkeypatch.context() as patch:
            residues = np.array([[flood % p for p in job.parameters.primes]], np.int64)
            patch.setattr(ring, "flood", lambda *args: residues)
            patch.setattr(ring, "errors", lambda draw, count: np.full(count, 21, np.int8))
            patch.setattr(ring, "ternary", lambda draw, count: np.full(count, 1, np.int8))
            hint = job.make_hint()
            patch.setattr(ring, "errors", lambda draw, count: np.full(count, 21 * sign, np.int8))
            patch.setattr(ring, "ternary", lambda draw, count: np.full(count, -sign, np.int8))
            secrets, words, own = job.client.encrypt(vectors)
            answers = job.server.answer(words, own, job.columns)
        return [x.tolist() for x in job.sums(job.integers(job.client.open(hint, np.arange(1), secrets, answers)))]

    largest = (1 << bits - 1) - (sign > 0)
    assert opened(sign * largest) == expected
    assert opened(sign << bits) != expected


# ---------------------------------------------------------------- answers under masks


def masked_job(codes, sizes, *, spare=0):
    """As `job_of_bins`, with answers masked over the whole ring."""
    rows = codes.shape[1]
    shifts = np.cumsum([0, rows.bit_length(), (rows * HESS).bit_length(), (2 * rows * GRAD + 1).bit_length()]).tolist()
    fields = [Field(shifts[0], 1), Field(shifts[1], HESS), Field(shifts[2], GRAD, True)]
    parameters = choose_masked(shifts[3], rows, GRAD + HESS + 1, spare)
    return Job(parameters, fields, SecretMatrix.of_bins(codes, np.cumsum([0, *sizes])))


def masked_products(job, vectors, masks):
    """Products, and the noise below them, (vectors, rows) of integers each, from answers and these masks."""
    hint, parameters = job.make_hint(), job.parameters
    secrets, words, own = job.client.encrypt(vectors)
    opened = job.client.open(hint, np.arange(len(hint)), secrets, job.server.answer(words, own, job.columns, masks))
    whole = (job.integers(opened) - job.integers(masks)) % (1 << 16 * parameters.digits)
    return whole >> parameters.below, (whole & (1 << parameters.below) - 1) - (1 << parameters.noise_bits)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_sums_under_masks_are_exact_whatever_the_mask(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    rows, sizes = data.draw(st.sampled_from([1, 30, 3000, DEGREE + 1])), [3, 2]
    codes = np.stack([(rng.random(rows) ** 3 * size).astype(np.uint8) for size in sizes])
    job = masked_job(codes, sizes, spare=data.draw(st.sampled_from([0, 7, 63])))
    vectors = random_vectors(rng, rows, 2, extreme=data.draw(st.booleans()))
    digits = data.draw(st.sampled_from([(0, 1), (0xFFFF, 0x10000), (0, 0x10000)]))
    products, noise = masked_products(job, vectors, rng.integers(*digits, (2, 5, job.parameters.digits), np.uint16))
    assert [x.tolist() for x in job.sums(products)] == bin_sums(codes, np.array([0, 3, 5]), vectors)
    assert np.abs(noise).max() < 1 << job.parameters.noise_bits


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("rows", [40, 3 * DEGREE])
def test_the_worst_noise_stays_below_a_quarter_of_its_field(monkeypatch, rows, sign):
    """All errors at their bounds, on one side; and entries' fields, whose rounded scales alone would exceed it."""
    codes, vector = np.zeros((1, rows), np.uint8), np.tile(np.array([[1], [HESS], [sign * GRAD]], np.int32), rows)
    job = masked_job(codes, [1])
    monkeypatch.setattr(ring, "errors", lambda draw, count: np.full(count, 21, np.int8))
    monkeypatch.setattr(ring, "ternary", lambda draw, count: np.full(count, 1, np.int8))
    hint = job.make_hint()
    monkeypatch.setattr(job, "make_hint", lambda: hint)
    monkeypatch.setattr(ring, "errors", lambda draw, count: np.full(count, 21 * sign, np.int8))
    monkeypatch.setattr(ring, "ternary", lambda draw, count: np.full(count, -sign, np.int8))
    parameters, masks = job.parameters, np.zeros((1, 1, job.parameters.digits), np.uint16)
    products, noise = masked_products(job, [vector], masks)
    assert [x.tolist() for x in job.sums(products)] == bin_sums(codes, np.array([0, 1]), [vector])
    scaled = (parameters.noise << 16 * parameters.digits) // parameters.modulus
    assert 0.9 * scaled - parameters.rounding < sign * noise[0, 0] < 1 << parameters.noise_bits


def test_entries_are_rounded_by_less_than_one(monkeypatch):
    """Not each field alone, which would be off by up to half of its bound."""
    rng, rows = np.random.default_rng(20), 5000
    job = masked_job(np.zeros((1, rows), np.uint8), [1])
    monkeypatch.setattr(ring, "ternary", lambda draw, count: np.zeros(count, np.int8))
    monkeypatch.setattr(ring, "errors", lambda draw, count: np.zeros(count, np.int8))
    (vector,) = random_vectors(rng, rows, 1, extreme=True)
    _, words, _ = job.client.encrypt([vector])
    q, bits = job.parameters.modulus, job.parameters.message_bits
    numbers = sum(vector[f].astype(object) << field.shift for f, field in enumerate(job.fields))
    for entry, number in zip(oracle.lift(words[0].tolist(), job.parameters.primes), numbers, strict=True):
        assert abs(oracle.centred((entry << bits) - q * number, q << bits)) < 1 << bits


def test_parameters_for_masks_answer_with_masks_alone_and_the_others_with_a_flood():
    codes, masks = np.zeros((1, 8), np.uint8), np.zeros((1, 1, 9), np.uint16)
    vector = np.zeros((3, 8), np.int32)
    for job, wrong in ((masked_job(codes, [1]), None), (job_of_bins(codes, [1]), masks)):
        _, words, own = job.client.encrypt([vector])
        with pytest.raises(CryptoError, match="expected answers to be masked, or flooded"):
            job.server.answer(words, own, job.columns, wrong)


# ---------------------------------------------------------------- every number equals the naive model's


@pytest.mark.parametrize("of_integers", [False, True], ids=["bins", "integers"])
@pytest.mark.parametrize(("primes", "message_bits"), [(3, 66), (5, 58)], ids=["not scaled down", "scaled down"])
def test_hint_query_answer_and_opening_equal_the_naive_model(monkeypatch, primes, message_bits, of_integers):
    job, vectors = small_job(monkeypatch, primes=primes, message_bits=message_bits, of_integers=of_integers)
    parameters, q = job.parameters, job.parameters.modulus
    assert (1 << 16 * parameters.digits > q) == (primes == 3)  # q' > q: every error of 1 shows
    public = oracle.ring_elements(SEED, 4, parameters.primes, SMALL)
    errors = record(monkeypatch, "errors")
    floods = record(monkeypatch, "flood")
    hint = job.make_hint()
    hint_errors = np.concatenate(errors).reshape(job.matrix.rows, SMALL).tolist()
    del errors[:]
    secrets, words, own = job.client.encrypt(vectors)
    query_errors = oracle.errors_of_query(errors, 2).tolist()
    answers = job.server.answer(words, own, job.columns)
    products = job.integers(job.client.open(hint, np.arange(job.matrix.rows), secrets, answers))

    plain_hints = []
    for s, (row, random, e) in enumerate(
        zip(matrix_rows(job.matrix), job.server.random.tolist(), hint_errors, strict=True)
    ):
        plain_hints.append(oracle.hint(public, row, random, e, q))
        for k, x in enumerate(plain_hints[-1]):
            assert oracle.scaling_error(oracle.number(hint[s, :, k]), x, q, parameters.digits) < 0.51
    for v, vector in enumerate(vectors):
        secret = secrets[v].tolist()
        numbers = oracle.message(job.fields, vector, q, parameters.message_bits)
        b = oracle.query(public, secret, query_errors[v], numbers, q)
        got = oracle.lift(np.concatenate([own[v], words[v]], axis=1).tolist(), parameters.primes)
        assert got == [x for block in b for x in block][: len(got)]
        added = oracle.lift(floods[v].T.tolist(), parameters.primes)
        for s, row in enumerate(matrix_rows(job.matrix)):
            y = oracle.answer(row, job.server.random[s].tolist(), b, added[s], q)
            scaled = oracle.number(answers[v, s])
            assert oracle.scaling_error(scaled, y, q, parameters.digits) < 0.51
            assert products[v, s] == oracle.opened(y, plain_hints[s], secret, q, parameters.message_bits)


@pytest.mark.parametrize("error", [-21, -1, 0, 21])
def test_words_without_a_secret_are_errors_and_message_below_their_primes(monkeypatch, error):
    job = job_of_bins(np.zeros((1, 8), np.uint8), [1])
    monkeypatch.setattr(ring, "ternary", lambda draw, count: np.zeros(count, np.int8))
    monkeypatch.setattr(ring, "errors", lambda draw, count: np.full(count, error, np.int8))
    counts, hessians, gradients = (
        [0, 1, 0, 0, 0, 1, 1, 0],
        [0, 0, 1, 0, 0, HESS, HESS, 0],
        [0, 0, 0, 1, -1, GRAD, -GRAD, 0],
    )
    vector = np.array([counts, hessians, gradients], np.int32)
    _, words, own = job.client.encrypt([vector])
    numbers = oracle.message(job.fields, vector, job.parameters.modulus, job.parameters.message_bits)
    for p, prime in enumerate(job.parameters.primes):
        assert words[0, p].tolist() == [(number + error) % prime for number in numbers]
        assert own[0, p].tolist() == [error % prime] * DEGREE


def test_full_degree_equals_the_naive_model_at_some_places(monkeypatch):
    rng, rows = np.random.default_rng(9), DEGREE + 900
    codes, sizes = rng.integers(0, 2, (1, rows)).astype(np.uint8), [2]
    job = job_of_bins(codes, sizes)
    (vector,) = random_vectors(rng, rows, 1)
    primes, q = job.parameters.primes, job.parameters.modulus
    errors = record(monkeypatch, "errors")
    floods = record(monkeypatch, "flood")
    hint = job.make_hint()
    secrets, words, own = job.client.encrypt([vector])
    answers = job.server.answer(words, own, job.columns)
    hint_errors, query_errors = errors[0].reshape(2, DEGREE), oracle.errors_of_query(errors[1:], 1)[0].tolist()
    b = np.concatenate([own[0], words[0]], axis=1)
    public = [[plain_coefficients(j, prime) for j in range(3)] for prime in primes]
    numbers = [0] * DEGREE + oracle.message(job.fields, vector, q, job.parameters.message_bits)
    for i in (0, DEGREE - 1, DEGREE, DEGREE + 77, 2 * DEGREE - 1, 2 * DEGREE, 2 * DEGREE + 899):
        j, k = divmod(i, DEGREE)
        for p, prime in enumerate(primes):
            product = oracle.coefficient(oracle.mirrored(public[p][j]), secrets[0].tolist(), k)
            assert b[p, i] == (product + query_errors[i] + numbers[i]) % prime
    blocks = oracle.blocks_of((codes[0] == 1).astype(int).tolist(), DEGREE)
    factors = [job.server.random[1].tolist(), *blocks]
    for k in (0, 1, DEGREE - 1):
        residues = [
            [(sum(map(oracle.coefficient, factors, of, [k] * 3)) + int(hint_errors[1, k])) % prime]
            for of, prime in zip(public, primes, strict=True)
        ]
        (x,) = oracle.lift(residues, primes)
        assert oracle.scaling_error(oracle.number(hint[1, :, k]), x, q, job.parameters.digits) < 0.51
    row = [x for factor in factors for x in factor][: len(numbers)]
    y = [[(oracle.inner(row, b[p].tolist()) + int(floods[0][1, p])) % prime] for p, prime in enumerate(primes)]
    (y,) = oracle.lift(y, primes)
    assert oracle.scaling_error(oracle.number(answers[0, 1]), y, q, job.parameters.digits) < 0.51


def plain_coefficients(number, prime):
    """Coefficients of a~_number modulo one prime, by the compiled transform (see test_transform)."""
    (values,) = public_ring_elements(SEED, number, (prime,), DEGREE)
    table = tables(prime, DEGREE)
    inverse_transform(values, 0, DEGREE, table.inverse, table.inverse_shoup, table.prime)
    return (values.astype(object) * pow(DEGREE, -1, prime) % prime).tolist()


# ---------------------------------------------------------------- threads, pieces, restarts


def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr(linear_map, "Keystream", fixed_keystream)
    rng, rows = np.random.default_rng(10), 40_000
    codes, sizes = rng.integers(0, 4, (3, rows)).astype(np.uint8), [4, 4, 4]
    vectors = random_vectors(rng, rows, 2)
    made = []
    for threads in (1, 2):
        job = job_of_bins(codes, sizes, threads=threads)
        hint = job.make_hint()
        secrets, words, own = job.client.encrypt(vectors)
        answers = job.server.answer(words, own, job.columns)
        made.append([hint, secrets, words, own, answers, job.client.open(hint, np.arange(12), secrets, answers)])
    assert all(map(np.array_equal, *made))


@pytest.mark.parametrize("at_a_time", [1, 4, 100])
def test_hint_may_be_made_in_pieces_of_any_size(at_a_time):
    rng = np.random.default_rng(11)
    codes, sizes = rng.integers(0, 3, (2, 200)).astype(np.uint8), [3, 4]
    job = job_of_bins(codes, sizes)
    pieces = list(job.server.hint(at_a_time))
    assert [len(piece) for piece in pieces] == [len(range(s, min(s + at_a_time, 7))) for s in range(0, 7, at_a_time)]
    vectors = random_vectors(rng, 200, 1)
    secrets, words, own = job.client.encrypt(vectors)
    answers = job.server.answer(words, own, job.columns)
    opened = job.client.open(np.concatenate(pieces), np.arange(7), secrets, answers)
    assert [x.tolist() for x in job.sums(job.integers(opened))] == bin_sums(codes, np.array([0, 3, 7]), vectors)


def test_server_made_again_from_its_kept_secrets_answers_for_the_same_hint():
    rng = np.random.default_rng(12)
    codes, sizes = rng.integers(0, 3, (1, 100)).astype(np.uint8), [3]
    job, vectors = job_of_bins(codes, sizes), random_vectors(rng, 100, 1)
    hint = job.make_hint()
    job.server = LinearMapServer(job.parameters, job.matrix, SEED, random=job.server.random.copy())
    secrets, words, own = job.client.encrypt(vectors)
    answers = job.server.answer(words, own, job.columns)
    opened = job.client.open(hint, np.arange(3), secrets, answers)
    assert [x.tolist() for x in job.sums(job.integers(opened))] == bin_sums(codes, np.array([0, 3]), vectors)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("of_integers", [False, True], ids=["bins", "integers"])
@pytest.mark.parametrize("prime", range(3))
@pytest.mark.parametrize("which", ["words", "own"])
@pytest.mark.parametrize("place", [0, 17, -1])
def test_word_not_below_its_prime_is_refused(monkeypatch, of_integers, prime, which, place):
    job, vectors = small_job(monkeypatch, of_integers=of_integers)
    job.make_hint()
    _, words, own = job.client.encrypt(vectors)
    bent = {"words": words, "own": own}
    bent[which][1, prime, place] = job.parameters.primes[prime] - 1
    assert job.server.answer(words, own, job.columns).shape == (2, job.matrix.rows, job.parameters.digits)
    for bad in (job.parameters.primes[prime], (1 << 32) - 1):
        bent[which][1, prime, place] = bad
        with pytest.raises(CryptoError, match="a word is not below its prime - in a query"):
            job.server.answer(words, own, job.columns)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([Field(0, SETS[5][4])], "expected numbers below"),
        ([Field(0, SETS[5][4], True)], "expected numbers below"),
        ([Field(0, (1 << 31) - 1), Field(20, 2), Field(30, 1, True)], "such large numbers do not fit"),
        ([Field(0, (1 << 31) + 1), Field(30, 1, True)], "such large numbers do not fit"),
    ],
    ids=["prime", "signed prime", "three wide", "two wide"],
)
def test_fields_too_wide_for_the_arithmetic_are_refused(fields, message):
    parameters = choose(70, 100, 100 << 31, 100)
    with pytest.raises(CryptoError, match=message):
        LinearMapClient(parameters, fields, SEED, 100)


# ---------------------------------------------------------------- nothing is used twice


class Watched(Keystream):
    """Counts the streams that are made under a key of the operating system, and notes those under another."""

    made = 0
    others: ClassVar[list[tuple[bytes, int]]] = []

    def __init__(self, key=None, number=0):
        super().__init__(key, number)
        Watched.made += key is None
        if key is not None:
            Watched.others.append((key, number))


def test_every_query_hint_and_answer_has_a_keystream_of_its_own(monkeypatch):
    job, vectors = small_job(monkeypatch)
    monkeypatch.setattr(linear_map, "Keystream", Watched)
    for step, streams in [
        (lambda: list(job.server.hint(4)), 2),  # six rows: two pieces
        (lambda: job.client.encrypt(vectors), 1),
        (lambda: job.server.answer(*job.client.encrypt(vectors)[1:], job.columns), 2),
    ]:
        Watched.made = 0
        step()
        assert Watched.made >= streams
    # errors of two queries, of two vectors each in a block of their own, and of b_0: none under the same key and number
    assert len(set(Watched.others)) == len(Watched.others) >= 2 * 2 * 2
    assert len({key for key, _ in Watched.others}) == 2


def test_a_vector_in_pieces_is_encrypted_and_added_up_as_a_whole(monkeypatch):
    """And who encrypts a block again, under the query's key, gets the same bytes."""
    job, vectors = small_job(monkeypatch)
    length, hint = job.matrix.length, job.make_hint()
    query = job.client.begin(2)
    again = EncryptedQuery(job.client, query.secrets, query._key)
    cuts = [0, SMALL, 2 * SMALL, length]
    parts = [query.encrypt([v[:, a:b] for v in vectors]) for a, b in pairwise(cuts)]
    assert np.array_equal(again.encrypt(vectors), np.concatenate(parts, axis=2))
    assert np.array_equal(again.own, query.own)
    sums = job.server.begin(query.own, job.columns)
    for part in parts:
        sums.add(np.ascontiguousarray(part))
    rows = np.arange(job.matrix.rows)
    found = job.integers(job.client.open(hint, rows, query.secrets, sums.answer()))
    np.testing.assert_array_equal(found, job.products(vectors))


def test_public_elements_that_are_not_kept_are_the_same(monkeypatch):
    job, vectors = small_job(monkeypatch)
    query = job.client.begin(2)
    kept = query.encrypt(vectors)
    monkeypatch.setattr(linear_map, "_KEPT_BYTES", 0)
    client = LinearMapClient(job.parameters, job.fields, SEED, job.matrix.length)
    again = EncryptedQuery(client, query.secrets, query._key)
    assert np.array_equal(again.encrypt(vectors), kept)
    assert np.array_equal(again.own, query.own)


def test_pieces_of_vectors_that_do_not_fit_are_refused(monkeypatch):
    job, vectors = small_job(monkeypatch)
    query = job.client.begin(2)
    words = query.encrypt([v[:, : SMALL - 1] for v in vectors])
    with pytest.raises(CryptoError, match="whole blocks"):
        query.encrypt([v[:, SMALL - 1 :] for v in vectors])
    sums = job.server.begin(query.own, job.columns)
    whole = job.client.encrypt(vectors)[1]
    for wrong in (words, whole[:, :, :0], np.repeat(whole, 2, axis=2)):
        with pytest.raises(CryptoError, match=f"in whole blocks of {SMALL}, got {wrong.shape[2]} "):
            sums.add(wrong)
    sums.add(np.ascontiguousarray(whole[:, :, :SMALL]))
    with pytest.raises(CryptoError, match=f"of {job.matrix.length} entries, got {SMALL} "):
        sums.answer()
    with pytest.raises(CryptoError, match=f"got {SMALL + job.matrix.length} "):
        sums.add(whole)


def assert_unrelated(a, b, values):
    """Two arrays of uniform numbers of so many values agree about as often as chance has it."""
    assert np.count_nonzero(a == b) <= stats.binom.isf(FALSE_ALARM, a.size, 1 / values)


def test_the_same_vector_encrypted_twice_shares_nothing():
    rng = np.random.default_rng(13)
    codes, sizes = np.zeros((1, 5000), np.uint8), [1]
    job, (vector,) = job_of_bins(codes, sizes), random_vectors(rng, 5000, 1)
    first, second = job.client.encrypt([vector, vector]), job.client.encrypt([vector])
    for a, b in [((x[0] for x in first), (x[1] for x in first)), ((x[0] for x in first), (x[0] for x in second))]:
        for x, y, values in zip(a, b, [3, SETS[5][0], SETS[5][0]], strict=True):
            assert_unrelated(x, y, values)


def test_two_hints_of_one_matrix_share_nothing():
    job = job_of_bins(np.zeros((1, 50), np.uint8), [2])
    first, random = job.make_hint(), job.server.random.copy()
    second = job.make_hint()
    assert_unrelated(first, second, 1 << 16)
    assert_unrelated(random, job.server.random, 3)
    assert_unrelated(first[0], first[1], 1 << 16)


def assert_bytes_uniform(array):
    counts = np.bincount(np.ascontiguousarray(array).view(np.uint8).ravel(), minlength=256)
    expected = counts.sum() / 256
    assert ((counts - expected) ** 2 / expected).sum() < stats.chi2.isf(FALSE_ALARM, 255)


@pytest.mark.parametrize("filled", [0, 1], ids=["empty bin", "full bin"])
def test_hint_digits_look_uniform_whatever_the_bin(filled):
    job = job_of_bins(np.zeros((1, 3000), np.uint8), [2])
    hint = job.make_hint()[1 - filled]
    for digit in hint:
        assert_bytes_uniform(digit)
    assert_bytes_uniform(hint)


@pytest.mark.parametrize("value", ["zeros", "bounds"])
def test_query_words_look_uniform_whatever_the_vector(value):
    rows = 3 * DEGREE
    job = job_of_bins(np.zeros((1, rows), np.uint8), [1])
    vector = np.zeros((3, rows), np.int32)
    if value == "bounds":
        vector += np.array([[1], [HESS], [-GRAD]], np.int32)
    _, words, own = job.client.encrypt([vector])
    for p, prime in enumerate(job.parameters.primes):
        for residues in (words[0, p], own[0, p]):
            assert_bytes_uniform((residues & 0xFFFF).astype(np.uint16))
            cells = np.bincount(residues.astype(np.int64) * 64 // prime, minlength=64)
            expected = len(residues) / 64
            assert ((cells - expected) ** 2 / expected).sum() < stats.chi2.isf(FALSE_ALARM, 63)


@pytest.mark.slow
def test_answers_are_flooded_uniformly_over_the_whole_width_and_each_time_anew():
    """Also for one query: what is left of an answer once its sum is taken off fills the flood's range evenly."""
    rng, rows, repeats = np.random.default_rng(14), 300, 60
    codes = rng.integers(0, 200, (1, rows)).astype(np.uint8)
    job = job_of_bins(codes, [200])
    parameters, vectors = job.parameters, random_vectors(rng, rows, 1)
    hint = job.make_hint()
    secrets, words, own = job.client.encrypt(vectors)
    answers = job.server.answer(np.repeat(words, repeats, 0), np.repeat(own, repeats, 0), job.columns)
    scale = 1 << 16 * parameters.digits
    products = job.integers(job.client.open(hint, np.arange(200), np.repeat(secrets, repeats, 0), answers))
    masks = [oracle.number(digits) for digits in (hint.astype(np.int64) @ secrets[0].astype(np.int64)).tolist()]
    exact = products.astype(object) * scale >> parameters.message_bits
    left = [
        oracle.centred(oracle.number(answers[v, s]) - masks[s] - exact[v, s], scale)
        for v in range(repeats)
        for s in range(200)
    ]
    width = (1 << parameters.flood_bits) * scale / parameters.modulus
    places = np.array([x / width + 0.5 for x in left])
    margin = (parameters.noise * scale / parameters.modulus + 0.51 * (DEGREE + 1)) / width
    assert places.min() > -margin
    assert places.max() < 1 + margin
    cells = np.bincount(np.clip(places * 64, 0, 63).astype(int), minlength=64)
    expected = len(left) / 64
    assert ((cells - expected) ** 2 / expected).sum() < stats.chi2.isf(FALSE_ALARM, 63)


@pytest.mark.parametrize(
    ("codes", "offsets"),
    [
        (np.array([[0, 1, 2]], np.uint8), [0, 2]),  # a code beyond its feature's bins
        (np.zeros((2, 3), np.uint8), [0, 2, 2]),  # a feature without bins
        (np.zeros((2, 3), np.uint8), [0, 2]),  # fewer offsets than features
    ],
)
def test_codes_outside_their_bins_are_refused(codes, offsets):
    with pytest.raises(CryptoError, match="within the bins"):
        SecretMatrix.of_bins(codes, np.array(offsets, np.int64))


@pytest.mark.parametrize("entry", [LEAST_PRIME, -LEAST_PRIME, -(2**31)])
def test_entries_that_wrap_around_a_prime_are_refused(entry):
    SecretMatrix.of_integers(np.array([[LEAST_PRIME - 1, 1 - LEAST_PRIME]], np.int32))
    with pytest.raises(CryptoError, match="in size"):
        SecretMatrix.of_integers(np.array([[1, entry]], np.int32))


def test_no_vectors_are_refused():
    client = LinearMapClient(choose(20, 10, 0, 10), [Field(0, 100)], bytes(32), 10)
    with pytest.raises(CryptoError, match="at least one vector"):
        client.encrypt([])
