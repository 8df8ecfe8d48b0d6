"""What each role of FedXGB is said to learn, by its options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from systems.fedxgb.playing import laid_out, options_of
from treaty.systems.fedxgb.system import SYSTEM


def learned(edges: int = 3, **options: Any) -> dict[str, list[str]]:
    roles = laid_out([f"u{k}" for k in range(3 * edges)], edges)
    return SYSTEM.disclosures(
        roles, *options_of(**{"min_child_samples": None, **options}), SimpleNamespace(spent="spent")
    )


@pytest.mark.parametrize(
    ("options", "role", "told", "not_told"),
    [
        ({}, "user", "the slot in the complete tree at each level", "splits and leaf values of all trees"),
        ({}, "edge", "while at most 1 of the 3 edge servers of a committee", "splits and leaf values of all trees"),
        ({}, "edge", 'one deals random numbers (comparison="additive")', "splits and leaf values of all trees"),
        ({"comparison": "shamir"}, "edge", "while at most 1 of the 3 edge servers", "deals random numbers (comp"),
        ({}, "user", "the slot in the complete tree at each level", "splits and leaf values"),
        ({"expose": "model"}, "user", "splits and leaf values of all trees", "the slot in the complete tree"),
        ({"expose": "model"}, "edge", "splits and leaf values of all trees", "their shares"),
        ({}, "server", "the sum over these users alone (3 or more", "min_child_samples"),
        ({}, "server", "colluding with two users of a group of three, the sums of the third", "users of a group of 5"),
        ({"group_size": 5}, "server", "with 4 users of a group of 5, the sums of the last one", "group of three"),
        ({"group_size": 5}, "server", "(5 or more", "(3 or more"),
        ({"expose": "paper", "allow_insecure": True}, "edge", "of every row, the slot", "all splits, all"),
        ({"expose": "paper", "allow_insecure": True}, "user", "columns of a level's splits", "approximately where"),
        ({"mode": "paper", "allow_insecure": True}, "edge", "the masks do not hide them", "no sum"),
        (
            {"mode": "paper", "allow_insecure": True},
            "server",
            "the sums over the users of one domain",
            "min_child_samples was",
        ),
        ({"min_child_samples": 2}, "server", "leaves of as few as 2 training rows", "noise"),
        ({"min_child_samples": 2}, "user", "leaves of as few as 2 training rows", "noise"),
    ],
)
def test_what_each_role_learned_depends_on_the_options(options, role, told, not_told):
    found = " ".join(learned(**options)[role])
    assert told in found
    assert not_told not in found


@pytest.mark.parametrize(
    ("edges", "own", "size", "bound"),
    [(3, {}, 3, 1), (10, {}, 3, 1), (4, {"comparison": "shamir"}, 4, 1), (10, {"comparison": "shamir"}, 10, 4),
     (10, {"comparison": "shamir", "committee": 5}, 5, 2)],
)  # fmt: skip
def test_as_many_edge_servers_may_collude_as_the_text_says(edges, own, size, bound):
    (fact,) = (fact for fact in learned(edges, **own)["edge"] if "with or without users" in fact)
    assert f"at most {bound} of the {size} edge servers of a committee" in fact
    assert f"; {bound + 1} of a committee have" in fact
    assert ("every user's rows" in fact) == (size == edges)
    assert ("the next ones, in the job's order" in fact) == (size < edges)


def test_before_training_it_is_not_known_how_small_groups_were():
    roles = laid_out([f"u{k}" for k in range(9)], 3)
    found = SYSTEM.disclosures(roles, *options_of(), None)
    assert list(found) == ["server", "edge", "user", "authority"]
    assert not any("spent" in fact for facts in found.values() for fact in facts)
    assert any("spent, whose values" in fact for fact in learned()["server"])
