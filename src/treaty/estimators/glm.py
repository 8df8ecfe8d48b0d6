"""The scikit-learn face of regressions of numbers, pooled and federated: `LinearRegression` and `PoissonRegressor`."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import RegressorMixin
from sklearn.metrics import d2_tweedie_score
from sklearn.utils import Tags

from treaty.data.columns import check_targets
from treaty.estimators.base import Scored, Tables, one_column
from treaty.estimators.inputs import check_beside
from treaty.estimators.linear import LinearModel


class _Regression(Scored, RegressorMixin, LinearModel):
    """What both regressions of numbers have in common: training, and predictions by the inverse of their link."""

    _mean: ClassVar[Any]  # of margins, the mean: the inverse of the link

    def _labels(self, y: Any, active: str, n_rows: int) -> tuple[None, NDArray[np.float64]]:
        return None, check_targets(one_column(y), active, n_rows)

    def predict(self, X: Tables) -> NDArray[np.float64]:
        """Return predicted means: numbers, or expected counts.

        Parameters
        ----------
        X : table, or mapping of party name to table
            As in `fit`, without labels.

        Returns
        -------
        float64 (n_rows,)

        Raises
        ------
        DataError
            For other parties or columns than those of training, or row counts that differ.
        """
        return np.asarray(self._mean(self._margins(X)))


class LinearRegression(_Regression):
    """Linear regression by least squares, with standard errors where they are asked for.

    Columns are prepared as for `LogisticRegression`. Training is on the whole table, to the optimum: by Newton's method
    on one table, by L-BFGS between parties.

    Parameters
    ----------
    protocol : str or SystemOptions, default "pooled"
        As for `LogisticRegression`; the whole table is taken at every step under "quasi-newton" and "sgd" alike.
    standard_errors : bool
        Whether weights get standard errors and p-values; between parties by further products of one's columns with the
        other's, see docs/logistic.md.
    max_iter : int or None
        Most steps; None is 100.
    learning_rate : float or None
        Factor on steps in new directions, between parties; None is 1 divided by the number of passive parties.
    tol : float
        Training ends when the losses of two steps differ by less than its square: when predictions change by about
        `tol` standard deviations of the target.
    l2 : float
        Penalty of l2 / 2 times the sum of squared weights beside half the mean squared residual, the target being
        in units of its standard deviation.
    fractional_bits, n_jobs, active, transport, parties, verbose, missing, reference
        As for `LogisticRegression`.

    Attributes
    ----------
    parts_ : dict of str to LinearPart
        Each party's part of the model.
    coef_ : float64 (n_columns,), or dict of str to float64 (n_columns,)
        What a unit of each column as it came, or being of a category, adds to the prediction, by party where `fit` was
        given a mapping.
    intercept_ : float
        Prediction for a row that is 0 in all columns as they came.
    standardized_coef_, standardized_intercept_ : as the two before
        Weights of the prepared columns, in the target's units, and the intercept, which the active party holds.
    standard_errors_, p_values_, confidence_intervals_, standardized_errors_, n_dropped_
        As of `LogisticRegression`.
    n_iter_ : int
        Steps.
    loss_history_ : list of float
        Of every step, half the mean squared residual over the target's variance, before the step.
    evals_result_, communication_, timeline_, timings_, disclosures_
        As of `LogisticRegression`.
    """

    _fixed: ClassVar[dict[str, Any]] = {"family": "linear"}
    _mean = staticmethod(np.asarray)


class PoissonRegressor(_Regression):
    """Regression of counts by Poisson's distribution with logarithmic link, between two parties at most.

    Columns are prepared as for `LogisticRegression`. Training is on the whole table, to the optimum: by Newton's method
    on one table, by L-BFGS between parties.

    Parameters
    ----------
    protocol : str or SystemOptions, default "pooled"
        As for `LinearRegression`. Two parties with data make rates under keys of their own, with `encryption` "ou" or
        "paillier"; there may be a coordinator, who has no key.
    standard_errors : bool
        Whether weights get standard errors and p-values, those of Fisher's information.
    max_iter, learning_rate, tol, fractional_bits, n_jobs, active, transport, parties, verbose, missing, reference
        As for `LinearRegression`.
    l2 : float
        Penalty of l2 / 2 times the sum of squared weights beside half the mean deviance, counts being in units of their
        mean.

    Attributes
    ----------
    parts_, standard_errors_, p_values_, confidence_intervals_, standardized_coef_, standardized_intercept_,
    standardized_errors_, n_dropped_, n_iter_, evals_result_, communication_, timeline_, timings_, disclosures_
        As of `LinearRegression`.
    coef_ : float64 (n_columns,), or dict of str to float64 (n_columns,)
        What a unit of each column as it came adds to the logarithm of the rate, by party where `fit` was given a
        mapping.
    intercept_ : float
        Logarithm of the rate of a row that is 0 in all columns as they came.
    loss_history_ : list of float
        Of every step, half the mean deviance of counts in units of their mean, before the step.
    """

    _fixed: ClassVar[dict[str, Any]] = {"family": "poisson"}
    _mean = staticmethod(np.exp)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def score(self, X: Tables, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the share of the deviance that is explained, as scikit-learn's `PoissonRegressor` does.

        Parameters
        ----------
        X : table, or mapping of party name to table
        y : array-like (n_rows,)
        sample_weight : array-like (n_rows,) or None

        Returns
        -------
        float
        """
        check_beside(X, {"y": y, "sample_weight": sample_weight})
        return float(d2_tweedie_score(y, self.predict(X), sample_weight=sample_weight, power=1))
