"""Logistic and other regressions as systems: on one table, and between parties by quasi-Newton steps or descent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from treaty.errors import ConfigError
from treaty.systems.logistic import roles
from treaty.systems.logistic.disclosures import disclosures
from treaty.systems.logistic.expected import expected
from treaty.systems.logistic.online import online_active, online_passive
from treaty.systems.logistic.options import SGD as SGDOptions
from treaty.systems.logistic.options import FederatedRegression, QuasiNewton, RegressionOptions
from treaty.systems.logistic.pooled import train_pooled
from treaty.systems.logistic.prediction import predict_active, predict_passive
from treaty.systems.logistic.told import TOLD
from treaty.systems.pooled.options import Pooled
from treaty.systems.pooled.system import DISCLOSED, in_one_place
from treaty.systems.system import Cast, Place, System, mesh, no_clusters

COORDINATOR = "coordinator"

CANNOT = {
    "explain": "contributions (TreeSHAP) are those of trees; in a logistic regression a column adds its weight times "
    "its prepared value: see coef of each party's part",
}


def cast(places: Mapping[str, Place], active: str, options: FederatedRegression) -> Cast:
    """Give every party its role: "active", "passive", or "coordinator" to the party that the job names.

    Raises ConfigError when roles and options do not go together.
    """
    others = [
        f'role = "{place.role}" at {name}' if place.role else f"edge at {name}"
        for name, place in places.items()
        if place.role not in (None, COORDINATOR) or place.edge
    ]
    if others:
        raise ConfigError(
            f'expected no role but "coordinator", and no edge, under protocol {options.system!r}, got '
            + ", ".join(others)
        )
    coordinators = [name for name, place in places.items() if place.role == COORDINATOR]
    if len(coordinators) > options.has_coordinator:
        raise ConfigError(
            'expected role = "coordinator" at one party, and only with coordinator = true, got it at '
            + ", ".join(coordinators)
        )
    for name in coordinators:
        if name == active or places[name].has_rows:
            raise ConfigError(
                f"expected {name}, the coordinator, to have no table and not to be the active party: a party with data "
                "must not coordinate"
            )
    if options.has_coordinator and not coordinators:
        raise ConfigError(
            'expected a coordinator, a party without data with role = "coordinator"; or take coordinator = false'
        )
    owners = [name for name in places if name not in coordinators]
    if active not in owners or len(owners) < 2:
        raise ConfigError(
            f"expected at least two parties with data, the label holder among them, got {', '.join(owners)}: one "
            "party's table is trained on under protocol 'pooled'"
        )
    _check_paper_mode(options)
    found = {name: COORDINATOR if name in coordinators else "passive" for name in places}
    return Cast(active, {**found, active: "active"}, owners)


def _check_paper_mode(options: FederatedRegression) -> None:
    """Refuse paper mode without consent, and in forms that were not published."""
    if options.mode != "paper":
        return
    if not options.allow_insecure:
        raise ConfigError(
            "mode='paper' shows the coordinator every gradient, step and loss, and lets passive parties solve for "
            "labels; it needs allow_insecure=True of every party"
        )
    if not options.has_coordinator or options.encryption == "lattice":
        raise ConfigError("mode='paper' needs a coordinator, and encryption 'paillier' or 'ou'")


def helpers(owners: Iterable[str], options: FederatedRegression) -> dict[str, Place]:
    """Return the coordinator that `fit` plays, under a name that no party with data has; nobody without one."""
    if not options.has_coordinator:
        return {}
    taken = set(owners)
    names = (COORDINATOR, *(f"{COORDINATOR}-{number}" for number in range(2, len(taken) + 2)))
    name = next(name for name in names if name not in taken)
    return {name: Place(role=COORDINATOR, has_rows=False)}


def warm_up(kind: type[FederatedRegression], options: FederatedRegression | None) -> list[Any]:
    """Return options of small trainings: under the lattice map and a short key, or the one that is meant."""
    keyed: dict[str, Any] = {"encryption": "ou", "insecure_test_key_bits": 768, "allow_insecure": True}
    if options is None:
        return [kind(), kind(**keyed)]
    fractional_bits = RegressionOptions().fractional_bits
    short = None if options.cipher(fractional_bits) == "lattice" else 768
    return [replace(options, key_bits=None, insecure_test_key_bits=short, allow_insecure=True)]


def on_clusters(options: FederatedRegression) -> frozenset[str]:
    """Return whose rows a cluster can add up: those of parties with data, under the lattice map."""
    return frozenset({"active", "passive"} if options.encryption in (None, "auto", "lattice") else ())


def _federated(kind: type[FederatedRegression]) -> System:
    return System(
        name=kind.system,
        options=kind,
        common=RegressionOptions,
        split="columns",
        train={"active": roles.active, "passive": roles.passive, COORDINATOR: roles.coordinator},
        cast=cast,
        disclosures=disclosures,
        told=TOLD,
        expected=expected,
        named_roles=frozenset({COORDINATOR}),
        on_clusters=on_clusters if kind is QuasiNewton else no_clusters,
        has_model=frozenset({"active", "passive"}),
        until_kept=frozenset({COORDINATOR}),  # its checkpoint: without it, nobody could go on
        helpers=helpers,
        links=mesh,
        predict={"active": predict_active, "passive": predict_passive},
        online={"active": online_active, "passive": online_passive},
        apart=frozenset({COORDINATOR}),
        orders_by_id=True,
        cannot=CANNOT,
        warm_up=partial(warm_up, kind),
    )


POOLED = System(
    name="pooled",
    options=Pooled,
    common=RegressionOptions,
    split="none",
    train={},
    cast=in_one_place,
    disclosures=lambda cast, options, common, part: DISCLOSED,
    has_model=frozenset({"alone"}),
    cannot=CANNOT | {"resume": "a logistic regression on one table keeps no checkpoint"},
    alone=train_pooled,
)
QUASI_NEWTON = _federated(QuasiNewton)
SGD = _federated(SGDOptions)
