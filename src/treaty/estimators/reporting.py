"""The report of a fitted estimator, and its files: a folder that `load` reads, with a part for each party."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
from numpy.typing import NDArray
from sklearn.base import is_classifier
from sklearn.utils.validation import check_is_fitted

from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, DataError
from treaty.files import Format, read_json, write_json
from treaty.machine.process import cores, is_code, trust
from treaty.models.interpretation import Contributions, willing
from treaty.models.linear import load_linear_part
from treaty.models.statistics import load_statistics_part
from treaty.models.trees import forest_of, load_part, staged_margins
from treaty.report import OURS, OWN, POOLED
from treaty.report.contents import Contents, Curve, ModelScores, Section, Spread, scores_of_classes, scores_of_numbers
from treaty.runs.report import importances_of, versions
from treaty.runs.threads import active_of
from treaty.systems import Model, find_system
from treaty.systems.options import converted, given, plain
from treaty.systems.pooled.system import ALONE
from treaty.trees.objectives import evaluate

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
# Quantiles need this many rows: those of fewer would be single rows' values.
FEWEST_ROWS = 20
_GIVEN = "rows given to this report"
_LOADED = "The model was loaded from files, which have no record of its training."


def contents_of(
    model: Any, X: Any, y: Any, pooled: Any, consent: Iterable[str] | None, title: str | None, alone: Any = None
) -> Contents:
    """Return the contents of a fitted estimator's report; parameters and errors as in `TableEstimator.report`."""
    check_is_fitted(model, "parts_")
    viewer = active_of(model.parts_)
    # The parties whose columns may be named.
    known = willing(model.parts_, consent) | {viewer}
    _check_given(model, X, y, {"pooled": pooled, "alone": alone})
    system, own, common = model._settings(random_state=None)
    rows = None if X is None else model._matched(X, y=y)
    labels = None if y is None or rows is None else _labels(model, y, viewer, next(iter(rows.values())).n_rows)
    contents = Contents(
        title=title or f"{type(own).__name__}: {type(model).__name__}",
        facts=list(_facts(model)),
        whose=_whose(model, viewer, known),
        viewer=viewer,
        unit="round" if model._model == "trees" else "epoch",
        best=forest_of(list(model.parts_.values())).best_watched if model._model == "trees" else None,
        sent=getattr(model, "communication_", {}),
        timeline=getattr(model, "timeline_", None),
        seconds={"": {name: of for name, of in model.timings_.items() if name != "total"}}
        if hasattr(model, "timings_")
        else {},
        learned=getattr(model, "disclosures_", {}),
        noise=list(_noise(model, own)),
        notes=list(_notes(model)),
        parameters=given(own, common),
        versions=versions(),
        absent=_absent(model, system.split == "none", X, y, alone),
    )
    curves = list(_curves(model, pooled, alone, X, labels))
    contents = replace(contents, curves=curves, **_importances(model, viewer, known))
    if labels is not None:
        contents = replace(contents, scores=_scores(model, pooled, alone, X, labels))
    return contents if rows is None else _with_shap(contents, model, X, rows, viewer, known)


def _check_given(model: Any, X: Any, y: Any, others: Mapping[str, Any]) -> None:
    if y is not None and X is None:
        raise ConfigError("expected the tables that y are the labels of, got y alone: report(path, X, y)")
    if y is not None and model._model == "trees" and forest_of(list(model.parts_.values())).objective.takes == "groups":
        raise ConfigError("a ranking has no ROC or calibration: expected report(path, X), got y; give fit an eval_set")
    for name, other in others.items():
        if other is None:
            continue
        if not hasattr(other, "_settings"):
            raise ConfigError(f"expected {name} to be an estimator of Treaty, got {type(other).__name__}")
        check_is_fitted(other, "parts_")
        if is_classifier(other) != is_classifier(model) or other._model != model._model:
            raise ConfigError(f"expected {name} to be a {type(model).__name__}, got a {type(other).__name__}")
        if is_classifier(model) and list(other.classes_) != list(model.classes_):
            raise ConfigError(f"expected {name} to be trained on the same classes")


def _facts(model: Any) -> Iterator[str]:
    yield "model " + next(iter(model.parts_.values())).model_id[:8]
    if ALONE not in model.parts_:
        yield f"{len(model.parts_)} parties: {', '.join(model.parts_)}"
    yield model.parts_[active_of(model.parts_)].summary()
    if hasattr(model, "timings_"):
        yield f"trained in {model.timings_['total']:.1f} s"


