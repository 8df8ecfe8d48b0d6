"""Options of FederBoost by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from treaty.systems.horizontal.sum_noise import RowOptions


@dataclass(kw_only=True, repr=False)
class FederBoostHorizontal(RowOptions):
    """Boosting between holders of rows, on securely summed histograms (FederBoost, Tian et al. 2020, arXiv 2011.02796).

    Parameters
    ----------
    mode : {"safe", "paper"}, default "safe"
        "paper" permits two participants, each of which sees the other's part of a sum. The search for bins is the same
        in both modes.
    allow_insecure : bool, default False
        Without effect: nothing in this system needs consent.
    dropout : {"accept"} or None, default None
        What happens if a participant is lost. None: training stops, and resumes from checkpoints when all are back.
        "accept": training continues without it, and the leader may find its histograms.
    bins : {"exact", "approximate"} or None, default None
        "exact": the bins of one table with all rows, so that trees equal those of `Pooled` with the same `max_bin`; the
        leader learns the values on both sides of every cut. "approximate": cuts with about as many rows between them,
        found in half as many rounds; no trial value separates fewer than `min_child_samples` rows. None is "exact", or
        "approximate" under `epsilon_total`, because noisy counts cost epsilon.
    epsilon_total : float or None, default None
        Noise on everything that is opened, so that the whole training is (epsilon_total, delta) differentially private
        for every row. Splits are then drawn at random, and only the sums of leaves are opened. None: no noise.
    delta : float or None, default None
        See `epsilon_total`; None is 1e-6.
    target_range : sequence of two floats or None, default None
        With `epsilon_total`, for a regression: the least and the largest target, which must not come from the data.
        Targets outside count as the nearer end.
    weight_bound : float or None, default None
        With `epsilon_total`, for rows with weights: the largest weight, which must not come from the data. Larger
        weights count as this one. Noise grows with it, rounded up to a power of two.
    validation_fraction : float or None, default None
        Share of its rows, between 0 and 1, that each participant keeps out of training, the same rows each time. After
        each round, these rows are counted by score and label, and the counts of all participants are added under masks.
        The leader sees the metrics: "validation" in `evals_result_`, and `held_out_`. Early stopping uses them if there
        is no eval set. None: all rows are trained on. With `epsilon_total`, other rows are drawn each time, and counts
        have noise at no further cost. They are opened after five rounds: the first, the last and three between.
    validation_group : str or None, default None
        Column of categories, such as sex or region, by which the held-out rows are counted, so that `held_out_` has
        metrics of each group. Needs `validation_fraction`.

    See Also
    --------
    FedXGB : Hundreds of users with a few rows each.
    FederBoostVertical : The same paper's system for parties with columns.

    Examples
    --------
    Three hospitals have rows of the same columns. The first one leads:

    >>> import numpy as np, treaty
    >>> def rows(start):
    ...     X = np.arange(start, start + 60.0)[:, None] % 50
    ...     return X, X[:, 0] > 20
    >>> hospitals = {"north": rows(0), "east": rows(7), "south": rows(21)}
    >>> options = treaty.FederBoostHorizontal(validation_fraction=0.2)
    >>> model = treaty.GBDTClassifier(options, n_estimators=3, max_depth=2).fit(hospitals)
    >>> model.predict([[10.0], [30.0]])
    array([False,  True])
    """

    system: ClassVar[str] = "federboost-horizontal"
    paper_bins: ClassVar[int | None] = 24  # of two of its three data sets; 26 for the third
    dropout: Literal["accept"] | None = None

    @property
    def exact_bins(self) -> bool:
        """`bins`, resolved."""
        return self.bins != "approximate" and not self.adds_noise

    @property
    def limits_categories(self) -> bool:
        return self.adds_noise


def honest_members(options: FederBoostHorizontal, members: int) -> int:
    """Return how many shares of noise in a sum nobody knows who sees the sum, at least."""
    # the leader knows its own share, so the others' must be enough; of those that a sum needs at least
    present = members if options.dropout is None else max(3, -(-2 * members // 3))
    return max(1, present - 1)
