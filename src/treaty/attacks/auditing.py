"""Train with every party's view recorded, or read recorded views, try every attack on each view, compare systems.

A comparison has the quality of each system's model on the same job, its cost, and what attacks find.
"""

from __future__ import annotations

import textwrap
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.metrics import log_loss, roc_auc_score

from treaty.attacks import nodes
from treaty.attacks.ciphertexts import learned_from_ciphertexts, recognised_ciphertexts, repeated_masks
from treaty.attacks.hidden_values import likeliest_buckets, matrix_products, noisy_gradients
from treaty.attacks.membership import extraction, membership
from treaty.attacks.views import Finding, Truth, View, recorded_views
from treaty.data.table import to_table
from treaty.errors import ConfigError, TreatyError
from treaty.estimators.linear import LogisticRegression
from treaty.estimators.trees import GBDTClassifier
from treaty.machine.arrays import Floats
from treaty.runs.records import READ, read_record
from treaty.systems import SYSTEMS, Model, find_system
from treaty.systems.options import SystemOptions, converted

Attack = Callable[[View, Truth], Iterator[Finding]]

ATTACKS: tuple[Attack, ...] = (
    nodes.instance_clustering, noisy_gradients, nodes.exact_sums, nodes.nested_sides, likeliest_buckets,
    nodes.inverted_histograms, nodes.row_communities, nodes.set_purity, recognised_ciphertexts,
    learned_from_ciphertexts, matrix_products, repeated_masks,
)  # fmt: skip
"""Each gets the view of one party, and yields nothing if it does not apply; what it reads is in `runs.records.READ`."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What attacks found in a training.

    Attributes
    ----------
    model : GBDTClassifier, GBDTRegressor or LogisticRegression
        The trained model.
    findings : list of Finding
        One for each attack that applies, party and target.
    in_clear : dict of str to list of str
        By party, what the messages that it received are stated to show in the clear or under noise. Attacks can start
        from these alone, unless a statement is wrong.
    unstated : list of str
        Messages that no statement covers, by receiver. Empty unless the system's `routes` have a fault.

    See Also
    --------
    audit : Makes it, with an example.

    Examples
    --------
    >>> from treaty.attacks.auditing import Audit
    >>> from treaty.attacks.views import Finding
    >>> finding = Finding(
    ...     attack="sums", party="bank", target="bins of shop", measure="share right", score=0.9, baseline=0.2
    ... )
    >>> found = Audit(model=None, findings=[finding], in_clear={"bank": ["sums of bins"]}, unstated=[])
    >>> [finding.attack for finding in found.findings if finding.finds]
    ['sums']
    """

    model: Any
    findings: list[Finding]
    in_clear: dict[str, list[str]]
    unstated: list[str]


def audit(model: Any, X: Any, y: Any = None, sample_weight: Any = None, *, megabytes: float = 2000.0) -> Audit:
    """Train a copy of a model and attack it from every party's view.

    All parties are played in this process, as `fit` plays them. What they see is recorded, with the contents of the
    messages that attacks read, and dropped at the end.

    Parameters
    ----------
    model : GBDTClassifier, GBDTRegressor, LogisticRegression, ...
        The model with its parameters; it is not changed.
    X, y, sample_weight
        The arguments of `fit`.
    megabytes : float, default 2000
        Most memory that what all parties see may take, in millions of bytes, besides what the training takes.

    Returns
    -------
    Audit

    Raises
    ------
    ConfigError
        If the protocol has no messages (``"pooled"``), if ``transport="tls"``, if parties see more than `megabytes`,
        which ends the training, and as `fit`.
    DataError
        As `fit`.

    See Also
    --------
    treaty.disclosures : What parties are stated to learn.

    Examples
    --------
    >>> import numpy as np, treaty
    >>> from treaty.attacks.auditing import audit
    >>> tables = {"bank": np.arange(100.0)[:, None], "shop": np.arange(100.0)[::-1, None] % 9}
    >>> system = treaty.FederBoostVertical(epsilon=8.0)
    >>> found = audit(treaty.GBDTClassifier(system, n_estimators=2), tables, np.arange(100) > 50)
    >>> [(finding.party, finding.target) for finding in found.findings]
    [('bank', 'buckets of shop')]
    """
    copy = clone(model)
    if copy.transport != "memory":
        raise ConfigError('an audit records what parties see in this process: set transport="memory"')
    given = (X,) if y is None else (X, y)
    with recorded_views(megabytes, READ) as views:
        copy.fit(*given, **({} if sample_weight is None else {"sample_weight": sample_weight}))
    if not views:
        raise ConfigError(f"protocol {copy.protocol!r} sends nothing that could be attacked: choose another one")
    by_row, targets = next(iter(views.values())).by_row, None
    if not by_row:
        inputs = next(view.inputs for view in views.values() if view.is_active)
        # the active party trains on randomised labels: findings are scored on the true ones
        if inputs.options.label_epsilon is not None:
            true = np.asarray(y)
            found = true if inputs.classes is None else np.searchsorted(np.asarray(inputs.classes), true)
            targets = found.astype(np.float64)
    return Audit(copy, findings(views, by_row=by_row, targets=targets), *compare_with_statements(views))


