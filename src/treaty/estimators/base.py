"""What all estimators share, whatever the model: tables in, labels checked, parameters out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import Tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data

from treaty.data.labels import check_labels
from treaty.data.table import Schema, Table, match_rows, to_table
from treaty.errors import ConfigError, DataError
from treaty.estimators.inputs import check_one_kind, known_tables, training_tables
from treaty.estimators.saving import Saved
from treaty.runs.fit import ALONE

Tables = Any  # one table (any dataframe or array), or {party: table}


def one_column(y: Any) -> Any:
    """Take labels in a column (n_rows, 1) for those in it, with scikit-learn's warning; others stay as they came.

    scikit-learn's own reading of others is too free: nullable integers become floats, and NaN beside text "nan".
    """
    try:
        shape = np.shape(y) if isinstance(y, list) else getattr(y, "shape", ())
    except ValueError:  # lists of several lengths, which are no labels
        return y
    return y if y is None or len(shape) == 1 else column_or_1d(y, warn=True)


class TableEstimator(BaseEstimator):
    """An estimator of one table or of a mapping of party to table.

    Subclasses have the parameters `protocol`, `active`, `transport` and `n_jobs`, say which protocols are vertical and
    horizontal, and which parties a prediction needs.
    """

    _vertical: ClassVar[tuple[str, ...]] = ()
    _horizontal: ClassVar[tuple[str, ...]] = ()
    _why_needed: ClassVar[str]

    protocol: str
    active: str | None
    transport: str
    n_jobs: int | None
    schemas_: dict[str, Schema]

    def _forget(self) -> None:
        """Drop what an earlier fit left."""
        for name in [name for name in vars(self) if name.endswith("_")]:
            delattr(self, name)

    def _check_played(self) -> None:
        """Check how parties are played."""
        if self.n_jobs is not None and (not isinstance(self.n_jobs, (int, np.integer)) or self.n_jobs == 0):
            raise ConfigError(f"expected n_jobs to be a number of threads, -1 or None for all, got {self.n_jobs!r}")
        if self.transport not in ("memory", "grpc"):
            raise ConfigError(f"expected transport 'memory' or 'grpc', got {self.transport!r}")
        if self.transport == "grpc" and self.protocol == "pooled":
            raise ConfigError("protocol 'pooled' has one party and no transport; leave transport='memory'")

    def _tables(self, X: Tables, *, reset: bool) -> dict[str, Table]:
        """Convert X to tables by party, in the parties' order."""
        if not isinstance(X, Mapping) or hasattr(X, "nnz"):  # one kind of sparse matrix is a mapping, too
            if not reset and ALONE not in self.schemas_:
                raise DataError(f"expected a mapping of the parties {', '.join(self.schemas_)} to their tables")
            if self.protocol in self._vertical:
                raise DataError(
                    f"protocol {self.protocol!r} expects a mapping of party to table, got {type(X).__name__}"
                )
            if not reset and getattr(X, "ndim", 2) == 2:
                validate_data(self, X, reset=False, skip_check_array=True)
            table = to_table(X, schema=None if reset else self.schemas_[ALONE])
            if reset:
                validate_data(self, X, reset=True, skip_check_array=True)
            return {ALONE: table}
        if self.protocol in self._horizontal:
            raise DataError(f"a model of protocol {self.protocol!r} takes one table, as it is whole; got a mapping")
        if not all(isinstance(name, str) for name in X) or not X:
            raise DataError("expected a mapping of party names (text) to tables")
        if not reset:
            return known_tables(X, self.schemas_, self._owners(), self._why_needed)
        tables = training_tables(X, self._active(X))
        self.n_features_in_ = sum(len(table.schema.names) for table in tables.values())
        return tables

    def _owners(self) -> set[str]:
        """Return the parties whose columns the model uses."""
        raise NotImplementedError

    def _matched(self, X: Tables) -> dict[str, Table]:
        tables = self._tables(X, reset=False)
        match_rows(tables)
        return tables

    def _active(self, tables: Mapping[str, Any]) -> str:
        if self.active is None:
            return next(iter(tables))
        if self.active not in tables:
            raise ConfigError(f"expected active to be one of {', '.join(tables)}, got {self.active!r}")
        return self.active

    def _class_numbers(
        self, y: Any, party: str, n_rows: int, classes: list[Any] | None = None
    ) -> tuple[list[Any], NDArray[np.float64]]:
        """Check labels and return the classes, set in training, and each row's number among them."""
        y = check_labels(y, party, n_rows)
        check_one_kind({party: y})
        if classes is None:
            check_classification_targets(y)
            self.classes_ = np.unique(y)
        try:
            target = np.searchsorted(self.classes_, y)
        except TypeError:  # numbers and text have no order
            raise DataError(f"{party}: expected the labels seen in training, got others - in an eval set") from None
        if len(self.classes_) < 2:
            raise DataError(f"{party}: expected labels of at least two classes, got one class in all {n_rows} rows")
        if np.any(self.classes_[np.minimum(target, len(self.classes_) - 1)] != y):
            raise DataError(f"{party}: expected the labels seen in training, got others - in an eval set")
        return self.classes_.tolist(), target.astype(np.float64)

    def _saved(self, parties: list[str]) -> Saved:
        """Return what is written beside the parts."""
        names = getattr(self, "feature_names_in_", None)
        return Saved(
            kind=type(self).__name__,
            params=self._plain_params(),
            parties=parties,
            schemas=self.schemas_,
            feature_names=None if names is None else list(names),
        )

    def _restore(self, saved: Saved) -> None:
        """Set what `_saved` kept beside parameters and parts."""
        self.schemas_ = saved.schemas
        self.n_features_in_ = sum(len(schema.names) for schema in saved.schemas.values())
        if saved.feature_names is not None:
            self.feature_names_in_ = np.array(saved.feature_names, dtype=object)

    def _plain_params(self) -> dict[str, Any]:
        """Return the parameters, with numpy scalars, which a parameter grid may hold, as Python's."""
        params = self.get_params(deep=False)
        return {name: value.item() if isinstance(value, np.generic) else value for name, value in params.items()}

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags
