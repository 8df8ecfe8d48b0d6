"""FederBoost on tables split by column as a system."""

from __future__ import annotations

from treaty.systems.federboost_vertical.disclosures import disclosures
from treaty.systems.federboost_vertical.expected import expected
from treaty.systems.federboost_vertical.options import FederBoostVertical
from treaty.systems.federboost_vertical.roles import active, passive
from treaty.systems.federboost_vertical.told import TOLD
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import System
from treaty.systems.vertical.cast import cast_by_column
from treaty.systems.vertical.contributions import explain_active, explain_passive
from treaty.systems.vertical.decisions import predict_active, predict_passive
from treaty.systems.vertical.online import online_active, online_passive

SYSTEM = System(
    name="federboost-vertical",
    options=FederBoostVertical,
    common=BoostingOptions,
    split="columns",
    train={"active": active, "passive": passive},
    cast=cast_by_column,
    disclosures=disclosures,
    told=TOLD,
    expected=expected,
    on_clusters=lambda options: frozenset({"active"}),
    has_model=frozenset({"active", "passive"}),
    pays_once=True,
    orders_by_id=True,  # so that buckets of an earlier job on the same rows are the same
    predict={"active": predict_active, "passive": predict_passive},
    online={"active": online_active, "passive": online_passive},
    explain={"active": explain_active, "passive": explain_passive},
    warm_up=lambda options: [FederBoostVertical()],
)
