"""Compare systems on the same job: the quality of the model, its cost, and what attacks find; draw the results."""

from __future__ import annotations

import textwrap
import time
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score

from treaty.attacks.auditing import audit
from treaty.attacks.membership import extraction, membership
from treaty.attacks.views import Finding
from treaty.data.table import to_table
from treaty.errors import ConfigError, TreatyError
from treaty.estimators.linear import LogisticRegression
from treaty.estimators.trees import GBDTClassifier
from treaty.systems import SYSTEMS, Model, find_system
from treaty.systems.options import SystemOptions, converted

Rows = NDArray[np.intp]
# into which a participant is cut
_USERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A system with its options.

    Attributes
    ----------
    title : str
        As it was named, ``"secureboost:encryption=ou"``.
    model : {"trees", "logistic"}
    options : SystemOptions
    by_row : bool
        Whether parties have rows of their own, and not columns.
    among_users : bool
        Whether these are users with a few rows each.
    """

    title: str
    model: Model
    options: SystemOptions
    by_row: bool
    among_users: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a system did.

    Attributes
    ----------
    title : str
    auc, log_loss : float
        On rows held back; of several classes the AUC is the mean of each against the rest.
    seconds : float
        Of training with every party a thread of one process, and all messages recorded.
    megabytes : float
        That all parties sent in training.
    messages : int
    findings : list of Finding
        Most successful first.
    error : str
        Why it could not be played; the numbers are then NaN.
    """

    title: str
    auc: float = float("nan")
    log_loss: float = float("nan")
    seconds: float = float("nan")
    megabytes: float = float("nan")
    messages: int = 0
    findings: list[Finding] = field(default_factory=list)
    error: str = ""

    @property
    def worst(self) -> Finding | None:
        """The finding that is furthest above its guess."""
        return max(self.findings, key=lambda finding: finding.advantage, default=None)


def entrant(title: str) -> Entrant:
    """Return the system that is named as ``"NAME"`` or ``"NAME:option=value:option=value"``.

    Raises ConfigError for a name, option or value that does not exist.
    """
    name, *given = title.split(":")
    model: Model = next((model for model, named in SYSTEMS.items() if name in named), "trees")
    system = find_system(name, model)
    if system.split == "none":
        raise ConfigError(f"protocol {name!r} sends nothing that could be attacked: leave it out of the comparison")
    values = {}
    for assignment in given:
        option, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"expected option=value after {name}:, got {assignment!r}")
        values[option] = _value(value)
    options = converted(values, system.options, name)
    options.check(system.common().checked(options))
    return Entrant(
        title=title, model=model, options=options, by_row=system.split == "rows", among_users="user" in system.train
    )


def compare(
    entrants: Sequence[Entrant],
    columns: Any,
    y: NDArray[Any],
    cut: Mapping[str, Sequence[str]],
    apart: Sequence[Rows],
    held_back: Rows,
    *,
    trees: int = 20,
    begin: Callable[[str], None] = lambda title: None,
) -> list[Standing]:
    """Train and attack each system on the same rows.

    Parameters
    ----------
    entrants : sequence of Entrant
    columns : pyarrow.Table (n_rows, n_columns)
    y : ndarray (n_rows,)
        Labels of two or more classes.
    cut : mapping of str to list of str
        Each party's columns under systems that split by column; the first party has the labels.
    apart : sequence of int64 (m,)
        Each participant's training rows under systems that split by row; among users each has a quarter of them.
    held_back : int64 (k,)
        Rows to score on; the training rows of all systems are those in `apart`.
    trees : int, default 20
    begin : callable
        Given each title before it is played.
    """
    standings = []
    for one in entrants:
        begin(one.title)
        try:
            with warnings.catch_warnings():
                # of a model that is trained to be attacked
                warnings.simplefilter("ignore")
                standings.append(_played(one, columns, y, cut, apart, held_back, trees))
        except TreatyError as error:
            standings.append(Standing(title=one.title, error=str(error)))
    return standings


