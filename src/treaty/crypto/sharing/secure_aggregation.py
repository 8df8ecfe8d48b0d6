"""Secure aggregation: sums of hidden vectors, by double masks that survive dropouts, or single ones without dropouts.

Bonawitz et al.'s protocol without transport: a protocol carries what these classes return. Vectors are int64 of public
length; sums are exact modulo 2^64 (the caller checks beforehand that they fit).

====  ======================================  ===============================================================
step  call                                    content
====  ======================================  ===============================================================
0     `EphemeralKeys.advertise`, `agree`      u -> A -> all: two signed public keys
1     `Participant.share`,                    u -> A -> v: sealed shares of u's self-mask seed b_u (and of its
      `Aggregator.pass_shares`                mask key s_u); U1 = those who sent them
2     `Participant.masked_input`,             u -> A: y_u = x_u + PRG(b_u) + sum_{v > u} PRG(s_uv)
      `Aggregator.add_input`                  - sum_{v < u} PRG(s_uv), v in U1
3     `Aggregator.survivors`,                 A -> u: U2, whose inputs came; u -> A -> all of U2: signatures
      `Participant.sign_survivors`,           on U2
      `Aggregator.pass_signatures`
4     `Participant.unmask`                    u -> A: v in U2: share of b_v; v in U1 but not in U2: share of s_v,
                                              or the key of PRG(s_uv)
open  `Aggregator.open`                       sum_{u in U2} x_u
====  ======================================  ===============================================================

With `surplus_parts` every u has a chain of further secrets besides b_u, from which it drew parts of the noise in its
vector. It shares them in step 1, too. In step 4, one of each member of U2 is opened: the one that gives the parts that
are too much for so many survivors, and no others (`privacy.surplus_noise`).

`dropout` says how the masks of a participant lost between steps 1 and 2 are recovered:

* ``"share"``: from shares of its mask key, any t of them. All keys are new in every round: if a key served in
  two rounds and were rebuilt when its owner drops from the second, the masks of the first would be known, too.
* ``"reveal"``: every survivor reveals the key of its one mask with the lost one. Keys may last a job and steps are
  cheaper, but a survivor lost before step 4 voids the round. For few and steady participants.
* ``"none"``: not at all. Only step 2 without PRG(b_u): `pairwise_input`, `open_pairwise`. Keys may last a job. Masks
  between pairs cancel in the sum over all members; without one member's vector the others' sum stays masked.

**Assumptions, and what is learned.** A is the aggregator, c the number of the n members that collude with it (a member
that is itself the aggregator counts). Channels to A are encrypted and authenticated; the roster's keys are right.

* If A follows the protocol and c < t, with t > n/2: A and its colluders learn U1, U2 and the sum over U2, hence the sum
  of the other survivors' inputs, and no more. With ``"none"``, any c.
* If A sends different members different lists and c < 2t - n (c < n/3 at the default t = ceil(2n/3)): the same. Two
  lists cannot both get t signatures, and all that is signed or sealed is tied to what its sender received of the round
  and of the keys. A can leave members out, make the round fail, or falsify the sum.
* Members learn who takes part. `min_cohort` counts colluders: of a sum of three, one colluder sees a sum of two.

Not prevented here: inputs that lie, and differences. If two sums of the same inputs are over cohorts that differ by one
member, in another round or another attempt, their difference is that member's input. The calling protocol must limit
who may drop out, and how often a round is repeated.

References: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, figure 4.
"""

from __future__ import annotations

import hashlib
import secrets
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from itertools import islice
from typing import Any, Literal, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto.keystream import add_masks, length_prefixed, mask_key, mask_nonce, pair_keys
from treaty.crypto.sharing import key_agreement
from treaty.crypto.sharing.shamir import share_bytes, share_length
from treaty.errors import CryptoError
from treaty.machine.arrays import Integers

Dropout = Literal["share", "reveal", "none"]
SECRET_BYTES = 32  # length of the self-mask seed b_u and of the mask key s_u
SHARE_BYTES = share_length(SECRET_BYTES)


