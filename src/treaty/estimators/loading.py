"""`load`: a model from the folder that an estimator's `save` wrote."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from treaty.estimators.glm import LinearRegression, PoissonRegressor
from treaty.estimators.linear import LogisticRegression
from treaty.estimators.reporting import params_of, read_parts, read_saved
from treaty.estimators.scorecard import Scorecard
from treaty.estimators.statistics import ColumnStatistics
from treaty.estimators.trees import GBDTClassifier, GBDTRanker, GBDTRegressor
from treaty.files import as_path

Estimator = (
    GBDTClassifier | GBDTRegressor | GBDTRanker | LogisticRegression | LinearRegression | PoissonRegressor | Scorecard
    | ColumnStatistics
)  # fmt: skip
_KINDS: dict[str, type[Estimator]] = {kind.__name__: kind for kind in get_args(Estimator)}


def load(folder: str | Path, *, trusted: Iterable[str] = ()) -> Estimator:
    """Load a model from the folder that `save` wrote.

    Parameters
    ----------
    folder : str or Path
        The folder. It may come from an untrusted source: no code in it is run.
    trusted : iterable of str, default ()
        Names of custom systems and losses, ``package.module:NAME``, that the model may use; their code is imported.

    Returns
    -------
    GBDTClassifier, GBDTRegressor, GBDTRanker, LogisticRegression, LinearRegression, PoissonRegressor, Scorecard
    or ColumnStatistics
        The fitted model, with its parameters.

    Raises
    ------
    ConfigError
        If a file is missing or is not from a Treaty model, or names code that is not `trusted`.

    See Also
    --------
    GBDTClassifier.save : Write the folder.

    Examples
    --------
    >>> import numpy as np, tempfile, treaty
    >>> X = np.arange(60.0)[:, None]
    >>> model = treaty.GBDTRegressor(n_estimators=2).fit(X, X[:, 0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save(f"{folder}/model")
    ...     again = treaty.load(f"{folder}/model")
    >>> bool((again.predict(X) == model.predict(X)).all())
    True
    """
    folder = as_path(folder, "folder")
    saved = read_saved(folder)
    kind = _KINDS.get(saved.kind, GBDTRegressor)
    model = kind(**params_of(saved, trusted, kind._model))
    model._restore(saved, read_parts(folder, saved, kind._model))
    return model
