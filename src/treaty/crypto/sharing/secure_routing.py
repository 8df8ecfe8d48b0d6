"""Routing of rows down a hidden tree on Shamir shares: no server learns a row, a split or a path.

SecPred of FedXGB among three or more servers. Users share their rows and the model's owner its splits, both as in
`hidden_splits`; the owner fills the tree up to its depth with dummy splits, which hides its shape, too. In each level
the servers compute one number per row, that of the row's node, and compare it with zero.

Programs are generators of one server for all rows, nodes (and trees) at a time; see `secure_comparison` on the message
seam. Messages are checked for their form, not for honesty: numbers beyond `Setting.bits` give wrong answers.

**Who learns what**, of honest but curious servers of which at most t collude, over secure channels:

========  =============================================================================================================
server    numbers of rows, columns, levels and leaves, and who asks; nothing else, but for what `is_negative` says
user      what is opened to it: the side of its rows in each level where it is sent shares of b, else their leaf values
owner     nothing
========  =============================================================================================================

A user may collude with t servers: they learn what it is told. A user who may ask for made-up rows can find the splits.
In paper mode (`route_shown`) all servers and the user see every bit; features are known, only thresholds are hidden.

**Cost**, numbers of 16 bytes, per row and ordered pair of servers; l of the setting, K = 2^level; one comparison per
row and level must be prepared before:

===============  ======================================  ======================================
part             rounds                                  numbers per row and pair
===============  ======================================  ======================================
`route_level`    1 + comparison (the root's)             1 + (l + 2)
                 3 + comparison (a later level's)        K + 1 + (l + 2) + (K - 1)
`leaf_values`    1                                       1
`route_shown`    1 + comparison                          (l + 2) + 1
sent by a user   -                                       D once (to each server)
sent by owner    -                                       K (D + 1) per level (to each server)
===============  ======================================  ======================================

References: Liu, Ma, Liu, Ma, Nepal, Deng, Boosting Privately, ICDCS 2020 (SecPred; there two servers' comparison, bits
opened).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sharing import shamir_field as field
from treaty.crypto.sharing.secret_sharing import make_shares
from treaty.crypto.sharing.secure_comparison import (
    Program,
    RandomNumbers,
    Setting,
    is_negative,
    multiply,
    open_checked,
    open_to_all,
    reduce_degree,
)
from treaty.crypto.sharing.shamir_field import Words
from treaty.errors import CryptoError


def share_integers(setting: Setting, values: NDArray[np.int64], key: bytes | None = None) -> Words:
    """Share rows, splits, thresholds or leaf values, as their owner, with degree t.

    int64 (...) -> uint64 (servers, ..., 2); row i is for server i alone. `key` as of
    `Keystream`: it must serve these values alone.
    """
    numbers = field.from_signed(values.reshape(-1))
    return make_shares(numbers, setting.points, setting.degree + 1, key).reshape(setting.servers, *values.shape, 2)


def open_integers(setting: Setting, shares: Words) -> NDArray[np.int64]:
    """Open the shares of all servers, in order, as their user: uint64 (servers, ..., 2) -> int64 (...).

    CryptoError if shares are malformed or do not belong together (up to servers - t - 1 wrong ones are noticed), or an
    integer exceeds 63 bits and its sign.
    """
    opened = _opened(setting, shares)
    negative = opened[..., 1] > 0  # p + x = 2^127 + x - 1
    values = (opened[..., 0] + negative.astype(np.uint64)).astype(np.int64)
    if not np.array_equal(field.from_signed(values), opened):
        raise CryptoError("expected integers of 63 bits and sign to open, got larger ones")
    return values


def open_bits(setting: Setting, shares: Words) -> NDArray[np.bool_]:
    """Open bits, uint64 (servers, ..., 2) -> bool (...); as `open_integers`, and CryptoError unless all are 0 or 1."""
    return _as_bits(_opened(setting, shares))


def route_level(
    setting: Setting,
    own: int,
    rows: Words,
    weights: Words,
    thresholds: Words,
    paths: Words | None,
    prepared: RandomNumbers,
    threads: int = 1,
) -> Program[tuple[Words, Words]]:
    """Route n rows one level down; return shares of b = [row goes left] and of the next level's paths.

    Returned are (*, n, 2) and (*, 2 K, n, 2). Server `own`'s shares, of degree t: `rows` (n, D, 2), copied in every
    level unless contiguous and writable; `weights` (*, K, D, 2) and `thresholds` (*, K, 2) of the splits of the level's
    K = 2^level nodes of a complete tree; `paths` (*, K, n, 2) as returned for the level above, None at the root: 1 at
    the row's node, else 0. The children of node k are 2 k (left) and 2 k + 1. Leading axes * hold any number of trees,
    which go in the same rounds; `prepared` must hold n comparisons per tree. CryptoError if shapes do not match or a
    number is not below p, and as in `is_negative`.

    a_k = w_k.z - T_k; a = sum_k p_k a_k, so that one comparison per row does; b = [a < 0]. The left child gets p_k b,
    the right one p_k - p_k b. As all p_k add up to 1, the last p_k b is b less the others.
    """
    if weights.ndim < 3:
        raise CryptoError(f"expected weights of splits (*, K, D, 2), got {weights.shape} - at secure routing")
    *trees, nodes, columns = weights.shape[:-1]
    _check(weights, (*trees, nodes, columns), "weights of splits")
    _check(thresholds, (*trees, nodes), "thresholds of splits")
    _check(rows, (len(rows), columns), "rows")
    if paths is not None:
        _check(paths, (*trees, nodes, len(rows)), "paths")
    elif nodes != 1:
        raise CryptoError(f"expected paths of rows to {nodes} nodes, got none: they are required below the root")
    values = field.inner_products(rows, weights.reshape(-1, columns, 2), threads)
    values = values.reshape(*trees, nodes, len(rows), 2)
    values = yield from reduce_degree(setting, own, field.subtract(values, thresholds[..., None, :]))
    if paths is None:
        at_node = values[..., 0, :, :]
    else:
        at_node = yield from reduce_degree(setting, own, _sum_over_nodes(field.multiply(paths, values)))
    left = yield from is_negative(setting, own, at_node.reshape(-1, 2), prepared)
    left = left.reshape(at_node.shape)
    if paths is None:
        return left, np.stack([left, field.subtract(field.constant(1), left)], axis=-3)
    goes_left = yield from multiply(setting, own, paths[..., :-1, :, :], left[..., None, :, :])
    last = field.subtract(left, _sum_over_nodes(goes_left))
    goes_left = np.concatenate([goes_left, last[..., None, :, :]], axis=-3)
    children = np.stack([goes_left, field.subtract(paths, goes_left)], axis=-3)
    return left, children.reshape(*trees, 2 * nodes, len(rows), 2)


def leaf_values(setting: Setting, own: int, paths: Words, values: Words) -> Program[Words]:
    """Return shares of degree t of the value of each row's leaf, uint64 (n, 2).

    `paths` (L, n, 2) and `values` (L, 2) are server `own`'s shares. For the sum over trees, whose single values the
    user is not to learn, pass the leaves of all trees as one tree's. CryptoError if shapes do not match or a number is
    not below p.
    """
    _check(paths, (len(values), *paths.shape[1:2]), "paths")
    _check(values, (len(values),), "leaf values")
    return (yield from reduce_degree(setting, own, _sum_over_nodes(field.multiply(paths, values[:, None]))))


def route_shown(
    setting: Setting, own: int, values: Words, thresholds: Words, nodes: NDArray[np.intp], prepared: RandomNumbers
) -> Program[NDArray[np.bool_]]:
    """Route rows one level down where every server may see their paths, the paper's SecPred: bool (n,), row goes left.

    Server `own`'s shares: `values` (n, 2), the value that each row's node compares (`Layout.encode_shown`), and
    `thresholds` (K, 2); `nodes` (n,) is each row's node, 0 to K - 1. CryptoError if shapes do not match, a number is
    not below p or an opened bit is neither 0 nor 1, and as in `is_negative`.
    """
    _check(values, nodes.shape, "values")
    _check(thresholds, (len(thresholds),), "thresholds")
    left = yield from is_negative(setting, own, field.subtract(values, thresholds[nodes]), prepared)
    opened = yield from open_to_all(setting, own, left, setting.degree)
    return _as_bits(opened)


def _sum_over_nodes(values: Words) -> Words:
    """Add up over the last axis but two: (*, K, n, 2) -> (*, n, 2)."""
    total = values[..., 0, :, :]
    for node in range(1, values.shape[-3]):
        total = field.add(total, values[..., node, :, :])
    return total


def _opened(setting: Setting, shares: Words) -> Words:
    if len(shares) != setting.servers:
        raise CryptoError(f"expected shares of {setting.servers} servers to open, got {len(shares)}")
    field.check_numbers(shares, "shares to open")
    flat = open_checked(setting, shares.reshape(setting.servers, -1, 2), setting.degree)
    return flat.reshape(shares.shape[1:])


def _as_bits(opened: Words) -> NDArray[np.bool_]:
    bits: NDArray[np.bool_] = opened[..., 0] == 1
    if not np.array_equal(field.from_signed(bits.astype(np.int64)), opened):
        raise CryptoError("expected bits of 0 or 1, got other numbers - at secure routing")
    return bits


def _check(numbers: Words, shape: tuple[int, ...], what: str) -> None:
    """Raise CryptoError for shares that are not of this field or have another shape (given without the last axis)."""
    field.check_numbers(numbers, what)
    if numbers.shape[:-1] != shape:
        raise CryptoError(f"expected {what} of shape {shape}, got {numbers.shape[:-1]} - at secure routing")
