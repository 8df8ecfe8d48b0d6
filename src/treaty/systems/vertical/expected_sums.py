"""What training over hidden sums is expected to take, under each cipher; messages are those of SecureBoost."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from treaty.crypto.lattice.store import HintStore
from treaty.crypto.parameters import OU_DEFAULT_KEY_BITS, PAILLIER_DEFAULT_KEY_BITS
from treaty.crypto.payload import Packing, SumsBounds
from treaty.crypto.sums.lattice_sums import sums_parameters, vector_bytes
from treaty.errors import CryptoError
from treaty.systems.expected import KEY_BYTES, ROUND_TRIP, Expected, Shape, Trees
from treaty.systems.system import Roles
from treaty.systems.vertical import cipher_choice
from treaty.systems.vertical.cipher_choice import Link
from treaty.systems.vertical.cipher_options import CipherOptions, why_unsealed
from treaty.systems.vertical.messages import CHOICE_BITS, node_type

# A link as it is taken to be before any is measured
NEAR = Link(step=0.5e-3, byte=1e-9)
_PAILLIER = 8.0  # times the time of Okamoto-Uchiyama, both with the keys that are the default
_HINT_PIECES = 128e6  # bytes of a hint, as it is made and sent
TRANSFER_BYTES = 1_100_000  # to make the transfers of sealed sums


def expected_of_sums(roles: Roles, options: CipherOptions, common: Any, shape: Shape, *, alone: int = 0) -> Expected:
    """Return what a training takes whose first `alone` rounds use the active party's columns alone.

    Bounds of gradients are those of a classification without weights.
    """
    found, active, n = Expected(), roles.active, shape.rows
    others = [name for name in roles.owners if name != active]
    trees = Trees.of(common, shape, n, alone)
    job = job_of(common, shape, trees.count)
    sizes = {peer: (shape.columns[peer], shape.slots[peer]) for peer in others}
    cipher = options.cipher
    if cipher == "auto":
        # without a tree that grows, ciphers take the same
        cipher = cipher_choice.cheaper(job, list(sizes.values())) if trees.count else "lattice"
    found.agree((active, peer) for peer in others)
    nodes = 1
    if cipher == "lattice" and not options.sealed:  # columns are taken to have as many bins each
        offsets = {peer: np.linspace(0, slots, of + 1).astype(np.int32) for peer, (of, slots) in sizes.items()}
        links = dict.fromkeys(offsets, NEAR if options.cipher == "auto" else cipher_choice.USUAL)
        nodes = cipher_choice.best_nodes(job, offsets, links, HintStore(None))[0]
    columns = sum(shape.columns.values())
    found.seconds = trees.growing(n, columns) + trees.count * trees.rounds * 2 * ROUND_TRIP
    slowest = 0.0
    for peer, (features, slots) in sizes.items():
        won = trees.count * trees.splits * features / max(1, columns)
        if options.reveals_columns(cipher):
            asked, answered = 40.0 * won, min(won, slots - features) * n / 8
        elif options.transfers_sides:
            asked, answered = trees.count * (trees.depth - 1) * CHOICE_BITS * n / 8, won * n / 8
        else:
            named = node_type(max(trees.nodes)).itemsize * n
            asked, answered = trees.count * trees.depth * float(named), trees.count * trees.depth * n / 8
        found.send(active, peer, asked, trees.count * (2 * trees.rounds + 2))
        found.send(peer, active, answered, trees.count * 2 * trees.rounds)
        cost = _of_cipher(found, cipher, options, trees, job, active, peer, features, slots, nodes)
        slowest = max(slowest, cost.seconds)
        if options.sealed:
            slowest += _seal(found, common, job, active, peer, shape).seconds
    found.seconds += slowest
    return found


def seconds_of_a_tree(common: Any, shape: Shape, links: Mapping[str, Link]) -> dict[str, list[float]]:
    """Return what a tree after the first takes over links with passive parties, by what hides sums.

    These are seconds of computing, of waiting for messages and of sending, by "open", "sealed" and "ou"; what the
    options do not allow is left out.
    """
    trees, job = Trees.of(common, shape, shape.rows), job_of(common, shape, 1)
    growing = trees.growing(shape.rows, sum(shape.columns.values())) / max(1, trees.count) + ROUND_TRIP * trees.rounds
    candidates = {peer: candidates_of_party(common, shape, peer) for peer in links}
    step = cipher_choice.best_step(links, candidates, job)

    def seconds(kind: str, waits: float, sends: float) -> float:
        over = {peer: Link(waits * link.step, sends * link.byte) for peer, link in links.items()}
        parameters = None if kind == "ou" else sums_parameters(job.bounds, kind == "sealed")
        computing, sending = 0.0, 0.0
        for peer, link in over.items():
            size = shape.columns[peer], shape.slots[peer]
            cost = cipher_choice.cost_of_ou(job, *size)
            if parameters is not None:
                cost = cipher_choice.cost_of_lattice(parameters, job, *size, kept=True)
            computing, sending = max(computing, cost.seconds), sending + cost.nbytes * link.byte
        waiting, sealing = (2 * trees.rounds - 1) * 2 * max(link.step for link in over.values()), 0.0
        if kind == "sealed":
            waiting /= job.together
            sealing = cipher_choice.cost_of_sealing(over, candidates, job, step).seconds
        return growing + computing + sending + waiting + sealing

    found = {}
    unfit = {"sealed": bool(why_unsealed("auto", common)), "ou": common.multi_output}
    for kind in ("open", "sealed", "ou"):
        if not unfit.get(kind):
            with suppress(CryptoError):  # too many rows for the lattice map
                # what is sent while steps are waited for takes no time of its own
                alone, waited, whole = (seconds(kind, *each) for each in ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0)))
                found[kind] = [alone, waited - alone, whole - waited]
    return found


def candidates_of_party(common: Any, shape: Shape, peer: str) -> tuple[float, float]:
    features, slots = shape.columns[peer], shape.slots[peer]
    return cipher_choice.candidates_of(common, features, slots - features, *shape.halved.get(peer, (0, 0)))


def job_of(common: Any, shape: Shape, trees: int) -> cipher_choice.JobSize:
    unit = 2.0**-common.fractional_bits
    bounds = SumsBounds(shape.rows, round(1 / unit), round(0.25 / unit))
    of_round = (shape.classes if shape.classes > 2 else 1) * common.num_parallel_tree
    together = cipher_choice.trees_together(common, shape.rows, sum(shape.slots.values()), of_round)
    return cipher_choice.JobSize(bounds, common.rules_of(unit, unit), trees, shape.threads, together)


def _of_cipher(
    found: Expected, cipher: str, options: CipherOptions, trees: Trees, job: cipher_choice.JobSize, active: str,
    peer: str, features: int, slots: int, nodes: int,
) -> cipher_choice.Estimate:  # fmt: skip
    """Count what the sums of one passive party take, a vector about so many nodes; return an estimate of seconds."""
    n, vectors = job.bounds.n_rows, trees.count * trees.asked
    if cipher == "lattice":
        vectors = trees.count * sum(-(-asked // nodes) for asked in trees.asked_of_levels)
        parameters = sums_parameters(job.bounds, options.sealed, nodes)
        hint, query = 2.0 * slots * parameters.digits * parameters.degree, vector_bytes(parameters, n)
        found.send(active, peer, vectors * query)
        found.send(peer, active, hint + vectors * 2.0 * slots * parameters.digits)
        # of a long hint few pieces are in memory: it is a mapped file, and its owner keeps a digit of each number
        pieces = min(2 * hint, _HINT_PIECES)
        found.hold(pieces + 2 * max(query, min(64e6, query * -(-max(trees.nodes) // nodes))), active, peer)
        found.hold(1.5 * hint / parameters.digits, peer)
        for name in (active, peer):
            found.kept[name] = found.kept.get(name, 0.0) + hint
        return cipher_choice.cost_of_lattice(parameters, job, features, slots, kept=False, nodes=nodes)
    if cipher == "dealer":
        found.send(active, peer, 16.0 * n * vectors)
        found.send(peer, active, 8.0 * n * slots + 16.0 * slots * vectors)
        found.hold(8.0 * n * slots + 16.0 * n * max(trees.nodes), active, peer)
        return cipher_choice.Estimate((n * slots * 40e-9 + vectors * n * features * 60e-9) / job.threads, 0.0)
    ou = cipher == "ou"
    bits = (
        options.insecure_test_key_bits or options.key_bits or (OU_DEFAULT_KEY_BITS if ou else PAILLIER_DEFAULT_KEY_BITS)
    )
    each = bits / 8 if ou else bits / 4
    encrypted = vectors if options.blind else trees.count
    positions = 0 if options.blind else trees.count * 2.0 * n * (trees.depth - 1)
    found.send(active, peer, encrypted * n * each + positions + KEY_BYTES * bits)
    found.send(peer, active, vectors * slots / Packing(job.bounds, bits // 3 if ou else bits).per_plaintext * each)
    found.hold(3.0 * n * each * (max(trees.nodes) if options.blind else 1), peer)
    found.memory[active] = found.memory[peer]  # the same ciphertexts for all
    cost = cipher_choice.cost_of_ou(job, features, slots)
    return cipher_choice.Estimate(
        cost.seconds * (encrypted / max(1, trees.count)) * (1.0 if ou else _PAILLIER), cost.nbytes
    )


def _seal(
    found: Expected, common: Any, job: cipher_choice.JobSize, active: str, peer: str, shape: Shape
) -> cipher_choice.Estimate:
    """Count what sealing one passive party's sums takes; return an estimate of its seconds."""
    candidates = candidates_of_party(common, shape, peer)
    step = cipher_choice.best_step({peer: NEAR}, {peer: candidates}, job)
    cost = cipher_choice.cost_of_sealing({peer: NEAR}, {peer: candidates}, job, step)
    for sender, receiver in ((active, peer), (peer, active)):
        found.send(
            sender,
            receiver,
            cost.nbytes / 2 + (cipher_choice.PROBES - 3) * cipher_choice.PROBE_BYTES + TRANSFER_BYTES,
            job.trees * 30,
        )
        found.hold(6e3 * min(1 << 14, sum(candidates) * (1 << job.rules.max_depth - 1)), sender)
    return cost
