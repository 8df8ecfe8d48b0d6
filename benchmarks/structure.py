"""How the package is built: files, lines, functions, comments, listings, in numbers that anyone can measure again.

`python benchmarks/structure.py [FOLDER ...]` prints a table with a column for each source tree (by default this
checkout's ``src/treaty``): give an older checkout's folder to compare with. `--check` exits with 1 where a number is
beyond its limit. `--names` lists what is behind the numbers: class names used twice, long modules, long functions.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONG_MODULE, LONG_FUNCTION = 450, 80


@dataclass
class Structure:
    """What one source tree is made of.

    `classes` are all names of classes at the top of a module, `functions` the lines of every function's body without
    its docstring, by place.
    """

    files: int = 0
    lines: int = 0
    code: int = 0
    comments: int = 0
    classes: Counter[str] = field(default_factory=Counter)
    functions: dict[str, int] = field(default_factory=dict)
    modules: dict[str, int] = field(default_factory=dict)


def measured(folder: Path) -> Structure:
    """Measure all Python files below a folder."""
    found = Structure()
    for path in sorted(folder.rglob("*.py")):
        text, name = path.read_text(), str(path.relative_to(folder))
        tree, lines = ast.parse(text), text.splitlines()
        documented = _docstring_lines(tree)
        code = {number for number, line in enumerate(lines, 1) if line.strip()} - documented
        commented = _comment_lines(text, lines)
        found.files += 1
        found.lines += len(lines)
        found.comments += len(commented)
        found.code += len(code - commented)
        found.modules[name] = len(lines)
        found.classes.update(node.name for node in tree.body if isinstance(node, ast.ClassDef))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.functions[f"{name}:{node.name}:{node.lineno}"] = _body_lines(node, documented)
    return found


def _docstring_lines(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        for inner in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            # attribute docstrings count too: any string that stands alone
            if (
                isinstance(inner, ast.Expr)
                and isinstance(inner.value, ast.Constant)
                and isinstance(inner.value.value, str)
            ):
                found.update(range(inner.lineno, (inner.end_lineno or inner.lineno) + 1))
    return found


def _comment_lines(text: str, lines: list[str]) -> set[int]:
    """Return the lines that hold a comment and nothing else."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {at for kind, _, (at, _), _, _ in tokens if kind == tokenize.COMMENT and lines[at - 1].lstrip()[0] == "#"}


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, documented: set[int]) -> int:
    first, last = node.body[0].lineno, node.body[-1].end_lineno or node.lineno
    return sum(number not in documented for number in range(first, last + 1))


def rows(found: Structure) -> list[tuple[str, float, float | None]]:
    """Return what is measured: its name, the number and its limit, if it has one (of comments the least)."""
    bodies = [lines for lines in found.functions.values() if lines]
    return [
        ("files", found.files, 260),
        ("lines", found.lines, 66_000),
        ("lines of code", found.code, None),
        ("comment lines, % of all lines", round(100 * found.comments / found.lines, 1), 3.0),
        ("functions", len(found.functions), 3500),
        ("functions of one line", sum(lines == 1 for lines in bodies), 300),
        ("median lines of a function's body", statistics.median(bodies), None),
        (f"functions longer than {LONG_FUNCTION} lines", sum(lines > LONG_FUNCTION for lines in bodies), 0),
        (f"modules longer than {LONG_MODULE} lines", sum(n > LONG_MODULE for n in found.modules.values()), 0),
        ("class names used more than once", sum(count > 1 for count in found.classes.values()), 0),
    ]


def within(name: str, number: float, limit: float | None) -> bool:
    """Say whether a number keeps to its limit."""
    return limit is None or (number >= limit if name.startswith("comment") else number <= limit)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[ROOT / "src" / "treaty"], metavar="FOLDER")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the last tree is beyond a limit")
    parser.add_argument("--names", action="store_true", help="list what is behind the numbers of the last tree")
    given = parser.parse_args()
    trees = [measured(folder) for folder in given.folders]
    columns = [rows(tree) for tree in trees]
    for number, (name, _, limit) in enumerate(columns[0]):
        shown = "".join(f"{column[number][1]:>12,}" for column in columns)
        print(f"{name:<40}{shown}{'' if limit is None else f'   limit {limit:,}'}")
    if given.names:
        last = trees[-1]
        print("\ntwice:", ", ".join(sorted(name for name, count in last.classes.items() if count > 1)))
        print("long modules:", ", ".join(f"{name} {n}" for name, n in last.modules.items() if n > LONG_MODULE))
        print("long functions:", ", ".join(f"{at} {n}" for at, n in last.functions.items() if n > LONG_FUNCTION))
    beyond = [name for name, number, limit in columns[-1] if not within(name, number, limit)]
    if given.check and beyond:
        print("beyond its limit:", ", ".join(beyond))
    return int(given.check and bool(beyond))


if __name__ == "__main__":
    sys.exit(main())
