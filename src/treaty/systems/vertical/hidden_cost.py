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
_ADDING = 1.5e-9  # seconds of a row in a column, for a vector and for own shares
_UNUSED_SHARE, _UNUSED_BYTES = 0.12, 5e6  # of what is made of transfers, and at most, that the last tree leaves unused
_CANDIDATE, _AT_ONCE = 11e3, 1 << 12  # bytes of memory of a candidate in a tournament, and how many are in one


class HiddenRows(NamedTuple):
    """What a training has besides training rows that count once: rows of all eval sets, and bits of the weights."""

    watched: int = 0
    weight_bits: int = 0


def _bytes_of_trees(job: JobSize, slots: Sequence[int], also: HiddenRows, transfer: float, *, active: bool) -> float:
    """Return what a party sends for trees, but for tournaments; `slots` are its own and the other's.

    `transfer` are the bytes of a transfer.
    """
    n, depth, parameters = job.bounds.n_rows, job.rules.max_depth, shared_parameters(job.bounds)
    value, vectors, (own, others) = -(-lattice_fields(job.bounds, sealed=True)[1] // 8), 1 << depth - 1, slots
    # transfers of its node, sides at the nodes of each level, weights of leaves
    to_walk = transfer * depth + ((1 << depth) - 2) / 8 + active * WEIGHT_BYTES * ((1 << depth) - 1)
    # numbers of right children, of the root's in one direction
    of_a_row = _OF_GRADIENTS + transfer * _TRANSFERS + to_walk + value * max(0.0, vectors - 1.5)
    if also.weight_bits:
        of_a_row += _OF_A_WEIGHT[not active] * (also.weight_bits + 2)
    return job.trees * (
        n * of_a_row
        + also.watched * (_OF_A_LOSS + to_walk)
        + vectors * (vector_bytes(parameters, n) * (others > 0) + 2 * own * parameters.digits)
    )


def cost_of_hidden(
    job: JobSize, columns: Sequence[int], slots: Sequence[int], candidates: float, link: Link, step: int, classes: int,
    also: HiddenRows,
) -> tuple[Estimate, list[float]]:  # fmt: skip
    """Return what trees take, and the bytes that the active and the passive party send; sizes are in this order.

    `candidates` are those of both, `step` is how many comparisons take as long as a step. Trees of so many `classes`
    wait for their steps together.
    """
    delay = link.step / classes
    # nodes without rows are compared, too
    whole = replace(job, rules=replace(job.rules, min_child_samples=1))
    tournaments = cipher_choice.cost_of_sealing({"": Link(delay, 0.0)}, {"": (candidates, 0.0)}, whole, step)
    short = cipher_choice.sends_little(link)
    transfer, compared = (_SHORT, 1.0 - _SHORTER) if short else (_TRANSFER_BYTES, 1.0)
    sent = [
        _bytes_of_trees(job, own, also, transfer, active=active) + compared * tournaments.nbytes / 2
        for own, active in ((slots, True), (slots[::-1], False))
    ]
    steps = _STEPS + _STEPS_OF_A_LEVEL * job.rules.max_depth
    waiting = job.trees * steps * (delay + cipher_choice.TO_MAKE_A_STEP)
    adding = job.trees * (1 << job.rules.max_depth) * job.bounds.n_rows * max(columns) * _ADDING
    computing, moving = max(sent) * cipher_choice.TO_MAKE_A_BYTE + adding, max(sent) * link.byte
    waiting += tournaments.seconds - tournaments.nbytes / 2 * cipher_choice.TO_MAKE_A_BYTE
    # on a far link most bytes are sent while steps wait
    took = max(waiting, moving) if link.step > cipher_choice.FAR else waiting + moving
    return Estimate(computing + took, sum(sent)), sent


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
    (peer,) = (name for name in roles.owners if name != active)
    job = job_of(common, shape, Trees.of(common, shape, shape.rows).count)
    (cost, sent), candidates = _cost(common, shape, active, peer, NEAR, job)
    found.agree([(active, peer)])
    for (sender, receiver), nbytes in zip(((active, peer), (peer, active)), sent, strict=True):
        hint = cipher_choice.cost_of_lattice(
            shared_parameters(job.bounds), replace(job, trees=0), shape.columns[sender], shape.slots[sender], kept=False
        )
        probes = (cipher_choice.PROBES - 3) * cipher_choice.PROBE_BYTES
        made = nbytes + min(_UNUSED_SHARE * nbytes, _UNUSED_BYTES)
        messages = job.trees * 30 * (1 + job.rules.max_depth)
        found.send(sender, receiver, hint.nbytes + probes + TRANSFER_BYTES + made, messages)
        found.seconds = max(found.seconds, hint.seconds)
        found.hold(hint.nbytes, receiver)
        nodes = 1 << job.rules.max_depth - 1
        # of the last level but one: numbers of its right children, of all, and twice of those to come
        # a node's candidates are compared at once, however many there are
        at_once = min(max(_AT_ONCE, candidates), candidates * nodes)
        found.hold(_outputs(shape) * (shape.rows * (100 + 28 * nodes) + _CANDIDATE * at_once), sender)
    found.seconds += cost.seconds
    return found


def _cost(
    common: Any, shape: Shape, active: str, peer: str, link: Link, job: JobSize
) -> tuple[tuple[Estimate, list[float]], float]:
    columns, slots = ((of[active], of[peer]) for of in (shape.columns, shape.slots))
    candidates = sum(candidates_of_party(common, shape, name)[0] for name in (active, peer))
    step = cipher_choice.comparisons_of_a_step(link, Widths.of(job.bounds, job.rules.ridge))
    also = HiddenRows(shape.watched, (MOST_WEIGHT + 1).bit_length() if shape.weighted else 0)
    return cost_of_hidden(job, columns, slots, candidates, link, step, _outputs(shape), also), candidates


def _outputs(shape: Shape) -> int:
    return shape.classes if shape.classes > 2 else 1


def seconds_of_a_hidden_tree(common: Any, shape: Shape, active: str, links: Mapping[str, Link]) -> list[float]:
    """Return what a tree takes over the link with the one other party: computing, waiting for messages, sending."""
    ((peer, link),), job = links.items(), job_of(common, shape, 1)
    links_of = Link(0.0, 0.0), Link(link.step, 0.0), link
    alone, waited, whole = (_cost(common, shape, active, peer, of, job)[0][0].seconds for of in links_of)
    return [alone, waited - alone, whole - waited]
