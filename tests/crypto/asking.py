"""Both ends of bin sums asked in one piece, as small tables are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.payload import Payload
from treaty.crypto.sums.encrypted_sums import SumsClient, SumsServer


def begun(client: SumsClient, grad: NDArray[np.int64], hess: NDArray[np.int64]) -> Payload:
    """What starts a tree."""
    (payload,) = client.begin_tree(grad, hess)
    return payload


def asked(client: SumsClient, positions: NDArray[np.int32], starts: NDArray[np.int32]) -> Payload:
    """What asks for the sums of nodes."""
    (payload,) = client.query(positions, starts)
    return payload


def answered(server: SumsServer, query: Payload) -> Payload:
    server.add(query)
    return server.answer()
