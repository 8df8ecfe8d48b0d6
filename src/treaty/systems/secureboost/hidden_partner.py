"""The partner of a training with hidden rows: the passive party that computes with the active one (`hidden_training`).

It has the same steps, in the same order, without labels and weights of rows: `_Partner.grow` is the other end of
`hidden_training._Grower.grow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from treaty.crypto.transfer.ahead import Ahead
from treaty.crypto.transfer.hidden_rows import WEIGHT_BYTES
from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Flags, Int32s, Integers, pieces
from treaty.messaging.conversation import MessageOrder, Table
from treaty.messaging.messages import Array, view
from treaty.models.trees import ModelPart
from treaty.systems.pooled.continuing import CheckpointRequest
from treaty.systems.secureboost import hidden_tree
from treaty.systems.secureboost.hidden_evaluation import (
    EvalLoss,
    EvalRows,
    GrownTree,
    check_rows,
)
from treaty.systems.secureboost.hidden_forest import (
    HiddenForest,
    SharedLeaves,
    decide_rows,
    margin_shares,
    with_lines,
)
from treaty.systems.secureboost.hidden_further import (
    Padded,
    train_further,
)
from treaty.systems.secureboost.hidden_setup import (
    Columns,
    losses_of,
    make_ends,
    note_rows,
    take_start,
    terms_of,
)
from treaty.systems.secureboost.hidden_training import CLASSES_AT_ONCE, HiddenTree, WeightShares
from treaty.systems.secureboost.hidden_tree import (
    HiddenEnd,
    HiddenLevel,
    record,
)
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.secureboost.shared_prediction import forest_with_lines, meet, pads_of
from treaty.systems.system import RoleInput
from treaty.systems.vertical.column_owner import ascending
from treaty.systems.vertical.prediction import Finish
from treaty.systems.vertical.sealed import MovingKey, compute
from treaty.systems.vertical.training import Follower, agree_on_terms


def train_passive(inputs: RoleInput[SecureBoost]) -> ModelPart:
    """Train as a passive party: as the first, grow each tree with the active one until it is done."""
    check_rows(inputs)
    if inputs.party.name != inputs.others[0]:
        return train_further(inputs)
    partner = _Partner(inputs)
    return partner.follower.follow(MessageOrder(_TABLE, "between trees"), {HiddenTree: partner.grow})


class _Partner:
    """The partner's part of all rounds: an end for each class, and shares of margins."""

    def __init__(self, inputs: RoleInput[SecureBoost]) -> None:
        self._inputs, self._party, (self._active,) = inputs, inputs.party, inputs.party.peers
        self._columns, self._further = Columns(inputs), inputs.others[1:]
        self._key = MovingKey(inputs.party, inputs.vouching, "hidden rows") if self._further else None
        agree_on_terms(inputs)
        keys = self._columns.exchange(inputs, self._key)
        if self._key is not None:
            meet(inputs, self._key, keys, "HiddenColumns")
        start = take_start(self._party, self._active)
        self.follower = Follower(inputs, start)
        note_rows(inputs, self.follower.part)
        self._objective, bounds, rules = terms_of(inputs, start)
        self._ends = make_ends(inputs, self._columns, bounds, rules, start.step, losses_of(self._objective))
        outputs, transfers, part = len(self._ends), self._ends[0].transfers, self.follower.part
        self._shared = inputs.options.shares_leaves
        self._leaves = SharedLeaves(self._party, part, outputs, start.rounds * outputs, 1, np.zeros(outputs, np.int64))
        self._margins = np.zeros((outputs, inputs.rows.table.n_rows), np.uint32)
        self._eval_sets = [
            EvalRows(of.table, transfers, part.splits, inputs.threads, outputs, number, self._shared)
            for number, of in enumerate(inputs.eval_sets)
        ]
        self._sets = [of.table.n_rows for of in (inputs.rows, *inputs.eval_sets)]
        if start.rounds:
            self._add_earlier()
        self._ahead, self._grown = Ahead(transfers), 0
        self._samples: list[tuple[Flags | None, list[Int32s]]] = []

    def _add_earlier(self) -> None:
        """Add the trees of a checkpoint or of an earlier model to the margins, which nobody has kept."""
        party, splits, table, outputs = self._party, self.follower.part.splits, self._inputs.rows.table, len(self._ends)
        transfers, came = self._ends[0].transfers, party.receive(self._active, HiddenForest)
        shared, beyond = forest_with_lines(self._inputs, came, len(splits), outputs)
        if (shared.outputs, shared.nbytes) != (outputs, WEIGHT_BYTES):
            what = f"expected trees of {outputs} outputs, in whole units"
            raise PeerProtocolError(self._active, what, at="HiddenForest")
        pads, weights = [] if self._key is None else pads_of(self._key, beyond), None
        if self._shared:
            weights = self._leaves.of_earlier(transfers, len(shared.records), len(shared.others))
        decide_own = partial(decide_rows, splits, table, self._inputs.threads)
        own = with_lines(decide_own, shared.held, table.n_rows, pads)
        steps = margin_shares(transfers, table.n_rows, own, shared, weights, self._shared)
        self._margins += compute(party, steps).T
        for rows in self._eval_sets:
            rows.add(party, shared, weights, pads)

    def grow(self, sent: HiddenTree) -> None:
        """Take the sample of a class's tree; after that of the last class, grow the round's trees."""
        self.follower.limits.tree()
        self.follower.next_tree()
        self._samples.append(
            _read_sample(sent, self._active, self._columns, self._ends[0].places, self._margins.shape[1])
        )
        if len(self._samples) < len(self._ends):
            return
        party, samples, self._samples = self._party, self._samples, []
        self._ahead.nbytes = sent.ahead
        self._ahead.begin_tree()
        trees, own_shares = list[GrownTree](), list[Integers]()
        for of in pieces(len(self._ends), CLASSES_AT_ONCE):
            ends = self._ends_of(of, samples[of])
            steps = hidden_tree.grow_together(ends, self._margins[of], [sampled for sampled, _ in samples[of]])
            grown = compute(party, steps, self._ahead)
            trees += [self._recorded(levels) for levels, *_ in grown]
            weights = None
            if self._shared:
                weights = self._leaves.of_trees([shares for *_, shares in grown])
                own_shares += weights
                self._leaves.reach_too_far(ends[0].transfers, of)
            else:
                for *_, shares in grown:
                    party.send(self._active, WeightShares(Array.of(shares)))
            add = hidden_tree.add_weights(grown, self._margins[of], weights, shared=self._shared)
            self._margins[of] = compute(party, add)
        for rows in self._eval_sets:
            rows.add_round(party, trees, self._ends[0].place, np.stack(own_shares) if self._shared else None)
            party.send(self._active, EvalLoss(Array.of(rows.loss(party, self._objective, None, 1))))

    def _ends_of(self, of: slice, samples: Sequence[tuple[Flags | None, list[Int32s]]]) -> list[HiddenEnd]:
        """Return the ends of some classes' trees on their samples of columns."""
        ends = [self._columns.of_tree(end, on) for end, (_, on) in zip(self._ends[of], samples, strict=True)]
        numbers = range(self._grown + 1, self._grown + 1 + len(ends))
        self._grown += len(ends)
        if self._key is None:
            return ends
        return [
            replace(end, further=Padded(self._key, self._further, number, self._sets, end.of_further))
            for end, number in zip(ends, numbers, strict=True)
        ]

    def _recorded(self, levels: list[HiddenLevel]) -> GrownTree:
        """Record a tree's own splits."""
        for level in levels:
            self._columns.note_splits(self._inputs, zip(level.columns.tolist(), level.left_bins, strict=True))
        return levels, record(self.follower.part.splits, self._columns.bins, levels)


