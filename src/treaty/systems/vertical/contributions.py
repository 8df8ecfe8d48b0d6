"""Exact TreeSHAP of a vertical model: the active party computes, each owner gets its own columns' values.

Contributions follow from which child a row takes at each record, from the trees' covers, and from which records split
on the same column (`treaty.trees.shap`). The active party has the first two after a prediction; owners add the third.

Beyond a prediction, the active party learns which of an owner's records share a column, and so, for every row, the
contribution of every foreign column that the model uses, under a pseudonym ("shop #2"). A passive party learns per row
and used column a real number. These are parts of the prediction: their sum ranks rows like a model of its own, and so
reveals something of the label, the more the larger the party's share. Rows with equal decisions of its own but
different values differ at splits of others on the same trees, so the values sort rows by other parties' decisions. Do
not hand out contributions where passive parties must not learn about labels or predictions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from treaty.errors import PeerProtocolError
from treaty.messaging.exchanges import send_rows, take_rows
from treaty.messaging.messages import Array, Message, leaks, view
from treaty.models.interpretation import order_of_first_use
from treaty.systems.system import Program, RoleInput
from treaty.systems.vertical.prediction import collect, online_active, online_passive, predict_active, predict_passive
from treaty.trees.shap import contributions


@leaks("which of its own splits the trees use", "exact")
class ColumnsRequest(Message):
    """Records int32 (n_records,), ascending; asks which of them split on the same column."""

    records: Array


@leaks("which splits of the sender use the same column, by number", "exact")
class ColumnNumbers(Message):
    """Of each record asked about, its column int32 (n_records,), numbered from 0 in order of first use."""

    numbers: Array


@leaks("what its own columns add to each row's prediction, which reveals something about labels", "exact")
class OwnContributions(Message):
    """Contributions float64 (n_outputs, n_columns, rows) of the owner's columns, as it numbered them.

    Many rows take several messages, each about the next rows.
    """

    values: Array


@dataclass(frozen=True, slots=True)
class ActiveContributions:
    """What the active party keeps: its own columns' values, and those of others' used columns under pseudonyms."""

    party: str
    own: NDArray[np.float64]  # (n_outputs, n_rows, n_features)
    others: dict[str, NDArray[np.float64]]  # (n_outputs, n_rows, n_columns); number k is `interpretation.pseudonym` k
    bias: NDArray[np.float64]  # (n_outputs,) what every row starts from

    @property
    def totals(self) -> dict[str, NDArray[np.float64]]:
        """Sum over each party's columns, float64 (n_outputs, n_rows)."""
        return {name: values.sum(axis=2) for name, values in {self.party: self.own, **self.others}.items()}

    @property
    def margins(self) -> NDArray[np.float64]:
        """What the rows are predicted, float64 (n_rows, n_outputs)."""
        return np.asarray(sum(self.totals.values(), start=self.bias[:, None])).T


def explain_active(inputs: RoleInput) -> ActiveContributions:
    """Explain the rows of the role's input as the active party; raises what `predict_active` does."""
    party, part = inputs.party, inputs.part
    found = collect(inputs)
    forest = part.forest
    used = {peer: np.zeros(0, np.int32) for peer in party.peers} | dict(zip(forest.sources, found.used, strict=True))
    for peer in party.peers:
        party.send(peer, ColumnsRequest(Array.of(used[peer])))
    n_own = len(part.schema.names)
    columns = {name: np.zeros(0, np.int32) for name in forest.sources}  # of each used record, within its owner
    columns[party.name] = np.array(part.splits.feature, np.int32)[used[party.name]]
    first, last = {party.name: 0}, {party.name: n_own}  # range of each party's columns in the result
    n_features = n_own
    for peer in party.peers:
        columns[peer] = _numbers(party.receive(peer, ColumnNumbers).numbers, len(used[peer]), peer)
        first[peer] = n_features
        n_features += int(columns[peer].max(initial=-1)) + 1
        last[peer] = n_features
    values = contributions(
        found.trees, found.base, found.packed,
        np.concatenate([columns[name] + np.int32(first.get(name, 0)) for name in forest.sources]),
        n_rows=found.n_rows, n_features=n_features, n_outputs=forest.objective.n_outputs,
        base_margins=forest.objective.base_margins, threads=inputs.threads,
    )  # fmt: skip
    others = {peer: values[:, :, first[peer] : last[peer]] for peer in party.peers}
    for peer, theirs in others.items():

        def piece(rows: slice, values: NDArray[np.float64] = theirs) -> OwnContributions:
            return OwnContributions(Array.of(values[:, rows].transpose(0, 2, 1)))

        send_rows(party, peer, found.n_rows, 64 * len(theirs) * theirs.shape[2], piece)
    return ActiveContributions(party.name, values[:, :, :n_own], others, values[:, 0, -1])


def _numbers(array: Array, n_records: int, peer: str) -> NDArray[np.int32]:
    """Check that columns are numbered in order of first use: each at most one above all before."""
    numbers = view(array, np.int32, (n_records,), peer=peer, what="ColumnNumbers.numbers")
    highest = np.maximum.accumulate(np.concatenate([[np.int32(-1)], numbers]))
    if np.any(numbers < 0) or np.any(np.diff(highest.astype(np.int64)) > 1):
        raise PeerProtocolError(peer, "expected columns numbered in order of first use", at="ColumnNumbers.numbers")
    return numbers


def explain_passive(inputs: RoleInput) -> NDArray[np.float64]:
    """Help the active party to explain the role's rows; return what own columns add to their margins.

    Returns float64 (n_outputs, n_rows, n_features), in the order of the own columns; zero for those without a split.
    """
    party, part, n_rows = inputs.party, inputs.part, inputs.rows.table.n_rows
    (active,) = party.peers
    predict_passive(inputs)
    request = party.receive(active, ColumnsRequest)
    asked = view(request.records, np.int32, (None,), peer=active, what="ColumnsRequest.records")
    if np.any(asked < 0) or np.any(asked >= len(part.splits)) or np.any(np.diff(asked) <= 0):
        raise PeerProtocolError(active, f"expected records below {len(part.splits)}, ascending", at="ColumnsRequest")
    features = np.array(part.splits.feature, np.int32)[asked]
    numbers = order_of_first_use(features)
    party.send(active, ColumnNumbers(Array.of(numbers)))

    n_columns = int(numbers.max(initial=-1)) + 1
    used, n_outputs = features[np.unique(numbers, return_index=True)[1]], part.trees_a_round
    own = np.zeros((n_outputs, len(part.schema.names), n_rows))
    for of, piece in take_rows(party, active, n_rows, 64 * n_outputs * n_columns, OwnContributions):
        shape = n_outputs, n_columns, of.stop - of.start
        values = view(piece.values, np.float64, shape, peer=active, what="OwnContributions.values")
        if not np.all(np.isfinite(values)):
            raise PeerProtocolError(active, "expected finite values", at="OwnContributions")
        own[:, used, of] = values
    return own.transpose(0, 2, 1)


class PredictionPrograms(TypedDict):
    """The fields of `System` with the programs of predictions, by role."""

    predict: Mapping[str, Program]
    online: Mapping[str, Program]
    explain: Mapping[str, Program]


# where parties send decisions as they are
IN_THE_CLEAR: PredictionPrograms = {
    "predict": {"active": predict_active, "passive": predict_passive},
    "online": {"active": online_active, "passive": online_passive},
    "explain": {"active": explain_active, "passive": explain_passive},
}
