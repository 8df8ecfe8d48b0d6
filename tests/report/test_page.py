"""The page of a report: names stay names, what is missing is said, nothing is loaded, and a real browser shows it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from html_pages import Parsed
from report.browser import CHROMIUM, measured, opened
from report.made_up import HOSTILE, hostile
from treaty.errors import ConfigError
from treaty.report.contents import Contents
from treaty.report.page import check_possible, page, shortened, write_page

WITH_BROWSER = pytest.mark.skipif(not CHROMIUM, reason="no chromium on PATH: apt-get install chromium")
SECTIONS = [
    "scores", "curves", "roc", "calibration", "importances", "shap", "seconds", "timeline", "messages", "learned",
    "noise", "parameters", "versions",
]  # fmt: skip


def test_names_that_others_chose_stay_names():
    found = Parsed(page(hostile()))
    names = {tag for tag, _ in found.tags}
    assert not names & {"script", "img", "iframe", "link", "object", "base", "foreignobject", "image"}
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    for section in set(SECTIONS) - {"roc", "calibration", "timeline"}:
        assert "<script>" in found.sections[section], f"{section} does not show the name at all"
    drawn = [dict(of).get("aria-label") or "" for tag, of in found.tags if tag == "svg"]
    assert len(drawn) == 6
    assert shortened(HOSTILE).count("\n") == 0
    assert len(shortened("x" * 500)) == 36


def test_the_file_names_nothing_that_would_be_loaded():
    text = page(replace(hostile(), **dict.fromkeys(("title", "whose"), "t")))
    found = Parsed(text)
    for tag, attributes in found.tags:
        for name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
            assert (attributes.get(name) or "#").startswith("#"), f"{tag} {name}={attributes[name]}"
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert "@import" not in text
    assert "http" not in page(Contents(title="t", facts=[], whose="")).replace("http-equiv", "")
    policy = [of["content"] for tag, of in found.tags if of.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"]


def test_ids_are_unique_and_every_reference_leads_to_one():
    text = page(hostile())
    ids = [of["id"] for _, of in Parsed(text).tags if "id" in of]
    assert len(set(ids)) == len(ids)
    assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', text)) <= set(ids)


def test_an_empty_section_is_left_out_and_listed_with_the_reason():
    whole = Contents(title="t", facts=[], whose="", absent={"roc": "Labels are numbers.", "alone": "Needs labels."})
    text = page(whole)
    found = Parsed(text)
    assert list(found.sections) == ["missing"]
    said = found.sections["missing"]
    assert text.count("<li>") == len(SECTIONS) + 1
    assert "ROC: Labels are numbers." in said
    assert "Comparison with own data only: Needs labels." in said
    assert said.count("The run recorded none.") == len(SECTIONS) - 1
    assert not any(tag == "svg" for tag, _ in found.tags)
    assert [of["href"] for tag, of in found.tags if tag == "a"] == ["#missing"]
    assert "it cannot say how good the model is" in text


def test_a_full_page_lists_nothing_as_missing():
    found = Parsed(page(hostile()))
    assert list(found.sections) == SECTIONS
    assert [of["href"] for tag, of in found.tags if tag == "a"] == [f"#{section}" for section in SECTIONS]


def test_a_print_has_the_size_of_paper_and_whole_figures():
    style = page(hostile()).partition("<style>")[2].partition("</style>")[0]
    printed = style.partition("@media print{")[2]
    assert "@page{size:A4;" in style
    assert re.search(r"figure[^{]*\{break-inside:avoid\}", printed)
    assert "nav{display:none}" in printed
    assert "overflow:visible" in printed, "a wide table would be cut"


def test_figures_take_the_colours_of_the_page():
    text = page(hostile())
    assert "#0a0b0" not in text
    assert "#0a0c0" not in text
    assert "var(--s0)" in text
    assert not re.search(r"(?:fill|stroke): #(?!ffffff)", text), "a figure has a colour that dark mode does not change"


def test_pairs_beyond_twelve_are_put_together():
    sent = {f"user{k} -> edge": {"messages": 1, "bytes": 1_000_000, "by_type": {"Sums": 1}} for k in range(40)}
    said = Parsed(page(Contents(title="t", facts=[], whose="", sent=sent))).sections["messages"]
    assert "28 other pairs 28.000 28 Sums" in said
    assert "all pairs 40.000 40 Sums" in said


def test_a_file_that_cannot_be_written_is_refused_beforehand(tmp_path, without):
    with pytest.raises(ConfigError, match="got a folder"):
        check_possible(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere; make it first"):
        check_possible(tmp_path / "nowhere" / "out.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_possible(tmp_path / "file" / "out.html")
    without("matplotlib")
    with pytest.raises(ConfigError, match=r"pip install 'treaty-learn\[report\]'"):
        write_page(tmp_path / "out.html", hostile())


def test_the_file_is_for_its_owner_alone(tmp_path):
    write_page(tmp_path / "out.html", Contents(title="t", facts=[], whose=""))
    assert (tmp_path / "out.html").stat().st_mode & 0o777 == 0o600


@WITH_BROWSER
def test_a_browser_opens_it_without_a_word_and_asks_nobody(tmp_path):
    blank, bad, out = (tmp_path / name for name in ("blank.html", "bad.html", "out.html"))
    blank.write_text("<!doctype html><title>blank</title>")
    bad.write_text('<!doctype html><img src="http://127.0.0.1:9/x"><script>console.error("boo")</script>')
    write_page(out, hostile())
    own = opened(blank).hosts  # the browser's own, which reach nobody
    control = opened(bad)
    assert control.hosts - own == {"127.0.0.1:9"}, "the test would not see a request"
    assert control.console, "the test would not see an error"
    seen = opened(out)
    assert seen.console == []
    assert seen.hosts <= own
    assert seen.document.count("<svg") == 6


@WITH_BROWSER
@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_the_width_and_follows_the_colour_scheme(tmp_path, width, dark):
    write_page(tmp_path / "out.html", hostile())
    found = measured(tmp_path / "out.html", tmp_path, width=width, dark=dark)
    assert found.wide <= width
    light_and_dark = [("rgb(246, 247, 249)", "rgb(27, 35, 48)"), ("rgb(18, 22, 29)", "rgb(229, 233, 240)")]
    assert (found.paper, found.ink) == light_and_dark[dark]
