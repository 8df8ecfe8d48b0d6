"""Prediction of a linear model row by row, by parties that have aligned their rows once and stay connected.

The active party names rows as it does for trees (`vertical.online`); passive parties answer with their parts of these
rows' margins, masked as in a prediction of many rows at a time (`prediction`), afresh for each request. Masks depend on
which rows are asked for, so that an active party that names different rows to different passive parties gets noise.

What each message tells is in `logistic.leakage`.
"""

from __future__ import annotations

import hashlib

from treaty.machine.arrays import Floats
from treaty.messaging.conversation import OF_ONE_MODEL, agree
from treaty.systems.logistic.prediction import collect_margins, send_margins
from treaty.systems.logistic.setup import GlmInput, pair_seeds
from treaty.systems.vertical.prediction import Asked, Finish, OnlineRows, answer_requests, asked_rows


def online_active(inputs: GlmInput) -> None:
    """Predict what `inputs.requests` asks for, until it ends."""
    agree(inputs.party, _terms(inputs), remedy=OF_ONE_MODEL)

    def answer(asked: Asked) -> Floats:
        own = inputs.part.margins(asked.table)
        return collect_margins(inputs.party, inputs.others, own.reshape(-1)).reshape(len(own), -1)

    answer_requests(inputs, answer)


def online_passive(inputs: GlmInput) -> None:
    """Give the own parts of margins of the rows that the active party asks for, until it has finished."""
    party, active = inputs.party, inputs.roles.active
    agree(party, _terms(inputs), remedy=OF_ONE_MODEL)
    seeds = pair_seeds(party, [name for name in inputs.others if name != party.name])
    margins, number = inputs.part.margins(inputs.rows.table), 0
    while isinstance(asked := party.receive(active, OnlineRows, Finish), OnlineRows):
        party.transcript.clear()
        rows = asked_rows(asked, active, len(margins))
        if len(rows):
            number += 1
            what = f"online {hashlib.sha256(rows.tobytes()).hexdigest()}"
            send_margins(party, active, margins[rows].reshape(-1), seeds, number, what)


def _terms(inputs: GlmInput) -> dict[str, str | int]:
    return {"model": inputs.part.model_id, "rows": inputs.rows.table.n_rows}
