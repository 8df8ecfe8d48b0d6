"""The arguments of `fit` and `predict`: tables, weights of classes, `verbose` and callbacks."""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import narwhals as nw
import numpy as np
from narwhals.dependencies import is_pandas_like_dataframe, is_pandas_like_series
from numpy.typing import NDArray
from sklearn.utils.class_weight import compute_sample_weight

from treaty.data.arrow_tables import FileTable
from treaty.data.columns import check_labels, check_weights
from treaty.data.reading import is_dataset
from treaty.data.sparse import is_sparse
from treaty.data.table import Schema, Table, to_table
from treaty.errors import ConfigError, DataError, warn_user
from treaty.estimators.files import opened
from treaty.machine.arrays import Floats
from treaty.machine.kernels import KernelCache
from treaty.models.trees import ModelPart
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.system import ALONE
from treaty.systems.system import LabelledRows, System
from treaty.trees.boosting import NoMoreTrees


def training_tables(X: Mapping[str, Any], active: str) -> dict[str, Table]:
    """Convert the parties' tables of a training; the active one's may have no column, but not all parties'."""
    given = {name: opened(table, name) for name, table in X.items()}
    tables = {
        name: to_table(table, party=name) for name, table in given.items() if not (name == active and _empty(table))
    }
    if not tables:
        raise DataError(f"expected a party with columns, got none among {', '.join(X)}")
    # The active party has labels, but no features.
    if active not in tables:
        tables[active] = Table(Schema((), ()), [], next(iter(tables.values())).n_rows)
    return {name: tables[name] for name in X}


def refuse_labels(X: Any, tables: Mapping[str, Table], y: Any) -> None:
    """Raise DataError if a column of a file equals the labels in every row: the user probably forgot to drop it.

    `X` is what the user passed for `tables`. In a dataframe or an array, the user has chosen the columns.
    """
    named = X if isinstance(X, Mapping) and not hasattr(X, "nnz") else dict.fromkeys(tables, X)
    for party, table in tables.items():
        if not (isinstance(named[party], str | Path | FileTable) or is_dataset(named[party])):
            continue
        labels = check_labels(y, party, table.n_rows)
        for name, column, values in zip(table.schema.names, table.columns, table.schema.categories, strict=True):
            # The first rows of most columns differ already.
            few = slice(1000)
            if _equal(column[few], values, labels[few]) and _equal(column, values, labels):
                raise DataError(
                    f"{party}: column {name!r} of the file equals the labels in all {table.n_rows} rows, so a model "
                    f"would learn nothing else. Leave it out: treaty.open_table(path, drop=[{name!r}])"
                )


def _equal(column: NDArray[Any], values: Sequence[Any] | None, labels: NDArray[Any]) -> bool:
    """Return whether a column, with the `values` of its codes if it is categorical, equals labels."""
    if values is None:
        return labels.dtype.kind in "biuf" and np.array_equal(column, labels.astype(column.dtype))
    # Missing values are NaN, and take the None at the end.
    return np.array_equal(np.array([*values, None], object)[np.nan_to_num(column, nan=-1.0).astype(np.intp)], labels)


