"""FedXGBoost-SMM as a system, in both modes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from treaty.errors import ConfigError
from treaty.systems.fedxgboost_smm.dealer import DEALER, dealer
from treaty.systems.fedxgboost_smm.disclosures import disclosures
from treaty.systems.fedxgboost_smm.expected import expected
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.fedxgboost_smm.roles import active, passive
from treaty.systems.fedxgboost_smm.told import TOLD
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Cast, Place, System
from treaty.systems.vertical.cast import cast_by_column, fellow_owners
from treaty.systems.vertical.cipher_options import unaudited as unaudited_ciphers
from treaty.systems.vertical.contributions import explain_active, explain_passive
from treaty.systems.vertical.decisions import predict_active, predict_passive
from treaty.systems.vertical.online import online_active, online_passive


def cast_roles(places: Mapping[str, Place], active: str, options: FedXGBoostSMM) -> Cast:
    """Give every party its role; with ``backend="dealer"`` one party without data deals.

    Raises
    ------
    ConfigError
        Where a dealer is missing, is one too many or has data, and as `cast_by_column`.
    """
    dealers = [name for name, place in places.items() if place.role == "dealer"]
    if len(dealers) > options.has_dealer:
        raise ConfigError(
            'expected role = "dealer" at one party, and only with backend = "dealer" of protocol \'fedxgboost-smm\', '
            f"got it at {', '.join(dealers)}"
        )
    if not options.has_dealer:
        return cast_by_column(places, active, options)
    if not dealers:
        raise ConfigError('backend = "dealer" needs a party without data that deals: add one with role = "dealer"')
    (name,) = dealers
    if name == active or places[name].has_rows or len(places) < 3:
        raise ConfigError(
            f"expected {name}, the dealer, to have no table and not to be the active party, and at least one passive "
            "party besides them: a party with data must not deal"
        )
    return cast_by_column(places, active, options, helper=name)


def dealer_of(owners: Iterable[str], options: FedXGBoostSMM) -> dict[str, Place]:
    """Return the dealer that `fit` plays, if the options need one; raise ConfigError where an owner has its name."""
    if not options.has_dealer:
        return {}
    if DEALER in owners:
        raise ConfigError(f"fit plays a dealer and calls it {DEALER!r}; give the party of that name another one")
    return {DEALER: Place(role="dealer", has_rows=False)}


def warm_up(options: FedXGBoostSMM | None) -> list[FedXGBoostSMM]:
    """Return options of small trainings with the backend and sums that the options name, or with every backend."""
    if options is not None and options.ciphers.sealed:
        return [FedXGBoostSMM(reveal="argmax")]
    of_each = {
        "ou": FedXGBoostSMM(backend="ou", insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True),
        "lattice": FedXGBoostSMM(backend="lattice", allow_exact_sums=True),
        "dealer": FedXGBoostSMM(backend="dealer", allow_exact_sums=True),
    }
    return [*of_each.values()] if options is None else [of_each[options.cipher]]


def unaudited(options: FedXGBoostSMM) -> str:
    """Say why no record can be kept for an audit of gradients; nothing where it can."""
    if options.mode == "paper":
        return "paper mode shows gradients, there is nothing to open"
    return "a dealer's masks have no key that opens them" if options.has_dealer else unaudited_ciphers(options.ciphers)


SYSTEM = System(
    name="fedxgboost-smm",
    options=FedXGBoostSMM,
    common=BoostingOptions,
    split="columns",
    train={"active": active, "passive": passive, "dealer": dealer},
    cast=cast_roles,
    vouched=fellow_owners,
    disclosures=disclosures,
    told=TOLD,
    expected=expected,
    named_roles=frozenset({"dealer"}),
    lossless=True,
    on_clusters=lambda options: frozenset(
        {"active", "passive"} if options.mode != "paper" and not options.has_dealer else ()
    ),
    has_model=frozenset({"active", "passive"}),
    helpers=dealer_of,
    predict={"active": predict_active, "passive": predict_passive},
    online={"active": online_active, "passive": online_passive},
    explain={"active": explain_active, "passive": explain_passive},
    unaudited=unaudited,
    warm_up=warm_up,
)
