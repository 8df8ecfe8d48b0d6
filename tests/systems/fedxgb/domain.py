"""One domain of a crowd for tests: its users' sums, and an edge server that does as it likes, without a training."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from treaty.crypto.keystream import add_masks, mask_key, mask_nonce, pair_keys
from treaty.crypto.sharing.secure_aggregation import Participant
from treaty.crypto.sharing.shamir import open_bytes
from treaty.errors import TreatyError
from treaty.messaging.transcript import Transcript
from treaty.runs.threads import play
from treaty.systems.fedxgb import secfind as crowd_users
from treaty.systems.fedxgb.cohorts import Rules, UserStanding
from treaty.systems.fedxgb.domain import Credentials, certify
from treaty.systems.fedxgb.messages import Call, Cohort, Domain, TrainingEnd, UserOffer
from treaty.systems.fedxgb.paper import PaperUserSums
from treaty.systems.fedxgb.secfind import DomainSums, UserSums
from treaty.systems.horizontal.members import TranscriptDigest

LENGTH = 2000
VICTIM = "u03"


@dataclass
class RunRecord:
    """What an edge server has seen and opened, users' secrets, and what ended users."""

    users: list[str]
    transcript: Transcript = None
    domain: Any = None
    opened: list[np.ndarray] = field(default_factory=list)
    members: dict[str, list[Participant]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[str, TreatyError] = field(default_factory=dict)

    def received(self, kind):
        """All messages of a class, in order, with their senders."""
        return [
            (e.peer, e.message(kind))
            for e in self.transcript.entries
            if e.direction == "received" and e.step == kind.__name__
        ]

    def last_step(self, name):
        """The class of what came last from a user."""
        return [e.step for e in self.transcript.entries if e.direction == "received" and e.peer == name][-1]

    def of_sum(self, k, kind):
        """Each user's k-th message of a class."""
        by_user = defaultdict(list)
        for name, message in self.received(kind):
            by_user[name].append(message)
        return {name: messages[k] for name, messages in by_user.items() if len(messages) > k}

    def secret(self, shares):
        """The secret behind shares, by holder."""
        this_round = self.members[VICTIM][0]._round
        holders = sorted(shares)[: this_round.threshold]
        return open_bytes(this_round.points(holders), [[shares[holder]] for holder in holders], 32)[0]


def values(message):
    """Return a message's vector, uint64 (n,)."""
    return np.frombuffer(message.values.data, np.uint64)


def own_vector(name, number):
    """Return what a user adds to a sum, int64 (LENGTH,)."""
    return np.arange(LENGTH) % (10 + int(name[1:])) + number


def server_key(name, number, attempt=0):
    """The key of the mask that a user shares with the server."""
    nonce = mask_nonce("job", "fedxgb", number, attempt, f"server {TranscriptDigest(b'').digest.hex()}")
    return mask_key(server_seed(name), nonce)


def server_seed(name):
    return hashlib.sha256(name.encode()).digest()


def play_domain(sums=DomainSums, script=lambda domain: [domain.total(1, LENGTH)], count=6, leaves=None, paper=False):
    """Play a domain whose edge server runs `script` on sums of class `sums`; users' failures are noted."""
    played = RunRecord([f"u{k:02}" for k in range(count)])

    class Noted(Participant):
        def __init__(self, this_round, seeds, signing_key, surplus=()):
            super().__init__(this_round, seeds, signing_key, surplus)
            played.members[seeds.name].append(self)

    def member(party):
        credentials = Credentials(party, "authority", "user")
        party.send("edge", UserOffer(credentials.certified))
        kind = PaperUserSums if paper else UserSums
        mine = kind(party, "edge", credentials, server_seed(party.name), (leaves or {}).get(party.name))
        held, kinds = None, (Domain, Cohort, Call, TrainingEnd)
        try:
            while True:
                told, held = held or party.receive("edge", *kinds), None
                match told:
                    case Domain():
                        mine.meet(told)
                    case Cohort():
                        mine.join(told)
                    case Call():
                        held = mine.give(told, own_vector(party.name, told.number), *kinds)
                    case TrainingEnd():
                        return
        except TreatyError as error:
            played.failures[party.name] = error

    def serve(party):
        party.may_lose(played.users)
        Credentials(party, "authority", "edge")
        offers = party.gather(played.users, UserOffer)
        keys = {name: offer.keys for name, offer in offers.items()}
        played.domain = sums(party, keys, {name: UserStanding() for name in keys}, Rules(), 20.0)
        played.domain.choose(played.users)
        played.opened = script(played.domain)
        party.send_each(dict.fromkeys(played.domain.there, TrainingEnd()))

    roles = {name: "user" for name in played.users} | {"edge": "edge"}
    links = {name: ["authority", "edge"] for name in played.users}
    links |= {"edge": ["authority", *played.users], "authority": [*played.users, "edge"]}
    programs = dict.fromkeys(played.users, member) | {
        "edge": serve,
        "authority": lambda party: certify(party, roles, 60.0),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crowd_users, "Participant", Noted)
        run = play(programs, links, job="job", protocol="fedxgb", timeout=20.0, record_content=True)
    played.transcript = run.transcripts["edge"]
    return played


def without(masked, keys_added=(), keys_subtracted=()):
    """A masked vector less some masks."""
    out = masked.copy()
    add_masks(out, list(keys_subtracted), list(keys_added))
    return out


def pair_masks(member, peers):
    """Keys of the masks between a user and peers, those it added and those it subtracted."""
    return pair_keys(member._seeds.name, member._seeds.mask, peers, member._round.nonce)


def own_mask(member):
    return mask_key(member._self_seed, member._round.nonce)
