"""`LogisticRegression`, pooled and federated; what it shares with other linear models is in `glm`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin

from treaty.errors import ConfigError, warn_user
from treaty.estimators.base import Scored, Tables, one_column
from treaty.estimators.glm import LinearModel, LinearRegression
from treaty.estimators.inputs import weights_of_classes
from treaty.linear.preparation import Calibration
from treaty.machine.arrays import Floats
from treaty.models.linear import LinearPart, label_holder
from treaty.systems.options import spelled_out
from treaty.systems.pooled.system import ALONE
from treaty.systems.system import System


@spelled_out(LinearRegression)
@dataclass(kw_only=True, eq=False, repr=False)
class LogisticRegression(Scored, ClassifierMixin, LinearModel):
    """Logistic regression, by quasi-Newton steps or gradient descent: on a small table to the optimum, else stochastic.

    With more than two classes, there is a model of each class against the rest, and every step uses the whole table.

    Each party prepares its own columns: missing values become the median, each category a column, and all columns are
    centred and divided by their standard deviation, or by a tenth of their farthest value if that is more. `coef_` and
    the attributes derived from it are in units of the original columns.

    Parameters
    ----------
    protocol : str or SystemOptions, default "pooled"
        The system: its options, ``QuasiNewton(coordinator=False)``, or its name alone for its defaults. One table:
        `treaty.Pooled`. Parties that hold different columns of the same rows: `treaty.QuasiNewton` or `treaty.SGD`.
    standard_errors : bool, default False
        Whether to compute standard errors and p-values of weights. They are those of least squares, which the Taylor
        loss is; with `Pooled(loss="logistic")` they are Fisher's. Each party computes its own, from products of its
        columns with the others' columns. Training then uses the whole table, without batches; see docs/logistic.md.
        Rows with missing values raise DataError, see `missing`.
    max_iter : int or None, default None
        Maximum epochs: None is 30, or 100 if every step uses the whole table.
    batch_size : int or None, default None
        Rows in a mini-batch; the whole table if it has fewer. None: a table of at most 10,000 rows is used whole at
        every step, to the optimum, and a larger one in batches of 1000. Batches are also the default of the published
        algorithm (``Pooled(solver=...)``, ``mode="paper"``, `hessian_batch_size`). With more than two classes, or
        standard errors, every step uses the whole table.
    learning_rate : float or None, default None
        Factor on every step: None is 0.2 by quasi-Newton, 0.3 by gradient descent, on the whole table 1 divided by
        the number of passive parties. By quasi-Newton in batches it is divided by 1 + k / 2 after k epochs. Halved
        automatically when an epoch's loss rises by more than a tenth.
    tol : float, default 1e-5
        Training ends when the losses of two epochs differ by less (on the whole table: by less than its square, when
        margins change by about `tol`). 0: all `max_iter` epochs. If training ends at `max_iter` otherwise, there is a
        warning.
    l2 : float, default 0
        Penalty of l2 / 2 times the sum of squared weights, added to the mean loss; not on the intercept.
    memory : int, default 5
        Quasi-Newton: the number of correction pairs to keep; on the whole table, all.
    period : int, default 4
        Quasi-Newton: iterations from one correction pair to the next.
    hessian_batch_size : int or None, default None
        Quasi-Newton: rows of a correction pair's Hessian product, the size of the paper's S_H: at most a batch, or a
        multiple of `batch_size`. None is `batch_size`.
    fractional_bits
        As for `LinearRegression`.
    calibrate : bool, default True
        Whether the label holder fits Platt's two numbers to the margins of the training rows, so that probabilities of
        the Taylor loss are unbiased. Between parties, the label holder sees these margins, as in a prediction of the
        rows. No effect with `Pooled(loss="logistic")`, whose margins are log-odds.
    early_stopping_rounds : int or None, default None
        Training also ends when the loss of the last eval set has not decreased for this many epochs; the weights are
        from the epoch with the lowest loss. None: no early stopping.
    random_state : int, RandomState or None, default None
        Seed of the batches; between parties, it is used if all parties with data set the same one.
    n_jobs, active, transport, parties, verbose
        As for `LinearRegression`.
    C : float or None, default None
        Instead of `l2`, as in scikit-learn: l2 is 1 / (C times the sum of rows' weights, or the number of rows).
        Columns are standardised here.
    class_weight : dict of label to float, "balanced" or None, default None
        Weights of classes, as in scikit-learn; only on one table, since other parties would get them with the rows.
    missing, reference
        As for `LinearRegression`.

    Attributes
    ----------
    classes_ : ndarray (n_classes,)
    parts_ : dict of str to LinearPart
        Each party's part of the model.
    coef_ : float64 (1, n_columns), or dict of str to float64 (n_columns,)
        What a unit of each column, or a category, adds to the log-odds; 0 for a constant column. By party if `fit` was
        given a mapping. A category has its own column, see `LinearPart.column_names`. With more than two classes, this
        and the following attributes have a row for each class.
    intercept_ : float64 (1,)
        Log-odds of a row that is 0 in all columns: with `coef_` it gives the log-odds of rows without missing values.
    standardized_coef_, standardized_intercept_ : as the two before
        Weights of the prepared columns, in margins, and the intercept, which the active party holds.
    calibration_ : Calibration or None
        `slope` and `offset`: log-odds are slope times the margin, the sum of prepared columns times weights and the
        intercept, plus offset. None: margins are log-odds.
    standard_errors_, p_values_ : float64 (n_columns + 1,), or dict of such by party
        With `standard_errors`: for `coef_`, and at the active party last for the intercept: on one table `intercept_`,
        between parties that of `summary`. The calibration is treated as known.
    confidence_intervals_, standardized_errors_, n_dropped_
        As for `LinearRegression`.
    n_iter_ : int
        Epochs.
    loss_history_ : list of float
        For every epoch, the mean loss of its batches, each before its step, without the penalty.
    evals_result_ : dict
        The same as ``{"train": {"taylor": [...]}}``, in the form of `GBDTClassifier`; and for each eval set, "eval_0",
        "eval_1" and so on, the mean loss after every epoch.
    best_iteration_ : int
        With `early_stopping_rounds`: the epoch, from 0, of these weights.
    communication_, timeline_, timings_, disclosures_
        As for `LinearRegression`.

    See Also
    --------
    LinearRegression : Numbers instead of classes.
    Scorecard : Weights of evidence and points.
    QuasiNewton, SGD : The systems for parties with different columns.

    References
    ----------
    Yang, Fan, Chen, Shi, Yang, "A Quasi-Newton Method Based Vertical Federated Learning Framework for Logistic
    Regression", 2019 (arXiv 1912.00513).

    Examples
    --------
    >>> import numpy as np, pandas as pd, treaty
    >>> age = np.arange(200) % 60 + 18
    >>> bank, shop = pd.DataFrame({"age": age}), pd.DataFrame({"orders": age * 7 % 11})
    >>> defaulted = (age + 2 * shop["orders"] < 50).to_numpy()
    >>> model = treaty.LogisticRegression().fit(bank, defaulted)
    >>> bool(model.coef_[0, 0] < 0)  # the older, the fewer defaults
    True

    Train between two parties; each gets the weights of its own columns:

    >>> model = treaty.LogisticRegression("quasi-newton").fit({"bank": bank, "shop": shop}, defaulted)
    >>> sorted(model.coef_)
    ['bank', 'shop']
    >>> bool(model.score({"bank": bank, "shop": shop}, defaulted) > 0.9)
    True
    """

    _fixed: ClassVar[dict[str, Any]] = {"family": "logistic"}

    batch_size: int | None = None
    memory: int = 5
    period: int = 4
    hessian_batch_size: int | None = None
    calibrate: bool = True
    early_stopping_rounds: int | None = None
    random_state: int | np.random.RandomState | None = None
    C: float | None = None
    class_weight: Mapping[Any, float] | Literal["balanced"] | None = None

    def _labels(self, y: Any, active: str, n_rows: int) -> tuple[list[Any], Floats]:
        return self._class_numbers(one_column(y), active, n_rows)

    def _penalty(self, weighed: float) -> dict[str, float]:
        if self.C is None:
            return {}
        if not isinstance(self.C, Real) or not self.C > 0.0 or self.l2 != 0.0:
            got = f"got C={self.C!r}, l2={self.l2}"
            raise ConfigError(f"expected a number C above 0 with l2=0, as C sets l2 = 1 / (C * sum of weights); {got}")
        return {"l2": 1.0 / (float(self.C) * weighed)}

    def _class_weights(self, system: System, target: Floats, weight: Floats | None) -> Floats | None:
        if self.class_weight is None:
            return weight
        if system.split != "none":
            raise ConfigError(
                f"leave class_weight out: under protocol {system.name!r}, other parties get the weights of rows and "
                "would read labels from them"
            )
        return weights_of_classes(target, self.classes_, None, self.class_weight, weight)

    def _keep(self, parts: dict[str, LinearPart]) -> None:
        super()._keep(parts)
        holder = label_holder(parts.values())
        assert holder.intercept is not None
        assert holder.classes is not None
        self.classes_ = np.array(holder.classes)
        if holder.of_classes:
            self._keep_classes(parts, holder)
            return
        self.calibration_ = holder.calibration
        # After `set_params` on a fitted model, there are no losses.
        if self.early_stopping_rounds is not None and holder.eval_losses:
            self.best_iteration_ = int(np.argmin(list(holder.eval_losses.values())[-1]))
        # scikit-learn's shape for two classes, on one table.
        for name in ("coef_", "standardized_coef_"):
            of = getattr(self, name)
            setattr(self, name, of if isinstance(of, dict) else of[None, :])
        self.intercept_ = np.array([self.intercept_])
        self.standardized_intercept_ = np.array([holder.intercept])

    def _keep_classes(self, parts: dict[str, LinearPart], holder: LinearPart) -> None:
        """Set the attributes of models of each class against the rest."""
        self.calibration_ = [model.calibration for model in holder.of_classes]
        made = [calibration or Calibration(1.0, 0.0) for calibration in self.calibration_]
        plain = {name: np.array([model.coef for model in part.of_classes]) for name, part in parts.items()}
        # The calibration is linear: its slope scales weights, its offset only the intercept.
        slopes = np.array([of.slope for of in made])[:, np.newaxis]
        coef = {name: slopes * [of.per_unit(of.coef) for of in part.of_classes] for name, part in parts.items()}
        zeros = np.array([[model.at_zero() for model in part.of_classes] for part in parts.values()]).sum(axis=0)
        self.standardized_coef_, self.coef_ = (plain, coef) if ALONE not in parts else (plain[ALONE], coef[ALONE])
        self.standardized_intercept_ = np.array([model.intercept for model in holder.of_classes])
        self.intercept_ = np.array([by.log_odds(zero) for by, zero in zip(made, zeros, strict=True)])

    def decision_function(self, X: Tables) -> Floats:
        """Return log-odds of the second class, calibrated if the model is; above 0, this class is predicted.

        With more than two classes: the log-odds of each class against the rest; the highest is predicted.

        Parameters
        ----------
        X : table, or mapping of party name to table
            Rows with the columns of training: a dataframe, array or sparse matrix; between owners of columns, each
            party's own, with the same rows in the same order.

        Returns
        -------
        float64 (n_rows,), or (n_rows, n_classes)

        Raises
        ------
        DataError
            For other parties or columns than those of training, or row counts that differ.
        """
        margins = self._checked_margins(X)
        return label_holder(self.parts_.values()).log_odds(margins)

    def _checked_margins(self, X: Tables) -> Floats:
        margins = self._margins(X)
        # Between parties, no training can warn: no party has seen margins.
        caution = label_holder(self.parts_.values()).caution(margins)
        if caution is not None and not self._predicting().in_one_place:
            warn_user(caution)
        return margins

    @spelled_out(decision_function)
    def predict_proba(self, X: Tables) -> Floats:
        """Return class probabilities (n_rows, n_classes).

        With more than two classes, they are the probabilities of each class against the rest, divided by their sum.

        Parameters and errors are as for `decision_function`.
        """
        margins = self._checked_margins(X)
        return label_holder(self.parts_.values()).probabilities(margins)

    @spelled_out(decision_function)
    def predict(self, X: Tables) -> NDArray[Any]:
        """Return the most probable class of each row (n_rows,).

        Parameters and errors are as for `decision_function`.
        """
        log_odds = self.decision_function(X)
        best = np.argmax(log_odds, axis=1) if log_odds.ndim == 2 else (log_odds > 0.0).astype(np.intp)
        return np.asarray(self.classes_[best])
