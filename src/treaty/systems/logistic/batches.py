"""How data parties of a logistic regression settle the partition of rows into batches, and whom it sets apart.

=====================  ========================  ==============================================================
message                from -> to                content
=====================  ========================  ==============================================================
`KnownBatches`         data parties, all pairs   digests of the seed kept of an earlier job, and of random_state's
`KeptBatches`          one who kept -> others    its seed
`ShareCommitted`,      data parties, all pairs   a seed made by all: of batches, of the lattice map's public elements
`ShareTold`
`StandAlone`           data parties, all pairs   how many of its rows stand alone in their batch
=====================  ========================  ==============================================================

**Batches** are cut once, for a training and for all later ones on the same rows that are told the same folder: fresh
batches would give everybody new equations about the same rows. Who kept a partition insists on it, whatever its columns
are by now. A seed of `random_state` is taken if all data parties name the same; one that a single party could choose
might be one that sets rows of its own apart.
A row that stands alone in its batch, the only one of its category for instance, has its residual in the gradient by
itself: see `rows_alone`. No choice of batches helps; data parties tell each other how many such rows they have.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError, PeerProtocolError
from treaty.linear.batches import SEED_BYTES, batch_seed, partition, rows_alone
from treaty.linear.preparation import COLUMN_FRACTION
from treaty.messaging.messages import Message
from treaty.messaging.party import Party
from treaty.models.trees import read_file, write_file
from treaty.systems.linear_options import LinearOptions
from treaty.systems.logistic.setup import Setting

Integers = NDArray[np.int64]

logger = logging.getLogger(__name__)

FORMAT = "treaty-batches 2"
_OTHER_ROWS = (
    "if these are other rows, of which a host knows but the number, name another store (`checkpoint` of fit), or align "
    "them by ids: [align]"
)


class KnownBatches(Message):
    """Digests of the seed that the sender kept and of the one that random_state gives, empty for none.

    Tells whether it had an earlier job on these rows.
    """

    kept: bytes
    named: bytes


class KeptBatches(Message):
    """The seed itself, to who has none. Tells which rows are in a batch, as all data parties know."""

    seed: bytes


class ShareCommitted(Message):
    """Commitment to a share of a joint seed. Tells nothing."""

    commitment: bytes


class ShareTold(Message):
    """The share committed to, a random number."""

    share: bytes


class StandAlone(Message):
    """How many rows of all batches stand alone among the sender's columns (`rows_alone`). Tells that."""

    rows: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]


def joint_seed(party: Party, others: Sequence[str], purpose: str) -> bytes:
    """Make a seed with others: all commit before any tells its share, so that it is uniform if one is honest."""
    share = secrets.token_bytes(SEED_BYTES)
    commitments = {party.name: _commit(purpose, party.name, share)}
    for peer in others:
        party.send(peer, ShareCommitted(commitments[party.name]))
    commitments |= {peer: party.receive(peer, ShareCommitted).commitment for peer in others}
    for peer in others:
        party.send(peer, ShareTold(share))
    shares = {party.name: share, **{peer: party.receive(peer, ShareTold).share for peer in others}}
    for peer in others:
        if len(shares[peer]) != SEED_BYTES or _commit(purpose, peer, shares[peer]) != commitments[peer]:
            raise PeerProtocolError(peer, f"expected the share that was committed to - at ShareTold from {peer}")
    whole = b"".join(shares[name] for name in sorted(shares))
    return hashlib.sha256(b"treaty joint seed" + purpose.encode() + whole).digest()


def _commit(purpose: str, name: str, share: bytes) -> bytes:
    return hashlib.sha256(repr(("treaty joint seed commitment", purpose, name, share)).encode()).digest()


def print_of_rows(setting: Setting, labels: Integers | None) -> bytes:
    """Tell rows that correspond by position from others, for `agree_on_batches`: by their number and own labels.

    Not by columns: with a column more the rows are the same, and so are their labels.
    """
    return hashlib.sha256(repr(setting.n_rows).encode() + (b"" if labels is None else labels.tobytes())).digest()


