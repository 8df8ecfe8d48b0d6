"""`ColumnStatistics`: what is known of all parties' columns before a model, and which of them to take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, Self

import narwhals as nw
import numpy as np
from numpy.typing import ArrayLike
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from treaty.data.table import Table, match_rows
from treaty.errors import ConfigError
from treaty.estimators.base import TableEstimator, Tables, one_column, refuse_misplaced
from treaty.estimators.files import framed
from treaty.estimators.inputs import eval_sets_of, refuse_labels
from treaty.models.statistics import StatisticsPart
from treaty.runs.fit import train
from treaty.runs.threads import Watched
from treaty.statistics import ColumnBins, Correlation, Monotone, bins_as_columns, columns_as_columns
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.system import ALONE
from treaty.systems.statistics.options import ColumnOptions


@dataclass(eq=False, repr=False)
class ColumnStatistics(TableEstimator):
    """Statistics of columns against a binary label, before a model: WOE and IV by bin, correlations, VIF, stability.

    Each party cuts its own columns into bins. Label 1, the second of both labels, is "bad" (the event):
    WOE = ln(share of all goods in a bin / share of all bads), IV = sum of (difference of both shares) WOE. A count of 0
    counts as 0.5. docs/statistics.md says what each party learns.

    Parameters
    ----------
    protocol : str or SystemOptions, default "pooled"
        One table, or all in one place: `treaty.Pooled`. Between parties: `treaty.Statistics`, or "statistics".
    max_bin : int, default 20
        Most bins of a column before neighbours are merged, from 2 to 255; missing values have one more.
    min_bin_rows : int, default 20
        Fewest rows of a bin.
    monotone : {"auto", "increasing", "decreasing", "none"}, default "auto"
        Neighbouring bins of a numeric column are merged until WOE rises or falls over its values; "auto" takes the
        direction with the higher IV. "none": bins are not merged.
    correlation : {"pearson", "spearman", "none"}, default "pearson"
        Correlation of numeric columns, of values or of ranks; a missing value counts as the mean of its column.
    n_jobs : int or None, default None
        Threads; None for all cores.
    active : str or None, default None
        The party with the labels; None for the first.
    transport : {"memory", "tls"}, default "memory"
        How `fit` runs the parties: in threads, or in a process each, connected by mutual TLS on this machine.
    parties : dict of str to (list of str or int), or None, default None
        The columns of each party in one table, by name or position. `fit` then takes one dataframe, or with positions
        one array, instead of a mapping of tables: ``{"bank": ["age", "income"], "shop": ["visits"]}``.

    Attributes
    ----------
    classes_ : ndarray (2,)
        The labels: good, bad.
    columns_ : dataframe
        A row for each column: "party", "column", "kind", "n_missing", "n_distinct", "iv", "vif", and
        "psi_eval_0", ... for each eval set. Of pandas if it is installed, else a `pyarrow.Table`, as are the next two.
    bins_ : dataframe
        A row for each bin whose labels the active party knows: "party", "column", "bin", "rows", "goods", "bads",
        "bad_rate", "woe", "iv". Between parties, cuts and categories of others are numbers of bins.
    correlation_ : dataframe or None
        Of all numeric columns, named "party.column" (in one table "column"); the names are in its column "column".
    column_bins_ : dict of str to list of ColumnBins
        By party, what it knows of its own columns.
    parts_ : dict of str to StatisticsPart
        Each party's part of the result.
    communication_ : dict
        For each ordered pair of parties: messages, bytes, and bytes by message type.
    timings_ : dict
        Seconds of set-up, of computing, and in total.
    disclosures_ : dict
        What each party learned beyond its own data, in sentences.

    See Also
    --------
    Scorecard : A model on WOE.
    permutation_importance : Columns that a finished model needs.
    Statistics : The system between parties.

    Examples
    --------
    >>> import numpy as np, pandas as pd, treaty
    >>> age = np.arange(400.0) % 60 + 18
    >>> tables = {"bank": pd.DataFrame({"age": age}), "shop": pd.DataFrame({"orders": (age * 7) % 11})}
    >>> found = treaty.ColumnStatistics("statistics").fit(tables, (age < 30).astype(int))
    >>> found.select(min_iv=0.1)
    {'bank': ['age'], 'shop': []}
    """

    _model, _common = "statistics", ColumnOptions
    _why_needed: ClassVar[str] = "its columns are unknown"
    _rounds = "max_bin"

    protocol: str | SystemOptions = "pooled"
    _: KW_ONLY
    max_bin: int = 20
    min_bin_rows: int = 20
    monotone: Monotone = "auto"
    correlation: Correlation = "pearson"
    n_jobs: int | None = None
    active: str | None = None
    transport: Literal["memory", "tls"] = "memory"
    parties: Mapping[str, Iterable[Any]] | None = None

    def fit(
        self, X: Tables, y: ArrayLike, eval_set: tuple[Tables, ArrayLike] | Sequence[Any] | None = None, **unknown: Any
    ) -> Self:
        """Compute all statistics, playing every party on this machine.

        Parameters
        ----------
        X : table, or mapping of party name to table
            A dataframe, numeric array or list of rows; or each party's own columns of the same rows, in the same order.
        y : array-like (n_rows,)
            Labels of two classes, held by the active party.
        eval_set : (X, y) or list of them
            Other samples of rows, each with any labels, whose stability against X is computed.
        **unknown
            Other parameters raise ConfigError.

        Returns
        -------
        self

        Raises
        ------
        ConfigError
            For an invalid option, or more products about a party's columns than it answers.
        DataError
            For a table or label that cannot be used, row counts that differ, or too few rows of a label.
        """
        refuse_misplaced(type(self), unknown, self.protocol, "fit")
        started = time.perf_counter()
        self._forget()
        settings = self._settings()
        tables = self._tables(X, reset=True, y=y)
        active = self._active(tables)
        classes, target = self._class_numbers(one_column(y), active, next(iter(tables.values())).n_rows)
        match_rows(tables, target)
        refuse_labels(X, tables, one_column(y))
        self.schemas_ = {name: table.schema for name, table in tables.items()}
        evals = []
        for of in eval_sets_of(eval_set):
            watched = self._tables(of.X, reset=False, y=of.y)
            evals.append(Watched(watched, np.zeros(match_rows(watched, np.asarray(of.y)))))
        run = self._run_on_columns(settings, tables, active, target, None, classes=classes, eval_sets=evals)
        trained = train(run, transport=self.transport, checkpoint=None)
        self._keep_training(trained, started)
        return self

    def _keep(self, parts: dict[str, StatisticsPart]) -> None:
        self.parts_, known = parts, next(part for part in parts.values() if part.is_active)
        self.classes_ = np.array(known.classes)
        bins = {name: known.bins[name] for name in parts}
        self.columns_, self.bins_ = framed(columns_as_columns(bins)), framed(bins_as_columns(bins))
        self.column_bins_ = {name: part.bins[name] for name, part in parts.items()}
        self.correlation_ = None
        if self.correlation != "none":
            names = [_named(of) for columns in known.bins.values() for of in columns if of.kind == "numeric"]
            # in the order of the parties
            order = [names.index(_named(of)) for columns in bins.values() for of in columns if of.kind == "numeric"]
            matrix = known.correlation[np.ix_(order, order)]
            ordered = [names[place] for place in order]
            self.correlation_ = framed({"column": ordered, **dict(zip(ordered, matrix.T.tolist(), strict=True))})

    def transform(self, X: Tables) -> Any:
        """Return the WOE of each row's bins: a dataframe, or a dict of them by party.

        Parameters
        ----------
        X : table, or mapping of party name to table
            Rows with the columns of `fit`; labels are not needed.

        Raises
        ------
        DataError
            Between parties without ``Statistics(reveal="passive")``: each lacks the WOE of its own columns.
        """
        check_is_fitted(self, "parts_")
        tables = self._matched(X)
        found = {
            name: framed({of.column: of.transform(table) for of in self.column_bins_[name]})
            for name, table in tables.items()
        }
        return found[ALONE] if ALONE in found else found

    def select(
        self, *, min_iv: float = 0.02, max_correlation: float = 1.0, importance: Any = None
    ) -> dict[str, list[str]]:
        """Return the columns to take, by party, in the order of its table.

        Parameters
        ----------
        min_iv : float, default 0.02
            Columns with a lower IV are left out; below 0.02 a column is commonly called unpredictive.
        max_correlation : float, default 1
            Going from the highest IV down, a column is left out if its correlation with one taken before is above this
            in size.
        importance : dataframe or None, default None
            What `permutation_importance` returned: columns of no importance above 0 are left out, too, and columns are
            taken by importance, not by IV.

        Returns
        -------
        dict of str to list of str
        """
        check_is_fitted(self, "parts_")
        if max_correlation < 1.0 and self.correlation_ is None:
            raise ConfigError("max_correlation needs correlations: fit with correlation='pearson' or 'spearman'")
        known = next(part for part in self.parts_.values() if part.is_active)
        every = [of for columns in known.bins.values() for of in columns]
        numeric = {_named(of): place for place, of in enumerate(of for of in every if of.kind == "numeric")}
        rank = {_named(of): of.iv for of in every}
        if importance is not None:
            table = nw.from_native(importance).to_dict(as_series=False)
            named = zip(table["party"], table["column"], table["importance"], strict=True)
            rank = {column if party == ALONE else f"{party}.{column}": size for party, column, size in named}
        chosen: list[str] = []
        for of in sorted(every, key=lambda of: -rank.get(_named(of), 0.0)):
            name = _named(of)
            rows = [numeric[other] for other in chosen if other in numeric] if name in numeric else []
            near = np.abs(known.correlation[numeric[name], rows]) if rows and max_correlation < 1.0 else np.zeros(0)
            useful = of.iv >= min_iv and (importance is None or rank.get(name, 0.0) > 0.0)
            if useful and not (near > max_correlation).any():
                chosen.append(name)
        return {name: [of.column for of in known.bins[name] if _named(of) in chosen] for name in self.parts_}

    def report(self, path: Any, *given: Any, **more: Any) -> None:
        """Raise ConfigError: a report is of a model's scores and losses."""
        raise ConfigError(
            "a report is of a model, which statistics have none of: write columns_ and bins_, or have a job do it"
        )

    def _owners(self) -> set[str]:
        return set(self.schemas_)


