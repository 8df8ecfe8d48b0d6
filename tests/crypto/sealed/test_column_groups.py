"""Which columns may split a node, on shares: as in the plain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.sealed.test_sealed import play
from treaty.crypto.transfer.stock import Transfers, open_transfers
from treaty.systems.vertical.sealed_candidates import ColumnGroups, allowed_columns


@pytest.fixture(scope="module")
def ends() -> tuple[Transfers, Transfers]:
    return play(open_transfers(0), open_transfers(1))


@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.tuples(st.integers(2, 5), st.integers(1, 4), st.integers(1, 5), st.integers(1, 6)),
)
def test_columns_of_a_group_with_all_that_were_used_are_allowed(ends: Any, seed: int, sizes: Any) -> None:
    (parties, nodes, groups, columns), rng = sizes, np.random.default_rng(seed)

    def bits(*shape: int) -> np.ndarray:
        return rng.integers(0, 2, shape, np.uint8)

    within, member = bits(parties, nodes, groups) | bits(parties, nodes, groups), bits(columns, groups)
    alone = bits(nodes, columns) & ~member.any(axis=1)
    masks = [bits(*of.shape) for of in (within, member, alone)]
    given = ColumnGroups(*(of ^ mask for of, mask in zip((within, member, alone), masks, strict=True)))
    # of groups of columns, one end gives those of own columns, and zeros for the others
    mine = rng.random(columns) < 0.5
    given = ColumnGroups(given.within, member * mine[:, None].astype(np.uint8), given.alone)
    other = ColumnGroups(masks[0], member * ~mine[:, None], masks[2])
    found = np.bitwise_xor(*play(*(allowed_columns(ends[k], of, k) for k, of in enumerate((given, other)))))
    expected = (within.all(axis=0) @ member.T.astype(np.int64) > 0) | alone.astype(bool)
    np.testing.assert_array_equal(found, expected)
