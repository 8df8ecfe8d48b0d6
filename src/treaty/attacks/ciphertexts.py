"""Attacks on ciphertexts and masks: labels from hidden gradients, bins from recognised answers, sums from masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata, zscore  # type: ignore[import-untyped]
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from treaty.attacks.views import Finding, Truth, View, auc_error, error_of_best
from treaty.crypto.additive.ciphers import OUPublicKey, PaillierPublicKey
from treaty.crypto.lattice.ring import unpack as unpacked_residues
from treaty.crypto.parameters import Parameters
from treaty.crypto.payload import Packing, Payload, SumsBounds, from_words, group_starts
from treaty.crypto.sums.lattice_sums import sums_parameters
from treaty.machine.arrays import Floats, Int32s, Integers
from treaty.messaging.messages import unpack
from treaty.messaging.messages import view as array_view
from treaty.messaging.transcript import TranscriptEntry
from treaty.privacy.exact_sums import OpenedNode
from treaty.systems.fedxgb.paper import InputAndShares
from treaty.systems.horizontal.masked_sums import MaskedInput
from treaty.systems.vertical import messages as vertical
from treaty.systems.vertical.exact_sums import content_of
from treaty.systems.vertical.messages import Setup, Sums, SumsRequest, TreeRows, TreeStart

MOST = 4096
"""The most combinations tried for each half of the bins of a ciphertext."""

MOST_CIPHERTEXTS = 5000
"""The number of answers' ciphertexts that are attacked, from the first tree on."""

MOST_PAIRED = 200
"""The most rows of a node for which bins of two rows are tried."""

Numbers = list[gmpy2.mpz]
Rows = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bin:
    """A bin in an answer: its slot, its number of rows, and the sets of rows that it may consist of; None: too many."""

    slot: int
    count: int
    candidates: list[Rows] | None


@dataclass(frozen=True, slots=True)
class KeyedCipher:
    """The public part of a cipher with a key: how sums are packed, the modulus, and the inverse of R modulo that."""

    packing: Packing
    modulus: int
    from_montgomery: gmpy2.mpz

    def numbers(self, sent: NDArray[Any]) -> Numbers:
        """Return ciphertexts as they are sent, Montgomery forms in bytes or words (rows, ...), as plain numbers."""
        packed = np.ascontiguousarray(sent).view(np.uint64)
        return [gmpy2.mpz(value) * self.from_montgomery % self.modulus for value in from_words(packed)]


def recognised_ciphertexts(view: View, truth: Truth) -> Iterator[Finding]:
    """Find a partner's bins from answers that were not re-randomised, at the active party of a cipher with keys.

    A bin's answer is the product of the ciphertexts of its rows. Unless its owner multiplies it by a random factor, it
    is a product of numbers that the active party itself sent. The attack tries which rows of the node, of those whose
    gradients add up to the opened sum, give the answer. Several bins share a ciphertext and have to be tried together.
    It tries those where each bin has one or two rows, or all of the node's but one, if there are not too many
    combinations. With longer keys a ciphertext holds more bins, and the attack finds fewer rows; this is no protection.

    Score: the share of bins of one row, in all answers, whose row is found. Baseline: a guess among the node's rows
    with that gradient, which opened sums allow under every cipher.

    References: Cheng et al., "SecureBoost", 2019 (arXiv 1901.08755), algorithm 1, whose answers are products alone.
    Chen et al., "SecureBoost+", 2021 (arXiv 2110.10927), section 4, on bins that share a ciphertext.
    """
    if not view.is_active:
        return
    for owner in [name for name in truth.owners if name != view.party]:
        nodes = view.recording.nodes.get(owner, [])
        entries = [entry for entry in view.transcript.entries if entry.peer == owner]
        cipher = keyed_cipher(view, entries)
        if cipher is None or not nodes:
            continue
        codes, offsets = truth.codes(owner)
        slots = codes + offsets[:-1]
        single, named, guessed = 0, 0.0, 0.0
        for bins, rows in islice(recognised(entries, nodes, cipher), MOST_CIPHERTEXTS):
            for one, found in zip(bins, rows, strict=True):
                if one.count != 1 or not one.candidates:
                    continue
                guess = 1.0 / len(one.candidates)
                single, guessed = single + 1, guessed + guess
                named += guess if found is None else float(one.slot in slots[found[0]])
        if single:
            score, baseline = named / single, guessed / single
            yield view.finding("matching ciphertexts", f"bins of {owner}", "share right", score, baseline)


