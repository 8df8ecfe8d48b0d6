"""FedXGB as published, for comparison: ``mode="paper"`` hides no user from its edge server.

Liu et al., "Boosting Privately", ICDCS 2020.

**Sums** (SecBoost and SecFind). A user u makes one key pair for a tree, shares its private key (zeta_uv is v's share)
and a number r_u among its domain, and adds the same mask to every number of every vector of the tree::

    mask_u = r_u + sum over v of (zeta_uv - zeta_vu)        modulo 2^64

From its messages alone, an edge server learns

* differences of any two numbers of a vector, or of two vectors of a tree: a user's bin sums, since some are zero;
* r of all users before it is settled whose vectors count, and the private key of any user that it calls lost, even one
  that is only slow: with the key it opens the boxes that it passed on, finds the user's mask and reads its vectors;
* the sum of its domain, which the server does not mask here. Cohorts may differ by one user.

The server sees every domain's sum. Sums and trees are those of safe mode.

**Ways down a tree** (SecPred, ``expose="paper"``). Only thresholds are hidden. Rows are shared level by level, so that
nothing is agreed on before. A user that misses a level is lost for good, since its rows are then nowhere in the tree.
Users and edge servers learn the shape and the columns of all trees, and all leaf values. Edge servers also learn the
slot of every user's rows at each level; users that of their own rows, and thresholds with rows made up for that. At
most (edges - 1) // 2 edge servers may collude. A user that shares numbers other than bins, or inconsistent shares, ends
the training: an edge server cannot find out whose they were.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream, length_prefixed
from treaty.crypto.sharing.key_agreement import agree, seal, unseal
from treaty.crypto.sharing.secure_aggregation import Round, enough
from treaty.crypto.sharing.shamir import Words, check_numbers, open_bytes, share_bytes, share_length
from treaty.crypto.sharing.shamir_routing import prepare, route_shown, share_integers
from treaty.errors import CryptoError, PeerProtocolError
from treaty.messaging.exchanges import take_rows
from treaty.messaging.messages import Array, M, Message, leaks, view
from treaty.messaging.party import Party
from treaty.systems.fedxgb.domain import gather_sound, patience_of
from treaty.systems.fedxgb.messages import AbsenceNotice, Call, Cohort, MaskKey, MaskKeys, RowCounts, Values
from treaty.systems.fedxgb.options import FedXGB, check_consent
from treaty.systems.fedxgb.pieces import (
    ComparedShares,
    Layout,
    PieceForm,
    exchange_counts,
    gather_rest,
    pieces_of,
    send_shares,
)
from treaty.systems.fedxgb.secfind import Crowd, DomainSums, SumSetup, UserSums
from treaty.systems.fedxgb.shares import play_among, setting_of
from treaty.systems.horizontal.masked_sums import PassedShares, SealedShares
from treaty.systems.system import RoleInput
from treaty.trees.slots import SlotSplits

KEY_BYTES, NUMBER_BYTES = 32, 8
KEY_SHARE = share_length(KEY_BYTES)
_MODULUS = 1 << 64


@leaks(
    "the user's own vector, as its mask is the same in all numbers and shares of it come along: of each bin"
    " of each column in each node the sum of gradients, sum of hessians and number of rows, over all rows "
    "in the sum; before, numbers of rows below points that are tried, of this user alone",
    "exact",
)
class InputAndShares(Message):
    """A vector uint64 (n,) under one mask, and the sender's shares of all users' r."""

    values: Array
    shares: dict[str, bytes]


@leaks("which users' vectors are missing", "control")
class LostUsers(Message):
    """Users which users' vectors are missing."""

    users: list[str]


@leaks("private keys of lost users, and so their vectors", "exact")
class KeyShares(Message):
    """The sender's shares of their private keys."""

    shares: dict[str, bytes]


def paper_mode(options: FedXGB) -> bool:
    """Tell whether secure aggregation is the published one; raise ConfigError when it is without `allow_insecure`."""
    check_consent(options)
    return options.mode == "paper"


@dataclass(frozen=True, slots=True)
class _TreeMask:
    """What a user has for a tree: its mask, and shares of all users' private keys and r, its own included."""

    mask: int
    of_keys: dict[str, bytes]
    of_numbers: dict[str, bytes]


