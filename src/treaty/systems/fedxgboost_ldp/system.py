"""FedXGBoost-LDP as a system."""

from __future__ import annotations

import numpy as np

from treaty.privacy.mechanisms import MECHANISMS
from treaty.systems.fedxgboost_ldp.disclosures import disclosures
from treaty.systems.fedxgboost_ldp.expected import expected
from treaty.systems.fedxgboost_ldp.options import FedXGBoostLDP
from treaty.systems.fedxgboost_ldp.roles import active, passive
from treaty.systems.fedxgboost_ldp.told import TOLD
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import System
from treaty.systems.vertical.cast import cast_by_column
from treaty.systems.vertical.contributions import explain_active, explain_passive
from treaty.systems.vertical.decisions import predict_active, predict_passive
from treaty.systems.vertical.online import online_active, online_passive


def warm_up(options: FedXGBoostLDP | None) -> list[FedXGBoostLDP]:
    """Compile all mechanisms, of which a training has one alone; return the options of a small training."""
    for release in MECHANISMS.values():
        release(np.zeros(1), 1.0)
    return [FedXGBoostLDP()]


SYSTEM = System(
    name="fedxgboost-ldp",
    options=FedXGBoostLDP,
    common=BoostingOptions,
    split="columns",
    train={"active": active, "passive": passive},
    cast=cast_by_column,
    disclosures=disclosures,
    told=TOLD,
    expected=expected,
    has_model=frozenset({"active", "passive"}),
    pays_once=True,
    predict={"active": predict_active, "passive": predict_passive},
    online={"active": online_active, "passive": online_passive},
    explain={"active": explain_active, "passive": explain_passive},
    warm_up=warm_up,
)