def keyed_cipher(view: View, entries: Sequence[TranscriptEntry]) -> KeyedCipher | None:
    """Return the cipher of a party's messages; None if it has no key, or encrypts each row for every node."""
    setups = [content_of(entry, Setup) for entry in entries if entry.step == Setup.__name__]
    if not setups or setups[0].encryption not in ("ou", "paillier") or view.inputs.options.ciphers.blind:
        return None
    numbers, stated = unpack(setups[0].payload, view.party, "Setup")
    kind = OUPublicKey if setups[0].encryption == "ou" else PaillierPublicKey
    key = kind.from_payload([numbers, stated[3:]], view.inputs.options.ciphers.insecure_test_key_bits)
    return KeyedCipher(
        Packing(SumsBounds(*stated[:3].tolist()), key.plaintext_bits),
        key.modulus.value,
        gmpy2.invert(key.modulus.radix, key.modulus.value),
    )


def recognised(
    entries: Sequence[TranscriptEntry], nodes: Sequence[OpenedNode], cipher: KeyedCipher
) -> Iterator[tuple[list[Bin], list[Rows | None]]]:
    """Yield the bins of each ciphertext that a peer returned, and the rows of each bin, or None if not known.

    `entries` are the active party's messages with the peer, `nodes` the sums that it opened.
    """
    opened, sent, sample = iter(nodes), Numbers(), np.empty(0, np.int32)
    asked: list[Int32s] = []
    for entry in entries:
        match entry.step:
            case "TreeStart":
                start = content_of(entry, TreeStart)
                sent = cipher.numbers(unpack(start.payload, entry.peer, entry.step)[0])
                sample = np.empty(0, np.int32) if start.rows is None else np.frombuffer(start.rows.data, np.int32)
            case "TreeRows":
                more = content_of(entry, TreeRows)
                sent += cipher.numbers(unpack(more.payload, entry.peer, entry.step)[0])
                if more.rows is not None:
                    sample = np.append(sample, np.frombuffer(more.rows.data, np.int32))
            case "SumsPiece":
                # of tables of tens of millions of rows: not attacked
                return
            case "SumsRequest":
                node_of_row, count = unpack(content_of(entry, SumsRequest).payload, entry.peer, entry.step)
                asked += [np.flatnonzero(node_of_row == k).astype(np.int32) for k in range(int(count[0]))]
            case "Sums":
                there, answer = unpack(content_of(entry, Sums).payload, entry.peer, entry.step)
                members, asked = asked[: len(there)], asked[len(there) :]
                bins = [
                    one
                    for positions, bits in zip(members, np.unpackbits(there, axis=1, bitorder="little"), strict=True)
                    for one in bins_of(positions, np.flatnonzero(bits), sample, opened)
                ]
                starts = group_starts(len(bins), cipher.packing.per_plaintext).tolist()
                for value, first, stop in zip(cipher.numbers(answer), starts, starts[1:], strict=False):
                    group = bins[first:stop]
                    yield group, rows_of(value, group, sent, cipher, sample)


def bins_of(
    positions: Int32s, slots: np.ndarray[tuple[int], np.dtype[np.intp]], sample: Int32s, opened: Iterator[OpenedNode]
) -> Iterator[Bin]:
    """Yield the bins that were sent for a node; `positions` are its rows, among those sampled."""
    rows = sample[positions] if len(sample) else positions
    # nodes that were opened without being asked about are passed over
    node = next(node for node in opened if np.array_equal(np.sort(node.rows), rows))
    grad, hess = node.grad[rows], node.hess[rows]
    for slot in slots.tolist():
        yield Bin(slot, int(node.sums[slot, 2]), candidates(rows, grad, hess, node.sums[slot]))


