"""Draw the pictures of the pages as SVG (`make docs`): docs/pictures/NAME.svg."""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).with_name("pictures")
INK, GREY, BLUE, ORANGE, PAPER = "#1f2933", "#52606d", "#1f5fa8", "#b4540a", "#f7f9fb"


def text(x: float, y: float, words: str, *, size: int = 14, colour: str = INK, anchor: str = "start") -> str:
    """Return a line of words, whose baseline begins, ends or has its middle at (x, y)."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, line: str) -> str:
    """Return a rectangle with its upper left corner at (x, y)."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{line}" rx="4"/>'


def arrow(start: float, end: float, y: float, words: str, colour: str, *, both: bool = False) -> str:
    """Return a horizontal arrow, with what travels above it."""
    heads = [(end, start), (start, end)] if both else [(end, start)]
    parts = [f'<line x1="{start:g}" y1="{y:g}" x2="{end:g}" y2="{y:g}" stroke="{colour}" stroke-width="2"/>']
    for tip, tail in heads:
        back = tip - 9 if tip > tail else tip + 9
        parts.append(f'<polygon points="{tip:g},{y:g} {back:g},{y - 5:g} {back:g},{y + 5:g}" fill="{colour}"/>')
    return "".join([*parts, text((start + end) / 2, y - 7, words, size=13, colour=colour, anchor="middle")])


def table(x: float, y: float, columns: dict[str, list[str]], colour: str, marked: str = "") -> str:
    """Return a small table; the column `marked` has the labels."""
    parts, width, height = [], 66, 22
    for k, (name, cells) in enumerate(columns.items()):
        left = x + k * width
        parts.append(box(left, y, width, height, colour, colour))
        parts.append(text(left + width / 2, y + 15, name, size=12, colour="#ffffff", anchor="middle"))
        for row, cell in enumerate(cells, 1):
            parts.append(
                box(left, y + row * height, width, height, "#fde9d3" if name == marked else "#ffffff", "#cbd2d9")
            )
            parts.append(text(left + width / 2, y + row * height + 15, cell, size=12, anchor="middle"))
    return "".join(parts)


def idea() -> str:
    """Return who holds what, and what travels, when two organisations train with sealed sums."""
    bank = {"id": list("ABD"), "income": ["31", "54", "47"], "defaulted": ["1", "0", "0"]}
    shop = {"id": list("BCD"), "orders": ["12", "3", "8"], "returns": ["0", "2", "5"]}
    bank_learns = "The bank reads no sum of the shop's bins. It learns which rows go left at each split of the shop."
    shop_learns = "The shop reads no label, gradient or row of a node. It learns which of its splits the trees use."
    parts = [
        box(8, 8, 944, 306, PAPER, "#cbd2d9"),
        text(30, 42, "Bank (active party)", size=17, colour=BLUE),
        table(30, 58, bank, BLUE, "defaulted"),
        text(30, 172, "keeps its columns and the labels", colour=GREY),
        text(30, 194, "keeps its splits and the leaf weights", colour=GREY),
        text(722, 42, "Shop (passive party)", size=17, colour=ORANGE),
        table(722, 58, shop, ORANGE),
        text(722, 172, "keeps its columns", colour=GREY),
        text(722, 194, "keeps its splits", colour=GREY),
        arrow(280, 700, 72, "ids in common: private set intersection", GREY, both=True),
        arrow(280, 700, 112, "gradients of the loss, encrypted", BLUE),
        arrow(700, 280, 152, "sums of gradients by bin, encrypted and masked", ORANGE),
        arrow(280, 700, 192, "best split of a node, compared on secret shares", GREY, both=True),
        arrow(700, 280, 232, "at the shop's best splits: which rows of the node go left", ORANGE),
        text(30, 276, bank_learns),
        text(30, 302, shop_learns),
    ]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 322" font-family="Helvetica, Arial, sans-serif">\n'
        "<title>A bank and a shop train one model: what each keeps, and what travels</title>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


PICTURES = {"idea": idea}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
