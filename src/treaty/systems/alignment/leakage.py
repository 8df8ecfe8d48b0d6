"""What an alignment of rows reveals, by message and in words for each party, and what it is expected to cost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from treaty.data.ids import OnDuplicate, Psi
from treaty.systems.alignment import alignment
from treaty.systems.alignment.common_rows import Challenge, Copies, JoinLayout, OrderDigest, SealOpening
from treaty.systems.alignment.ecdh import BlindedPoints, RaisedPoints
from treaty.systems.alignment.kkrt import MaskedCodes, OprfChoices, OprfOffer, OprfUsed, OprfValues
from treaty.systems.expected import Expected, Shape
from treaty.systems.leakage import ACTIVE, AGREEMENT, PASSIVE, Route, Routes, When, between, routes
from treaty.systems.system import Roles

_BOTH = ("active", "passive")
_POINTS = When('psi="auto" or "ecdh"', lambda options, common: options.psi != "kkrt")
_LONG = When('psi="auto" or "kkrt"', lambda options, common: options.psi != "ecdh")
_EXPAND = When('on_duplicate="expand"', lambda options, common: options.on_duplicate == "expand")

ROUTES: Routes = routes(
    AGREEMENT,
    Route(alignment.ListSummary, _BOTH, _BOTH),
    routes(
        Route(BlindedPoints, _BOTH, _BOTH),
        Route(RaisedPoints, PASSIVE, ACTIVE),
        when=_POINTS,
        reference="docs/alignment.md, What happens",
    ),
    routes(
        Route(OprfOffer, ACTIVE, PASSIVE),
        Route(OprfChoices, PASSIVE, ACTIVE),
        Route(MaskedCodes, ACTIVE, PASSIVE),
        Route(OprfValues, PASSIVE, ACTIVE),
        Route(OprfUsed, _BOTH, _BOTH),
        when=_LONG,
        reference="docs/alignment.md, Long lists",
    ),
    routes(
        between(ACTIVE, PASSIVE, alignment.Matches, alignment.OrderKey),
        Route(Challenge, PASSIVE, ACTIVE),
        Route(OrderDigest, ACTIVE, PASSIVE),
        Route(SealOpening, PASSIVE, ACTIVE),
    ),
    routes(
        Route(Copies, PASSIVE, ACTIVE), Route(JoinLayout, ACTIVE, PASSIVE), guard='on_duplicate="error"', when=_EXPAND
    ),
    Route(alignment.AlignmentEnd, ACTIVE, PASSIVE),
    reference="docs/alignment.md, Who learns what",
)
"""Messages before a training of a system split by column, if the job aligns rows."""

_KKRT = {"auto": f"if a list has {alignment.LONG:,} ids or more (KKRT): ", "kkrt": "by KKRT: "}


def disclosures(
    active: str,
    others: Sequence[str],
    result_to: alignment.ResultTo = "both",
    on_duplicate: OnDuplicate = "error",
    psi: Psi = "auto",
    log: bool = False,
) -> dict[str, list[str]]:
    """Return, by party, sentences on what it learned beyond its own ids.

    `psi` is how common ids were found, "auto" if that is not known; `log` says whether a run log compares ids with
    those of earlier runs.
    """
    sizes = "how many distinct ids each partner has, to within an eighth, and of what kind they are"
    runs = [
        "from the run log: about how many ids differ between a partner's list and its most similar earlier list"
    ] * log
    learned = {
        active: [
            f"which of its own ids {'each of ' * (len(others) > 1)}{', '.join(others)} holds, row by row",
            sizes,
            *runs,
        ]
    }
    if psi != "ecdh":
        learned[active].append(
            f"{_KKRT[psi]}nothing more if it follows the protocol. If it cheats, it could test any ids against the "
            f"lists of {', '.join(others)}, also after the run"
        )
    for name in others:
        found = f"which of its own ids all parties hold (not which other ids {active} shares with single parties)"
        learned[name] = [*([found] if result_to == "both" else []), sizes.replace("each partner", active), *runs]
        if psi != "ecdh" and result_to == "both":
            learned[name].append(
                f"{_KKRT[psi]}nothing more if it follows the protocol. If it cheats, it could learn about {active}'s "
                "other ids from which of its own are reported as common"
            )
    # the layout of step 8 is a product of all parties' numbers of rows: each party learns it without its own factor
    if on_duplicate == "expand" and result_to == "both":
        learned[active].append(
            f"for each common id: how many rows {'each of ' * (len(others) > 1)}{', '.join(others)} has"
        )
        for place, name in enumerate(others):
            parties = [list(part) for part in ([active, *others[:place]], others[place + 1 :]) if part]
            products = [" times ".join(f"{party}'s" for party in part) for part in parties]
            learned[name].append(f"for each common id: how many rows it has elsewhere ({'; '.join(products)})")
    return learned


# bytes: of a point under ECDH; under KKRT of an id in the active party's list and in a passive one's; of a match; of
# the base transfers under KKRT
_POINT, _MASKED, _VALUE, _MATCH, _TRANSFERS = 33.0, 89.0, 76.0, 20.0, 16_000.0


def add_alignment(found: Expected, roles: Roles, psi: Psi, shape: Shape) -> None:
    """Add the bytes, memory and seconds of aligning the rows of all owners, each with as many ids, to `found`."""
    ids, owners = shape.rows, [name for name in roles.owners if name != roles.active]
    # as `alignment` decides, but by ids instead of buckets
    points = psi == "ecdh" or (psi == "auto" and ids < alignment.LONG)
    for name in owners:
        there, back = (_POINT * ids, 2 * _POINT * ids) if points else (_MASKED * ids, _VALUE * ids + _TRANSFERS)
        found.send(roles.active, name, there + _MATCH * ids, 10)
        found.send(name, roles.active, back, 10)
    found.hold(min(ids, 1 << 20) * 250.0, roles.active, *owners)
    found.seconds += ids * (0.25e-3 / shape.threads if points else 8e-6) * len(owners)


FEWEST = 0.1
"""The share of common ids below which a party is warned."""

logger = logging.getLogger(__name__)


def report_shared(
    name: str, aligned: alignment.Alignment, warn: Callable[[str], None], note: Callable[[str], None] = logger.info
) -> None:
    """Log how many of a party's ids all parties hold, or warn if they are few; do nothing if it does not know."""
    common, own = aligned.n_common, aligned.n_ids
    if common is None:
        return
    without = f"; {aligned.n_null} rows without an id" if aligned.n_null else ""
    shared = f"{name}: {common} of its {own} ids are common to all parties ({common / own:.1%}){without}"
    if common < FEWEST * own:
        warn(f"{shared}. If you expected more, {alignment.CAUSES}")
    else:
        note(shared)
