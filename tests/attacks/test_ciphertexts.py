"""Numbers that hide gradients tell no labels; the same attack finds them where nothing hides the gradients."""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest

from attacks.played import OU, cancer, digits, findings_of, views_of
from marks import slow
from treaty import FedXGBoostSMM, GBDTClassifier, SecureBoost
from treaty.attacks.ciphertexts import hidden_numbers, keyed_cipher, learned_from_ciphertexts
from treaty.crypto.lattice.ring import pack
from treaty.crypto.payload import SumsBounds, from_words, to_words
from treaty.crypto.sums.lattice_sums import sums_parameters
from treaty.messaging.messages import Array, encode
from treaty.messaging.transcript import Transcript
from treaty.systems.vertical.messages import Setup, SumsRequest, TreeStart

TREES = {"n_estimators": 2, "n_jobs": 1}
CHANCE = 5.0  # standard errors: keys are drawn anew, and one test in two million may be as far off
LATTICE = SecureBoost(encryption="lattice", sums="open", allow_exact_sums=True)


def changed(view, kind, change):
    """Return a view of which messages of a kind are changed."""
    transcript = Transcript(view.party, record_content=True)
    for entry in view.transcript.entries:
        content = entry.content
        if entry.step == kind.__name__:
            content = encode(change(entry.message(kind)))
        transcript.record(entry.direction, entry.peer, entry.step, entry.round, entry.nbytes, content)
    made = copy(view)
    made.transcript = transcript
    return made


@pytest.mark.parametrize(
    ("table", "protocol"),
    [
        (cancer, SecureBoost(**OU)),
        slow(cancer, SecureBoost(**{**OU, "encryption": "paillier"})),
        (cancer, LATTICE),
        slow(digits, LATTICE),
        slow(cancer, SecureBoost(sums="sealed")),
        (cancer, FedXGBoostSMM(backend="dealer", allow_exact_sums=True)),
        slow(
            cancer,
            FedXGBoostSMM(backend="ou", insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True),
        ),
    ],
    ids=["ou", "paillier", "lattice", "lattice-digits", "sealed", "dealer", "blind-ou"],
)
def test_what_hides_gradients_tells_no_labels(table, protocol):
    (found,) = findings_of(learned_from_ciphertexts, GBDTClassifier(protocol, **TREES), *table())
    assert found.party == "shop"
    assert found.baseline == 0.5
    assert abs(found.score - 0.5) < CHANCE * found.error


def test_labels_are_found_in_plaintexts_that_are_sent_in_place_of_ciphertexts():
    views, truth = views_of(GBDTClassifier(SecureBoost(**OU), **TREES), *cancer())
    view, node = views["shop"], views["bank"].recording.nodes["shop"][0]
    packing = keyed_cipher(view, view.transcript.entries).packing

    def plain(start):
        sent = np.zeros(start.payload[0].shape, np.uint8)
        words = packing.pack_rows(node.grad, node.hess).view(np.uint8)
        sent[:, : words.shape[1]] = words
        return TreeStart(start.rows, start.n_rows, start.columns, start.commitment, [Array.of(sent)])

    (found,) = learned_from_ciphertexts(changed(view, TreeStart, plain), truth)
    assert found.score > 0.99
    assert found.finds


def test_labels_are_found_by_the_jacobi_symbol_of_a_cipher_that_shows_it():
    views, truth = views_of(GBDTClassifier(SecureBoost(**OU), **TREES), *cancer())
    view = views["shop"]
    modulus = keyed_cipher(view, view.transcript.entries).modulus
    honest = hidden_numbers(view)[1]
    assert np.all(honest[:, 64] == 1.0)  # after the 64 bytes of a ciphertext: all are squares modulo q

    def negated(start):
        """Turn ciphertexts of class 1 into their negatives, whose symbol is -1, for q is 3 modulo 4."""
        sent = np.frombuffer(start.payload[0].data, np.uint64).reshape(len(truth.labels), -1)
        numbers = [modulus - x if y else x for x, y in zip(from_words(sent), truth.labels, strict=True)]
        other = to_words(numbers, sent.shape[1]).view(np.uint8)
        return TreeStart(start.rows, start.n_rows, start.columns, start.commitment, [Array.of(other)])

    (found,) = learned_from_ciphertexts(changed(view, TreeStart, negated), truth)
    assert found.score > 0.95
    assert found.finds


def test_labels_are_found_in_lattice_vectors_without_secrets():
    views, truth = views_of(GBDTClassifier(LATTICE, **TREES), *cancer())
    view, node = views["shop"], views["bank"].recording.nodes["shop"][0]
    (setup,) = [e.message(Setup) for e in view.transcript.entries if e.step == Setup.__name__]
    *bounds, nodes = np.frombuffer(setup.payload[0].data, np.int64).tolist()
    parameters = sums_parameters(SumsBounds(*bounds), nodes=nodes)

    def plain(request):
        vectors, n_primes = request.payload[0].shape[0], len(parameters.primes)
        shifted = (node.grad - node.grad.min()).astype(np.uint32)
        residues = np.broadcast_to(shifted, (vectors, n_primes, len(shifted))).copy()
        return SumsRequest([Array.of(pack(parameters, residues)), request.payload[1]], request.last)

    (found,) = learned_from_ciphertexts(changed(view, SumsRequest, plain), truth)
    assert found.score > 0.99
    assert found.finds


def test_tables_of_few_rows_are_not_tried():
    tables, y = cancer()
    few = {name: table[:60] for name, table in tables.items()}
    assert findings_of(learned_from_ciphertexts, GBDTClassifier(SecureBoost(**OU), **TREES), few, y[:60]) == []
