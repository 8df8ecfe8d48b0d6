import numpy as np
import pytest

from crypto.asking import answered, asked, begun
from treaty.crypto.payload import from_words
from treaty.crypto.sums.encrypted_sums import SumsBounds, make_client, make_server
from treaty.errors import ConfigError, CryptoError

BOUNDS = SumsBounds(4, 10, 10)
CIPHERS = pytest.mark.parametrize("cipher", ["ou", "paillier"])
CODES, OFFSETS = np.array([[0], [1], [1], [0]], np.uint8), np.array([0, 3], np.int32)


@CIPHERS
def test_both_ends_of_a_cipher_work_through_the_seam(cipher):
    client = make_client(cipher, BOUNDS, threads=1, insecure_test_key_bits=200)
    server = make_server(cipher, client.setup(), CODES, OFFSETS, threads=1, insecure_test_key_bits=200)
    client.accept_hint("shop", next(server.hint()), OFFSETS)
    grad, hess = np.array([1, -2, 3, -4]), np.array([5, 6, 7, 8])
    server.begin_tree(begun(client, grad, hess), np.arange(4, dtype=np.int32))
    query = asked(client, np.arange(4, dtype=np.int32), np.array([0, 4], np.int32))
    sums = client.open("shop", answered(server, query), np.array([[-2, 26, 4]]))
    assert sums.tolist() == [[[-3, 13, 2], [1, 13, 2], [0, 0, 0]]]


def test_unknown_cipher_is_a_configuration_error():
    client = make_client("ou", BOUNDS, threads=1, insecure_test_key_bits=200)
    with pytest.raises(ConfigError, match="expected encryption"):
        make_client("rot13", BOUNDS, threads=1)
    with pytest.raises(ConfigError, match="expected encryption"):
        make_server("rot13", client.setup(), CODES, OFFSETS, threads=1)


@pytest.mark.slow
@CIPHERS
def test_key_bits_reach_the_cipher(cipher):
    setup = make_client(cipher, BOUNDS, threads=1, key_bits=2048).setup()
    assert from_words(setup[0])[0].bit_length() == 2048
    assert from_words(make_client(cipher, BOUNDS, threads=1).setup()[0])[0].bit_length() == 3072
    with pytest.raises(CryptoError, match="expected a key of"):
        make_client(cipher, BOUNDS, threads=1, key_bits=1024)


@CIPHERS
def test_server_refuses_a_short_key_it_was_not_told_of(cipher):
    client = make_client(cipher, BOUNDS, threads=1, insecure_test_key_bits=512)  # the papers' size
    with pytest.raises(CryptoError, match="expected a key of"):
        make_server(cipher, client.setup(), CODES, OFFSETS, threads=1)


@CIPHERS
def test_set_up_of_the_other_cipher_is_refused(cipher):
    other = {"ou": "paillier", "paillier": "ou"}[cipher]
    setup = make_client(other, BOUNDS, threads=1, insecure_test_key_bits=200).setup()
    with pytest.raises(CryptoError, match="public key"):
        make_server(cipher, setup, CODES, OFFSETS, threads=1, insecure_test_key_bits=200)


@CIPHERS
def test_set_up_of_the_lattice_map_and_that_of_a_cipher_with_keys_are_told_apart(cipher):
    lattice = make_client("lattice", BOUNDS, threads=1)
    keyed = make_client(cipher, BOUNDS, threads=1, insecure_test_key_bits=200)
    assert (lattice.blind, keyed.blind) == (True, False)
    with pytest.raises(CryptoError, match="expected 1 arrays, got 2 - in the set-up"):
        make_server("lattice", keyed.setup(), CODES, OFFSETS, threads=1)
    with pytest.raises(CryptoError, match="expected 2 arrays, got 1 - in the set-up"):
        make_server(cipher, lattice.setup(), CODES, OFFSETS, threads=1)


def test_okamoto_uchiyama_set_up_has_its_form_on_the_wire():
    setup = make_client("ou", BOUNDS, threads=1, insecure_test_key_bits=200).setup()
    assert (setup[0].dtype, setup[0].shape) == (np.uint64, (3 + 8 + 8 + 128, 4))
    assert (setup[1].dtype, setup[1].tolist()[:3], len(setup[1])) == (np.int64, [4, 10, 10], 4)
