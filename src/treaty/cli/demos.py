"""``treaty demo``: train a scenario, predict, and compare the scores with training on the pooled table."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.status import Status
from rich.table import Table as Grid
from sklearn.linear_model import LogisticRegression as SklearnRegression
from sklearn.metrics import log_loss, r2_score, roc_auc_score

from treaty.cli.demo_scenarios import DEMO_TREES, Scenario, by_column, by_row, is_target, load_data, regression
from treaty.cli.logs import console, say
from treaty.data.table import to_table
from treaty.errors import ConfigError
from treaty.estimators.linear import LogisticRegression
from treaty.estimators.trees import GBDTRegressor
from treaty.machine.process import trust
from treaty.models.linear import label_holder, preparation_of
from treaty.runs.warm_up import compile_kernels, compile_walks
from treaty.systems import SYSTEMS, Model, find_system
from treaty.systems.alignment.leakage import disclosures
from treaty.systems.options import SystemOptions, converted, names_of
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import System, roles_of

# a table of the terminal without lines, so that all of the demo fits a screen
_PLAIN: dict[str, Any] = {"box": None, "header_style": "italic", "pad_edge": False, "padding": (0, 2, 0, 0)}
_MOST_FACTS = 2


def run_demo(
    *,
    model: Model,
    protocol: str | None,
    parties: int | None,
    data: str,
    label: str | None,
    ids: str | None,
    split: str | None,
    transport: str | None,
    trees: int | None,
    encryption: str,
    open_sums: bool,
    first_time: bool,
    report: Path | None = None,
) -> None:
    """Train between fictitious organisations, predict held-back rows, and print scores, costs and what parties learned.

    The arguments are the options of ``treaty demo``; `first_time` says whether kernels are still to be compiled.
    """
    if protocol not in SYSTEMS[model] and any(protocol in known for known in SYSTEMS.values()):
        hint = "add --model logistic" if model == "trees" else "leave --model out"
        raise ConfigError(f"expected --protocol to be one of {', '.join(SYSTEMS[model])}, got {protocol!r}: {hint}")
    trust([protocol])
    system = find_system(protocol or ("secureboost" if model == "trees" else "quasi-newton"), model)
    cipher = next((name for name in ("encryption", "backend") if name in names_of(system.options)), None)
    named, seals = encryption != "auto", "sums" in names_of(system.options)
    unused = {
        "--model logistic has no trees: leave --trees out": trees is not None and model == "logistic",
        f"protocol {system.name!r} sends nothing: leave --transport out": transport and system.split == "none",
        f"protocol {system.name!r} splits rows: use --parties in place of --split": split and system.split == "rows",
        "--split says how many parties there are: leave --parties out": split and parties,
        f"protocol {system.name!r} has no cipher to choose: leave --encryption out": named and not cipher,
        f"protocol {system.name!r} has no sealed sums: leave --open out": open_sums and not seals,
        f"sums under {encryption} are open: add --open": seals and not open_sums and encryption in ("ou", "paillier"),
    }
    for refusal, given in unused.items():
        if given:
            raise ConfigError(refusal)
    options = _options(system, {cipher: encryption} if cipher and named else {}, parties, open_sums or not seals)
    loaded = load_data(data, label, ids)
    rounds = 20 if trees is None else trees
    played = {} if system.split == "none" else {"transport": transport or "memory"}
    if model == "logistic":
        scenario = regression(options, parties or 2, loaded, split, played)
    elif system.split == "rows":
        scenario = by_row(system, options, parties or 3, loaded, rounds, played)
    else:
        scenario = by_column(options, parties or 3, loaded, split, rounds, played)
    # alignment has compiled its own kernels by now, while another process compiled those for trees
    if first_time:
        with Status("the first time: compiling for this processor, for 5 to 20 seconds", console=console):
            if model == "trees":
                compile_walks()
            compile_kernels(system, options, aligns=None)
    _play(scenario, system)
    if report is not None:
        from treaty.estimators.reporting import contents_of
        from treaty.report.page import write_page

        # on the held-back rows, compared with the pooled model that `_scores` has trained
        test, pooled = scenario.test, None if system.split == "none" else scenario.pooled
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*rows have a margin beyond 4")
            warnings.filterwarnings("ignore", message="training ended after max_iter")
            alone = next(map(scenario.model_alone, scenario.alone), None)
            contents = contents_of(scenario.model, scenario.rows_of(test), scenario.y[test], pooled, (), None, alone)
        write_page(report, replace(contents, learned=_learned(scenario)))
        say(f"wrote {report}")
    _say_next(own_table=data != "breast", sealed=seals and not open_sums, report=report)


def _options(system: System, given: dict[str, Any], parties: int | None, exact_sums: bool) -> SystemOptions:
    """Return the system's options, checked. In a system with edge servers, `parties` is their number.

    With `exact_sums`, all parties accept what exact sums of so few rows show: the organisations are fictitious.
    """
    demo: dict[str, Any] = {"edges": parties or 3, "sums": "open" if exact_sums else "sealed"}
    if system.common is BoostingOptions and exact_sums:
        demo["allow_exact_sums"] = True
    demo = {name: value for name, value in demo.items() if name in names_of(system.options)}
    own = converted(given | demo, system.options, system.name)
    own.check(system.common().checked(own))
    return own


def _play(scenario: Scenario, system: System) -> None:
    """Train, predict and print scores, costs and what each party learned."""
    model, train, test = scenario.model, scenario.train, scenario.test
    regression = isinstance(model, LogisticRegression)
    batches = f", batches of {model.batch_size}" if regression else ""
    sealed = ", sealed sums" if getattr(model.protocol, "sums", "") == "sealed" else ""
    console.print(f"{len(train)} rows to train on, {len(test)} held back; {system.name}{batches}{sealed}", style="bold")
    if system.split != "none" and model.transport == "memory":
        console.print("all parties are threads of this process; for processes and TLS: --transport tls")
    if getattr(model.protocol, "allow_exact_sums", False):
        console.print("sums are open: they show bins of so few rows; in a job, all parties must accept that")
    # the demo prints what these warnings say, or expects it
    with warnings.catch_warnings():
        # some of so few rows always do
        warnings.filterwarnings("ignore", message=".*rows have a margin beyond 4")
        # printed below
        warnings.filterwarnings("ignore", message="training ended after max_iter")
        # which the baseline does on purpose
        warnings.filterwarnings("ignore", message="protocol 'pooled' joins")
        started = time.perf_counter()
        with Status("training", console=console):
            model.fit(*scenario.given)
        fitted = time.perf_counter()
        ours = _predicted(model, scenario.rows_of(test))
        predicted = time.perf_counter()
        grid = _scores(scenario, system, ours)
    console.print("")
    console.print(grid)
    if regression:
        cut = ", before it was steady" if label_holder(model.parts_.values()).unsettled else ""
        console.print(f"{model.n_iter_} epochs, mean Taylor loss {model.loss_history_[-1]:.4f} in the last{cut}")
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in model.timings_.items() if name != "total")
    console.print(f"training {fitted - started:.1f} s ({phases}), prediction {predicted - fitted:.1f} s")
    if model.communication_:
        console.print(_bytes_by_role(scenario, system) if "user" in system.train else _bytes_by_pair(model))
    for party, part in model.parts_.items():
        if getattr(part, "spent", ""):
            console.print(f"noise of {party}: {part.spent}", soft_wrap=True)
    grid = Grid("", "", title="\nWhat each party learned, in short", title_justify="left", **_PLAIN, show_header=False)
    for party, facts in scenario.model.disclosures_.items():
        for fact in facts[:_MOST_FACTS]:
            grid.add_row(party, fact)
    console.print(grid)


def _say_next(*, own_table: bool, sealed: bool, report: Path | None) -> None:
    """Print what to do after the demo."""
    console.print("\nNext", style="italic")
    if report is None:
        say("  all that each party learned       treaty demo --report out.html")
    if not own_table:
        say("  your own table                    treaty demo --data FILE --label COLUMN")
    if sealed:
        say("  faster, with sums in the clear    treaty demo --open")
    say("  in Python, and between two organisations    docs/tutorial.md")


def _learned(scenario: Scenario) -> dict[str, list[str]]:
    """Return what each party, or role, learned, by aligning rows and by training."""
    aligning = disclosures(scenario.aligned[0], scenario.aligned[1:]) if scenario.aligned else {}
    return {party: [*aligning.get(party, []), *facts] for party, facts in scenario.model.disclosures_.items()}


def _predicted(model: Any, tables: Any) -> NDArray[np.float64]:
    """Return probabilities (n_rows, n_classes), or predictions (n_rows,) of a target."""
    found = model.predict(tables) if isinstance(model, GBDTRegressor) else model.predict_proba(tables)
    return np.asarray(found, np.float64)


def add_scores(grid: Grid, title: str, y: NDArray[Any], probabilities: NDArray[np.float64]) -> None:
    """Add the scores of probabilities (n_rows, n_classes), or of predictions (n_rows,) of a numeric target."""
    if is_target(y):
        error = np.sqrt(np.mean((y - probabilities) ** 2))
        grid.add_row(title, f"{r2_score(y, probabilities):.4f}", f"{error:.4g}")
        return
    of_second = probabilities[:, 1] if probabilities.shape[1] == 2 else probabilities
    auc = roc_auc_score(y, of_second, multi_class="ovr")
    grid.add_row(title, f"{auc:.4f}", f"{log_loss(y, probabilities):.4f}")


def _scores(scenario: Scenario, system: System, ours: NDArray[np.float64]) -> Grid:
    """Return the scores of Treaty, of each participant alone, of the pooled table, and of another library."""
    y, train, test = scenario.y, scenario.train, scenario.test
    grid = Grid("On the held-back rows", **_PLAIN)
    for heading in ("R2", "RMSE") if is_target(y) else ("AUC", "log-loss"):
        grid.add_column(heading, justify="right")
    alone = system.split == "none"
    add_scores(grid, "Treaty, pooled" if alone else f"Treaty, {system.name}, nothing pooled", y[test], ours)
    for name in scenario.alone:
        if (model := scenario.model_alone(name)) is not None:
            rows = scenario.rows_of(test)[name] if scenario.aligned else scenario.rows_of(test)
            add_scores(grid, f"Treaty, {name} alone", y[test], _predicted(model, rows))
        else:
            grid.add_row(f"Treaty, {name} alone: lacks a class", "-", "-")
    if not alone:
        _add_pooled(grid, scenario, system, ours)
    if isinstance(scenario.model, LogisticRegression):
        # scikit-learn's model of the same prepared columns, with the exact loss and its own penalty
        table = to_table(scenario.columns)
        learnt = preparation_of(to_table(scenario.columns.take(train)))
        prepared = learnt.matrix(table.columns, table.n_rows)
        theirs = SklearnRegression(max_iter=1000).fit(prepared[train], y[train])
        found = theirs.predict_proba(prepared[test])
        add_scores(grid, "scikit-learn's LogisticRegression, pooled table", y[test], found)
    else:
        _add_xgboost(grid, scenario)
    return grid


def _add_pooled(grid: Grid, scenario: Scenario, system: System, ours: NDArray[np.float64]) -> None:
    """Add the same model trained on the pooled table, and how close ours is to it if both should be equal."""
    y, train, test, pooled = scenario.y, scenario.train, scenario.test, scenario.pooled
    tables = scenario.rows_of(train)
    theirs = _predicted(pooled.fit(tables, y[train]), scenario.rows_of(test))
    note = ""
    if isinstance(pooled, LogisticRegression):
        pairs = ((scenario.model.parts_[name].coef, pooled.parts_[name].coef) for name in tables)
        note = f" (weights within {max(np.abs(a - b).max(initial=0.0) for a, b in pairs):.0e})"
    elif system.lossless:
        note = " (bit for bit the same)" if np.array_equal(theirs, ours) else " (DIFFERENT)"
    add_scores(grid, f"Treaty, pooled table{note}", y[test], theirs)


def _add_xgboost(grid: Grid, scenario: Scenario) -> None:
    """Add XGBoost trained on the pooled table with the same settings, or a line that it is not installed."""
    try:
        from xgboost import XGBClassifier, XGBRegressor
    except ImportError:
        grid.add_row("XGBoost, not installed: pip install 'treaty-learn[xgboost]'", "-", "-")
        return
    y, train, test = scenario.y, scenario.train, scenario.test
    table = to_table(scenario.columns)
    matrix = table.matrix()
    codes = y if is_target(y) else np.unique(y, return_inverse=True)[1]
    booster = (XGBRegressor if is_target(y) else XGBClassifier)(
        n_estimators=scenario.model.n_estimators, **DEMO_TREES,
        max_bin=scenario.pooled.max_bin, tree_method="hist",
        enable_categorical=True, feature_types=["float" if of is None else "c" for of in table.schema.categories],
    )  # fmt: skip
    booster.fit(matrix[train], codes[train])
    p = np.asarray((booster.predict if is_target(y) else booster.predict_proba)(matrix[test]), np.float64)
    theirs = p if is_target(y) else p / p.sum(axis=1, keepdims=True)
    add_scores(grid, "XGBoost, pooled table (no least leaf size)", y[test], theirs)


def _byte_grid(headings: tuple[str, ...]) -> Grid:
    grid = Grid(**_PLAIN)
    for heading in headings:
        grid.add_column(heading, justify="right" if heading in ("messages", "MB", "MB of each sender") else "left")
    return grid


def _bytes_by_pair(model: Any) -> Grid:
    grid = _byte_grid(("Sent in training", "messages", "MB", "mostly"))
    for pair, totals in model.communication_.items():
        largest = max(totals["by_type"], key=totals["by_type"].get)
        grid.add_row(pair, str(totals["messages"]), f"{totals['bytes'] / 1e6:.2f}", largest)
    return grid


def _bytes_by_role(scenario: Scenario, system: System) -> Grid:
    """Return what each role sent to each other role: all its parties together, and one on average."""
    roles = roles_of(system, list(scenario.given[0]), None, scenario.model.protocol).of
    members = {role: sum(other == role for other in roles.values()) for role in roles.values()}
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for pair, totals in scenario.model.communication_.items():
        sender, _, receiver = pair.partition(" -> ")
        messages, size = sums.get((roles[sender], roles[receiver]), (0, 0))
        sums[roles[sender], roles[receiver]] = messages + totals["messages"], size + totals["bytes"]
    grid = _byte_grid(("Sent in training", "messages", "MB", "MB of each sender"))
    for (sender, receiver), (messages, size) in sums.items():
        grid.add_row(
            f"{members[sender]} {sender} -> {members[receiver]} {receiver}", str(messages), f"{size / 1e6:.2f}",
            f"{size / members[sender] / 1e6:.2f}",
        )  # fmt: skip
    return grid
