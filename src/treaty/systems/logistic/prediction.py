"""Federated prediction of a linear model: every host adds its part of the margins, the guest gets the sum.

A margin is a sum of parties' parts, so the guest, who gets it, knows the hosts' share of it whatever is done. Of
several hosts it learns no more: their parts go under masks that cancel in the sum. Of one host it learns its part of
every row's margin; over as many rows as the host has columns, and knowing the values of these in them, its weights.

============  ==============  ======================================================================
message       from -> to      what it tells
============  ==============  ======================================================================
`PairKey`     host -> host    nothing
`MarginPart`  host -> guest   its parts of margins; of several hosts, these summed over all
============  ==============  ======================================================================

Numbers are rounded to multiples of 2^-32. Hosts learn nothing, not even the margins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto.aggregation.key_agreement import agree as agree_on_pair
from treaty.crypto.aggregation.masks import add_masks, mask_nonce, pair_keys
from treaty.data.table import Table
from treaty.errors import DataError
from treaty.messaging.agreement import OF_ONE_MODEL, agree
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.models.linear import LinearPart
from treaty.systems.logistic.setup import PairKey

FRACTION_BITS = 32
_LARGEST = 2.0**30  # of a part of a margin


class MarginPart(Message):
    """Parts of margins uint64 (n_rows,), in units of 2^-32 modulo 2^64, masked if there are several hosts."""

    values: Array


def predict_guest(party: Party, part: LinearPart, table: Table) -> NDArray[np.float64]:
    """Predict rows as the label holder; all peers play `predict_host`.

    Parameters
    ----------
    part : LinearPart
        Own, with the intercept.
    table : Table
        Own columns of the rows.

    Returns
    -------
    float64 (n_rows,)
        Margins: log-odds of the second class.

    Raises
    ------
    ConfigError
        When parties disagree on model or rows.
    PeerError
        When a peer is lost or sends something else.
    """
    agree(party, _terms(part, table), remedy=OF_ONE_MODEL)
    summed = np.zeros(table.n_rows, np.uint64)
    for host in party.peers:
        values = party.receive(host, MarginPart).values
        summed += view(values, np.uint64, (table.n_rows,), peer=host, what="MarginPart.values")
    return part.margins(table) + summed.view(np.int64) * 2.0**-FRACTION_BITS


def predict_host(party: Party, part: LinearPart, table: Table, *, guest: str, hosts: Sequence[str]) -> None:
    """Help the guest to predict rows; `hosts` are all of them, errors as of `predict_guest`."""
    agree(party, _terms(part, table), remedy=OF_ONE_MODEL)
    margins = part.margins(table)
    if not np.all(np.abs(margins) < _LARGEST):
        raise DataError(f"{party.name}: expected parts of margins below 2^30, got a larger one - in the model")
    values = np.rint(margins * 2.0**FRACTION_BITS).astype(np.int64).view(np.uint64)
    others = [host for host in hosts if host != party.name]
    own = X25519PrivateKey.generate()
    for peer in others:
        party.send(peer, PairKey(own.public_key().public_bytes_raw()))
    seeds = {
        peer: agree_on_pair(own, party.receive(peer, PairKey).key, party.job, *sorted((party.name, peer)))
        for peer in others
    }
    nonce = mask_nonce(party.job, party.protocol, 0, 0, "margins")  # once: the seeds serve this prediction alone
    add_masks(values, *pair_keys(party.name, seeds, others, nonce))
    party.send(guest, MarginPart(Array.of(values)))


def _terms(part: LinearPart, table: Table) -> dict[str, str | int]:
    return {"model": part.model_id, "rows to predict": table.n_rows}
