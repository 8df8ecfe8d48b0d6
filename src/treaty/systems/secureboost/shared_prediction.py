"""Prediction on shares: the active party gets margins, and no decision of another party (``inference="shared"``).

Two parties compute (`hidden_forest`): the active party and its *partner*, the first passive party of the job. Further
passive parties give the sides of rows at their splits under one-time pads, which they share with the partner: the
active party has the masked sides, the partner the pads. Keys of pads pass through the active party, signed with those
of the parties' certificates (`MovingKey`).

* *Active party*: learns rows' margins. By trying which leaves add up to a margin, it can find the decisions of small
  models, as anyone who sees a margin can. It is honest but curious: trees of its own making would read decisions one by
  one.
* *Partner*: learns how many rows and trees there are, at which nodes its own splits and those of further parties are,
  and which levels have splits of the active party.
* *Further party*: learns how many rows there are, and which of its splits the trees use.
* *Active party and partner together*: the sides of all rows at splits of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.crypto.transfer.hidden_rows import WEIGHT_BYTES
from treaty.crypto.transfer.stock import Steps, Transfers, open_transfers
from treaty.data.table import Table
from treaty.errors import CryptoError, DataError, PeerProtocolError
from treaty.machine.arrays import Bytes, Floats, Int32s, Integers, Words
from treaty.messaging.exchanges import OF_ONE_MODEL, Term, agree, send_rows, take_rows
from treaty.messaging.messages import Array, Message, column_pieces, leaks, row_pieces, view
from treaty.models.trees import margins, used_records
from treaty.systems.secureboost.hidden_evaluation import rounded
from treaty.systems.secureboost.hidden_forest import (
    PRECISION_BITS,
    Decide,
    FurtherLines,
    HiddenForest,
    Lines,
    SharedForest,
    SidesRequest,
    blocks_of_lines,
    decide_rows,
    depth_of,
    leaf_shares,
    leaf_weights,
    margin_shares,
    read_forest,
    show_forest,
    unit_of,
    with_lines,
)
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import RoleInput
from treaty.systems.vertical.column_owner import ascending
from treaty.systems.vertical.messages import SignedKey
from treaty.systems.vertical.prediction import (
    Finish,
    OnlineRows,
    answer_requests,
    ask_all,
    asked_rows,
    check_not_trained,
    check_present,
    decidable,
    known_by_ids,
    take_decisions,
    withheld_rows,
)
from treaty.systems.vertical.sealed import MovingKey, compute
from treaty.trees.ensemble import SplitTable

_SHARE_BITS = 64  # of a row and output, as shares of margins are sent


@leaks("how many splits the sender keeps; a public key", "control")
class SharingKey(Message):
    """How many records the party has, and a fresh signed public key for pads."""

    records: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    key: SignedKey


@leaks("sides of rows under a pad, which another party has", "masked")
class MaskedSides(Message):
    """Packed bits (n_records, n_rows/8), 1 for right, xor the pad; of each block of rows in pieces as `Decisions`."""

    left: Array


@leaks("each row's sum of leaf weights, from which decisions of small models follow", "exact")
class MarginShares(Message):
    """Shares of the next rows' sums of leaf weights, uint64 (n, outputs), which the active party opens."""

    shares: Array


def _agree(inputs: RoleInput[SecureBoost], rows: str) -> int:
    """Agree on the model, the number of `rows`, and how many lowest bits of margins are dropped; return this."""
    check_present(inputs.party, inputs.part, inputs.rows.table)
    terms: dict[str, Term] = {"model": inputs.part.model_id, rows: inputs.rows.table.n_rows, "inference": "shared"}
    terms["training_rows"], dropped = "refused", 0
    if inputs.options.rounds_margins:
        # the model's, as a job of another objective would leave more bits
        dropped = inputs.part.dropped
        terms["training_rows"] = f"rounded by {dropped} bits"
    agree(inputs.party, terms, remedy=OF_ONE_MODEL)
    return dropped


