"""What trees on shared rows are expected to take (``membership="hidden"``): bytes, seconds and memory.

Bytes follow from the messages. Trees are complete, as all nodes of a level are in its messages. Seconds follow from the
bytes that an end makes, most of which are for transfers, from its sums over columns, and from the steps that wait for
the other end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from treaty.crypto.sums.lattice_sums import lattice_fields, vector_bytes
from treaty.crypto.sums.shared_sums import shared_parameters
from treaty.crypto.transfer.hidden_rows import WEIGHT_BYTES
from treaty.crypto.transfer.sealed_sums import Widths
from treaty.errors import DataError
from treaty.systems.expected import Expected, Shape, Trees
from treaty.systems.system import Roles
from treaty.systems.vertical import cipher_choice
from treaty.systems.vertical.cipher_choice import Estimate, JobSize, Link
from treaty.systems.vertical.expected_sums import NEAR, TRANSFER_BYTES, candidates_of_party, job_of

logger = logging.getLogger(__name__)

MOST_WEIGHT = 255  # a row that counts more stands out in its leaf's weight
_OF_GRADIENTS = 87.5  # bytes of a row's tables, sent by either end
_TRANSFERS, _TRANSFER_BYTES, _SHORT = 19, 2.75, 2.0  # of a row, besides those of its node, and bytes of each
_OF_A_LOSS = 155.0  # bytes of a row of an eval set, sent by either end, besides the walk down a tree
_OF_A_WEIGHT = 6.1, 17.8  # bytes of a row's product with its weight, by the weight's bits and two more, by sender
_SHORTER = 0.12  # the share of a tournament's bytes that short transfers save
_STEPS, _STEPS_OF_A_LEVEL = 34, 3  # of a tree and of a level, besides the tournament's
_STEPS_OF_FURTHER = 6  # of a level: further parties' answers and sides, there and back and to the partner
_ADDING = 1.5e-9  # seconds of a row in a column, for a vector and for own shares
_UNUSED_SHARE, _UNUSED_BYTES = 0.12, 5e6  # of what is made of transfers, and at most, that the last tree leaves unused
_CANDIDATE, _AT_ONCE = 11e3, 1 << 12  # bytes of memory of a candidate in a tournament, and how many are in one


class HiddenRows(NamedTuple):
    """What a training has besides training rows that count once: rows of all eval sets, and bits of the weights."""

    watched: int = 0
    weight_bits: int = 0


Sent = dict[tuple[int, int], float]
"""Bytes by sender and receiver: the active party is 0, its partner 1, and further parties come after these."""


def _bytes_of_trees(job: JobSize, slots: Sequence[int], also: HiddenRows, transfer: float) -> Sent:
    """Return what parties send each other for trees, but for tournaments; `slots` are in their order.

    `transfer` are the bytes of a transfer.
    """
    n, depth, parameters = job.bounds.n_rows, job.rules.max_depth, shared_parameters(job.bounds, len(slots) > 2)
    value, vectors, nodes = -(-lattice_fields(job.bounds, sealed=True)[1] // 8), 1 << depth - 1, (1 << depth) - 1
    # transfers of a row's node, and sides at the nodes of each level
    to_walk = transfer * depth + (nodes - 1) / 8
    # numbers of right children, of the root's in one direction
    of_a_row = _OF_GRADIENTS + transfer * _TRANSFERS + to_walk + value * max(0.0, vectors - 1.5)
    answers, vector = [2 * of * parameters.digits for of in slots], vector_bytes(parameters, n)
    active, partner, *further = slots
    # the active party passes on what further parties answer
    of_vectors = vector * (partner > 0) + sum(answers) - answers[1], vector * (active + sum(further) > 0) + answers[1]
    sent: Sent = {}
    for role, to_weigh in enumerate(_OF_A_WEIGHT):
        weights = (1 - role) * WEIGHT_BYTES * nodes
        of_weighted = to_weigh * (also.weight_bits + 2) if also.weight_bits else 0.0
        sent[role, 1 - role] = (
            n * (of_a_row + weights + of_weighted)
            + also.watched * (_OF_A_LOSS + to_walk + weights)
            + vectors * of_vectors[role]
        )
    for k, of in enumerate(further, 2):
        # both vectors, both answers, and rows' sides at as many splits as are one party's
        sent[0, k] = 2.0 * vectors * vector * (of > 0)
        sent[k, 0] = 2 * vectors * answers[k] + (n + also.watched) / 8 * nodes / len(slots)
    return {pair: job.trees * of for pair, of in sent.items()}


def cost_of_hidden(
    job: JobSize, columns: Sequence[int], slots: Sequence[int], candidates: float, link: Link, step: int, classes: int,
    also: HiddenRows,
) -> tuple[Estimate, Sent]:  # fmt: skip
    """Return what trees take, and the bytes that parties send each other; sizes are in the order of `Sent`.

    `candidates` are those of all, `step` is how many comparisons take as long as a step. Trees of so many `classes`
    wait for their steps together.
    """
    delay = link.step / classes
    # nodes without rows are compared, too
    whole = replace(job, rules=replace(job.rules, min_child_samples=1))
    tournaments = cipher_choice.cost_of_sealing({"": Link(delay, 0.0)}, {"": (candidates, 0.0)}, whole, step)
    short = cipher_choice.sends_little(link)
    transfer, compared = (_SHORT, 1.0 - _SHORTER) if short else (_TRANSFER_BYTES, 1.0)
    sent = _bytes_of_trees(job, slots, also, transfer)
    for pair in ((0, 1), (1, 0)):
        sent[pair] += compared * tournaments.nbytes / 2
    steps = _STEPS + (_STEPS_OF_A_LEVEL + _STEPS_OF_FURTHER * (len(slots) > 2)) * job.rules.max_depth
    waiting = job.trees * steps * (delay + cipher_choice.TO_MAKE_A_STEP)
    adding = job.trees * (1 << job.rules.max_depth) * job.bounds.n_rows * max(columns) * _ADDING
    computing = max(sent[0, 1], sent[1, 0]) * cipher_choice.TO_MAKE_A_BYTE + adding
    moving = max(sum(of for (sender, _), of in sent.items() if sender == party) for party in (0, 1)) * link.byte
    waiting += tournaments.seconds - tournaments.nbytes / 2 * cipher_choice.TO_MAKE_A_BYTE
    # on a far link most bytes are sent while steps wait
    took = max(waiting, moving) if link.step > cipher_choice.FAR else waiting + moving
    return Estimate(computing + took, sum(sent.values())), sent


def tell_cost(name: str, job: JobSize, *sizes: Any) -> str:
    """Log what trees are expected to take (`cost_of_hidden`), as a warning where it is long; return it in words."""
    cost, _ = cost_of_hidden(job, *sizes)
    words = f"rows of nodes are hidden, estimated {cost} for {job.trees} trees"
    level = logging.WARNING if cost.seconds > cipher_choice.LONG else logging.INFO
    logger.log(level, "%s: %s; a lower n_estimators, max_depth or max_bin takes less (docs/hidden.md)", name, words)
    return words


def expected_of_hidden(roles: Roles, common: Any, shape: Shape) -> Expected:
    """Return what a training takes in which neither party learns which rows are in a node.

    Weights count as the largest that there may be. DataError if a party has columns of so many categories that they
    would be split by sets.
    """
    for name, (columns, _) in shape.halved.items():
        if columns:
            raise DataError(
                f'membership="hidden" splits categories one against the rest, and {name} has {columns} column(s) of '
                f"{common.onehot_below} or more: raise max_cat_to_onehot"
            )
    found, active = Expected(), roles.active
    names = [active, *(name for name in roles.owners if name != active)]
    job = job_of(common, shape, Trees.of(common, shape, shape.rows).count)
    (cost, sent), candidates = _cost(common, shape, names, NEAR, job)
    found.agree([(active, name) for name in names[1:]])
    parameters = shared_parameters(job.bounds, len(names) > 2)
    hints = {
        name: cipher_choice.cost_of_lattice(
            parameters, replace(job, trees=0), shape.columns[name], shape.slots[name], kept=False
        )
        for name in names
    }
    for (sender, receiver), nbytes in sent.items():
        # those who compute on shares take the hints of all others, further parties' by way of the active party
        passed = [sender, *range(2, len(names))] if (sender, receiver) == (0, 1) else [sender] if receiver < 2 else []
        setup = sum(hints[names[of]].nbytes for of in passed)
        computes = sender + receiver == 1
        if computes:
            setup += (cipher_choice.PROBES - 3) * cipher_choice.PROBE_BYTES + TRANSFER_BYTES
            nbytes += min(_UNUSED_SHARE * nbytes, _UNUSED_BYTES)
        messages = job.trees * (30 if computes else 3) * (1 + job.rules.max_depth)
        found.send(names[sender], names[receiver], setup + nbytes, messages)
        found.seconds = max(found.seconds, hints[names[sender]].seconds)
        found.hold(setup, names[receiver])
        if not computes:
            continue
        nodes = 1 << job.rules.max_depth - 1
        # of the last level but one: numbers of its right children, of all, and twice of those to come
        # a node's candidates are compared at once, however many there are
        at_once = min(max(_AT_ONCE, candidates), candidates * nodes)
        found.hold(_outputs(shape) * (shape.rows * (100 + 28 * nodes) + _CANDIDATE * at_once), names[sender])
    found.seconds += cost.seconds
    return found


def _cost(
    common: Any, shape: Shape, names: Sequence[str], link: Link, job: JobSize
) -> tuple[tuple[Estimate, Sent], float]:
    """Return `cost_of_hidden` of the active party, its partner and further parties, and their candidates."""
    columns, slots = ([of[name] for name in names] for of in (shape.columns, shape.slots))
    candidates = sum(candidates_of_party(common, shape, name)[0] for name in names)
    step = cipher_choice.comparisons_of_a_step(link, Widths.of(job.bounds, job.rules.ridge))
    also = HiddenRows(shape.watched, (MOST_WEIGHT + 1).bit_length() if shape.weighted else 0)
    return cost_of_hidden(job, columns, slots, candidates, link, step, _outputs(shape), also), candidates


def _outputs(shape: Shape) -> int:
    return shape.classes if shape.classes > 2 else 1


def seconds_of_a_hidden_tree(common: Any, shape: Shape, active: str, links: Mapping[str, Link]) -> list[float]:
    """Return what a tree takes over the slowest of the links: computing, waiting for messages, sending."""
    link = Link(max(of.step for of in links.values()), max(of.byte for of in links.values()))
    job = job_of(common, shape, 1)
    links_of, names = (Link(0.0, 0.0), Link(link.step, 0.0), link), [active, *links]
    alone, waited, whole = (_cost(common, shape, names, of, job)[0][0].seconds for of in links_of)
    return [alone, waited - alone, whole - waited]
