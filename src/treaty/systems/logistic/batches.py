"""How the data parties of a regression agree on batches and weights of rows, and count rows that stand alone.

**Batches** are cut once, for a training and for all later ones on the same rows that use the same folder: fresh batches
would give all parties new equations about the same rows. A party that kept a partition insists on it, even if its
columns have changed since. A seed of `random_state` is used only if all data parties name the same one: a party that
chose the seed alone could pick one that isolates rows of its choice.

**Weights of rows** are shown to all parties with data, by consent. Every party multiplies its part of a row's margin by
the row's weight, and the active party the label, so that all products and the loss are weighted. Hidden weights would
need products of a passive party's own columns with its own margins under weights that it does not know.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import msgspec
import numpy as np

from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.files import Format, read_file, write_file
from treaty.linear.lbfgs import SEED_BYTES, batch_seed, partition, rows_alone
from treaty.linear.preparation import COLUMN_FRACTION
from treaty.machine.arrays import Floats, Integers
from treaty.messaging.exchanges import exchange, joint_seed, send_rows, take_rows
from treaty.messaging.messages import Array, Message, RowSize, leaks, view
from treaty.messaging.party import Party
from treaty.systems.logistic.setup import LARGEST_WEIGHT, GlmInput, OwnData, Setting, check_guards

logger = logging.getLogger(__name__)

FORMAT = Format("batches", 3)
_OTHER_ROWS = (
    "if these are other rows (without ids a passive party knows only how many there are), name another store "
    "(`checkpoint` of fit), or align them by ids: [align]"
)


@leaks("whether the sender had an earlier job on these rows", "control")
class KnownBatches(Message):
    """Digests of the seed that the sender kept and of the one that random_state gives, empty for none."""

    kept: bytes
    named: bytes


@leaks("which rows are in a batch, as all parties with data know", "control")
class KeptBatches(Message):
    """The kept seed itself, for a party that has none."""

    seed: bytes


@leaks("how many rows of all batches stand alone among the sender's columns", "aggregated", guard="batch_size")
class LoneRows(Message):
    """How many rows of all batches stand alone among the sender's columns (`rows_alone`)."""

    rows: RowSize


def rows_digest_of(n_rows: int, labels: Integers | None) -> bytes:
    """Return a digest of rows matched by position, for `agree_on_batches`: of their number and own labels.

    Columns do not count: with one more, the rows are the same.
    """
    return hashlib.sha256(repr(n_rows).encode() + (b"" if labels is None else labels.tobytes())).digest()


def agree_on_batches(
    party: Party, setting: Setting, random_state: int | None, rows_digest: bytes, store: Path | None
) -> Integers:
    """Agree on the partition into batches with all data parties; return its rows (n_batches, batch_size).

    A kept partition belongs to `rows_digest`: of the rows' ids in this order, or `rows_digest_of`. `store` keeps
    partitions from job to job, unless it is None. Raises ConfigError when other batches are asked for than those kept,
    or parties kept different ones.
    """
    # a party's name may hold what a file's may not
    file = None if store is None else store / f"{quote(party.name, safe=' ')}.batches"
    found = _Kept([]) if file is None or not file.exists() else read_file(file, _Kept, FORMAT, party.name)
    named = None if random_state is None else batch_seed(random_state)
    known = None
    # other batches than the kept ones are refused, whatever the reason
    for entry in found.entries:
        if entry.rows != rows_digest:
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
                "%s: %s keeps batches of %d other sets of rows; gradients of rows that are in several sets have shown "
                "more about them than one partition would",
                party.name, file.name, len(found.entries),
            )  # fmt: skip
        file.parent.mkdir(parents=True, exist_ok=True)
        entries = [*found.entries, _Partition(rows_digest, setting.batch_size, seed)]
        write_file(file, _Kept(entries), FORMAT, party.name)
    return partition(setting.n_rows, setting.batch_size, seed)


class _Partition(msgspec.Struct):
    rows: bytes
    batch_size: int
    seed: bytes


class _Kept(msgspec.Struct):
    entries: list[_Partition]


def _common_seed(
    party: Party, others: Sequence[str], kept: bytes | None, named: bytes | None, file: Path | None
) -> bytes:
    """Return the seed that a party kept, else the one that all name, else a new one made by all."""
    own = KnownBatches(*(b"" if seed is None else _digest(seed) for seed in (kept, named)))
    received = exchange(party, others, own)
    insisted = {known.kept for known in received.values()} - {b""}
    if len(insisted) > 1:
        raise ConfigError(
            "parties insist on different batches, from earlier jobs with other partners; take the partners of one of "
            f"these jobs{'' if file is None else f' - this party keeps its own in {file}'}; {_OTHER_ROWS}",
            public="parties insist on different batches, from earlier jobs with other partners; take the partners of "
            "one of these jobs, or, if they are other rows, name another store",
        )
    names = sorted(name for name, known in received.items() if known.named)
    if not insisted:
        if named is not None and {known.named for known in received.values()} == {own.named}:
            return named
        if names:
            logger.warning(
                "%s: random_state of %s is not used for the batches: all parties with data must name the same",
                party.name, ", ".join(names),
            )  # fmt: skip
        return joint_seed(party, others, "batches")
    # those that kept the seed have it; the first of them sends it to all that have none
    first = min(name for name, known in received.items() if known.kept)
    if first == party.name and kept is not None:
        for peer in others:
            if not received[peer].kept:
                party.send(peer, KeptBatches(kept))
    if kept is None:
        kept = party.receive(first, KeptBatches).seed
        if len(kept) != SEED_BYTES or _digest(kept) != received[first].kept:
            raise PeerProtocolError(first, "the seed does not match its digest", at="KeptBatches")
        logger.warning("%s: using the batches that %s kept from an earlier job on these rows", party.name, first)
    return kept


