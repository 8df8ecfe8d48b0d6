"""SecureBoost as a system."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.secureboost.disclosures import disclosures
from treaty.systems.secureboost.hidden_prediction import hidden_active, hidden_passive
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.secureboost.roles import active, passive
from treaty.systems.secureboost.told import TOLD
from treaty.systems.system import Seat, System
from treaty.systems.vertical.cast import cast_by_column, fellow_owners
from treaty.systems.vertical.cipher_options import unaudited
from treaty.systems.vertical.contributions import explain_active, explain_passive
from treaty.systems.vertical.decisions import predict_active, predict_passive
from treaty.systems.vertical.expected_sums import expected_of_sums
from treaty.systems.vertical.online import online_active, online_passive


def predict(seat: Seat) -> NDArray[np.float64]:
    """Return margins (n_rows, n_outputs) as the active party; with `he_inference` from encrypted leaf weights."""
    return hidden_active(seat) if seat.options.hides_decisions else predict_active(seat)


def follow_prediction(seat: Seat) -> None:
    """Take part in a prediction as a passive party, see `predict`."""
    return hidden_passive(seat) if seat.options.hides_decisions else predict_passive(seat)


def warm_up(options: SecureBoost | None) -> list[SecureBoost]:
    """Return options of small trainings that compile what is needed under these options, or under any."""
    sealed = SecureBoost(sums="sealed")
    if options is not None and options.ciphers.sealed:
        return [sealed]
    lattice = SecureBoost(encryption="lattice", allow_exact_sums=True)
    if options is not None and options.cipher in ("auto", "lattice"):  # which "auto" nearly always is
        return [lattice]
    keyed = SecureBoost(encryption="ou", insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True)
    return [keyed, lattice, sealed] if options is None else [keyed]


SYSTEM = System(
    name="secureboost",
    options=SecureBoost,
    common=BoostingOptions,
    split="columns",
    train={"active": active, "passive": passive},
    cast=cast_by_column,
    vouched=fellow_owners,
    disclosures=disclosures,
    told=TOLD,
    lossless=True,
    on_clusters=lambda options: frozenset({"active", "passive"}),
    has_model=frozenset({"active", "passive"}),
    pays_once=True,
    predict={"active": predict, "passive": follow_prediction},
    online={"active": online_active, "passive": online_passive},
    explain={"active": explain_active, "passive": explain_passive},
    unaudited=lambda options: unaudited(options.ciphers),
    warm_up=warm_up,
    expected=lambda cast, options, common, shape: expected_of_sums(
        cast, options.ciphers, common, shape, alone=options.rl_trees or 0
    ),
)
