"""What a report shows of a finished run, whether of a fitted estimator or of a job; and scores of predictions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from treaty.data.reading import read_table
from treaty.errors import ConfigError, DataError
from treaty.files import kind_of, read_json
from treaty.machine.arrays import Floats
from treaty.messaging.transcript import Timeline, joined
from treaty.models.trees import FORMAT as TREES
from treaty.models.trees import load_part
from treaty.report import OURS, OWN
from treaty.runs.job_files import load_job
from treaty.runs.report import FORMAT, Report
from treaty.systems import find_system

# points of a ROC curve: more would not be visible
_MOST_POINTS = 200
_MOST_CLASSES = 6
_TENTHS = 10

Section = Literal[
    "scores", "curves", "roc", "calibration", "importances", "shap", "messages", "timeline", "seconds", "learned",
    "noise", "parameters", "versions", "alone",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of one set of rows after each round or epoch."""

    name: str
    metric: str
    values: Sequence[float]
    # of the same model trained on one table, for comparison
    pooled: bool = False
    # of the same model trained on own data only; its name ends with `OWN`
    alone: bool = False
    # after which rounds, if not after each
    at: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Points:
    """A line through points (x, y); `pooled` as in `Curve`."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    pooled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScores:
    """Scores of predictions for rows with known labels."""

    # the rows, in words
    of: str
    # by model and metric
    values: Mapping[str, Mapping[str, float]]
    # false and true positive rates; with more than two classes, each against the rest; empty for numbers
    roc: Sequence[Points] = ()
    # for rows in tenths by their prediction: mean prediction, and the observed share of the second class. With more
    # than two classes, the share of correct ones by the predicted class's probability; for numbers, the mean label
    calibration: Sequence[Points] = ()
    of_numbers: bool = False
    # whether rows are too few to tell the model from that of own data: two standard errors of the mean loss
    by_chance: bool = False


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles 0.05, 0.25, 0.5, 0.75, 0.95 of what a column adds to rows' margins (TreeSHAP); no single row."""

    name: str
    # absolute contribution
    mean: float
    # of the rows with a value up to, or above, the column's median
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    # of all rows: of categories, and of all columns of a party together
    every: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a report shows."""

    title: str
    # a few words each: rows, columns, date
    facts: Sequence[str]
    # a sentence: whose view of the run this is, and who may see the page
    whose: str
    # the party whose view it is
    viewer: str = ""
    curves: Sequence[Curve] = ()
    # of the curves: "round" or "epoch"
    unit: str = "round"
    # the round, or epoch, that early stopping kept
    best: int | None = None
    scores: ModelScores | None = None
    # by party and column, or its pseudonym
    importances: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # a sentence on what these numbers are
    importance_kind: str = ""
    # what they are of splits: "gain" or "number"; "" if they are not of splits, or those of some parties are unknown
    splits: str = ""
    shap: Sequence[Spread] = ()
    # label of the figure's axis
    shap_of: str = "adds to the margin"
    # by "sender -> receiver": bytes and, if they are known, messages and bytes by message type
    sent: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    timeline: Timeline | None = None
    # by party ("" for all together) and phase
    seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # by party, or role, beyond its own data
    learned: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # sentences on what noise has cost
    noise: Sequence[str] = ()
    # further sentences for the reader
    notes: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    # why sections are empty
    absent: Mapping[Section, str] = field(default_factory=dict)


def scores_of_classes(
    of: str, y: NDArray[np.intp], by_model: Mapping[str, Floats], classes: Sequence[Any], pooled: str = ""
) -> ModelScores:
    """Return scores of class probabilities, for class numbers `y`.

    `by_model` has each model's probabilities, float64 (n_rows, n_classes); `pooled` is the name of the model that was
    trained on one table, if any. `of` describes the rows.
    """
    from sklearn import metrics

    values, roc, calibration = {}, [], []
    several, numbers = len(classes) > 2, list(range(len(classes)))
    for name, p in by_model.items():
        found = {"log-loss": float(metrics.log_loss(y, p, labels=numbers))}
        if len(np.unique(y)) == len(classes):
            of_second = p if several else p[:, 1]
            found |= {"AUC": float(metrics.roc_auc_score(y, of_second, multi_class="ovr"))}
        found["accuracy"] = float(metrics.accuracy_score(y, np.argmax(p, axis=1)))
        if not several:
            found["Brier score"] = float(metrics.brier_score_loss(y, p[:, 1]))
        values[name] = found
        is_pooled = name == pooled
        for number in numbers[:_MOST_CLASSES] if several else [1]:
            # lines of several classes have the classes' names
            if 0 < np.count_nonzero(y == number) < len(y) and not (several and name == OWN):
                line = f"{classes[number]} against the rest" if several else _line(name, by_model, pooled)
                false, true, _ = metrics.roc_curve(y == number, p[:, number])
                at = np.unique(np.linspace(0, len(false) - 1, _MOST_POINTS).round().astype(int))
                roc.append(Points(line, false[at].tolist(), true[at].tolist(), is_pooled))
        right, sure = (np.argmax(p, axis=1) == y, p.max(axis=1)) if several else (y == 1, p[:, 1])
        calibration.append(_tenths(_line(name, by_model, pooled), sure, right.astype(float), is_pooled))
    return ModelScores(of=of, values=values, roc=roc, calibration=calibration)


def scores_of_numbers(
    of: str, y: Floats, by_model: Mapping[str, Floats], pooled: str = "", *, means: bool = True
) -> ModelScores:
    """Return scores of predicted numbers, float64 (n_rows,), by model; `means`: whether the models predict means."""
    from sklearn import metrics

    values = {
        name: {
            "RMSE": float(metrics.root_mean_squared_error(y, predicted)),
            "mean absolute error": float(metrics.mean_absolute_error(y, predicted)),
            "R²": float(metrics.r2_score(y, predicted)) if len(y) > 1 else float("nan"),
        }
        for name, predicted in by_model.items()
    }
    calibration = [
        _tenths(_line(name, by_model, pooled), predicted, y, name == pooled) for name, predicted in by_model.items()
    ]
    return ModelScores(of=of, values=values, calibration=calibration if means else (), of_numbers=True)


def _line(name: str, by_model: Mapping[str, Any], pooled: str) -> str:
    """Return a line's name; the pooled model has the name, and so the colour, of the model it is compared with."""
    return next(iter(by_model)) if name == pooled else name