def participants(X: Any, protocol: str) -> dict[str, LabelledRows]:
    """Convert a mapping of party to (X, y) or (X, y, sample_weight); DataError names a party with anything else.

    Labels may be of any kind, and none is missing.
    """
    expected = f"protocol {protocol!r} expects a mapping of party to (X, y) or (X, y, sample_weight)"
    # A sparse matrix in the DOK format is a mapping, too.
    if not isinstance(X, Mapping) or hasattr(X, "nnz"):
        raise DataError(f"{expected}, got {type(X).__name__}")
    if not X or not all(isinstance(name, str) and name for name in X):
        raise DataError(f"{expected}, got {'parties that are not named by text' if X else 'no party'}")
    found: dict[str, LabelledRows] = {}
    unnamed: dict[str, int] = {}
    for name, given in X.items():
        if not isinstance(given, tuple) or len(given) not in (2, 3):
            got = f"a tuple of {len(given)}" if isinstance(given, tuple) else type(given).__name__
            raise DataError(f"{expected}, got {got} - at {name}")
        check_row_labels([(f"{name}'s {what}", of) for what, of in zip(("X", "y", "weights"), given, strict=False)])
        table = to_table(given[0], party=name, doubles=True)
        y, weight = check_labels(given[1], name, table.n_rows), given[2] if len(given) == 3 else None
        weight = None if weight is None else check_weights(weight, n_rows=table.n_rows, party=name)
        found[name] = LabelledRows(table, y, weight)
        # Columns of arrays have no names, so all participants need the same number.
        if not hasattr(given[0], "columns") and not isinstance(given[0], FileTable):
            unnamed[name] = len(table.schema.names)
    if unnamed and len(unnamed) < len(found):
        named = ", ".join(name for name in found if name not in unnamed)
        raise DataError(
            "expected dataframes (columns are matched by name) or arrays (by position) at all participants, got arrays "
            f"at {', '.join(unnamed)} and dataframes at {named}"
        )
    if len(set(unnamed.values())) > 1:
        counts = ", ".join(f"{name} {n}" for name, n in unnamed.items())
        raise DataError(
            f"expected arrays with the same number of columns at all participants, got {counts}; in dataframes, whose "
            "columns have names, a participant may lack some"
        )
    return found


def check_one_kind(labels: Mapping[str, NDArray[Any]]) -> None:
    """Raise DataError for classes that cannot be compared, such as numbers at one party and text at another."""
    kinds = {name: _kind(y) for name, y in labels.items()}
    for name, kind in kinds.items():
        if " and " in kind:
            raise DataError(f"{name}: expected labels of one kind, got {kind}")
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{kind} at {name}" for name, kind in kinds.items())
        raise DataError(f"expected labels of one kind at all participants, got {listed}")


def _kind(y: NDArray[Any]) -> str:
    """Return the type of labels; types joined by "and" if they cannot be compared with each other."""
    labels = (y if y.dtype.kind == "O" else y[:1]).tolist()
    if all(isinstance(label, numbers.Number | np.bool_) for label in labels):
        return {"b": "bool", "i": "int", "u": "int", "f": "float"}.get(np.array(labels).dtype.kind, "number")
    return " and ".join(sorted({"str" if isinstance(label, str) else type(label).__name__ for label in labels}))


def check_row_labels(given: Collection[tuple[str, Any]]) -> None:
    """Raise DataError if the indexes of named tables and columns differ; rows are matched by position.

    Only pandas and similar libraries have an index. A default index, which counts from 0, is only compared with one of
    the same labels, for its order.
    """
    indexes = [
        (name, data.index) for name, data in given if is_pandas_like_dataframe(data) or is_pandas_like_series(data)
    ]
    first, chosen = next(((name, index) for name, index in indexes if not _counts_rows(index)), ("", None))
    for name, index in indexes:
        if chosen is None or len(index) != len(chosen) or index.equals(chosen):
            continue
        shuffled = bool(index.isin(chosen).all() and chosen.isin(index).all())
        if shuffled or not _counts_rows(index):
            differ = "the same labels in another order" if shuffled else "different labels"
            raise DataError(
                f"rows are matched by position, but the indexes of {first} and {name} have {differ}: sort the rows, as "
                "a.loc[b.index] does, or call reset_index(drop=True) on both if rows at the same position belong "
                "together"
            )


def check_row_order(X: Any, columns: Mapping[str, Any]) -> None:
    """Check the order of rows: of one table, or those of several parties, and of labels and weights, by name."""
    tables = X.items() if isinstance(X, Mapping) and not hasattr(X, "nnz") else [("X", X)]
    check_row_labels([*tables, *columns.items()])


def _counts_rows(index: Any) -> bool:
    """Return whether an index is the default one of dataframes: 0, 1, 2 and so on."""
    return bool(index.dtype.kind in "iu" and np.array_equal(index, np.arange(len(index))))


def are_labelled(X: Any) -> bool:
    """Return whether X is a mapping of party to (X, y), as only horizontal protocols take it."""
    return isinstance(X, Mapping) and any(
        isinstance(given, tuple) and len(given) in (2, 3) and len(getattr(given[0], "shape", ())) == 2
        for given in X.values()
    )