_TABLE: Table = {
    "between trees": {HiddenTree: "between trees", CheckpointRequest: "between trees", Finish: "finished"},
    "finished": {},
}


def _read_sample(
    sent: HiddenTree, active: str, columns: Columns, places: Sequence[int], n_rows: int
) -> tuple[Flags | None, list[Int32s]]:
    """Return a tree's rows, None for all, and each owner's columns, in the job's order."""
    fields = ["active", "passive", *(f"further[{k}]" for k in range(len(sent.further)))]
    if len(fields) != len(places):
        raise PeerProtocolError(active, "expected columns of all owners", at="HiddenTree.further")
    found = dict[int, Int32s]()
    for place, of, field in zip(places, (sent.active, sent.passive, *sent.further), fields, strict=True):
        found[place] = ascending(of, len(columns.layouts[place].categorical), active, f"HiddenTree.{field}")
    if not any(map(len, found.values())):
        raise PeerProtocolError(active, "expected a column at least", at="HiddenTree")
    ordered = [found[place] for place in range(len(found))]
    if sent.rows is None:
        return None, ordered
    packed = view(sent.rows, np.uint8, (-(-n_rows // 8),), peer=active, what="HiddenTree.rows")
    return np.unpackbits(packed, count=n_rows).view(np.bool_), ordered