def candidates(rows: Int32s, grad: Integers, hess: Integers, sums: Integers) -> list[Rows] | None:
    """Return the sets of a node's rows, with these gradients, that give a bin's sums; None: not tried."""
    count, n_rows = int(sums[2]), len(rows)
    if count == n_rows:
        return [tuple(rows.tolist())]
    if count == 1:
        return [(row,) for row in rows[(grad == sums[0]) & (hess == sums[1])].tolist()]
    if count == n_rows - 1:
        missing = np.flatnonzero((grad == grad.sum() - sums[0]) & (hess == hess.sum() - sums[1]))
        return [tuple(np.delete(rows, out).tolist()) for out in missing.tolist()]
    if count == 2 and n_rows <= MOST_PAIRED:
        fits = (grad[:, None] + grad == sums[0]) & (hess[:, None] + hess == sums[1])
        pairs = rows[np.argwhere(np.triu(fits, k=1))]
        return [(a, b) for a, b in pairs.tolist()]
    return None


def rows_of(
    answer: gmpy2.mpz, group: Sequence[Bin], sent: Numbers, cipher: KeyedCipher, sample: Int32s
) -> list[Rows | None]:
    """Return the rows of each bin of a ciphertext if exactly one combination of candidates gives it."""
    # meet in the middle: all products of the first half of the bins against those of the second half. The first bin is
    # the highest: bin j of k is raised to 2^(bits (k - 1 - j))
    bits, modulus = cipher.packing.sum_bits, cipher.modulus
    half, nothing = len(group) // 2, list[Rows | None]([None] * len(group))
    if any(not one.candidates for one in group):
        return nothing
    tried = [of for one in group if (of := one.candidates) is not None]
    if any(np.prod([float(len(of)) for of in part]) > MOST for part in (tried[:half], tried[half:])):
        return nothing
    place = {int(row): k for k, row in enumerate(sample.tolist())}

    def values(of: Sequence[list[Rows]], above: int) -> list[tuple[gmpy2.mpz, tuple[Rows, ...]]]:
        """Return the product that each combination of candidates gives, for bins `above` places from the last."""
        made = []
        for number, rows_of_bin in enumerate(of):
            shift = gmpy2.mpz(1) << bits * (above + len(of) - 1 - number)
            made.append([gmpy2.powmod(multiplied(rows, sent, place, modulus), shift, modulus) for rows in rows_of_bin])
        return [
            (multiplied(range(len(chosen)), list(chosen), {}, modulus), rows)
            for chosen, rows in zip(product(*made), product(*of), strict=True)
        ]

    # all products of the second half, looked up by what the first half needs to give the answer
    low: dict[gmpy2.mpz, list[tuple[Rows, ...]]] = {}
    for value, rows in values(tried[half:], 0):
        low.setdefault(value, []).append(rows)
    high = values(tried[:half], len(group) - half)
    fits = [
        (*rows, *rest) for value, rows in high for rest in low.get(answer * gmpy2.invert(value, modulus) % modulus, [])
    ]
    return list(fits[0]) if len(fits) == 1 else nothing


def multiplied(rows: Sequence[int], sent: Numbers, place: dict[int, int], modulus: int) -> gmpy2.mpz:
    """Return the product of the ciphertexts of these rows; `place` is where they are among those sent."""
    value = gmpy2.mpz(1)
    for row in rows:
        value = value * sent[place.get(row, row)] % modulus
    return value


MOST_ROWS = 10_000
MOST_NUMBERS = 512
"""The most numbers of a row that are attacked, from the first tree on."""


