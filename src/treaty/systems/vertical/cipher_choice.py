"""The choice of a job's cipher by its cost, and what a training is expected to take under each.

Estimates follow from a job's size (rows, columns, bins, trees, depth, threads) and the speed of its links:
`cost_of_lattice`, `cost_of_ou` and, for what sealing takes besides, `cost_of_sealing`. Constants are processor seconds
as measured on one machine with AVX-512; bytes count by the speed of each link in turn. The lattice map hides rows of
nodes from passive parties, so it is chosen unless it takes more than `PREFERENCE` times as long, its hints exceed
`MOST_HINT_BYTES`, or sums exceed what it holds or may leak. Vectors of two nodes take a quarter less to send, and hints
of twice the degree; the kind that takes less time is chosen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.additive.multiplier import HAS_FMA, HAS_IFMA
from treaty.crypto.lattice.store import HintStore
from treaty.crypto.parameters import LEAK_LIMIT, OU_DEFAULT_KEY_BITS, Parameters
from treaty.crypto.payload import Packing, SumsBounds
from treaty.crypto.sums.lattice_sums import LatticeSumsClient, leak_of, sums_parameters, vector_bytes
from treaty.crypto.transfer.comparison import comparison_steps
from treaty.crypto.transfer.ring_products import MASK_BITS
from treaty.crypto.transfer.sealed_sums import Widths, rounds_of, steps_of
from treaty.errors import CryptoError, PeerProtocolError
from treaty.messaging.party import Party
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.vertical.cipher_options import MOST_LATTICE_FRACTION, CipherOptions, why_unsealed
from treaty.systems.vertical.messages import MOST_STEP, MOST_TOGETHER, LinkEcho, LinkProbe
from treaty.trees.splits import SplitRules

logger = logging.getLogger(__name__)

# Probes by which a link is measured; no more are answered
PROBES = 8
PROBE_BYTES = 1 << 18
_LONG_LOAD = 2.0  # seconds
_LEAST_BYTE = 1e-10  # seconds: links faster than 10 GB/s count as that fast

MOST_HINT_BYTES = 16 << 30  # where the disk has twice as much room
_MOST_OF_TWO_NODES = 4 << 30
PREFERENCE = 2.0
# Times the time that arithmetic modulo a key's number takes with AVX-512 IFMA
MODULAR = 1.0 if HAS_IFMA else 2.3 if HAS_FMA else 5.0
# Estimated seconds of sealed sums from which the active party gets a warning
LONG = 60.0

TWO_NODES = "; each vector is about two nodes"
# Seconds of computing: of a step, however little it compares, and for each byte sent
TO_MAKE_A_STEP, TO_MAKE_A_BYTE = 0.25e-3, 23e-9
_OF_A_BIT, _OF_A_DIGIT = 1.06, 15  # bytes of a comparison: for each bit of its products and their masks, and each digit
_IN_BULK = 2e7  # bytes of a peer for what is made in bulk and not used up, unless its steps take less
_SLOW_BYTE = 32e-9  # seconds on the way, some 250 Mbit/s, from which bytes take longer than to make them fewer
FAR = 1e-3  # seconds on the way from which a step waits for the wire rather than for computing
# Of a level under seal: its steps before the tournament, and a candidate's bytes then by those of a comparison
_STEPS_BEFORE, _BYTES_BEFORE = 8, 1.0
# What a category of a column that is split by halves takes, by what a candidate does
_OF_A_CATEGORY = 0.1

# A tree's candidates under seal at each passive party, and the categories of its columns that are split by halves
OfTrees = Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds of an empty message on its way, and of each byte more."""

    step: float
    byte: float


# A link between organisations where none was measured: of a gigabit a second
USUAL = Link(step=1e-3, byte=8e-9)


def measure(party: Party, peer: str) -> tuple[Link, float]:
    """Measure the link with a peer, by probes that come back; return it, and what the peer's answers may still leak."""
    left = 0.0

    def took(nbytes: int) -> float:
        nonlocal left
        started = time.perf_counter()
        party.send(peer, LinkProbe(bytes(nbytes)))
        echo = party.receive(peer, LinkEcho)
        if len(echo.filler) != nbytes:
            raise PeerProtocolError(peer, f"expected {nbytes} bytes, got {len(echo.filler)}", at="LinkEcho")
        left = echo.left
        return time.perf_counter() - started

    took(0)  # waits until the peer has finished other work
    empty, loads = min(took(0) for _ in range(2)), [took(PROBE_BYTES) for _ in range(2)]
    # a new connection sends little at a time; how much grows with each load
    while len(loads) < PROBES - 3 and loads[-1] < _LONG_LOAD:
        loads.append(took(PROBE_BYTES))
    loaded = min(loads)
    return Link(empty / 2, max(_LEAST_BYTE, (loaded - empty) / (2 * PROBE_BYTES))), left


