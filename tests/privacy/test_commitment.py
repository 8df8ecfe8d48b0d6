from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.privacy.commitment import audit_tree, check_opening, commit
from treaty.trees.objectives import make_objective

OBJECTIVE = make_objective("logistic", np.array([0.0, 1.0]), None)
TREE = 3


def honest(n_rows=40, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n_rows).astype(float)
    grad, hess, _ = OBJECTIVE.gradients(rng.normal(size=(n_rows, 1)), y, None)
    return grad[0], hess[0]


def audit(grad, hess, *, sent=None, expected=None, commitment=None, nonce=None, tree=TREE):
    """Audit an opening of (grad, hess); what was sent and expected are the same unless given."""
    made, opening = commit(grad, hess, TREE)
    sent, expected = sent or (grad, hess), expected or (grad, hess)
    bounds = OBJECTIVE.grad_bound, OBJECTIVE.hess_bound
    return audit_tree(
        commitment or made, nonce or opening, tree, (grad, hess), decrypted=sent, expected=expected, bounds=bounds
    )


def crafted(n_rows=40, base=4):
    """Powers of a base in g, as large as the bound allows: the sum of a bin tells which of these rows are in it."""
    powers = base ** np.arange(int(np.log(OBJECTIVE.grad_bound) / np.log(base)))
    grad = np.zeros(n_rows, np.int64)
    grad[: len(powers)] = powers
    return grad, np.full(n_rows, OBJECTIVE.hess_bound, np.int64)


def test_an_honest_tree_has_no_findings():
    grad, hess = honest()
    assert audit(grad, hess) == []


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


def test_crafted_gradients_that_were_committed_differ_from_the_objectives():
    grad, hess = crafted()
    assert np.abs(grad).max() <= OBJECTIVE.grad_bound  # the bound alone would not find them
    findings = audit(grad, hess, expected=honest())
    assert len(findings) == 2
    assert all("differ from those of the labels and the trees before" in finding for finding in findings)
    assert "40 gradients" in findings[0]
    assert "hessians" in findings[1]


def test_crafted_gradients_beside_an_honest_commitment_differ_from_the_ciphertexts():
    grad, hess = honest()
    (finding,) = audit(grad, hess, sent=(crafted()[0], hess))
    assert "differ from those of the ciphertexts sent" in finding


def test_one_changed_row_is_found_and_named():
    grad, hess = honest()
    sent = grad.copy()
    sent[17] += 1
    assert audit(grad, hess, sent=(sent, hess)) == [
        "tree 3: 1 of 40 gradients differ from those of the ciphertexts sent, first at row 17"
    ]


@pytest.mark.parametrize("tree", [2, 4])
def test_the_commitment_of_another_tree_is_found(tree):
    grad, hess = honest()
    (finding,) = audit(grad, hess, tree=tree)
    assert "does not fit the commitment" in finding


@pytest.mark.parametrize("value", [OBJECTIVE.grad_bound + 1, -OBJECTIVE.grad_bound - 1, -(2**63)])
def test_gradients_beyond_the_bound_are_found(value):
    grad, hess = honest()
    grad[5] = value
    (finding,) = audit(grad, hess)
    assert finding == "tree 3: 1 of 40 gradients are beyond the public bound, first at row 5"


@pytest.mark.parametrize("value", [-1, OBJECTIVE.hess_bound + 1])
def test_hessians_beyond_the_bound_are_found(value):
    grad, hess = honest()
    hess[39] = value
    (finding,) = audit(grad, hess)
    assert finding == "tree 3: 1 of 40 hessians are beyond the public bound, first at row 39"


def test_gradients_at_the_bound_are_no_finding():
    grad, hess = honest()
    grad[:2] = OBJECTIVE.grad_bound, -OBJECTIVE.grad_bound
    hess[:2] = 0, OBJECTIVE.hess_bound
    assert audit(grad, hess) == []


def test_another_number_of_rows_is_found():
    grad, hess = honest()
    assert audit(grad, hess, sent=honest(39)) == [
        "tree 3: 40 gradients were opened, 39 follow from the ciphertexts sent",
        "tree 3: 40 hessians were opened, 39 follow from the ciphertexts sent",
    ]
