"""Attacks on ciphertexts: labels from the numbers that hide gradients, and bins from answers that are recognised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from treaty.attacks.views import Finding, Truth, View, auc_error
from treaty.crypto.additive.ciphers import OUPublicKey, PaillierPublicKey
from treaty.crypto.lattice.ring import unpack as unpacked_residues
from treaty.crypto.parameters import Parameters
from treaty.crypto.payload import Packing, Payload, SumsBounds, from_words
from treaty.crypto.sums.lattice_sums import sums_parameters
from treaty.machine.arrays import Flags, Floats, Int32s, Integers
from treaty.messaging.messages import unpack
from treaty.messaging.transcript import TranscriptEntry
from treaty.privacy.exact_sums import OpenedNode
from treaty.systems.vertical.exact_sums import content_of
from treaty.systems.vertical.messages import SealedSumsRequest, Setup, Sums, SumsPiece, SumsRequest, TreeRows, TreeStart

MOST = 4096
"""Combinations tried for each half of the bins of a ciphertext."""

MOST_CIPHERTEXTS = 5000
"""Answers' ciphertexts that are looked at, from the first tree on."""

MOST_PAIRED = 200
"""Rows of a node beyond which bins of two rows are not tried."""

Numbers = list[gmpy2.mpz]
Rows = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bin:
    """A bin in an answer: its slot, its number of rows, and which rows it may be made of; None: too many."""

    slot: int
    count: int
    candidates: list[Rows] | None


@dataclass(frozen=True, slots=True)
class KeyedCipher:
    """What is public of a cipher with a key: how sums are packed, its modulus, and the inverse of R modulo that."""

    packing: Packing
    modulus: int
    from_montgomery: gmpy2.mpz

    def numbers(self, sent: NDArray[Any]) -> Numbers:
        """Return ciphertexts as they are sent, Montgomery forms in bytes or words (rows, ...), as plain numbers."""
        packed = np.ascontiguousarray(sent).view(np.uint64)
        return [gmpy2.mpz(value) * self.from_montgomery % self.modulus for value in from_words(packed)]


def recognised_ciphertexts(view: View, truth: Truth) -> Iterator[Finding]:
    """Name the rows of bins of one row, at an active party of sums under a cipher with keys.

    A partner's bins from answers that were not re-randomised: the active party knows its own ciphertexts again.

    A bin's answer is the product of the ciphertexts of its rows. Without a factor that the owner draws it is the very
    product of numbers that the active party sent: it tries which rows of the node, of those whose gradients add up to
    the opened sum, give the answer. Several bins share a ciphertext, so that all of them have to be tried together;
    tried are those where each bin has one or two rows, or all of the node's but one, and there are not too many
    combinations. So longer keys, whose ciphertexts hold more bins, give away fewer rows to this attack; that is no
    guard.

    Score: the share of bins of one row, in all answers, whose row is named. Baseline: a guess among the node's rows
    with that gradient, which opened sums allow under every cipher.

    References
    ----------
    Cheng et al., "SecureBoost", 2019 (arXiv 1901.08755), algorithm 1, whose answers are products alone. Chen et al.,
    "SecureBoost+", 2021 (arXiv 2110.10927), section 4, on bins that share a ciphertext.
    """
    if not view.is_active:
        return
    for owner in [name for name in truth.owners if name != view.party]:
        nodes = view.recorded.recording.nodes.get(owner, [])
        entries = [entry for entry in view.recorded.transcript.entries if entry.peer == owner]
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
            yield Finding(
                attack="ciphertexts known again", party=view.party, target=f"bins of {owner}", measure="share right",
                score=named / single, baseline=guessed / single,
            )  # fmt: skip


