"""Pages lead where they say, in the repository as on the site, and the site's sidebar has each of them once."""

from __future__ import annotations

import re
import runpy
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
SYSTEMS = {
    "secureboost.md": ["SecureBoost"],
    "fedxgboost.md": ["FedXGBoostLDP", "FedXGBoostSMM"],
    "federboost.md": ["FederBoostVertical", "FederBoostHorizontal"],
    "fedxgb.md": ["FedXGB"],
    "logistic.md": ["QuasiNewton"],
    "statistics.md": ["Statistics"],
}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def prose(page: Path) -> str:
    """Return a page without its blocks and spans of code, in which brackets are no links."""
    text = re.sub(r"^(`{3,})[^`\n]*\n.*?^\1\s*$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda span: "x" * len(span[0]) if "](" in span[0] else span[0], text)


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as viewers of repositories make them."""
    found: dict[str, int] = {}
    for title in re.findall(r"^#{1,6} +(.+?)(?: +#+)?$", prose(page), flags=re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
        if found[slug]:
            found[f"{slug}-{found[slug]}"] = 0
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_to_a_file_and_to_a_heading(page):
    dead = []
    for target in re.findall(r"\]\(\s*([^)\s]+)\s*\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_one_title_and_skips_no_level_of_headings(page):
    levels = [len(marks) for marks in re.findall(r"^(#{1,6}) ", prose(page), flags=re.MULTILINE)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_the_sidebar_has_every_page_once():
    contents = runpy.run_path(str(ROOT / "docs/conf.py"))["CONTENTS"]
    listed = [page for pages in contents.values() for page in pages]
    there = [name_of(page).removesuffix(".md") for page in PAGES if page.name != "README.md"]
    assert sorted(listed) == sorted([*there, "docs/reference"])


@pytest.mark.parametrize("page", SYSTEMS)
def test_each_system_is_described_in_the_same_shape(page):
    text = (ROOT / "docs" / page).read_text()
    shapes = re.findall(r"^\| In short \| \|\n\|---\|---\|\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    assert len(shapes) == len(SYSTEMS[page])
    for shape, system in zip(shapes, SYSTEMS[page], strict=True):
        rows = dict(re.findall(r"^\| ([\w ]+) \| (.+) \|$", shape, flags=re.MULTILINE))
        assert list(rows) == ["Idea", "Roles", "Messages", "Leakage", "Options", "When to use"]
        assert f"options.md#{system.lower()}" in rows["Options"]


def test_every_public_name_is_in_the_reference():
    import treaty

    text = (ROOT / "docs/reference.rst").read_text()
    assert set(re.findall(r":: treaty\.(\w+)$", text, flags=re.MULTILINE)) == set(treaty.__all__)


def test_pictures_are_as_the_script_draws_them():
    drawn = runpy.run_path(str(ROOT / "docs/pictures.py"))["PICTURES"]
    kept = {path.stem: path.read_text() for path in (ROOT / "docs/pictures").glob("*.svg")}
    assert kept == {name: draw() for name, draw in drawn.items()}, "run `make docs`"
