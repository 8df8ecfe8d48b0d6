"""The record of FederBoost by row: who plays which role, who may be lost, what is said of it."""

from __future__ import annotations

import pytest

from treaty.errors import ConfigError
from treaty.systems import find_system
from treaty.systems.federboost_horizontal.options import FederBoostHorizontal
from treaty.systems.system import Place

SYSTEM = find_system("federboost-horizontal")
THREE = {name: Place() for name in ("north", "south", "east")}


def test_the_active_party_leads_with_or_without_rows():
    options = FederBoostHorizontal()
    cast = SYSTEM.cast(THREE, "south", options)
    assert cast.roles == {"north": "member", "south": "leader", "east": "member"}
    assert cast.owners == list(THREE)
    assert SYSTEM.links(cast, options)["north"] == ["south"]
    for places in (THREE, {"server": Place(has_rows=False), **THREE}):
        cast = SYSTEM.cast(places, "server", options)
        assert cast.having("leader") == ["server"]
        assert cast.owners == SYSTEM.vouched(cast, options, "server") == list(THREE)
        assert set(SYSTEM.links(cast, options)["server"]) == set(THREE)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        ({**THREE, "east": Place(has_rows=False)}, "got none of east"),
        (
            {**THREE, "east": Place(role="user")},
            "expected no role and edge with protocol 'federboost-horizontal', got them at east",
        ),
        ({**THREE, "east": Place(edge="e0")}, "got them at east"),
        ({"north": Place(), "south": Place()}, "expected 3 participants"),
    ],
)
def test_parties_without_rows_with_roles_or_too_few_are_refused(places, words):
    with pytest.raises(ConfigError, match=words):
        SYSTEM.cast(places, "north", FederBoostHorizontal())


def test_members_may_be_lost_only_with_consent():
    cast = SYSTEM.cast({**THREE, "west": Place()}, "north", FederBoostHorizontal())
    assert SYSTEM.may_lose(cast, FederBoostHorizontal()) == []
    assert SYSTEM.may_lose(cast, FederBoostHorizontal(dropout="accept")) == ["south", "east", "west"]
