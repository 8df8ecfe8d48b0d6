"""One round of secure aggregation as its members and the aggregator agree on it beforehand; see `secure_aggregation`.

The form for parties that never drop out is complete here: masks between pairs cancel in the sum over all members, and
nothing has to be recovered. Without one member's vector the others' sum stays masked: the aggregator and any number of
colluders learn the sum of the remaining members' inputs and no more, whatever the aggregator tells whom.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from copy import copy
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.aggregation.key_agreement import PairSeeds, verifies
from treaty.crypto.aggregation.masks import length_prefixed, mask_nonce
from treaty.errors import CryptoError

Dropout = Literal["share", "reveal", "none"]


class RoundVoid(CryptoError):
    """Too few participants are left; nothing was opened. Repeat with the next attempt, which has new masks."""


class Unmasking(NamedTuple):
    """A participant's answer at step 4, by member.

    For those in U2 its share of their self-mask seed; for those lost from U1 its share of their mask key (``"share"``)
    or the key of its one mask with them (``"reveal"``).
    """

    survivors: dict[str, bytes]
    lost: dict[str, bytes]


class Round:
    """What all agree on before one vector is summed; an aggregator cannot tell two members different versions of it.

    The roster gives the Ed25519 public keys (32 bytes) of the n members chosen for this round; an absent member still
    counts for t. `vector_id` distinguishes vectors of one round. `threshold` is t, how many members must answer: more
    than n/2, by default ceil(2n/3). `min_cohort` is the fewest members whose sum may be opened, 3 or more; with
    `allow_two` also 2, each of whom sees the other's input in the sum: only where noise protects inputs. CryptoError if
    these are out of range.
    """

    def __init__(
        self,
        *,
        job_id: str,
        protocol: str,
        round_id: int,
        roster: Mapping[str, bytes],
        length: int,
        dropout: Dropout = "share",
        vector_id: str = "",
        threshold: int | None = None,
        min_cohort: int = 3,
        allow_two: bool = False,
    ) -> None:
        n = len(roster)
        threshold = -(-2 * n // 3) if threshold is None else threshold
        if min_cohort < (2 if allow_two else 3):
            raise CryptoError(f"expected a min_cohort of 3 or more (2 only where noise is on), got {min_cohort}")
        if n < min_cohort:
            raise CryptoError(f"expected {min_cohort} members or more, got {n}: a sum over fewer shows single inputs")
        if not n < 2 * threshold <= 2 * n:
            raise CryptoError(f"expected a threshold above half of {n} members and at most {n}, got {threshold}")
        self.job_id, self.roster, self.length, self.dropout = job_id, dict(roster), length, dropout
        self.threshold, self.least = threshold, max(threshold, min_cohort)  # `least` members whose sum is opened
        self.nonce = mask_nonce(job_id, protocol, round_id, 0, vector_id)  # names the vector's masks
        names = sorted(roster)
        self._protocol, self._round_id, self._vector_id, self._min_cohort = protocol, round_id, vector_id, min_cohort
        self._points = {name: place for place, name in enumerate(names, 1)}
        self._listed = length_prefixed(*(part for name in names for part in (name, roster[name])))
        self._job = hashlib.sha256(length_prefixed("treaty job", job_id, protocol, self._listed)).digest()

    def another(self, round_id: int, length: int, vector_id: str, attempt: int = 0) -> Round:
        """Return a round of the same members under the same rules; cheaper than a new one, which digests the roster."""
        other = copy(self)
        other.length, other._round_id, other._vector_id = length, round_id, vector_id
        other.nonce = mask_nonce(self.job_id, self._protocol, round_id, attempt, vector_id)
        return other

    def repeated(self, attempt: int) -> Round:
        """Return this round's repetition number `attempt`, from 1, which has new masks; 0 is the round itself."""
        return self.another(self._round_id, self.length, self._vector_id, attempt)

    @property
    def context(self) -> bytes:
        """Digest of all that the members agree on, bytes of length 32."""
        parts = (self.nonce, self.length, self.dropout, self.threshold, self._min_cohort, self._listed)
        return hashlib.sha256(length_prefixed("treaty round", *parts)).digest()

    @property
    def key_scope(self) -> bytes:
        """Scope of the members' `EphemeralKeys`: this round and attempt ("share"), or the job and roster."""
        return self.context if self.dropout == "share" else self._job

    def points(self, names: Sequence[str]) -> list[int]:
        """Return the points of members' shares: their places in the sorted roster, from 1."""
        return [self._points[name] for name in names]

    def check(self, vector: NDArray[Any], dtype: type[np.generic], what: str) -> None:
        """Raise CryptoError for a vector of another type or length than the round's."""
        if vector.dtype != dtype or vector.shape != (self.length,):
            wanted = f"{np.dtype(dtype)} ({self.length},)"
            raise CryptoError(f"expected {wanted}, got {vector.dtype} {vector.shape} - at {what}")

    def check_seeds(self, seeds: PairSeeds) -> None:
        """Raise CryptoError for seeds from keys made for anything but this round's scope."""
        if seeds.scope != self.key_scope or seeds.name not in self.roster:
            raise CryptoError(f"expected seeds from keys made for this round, got others - at {seeds.name}")

    def session(self, keys: bytes) -> bytes:
        """Name the round together with the keys its members were told; nothing signed or sealed is valid in another."""
        return hashlib.sha256(length_prefixed("treaty session", self.context, keys)).digest()

    def signers(
        self, signatures: Mapping[str, bytes], survivors: Sequence[str], session: bytes, most: int | None = None
    ) -> list[str]:
        """Return the survivors, the first `most`, whose signature on the list of survivors is present and valid."""
        content = survival(session, survivors)
        valid = (u for u in survivors if u in signatures and verifies(self.roster[u], signatures[u], content))
        return list(islice(valid, most))


def pairwise_input(this_round: Round, seeds: PairSeeds, values: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Mask a vector, int64 (length,), where nobody may drop out (``dropout="none"``).

    CryptoError if a seed with another member is missing, the vector has another type or length, or the round's mask was
    made before.
    """
    this_round.check_seeds(seeds)
    this_round.check(values, np.int64, "the input")
    without = this_round.roster.keys() - seeds.mask.keys() - {seeds.name}
    if without:
        raise CryptoError(f"expected a seed with every member, got none with {len(without)} - at {seeds.name}")
    seeds.used.use(this_round.nonce)
    masked = values.astype(np.uint64)
    seeds.streams.add(masked, this_round.nonce)
    return masked


def open_pairwise(this_round: Round, inputs: Mapping[str, NDArray[np.uint64]]) -> NDArray[np.int64]:
    """Add up every member's `pairwise_input`: the masks cancel. RoundVoid if a member is missing."""
    enough(len(inputs.keys() & this_round.roster.keys()), len(this_round.roster), "inputs")
    total = np.zeros(this_round.length, np.uint64)
    for name in this_round.roster:
        this_round.check(inputs[name], np.uint64, f"the input of {name}")
        total += inputs[name]
    return total.view(np.int64)


def survival(session: bytes, survivors: Sequence[str]) -> bytes:
    """Return what a survivor signs."""
    return length_prefixed("treaty survivors", session, *survivors)


def enough(count: int, least: int, what: str) -> None:
    """Raise RoundVoid if fewer than `least` are left."""
    if count < least:
        raise RoundVoid(f"the round is void: expected {what} of {least} members or more, got {count}")
