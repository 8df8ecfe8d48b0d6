"""The histogram of encrypted words takes the same steps whatever the bins: its time is not to tell how skewed they are.

Times themselves are measured in benchmarks/lattice_skew.py; what they rest on is here. An addition to a place in memory
waits for the last one to that place, or to one that the processor takes for it.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.lattice.test_linear_map import job_of_bins, random_vectors
from treaty.crypto.lattice import kernels
from treaty.crypto.lattice.linear_map import zeros_on_lines
from treaty.crypto.lattice.ring import WORDS

COPIES = 4  # fewer leave differences of a quarter and more between skewed and even bins
PLACE, LINE, PAGE = 8 * WORDS, 64, 4096  # bytes


def spread(rng, rows, bins, how):
    codes = rng.integers(0, bins, rows)
    return {
        "uniform": codes,
        "skewed": np.where(rng.random(rows) < 0.95, 0, codes),
        "one": np.full(rows, bins - 1),
        "sorted": np.sort(codes),
        "in turn": np.arange(rows) % min(2, bins),
    }[how].astype(np.uint8)


HOW = ["uniform", "skewed", "one", "sorted", "in turn"]


def summed(words, codes, offsets, features, first, stop):
    """Sums of every copy of every place: uint64 (bins, COPIES, WORDS)."""
    sums = zeros_on_lines((int(offsets[-1]), kernels.COPIES, WORDS), np.uint64)
    kernels.bin_sums(words.reshape(-1), codes, 0, offsets, features, first, stop, sums.reshape(-1))
    return sums


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("rows", [1, 3, 1023, 1024, 4096, 5003])
def test_each_copy_of_a_bin_holds_every_fourth_row_of_it(rows, how):
    rng = np.random.default_rng(rows)
    codes, offsets = spread(rng, rows, 5, how)[np.newaxis], np.array([0, 5])
    words = rng.integers(0, 1 << 32, (rows, WORDS), np.uint32)
    sums = summed(words, codes, offsets, np.array([0]), 0, 1)
    assert sums.shape == (5, COPIES, WORDS)
    for bin in range(5):
        for copy in range(COPIES):
            of_copy = (codes[0] == bin) & (np.arange(rows) % COPIES == copy)
            assert sums[bin, copy].tolist() == words[of_copy].sum(axis=0, dtype=np.uint64).tolist()


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_copies_add_up_to_the_histogram_of_the_features_asked(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    rows, sizes = data.draw(st.integers(0, 3000)), data.draw(st.lists(st.integers(1, 256), min_size=1, max_size=4))
    codes = np.stack([spread(rng, rows, bins, data.draw(st.sampled_from(HOW))) for bins in sizes])
    offsets = np.cumsum([0, *sizes])
    features = np.array(sorted(data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1))))
    first = data.draw(st.integers(0, len(features)))
    stop = data.draw(st.integers(first, len(features)))
    words = rng.integers(0, 1 << 32, (rows, WORDS), np.uint32)
    expected = np.zeros((offsets[-1], WORDS), np.uint64)
    for f in features[first:stop]:
        np.add.at(expected, offsets[f] + codes[f], words)
    assert np.array_equal(summed(words, codes, offsets, features, first, stop).sum(axis=1), expected)


def steps(monkeypatch, codes, offsets, features):
    """Places and rows of all additions, in order; both are numbers of pieces of `WORDS` words."""
    taken = []
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "add_words", lambda sums, o, words, i: taken.append((int(o), int(i))))
        sums = np.zeros(int(offsets[-1]) * kernels.COPIES * WORDS, np.uint64)
        words = np.zeros(codes.shape[1] * WORDS, np.uint32)
        kernels.bin_sums.py_func(words, codes, 0, offsets, features, 0, len(features), sums)
    places, rows = np.array(taken).T
    assert not (places % WORDS).any()
    assert not (rows % WORDS).any()
    return places // WORDS, rows // WORDS


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("bins", [2, 32, 33, 256])
def test_no_addition_goes_where_one_of_the_last_three_went(monkeypatch, bins, how):
    """Nor, where both are of one bin, to an address that is the same but for multiples of a page."""
    rng = np.random.default_rng(bins)
    codes, offsets = np.stack([spread(rng, 1501, bins, how) for _ in range(12)]), np.arange(13) * bins
    places, rows = steps(monkeypatch, codes, offsets, np.array([1]))
    assert np.array_equal(rows, np.arange(1501))
    met = 0
    for back in range(1, COPIES):
        same_bin = codes[1, back:] == codes[1, :-back]
        met += np.count_nonzero(same_bin)
        apart = np.abs(places[back:] - places[:-back])
        assert apart.min() > 0
        assert (apart[same_bin] * PLACE % PAGE > 0).all()
    assert met > 0
    places, _ = steps(monkeypatch, codes, offsets, np.arange(12))
    for back in range(1, COPIES):
        assert (places[back:] != places[:-back]).all()


@pytest.mark.parametrize("how", HOW)
def test_order_of_rows_and_columns_does_not_depend_on_bins(monkeypatch, how):
    rng = np.random.default_rng(0)
    offsets, columns = np.array([0, 7, 14, 21]), np.arange(3)
    skewed, even = (np.stack([spread(rng, 2101, 7, one) for _ in columns]) for one in (how, "uniform"))
    places, rows = steps(monkeypatch, skewed, offsets, columns)
    even_places, even_rows = steps(monkeypatch, even, offsets, columns)
    assert np.array_equal(rows, even_rows)
    assert np.array_equal(places // COPIES // 7, even_places // COPIES // 7)  # the column
    assert np.array_equal(places % COPIES, even_places % COPIES)


@pytest.mark.parametrize("rows", [1, 240, 30_001])
def test_sums_and_words_of_an_answer_begin_at_a_cache_line(monkeypatch, rows):
    """Else every addition, or every second one, straddles two lines, and waits longer for the last one."""
    seen, real = [], kernels.bin_sums

    def watched(words, codes, base, offsets, features, first, stop, sums):
        seen.append((words.ctypes.data % LINE, sums.ctypes.data % LINE, len(sums)))
        real(words, codes, base, offsets, features, first, stop, sums)

    monkeypatch.setattr(kernels, "bin_sums", watched)
    rng = np.random.default_rng(1)
    codes, sizes = rng.integers(0, 3, (2, rows)).astype(np.uint8), [3, 4]
    job, vectors = job_of_bins(codes, sizes), random_vectors(rng, rows, 3)
    job.server.random[:] = 0
    job.server.answer(*job.client.encrypt(vectors)[1:], np.arange(2))
    assert seen == [(0, 0, 7 * COPIES * WORDS)] * 3


@given(shape=st.tuples(st.integers(0, 50), st.integers(0, 9)), dtype=st.sampled_from([np.uint8, np.uint32, np.uint64]))
def test_zeros_on_lines_are_zeros_on_lines(shape, dtype):
    made = zeros_on_lines(shape, dtype)
    assert (made.shape, made.dtype) == (shape, dtype)
    assert not made.any()
    assert made.ctypes.data % LINE == 0 or made.size == 0
    assert made.flags.c_contiguous
    assert made.flags.writeable