def sends_little(link: Link) -> bool:
    """Return whether transfers over a link are to send fewer bytes and compute longer."""
    return link.byte > _SLOW_BYTE


def bytes_of_a_comparison(widths: Widths) -> float:
    """Return what an end sends for a comparison, a third of it for two products."""
    return 2 * _OF_A_BIT * (widths.below + widths.top + MASK_BITS) + _OF_A_DIGIT * widths.difference / 3


def comparisons_of_a_step(link: Link, widths: Widths) -> int:
    """Return how many comparisons take as long as a step.

    What a comparison takes besides its steps is to compute and to move its bytes.
    """
    of_one = bytes_of_a_comparison(widths) * (link.byte + TO_MAKE_A_BYTE)
    return int(np.clip((link.step + TO_MAKE_A_STEP) / of_one, 1, MOST_STEP))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A cipher's cost of a job: seconds of computing and sending, and bytes sent both ways."""

    seconds: float
    nbytes: float

    def __str__(self) -> str:
        return f"about {in_words(self.seconds)} and {rounded(self.nbytes / 1e6)} MB"


def in_words(seconds: float) -> str:
    """Return a time in its usual unit: 0.4 seconds, 3 minutes, 5.2 hours."""
    if seconds < 90:
        return f"{rounded(seconds)} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{rounded(seconds / 3600)} hours"


def rounded(value: float) -> str:
    """Return a number with a digit after the point where it is below 10, and none above."""
    return f"{value:,.{1 if value < 10 else 0}f}"


@dataclass(frozen=True, slots=True)
class JobSize:
    """What a job's cost depends on, besides the layouts of passive parties' columns; `trees` are still to grow.

    Under the lattice map so many trees of a round grow `together`.
    """

    bounds: SumsBounds
    rules: SplitRules
    trees: int
    threads: int
    together: int = 1


# What trees that grow together may take: a row's way in each of them (16 bytes), shares of sums in their last levels
_ROWS_TOGETHER, _SUMS_TOGETHER = 1 << 23, 1 << 22


