"""Print the tables of options as Markdown (`make docs` writes them to docs/options.md)."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import msgspec

from treaty.systems import OPTIONS, option_class
from treaty.systems.logistic.options import RegressionOptions
from treaty.systems.pooled.options import BoostingOptions


def meanings(options: type) -> dict[str, tuple[str, str]]:
    """Return kind and meaning of each option from the class's docstring; the kind is empty where it says none."""
    found = {}
    body = (inspect.getdoc(options) or "").partition("----------\n")[2]
    for names, kind, meaning in re.findall(r"^(\w[\w, ]*?)(?: : (.+))?\n((?:    .+\n?)+)", body, flags=re.M):
        for name in names.split(", "):
            found[name] = (re.sub(r", default .*", "", kind), " ".join(meaning.split()))
    return found


def defaults(options: type) -> dict[str, Any]:
    """Return the default of each option, in order."""
    if issubclass(options, msgspec.Struct):
        return {field.name: field.default for field in msgspec.structs.fields(options)}
    return {field.name: field.default for field in dataclasses.fields(options)}


def print_table(options: type) -> None:
    """Print a row per option."""
    print("| option | default | kind | meaning |")
    print("|---|---|---|---|")
    said = meanings(options)
    for name, default in defaults(options).items():
        kind, meaning = said[name]
        print(f"| `{name}` | `{default!r}` | {kind.replace('|', ' or ')} | {meaning} |")


def print_system(name: str) -> None:
    """Print what a system is, and its own options."""
    kind = option_class(name)
    summary = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
    print(f'\n## {name}\n\nIn a job file: `protocol = "{kind.system}"` and a table `[{kind.system}]`. {summary}\n')
    print_table(kind)


print("# Options\n")
print(
    "Each system has options of its own, given to its class: `GBDTClassifier(SecureBoost(rl_trees=1), max_depth=4)`. Options "
    "that every boosting, or every regression, has are given to the estimator. `None` means the system's own default. "
    "`make docs` makes this page from the classes.\n"
)
print("## All boosted trees\n\nParameters of `GBDTClassifier` and `GBDTRegressor`; in a job file the table `[boosting]`.\n")
print_table(BoostingOptions)
print("\n## All logistic regressions\n\nParameters of `LogisticRegression`; in a job file the table `[regression]`.\n")
print_table(RegressionOptions)
for name in OPTIONS:
    print_system(name)
