"""`LinearModel`, the training of all linear models, and the regressions: `LinearRegression`, `PoissonRegressor`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import d2_tweedie_score
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from treaty.data.columns import check_targets, check_weights
from treaty.data.table import match_rows
from treaty.errors import ConfigError, warn_user
from treaty.estimators.base import Scored, Settings, TableEstimator, Tables, one_column, refuse_misplaced
from treaty.estimators.files import framed
from treaty.estimators.inputs import Watch, check_row_order, eval_sets_of, refuse_labels, rows_with_weight
from treaty.files import as_path
from treaty.machine.arrays import Floats
from treaty.models.linear import LinearPart, label_holder
from treaty.runs.fit import train
from treaty.runs.threads import Watched
from treaty.systems.logistic.options import RegressionOptions
from treaty.systems.options import SystemOptions, spelled_out
from treaty.systems.pooled.system import ALONE
from treaty.systems.system import System


@dataclass(eq=False, repr=False)
class LinearModel(TableEstimator):
    """Training of linear models, and the attributes that follow from the parties' parts."""

    _model, _common = "logistic", RegressionOptions
    _why_needed = "margins lack its columns"
    _rounds = "max_iter"

    calibration_: Any = field(init=False)
    coef_: Any = field(init=False)
    intercept_: Any = field(init=False)
    standardized_coef_: Any = field(init=False)
    standardized_intercept_: Any = field(init=False)

    protocol: str | SystemOptions = "pooled"
    _: KW_ONLY
    standard_errors: bool = False
    max_iter: int | None = None
    learning_rate: float | None = None
    tol: float = 1e-5
    l2: float = 0.0
    fractional_bits: int = 32
    n_jobs: int | None = None
    active: str | None = None
    transport: Literal["memory", "tls"] = "memory"
    parties: Mapping[str, Iterable[Any]] | None = None
    verbose: bool | int = False
    missing: Literal["median", "raise", "drop"] | None = None
    reference: Literal["first"] | None = None

    def fit(
        self,
        X: Tables,
        y: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        checkpoint: str | Path | None = None,
        eval_set: tuple[Tables, ArrayLike] | Sequence[tuple[Tables, ArrayLike]] | None = None,
        **unknown: Any,
    ) -> Self:
        """Train, playing every party on this machine.

        Parameters
        ----------
        X : table, or mapping of party name to table
            A table is a dataframe, numeric array or list of rows. In a mapping, rows are matched by position, and the
            first party is the active one unless `active` names another; its table may have no column.
        y : array-like (n_rows,)
            Held by the active party: labels of two or more classes, numbers, or counts of 0 or more.
        sample_weight : array-like (n_rows,) or None
            Weights of 0 or more, held by the active party; only for a regression of numbers on one table. They are
            scaled to mean 1.
        checkpoint : path or None
            Folder of what parties keep from one fit on the same rows to the next; "pooled" keeps nothing.
        eval_set : (X, y) or list of them
            Rows whose loss is computed after every epoch, X as above; only for a logistic regression of two classes
            without standard errors. Between parties, the active one receives the others' part of the margins each time,
            which needs ``show_eval_margins=True`` in the system's options.
        **unknown
            Other parameters raise ConfigError, which names the right ones.

        Returns
        -------
        self

        Raises
        ------
        ConfigError
            For an option that is invalid, unknown or not of this protocol, or too few rows or batches to hide labels.
        DataError
            For a table or label that cannot be used, or row counts that differ.

        Warns
        -----
        sklearn.exceptions.ConvergenceWarning
            If training ends at `max_iter` while the loss still changes by `tol` or more.
        """
        refuse_misplaced(type(self), unknown, self.protocol, "fit")
        started = time.perf_counter()
        self._forget()
        watch = Watch(self, self.verbose)
        settings = self._settings()
        tables = self._tables(X, reset=True, y=y, sample_weight=sample_weight)
        active = self._active(tables)
        classes, target = self._labels(y, active, next(iter(tables.values())).n_rows)
        match_rows(tables, target)
        refuse_labels(X, tables, one_column(y))
        weight = None if sample_weight is None else check_weights(sample_weight, n_rows=len(target), party=active)
        weight = self._class_weights(settings[0], target, weight)
        # Rows of weight 0 must not count in medians and standard deviations either.
        tables, target, weight = rows_with_weight(tables, target, weight)
        if self.missing == "drop":
            whole = ~np.logical_or.reduce([np.isnan(of) for table in tables.values() for of in table.columns])
            self.n_dropped_ = int(np.count_nonzero(~whole))
            tables = {name: table.rows(whole) for name, table in tables.items()}
            target, weight = target[whole], None if weight is None else weight[whole]
        changed: dict[str, Any] = self._penalty(len(target) if weight is None else float(weight.sum()))
        changed |= {"family": "multiclass"} if len(classes or ()) > 2 else {}
        # Checked once more, with the seed that the first check drew.
        if changed:
            settings = self._settings(**changed, random_state=settings[2].random_state)
        self.schemas_ = {name: table.schema for name, table in tables.items()}
        run = self._run_on_columns(settings, tables, active, target, weight, classes=classes)
        run = replace(run, eval_sets=self._eval_sets(eval_set, settings, active))
        folder = None if checkpoint is None else as_path(checkpoint, "checkpoint")
        trained = train(run, transport=self.transport, checkpoint=folder, weighted=weight is not None, watch=watch)
        self._keep_training(trained, started)
        unsettled = label_holder(trained.parts.values()).unsettled
        if unsettled:
            warn_user(unsettled, ConvergenceWarning)
        return self

    def _labels(self, y: Any, active: str, n_rows: int) -> tuple[list[Any] | None, Floats]:
        """Return classes (None for a regression of numbers), and labels (n_rows,)."""
        raise NotImplementedError

    def _eval_sets(self, eval_set: Any, settings: Settings, active: str) -> list[Watched]:
        """Check eval sets against the training tables and the options; return tables and labels of each."""
        _, own, common = settings
        given = eval_sets_of(eval_set)
        if any(of.weight is not None for of in given):
            raise ConfigError("rows of a linear model's eval sets all weigh the same: expected eval_set=(X, y)")
        if given:
            common.check_eval_sets(own)
        elif common.early_stopping_rounds is not None:
            raise ConfigError("early_stopping_rounds needs an eval_set: fit(X, y, eval_set=(X_valid, y_valid))")
        evals = []
        for X, y, *_ in given:
            tables = self._tables(X, reset=False, y=y)
            n_rows = next(iter(tables.values())).n_rows
            _, target = self._class_numbers(one_column(y), active, n_rows, self.classes_.tolist())
            match_rows(tables, target)
            evals.append(Watched(tables, target))
        return evals

    def _penalty(self, weighed: float) -> dict[str, float]:
        """Return `l2` if another parameter sets it; `weighed` is the sum of rows' weights, or the number of rows."""
        return {}

    def _class_weights(self, system: System, target: Floats, weight: Floats | None) -> Floats | None:
        """Return the weights of rows times those of their classes, if there are any."""
        return weight

    def _keep(self, parts: dict[str, LinearPart]) -> None:
        holder = label_holder(parts.values())
        self.parts_, made = parts, holder.calibration

        def by_party(of: Mapping[str, Any]) -> Any:
            return of if ALONE not in parts else of[ALONE]

        tables = {name: part.table(made) for name, part in parts.items()}
        self.coef_ = by_party({name: of["coef"][: len(parts[name].coef)] for name, of in tables.items()})
        self.standardized_coef_ = by_party({name: part.coef for name, part in parts.items()})
        # `at_zero` is a part's margin of a row with 0 in all columns: prepared columns are not 0 there.
        zero = sum((part.at_zero() for part in parts.values()), 0.0)
        self.intercept_ = zero if made is None else made.slope * zero + made.offset
        self.standardized_intercept_ = holder.intercept
        if holder.errors is not None:
            self.standard_errors_ = by_party({name: of["standard_error"] for name, of in tables.items()})
            self.p_values_ = by_party({name: of["p_value"] for name, of in tables.items()})
            limits = {name: np.column_stack([of["lower"], of["upper"]]) for name, of in tables.items()}
            self.confidence_intervals_ = by_party(limits)
            self.standardized_errors_ = by_party({name: part.errors for name, part in parts.items()})
        self.loss_history_ = holder.losses
        losses = {"train": holder.losses, **holder.eval_losses}
        self.evals_result_ = {name: {holder.loss: of} for name, of in losses.items()}
        self.n_iter_ = len(holder.losses)

    def summary(self, alpha: float = 0.05) -> Any:
        """Return the weights as a table: a row for each column, and for the intercept, of each class and party.

        Between parties, it joins what each party knows of its own columns. The intercept, with its error, is then for
        rows where the active party's columns are 0 and all others have their means.

        Parameters
        ----------
        alpha : float
            Limits have confidence 1 - `alpha`.

        Returns
        -------
        dataframe
            Of pandas if it is installed, else a `pyarrow.Table`. Columns: "party" and "class", if there are several,
            "column", "coef" and "standardized_coef"; and with standard errors "standard_error", "t" (least squares) or
            "z", "p_value", "lower" and "upper".
        """
        check_is_fitted(self)
        if not isinstance(alpha, float) or not 0.0 < alpha < 1.0:
            raise ConfigError(f"expected alpha between 0 and 1, such as 0.05 for 95 % confidence, got {alpha!r}")
        holder, found = label_holder(self.parts_.values()), dict[str, list[Any]]()
        models = {name: part.of_classes or [part] for name, part in self.parts_.items()}
        for name, of_party in models.items():
            for number, (part, own) in enumerate(zip(of_party, models[holder.party], strict=True)):
                rows = part.table(own.calibration, alpha)
                n = len(rows["coef"])
                keys: dict[str, Any] = {"party": [name] * n} if len(models) > 1 else {}
                keys |= {"class": [(holder.classes or [])[number]] * n} if len(of_party) > 1 else {}
                for column, values in (keys | rows).items():
                    found.setdefault(column, []).extend(values)
        return framed(found)

    def _margins(self, X: Tables) -> Floats:
        """Return the rows' margins (n_rows,)."""
        return self._predicting().margins(self._matched(X), self.transport)

    def _owners(self) -> set[str]:
        if not hasattr(self, "parts_"):  # while training
            return set(self.schemas_)
        each = {name: part.of_classes or [part] for name, part in self.parts_.items()}
        return {name for name, parts in each.items() if any(np.any(part.coef) for part in parts)}