def _tenths(name: str, predicted: Floats, so: Floats, pooled: bool) -> Points:
    """Return mean prediction and mean outcome of rows, in tenths by prediction; equal predictions stay together."""
    edges = np.unique(np.quantile(predicted, np.linspace(0.0, 1.0, _TENTHS + 1)[1:-1]))
    tenth = np.searchsorted(edges, predicted, side="left")
    rows = np.bincount(tenth)
    means = [np.bincount(tenth, of)[rows > 0] / rows[rows > 0] for of in (predicted, so)]
    return Points(name, means[0].tolist(), means[1].tolist(), pooled)


_LEADS = ("active", "leader", "server")
_PROBABILITY = "probability_"


def read_run(run: Path, party: str | None = None) -> tuple[Path, dict[str, Report], str]:
    """Return the folder of a finished training, its reports by party, and the viewer.

    `run` is a job's output folder, a report in it (NAME.report.json), or the job file. Without a `party`, the viewer
    is the only party there, or else the one with the labels. Raises ConfigError if there is no report, if one is
    damaged, or if the viewer is ambiguous.
    """
    folder, named = _folder_of(run)
    files = {path.name.removesuffix(".report.json"): path for path in sorted(folder.glob("*.report.json"))}
    # those of earlier trainings have a date in their names
    files = {name: path for name, path in files.items() if re.fullmatch(r"[\w-]+", name, re.ASCII)}
    if not files:
        raise ConfigError(
            f"expected the folder of a finished training, with a NAME.report.json of each party, got none - at {run}"
        )
    viewer = party or named
    if viewer is not None and viewer not in files:
        raise ConfigError(f"expected a report of {', '.join(files)}, got --as {viewer} - at {folder}")
    reports = {name: read_json(path, Report, FORMAT, name) for name, path in files.items()}
    if viewer is None:
        leads = [name for name, report in reports.items() if report.role in _LEADS or len(reports) == 1]
        if len(leads) != 1:
            raise ConfigError(f"several parties have reports: add --as with one of {', '.join(reports)} - at {folder}")
        (viewer,) = leads
    of_run = reports[viewer].job, reports[viewer].model
    return folder, {name: of for name, of in reports.items() if (of.job, of.model) == of_run}, viewer


def _folder_of(run: Path) -> tuple[Path, str | None]:
    """Return the folder of reports, and the party if `run` is its report."""
    if run.is_dir():
        return run, None
    if not run.exists():
        raise ConfigError(f"expected the folder of a finished training, a job file or a report, got nothing - at {run}")
    if run.name.endswith(".report.json"):
        return run.parent, run.name.removesuffix(".report.json")
    if run.suffix == ".toml":
        folder = Path(load_job(run).output)
        if not folder.is_dir():
            raise ConfigError(f"the job has not run: there is no folder {folder} - at {run}")
        return folder, None
    raise ConfigError(
        f"expected the folder of a finished training, a job file or a report, got another file - at {run}"
    )


