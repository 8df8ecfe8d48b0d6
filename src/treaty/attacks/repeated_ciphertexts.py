"""A partner's bins from answers that were not re-randomised: the active party knows its own ciphertexts again.

A bin's answer is the product of the ciphertexts of its rows. Without a factor that the owner draws it is the very
product of numbers that the active party sent: it tries which rows of the node, of those whose gradients add up to the
opened sum, give the answer. Several bins share a ciphertext, so that all of them have to be tried together; tried are
those where each bin has one or two rows, or all of the node's but one, and there are not too many combinations. So
longer keys, whose ciphertexts hold more bins, give away fewer rows to this attack; that is no guard.

Score: the share of bins of one row, in all answers, whose row is named. Baseline: a guess among the node's rows with
that gradient, which opened sums allow under every cipher.

References
----------
Cheng et al., "SecureBoost", 2019 (arXiv 1901.08755), algorithm 1, whose answers are products alone. Chen et al.,
"SecureBoost+", 2021 (arXiv 2110.10927), section 4, on bins that share a ciphertext.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import gmpy2
import numpy as np
from numpy.typing import NDArray

from treaty.attacks.views import Finding, Truth, View
from treaty.crypto.additive import okamoto_uchiyama, paillier
from treaty.crypto.additive.montgomery import from_words
from treaty.crypto.additive.packing import Packing
from treaty.crypto.payload import SumsBounds
from treaty.machine.arrays import Int32s, Integers
from treaty.messaging.messages import unpack
from treaty.messaging.transcript import Entry
from treaty.privacy.exact_sums import OpenedNode
from treaty.systems.vertical.encrypted import Setup
from treaty.systems.vertical.encrypted_columns import Sums, SumsRequest, TreeRows, TreeStart
from treaty.systems.vertical.exact_sums import content_of

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


def attack(view: View, truth: Truth) -> Iterator[Finding]:
    """Name the rows of bins of one row, at an active party of sums under a cipher with keys."""
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


def keyed_cipher(view: View, entries: Sequence[Entry]) -> KeyedCipher | None:
    """Return the cipher of a party's messages; None where it has no key, or a ciphertext for each row and node."""
    setups = [content_of(entry, Setup) for entry in entries if entry.step == Setup.__name__]
    if not setups or setups[0].encryption not in ("ou", "paillier") or view.inputs.options.ciphers.blind:
        return None
    numbers, stated = unpack(setups[0].payload, view.party, "Setup")
    kind = okamoto_uchiyama.PublicKey if setups[0].encryption == "ou" else paillier.PublicKey
    key = kind.from_payload([numbers, stated[3:]], view.inputs.options.ciphers.insecure_test_key_bits)
    return KeyedCipher(
        Packing(SumsBounds(*stated[:3].tolist()), key.plaintext_bits),
        key.modulus.value,
        gmpy2.invert(key.modulus.radix, key.modulus.value),
    )


def recognised(
    entries: Sequence[Entry], nodes: Sequence[OpenedNode], cipher: KeyedCipher
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
                return  # of tables of tens of millions of rows
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
