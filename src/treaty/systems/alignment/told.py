"""What the messages of an alignment of rows tell."""

from __future__ import annotations

import logging
from collections.abc import Callable

from treaty.data.ids import Psi
from treaty.systems.alignment.common_order import Challenge, OrderDigest, SealOpening
from treaty.systems.alignment.joined_rows import Copies, JoinLayout
from treaty.systems.alignment.oblivious_values import MaskedCodes, OprfChoices, OprfOffer, OprfUsed, OprfValues
from treaty.systems.alignment.points import BlindedPoints, RaisedPoints
from treaty.systems.alignment.roles import CAUSES, LONG, Alignment, AlignmentEnd, ListSummary, Matches, OrderKey
from treaty.systems.expected import Expected, Shape
from treaty.systems.system import Roles
from treaty.systems.told import ACTIVE, AGREEMENT, PASSIVE, Lines, Told, When, lines

_BOTH = ("active", "passive")
_POINTS = When('psi="auto" or "ecdh"', lambda options, common: options.psi != "kkrt")
_LONG = When('psi="auto" or "kkrt"', lambda options, common: options.psi != "ecdh")
_EXPAND = When('on_duplicate="expand"', lambda options, common: options.on_duplicate == "expand")

TOLD: Lines = lines(
    AGREEMENT,
    Told(
        ListSummary,
        _BOTH,
        _BOTH,
        "the kind of ids, the size of the list to a factor, and, with a log, whether ids have changed",
        "control",
    ),
    lines(
        Told(BlindedPoints, _BOTH, _BOTH, "points under the sender's key, ids and padding alike", "encrypted"),
        Told(
            RaisedPoints,
            PASSIVE,
            ACTIVE,
            "its own points under both keys: which ids both have",
            "encrypted",
        ),
        when=_POINTS,
        reference="docs/alignment.md, What happens",
    ),
    lines(
        Told(OprfOffer, ACTIVE, PASSIVE, "keys and an offer of transfers", "nothing"),
        Told(OprfChoices, PASSIVE, ACTIVE, "answers to it", "nothing"),
        Told(MaskedCodes, ACTIVE, PASSIVE, "masked code words, of ids and of nothing alike", "masked"),
        Told(OprfValues, PASSIVE, ACTIVE, "values of the sender's ids, to compare: which ids both have", "encrypted"),
        Told(OprfUsed, _BOTH, _BOTH, "that a message is used up", "nothing"),
        when=_LONG,
        reference="docs/alignment.md, Long lists",
    ),
    lines(
        Told(Matches, ACTIVE, PASSIVE, "which of its own ids all parties have", "exact", 'result_to="active"'),
        Told(OrderKey, ACTIVE, PASSIVE, "the key of the common order", "nothing"),
        Told(Challenge, PASSIVE, ACTIVE, "a key, and a commitment", "nothing"),
        Told(OrderDigest, ACTIVE, PASSIVE, "whether both have the same common ids in the same order", "control"),
        Told(SealOpening, PASSIVE, ACTIVE, "whether both have the same common ids in the same order", "control"),
    ),
    lines(
        Told(Copies, PASSIVE, ACTIVE, "how many rows the sender has of each common id", "exact"),
        Told(JoinLayout, ACTIVE, PASSIVE, "of each common id how many rows all parties together have", "exact"),
        guard='on_duplicate="error"',
        when=_EXPAND,
    ),
    Told(AlignmentEnd, ACTIVE, PASSIVE, "that the active party keeps its result", "nothing"),
    reference="docs/alignment.md, Who learns what",
)
"""Before a training of systems split by column, where the job aligns rows."""


# -------------- what an alignment is expected to take; messages are those of `roles`, under KKRT of `oblivious_values`

_POINT, _MASKED, _VALUE, _MATCH = 33.0, 89.0, 76.0, 20.0
"""Bytes: of a point under ECDH; under KKRT of an id in the active party's list, and in another; of an id in common."""
_TRANSFERS = 16_000.0  # bytes under KKRT


def add_alignment(found: Expected, roles: Roles, psi: Psi, shape: Shape) -> None:
    """Count the alignment of all owners' rows, each of whom has as many ids, before a training."""
    ids, owners = shape.rows, [name for name in roles.owners if name != roles.active]
    points = psi == "ecdh" or (psi == "auto" and ids < LONG)
    for name in owners:
        there, back = (_POINT * ids, 2 * _POINT * ids) if points else (_MASKED * ids, _VALUE * ids + _TRANSFERS)
        found.send(roles.active, name, there + _MATCH * ids, 10)
        found.send(name, roles.active, back, 10)
    found.hold(min(ids, 1 << 20) * 250.0, roles.active, *owners)
    found.seconds += ids * (0.25e-3 / shape.threads if points else 8e-6) * len(owners)


# ----------------------------------------------------------------
# How many of its ids a party shares with all others, said to that party alone, which learns it from the alignment.

FEWEST = 0.1
"""The share of a party's ids below which it is warned that few are common."""

logger = logging.getLogger(__name__)


def tell_shared(
    name: str, aligned: Alignment, warn: Callable[[str], None], note: Callable[[str], None] = logger.info
) -> None:
    """Note how many of a party's ids all hold, or warn of it where these are few; nothing where it does not learn."""
    common, own = aligned.n_common, aligned.n_ids
    if common is None:
        return
    without = f"; {aligned.n_null} rows without an id" if aligned.n_null else ""
    said = f"{name}: {common} of its {own} ids are common to all parties ({common / own:.1%}){without}"
    if common < FEWEST * own:
        warn(f"{said}. Where that is not expected, {CAUSES}")
    else:
        note(said)
