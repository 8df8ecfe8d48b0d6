"""What the messages of an alignment of rows tell."""

from __future__ import annotations

from treaty.systems.alignment.common_order import Challenge, OrderDigest, SealOpening
from treaty.systems.alignment.joined_rows import Copies, JoinLayout
from treaty.systems.alignment.oblivious_values import MaskedCodes, OprfChoices, OprfOffer, OprfUsed, OprfValues
from treaty.systems.alignment.points import BlindedPoints, RaisedPoints
from treaty.systems.alignment.roles import AlignmentEnd, ListSummary, Matches, OrderKey
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
