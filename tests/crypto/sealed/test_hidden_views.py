"""What a party receives, and its own shares, where rows of nodes are shared: uniform, whatever the other's secrets."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from crypto.sealed.test_sealed import play
from crypto.sealed.watching import Computation, alike, counts, even, fill, uniform, views
from systems.secureboost.hidden_jobs import Columns, Job
from treaty.crypto.payload import SumsBounds
from treaty.crypto.transfer import arithmetic, hidden_rows, shared_pieces, shared_products
from treaty.crypto.transfer.hidden_best import WEIGHT_BITS, left_sums, weights_of
from treaty.crypto.transfer.hidden_rows import SharedNodes
from treaty.crypto.transfer.sealed_sums import Widths
from treaty.crypto.transfer.shared_pieces import Pieces
from treaty.crypto.transfer.stock import Steps, Transfers, open_transfers

N, ROLES, SECRETS = 4096, (0, 1), ("zeros", "ones")
Ends = tuple[Transfers, Transfers]


@pytest.fixture(scope="module")
def ends() -> Ends:
    return play(open_transfers(0), open_transfers(1))


def of_secret(secret: str, shape: Any, kind: Any, ones: int = 1) -> np.ndarray:
    return np.full(shape, ones if secret == "ones" else 0, kind)


def assert_uniform(make: Computation, role: int, of_result: Callable[[Any], Any]) -> None:
    """Fail unless all that a role receives, and its result as bytes, is uniform, and so are sums of two of these."""
    came, result = views(make)[role]
    arrays = [array for of in came for array in of if array.size]
    assert arrays
    for array in arrays:
        assert uniform(array)
        if array.ndim > 1:  # a row's entries are under pads of their own
            parts = array.reshape(len(array), -1)
            step = max(1, parts.shape[1] // 2)
            assert uniform(parts[:, :-step] ^ parts[:, step:])
    own = np.ascontiguousarray(of_result(result))
    assert uniform(own)
    for one, other in pairwise([*(array for array in arrays if array.nbytes == own.nbytes), own]):
        both = [np.ascontiguousarray(of).view(np.uint8).reshape(-1) for of in (one, other)]
        assert uniform(both[0] ^ both[1])


def packed(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits.reshape(-1))


class Rows:
    """Both ends' rows in a tree of three levels, in nodes that are drawn."""

    def __init__(self, ends: Ends) -> None:
        self.both = [SharedNodes(end, N) for end in ends]
        for _ in range(3):
            bits = np.frombuffer(np.random.default_rng().bytes(2 * N), np.uint8).reshape(2, N) & np.uint8(1)
            play(*(rows.multiplied(bits[k], None, 1, (True, True)) for k, rows in enumerate(self.both)))


@pytest.fixture(scope="module")
def rows(ends: Ends) -> Rows:
    return Rows(ends)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("owns", [(True, True), (True, False), (False, True)])
def test_routing(rows: Rows, role: int, secret: str, owns: tuple[bool, bool]) -> None:
    """Sides at all of the other's nodes are left, or right; and so for who sends a table and receives none."""
    sides = of_secret(secret, N, np.uint32, 255)

    def make(k: int) -> Steps[Any]:
        of = owns if k == 0 else owns[::-1]
        return rows.both[k].side_of_rows(sides if of[0] else np.zeros(N, np.uint32), of)

    if owns == (True, True) or owns[1 - role]:
        assert_uniform(make, role, packed)
        came, own = views(make)[role]
        table = np.unpackbits(came[0][0], bitorder="little").reshape(N, 8)
        # nor is the entry of another node under the mask alone, as the row's own is once its pad is off
        others = table[np.arange(N), rows.both[role].share ^ 1]
        assert even(others ^ own)
    else:
        (_, own) = views(make)[role]
        assert even(own)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("chooses", [(True, True), (True, False), (False, True)])