def _rounded(
    role: int, dropped: int, transfers: Transfers, n_rows: int, own: Decide, forest: SharedForest, *given: Any
) -> Steps[Words]:
    """Return shares of margins as `margin_shares`, uint64 (n_rows, outputs), without the lowest bits of these."""
    shares = yield from margin_shares(transfers, n_rows, own, forest, *given)
    if not dropped:
        return shares.astype(np.uint64)
    return (yield from rounded(transfers, shares, forest.nbytes, dropped, role))


# ---------------------------------------------------------------- active party


@dataclass(frozen=True, slots=True)
class _Walk:
    """The active party's end of predictions by a model, for as many rows and as often as wanted.

    `further` is of how many records each further party shares sides.
    """

    inputs: RoleInput[SecureBoost]
    forest: SharedForest
    weights: Integers
    unit: float
    dropped: int
    further: Mapping[str, int]
    transfers: Transfers

    def margins(self, table: Table) -> Floats:
        """Return margins of rows, float64 (n_rows, n_outputs)."""
        inputs, n_rows, party, forest = self.inputs, table.n_rows, self.inputs.party, self.forest
        part, partner, outputs = inputs.part, inputs.others[0], self.forest.outputs
        own = with_lines(
            partial(decide_rows, part.splits, table, inputs.threads), forest.held, n_rows,
            [(lines, partial(take_decisions, party, name, MaskedSides, lines)) for name, lines in self.further.items()],
        )  # fmt: skip
        # of a batch: a request of a service is short
        done = [partial(inputs.observers.set_up, "predicting")] if inputs.requests is None else []
        shared = part.leaves is not None
        steps = _rounded(0, self.dropped, self.transfers, n_rows, own, forest, self.weights, shared, *done)
        shares = compute(party, steps, partner=partner)
        for of, came in take_rows(party, partner, n_rows, _SHARE_BITS * outputs, MarginShares):
            shape = (of.stop - of.start, outputs)
            shares[of] += view(came.shares, np.uint64, shape, peer=partner, what="MarginShares.shares")
        # of the bytes that count, the highest bit is the sign
        above = 64 - 8 * forest.nbytes
        sums = (shares << np.uint64(above)).view(np.int64) >> above
        return np.asarray(part.grown.objective.base_margins + sums * self.unit)


