"""Print the table of options as Markdown (`make docs` writes it to docs/options.md)."""

from __future__ import annotations

import inspect
import re

import msgspec

from treaty.systems.linear_options import LINEAR_PROTOCOLS, LinearOptions
from treaty.systems.tree_options import PROTOCOLS, TreeOptions


def meanings(options: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """Return kind and meaning of each option from the class's docstring."""
    found = {}
    body = (inspect.getdoc(options) or "").partition("----------\n")[2]
    for names, kind, meaning in re.findall(r"^(\w[\w, ]*) : (.+)\n((?:    .+\n?)*)", body, flags=re.M):
        for name in names.split(", "):
            found[name] = (kind, " ".join(meaning.split()))
    return found


def print_table(options: type[msgspec.Struct], protocols: dict[str, tuple[str, ...]]) -> None:
    """Print a row per option."""
    print("| option | default | kind | protocols | meaning |")
    print("|---|---|---|---|---|")
    said = meanings(options)
    for field in msgspec.structs.fields(options):
        kind, meaning = said[field.name]
        own = [protocol for protocol, names in protocols.items() if field.name in names]
        print(f"| `{field.name}` | `{field.default!r}` | {kind} | {', '.join(own) or 'all'} | {meaning} |")


print("# Options\n")
print("Made from `treaty.options.TreeOptions` and `treaty.linear_options.LinearOptions` by `make docs`.\n")
print("## Trees\n")
print_table(TreeOptions, PROTOCOLS)
print("\n## Logistic regression\n")
print_table(LinearOptions, LINEAR_PROTOCOLS)
