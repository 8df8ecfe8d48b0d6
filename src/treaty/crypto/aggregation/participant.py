"""A member's part in one round of secure aggregation; see `secure_aggregation` for the steps and what they protect."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto.aggregation.key_agreement import PairSeeds, seal, unseal
from treaty.crypto.aggregation.masks import add_masks, length_prefixed, mask_key, pair_keys
from treaty.crypto.aggregation.round import Round, Unmasking, survival
from treaty.crypto.sharing.secret_sharing import share_bytes, share_length
from treaty.errors import CryptoError

SECRET_BYTES = 32  # length of the self-mask seed b_u and of the mask key s_u

_SHARE = share_length(SECRET_BYTES)


class Participant:
    """A member's part in one round: `share`, `masked_input`, `sign_survivors`, `unmask`, each once and in this order.

    A step that refuses its arguments ends the round for this participant: all later calls are refused, too. `seeds`
    come from keys made for ``this_round.key_scope``; the roster has the public key of `signing_key`. CryptoError with
    `dropout` "none", for seeds of other keys, or if fewer than t members advertised keys.
    """

    def __init__(self, this_round: Round, seeds: PairSeeds, signing_key: Ed25519PrivateKey) -> None:
        if this_round.dropout == "none":
            raise CryptoError('expected a round with dropout "share" or "reveal", got "none"; use pairwise_input')
        this_round.check_seeds(seeds)
        if len(seeds.mask) + 1 < this_round.threshold:
            raise CryptoError(f"expected keys of {this_round.threshold} members or more, got {len(seeds.mask) + 1}")
        self._round, self._seeds, self._signing_key = this_round, seeds, signing_key
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
        shares = share_bytes(self._self_seed, points, threshold)
        if self._round.dropout == "share":
            of_key = share_bytes(self._seeds.mask_secret, points, threshold)
            shares = [one + other for one, other in zip(shares, of_key, strict=True)]
        own, by_name = self._seeds.name, dict(zip(names, shares, strict=True))
        self._shares[own] = by_name.pop(own)
        self._next = "masked_input"
        return {to: seal(self._seeds.channel[to], by_name[to], self._bound(own, to)) for to in by_name}

    def masked_input(self, values: NDArray[np.int64], sealed: Mapping[str, bytes]) -> NDArray[np.uint64]:
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
        self._shares |= {peer: self._opened_share(peer, box) for peer, box in sealed.items()}
        self._seeds.used.use(self._round.nonce)
        masked = values.astype(np.uint64)
        add_masks(masked, [mask_key(self._self_seed, self._round.nonce), *added], subtracted)
        self._next = "sign_survivors"
        return masked

    def sign_survivors(self, survivors: Sequence[str]) -> bytes:
        """Return the signature on the list of survivors (step 3); see `take_survivors`."""
        return self._signing_key.sign(self.take_survivors(survivors))

    def take_survivors(self, survivors: Sequence[str]) -> bytes:
        """Return what a participant vouches for to the other survivors, who were told the same list (step 3).

        CryptoError if the list is not sorted and free of repetitions, has anybody outside U1, lacks this participant,
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
                f"expected {self._round.threshold} signatures or more on the survivors that {self._seeds.name} was "
                f"told, got {len(vouched)}; the aggregator may have told others something else"
            )
        lost = sorted(self._shares.keys() - set(self._survivors))
        if self._round.dropout == "share":
            of_lost = {name: self._shares[name][_SHARE:] for name in lost}
        else:
            of_lost = {name: mask_key(self._seeds.mask[name], self._round.nonce) for name in lost}
        return Unmasking({name: self._shares[name][:_SHARE] for name in self._survivors}, of_lost)

    def _begin(self, step: str) -> None:
        if self._next != step:
            raise CryptoError(
                f"expected {self._next or 'nothing more'} in this round, got {step} (once each, in order)"
            )
        self._next = None  # until the step has succeeded

    def _opened_share(self, sender: str, box: bytes) -> bytes:
        content = unseal(self._seeds.channel[sender], box, self._bound(sender, self._seeds.name))
        if content is None or len(content) != len(self._shares[self._seeds.name]):
            raise CryptoError(
                f"expected what {sender} sealed for {self._seeds.name} and this round, got something else"
            )
        return content

    def _bound(self, sender: str, receiver: str) -> bytes:
        return length_prefixed("treaty shares", self._session, sender, receiver)
