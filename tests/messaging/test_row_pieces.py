"""Values of rows in messages of bounded size: cut alike at both ends, and whole again."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treaty.errors import PeerProtocolError
from treaty.machine import arrays
from treaty.messaging.messages import Array, bits_of, put_together, row_pieces


@given(n_rows=st.integers(0, 10**6), bits=st.integers(0, 10**7), bound=st.integers(1, 10**4))
def test_pieces_are_the_rows_in_order_end_at_bytes_and_keep_to_the_bound(n_rows, bits, bound):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "PIECE_BYTES", bound)
        cut = row_pieces(n_rows, bits)[:1000]
    assert cut[0].start == 0
    assert all(before.stop == after.start for before, after in pairwise(cut))
    assert all((of.stop - of.start) % 8 == 0 for of in cut[:-1])
    assert all((of.stop - of.start) * bits <= 8 * max(bound, bits) for of in cut)
    if len(cut) < 1000:
        assert cut[-1].stop == n_rows


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), width=st.integers(1, 3))
def test_parts_are_put_together_and_let_go(lengths, width):
    whole = np.arange(sum(lengths) * width).reshape(-1, width)
    parts = np.split(whole, np.cumsum(lengths)[:-1])
    found = put_together(parts)
    np.testing.assert_array_equal(found, whole)
    assert parts == []


def test_packed_bits_of_another_number_of_rows_are_refused():
    bits = np.arange(11) % 3 == 0
    packed = Array.of(np.packbits(bits))
    np.testing.assert_array_equal(bits_of(packed, 11, "shop", "Answer.left"), bits)
    for rows in (8, 17):
        with pytest.raises(PeerProtocolError, match=r"at Answer.left from shop"):
            bits_of(packed, rows, "shop", "Answer.left")
