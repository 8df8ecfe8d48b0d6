"""Standard errors of weights: each party's own block of the inverse Hessian, by products of its columns with others'.

The covariance of the weights is sigma^2 (n F)^-1, where F is the mean Hessian of the loss and sigma^2 the residuals'
variance. Every party k rewrites its columns as Z_k = X_k T_k Q_k: uncorrelated, by T_k, and turned by a random rotation
Q_k that only k knows. Then the Hessian is M, with identities on its diagonal and the blocks C_kj = Z_k^T Z_j off it,
and k's block of (n F)^-1 is T_k Q_k (M^-1)_kk Q_k^T T_k^T / n. The products are those of training, with a column of Z_j
as j's vector and zeros as all others'.

Without a coordinator the active party takes its place. Between two parties it then learns C, which says as much as its
own block of the inverse; the other party learns its own block alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
import numpy as np

from treaty.errors import CryptoError, DataError, PeerProtocolError
from treaty.linear.preparation import TOO_FEW_ROWS, determined, random_rotation, with_sums
from treaty.machine.arrays import Floats
from treaty.messaging.messages import Array, ColumnSize, Message, leaks, leaks_by, view
from treaty.messaging.party import Party
from treaty.systems.logistic.coordinated import Opener
from treaty.systems.logistic.setup import MARGIN_BITS, Setting

# Of the Hessian in uncorrelated coordinates: below, columns of different parties depend on each other linearly
LEAST_EIGENVALUE = 1e-7

_ROUNDING = 1e-6

# Multiplies the own columns with a party's vector, which its owner gives, under the Hessian
Times = Callable[[str, Floats | None], Floats | None]


@leaks_by(
    to_coordinator=("canonical correlations between parties' columns", "aggregated"),
    to_active=("correlations between parties' columns, rotated", "aggregated"),
)
class CrossProducts(Message):
    """The sender's rotated columns times others', float64 (n_columns, columns of passive parties but the sender's).

    `rank` is how many of its columns are independent.
    """

    products: Array
    rank: ColumnSize


@leaks("how its columns correlate with the others'", "aggregated")
class InverseBlock(Message):
    """The receiver's block of the inverse, float64 (n_columns, n_columns); how many columns are independent in all."""

    block: Array
    rank: ColumnSize


@leaks("the variance of residuals", "aggregated")
class ErrorVariance(Message):
    """Variance of the residuals, in the units of training."""

    variance: Annotated[float, msgspec.Meta(ge=0)]


def standard_errors(
    party: Party,
    setting: Setting,
    X: Floats,
    hessian: Floats,
    times: Times,
    variance_of: Callable[[int], float] | None,
    sums: Floats,
    steps: Callable[[int, int], None],
) -> tuple[Floats, int]:
    """Return standard errors of the own weights, in the unit of training, and the residuals' degrees of freedom.

    The error is NaN of a constant column, and of one whose weight the optimum does not determine. `X` are the own
    columns (n_rows, n_columns), `hessian` is their block of the mean Hessian at the optimum. `variance_of` gives, at
    the active party, the variance for the residuals' degrees of freedom. After the weights' errors come those of
    `sums`, (n_sums, n_columns). `steps` is called with the products done, and how many there are. DataError where there
    are no more rows than independent columns, or columns of different parties depend on each other linearly.
    """
    n_rows, n_columns = X.shape
    local, known, rank = determined(X, hessian)
    # uncorrelated coordinates, turned by a rotation that no other party knows; dependent columns become zeros
    turned = np.zeros((n_columns, n_columns))
    turned[:, : local.shape[1]] = local @ random_rotation(local.shape[1])
    cross = _cross_products(party, setting, times, X, turned, steps)
    lead = setting.coordinator or setting.active
    if lead == party.name:
        blocks = _inverse(setting, {party.name: (cross, rank), **_collect(party, setting, setting.passives)})
        block, columns = blocks.pop(party.name)
        _give(party, blocks)
    else:
        whole = np.hstack([np.zeros((n_columns, 0)), *cross.values()])
        party.send(lead, CrossProducts(Array.of(np.ascontiguousarray(whole)), rank))
        answer, what = party.receive(lead, InverseBlock), "InverseBlock.block"
        block, columns = view(answer.block, np.float64, (n_columns, n_columns), peer=lead, what=what), answer.rank
        if not np.all(np.isfinite(block)):
            raise PeerProtocolError(lead, "expected finite numbers", at=what)
    degrees = n_rows - columns
    if degrees < 1:
        raise DataError(TOO_FEW_ROWS.format(rows=n_rows, columns=columns))
    if variance_of is None:
        variance = party.receive(setting.active, ErrorVariance).variance
    else:
        variance = variance_of(degrees)
        for peer in setting.passives:
            party.send(peer, ErrorVariance(variance))
    turned, known = with_sums(turned, known, sums)
    # the diagonal of T Q (M^-1)_kk Q^T T^T
    squares = np.einsum("ij,jk,ik->i", turned, block, turned) * variance / n_rows
    return np.where(known, np.sqrt(np.maximum(squares, 0.0)), np.nan), degrees


def _cross_products(
    party: Party, setting: Setting, times: Times, X: Floats, turned: Floats, steps: Callable[[int, int], None]
) -> dict[str, Floats]:
    """Return the own C_kj, (n_columns, n_columns of j), for each passive party j but this one."""
    # entries are at most the root of n / curvature in size: scaled down where that exceeds what a margin may be
    halvings = max(0, math.ceil(math.log2(len(X) / setting.curvature) / 2) - MARGIN_BITS + 1)
    Z = X @ turned * 2.0**-halvings
    cross, done, total = {}, 0, sum(setting.n_columns[owner] for owner in setting.passives)
    for owner in setting.passives:
        found = []
        for column in range(setting.n_columns[owner]):
            products = times(owner, Z[:, column] if owner == party.name else None)
            if products is not None:
                found.append(turned.T @ products * 2.0**halvings)
            done += 1
            steps(done, total)
        if owner != party.name:
            cross[owner] = np.array(found).reshape(-1, X.shape[1]).T
    return cross


def invert_blocks(party: Party, setting: Setting, opener: Opener | None) -> None:
    """As a coordinator, decrypt the products where it has the key, and give all parties their blocks of the inverse."""
    for _ in range(sum(setting.n_columns[name] for name in setting.passives)):
        if opener is not None:
            opener.open()
    _give(party, _inverse(setting, _collect(party, setting, setting.owners)))


Crossed = tuple[dict[str, Floats], int]


def _collect(party: Party, setting: Setting, owners: list[str]) -> dict[str, Crossed]:
    """Receive parties' cross products, by the other party, and their ranks."""
    collected = {}
    for name in owners:
        others = [other for other in setting.passives if other != name]
        widths = [setting.n_columns[other] for other in others]
        message, what = party.receive(name, CrossProducts), "CrossProducts.products"
        whole = view(message.products, np.float64, (setting.n_columns[name], sum(widths)), peer=name, what=what)
        if not np.all(np.abs(whole) < 1.0 + _ROUNDING) or message.rank > setting.n_columns[name]:
            raise PeerProtocolError(name, "expected correlations, of size 1 at most", at=what)
        cut = np.split(whole, np.cumsum(widths)[:-1], axis=1) if widths else []
        collected[name] = (dict(zip(others, cut, strict=True)), message.rank)
    return collected


def _inverse(setting: Setting, collected: Mapping[str, Crossed]) -> dict[str, tuple[Floats, int]]:
    """Return every party's block of M^-1, and how many columns are independent."""
    ends = np.cumsum([setting.n_columns[name] for name in setting.owners])
    place = {
        name: slice(int(end) - setting.n_columns[name], int(end))
        for name, end in zip(setting.owners, ends, strict=True)
    }
    # identities on the diagonal; of a pair with the active party only one side has its products
    M = np.eye(int(ends[-1]))
    for name, (crossed, _) in collected.items():
        for other, block in crossed.items():
            M[place[name], place[other]] = block
            if other not in collected or name not in collected[other][0]:
                M[place[other], place[name]] = block.T
    if np.abs(M - M.T).max() > _ROUNDING:
        raise CryptoError("cross products of two parties differ: malformed contribution")
    # rounding leaves M not quite symmetric
    values, vectors = np.linalg.eigh((M + M.T) / 2.0)
    if values[0] < LEAST_EIGENVALUE:
        raise DataError(
            "columns of different parties depend on each other linearly: their weights have no standard errors; leave "
            "out columns that another party has as well",
            public="columns of different parties depend on each other linearly: weights have no standard errors",
        )
    inverse = (vectors / values) @ vectors.T
    rank = sum(rank for _, rank in collected.values())
    return {name: (np.ascontiguousarray(inverse[of, of]), rank) for name, of in place.items()}


def _give(party: Party, blocks: Mapping[str, tuple[Floats, int]]) -> None:
    for name, (block, rank) in blocks.items():
        party.send(name, InverseBlock(Array.of(block), rank))
