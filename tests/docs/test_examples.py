"""Every file of examples/ that the tutorial and how-to pages show runs as it is, and prints what the pages say."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "docs/tutorial.md", *sorted(ROOT.glob("docs/howto/*.md"))]
QUICK = {"customers.py", "first_model.py", "hospitals.py"}
SCRIPTS = [each for each in sorted(ROOT.glob("examples/*.py"))]


@pytest.fixture(scope="module")
def snippets():
    spec = importlib.util.spec_from_file_location("snippets", ROOT / "docs/snippets.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["snippets"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["snippets"]


@pytest.fixture
def folder(snippets, tmp_path):
    return snippets.make_folder(tmp_path)


def shown(file):
    """Return what pages say that a file prints, by title of its parts."""
    text = "".join(page.read_text() for page in GUIDES)
    blocks = re.findall(
        rf"<!-- examples/{re.escape(file)}(?:: ([\w ]+))?, printed(?:, \d+ lines)? -->\n```\w+\n(.*?)```",
        text,
        re.DOTALL,
    )
    assert blocks, f"no page says what {file} prints"
    return dict(blocks)


def masked(text):
    """Return a text without what differs from run to run: numbers with their units, fingerprints and dates."""
    text = re.sub(r"SHA256:[0-9a-f ]+", "FINGERPRINT ", text)
    text = re.sub(r"\bmodel [0-9a-f]{8}\b", "model ID", text)
    text = re.sub(r"\d[\d,.:+T-]*( (seconds?|minutes?|hours?|MB|GB|kB|s)\b)?", "N", text)
    return [" ".join(line.split()) for line in text.splitlines()]


def test_pages_show_the_examples_as_they_are(snippets):
    stale = [page.name for page in snippets.pages() if snippets.filled(page.read_text(), {}) != page.read_text()]
    assert not stale, "run `make snippets`"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_every_snippet_of_a_guide_is_a_file(page):
    text = page.read_text()
    blocks = len(re.findall(r"^```\w+.*$", text, flags=re.MULTILINE))
    assert blocks == len(re.findall(r"^<!-- examples/[^\n]+ -->\n```\w+", text, flags=re.MULTILINE))


def test_every_example_is_shown(snippets):
    text = "".join(page.read_text() for page in GUIDES)
    for path in [*SCRIPTS, *sorted(ROOT.glob("examples/*.sh")), *sorted(ROOT.glob("examples/first_steps/*"))]:
        name = path.relative_to(ROOT).as_posix()
        assert f"<!-- {name}" in text, name
        if path.suffix in {".py", ".sh"} and "# %%" in path.read_text():
            assert [title for title in snippets.parts(path) if title and f"<!-- {name}: {title} -->" not in text] == []


@pytest.mark.parametrize(
    "script",
    [pytest.param(each, marks=[] if each.name in QUICK else pytest.mark.slow, id=each.stem) for each in SCRIPTS],
)
def test_a_script_runs_as_it_is_and_prints_what_the_page_says(script, folder, snippets):
    done = subprocess.run([sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    said = shown(script.name)
    printed = [said[title] for title in snippets.parts(script) if title in said]
    assert done.stdout.startswith("".join(printed))
    silent = done.stdout.removeprefix("".join(printed))
    assert silent == ("wrote report.html\n" if script.name == "first_model.py" else "")


@pytest.mark.slow
def test_systems_are_compared_as_the_page_says(folder, snippets):
    printed = snippets.run_commands(ROOT / "examples/choose.sh", folder)[""]
    said = shown("choose.sh")[""]
    of_systems = r"│ (secureboost|secureboost:\S+|federboost-vertical:\S+) +│ (0\.\d\d)"
    assert re.findall(of_systems, printed)[:2] == re.findall(of_systems, said)[:2]
    assert [name for name, _ in re.findall(of_systems, printed)] == [name for name, _ in re.findall(of_systems, said)]


def test_two_organisations_see_in_their_terminals_what_the_tutorial_says(folder, snippets):
    printed = snippets.run_terminals(folder)
    compared = 0
    for name in ("bank", "shop"):
        for title, text in shown(f"first_steps/{name}.sh").items():
            lines, said = masked(printed[name][title]), masked(text)
            if said[-1] == "...":
                lines = [*lines[: len(said) - 1], "..."]
            if title == "audit":  # which attack is how good is chance
                lines, said = lines[:3], said[:3]
            assert lines == said, (name, title)
            compared += 1
    assert compared >= 7
    assert (folder / "bank/report.html").stat().st_size > 10_000
    assert not list((folder / "shop").glob("model/predictions*"))
