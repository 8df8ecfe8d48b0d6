"""Who is in a domain: keys that an authority certified, and which users are there, take part in a tree, or are lost.

The key authority certifies every party's signing key of a run, and all parties check that. It sees keys, no data, and
leaves when all are certified. All trust it to have checked who speaks: over a network, by the certificate pinned for
each name. It could certify a key of its own in any user's name; it is assumed not to collude with an edge server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto.keystream import length_prefixed, mask_nonce
from treaty.crypto.sharing.aggregator import Aggregator
from treaty.crypto.sharing.key_agreement import agree, verifies
from treaty.crypto.sharing.secure_aggregation import Round, RoundVoid, enough
from treaty.errors import PeerProtocolError, PeerTimeout
from treaty.machine.process import stay_on_one_core
from treaty.messaging.messages import M, Message
from treaty.messaging.party import Party
from treaty.systems.fedxgb.cohorts import Cohorts, Opened, Rules, UserStanding, select
from treaty.systems.fedxgb.messages import (
    AbsenceNotice,
    Call,
    CertifiedKeys,
    Cohort,
    Domain,
    KeyCertificate,
    KeyRequest,
    TrainingEnd,
    UserOffer,
)
from treaty.systems.fedxgb.roles import Leaves, Stage
from treaty.systems.horizontal.masked_sums import SumAggregator
from treaty.systems.horizontal.members import TranscriptDigest
from treaty.systems.system import RoleInput, Roles

logger = logging.getLogger(__name__)

# what is signed with a party's certified name and key: by the authority, and by the party
_CERTIFICATE, _CHANNEL = "treaty crowd certificate", "treaty crowd channel"
PATIENCE = 60.0  # seconds; a tenth of the job's timeout if that is less
MOST_SILENCES = 3  # in a row, after which a user is no longer waited for: all others would wait each time
_MOMENT = 0.05  # seconds given to such users once all others have answered
LATE_POLL = 0.5  # seconds between two looks whether users came late
FIRST_PATIENCE = 3  # times `patience` a user has for a step of a job's first sum
MOST_PATIENCE = 4  # times `patience` a sum waits for users lost one after another; others wait for the edge server


# ---------------------------------------------------------------- keys


def authority(inputs: RoleInput) -> None:
    """Certify all parties' keys; a party that does not ask, or asks for another role, gets no certificate.

    The party is connected with all others. Users have twice `patience` to ask, since they read their tables first.
    Without the others there is no job, so these have the party's `timeout`.
    """
    if not inputs.alone:
        stay_on_one_core()
    roles = {name: role for name, role in inputs.roles.of.items() if role != "authority"}
    certify(inputs.party, roles, 2 * patience_of(inputs), inputs.roles.active if inputs.options.adds_noise else "")


def authority_of(roles: Roles) -> str:
    (name,) = roles.having("authority")
    return name


def patience_of(inputs: RoleInput) -> float:
    """Return after how many seconds a user is dropped: for this tree if silent, for the job if it accepts no message.

    With users lost one after another, others wait up to ten times as long: their `timeout` must not be shorter.
    """
    return min(PATIENCE, inputs.party.timeout / 10) if inputs.patience is None else inputs.patience


def certify(party: Party, roles: Mapping[str, str], patience: float, until: str = "") -> None:
    """Certify parties' keys for their roles; wait `patience` seconds for users, the party's `timeout` for others.

    Users may come late if it is given a server `until` whose end of training to wait.
    """
    party.may_lose(roles)
    # a key for this run alone: certificates of another run are worth nothing here
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    # users may stay away; without the others there is no job
    users = [name for name, role in roles.items() if role == "user"]
    requests = gather_sound(party, roles.keys() - set(users), KeyRequest, timeout=party.timeout)
    requests |= gather_sound(party, users, KeyRequest, timeout=patience)
    reached: set[str] = set()
    while True:
        certified = {
            name: KeyCertificate(
                public, key.sign(length_prefixed(_CERTIFICATE, party.job, name, roles[name], request.key))
            )
            for name, request in requests.items()
            if request.role == roles[name]
        }
        reached |= set(party.send_each(certified, timeout=patience))
        late = [name for name in users if name not in reached and name not in requests]
        try:
            if not until or party.receive(until, TrainingEnd, timeout=LATE_POLL, follow=True):
                break
        except PeerTimeout:
            requests = gather_sound(party, late, KeyRequest, timeout=0.0)
    for name in roles:
        if name not in reached:
            logger.warning("%s does not certify %s, which did not ask as %s", party.name, name, roles[name])
            party.leave_out(name)


class Credentials:
    """A party's certified keys of one run: `signing_key`, and the public ones, `certified`.

    The constructor asks the authority, a peer, for a certificate as `role`.
    """

    def __init__(self, party: Party, authority: str, role: str) -> None:
        self._name, self._job = party.name, party.job
        self.signing_key, self._channel = Ed25519PrivateKey.generate(), X25519PrivateKey.generate()
        key, channel = self.signing_key.public_key().public_bytes_raw(), self._channel.public_key().public_bytes_raw()
        party.send(authority, KeyRequest(role, key))
        certificate = party.receive(authority, KeyCertificate)
        self._authority = certificate.authority
        signature = self.signing_key.sign(length_prefixed(_CHANNEL, self._job, self._name, channel))
        self.certified = CertifiedKeys(key, certificate.signature, channel, signature)
        self.check(self._name, role, self.certified, authority)

    def check(self, name: str, role: str, keys: CertifiedKeys, peer: str) -> None:
        """Raise PeerProtocolError about `peer`, which sent the keys, unless they are certified for name and role."""
        certificate = length_prefixed(_CERTIFICATE, self._job, name, role, keys.key)
        channel = length_prefixed(_CHANNEL, self._job, name, keys.channel)
        if not (
            verifies(self._authority, keys.certificate, certificate) and verifies(keys.key, keys.signature, channel)
        ):
            raise PeerProtocolError(
                peer, f"expected keys of {name} as {role} that the authority certified, got others - from {peer}"
            )

    def seed_with(self, name: str, keys: CertifiedKeys) -> bytes:
        """Return the 32 bytes shared with another party."""
        return agree(self._channel, keys.channel, self._job, *sorted([self._name, name]))


def gather_sound(party: Party, users: Iterable[str], *kinds: type[M], timeout: float) -> dict[str, M]:
    """Receive messages of these kinds from users, as many as come in time; leave out users who send anything else."""
    waiting = [name for name in users if name in party.peers]
    # one deadline for all of them
    until = time.monotonic() + timeout  # however many are left out meanwhile
    while True:
        try:
            return party.gather(waiting, *kinds, timeout=until - time.monotonic())
        except PeerProtocolError as error:
            if error.peer not in waiting:
                raise
            logger.warning("%s continues without %s: %s", party.name, error.peer, error)
            party.leave_out(error.peer)
            waiting.remove(error.peer)


def certified(party: Party, credentials: Credentials, offers: Mapping[str, UserOffer]) -> dict[str, CertifiedKeys]:
    """Return the keys that users offer; leave out users whose keys are not certified."""
    found = {}
    for name, offer in offers.items():
        try:
            credentials.check(name, "user", offer.keys, name)
            found[name] = offer.keys
        except PeerProtocolError as error:
            logger.warning("%s: %s", party.name, error)
            party.leave_out(name)
    return found


def send_each_or_leave_out(party: Party, messages: Mapping[str, Message], timeout: float) -> None:
    """Send to users; leave out users who are gone, or do not take their message in time."""
    reached = party.send_each(messages, timeout=timeout)
    for name in messages.keys() - set(reached):
        logger.warning("%s continues without %s, which has not taken a message", party.name, name)
        party.leave_out(name)


def server_mask(party: Party, number: int, attempt: int, transcript: bytes) -> bytes:
    """Return the nonce of the mask that a user and the server share for one attempt at a sum."""
    return mask_nonce(party.job, party.protocol, number, attempt, f"server {transcript.hex()}")


def sum_round(
    party: Party, call: Call, roster: Mapping[str, bytes], length: int, digest: TranscriptDigest, surplus_parts: int
) -> Round:
    """Return the round of secure aggregation that edge server and users of `roster` agree on for a call."""
    return Round(
        job_id=party.job, protocol=party.protocol, round_id=call.number, roster=roster, length=length,
        vector_id=digest.digest.hex(), surplus_parts=surplus_parts, attempt=call.attempt,
    )  # fmt: skip


# ---------------------------------------------------------------- edge server


class DomainCohort(SumAggregator):
    """A domain's users at their edge server: who is there, who takes part in the tree that grows, who is lost.

    `users` have their keys, already checked. A user silent for `patience` seconds counts as lost for the tree, and is
    asked again as the next begins; one that takes no message for so long is lost for good. `transcript` digests what
    users were sent, as they do; `there` are those not lost for good. `cohorts` are those of a training that resumes;
    `keep` is called with them before another sum is opened.
    """

    def __init__(
        self,
        party: Party,
        users: Mapping[str, CertifiedKeys],
        standings: dict[str, UserStanding],
        rules: Rules,
        patience: float,
        cohorts: Cohorts | None = None,
        keep: Callable[[Cohorts], None] = lambda _: None,
    ) -> None:
        self.transcript = TranscriptDigest(b"")
        self.there = list(users)
        self._party, self._users, self._standings = party, dict(users), standings
        self._rules, self._patience = rules, patience
        self._rng = np.random.default_rng()
        self._cohorts, self._keep = cohorts or Cohorts(rules, self._rng), keep
        self._cohort: list[str] = []  # as the tree began, or as it continued with fewer
        self._running: list[str] = sorted(self._cohorts.running)  # those of them still there
        self._silent: dict[str, int] = {}
        self._joined: dict[str, CertifiedKeys] = {}
        self._idle = False  # gave nothing to the last sum
        self._until = float("inf")  # monotonic time at which the sum under way is given up
        self.introduce(self.there)

    def add(self, users: Mapping[str, CertifiedKeys]) -> None:
        """Let users in who came late, whose keys are checked."""
        self._users |= users
        self.there += users
        self._standings |= {name: UserStanding() for name in users}
        self._joined |= users

    def joined(self) -> dict[str, CertifiedKeys]:
        """Return the users who have come since the last call."""
        joined, self._joined = self._joined, {}
        return joined

    def introduce(self, users: Collection[str]) -> None:
        """Send users the keys of all."""
        self.send(dict.fromkeys(users, Domain(self._users, self._rules.least_change)))

    def choose(self, answered: Sequence[str], *, everybody: bool = False) -> None:
        """Choose the cohort of a tree among the users who answered, `everybody` all of them, and send it to them."""
        # bounds and bins hold for rows in the first sum alone
        counted = self._cohorts.may_come(self.there)
        standings = {name: self._standings[name] for name in answered if name in counted}
        ordered = select(standings, self._running, self._rng)
        away = sorted(counted.intersection(self.there).difference(answered))
        before = self._cohorts.running
        cohort = sorted(ordered) if everybody else self._cohorts.begin(ordered, away)
        if cohort is None:
            self._skip_rest_of_tree(f"no permitted cohort among {len(ordered)} users")
        for name in cohort or ():
            self._standings[name].called += 1
        # a resumed training must know whom the last cohort had
        if before != self._cohorts.running:
            self.keep()
        self._form(cohort or ())

    def keep(self) -> None:
        """Keep the cohorts for a training that resumes, once there are any."""
        if self._cohorts.users is not None:
            self._keep(self._cohorts)

    def _form(self, cohort: Collection[str]) -> None:
        """Continue with a cohort, and send it to its users."""
        self._cohort, self._running = list(cohort), list(cohort)
        self.send(dict.fromkeys(self._cohort, Cohort(self._cohort)))

    def _counted(self, users: Sequence[str]) -> None:
        # whose rows are in the first sum: no other user takes part later
        if self._cohorts.users is None:
            self._cohorts.users = frozenset(users)
            self.keep()

    def _skip_rest_of_tree(self, why: str) -> None:
        # a warning once until the domain adds again: that may take hundreds of trees
        level = logging.INFO if self._idle else logging.WARNING
        logger.log(level, "%s adds nothing to the rest of a tree: %s", self._party.name, why)
        self._idle = True

    def _choose(self, this_round: Round, aggregator: Aggregator, came: Mapping[str, NDArray[np.uint64]]) -> None:
        """Leave users out until the sum of the others may be opened after the earlier sums."""
        kept = self._cohorts.keep(came) or []
        # left out for the rest of the tree, so that the next sum is over the same users or a permitted rest
        self._running = [name for name in self._running if name in kept]
        enough(len(kept), this_round.least, "inputs of a permitted cohort")
        for name in came.keys() - set(kept):
            aggregator.take_back(name, came[name])
        if self._cohorts.open(kept):
            self._keep(self._cohorts)  # before the sum is opened

    def send(self, messages: Mapping[str, Message]) -> None:
        """Send to users, some of whom may be gone."""
        reached = self._party.send_each(
            {name: messages[name] for name in messages if name in self.there}, timeout=self._patience
        )
        for name in messages:
            if name not in reached and name in self.there:
                self.lose_for_good(name)

    def only(self, users: Collection[str]) -> None:
        for name in [name for name in self.there if name not in users]:
            self.lose_for_good(name)

    def lose_for_good(self, name: str) -> None:
        """Continue without a user whose connection is lost, or that sent something invalid."""
        logger.warning("%s continues without %s", self._party.name, name)
        self._party.leave_out(name)
        self.there.remove(name)
        self._lose([name])

    def attending(self, kind: type[Message]) -> list[str]:
        """Return the users that send a message of this kind: they are there for a tree."""
        # users that were silent for long get a moment after all others, instead of full patience
        silent = [name for name in self.there if self._silent.get(name, 0) >= MOST_SILENCES]
        came = self.gather([name for name in self.there if name not in silent], kind)
        return [*came, *self.gather(silent, kind, _MOMENT)]

    def gather(self, names: Sequence[str], kind: type[M], patience: float | None = None) -> dict[str, M]:
        """Receive messages of a kind from users, as many as come in time; users who send others are lost for good."""
        until = time.monotonic() + (self._patience if patience is None else patience)  # however many are expelled
        while True:
            waiting = [name for name in names if name in self.there]
            try:
                came = self._party.gather(waiting, kind, AbsenceNotice, timeout=until - time.monotonic())
            except PeerProtocolError as error:
                self._expel(error)
            else:
                for name in names:
                    # an absence notice is an answer, too
                    self._silent[name] = 0 if name in came else self._silent.get(name, 0) + 1
                return {name: message for name, message in came.items() if isinstance(message, kind)}

    def _gather(self, kind: type[M]) -> dict[str, M]:
        # from the running cohort; absent users are lost for the tree
        if time.monotonic() > self._until:
            raise RoundVoid(f"the round is void: users were waited for {MOST_PATIENCE * self._patience:g} s in all")
        first = self._cohorts.users is None  # who misses it misses the job
        came = self.gather(self._running, kind, FIRST_PATIENCE * self._patience if first else self._patience)
        self._lose([name for name in self._running if name not in came])
        return came

    def _expel(self, error: PeerProtocolError) -> None:
        if error.peer not in self.there:
            raise error
        logger.warning("%s: %s", self._party.name, error)
        self.lose_for_good(error.peer)

    def _lose(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self._running:
                self._standings[name].lost += 1
        self._running = [name for name in self._running if name not in names]


# ---------------------------------------------------------------- user


class UserCohort:
    """A user's knowledge of its domain, and whether it takes part; `leaves` says when to drop out.

    `transcript` digests what the server sent to all users, on which masks depend. `awake` is False once the user has
    dropped out of a tree; it is set again when the next one begins.
    """

    def __init__(self, party: Party, edge: str, credentials: Credentials, leaves: Leaves | None) -> None:
        self.transcript = TranscriptDigest(b"")
        self.awake = True
        self._party, self._edge, self._credentials, self._leaves = party, edge, credentials, leaves
        self._keys: dict[str, bytes] = {}
        self._channels: dict[str, bytes] = {}
        self._agreed_to = Opened()
        self._cohort: list[str] = []

    def meet(self, domain: Domain) -> None:
        """Check the keys of the domain's users; PeerProtocolError if one is not certified, or its own is missing."""
        me = self._party.name
        if me not in domain.users or domain.users[me].key != self._credentials.certified.key:
            raise PeerProtocolError(self._edge, f"the domain's users lack {me}, or the key that it sent - at Domain")
        for name, offered in domain.users.items():
            if name != me:
                self._credentials.check(name, "user", offered, self._edge)
                self._channels[name] = self._credentials.seed_with(name, offered)
            self._keys[name] = offered.key
        self._agreed_to = Opened(domain.least_change)

    def join(self, cohort: Cohort) -> None:
        """Join the cohort of a tree; PeerProtocolError unless it has users of the domain alone, this user included."""
        if self._party.name not in cohort.users or not self._keys.keys() >= set(cohort.users):
            raise PeerProtocolError(
                self._edge, f"expected users of the domain, {self._party.name} among them", at="Cohort"
            )
        self._cohort = sorted(set(cohort.users))

    def permit(self, survivors: Sequence[str]) -> None:
        """Record whose sum is opened; PeerProtocolError if this sum and earlier ones would isolate a few users."""
        if not self._agreed_to.permits(survivors):
            raise PeerProtocolError(
                self._edge,
                "expected a cohort that differs by three users or more from earlier ones, or equals one, and does not "
                "isolate any user together with them - at Survivors",
            )
        self._agreed_to.add(survivors)

    def absent(self, stage: Stage) -> bool:
        """Drop out if `leaves` says so at this stage; return whether this user has dropped out."""
        if self.awake and self._leaves is not None and self._leaves(max(0, self._party.round - 1), stage):
            self.withdraw()
        return not self.awake

    def withdraw(self) -> None:
        """Take no further part in this tree."""
        self._party.send(self._edge, AbsenceNotice())
        self.awake = False