def _named(of: ColumnBins) -> str:
    return of.column if of.party == ALONE else f"{of.party}.{of.column}"


def permutation_importance(
    model: Any, X: Tables, y: ArrayLike, *, n_repeats: int = 5, random_state: int | None = None,
    scoring: Callable[[Any, Tables, Any], float] | None = None,
) -> Any:  # fmt: skip
    """Return how much worse a fitted model of Treaty scores when a column's values are put in random order.

    All parties are played on this machine: a column of another organisation would be permuted by its owner, whose
    predictions of permuted rows would tell more than those of true ones, so that jobs have no such step.

    Parameters
    ----------
    model : fitted estimator
        Any estimator of Treaty.
    X : table, or mapping of party name to table
        As in its `fit`: rows that it was not trained on.
    y : array-like (n_rows,)
        Labels of these rows.
    n_repeats : int, default 5
        Orders drawn for each column.
    random_state : int or None, default None
        Seed of the orders; None: another one each time.
    scoring : callable or None, default None
        ``scoring(model, X, y) -> float``, higher is better; None: the model's `score`.

    Returns
    -------
    dataframe
        "party", "column", "importance" (the mean loss of score) and "std" over the repeats.

    See Also
    --------
    ColumnStatistics.select : Takes the result as `importance`.

    References
    ----------
    Breiman, "Random Forests", Machine Learning 2001, section 10.

    Examples
    --------
    >>> import numpy as np, pandas as pd, treaty
    >>> age = np.arange(200) % 60 + 18
    >>> table = pd.DataFrame({"age": age, "orders": age * 7 % 11})
    >>> model = treaty.GBDTClassifier(n_estimators=5, max_depth=1).fit(table, age < 40)
    >>> found = treaty.permutation_importance(model, table, age < 40, random_state=0)
    >>> found[found["importance"] > 0]["column"].tolist()
    ['age']
    """
    check_is_fitted(model, "parts_")
    score = scoring or (lambda model, X, y: model.score(X, y))
    tables, rng = model._matched(X), check_random_state(random_state)

    def given(of: Mapping[str, Table]) -> Tables:
        return of[ALONE] if ALONE in of else of

    best, found = score(model, given(tables), y), dict[str, list[Any]](party=[], column=[], importance=[], std=[])
    for party, table in tables.items():
        for place, name in enumerate(table.schema.names):
            losses = []
            for _ in range(n_repeats):
                columns = [*table.columns]
                columns[place] = columns[place][rng.permutation(table.n_rows)]
                permuted = tables | {party: Table(table.schema, columns, table.n_rows)}
                losses.append(best - score(model, given(permuted), y))
            for key, value in zip(found, (party, name, float(np.mean(losses)), float(np.std(losses))), strict=True):
                found[key].append(value)
    return framed(found)
