"""The channel's statistical tests fix their seed; false-alarm rates are what they would be with another one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, localcontext

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from treaty.errors import ConfigError, DataError
from treaty.files import Format, read_file, write_file
from treaty.privacy import randomised_response
from treaty.privacy.randomised_response import randomise_labels, stored_noisy_labels
from treaty.trees.objectives import make_objective


def chances(n_classes, epsilon):
    """p and r of the channel."""
    total = np.exp(epsilon) + n_classes - 1
    return np.exp(epsilon) / total, 1 / total


def scripted(*draws):
    """Give the listed integers, one call's list after the other."""
    left = list(draws)

    def randomness(nbytes):
        values = np.array(left.pop(0), np.uint64)
        assert 8 * len(values) == nbytes
        return values.tobytes()

    return randomness


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("n_classes", [2, 3, 6])
def test_channel_has_the_chances_of_randomised_response(n_classes, epsilon):
    n = 60_000
    rng = np.random.default_rng(n_classes)
    p, r = chances(n_classes, epsilon)
    statistic = 0.0
    for label in range(n_classes):
        noisy = randomise_labels(np.full(n, label), n_classes, epsilon, rng.bytes)
        expected = np.where(np.arange(n_classes) == label, p, r) * n
        statistic += ((np.bincount(noisy, minlength=n_classes) - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(statistic, n_classes * (n_classes - 1)) > 1e-6  # false alarm: one seed in a million


def test_channel_with_the_operating_systems_generator_keeps_as_many_labels_as_it_should():
    n, (p, _) = 40_000, chances(3, 1.0)
    kept = np.count_nonzero(randomise_labels(np.ones(n, np.int64), 3, 1.0) == 1)
    assert abs(kept - n * p) < 6.5 * np.sqrt(n * p * (1 - p))  # false alarm: one run in 10^10


@pytest.mark.parametrize("n_classes", [2, 4])
def test_debiased_labels_are_right_on_average(n_classes):
    n, epsilon = 100_000, 0.7
    y = np.arange(n) % n_classes
    noisy = randomise_labels(y, n_classes, epsilon, np.random.default_rng(5).bytes)
    name = "logistic" if n_classes == 2 else "softmax"
    s, t = make_objective(name, noisy.astype(float), None, n_classes=n_classes, epsilon=epsilon).debiasing
    p, r = chances(n_classes, epsilon)
    for label in range(n_classes):
        for k in range(n_classes):
            mean = (s * (noisy[y == label] == k) - t).mean()
            chance = p if k == label else r
            error = s * np.sqrt(chance * (1 - chance) / np.count_nonzero(y == label))
            assert abs(mean - (k == label)) < 5 * error  # false alarm: 16 comparisons, 6e-7 each


@pytest.mark.parametrize("epsilon", [700.0, 746.0, 1e6])
def test_a_label_changes_now_and_then_at_any_epsilon(epsilon):
    assert randomise_labels(np.array([0, 0, 1]), 2, epsilon, scripted([0, 1, 2], [0])).tolist() == [1, 0, 1]


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(epsilon=st.floats(1e-6, 40.0), n_classes=st.integers(2, 1000))
def test_no_label_costs_more_than_epsilon(epsilon, n_classes):
    with localcontext(prec=60):
        odds = (n_classes - 1) * (-Decimal(epsilon)).exp()
        change = odds / (1 + odds) * 2**64
    must, must_not = int(change) - 1, int(change * (1 + Decimal(2) ** -48)) + 2
    y = np.zeros(2, np.int64)
    with_these = scripted([max(must, 0), must_not], [0])
    assert (randomise_labels(y, n_classes, epsilon, with_these) != y).tolist() == [True, False]


def test_other_classes_are_drawn_without_bias_by_rejection():
    # of 2^64 values the last one has no fellow modulo 3: it is drawn again
    noisy = randomise_labels(np.array([0, 1, 3]), 4, 1.0, scripted([0, 0, 0], [2**64 - 1, 2**64 - 2, 4], [1]))
    assert noisy.tolist() == [2, 3, 1]  # 1, 2 and 1 of the classes that are left: (1 2 3), (0 2 3), (0 1 2)


def test_labels_of_a_large_epsilon_stay():
    y = np.arange(1000) % 7
    np.testing.assert_array_equal(randomise_labels(y, 7, 60.0), y)


def test_whole_floats_are_labels_as_well():
    y = np.arange(50) % 2
    as_ints = randomise_labels(y, 2, 1.0, np.random.default_rng(1).bytes)
    as_floats = randomise_labels(y.astype(float), 2, 1.0, np.random.default_rng(1).bytes)
    assert as_ints.dtype == as_floats.dtype == np.int64
    np.testing.assert_array_equal(as_ints, as_floats)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, np.inf, np.nan])