class PaperUserSums(UserSums):
    """A user's part in its domain's sums as published."""

    _tree: _TreeMask | None = None

    def join(self, cohort: Cohort) -> None:
        super().join(cohort)
        self._tree = None

    def give(self, call: Call, values: NDArray[np.int64], *others: type[M]) -> M | None:
        party, edge = self._party, self._edge
        if self.absent("setup"):
            return None
        if self._tree is None:
            made = self._share(self._round(call, len(values)), *others)
            if not isinstance(made, _TreeMask):
                return made
            self._tree = made
        tree = self._tree
        if self.absent("shared"):
            return None
        # one mask for all numbers, which is why differences of numbers are in the open
        masked = values.astype(np.uint64) + np.uint64(tree.mask)
        party.send(edge, InputAndShares(Array.of(masked), tree.of_numbers))
        gone = self.absent("masked")
        answer: Message = party.receive(edge, LostUsers, *others, follow=True)
        if not isinstance(answer, LostUsers):
            return answer  # type: ignore[return-value]
        if not tree.of_keys.keys() >= set(answer.users):
            raise PeerProtocolError(edge, "expected users of the tree", at="LostUsers")
        if not gone:
            party.send(edge, KeyShares({name: tree.of_keys[name] for name in answer.users}))
        return None

    def _share(self, this_round: Round, *others: type[M]) -> _TreeMask | M:
        """Share key and r with the cohort, once per tree; or return the message that came instead."""
        party, edge, me = self._party, self._edge, self._party.name
        keys = self._round_keys(this_round)
        party.send(edge, MaskKey(keys.public, keys.tags()))
        answer: Message = party.receive(edge, MaskKeys, *others, follow=True)
        if not isinstance(answer, MaskKeys):
            return answer  # type: ignore[return-value]
        seeds = keys.agree(answer.public, answer.tags)
        own_number = Keystream().raw(NUMBER_BYTES)
        names = sorted([me, *seeds.mask])
        points, threshold = this_round.points(names), this_round.threshold
        of_key = dict(zip(names, share_bytes(seeds.mask_secret, points, threshold), strict=True))
        of_number = dict(zip(names, share_bytes(own_number, points, threshold), strict=True))
        party.send(edge, SealedShares({
            to: seal(seed, of_key[to] + of_number[to], bound(this_round, me, to)) for to, seed in seeds.mask.items()
        }))  # fmt: skip
        answer = party.receive(edge, PassedShares, *others, follow=True)
        if not isinstance(answer, PassedShares):
            return answer  # type: ignore[return-value]
        boxes = {name: opened(seeds.mask[name], box, this_round, name, me) for name, box in answer.sealed.items()}
        of_keys = {name: content[:KEY_SHARE] for name, content in boxes.items()}
        of_numbers = {name: content[KEY_SHARE:] for name, content in boxes.items()}
        # what others add for this user comes off in the sum
        between = sum(number(of_key[name]) - number(of_keys[name]) for name in of_keys)
        mask = (int.from_bytes(own_number, "little") + between) % _MODULUS
        return _TreeMask(mask, of_keys | {me: of_key[me]}, of_numbers | {me: of_number[me]})


class PaperDomainSums(DomainSums):
    """A domain's cohort and its sums as published. Cohorts may differ from earlier ones by one user."""

    _setup: SumSetup | None  # once the tree's keys are shared
    _between: dict[str, dict[str, int]]  # lost user -> other user -> what does not cancel of their masks

    def _form(self, cohort: Collection[str]) -> None:
        super()._form(cohort)
        self._setup, self._between = None, {}

    def _attempt(self, this_round: Round, call: Call) -> tuple[NDArray[np.int64], list[str]]:
        if self._setup is None:
            self._setup = self._begin(this_round, call)
        else:
            self.send(dict.fromkeys(self._running, call))
        setup = self._setup
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
        # r of all users, as published: before it is settled whose vectors count
        numbers = rebuilt(setup.round, shares, remaining, NUMBER_BYTES)
        offset = sum(int.from_bytes(numbers[u], "little") for u in remaining)
        # zeta_uv - zeta_vu cancels among those here; of a lost user it stays in the masks of all
        offset -= sum(self._between[v][u] for v in lost for u in remaining)
        return (total - np.uint64(offset % _MODULUS)).view(np.int64), remaining


def number(share: bytes) -> int:
    # zeta, the number of 64 bits that masks: the first bytes of a share of a private key
    return int.from_bytes(share[:NUMBER_BYTES], "little")


def bound(this_round: Round, sender: str, receiver: str) -> bytes:
    # who seals shares for whom, and for which tree
    return length_prefixed("treaty paper shares", this_round.key_scope, sender, receiver)


