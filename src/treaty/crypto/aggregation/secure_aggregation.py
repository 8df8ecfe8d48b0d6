"""Sums of vectors that nobody sees: double masking with dropout, and its form for parties that never drop out.

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

`dropout` says how the masks of a participant lost between steps 1 and 2 are recovered:

* ``"share"``: from shares of its mask key, any t of them. All keys are made anew in every round: if a key served in
  two rounds and were rebuilt when its owner drops from the second, the masks of the first would be known, too.
* ``"reveal"``: every survivor tells the key of its one mask with the lost one. Keys may last a job and steps are
  cheaper, but a survivor lost before step 4 voids the round. For few and steady participants.
* ``"none"``: not at all. Only step 2 without PRG(b_u): `pairwise_input`, `open_pairwise`. Keys may last a job.

**What is assumed, what is learned.** A is the aggregator, c how many of the n members pass it all they see (a member
that is itself the aggregator counts). Channels to A are encrypted and authenticated; the roster's keys are right.

* A follows the protocol and c < t, with t > n/2: A and its colluders learn U1, U2 and the sum over U2, hence the sum of
  the other survivors' inputs, and no more. With ``"none"``, any c.
* A tells different members different things and c < 2t - n (that is c < n/3 at the default t = ceil(2n/3)): the same.
  Two lists cannot both get t signatures, and all that is signed or sealed is tied to what its sender was told of the
  round and of the keys. A can leave members out or make the round fail, and it can falsify the sum.
* Members learn who takes part. `min_cohort` counts colluders: of a sum of three, one colluder sees a sum of two.

Not prevented here: inputs that lie, and differences. Of two sums of the same inputs over cohorts that differ by one
member, be it in another round or in another attempt after a void one, the difference is that member's input: the
calling protocol must limit who may drop out, and when to stop repeating.

References: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017, figure 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto.aggregation.key_agreement import Advertisement, agree_with, check_advertisements, transcript
from treaty.crypto.aggregation.masks import KEY_BYTES, add_masks, mask_key
from treaty.crypto.aggregation.participant import SECRET_BYTES
from treaty.crypto.aggregation.round import Round, Unmasking, enough
from treaty.crypto.sharing.secret_sharing import open_bytes
from treaty.errors import CryptoError


class Aggregator:
    """The aggregator's part in one round: passes sealed messages on, adds masked vectors up, opens the sum.

    `signed` False is for `round_keys`, which the members check among themselves. All methods raise RoundVoid if fewer
    than t members (max(t, min_cohort) for inputs) are left. CryptoError with `dropout` "none", or if an advertisement
    is not what its sender signed for this round.
    """

    def __init__(self, this_round: Round, advertisements: Mapping[str, Advertisement], *, signed: bool = True) -> None:
        if this_round.dropout == "none":
            raise CryptoError('expected a round with dropout "share" or "reveal", got "none"; use open_pairwise')
        if signed:
            check_advertisements(advertisements, this_round.roster, this_round.key_scope)
        enough(len(advertisements), this_round.threshold, "keys")
        self._round, self._advertised = this_round, dict(advertisements)
        self._session = this_round.session(transcript(advertisements, this_round.key_scope))
        self._sum = np.zeros(this_round.length, np.uint64)
        self._shared: set[str] = set()
        self._came: set[str] = set()
        self._survivors: list[str] | None = None

    def pass_shares(self, sent: Mapping[str, Mapping[str, bytes]]) -> dict[str, dict[str, bytes]]:
        """Turn sealed shares, by sender and receiver, into those of each receiver, by sender; the senders are U1.

        CryptoError if a sender has no advertised keys, or did not send to just the others who have.
        """
        for name, boxes in sent.items():
            if name not in self._advertised or boxes.keys() != self._advertised.keys() - {name}:
                raise CryptoError(f"expected shares for all others with keys, got others - in the shares of {name}")
        enough(len(sent), self._round.least, "shares")
        self._shared = set(sent)
        return {to: {name: sent[name][to] for name in sent if name != to} for to in sent}

    def add_input(self, name: str, masked: NDArray[np.uint64]) -> None:
        """Add one member's masked vector, uint64 (length,), to the sum; it need not be kept.

        CryptoError if the member is not in U1 or sent a vector before, the list of survivors is closed (drop a late
        input unread), or the vector has another type or length.
        """
        if name not in self._shared or name in self._came or self._survivors is not None:
            raise CryptoError(f"expected one input per member who shared, before survivors are listed - from {name}")
        self._round.check(masked, np.uint64, f"the input of {name}")
        self._came.add(name)
        self._sum += masked

    def take_back(self, name: str, masked: NDArray[np.uint64]) -> None:
        """Subtract a member's vector from the sum before survivors are listed: it then counts as lost.

        CryptoError if there is no such input.
        """
        if name not in self._came or self._survivors is not None:
            raise CryptoError(f"expected an input that is in the sum, before survivors are listed - of {name}")
        self._round.check(masked, np.uint64, f"the input of {name}")
        self._came.remove(name)
        self._sum -= masked

    def survivors(self) -> list[str]:
        """Close the list of those whose inputs came, and return it sorted: U2."""
        enough(len(self._came), self._round.least, "inputs")
        self._survivors = sorted(self._came)
        return list(self._survivors)

    def pass_signatures(self, signatures: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the survivors' valid signatures on their list, for all who sent one."""
        survivors = self._closed()
        valid = self._round.signers(signatures, survivors, self._session)
        enough(len(valid), self._round.threshold, "signatures")
        return {name: signatures[name] for name in valid}

    def open(self, answers: Mapping[str, Unmasking]) -> NDArray[np.int64]:
        """Remove the masks and return the sum of the survivors' inputs modulo 2^64, int64 (length,).

        `answers` are by survivor: t of them, and all where ``"reveal"`` has to recover a lost member, else RoundVoid.
        CryptoError if an answer is of somebody else or for other lists, or shares of a mask key do not give the
        advertised key. A wrong share of a self-mask seed goes unnoticed and makes the sum garbage.
        """
        survivors = self._closed()
        lost = sorted(self._shared - self._came)
        for name, answer in answers.items():
            right = answer.survivors.keys() == self._came and answer.lost.keys() == set(lost)
            if name not in self._came or not right:
                raise CryptoError(f"expected an answer for the signed list of survivors - in the answer of {name}")
        by_key = self._round.dropout == "share"
        enough(len(answers), self._round.threshold if by_key or not lost else len(survivors), "answers")
        of_seeds = self._opened({name: answer.survivors for name, answer in answers.items()}, survivors)
        if by_key:
            rebuilt = self._opened({name: answer.lost for name, answer in answers.items()}, lost)
            keys = {v: self._keys_with(v, rebuilt[v], survivors) for v in lost}
        else:
            keys = {v: {u: _key(answers[u].lost[v], u) for u in survivors} for v in lost}
        added = [keys[v][u] for v in lost for u in survivors if u > v]  # u > v subtracted what it shares with v
        subtracted = [keys[v][u] for v in lost for u in survivors if u < v]
        subtracted += [mask_key(of_seeds[u], self._round.nonce) for u in survivors]
        total = self._sum.copy()
        add_masks(total, added, subtracted)
        return total.view(np.int64)

    def _opened(self, shares: Mapping[str, Mapping[str, bytes]], owners: Sequence[str]) -> dict[str, bytes]:
        """Rebuild the secrets of `owners` from the first t holders' shares; by holder, then owner."""
        holders = sorted(shares)[: self._round.threshold]
        held = [[shares[holder][owner] for owner in owners] for holder in holders]
        return dict(zip(owners, open_bytes(self._round.points(holders), held, SECRET_BYTES), strict=True))

    def _keys_with(self, lost: str, secret: bytes, survivors: Sequence[str]) -> dict[str, bytes]:
        """Return keys of the masks between the survivors and a lost member whose secret key was rebuilt."""
        own = X25519PrivateKey.from_private_bytes(secret)
        if own.public_key().public_bytes_raw() != self._advertised[lost].mask:
            raise CryptoError(
                f"expected shares of the mask key of {lost}, got some that give another; repeat the round"
            )
        publics = {u: self._advertised[u].mask for u in survivors}
        seeds = agree_with(own, publics, self._round.job_id, lost)
        return {u: mask_key(seeds[u], self._round.nonce) for u in survivors}

    def _closed(self) -> list[str]:
        if self._survivors is None:
            raise CryptoError("expected the list of survivors to be closed first")
        return self._survivors


def _key(key: bytes, sender: str) -> bytes:
    if len(key) != KEY_BYTES:
        raise CryptoError(f"expected keys of {KEY_BYTES} bytes, got {len(key)} - in the answer of {sender}")
    return key
