"""Print the table of options as Markdown (`make docs` writes it to docs/options.md)."""

from __future__ import annotations

import inspect
import re

import msgspec

from treaty.options import PROTOCOLS, TreeOptions

TEXT = inspect.getdoc(TreeOptions) or ""


def meanings() -> dict[str, tuple[str, str]]:
    """Return kind and meaning of each option from the class's docstring."""
    found = {}
    body = TEXT.partition("----------\n")[2]
    for names, kind, meaning in re.findall(r"^(\w[\w, ]*) : (.+)\n((?:    .+\n?)*)", body, flags=re.M):
        for name in names.split(", "):
            found[name] = (kind, " ".join(meaning.split()))
    return found


print("# Options\n")
print("Made from `treaty.options.TreeOptions` by `make docs`.\n")
print("| option | default | kind | protocols | meaning |")
print("|---|---|---|---|---|")
for field in msgspec.structs.fields(TreeOptions):
    kind, meaning = meanings()[field.name]
    own = [protocol for protocol, names in PROTOCOLS.items() if field.name in names]
    print(f"| `{field.name}` | `{field.default!r}` | {kind} | {', '.join(own) or 'all'} | {meaning} |")
