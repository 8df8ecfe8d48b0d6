"""Commitments to a tree's gradients, and what an auditor finds when they are opened.

An active party that encrypts chosen numbers instead of gradients (powers of a base, say) reads from the bin sums which
rows are in a bin. No cipher prevents it: the sums are what it is meant to learn. So it commits to the gradients of
every tree when it sends them; on dispute an auditor, who may see labels and the key, has them opened and calls
`audit_tree`. Passive parties learn nothing from a commitment.

References
----------
Weng et al., "Privacy Leakage of Real-World Vertical Federated Learning", 2020 (arXiv 2011.09290): the reverse sum
attack, with its magic numbers.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np

from treaty.compute import Integers

NONCE_BYTES = 32
COMMITMENT_BYTES = 32
_LABEL = b"treaty gradients of a tree 1"  # separates this hash from all others


def commit(grad: Integers, hess: Integers, tree: int) -> tuple[bytes, bytes]:
    """Commit to a tree's grad and hess (n_sampled,) in the order of encryption; return commitment and nonce.

    The commitment is SHA-256 of nonce, the tree's number within its model, gradients and hessians. It goes to the
    passive parties, hides the gradients as long as the nonce is kept, and fits no others. The nonce, from the
    operating system's generator, is the opening, for the auditor alone.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    return _hash(nonce, grad, hess, tree), nonce


def check_opening(commitment: bytes, nonce: bytes, grad: Integers, hess: Integers, tree: int) -> bool:
    """Tell whether `nonce` opens `commitment` to these gradients; arguments as in `commit`."""
    return len(nonce) == NONCE_BYTES and grad.shape == hess.shape and _hash(nonce, grad, hess, tree) == commitment


Derivatives = tuple[Integers, Integers]
"""grad and hess of a tree's sampled rows, in fixed point and in the order they are encrypted."""


def audit_tree(
    commitment: bytes,
    nonce: bytes,
    tree: int,
    opened: Derivatives,
    *,
    decrypted: Derivatives,
    expected: Derivatives,
    bounds: tuple[int, int],
) -> list[str]:
    """Compare what was committed, what was sent and what should have been; return a sentence per finding.

    The active party opens `nonce`, `tree` and `opened` (see `commit`). `decrypted` is what the ciphertexts a passive
    party received decrypt to, by `SumsClient.decrypt_rows`. `expected` follows from the labels (the noisy ones of
    `label_rr`) and the margins of the trees so far. `bounds` are the job's public ones, grad_bound and hess_bound of
    the objective, times the factor of one-side sampling.
    """
    findings = []
    if not check_opening(commitment, nonce, *opened, tree):
        findings.append(f"tree {tree}: the opening does not fit the commitment the passive party received")
    for k, (name, least, most) in enumerate((("gradients", -bounds[0], bounds[0]), ("hessians", 0, bounds[1]))):
        own = opened[k]
        beyond = np.flatnonzero((own < least) | (own > most))
        if len(beyond):
            findings.append(
                f"tree {tree}: {len(beyond)} of {len(own)} {name} are beyond the public bound, first at row {beyond[0]}"
            )
        for whose, other in (("the ciphertexts sent", decrypted[k]), ("the labels and the trees before", expected[k])):
            if other.shape != own.shape:
                findings.append(f"tree {tree}: {len(own)} {name} were opened, {len(other)} follow from {whose}")
            elif len(rows := np.flatnonzero(own != other)):
                findings.append(
                    f"tree {tree}: {len(rows)} of {len(own)} {name} differ from those of {whose}, "
                    f"first at row {rows[0]}"
                )
    return findings


def _hash(nonce: bytes, grad: Integers, hess: Integers, tree: int) -> bytes:
    assert grad.dtype == hess.dtype == np.int64
    message = hashlib.sha256(_LABEL + nonce + tree.to_bytes(8, "little"))
    message.update(grad.astype("<i8", copy=False).tobytes())
    message.update(hess.astype("<i8", copy=False).tobytes())
    return message.digest()
