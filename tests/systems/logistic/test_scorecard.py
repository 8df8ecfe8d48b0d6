"""Counting events in bins between parties: who sends what, and counts that cannot be."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest

import treaty
from treaty.data.table import to_table
from treaty.errors import ConfigError, CryptoError, DataError
from treaty.runs import fit as fits
from treaty.systems.logistic.options import RegressionOptions
from treaty.systems.logistic.scorecard import _counted, cut
from treaty.systems.observers import Observer, observing

RNG = np.random.default_rng(0)
X = RNG.normal(size=(600, 3))
Y = (RNG.random(600) < 1 / (1 + np.exp(1.0 - X[:, 0] - X[:, 2]))).astype(int)
TABLES = {"bank": X[:, :1], "shop": X[:, 1:]}
CARD = RegressionOptions(pdo=20.0)


def messages(model):
    """Return how many messages of each kind each party sent to each other in a training."""
    sent = Counter()

    class Watch(Observer):
        def __init__(self, inputs):
            self._name = inputs.party.name

        def message_sent(self, peer, message):
            sent[self._name, peer, type(message).__name__] += 1

    with observing(lambda inputs: [Watch(inputs)]):
        model.fit(TABLES, Y)
    return sent


def test_counting_adds_products_alone_and_points_one_slope():
    options = {"coordinator": False, "encryption": "lattice"}
    card = messages(treaty.Scorecard(treaty.QuasiNewton(**options)))
    kinds = {(sender, kind) for sender, _, kind in card}
    plain = messages(treaty.LogisticRegression(treaty.QuasiNewton(**options)))
    assert kinds - {(sender, kind) for sender, _, kind in plain} == {("bank", "CalibrationSlope")}
    assert card["bank", "shop", "CalibrationSlope"] == 1
    assert card["shop", "bank", "TableSize"] == 2


@pytest.mark.parametrize(
    "changed",
    [
        lambda counts, one: [counts[0] + one // 2, *counts[1:]],
        lambda counts, one: [-one, *counts[1:]],
        lambda counts, one: [counts[0] + 700 * one, *counts[1:]],
        lambda counts, one: [counts[0] << 80, *counts[1:]],
        lambda counts, one: [counts[0] - one, *counts[1:]],
        lambda counts, one: [0] * len(counts),
    ],
)
def test_numbers_that_are_no_counts_are_refused(changed):
    table, one = to_table(X[:, 1:]), 1 << 56
    bins = cut(table, "shop", CARD)
    counts = [one * int(Y[of.assign(table) == k].sum()) for of in bins for k in range(len(of.n_rows))]
    found = _counted(bins, counts, 56, 600, CARD)
    assert [sum(of.n_bads) for of in found] == [Y.sum()] * 2
    with pytest.raises(CryptoError, match="malformed contribution"):
        _counted(bins, changed(counts, one), 56, 600, CARD)


@pytest.mark.parametrize("name", ["base_score", "max_bin", "monotone", "round_points"])
def test_options_of_a_card_need_pdo(name):
    given = {"base_score": 500.0, "max_bin": 5, "monotone": "none", "round_points": False}[name]
    with pytest.raises(ConfigError, match=f"{name} is an option of scorecards: add pdo"):
        RegressionOptions(**{name: given}).checked(treaty.QuasiNewton())


@pytest.mark.parametrize(
    "given",
    [{"batch_size": 100}, {"family": "linear"}, {"missing": "drop"}, {"calibrate": False}, {"reference": "first"}],
)
def test_options_that_a_card_cannot_have_are_refused(given):
    (name,) = given
    with pytest.raises(ConfigError, match=f"leave {name} out"):
        RegressionOptions(pdo=20.0, **given).checked(treaty.QuasiNewton())


def test_paper_mode_has_no_card():
    with pytest.raises(ConfigError, match="leave mode out"):
        RegressionOptions(pdo=20.0).checked(treaty.QuasiNewton(mode="paper", allow_insecure=True))


def test_too_few_rows_for_their_bins_are_refused():
    few = {name: table[:45] for name, table in TABLES.items()}
    with pytest.raises((ConfigError, DataError), match="expected batches of at least"):
        treaty.Scorecard("quasi-newton").fit(few, Y[:45])


@pytest.mark.parametrize("options", [{}, {"coordinator": False}], ids=["coordinator", "two"])
def test_labels_are_counted_in_so_many_bins_over_all_jobs(tmp_path, options):
    def train(max_bin, **more):
        return treaty.Scorecard(treaty.QuasiNewton(**options, **more), max_bin=max_bin).fit(
            TABLES, Y, checkpoint=tmp_path
        )

    # of 600 rows, in 60 bins: two columns of the shop in so many bins each
    for max_bin in (10, 9, 8):
        train(max_bin)
    text = (
        r"bank: a scorecard would multiply 14 vectors of the others with its labels, after 54 in earlier jobs, .* 60,"
    )
    with pytest.raises(ConfigError, match=f"{text} .*take fewer bins .*allow_exact_sums=True"):
        train(7)
    card = train(3)
    assert any("one bin for 10 rows over all jobs" in fact for fact in card.disclosures_["shop"])
    assert train(7, allow_exact_sums=True).predict(TABLES).shape == (600,)


def test_statistics_and_scorecards_count_labels_together(tmp_path, monkeypatch):
    monkeypatch.setattr("treaty.estimators.statistics.train", partial(keeping, tmp_path))
    statistics = treaty.ColumnStatistics(treaty.Statistics(reveal="passive"), max_bin=20, correlation="none")
    statistics.fit(TABLES, Y)
    with pytest.raises(ConfigError, match="22 vectors of the others with its labels, after 40 in earlier jobs"):
        treaty.Scorecard("quasi-newton", max_bin=11).fit(TABLES, Y, checkpoint=tmp_path)


def keeping(folder, run, **given):
    """Train as a job does that keeps something for later ones in a folder."""
    return fits.train(run, **{**given, "checkpoint": folder})


def test_consent_to_counts_is_about_scorecards():
    with pytest.raises(ConfigError, match="allow_exact_sums is about counts in bins of a scorecard: add pdo"):
        treaty.QuasiNewton(allow_exact_sums=True).check(RegressionOptions())
