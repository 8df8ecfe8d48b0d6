"""FedXGB as a system: its roles, and what a runner has to know of them."""

from __future__ import annotations

from treaty.systems.fedxgb.authority import authority
from treaty.systems.fedxgb.disclosures import disclosures
from treaty.systems.fedxgb.edge import edge
from treaty.systems.fedxgb.expected import expected
from treaty.systems.fedxgb.layout import cast_of, dropouts, helpers, links, only_simulated
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.secpred.service import SERVICE
from treaty.systems.fedxgb.server import server
from treaty.systems.fedxgb.told import TOLD
from treaty.systems.fedxgb.user import user
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Cast, System


def users(cast: Cast, options: FedXGB) -> list[str]:
    """Return whom a training goes on without."""
    return cast.owners


def vouching_edges(cast: Cast, options: FedXGB, name: str) -> list[str]:
    """Return the edge servers, whose certificates they and the server check: masks between them depend on it."""
    return cast.having("edge") if cast.roles[name] in ("server", "edge") else []


SYSTEM = System(
    name="fedxgb",
    options=FedXGB,
    common=BoostingOptions,
    split="rows",
    train={"server": server, "edge": edge, "user": user, "authority": authority},
    cast=cast_of,
    helpers=helpers,
    links=links,
    disclosures=disclosures,
    told=TOLD,
    expected=expected,
    has_model=frozenset({"server"}),
    until_kept=frozenset({"edge", "user"}),
    named_roles=frozenset({"server", "edge", "authority"}),
    shows_columns=frozenset({"server"}),
    may_lose=users,
    may_be_absent=users,
    vouched=vouching_edges,
    service=SERVICE,
    absences=dropouts,
    only_simulated=only_simulated,
    warm_up=lambda options: [FedXGB()],
)