def agree_on_batches(
    party: Party, setting: Setting, options: LinearOptions, rows: bytes, kept: Path | None
) -> Integers:
    """Settle the partition into batches with all data parties; return its rows (n_batches, batch_size).

    Parameters
    ----------
    rows : bytes
        What tells these rows from others, in this order: a digest of their ids, or `print_of_rows`. A kept partition
        belongs to it.
    kept : Path or None
        Folder that keeps partitions from job to job. None: nothing is kept.

    Raises
    ------
    ConfigError
        When batches are to be others than those kept, or parties kept different ones.
    """
    file = None if kept is None else _batches_file(kept, party.name)
    found = _Kept([]) if file is None or not file.exists() else read_file(file, _Kept, FORMAT)
    named = None if options.random_state is None else batch_seed(options.random_state)
    known = None
    for entry in found.entries:
        if entry.rows != rows:
            continue
        if entry.batch_size != setting.batch_size or named not in (None, entry.seed):
            raise ConfigError(
                f"expected batches as in the earlier job on these rows (batch_size={entry.batch_size}, the same "
                "random_state or none): another partition would give every party new equations about the same rows - "
                f"kept in {file}; {_OTHER_ROWS}",
                public="it insists on the batches of an earlier job on its rows; give the same batch_size, or, if they "
                "are other rows, have it name another store",
            )
        known = entry.seed
    seed = _common_seed(party, setting.others(party.name), known, named, file)
    if file is not None and known is None:
        if found.entries:
            logger.warning(
                "%s: %s keeps batches of %d other sets of rows; of rows that are in several sets, gradients told more "
                "than those of one partition do",
                party.name, file.name, len(found.entries),
            )  # fmt: skip
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, _Kept([*found.entries, _Partition(rows, setting.batch_size, seed)]), FORMAT)
    return partition(setting.n_rows, setting.batch_size, seed)


class _Partition(msgspec.Struct):
    rows: bytes
    batch_size: int
    seed: bytes


class _Kept(msgspec.Struct):
    entries: list[_Partition]


def _batches_file(folder: Path, name: str) -> Path:
    return folder / f"{quote(name, safe=' ')}.batches"  # a party's name may hold what a file's may not


def _common_seed(
    party: Party, others: Sequence[str], kept: bytes | None, named: bytes | None, file: Path | None
) -> bytes:
    """Return the seed that somebody kept, else the one that all name, else a new one of all."""
    own = KnownBatches(*(b"" if seed is None else _digest(seed) for seed in (kept, named)))
    for peer in others:
        party.send(peer, own)
    told = {party.name: own, **{peer: party.receive(peer, KnownBatches) for peer in others}}
    insisted = {known.kept for known in told.values()} - {b""}
    if len(insisted) > 1:
        raise ConfigError(
            "parties insist on different batches, from earlier jobs on their rows with others; take partners of one of "
            f"these jobs{'' if file is None else f' - this party keeps its own in {file}'}; {_OTHER_ROWS}",
            public="parties insist on different batches, from earlier jobs on their rows with others; take partners of "
            "one of these jobs, or, if they are other rows, name another store",
        )
    names = sorted(name for name, known in told.items() if known.named)
    if not insisted:
        if named is not None and {known.named for known in told.values()} == {own.named}:
            return named
        if names:
            logger.warning(
                "%s: batches are not those of the random_state of %s: all parties with data must name the same",
                party.name, ", ".join(names),
            )  # fmt: skip
        return joint_seed(party, others, "batches")
    first = min(name for name, known in told.items() if known.kept)
    if first == party.name and kept is not None:
        for peer in others:
            if not told[peer].kept:
                party.send(peer, KeptBatches(kept))
    if kept is None:
        kept = party.receive(first, KeptBatches).seed
        if len(kept) != SEED_BYTES or _digest(kept) != told[first].kept:
            raise PeerProtocolError(first, f"expected the seed it told a digest of - at KeptBatches from {first}")
        logger.warning("%s: takes the batches that %s has kept of an earlier job on these rows", party.name, first)
    return kept


def _digest(seed: bytes) -> bytes:
    return hashlib.sha256(b"treaty known batches" + seed).digest()


def tell_who_stands_alone(party: Party, setting: Setting, columns: Integers, batches: Integers) -> dict[str, int]:
    """Return of each data party how many of its rows stand alone in their batch, and warn of others'.

    Parameters
    ----------
    columns : int64 (n_rows, n_columns)
        Own columns, in fixed point.
    batches : int64 (n_batches, batch_size)
    """
    own = sum(rows_alone(columns[rows] * 2.0**-COLUMN_FRACTION) for rows in batches)
    others = setting.others(party.name)
    for peer in others:
        party.send(peer, StandAlone(own))
    alone = {party.name: own, **{peer: party.receive(peer, StandAlone).rows for peer in others}}
    for peer in others:
        if alone[peer] > batches.size:
            raise PeerProtocolError(peer, f"expected at most {batches.size} rows - at StandAlone.rows from {peer}")
    _warn(party.name, setting.guest, alone, batches.size)
    return {name: alone[name] for name in setting.parties}


def _warn(name: str, guest: str, alone: Mapping[str, int], n_rows: int) -> None:
    for peer, rows in alone.items():
        if rows and peer != name and guest in (name, peer):
            logger.warning(
                "%s: %d of %d rows stand alone in their batch among %s's columns, which can tell their %s from its "
                "gradients; fewer rare categories, far values cut off, or larger batches make them fewer",
                name, rows, n_rows, peer, "labels" if name == guest else "margins",
            )  # fmt: skip