def known_tables(
    X: Mapping[str, Any], schemas: Mapping[str, Schema], needed: Collection[str], why: str
) -> dict[str, Table]:
    """Convert the tables of parties that have trained, in their order; DataError for other parties or columns.

    The model uses the columns of the `needed` parties; `why` is for the error if one is missing. For other absent
    parties, a table of missing values is used.
    """
    absent = [name for name in schemas if name not in X]
    missed = [name for name in absent if name in needed]
    if not set(X) <= set(schemas) or missed or len(absent) == len(schemas):
        raise DataError(
            f"expected tables of the parties {', '.join(schemas)}, got {', '.join(map(str, X))}"
            + (f"; without {', '.join(missed)} {why}" if missed else "")
        )
    tables = {
        name: to_table(opened(X[name], name), party=name, schema=schema, on_unseen=warn_user)
        for name, schema in schemas.items()
        if schema.names and name in X
    }
    n_rows = next(iter(tables.values())).n_rows
    # One array stands for all columns of absent parties: nothing writes to it.
    missing = np.full(n_rows, np.nan, np.float32)
    return {
        name: tables.get(name, Table(schema, [missing] * len(schema.names), n_rows)) for name, schema in schemas.items()
    }


def rows_with_weight(tables: dict[str, Table], target: Floats, weight: Floats | None, *more: Any) -> tuple[Any, ...]:
    """Return one table, its labels, weights and `more` columns (arrays or None) without rows of weight 0.

    Tables of several parties are unchanged: rows are matched by position, and other parties do not learn weights.
    """
    if weight is None or ALONE not in tables or weight.all():
        return tables, target, weight, *more
    of, kept = tables[ALONE], weight > 0.0
    return {ALONE: of.rows(kept)}, target[kept], weight[kept], *(None if each is None else each[kept] for each in more)


def positions_by_party(
    parties: Mapping[str, Iterable[Any]], names: Sequence[str] | None, n_columns: int
) -> dict[str, list[int]]:
    """Return the positions of each party's columns in one table, given its columns' names (None: an array).

    Raises ConfigError for an unknown column, and for a column of no party, or of two.
    """
    if not isinstance(parties, Mapping) or not parties or not all(isinstance(name, str) for name in parties):
        raise ConfigError(f"expected parties={{name: columns}}, as {{'bank': [...], 'shop': [...]}}, got {parties!r}")
    found: dict[str, list[int]] = {}
    for party, columns in parties.items():
        if isinstance(columns, str) or not isinstance(columns, Iterable):
            raise ConfigError(f"expected a list of columns for {party}, got {columns!r} - at parties")
        found[party] = [_position(column, party, names, n_columns) for column in columns]
    taken = Counter(position for of in found.values() for position in of)
    called = [repr(name) for name in names] if names is not None else list(map(str, range(n_columns)))
    twice = [called[position] for position, times in taken.items() if times > 1]
    left = [called[position] for position in range(n_columns) if position not in taken]
    if twice or left:
        wrong = f"of two parties: {', '.join(twice[:10])}" if twice else f"of no party: {', '.join(left[:10])}"
        raise ConfigError(f"expected every column of the table to be of one party, got columns {wrong} - at parties")
    return found


def _position(column: Any, party: str, names: Sequence[str] | None, n_columns: int) -> int:
    """Return the position of a party's column in the table."""
    if names is not None:
        if str(column) not in names:
            near = get_close_matches(str(column), names, 1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"the table has no column {column!r}, which is one of {party}'s{meant} - at parties")
        return names.index(str(column))
    if isinstance(column, bool) or not isinstance(column, (int, np.integer)):
        raise ConfigError(
            f"columns of an array are named by position: expected numbers from 0 to {n_columns - 1} for {party}, got "
            f"{column!r} - at parties; or pass a dataframe (in a Pipeline: set_output(transform='pandas'))"
        )
    if not 0 <= column < n_columns:
        raise ConfigError(f"expected positions from 0 to {n_columns - 1} for {party}, got {column} - at parties")
    return int(column)


