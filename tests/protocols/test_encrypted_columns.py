"""What an owner of columns lets the active party ask, and when."""

from __future__ import annotations

import numpy as np
import pytest

from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array
from treaty.protocols.encrypted_columns import SplitRequest, TreeOrder


def split_of(*sizes: int) -> SplitRequest:
    nodes = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    none = Array.of(np.zeros(0, np.int32))
    return SplitRequest(none, none, Array.of(np.append(nodes, np.int32(-1))))


@pytest.fixture
def order() -> TreeOrder:
    """Return the order of a tree of depth 2 with leaves of 3 rows or more, begun."""
    begun = TreeOrder("bank", 2, 3)
    begun.start()
    return begun


def test_a_tree_goes_from_sums_to_split_level_by_level(order):
    order.sums()
    order.split(split_of(12))
    order.sums()
    order.split(split_of(6, 6))
    order.end()
    order.start()
    order.sums()  # of a level where another party won
    order.sums()
    order.end()


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (["start"], "expected TreeEnd before the next TreeStart"),
        (["end", "end"], "expected TreeStart before TreeEnd"),
        (["end", "sums"], "2 SumsRequests in a tree at most"),
        (["sums", "sums", "sums"], "2 SumsRequests in a tree at most"),
        (["split"], "expected SumsRequest before SplitRequest"),
        (["sums", "split", "split"], "expected SumsRequest before SplitRequest, and one of it"),
        (["sums", "end", "split"], "expected SumsRequest before SplitRequest"),
        (["sums", "end", "start", "split"], "expected SumsRequest before SplitRequest"),
        (["sums", "small"], "expected nodes of 6 rows at least"),
        (["sums", "empty"], "expected nodes of 6 rows at least"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, list) else "",
)
def test_anything_else_is_refused_naming_the_asker(order, steps, expected):
    requests = {"split": split_of(6), "small": split_of(9, 5), "empty": split_of(9, 0, 9)}
    do = {"start": order.start, "end": order.end, "sums": order.sums}
    do |= {name: lambda request=request: order.split(request) for name, request in requests.items()}
    *before, last = steps
    for step in before:
        do[step]()
    with pytest.raises(PeerProtocolError, match=rf"{expected}.* - from bank"):
        do[last]()
