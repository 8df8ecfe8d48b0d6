import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.errors import CryptoError
from treaty.systems.fedxgb.pieces import Layout

FEATURES = st.lists(
    st.tuples(st.one_of(st.integers(0, 6), st.sampled_from([31, 32, 33, 254, 255])), st.booleans(), st.booleans()),
    min_size=1,
    max_size=5,
)


def layout_of(features):
    n_bins, categorical, may_miss = zip(*features, strict=True)
    return Layout(n_bins=n_bins, categorical=categorical, may_miss=may_miss)


def every_code(layout, feature):
    """Rows that take every code of one feature and the lowest of the others."""
    codes = np.arange(layout.n_bins[feature] + layout.may_miss[feature], dtype=np.uint8)
    rows = np.zeros((len(codes), len(layout.n_bins)), np.uint8)
    rows[:, feature] = codes
    return rows


def numeric_splits(bins):
    """Every split of a numeric feature: bool (2 (bins + 1), 256)."""
    splits = np.zeros((2, bins + 1, 256), bool)
    for below in range(bins + 1):
        splits[:, below, :below] = True
    splits[1, :, bins] = True
    return splits.reshape(-1, 256)


@settings(deadline=None)
@given(FEATURES.filter(lambda features: all(bins + miss for bins, _, miss in features)), st.data())
def test_the_sign_is_the_side_of_every_row_and_split(features, data):
    layout = layout_of(features)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    highest = [bins - 1 + miss for bins, _, miss in features]
    codes = np.stack([rng.integers(0, top + 1, 50) for top in highest], axis=1).astype(np.uint8)
    z = layout.encode_rows(codes)
    assert z.shape == (50, layout.columns)
    for f, (bins, categorical, _) in enumerate(features):
        left = rng.random(256) < rng.random()
        if not categorical:
            left[:bins] = np.arange(bins) < rng.integers(0, bins + 1)
        weights, threshold = layout.encode_split(f, left)
        value = z @ weights - threshold
        assert np.array_equal(value < 0, left[codes[:, f]])
        assert (np.abs(value) < 1 << (layout.bits - 1)).all()
        assert np.abs(weights).max(initial=0) <= 255


@pytest.mark.parametrize("may_miss", [False, True], ids=["never missing", "may miss"])
@pytest.mark.parametrize("bins", [1, 2, 3, 32, 255])
def test_every_numeric_split_is_right_for_every_code(bins, may_miss):
    layout = layout_of([(3, True, True), (bins, False, may_miss)])
    rows = every_code(layout, 1)
    z = layout.encode_rows(rows)
    values = []
    for left in numeric_splits(bins):
        weights, threshold = layout.encode_split(1, left)
        values.append(z @ weights - threshold)
        assert np.array_equal(values[-1] < 0, left[rows[:, 1]])
        shown = layout.encode_shown(rows, np.ones(len(rows), int), np.full(len(rows), left[bins]))
        shown -= layout.shown_threshold(1, left)
        assert np.array_equal(shown < 0, left[rows[:, 1]])
        assert np.abs(shown).max() < 1 << (layout.shown_bits - 1)
    assert 2 * np.abs(values).max() >= 1 << (layout.bits - 1) or layout.bits == 2  # no bit too many


def test_every_categorical_split_is_right_for_every_code():
    layout = layout_of([(4, False, False), (4, True, True)])
    rows = every_code(layout, 1)
    z = layout.encode_rows(rows)
    for subset in range(32):
        left = np.zeros(256, bool)
        left[:5] = subset >> np.arange(5) & 1
        weights, threshold = layout.encode_split(1, left)
        assert np.array_equal(z @ weights - threshold < 0, left[:5])


def test_bits_are_those_of_bin_codes():
    assert [layout_of([(bins, False, True)]).bits for bins in (1, 2, 3, 4, 5, 32, 33, 255)] == [2, 2, 3, 3, 4, 6, 7, 9]
    assert layout_of([(255, True, True)]).bits == 2
    assert layout_of([(0, False, True)]).bits == 2


def test_a_dummy_sends_all_rows_right():
    layout = layout_of([(4, False, True), (3, True, False)])
    weights, threshold = layout.encode_split(-1, np.ones(256, bool))
    assert not weights.any()
    assert threshold == 0
    assert layout.shown_threshold(-1, np.ones(256, bool)) == 0


def test_columns_that_cannot_be_missing_are_saved():
    assert layout_of([(9, False, False), (9, False, True), (9, True, False), (9, True, True)]).columns == 1 + 2 + 9 + 10


def test_no_rows_are_encoded_as_no_rows():
    assert layout_of([(9, False, True)]).encode_rows(np.zeros((0, 1), np.uint8)).shape == (0, 2)


def test_codes_out_of_range_are_refused():
    layout = layout_of([(4, False, True), (4, True, False)])
    for codes, at in (([5, 0], 0), ([0, 4], 1), ([255, 0], 0)):
        with pytest.raises(CryptoError, match=f"at feature {at}"):
            layout.encode_rows(np.array([[0, 0], codes], np.uint8))
    with pytest.raises(CryptoError, match="at feature 0"):
        layout.encode_shown(np.array([[5, 0]], np.uint8), np.array([0]), np.array([False]))
    with pytest.raises(CryptoError, match="2 features"):
        layout.encode_rows(np.zeros((3, 3), np.uint8))


def test_splits_of_no_such_kind_are_refused():
    layout = layout_of([(4, False, True), (4, True, False)])
    gap = np.arange(256) == 1
    with pytest.raises(CryptoError, match="lowest bins"):
        layout.encode_split(0, gap)
    with pytest.raises(CryptoError, match="lowest bins"):
        layout.shown_threshold(0, gap)
    with pytest.raises(CryptoError, match="feature below 2"):
        layout.encode_split(2, gap)
    with pytest.raises(CryptoError, match="categorical feature 1"):
        layout.shown_threshold(1, gap)
    with pytest.raises(CryptoError, match="categorical feature 1"):
        layout.encode_shown(np.zeros((1, 2), np.uint8), np.array([1]), np.array([False]))


@pytest.mark.parametrize(
    ("n_bins", "categorical", "may_miss"),
    [([3], [True], []), ([], [], []), ([256], [False], [True]), ([-1], [False], [True])],
    ids=str,
)
def test_layouts_out_of_range_are_refused(n_bins, categorical, may_miss):
    with pytest.raises(CryptoError, match="expected"):
        Layout(n_bins=n_bins, categorical=categorical, may_miss=may_miss)
