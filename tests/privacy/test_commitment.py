from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.privacy.exact_sums import check_opening, commit
from treaty.trees.objectives import make_objective

OBJECTIVE = make_objective("logistic", np.array([0.0, 1.0]), None)


def honest(n_rows=40, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n_rows).astype(float)
    grad, hess, _ = OBJECTIVE.gradients(rng.normal(size=(n_rows, 1)), y, None)
    return grad[0], hess[0]


@settings(deadline=None, max_examples=50)
@given(
    numbers=st.lists(st.integers(-(2**62), 2**62), max_size=20),
    tree=st.integers(0, 2**20),
    at=st.integers(0, 2**30),
    what=st.sampled_from(["grad", "hess", "tree", "nonce", "swapped", "shorter"]),
)
def test_a_commitment_opens_to_what_was_committed_and_nothing_else(numbers, tree, at, what):
    grad = np.array(numbers, np.int64)
    hess = grad[::-1] + 1
    commitment, nonce = commit(grad, hess, tree)
    assert check_opening(commitment, nonce, grad, hess, tree)
    other = {"nonce": nonce, "grad": grad.copy(), "hess": hess.copy(), "tree": tree}
    if what == "tree":
        other["tree"] += 1
    elif what == "nonce":
        other["nonce"] = bytes([nonce[0] ^ 1]) + nonce[1:]
    elif len(grad) == 0:
        return
    elif what == "swapped":
        other["grad"], other["hess"] = hess, grad
        if np.array_equal(grad, hess):
            return
    elif what == "shorter":
        other["grad"], other["hess"] = grad[1:], hess[1:]
    else:
        other[what][at % len(grad)] ^= 1
    assert not check_opening(commitment, **other)


def test_commitments_to_the_same_gradients_cannot_be_linked():
    grad, hess = honest()
    made = [commit(grad, hess, 0) for _ in range(50)]
    assert len({commitment for commitment, _ in made}) == len({nonce for _, nonce in made}) == 50
    assert {len(commitment) for commitment, _ in made} == {len(nonce) for _, nonce in made} == {32}


@pytest.mark.parametrize("nonce", [b"", b"short", bytes(33)], ids=["none", "short", "long"])
def test_a_nonce_of_another_length_opens_nothing(nonce):
    grad, hess = honest()
    commitment, _ = commit(grad, hess, 0)
    assert not check_opening(commitment, nonce, grad, hess, 0)


def test_a_longer_nonce_cannot_take_the_place_of_what_follows_it():
    grad, hess = np.abs(honest())
    commitment, nonce = commit(grad, hess, 5)
    longer = nonce + (5).to_bytes(8, "little") + grad[:1].tobytes()
    shifted = np.concatenate([grad[2:], hess])  # the same bytes, opened as a tree of one row less
    assert not check_opening(commitment, longer, shifted[:39], shifted[39:], int(grad[1]))


def test_gradients_of_uneven_length_open_nothing():
    grad, hess = honest()
    commitment, nonce = commit(grad, hess, 0)
    assert not check_opening(commitment, nonce, grad, hess[:-1], 0)