def learned_from_ciphertexts(view: View, truth: Truth) -> Iterator[Finding]:
    """Learn labels from the numbers that hide gradients, at a passive party of encrypted sums.

    A cipher hides labels only if nothing that can be computed from its ciphertexts reveals them. Here a logistic
    regression learns on half of the rows, whose labels the attacker gets, and is scored on the other half. Its features
    are numbers that anyone can compute: for each ciphertext under Okamoto-Uchiyama and Paillier the bytes as they are
    sent and the Jacobi symbol, which shows half of the non-residues; residues of lattice vectors; masked words.
    Baseline: chance.

    A score by chance proves nothing; the cipher's security proof does. The attack is there to find a broken cipher.

    References: Goldwasser, Micali, "Probabilistic Encryption", Journal of Computer and System Sciences 1984: what no
    ciphertext may reveal, and the Jacobi symbol as what a careless one does.
    """
    if view.is_active or not view.steps(TreeStart):
        return
    rows, numbers = hidden_numbers(view)
    labels = truth.labels[rows]
    if len(rows) < 100 or not 10 <= labels.sum() <= len(labels) - 10:
        return
    order = np.random.default_rng(0).permutation(len(labels))[:MOST_ROWS]
    known, asked = order[::2], order[1::2]
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
    scores = model.fit(numbers[known], labels[known]).decision_function(numbers[asked])
    score, error = float(roc_auc_score(labels[asked], scores)), auc_error(labels[asked])
    yield view.finding("distinguishing ciphertexts (Goldwasser 1984)", "labels", "AUC", score, 0.5, error)


def hidden_numbers(view: View) -> tuple[Int32s, Floats]:
    """Return rows of the table and the numbers that hide their gradients, float64 (rows, numbers) from -1 to 1.

    If trees are grown on samples of rows, only the first tree is read; of long tables, the rows in first messages.
    """
    assert view.inputs.data is not None
    of_first, made = np.empty(0, np.int32), list[Floats]()
    for rows, numbers in of_messages(view, view.inputs.data.table.n_rows):
        of_first = of_first if made else rows
        if np.array_equal(rows, of_first):
            made.append(numbers)
        if sum(part.shape[1] for part in made) >= MOST_NUMBERS:
            break
    return of_first, np.concatenate(made, axis=1)[:, :MOST_NUMBERS] if made else np.zeros((0, 0))


def of_messages(view: View, n_rows: int) -> Iterator[tuple[Int32s, Floats]]:
    """Yield what `hidden_numbers` returns, message by message."""
    received = [entry for entry in view.transcript.entries if entry.direction == "received"]
    cipher, every = keyed_cipher(view, received), np.arange(n_rows, dtype=np.int32)
    setups = [content_of(entry, Setup) for entry in received if entry.step == Setup.__name__]
    parameters = None
    if setups and setups[0].encryption == "lattice":
        *bounds, nodes = unpack(setups[0].payload, view.party, "Setup")[0].tolist()
        parameters = sums_parameters(SumsBounds(*bounds), view.inputs.options.ciphers.sealed, nodes)
    for entry in received:
        match entry.step:
            case "TreeStart" if cipher is not None:  # of many rows it has the first ones
                start = content_of(entry, TreeStart)
                (ciphertexts,) = unpack(start.payload, entry.peer, entry.step)
                rows = every if start.rows is None else np.frombuffer(start.rows.data, np.int32)
                symbols = [[gmpy2.jacobi(number, cipher.modulus)] for number in cipher.numbers(ciphertexts)]
                features = [ciphertexts / 255.0, np.array(symbols, np.float64).reshape(-1, 1)]
                yield rows[: len(ciphertexts)], np.concatenate(features, axis=1)
            case "SumsRequest" | "SealedSumsRequest" | "SumsPiece" if cipher is None:
                payload = content_of(entry, getattr(vertical, entry.step)).payload
                numbers = of_vectors(unpack(payload, entry.peer, entry.step), parameters, n_rows)
                if len(numbers):
                    yield every[: len(numbers)], numbers


def of_vectors(payload: Payload, parameters: Parameters | None, n_rows: int) -> Floats:
    """Return the numbers of each row in the vectors of a query, one vector per node; none in its later pieces."""
    hidden = payload[0]
    if parameters is not None:
        if len(payload) == 1:
            return np.zeros((0, 0))
        # residues (vectors, primes, rows), each between 0 and 1 of its prime
        residues = unpacked_residues(parameters, hidden, n_rows)
        return np.concatenate(residues / np.array(parameters.primes, np.float64)[:, None]).T
    # under masks: (nodes, words, rows)
    if hidden.dtype == np.uint64:
        return np.concatenate(hidden / 2.0**64).T
    # a ciphertext for each node: (nodes, rows, bytes)
    if hidden.ndim == 3 and hidden.shape[1] == n_rows:
        return np.concatenate(hidden / 255.0, axis=1)
    return np.zeros((0, 0))


