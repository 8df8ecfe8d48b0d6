"""Print the tables of options as Markdown (`make docs` writes them to docs/options.md)."""

from __future__ import annotations

import inspect
import re
from typing import Any

from treaty import (
    ColumnStatistics,
    GBDTClassifier,
    LinearRegression,
    LogisticRegression,
    PoissonRegressor,
    Scorecard,
)
from treaty.systems import OPTIONS, SYSTEMS, find_system, option_class
from treaty.systems.logistic.options import OF_SCORECARDS, RegressionOptions
from treaty.systems.options import names_of
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.statistics.options import ColumnOptions


def meanings(options: type) -> dict[str, tuple[str, str]]:
    """Return kind and meaning of each option from the docstrings of a class and, for what it leaves out, its bases."""
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(options.__mro__):
        body = inspect.cleandoc(base.__doc__ or "").partition("----------\n")[2].partition("\n\n")[0]
        for names, kind, text in re.findall(r"^(\w[\w, ]*?)(?: : (.+))?\n((?:    .+\n?)+)", body, flags=re.M):
            for name in names.split(", "):
                inherited, _ = found.get(name, ("", ""))
                found[name] = (re.sub(r",? ?default .*", "", kind) or inherited, " ".join(text.split()))
    return found


def print_table(options: type, names: list[str], *others: type) -> None:
    """Print a row for each of these options or parameters of a class; what it does not say, `others` do."""
    print("| option | default | kind | meaning |")
    print("|---|---|---|---|")
    said, parameters = meanings(options), dict(inspect.signature(options).parameters)
    for other in others:
        said = {**meanings(other), **said}
        parameters = {**inspect.signature(other).parameters, **parameters}
    for name in names:
        kind, meaning = said[name]
        print(f"| `{name}` | `{parameters[name].default!r}` | {kind.replace('|', ' or ')} | {meaning} |")


def print_system(kind: Any) -> None:
    """Print what a system is, and its own options."""
    summary = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
    models = [model for model, known in SYSTEMS.items() if kind.system in known]
    if find_system(kind.system, models[0]).split == "none":
        place = "Job files have no such system, as a job runs between parties."
    else:
        place = f'In a job file: `protocol = "{kind.system}"` and a table `[{kind.system}]`.'
    print(f"\n## {kind.__name__}\n\n{summary} {place}\n")
    print_table(kind, names_of(kind))


print("# Options\n")
print(
    "Each system has options of its own, given to its class: `GBDTClassifier(SecureBoost(rl_trees=1), max_depth=4)`. "
    "Options that every boosting, or every regression, has are given to the estimator. `None` means the system's own "
    "default. `make docs` makes this page from the classes.\n"
)
statistics = [name for name in inspect.signature(ColumnStatistics).parameters if name in names_of(ColumnOptions)]
regressions = (LogisticRegression, LinearRegression, PoissonRegressor)
own = {
    kind: [name for name in inspect.signature(kind).parameters if name not in {*names_of(common), "C"}]
    for kind, common in [(GBDTClassifier, BoostingOptions), *((kind, RegressionOptions) for kind in regressions)]
}
alone = [name for name in own[GBDTClassifier] if all(name in names for names in own.values())]
print("## Of the estimator alone\n")
print(
    "Parameters of `GBDTClassifier`, `GBDTRegressor`, `GBDTRanker`, and of the linear models `LogisticRegression`, "
    "`LinearRegression` and `PoissonRegressor`, whose systems are `Pooled`, `QuasiNewton` and `SGD`, and of "
    "`ColumnStatistics`, whose systems are `Pooled` and `Statistics`. In a job file "
    "`protocol`, `active` and `n_jobs` stand at the top; `transport` does not: the parties always talk over TLS.\n"
)
print_table(GBDTClassifier, alone)
print("\n## Of the estimators of boosted trees alone\n")
print("Job files have no such options.\n")
print_table(GBDTClassifier, [name for name in own[GBDTClassifier] if name not in alone])
print("\n## Of LogisticRegression alone\n")
print("Job files have no such options.\n")
print_table(LogisticRegression, ["C", *(name for name in own[LogisticRegression] if name not in alone)])
print("\n## All boosted trees\n")
print("Parameters of `GBDTClassifier`, `GBDTRegressor` and `GBDTRanker`; in a job file the table `[boosting]`.\n")
print_table(GBDTClassifier, names_of(BoostingOptions))
print("\n## All linear models\n")
print(
    "Parameters of `LogisticRegression`; of `LinearRegression` and `PoissonRegressor` those but batches and "
    "probabilities. In a job file the table `[regression]`.\n"
)
card = ["pdo", *OF_SCORECARDS]
print_table(LogisticRegression, [name for name in names_of(RegressionOptions) if name not in card], RegressionOptions)
print("\n## Scorecards\n")
print(
    "Parameters of `Scorecard`, which also has `l2` and those of the estimator alone. In a job file the table "
    "`[regression]`: with `pdo`, which has no default there, the job trains a scorecard.\n"
)
print_table(Scorecard, card)
print("\n## ColumnStatistics\n")
print("Parameters of `ColumnStatistics`; in a job file the table `[columns]`.\n")
print_table(ColumnStatistics, statistics)
for name in OPTIONS:
    print_system(option_class(name))
