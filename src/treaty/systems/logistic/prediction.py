"""Margins of a linear model: passive parties send their parts under masks, and the active party gets the sum.

The active party, which gets the sum, knows the passive parties' share of it in any case. Of several passive parties it
learns no more: masks that cancel hide their parts. Of a single one it learns its part of every row's margin; given as
many rows as that party has columns, and these columns' values in them, it can solve for the party's weights. Passive
parties learn nothing, not even the margins. A coordinator has no part in it.

The same messages serve the prediction of many rows, that of rows asked for one request at a time by parties that have
aligned their rows once and stay connected, the calibration at the end of a training, and eval sets after every epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from treaty.crypto.keystream import add_masks, mask_nonce, pair_keys
from treaty.errors import DataError
from treaty.linear.preparation import fit_calibration
from treaty.machine.arrays import Flags, Floats
from treaty.messaging.exchanges import OF_ONE_MODEL, Term, agree, send_rows, take_rows
from treaty.messaging.messages import Array, Message, leaks_by, view
from treaty.messaging.party import Party
from treaty.models.linear import LinearPart
from treaty.systems.logistic.setup import GlmInput, pair_seeds
from treaty.systems.vertical.prediction import Asked, Finish, OnlineRows, answer_requests, asked_rows

FRACTION_BITS = 32
_LARGEST = 2.0**30  # of a part of a margin


@leaks_by(
    training=(
        "the sender's parts of the scores (margins) of training rows (calibrate) or eval rows; of several "
        "passive parties their sum",
        "exact",
        "calibrate=False, show_eval_margins=False",
    ),
    prediction=(
        "the sender's parts of margins; of several passive parties their sum. From many rows of one whose "
        "values it knows, weights follow",
        "exact",
    ),
)
class MarginPart(Message):
    """Parts of margins of the next rows, uint64, in units of 2^-32 modulo 2^64; masked if there are several senders."""

    values: Array


def predict_active(inputs: GlmInput) -> Floats:
    """Predict rows as the label holder; all other owners play `predict_passive`.

    The input has the own columns of the rows, and the own part of the model, with the intercept. Returns margins
    float64 (n_rows,), which the part turns into log-odds of the second class, see `LinearPart.log_odds`.

    Raises ConfigError when parties disagree on model or rows, PeerError when a peer is lost or sends another message.
    """
    _agree_on_rows(inputs, "rows to predict")
    own = inputs.part.margins(inputs.rows.table)
    return collect_margins(inputs.party, inputs.others, own.reshape(-1)).reshape(own.shape)


def collect_margins(party: Party, passives: Sequence[str], own: Floats) -> Floats:
    """Add all passive parties' parts to the own part (n_rows,), as the active party."""
    # masks cancel modulo 2^64; the sum is signed
    summed = np.zeros(len(own), np.uint64)
    for peer in passives:
        for of, part in take_rows(party, peer, len(own), 64, MarginPart):
            summed[of] += view(part.values, np.uint64, (of.stop - of.start,), peer=peer, what="MarginPart.values")
    return own + summed.view(np.int64) * 2.0**-FRACTION_BITS


def predict_passive(inputs: GlmInput) -> None:
    """Help the active party to predict rows, without learning anything; inputs and errors as of `predict_active`.

    Raises DataError when a part of a margin is too large.
    """
    _agree_on_rows(inputs, "rows to predict")
    _give_margins(inputs, inputs.part.margins(inputs.rows.table).reshape(-1))


def calibrate(inputs: GlmInput, part: LinearPart, positive: Flags) -> None:
    """Have the active party fit its calibration to margins of the training rows and its labels, which are `positive`.

    It gets these margins from all parties, as in a prediction.
    """
    margins = part.margins(inputs.rows.table)
    if inputs.party.name == inputs.roles.active:
        margins = collect_margins(inputs.party, inputs.others, margins)
        part.calibration = fit_calibration(margins, positive.astype(np.float64), inputs.rows.weight)
    else:
        _give_margins(inputs, margins)


def _give_margins(inputs: GlmInput, margins: Floats) -> None:
    """Send the active party the own part of margins (n_rows,), under masks made for these rows alone."""
    others = [name for name in inputs.others if name != inputs.party.name]
    seeds = pair_seeds(inputs.party, others)
    send_margins(inputs.party, inputs.roles.active, margins, seeds, 0, "margins")


def send_margins(
    party: Party, active: str, margins: Floats, seeds: Mapping[str, bytes], round_: int, what: str
) -> None:
    """Send parts of margins (n_rows,) under masks that cancel over all passive parties.

    `seeds` are those shared with each other one; `round_` and `what` name the sum.
    """
    if not np.all(np.abs(margins) < _LARGEST):
        raise DataError(f"{party.name}: expected parts of margins below 2^30, got a larger one - in the model")
    values = np.rint(margins * 2.0**FRACTION_BITS).astype(np.int64).view(np.uint64)
    nonce = mask_nonce(party.job, party.protocol, round_, 0, what)
    add_masks(values, *pair_keys(party.name, seeds, seeds, nonce))
    send_rows(party, active, len(values), 64, lambda of: MarginPart(Array.of(values[of])))


def _agree_on_rows(inputs: GlmInput, rows: str) -> None:
    """Compare the model, and how many rows there are, with all peers; `rows` is what they are called."""
    terms: dict[str, Term] = {"model": inputs.part.model_id, rows: inputs.rows.table.n_rows}
    agree(inputs.party, terms, remedy=OF_ONE_MODEL)


def online_active(inputs: GlmInput) -> None:
    """Predict what `inputs.requests` asks for, until it ends."""
    _agree_on_rows(inputs, "rows")

    def answer(asked: Asked) -> Floats:
        own = inputs.part.margins(asked.table)
        return collect_margins(inputs.party, inputs.others, own.reshape(-1)).reshape(len(own), -1)

    answer_requests(inputs, answer)


def online_passive(inputs: GlmInput) -> None:
    """Give the own parts of margins of the rows that the active party asks for, until it has finished."""
    party, active = inputs.party, inputs.roles.active
    _agree_on_rows(inputs, "rows")
    seeds = pair_seeds(party, [name for name in inputs.others if name != party.name])
    margins, number = inputs.part.margins(inputs.rows.table), 0
    while isinstance(asked := party.receive(active, OnlineRows, Finish), OnlineRows):
        party.transcript.clear()
        rows = asked_rows(asked, active, len(margins))
        if len(rows):
            number += 1
            # masks depend on the rows: an active party that names others to another passive party gets noise
            what = f"online {hashlib.sha256(rows.tobytes()).hexdigest()}"
            send_margins(party, active, margins[rows].reshape(-1), seeds, number, what)
