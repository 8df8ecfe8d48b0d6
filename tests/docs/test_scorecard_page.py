"""The page about scorecards prints what its example prints, played by two parties in a process each."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("TREATY_DATA", "")) / "credit2.parquet"
PAGE = ROOT / "docs/howto/scorecard.md"


@pytest.fixture(scope="module")
def snippets():
    spec = importlib.util.spec_from_file_location("snippets", ROOT / "docs/snippets.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["snippets"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["snippets"]


def test_the_page_shows_every_part_of_the_example(snippets):
    text = PAGE.read_text()
    for path in snippets.CARD.glob("*.sh"):
        missing = [
            title for title in snippets.parts(path) if title and f"scorecard/{path.name}: {title} -->" not in text
        ]
        assert missing == []
        named = set(snippets.parts(path)) - {""}
        assert path.name == "setup.sh" or named <= set(snippets.TITLES["scorecard"])


@pytest.mark.skipif(not DATA.is_file(), reason="TREATY_DATA names no folder with credit2.parquet")
def test_two_parties_make_the_signed_card_of_the_page(snippets, tmp_path):
    played = snippets.run_card(snippets.make_card_folder(tmp_path, DATA))
    said = re.findall(
        r"<!-- examples/scorecard/(\w+)\.sh: (\w+), printed -->\n```text\n(.*?)```", PAGE.read_text(), re.S
    )
    assert {(name, title) for name, title, _ in said} >= {("bureau", "card"), ("bank", "sign"), ("setup", "compare")}
    for name, title, text in said:
        # rows come in an order that differs from run to run, digests are of this run's model
        numbers = r"SHA-256 \w{64}|^\d+,.*$" if title in ("export", "sign", "predict") else r"\d+(?= epochs)"
        masked = [re.sub(numbers, "N", of, flags=re.M) for of in (played[name][title], text)]
        assert [line.rstrip() for line in masked[0].splitlines()] == [line.rstrip() for line in masked[1].splitlines()]
    page = (tmp_path / "bank/card.html").read_text()
    assert page.count("signed with the key of the certificate SHA256:") == 2
    assert "bureau.PAY_AMT1" in page
    assert not list((tmp_path / "bank").glob("**/bureau.part"))
