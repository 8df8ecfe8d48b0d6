"""The scikit-learn face of linear models: `LogisticRegression`, for pooled and federated training alike."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils import Tags
from sklearn.utils.multiclass import type_of_target

from treaty.data.labels import check_weights
from treaty.data.table import match_rows
from treaty.errors import DataError
from treaty.estimators.base import TableEstimator, Tables, one_column
from treaty.estimators.saving import SavedEstimator, params_of, read_parts
from treaty.linear.losses import probabilities, warn_beyond_taylor
from treaty.models.linear import LinearPart, label_holder, load_linear_part
from treaty.runs.fit import train
from treaty.systems.logistic.options import RegressionOptions
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.system import ALONE


class LogisticRegression(ClassifierMixin, TableEstimator):
    """Logistic regression of two classes, by stochastic quasi-Newton steps or gradient descent.

    Columns are prepared inside the party that owns them: missing values become the median, categories a column each,
    all are standardised and clipped at 10 standard deviations.

    Parameters
    ----------
    protocol : str or SystemOptions, default "pooled"
        The system: its options, ``QuasiNewton(coordinator=False)``, or its name alone for its defaults. One table:
        `treaty.Pooled`. Parties that hold different columns of the same rows: `treaty.QuasiNewton` or `treaty.SGD`.
    max_iter : int
        Most epochs.
    batch_size : int
        Rows in a mini-batch; all of the table where it has fewer.
    learning_rate : float or None
        None is 0.05 by quasi-Newton, 0.15 by gradient descent.
    tol : float
        Training ends when the losses of two epochs differ by less.
    l2 : float
        Penalty of l2 / 2 times the sum of squared weights beside the mean loss.
    memory, period : int
        Quasi-Newton: correction pairs kept, and iterations from one to the next.
    random_state : int or None
        Seed of the batches; between parties it counts if all who have data name the same.
    n_jobs : int or None
        Threads; None for all cores.
    active : str or None
        The party with the labels; None for the first.
    transport : {"memory", "grpc"}
        How `fit` plays the parties: threads, or one process each over gRPC with mutual TLS on this machine.
    fractional_bits : int
        Numbers are encrypted as multiples of 2^-fractional_bits.

    Attributes
    ----------
    classes_ : ndarray (2,)
    parts_ : dict of str to LinearPart
        Each party's part of the model.
    coef_ : float64 (1, n_columns), or dict of str to float64 (n_columns,)
        Weights of the prepared columns, by party where `fit` was given a mapping; a category has a column of its own,
        see `LinearPart.column_names`.
    intercept_ : float64 (1,)
        Held by the active party.
    n_iter_ : int
        Epochs.
    loss_history_ : list of float
        Of every epoch, the mean loss of its batches, each at the weights it was met with, without the penalty.
    evals_result_ : dict
        The same as ``{"train": {"taylor": [...]}}``, in the form of `GBDTClassifier`.
    communication_ : dict
        Of each ordered pair of parties: messages, bytes, and bytes by message type.
    timings_ : dict
        Seconds of set-up, of training, and in total.
    disclosures_ : dict
        What each party learned beyond its own data, in words.

    References
    ----------
    Yang, Fan, Chen, Shi, Yang, "A Quasi-Newton Method Based Vertical Federated Learning Framework for Logistic
    Regression", 2019 (arXiv 1912.00513).
    """

    _model, _common = "logistic", RegressionOptions
    _why_needed = "margins lack its columns"

    def __init__(
        self,
        protocol: str | SystemOptions = "pooled",
        *,
        max_iter: int = 30,
        batch_size: int = 1000,
        learning_rate: float | None = None,
        tol: float = 1e-5,
        l2: float = 0.0,
        memory: int = 5,
        period: int = 4,
        fractional_bits: int = 32,
        random_state: int | None = None,
        n_jobs: int | None = None,
        active: str | None = None,
        transport: Literal["memory", "grpc"] = "memory",
    ) -> None:
        self.protocol = protocol
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.tol = tol
        self.l2 = l2
        self.memory = memory
        self.period = period
        self.fractional_bits = fractional_bits
        self.random_state = random_state
        self.n_jobs = n_jobs
        self.active = active
        self.transport = transport

    def fit(
        self,
        X: Tables,
        y: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        checkpoint: str | Path | None = None,
    ) -> Self:
        """Train, playing every party on this machine.

        Parameters
        ----------
        X : table, or mapping of party name to table
            A table is any dataframe, numeric array or list of rows. Of a mapping, rows correspond by position and the
            first party is the active one unless `active` names another; its table may have no column.
        y : array-like (n_rows,)
            Labels of two classes, held by the active party.
        sample_weight : array-like (n_rows,) or None
            Not negative, held by the active party; scaled to mean 1.
        checkpoint : path or None
            Folder of what parties keep from one fit on the same rows to the next; "pooled" keeps nothing.

        Returns
        -------
        self

        Raises
        ------
        ConfigError
            For an option that is wrong, unknown or not of this protocol, or batches too small to hide labels.
        DataError
            For a table or label that cannot be used, row counts that differ, or more than two classes.
        """
        started = time.perf_counter()
        self._forget()
        settings = self._settings()
        tables = self._tables(X, reset=True)
        active = self._active(tables)
        classes, target = self._class_numbers(one_column(y), active, next(iter(tables.values())).n_rows)
        if len(classes) > 2:  # scikit-learn's words first
            raise DataError(
                f"{active}: Only binary classification is supported. The type of the target is "
                f"{type_of_target(classes)}; expected labels of two classes, got {len(classes)}"
            )
        match_rows(tables, target)
        weight = None if sample_weight is None else check_weights(sample_weight, n_rows=len(target), party=active)
        self.schemas_ = {name: table.schema for name, table in tables.items()}
        trained = train(
            self._run_on_columns(settings, tables, active, target, weight, classes),
            transport=self.transport,
            checkpoint=None if checkpoint is None else Path(checkpoint),
            weighted=weight is not None,
        )
        self.communication_, self.disclosures_ = trained.traffic.totals, trained.learned
        self.timings_ = {**trained.seconds, "total": time.perf_counter() - started}
        self._keep(trained.parts)
        return self

    def _keep(self, parts: dict[str, LinearPart]) -> None:
        """Set the fitted attributes that follow from the parts."""
        holder = label_holder(parts.values())
        assert holder.intercept is not None
        assert holder.classes is not None
        self.parts_, self.classes_ = parts, np.array(holder.classes)
        alone = parts.get(ALONE)
        self.coef_ = {name: part.coef for name, part in parts.items()} if alone is None else alone.coef[None, :]
        self.intercept_ = np.array([holder.intercept])
        self.loss_history_ = holder.losses
        self.evals_result_ = {"train": {holder.loss: holder.losses}}
        self.n_iter_ = len(holder.losses)

    def decision_function(self, X: Tables) -> NDArray[np.float64]:
        """Return margins: log-odds of the second class.

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
        predicting = self._predicting()
        margins = predicting.margins(self._matched(X), self.transport)
        if not predicting.in_one_place:  # what margins are, nobody has seen in training
            warn_beyond_taylor(margins)
        return margins

    def predict_proba(self, X: Tables) -> NDArray[np.float64]:
        """Return class probabilities (n_rows, 2); X and errors as in `decision_function`."""
        p = probabilities(self.decision_function(X))
        return np.column_stack([1.0 - p, p])

    def predict(self, X: Tables) -> NDArray[Any]:
        """Return the more probable class of each row (n_rows,); X and errors as in `decision_function`."""
        second = self.decision_function(X) > 0.0
        return np.asarray(self.classes_[second.astype(np.intp)])

    def _owners(self) -> set[str]:
        return {name for name, part in self.parts_.items() if np.any(part.coef)}

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


def restored(folder: str | Path, saved: SavedEstimator) -> LogisticRegression:
    """Return the model that `LogisticRegression.save` wrote to a folder; see `treaty.load`."""
    model = LogisticRegression(**params_of(saved))
    model._restore(saved)
    model._keep(read_parts(folder, saved, load_linear_part))
    return model
