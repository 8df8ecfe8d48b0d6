"""Rows are routed down a hidden tree on Shamir shares: no server learns a row, a split or a path.

SecPred of FedXGB among three servers or more. Users share their rows and the model's owner its splits, both as in
`hidden_splits`; the owner fills the tree up to its depth with dummy splits, so that its shape is hidden, too. In each
level the servers compute for every row one number, that of the node the row is in, and compare it with zero.

Programs are generators of one server, all rows, nodes (and trees) at a time; see `secure_comparison` on the seam.
Whatever a user, the owner or a server sends is checked for its form; that it is meant honestly is not: numbers beyond
`Setting.bits` give wrong answers.

**Who learns what**, of honest but curious servers of which at most t put together what they see, over secure channels:

========  =============================================================================================================
server    numbers of rows, columns, levels and leaves, and who asks; nothing else, but for what `is_negative` says
user      what is opened to it: the side of its rows in each level where it is sent shares of b, else their leaf values
owner     nothing
========  =============================================================================================================

A user may collude with t servers: they learn what it is told. Whoever may ask for made-up rows finds out the splits.
In paper mode (`route_shown`) all servers and the user see every bit; features are known, only thresholds are hidden.

**Cost**, numbers of 16 bytes, per row and ordered pair of servers; l of the setting, K = 2^level; comparisons are to be
prepared before, one per row and level:

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

References
----------
Liu, Ma, Liu, Ma, Nepal, Deng, Boosting Privately, ICDCS 2020 (SecPred; there two servers' comparison, bits opened).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.sharing import shamir_field as field
from treaty.crypto.sharing.secret_sharing import make_shares
from treaty.crypto.sharing.secure_comparison import (
    Prepared,
    Program,
    Setting,
    is_negative,
    multiply,
    open_checked,
    open_to_all,
    reduce_degree,
)
from treaty.crypto.sharing.shamir_field import Words
from treaty.errors import CryptoError


def share_integers(setting: Setting, values: NDArray[np.int64]) -> Words:
    """Share rows, splits, thresholds or leaf values among the servers, as their owner.

    Parameters
    ----------
    setting : Setting
    values : int64 (...)

    Returns
    -------
    uint64 (servers, ..., 2)
        Of degree t; row i is for server i alone.
    """
    numbers = field.from_signed(values.reshape(-1))
    return make_shares(numbers, setting.points, setting.degree + 1).reshape(setting.servers, *values.shape, 2)


def open_integers(setting: Setting, shares: Words) -> NDArray[np.int64]:
    """Open what the servers have sent, as the user that is to learn it.

    Parameters
    ----------
    setting : Setting
    shares : uint64 (servers, ..., 2)
        Of degree t, of all servers, in order.

    Returns
    -------
    int64 (...)

    Raises
    ------
    CryptoError
        When shares are malformed or do not belong together (up to servers - t - 1 wrong ones are noticed), or an
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
    prepared: Prepared,
    threads: int = 1,
) -> Program[tuple[Words, Words]]:
    """Route rows one level further down.

    Any number of trees go at once, in the same rounds, where arrays marked * have leading axes for them.

    Parameters
    ----------
    setting : Setting
    own : int
        This server, from 0.
    rows : uint64 (n, D, 2)
        Its shares of encoded rows; contiguous and writable, or they are copied in every level.
    weights : uint64 (*, K, D, 2)
        Its shares of the splits of the level's K = 2^level nodes of a complete tree.
    thresholds : uint64 (*, K, 2)
    paths : uint64 (*, K, n, 2) or None
        Its shares of which node each row is in, as this returned them for the level above; None at the root.
    prepared : Prepared
        For n comparisons or more per tree.
    threads : int, default 1

    Returns
    -------
    left : uint64 (*, n, 2)
        Its shares of b: 1 where the row goes left, else 0.
    paths : uint64 (*, 2 K, n, 2)
        Its shares of 1 at the node of the next level where the row is, else 0. Children of node k are 2 k (left) and
        2 k + 1.

    Raises
    ------
    CryptoError
        When shapes do not belong together, a number is not below p, and as in `is_negative`.

    Notes
    -----
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
        raise CryptoError(f"expected paths of rows to {nodes} nodes, got none; only the root has none")
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
    """Return shares of the value of each row's leaf.

    For the sum over trees, whose single values the user is not to learn, give the leaves of all trees as those of one.

    Parameters
    ----------
    setting : Setting
    own : int
        This server, from 0.
    paths : uint64 (L, n, 2)
        Its shares of which leaf each row is in.
    values : uint64 (L, 2)
        Its shares of the leaves' values.

    Returns
    -------
    uint64 (n, 2)
        Of degree t.

    Raises
    ------
    CryptoError
        When shapes do not belong together or a number is not below p.
    """
    _check(paths, (len(values), *paths.shape[1:2]), "paths")
    _check(values, (len(values),), "leaf values")
    return (yield from reduce_degree(setting, own, _sum_over_nodes(field.multiply(paths, values[:, None]))))


def route_shown(
    setting: Setting, own: int, values: Words, thresholds: Words, nodes: NDArray[np.intp], prepared: Prepared
) -> Program[NDArray[np.bool_]]:
    """Route rows one level down where every server may see their paths: the paper's SecPred.

    Parameters
    ----------
    setting : Setting
    own : int
        This server, from 0.
    values : uint64 (n, 2)
        Its shares of the one value of each row that its node compares, see `Layout.encode_shown`.
    thresholds : uint64 (K, 2)
        Its shares of the nodes' thresholds.
    nodes : int (n,)
        In which node each row is, 0 to K - 1.
    prepared : Prepared
        For n comparisons or more.

    Returns
    -------
    bool (n,)
        Whether each row goes left; all servers get it.

    Raises
    ------
    CryptoError
        When shapes do not belong together, a number is not below p, a bit opened is neither 0 nor 1, and as in
        `is_negative`.
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
    """Refuse shares that are not of this field or have another shape (without the last axis, of two words)."""
    field.check_numbers(numbers, what)
    if numbers.shape[:-1] != shape:
        raise CryptoError(f"expected {what} of shape {shape}, got {numbers.shape[:-1]} - at secure routing")
