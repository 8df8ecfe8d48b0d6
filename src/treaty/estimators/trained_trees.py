"""Methods of trained trees: predictions, leaves, contributions, importances, export."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import narwhals as nw
import numpy as np
import pyarrow
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from treaty.errors import ConfigError
from treaty.estimators.base import TableEstimator, Tables
from treaty.machine.process import cores
from treaty.models.interpretation import Contributions, Kind, importances, joined_booster
from treaty.models.trees import HeldOut, RowDecisions, check_starts, forest_of, leaves, staged_margins
from treaty.runs.threads import active_of
from treaty.systems.options import spelled_out
from treaty.systems.pooled.system import ALONE, check_margins


class TrainedTrees(TableEstimator):
    """Methods of trained boosted trees; `_decide` turns outputs into what `predict` returns."""

    evals_result_: dict[str, dict[str, list[float]]]
    best_iteration_: int
    best_score_: float

    @property
    def held_out_(self) -> HeldOut | None:
        """Metrics by group, and calibration, of held-out rows of participants (`validation_fraction`), or None."""
        return next((part.held_out for part in self.parts_.values() if part.held_out is not None), None)

    def _owners(self) -> set[str]:
        """Return the parties that own a split in use; while training, all."""
        if not hasattr(self, "parts_"):
            return set(self.schemas_)
        forest = forest_of(list(self.parts_.values()))
        return {forest.sources[source] for tree in forest.trees for source in np.unique(tree.source[tree.left >= 0])}

    def _margins(self, X: Tables, base_margin: Any = None) -> NDArray[np.float64]:
        predicting, start = self._predicting(), self._start(base_margin)
        return start(predicting.margins(self._matched(X, base_margin=base_margin), self.transport))

    def _start(self, base_margin: Any) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
        """Return a function that adds rows' own margins to those of the trees."""
        check_starts(forest_of(list(self.parts_.values())), given=base_margin is not None)
        start = partial(check_margins, base_margin, "X")
        return lambda margins: margins if base_margin is None else margins + start(*margins.shape)

    def _decided(self, X: Tables) -> RowDecisions:
        predicting = self._predicting()
        if predicting.settings[0].hides_decisions:
            raise ConfigError(
                'inference="shared" and membership="hidden" hide which leaf a row is in; inference="plain" has '
                "leaves and stages"
            )
        return predicting.decisions(self._matched(X))

    def predict(self, X: Tables, *, base_margin: Any = None) -> NDArray[Any]:
        """Return each row's most probable class, or the predicted mean.

        Parameters
        ----------
        X : table, or mapping of party name to table
            Rows with the columns of training: a dataframe, array or sparse matrix; between owners of columns, each
            party's own, with the same rows in the same order.
        base_margin : array-like (n_rows,) or (n_rows, n_classes), or None
            Margins from which these rows start; of a model that was trained with it, and only then.

        Returns
        -------
        ndarray (n_rows,)

        Raises
        ------
        DataError
            For other parties or columns than those of training, or row counts that differ.
        """
        return self._decide(self._predictions(X, base_margin))

    @spelled_out(predict)
    def staged_predict(self, X: Tables, *, base_margin: Any = None) -> Iterator[NDArray[Any]]:
        """Yield the result of `predict` after each round; the parties exchange messages only once.

        Parameters
        ----------
        X, base_margin
            As for `predict`.

        Yields
        ------
        ndarray (n_rows,)

        Raises
        ------
        ConfigError
            With ``inference="shared"``, which hides the decisions that this needs.
        DataError
            As for `predict`.
        """
        return map(self._decide, self._stages(X, base_margin))

    def _decide(self, outputs: NDArray[np.float64]) -> NDArray[Any]:
        """Return classes or means (n_rows,) of probabilities or means (n_rows, n_outputs)."""
        return outputs[:, 0]

    @spelled_out(staged_predict)
    def predict_leaf(self, X: Tables) -> NDArray[np.int32]:
        """Return the leaf of each row; parties run in threads.

        Parameters and errors are as for `staged_predict`.

        Returns
        -------
        int32 (n_rows, n_trees)
            The leaf's number among its tree's nodes; the root is 0. With more than two classes, a round has a tree for
            each class.
        """
        return leaves(self._decided(X), cores(self.n_jobs))

    @spelled_out(staged_predict)
    def apply(self, X: Tables) -> NDArray[np.int32]:
        """Return the leaf of each row, int32 (n_rows, n_trees): `predict_leaf` by XGBoost's name.

        Parameters and errors are as for `staged_predict`.
        """
        return self.predict_leaf(X)

    def evals_result(self) -> dict[str, dict[str, list[float]]]:
        """Return the metrics of each eval set, one number per round: `evals_result_` by XGBoost's name."""
        check_is_fitted(self, "parts_")
        return self.evals_result_

    @property
    def best_iteration(self) -> int:
        """The last round that early stopping kept, from 0; AttributeError without early stopping (XGBoost's name)."""
        return int(self._of_early_stopping("best_iteration_"))

    @property
    def best_score(self) -> float:
        """The metric that decided early stopping, after the last kept round; AttributeError without early stopping."""
        return self._of_early_stopping("best_score_")

    def _of_early_stopping(self, name: str) -> float:
        if not hasattr(self, name):
            raise AttributeError(f"{name.removesuffix('_')} needs a fit with early_stopping_rounds")
        return float(getattr(self, name))

    def _stages(self, X: Tables, base_margin: Any = None) -> Iterator[NDArray[np.float64]]:
        """Yield probabilities or means (n_rows, n_outputs) after each round, from one batch of decisions."""
        found, start = self._decided(X), self._start(base_margin)
        forest = forest_of(list(self.parts_.values()))
        for margins in staged_margins(found, forest, cores(self.n_jobs)):
            yield forest.objective.predictions(start(margins))

    @spelled_out(staged_predict)
    def predict_contributions(self, X: Tables) -> NDArray[np.float64] | Contributions:
        """Return the contribution of each column to each row's margin: exact TreeSHAP, as XGBoost's ``pred_contribs``.

        Parameters
        ----------
        X
            As for `staged_predict`.

        Returns
        -------
        float64 (n_rows, n_features + 1) or (n_rows, n_classes, n_features + 1)
            For a model on one table; the second form with more than two classes. The last column is the bias; the sum
            of a row is its margin, without a `base_margin`.
        treaty.interpretation.Contributions
            For a vertical model: each party's own columns, and the bias; its ``joined()`` is the array above. Parties
            run in threads. docs/interpretation.md lists what a party learns from it.

        Raises
        ------
        ConfigError
            With ``inference="shared"``, which hides the decisions that this needs; for a horizontal model, which does
            not record how many rows its nodes had.
        DataError
            As for `staged_predict`.
        """
        predicting = self._predicting()
        if predicting.settings[0].hides_decisions:
            raise ConfigError(
                'inference="shared" and membership="hidden" hide which leaf a row is in; inference="plain" has '
                "contributions"
            )
        return predicting.contributions(self._matched(X))

    @spelled_out(predict_contributions)
    def contributions_frame(self, X: Tables) -> Any:
        """Return `predict_contributions` as a dataframe: a column for each column of X, by its name, and "bias".

        With more than two classes, each column of X has a column for each class, such as "age: setosa".

        Parameters and errors are as for `predict_contributions`.

        Returns
        -------
        dataframe
            Of the same library as X (in a mapping, the first table); a `pyarrow.Table` for arrays.
        """
        values = self._in_place(self._joined_contributions(X))
        names = [*self._column_names(), "bias"]
        # (n_rows, n_classes, n_columns) becomes a column for each column and class.
        if values.ndim > 2:
            names = [f"{name}: {label}" for name in names for label in self.classes_]
            values = values.transpose(0, 2, 1).reshape(len(values), -1)
        first = next(iter(X.values())) if isinstance(X, Mapping) else X
        try:
            library = nw.get_native_namespace(nw.from_native(first, eager_only=True))
        except TypeError:
            library = pyarrow
        columns = dict(zip(names, values.T, strict=True))
        return nw.from_dict(columns, backend=library).to_native()

    @spelled_out(predict_contributions)
    def explain(self, X: Tables) -> Any:
        """Return `predict_contributions` as a `shap.Explanation`, for plots such as ``shap.plots.beeswarm``.

        The columns of all parties are joined, or, with the parameter `parties`, in the order of the one table.

        Parameters
        ----------
        X
            As for `predict_contributions`.

        Returns
        -------
        shap.Explanation
            `values` float64 (n_rows, n_features), with more than two classes (n_rows, n_features, n_classes), in
            margins; `base_values`, `feature_names`, `data` with the numbers of categories, and `display_data` with
            their names.

        Raises
        ------
        ConfigError
            If shap is not installed; also as `predict_contributions` raises it.
        DataError
            As for `predict_contributions`.
        """
        try:
            import shap
        except ImportError as error:
            raise ConfigError("explain() needs shap: pip install 'treaty-learn[shap]'") from error
        values = self._joined_contributions(X)
        values, bias = self._in_place(values), values[..., -1]
        values = values[..., :-1]
        tables = self._tables(X, reset=False)
        # Plots color points by codes (`data`), and label them with names (`display_data`).
        shown = [
            column if known is None else np.array([*known, "unseen", None], object)[_codes(column, len(known))]
            for table in tables.values()
            for column, known in zip(table.columns, table.schema.categories, strict=True)
        ]
        return shap.Explanation(
            values=values if values.ndim == 2 else values.transpose(0, 2, 1),
            base_values=bias,
            data=self._in_place(np.hstack([table.matrix() for table in tables.values()])),
            display_data=self._in_place(np.column_stack([column.astype(object) for column in shown])),
            feature_names=self._column_names(),
        )

    def _joined_contributions(self, X: Tables) -> NDArray[np.float64]:
        """Return contributions of all parties' columns, and the bias last."""
        found = self.predict_contributions(X)
        return found.joined() if isinstance(found, Contributions) else found

    def _column_names(self) -> list[str]:
        """Return the names of all columns, in the order of the table that X is."""
        names = getattr(self, "feature_names_in_", None)
        if names is not None:
            return [str(name) for name in names]
        return [f"f{position}" for position in range(self.n_features_in_)]

    def _in_place(self, values: NDArray[Any]) -> NDArray[Any]:
        """Reorder values of parties' joined columns to the order of the one table, with the parameter `parties`.

        `values` is (..., n_features), or has one more value last, which is of no column.
        """
        if not hasattr(self, "positions_by_party_") or ALONE in self.schemas_:
            return values
        # A copy keeps the last value, such as the bias, in its place.
        in_place = values.copy()
        in_place[..., [position for name in self.schemas_ for position in self.positions_by_party_[name]]] = values[
            ..., : self.n_features_in_
        ]
        return in_place

    def importances(
        self, kind: Kind = "gain", consent: Iterable[str] | None = (), *, normalised: bool = False
    ) -> dict[str, dict[str, float]]:
        """Return the importance of each column, by party, as the active party may see it.

        Parameters
        ----------
        kind : {"gain", "cover", "count"}
            Total gain of the column's splits, total cover of their nodes (not of a horizontal model), or their number.
            A model with hidden rows has neither gains nor covers.
        consent : iterable of str or None, default ()
            Parties that let their columns be named; None for all. Used columns of other parties are called "shop #1"
            and so on.
        normalised : bool, default False
            Divide by the sum over all parties.

        Returns
        -------
        dict of str to (dict of str to float)

        Raises
        ------
        ConfigError
            For another kind, one that the model lacks, or a name that is no party.
        """
        check_is_fitted(self, "parts_")
        return importances(list(self.parts_.values()), active_of(self.parts_), kind, consent, normalised=normalised)

    @property
    def feature_importances_(self) -> NDArray[np.float64]:
        """Total gain of each column's splits, scaled to sum 1 (n_features,); under hidden rows, their number.

        Columns are in the order of the table; for a mapping of tables, those of all parties, one after the other.
        """
        kind: Kind = "gain" if forest_of(list(self.parts_.values())).has_gains else "count"
        found = self.importances(kind, consent=None, normalised=True)
        return self._in_place(np.array([of for name in self.parts_ for of in found[name].values()]))

    def to_xgboost(self, consent: Iterable[str] = ()) -> Any:
        """Return an `xgboost.Booster` with the same predictions, on the joined columns of consenting parties.

        Parameters
        ----------
        consent : iterable of str, default ()
            Parties that agree: all whose splits are in use, besides the active one. A model of one table needs none.

        Returns
        -------
        xgboost.Booster
            Its `predict` returns probabilities (classifier) or means. Columns have the parties' names (``f0``, ``f1``
            and so on for arrays), with the party as a prefix (``"bank.age"``) if several parties have columns.
            Categorical columns must have the categories of training in the same order;
            ``json.loads(booster.attr("categories"))`` has them by column. Unlike the estimator, a booster identifies
            categories by number, and handles unseen categories in its own way.

        Raises
        ------
        ConfigError
            If a party owns splits in use, or shares of weights, but does not consent, or XGBoost is not installed.
        """
        check_is_fitted(self, "parts_")
        return joined_booster(list(self.parts_.values()), consent)

    def _predictions(self, X: Tables, base_margin: Any = None) -> NDArray[np.float64]:
        """Return probabilities or means (n_rows, n_outputs)."""
        margins = self._margins(X, base_margin)
        return forest_of(list(self.parts_.values())).objective.predictions(margins)


def _codes(column: NDArray[np.float32], n_known: int) -> NDArray[np.intp]:
    """Return the codes of categories: `n_known` for unseen categories, one more for missing values."""
    return np.where(np.isnan(column), n_known + 1, np.nan_to_num(column)).astype(np.intp)