def _bytes_of(weights: Integers, outputs: int, *, whole: bool) -> int:
    """Return how many bytes hold any sum; of weights without a unit of their own, by the number of trees alone."""
    most = int(np.abs(weights).max(axis=1).sum()) if whole else len(weights) // outputs << PRECISION_BITS
    return max(WEIGHT_BYTES, (most.bit_length() + 8) // 8)


def _begin(inputs: RoleInput[SecureBoost], rows: str) -> Callable[[Table], Floats]:
    """Agree on the model and the number of `rows`; return what predicts rows."""
    party, part, partner = inputs.party, inputs.part, (*inputs.others, "")[0]
    if part.leaves is not None and (has := next(of for of in part.grown.sources if of != party.name)) != partner:
        raise DataError(f"expected {has}, which shares the weights of leaves, before the job's other passive parties")
    if inputs.requests is None:
        check_not_trained(inputs)
    dropped = _agree(inputs, rows)
    keys = {peer: party.receive(peer, SharingKey) for peer in party.peers}
    trees = decidable(party, part, {peer: of.records for peer, of in keys.items()})
    objective, sources = part.grown.objective, part.grown.sources
    used = {name: of for name, of in zip(sources, used_records(trees, len(sources)), strict=True) if len(of)}
    # with shared weights the partner is needed, also if it has no split
    if not trees or (part.leaves is None and not used.keys() - {party.name}):
        return lambda table: margins(ask_all(party, part, trees, table, 0, inputs.threads), objective, inputs.threads)
    unit, outputs = unit_of(trees, objective.leaf_unit * objective.grad_clip), objective.n_outputs
    if part.leaves is None:
        weights = leaf_weights(trees, depth_of(trees), unit)
        nbytes = _bytes_of(weights, outputs, whole=bool(objective.leaf_unit))
    else:
        weights, nbytes = leaf_shares(part.shared_leaves, len(trees), depth_of(trees)), WEIGHT_BYTES
    further = {name: of for name, of in used.items() if name not in (party.name, partner)}
    held = {party.name: len(part.splits), partner: keys[partner].records}
    signed = {name: of.key for name, of in keys.items()} if len(inputs.others) > 1 else {}
    forest = show_forest(party, trees, sources, held, further, signed, outputs, nbytes)
    transfers = compute(party, open_transfers(0), partner=partner)
    return _Walk(
        inputs, forest, weights, unit, dropped, {name: len(of) for name, of in further.items()}, transfers
    ).margins


def predict_active(inputs: RoleInput[SecureBoost]) -> Floats:
    """Return margins, float64 (n_rows, n_outputs), of the role's rows without a decision of another party.

    They are exact if leaves are whole units; else weights are rounded to `PRECISION_BITS` below the largest, and added
    up exactly. Observers are shown rows done.
    """
    found = _begin(inputs, "rows to predict")(inputs.rows.table)
    for peer in inputs.party.peers:
        inputs.party.send(peer, Finish())
    return found


def online_active(inputs: RoleInput[SecureBoost]) -> None:
    """Predict what `inputs.requests` asks for, until it ends, without a decision of another party."""
    predict = _begin(inputs, "rows")
    answer_requests(inputs, lambda asked: predict(asked.table))


# ---------------------------------------------------------------- passive parties


Further = Mapping[str, tuple[int, SignedKey]]
"""How many lines each further party shares, and its key."""
# Answers about some rows, given how many they are and what decides them
_Answer = Callable[[int, Decide], None]


def follow(inputs: RoleInput[SecureBoost], rows: str) -> None:
    """Take part in predictions as a passive party: of all its rows, or of those that are asked for, by number."""
    party, table, splits = inputs.party, inputs.rows.table, inputs.part.splits
    (active,) = party.peers
    dropped, online = _agree(inputs, rows), [OnlineRows] if rows == "rows" else []
    # rows known by values alone are offered by the active party, which does not know them
    if not (online and known_by_ids(inputs)):
        check_not_trained(inputs)
    key = MovingKey(party, inputs.vouching, "sides at prediction")
    party.send(active, SharingKey(len(splits), key.signed()))
    kind = HiddenForest if party.name == inputs.others[0] else SidesRequest
    came, answer = party.receive(active, kind, *online, Finish), None
    if isinstance(came, HiddenForest | SidesRequest):
        if isinstance(came, HiddenForest):
            answer = _partner(inputs, came, key, dropped)
        else:
            meet(inputs, key, {inputs.others[0]: came.key}, "SidesRequest.key")
            answer = share_sides(inputs, came, key, len(splits))
        if not online:
            answer(table.n_rows, partial(decide_rows, splits, table, inputs.threads))
        came = party.receive(active, *online, Finish)
    # by row, as single rows are asked for
    matrix = table.matrix() if online else np.zeros((0, 0), np.float32)
    withheld = withheld_rows(inputs) if online else np.zeros(0, np.bool_)
    while isinstance(came, OnlineRows):
        party.transcript.clear()
        asked = asked_rows(came, active, len(matrix))
        if withheld[asked].any():
            raise PeerProtocolError(active, "expected no rows that the model was trained on", at="OnlineRows")
        some = matrix[asked]
        if answer is not None and len(some):
            answer(len(some), partial(_decide_matrix, splits, some))
        came = party.receive(active, OnlineRows, Finish)


def _partner(inputs: RoleInput[SecureBoost], came: HiddenForest, key: MovingKey, dropped: int) -> _Answer:
    party, part, (active,) = inputs.party, inputs.part, inputs.party.peers
    forest, further = forest_with_lines(inputs, came, len(part.splits), part.trees_a_round)
    meet(inputs, key, {name: of for name, (_, of) in further.items()}, "FurtherLines.further")
    shares = None
    if part.leaves is not None:
        if len(forest.records) > len(part.shared_leaves) or forest.nbytes != WEIGHT_BYTES:
            what = f"expected at most {len(part.shared_leaves)} trees, in whole units"
            raise PeerProtocolError(active, what, at="HiddenForest")
        shares = leaf_shares(part.shared_leaves, len(forest.records), len(forest.others))
    transfers = compute(party, open_transfers(1))

    def answer(n_rows: int, own: Decide) -> None:
        decide = with_lines(own, forest.held, n_rows, pads_of(key, further))
        found = compute(party, _rounded(1, dropped, transfers, n_rows, decide, forest, shares, shares is not None))
        send_rows(party, active, n_rows, _SHARE_BITS * forest.outputs, lambda of: MarginShares(Array.of(found[of])))

    return answer


def forest_with_lines(
    inputs: RoleInput[SecureBoost], came: HiddenForest, held: int, most_outputs: int
) -> tuple[SharedForest, Further]:
    """Return what the active party tells of trees, and of lines that are shared with further parties."""
    party, (active,) = inputs.party, inputs.party.peers
    further = party.receive(active, FurtherLines).further if len(inputs.others) > 1 else {}
    shared = sum(lines for lines, _ in further.values())
    forest = read_forest(came, active, held, most_outputs, shared)
    # pads of all lines are in memory, of a block of rows
    if shared > forest.records.size:
        raise PeerProtocolError(active, "expected no more lines than the trees have nodes", at="FurtherLines.further")
    if not further.keys() <= {*inputs.others} - {party.name}:
        what = "expected lines of the job's other passive parties"
        raise PeerProtocolError(active, what, at="FurtherLines.further")
    return forest, further


def pads_of(key: MovingKey, further: Further) -> list[Lines]:
    """Return what makes the partner's shares of further parties' lines, given how many rows are next."""
    return [(lines, partial(_pads, key, name, lines, sending=False)) for name, (lines, _) in further.items()]


def share_sides(inputs: RoleInput[SecureBoost], came: SidesRequest, key: MovingKey, held: int) -> _Answer:
    """Return what shares the sides of rows at own records, below `held`, as a further party."""
    party, (active,), partner = inputs.party, inputs.party.peers, inputs.others[0]
    records = ascending(came.records, held, active, "SidesRequest.records")

    def answer(n_rows: int, own: Decide) -> None:
        for block in blocks_of_lines(n_rows, len(records)):
            count = block.stop - block.start
            # what both others take for a side left of their own adds up to the side right
            masked = ~own(records, block) ^ _pads(key, partner, len(records), count, sending=True)
            for part in column_pieces(len(records), count):
                for of in row_pieces(count, part.stop - part.start):
                    party.send(active, MaskedSides(Array.of(masked[part, of.start // 8 : -(-of.stop // 8)])))

    return answer


def meet(inputs: RoleInput[SecureBoost], key: MovingKey, keys: Mapping[str, SignedKey], what: str) -> None:
    """Derive a seed with other passive parties by their keys, which the active party has passed on."""
    active = inputs.roles.active
    if not keys.keys() <= {*inputs.others} - {inputs.party.name}:
        raise PeerProtocolError(active, "expected keys of the job's other passive parties", at=what)
    try:
        key.meet(keys)
    except CryptoError as error:
        raise PeerProtocolError(active, str(error), at=what) from None


def _pads(key: MovingKey, other: str, lines: int, n_rows: int, *, sending: bool) -> Bytes:
    """Return the next pads of lines of packed bits, uint8 (lines, ceil(n_rows / 8))."""
    words = key.mask(other, (lines, -(-n_rows // 64)), sending=sending)
    return np.asarray(words.astype("<u8").view(np.uint8)[:, : -(-n_rows // 8)])


def _decide_matrix(splits: SplitTable, rows: NDArray[np.float32], records: Int32s, of: slice) -> Bytes:
    return splits.decide(rows[of], records)