def contents_of_run(
    folder: Path, reports: Mapping[str, Report], viewer: str, scores: ModelScores | None = None, pooled: Any = None
) -> Contents:
    """Return the contents of a job's report, in the view of one party.

    `scores` are those of predictions with known labels, `pooled` the losses of the same model trained on one table, by
    eval set and metric.
    """
    own, others = reports[viewer], ""
    if scores is None and own.held_out is not None:
        parts = own.held_out.calibration
        line = Points("all", [score for score, _, _ in parts], [share for _, share, _ in parts])
        scores = ModelScores(
            of="held-out rows of participants", values=own.held_out.groups, calibration=[line] if parts else ()
        )
    if len(reports) > 1:
        names = ", ".join(name for name in reports if name != viewer)
        others = f" Times, bytes and the cost of noise of {names} are from their reports in the same folder."
    timelines = {name: of.timeline for name, of in reports.items() if of.timeline is not None}
    totals = _gain_by_party(folder, own)
    kinds = list(own.importances)
    kind = "gain" if "gain" in kinds else kinds[0] if kinds else ""
    regression = kind.startswith("weight")
    facts = [f"job {own.job}", f"{viewer} as {own.role}", f"ended {own.ended.replace('T', ' ')[:16]} UTC"]
    if own.columns:
        facts.append(own.table())
    return Contents(
        title=f"{own.options.get('protocol', 'job')}: {own.job}", facts=facts, viewer=viewer,
        whose=f"This is the view of {viewer}, which decides who else may see it.{others}",
        curves=list(_curves(own, pooled)), unit="epoch" if regression else "round", best=own.best_round, scores=scores,
        importances={viewer: own.importances.get(kind, {}), **totals},
        importance_kind=_importance_kind(kind, viewer, bool(totals)),
        splits={"gain": "gain" if totals else "", "count": "number"}.get(kind, ""), sent=_sent(reports, own),
        timeline=joined(timelines), seconds={name: of.seconds for name, of in reports.items()}, learned=own.learned,
        noise=[f"{name}: {of.spent}" for name, of in reports.items() if of.spent], notes=list(_notes(own)),
        parameters=own.options, versions=own.versions, absent=_absent(own, viewer, scores, timelines, reports),
    )  # fmt: skip


def _curves(own: Report, pooled: Mapping[str, Mapping[str, Sequence[float]]] | None) -> Iterator[Curve]:
    """Yield the losses of training rows, and by eval set; those of several metrics are named for both."""
    usual = str(own.options.get("eval_metric") or "loss")
    if own.train_losses:
        yield Curve("training rows", "loss", list(own.train_losses.values()), at=list(own.train_losses))
    for losses, alone in ((own.losses, False), (own.alone, True)):
        for name, values in losses.items():
            of, _, metric = name.partition(" ")
            yield Curve(f"{of}, {OWN}" if alone else of, metric or usual, values, alone=alone)
    several = any(" " in name for name in own.losses)
    for of, metrics in (pooled or {}).items():
        for metric, by_round in metrics.items():
            yield Curve(of, metric if several else usual, by_round, pooled=True)


def _gain_by_party(folder: Path, own: Report) -> dict[str, dict[str, float]]:
    """Return the total gain of each other party's splits, from the viewer's part of the model if that has the trees."""
    file = folder / f"{own.party}.part"
    if not file.exists() or kind_of(file) != TREES.kind:
        return {}
    part = load_part(file, own.party)
    if part.forest is None or part.model_id != own.model or "gain" not in own.importances:
        return {}
    gains = np.zeros(len(part.forest.sources))
    for tree in part.forest.trees:
        inner = tree.left >= 0
        np.add.at(gains, tree.source[inner], tree.gain[inner])
    others = zip(part.forest.sources, gains.tolist(), strict=True)
    return {name: {f"all of {name}": gain} for name, gain in others if name != own.party}


def _importance_kind(kind: str, viewer: str, totals: bool) -> str:
    if kind == "gain":
        others = f" Other parties' columns are added up: {viewer} does not know their names." if totals else ""
        return f"Total gain of the splits on a column.{others}"
    if kind == "count":
        return f"Number of splits on a column; {viewer} does not know their gains."
    return f"Weights of {viewer}'s columns in units of their standard deviation; other parties keep theirs."


def _sent(reports: Mapping[str, Report], own: Report) -> dict[str, dict[str, Any]]:
    """Return what all parties here sent, and the bytes that the viewer received from others."""
    found = {f"{name} -> {peer}": totals for name, of in reports.items() for peer, totals in of.sent.items()}
    received = {f"{peer} -> {own.party}": {"bytes": n} for peer, n in own.received.items() if peer not in reports}
    return found | received


