"""The record of FederBoost by row: who plays which role, who may be lost, what is said of it."""

from __future__ import annotations

import pytest

from treaty.errors import ConfigError
from treaty.systems import find_system
from treaty.systems.federboost_horizontal.options import FederBoostHorizontal
from treaty.systems.system import PartySpec

SYSTEM = find_system("federboost-horizontal")
THREE = {name: PartySpec() for name in ("north", "south", "east")}


def test_the_active_party_leads_with_or_without_rows():
    options = FederBoostHorizontal()
    roles = SYSTEM.assign(THREE, "south", options)
    assert roles.of == {"north": "member", "south": "leader", "east": "member"}
    assert roles.owners == list(THREE)
    assert SYSTEM.links(roles, options)["north"] == ["south"]
    for places in (THREE, {"server": PartySpec(has_rows=False), **THREE}):
        roles = SYSTEM.assign(places, "server", options)
        assert roles.having("leader") == ["server"]
        assert roles.owners == SYSTEM.vouched(roles, options, "server") == list(THREE)
        assert set(SYSTEM.links(roles, options)["server"]) == set(THREE)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({**THREE, "east": PartySpec(has_rows=False)}, "got none of east"),
        (
            {**THREE, "east": PartySpec(role="user")},
            "expected no role and edge with protocol 'federboost-horizontal', got them at east",
        ),
        ({**THREE, "east": PartySpec(edge="e0")}, "got them at east"),
        ({"north": PartySpec(), "south": PartySpec()}, "expected 3 participants"),
    ],
)
def test_parties_without_rows_with_roles_or_too_few_are_refused(places, words):
    with pytest.raises(ConfigError, match=words):
        SYSTEM.assign(places, "north", FederBoostHorizontal())


def test_members_may_be_lost_only_with_consent():
    roles = SYSTEM.assign({**THREE, "west": PartySpec()}, "north", FederBoostHorizontal())
    assert SYSTEM.may_lose(roles, FederBoostHorizontal()) == []
    assert SYSTEM.may_lose(roles, FederBoostHorizontal(dropout="accept")) == ["south", "east", "west"]
