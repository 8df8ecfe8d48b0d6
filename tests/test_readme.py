"""Examples run and print what the README, or a page, says of them."""

import re
import tomllib
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_readmes_example_prints_what_it_says(capsys, without):
    without("pandas")  # no dependency: whoever has Treaty alone can run it
    text = README.read_text()
    code = re.search(r"```python\n(.*?)```", text, flags=re.S).group(1)
    said = re.search(r"prints\n\n```\n(.*?)```", text, flags=re.S).group(1)
    assert len(code.strip().splitlines()) <= 16
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == said


def test_the_readme_is_short_and_begins_with_how_to_install():
    project = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]
    text = README.read_text()
    assert len(text.splitlines()) <= 110
    start, _, _ = text.partition("```python")
    assert project["name"] in start
    assert "pip install ." in start


def test_the_tutorial_says_what_every_extra_is_for():
    project = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]
    text = (README.parent / "docs/tutorial.md").read_text()
    for extra in project["optional-dependencies"]:
        assert re.search(rf"pip install '\.\[{extra}\]'` \| [\w`]", text), f"what is the extra {extra} for?"


def test_every_page_the_readme_links_exists():
    for page in re.findall(r"\]\(([\w./]+\.md)\)", README.read_text()):
        assert (README.parent / page).is_file(), page


def test_the_search_over_options_finds_what_the_page_says(capsys, without):
    without("pandas")
    page = (README.parent / "docs/growth.md").read_text()
    code = re.search(r"```python\n(.*?)```", page.partition("## Choosing options")[2], flags=re.S).group(1)
    exec(compile(code, "growth.md", "exec"), {})
    assert capsys.readouterr().out.strip() == code.rsplit("# ", 1)[1].strip()


@pytest.mark.slow
def test_the_example_of_a_loss_runs(capsys, without):
    without("pandas")
    page = (README.parent / "docs/objectives.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, flags=re.S).group(1)
    exec(compile(code, "objectives.md", "exec"), {})
    assert capsys.readouterr().out.strip() == code.rsplit("# ", 1)[1].strip()
