"""Keys of moving shares are their owners', although the active party carries them."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from systems.secureboost.test_sealed import SMALL_JOB
from systems.vertical.playing import play_training, role_input, tables_and_labels
from treaty.crypto.transfer.arithmetic import add, subtract
from treaty.errors import CryptoError, PeerProtocolError
from treaty.messaging.certificates import Signer, make_identity
from treaty.messaging.party import Party
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.secureboost import secureboost
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.secureboost.system import SYSTEM
from treaty.systems.system import PartySpec
from treaty.systems.vertical.messages import MovedShares
from treaty.systems.vertical.sealed import MovingKey
from treaty.systems.vertical.sealed_active import SealedPeer
from treaty.systems.vertical.training import fellow_owners

USE = "sealed sums"
IDENTITIES = {name: make_identity(name) for name in ("p0", "p1", "p2")}
PINNED = {name: identity.certificate for name, identity in IDENTITIES.items()}


def play_with_certificates():
    tables, y = tables_and_labels(parties=3)

    def passive(party: Party):
        vouching = Signer(IDENTITIES[party.name], PINNED)
        return secureboost.passive(role_input(party, tables, y, SMALL_JOB, vouching=vouching))

    return play_training(tables, y, replace={"p1": passive, "p2": passive}, **SMALL_JOB)


def test_passive_parties_move_shares_under_keys_that_they_signed():
    played = play_with_certificates()
    assert any(entry.step == MovedShares.__name__ for entry in played.transcripts["p0"].entries)


@pytest.mark.parametrize("forger", ["p0", "p1", None])
def test_an_active_party_that_swaps_keys_is_refused(monkeypatch, forger):
    """It gives p1 a key of its own as that of p2, signed by itself, by p1, or with what p2 signed another key with."""
    honest = SealedPeer.introduce

    def swapping(peer: SealedPeer):
        key = honest(peer)
        if peer.peer != "p2":
            return key
        own = X25519PrivateKey.generate().public_key().public_bytes_raw()
        if forger is None:
            return own, key[1]
        content = MovingKey(peer._party, Signer(), USE).content("p2", own)
        return own, Signer(IDENTITIES[forger], PINNED).vouch(content)

    monkeypatch.setattr(SealedPeer, "introduce", swapping)
    with pytest.raises(PeerProtocolError, match="expected a key signed by p2 with the key of its certificate") as error:
        play_with_certificates()
    assert error.value.peer == "p0"


def test_a_signature_is_for_one_job_owner_and_use():
    def key(job: str, name: str, use: str = USE):
        party = Party(name, job, "secureboost", _Channel(name), [])
        return MovingKey(party, Signer(IDENTITIES[name], PINNED), use)

    ours = key("job", "p1")
    ours.meet({"p2": key("job", "p2").signed()})
    for signed in (key("another job", "p2").signed(), ours.signed(), key("job", "p2", "sides at prediction").signed()):
        with pytest.raises(CryptoError, match="expected a key signed by p2"):
            ours.meet({"p2": signed})


def test_what_two_parties_move_to_each_other_has_two_masks():
    """The active party says who moves to whom: under one mask it would learn the difference of what both hold."""
    ours, theirs = (
        MovingKey(Party(name, "job", "secureboost", _Channel(name), []), Signer(), USE) for name in ("1", "2")
    )
    signed = {"1": ours.signed(), "2": theirs.signed()}
    ours.meet({"2": signed["2"]})
    theirs.meet({"1": signed["1"]})
    shares = np.zeros((4, 5, 2), np.uint64)
    moved = subtract(shares, ours.mask("2", shares.shape, sending=True))
    assert not (moved == subtract(shares, theirs.mask("1", shares.shape, sending=True))).any()
    moved = subtract(shares, ours.mask("2", shares.shape, sending=True))
    assert np.array_equal(add(moved, theirs.mask("1", shares.shape, sending=False)), shares)


def test_passive_parties_of_sealed_sums_need_each_others_certificates():
    places = {name: PartySpec() for name in ("p0", "p1", "p2")}
    sealed, open_ = SecureBoost(sums="sealed"), SecureBoost(sums="open")
    roles = SYSTEM.assign(places, "p0", sealed)
    assert SYSTEM.vouched(roles, sealed, "p1") == ["p1", "p2"]
    assert SYSTEM.vouched(roles, open_, "p1") == SYSTEM.vouched(roles, sealed, "p0") == []
    assert fellow_owners(roles, FedXGBoostSMM(reveal="argmax"), "p2") == ["p1", "p2"]
    assert fellow_owners(roles, SecureBoost().settled(BoostingOptions()), "p2") == ["p1", "p2"]
    two = SYSTEM.assign({name: places[name] for name in ("p0", "p1")}, "p0", sealed)
    assert SYSTEM.vouched(two, sealed, "p1") == []


class _Channel:
    def __init__(self, name: str) -> None:
        self.name = name
