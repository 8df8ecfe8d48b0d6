"""Commitments to a tree's gradients, which an auditor has opened.

An active party that encrypts chosen numbers instead of gradients (powers of a base, say) reads from the bin sums which
rows are in a bin. No cipher prevents it: the sums are what it is meant to learn. So it commits to the gradients of
every tree when it sends them; on dispute an auditor, who may see labels and the key, has them opened
(`systems.vertical.audit.replay`). Passive parties learn nothing from a commitment.

References
----------
Weng et al., "Privacy Leakage of Real-World Vertical Federated Learning", 2020 (arXiv 2011.09290): the reverse sum
attack, with its magic numbers.
"""

from __future__ import annotations

import hashlib
import secrets

import numpy as np

from treaty.machine.arrays import Integers

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


def _hash(nonce: bytes, grad: Integers, hess: Integers, tree: int) -> bytes:
    assert grad.dtype == hess.dtype == np.int64
    message = hashlib.sha256(_LABEL + nonce + tree.to_bytes(8, "little"))
    message.update(grad.astype("<i8", copy=False).tobytes())
    message.update(hess.astype("<i8", copy=False).tobytes())
    return message.digest()