def opened(seed: bytes, box: bytes, this_round: Round, sender: str, receiver: str) -> bytes:
    """Open a box of shares, of the sender's private key and then of its r; CryptoError for any other content."""
    content = unseal(seed, box, bound(this_round, sender, receiver))
    if content is None or len(content) != KEY_SHARE + share_length(NUMBER_BYTES):
        raise CryptoError(f"cannot decrypt {sender}'s share for {receiver}: wrong key, sender or tree")
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
        # with the lost user's key the edge server opens the boxes that it passed on
        seed = agree(own, setup.keys[name], job, *sorted([lost, name]))
        to, back = (
            opened(seed, setup.sealed[sender][receiver], setup.round, sender, receiver)
            for sender, receiver in ((lost, name), (name, lost))
        )
        pairs[name] = number(to) - number(back)
    return pairs


_AT_ONCE = 1 << 16  # comparisons: their random numbers take a kilobyte each


@leaks("columns of a level's splits", "aggregated", guard='expose="nothing"')
class ShownSplits(Message):
    """What users know of a level: int32 columns (trees, slots), -1 for none; bool whether missing values go left."""

    features: Array
    missing_left: Array


@leaks("shares of thresholds", "masked")
class HiddenThresholds(Message):
    """Thresholds of a level, the receiver's shares: uint64 (trees, slots, 2)."""

    thresholds: Array


@leaks("which of its own rows go left; with made-up rows, thresholds", "exact", guard='expose="nothing"')
class Sides(Message):
    """Whether some of the receiver's rows go left: bool (trees, rows)."""

    left: Array


class PaperModel:
    """The server's part: shares thresholds among the edge servers, and sends all else to all users."""

    def __init__(self, party: Party, crowd: Crowd, edges: Sequence[str], layout: Layout) -> None:
        self._party, self._crowd, self._edges, self._layout = party, crowd, edges, layout
        self._setting = setting_of(layout.shown_bits, len(edges))

    def split(self, chosen: Sequence[SlotSplits]) -> None:
        """Take all rows down a level, by the splits of each tree."""
        features = np.stack([of.features for of in chosen])
        n_bins = np.array(self._layout.n_bins)[features]
        left_bins = np.stack([of.left_bins for of in chosen])
        missing_left = np.take_along_axis(left_bins, n_bins[..., None], axis=2)[..., 0] & (features >= 0)
        self._crowd.broadcast(ShownSplits(Array.of(features), Array.of(missing_left)))
        thresholds = np.array([
            [self._layout.shown_threshold(int(f), left) for f, left in zip(of.features, of.left_bins, strict=True)]
            for of in chosen
        ])  # fmt: skip
        for edge, shares in zip(self._edges, share_integers(self._setting, thresholds), strict=True):
            self._party.send(edge, HiddenThresholds(Array.of(shares)))

    def finish(self, values: NDArray[np.float64]) -> None:
        self._crowd.broadcast(Values(Array.of(values)))