def test_epsilon_out_of_range_is_refused(epsilon):
    with pytest.raises(ConfigError, match="epsilon"):
        randomise_labels(np.zeros(3, np.int64), 2, epsilon)


@pytest.mark.parametrize("y", [[0, 2], [0, -1], [0, 0.5], [0, np.nan], [[0], [1]]], ids=str)
def test_labels_that_are_no_class_numbers_are_refused(y):
    with pytest.raises(DataError, match="class numbers"):
        randomise_labels(np.array(y), 2, 1.0)


def test_one_class_is_refused():
    with pytest.raises(ConfigError, match="2 classes"):
        randomise_labels(np.zeros(3, np.int64), 1, 1.0)


# ---------------------------------------------------------------- kept in a file


@pytest.fixture
def y():
    return np.random.default_rng(0).integers(0, 3, 500)


def test_stored_labels_are_drawn_once(tmp_path, y):
    path = tmp_path / "noisy"
    first = stored_noisy_labels(path, y, 3, 1.0)
    assert 0.1 < np.mean(first != y) < 0.7  # 0.42 expected
    for labels in (y, y.astype(float)):
        np.testing.assert_array_equal(stored_noisy_labels(path, labels, 3, 1.0), first)
    assert [file.name for file in tmp_path.iterdir()] == ["noisy"]


def test_stored_labels_are_readable_by_their_owner_alone(tmp_path, y):
    stored_noisy_labels(tmp_path / "noisy", y, 3, 1.0)
    assert (tmp_path / "noisy").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda y: (y[::-1], 3, 1.0), "noisy labels of another"),
        (lambda y: (y[:-1], 3, 1.0), "noisy labels of another"),
        (lambda y: (y, 3, 2.0), "expected noisy labels of epsilon 2.0, got epsilon 1.0"),
        (lambda y: (y, 4, 1.0), "expected noisy labels of classes 4, got classes 3"),
    ],
    ids=["other-order", "fewer-rows", "other-epsilon", "more-classes"],
)
def test_stored_labels_of_something_else_are_refused_and_kept(tmp_path, y, change, text):
    path = tmp_path / "noisy"
    first = stored_noisy_labels(path, y, 3, 1.0)
    with pytest.raises(ConfigError, match=text):
        stored_noisy_labels(path, *change(y))
    np.testing.assert_array_equal(stored_noisy_labels(path, y, 3, 1.0), first)


def rewritten(path, **changes):
    kept = read_file(path, randomised_response._NoisyLabels, randomised_response.FORMAT)
    write_file(path, msgspec.structs.replace(kept, **changes), randomised_response.FORMAT, "")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: path.write_bytes(b""), "an empty file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cut off"),
        (lambda path: write_file(path, [1], Format("noisy-labels", 9), ""), "newer Treaty"),
        (lambda path: rewritten(path, labels=np.zeros(1, np.int64)), "expected 500 noisy labels, got 1"),
        (lambda path: rewritten(path, labels=np.full(500, 7)), "below 3"),
    ],
    ids=["empty", "cut-off", "other-format", "too-few", "no-class"],
)
def test_damaged_stored_labels_are_refused(tmp_path, y, damage, text):
    path = tmp_path / "noisy"
    stored_noisy_labels(path, y, 3, 1.0)
    damage(path)
    with pytest.raises(ConfigError, match=text):
        stored_noisy_labels(path, y, 3, 1.0)


def test_a_folder_that_is_not_there_is_a_config_error(tmp_path, y):
    with pytest.raises(ConfigError, match=r"cannot write .*noisy"):
        stored_noisy_labels(tmp_path / "none" / "noisy", y, 3, 1.0)


def test_jobs_that_start_together_share_one_draw(tmp_path, y, monkeypatch):
    path, draw = tmp_path / "noisy", randomise_labels

    def draw_late(*args):  # the other one is done before this one writes
        noisy = draw(*args)
        monkeypatch.setattr(randomised_response, "randomise_labels", draw)
        stored_noisy_labels(path, y, 3, 1.0)
        return noisy

    monkeypatch.setattr(randomised_response, "randomise_labels", draw_late)
    late = stored_noisy_labels(path, y, 3, 1.0)
    np.testing.assert_array_equal(late, stored_noisy_labels(path, y, 3, 1.0))
    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(lambda _: stored_noisy_labels(tmp_path / "other", y, 3, 1.0), range(8)))
    assert all(np.array_equal(drawn[0], one) for one in drawn)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["noisy", "other"]