KINDS: dict[str, type[MaskedInput] | type[InputAndShares]] = {
    kind.__name__: kind for kind in (MaskedInput, InputAndShares)
}
MOST_MASKED = 1_000_000
"""The most numbers of a member that are attacked, from the first sum on."""

Vectors = list[Integers]


def repeated_masks(view: View, truth: Truth) -> Iterator[Finding]:
    """Find what each member gave to a sum from differences of its masked vectors, at the party that opens sums.

    That party sees each member's vectors under masks; a mask that is used twice cancels in a difference. The attack
    takes the numbers as they were sent, their differences from each vector's first, and the differences of successive
    vectors, and compares them by rank correlation with the same of what the member gave. Baseline: 0, which fresh masks
    for every number and vector give. FedXGB as published has one mask for all numbers of a tree.

    It does not compare opened sums of cohorts that differ by one member, which no masks hide. FedXGB's users refuse
    such cohorts.

    References: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, on
    masks that serve once. Liu et al., "Boosting Privately", ICDCS 2020, whose masks do not.
    """
    for peer, given in truth.given.items():
        plain, seen = paired(given, masked_from(view, peer))
        if not seen:
            continue
        found = [correlation(*both) for both in zip(compared(plain), compared(seen), strict=True)]
        rho, error = max(found, key=lambda of: of[0] / max(of[1], 1e-9))
        error, attack = error_of_best(error, len(found)), "differences of masked vectors (Bonawitz 2017)"
        yield view.finding(attack, f"sums of {peer}", "rank correlation", max(0.0, rho), 0.0, error)


def masked_from(view: View, peer: str) -> Vectors:
    """Return the masked vectors that a member sent, as int64 (n,) modulo 2^64."""
    received = [
        entry for entry in view.transcript.entries
        if entry.direction == "received" and entry.peer == peer and entry.step in KINDS
    ]  # fmt: skip
    messages = [content_of(entry, KINDS[entry.step]) for entry in received]
    return [array_view(of.values, np.uint64, (None,), peer=peer, what="values").view(np.int64) for of in messages]


def paired(given: Vectors, seen: Vectors) -> tuple[Vectors, Vectors]:
    """Return the vectors that were given and those received for them, in order, without those never received."""
    plain, masked, left = Vectors(), Vectors(), iter(given)
    for vector in seen:
        own = next((one for one in left if len(one) == len(vector)), None)
        if own is None or sum(map(len, masked)) > MOST_MASKED:
            break
        plain.append(own)
        masked.append(vector)
    return plain, masked


def compared(vectors: Vectors) -> tuple[Vectors, Vectors, Vectors]:
    """Return vectors, the differences of each one's other numbers from its first, and those of successive vectors."""
    # int64 wraps around, as the masks do modulo 2^64; of two lengths the shorter one counts
    within = [vector[1:] - vector[:1] for vector in vectors]
    between = [
        after[: min(len(before), len(after))] - before[: min(len(before), len(after))]
        for before, after in pairwise(vectors)
    ]
    return vectors, within, between


def correlation(plain: Vectors, seen: Vectors) -> tuple[float, float]:
    """Return the mean correlation of ranks within vectors, weighted by their lengths, and its standard error by chance.

    Vectors of equal numbers have no ranks and are left out; if there are no others, both are 0.
    """
    ranks = [
        (zscore(rankdata(a)), zscore(rankdata(b)))
        for a, b in zip(plain, seen, strict=True)
        if np.any(a != a[:1]) and np.any(b != b[:1])
    ]
    count = sum(len(own) for own, _ in ranks)
    if not count:
        return 0.0, 0.0
    total = sum(float(own @ other) for own, other in ranks)
    # neighbouring differences share a vector, so they are not independent: hence the factor
    return total / count, float(np.sqrt(1.5 / count))
