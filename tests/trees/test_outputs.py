"""The scan of multi-output trees against the rule word for word."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.trees.outputs import join_outputs, of_output
from treaty.trees.splits import SplitRules, best_of, scan


def _term(sums, rules):
    """What all outputs of a node add to a gain, in the order of outputs."""
    total = 0.0
    for grad, hess in zip(sums[:-1:2] * rules.grad_unit, sums[1:-1:2] * rules.hess_unit, strict=True):
        whole = hess + rules.reg_lambda
        if hess > 0.0 and hess >= rules.min_child_weight:
            shrunk = max(abs(grad) - rules.reg_alpha, 0.0)
            limit = rules.step
            total += shrunk**2 / whole if shrunk <= limit * whole else limit * (2 * shrunk - limit * whole)
    return total


def _candidates(slots, total, is_categorical, rules):
    """Sets of bins that go left, the missing bin last, in the order in which ties are broken."""
    bins = len(slots) - 1
    if is_categorical and bins >= rules.onehot_below:
        known = [code for code in range(bins + 1) if slots[code, -1] >= rules.fewest_of_category]
        for at in range(0, len(total) - 1, 2):
            whole = total[at + 1] + 2 * rules.reg_lambda / rules.hess_unit
            above = {code for code in known if whole * slots[code, at] > float(total[at]) * slots[code, at + 1]}
            yield above
            yield set(known) - above
        return
    parts = [{code} if is_categorical else set(range(code + 1)) for code in range(bins)]
    yield from parts
    if slots[bins, -1]:
        yield from ({*part, bins} for part in reversed(parts))


def _admissible(slots_of_columns, total, categorical, rules):
    """Yield gain, feature, bins going left and their sums of every admissible split."""
    for feature, slots in enumerate(slots_of_columns):
        for left in _candidates(slots, total, categorical[feature], rules):
            sums = slots[sorted(left)].sum(axis=0)
            right = total - sums
            gain = _term(sums, rules) + _term(right, rules) - _term(total, rules)
            if min(sums[-1], right[-1]) >= rules.min_child_samples and gain > rules.threshold:
                yield gain, feature, left, sums


@settings(deadline=None, max_examples=60)
@given(
    n_outputs=st.integers(2, 5), n_rows=st.integers(2, 60), n_bins=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    missing=st.sampled_from([0.0, 0.4]), seed=st.integers(0, 2**32),
    options=st.fixed_dictionaries({
        "min_child_weight": st.sampled_from([0.0, 1.0, 4.0]), "min_child_samples": st.sampled_from([1, 5]),
        "reg_alpha": st.sampled_from([0.0, 0.3]), "max_delta_step": st.sampled_from([0.0, 0.4]),
        "min_split_loss": st.sampled_from([0.0, 0.5]), "onehot_below": st.sampled_from([0, 5]),
    }),
)  # fmt: skip
def test_the_best_split_is_that_of_the_rule(n_outputs, n_rows, n_bins, missing, seed, options):
    rng = np.random.default_rng(seed)
    rules = SplitRules(grad_unit=2.0**-8, hess_unit=2.0**-8, **options)
    codes = np.stack([np.where(rng.random(n_rows) < missing, bins, rng.integers(0, bins, n_rows)) for bins in n_bins])
    grad, hess = rng.integers(-256, 257, (n_outputs, n_rows)), rng.integers(0, 129, (n_outputs, n_rows))
    numbers = np.concatenate([np.stack([grad, hess], axis=1).reshape(-1, n_rows), np.ones((1, n_rows), int)]).T
    columns = []
    for of_column, bins in zip(codes, n_bins, strict=True):
        slots = np.zeros((bins + 1, numbers.shape[1]), np.int64)
        np.add.at(slots, of_column, numbers)
        columns.append(slots)
    offsets = np.cumsum([0, *(len(of) for of in columns)]).astype(np.int32)
    sums, totals = np.concatenate(columns)[None], numbers.sum(axis=0)[None]
    categorical = rng.random(len(n_bins)) < 0.5
    found = scan(sums, totals, np.arange(len(n_bins), dtype=np.int32), offsets, categorical, rules)
    splits = list(_admissible(columns, totals[0], categorical, rules))
    best = max((gain for gain, *_ in splits), default=0.0)
    if best > rules.threshold + 1e-9:
        assert found.gain[0] == pytest.approx(best, rel=1e-9)
        going = set(np.flatnonzero(found.left_bins[0]).tolist())
        # rounding decides between equal gains
        fitting = [
            sums for gain, feature, left, sums in splits
            if gain >= best - 1e-9 * (1 + best) and feature == found.feature[0] and left == going
        ]  # fmt: skip
        np.testing.assert_array_equal(fitting[0], found.left_totals[0])
    elif not splits:
        assert found.feature[0] == -1
        assert found.gain[0] == 0.0
    # each column alone, as owners of columns are scanned, gives the split of all together
    of_owners = [
        scan(
            sums[:, a:b], totals, np.zeros(1, np.int32), np.array([0, b - a], np.int32), categorical[k : k + 1], rules,
            source=k,
        )
        for k, (a, b) in enumerate(pairwise(offsets))
    ]  # fmt: skip
    together = best_of(of_owners, totals, rules)
    assert together.gain[0] == found.gain[0]
    if found.feature[0] >= 0:
        assert together.source[0] == found.feature[0]
        np.testing.assert_array_equal(together.left_totals, found.left_totals)


def test_sums_of_outputs_are_joined_and_taken_apart():
    rng = np.random.default_rng(0)
    outputs = [rng.integers(0, 9, (2, 4, 3)) for _ in range(3)]
    for other in outputs[1:]:
        other[..., 2] = outputs[0][..., 2]
    joined = join_outputs(outputs)
    assert joined.shape == (2, 4, 7)
    for k, of in enumerate(outputs):
        np.testing.assert_array_equal(of_output(joined, k), of)
