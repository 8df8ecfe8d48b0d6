"""The pages in the docs' screenshots, and the docs' drawings, measured in a real browser."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from PIL import Image

import treaty
from report.browser import CHROMIUM, measured, n_printed_pages, opened
from report.made_up import hostile
from tables import real_table
from treaty.report.page import write_page

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH: apt-get install chromium")
DOCS = Path(__file__).parents[2] / "docs"
PICTURES = DOCS / "pictures"


@pytest.fixture(scope="module")
def taker():
    return runpy.run_path(str(DOCS / "screenshots.py"))


@pytest.fixture(scope="module")
def pages(taker, tmp_path_factory):
    """Return the demo's report, the node's page, a report under long names, and a scorecard."""
    folder = tmp_path_factory.mktemp("pages")
    others = {name: folder / f"{name}.html" for name in ("hostile", "card")}
    write_page(others["hostile"], hostile())
    X, y = real_table("binary")
    treaty.Scorecard().fit(X[X.columns[:3]], y).export_card(others["card"], version="2026.1")
    return taker["write_pages"](folder, "--open", "--trees", "4") | others


def test_faults_of_a_page_are_found(tmp_path):
    """A control of the next tests: a page with one fault of each kind."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<!doctype html><body style="margin:0"><section id="bare"></section><div style="width:700px">x</div>'
        '<svg width="99" height="99"><text y="20">one</text><text y="22" x="3">two</text><text x="90" y="60">out</text>'
        '</svg><div class="wide" style="overflow:auto"><p style="width:800px">table</p></div>'
        '<dl style="display:flex;width:60px;overflow-wrap:anywhere"><dt>caution</dt><dd>a longer one</dd></dl></body>'
    )
    found = measured(bad, tmp_path, width=390)
    assert (found.wide, found.outside, found.overlapping) == (700, ["out"], ["one / two"])
    assert (found.empty, found.broken) == (["SECTION bare"], ["caution"])
    assert found.scrolled == ["table"]


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["report", "node", "hostile", "card"])
def test_a_page_shows_all_of_its_panels(pages, tmp_path, name, width):
    found = measured(pages[name], tmp_path, width=width)
    assert found.wide == width
    assert (found.outside, found.overlapping, found.empty) == ([], [], [])
    assert found.broken == [] or name == "hostile"
    assert found.scrolled == [] or name in ("hostile", "card")


@pytest.mark.parametrize(("name", "most"), [("report", 5), ("node", 3)])
def test_a_page_is_printed_on_few_sheets_without_a_word_on_the_console(pages, tmp_path, name, most):
    assert opened(pages[name]).console == []
    assert 1 < n_printed_pages(pages[name], tmp_path) <= most


def test_the_docs_have_screenshots_of_the_size_that_is_taken_now(taker, pages, tmp_path):
    taker["write_pictures"]({name: pages[name] for name in taker["HEIGHTS"]}, tmp_path)
    for new in tmp_path.glob("*.png"):
        kept = PICTURES / new.name
        with Image.open(kept) as before, Image.open(new) as now:
            assert before.size == now.size
            assert len(now.convert("L").getcolors()) > 20, "nothing is on it"
        assert kept.stat().st_size < 150_000


def test_words_of_drawings_are_inside_and_apart(tmp_path):
    drawings = "".join(f"<p>{path.read_text()}</p>" for path in sorted(PICTURES.glob("*.svg")))
    (tmp_path / "all.html").write_text(f"<!doctype html><body>{drawings}</body>")
    found = measured(tmp_path / "all.html", tmp_path, width=1000)
    assert (found.outside, found.overlapping) == ([], [])
