"""Routing of rows down a hidden tree on additive shares: no server learns a row, a split or a path.

The cheaper form of `secure_routing`: two servers compute modulo 2^64 with the help of a dealer, who makes random
numbers and products of them and sees none of the servers' data. Users share rows and the model's owner shares splits,
both encoded as in `hidden_splits`. In each level the servers compute one number per row, that of the row's node, and
compare it with zero (`additive_comparison`).

Programs are generators of one server for all rows, nodes and trees at a time; see `secure_comparison` on the message
seam. Messages are checked for their form only: every number is a valid share, so wrong shares, and numbers outside the
ranges of `hidden_splits`, give wrong answers for their rows unnoticed.

**Assumed:** honest but curious servers and dealer; neither the two servers nor a server and the dealer collude; secure
channels. What each party learns:

========  =============================================================================================================
server    numbers of rows, columns, levels and leaves; all else that it receives is uniform, whatever is routed
dealer    numbers of rows, columns, levels and leaves
user      what is opened to it: the side of its rows in each level where it is sent shares of it, else leaf values
owner     nothing
========  =============================================================================================================

A user who colludes with one server or with the dealer still learns only that if its shares are re-randomised
(`fresh_shares`). Shares must never be sent to it as programs return them: all random numbers in these are the dealer's,
who together with the user could take off all leaf values, and narrow splits down to a few candidates.

**Cost**, in words of 8 bytes per row and tree, besides the comparison; K = 2^level. A tree of L leaves:

=================  ==============================  ========================  =========================
part               rounds                          one server to the other   dealer to server 1
=================  ==============================  ========================  =========================
`mask_rows`        1                               D once, 4 for all rows    0
`route_level`      2 + comparison (the root's)     1/64                      3
                   3 + comparison (a later's)      2 (K - 1) + 1/64          2 K + 1
`leaf_values`      1                               L                         1
sent by a user     -                               D once (to each server)
sent by owner      -                               K (D + 1) per level (to each server)
=================  ==============================  ========================  =========================

References: Beaver, Efficient Multiparty Protocols Using Circuit Randomization, CRYPTO 1991 (products). Liu, Ma, Liu,
Ma, Nepal, Deng, Boosting Privately, ICDCS 2020 (SecPred; there two servers' comparison, bits opened).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.sharing.additive_comparison import TripleShares, deal, sign_bit, swap, triples_of
from treaty.crypto.sharing.secure_comparison import Program
from treaty.crypto.sharing.shamir_field import Words
from treaty.errors import CryptoError

Keys = tuple[bytes, bytes]  # of server 0 and of server 1; each to be kept from the other


@dataclass(frozen=True, slots=True, eq=False)
class MaskedRows:
    """One server's view of n rows: rows minus their mask, which both servers know, and its share of the mask."""

    opened: Words  # (n, D), as the mask
    mask: Words

    def __len__(self) -> int:
        return len(self.opened)

    def part(self, rows: slice) -> MaskedRows:
        return MaskedRows(self.opened[rows], self.mask[rows])


def share_integers(values: NDArray[np.int64], key: bytes | None = None) -> Words:
    """Share rows, splits or leaf values among both servers, as their owner: int64 (...) -> uint64 (2, ...).

    `key` as of `Keystream`: it must serve these values alone.
    """
    first = Keystream(key).bits(64, values.size).reshape(values.shape)
    return np.stack([first, values.astype(np.uint64) - first])


def open_integers(shares: Words) -> NDArray[np.int64]:
    """Open the shares of both servers, as the user who is to learn them: uint64 (2, ...) -> int64 (...)."""
    opened: Words = shares[0] + shares[1]
    return opened.view(np.int64)