def keyed_cipher(view: View, entries: Sequence[TranscriptEntry]) -> KeyedCipher | None:
    """Return the cipher of a party's messages; None where it has no key, or a ciphertext for each row and node."""
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
    """Yield the bins of each ciphertext that came back from a peer, and the rows of each, or None where not known.

    `entries` are the active party's messages with the peer, `nodes` what it opened of its answers.
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
                # of tables of tens of millions of rows
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
                starts = cipher.packing.group_starts(len(bins)).tolist()
                for value, first, stop in zip(cipher.numbers(answer), starts, starts[1:], strict=False):
                    group = bins[first:stop]
                    yield group, rows_of(value, group, sent, cipher, sample)


def bins_of(
    positions: Int32s, slots: np.ndarray[tuple[int], np.dtype[np.intp]], sample: Int32s, opened: Iterator[OpenedNode]
) -> Iterator[Bin]:
    """Yield the bins that were sent of a node; `positions` are its rows, among those sampled."""
    rows = sample[positions] if len(sample) else positions
    node = next(node for node in opened if np.array_equal(np.sort(node.rows), rows))  # others were not asked about
    grad, hess = node.grad[rows], node.hess[rows]
    for slot in slots.tolist():
        yield Bin(slot, int(node.sums[slot, 2]), candidates(rows, grad, hess, node.sums[slot]))


def candidates(rows: Int32s, grad: Integers, hess: Integers, sums: Integers) -> list[Rows] | None:
    """Return which rows of a node, with these gradients, a bin of these sums can be made of; None: not tried."""
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
    """Return the rows of each bin of a ciphertext where just one combination of candidates gives it.

    The first bin is the highest: bin j of k is raised to 2^(bits (k - 1 - j)). Met in the middle.
    """
    bits, modulus = cipher.packing.sum_bits, cipher.modulus
    half, nothing = len(group) // 2, list[Rows | None]([None] * len(group))
    if any(not one.candidates for one in group):
        return nothing
    tried = [of for one in group if (of := one.candidates) is not None]
    if any(np.prod([float(len(of)) for of in part]) > MOST for part in (tried[:half], tried[half:])):
        return nothing
    place = {int(row): k for k, row in enumerate(sample.tolist())}

    def values(of: Sequence[list[Rows]], above: int) -> list[tuple[gmpy2.mpz, tuple[Rows, ...]]]:
        """Return what every combination of candidates of some bins, `above` places from the last, gives."""
        made = []
        for number, rows_of_bin in enumerate(of):
            shift = gmpy2.mpz(1) << bits * (above + len(of) - 1 - number)
            made.append([gmpy2.powmod(multiplied(rows, sent, place, modulus), shift, modulus) for rows in rows_of_bin])
        return [
            (multiplied(range(len(chosen)), list(chosen), {}, modulus), rows)
            for chosen, rows in zip(product(*made), product(*of), strict=True)
        ]

    low: dict[gmpy2.mpz, list[tuple[Rows, ...]]] = {}
    for value, rows in values(tried[half:], 0):
        low.setdefault(value, []).append(rows)
    high = values(tried[:half], len(group) - half)
    fits = [
        (*rows, *rest) for value, rows in high for rest in low.get(answer * gmpy2.invert(value, modulus) % modulus, [])
    ]
    return list(fits[0]) if len(fits) == 1 else nothing


def multiplied(rows: Sequence[int], sent: Numbers, place: dict[int, int], modulus: int) -> gmpy2.mpz:
    """Return the product of the ciphertexts of these rows; `place` says where they are among those sent."""
    value = gmpy2.mpz(1)
    for row in rows:
        value = value * sent[place.get(row, row)] % modulus
    return value


QUERIES: dict[str, type[SumsRequest] | type[SumsPiece]] = {
    kind.__name__: kind for kind in (SumsRequest, SealedSumsRequest, SumsPiece)
}
MOST_ROWS = 10_000
MOST_NUMBERS = 512
"""Numbers of each row that are looked at, from the first tree on."""


def learned_from_ciphertexts(view: View, truth: Truth) -> Iterator[Finding]:
    """Learn labels from hidden gradients, at a passive party of encrypted sums.

    Labels from the very numbers that hide gradients: ciphertexts of rows, residues of lattice vectors, masked words.

    A cipher hides labels only if nothing that can be computed from its ciphertexts reveals them. Here a logistic
    regression learns on half of the rows, whose labels the attacker is given, and its scores of the other half are
    compared with theirs. Of each ciphertext under Okamoto-Uchiyama and Paillier it has the bytes as they are sent, and
    the Jacobi symbol, which anyone can compute and which shows half of the non-residues; of other ciphers the numbers.
    Baseline: chance.

    That nothing is found proves nothing: the proof is the cipher's. The attack is there to find one that is broken.

    References
    ----------
    Goldwasser, Micali, "Probabilistic Encryption", Journal of Computer and System Sciences 1984: what no ciphertext may
    tell, and the Jacobi symbol as what a careless one does.
    """
    if view.is_active or not view.steps(TreeStart):
        return
    rows, numbers = hidden_numbers(view)
    labels = truth.labels[rows]
    if len(rows) < 100 or not 10 <= labels.sum() <= len(labels) - 10:
        return
    score, error = learned(numbers, labels)
    yield Finding(
        attack="ciphertexts told apart (Goldwasser 1984)", party=view.party, target="labels", measure="AUC",
        score=score, baseline=0.5, error=error,
    )  # fmt: skip


def learned(numbers: Floats, labels: Flags) -> tuple[float, float]:
    """Return the AUC on half of the rows of what was learned on the others, and its standard error by chance."""
    order = np.random.default_rng(0).permutation(len(labels))[:MOST_ROWS]
    known, asked = order[::2], order[1::2]
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
    scores = model.fit(numbers[known], labels[known]).decision_function(numbers[asked])
    return float(roc_auc_score(labels[asked], scores)), auc_error(labels[asked])


def hidden_numbers(view: View) -> tuple[Int32s, Floats]:
    """Return rows of the table and the numbers that hide their gradients, float64 (rows, numbers) from -1 to 1.

    Of trees with samples of rows the first alone is read; of long tables the rows that came in first messages.
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
    """Yield what `hidden_numbers` returns, of each message that has some."""
    received = [entry for entry in view.recorded.transcript.entries if entry.direction == "received"]
    cipher, every = keyed_cipher(view, received), np.arange(n_rows, dtype=np.int32)
    setups = [content_of(entry, Setup) for entry in received if entry.step == Setup.__name__]
    parameters = None
    if setups and setups[0].encryption == "lattice":
        *bounds, nodes = unpack(setups[0].payload, view.party, "Setup")[0].tolist()
        parameters = sums_parameters(SumsBounds(*bounds), view.inputs.options.ciphers.sealed, nodes)
    for entry in received:
        match entry.step:
            case "TreeStart" if cipher is not None:  # of many rows the first ones
                start = content_of(entry, TreeStart)
                (ciphertexts,) = unpack(start.payload, entry.peer, entry.step)
                rows = every if start.rows is None else np.frombuffer(start.rows.data, np.int32)
                yield rows[: len(ciphertexts)], of_ciphertexts(ciphertexts, cipher)
            case "SumsRequest" | "SealedSumsRequest" | "SumsPiece" if cipher is None:
                payload = content_of(entry, QUERIES[entry.step]).payload
                numbers = of_vectors(unpack(payload, entry.peer, entry.step), parameters, n_rows)
                if len(numbers):
                    yield every[: len(numbers)], numbers


