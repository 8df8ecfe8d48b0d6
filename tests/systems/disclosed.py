"""What every system says that its parties learn, over all options that change a sentence: `CASES`, and their text.

`python tests/systems/disclosed.py > tests/systems/disclosed.txt` writes the text that tests compare. Read what changed
in it: these sentences are what users are told. A new option gets a case here, a new system a list of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from treaty.systems import find_system
from treaty.systems.alignment.leakage import disclosures as of_alignment
from treaty.systems.options import names_of
from treaty.systems.system import Roles

COLUMNS = Roles("bank", {"bank": "active", "shop": "passive", "lab": "passive"}, ["bank", "shop", "lab"])
TWO = Roles("bank", {"bank": "active", "shop": "passive"}, ["bank", "shop"])
DEALT = Roles("bank", {**COLUMNS.of, "dealer": "dealer"}, COLUMNS.owners)
COORDINATED = Roles("bank", {**COLUMNS.of, "referee": "coordinator"}, COLUMNS.owners)
COORDINATED_TWO = Roles("bank", {**TWO.of, "referee": "coordinator"}, TWO.owners)
HOLDERS = ["north", "south", "east", "west"]
ROWS = Roles("north", dict.fromkeys(HOLDERS, "member") | {"north": "leader"}, HOLDERS)
ROWS_OF_TWO = Roles("north", {"north": "leader", "south": "member"}, ["north", "south"])
APART = Roles("server", {"server": "leader", "north": "member", "south": "member"}, ["north", "south"])
CROWD = Roles("server", {"server": "server", "edge0": "edge", "edge1": "edge", "edge2": "edge"}, [])
CROWD_OF_FIVE = Roles("server", {"server": "server", **{f"edge{k}": "edge" for k in range(5)}}, [])


@dataclass(frozen=True)
class Case:
    """Options by name, own and common ones; who takes part; and what the part of the model at hand says."""

    given: Mapping[str, Any] = field(default_factory=dict)
    roles: Roles = COLUMNS
    part: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.given.items()) or "defaults"
        part = "" if self.part is None else "; " + ", ".join(f"{k}: {v}" for k, v in self.part.items())
        return f"{shown}; {' '.join(self.roles.of)}{part}"


CASES: dict[str, list[Case]] = {
    "pooled": [Case()],
    "secureboost": [
        Case({"encryption": "ou"}),
        Case({"encryption": "paillier"}),
        Case({"encryption": "lattice"}),
        Case({"encryption": "lattice", "reveal": "node"}),
        Case({"sums": "sealed"}),
        Case({"sums": "sealed", "reveal": "node", "purity_guard": 0.2}, TWO),
        Case({"membership": "hidden", "objective": "logistic_pieces"}, TWO),
        Case({"membership": "hidden", "objective": "logistic_pieces", "training_rows": "rounded"}, TWO),
        Case({"membership": "hidden", "objective": "logistic_pieces", "leaves": "shared"}, TWO),
        Case({"membership": "hidden", "objective": "logistic_pieces"}),
        Case(
            {"membership": "hidden", "objective": "logistic_pieces"},
            TWO,
            {"forest": SimpleNamespace(objective=SimpleNamespace(weight_bound=4.0))},
        ),
        Case({"sums": "sealed", "max_cat_to_onehot": 4}, TWO),
        Case({"sums": "sealed", "interaction_constraints": [["bank.age", "shop.visits"]]}),
        Case({"encryption": "ou", "max_cat_to_onehot": 4, "category_sets": "sorted"}, TWO),
        Case(),
        Case(part={"encryption": "lattice"}),
        Case(part={"encryption": "ou", "exact_sums": {"shop": 0.034, "lab": 0.0}}),
        Case(part={"encryption": "ou", "forest": SimpleNamespace(objective=SimpleNamespace(weight_bound=4.0))}),
        Case({"mechanism": "label_rr", "epsilon": 2.0}),
        Case({"encryption": "ou", "inference": "shared"}),
        Case({"encryption": "lattice", "inference": "shared"}),
        Case({"mode": "paper", "allow_insecure": True}),
        Case({"mode": "paper", "key_bits": 2048, "rerandomise": True}),
        Case({"encryption": "ou", "rl_trees": 3}),
        Case({"encryption": "ou", "purity_guard": 0.2}),
        Case({"encryption": "lattice", "purity_guard": 0.2}),
        Case({"encryption": "ou", "goss": True}),
        Case({"encryption": "lattice", "goss": True}),
        Case({"encryption": "lattice", "max_leaves": 7}),
        Case({"min_child_samples": 5}),
        Case({"min_child_samples": 5, "mode": "paper", "encryption": "lattice"}),
    ],
    "fedxgboost-smm": [
        Case(),
        Case({"reveal": "argmax"}),
        Case({"reveal": "node"}),
        Case({"backend": "ou"}),
        Case({"backend": "dealer"}, DEALT),
        Case(part={"encryption": "lattice", "exact_sums": {"shop": 0.061, "lab": 0.02}}),
        Case({"reveal": "argmax"}, part={"encryption": "lattice", "sides": {"shop": 0.047, "lab": 0.003}}),
        Case({"min_child_samples": 5}),
        Case({"mode": "paper", "allow_insecure": True}),
        Case({"mode": "paper", "allow_insecure": True, "version": 2}),
    ],
    "fedxgboost-ldp": [
        Case(),
        Case({"mechanism": "laplace", "epsilon": 3.0, "epsilon_total": 30.0}),
        Case({"mechanism": "label_rr", "epsilon": 2.0}),
        Case({"target_range": [0.0, 90.0]}),
        Case({"mode": "paper", "allow_insecure": True}),
        Case({"mechanism": "duchi", "refit": True}),
    ],
    "federboost-vertical": [
        Case(),
        Case({"epsilon": 1.5}),
        Case({"epsilon_person": 8.0}),
        Case({"column_epsilon": {"shop.age": 0.5}}),
        Case({"epsilon": float("inf"), "mode": "paper"}),
    ],
    "federboost-horizontal": [
        Case(roles=ROWS),
        Case(roles=ROWS, part={"spent": "the search for bin edges separated groups of as few as 7 rows"}),
        Case(roles=APART),
        Case({"base_score": 0.1}, ROWS),
        Case({"min_child_samples": 5}, ROWS),
        Case({"dropout": "accept"}, ROWS),
        Case({"bins": "approximate"}, ROWS),
        Case({"epsilon_total": 2.0}, ROWS),
        Case({"epsilon_total": 2.0, "delta": 1e-7}, ROWS, {"spent": "epsilon 2"}),
        Case({"epsilon_total": 2.0, "dropout": "accept"}, ROWS),
        Case({"mode": "paper"}, ROWS_OF_TWO),
        Case({"epsilon_total": 2.0}, ROWS_OF_TWO),
        Case({"mode": "paper"}, APART),
        Case({"validation_fraction": 0.2, "validation_group": "sex"}, ROWS),
        Case({"validation_fraction": 0.2, "epsilon_total": 2.0}, ROWS),
    ],
    "fedxgb": [
        Case(roles=CROWD),
        Case(roles=CROWD, part={"spent": "the search for bin edges separated groups of as few as 7 rows"}),
        Case(roles=CROWD_OF_FIVE),
        Case({"comparison": "shamir"}, CROWD),
        Case({"comparison": "shamir", "committee": 3}, CROWD_OF_FIVE),
        Case({"base_score": 0.1}, CROWD),
        Case({"max_queries": 50}, CROWD),
        Case({"bins": "exact"}, CROWD),
        Case({"group_size": 5}, CROWD),
        Case({"expose": "model"}, CROWD),
        Case({"expose": "model", "min_child_samples": 5}, CROWD),
        Case({"min_child_samples": 5}, CROWD),
        Case({"validation_fraction": 0.2, "validation_group": "sex"}, CROWD),
        Case({"expose": "paper", "allow_insecure": True}, CROWD),
        Case({"mode": "paper", "allow_insecure": True}, CROWD),
        Case({"mode": "paper", "allow_insecure": True, "expose": "nothing"}, CROWD),
        Case({"epsilon_total": 2.0}, CROWD, {"spent": "epsilon 2"}),
        Case({"epsilon_total": 2.0, "validation_fraction": 0.2}, CROWD),
        Case({"epsilon_total": 2.0, "delta": 1e-7, "user_rows": 5}, CROWD),
    ],
    "quasi-newton": [
        Case(roles=COORDINATED),
        Case(roles=COORDINATED_TWO),
        Case(roles=COORDINATED, part={"encryption": "lattice", "alone": {"bank": 0, "shop": 1, "lab": 7}}),
        Case({"encryption": "ou"}, COORDINATED),
        Case({"encryption": "ou"}, COORDINATED_TWO),
        Case({"coordinator": False}, TWO),
        Case({"coordinator": False}),
        Case({"coordinator": False, "encryption": "lattice"}, TWO),
        Case({"insecure_test_key_bits": 768, "allow_insecure": True}, COORDINATED),
        Case({"mode": "paper", "allow_insecure": True}, COORDINATED),
        Case({"show_weights": True}, COORDINATED),
        Case({"show_eval_margins": True}, COORDINATED),
        Case({"show_eval_margins": True, "coordinator": False}, TWO),
        Case({"family": "multiclass"}, COORDINATED),
        Case({"family": "linear"}, COORDINATED),
        Case({"pdo": 20.0}, COORDINATED),
        Case({"pdo": 20.0, "min_bin_rows": 50, "coordinator": False}, TWO),
        Case({"family": "poisson", "coordinator": False}, TWO),
        Case({"family": "poisson", "standard_errors": True}, COORDINATED_TWO),
        Case({"family": "linear", "standard_errors": True, "coordinator": False}, TWO),
        Case({"family": "linear", "standard_errors": True, "coordinator": False}),
        Case({"standard_errors": True, "encryption": "ou"}, COORDINATED),
        Case({"standard_errors": True}, COORDINATED_TWO, {"encryption": "lattice", "alone": {"bank": 0, "shop": 1}}),
    ],
    "sgd": [Case(roles=COORDINATED), Case({"coordinator": False}, TWO)],
    "statistics": [
        Case(),
        Case({"reveal": "passive"}),
        Case({"correlation": "none"}, TWO),
        Case({"min_bin_rows": 50}, TWO),
    ],
}

OF_ALIGNMENT: list[dict[str, Any]] = [
    {"others": ["shop", "lab"]},
    {"others": ["shop"]},
    {"others": ["shop", "lab"], "result_to": "active"},
    {"others": ["shop", "lab"], "on_duplicate": "expand"},
    {"others": ["shop"], "on_duplicate": "expand", "result_to": "active"},
    {"others": ["shop"], "psi": "kkrt"},
    {"others": ["shop"], "psi": "ecdh"},
    {"others": ["shop", "lab"], "log": True},
]


def learned(name: str, case: Case) -> dict[str, list[str]]:
    """Return the sentences of a case, by party or role."""
    system = find_system(name)
    common = {of: value for of, value in case.given.items() if of in names_of(system.common)}
    own = system.options(**{of: value for of, value in case.given.items() if of not in common})
    checked = system.common(**common).checked(own)
    own.check(checked)
    part = (
        None
        if case.part is None
        else SimpleNamespace(
            **{
                "encryption": "",
                "spent": "",
                "exact_sums": {},
                "sides": {},
                "forest": None,
                "batch_size": 1000,
                **case.part,
            }
        )
    )
    return system.disclosures(case.roles, own, checked, part)


def told() -> Iterator[tuple[str, list[tuple[str, dict[str, list[str]]]]]]:
    """Yield each system with its cases and what these disclose; alignment comes last."""
    for name, cases in CASES.items():
        yield name, [(str(case), learned(name, case)) for case in cases]
    pairs = [
        (", ".join(f"{k}={v!r}" for k, v in given.items()), of_alignment("bank", **given)) for given in OF_ALIGNMENT
    ]
    yield "alignment", pairs


def lines() -> Iterator[str]:
    """Yield the text: a system's first case in full, of the others what differs from it."""
    for name, cases in told():
        first = cases[0][1]
        for number, (title, found) in enumerate(cases):
            yield f"## {name}: {title}"
            alike: dict[tuple[str, ...], str] = {}
            for party, sentences in found.items():
                before = first.get(party, []) if number else []
                changed = [f"- {one}" for one in before if one not in sentences]
                changed += [f"+ {one}" for one in sentences if one not in before]
                if tuple(changed) in alike:
                    yield f"{party}: as {alike[tuple(changed)]}"
                elif changed:
                    yield from (party, *changed)
                    alike[tuple(changed)] = party
            yield from (f"{party}: not told of" for party in first if party not in found)
            yield ""


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()))