def open_bits(shares: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Open bits, uint8 (2, ...) -> bool (...); CryptoError unless all shares are 0 or 1."""
    if np.any(shares > 1):
        raise CryptoError("expected shares of bits, 0 or 1, got other numbers - at secure routing")
    opened: NDArray[np.bool_] = shares[0] != shares[1]
    return opened


# ---------------------------------------------------------------- dealer


def deal_mask(rows: int, columns: int) -> tuple[Words, Keys]:
    """Return the mask of some rows, uint64 (rows, columns), and the servers' keys to their shares of it.

    The mask stays with the dealer and serves all levels of all trees.
    """
    keys = secrets.token_bytes(32), secrets.token_bytes(32)
    return _share_of_mask(keys[0], rows, columns) + _share_of_mask(keys[1], rows, columns), keys


def deal_level(mask: Words, trees: int, nodes: int, bits: int) -> tuple[Keys, Words]:
    """Return the servers' keys, and server 1's shares of products, for rows with this mask (n, D) to go down one level.

    `nodes` counts those of each tree in the level, `bits` is `Layout.bits`; the shares are uint64
    (`numbers_of_level`,).
    """
    numbers, n = _DealerNumbers(), len(mask)
    corrected = [deal(trees * n, bits, numbers.keys_drawn())[1].corrections]
    split_masks = numbers.drawn(trees, nodes, mask.shape[1])
    corrected.append(numbers.corrected(_values(split_masks, mask)))
    coins = numbers.coins(trees, n).astype(np.uint64)
    corrected.append(numbers.corrected(coins))
    path_masks, value_masks = numbers.drawn(trees, nodes - 1, n), numbers.drawn(trees, nodes - 1, n)
    corrected.append(numbers.corrected((path_masks * value_masks).sum(axis=1)))
    corrected.append(numbers.corrected(path_masks * coins[:, None]))
    return numbers.keys, np.concatenate([of.reshape(-1) for of in corrected])


def numbers_of_level(rows: int, trees: int, nodes: int, bits: int) -> int:
    """Return how many numbers of `deal_level` server 1 gets."""
    return triples_of(bits) * -(-trees * rows // 64) + trees * rows * (2 * nodes + 1)


def deal_leaves(rows: int, trees: int, leaves: int) -> tuple[Keys, Words]:
    """Return the servers' keys, and server 1's shares of products, uint64 (trees * rows,), for `leaf_values`."""
    numbers = _DealerNumbers()
    path_masks, value_masks = numbers.drawn(trees, leaves, rows), numbers.drawn(trees, leaves)
    return numbers.keys, numbers.corrected((path_masks * value_masks[..., None]).sum(axis=1)).reshape(-1)


# ---------------------------------------------------------------- server


def mask_rows(own: int, rows: Words, key: bytes) -> Program[tuple[MaskedRows, bytes]]:
    """Open server `own`'s shares of encoded rows, uint64 (n, D), minus their mask to both servers; agree on a seed.

    The 32-byte seed is for `fresh_shares`: each server contributes to it and the dealer does not see it. `key` is the
    dealer's. CryptoError if the other server's message is malformed, as in all programs here.
    """
    mask = _share_of_mask(key, *rows.shape)
    given = np.frombuffer(secrets.token_bytes(32), "<u8").astype(np.uint64)
    opened, seed = yield from _open(own, [rows - mask, given])
    return MaskedRows(opened, mask), seed.astype("<u8").tobytes()


def route_level(
    own: int,
    rows: MaskedRows,
    weights: Words,
    thresholds: Words,
    paths: Words,
    bits: int,
    key: bytes,
    corrections: Words,
) -> Program[tuple[NDArray[np.uint8], Words]]:
    """Route n rows one level down; return shares of b = [row goes left] and of the next level's paths.

    `weights` (trees, K, D) and `thresholds` (trees, K) are server `own`'s shares of the splits of the level's
    K = 2^level nodes of complete trees; `paths` (trees, K, n) those of each row's node, from `at_root` or the level
    above; `bits` is `Layout.bits`; `key` and `corrections`, of `numbers_of_level` (server 1) or none (server 0), are
    the dealer's. Returned are uint8 (trees, n) XOR shares of b, which only the row's user may open, re-randomised, and
    uint64 (trees, 2 K, n) shares of 1 at the row's next node, else 0; the children of node k are 2 k (left) and 2
    k + 1. CryptoError if shapes do not match.

    a_k = w_k.z - T_k. As all p_k add up to 1, a = a_last + sum_k p_k (a_k - a_last), so one comparison per row does;
    b = [a < 0]. The servers' XOR shares of b are opened under a coin c of the dealer: m = b ^ c, so that b = m + (1 - 2
    m) c. The left child gets p_k b, for which p_k c = (p_k - x_k) c + x_k c takes no further round: p_k - x_k was
    opened for the product above, and shares of x_k c are dealt. The last p_k b is b less the others.
    """
    if weights.ndim != 3:
        raise CryptoError(f"expected weights of splits (trees, K, D), got {weights.shape} - at secure routing")
    trees, nodes, columns = weights.shape
    n = len(rows)
    _check(thresholds, (trees, nodes), "thresholds of splits")
    _check(rows.opened, (n, columns), "rows")
    _check(paths, (trees, nodes, n), "paths")
    _check(corrections, (own * numbers_of_level(n, trees, nodes, bits),), "the dealer's numbers")
    dealt = _ServerNumbers(own, key, corrections)
    compared = dealt.comparison(trees * n, bits)
    split_masks = dealt.numbers(trees, nodes, columns)
    masked_values = dealt.products(trees, nodes, n)
    coins = dealt.coins(trees, n)
    coin = dealt.products(trees, n)
    path_masks, value_masks = dealt.numbers(trees, nodes - 1, n), dealt.numbers(trees, nodes - 1, n)
    summed, masked_coins = dealt.products(trees, n), dealt.products(trees, nodes - 1, n)
    splits, in_path = yield from _open(own, [weights - split_masks, paths[:, :-1] - path_masks])
    values = masked_values - thresholds[..., None]
    values += _values(split_masks + splits if own == 0 else split_masks, rows.opened) + _values(splits, rows.mask)
    over = values[:, :-1] - values[:, -1:] - value_masks
    if nodes > 1:
        (over,) = yield from _open(own, [over])
    products = in_path * (value_masks + over if own == 0 else value_masks) + over * path_masks
    at_node = values[:, -1] + products.sum(axis=1) + summed
    left = yield from sign_bit(own, np.ascontiguousarray(at_node.reshape(-1)), compared)
    left = left.reshape(trees, n)
    turned = yield from _open_turned(own, left ^ coins)
    sign = 1 - 2 * turned.astype(np.int64)
    turned, sign = turned.astype(np.uint64), sign.astype(np.uint64)
    goes_left = sign * coin + (turned if own == 0 else 0)
    of_nodes = turned[:, None] * paths[:, :-1] + sign[:, None] * (in_path * coin[:, None] + masked_coins)
    goes_left = np.concatenate([of_nodes, (goes_left - of_nodes.sum(axis=1))[:, None]], axis=1)
    children = np.stack([goes_left, paths - goes_left], axis=2)
    return left, children.reshape(trees, 2 * nodes, n)


def at_root(own: int, trees: int, rows: int) -> Words:
    """Return a server's shares of the rows' first node, uint64 (trees, 1, rows)."""
    return np.full((trees, 1, rows), 1 - own, np.uint64)


def leaf_values(own: int, paths: Words, values: Words, key: bytes, corrections: Words) -> Program[Words]:
    """Return shares, uint64 (trees, n), of the value of each row's leaf; re-randomise them before they are opened.

    `paths` (trees, L, n) and `values` (trees, L) are server `own`'s shares; `corrections` (trees * n,) for server 1,
    (0,) for server 0. For the sum over trees, whose single values the user is not to learn, pass the leaves of all
    trees as one tree's.
    """
    trees, leaves, n = paths.shape
    _check(values, (trees, leaves), "leaf values")
    _check(corrections, (own * trees * n,), "the dealer's numbers")
    dealt = _ServerNumbers(own, key, corrections)
    path_masks, value_masks = dealt.numbers(trees, leaves, n), dealt.numbers(trees, leaves)
    summed = dealt.products(trees, n)
    in_path, over = yield from _open(own, [paths - path_masks, values - value_masks])
    products = in_path * (value_masks + over if own == 0 else value_masks)[..., None] + over[..., None] * path_masks
    found: Words = products.sum(axis=1) + summed
    return found


# ---------------------------------------------------------------- numbers dealt


class _ServerNumbers:
    """A server's shares of a batch's random numbers and of their products, in the order in which they were dealt."""

    def __init__(self, own: int, key: bytes, corrections: Words) -> None:
        self._own, self._stream, self._corrections = own, Keystream(key), corrections

    def comparison(self, rows: int, bits: int) -> TripleShares:
        triples, words = self._own * triples_of(bits), -(-rows // 64)  # none for server 0
        corrections = self._taken(triples * words).reshape(triples, words)
        return TripleShares(rows, self._stream.raw(32), corrections, bits)

    def key(self) -> bytes:
        return self._stream.raw(32)

    def numbers(self, *shape: int) -> Words:
        return self._stream.bits(64, math.prod(shape)).reshape(shape)

    def coins(self, *shape: int) -> NDArray[np.uint8]:
        """XOR shares of random bits."""
        count = math.prod(shape)
        drawn = self._stream.bits(64, -(-count // 64)).astype("<u8").view(np.uint8)
        return np.unpackbits(drawn.reshape(-1), count=count).reshape(shape)

    def products(self, *shape: int) -> Words:
        """Random for server 0, the dealer's corrections for server 1."""
        return self._taken(math.prod(shape)).reshape(shape) if self._own else self.numbers(*shape)

    def _taken(self, count: int) -> Words:
        taken, self._corrections = self._corrections[:count], self._corrections[count:]
        return taken


