"""Pages that were rewritten keep to the rules for prose, and the script that checks them finds what breaks these."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROSE = runpy.run_path(str(ROOT / "docs/prose.py"))
LISTED = (ROOT / "docs/prose.txt").read_text().split()
SHORT = "The bank trains a model.\n\n"


@pytest.mark.parametrize("name", LISTED)
def test_a_listed_page_keeps_to_the_rules(name):
    assert PROSE["faults_of"](name) == []


def test_pages_are_listed_once_and_in_order():
    assert sorted(set(LISTED)) == LISTED


def test_long_sentences_phrases_and_a_high_median_are_found():
    faults = PROSE["faults"]
    assert faults(SHORT * 3 + " ".join(["word"] * 40) + ".") == []
    assert faults(SHORT * 3 + " ".join(["word"] * 41) + ".")[0].startswith("line 7: 41 words: word")
    assert faults("# A page\n\nOne is short. The shop\nis told\nthe sums.") == [
        "line 3: 'told': The shop is told the sums."
    ]
    assert faults(" ".join(["word"] * 19) + ".") == ["median of 19 words a sentence, at most 18"]


def test_only_prose_counts():
    page = (
        "# What is told\n\nA `span of what is told` and a [link](told.md) are two words, e.g. here.\n\n"
        "```sh\nwhat is told\n```\n\n| what is told | said |\n|---|---|\n\n<!-- what is\ntold -->\n"
        "<!-- messages: x -->\nwhat is told\n<!-- end of messages -->\n"
        "* An item without a full stop\n* `The` second item. Is there more?\n"
    )
    assert [(each.line, each.words) for each in PROSE["sentences"](page)] == [(3, 10), (17, 6), (18, 3), (18, 3)]
    assert PROSE["faults"](page) == []


def test_the_command_names_the_page_and_fails(tmp_path):
    command = [sys.executable, ROOT / "docs/prose.py", "--check"]
    page = tmp_path / "page.md"
    page.write_text("Whoever has a table may train.\n")
    done = subprocess.run([*command, page], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, f"{page}: line 1: 'Whoever': Whoever has a table may train.\n")
    page.write_text(SHORT)
    done = subprocess.run([*command, page], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
