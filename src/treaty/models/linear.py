"""A party's part of a trained linear model, and the file of it.

Every party has the weights and the preparation of its own columns; the active party, which has the labels, also has the
intercept, the classes and the calibration. A row's margin is the sum over all parts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.columns import Category
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, DataError
from treaty.files import Format, read_file, write_file
from treaty.linear.preparation import Calibration, Preparation, beyond_taylor, prepare, probabilities
from treaty.machine.arrays import Floats
from treaty.machine.database import Mark
from treaty.models.scorecard import ScorecardPart

FORMAT = Format("linear-part", 6)


class LinearPart(msgspec.Struct, kw_only=True):
    """One party's part of a linear model.

    `model_id` is the same in all parts; `coef` (preparation.n_columns,) are the weights of the prepared columns. The
    active party alone has `intercept`, `classes` (two labels; a high margin speaks for the second), `calibration`,
    which makes log-odds of margins (None: margins are log-odds), `losses` (of every epoch the mean loss of its
    batches), `eval_losses` (of each eval set the mean loss after every epoch) and `settled`, False where training ended
    at `max_iter` while the loss was still changing. `loss` is "taylor" or "logistic"; `encryption` the cipher it was
    trained under, empty for a pooled model. `alone` says of each party how many rows stand alone in their batch among
    its columns, so that its gradients reveal their labels (the active party's: the others' part of their margins); it
    is empty after a pooled training and in paper mode. `family` is "logistic"; "multiclass", whose `of_classes` are the
    parts of models of each class against the rest, without weights of its own; "linear", whose margins are predictions;
    or "poisson", whose margins are their logarithms. The last two have no classes. `errors` are the standard errors of
    `coef`, at the active party also of the intercept, which comes last, and `degrees` their degrees of freedom, where
    they were asked for; `error_at_zero` is that of `at_zero` there. `batch_size` is None where every step was on the
    whole table. `card` is that of a scorecard, which is then
    what predicts: `preparation` and `coef` are of weights of evidence. `kept` is as in a part of trees.
    """

    model_id: str
    party: str
    schema: Schema
    preparation: Preparation
    coef: Floats
    intercept: float | None = None
    classes: list[Category] | None = None
    calibration: Calibration | None = None
    family: str = "logistic"
    loss: str = "taylor"
    of_classes: list[LinearPart] = []
    errors: Floats | None = None
    degrees: int | None = None
    error_at_zero: float = math.nan
    losses: list[float] = []
    eval_losses: dict[str, list[float]] = {}
    settled: bool = True
    batch_size: int | None = None
    encryption: str = ""
    alone: dict[str, int] = {}
    card: ScorecardPart | None = None
    kept: dict[str, Mark] = {}

    def __repr__(self) -> str:
        """Return a line without values of rows, keys and thresholds, for notebooks and logs."""
        return f"<LinearPart of {self.party}: {len(self.schema.names)} columns, {self.summary()}>"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the part to a file, readable by its owner alone; an old file is replaced only by a whole new one."""
        write_file(path, self, FORMAT, self.party)

    @property
    def is_active(self) -> bool:
        """Whether this is the active party's part, with intercept and classes."""
        return self.intercept is not None

    def summary(self) -> str:
        """Describe how many weights there are and, at the active party, how training ended."""
        ended = f", loss {self.losses[-1]:.6f} after {len(self.losses)} epochs" if self.losses else ""
        return f"{len(self.coef)} weights{ended}{'' if self.settled else ', not converged'}"

    @property
    def unsettled(self) -> str:
        """A sentence if training ended before the loss was steady; empty otherwise."""
        if self.settled:
            return ""
        change = f", which changed by {abs(self.losses[-1] - self.losses[-2]):.2g}" if len(self.losses) > 1 else ""
        whole_table = self.batch_size is None
        batches = "" if whole_table else ", or take smaller batches: an epoch of few batches has few steps"
        return (
            f"training ended after max_iter={len(self.losses)} {'steps' if whole_table else 'epochs'} without a steady "
            f"loss{change} in the last; raise max_iter, or tol{batches}"
        )

    def log_odds(self, margins: Floats) -> Floats:
        """Return log-odds of the second class, from all parts' margins (n_rows,), or of each of several, as these."""
        if self.of_classes:
            each = zip(self.of_classes, margins.T, strict=True)
            return np.column_stack([part.log_odds(own) for part, own in each])
        # the points of a scorecard are of calibrated log-odds
        return margins if self.calibration is None or self.card is not None else self.calibration.log_odds(margins)

    def predictions(self, margins: Floats) -> dict[str, NDArray[Any]]:
        """Return predictions, and each class's probability, as columns of a file, from all parts' margins."""
        if self.family != "logistic" and not self.of_classes:
            return {"prediction": np.exp(margins) if self.family == "poisson" else margins}
        classes, log_odds, p = self.classes or [], self.log_odds(margins), self.probabilities(margins)
        best = np.argmax(p, axis=1) if self.of_classes else (log_odds > 0.0).astype(np.intp)
        columns: dict[str, NDArray[Any]] = {"prediction": np.array(classes)[best]}
        columns |= {f"probability_{name}": of for name, of in zip(classes, p.T, strict=True)}
        return columns if self.card is None else {"points": self.card.score(log_odds), **columns}

    def probabilities(self, margins: Floats) -> Floats:
        """Return each class's probability (n_rows, n_classes), from all parts' margins.

        Of more than two classes they are those of each class against the rest, divided by their sum.
        """
        p = probabilities(self.log_odds(margins))
        shares: Floats = p / p.sum(axis=1, keepdims=True) if self.of_classes else np.column_stack([1.0 - p, p])
        return shares

    def caution(self, margins: Floats) -> str | None:
        """Return a warning if probabilities of rows with these margins are unreliable."""
        if self.family not in ("logistic", "multiclass") or self.loss != "taylor":
            return None
        made = self.calibration
        return beyond_taylor(margins if self.card is None or made is None else made.margins(margins))

    def table(self, calibration: Calibration | None = None, alpha: float = 0.05) -> dict[str, NDArray[Any]]:
        """Return the weights per unit of the columns as they came, as columns of a file.

        They are of margins, or with a calibration of log-odds. With standard errors there are these, too, two-sided
        p-values of the hypotheses that a weight is 0, and limits of 1 - `alpha` confidence; those of a linear
        regression follow Student's t, others the normal distribution. The intercept is `at_zero`.
        """
        from scipy.special import ndtr, ndtri, stdtr, stdtrit  # type: ignore[import-untyped]  # at every start: 0.15 s

        made, plain = calibration or Calibration(1.0, 0.0), self.coef
        named, weights = self.column_names(), made.slope * self.per_unit(plain)
        if self.intercept is not None:
            named, plain = [*named, "intercept"], np.append(plain, self.intercept)
            weights = np.append(weights, made.slope * self.at_zero() + made.offset)
        columns = {"column": np.array(named, dtype=object), "coef": weights}
        if self.errors is not None and self.degrees is not None:
            errors = self.per_unit(self.errors[: len(self.coef)], of_constant=np.nan)
            errors = abs(made.slope) * np.append(errors, [self.error_at_zero] if self.is_active else [])
            students = self.family == "linear"
            ratios = weights / errors  # NaN of a constant column
            p = 2.0 * (stdtr(self.degrees, -np.abs(ratios)) if students else ndtr(-np.abs(ratios)))
            reach = errors * (stdtrit(self.degrees, 1.0 - alpha / 2.0) if students else ndtri(1.0 - alpha / 2.0))
            columns |= {"standard_error": errors, "t" if students else "z": ratios, "p_value": p}
            columns |= {"lower": weights - reach, "upper": weights + reach}
        return columns | {"standardized_coef": plain}

    def margins(self, table: Table) -> Floats:
        """Return the part's summand of rows' margins (n_rows,), or (n_rows, n_classes) for more than two classes."""
        if self.of_classes:
            return np.column_stack([part.margins(table) for part in self.of_classes])
        if self.card is not None:
            return self.card.log_odds(table)
        own = np.full(table.n_rows, self.intercept or 0.0)
        # one column after the other: a product of matrices adds up in an order that depends on how many rows there are
        for weight, column in zip(self.coef, self.preparation.matrix(table.columns, table.n_rows).T, strict=True):
            own += weight * column
        return own

    def per_unit(self, of_prepared: Floats, of_constant: float = 0.0) -> Floats:
        """Return weights or errors of prepared columns (n_columns,) per unit of each column in the table."""
        scale = self.preparation.scale
        return np.divide(of_prepared, scale, out=np.full_like(of_prepared, of_constant), where=scale > 0.0)

    def at_zero(self) -> float:
        """Return the part's summand of the margin of a row whose columns in the table are all 0.

        At the active party that is the intercept where others' columns are at their means.
        """
        return (self.intercept or 0.0) + float(self.coef @ self.preparation.at_zero)

    def column_names(self) -> list[str]:
        """Return the name of each weight of `coef`: a column, or "column=category"."""
        if self.card is not None:
            return list(self.schema.names)
        return self.preparation.names(self.schema.names, self.schema.categories)


