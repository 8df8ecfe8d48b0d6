"""Federated prediction of a linear model: passive parties add their parts of the margins, the active one gets the sum.

A margin is a sum of parties' parts, so the active party, who gets it, knows the passive parties' share of it whatever
is done. Of several passive parties it learns no more: masks that cancel in the sum hide their parts. Of a single one it
learns its part of every row's margin; given as many rows as that party has columns, and these columns' values in them,
it can solve for the party's weights.

What each message tells is in `logistic.leakage`.

Numbers are rounded to multiples of 2^-32. Passive parties learn nothing, not even the margins. The coordinator has no
part in prediction. At the end of a training the same messages give the active party the margins of the training rows,
to which it fits its calibration, and after each epoch those of eval sets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from treaty.crypto.keystream import add_masks, mask_nonce, pair_keys
from treaty.errors import DataError
from treaty.machine.arrays import Floats
from treaty.messaging.conversation import OF_ONE_MODEL, agree
from treaty.messaging.messages import Array, Message, MessageLeakage, send_rows, take_rows, view
from treaty.messaging.party import Party
from treaty.systems.logistic.setup import GlmInput, pair_seeds
from treaty.systems.vertical.prediction import Asked, Finish, OnlineRows, answer_requests, asked_rows

FRACTION_BITS = 32
_LARGEST = 2.0**30  # of a part of a margin


class MarginPart(Message):
    """Parts of margins of rows, uint64, in units of 2^-32 modulo 2^64; masked if there are several passive parties.

    Of many rows there are several, each of the next ones.
    """

    leakage: ClassVar = {
        "training": MessageLeakage(
            "the sender's parts of the scores (margins) of training rows (calibrate) or eval rows; of several "
            "passive parties their sum",
            "exact",
            guard="calibrate=False, show_eval_margins=False",
        ),
        "prediction": MessageLeakage(
            "the sender's parts of margins; of several passive parties their sum. From many rows of one whose "
            "values it knows, weights follow",
            "exact",
        ),
    }

    values: Array


def predict_active(inputs: GlmInput) -> Floats:
    """Predict rows as the label holder; all other owners play `predict_passive`.

    The role's `data` has the own columns of the rows, its `part` the own part of the model, with the intercept.
    Returns margins float64 (n_rows,), which the part makes log-odds of the second class of, see `LinearPart.log_odds`.

    Raises ConfigError when parties disagree on model or rows, PeerError when a peer is lost or sends something else.
    """
    party, table = inputs.party, inputs.rows.table
    agree(party, _terms(inputs), remedy=OF_ONE_MODEL)
    own = inputs.part.margins(table)
    return collect_margins(party, inputs.others, own.reshape(-1)).reshape(own.shape)


def collect_margins(party: Party, passives: Sequence[str], own: Floats) -> Floats:
    """Add all passive parties' parts to the own part (n_rows,), as the active party."""
    summed = np.zeros(len(own), np.uint64)
    for peer in passives:
        for of, part in take_rows(party, peer, len(own), 64, MarginPart):
            summed[of] += view(part.values, np.uint64, (of.stop - of.start,), peer=peer, what="MarginPart.values")
    return own + summed.view(np.int64) * 2.0**-FRACTION_BITS


def predict_passive(inputs: GlmInput) -> None:
    """Help the active party to predict rows, without learning anything; inputs and errors as of `predict_active`.

    Raises DataError when a part of a margin is too large.
    """
    party = inputs.party
    agree(party, _terms(inputs), remedy=OF_ONE_MODEL)
    give_margins(party, inputs.roles.active, inputs.others, inputs.part.margins(inputs.rows.table).reshape(-1))


def give_margins(party: Party, active: str, passives: Sequence[str], margins: Floats) -> None:
    """Send the active party the own part of margins (n_rows,), under masks that cancel over all passive parties."""
    others = [name for name in passives if name != party.name]
    # once: the seeds serve these rows alone
    send_margins(party, active, margins, pair_seeds(party, others), 0, "margins")


def send_margins(
    party: Party, active: str, margins: Floats, seeds: Mapping[str, bytes], round_: int, what: str
) -> None:
    """Send them under masks of the `seeds` shared with each other passive party; `round_` and `what` name the sum."""
    if not np.all(np.abs(margins) < _LARGEST):
        raise DataError(f"{party.name}: expected parts of margins below 2^30, got a larger one - in the model")
    values = np.rint(margins * 2.0**FRACTION_BITS).astype(np.int64).view(np.uint64)
    nonce = mask_nonce(party.job, party.protocol, round_, 0, what)
    add_masks(values, *pair_keys(party.name, seeds, seeds, nonce))
    send_rows(party, active, len(values), 64, lambda of: MarginPart(Array.of(values[of])))


def _terms(inputs: GlmInput) -> dict[str, str | int]:
    return {"model": inputs.part.model_id, "rows to predict": inputs.rows.table.n_rows}


# ------------ prediction of a linear model row by row, by parties that have aligned their rows once and stay connected
#
# The active party names rows as it does for trees (`vertical.online`); passive parties answer with their parts of these
# rows' margins, masked as in a prediction of many rows at a time (`prediction`), afresh for each request. Masks depend
# on which rows are asked for, so that an active party that names different rows to different passive parties gets
# noise.
#
# What each message tells is in `logistic.leakage`.


def online_active(inputs: GlmInput) -> None:
    """Predict what `inputs.requests` asks for, until it ends."""
    agree(inputs.party, _online_terms(inputs), remedy=OF_ONE_MODEL)

    def answer(asked: Asked) -> Floats:
        own = inputs.part.margins(asked.table)
        return collect_margins(inputs.party, inputs.others, own.reshape(-1)).reshape(len(own), -1)

    answer_requests(inputs, answer)


def online_passive(inputs: GlmInput) -> None:
    """Give the own parts of margins of the rows that the active party asks for, until it has finished."""
    party, active = inputs.party, inputs.roles.active
    agree(party, _online_terms(inputs), remedy=OF_ONE_MODEL)
    seeds = pair_seeds(party, [name for name in inputs.others if name != party.name])
    margins, number = inputs.part.margins(inputs.rows.table), 0
    while isinstance(asked := party.receive(active, OnlineRows, Finish), OnlineRows):
        party.transcript.clear()
        rows = asked_rows(asked, active, len(margins))
        if len(rows):
            number += 1
            what = f"online {hashlib.sha256(rows.tobytes()).hexdigest()}"
            send_margins(party, active, margins[rows].reshape(-1), seeds, number, what)


def _online_terms(inputs: GlmInput) -> dict[str, str | int]:
    return {"model": inputs.part.model_id, "rows": inputs.rows.table.n_rows}
