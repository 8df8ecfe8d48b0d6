"""The aggregator's part in the secure sums of `secure_aggregation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto.keystream import KEY_BYTES, add_masks, mask_key
from treaty.crypto.sharing import key_agreement
from treaty.crypto.sharing.secure_aggregation import SECRET_BYTES, SHARE_BYTES, Round, Unmasking, enough
from treaty.crypto.sharing.shamir import open_bytes
from treaty.errors import CryptoError
from treaty.machine.arrays import Integers


class Aggregator:
    """The aggregator's part in one round: passes sealed messages on, adds masked vectors up, opens the sum.

    `signed` False is for `RoundKeys`, which the members check among themselves. All methods raise RoundVoid if fewer
    than t members (max(t, min_cohort) for inputs) are left. CryptoError with `dropout` "none", or if an advertisement
    is not what its sender signed for this round. After `open`, `surplus` has each survivor's secret of surplus noise.
    """

    def __init__(
        self, this_round: Round, advertisements: Mapping[str, key_agreement.Advertisement], *, signed: bool = True
    ) -> None:
        if this_round.dropout == "none":
            raise CryptoError('expected a round with dropout "share" or "reveal", got "none"; use open_pairwise')
        if signed:
            key_agreement.check_advertisements(advertisements, this_round.roster, this_round.key_scope)
        enough(len(advertisements), this_round.threshold, "keys")
        self._round, self._advertised = this_round, dict(advertisements)
        self._session = this_round.session(key_agreement.transcript(advertisements, this_round.key_scope))
        self._sum = np.zeros(this_round.length, np.uint64)
        self._shared: set[str] = set()
        self._came: set[str] = set()
        self._survivors: list[str] | None = None
        self.surplus: dict[str, bytes] = {}

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
        enough(len(self._came), self._round.least, "inputs")
        # closes the list of those whose inputs came, U2
        self._survivors = sorted(self._came)
        return list(self._survivors)

    def pass_signatures(self, signatures: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the survivors' valid signatures on their list, for all who sent one."""
        survivors = self._closed()
        valid = self._round.signers(signatures, survivors, self._session)
        enough(len(valid), self._round.threshold, "signatures")
        return {name: signatures[name] for name in valid}

    def open(self, answers: Mapping[str, Unmasking]) -> Integers:
        """Remove the masks and return the sum of the survivors' inputs modulo 2^64, int64 (length,).

        `answers` are by survivor: t of them, and all where ``"reveal"`` has to recover a lost member, else RoundVoid.
        CryptoError if an answer is of another member or for other lists, or shares of a mask key do not give the
        advertised key. A wrong share of a self-mask seed goes unnoticed and makes the sum garbage.
        """
        survivors = self._closed()
        # no answer has both kinds of shares of a member: with both, its input would be open
        lost = sorted(self._shared - self._came)
        for name, answer in answers.items():
            right = answer.survivors.keys() == self._came and answer.lost.keys() == set(lost)
            if name not in self._came or not right:
                raise CryptoError(f"expected an answer for the signed list of survivors - in the answer of {name}")
        by_key = self._round.dropout == "share"
        enough(len(answers), self._round.threshold if by_key or not lost else len(survivors), "answers")
        shared = {name: answer.survivors for name, answer in answers.items()}
        of_seeds = self._opened(shared, survivors, slice(SHARE_BYTES))
        if self._round.removed(len(survivors)):
            self.surplus = self._opened(shared, survivors, slice(SHARE_BYTES, None))
        if by_key:
            rebuilt = self._opened({name: answer.lost for name, answer in answers.items()}, lost)
            keys = {v: self._keys_with(v, rebuilt[v], survivors) for v in lost}
        else:
            keys = {v: {u: answers[u].lost[v] for u in survivors} for v in lost}
            for name in {u for of in keys.values() for u, key in of.items() if len(key) != KEY_BYTES}:
                raise CryptoError(f"expected keys of {KEY_BYTES} bytes, got others - in the answer of {name}")
        # u > v subtracted what it shares with v, u < v added it; self-masks were added by all
        added = [keys[v][u] for v in lost for u in survivors if u > v]
        subtracted = [keys[v][u] for v in lost for u in survivors if u < v]
        subtracted += [mask_key(of_seeds[u], self._round.nonce) for u in survivors]
        total = self._sum.copy()
        add_masks(total, added, subtracted)
        return total.view(np.int64)

    def _opened(
        self, shares: Mapping[str, Mapping[str, bytes]], owners: Sequence[str], part: slice = slice(None)
    ) -> dict[str, bytes]:
        # the first t holders' shares rebuild the secrets of all owners
        holders = sorted(shares)[: self._round.threshold]
        held = [[shares[holder][owner][part] for owner in owners] for holder in holders]
        return dict(zip(owners, open_bytes(self._round.points(holders), held, SECRET_BYTES), strict=True))

    def _keys_with(self, lost: str, secret: bytes, survivors: Sequence[str]) -> dict[str, bytes]:
        # keys of the masks between the survivors and a lost member whose secret key was rebuilt
        own = X25519PrivateKey.from_private_bytes(secret)
        if own.public_key().public_bytes_raw() != self._advertised[lost].mask:
            raise CryptoError(
                f"expected shares of the mask key of {lost}, got some that give another; repeat the round"
            )
        publics = {u: self._advertised[u].mask for u in survivors}
        seeds = key_agreement.agree_with(own, publics, self._round.job_id, lost)
        return {u: mask_key(seeds[u], self._round.nonce) for u in survivors}

    def _closed(self) -> list[str]:
        if self._survivors is None:
            raise CryptoError("expected the list of survivors to be closed first")
        return self._survivors