def _whose(model: Any, viewer: str, known: set[str]) -> str:
    if ALONE in model.parts_:
        return "The owner's view. It has facts about training rows and labels: show it only to those who may see these."
    others = [name for name in model.parts_ if name not in known]
    hidden = f" Columns of {', '.join(others)} have pseudonyms, or are shown in sum." if others else ""
    return f"The view of {viewer}, which has the labels. Scores and curves depend on them.{hidden}"


def _notes(model: Any) -> Iterator[str]:
    for name, part in model.parts_.items():
        if getattr(part, "choice", ""):
            yield f"Encryption: {part.encryption}, {part.choice}"
        if getattr(part, "unsettled", ""):
            yield f"{name}: {part.unsettled}"
    yield from getattr(model, "warnings_", ())


def _noise(model: Any, own: Any) -> Iterator[str]:
    spent = {name: part.spent for name, part in model.parts_.items() if getattr(part, "spent", "")}
    yield from (text if name == ALONE else f"{name}: {text}" for name, text in spent.items())
    if own.label_epsilon is not None:
        yield f"Labels were randomised once, each with epsilon {own.label_epsilon:g}; training used only these."


def _absent(model: Any, whole: bool, X: Any, y: Any, alone: Any) -> dict[Section, str]:
    """Return the sections that will be empty, with the reasons."""
    trees, loaded = model._model == "trees", not hasattr(model, "timings_")
    of_training = _LOADED if loaded else "All was in one place: nothing was sent." if whole else "No messages recorded."
    found: dict[Section, str] = {}
    if not getattr(model, "communication_", {}):
        found |= {"messages": of_training, "timeline": of_training}
    if loaded:
        found |= {"seconds": _LOADED}
        # Older versions did not save them.
        if not hasattr(model, "disclosures_"):
            found["learned"] = _LOADED
    if X is None or y is None:
        needed = "Needs rows with labels: report(path, X, y)."
        found |= {"scores": needed, "roc": needed, "calibration": needed}
    elif not is_classifier(model):
        found["roc"] = "ROC needs classes; the labels are numbers."
    if X is None:
        found["shap"] = "Needs rows: report(path, X)."
    if not trees:
        found["shap"] = "A linear model adds weight times value; its weights are above."
    if alone is None and not whole:
        found["alone"] = "Needs a model trained on the own data: report(path, X, y, alone=model)."
    if trees:
        found["curves"] = "The training kept no loss. Give fit an eval_set."
    if not any(getattr(part, "spent", "") for part in model.parts_.values()):
        found["noise"] = "No part of the model records noise, so no epsilon was spent."
    return found


def _curves(model: Any, pooled: Any, alone: Any, X: Any, labels: NDArray[Any] | None) -> Iterator[Curve]:
    """Yield metrics by round: of training rows and eval sets, and of the report's rows if trees can predict stages."""
    for name, of in getattr(alone, "evals_result_", {}).items() if model._model == "trees" else ():
        for metric, values in of.items():
            yield Curve(f"{name}, {OWN}", metric, values, alone=True)
    for each, is_pooled in ((model, False), (pooled, True)):
        if each is None:
            continue
        forest = forest_of(list(each.parts_.values())) if each._model == "trees" else None
        if forest is not None and forest.losses:
            losses = list(forest.losses.values())
            yield Curve("training rows", forest.objective.metric, losses, is_pooled, at=list(forest.losses))
        for name, of in getattr(each, "evals_result_", {}).items():
            for metric, values in of.items():
                yield Curve(name, metric if each._model == "trees" else f"{metric} loss", values, is_pooled)
        if getattr(model, "evals_result_", {}) or forest is None or labels is None:
            continue
        if not each._settings(random_state=None)[1].hides_decisions:
            objective, stages = forest.objective, staged_margins(each._decided(X), forest, cores(each.n_jobs))
            values = [evaluate(objective.metric, objective, margins, labels, None) for margins in stages]
            if values:
                yield Curve(_GIVEN, objective.metric, values, is_pooled)


def _labels(model: Any, y: Any, viewer: str, n_rows: int) -> NDArray[np.float64]:
    """Return class numbers, or numbers (n_rows,)."""
    if is_classifier(model):
        return np.asarray(model._class_numbers(y, viewer, n_rows, model.classes_.tolist())[1])
    labels = np.asarray(y, np.float64)
    if labels.shape != (n_rows,) or not np.all(np.isfinite(labels)):
        raise DataError(f"expected a number for each of {n_rows} rows, got an array {labels.shape} - at y")
    return labels


