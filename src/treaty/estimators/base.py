"""What all estimators share: the system and its options, conversion of tables, checks of labels, report and files."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from treaty.data.columns import check_labels
from treaty.data.table import Schema, Table, match_rows, to_table
from treaty.errors import ConfigError, DataError, warn_user
from treaty.estimators.files import opened, shown
from treaty.estimators.inputs import check_one_kind, check_row_order, known_tables, split_by_party, training_tables
from treaty.estimators.reporting import SavedEstimator, write_model
from treaty.files import as_path
from treaty.machine.arrays import Floats
from treaty.machine.process import trust
from treaty.runs.fit import TrainedModel, TrainingOutcome
from treaty.runs.threads import Run
from treaty.systems import ESTIMATORS, SYSTEMS, Model, find_system
from treaty.systems.options import SystemOptions, advice, called_here, converted, names_of, plain
from treaty.systems.pooled.system import ALONE
from treaty.systems.system import LabelledRows, System, roles_of
from treaty.trees.objectives import as_text

_SUFFIXES_OF_FILES = {".json", ".ubj", ".pkl", ".pickle", ".joblib", ".bin", ".txt", ".model", ".part", ".onnx"}

# One table (any dataframe or array), or {party: table}.
Tables = Any
# A system, its own options and the common ones.
Settings = tuple[System, Any, Any]


def one_column(y: Any) -> Any:
    """Flatten labels in a column (n_rows, 1), with scikit-learn's warning; return others unchanged."""
    # Others are not for scikit-learn to convert: it makes floats of nullable integers, and "nan" of NaN among text.
    try:
        shape = np.shape(y) if isinstance(y, list) else getattr(y, "shape", ())
    except ValueError:  # lists of several lengths, which are no labels
        return y
    return y if y is None or len(shape) == 1 else column_or_1d(y, warn=True)


def refuse_misplaced(estimator: type[BaseEstimator], misplaced: Iterable[str], protocol: Any, method: str = "") -> None:
    """Raise ConfigError for parameters that an estimator, or its `method`, lacks; the error says where they belong."""
    kind, params = estimator.__name__, estimator._get_param_names()
    # A `fit` that passes further parameters on has those of its base class, too.
    fits = [vars(base)["fit"] for base in estimator.__mro__ if "fit" in vars(base)]
    of_fit = list(dict.fromkeys(name for fit in fits for name in signature(fit).parameters))
    known = [name for name in (of_fit if method else params) if name not in ("self", "unknown", "further")]
    for name in misplaced:
        own: type[SystemOptions] | None = type(protocol) if isinstance(protocol, SystemOptions) else None
        # An unknown system has an error of its own, later.
        with suppress(ConfigError):
            own = find_system(protocol).options if isinstance(protocol, str) else own
        if name in params:
            where = f"it belongs to the estimator: {kind}({name}=...)"
        elif own is not None and name in names_of(own) and not called_here(name, known):
            where = f"it belongs to the system: {kind}({own.__name__}({name}=...))"
        elif not method and called_here(name, known) is None and (name in of_fit or called_here(name, of_fit)):
            where = f"it belongs to fit: {kind}().fit(X, y, {called_here(name, of_fit) or name}=...)"
        else:
            where = advice(name, known, None)
        raise ConfigError(f"{kind}{method and f'.{method}'} has no parameter {name!r}; {where}")


