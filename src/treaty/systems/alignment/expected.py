"""What an alignment is expected to take; messages are those of `roles`, under KKRT of `oblivious_values`."""

from __future__ import annotations

from treaty.data.ids import Psi
from treaty.systems.alignment.roles import LONG
from treaty.systems.expected import Expected, Shape
from treaty.systems.system import Cast

_POINT, _MASKED, _VALUE, _MATCH = 33.0, 89.0, 76.0, 20.0
"""Bytes: of a point under ECDH; under KKRT of an id in the active party's list, and in another; of an id in common."""
_TRANSFERS = 16_000.0  # bytes under KKRT


def add_alignment(found: Expected, cast: Cast, psi: Psi, shape: Shape) -> None:
    """Count the alignment of all owners' rows, each of whom has as many ids, before a training."""
    ids, owners = shape.rows, [name for name in cast.owners if name != cast.active]
    points = psi == "ecdh" or (psi == "auto" and ids < LONG)
    for name in owners:
        there, back = (_POINT * ids, 2 * _POINT * ids) if points else (_MASKED * ids, _VALUE * ids + _TRANSFERS)
        found.send(cast.active, name, there + _MATCH * ids, 10)
        found.send(name, cast.active, back, 10)
    found.hold(min(ids, 1 << 20) * 250.0, cast.active, *owners)
    found.seconds += ids * (0.25e-3 / shape.threads if points else 8e-6) * len(owners)