def test_multiplexing(ends: Ends, role: int, secret: str, chooses: tuple[bool, bool]) -> None:
    """The other's bits, and all bits of its values, are 0 or 1."""

    def make(k: int) -> Steps[Any]:
        rows = SharedNodes(ends[k], N)
        given = secret if k != role else "zeros"
        may = chooses if k == 0 else chooses[::-1]
        bits = of_secret(given if may[0] else "zeros", N, np.uint8)
        return rows.multiplied(bits, of_secret(given, (N, 2, 2), np.uint64, 2**64 - 1), 128, may)

    assert_uniform(make, role, lambda result: result)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("nbytes", [3, 6, 8])
def test_weights_of_rows(rows: Rows, role: int, secret: str, nbytes: int) -> None:
    weights = of_secret(secret, (2, 8), np.int64, -(1 << 14))

    def make(k: int) -> Steps[Any]:
        return rows.both[k].weight_of_rows(weights if k == 1 else None, nbytes)

    came, result = views(make)[role]
    assert uniform(hidden_rows.bytes_of(result.astype(np.uint64)[:, None], nbytes))
    if role == 0:
        (sent,) = came[0]
        assert uniform(sent)
        table = np.pad(sent, ((0, 0), (1, 0), (0, 0)))  # the first entry's ciphertext is 0
        assert all(uniform(table[:, a] ^ table[:, b]) for a in range(8) for b in range(a))
    else:
        assert came == [[]]  # who gives the weights is sent nothing


PIECES = {
    "carry": (lambda end, digits, bits, role: shared_pieces._carry(end, digits, None, role), packed),
    "carry of a carry": (lambda end, digits, bits, role: shared_pieces._carry(end, digits, bits, role), packed),
    "range": (
        lambda end, digits, bits, role: shared_pieces._range(end, digits, bits, role),
        lambda found: np.concatenate([packed(found[0]), found[1][::2] << 4 | found[1][1::2]]),
    ),
    "number": (lambda end, digits, bits, role: arithmetic.as_numbers(end, bits, 64, role), np.asarray),
    "half byte": (
        lambda end, digits, bits, role: shared_pieces._nibble_where(end, bits, digits),
        lambda found: found[::2] << 4 | found[1::2],
    ),
    "look up": (
        lambda end, digits, bits, role: shared_pieces._look_up(
            end, digits, digits.astype(np.uint64), Pieces(*np.full((2, 16), 1 << 40, np.uint64), 64), role
        ),
        np.asarray,
    ),
}  # fmt: skip


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("case", PIECES)
def test_steps_of_pieces(ends: Ends, case: str, role: int, secret: str) -> None:
    """All of the other's digits and bits are 0, or 15 and 1."""
    compute, of_result = PIECES[case]

    def make(k: int) -> Steps[Any]:
        given = secret if k != role else "zeros"
        bits = of_secret(given, N, np.uint8)
        return compute(ends[k], of_secret(given, N, np.uint8, 15), bits, k)

    if case == "half byte":
        came, result = views(make)[role]
        flips, table = came[0]
        assert uniform(flips)
        # four bits of a byte are the message
        assert uniform((table[::2] & 15) << 4 | (table[1::2] & 15))
        assert uniform(of_result(result))
    else:
        assert_uniform(make, role, of_result)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("role", ROLES)
def test_left_sums(ends: Ends, role: int, secret: str) -> None:
    """All bits of the other's shares, and of its winners' numbers, are 0 or 1."""
    nodes, candidates = 512, 8
    owners = (1 + np.arange(nodes) % 2).astype(np.uint8)

    def make(k: int) -> Steps[Any]:
        given = secret if k != role else "zeros"
        left = of_secret(given, (nodes, candidates, 3, 2), np.uint64, 2**64 - 1)
        numbers = np.where(owners == k + 1, of_secret(given, nodes, np.int64, candidates - 1), -1)
        return left_sums(ends[k], left, owners, numbers, k)

    came, result = views(make)[role]
    for array in (array for of in came for array in of):
        assert uniform(array)
    for owner in (1, 2):
        assert uniform(result[owners == owner])