def _digest(seed: bytes) -> bytes:
    return hashlib.sha256(b"treaty known batches" + seed).digest()


def count_lone_rows(party: Party, setting: Setting, data: OwnData, batches: Integers) -> dict[str, int]:
    """Return of each data party how many of its rows stand alone in their batch, and warn of others'.

    Such a row, the only one of its category for instance, shows its own residual in the gradient, see `rows_alone`. No
    choice of batches helps. `data` are the own columns and weights, `batches` row numbers (n_batches, batch_size).
    """
    scale = np.ones(setting.n_rows) if data.weight is None else np.sqrt(data.weight)
    scale *= 2.0**-COLUMN_FRACTION
    own = sum(rows_alone(data.columns[rows] * scale[rows, np.newaxis]) for rows in batches)
    others, active, name = setting.others(party.name), setting.active, party.name
    counts = exchange(party, others, LoneRows(own))
    for peer in others:
        if counts[peer].rows > batches.size:
            raise PeerProtocolError(peer, f"expected at most {batches.size} rows", at="LoneRows.rows")
    for peer in others:
        if counts[peer].rows and active in (name, peer):
            logger.warning(
                "%s: %d of %d rows stand alone in their batch among %s's columns: its gradients show their %s; to make "
                "them fewer, join rare categories, cut off far values, or take larger batches",
                name, counts[peer].rows, batches.size, peer, "labels" if name == active else "margins",
            )  # fmt: skip
    return {name: counts[name].rows for name in setting.owners}


# Beyond 1/2: weights of rows that predict labels with such an area under the curve are warned of
TELLING = 0.1


@leaks(
    "the weights of all rows, and so what they depend on: class weights reveal labels",
    "exact",
    guard="show_weights=False",
)
class RowWeights(Message):
    """Weights of rows, float64, of many the next ones; once, before the first step."""

    values: Array


def check_shown(inputs: GlmInput, y: Floats, weight: Floats) -> None:
    """Refuse weights of rows (n_rows,) that may not be shown, or that no fixed point holds; warn if they show labels.

    Raises ConfigError or DataError.
    """
    name = inputs.party.name
    if inputs.options.mode == "paper":
        raise ConfigError("mode='paper' has no weights of rows, as the paper has none: expected sample_weight=None")
    if not inputs.options.show_weights:
        raise ConfigError(
            "weights of rows have to be shown to all parties with data, which multiply their parts of margins by them; "
            f"if these may know them, set show_weights=True in {type(inputs.options).__name__} at every party (weights "
            "that follow labels, as class weights do, reveal labels), or leave sample_weight out"
        )
    largest = float(weight.max() / weight.mean())
    if largest > LARGEST_WEIGHT:
        raise DataError(
            f"{name}: expected weights of at most {LARGEST_WEIGHT} times their mean, got {largest:.0f} times; cap them"
        )
    from sklearn.metrics import roc_auc_score  # late: few trainings have weights

    area = float(roc_auc_score(y > 0.5, weight))
    if abs(area - 0.5) > TELLING:
        logger.warning(
            "%s: weights of rows, which all parties with data receive, reveal labels with AUC %.2f", name,
            max(area, 1.0 - area),
        )  # fmt: skip


def share_weights(party: Party, setting: Setting, own: OwnData, batches: Integers) -> OwnData:
    """Send passive parties the weights of rows, if any, or receive them; return the own data with them.

    Raises ConfigError when a batch has too few rows of any weight to hide labels.
    """
    if not setting.weighted:
        return own
    weight = own.weight
    if weight is not None:
        shown = weight
        for peer in setting.passives:
            send_rows(party, peer, setting.n_rows, 64, lambda of: RowWeights(Array.of(shown[of])))
    else:
        weight = np.empty(setting.n_rows)
        for of, piece in take_rows(party, setting.active, setting.n_rows, 64, RowWeights):
            shape = (of.stop - of.start,)
            weight[of] = view(piece.values, np.float64, shape, peer=setting.active, what="RowWeights.values")
        if not (np.all((weight >= 0.0) & (weight <= LARGEST_WEIGHT)) and abs(weight.mean() - 1.0) < 1e-6):
            raise PeerProtocolError(
                setting.active, f"expected weights of 0 to {LARGEST_WEIGHT} with mean 1", at="RowWeights"
            )
    # a row without weight hides nothing
    least = int(np.count_nonzero(weight[batches], axis=1).min())
    try:
        check_guards(setting, least)
    except ConfigError as error:
        raise ConfigError(f"of rows that weigh more than 0: {error}") from None
    return replace(own, weight=weight)