def split_by_party(X: Any, parties: Mapping[str, Iterable[Any]]) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Return each party's columns of one dataframe or array, and their positions; errors as in `positions_by_party`."""
    if isinstance(X, FileTable):
        positions = positions_by_party(parties, X.column_names, len(X.column_names))
        return {party: X.select([X.column_names[k] for k in of]) for party, of in positions.items()}, positions
    try:
        frame = nw.from_native(X, eager_only=True)
    except TypeError:  # an array, a sparse matrix, or lists
        array = X.tocsc() if is_sparse(X) else X if isinstance(X, np.ndarray) else np.asarray(X)
        if array.ndim != 2:
            raise DataError(f"expected a table of two dimensions, got {array.ndim}") from None
        positions = positions_by_party(parties, None, array.shape[1])
        return {party: array[:, of] for party, of in positions.items()}, positions
    positions = positions_by_party(parties, list(map(str, frame.columns)), len(frame.columns))
    return {party: frame[:, of].to_native() if of else None for party, of in positions.items()}, positions


def _empty(table: Any) -> bool:
    """Return whether an active party has no features: None, or a table without columns."""
    shape = getattr(table, "shape", None)
    return table is None or (isinstance(shape, tuple) and len(shape) == 2 and shape[1] == 0)


class GivenRows(NamedTuple):
    """Rows to train on, or of an eval set, as the user passed them."""

    X: Any
    y: Any
    weight: Any = None
    base_margin: Any = None


def eval_sets_of(
    eval_set: Any, sample_weight_eval_set: Any = None, base_margin_eval_set: Any = None
) -> list[GivenRows]:
    """Return an eval set (X, y) or (X, y, sample_weight), or several; ConfigError for anything else."""
    in_tuple = isinstance(eval_set, tuple) and bool(eval_set) and all(isinstance(given, tuple) for given in eval_set)
    sets = [] if eval_set is None else list(eval_set) if in_tuple or isinstance(eval_set, list) else [eval_set]
    if any(not isinstance(given, tuple | list) or len(given) not in (2, 3) for given in sets):
        raise ConfigError("expected eval_set=(X, y) or (X, y, sample_weight), or a list of them")
    found = [GivenRows(*given) for given in sets]
    weights = listed_for(found, sample_weight_eval_set, "sample_weight_eval_set")
    if twice := [k for k, weight in enumerate(weights) if weight is not None and found[k].weight is not None]:
        raise ConfigError(f"expected weights of eval_{twice[0]} in eval_set or in sample_weight_eval_set, got both")
    found = [of if weight is None else of._replace(weight=weight) for of, weight in zip(found, weights, strict=True)]
    margins = listed_for(found, base_margin_eval_set, "base_margin_eval_set")
    return [of._replace(base_margin=margin) for of, margin in zip(found, margins, strict=True)]


def listed_for(sets: Sequence[Any], given: Any, name: str) -> list[Any]:
    """Return the values of the parameter `name`, one for each eval set; None for each where there are none."""
    if given is None:
        return [None] * len(sets)
    if not isinstance(given, list | tuple) or len(given) != len(sets):
        got = f"{len(given)} of them" if isinstance(given, list | tuple) else type(given).__name__
        raise ConfigError(f"expected {name} as a list with an entry for each of {len(sets)} eval sets, got {got}")
    return list(given)


def refuse_revealing_weights(system: System, own: SystemOptions, class_weight: Any) -> None:
    """Raise ConfigError if weights of classes would reveal what a system of boosted trees hides of labels."""
    if own.label_epsilon is not None:
        either = "leave out scale_pos_weight and class_weight, or the noise"
        raise ConfigError(f"weights of classes would reveal labels that noise hides: {either}")
    if isinstance(class_weight, str) and class_weight == "balanced" and (system.split == "rows" or own.adds_noise):
        raise ConfigError(
            f"class_weight='balanced' needs the counts of all labels, which protocol {system.name!r} hides: name the "
            "weight of each class, class_weight={label: weight}"
        )


