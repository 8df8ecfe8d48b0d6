"""What an auditor who is shown key or secrets finds in recorded messages."""

from __future__ import annotations

import numpy as np
import pytest

from crypto.asking import asked, begun
from treaty.crypto.lattice.ring import pack, unpack
from treaty.crypto.lattice.store import HintStore
from treaty.crypto.sums.encrypted_sums import (
    DisclosedKey,
    DisclosedLattice,
    SumsBounds,
    disclosed_key,
    make_client,
    message_bytes,
)
from treaty.crypto.sums.lattice_sums import LatticeSumsClient
from treaty.errors import CryptoError

ROWS, BITS = 70, 400
BOUNDS = SumsBounds(ROWS, 1 << 10, 1 << 8)
CIPHERS = pytest.mark.parametrize("cipher", ["ou", "paillier"])


def gradients():
    rng = np.random.default_rng(13)
    grad, hess = rng.integers(-(1 << 10), 1 << 10, ROWS), rng.integers(0, 1 << 8, ROWS)
    grad[:2], hess[:2] = (-1 << 10, 1 << 10), (0, 1 << 8)
    return grad, hess


def opened(cipher, *, blind=False, change=None):
    """Send a tree (blind: two nodes) and open it with the key; `change` alters what is expected."""
    client = make_client(cipher, BOUNDS, threads=1, insecure_test_key_bits=BITS, blind=blind)
    grad, hess = gradients()
    payload = begun(client, grad, hess)
    if blind:
        payload = asked(client, np.arange(50, dtype=np.int32), np.array([0, 20, 50], np.int32))
    key = disclosed_key(cipher, client.setup(), client.secret_numbers, BITS)
    auditor = DisclosedKey(key, BOUNDS)
    if change is not None:
        change(grad, hess)
    auditor.begin_tree(grad, hess)
    return auditor.open(payload), payload, client


@CIPHERS
@pytest.mark.parametrize("blind", [False, True])
def test_ciphertexts_are_opened_by_the_numbers_of_the_key(cipher, blind):
    found, payload, client = opened(cipher, blind=blind)
    nodes = [range(20), range(20, 50)] if blind else [range(ROWS)]
    assert [np.flatnonzero(row).tolist() for row in found.held] == [list(node) for node in nodes]
    assert not found.wrong.any()
    assert found.faults == []
    estimated = len(nodes) * message_bytes(cipher, client.setup())  # n^2 may have a word less than twice those of n
    assert 0.9 * estimated <= payload[0].nbytes <= estimated


@CIPHERS
@pytest.mark.parametrize("which", ["grad", "hess"])
def test_one_other_number_is_found(cipher, which):
    def change(grad, hess):
        (grad if which == "grad" else hess)[5] += 1

    found, _, _ = opened(cipher, change=change)
    assert np.flatnonzero(found.wrong).tolist() == [5]


@CIPHERS
def test_keys_and_messages_of_others_are_refused(cipher):
    (_, payload, client), (_, others, other) = opened(cipher), opened(cipher)
    first, *rest = client.secret_numbers
    for numbers in (other.secret_numbers, (first + 2, *rest), rest):
        with pytest.raises(CryptoError, match="the numbers shown are not the private key of the public key"):
            disclosed_key(cipher, client.setup(), numbers, BITS)
    auditor = DisclosedKey(disclosed_key(cipher, client.setup(), client.secret_numbers, BITS), BOUNDS)
    auditor.begin_tree(*gradients())
    try:
        assert auditor.open(others).wrong.all()
    except CryptoError:  # no ciphertexts at all under this key
        pass
    with pytest.raises(CryptoError, match="expected ciphertexts of 70 rows"):
        auditor.open([payload[0][:-1]])
    with pytest.raises(CryptoError, match="expected ciphertexts of 70 rows"):
        auditor.open([np.full_like(payload[0], 255)])


def test_a_scale_of_messages_other_than_the_key_s_is_refused():
    """Else the owner of an Okamoto-Uchiyama key could show honest gradients times a constant as what it sent."""
    _, _, client = opened("ou")
    *numbers, a = client.secret_numbers
    with pytest.raises(CryptoError, match="the numbers shown are not the private key of the public key"):
        disclosed_key("ou", client.setup(), (*numbers, 2 * a), BITS)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_secrets_of_any_length_are_refused(place):
    """Tables are made of the orders: an owner could have the auditor run out of memory."""
    _, _, client = opened("ou")
    numbers = list(client.secret_numbers)
    for order in (0, -1, 1 << 20_000):
        numbers[place] = order
        with pytest.raises(CryptoError, match="the numbers shown are not the private key of the public key"):
            disclosed_key("ou", client.setup(), numbers, BITS)


def test_vectors_of_the_lattice_map_are_opened_by_their_secrets():
    client, kept = LatticeSumsClient(BOUNDS, HintStore(None)), []
    client.keep_secrets = kept.append
    client.settle(bytes(32))
    grad, hess = gradients()
    begun(client, grad, hess)
    query = asked(client, np.arange(50, dtype=np.int32), np.array([0, 20, 50], np.int32))
    assert sum(part.nbytes for part in query) == 2 * message_bytes("lattice", client.setup())
    auditor = DisclosedLattice(BOUNDS, bytes(32))
    auditor.begin_tree(grad, hess)
    found = auditor.open(query, kept[0])
    assert [np.flatnonzero(row).tolist() for row in found.held] == [list(range(20)), list(range(20, 50))]
    assert not found.wrong.any()
    assert found.faults == []
    shown = kept[0].copy()
    shown[1, 0] = 1 - abs(shown[1, 0])  # one coefficient of the secret
    assert auditor.open(query, shown).faults == ["the secrets shown do not belong to 1 of 2 vectors"]
    assert auditor.open(query, 2 * kept[0]).faults == ["the secrets shown do not belong to 2 of 2 vectors"]
    assert auditor.open(query, None).faults == ["no secrets are shown for 2 vectors"]
    parameters = client._parameters
    large = unpack(parameters, query[0], ROWS)
    large[0, 0, 3] = (large[0, 0, 3] + 60) % parameters.primes[0]  # an error that no flood covers
    assert np.argwhere(auditor.open([pack(parameters, large), query[1]], kept[0]).wrong).tolist() == [[0, 3]]
    grad[7] += 1
    auditor.begin_tree(grad, hess)
    assert np.argwhere(auditor.open(query, kept[0]).wrong).tolist() == [[0, 7]]
    elsewhere = DisclosedLattice(BOUNDS, bytes(31) + b"x")  # another seed of all parties
    elsewhere.begin_tree(grad, hess)
    assert elsewhere.open(query, kept[0]).faults == ["the secrets shown do not belong to 2 of 2 vectors"]
