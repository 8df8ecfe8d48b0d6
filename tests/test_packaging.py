"""What the distribution says of itself is true: its name, version, extras and dependencies."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import treaty

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [
    *PROJECT["dependencies"],
    *(each for extra in PROJECT["optional-dependencies"].values() for each in extra),
]
IMPORTED_AS = {"scikit-learn": "sklearn"}
OF_ANOTHER = {"llvmlite": "numba", "markupsafe": "jinja2"}  # modules that come with a dependency, which pins them
FOR_TYPE_CHECKERS = {"typing_extensions"}  # which bring its stubs; it is never imported when anything runs
TEXTS = [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]


def modules(requirements: list[str]) -> set[str]:
    names = [re.match(r"[\w-]+", requirement).group() for requirement in requirements]
    return {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}


def imported() -> set[str]:
    """Return the top-level names of all other packages that ours import, anywhere in a file."""
    found = set()
    for path in ROOT.glob("src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
                found |= {each.value.partition(".")[0] for each in node.args if isinstance(each, ast.Constant)}
    return {OF_ANOTHER.get(name, name) for name in found - {"treaty"} - FOR_TYPE_CHECKERS - sys.stdlib_module_names}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    assert imported() | {"h11"} == modules(REQUIREMENTS)  # which is uvicorn's: named for its lowest version


KNOWN = {
    "cryptography": (46, 0, 7),  # CVE-2024-12797, CVE-2026-26007, CVE-2026-34073, CVE-2026-39892
    "starlette": (1, 3, 1),  # CVE-2024-47874, CVE-2025-54121, CVE-2025-62727, CVE-2026-48710, limits of forms
    "h11": (0, 16),  # CVE-2025-43859
}
"""The first versions without the vulnerabilities that are known of what reads bytes of others."""


def test_what_reads_bytes_of_others_is_above_known_vulnerabilities() -> None:
    tested = (ROOT / "constraints-lowest.txt").read_text()
    for name, first in KNOWN.items():
        lowest = [re.fullmatch(rf"{name}>=([\d.]+)", each) for each in REQUIREMENTS]
        (floor,) = [found.group(1) for found in lowest if found]
        assert tuple(map(int, floor.split("."))) >= first, name
        pinned = re.search(rf"^{name}==([\d.]+)$", tested, re.MULTILINE)
        assert pinned is not None
        assert tuple(map(int, pinned.group(1).split("."))) >= first, name


def test_messages_and_pages_name_this_distribution_and_its_extras() -> None:
    named = [found for path in TEXTS for found in re.findall(r"([\w.-]+)\[([a-z,]+)\]['\"`]", path.read_text())]
    ours = [
        (name, extra)
        for name, extras in named
        if name in ("treaty", ".", PROJECT["name"])
        for extra in extras.split(",")
    ]
    assert {extra for _, extra in ours} == set(PROJECT["optional-dependencies"])
    assert {name for name, _ in ours} == {".", PROJECT["name"]}


def test_the_newest_release_of_the_changelog_is_this_version() -> None:
    newest = re.search(r"^## \[(\d[\w.]*)\] - \d{4}-\d{2}-\d{2}$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == treaty.__version__


def test_the_citation_is_of_the_newest_release() -> None:
    changelog, citation = (ROOT / "CHANGELOG.md").read_text(), (ROOT / "CITATION.cff").read_text()
    day = re.search(rf"^## \[{re.escape(treaty.__version__)}\] - (\S+)$", changelog, re.MULTILINE)
    assert day is not None
    for line in (f"version: {treaty.__version__}", f"date-released: {day[1]}", f"license: {PROJECT['license']}"):
        assert f"\n{line}\n" in citation


def test_the_lowest_versions_are_those_that_make_test_lowest_tries() -> None:
    tried = dict(line.split("==") for line in (ROOT / "constraints-lowest.txt").read_text().split())
    for requirement in REQUIREMENTS:
        name, lowest = requirement.split(">=")
        assert f"{tried[name]}.0.0".startswith(f"{lowest}.0"), requirement