def _scores(model: Any, pooled: Any, alone: Any, X: Any, labels: NDArray[np.float64]) -> ModelScores:
    predicted = {name: _predicted(each, X) for name, each in ((OURS, model), (POOLED, pooled)) if each is not None}
    of, other = f"{len(labels)} rows", "" if pooled is None else POOLED
    by_chance = False
    if alone is not None:
        if hasattr(model, "columns_by_party_"):
            X = model._by_party(X, model._chosen()[0], reset=False)
        predicted[OWN] = _predicted(alone, X[active_of(model.parts_)] if isinstance(X, Mapping) else X)
        better = _row_losses(predicted[OWN], labels) - _row_losses(predicted[OURS], labels)
        by_chance = bool(abs(better.mean()) < 2.0 * better.std() / math.sqrt(len(better)))
    if is_classifier(model):
        found = scores_of_classes(of, labels.astype(np.intp), predicted, model.classes_.tolist(), other)
    else:
        means = getattr(model, "objective", None) != "quantile"
        found = scores_of_numbers(of, labels, predicted, other, means=means)
    return replace(found, by_chance=by_chance)


def _predicted(model: Any, X: Any) -> NDArray[np.float64]:
    return np.asarray(model.predict_proba(X) if is_classifier(model) else model.predict(X), np.float64)