def one_against_rest(parts: Sequence[LinearPart], classes: list[Category] | None) -> LinearPart:
    """Join a party's parts of models of each class against the rest; `classes` at the active party."""
    first = parts[0]
    most = max(len(part.losses) for part in parts)
    padded = [part.losses + part.losses[-1:] * (most - len(part.losses)) for part in parts]
    return LinearPart(
        model_id=first.model_id, party=first.party, schema=first.schema, preparation=first.preparation,
        coef=np.zeros_like(first.coef), intercept=None if first.intercept is None else 0.0, classes=classes,
        family="multiclass", loss=first.loss, of_classes=list(parts),
        losses=[float(np.mean(of)) for of in zip(*padded, strict=True)],
        settled=all(part.settled for part in parts), encryption=first.encryption, alone=first.alone,
    )  # fmt: skip


def preparation_of(
    table: Table, weight: Floats | None = None, *, reference: bool = False, centred: bool = True
) -> Preparation:
    """Learn from a party's training table how to prepare its columns; `reference`: first categories have none."""
    n_categories = [None if values is None else len(values) for values in table.schema.categories]
    return prepare(table.columns, n_categories, table.n_rows, weight=weight, first=int(reference), centred=centred)


def load_linear_part(path: str | os.PathLike[str], party: str | None = None) -> LinearPart:
    """Read a part that `LinearPart.save` wrote, of a party (None: of any); errors as of `load_part` for trees."""
    part = read_file(path, LinearPart, FORMAT, party)
    try:
        check_linear_part(part)
    except ValueError as error:
        raise ConfigError(f"expected a linear model of Treaty, got {error} - at {path}") from None
    return part