class _Regression(Scored, RegressorMixin, LinearModel):
    """A regression of numbers, which predicts by the inverse of its link."""

    # The inverse of the link: the mean, as a function of margins.
    _mean: ClassVar[Any]

    def _labels(self, y: Any, active: str, n_rows: int) -> tuple[None, Floats]:
        return None, check_targets(one_column(y), active, n_rows)

    def predict(self, X: Tables) -> Floats:
        """Return predicted means: numbers, or expected counts.

        Parameters
        ----------
        X : table, or mapping of party name to table
            Rows with the columns of training: a dataframe, array or sparse matrix; between owners of columns, each
            party's own, with the same rows in the same order.

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
    """Linear regression by least squares, with standard errors if `standard_errors` is set.

    Each party prepares its own columns: missing values become the median, each category a column, and all columns are
    centred and divided by their standard deviation, or by a tenth of their farthest value if that is more. `coef_` and
    the attributes derived from it are in units of the original columns.

    Training is on the whole table, to the optimum: by Newton's method on one table, by L-BFGS between parties.

    Parameters
    ----------
    protocol : str or SystemOptions, default "pooled"
        The system: its options, ``QuasiNewton(coordinator=False)``, or its name alone for its defaults. One table:
        `treaty.Pooled`. Parties that hold different columns of the same rows: `treaty.QuasiNewton` or `treaty.SGD`,
        both of which use the whole table at every step.
    standard_errors : bool, default False
        Whether to compute standard errors and p-values of weights; between parties, this takes further products of
        their columns, see docs/logistic.md.
    max_iter : int or None, default None
        Maximum steps; None is 100.
    learning_rate : float or None, default None
        Factor on steps in new directions, between parties; None is 1 divided by the number of passive parties.
    tol : float, default 1e-5
        Training ends when the losses of two steps differ by less than its square: when predictions change by about
        `tol` standard deviations of the target.
    l2 : float, default 0
        Penalty of l2 / 2 times the sum of squared weights, added to half the mean squared residual; the target is in
        units of its standard deviation.
    fractional_bits : int, default 32
        Numbers are encrypted as multiples of 2^-fractional_bits.
    n_jobs : int or None, default None
        Threads; None for all cores.
    active : str or None, default None
        The party with the labels; None for the first.
    transport : {"memory", "tls"}, default "memory"
        How `fit` runs the parties: in threads, or in a process each, connected by mutual TLS on this machine.
    parties : dict of str to (list of str or int), or None, default None
        The columns of each party in one table, by name or position. `fit` then takes one dataframe, or with positions
        one array, instead of a mapping of tables: ``{"bank": ["age", "income"], "shop": ["visits"]}``.
    verbose : bool or int, default False
        Whether to print a line with the loss after every epoch or step, or after so many.
    missing : {"median", "raise", "drop"} or None, default None
        How to handle rows with missing values. "median": the median replaces a missing number, and no category a
        missing category. "raise": DataError, with their number. "drop": `fit` leaves them out, in all parties' tables.
        None is "raise" with standard errors, else "median".
    reference : {"first"} or None, default None
        "first": weights of categories are relative to the first one (the lowest, by text or number), which has no
        column, so that weights are unique. A missing value counts as the reference.

    Attributes
    ----------
    parts_ : dict of str to LinearPart
        Each party's part of the model.
    coef_ : float64 (n_columns,), or dict of str to float64 (n_columns,)
        What a unit of each column, or a category, adds to the prediction; by party if `fit` was given a mapping.
    intercept_ : float
        Prediction for a row that is 0 in all columns.
    standardized_coef_, standardized_intercept_ : as the two before
        Weights of the prepared columns, in the target's units, and the intercept, which the active party holds.
    standard_errors_, p_values_ : float64 (n_columns + 1,), or dict of such by party
        With `standard_errors`: for `coef_`, and at the active party last for the intercept: on one table `intercept_`,
        between parties that of `summary`.
    confidence_intervals_ : float64 (n_columns + 1, 2), or dict of such by party
        Limits of 95 % confidence; `summary` has others.
    standardized_errors_ : float64 (n_columns + 1,), or dict of such by party
        Standard errors of `standardized_coef_` and `standardized_intercept_`.
    n_dropped_ : int
        With ``missing="drop"``: rows left out.
    n_iter_ : int
        Steps.
    loss_history_ : list of float
        For every step, half the mean squared residual over the target's variance, before the step.
    evals_result_ : dict
        The same by name: ``{"train": {"squared_error": [...]}}``.
    communication_ : dict
        For each ordered pair of parties: messages, bytes, and bytes by message type.
    timeline_ : Timeline or None
        Bytes sent between each pair of parties over time, in up to 60 steps; None if nothing was sent.
    timings_ : dict
        Seconds of set-up, of training, and in total.
    disclosures_ : dict
        What each party learned beyond its own data, in sentences.

    See Also
    --------
    LogisticRegression : Classes instead of numbers.
    PoissonRegressor : Counts.

    Examples
    --------
    >>> import numpy as np, pandas as pd, treaty
    >>> age = np.arange(200.0) % 60 + 18
    >>> tables = {"bank": pd.DataFrame({"age": age}), "shop": pd.DataFrame({"orders": age * 7 % 11})}
    >>> model = treaty.LinearRegression("quasi-newton").fit(tables, 3 * age - 2 * (age * 7 % 11) + 5)
    >>> {name: coef.round(3).tolist() for name, coef in model.coef_.items()}
    {'bank': [3.0], 'shop': [-2.0]}
    >>> round(float(model.intercept_), 3)
    5.0
    """

    _fixed: ClassVar[dict[str, Any]] = {"family": "linear"}
    _mean = staticmethod(np.asarray)


@spelled_out(LinearRegression)
class PoissonRegressor(_Regression):
    """Regression of counts by Poisson's distribution with logarithmic link, between two parties at most.

    Columns are prepared as for `LinearRegression`. Training is on the whole table, to the optimum: by Newton's method
    on one table, by L-BFGS between parties.

    Parameters
    ----------
    protocol : str or SystemOptions, default "pooled"
        The system, as for `LinearRegression`. Two parties with data compute rates under their own keys, with
        `encryption` "ou" or "paillier"; there may be a coordinator, which has no key.
    standard_errors : bool, default False
        Whether to compute standard errors and p-values of weights, from Fisher's information.
    max_iter, learning_rate, tol, fractional_bits, n_jobs, active, transport, parties, verbose, missing, reference
        As for `LinearRegression`.
    l2 : float, default 0
        Penalty of l2 / 2 times the sum of squared weights, added to half the mean deviance; counts are in units of
        their mean.

    Attributes
    ----------
    parts_, standard_errors_, p_values_, confidence_intervals_, standardized_coef_, standardized_intercept_,
    standardized_errors_, n_dropped_, n_iter_, communication_, timeline_, timings_, disclosures_
        As for `LinearRegression`.
    coef_ : float64 (n_columns,), or dict of str to float64 (n_columns,)
        What a unit of each column adds to the logarithm of the rate; by party if `fit` was given a mapping.
    intercept_ : float
        Logarithm of the rate of a row that is 0 in all columns.
    loss_history_ : list of float
        For every step, half the mean deviance of counts in units of their mean, before the step.
    evals_result_ : dict
        The same by name: ``{"train": {"poisson": [...]}}``.

    See Also
    --------
    LinearRegression : Numbers with normal errors.

    Examples
    --------
    >>> import numpy as np, pandas as pd, treaty
    >>> table = pd.DataFrame({"size": np.arange(200) % 5})
    >>> model = treaty.PoissonRegressor().fit(table, 2 ** table["size"])  # each unit of size doubles the rate
    >>> np.exp(model.coef_).round(3)
    array([2.])
    """

    _fixed: ClassVar[dict[str, Any]] = {"family": "poisson"}
    _mean = staticmethod(np.exp)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def score(self, X: Tables, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the share of the deviance that is explained, as in scikit-learn's `PoissonRegressor`.

        Parameters
        ----------
        X : table, or mapping of party name to table
        y : array-like (n_rows,)
        sample_weight : array-like (n_rows,) or None

        Returns
        -------
        float
        """
        check_row_order(X, {"y": y, "sample_weight": sample_weight})
        return float(d2_tweedie_score(y, self.predict(X), sample_weight=sample_weight, power=1))
