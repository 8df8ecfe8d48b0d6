"""Weights of rows in a logistic regression between parties: told to all parties with data, by consent.

============  =======================  ================================================
message       from -> to               content
============  =======================  ================================================
`RowWeights`  active party -> passive  weights of all rows, once, before the first step
============  =======================  ================================================

Every party multiplies its part of a row's margin by the row's weight, and the active party the label, so that all
products and the loss are weighted. Hidden weights would need products of a passive party's own columns with its own
margins under weights that it does not know.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import ClassVar

import numpy as np

from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.machine.arrays import Floats, Integers
from treaty.messaging.leakage import MessageLeakage
from treaty.messaging.messages import Array, Message, send_rows, take_rows, view
from treaty.messaging.party import Party
from treaty.systems.logistic.setup import LARGEST_WEIGHT, GlmInput, OwnData, Setting, check_guards

logger = logging.getLogger(__name__)

TELLING = 0.1
"""Above 1/2, the area under the curve from which on weights of rows are warned of: they tell labels."""


class RowWeights(Message):
    """Weights of rows, float64, of many the next ones. Tell what they were made of: class weights tell labels."""

    leakage: ClassVar = MessageLeakage(
        "the weights of all rows, and what they were made of: weights of classes tell labels",
        "exact",
        guard="show_weights=False",
    )

    values: Array


def check_shown(inputs: GlmInput, y: Floats, weight: Floats) -> None:
    """Refuse weights of rows (n_rows,) that no party may be told, or that no fixed point holds; warn of telling ones.

    Raises ConfigError or DataError.
    """
    name = inputs.party.name
    if inputs.options.mode == "paper":
        raise ConfigError("mode='paper' has no weights of rows, as the paper has none: expected sample_weight=None")
    if not inputs.options.show_weights:
        raise ConfigError(
            "weights of rows have to be told to all parties with data, which multiply their parts of margins by them; "
            f"if these may know them, set show_weights=True in {type(inputs.options).__name__} at every party (weights "
            "that follow labels, as class weights do, tell labels), or leave sample_weight out"
        )
    largest = float(weight.max() / weight.mean())
    if largest > LARGEST_WEIGHT:
        raise DataError(
            f"{name}: expected weights of at most {LARGEST_WEIGHT} times their mean, got {largest:.0f} times; cap them"
        )
    from sklearn.metrics import roc_auc_score  # late: few trainings have weights

    area = float(roc_auc_score(y > 0.5, weight))
    if abs(area - 0.5) > TELLING:
        logger.warning(
            "%s: weights of rows, which all parties with data are told, tell labels with AUC %.2f", name,
            max(area, 1.0 - area),
        )  # fmt: skip


def tell_weights(party: Party, setting: Setting, own: OwnData, batches: Integers) -> OwnData:
    """Tell passive parties the weights of rows, or receive them; return the own data with them.

    Every party multiplies its part of a margin by the row's weight, and the active party its labels. Raises ConfigError
    when a batch has too few rows of any weight to hide labels.
    """
    if not setting.weighted:
        return own
    if own.weight is not None:
        told = own.weight
        for peer in setting.passives:
            send_rows(party, peer, setting.n_rows, 64, lambda of: RowWeights(Array.of(told[of])))
    else:
        weight = np.empty(setting.n_rows)
        for of, piece in take_rows(party, setting.active, setting.n_rows, 64, RowWeights):
            shape = (of.stop - of.start,)
            weight[of] = view(piece.values, np.float64, shape, peer=setting.active, what="RowWeights.values")
        if not (np.all((weight >= 0.0) & (weight <= LARGEST_WEIGHT)) and abs(weight.mean() - 1.0) < 1e-6):
            raise PeerProtocolError(
                setting.active,
                f"expected weights of 0 to {LARGEST_WEIGHT} with mean 1 - at RowWeights from {setting.active}",
            )
        own = replace(own, weight=weight)
    assert own.weight is not None
    least = int(np.count_nonzero(own.weight[batches], axis=1).min())
    try:
        check_guards(setting, least)
    except ConfigError as error:
        raise ConfigError(f"of rows that weigh more than 0: {error}") from None
    return own
