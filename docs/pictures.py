"""Draw the pictures of the pages as SVG (`make docs`): docs/pictures/NAME.svg."""

from __future__ import annotations

import csv
import math
from html import escape
from itertools import combinations
from pathlib import Path

FOLDER = Path(__file__).with_name("pictures")
INK, GREY, BLUE, ORANGE, PAPER = "#1f2933", "#52606d", "#1f5fa8", "#b4540a", "#f7f9fb"
RED, GREEN, LINE, WHITE = "#a61b1b", "#1f7a4d", "#cbd2d9", "#ffffff"
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks/results"


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
    return picture(960, 332, "A bank and a shop train one model: what each keeps, and what travels", *parts)


def picture(width: int, height: int, title: str, *parts: str) -> str:
    """Return a whole SVG file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="Helvetica, Arial, sans-serif">\n<title>{escape(title)}</title>\n'
        + box(4, 4, width - 8, height - 8, PAPER, LINE)
        + "\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def grid(x: float, y: float, widths: list[int], rows: list[list[str]], colour: str, marked: int = -1) -> str:
    """Return a table with a coloured first row; the column with the number `marked` is tinted."""
    parts = []
    for number, row in enumerate(rows):
        left = x
        for place, (width, cell) in enumerate(zip(widths, row, strict=True)):
            fill = colour if number == 0 else "#fde9d3" if place == marked else WHITE
            parts.append(box(left, y + number * 24, width, 24, fill, colour if number == 0 else LINE))
            ink = WHITE if number == 0 else INK
            parts.append(text(left + width / 2, y + number * 24 + 16, cell, size=12, colour=ink, anchor="middle"))
            left += width
    return "".join(parts)


def notes(x: float, y: float, *words: str, size: int = 13, colour: str = INK, step: int = 20) -> str:
    """Return lines of words below each other."""
    return "".join(text(x, y + step * place, line, size=size, colour=colour) for place, line in enumerate(words))


def bars(x: float, y: float, width: float, entries: list[tuple[str, float, str]], colour: str) -> str:
    """Return horizontal bars: a label, a share from 0 to 1, and the words behind the bar."""
    parts = []
    for number, (label, share, words) in enumerate(entries):
        top = y + 26 * number
        parts.append(text(x - 10, top + 14, label, size=13, anchor="end"))
        parts.append(box(x, top, max(1, width * share), 18, colour, colour))
        parts.append(text(x + width * share + 8, top + 14, words, size=13))
    return "".join(parts)


def boosting() -> str:
    """Return one split, worked out: gradients of six rows, sums by bin, gains of two cuts."""
    labels = dict(zip("ABCDEF", [1, 0, 0, 1, 0, 1], strict=True))
    bins = {1: "ADF", 2: "C", 3: "BE"}
    gradients = {row: 0.5 - label for row, label in labels.items()}
    sums = {number: (sum(gradients[row] for row in rows), 0.25 * len(rows)) for number, rows in bins.items()}
    total, weight = (sum(pair[k] for pair in sums.values()) for k in (0, 1))
    cuts = [["cut", "left G, H", "right G, H", "gain"]]
    for cut in (1, 2):
        left, mass = (sum(sums[number][k] for number in range(1, cut + 1)) for k in (0, 1))
        halves = left**2 / (mass + 1) + (total - left) ** 2 / (weight - mass + 1) - total**2 / (weight + 1)
        right = f"{total - left:+.1f}, {weight - mass:.2f}"
        cuts.append([f"bins 1 to {cut}", f"{left:+.1f}, {mass:.2f}", right, f"{halves:.2f}"])
    of_rows = [["row", "label", "gradient"], *([row, str(labels[row]), f"{gradients[row]:+.1f}"] for row in labels)]
    of_bins = [["bin of orders", "rows", "G", "H"]]
    of_bins += [[str(b), ", ".join(bins[b]), f"{g:+.1f}", f"{h:.2f}"] for b, (g, h) in sums.items()]
    return picture(
        960, 400, "One split: the bank's gradients, the shop's bins, sums, and the gain of each cut",
        text(30, 40, "1  Bank: labels and gradients", size=16, colour=BLUE),
        grid(30, 54, [60, 70, 90], of_rows, BLUE, 1),
        arrow(280, 560, 96, "2  gradients, encrypted", BLUE),
        text(600, 40, "3  Shop: adds them up by bin", size=16, colour=ORANGE),
        grid(600, 54, [110, 90, 60, 60], of_bins, ORANGE),
        notes(600, 172, "The shop knows bins and rows. It reads no gradient:", "G and H stay encrypted.", colour=GREY),
        arrow(560, 280, 176, "4  sums of each bin, encrypted", ORANGE),
        text(280, 246, "5  The cut with the highest gain wins", size=16),
        grid(280, 260, [110, 100, 100, 80], cuts, GREY, 3),
        notes(280, 352, "Open sums: the bank decrypts G and H, and compares.", colour=RED),
        notes(280, 372, "Sealed sums: both compare on secret shares. Nobody reads G, H or a gain.", colour=GREEN),
        notes(690, 280, "6  The shop learns which cut won.", "The bank learns which rows go left."),
        notes(690, 320, "Repeat for every node, level and tree."),
    )  # fmt: skip


def exact_sums() -> str:
    """Return how sums name single rows, and how many are found in a table of credit cards."""
    gradients = {"A": 0.31, "B": -0.12, "C": 0.47, "D": -0.58, "E": 0.22}
    bins = {1: "C", 2: "BD", 3: "AE"}
    found = [["bin", "count", "sum", "so it holds"]]
    for number, rows in bins.items():
        total = sum(gradients[row] for row in rows)
        # the attack: which rows, as many as the count, have this sum
        (fit,) = (
            each for each in combinations(gradients, len(rows)) if math.isclose(sum(map(gradients.get, each)), total)
        )
        found.append([str(number), str(len(rows)), f"{total:+.2f}", " and ".join(fit)])
    with (RESULTS / "secureboost_exact_sums.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["data"] == "Default of Credit Card Clients"]
    known = {(int(line["rows"]), line["changed"]): float(line["bins known for certain"]) for line in lines}

    def shares(changed: str) -> list[tuple[str, float, str]]:
        found = [(rows, known[rows, changed]) for rows in (1000, 10000, 30000)]
        return [(f"{rows:,} rows", share, f"{100 * share:.2g} %") for rows, share in found]

    return picture(
        960, 412, "Exact sums name the rows of small bins",
        text(30, 40, "The bank knows every row's gradient", size=16, colour=BLUE),
        grid(30, 54, [60, 90], [["row", "gradient"], *([row, f"{g:+.2f}"] for row, g in gradients.items())], BLUE),
        text(330, 40, "The shop's sums at one node, opened", size=16, colour=ORANGE),
        grid(330, 54, [50, 60, 80, 130], found, ORANGE, 3),
        notes(330, 172, "Only C has +0.47. Of all pairs, only B and D add up to -0.70.", colour=GREY),
        notes(690, 72, "Many nodes and trees repeat this", "with other rows, until each", "row's bin is known."),
        text(30, 246, "Bins of the partner known for certain: Default of Credit Card Clients, 20 trees", size=16),
        notes(150, 274, "depth 3", colour=GREY),
        bars(150, 284, 280, shares(""), "#d98e4a"),
        notes(610, 274, "depth 6", colour=GREY),
        bars(610, 284, 280, shares("max_depth=6"), RED),
        notes(30, 386, "Sealed sums and hidden rows open no sum of a bin.", colour=GREEN),
    )  # fmt: skip


def sealed_and_hidden() -> str:
    """Return who reads what under open sums, sealed sums and hidden rows."""
    levels = [("Open sums (lattice map)", RED), ("Sealed sums (default)", ORANGE), ("Hidden rows", GREEN)]
    facts = [
        ("sums of the shop's bins", ["bank", "nobody", "nobody"]),
        ("gain of each cut", ["bank", "nobody", "nobody"]),
        ("whose split wins at a node", ["bank; shop: number of wins", "bank; shop: number of wins", "both"]),
        ("column and cut of the shop's split", ["shop", "shop", "shop"]),
        ("rows that go left at the shop's split", ["bank: of all rows", "bank: of the node's rows", "nobody"]),
        ("margins and gradients of rows", ["bank", "bank", "nobody"]),
        ("weights of leaves", ["bank", "bank", "bank"]),
    ]
    tint = {"nobody": "#d9efe2", "bank": "#fbe0e0", "bank:": "#fbe0e0"}
    parts = [text(30, 40, "Who reads a number during the training", size=16)]
    for column, (name, colour) in enumerate(levels):
        left = 340 + 200 * column
        parts += [box(left, 56, 190, 30, colour, colour)]
        parts += [text(left + 95, 76, name, size=14, colour=WHITE, anchor="middle")]
        for row, (_, who) in enumerate(facts):
            reads = who[column]
            parts += [box(left, 92 + 32 * row, 190, 28, tint.get(reads.split()[0], WHITE), LINE)]
            words = "nobody: kept in shares" if reads == "nobody" else reads
            parts += [text(left + 95, 111 + 32 * row, words, size=13, anchor="middle")]
    parts += [text(30, 111 + 32 * row, fact, size=13) for row, (fact, _) in enumerate(facts)]
    number, share = 27, 81
    parts += [
        text(30, 350, "A number in two shares, modulo 100:", size=14),
        text(300, 350, f"{number}  =  {share} (bank)  +  {(number - share) % 100} (shop)", size=14, colour=BLUE),
        text(560, 350, "Each share alone is a uniform random number.", size=14, colour=GREY),
    ]
    return picture(960, 372, "What the parties read under open sums, sealed sums and hidden rows", *parts)


def aggregation() -> str:
    """Return three numbers under masks that cancel in their sum."""
    names, own, masks = ["north", "south", "east"], [5, 8, 2], {(0, 1): 31, (0, 2): 58, (1, 2): 77}
    sent, parts = (
        [],
        [text(30, 40, "Each pair of hospitals shares a random mask. One adds it, the other subtracts it.", size=16)],
    )
    for k, name in enumerate(names):
        terms = [(masks[k, j] if k < j else -masks[j, k]) for j in range(3) if j != k]
        sent.append((own[k] + sum(terms)) % 100)
        left = 30 + 310 * k
        sign = [f"{'+' if term > 0 else '-'} {abs(term)}" for term in terms]
        parts += [
            box(left, 58, 280, 92, WHITE, BLUE),
            text(left + 140, 82, name, size=15, colour=BLUE, anchor="middle"),
            text(left + 140, 108, f"own sum {own[k]}", size=14, anchor="middle"),
            text(
                left + 140,
                134,
                f"sends {own[k]} {sign[0]} {sign[1]} = {sent[k]} (modulo 100)",
                size=13,
                anchor="middle",
            ),
            f'<line x1="{left + 140}" y1="150" x2="480" y2="222" stroke="{ORANGE}" stroke-width="2"/>',
        ]
    total = sum(sent) % 100
    added = " + ".join(map(str, sent))
    parts += [
        box(270, 222, 420, 74, WHITE, ORANGE),
        text(480, 246, "leader", size=15, colour=ORANGE, anchor="middle"),
        text(480, 276, f"{added} = {total} (modulo 100): all masks cancel", size=14, anchor="middle"),
        text(
            30, 330, f"The leader reads the total, {total}, and three random numbers. It reads no hospital's own sum."
        ),
        text(
            30,
            352,
            "If all others help the leader, they subtract their own sums, and the last one is known.",
            colour=RED,
        ),
    ]
    return picture(960, 384, "Secure aggregation: masks that cancel in the sum", *parts)


def intersection() -> str:
    """Return an alignment in a small group: ids under one key, then under both."""
    prime, a, b = 1019, 77, 305  # a toy: the squares modulo a prime instead of a curve
    points = {name: pow(place, 2, prime) for name, place in [("Ann", 5), ("Bob", 11), ("Cem", 23), ("Dee", 30)]}
    lists = {"bank": ["Ann", "Bob", "Dee"], "shop": ["Bob", "Cem", "Dee"]}
    keys = {"bank": a, "shop": b}
    parts = []
    for left, name, colour in [(30, "bank", BLUE), (560, "shop", ORANGE)]:
        own, other = keys[name], keys["shop" if name == "bank" else "bank"]
        rows = [["id", "own key", "both keys", "common"]]
        both = {pow(points[each], a * b, prime) for each in lists["bank"]} & {
            pow(points[each], a * b, prime) for each in lists["shop"]
        }
        for each in lists[name]:
            once = pow(points[each], own, prime)
            twice = pow(once, other, prime)
            rows.append([each, str(once), str(twice), "yes" if twice in both else ""])
        parts += [
            text(left, 40, f"{name.capitalize()}: secret key {'a' if own == a else 'b'}", size=16, colour=colour),
            grid(left, 54, [80, 90, 100, 90], rows, colour, 2),
        ]
    parts += [
        arrow(410, 540, 90, "own key", BLUE),
        arrow(540, 410, 120, "own key", ORANGE),
        arrow(540, 410, 150, "both keys", ORANGE),
        notes(
            30, 190,
            "1  Each party turns its ids into points, and raises them to its own secret key.",
            "2  The other party raises them to its key. The order of the two keys does not matter.",
            "3  Equal numbers under both keys are common ids. The others stay random numbers to the partner.",
            size=14, step=24,
        ),
        notes(30, 272, f"A toy, modulo {prime}: Treaty uses the group ristretto255, and pads the lists.", colour=GREY),
    ]  # fmt: skip
    return picture(960, 292, "Private set intersection: ids under two keys", *parts)


def epsilon() -> str:
    """Return how often noise keeps the truth, and how epsilon adds up."""

    def truth(size: float, kinds: int) -> float:
        return math.exp(size) / (math.exp(size) + kinds - 1)

    sizes = [0.5, 1.0, 2.0, 4.0, 8.0]
    parts = [text(30, 40, "A randomised answer is the true one with probability", size=16)]
    for left, kinds, name, colour in [
        (130, 2, "yes or no (2 answers)", BLUE),
        (590, 8, "a value's bucket (8 answers)", ORANGE),
    ]:
        entries = [(f"epsilon {size:g}", truth(size, kinds), f"{100 * truth(size, kinds):.4g} %") for size in sizes]
        parts += [
            text(left, 68, f"{name}; a guess: {100 / kinds:g} %", size=13, colour=GREY),
            bars(left, 78, 220, entries, colour),
        ]
    sums = [["protects", "epsilon of one", "number", "epsilon in all"]]
    sums += [
        ["a label, randomised once", "1", "1 draw", "1"],
        ["a label, new noise for each tree", "1", "20 trees", "20"],
    ]
    sums += [["a person, by a value in each column", "4", "10 columns", "40"]]
    parts += [
        text(30, 246, "Epsilon adds up over everything that is sent about a person", size=16),
        grid(30, 260, [280, 130, 130, 130], sums, GREY, 3),
        notes(730, 290, "Small epsilon: strong", "protection, less accuracy."),
        notes(730, 332, "Ask: epsilon of what,", "and how often?"),
    ]
    return picture(960, 384, "Epsilon: how much noise hides, and how it adds up", *parts)


PICTURES = {
    "idea": idea,
    "boosting": boosting,
    "exact_sums": exact_sums,
    "sealed_and_hidden": sealed_and_hidden,
    "aggregation": aggregation,
    "intersection": intersection,
    "epsilon": epsilon,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
