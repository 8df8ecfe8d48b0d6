"""FederBoost by row as a system."""

from __future__ import annotations

from collections.abc import Mapping

from treaty.errors import ConfigError
from treaty.systems.federboost_horizontal.disclosures import disclosures
from treaty.systems.federboost_horizontal.expected import expected
from treaty.systems.federboost_horizontal.options import FederBoostHorizontal
from treaty.systems.federboost_horizontal.roles import check_members, leader, member
from treaty.systems.federboost_horizontal.told import TOLD
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Cast, Place, System


def cast(places: Mapping[str, Place], active: str, options: FederBoostHorizontal) -> Cast:
    """Make the active party the leader, which needs no rows and no place, and all others members.

    Raises ConfigError when another party brings no rows, a role is given, or members are too few for sums to hide
    anything.
    """
    wished = [name for name, place in places.items() if place.role or place.edge]
    if wished:
        raise ConfigError(
            f"expected no role and edge with protocol {options.system!r}, got them at {', '.join(wished)}"
        )
    without = [name for name, place in places.items() if not place.has_rows and name != active]
    if without:
        raise ConfigError(
            f"expected a table of every party but the active one, got none of {', '.join(without)}: in a horizontal "
            "job parties.NAME.table says who brings rows, in everybody's copy of the file (only one's own is read)"
        )
    owners = [name for name, place in places.items() if place.has_rows]
    check_members(options, owners)
    return Cast(active, dict.fromkeys(places, "member") | {active: "leader"}, owners)


def may_lose(cast: Cast, options: FederBoostHorizontal) -> list[str]:
    """Return all members but the leader, with ``dropout="accept"``."""
    return [name for name in cast.owners if name != cast.active] if options.dropout == "accept" else []


SYSTEM = System(
    name="federboost-horizontal",
    options=FederBoostHorizontal,
    common=BoostingOptions,
    split="rows",
    train={"leader": leader, "member": member},
    cast=cast,
    disclosures=disclosures,
    told=TOLD,
    expected=expected,
    on_clusters=lambda options: frozenset({"leader", "member"}),
    has_model=frozenset({"leader", "member"}),
    may_lose=may_lose,
    vouched=lambda cast, options, name: cast.owners,  # members check also the keys of whom they do not talk to
    cannot={
        "explain": "contributions need how many rows reached each node, which a federboost-horizontal model leaves "
        "out: participants could tell each other's rows from it"
    },
    warm_up=lambda options: [FederBoostHorizontal()],
)