def _row_losses(predicted: NDArray[np.float64], labels: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the log-loss of each row, or its squared error."""
    if predicted.ndim == 1:
        return np.square(labels - predicted)
    p = predicted[np.arange(len(labels)), labels.astype(np.intp)]
    return np.asarray(-np.log(np.maximum(p, 1e-15)))


def _importances(model: Any, viewer: str, known: set[str]) -> dict[str, Any]:
    if model._model == "trees":
        by_gain = forest_of(list(model.parts_.values())).has_gains
        kind = "Total gain of the splits on a column." if by_gain else "Number of splits on a column."
        found = model.importances("gain" if by_gain else "count", sorted(known))
        return {"importances": found, "importance_kind": kind, "splits": "gain" if by_gain else "number"}
    found = {}
    for name in model.parts_:
        if name in known:
            by_class = list(importances_of(model.parts_[name]).values())
            several = len(by_class) > 1
            found[name] = {
                column: float(np.mean([abs(of[column]) for of in by_class])) if several else by_class[0][column]
                for column in (by_class[0] if by_class else {})
            }
    kind = (
        "Weights of columns in units of their standard deviation; of more than two classes their mean absolute value."
    )
    others = [name for name in model.parts_ if name not in known]
    return {
        "importances": found,
        "importance_kind": kind + (f" Weights of {', '.join(others)} stay there." if others else ""),
    }


def _with_shap(
    contents: Contents, model: Any, X: Any, rows: Mapping[str, Table], viewer: str, known: set[str]
) -> Contents:
    """Return the contents with contributions of columns to margins, or the reason if there are none."""
    if model._model != "trees":
        return contents
    if next(iter(rows.values())).n_rows < FEWEST_ROWS:
        too_few = f"With fewer than {FEWEST_ROWS} rows, it would show single rows."
        return replace(contents, absent={**contents.absent, "shap": too_few})
    try:
        found = model.predict_contributions(X)
    except ConfigError as error:
        return replace(contents, absent={**contents.absent, "shap": f"Not for this model: {error}."})
    if isinstance(found, Contributions):
        values = found.values
    else:  # of joined columns
        ends = np.cumsum([len(table.schema.names) for table in rows.values()])
        values = dict(zip(rows, np.split(found[..., :-1], ends[:-1], axis=-1), strict=True))
    several = next(iter(values.values())).ndim == 3
    # The mean over classes of the absolute contribution of a column.
    if several:
        values = {party: np.abs(of).mean(axis=1) for party, of in values.items()}
    spreads = []
    for party, of in values.items():
        if party in known:
            names, columns = rows[party].schema.names, rows[party].columns
            for number, name in enumerate(names):
                shown = name if known == {viewer} else f"{party}: {name}"
                numeric = rows[party].schema.categories[number] is None and not several
                spreads.append(_spread(shown, of[:, number], columns[number] if numeric else None))
        else:
            # Columns of parties without consent are only shown in sum.
            spreads.append(_spread(f"all of {party}", of.sum(axis=1), None))
    of_what = "adds to the margin" if not several else "moves margins by (mean over classes)"
    return replace(contents, shap=[spread for spread in spreads if spread.mean > 0.0], shap_of=of_what)


def _spread(name: str, contributions: NDArray[np.float64], column: NDArray[Any] | None) -> Spread:
    mean = float(np.abs(contributions).mean())
    if column is not None:
        middle = np.nanmedian(column) if not np.all(np.isnan(column)) else np.nan
        # Two halves of the column show the direction of its effect; each needs enough rows for quantiles.
        halves = [contributions[column <= middle], contributions[column > middle]]
        if all(len(half) >= FEWEST_ROWS for half in halves):
            low, high = (np.quantile(half, QUANTILES).tolist() for half in halves)
            return Spread(name, mean, low=low, high=high)
    return Spread(name, mean, every=np.quantile(contributions, QUANTILES).tolist())


FORMAT = Format("estimator", 1)


class SavedEstimator(msgspec.Struct, kw_only=True):
    """The file that `save` writes in addition to the parts."""

    # The name of the estimator's class.
    kind: str
    # Its parameters, with the system's name as `protocol`, and the system's own options.
    params: dict[str, Any]
    system: dict[str, Any]
    # Owners of the parts, in the order of columns.
    parties: list[str]
    # The schema of each table that `predict` expects.
    schemas: dict[str, Schema]
    # scikit-learn's `feature_names_in_`, if the training table had names.
    feature_names: list[str] | None = None
    # What each party, or role, learned in the training, in sentences.
    learned: dict[str, list[str]] = {}
    # Positions of each party's columns in one table, with the parameter `parties`.
    positions: dict[str, list[int]] | None = None


def write_model(folder: Path, model: Any) -> None:
    """Write a fitted estimator to a folder, made when missing; ConfigError if it cannot be written."""
    names, own = getattr(model, "feature_names_in_", None), model._chosen()[1].get_params()
    saved = SavedEstimator(
        kind=type(model).__name__,
        params=model._plain_params(),
        # JSON has no infinity.
        system={name: "inf" if value == math.inf else plain(value) for name, value in own.items()},
        parties=list(model.parts_),
        schemas=model.schemas_,
        feature_names=None if names is None else list(names),
        learned=getattr(model, "disclosures_", {}),
        positions=getattr(model, "positions_by_party_", None),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in model.parts_.items():
            part.save(_part_file(folder, name))
        write_json(folder / "model.json", saved, FORMAT, "")
    except TypeError as error:
        raise ConfigError(f"a parameter cannot be saved: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot write the model to {folder}: {error.strerror}") from None


def read_saved(folder: Path) -> SavedEstimator:
    """Read the estimator's file of a saved model; ConfigError if it is missing, or another file."""
    return read_json(folder / "model.json", SavedEstimator, FORMAT)


def params_of(saved: SavedEstimator, trusted: Iterable[str], model: Model) -> dict[str, Any]:
    """Return a saved estimator's parameters, with the system's options.

    Raises ConfigError for a custom system or loss that is not among the `trusted` names; nothing is imported then.
    """
    name, given = saved.params["protocol"], list(trusted)
    for code in (name, saved.params.get("objective")):
        if is_code(code) and code not in given:
            raise ConfigError(
                f"the model names code, {code!r}, which is not imported: if you trust it, load(..., trusted=[{code!r}])"
            )
    trust(given)
    system = find_system(name, model)
    own = converted(saved.system, system.options, system.options.__name__)
    weights = saved.params.get("class_weight")
    pairs = {"class_weight": dict(weights)} if isinstance(weights, list) else {}
    return {**saved.params, **pairs, "protocol": own if own != system.options() else name}


def read_parts(folder: Path, saved: SavedEstimator, model: Model) -> dict[str, Any]:
    """Read every party's part; ConfigError if a file is missing or is not one of a Treaty model."""
    load = {"trees": load_part, "logistic": load_linear_part, "statistics": load_statistics_part}[model]
    return {name: load(_part_file(folder, name), name) for name in saved.parties}


def _part_file(folder: Path, party: str) -> Path:
    # A party's name may have characters that a file's must not.
    return folder / f"{quote(party, safe=' ')}.part"
