"""The purity guard: which nodes' classes are mixed about as in the whole table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.privacy.leaks import mixed_nodes


def marked(y: list[int], n_classes: int, limit: float, nodes: list[list[int]]) -> list[bool]:
    rows = np.array([row for node in nodes for row in node], np.int32)
    starts = np.cumsum([0, *(len(node) for node in nodes)])
    return mixed_nodes(np.array(y, np.float64), n_classes, limit)(rows, starts).tolist()


def test_the_class_whose_share_differs_most_decides():
    y = [0] * 4 + [1] * 4 + [2] * 4
    without_one = [0, 1, 4, 5, 8]  # shares 0.4, 0.4 and 0.2: away from a third by 0.07, 0.07 and 0.13
    only_two = [0, 1, 2, 4, 5, 6]  # 0.5, 0.5 and 0: by 0.17, 0.17 and 0.33
    assert marked(y, 3, 0.2, [without_one, only_two, list(range(12)), []]) == [True, False, True, True]
    assert marked(y, 3, 0.1, [without_one, only_two]) == [False, False]


@settings(max_examples=60)
@given(data=st.data(), n_classes=st.integers(2, 5))
def test_no_class_of_a_node_that_may_be_shown_is_further_from_its_share_of_the_table(data, n_classes):
    y = data.draw(st.lists(st.integers(0, n_classes - 1), min_size=1, max_size=40))
    limit = data.draw(st.floats(0.01, 0.99))
    nodes = data.draw(st.lists(st.lists(st.integers(0, len(y) - 1), max_size=12), max_size=4))
    prior = [y.count(k) / len(y) for k in range(n_classes)]
    for node, mixed in zip(nodes, marked(y, n_classes, limit, nodes), strict=True):
        labels = [y[row] for row in node]
        away = [abs(labels.count(k) / len(node) - prior[k]) for k in range(n_classes)] if node else [0.0]
        assert mixed == (max(away) <= limit) or max(away) == pytest.approx(limit)