def _played(
    one: Entrant,
    columns: Any,
    y: NDArray[Any],
    cut: Mapping[str, Sequence[str]],
    apart: Sequence[Rows],
    held_back: Rows,
    trees: int,
) -> Standing:
    def rows_of(rows: Rows) -> Any:
        taken = columns.take(rows)
        return taken if one.by_row else {party: taken.select(names) for party, names in cut.items()}

    model: Any
    if one.model == "logistic":
        model = LogisticRegression(one.options, random_state=0)
    else:
        model = GBDTClassifier(one.options, n_estimators=trees, random_state=0)
    train = np.sort(np.concatenate(list(apart)))
    started = time.perf_counter()
    if one.by_row:
        parts = [part for rows in apart for part in (np.array_split(rows, _USERS) if one.among_users else [rows])]
        done = audit(model, {f"participant{k + 1}": (columns.take(rows), y[rows]) for k, rows in enumerate(parts)})
    else:
        done = audit(model, rows_of(train), y[train])
    seconds = min(time.perf_counter() - started, done.model.timings_["total"])
    sent = done.model.communication_.values()
    chances, seen = (done.model.predict_proba(rows_of(rows)) for rows in (held_back, train))
    classes = done.model.classes_
    right, of_seen = (np.searchsorted(classes, y[rows]) for rows in (held_back, train))
    found = [
        *done.findings,
        membership(
            seen[np.arange(len(seen)), of_seen], np.ones(len(seen), np.bool_),
            chances[np.arange(len(chances)), right], np.ones(len(chances), np.bool_),
        ),
    ]  # fmt: skip
    if len(classes) == 2:
        x, half = to_table(columns.take(held_back)).matrix().astype(np.float64), len(held_back) // 2
        answers = chances[:, 1]
        found.append(extraction(x[:half], answers[:half], x[half:], answers[half:], right[:half] == 1))
    return Standing(
        title=one.title,
        auc=float(roc_auc_score(right, chances[:, 1] if len(classes) == 2 else chances, multi_class="ovr")),
        log_loss=float(log_loss(right, chances, labels=np.arange(len(classes)))),
        seconds=seconds,
        megabytes=sum(of["bytes"] for of in sent) / 1e6,
        messages=sum(of["messages"] for of in sent),
        findings=sorted(found, key=lambda finding: -finding.advantage),
    )


def _value(text: str) -> Any:
    """Return a number, truth value or list as TOML writes it, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


FINDS, GUESSES = "tab:red", "tab:gray"


def draw_standings(standings: Sequence[Standing], path: Path) -> None:
    """Draw how good each model is against what the most successful attack on its training finds.

    Raises ConfigError without matplotlib, which ``pip install "treaty-learn[report]"`` brings, and for a file that
    cannot be written or is of no kind that matplotlib knows.
    """
    drawn = [(standing, standing.worst) for standing in standings if standing.worst is not None]
    picture, (quality, danger) = _picture(len(drawn), 2)
    places = np.arange(len(drawn))[::-1]
    quality.plot([standing.auc for standing, _ in drawn], places, "o", color="tab:blue")
    quality.set(
        xlabel="AUC on rows held back", yticks=places, yticklabels=[_wrapped(standing.title) for standing, _ in drawn]
    )
    for place, (_, worst) in zip(places, drawn, strict=True):
        danger.barh(place, max(0.0, worst.advantage), color=FINDS if worst.finds else GUESSES, alpha=0.6)
        text = f"{worst.attack}, {worst.party}"
        danger.annotate(text, (0.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=7)
    danger.set(xlabel="most successful attack: way from a guess to all", xlim=(0.0, 1.0))
    _save(picture, path)


def draw_findings(found: Sequence[Finding], path: Path) -> None:
    """Draw each finding's score next to its guess; raises as `draw_standings`."""
    picture, (axes,) = _picture(len(found), 1)
    places = np.arange(len(found))[::-1]
    axes.barh(places, [one.score for one in found], color=[FINDS if one.finds else GUESSES for one in found], alpha=0.6)
    axes.plot([one.baseline for one in found], places, "|", color="black", markersize=18, label="guess")
    titles = [_wrapped(f"{one.attack}, {one.party}, {one.target} ({one.measure})") for one in found]
    axes.set(xlabel="score", xlim=(0.0, 1.0), yticks=places, yticklabels=titles)
    axes.legend(loc="lower right")
    _save(picture, path)


def _picture(lines: int, columns: int) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError('a figure needs matplotlib: pip install "treaty-learn[report]"') from None
    picture = Figure(figsize=(10, 0.7 * max(1, lines) + 1.6), layout="constrained")
    axes = list(picture.subplots(1, columns, sharey=True, squeeze=False)[0])
    for each in axes:
        each.grid(axis="x", alpha=0.3)
    return picture, axes


def _save(picture: Any, path: Path) -> None:
    try:
        picture.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the figure {path} cannot be written: {error}") from None


def _wrapped(title: str) -> str:
    """Break a long title between words, or at a system's options."""
    return "\n".join(textwrap.wrap(title.replace(":", ": "), 36, break_on_hyphens=False)).replace(": ", ":")