class _DealerNumbers:
    """Both servers' shares, as the dealer knows them."""

    def __init__(self) -> None:
        self.keys = secrets.token_bytes(32), secrets.token_bytes(32)
        none = np.empty(0, np.uint64)
        self._first, self._second = (_ServerNumbers(own, key, none) for own, key in enumerate(self.keys))

    def keys_drawn(self) -> Keys:
        return self._first.key(), self._second.key()

    def drawn(self, *shape: int) -> Words:
        return self._first.numbers(*shape) + self._second.numbers(*shape)

    def coins(self, *shape: int) -> NDArray[np.uint8]:
        return self._first.coins(*shape) ^ self._second.coins(*shape)

    def corrected(self, products: Words) -> Words:
        """Return server 1's shares of products; server 0's are random."""
        return products - self._first.products(*products.shape)


def _share_of_mask(key: bytes, rows: int, columns: int) -> Words:
    return Keystream(key).bits(64, rows * columns).reshape(rows, columns)


def _values(splits: Words, rows: Words) -> Words:
    """Inner products (trees, K, n) of splits (trees, K, D) and rows (n, D)."""
    return (splits.reshape(-1, splits.shape[-1]) @ rows.T).reshape(*splits.shape[:-1], len(rows))


def _open(own: int, shares: Sequence[Words]) -> Program[list[Words]]:
    """Open numbers to both servers, in one round."""
    mine = np.concatenate([of.reshape(-1) for of in shares])
    opened = mine + (yield from swap(own, mine))
    ends = np.cumsum([of.size for of in shares])[:-1]
    return [of.reshape(own.shape) for of, own in zip(np.split(opened, ends), shares, strict=True)]


def _open_turned(own: int, bits: NDArray[np.uint8]) -> Program[NDArray[np.uint8]]:
    """Open XOR shares of bits to both servers, 64 in a word."""
    packed = np.zeros(-(-bits.size // 64) * 8, np.uint8)
    packed[: -(-bits.size // 8)] = np.packbits(bits.reshape(-1))
    mine = packed.view("<u8").astype(np.uint64)
    opened = mine ^ (yield from swap(own, mine))
    return np.unpackbits(opened.astype("<u8").view(np.uint8), count=bits.size).reshape(bits.shape)


def _check(numbers: Words, shape: tuple[int, ...], what: str) -> None:
    if numbers.dtype != np.uint64 or numbers.shape != shape:
        raise CryptoError(f"expected {what} uint64 {shape}, got {numbers.dtype} {numbers.shape} - at secure routing")
