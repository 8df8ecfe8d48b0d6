"""Notebooks of examples/ run from top to bottom, print what they show, and keep to the rules for pages."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SNIPPETS = runpy.run_path(str(ROOT / "docs/snippets.py"))
FAULTS = runpy.run_path(str(ROOT / "docs/prose.py"))["faults"]
NOTEBOOKS = pytest.mark.parametrize("path", SNIPPETS["NOTEBOOKS"], ids=lambda path: path.stem)


def text_of(cell):
    return "".join(cell["source"])


def masked(text):
    """Return the lines of a text without numbers, digests and widths of columns, which differ from run to run.

    Sentences on what a party learned (`disclosures_`) are left out too: other tests hold these.
    """
    text = re.sub(r"^ \* .*", "SENTENCE", text, flags=re.MULTILINE)
    text = re.sub(r"\b[0-9a-f]{64}\b|(?<=SHA256:)[0-9a-f ]+", "DIGEST", text)
    return [" ".join(re.sub(r"\d[\d.]*", "N", line).split()) for line in text.splitlines()]


def printed(cell):
    return "".join("".join(each["text"]) for each in cell["outputs"])


def test_there_are_three_notebooks():
    assert {path.stem for path in SNIPPETS["NOTEBOOKS"]} >= {"credit_scoring", "hospitals", "choose_protection"}


@NOTEBOOKS
def test_a_notebook_is_small_and_of_the_format_that_readers_open(path):
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)
    assert {each["name"] for cell in SNIPPETS["code_cells"](notebook) for each in cell["outputs"]} == {"stdout"}
    assert max(printed(cell).count("\n") for cell in SNIPPETS["code_cells"](notebook)) < 40
    assert path.stat().st_size < 25_000
    for cell in SNIPPETS["code_cells"](notebook):
        ast.parse(SNIPPETS["as_python"](text_of(cell)))


@NOTEBOOKS
def test_the_text_of_a_notebook_keeps_to_the_rules_for_prose(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "markdown"]
    page = "\n\n".join(map(text_of, cells))
    assert page.startswith("# ")
    assert FAULTS(page) == []
    links = re.findall(r"\]\(([^)#\s]+)", page)
    assert links
    assert [link for link in links if not (path.parent / link).is_file()] == []


@pytest.mark.slow
@NOTEBOOKS
def test_a_notebook_prints_what_it_shows(path, tmp_path):
    shown = [printed(cell) for cell in SNIPPETS["code_cells"](json.loads(path.read_text()))]
    run = SNIPPETS["run_notebook"](path, tmp_path)
    assert list(map(masked, run)) == list(map(masked, shown)), "run `make snippets`"


def test_a_cell_that_fails_ends_the_run(tmp_path):
    cells = [{"cell_type": "code", "source": [text]} for text in ("x = 1\n!echo \\\n  shown", "print(x)\n", "print(y)")]
    notebook = tmp_path / "made.ipynb"
    notebook.write_text(json.dumps({"cells": cells[:2]}))
    assert SNIPPETS["run_notebook"](notebook, tmp_path) == ["shown\n", "1\n"]
    for failing in (cells, [{"cell_type": "code", "source": ["!exit 3"]}]):
        notebook.write_text(json.dumps({"cells": failing}))
        with pytest.raises(RuntimeError, match=r"NameError: name 'y'|exit status 3"):
            SNIPPETS["run_notebook"](notebook, tmp_path)