def trees_together(common: BoostingOptions, n_rows: int, slots: int, of_round: int) -> int:
    """Return how many of a round's trees may grow together under the lattice map, by the slots of all columns.

    1 where trees may have different columns, have several outputs or grow by gain, and under constraints; else as many
    as memory allows, in batches of about the same size.
    """
    if common.constrained or common.multi_output or common.max_leaves or common.colsample_bytree < 1.0:
        return 1
    most = min(MOST_TOGETHER, _ROWS_TOGETHER // max(1, n_rows), _SUMS_TOGETHER // max(1, slots << common.depth))
    return -(-of_round // -(-of_round // max(1, most)))


def may_grow_together(options: CipherOptions, cipher: str) -> bool:
    """Return whether trees may grow together: not where a row is named with its node, as it is in one of each tree."""
    return cipher == "lattice" and not options.names_rows(cipher)


@dataclass(frozen=True, slots=True)
class Choice:
    """The cipher of a job, the reason, and the links as far as they were measured: for "auto", and sealed sums.

    `nodes` are those of a vector of the lattice map.
    """

    cipher: str
    why: str
    links: Mapping[str, Link] = field(default_factory=dict)
    nodes: int = 1


def choose_cipher(
    party: Party, options: CipherOptions, common: BoostingOptions, job: JobSize,
    offsets: Mapping[str, NDArray[np.int32]], store: HintStore, *, one_node: bool = False,
) -> Choice:  # fmt: skip
    """Take the cipher the job names; under "auto" measure the links and go by the estimates.

    `offsets` are the first slots of every passive party's features; with `one_node` vectors are not about more.
    """
    if options.sealed:
        return Choice(options.cipher, "as the job says", {peer: measure(party, peer)[0] for peer in offsets})
    counts = [1] if one_node else [1, 2]
    if options.cipher != "auto":
        usual = dict.fromkeys(offsets, USUAL)
        nodes = best_nodes(job, offsets, usual, store, counts)[0] if options.cipher == "lattice" else 1
        return Choice(options.cipher, "as the job says" + (TWO_NODES if nodes == 2 else ""), nodes=nodes)
    bounds, trees = job.bounds, job.trees
    if common.fractional_bits > MOST_LATTICE_FRACTION:
        return Choice("ou", f"fractional_bits is above the {MOST_LATTICE_FRACTION} that the lattice map takes")
    if unfit := beyond_lattice(bounds, offsets, trees, job.rules, room=store.room // 2):
        return Choice("ou", unfit)
    parameters, vectors, links = sums_parameters(bounds), trees * vectors_of_a_tree(job.rules), {}
    for peer, of_peer in offsets.items():
        links[peer], left = measure(party, peer)
        if vectors * leak_of(parameters, bounds, np.diff(of_peer)).sum() > left:
            return Choice("ou", f"{peer}'s answers have leaked nearly all that the lattice map may leak of its table")
    nodes, lattice, kept = best_nodes(job, offsets, links, store, counts)
    ou = _total([cost_of_ou(job, len(of) - 1, int(of[-1])) for of in offsets.values()], links)
    chosen = lattice.seconds <= PREFERENCE * ou.seconds
    best, other = (("lattice", lattice), ("ou", ou)) if chosen else (("ou", ou), ("lattice", lattice))
    times, slowest = other[1].seconds / best[1].seconds, max((link.byte for link in links.values()), default=0.0)
    what = f"{rounded(times)} times as long" if times >= 1 else "less, but shows passive parties the rows of nodes"
    link = f"link of {rounded(1e-6 / slowest)} MB/s" if slowest else "no link"
    why = (
        f"estimated {best[1]} for {trees} trees; {other[0]} would take {other[1]}, {what}"
        f"{_of_sealing(common, job, offsets, links)} ({link}{', hints kept earlier' if kept else ''})"
    )
    return Choice(best[0], why + (TWO_NODES if chosen and nodes == 2 else ""), links, nodes)


def best_nodes(
    job: JobSize, offsets: Mapping[str, NDArray[np.int32]], links: Mapping[str, Link], store: HintStore,
    counts: Sequence[int] = (1, 2),
) -> tuple[int, Estimate, bool]:  # fmt: skip
    """Return how many nodes a vector is about where trees take the least time, the estimate, and if hints are kept."""
    found: list[tuple[int, Estimate, bool]] = []
    for nodes in counts:
        room = min(_MOST_OF_TWO_NODES, store.room // 2)
        if nodes > 1 and beyond_lattice(job.bounds, offsets, job.trees, job.rules, nodes=nodes, room=room):
            continue
        try:
            parameters = sums_parameters(job.bounds, nodes=nodes)
        except CryptoError:  # raised again where the cipher is made
            return 1, Estimate(0.0, 0.0), False
        kept = LatticeSumsClient(job.bounds, store, nodes=nodes).offer(offsets) is not None
        sizes = [(len(of) - 1, int(of[-1])) for of in offsets.values()]  # features and slots
        costs = [cost_of_lattice(parameters, job, *size, kept=kept, nodes=nodes) for size in sizes]
        found.append((nodes, _total(costs, links), kept))
    return min(found, key=lambda choice: choice[1].seconds)


def vectors_of_a_tree(rules: SplitRules, nodes: int = 1) -> int:
    """Return how many vectors a tree takes at most: for the root, and at each level for one of each two siblings."""
    if rules.max_leaves:
        return rules.most_asked
    return 1 + sum(-(-(1 << level - 1) // nodes) for level in range(1, rules.max_depth))


def _of_sealing(
    common: BoostingOptions, job: JobSize, offsets: Mapping[str, NDArray[np.int32]], links: Mapping[str, Link]
) -> str:
    """Return what sealing sums would take, if possible, in words; no values are taken to be missing."""
    open_alone = why_unsealed("auto", common) or not job.rules.exact
    if open_alone or beyond_lattice(job.bounds, offsets, job.trees, job.rules, sealed=True):
        return ""
    candidates = {}
    for peer, of_peer in offsets.items():
        bins = np.diff(of_peer) - 1
        categories = bins[bins > common.most_bins]  # of numbers there are no more
        candidates[peer] = candidates_of(common, len(bins), int(bins.sum()), len(categories), int(categories.sum()))
    step = best_step(links, candidates, job)
    return f"; sums under seal would take {cost_of_sealing(links, candidates, job, step)} more than under lattice"


def candidates_of(
    common: BoostingOptions, features: int, bins: int, halved: int, categories: int
) -> tuple[float, float]:
    """Return a tree's candidates of features with so many bins in all, and its categories of the `halved` ones."""
    share = common.colsample_bytree
    # rounded numbers of bins may be fewer than their categories
    return share * float(max(0, bins - categories - features + 3 * halved)), share * float(categories)


def tell_cost_of_sealing(
    name: str, links: Mapping[str, Link], candidates: OfTrees, job: JobSize, step: int, to_open: str
) -> str:
    """Log what sealed sums take, as a warning where it is long, and return it in words.

    `to_open` is the option that does without.
    """
    cost = cost_of_sealing(links, candidates, job, step)
    words = f"sums are sealed, which takes {cost} more for {job.trees} trees"
    level = logging.WARNING if cost.seconds > LONG else logging.INFO
    less = "early_stopping_rounds or a lower n_estimators or max_depth takes less"
    logger.log(level, "%s: %s; %s, %s does without and shows what docs/secureboost.md says", name, words, less, to_open)
    return words


def beyond_lattice(
    bounds: SumsBounds, offsets: Mapping[str, NDArray[np.int32]], trees: int, rules: SplitRules, *,
    sealed: bool = False, nodes: int = 1, room: int = MOST_HINT_BYTES,
) -> str:  # fmt: skip
    """Return why the lattice map does not hold a job of this size; empty if it does. `room` is for hints, in bytes."""
    try:
        parameters = sums_parameters(bounds, sealed, nodes)
    except CryptoError as error:
        return str(error)
    hints = sum(_hint_bytes(parameters, int(of_peer[-1])) for of_peer in offsets.values())
    most = min(MOST_HINT_BYTES, room)
    if hints > most and not sealed:  # there is a choice
        return f"hints of the lattice map would take {hints / 1e9:.1f} GB of disk, expected at most {most / 1e9:.1f} GB"
    vectors = 0 if sealed else trees * vectors_of_a_tree(rules, nodes)  # masked answers leak nothing
    if any(vectors * leak_of(parameters, bounds, np.diff(of_peer)).sum() > LEAK_LIMIT for of_peer in offsets.values()):
        return "so many sums about so many columns would pass the limit of what the lattice map may leak"
    return ""


def _total(of_peers: list[Estimate], links: Mapping[str, Link]) -> Estimate:
    # peers compute at the same time, but the active party sends to one after another
    sending = sum(of.nbytes * link.byte for of, link in zip(of_peers, links.values(), strict=True))
    return Estimate(max((of.seconds for of in of_peers), default=0.0) + sending, sum(of.nbytes for of in of_peers))


def _hint_bytes(parameters: Parameters, slots: int) -> int:
    return 2 * slots * parameters.digits * parameters.degree


def cheaper(job: JobSize, sizes: Sequence[tuple[int, int]]) -> str:
    """Return the cipher that "auto" takes on quick links, from passive parties' features and slots."""
    try:
        parameters = sums_parameters(job.bounds)
    except CryptoError:
        return "ou"
    # passive parties compute at the same time: the slowest counts
    lattice = max((cost_of_lattice(parameters, job, *size, kept=False).seconds for size in sizes), default=0.0)
    ou = max((cost_of_ou(job, *size).seconds for size in sizes), default=0.0)
    hints = sum(_hint_bytes(parameters, slots) for _, slots in sizes)
    return "lattice" if lattice <= PREFERENCE * ou and hints <= MOST_HINT_BYTES else "ou"


def cost_of_lattice(
    parameters: Parameters, job: JobSize, features: int, slots: int, *, kept: bool, nodes: int = 1
) -> Estimate:
    """Return what trees take under the lattice map with one passive party; `kept`: its hint is there.

    The hint is a product of all bins with the public elements, once a job; then each vector is encrypted, added up over
    the bins by the passive party, and its sums are decrypted.
    """
    degree, primes, digits = parameters.degree, len(parameters.primes), parameters.digits
    n, depth = job.bounds.n_rows, job.rules.full_depth
    vectors = vectors_of_a_tree(job.rules, nodes)
    # public elements of every slot are multiplied by its bins, once a job
    hint = 0.0 if kept else slots * (degree / 8192) ** 1.4 * (primes * (-(-n // degree) + 2) * 30e-6 + 0.4e-3)
    # additions over the bins of all columns, and the two transforms of each vector
    adding = n * (features * -(-primes // 8) * 1.5e-9 + primes * 2e-9)
    vector = primes * (n + degree) * (8e-9 + 3.5e-9 * nodes) + adding + 2 * slots * primes * degree * 4e-11
    tree = vectors * vector + depth * slots * digits * degree * 1.5e-10
    nbytes = vectors * (vector_bytes(parameters, n) + 2 * slots * digits) + (2**depth - 1) * n / 8
    hint_bytes = 0 if kept else _hint_bytes(parameters, slots)
    return Estimate((hint + job.trees * tree) / job.threads, hint_bytes + job.trees * nbytes)


def cost_of_ou(job: JobSize, features: int, slots: int) -> Estimate:
    """Return what trees take under Okamoto-Uchiyama, by its default keys, with one passive party.

    Gradients are encrypted once a tree; each level multiplies ciphertexts of half the rows for every column.
    """
    n, depth, bits = job.bounds.n_rows, job.rules.full_depth, OU_DEFAULT_KEY_BITS
    # sums of several nodes and bins share a plaintext
    answers = 2 ** (depth - 1) * slots / Packing(job.bounds, bits // 3).per_plaintext
    tree = n * 23e-6 + n * features * (depth + 1) / 2 * 0.55e-6 + answers * 1.9e-3
    nbytes = (n + answers) * bits / 8 + depth * n
    return Estimate(job.trees * tree * MODULAR / job.threads, job.trees * nbytes)


def best_step(links: Mapping[str, Link], candidates: OfTrees, job: JobSize) -> int:
    """Return as how many comparisons a step is best counted when rounds are planned.

    Most bytes are sent while steps are on their way: where these leave a link idle, more comparisons cost nothing.
    """
    widths = Widths.of(job.bounds, job.rules.ridge)
    least = max((comparisons_of_a_step(link, widths) for link in links.values()), default=1)
    counts = [min(least << k, MOST_STEP) for k in range(5)]
    return min(counts, key=lambda step: cost_of_sealing(links, candidates, job, step).seconds)


def cost_of_sealing(links: Mapping[str, Link], candidates: OfTrees, job: JobSize, step: int) -> Estimate:
    """Return what trees take under seal beyond open sums, by each peer's link and its candidates in a tree.

    Trees are complete, but for levels of more nodes than rows allow. Rounds are planned as if a step took as long as
    `step` comparisons.
    """
    waiting, computing, moving, nbytes = 0.0, 0.0, 0.0, 0.0
    widths = Widths.of(job.bounds, job.rules.ridge)
    slowest = max((link.step for link in links.values()), default=0.0) + TO_MAKE_A_STEP
    most_nodes = max(1, job.bounds.n_rows // job.rules.min_child_samples)
    for level in range(job.rules.max_depth):
        nodes, steps = job.together * min(1 << level, most_nodes), 0
        for peer, link in links.items():
            of_peer, categories = candidates[peer]
            work = of_peer + _OF_A_CATEGORY * categories
            rounds = rounds_of(1 + round(work), nodes, widths.difference, step)
            pairs = sum(groups * size * (size - 1) // 2 for size, groups in rounds)
            sent = (pairs + _BYTES_BEFORE * work) * nodes * bytes_of_a_comparison(widths)
            # a product, a comparison, a conjunction and a selection give the halves
            before = _STEPS_BEFORE + (3 + comparison_steps(widths.grad) if categories else 0)
            steps = max(steps, before + sum(steps_of(size, widths.difference) for size, _ in rounds))
            computing, moving = computing + sent * TO_MAKE_A_BYTE, moving + sent * link.byte
            nbytes += 2 * sent
        waiting += steps * slowest
    batches = job.trees / job.together
    of_steps = batches * nbytes
    return Estimate(batches * (max(waiting, moving) + computing), of_steps + min(_IN_BULK * len(links), of_steps))
