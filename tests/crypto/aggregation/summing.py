"""All members of secure sums in one place, without transport."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from treaty.crypto.sharing.aggregator import Aggregator
from treaty.crypto.sharing.key_agreement import EphemeralKeys
from treaty.crypto.sharing.secure_aggregation import Participant, Round

SIGNING = [Ed25519PrivateKey.generate() for _ in range(12)]
ROSTER = {f"p{i}": key.public_key().public_bytes_raw() for i, key in enumerate(SIGNING)}


def make_round(members, length=4, attempt=0, **options):
    roster = dict(list(ROSTER.items())[:members])
    terms = {"job_id": "job", "protocol": "sum", "round_id": 0, "roster": roster, "length": length, **options}
    return Round(**terms, attempt=attempt)


def signing_key(name):
    return SIGNING[int(name[1:])]


def advertise(this_round, absent=()):
    """New keys and their advertisements, by member."""
    keys = {u: EphemeralKeys("job", u, this_round.key_scope) for u in this_round.roster if u not in absent}
    return keys, {u: key.advertise(signing_key(u)) for u, key in keys.items()}


def agree_all(this_round, absent=()):
    keys, advertised = advertise(this_round, absent)
    return {u: key.agree(advertised, this_round.roster) for u, key in keys.items()}, advertised


class Sum:
    """One round up to the masked inputs; `seeds` and `advertised` of a job or, by default, made for it."""

    def __init__(self, this_round, values, absent=(), mute=(), lost=(), keys=None, surplus=None):
        self.round = this_round
        seeds, advertised = keys or agree_all(this_round, absent)
        secrets = surplus or {}
        self.members = {u: Participant(this_round, seeds[u], signing_key(u), secrets.get(u, ())) for u in seeds}
        self.aggregator = Aggregator(this_round, advertised)
        self.boxes = self.aggregator.pass_shares({u: p.share() for u, p in self.members.items() if u not in mute})
        self.inputs = {u: self.members[u].masked_input(values[u], self.boxes[u]) for u in self.boxes}
        for u, masked in self.inputs.items():
            if u not in lost:
                self.aggregator.add_input(u, masked)
        self.survivors = self.aggregator.survivors()

    def signatures(self, unsigned=()):
        signed = {u: self.members[u].sign_survivors(self.survivors) for u in self.survivors if u not in unsigned}
        return self.aggregator.pass_signatures(signed)

    def answers(self, unsigned=(), silent=()):
        signatures = self.signatures(unsigned)
        return {u: self.members[u].unmask(signatures) for u in signatures if u not in silent}
