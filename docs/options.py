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


def meanings(options: Any) -> dict[str, tuple[str, str]]:
    """Return kind and meaning of each option from the class's docstring."""
    found = {}
    body = (inspect.getdoc(options) or "").partition("----------\n")[2]
    for names, kind, meaning in re.findall(r"^(\w[\w, ]*?)(?: : (.+))?\n((?:    .+\n?)*)", body, flags=re.M):
        for name in names.split(", "):
            found[name] = (kind.partition(", default")[0], " ".join(meaning.split()))
    return found


def print_table(options: Any) -> None:
    """Print a row per option."""
    print("| option | default | kind | meaning |")
    print("|---|---|---|---|")
    said = meanings(options)
    of = msgspec.structs if issubclass(options, msgspec.Struct) else dataclasses
    for field in of.fields(options):
        kind, meaning = said[field.name]
        kind = kind or {"mode": '{"safe", "paper"}', "allow_insecure": "bool"}.get(field.name, "see there")
        print(f"| `{field.name}` | `{field.default!r}` | {kind} | {meaning} |")


print("# Options\n")
print("Made from the docstrings of the options' classes by `make docs`.\n")
print("## Of every boosting: `GBDTClassifier`, `GBDTRegressor`, `[boosting]` in a job file\n")
print_table(BoostingOptions)
print("\n## Of every logistic regression: `LogisticRegression`, `[regression]` in a job file\n")
print_table(RegressionOptions)
for name in OPTIONS:
    kind = option_class(name)
    in_jobs = "" if kind.system == "pooled" else f", `[{kind.system}]` in a job file"
    print(f"\n## `{name}`{in_jobs}\n")
    print(f"{(inspect.getdoc(kind) or '').partition(chr(10))[0]}\n")
    print_table(kind)