def weights_of_classes(
    target: Floats, classes: NDArray[Any], scale_pos_weight: float | None, class_weight: Any, weight: Floats | None
) -> Floats:
    """Return each row's weight times that of its class; `target` has the numbers of `classes`.

    `scale_pos_weight` is the weight of the second class of two, as in XGBoost; `class_weight` has weights by label, or
    is "balanced", as in scikit-learn.
    """
    if scale_pos_weight is not None and class_weight is not None:
        raise ConfigError("expected scale_pos_weight or class_weight, got both")
    if scale_pos_weight is not None:
        if len(classes) != 2:
            raise ConfigError(f"scale_pos_weight needs two classes, got {len(classes)}: use class_weight")
        number = isinstance(scale_pos_weight, Real) and not isinstance(scale_pos_weight, bool)
        if not number or not np.isfinite(scale_pos_weight) or not scale_pos_weight > 0:
            raise ConfigError(f"expected a number scale_pos_weight above 0, got {scale_pos_weight!r}")
        of_rows = np.where(target == 1.0, float(scale_pos_weight), 1.0)
    else:
        if not isinstance(class_weight, str | Mapping):
            raise ConfigError(f"expected class_weight to be {{label: weight}} or 'balanced', got {class_weight!r}")
        # scikit-learn's errors name its own arguments.
        try:
            of_rows = compute_sample_weight(class_weight, classes[target.astype(np.intp)])
        except (ValueError, TypeError) as error:
            raise ConfigError(f"class_weight={class_weight!r}: {error}") from None
        if not np.all(np.isfinite(of_rows) & (of_rows > 0.0)):
            raise ConfigError(
                f"expected weights above 0 for all classes, got class_weight={class_weight!r}: all parties would leave "
                "out rows of weight 0, and so learn labels; leave the class out of the tables instead"
            )
    return of_rows if weight is None else of_rows * weight


class Watch:
    """Prints metrics and calls callbacks, after every round or epoch.

    It is called with the number of finished rounds and the active party's part, or losses by set. It prints XGBoost's
    lines, ``[0]  eval_0-logloss:0.61``, for every `verbose`-th round. Callbacks have ``after_iteration(model, epoch,
    evals_log) -> bool``, as `xgboost.callback.TrainingCallback`.
    """

    def __init__(self, model: Any, verbose: bool | int) -> None:
        given = getattr(model, "callbacks", None) or []
        if not isinstance(given, list | tuple):
            raise ConfigError(f"expected callbacks in a list, got {type(given).__name__}")
        self._model, self._callbacks = model, list(given)
        if not isinstance(verbose, int | np.integer) or verbose < 0:
            raise ConfigError(f"expected verbose to be a bool, or the number of rounds between lines, got {verbose!r}")
        if any(not callable(getattr(callback, "after_iteration", None)) for callback in self._callbacks):
            raise ConfigError("expected callbacks with a method after_iteration(model, epoch, evals_log)")
        if self._callbacks and model.transport == "tls":
            raise ConfigError("callbacks are called in this process: they need transport='memory'")
        self._every, self._shown, self._begun = int(verbose), 0, False
        KernelCache.printed = self._every > 0
        self.call("before_training")

    def __call__(self, done: int, part: Any) -> None:
        """Show the rounds since the last call; raise `NoMoreTrees` where a callback returns True.

        The first call is before the first round, or the first after those of a checkpoint.
        """
        history: Mapping[str, Mapping[str, list[float]]]
        before = 0
        if isinstance(part, ModelPart):
            done, history, before = part.grown.rounds, part.grown.history, part.grown.before
        else:
            history = {name: {"loss": of} for name, of in (part or {}).items()}
        for at in range(max(self._shown, before), done):
            if self._every and at % self._every == 0:
                print(_line(at, history, before), flush=True)
        # The first call comes before a round of this fit, so callbacks are not due yet.
        begun, self._begun, self._shown = self._begun, True, max(self._shown, done)
        if not begun:
            return
        asked_to_stop = [callback.after_iteration(self._model, done - 1, history) for callback in self._callbacks]
        if any(asked_to_stop):
            raise NoMoreTrees

    def call(self, method: str) -> None:
        """Call a method without further arguments, at the callbacks that have it."""
        for callback in self._callbacks:
            if hasattr(callback, method):
                getattr(callback, method)(self._model)


def _line(at: int, history: Mapping[str, Mapping[str, list[float]]], before: int) -> str:
    values = [
        f"{name}-{metric}:{of[at - before]:.5f}"
        for name, metrics in history.items()
        for metric, of in metrics.items()
        if at - before < len(of)
    ]
    return "\t".join([f"[{at}]", *values])
