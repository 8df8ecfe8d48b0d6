"""The scikit-learn face: `GBDTClassifier` and `GBDTRegressor`, for pooled and federated training alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin, RegressorMixin

from treaty.data.labels import check_targets
from treaty.estimators.base import Tables
from treaty.estimators.boosted import BoostedTrees
from treaty.estimators.linear import LogisticRegression, restored
from treaty.estimators.saving import params_of, read_parts, read_saved
from treaty.models.trees import forest_of, load_part, of_classes


class GBDTClassifier(ClassifierMixin, BoostedTrees):
    """Gradient boosted trees for two or more classes.

    Parameters
    ----------
    protocol : str or SystemOptions, default "pooled"
        The system: its options, ``SecureBoost(encryption="ou")``, or its name alone for its defaults. One table:
        `treaty.Pooled`. Parties that hold different columns of the same rows: `treaty.SecureBoost`,
        `treaty.FedXGBoostSMM`, `treaty.FedXGBoostLDP`, `treaty.FederBoostVertical`. Participants that hold different
        rows of the same columns: `treaty.FederBoostHorizontal` for a few organisations, `treaty.FedXGB` for hundreds of
        users.
    n_estimators : int, default 20
        Boosting rounds: one tree each, one per class for more than two classes.
    max_depth : int, default 3
        Levels of splits, 1 to 24.
    learning_rate, reg_lambda, reg_alpha, min_split_loss, min_child_weight, subsample, colsample_bytree
        As in XGBoost.
    min_child_samples : int or None, default None
        Fewest training rows in a leaf, a privacy rule; None is 20, in paper mode 1.
    goss, top_rate, other_rate
        Sampling of rows by gradient in place of `subsample`.
    max_bin : int, default 32
        Most bins per column, 2 to 255.
    base_score : float, default 0.5
        Where training starts: a probability for two classes, else a margin.
    fractional_bits : int, default 16
        Gradients are rounded once to multiples of 2^-fractional_bits, the same in every system.
    early_stopping_rounds : int or None, default None
        Stop when the last eval set's loss has not fallen for so many rounds.
    random_state : int or None, default None
        Seed of row and column sampling.
    n_jobs : int or None, default None
        Threads; None for all cores.
    active : str or None, default None
        The party with the labels; None for the first. `FederBoostHorizontal`: the participant that leads; with the name
        of no participant, a party without data leads. `FedXGB`: None.
    transport : {"memory", "grpc"}, default "memory"
        How `fit` plays the parties: threads, or one process each over gRPC with mutual TLS on this machine.

    Attributes
    ----------
    classes_ : ndarray (n_classes,)
    parts_ : dict of str to ModelPart
        Each party's part of the model; one part, "pooled", where the model is whole.
    evals_result_ : dict
        ``{"eval_0": {"logloss": [...]}}``, one number per round.
    n_iter_ : int
        Rounds of the model.
    best_iteration_ : int
        With early stopping: the last of these rounds, from 0.
    clipped_rows_ : int
        Of a regression, most rows of one round whose gradient was clipped.
    feature_importances_ : float64 (n_features,)
    communication_ : dict
        Of each ordered pair of parties: messages, bytes, and bytes by message type. "fedxgb": beside users "server",
        "edge0" and so on, and "authority".
    timings_ : dict
        Seconds of set-up (binning, keys), of boosting, and in total (processes have to start, too).
    disclosures_ : dict
        What each party, under "fedxgb" each role, learned beyond its own data, in words.
    """

    def decision_function(self, X: Tables) -> NDArray[np.float64]:
        """Return margins: log-odds of the second class (n_rows,), or (n_rows, n_classes) with more than two.

        X and errors are as in `predict`.
        """
        margins = self._margins(X)
        return margins[:, 0] if margins.shape[1] == 1 else margins

    def predict_proba(self, X: Tables) -> NDArray[np.float64]:
        """Return class probabilities (n_rows, n_classes); X and errors as in `predict`."""
        return of_classes(self._predictions(X))

    def staged_predict_proba(self, X: Tables) -> Iterator[NDArray[np.float64]]:
        """Yield class probabilities (n_rows, n_classes) after each round; X and errors as in `staged_predict`."""
        return map(of_classes, self._stages(X))

    def _decide(self, outputs: NDArray[np.float64]) -> NDArray[Any]:
        return np.asarray(self.classes_[np.argmax(of_classes(outputs), axis=1)])

    def _target(
        self, y: NDArray[Any] | None, party: str, n_rows: int, classes: list[Any] | None = None
    ) -> tuple[list[Any], NDArray[np.float64]]:
        return self._class_numbers(y, party, n_rows, classes)


class GBDTRegressor(RegressorMixin, BoostedTrees):
    """Gradient boosted trees for a numeric target, with squared error; parameters as `GBDTClassifier`.

    `base_score` is the prediction training starts from; set it near the mean of the labels.
    """

    def _decide(self, outputs: NDArray[np.float64]) -> NDArray[Any]:
        return outputs[:, 0]

    def _target(
        self, y: NDArray[Any] | None, party: str, n_rows: int, classes: list[Any] | None = None
    ) -> tuple[None, NDArray[np.float64]]:
        return None, check_targets(y, party, n_rows)


def load(folder: str | Path) -> GBDTClassifier | GBDTRegressor | LogisticRegression:
    """Read what `save` wrote.

    Parameters
    ----------
    folder : str or Path

    Returns
    -------
    GBDTClassifier, GBDTRegressor or LogisticRegression
        Fitted, with the parameters it had.

    Raises
    ------
    ConfigError
        If a file is missing or is not one of a Treaty model.
    """
    saved = read_saved(folder)
    if saved.kind == "LogisticRegression":
        return restored(folder, saved)
    model = (GBDTClassifier if saved.kind == "GBDTClassifier" else GBDTRegressor)(**params_of(saved))
    model._restore(saved)
    model.parts_ = read_parts(folder, saved, load_part)
    forest = forest_of(list(model.parts_.values()))
    if forest.classes is not None:
        model.classes_ = np.array(forest.classes)
    model._keep(forest)
    return model
