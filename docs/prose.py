"""Measure the prose of pages: words, the median length of sentences, long sentences, and phrases that we avoid.

    python docs/prose.py                       # a table of all pages
    python docs/prose.py --check               # check the pages listed in docs/prose.txt (part of `make docs`)
    python docs/prose.py --check PAGE [PAGE]   # check these; the exit code is 1 if one breaks a rule

Code, tables, headings, comments and generated parts do not count. A code span counts as one word.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LISTED = Path(__file__).with_name("prose.txt")
GENERATED = {"docs/options.md", "docs/results.md"}  # as a whole
MOST_WORDS, MOST_MEDIAN = 40, 18

PHRASES = (
    r"told|said|heard|goes on|begun anew|beside|by itself|whoever|those of|what is|as ever|a crowd|a farewell|"
    r"of the latter|of which nearly|cannot tell|must have said|an order of its own|nobody's data"
)
_PHRASE = re.compile(rf"\b({PHRASES})\b", re.IGNORECASE)
# what is no prose, in the order in which it is removed
_REMOVED = (
    re.compile(r"^ *(`{3,}|:{3,}).*?^ *\1 *$", re.DOTALL | re.MULTILINE),
    re.compile(r"<!-- (messages|attack scores)\b.*?<!-- end of \1 -->", re.DOTALL),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"^ *(\||#{1,6} ).*$", re.MULTILINE),
)
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|vs|cf|et al|etc|approx|fig|sect|no)\.$", re.IGNORECASE)
_ITEM = re.compile(r"^ *([-*+]|\d+\.) +")


class Sentence(NamedTuple):
    """A sentence, and the line of the page on which its paragraph begins."""

    line: int
    text: str

    @property
    def words(self) -> int:
        """Return how many words it has: groups of characters with a letter or a digit."""
        return len(re.findall(r"\S*\w\S*", self.text))


def sentences(page: str) -> list[Sentence]:
    """Return the sentences of a page's prose. Fewer than three words are a label or a term, and left out."""
    for part in _REMOVED:
        page = part.sub(lambda found: "\n" * found[0].count("\n"), page)
    found: list[Sentence] = []
    start, lines = 0, list[str]()
    for number, line in enumerate([*page.splitlines(), ""], 1):
        text = line.lstrip("> ")
        if (not text or _ITEM.match(line)) and lines:
            found += (Sentence(start, text) for text in _split(" ".join(lines)))
            lines = []
        if text:
            start = start if lines else number
            lines.append(_ITEM.sub("", text))
    return [sentence for sentence in found if sentence.words > 2]


def _split(paragraph: str) -> list[str]:
    text = re.sub(r"`[^`]+`", "Code", paragraph)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\*\*|(?<!\w)[*_]|[*_](?!\w)", "", text)
    pieces = [""]
    for word in text.split():
        if re.search(r"[.!?][)\"”]*$", pieces[-1]) and not _ABBREVIATION.search(pieces[-1]) and not word[0].islower():
            pieces.append("")
        pieces[-1] = f"{pieces[-1]} {word}".strip()
    return pieces


def faults(page: str) -> list[str]:
    """Return what breaks the rules on a page, each with its line."""
    all_ = sentences(page)
    found = [f"line {each.line}: {each.words} words: {each.text}" for each in all_ if each.words > MOST_WORDS]
    for each in all_:
        found += [f"line {each.line}: {phrase[0]!r}: {each.text}" for phrase in _PHRASE.finditer(each.text)]
    middle = median(each.words for each in all_) if all_ else 0
    return found + ([f"median of {middle} words a sentence, at most {MOST_MEDIAN}"] if middle > MOST_MEDIAN else [])


def pages() -> list[str]:
    """Return the names of all pages that people write."""
    there = [path.relative_to(ROOT).as_posix() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))]
    return sorted(name for name in there if name not in GENERATED)


def row(name: str) -> str:
    """Return the figures of a page as a row of the table."""
    all_ = sentences((ROOT / name).read_text())
    words = [each.words for each in all_]
    long = sum(count > MOST_WORDS for count in words)
    phrases = sum(len(_PHRASE.findall(each.text)) for each in all_)
    return f"{name:<38}{sum(words):>7}{median(words or [0]):>8g}{long:>9}{phrases:>9}"


def main(arguments: list[str]) -> int:
    """Print the table, or what breaks the rules on the pages to check."""
    if arguments[:1] != ["--check"]:
        print(f"{'page':<38}{'words':>7}{'median':>8}{'over 40':>9}{'phrases':>9}")
        print("\n".join(map(row, arguments or pages())))
        return 0
    found = [f"{name}: {fault}" for name in arguments[1:] or LISTED.read_text().split() for fault in faults_of(name)]
    for fault in found:
        print(fault)
    return 1 if found else 0


def faults_of(name: str) -> list[str]:
    """Return what breaks the rules on the page of this name, relative to the repository."""
    return faults((ROOT / name).read_text())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