def check_linear_part(part: LinearPart) -> None:
    """Raise ValueError for a part whose arrays do not fit each other."""
    for of_class in part.of_classes:
        check_linear_part(of_class)
    if part.of_classes and part.classes is not None and len(part.classes) != len(part.of_classes):
        raise ValueError("another number of models than of classes")
    made, n_features = part.preparation, len(part.schema.names)
    known = tuple(None if values is None else len(values) for values in part.schema.categories)
    if len(made.median) != n_features or made.n_categories != (known if part.card is None else (None,) * n_features):
        raise ValueError("a preparation of other columns")
    if part.card is not None:
        part.card.check_sizes()
        if tuple(of.column for of in part.card.bins) != part.schema.names or (part.card.base is None) == part.is_active:
            raise ValueError("a scorecard of other columns")
    if part.errors is not None and len(part.errors) != len(part.coef) + (part.intercept is not None):
        raise ValueError("another number of standard errors than of weights")
    if not len(part.coef) == len(made.mean) == len(made.scale) == made.n_columns:
        raise ValueError("another number of weights than of columns")
    found = part.calibration
    scaling = [] if found is None else [found.slope, found.offset]
    if not all(np.all(np.isfinite(numbers)) for numbers in (part.coef, made.median, made.mean, made.scale, scaling)):
        raise ValueError("weights that are not finite")


def label_holder(parts: Iterable[LinearPart]) -> LinearPart:
    """Return the active party's part; DataError unless the parts are of one model and one has the intercept."""
    parts = list(parts)
    holders = [part for part in parts if part.is_active]
    if len(holders) != 1 or len({part.model_id for part in parts}) != 1:
        raise DataError(f"expected the parts of one model, got {', '.join(part.party for part in parts)}")
    return holders[0]


def pooled_margins(parts: Mapping[str, LinearPart], tables: Mapping[str, Table]) -> Floats:
    """Return the margins (n_rows,) of all parties' parts and tables."""
    margins: Floats = np.sum([part.margins(tables[name]) for name, part in parts.items()], axis=0)
    return margins
