"""Labels from the very numbers that hide gradients: ciphertexts of rows, residues of lattice vectors, masked words.

A cipher hides labels only if nothing that can be computed of its ciphertexts tells them. Here a logistic regression
learns on half of the rows, whose labels the attacker is given, and its scores of the other half are compared with
theirs. Of each ciphertext under Okamoto-Uchiyama and Paillier it has the bytes as they are sent, and the Jacobi symbol,
which everybody can compute and which half tells quadratic residues; of other ciphers the numbers. Baseline: chance.

That nothing is found proves nothing: the proof is the cipher's. The attack is there to find one that is broken.

References
----------
Goldwasser, Micali, "Probabilistic Encryption", Journal of Computer and System Sciences 1984: what no ciphertext may
tell, and the Jacobi symbol as what a careless one does.
"""

from __future__ import annotations

from collections.abc import Iterator

import gmpy2
import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from treaty.attacks.repeated_ciphertexts import KeyedCipher, keyed_cipher
from treaty.attacks.views import Finding, Truth, View, auc_error
from treaty.crypto.lattice.packed import unpack as unpacked_residues
from treaty.crypto.lattice.parameters import Parameters
from treaty.crypto.payload import Payload, SumsBounds
from treaty.crypto.sums.lattice_sums import sums_parameters
from treaty.machine.arrays import Flags, Floats, Int32s
from treaty.messaging.messages import unpack
from treaty.systems.vertical.encrypted import Setup
from treaty.systems.vertical.encrypted_columns import SumsPiece, SumsRequest, TreeStart
from treaty.systems.vertical.exact_sums import content_of
from treaty.systems.vertical.sealed.level import SealedSumsRequest

QUERIES: dict[str, type[SumsRequest] | type[SumsPiece]] = {
    kind.__name__: kind for kind in (SumsRequest, SealedSumsRequest, SumsPiece)
}
MOST_ROWS = 10_000
MOST_NUMBERS = 512
"""Numbers of each row that are looked at, from the first tree on."""


def attack(view: View, truth: Truth) -> Iterator[Finding]:
    """Learn labels from hidden gradients, at a passive party of encrypted sums."""
    if view.is_active or not view.steps(TreeStart):
        return
    rows, numbers = hidden_numbers(view)
    labels = truth.labels[rows]
    if len(rows) < 100 or not 10 <= labels.sum() <= len(labels) - 10:
        return
    score, error = learned(numbers, labels)
    yield Finding(
        attack="ciphertexts told apart (Goldwasser 1984)", party=view.party, target="labels", measure="AUC",
        score=score, baseline=0.5, error=error,
    )  # fmt: skip


def learned(numbers: Floats, labels: Flags) -> tuple[float, float]:
    """Return the AUC on half of the rows of what was learned on the others, and its standard error by chance."""
    order = np.random.default_rng(0).permutation(len(labels))[:MOST_ROWS]
    known, asked = order[::2], order[1::2]
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.01, max_iter=1000))
    scores = model.fit(numbers[known], labels[known]).decision_function(numbers[asked])
    return float(roc_auc_score(labels[asked], scores)), auc_error(labels[asked])


def hidden_numbers(view: View) -> tuple[Int32s, Floats]:
    """Return rows of the table and the numbers that hide their gradients, float64 (rows, numbers) from -1 to 1.

    Of trees with samples of rows the first alone is read; of long tables the rows that came in first messages.
    """
    assert view.inputs.data is not None
    of_first, made = np.empty(0, np.int32), list[Floats]()
    for rows, numbers in of_messages(view, view.inputs.data.table.n_rows):
        of_first = of_first if made else rows
        if np.array_equal(rows, of_first):
            made.append(numbers)
        if sum(part.shape[1] for part in made) >= MOST_NUMBERS:
            break
    return of_first, np.concatenate(made, axis=1)[:, :MOST_NUMBERS] if made else np.zeros((0, 0))


def of_messages(view: View, n_rows: int) -> Iterator[tuple[Int32s, Floats]]:
    """Yield what `hidden_numbers` returns, of each message that has some."""
    received = [entry for entry in view.recorded.transcript.entries if entry.direction == "received"]
    cipher, every = keyed_cipher(view, received), np.arange(n_rows, dtype=np.int32)
    setups = [content_of(entry, Setup) for entry in received if entry.step == Setup.__name__]
    parameters = None
    if setups and setups[0].encryption == "lattice":
        *bounds, nodes = unpack(setups[0].payload, view.party, "Setup")[0].tolist()
        parameters = sums_parameters(SumsBounds(*bounds), view.inputs.options.ciphers.sealed, nodes)
    for entry in received:
        match entry.step:
            case "TreeStart" if cipher is not None:  # of many rows the first ones
                start = content_of(entry, TreeStart)
                (ciphertexts,) = unpack(start.payload, entry.peer, entry.step)
                rows = every if start.rows is None else np.frombuffer(start.rows.data, np.int32)
                yield rows[: len(ciphertexts)], of_ciphertexts(ciphertexts, cipher)
            case "SumsRequest" | "SealedSumsRequest" | "SumsPiece" if cipher is None:
                payload = content_of(entry, QUERIES[entry.step]).payload
                numbers = of_vectors(unpack(payload, entry.peer, entry.step), parameters, n_rows)
                if len(numbers):
                    yield every[: len(numbers)], numbers


def of_ciphertexts(ciphertexts: np.ndarray[tuple[int, int], np.dtype[np.uint8]], cipher: KeyedCipher) -> Floats:
    """Return the bytes of ciphertexts (rows, bytes) as they are sent, and their Jacobi symbols."""
    symbols = [[gmpy2.jacobi(number, cipher.modulus)] for number in cipher.numbers(ciphertexts)]
    return np.concatenate([ciphertexts / 255.0, np.array(symbols, np.float64).reshape(-1, 1)], axis=1)


def of_vectors(payload: Payload, parameters: Parameters | None, n_rows: int) -> Floats:
    """Return the numbers of each row in the vectors of a query, a vector for each node; none in its later pieces."""
    hidden = payload[0]
    if parameters is not None:
        if len(payload) == 1:
            return np.zeros((0, 0))
        residues = unpacked_residues(parameters, hidden, n_rows)  # (vectors, primes, rows)
        return np.concatenate(residues / np.array(parameters.primes, np.float64)[:, None]).T
    if hidden.dtype == np.uint64:  # under masks: (nodes, words, rows)
        return np.concatenate(hidden / 2.0**64).T
    if hidden.ndim == 3 and hidden.shape[1] == n_rows:  # a ciphertext for each node: (nodes, rows, bytes)
        return np.concatenate(hidden / 255.0, axis=1)
    return np.zeros((0, 0))