def _notes(own: Report) -> Iterator[str]:
    if own.encryption:
        yield f"Encryption: {own.encryption}{', ' if own.choice else ''}{own.choice}"
    if own.unsettled:
        yield own.unsettled
    yield from own.joined
    if own.diverged:
        yield own.diverged
    if own.waited:
        yield "Waited for " + ", ".join(f"{peer} {seconds:.1f} s" for peer, seconds in own.waited.items())


def _absent(
    own: Report, viewer: str, scores: ModelScores | None, timelines: Mapping[str, Any], reports: Mapping[str, Report]
) -> dict[Section, str]:
    needed = "A run stores no predictions with labels: add --predictions (from treaty predict), --labels and --label."
    found: dict[Section, str] = {"shap": _no_contributions(own)}
    if not own.alone:
        needed_for_own = "Needs a job of trees between owners of columns, with exact labels and eval_tables."
        found["alone"] = needed_for_own if own.role in _LEADS else f"{viewer} has no labels to train on."
    if scores is None:
        found |= {"scores": needed, "roc": needed, "calibration": needed}
    elif scores.of_numbers:
        found["roc"] = "Labels are numbers, but ROC needs classes."
    if not own.losses:
        found["curves"] = f"{viewer} has no losses: only the party with labels has them, without noise on labels."
    if not any(own.importances.values()):
        found["importances"] = f"{viewer} has no columns in the model."
    if not timelines:
        found["timeline"] = "An earlier version of Treaty ran this job, and noted no times of messages."
    if not any(report.spent for report in reports.values()):
        found["noise"] = "No party has added noise, so there is no epsilon to account for."
    return found


def _no_contributions(own: Report) -> str:
    """Return why a run has none: `treaty explain` computes them, if the system can."""
    with suppress(ConfigError):  # a system of another version, or code that is not trusted
        if reason := find_system(str(own.options.get("protocol"))).cannot.get("explain"):
            return f"{reason[:1].upper()}{reason[1:]}."
    if own.options.get("membership") == "hidden" or own.options.get("inference") == "shared":
        return "The job hides the decisions of trees, of which contributions are made. No command computes them."
    return "A run stores no rows. The command treaty explain computes what columns add to each row."


def read_scores(predictions: Path, labels: Path, label: str) -> ModelScores:
    """Return scores of the output of ``treaty predict``, with labels from another table of the same rows.

    Rows are matched by a common column, such as ids, or else by their order. Raises ConfigError if a file cannot be
    read or lacks a column, and DataError if the rows do not match.
    """
    predicted = read_table(predictions, party="predictions")
    if "prediction" not in predicted.column_names:
        raise ConfigError(f"expected a file that treaty predict wrote, got no column 'prediction' - at {predictions}")
    known = read_table(labels, party="labels")
    if label not in known.column_names:
        raise ConfigError(f"expected --label to be one of {', '.join(known.column_names[:20])}, got {label!r}")
    y = _in_order(predicted, known, label, labels)
    names = [name for name in predicted.column_names if name.startswith(_PROBABILITY)]
    # without probabilities, predictions are numbers
    if not names:
        numbers = np.asarray(y, np.float64)
        made = {OURS: np.asarray(predicted["prediction"].to_numpy(), np.float64)}
        return scores_of_numbers(f"{len(numbers)} rows", numbers, made)
    classes = [name.removeprefix(_PROBABILITY) for name in names]
    numbers_of = {text: number for number, text in enumerate(classes)}
    # as labels are spelt in the names of columns of probabilities: a whole number without a point
    spelt = [str(int(value)) if isinstance(value, float) and value.is_integer() else str(value) for value in y]
    codes = [numbers_of.get(label) for label in spelt]
    if None in codes:
        raise DataError(f"expected labels of {', '.join(classes)}, got others - in column {label!r} of {labels}")
    p = np.column_stack([predicted[name].to_numpy() for name in names])
    return scores_of_classes(f"{len(codes)} rows", np.array(codes, np.intp), {OURS: p}, classes)


def _in_order(predicted: Any, known: Any, label: str, path: Path) -> list[Any]:
    """Return the labels of the predicted rows."""
    shared = [name for name in predicted.column_names if name in known.column_names and name != label]
    y: list[Any] = known[label].to_pylist()
    if shared:
        by_id = dict(zip(known[shared[0]].to_pylist(), y, strict=True))
        wanted = predicted[shared[0]].to_pylist()
        if len(by_id) < len(y) or not by_id.keys() >= set(wanted):
            raise DataError(f"expected every predicted row once in column {shared[0]!r}, got others - at {path}")
        y = [by_id[id] for id in wanted]
    if len(y) != predicted.num_rows or not y:
        raise DataError(f"expected labels of {predicted.num_rows} predicted rows, got {len(y)} - at {path}")
    if any(value is None for value in y):
        raise DataError(f"expected a label of every row, got empty ones - in column {label!r} of {path}")
    return y
