"""What the dealer of additive shares can do with a user, who gets both servers' shares of its own rows' answers."""

from dataclasses import dataclass

import numpy as np

from treaty.crypto.sharing.additive_routing import _levels, _ServerNumbers, open_bits

NONE = np.empty(0, np.uint64)
BITS, CODES = 6, 32  # of the comparison, and of a column

# ---------------------------------------------------------------- leaf values: linear equations modulo 2^64


def leaf_values_found(own, leaf, dealt, told, leaves, rows):
    """Return all leaf values, int64 (leaves,), or None where too few rows are the user's.

    `own` are its rows among all, `leaf` theirs, and `told` what servers send of them, (2, len(own)); `dealt` is what
    the dealer dealt for all rows.

    Server 0's share of a row's value is s + in.m + o.(e - q): s, m its numbers, q server 1's of the row's path, e the
    row's path and `in` the same less all masks, which both know; but o, the values less all masks, is of all leaves.
    """
    (key_0, key_1), corrections = dealt
    first, second = _ServerNumbers(0, key_0, NONE), _ServerNumbers(1, key_1, corrections)
    (path_masks_0, value_masks_0), (path_masks_1, value_masks_1) = (
        (of.numbers(leaves, rows)[:, own], of.numbers(leaves)) for of in (first, second)
    )
    path = (np.arange(leaves)[:, None] == leaf).astype(np.uint64)
    in_path = path - path_masks_0 - path_masks_1
    known = first.products(rows)[own] + (in_path * value_masks_0[:, None]).sum(axis=0)
    over = solved((path - path_masks_1).T, told[0] - known)
    return None if over is None else (over + value_masks_0 + value_masks_1).view(np.int64)


def solved(coefficients, sums):
    """Solve linear equations modulo 2^64, uint64 (unknowns,) from enough of them, the rest unused; else None."""
    left = [[*map(int, row), int(total)] for row, total in zip(coefficients, sums, strict=True)]
    unknowns = coefficients.shape[1]
    for at in range(unknowns):
        odd = next((k for k in range(at, len(left)) if left[k][at] & 1), None)
        if odd is None:
            return None
        left[at], left[odd] = left[odd], left[at]
        inverse = pow(left[at][at], -1, 1 << 64)
        left[at] = [number * inverse % (1 << 64) for number in left[at]]
        for k, row in enumerate(left):
            if k != at and row[at]:
                left[k] = [(a - row[at] * b) % (1 << 64) for a, b in zip(row, left[at], strict=True)]
    return np.array([row[-1] for row in left[:unknowns]], np.uint64)


# ---------------------------------------------------------------- splits: each one tried


@dataclass
class Root:
    """A root's split by one column of many, and rows that went by it; what the dealer has and what users are sent."""

    column: int
    threshold: int
    rows: np.ndarray
    masks: tuple
    level: tuple
    told: np.ndarray


def splits_left(root):
    """Splits (column, threshold) that agree with the sides, and those of them that agree with server 0's shares, too.

    Given a split and server 0's share of the threshold, of which there are 2^bits, all shares of the comparison follow.
    """
    n, columns = root.rows.shape
    keys, corrections = root.level
    dealt = [_ServerNumbers(i, keys[i], corrections if i else NONE) for i in range(2)]
    compared = [of.comparison(n, BITS) for of in dealt]
    split_masks, products = [of.numbers(columns) for of in dealt], [of.products(n) for of in dealt]
    for of in dealt:
        of.coins(1, n), of.products(n)
    summed = [of.products(n) for of in dealt]
    triples = [triples_dealt(i, compared[i], n) for i in range(2)]
    masks = [_ServerNumbers(0, key, NONE).numbers(n, columns) for key in root.masks]
    opened, sides = root.rows.astype(np.uint64) - masks[0] - masks[1], open_bits(root.told)
    agree = [(f, t) for f in range(columns) for t in range(1, CODES) if np.array_equal(root.rows[:, f] < t, sides)]
    shares, left = np.arange(1 << BITS, dtype=np.uint64)[:, None], []
    for f, t in agree:
        split = (np.arange(columns) == f).astype(np.uint64) - split_masks[0] - split_masks[1]
        first = products[0] + summed[0] + opened @ (split_masks[0] + split) + masks[0] @ split
        second = products[1] + summed[1] + opened @ split_masks[1] + masks[1] @ split
        bits = bits_of_server_0((first - shares, second - (np.uint64(t) - shares)), triples)
        if np.any(np.all(bits == root.told[0], axis=1)):
            left.append((f, t))
    return agree, left


def triples_dealt(own, dealt, n):
    """A server's bits of all triples: those of the first products, then those of each joining; (slices, n)."""
    stream, size = _ServerNumbers(own, dealt.key, dealt.corrections.reshape(-1)), -(-n // 64)

    def unpacked(words):
        return np.unpackbits(words.astype("<u8").view(np.uint8), axis=1, bitorder="little")[:, :n].astype(np.uint8)

    found = [(unpacked(stream.numbers(BITS - 1, size)), unpacked(stream.products(BITS - 1, size)))]
    for spans in _levels(BITS):
        pairs = spans // 2
        operands = [unpacked(stream.numbers(count, size)) for count in (pairs, pairs, pairs - 1)]
        found.append((*operands, unpacked(stream.products(pairs, size)), unpacked(stream.products(pairs - 1, size))))
    return found


def bits_of_server_0(values, triples):
    """What `sign_bit` gives server 0, uint8 (m, n), for both servers' values (m, n)."""
    at = np.arange(BITS, dtype=np.uint64)[:, None, None]
    slices = [((of >> at) & np.uint64(1)).astype(np.uint8) for of in values]
    carries = BITS - 1
    (a_0, c_0), (a_1, c_1) = [[part[:, None] for part in of[0]] for of in triples]
    mine = slices[0][:carries] ^ a_0, slices[1][:carries] ^ a_1
    g = [mine[1] & a_0 ^ c_0 ^ (mine[1] & mine[0]), mine[0] & a_1 ^ c_1]
    p = [of[:carries] for of in slices]
    for level in range(1, 1 + len(_levels(BITS))):
        pairs = len(g[0]) // 2
        even, dealt = 2 * pairs, [[part[:, None] for part in of[level]] for of in triples]
        opened = np.bitwise_xor(*(
            np.concatenate([p[i][1:even:2] ^ upper, g[i][:even:2] ^ lower, p[i][2:even:2] ^ lower_p])
            for i, (upper, lower, lower_p, _, _) in enumerate(dealt)
        ))  # fmt: skip
        d, e, f = opened[:pairs], opened[pairs:even], opened[even:]
        for i, (upper, lower, lower_p, of_carried, of_passed) in enumerate(dealt):
            carried = (d & lower) ^ (upper & e) ^ of_carried ^ g[i][1:even:2]
            passed = (d[1:] & lower_p) ^ (upper[1:] & f) ^ of_passed
            if i == 0:
                carried, passed = carried ^ d & e, passed ^ d[1:] & f
            p[i] = np.concatenate([np.zeros_like(p[i][:1]), passed, p[i][even:]])
            g[i] = np.concatenate([carried, g[i][even:]])
    return slices[0][carries] ^ g[0][0]
