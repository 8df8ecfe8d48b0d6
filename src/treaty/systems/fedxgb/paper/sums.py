"""FedXGB's secure aggregation as published, for comparison (``mode="paper"``): it hides no user from its edge server.

Liu et al., "Boosting Privately", ICDCS 2020, algorithms SecBoost and SecFind. A user u makes one key pair for a tree,
shares its private key (zeta_uv is v's share) and a number r_u among its domain, and adds to every number of every
vector of the tree the very same mask::

    mask_u = r_u + sum over v of (zeta_uv - zeta_vu)        modulo 2^64

====================  ====================  ================================================  =======================
message               from -> to            content                                           protection
====================  ====================  ================================================  =======================
`MaskKey`,            user -> edge -> all   X25519 key of the tree, a tag for each peer       tags under the channels
`MaskKeys`
`SealedShares`,       user -> edge -> user  zeta_uv, and v's share of r_u                     AES-256-GCM under that
`PassedShares`                                                                                same key pair
`InputAndShares`      user -> edge          the vector under the mask; the user's shares of   mask_u
                                            everybody's r
`LostUsers`           edge -> users         whose vectors have not come                       TLS
`KeyShares`           users -> edge         shares of their private keys                      TLS
====================  ====================  ================================================  =======================

What an edge server learns, with no more than it is sent:

* differences of any two numbers of a vector, or of two vectors of a tree: a user's bin sums, since some are zero;
* r of everybody before it is settled whose vectors count, and the private key of any user that it calls lost, even one
  that is only slow: with the key it opens the boxes that it passed on, so that the user's mask follows and its vectors
  are plain;
* the sum of its domain, which here lies under no mask for the server. Cohorts may differ by one user.

The server sees every domain's sum. Both get the same sums as in safe mode, and the trees are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto.aggregation.key_agreement import agree, seal, unseal
from treaty.crypto.aggregation.masks import length_prefixed
from treaty.crypto.aggregation.round import Round, enough
from treaty.crypto.keystream import Keystream
from treaty.crypto.sharing.secret_sharing import open_bytes, share_bytes, share_length
from treaty.errors import CryptoError, PeerProtocolError
from treaty.messaging.messages import Array, M, Message, view
from treaty.systems.fedxgb.options import FedXGB, check_consent
from treaty.systems.fedxgb.sums.edge import DomainSums, SumSetup
from treaty.systems.fedxgb.sums.user import Call, Cohort, MaskKey, MaskKeys, UserSums
from treaty.systems.horizontal.masked_sums import PassedShares, SealedShares

KEY_BYTES, NUMBER_BYTES = 32, 8
KEY_SHARE = share_length(KEY_BYTES)
_MODULUS = 1 << 64


class InputAndShares(Message):
    """A vector uint64 (n,) under one mask, and the sender's shares of everybody's r."""

    values: Array
    shares: dict[str, bytes]


class LostUsers(Message):
    """Users whose vectors have not come."""

    users: list[str]


class KeyShares(Message):
    """The sender's shares of their private keys."""

    shares: dict[str, bytes]


def paper_mode(options: FedXGB) -> bool:
    """Tell whether secure aggregation is the published one; raise ConfigError when it is without `allow_insecure`."""
    check_consent(options)
    return options.mode == "paper"


@dataclass(frozen=True, slots=True)
class _Tree:
    """What a user has for a tree: its mask, and shares of all users' private keys and r, its own included."""

    mask: int
    of_keys: dict[str, bytes]
    of_numbers: dict[str, bytes]


class PaperUserSums(UserSums):
    """A user's part in its domain's sums as published; see `UserSums`."""

    _tree: _Tree | None = None

    def join(self, cohort: Cohort) -> None:
        """Take part in a tree with these users; see `UserSums.join`."""
        super().join(cohort)
        self._tree = None

    def give(self, call: Call, values: NDArray[np.int64], *others: type[M]) -> M | None:
        """Contribute an int64 vector to a sum; see `UserSums.give`."""
        party, edge = self._party, self._edge
        if self.absent("setup"):
            return None
        if self._tree is None:
            made = self._share(self._round(call, len(values)), *others)
            if not isinstance(made, _Tree):
                return made
            self._tree = made
        tree = self._tree
        if self.absent("shared"):
            return None
        masked = values.astype(np.uint64) + np.uint64(tree.mask)
        party.send(edge, InputAndShares(Array.of(masked), tree.of_numbers))
        gone = self.absent("masked")
        said: Message = party.receive(edge, LostUsers, *others, follow=True)
        if not isinstance(said, LostUsers):
            return said  # type: ignore[return-value]
        if not tree.of_keys.keys() >= set(said.users):
            raise PeerProtocolError(edge, f"expected users of the tree - at LostUsers from {edge}")
        if not gone:
            party.send(edge, KeyShares({name: tree.of_keys[name] for name in said.users}))
        return None

    def _share(self, this_round: Round, *others: type[M]) -> _Tree | M:
        """Share key and r with the cohort, once per tree; or return the message that came instead."""
        party, edge, me = self._party, self._edge, self._party.name
        keys = self._round_keys(this_round)
        party.send(edge, MaskKey(keys.public, keys.tags()))
        said: Message = party.receive(edge, MaskKeys, *others, follow=True)
        if not isinstance(said, MaskKeys):
            return said  # type: ignore[return-value]
        seeds = keys.agree(said.public, said.tags)
        own_number = Keystream().raw(NUMBER_BYTES)
        names = sorted([me, *seeds.mask])
        points, threshold = this_round.points(names), this_round.threshold
        of_key = dict(zip(names, share_bytes(seeds.mask_secret, points, threshold), strict=True))
        of_number = dict(zip(names, share_bytes(own_number, points, threshold), strict=True))
        party.send(edge, SealedShares({
            to: seal(seed, of_key[to] + of_number[to], bound(this_round, me, to)) for to, seed in seeds.mask.items()
        }))  # fmt: skip
        said = party.receive(edge, PassedShares, *others, follow=True)
        if not isinstance(said, PassedShares):
            return said  # type: ignore[return-value]
        boxes = {name: opened(seeds.mask[name], box, this_round, name, me) for name, box in said.sealed.items()}
        of_keys = {name: content[:KEY_SHARE] for name, content in boxes.items()}
        of_numbers = {name: content[KEY_SHARE:] for name, content in boxes.items()}
        between = sum(number(of_key[name]) - number(of_keys[name]) for name in of_keys)
        mask = (int.from_bytes(own_number, "little") + between) % _MODULUS
        return _Tree(mask, of_keys | {me: of_key[me]}, of_numbers | {me: of_number[me]})


class PaperDomainSums(DomainSums):
    """A domain's cohort and its sums as published; see `DomainSums`."""

    _setup: SumSetup | None  # once the tree's keys are shared
    _between: dict[str, dict[str, int]]  # lost user -> other user -> what does not cancel of their masks

    def _form(self, cohort: Collection[str]) -> None:
        """Go on with a cohort, which may differ from earlier ones by one user; see `DomainSums.choose`."""
        super()._form(cohort)
        self._setup, self._between = None, {}

    def _attempt(self, this_round: Round, call: Call) -> tuple[NDArray[np.int64], list[str]]:
        self.send(dict.fromkeys(self._running, call))
        setup = self._setup = self._setup or self._begin(this_round)
        total, shares = np.zeros(this_round.length, np.uint64), {}
        for name, message in self._gather(InputAndShares).items():
            try:
                total += view(message.values, np.uint64, total.shape, peer=name, what="InputAndShares.values")
            except PeerProtocolError as error:
                self._expel(error)
            else:
                shares[name] = message.shares
        enough(len(shares), this_round.least, "inputs")
        remaining = sorted(shares)
        lost = sorted(setup.sealed.keys() - shares.keys())
        asked = [name for name in lost if name not in self._between]
        if asked:
            self.send(dict.fromkeys(remaining, LostUsers(asked)))
            held = {name: message.shares for name, message in self._gather(KeyShares).items()}
            secrets = rebuilt(setup.round, held, asked, KEY_BYTES)
            job = self._party.job
            self._between |= {v: pairs_of(v, secrets[v], setup, job) for v in asked}
        numbers = rebuilt(setup.round, shares, remaining, NUMBER_BYTES)
        offset = sum(int.from_bytes(numbers[u], "little") for u in remaining)
        offset -= sum(self._between[v][u] for v in lost for u in remaining)
        return (total - np.uint64(offset % _MODULUS)).view(np.int64), remaining


def number(share: bytes) -> int:
    """Return zeta, the number of 64 bits that masks: the first bytes of a share of a private key."""
    return int.from_bytes(share[:NUMBER_BYTES], "little")


def bound(this_round: Round, sender: str, receiver: str) -> bytes:
    """Return what a box of shares is bound to: tree, sender, receiver."""
    return length_prefixed("treaty paper shares", this_round.key_scope, sender, receiver)


def opened(seed: bytes, box: bytes, this_round: Round, sender: str, receiver: str) -> bytes:
    """Open a box of shares, of the sender's private key and then of its r; CryptoError for any other content."""
    content = unseal(seed, box, bound(this_round, sender, receiver))
    if content is None or len(content) != KEY_SHARE + share_length(NUMBER_BYTES):
        raise CryptoError(f"expected what {sender} sealed for {receiver} and this tree, got something else")
    return content


def rebuilt(
    this_round: Round, held: Mapping[str, Mapping[str, bytes]], owners: Collection[str], length: int
) -> dict[str, bytes]:
    """Rebuild secrets of `length` bytes from shares by holder and owner; CryptoError if these are too few or wrong."""
    enough(len(held), this_round.threshold, "shares")
    holders = sorted(held)[: this_round.threshold]
    if not all(held[holder].keys() >= set(owners) for holder in holders):
        raise CryptoError("expected shares of the secrets of all who were asked for, got fewer - at an edge server")
    shares = [[held[holder][owner] for owner in owners] for holder in holders]
    return dict(zip(owners, open_bytes(this_round.points(holders), shares, length), strict=True))


def pairs_of(lost: str, secret: bytes, setup: SumSetup, job: str) -> dict[str, int]:
    """Return zeta_vu - zeta_uv of a lost user v and every other u, from v's private key and the boxes passed on.

    Raises CryptoError when it is not v's key, or a box is not what its sender sealed.
    """
    own = X25519PrivateKey.from_private_bytes(secret)
    if own.public_key().public_bytes_raw() != setup.keys[lost]:
        raise CryptoError(f"expected shares of the private key of {lost}, got some that give another")
    pairs = {}
    for name in setup.sealed.keys() - {lost}:
        seed = agree(own, setup.keys[name], job, *sorted([lost, name]))
        to, back = (
            opened(seed, setup.sealed[sender][receiver], setup.round, sender, receiver)
            for sender, receiver in ((lost, name), (name, lost))
        )
        pairs[name] = number(to) - number(back)
    return pairs
