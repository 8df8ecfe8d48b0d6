"""What a logistic regression of two classes is expected to take; messages are those of `roles` and of each cipher."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from typing import NamedTuple

import numpy as np

from treaty.crypto.lattice.parameters import DEGREE
from treaty.crypto.parameters import OU_DEFAULT_KEY_BITS, PAILLIER_DEFAULT_KEY_BITS
from treaty.crypto.sums.lattice_sums import vector_bytes
from treaty.crypto.vectors.encrypted_vectors import Fields, product_bits
from treaty.crypto.vectors.lattice_vectors import vectors_parameters
from treaty.systems.expected import KEY_BYTES, ROUND_TRIP, Expected, Shape, not_expected
from treaty.systems.logistic.lattice import WEIGHT_BOUND
from treaty.systems.logistic.options import FederatedRegression, RegressionOptions
from treaty.systems.logistic.setup import MARGIN_BITS, WEIGHT_BITS, solver_of
from treaty.systems.system import Cast
from treaty.systems.vertical.cipher_choice import MODULAR

_PAILLIER = 3.5  # times the time of Okamoto-Uchiyama, both with the keys that are the default


def expected(cast: Cast, options: FederatedRegression, common: RegressionOptions, shape: Shape) -> Expected:
    """Return it, for as many epochs as there may be; ConfigError where a formula is missing.

    `shape.columns` are prepared ones, the active party's without its intercept.
    """
    if options.mode == "paper":
        raise not_expected("the published form")
    if not common.has_batches:
        raise not_expected("this regression")
    found, active, common = Expected(), cast.active, common.on(shape.rows)
    batch = common.rows_of_batch(shape.rows)
    batches = shape.rows // batch
    columns = {name: shape.columns[name] + (name == active) for name in cast.owners}
    solver = solver_of(common, type(options), len(cast.owners))
    steps = solver.max_iter * batches
    if common.whole_table and options.keeps_pairs:  # one in each direction, or not many more
        steps = min(steps, sum(columns.values()) + 2)
    pairs = max(0, steps // solver.period - 1) if options.keeps_pairs and not common.whole_table else 0
    rows = steps * batch + pairs * (solver.hessian_batch_size or batch)
    products = steps + pairs * max(1, (solver.hessian_batch_size or batch) // batch)
    found.agree(permutations(cast.roles, 2))
    _steps(found, cast, steps, solver.memory, solver.period)
    cipher = options.cipher(common.fractional_bits, common.family)
    bits = common.fractional_bits + MARGIN_BITS + 2  # of a vector's entries
    if cipher == "lattice":
        seconds = _lattice(found, cast, columns, batch, batches, products, bits)
    else:
        key = options.key_bits or options.insecure_test_key_bits
        key = key or (OU_DEFAULT_KEY_BITS if cipher == "ou" else PAILLIER_DEFAULT_KEY_BITS)
        ciphertext, plaintext = (key / 8, key // 3) if cipher == "ou" else (key / 4, key)
        hide = _coordinated if options.has_coordinator else _two_party
        size = _Size(shape.rows, rows, products, batch, KEY_BYTES * key, ciphertext, plaintext, bits)
        seconds = hide(found, cast, columns, size) * (1.0 if cipher == "ou" else _PAILLIER)
    for name in cast.owners:
        found.hold(24.0 * shape.rows * columns[name], name)
        if common.calibrate and name != active:
            found.send(name, active, 8.0 * shape.rows, 1)
    found.seconds = seconds / shape.threads + products * 3 * ROUND_TRIP
    return found


class _Size(NamedTuple):
    """Rows: of the table, of all products together, of a batch; bytes of a key and ciphertext; bits of numbers."""

    table: int
    rows: int
    products: int
    batch: int
    key: float
    ciphertext: float
    plaintext: int
    bits: int


def _steps(found: Expected, cast: Cast, steps: int, memory: int, period: int) -> None:
    """Count inner products to the coordinator, or the active party in its place, and coefficients back."""
    decider = cast.holder("coordinator") or cast.active
    pairs = np.clip(np.arange(1, steps + 1) // period - 1, 0, memory)  # that each step has
    products, coefficients = 16.0 * ((2 * pairs + 1) * (pairs + 1)).sum(), 8.0 * (2 * pairs + 1).sum()
    for name in cast.owners:
        if name != decider:
            found.send(name, decider, products, steps)
            found.send(decider, name, coefficients, steps)


def _lattice(
    found: Expected, cast: Cast, columns: Mapping[str, int], batch: int, batches: int, products: int, bits: int
) -> float:
    """Count vectors, hints and products between all owners; return seconds of one core of one of them."""
    of_block = max(1, DEGREE // batch)
    blocks, length = -(-batches // of_block), batch * min(of_block, batches)
    parameters = vectors_parameters(length, WEIGHT_BOUND, bits + len(cast.owners).bit_length(), batch)
    primes, digits, seconds = len(parameters.primes), parameters.digits, 0.0
    for one, other in permutations(cast.owners, 2):
        own, theirs = (columns[name] + (name == cast.active) for name in (one, other))
        hint = 2.0 * digits * DEGREE * own * blocks
        found.send(one, other, products * float(vector_bytes(parameters, length)), products)
        found.send(one, other, hint + products * (2.0 * digits * own + 16.0 * theirs), 2 * products)
        found.hold(2 * hint, one, other)
        found.kept[one] = hint
        each = primes * (length + DEGREE) * 20e-9 + own * primes * DEGREE * 2e-9
        seconds = max(seconds, own * blocks * 15e-3 + products * each * 2 * (len(cast.owners) - 1))
    return seconds


def _coordinated(found: Expected, cast: Cast, columns: Mapping[str, int], size: _Size) -> float:
    """Count what a coordinator with a key takes; return seconds of one core, under Okamoto-Uchiyama."""
    coordinator, senders = str(cast.holder("coordinator")), len(cast.owners).bit_length()
    fields = Fields.of(product_bits(size.batch, WEIGHT_BITS, size.bits) + senders, size.plaintext, masks=1)
    for name in cast.owners:
        plaintexts = -(-columns[name] // fields.per_plaintext)
        found.send(name, coordinator, size.products * plaintexts * size.ciphertext, size.products)
        found.send(coordinator, name, size.key + size.products * columns[name] * fields.width / 8, size.products)
        found.hold(4.0 * size.batch * size.ciphertext, name)
        if name != cast.active:
            for one, other in ((name, cast.active), (cast.active, name)):
                found.send(one, other, size.rows * size.ciphertext, size.products)
    most = max(columns.values())
    return 3.0 + size.rows * (0.35e-3 + most * 6e-6) * MODULAR


def _two_party(found: Expected, cast: Cast, columns: Mapping[str, int], size: _Size) -> float:
    """Count what keys of all owners take; return seconds of one core, under Okamoto-Uchiyama."""
    senders = len(cast.owners) - 1
    bits = product_bits(size.batch, WEIGHT_BITS, size.bits) + senders.bit_length()
    fields = Fields.of(bits, size.plaintext, masks=senders if senders > 1 else 0)
    plaintexts = {name: -(-columns[name] // fields.per_plaintext) for name in cast.owners}
    for one, other in permutations(cast.owners, 2):
        rows = size.table * (plaintexts[one] + (one == cast.active)) * size.ciphertext
        found.send(one, other, size.key + rows + size.products * plaintexts[other] * size.ciphertext, size.products)
        found.hold(2 * rows, one, other)
    most = max(plaintexts.values())
    of_all = size.table * (most + 1) * 30e-6 + senders * most * (size.rows * 6e-6 + size.products * 2e-3)
    return 3.0 + of_all * MODULAR