class SeenRows:
    """An edge server's part: where the rows of all domains' `users` are in the trees of a round.

    A user that is silent for the role's `patience`, or says that it has more than `most` rows, is lost.
    """

    def __init__(self, inputs: RoleInput[FedXGB], users: Sequence[str], layout: Layout, most: int) -> None:
        self.users, self._most, edges = list(users), most, inputs.roles.having("edge")
        self._party, self._server, self._patience = inputs.party, inputs.roles.active, patience_of(inputs)
        self._edges, self._setting = edges, setting_of(layout.shown_bits, len(edges))
        self._own = edges.index(inputs.party.name)
        self._n_slots = 1
        self._slots: dict[str, NDArray[np.intp]] = {}

    def start(self) -> None:
        """Put all rows at the root again."""
        self._n_slots, self._slots = 1, {}

    def route(self, hidden: HiddenThresholds) -> dict[str, Iterator[Message]]:
        """Take all rows down a level; return users' results, `Sides`. `users` are those still there.

        Raises PeerProtocolError or CryptoError when the server, another edge server or a user broke the protocol.
        """
        shape = (None, self._n_slots, 2)
        thresholds = view(hidden.thresholds, np.uint64, shape, peer=self._server, what="HiddenThresholds.thresholds")
        trees = len(thresholds)
        came = self._receive(trees)
        counts = {name: shares.shape[1] for name, shares in came.items()}
        kept, _ = exchange_counts(self._party, self._edges, RowCounts(counts))
        for name in set(self.users) - set(kept):
            self._party.leave_out(name)
        self.users = kept
        slots = [self._slots.get(name, np.zeros((trees, counts[name]), np.intp)) for name in kept]
        of_tree = np.arange(trees)[:, None] * self._n_slots
        left = self._compare(
            np.concatenate([np.empty((0, 2), np.uint64), *(came[name].reshape(-1, 2) for name in kept)]),
            thresholds.reshape(-1, 2),
            np.concatenate([np.empty(0, np.intp), *((own + of_tree).reshape(-1) for own in slots)]),
        )
        of_users = np.split(left, np.cumsum([own.size for own in slots])[:-1]) if kept else []
        sides = {name: of.reshape(own.shape) for name, of, own in zip(kept, of_users, slots, strict=True)}
        # children of slot s are 2 s, left, and 2 s + 1
        self._slots = {name: 2 * own + ~sides[name] for name, own in zip(kept, slots, strict=True)}
        self._n_slots *= 2
        return {name: pieces_of(Sides, of, slice(None)) for name, of in sides.items()}

    def _receive(self, trees: int) -> dict[str, Words]:
        found: dict[str, Words] = {}
        form = PieceForm((trees, None, 2), check_numbers, self._fits)
        waiting = self.users
        while waiting:
            sent = gather_sound(self._party, waiting, ComparedShares, AbsenceNotice, timeout=self._patience)
            first = {name: what for name, what in sent.items() if isinstance(what, ComparedShares)}
            came = gather_rest(self._party, ComparedShares, first, form, self._patience)
            found |= {name: np.concatenate(pieces, axis=1) for name, pieces in came.items()}
            # absent from sums; their rows still go down
            waiting = [name for name, what in sent.items() if isinstance(what, AbsenceNotice)]
        return found

    def _fits(self, name: str, n_rows: int) -> bool:
        return n_rows == self._slots[name].shape[1] if name in self._slots else n_rows <= self._most

    def _compare(self, values: Words, thresholds: Words, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        left = []
        for start in range(0, len(values), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            ready = play_among(self._party, self._edges, prepare(self._setting, self._own, len(values[part])))
            program = route_shown(self._setting, self._own, values[part], thresholds, slots[part], ready)
            left.append(play_among(self._party, self._edges, program))
        return np.concatenate([np.empty(0, np.bool_), *left])


class ComparedRows:
    """A user's part: shares the values that its rows' slots compare; `codes` are uint8 (n_rows, n_features)."""

    def __init__(self, party: Party, edges: Sequence[str], edge: str, layout: Layout, codes: NDArray[np.uint8]) -> None:
        self._party, self._edges, self._edge, self._layout, self._codes = party, edges, edge, layout, codes
        self._setting = setting_of(layout.shown_bits, len(edges))

    def compare(self, splits: ShownSplits, slots: NDArray[np.int64], n_slots: int) -> None:
        """Share what is compared in the slots that rows are in, int64 (trees, n_rows).

        Raises PeerProtocolError for a column that does not exist.
        """
        shape = (len(slots), n_slots)
        features = view(splits.features, np.int32, shape, peer=self._edge, what="ShownSplits.features")
        missing_left = view(splits.missing_left, np.bool_, shape, peer=self._edge, what="ShownSplits.missing_left")
        if np.any(features < -1) or np.any(features >= len(self._layout.n_bins)):
            raise PeerProtocolError(self._edge, "expected existing columns", at="ShownSplits")
        missing_left = missing_left & (features >= 0)
        # the bin that the slot's column compares, with missing values on the side where they go
        values = np.stack([
            self._layout.encode_shown(self._codes, np.maximum(of, 0)[own], missing[own])
            for of, missing, own in zip(features, missing_left, slots, strict=True)
        ])  # fmt: skip
        shares = share_integers(self._setting, values)
        send_shares(self._party, ComparedShares, dict(zip(self._edges, shares, strict=True)), axis=1)

    def left(self, first: Sides, trees: int) -> NDArray[np.bool_]:
        """Return which rows go left in each tree, bool (trees, n_rows); `first` is the piece that has come."""
        left = np.empty((trees, len(self._codes)), np.bool_)
        for rows, piece in take_rows(self._party, self._edge, len(self._codes), 8 * trees, Sides, first):
            shape = trees, rows.stop - rows.start
            left[:, rows] = view(piece.left, np.bool_, shape, peer=self._edge, what="Sides.left")
        return left