class Scored:
    """A base class before scikit-learn's mixins, whose `score` would pair rows by position and ignore indexes."""

    def score(self, X: Tables, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return scikit-learn's score of the predictions; DataError if indexes of X and y differ in order."""
        check_row_order(X, {"y": y, "sample_weight": sample_weight})
        return float(super().score(X, y, sample_weight))  # type: ignore[misc]


class TableEstimator(BaseEstimator):
    """An estimator of one table or of a mapping of party to table.

    Subclasses define the model that they train, its common options, and the parties that a prediction needs.
    """

    _model: ClassVar[Model]
    _common: ClassVar[Any]
    # Common options that the estimator decides.
    _fixed: ClassVar[dict[str, Any]] = {}
    # Why a prediction needs the parties of `_owners`, for an error.
    _why_needed: ClassVar[str]
    # The parameter that a number without a name is most likely meant for.
    _rounds: ClassVar[str]

    # The columns of `parties` at `fit`, as parameters may change later.
    columns_by_party_: dict[str, list[Any]]
    positions_by_party_: dict[str, list[int]]

    protocol: str | SystemOptions
    active: str | None
    transport: str
    n_jobs: int | None
    parties: Mapping[str, Iterable[Any]] | None
    schemas_: dict[str, Schema]
    parts_: dict[str, Any]

    # ------------------------------------------------------------ options

    def __new__(cls, *given: Any, **params: Any) -> Self:
        """Refuse unknown parameters, and say where they belong; the signature stays that of `__init__`."""
        number = next((value for value in given if isinstance(value, (int, float, np.number))), None)
        if number is not None or len(given) > 1:
            raise ConfigError(
                f"{cls.__name__} takes the system first, by its name or options, and all other parameters by name: "
                f"expected {cls.__name__}({cls._rounds}={'...' if number is None else number}), got "
                f"{', '.join(map(repr, given))}"
            )
        protocol = given[0] if given else params.get("protocol", "pooled")
        refuse_misplaced(cls, [name for name in params if name not in cls._get_param_names()], protocol)
        estimator: Self = super().__new__(cls)
        return estimator

    def set_params(self, **params: Any) -> Self:
        """Set parameters, those of the system as ``protocol__NAME``; a system given by name becomes its options.

        Raises ConfigError for an option that the system does not have.
        """
        chosen = params.get("protocol", self.protocol)
        if isinstance(chosen, str) and any(name.startswith("protocol__") for name in params):
            trust([chosen])
            params["protocol"] = chosen = find_system(chosen, self._model).options()
        own = self.get_params(deep=False)
        refuse_misplaced(type(self), [name for name in params if name.partition("__")[0] not in own], chosen)
        super().set_params(**params)
        return self

    def _chosen(self) -> tuple[System, SystemOptions]:
        """Return the system and its own options, as given."""
        given = self.protocol
        # The user has named the system's code as an argument; `load` asks before it does so.
        trust([given if isinstance(given, str) else getattr(given, "system", None)])
        if isinstance(given, str):
            system = find_system(given, self._model)
            return system, system.options()
        if isinstance(given, type) and issubclass(given, SystemOptions):
            raise ConfigError(f"expected an instance, protocol={given.__name__}(), got the class {given.__name__}")
        if not isinstance(given, SystemOptions):
            raise ConfigError(f"expected protocol to be a system's name or its options, got {given!r}")
        try:
            system = find_system(type(given).system, self._model)
        except ConfigError:
            system = find_system(type(given).system)
        if system.common is not self._common:
            owner = next(of for model, of in ESTIMATORS.items() if type(given).system in SYSTEMS[model])
            raise ConfigError(f"{type(given).__name__} is a system of {owner}, not of {type(self).__name__}")
        return system, given

    def _settings(self, **changed: Any) -> Settings:
        """Return the system, its own options and the common ones, all checked; `changed` hold for this call."""
        system, given = self._chosen()
        own = converted(given.get_params(), type(given), type(given).__name__)
        names = set(names_of(self._common)) & set(self._get_param_names())
        params = {name: getattr(self, name) for name in names} | self._fixed | changed
        trust([plain(params.get("objective"))])
        if "eval_metric" in params:
            params["eval_metric"] = as_text(params["eval_metric"], in_processes=self.transport == "tls")
        state = params.get("random_state")
        if not (state is None or state is np.random or isinstance(state, int | np.integer | np.random.RandomState)):
            raise ConfigError(f"expected random_state to be a whole number, a numpy RandomState or None, got {state!r}")
        # A seed drawn from a RandomState reaches all parties; the generator itself cannot.
        if isinstance(state, np.random.RandomState) or state is np.random:
            params["random_state"] = int(check_random_state(params["random_state"]).randint(np.iinfo(np.int32).max))
        common = converted(params, self._common, type(self).__name__)
        own = own.settled(common)
        common = common.checked(own)
        own.check(common)
        if self.n_jobs is not None and (not isinstance(self.n_jobs, (int, np.integer)) or self.n_jobs == 0):
            raise ConfigError(f"expected n_jobs to be a number of threads, -1 or None for all, got {self.n_jobs!r}")
        if self.transport not in ("memory", "tls"):
            raise ConfigError(f"expected transport 'memory' or 'tls', got {self.transport!r}")
        if self.transport == "tls" and system.split == "none":
            raise ConfigError(f"protocol {system.name!r} has one party and no transport; leave transport='memory'")
        return system, own, common

    # ------------------------------------------------------------ tables and labels

    def _forget(self) -> None:
        """Remove the attributes of an earlier fit."""
        for name in [name for name in vars(self) if name.endswith("_")]:
            delattr(self, name)

    def _tables(self, X: Tables, *, reset: bool, **labels: Any) -> dict[str, Table]:
        """Convert X to tables by party, in the parties' order; `labels` are columns of labels and weights."""
        system = self._chosen()[0]
        check_row_order(X, labels)
        if self.parties is not None if reset else hasattr(self, "columns_by_party_"):
            X = self._by_party(X, system, reset=reset)
        # A sparse matrix in the DOK format is a mapping, too.
        if not isinstance(X, Mapping) or hasattr(X, "nnz"):
            if not reset and ALONE not in self.schemas_:
                raise DataError(f"expected a mapping of the parties {', '.join(self.schemas_)} to their tables")
            if system.split == "columns":
                raise DataError(
                    f"protocol {system.name!r} expects a mapping of party to table, got {type(X).__name__}: pass a "
                    "dict, or name each party's columns of the one table with parties={party: columns}"
                )
            X = opened(X)
            if not reset and (len(X.shape) == 2 if hasattr(X, "shape") else isinstance(X, list | tuple) and X):
                validate_data(self, shown(X), reset=False, skip_check_array=True)
            table = to_table(X, schema=None if reset else self.schemas_[ALONE], on_unseen=warn_user)
            if reset:
                validate_data(self, shown(X), reset=True, skip_check_array=True)
            return {ALONE: table}
        if system.split == "rows":
            raise DataError(f"a model of protocol {system.name!r} predicts one table, got a mapping")
        if not all(isinstance(name, str) for name in X) or not X:
            raise DataError("expected a mapping of party names (text) to tables")
        if reset and system.split == "none" and len(X) > 1 and self.parties is None:
            warn_user(
                f"protocol 'pooled' joins the tables of {', '.join(X)} in one place; to keep them apart, name another "
                "system, such as 'secureboost' for trees or 'quasi-newton' for a regression"
            )
        if not reset:
            return known_tables(X, self.schemas_, self._owners(), self._why_needed)
        tables = training_tables(X, self._active(X))
        if self.parties is None:
            named = [f"{party}.{name}" for party, table in tables.items() for name in table.schema.names]
            self.feature_names_in_ = np.array(named, dtype=object)
        self.n_features_in_ = sum(len(table.schema.names) for table in tables.values())
        return tables

    def _by_party(self, X: Tables, system: System, *, reset: bool) -> dict[str, Any]:
        """Return the columns of one table by party, as in `parties`."""
        if system.split == "rows":
            by_row = f"in protocol {system.name!r} participants have rows: give fit a mapping of participant to (X, y)"
            raise ConfigError(f"leave out parties=..., which assigns columns; {by_row}")
        if isinstance(X, Mapping) and not hasattr(X, "nnz"):
            raise ConfigError("parties=... assigns the columns of one table, got a mapping of tables as well")
        X = opened(X)
        columns = _listed(self.parties) if reset else self.columns_by_party_
        tables, positions = split_by_party(X, columns)
        names = list(map(str, getattr(X, "column_names", getattr(X, "columns", ()))))
        if reset:
            self.columns_by_party_, self.positions_by_party_ = columns, positions
        # scikit-learn compares order and number of columns; columns of the same names may come in another order.
        if reset or not names or sorted(names) != sorted(getattr(self, "feature_names_in_", ())):
            validate_data(self, shown(X), reset=reset, skip_check_array=True)
        return tables

    def _owners(self) -> set[str]:
        """Return the parties whose columns the model uses."""
        raise NotImplementedError

    def _matched(self, X: Tables, **labels: Any) -> dict[str, Table]:
        tables = self._tables(X, reset=False, **labels)
        match_rows(tables)
        return tables

    def _active(self, tables: Mapping[str, Any]) -> str:
        if self.active is None:
            return next(iter(tables))
        if not isinstance(self.active, str) or self.active not in tables:
            raise ConfigError(f"expected active to be one of {', '.join(tables)}, got {self.active!r}")
        return self.active

    def _class_numbers(
        self, y: Any, party: str, n_rows: int, classes: list[Any] | None = None
    ) -> tuple[list[Any], Floats]:
        """Check labels; return the classes, which a training sets, and each row's number among them."""
        y = check_labels(y, party, n_rows)
        check_one_kind({party: y})
        if classes is None:
            check_classification_targets(y)
            self.classes_ = np.unique(y)
        others = f"{party}: expected the labels seen in training, got others - in an eval set"
        try:
            target = np.searchsorted(self.classes_, y)
        except TypeError:  # numbers and text have no order
            raise DataError(others) from None
        if len(self.classes_) < 2:
            raise DataError(f"{party}: expected labels of at least two classes, got one class in all {n_rows} rows")
        # `searchsorted` returns a place for any label: compare the class there.
        if np.any(self.classes_[np.minimum(target, len(self.classes_) - 1)] != y):
            raise DataError(others)
        return self.classes_.tolist(), target.astype(np.float64)

    # ------------------------------------------------------------ runs

    def _run_on_columns(
        self, settings: Settings, tables: dict[str, Table], active: str, y: Floats, weight: Floats | None, **more: Any
    ) -> Run:
        """Return the run of a training on one table, or between owners of columns; `more` are further fields of it."""
        system, own, common = settings
        # Only the active party has labels and weights.
        none = np.zeros(0)
        data = {name: LabelledRows(table, y if name == active else none) for name, table in tables.items()}
        data[active] = LabelledRows(tables[active], y, weight)
        return Run(
            system=system, options=own, common=common, roles=roles_of(system, list(tables), active, own), data=data,
            n_jobs=self.n_jobs, **more,
        )  # fmt: skip

    def _keep_training(self, trained: TrainingOutcome, started: float) -> None:
        """Set the fitted attributes of a training that began when `time.perf_counter` was `started`."""
        self.communication_, self.disclosures_ = trained.traffic.totals, trained.learned
        self.timeline_ = trained.traffic.timeline
        self.timings_ = {**trained.seconds, "total": time.perf_counter() - started}
        self._keep(trained.parts)

    def _predicting(self) -> TrainedModel:
        """Return the trained model and its settings, for a prediction."""
        check_is_fitted(self, "parts_")
        system, own, common = self._settings(random_state=None)
        return TrainedModel(system, (own, common), self.parts_, self.n_jobs)

    # ------------------------------------------------------------ report and files

    def report(
        self,
        path: str | Path,
        X: Tables = None,
        y: Any = None,
        *,
        pooled: TableEstimator | None = None,
        alone: TableEstimator | None = None,
        consent: Iterable[str] | None = (),
        title: str | None = None,
    ) -> None:
        """Write a report of the training and the model: one HTML file that loads nothing, for any browser.

        It begins with a verdict in words, and shows what the active party sees: scores, learning curves, importances by
        party, contributions of columns, messages, seconds, what each party learned, the cost of noise, parameters and
        versions. It lists the sections that have no data. It contains no row of a table, but aggregates over rows and
        labels.

        Parameters
        ----------
        path : str or Path
            The file, which only its owner can read. An existing file is replaced.
        X : table, or mapping of party name to table, or None
            Rows that the model was not trained on, in the form that `predict` takes: for scores, and (trees)
            contributions of columns.
        y : array-like (n_rows,) or None
            Their labels: for scores, ROC, calibration, and (trees) the loss by round.
        pooled : estimator or None
            A fitted estimator of the same kind on one table, for comparison. If X is given, it must be able to predict
            it.
        alone : estimator or None
            A fitted estimator of the same kind on the active party's own data: the report says what partners add to it.
        consent : iterable of str or None, default ()
            Parties that let their columns be named; None for all.
        title : str or None
            The title of the page. None: the system and the estimator.

        Raises
        ------
        ConfigError
            If matplotlib is not installed (extra ``report``), the file cannot be written, `pooled` is of another kind,
            a name in `consent` is no party, or y is given without X, or for a ranking.
        DataError
            For tables or labels that do not fit the model.
        """
        # Imported here, as few fits are followed by a report.
        from treaty.estimators.reporting import contents_of
        from treaty.report.page import check_possible, write_page

        path = as_path(path, "path")
        check_possible(path)
        write_page(path, contents_of(self, X, y, pooled, consent, title, alone))

    def save(self, folder: str | Path) -> None:
        """Write the model to a folder: a file ``NAME.part`` for each party, and ``model.json``, which lists them.

        Parameters
        ----------
        folder : str or Path
            Created if it does not exist. `treaty.load` reads it. A RandomState, callbacks and functions for
            `eval_metric` are not saved.

        Raises
        ------
        ConfigError
            If the folder cannot be written, or has the name of a file ("model.json").

        See Also
        --------
        treaty.load : Read the model again; its example saves one.
        """
        check_is_fitted(self, "parts_")
        folder = as_path(folder, "folder")
        if folder.suffix.lower() in _SUFFIXES_OF_FILES:
            raise ConfigError(
                "save makes a folder, with a file for each party and model.json: expected the name of a folder, as in "
                f"save({folder.stem!r}), got {str(folder)!r}"
            )
        write_model(folder, self)

    def _restore(self, saved: SavedEstimator, parts: dict[str, Any]) -> None:
        """Set what `save` stored besides parameters."""
        self.schemas_ = saved.schemas
        if saved.learned:
            self.disclosures_ = saved.learned
        self.n_features_in_ = sum(len(schema.names) for schema in saved.schemas.values())
        if saved.positions is not None:
            self.columns_by_party_, self.positions_by_party_ = _listed(self.parties), saved.positions
        if saved.feature_names is not None:
            self.feature_names_in_ = np.array(saved.feature_names, dtype=object)
        self._keep(parts)

    def _keep(self, parts: dict[str, Any]) -> None:
        """Set the fitted attributes that follow from the parts."""
        raise NotImplementedError

    def _plain_params(self) -> dict[str, Any]:
        """Return the parameters, the system by its name, with numpy scalars as Python's."""
        params = {**self.get_params(deep=False), "protocol": type(self._chosen()[1]).system}
        if self.parties is not None:
            params["parties"] = {name: [plain(column) for column in of] for name, of in self.parties.items()}
        if not isinstance(params.get("random_state"), int | np.integer):
            params.pop("random_state", None)
        params.pop("callbacks", None)
        metrics = params.get("eval_metric")
        if any(map(callable, metrics if isinstance(metrics, list | tuple) else [metrics])):
            params.pop("eval_metric")
        # As pairs, since JSON's field names are text.
        if isinstance(params.get("class_weight"), Mapping):
            params["class_weight"] = [[plain(label), float(of)] for label, of in params["class_weight"].items()]
        return {name: plain(value) for name, value in params.items()}

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = tags.input_tags.sparse = True
        return tags


def _listed(parties: Any) -> Any:
    """Return `parties` with lists of columns, as iterators can be read only once; anything else unchanged."""
    if not isinstance(parties, Mapping):
        return parties
    return {
        party: list(columns) if isinstance(columns, Iterable) and not isinstance(columns, str) else columns
        for party, columns in parties.items()
    }