@pytest.mark.parametrize("secret", SECRETS)
def test_shares_of_leaf_weights(ends: Ends, secret: str) -> None:
    """What the passive party sends of a leaf tells of its weight alone, whatever the sums."""
    widths, n = Widths.of(SumsBounds(1000, 65_536, 17_040), 65_536), 600
    for weight in (0, 3):
        masks = np.tile(of_secret(secret, 2, np.uint64, 2**64 - 1), (n, 1))
        shares = [np.tile(np.array([-weight * 65_536, 0]), (n, 1)).view(np.uint64) - masks, masks]
        one, other = play(*(weights_of(ends[k], shares[k], 1, 65_536, widths, k) for k in (0, 1)))
        assert np.all((one + other).view(np.int64) - (1 << WEIGHT_BITS - 1) == weight)
        assert uniform((one & np.uint64(0x7FFF)).astype(np.uint16).view(np.uint8)[::2])
        assert uniform((other & np.uint64(0x7FFF)).astype(np.uint16).view(np.uint8)[::2])


# ---------------------------------------------------------------- a whole tree


def seen_in_trees(
    ends: Ends, role: int, columns: list[Columns], labels: np.ndarray, weights: np.ndarray | None = None
) -> list[list[np.ndarray]]:
    """Return how often half bytes come at each step of a tree, array by array, in some trees on equal margins."""
    job = Job(ends, columns, labels, max_depth=2, step=100, weights=weights)
    found: list[list[np.ndarray]] = []
    for number in range(7):
        margins = job.share(np.zeros(job.n, np.int64), np.random.default_rng())
        fill(ends, 1 << 17)
        came, _ = views(lambda k, margins=margins: job.tree(k, margins))[role]
        if not number:  # it makes the keys of products in rings
            continue
        of_tree = [[counts(array) if array.size else np.zeros(16, np.int64) for array in of] for of in came]
        found = of_tree if not found else [
            [a + b for a, b in zip(one, other, strict=True)] for one, other in zip(found, of_tree, strict=True)
        ]  # fmt: skip
    return found


def assert_alike(one: list[list[np.ndarray]], other: list[list[np.ndarray]]) -> None:
    compared = 0
    for of_step, same_step in zip(one, other, strict=True):
        for first, second in zip(of_step, same_step, strict=True):
            assert first.sum() == second.sum()
            if first.sum() > 400:
                assert alike(first, second)
                compared += 1
    assert compared > 60


def job_parts() -> tuple[list[Columns], np.ndarray]:
    """Return columns of which the active party's alone split, and labels."""
    codes, no = np.arange(256, dtype=np.uint8), np.zeros(2, np.bool_)
    mine = Columns(np.stack([codes & 1, codes >> 1 & 1], 1), np.array([0, 3, 6], np.int32), no, no)
    theirs = Columns(np.stack([codes >> 2 & 3, codes >> 4 & 3], 1), np.array([0, 5, 10], np.int32), no, no)
    return [mine, theirs], (mine.codes.any(axis=1)).astype(np.int64)


@pytest.fixture(params=[False, True], ids=["by transfers", "in rings"])
def in_rings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all products of one sort, so that trees have the same steps."""
    monkeypatch.setattr(shared_products, "pays", lambda *_: request.param)


def test_a_tree_shows_the_passive_party_nothing_of_labels(ends: Ends, in_rings: None) -> None:
    columns, labels = job_parts()
    assert_alike(*(seen_in_trees(ends, 1, columns, given) for given in (labels, 1 - labels)))


def test_a_tree_shows_the_passive_party_nothing_of_weights(ends: Ends, in_rings: None) -> None:
    columns, labels = job_parts()
    of_all = (np.full(len(labels), weight) for weight in (3, 4))
    assert_alike(*(seen_in_trees(ends, 1, columns, labels, weights) for weights in of_all))


def test_a_tree_shows_the_active_party_nothing_of_columns_that_split_no_node(ends: Ends, in_rings: None) -> None:
    found = []
    for constant in (False, True):
        columns, labels = job_parts()
        columns[1].codes[:] *= not constant
        found.append(seen_in_trees(ends, 0, columns, labels))
    assert_alike(*found)