def compare_with_statements(views: Mapping[str, View]) -> tuple[dict[str, list[str]], list[str]]:
    """Return what the received messages are stated to show, by party, and the messages that no statement covers."""
    stated = {name: view.stated() for name, view in views.items()}
    unstated = [f"{name} received {one}, which no statement covers" for name, (_, of) in stated.items() for one in of]
    return {name: in_clear for name, (in_clear, _) in stated.items()}, unstated


def findings(views: Mapping[str, View], *, by_row: bool, targets: Floats | None = None) -> list[Finding]:
    """Try every attack on every party's view; return findings, the most successful first. Arguments are `Truth`'s."""
    truth = Truth(views, by_row=by_row, targets=targets)
    found = [finding for view in views.values() for attack in ATTACKS for finding in attack(view, truth)]
    return sorted(found, key=lambda finding: finding.baseline - finding.score)


def findings_of_records(paths: Sequence[Path]) -> tuple[list[Finding], dict[str, list[str]], list[str]]:
    """Try every attack on each record of one training, of different parties; a folder stands for the records in it.

    Return the findings; by party, what its messages are stated to show in the clear; and in words what could not be
    scored, and messages that no statement covers. Raise ConfigError if records are damaged, of several trainings, or of
    the same party, or if one is missing that scoring needs: that of the active party, which has the labels, or of any
    party with rows, if tables are split by row.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.record")) if path.is_dir() else [path])]
    if not files:
        raise ConfigError(f"expected records in {', '.join(map(str, paths))}, found no file *.record")
    views: dict[str, View] = {}
    for file in files:
        view = View(*read_record(file))
        if view.party in views:
            raise ConfigError(f"expected one record of each party, got another of {view.party} - at {file}")
        views[view.party] = view
    first = next(iter(views.values())).inputs
    ids = {view.inputs.model_id for view in views.values() if view.inputs.model_id}
    if len(ids) > 1:
        raise ConfigError(
            f"expected records of one training, got records of {len(ids)} - at {', '.join(map(str, files))}"
        )
    by_row = next(iter(views.values())).by_row
    missing = [name for name in first.roles.owners if name not in views]
    needed = missing if by_row else [first.roles.active] if first.roles.active in missing else []
    if needed:
        raise ConfigError(
            f"nothing can be scored without the record of {', '.join(needed)}; to have the records of all parties, "
            "rehearse the training with made-up or public rows"
        )
    unscored = [f"{name}: what others found of its columns cannot be scored without its record" for name in missing]
    if first.options.label_epsilon is not None:
        unscored.append("findings about labels are scored on the active party's randomised labels, not the true ones")
    in_clear, unstated = compare_with_statements(views)
    return findings(views, by_row=by_row), in_clear, unscored + unstated


Rows = NDArray[np.intp]

# users into which a participant is divided
_USERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A system with its options."""

    # its name in the comparison, ``"secureboost:encryption=ou"``
    title: str
    model: Model
    options: SystemOptions
    # whether each party has some of the rows, not some of the columns
    by_row: bool
    # whether the parties are users with a few rows each
    among_users: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The result of one system in a comparison."""

    title: str
    # on rows that were held back. For several classes, the AUC is the mean of each class against the rest
    auc: float = float("nan")
    log_loss: float = float("nan")
    # training time, with every party in a thread of one process and all messages recorded
    seconds: float = float("nan")
    # data that all parties sent in training
    megabytes: float = float("nan")
    messages: int = 0
    # the most successful first
    findings: list[Finding] = field(default_factory=list)
    # why it could not be played; the numbers are then NaN
    error: str = ""


def entrant(title: str) -> Entrant:
    """Return the system for a title ``"NAME"`` or ``"NAME:option=value:option=value"``.

    Raises ConfigError if the name, an option or a value does not exist.
    """
    name, *given = title.split(":")
    model: Model = next((model for model, named in SYSTEMS.items() if name in named), "trees")
    system = find_system(name, model)
    if system.split == "none":
        raise ConfigError(f"protocol {name!r} sends nothing that could be attacked: leave it out of the comparison")
    values: dict[str, Any] = {}
    for assignment in given:
        option, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"expected option=value after {name}:, got {assignment!r}")
        # a number, truth value or list as TOML writes it, else the text itself
        try:
            values[option] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            values[option] = value
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
    megabytes: float = 2000.0,
    begin: Callable[[str], None] = lambda title: None,
) -> list[Standing]:
    """Train and attack each system on the same rows.

    `columns` is a pyarrow.Table, `y` (n_rows,) labels of two or more classes. `cut` has each party's columns, for
    systems that split by column; the first party has the labels. `apart` has each participant's training rows, int64
    (m,), for systems that split by row; each of four users has a quarter of them. All systems train on these rows and
    are scored on the rows `held_back`. `megabytes` is as in `audit`, for each system. `begin` is called with each title
    before its system is played.
    """

    def played(one: Entrant) -> Standing:
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
        given: tuple[Any, ...] = (rows_of(train), y[train])
        if one.by_row:
            parts = [part for rows in apart for part in (np.array_split(rows, _USERS) if one.among_users else [rows])]
            given = ({f"participant{k + 1}": (columns.take(rows), y[rows]) for k, rows in enumerate(parts)},)
        done = audit(model, *given, megabytes=megabytes)
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
            log_loss=float(log_loss(right, chances, labels=np.arange(len(classes)))), seconds=seconds,
            megabytes=sum(of["bytes"] for of in sent) / 1e6, messages=sum(of["messages"] for of in sent),
            findings=sorted(found, key=lambda finding: -finding.advantage),
        )  # fmt: skip

    standings = []
    for one in entrants:
        begin(one.title)
        try:
            with warnings.catch_warnings():
                # the model is trained to be attacked, so warnings about its use do not matter
                warnings.simplefilter("ignore")
                standings.append(played(one))
        except TreatyError as error:
            standings.append(Standing(title=one.title, error=str(error)))
    return standings


FINDS, GUESSES = "tab:red", "tab:gray"


def draw_standings(standings: Sequence[Standing], path: Path) -> None:
    """Draw the quality of each model next to the success of the best attack on its training.

    Raises ConfigError if matplotlib is missing (``pip install "treaty-learn[report]"``), if the file cannot be written,
    and for a file type that matplotlib does not know.
    """
    drawn = [(standing, standing.findings[0]) for standing in standings if standing.findings]
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
    """Draw each finding's score next to that of a guess; raises as `draw_standings`."""
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
        raise ConfigError('figures need matplotlib: pip install "treaty-learn[report]"') from None
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
    """Break a long title between words, or at its options."""
    return "\n".join(textwrap.wrap(title.replace(":", ": "), 36, break_on_hyphens=False)).replace(": ", ":")
