"""The record of SecureBoost: who plays which role, and what each party learns."""

from __future__ import annotations

import pytest

from treaty.data.table import Schema
from treaty.errors import ConfigError
from treaty.models.trees import ModelPart
from treaty.systems import find_system
from treaty.systems.options import public_terms
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.secureboost.system import SYSTEM
from treaty.systems.system import PartySpec
from treaty.trees.ensemble import SplitTable

OWNERS = {"shop": PartySpec(), "bank": PartySpec(), "telco": PartySpec()}


def learned(cipher: str, common: BoostingOptions | None = None, **options) -> dict[str, str]:
    """Return what each party learns where training used this cipher."""
    chosen = SecureBoost(**options)
    part = ModelPart(model_id="m", party="bank", schema=Schema((), ()), splits=SplitTable(), encryption=cipher)
    roles = SYSTEM.assign(OWNERS, "bank", chosen)
    told = SYSTEM.disclosures(roles, chosen, (common or BoostingOptions()).checked(chosen), part)
    return {name: "; ".join(facts) for name, facts in told.items()}


def test_the_table_of_systems_names_this_record():
    assert find_system("secureboost") is SYSTEM
    assert SYSTEM.options is SecureBoost
    assert set(SYSTEM.train) == set(SYSTEM.predict) == set(SYSTEM.explain) == SYSTEM.has_model


def test_the_active_party_is_linked_with_all_others_in_the_jobs_order():
    roles = SYSTEM.assign(OWNERS, "bank", SecureBoost())
    assert roles.of == {"shop": "passive", "bank": "active", "telco": "passive"}
    assert roles.owners == list(OWNERS)
    links = SYSTEM.links(roles, SecureBoost())
    assert links == {"bank": ["shop", "telco"], "shop": ["bank"], "telco": ["bank"]}


@pytest.mark.parametrize(
    ("places", "match"),
    [
        (
            {"bank": PartySpec(), "shop": PartySpec(role="user")},
            "expected no role and edge with protocol 'secureboost'",
        ),
        ({"bank": PartySpec(), "shop": PartySpec(edge="oslo")}, "got them at shop"),
        ({"bank": PartySpec(), "shop": PartySpec(has_rows=False)}, "expected rows at every party, got none at shop"),
        ({"bank": PartySpec()}, "expected at least two parties with rows, got bank"),
        ({"shop": PartySpec(), "telco": PartySpec()}, "expected active to be one of shop, telco, got 'bank'"),
    ],
    ids=["role", "edge", "no rows", "alone", "unknown"],
)
def test_roles_that_it_does_not_have_are_refused(places, match):
    with pytest.raises(ConfigError, match=match):
        SYSTEM.assign(places, "bank", SecureBoost())


def test_nodes_are_disclosed_where_the_cipher_that_was_chosen_shows_them():
    shown, blind = learned("ou"), learned("lattice")
    assert "which bin of a column is fullest" in shown["bank"]
    assert "which rows are in each node" in shown["shop"]
    assert "no label, and not which rows are in a node" in blind["shop"]
    assert "also outside the node" in blind["bank"]
    by_node = learned("lattice", reveal="node")
    assert "which rows are in the nodes of its splits" in by_node["telco"]
    assert "also outside the node" not in by_node["bank"]


@pytest.mark.parametrize(
    ("options", "common", "who", "expected"),
    [
        ({"inference": "shared"}, {}, "bank", "at prediction, from a row's sum of leaf weights"),
        (
            {"inference": "shared"},
            {},
            "shop",
            "only by colluding with bank, which is not allowed: at prediction, sides of rows",
        ),
        ({"mechanism": "label_rr", "epsilon": 2.0}, {}, "shop", "about a label, no more than epsilon 2 permits"),
        ({"rl_trees": 3}, {}, "shop", "nothing of the trees of the first 3 rounds"),
        ({"purity_guard": 0.25}, {}, "shop", "by more than 0.25, but that there is such a child; at a split"),
        ({}, {"goss": True}, "shop", "large gradients: they are predicted worst (goss)"),
        ({}, {"min_child_samples": 3}, "bank", "leaves of as few as 3 training rows"),
        (
            {"mode": "paper", "allow_insecure": True, "rerandomise": False},
            {},
            "bank",
            "answers were not re-randomised",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_change_what_is_disclosed(options, common, who, expected):
    assert expected in learned("ou", BoostingOptions(**common), **options)[who]
    assert expected not in learned("ou")[who]


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        (None, {"ou", "lattice"}),
        (SecureBoost(allow_exact_sums=True), {"lattice"}),
        (SecureBoost(encryption="ou", allow_exact_sums=True), {"ou"}),
        (SecureBoost(mode="paper", allow_insecure=True), {"ou"}),
    ],
)
def test_warm_up_is_of_the_kinds_of_cipher_that_may_serve(options, kinds):
    made = SYSTEM.warm_up(options)
    assert {small.cipher for small in made} == kinds
    for small in made:
        small.check(BoostingOptions(objective="logistic_pieces" if small.hides_rows else None).checked(small))


@pytest.mark.parametrize(
    ("options", "common", "sums"),
    [
        ({}, {}, "sealed"),
        ({"encryption": "auto"}, {}, "sealed"),
        ({"encryption": "lattice", "reveal": "node"}, {}, "sealed"),
        ({"rl_trees": 2, "purity_guard": 0.2, "inference": "shared"}, {}, "sealed"),
        ({}, {"max_cat_to_onehot": 32_768, "fractional_bits": 20}, "sealed"),
        ({"allow_exact_sums": True}, {}, "open"),
        ({"mode": "paper"}, {}, "open"),
        ({"mode": "paper", "encryption": "lattice"}, {}, "open"),
        ({"encryption": "ou"}, {}, "open"),
        ({"key_bits": 3072}, {}, "open"),
        ({}, {"reg_alpha": 0.1}, "open"),
        ({}, {"reg_lambda": 0.0}, "open"),
        ({}, {"max_delta_step": 1.0}, "open"),
        ({}, {"objective": "poisson"}, "open"),
        ({}, {"min_child_weight": 0.0}, "open"),
        ({}, {"max_cat_to_onehot": 4}, "sealed"),
        ({}, {"max_cat_to_onehot": 4, "category_sets": "sorted"}, "open"),
        ({}, {"category_sets": "sorted"}, "open"),
        ({}, {"fractional_bits": 24}, "open"),
        ({"sums": "open"}, {}, "open"),
        ({"sums": "sealed", "allow_exact_sums": True}, {}, "sealed"),
    ],
    ids=str,
)
def test_sums_are_sealed_where_nothing_else_was_chosen(options, common, sums):
    given = BoostingOptions(**common)
    settled = SecureBoost(**options).settled(given)
    assert settled.sums == sums
    assert settled.settled(given) == settled
    assert settled.ciphers.sealed == (sums == "sealed")
    assert settled.ciphers.cipher == "lattice" or sums == "open"
    if options.get("mode") != "paper":
        settled.check(given.checked(settled))


def test_consent_of_one_party_alone_shows_in_what_parties_agree_on():
    common = BoostingOptions()
    one, other = (SecureBoost(allow_exact_sums=consent).settled(common) for consent in (True, False))
    differ = {name for name, term in public_terms(one, common).items() if term != public_terms(other, common)[name]}
    assert "sums" in differ
