"""Who is who in a crowd, who talks to whom, and who drops out of a simulation when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from systems.fedxgb.playing import laid_out, options_of, roles_with
from treaty.errors import ConfigError
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.roles import domains
from treaty.systems.fedxgb.system import SYSTEM
from treaty.systems.system import PartySpec

USERS = [f"user{k}" for k in range(6)]
SHOWN = FedXGB(expose="model")


def places(**changed: Any) -> dict[str, PartySpec]:
    given = {
        "owner": PartySpec(has_rows=False),
        **dict.fromkeys(("berlin", "tokyo"), PartySpec("edge", has_rows=False)),
    }
    return {**given, "notary": PartySpec("authority", has_rows=False), **dict.fromkeys(USERS, PartySpec()), **changed}


def test_users_without_an_edge_server_are_dealt_out():
    roles = SYSTEM.assign(places(user0=PartySpec(edge="tokyo")), "owner", SHOWN)
    assert domains(roles) == {"berlin": ["user1", "user3", "user5"], "tokyo": ["user0", "user2", "user4"]}
    assert roles.of == {
        "owner": "server", "berlin": "edge", "tokyo": "edge", "notary": "authority", **dict.fromkeys(USERS, "user")
    }  # fmt: skip
    assert roles.owners == SYSTEM.may_lose(roles, SHOWN) == SYSTEM.may_be_absent(roles, SHOWN) == USERS


def test_server_may_have_rows_to_watch():
    assert SYSTEM.assign(places(owner=PartySpec()), "owner", SHOWN).owners == USERS


@pytest.mark.parametrize(
    ("changed", "options", "words"),
    [
        ({"notary": PartySpec("edge", has_rows=False)}, {}, "expected one key authority, .* got none"),
        ({"tokyo": PartySpec("authority", has_rows=False)}, {}, "expected one key authority, .* got tokyo, notary"),
        ({"berlin": PartySpec(has_rows=False)}, {}, 'expected parties.berlin to have a table, .* or role = "edge"'),
        ({"berlin": PartySpec("server", has_rows=False)}, {}, "active party owner, got parties.berlin.role"),
        ({"owner": PartySpec("edge", has_rows=False)}, {}, "active party owner, got parties.owner.role"),
        ({"berlin": PartySpec("dealer", has_rows=False)}, {}, 'server, edge, user or authority, got "dealer"'),
        ({"berlin": PartySpec("edge")}, {}, "of no other role, got one - at parties.berlin"),
        ({"user1": PartySpec("user", has_rows=False)}, {}, "a table of every user .* got none - at parties.user1"),
        ({"user1": PartySpec(edge="oslo")}, {}, r"\(berlin, tokyo\), got 'oslo'"),
        (
            {"tokyo": PartySpec("edge", "berlin", has_rows=False)},
            {},
            "of users alone, got parties.tokyo.edge of the edge",
        ),
        ({"user1": PartySpec(edge="berlin")}, {}, "got 2 at tokyo: of a sum over fewer"),
        ({}, {"expose": None}, "expected 3 edge servers or more, got 2"),
        ({}, {"edges": 3}, "expected edges to be 2"),
    ],
)
def test_a_crowd_that_cannot_be_is_refused(changed, options, words):
    with pytest.raises(ConfigError, match=words):
        SYSTEM.assign(places(**changed), "owner", FedXGB(**{"expose": "model", **options}))


def fitted(users: int, options: FedXGB) -> Any:
    """Return who is who in a fit."""
    names = [f"u{k}" for k in range(users)]
    helpers = SYSTEM.helpers(names, options)
    return SYSTEM.assign({**dict.fromkeys(names, PartySpec()), **helpers}, "server", options)


def test_fit_plays_three_edge_servers_unless_told_otherwise():
    assert domains(fitted(9, FedXGB())) == {f"edge{k}": [f"u{k}", f"u{k + 3}", f"u{k + 6}"] for k in range(3)}
    assert fitted(6, FedXGB(expose="model", edges=2)).having("edge") == ["edge0", "edge1"]
    with pytest.raises(
        ConfigError, match="12 users or more, 3 in the domain of each of 4 edge servers, got 2 at edge1"
    ):
        fitted(9, FedXGB(edges=4))


@pytest.mark.parametrize("name", ["server", "authority", "edge2"])
def test_no_user_may_be_called_like_a_helper(name):
    with pytest.raises(ConfigError, match=rf"other names than the server, .* got {name}"):
        SYSTEM.helpers(["ann", name], FedXGB())


@pytest.mark.parametrize("options", [SHOWN, FedXGB()], ids=["shown", "hidden"])
def test_links_go_both_ways_and_users_meet_other_edge_servers_where_the_model_is_hidden_alone(options):
    roles = laid_out(USERS, 2)
    links = SYSTEM.links(roles, options)
    assert all(one in links[other] for one, peers in links.items() for other in peers)
    assert links["server"] == ["authority", "edge0", "edge1"]
    assert links["user0"] == ["authority", *(["edge0"] if options is SHOWN else ["edge0", "edge1"])]
    assert set(links["authority"]) == set(roles.of) - {"authority"}


def test_certificates_of_edge_servers_are_for_them_and_the_server():
    roles = laid_out(USERS, 2)
    vouched = {name: SYSTEM.vouched(roles, FedXGB(), name) for name in ("server", "edge1", "user0", "authority")}
    assert vouched == {"server": ["edge0", "edge1"], "edge1": ["edge0", "edge1"], "user0": [], "authority": []}


# ---------------------------------------------------------------- dropouts


def drops(sizes: list[int], **chosen: Any) -> dict[str, Callable[[int, str], bool]]:
    users = (f"u{k}" for k in range(sum(sizes)))
    roles = roles_with({f"edge{k}": [next(users) for _ in range(size)] for k, size in enumerate(sizes)})
    assert SYSTEM.absences is not None
    return SYSTEM.absences(roles, *options_of(**chosen))  # type: ignore[return-value]


def test_who_drops_out_is_away_until_the_next_tenth_round():
    leaves = drops([10, 10], dropout=0.1, n_estimators=25, random_state=1)
    first = [
        (name, next(s for s in ("setup", "shared", "masked", "prediction") if at(10, s)))
        for name, at in leaves.items()
        if at(11, "call")
    ]
    assert len(first) == 2  # one of each domain
    for name, stage in first:
        at = leaves[name]
        assert not at(9, "call")
        assert [s for s in ("call", "setup", "shared", "masked", "prediction") if at(10, s)] == [stage]
        assert all(at(k, "call") for k in range(11, 20))
    assert sum(any(at(20, s) for s in ("setup", "shared", "masked", "prediction")) for at in leaves.values()) == 2


def test_dropout_says_where_it_loses_nobody(caplog):
    leaves = drops([10, 9, 9], dropout=0.1, n_estimators=10)
    assert len(leaves) == 1
    assert leaves.keys() <= {f"u{k}" for k in range(10)}
    assert [record.message for record in caplog.records] == [
        "dropout=0.1 loses none of the users of small domains: 9 at edge1, 9 at edge2"
    ]
    assert drops([10, 9, 9], dropout=0.2, n_estimators=9) == {}
    assert caplog.records[-1].message == "dropout begins with round 10: none of 9 rounds"


def test_dropout_that_loses_nobody_or_too_many_is_refused():
    with pytest.raises(ConfigError, match=r"to lose a user, got 0.3 of domains of 3 users or fewer"):
        drops([3, 3], dropout=0.3)
    with pytest.raises(ConfigError, match=r"can lose 0.4 of their users, got 3 in the largest"):
        drops([3, 3], dropout=0.4)


def test_dropout_is_for_simulations_alone():
    assert SYSTEM.only_simulated(FedXGB()) == ""
    assert "leave it out of a job" in SYSTEM.only_simulated(FedXGB(dropout=0.1))