def of_ciphertexts(ciphertexts: np.ndarray[tuple[int, int], np.dtype[np.uint8]], cipher: KeyedCipher) -> Floats:
    """Return the bytes of ciphertexts (rows, bytes) as they are sent, and their Jacobi symbols."""
    symbols = [[gmpy2.jacobi(number, cipher.modulus)] for number in cipher.numbers(ciphertexts)]
    return np.concatenate([ciphertexts / 255.0, np.array(symbols, np.float64).reshape(-1, 1)], axis=1)


def of_vectors(payload: Payload, parameters: Parameters | None, n_rows: int) -> Floats:
    """Return the numbers of each row in the vectors of a query, a vector for each node; none in its later pieces."""
    hidden = payload[0]
    if parameters is not None:
        if len(payload) == 1:
            return np.zeros((0, 0))
        residues = unpacked_residues(parameters, hidden, n_rows)  # (vectors, primes, rows)
        return np.concatenate(residues / np.array(parameters.primes, np.float64)[:, None]).T
    # under masks: (nodes, words, rows)
    if hidden.dtype == np.uint64:
        return np.concatenate(hidden / 2.0**64).T
    # a ciphertext for each node: (nodes, rows, bytes)
    if hidden.ndim == 3 and hidden.shape[1] == n_rows:
        return np.concatenate(hidden / 255.0, axis=1)
    return np.zeros((0, 0))