class RoundVoid(CryptoError):
    """Too few participants are left; nothing was opened. Repeat with the next attempt, which has new masks."""


class Unmasking(NamedTuple):
    """A participant's answer at step 4, by member."""

    survivors: dict[str, bytes]  # of those in U2: its share of their self-mask seed, and of a secret of surplus noise
    lost: dict[str, bytes]  # of those lost from U1: its share of their mask key, or the key of its one mask with them


class Round:
    """What all members agree on before one vector is summed; an aggregator cannot give two members different versions.

    The roster has the Ed25519 public keys (32 bytes) of the round's n members; an absent member still counts for t.
    `vector_id` distinguishes vectors of one round, `attempt` its repetitions, which have new masks. `threshold` is t,
    how many members must answer: more than n/2, by default ceil(2n/3). `min_cohort` is the fewest members whose sum may
    be opened, 3 or more; with `allow_two` also 2, each of whom sees the other's input in the sum: only where noise
    protects inputs. `surplus_parts` is the most parts of noise that are removed if more than the fewest survive;
    `counts` are then the numbers of survivors, ascending from the fewest to n, at which one part more is removed.
    CryptoError if out of range.
    """

    def __init__(
        self, *, job_id: str, protocol: str, round_id: int, roster: Mapping[str, bytes], length: int,
        dropout: Dropout = "share", vector_id: str = "", threshold: int | None = None, min_cohort: int = 3,
        allow_two: bool = False, surplus_parts: int = 0, attempt: int = 0,
    ) -> None:  # fmt: skip
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
        steps = min(surplus_parts, n - self.least)
        self.counts = tuple(self.least + (n - self.least) * k // max(steps, 1) for k in range(steps + 1))
        self.nonce = mask_nonce(job_id, protocol, round_id, attempt, vector_id)  # names the vector's masks
        names = sorted(roster)
        self._protocol, self._min_cohort = protocol, min_cohort
        self._points = {name: place for place, name in enumerate(names, 1)}
        self._listed = length_prefixed(*(part for name in names for part in (name, roster[name])))
        self._job = hashlib.sha256(length_prefixed("treaty job", job_id, protocol, self._listed)).digest()

    def another(self, round_id: int, length: int, vector_id: str, attempt: int = 0) -> Round:
        # the same members under the same rules: cheaper than a new round, which digests the roster
        other = copy(self)
        other.length = length
        other.nonce = mask_nonce(self.job_id, self._protocol, round_id, attempt, vector_id)
        return other

    def removed(self, survivors: int) -> int:
        """Return how many parts of each survivor's noise are too much if so many survive."""
        return bisect_right(self.counts, survivors) - 1

    @property
    def context(self) -> bytes:
        """Digest of all that the members agree on, 32 bytes."""
        parts = (self.nonce, self.length, self.dropout, self.threshold, self._min_cohort, *self.counts, self._listed)
        return hashlib.sha256(length_prefixed("treaty round", *parts)).digest()

    @property
    def key_scope(self) -> bytes:
        """Scope of the members' `EphemeralKeys`: this round and attempt ("share"), or the job and roster."""
        return self.context if self.dropout == "share" else self._job

    def points(self, names: Sequence[str]) -> list[int]:
        """Return the points of members' shares: their places in the sorted roster, from 1."""
        return [self._points[name] for name in names]

    def check(self, vector: NDArray[Any], dtype: type[np.generic], what: str) -> None:
        if vector.dtype != dtype or vector.shape != (self.length,):
            wanted = f"{np.dtype(dtype)} ({self.length},)"
            raise CryptoError(f"expected {wanted}, got {vector.dtype} {vector.shape} - at {what}")

    def check_seeds(self, seeds: key_agreement.PairSeeds) -> None:
        if seeds.scope != self.key_scope or seeds.name not in self.roster:
            raise CryptoError(f"expected seeds from keys made for this round, got others - at {seeds.name}")

    def session(self, keys: bytes) -> bytes:
        # nothing signed or sealed in this round, for these keys, is valid in another
        return hashlib.sha256(length_prefixed("treaty session", self.context, keys)).digest()

    def signers(
        self, signatures: Mapping[str, bytes], survivors: Sequence[str], session: bytes, most: int | None = None
    ) -> list[str]:
        """Return the survivors, the first `most`, whose signature on the list of survivors is present and valid."""
        content = survival(session, survivors)
        valid = (
            u for u in survivors if u in signatures and key_agreement.verifies(self.roster[u], signatures[u], content)
        )
        return list(islice(valid, most))


def pairwise_input(this_round: Round, seeds: key_agreement.PairSeeds, values: Integers) -> NDArray[np.uint64]:
    """Mask a vector, int64 (length,), in a round without dropouts (``dropout="none"``).

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


def open_pairwise(this_round: Round, inputs: Mapping[str, NDArray[np.uint64]]) -> Integers:
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
    if count < least:
        raise RoundVoid(f"the round is void: expected {what} of {least} members or more, got {count}")


class Participant:
    """A member's part in one round: `share`, `masked_input`, `sign_survivors`, `unmask`, each once and in this order.

    A step that refuses its arguments ends the round for this participant: all later calls are refused, too. `seeds`
    come from keys made for ``this_round.key_scope``; the roster has the public key of `signing_key`. `surplus` are the
    secrets of the parts of its noise that may be removed. CryptoError with `dropout` "none", for seeds of other keys,
    if fewer than t members advertised keys, or for another number of secrets than the round has parts.
    """

    def __init__(
        self, this_round: Round, seeds: key_agreement.PairSeeds, signing_key: Ed25519PrivateKey,
        surplus: Sequence[bytes] = (),
    ) -> None:  # fmt: skip
        if this_round.dropout == "none":
            raise CryptoError('expected a round with dropout "share" or "reveal", got "none"; use pairwise_input')
        this_round.check_seeds(seeds)
        if len(seeds.mask) + 1 < this_round.threshold:
            raise CryptoError(f"expected keys of {this_round.threshold} members or more, got {len(seeds.mask) + 1}")
        if len(surplus) != len(this_round.counts) - 1:
            raise CryptoError(f"expected {len(this_round.counts) - 1} secrets of noise, got {len(surplus)}")
        self._round, self._seeds, self._signing_key = this_round, seeds, signing_key
        self._surplus = list(surplus)
        self._session = this_round.session(seeds.transcript)
        self._next: str | None = "share"
        self._self_seed = secrets.token_bytes(SECRET_BYTES)
        self._shares: dict[str, bytes] = {}  # by member of U1, this one included
        self._survivors: list[str] = []

    def share(self) -> dict[str, bytes]:
        """Return sealed shares of this participant's secrets, by receiver (step 1)."""
        self._begin("share")
        names = sorted([*self._seeds.mask, self._seeds.name])
        points, threshold = self._round.points(names), self._round.threshold
        secret = [
            self._self_seed,
            *([self._seeds.mask_secret] if self._round.dropout == "share" else []),
            *self._surplus,
        ]
        shares = [b"".join(of) for of in zip(*(share_bytes(of, points, threshold) for of in secret), strict=True)]
        own, by_name = self._seeds.name, dict(zip(names, shares, strict=True))
        self._shares[own] = by_name.pop(own)
        self._next = "masked_input"
        return {to: key_agreement.seal(self._seeds.channel[to], by_name[to], self._bound(own, to)) for to in by_name}

    def masked_input(self, values: Integers, sealed: Mapping[str, bytes]) -> NDArray[np.uint64]:
        """Return the masked vector of values, int64 (length,), given the shares sealed for this member (step 2).

        `sealed` has those of the other members of U1, by sender. CryptoError for another kind of vector, if U1 is too
        small or not of members, a share was not sealed by its sender for this member and round, or a mask of this round
        was made before.
        """
        self._begin("masked_input")
        self._round.check(values, np.int64, "the input")
        if len(sealed) + 1 < self._round.least:
            raise CryptoError(f"expected shares of {self._round.least} members or more, got {len(sealed) + 1}")
        added, subtracted = pair_keys(self._seeds.name, self._seeds.mask, sealed, self._round.nonce)
        own = self._seeds.name
        for peer, box in sealed.items():
            share = key_agreement.unseal(self._seeds.channel[peer], box, self._bound(peer, own))
            if share is None or len(share) != len(self._shares[own]):
                raise CryptoError(f"cannot decrypt {peer}'s share for {own}: wrong key, sender or round")
            self._shares[peer] = share
        self._seeds.used.use(self._round.nonce)
        masked = values.astype(np.uint64)
        add_masks(masked, [mask_key(self._self_seed, self._round.nonce), *added], subtracted)
        self._next = "sign_survivors"
        return masked

    def sign_survivors(self, survivors: Sequence[str]) -> bytes:
        """Return the signature on the list of survivors (step 3), checked as by `take_survivors`."""
        return self._signing_key.sign(self.take_survivors(survivors))

    def take_survivors(self, survivors: Sequence[str]) -> bytes:
        """Return what a participant vouches for to the other survivors, who received the same list (step 3).

        CryptoError if the list is not sorted and free of repetitions, has members outside U1, lacks this participant,
        or is shorter than max(t, min_cohort).
        """
        self._begin("sign_survivors")
        if list(survivors) != sorted(set(survivors)):
            raise CryptoError("expected a sorted list without repetitions, got another - at the survivors")
        if not self._shares.keys() >= set(survivors) or self._seeds.name not in survivors:
            raise CryptoError(
                f"expected some of the {len(self._shares)} members who shared, and {self._seeds.name} among them, "
                "got others - at the survivors"
            )
        if len(survivors) < self._round.least:
            raise CryptoError(f"expected {self._round.least} survivors or more, got {len(survivors)}")
        self._survivors = list(survivors)
        self._next = "unmask"
        return survival(self._session, self._survivors)

    def unmask(self, signatures: Mapping[str, bytes]) -> Unmasking:
        """Return what removes the masks of the list this participant signed (step 4), never both kinds for a member.

        CryptoError if fewer than t survivors signed the very list that this participant signed.
        """
        return self.unmask_for(
            self._round.signers(signatures, self._survivors, self._session, most=self._round.threshold)
        )

    def unmask_for(self, vouched: Collection[str]) -> Unmasking:
        """Do the same for survivors who vouched for the list in another way; CryptoError if they are fewer than t."""
        self._begin("unmask")
        if len(set(vouched) & set(self._survivors)) < self._round.threshold:
            raise CryptoError(
                f"expected {self._round.threshold} signatures or more on the list of survivors that {self._seeds.name} "
                f"received, got {len(vouched)}; the aggregator may have sent others another list"
            )
        # never both kinds of share of one member
        lost = sorted(self._shares.keys() - set(self._survivors))
        if self._round.dropout == "share":
            of_lost = {name: self._shares[name][SHARE_BYTES : 2 * SHARE_BYTES] for name in lost}
        else:
            of_lost = {name: mask_key(self._seeds.mask[name], self._round.nonce) for name in lost}
        # the secret of the last part that is too much gives all before it, and none after it
        removed = self._round.removed(len(self._survivors))
        end = len(self._shares[self._seeds.name]) - SHARE_BYTES * (len(self._surplus) - removed)
        noise = slice(end - SHARE_BYTES, end) if removed else slice(0)
        return Unmasking({n: self._shares[n][:SHARE_BYTES] + self._shares[n][noise] for n in self._survivors}, of_lost)

    def _begin(self, step: str) -> None:
        if self._next != step:
            raise CryptoError(
                f"expected {self._next or 'nothing more'} in this round, got {step} (once each, in order)"
            )
        # until the step has succeeded
        self._next = None

    def _bound(self, sender: str, receiver: str) -> bytes:
        return length_prefixed("treaty shares", self._session, sender, receiver)
