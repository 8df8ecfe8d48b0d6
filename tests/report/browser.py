"""A page opened in a real browser, Debian's chromium: what it says, asks for, looks like, and prints."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

CHROMIUM = shutil.which("chromium") or ""
_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic", "--hide-scrollbars",
    "--enable-logging=stderr", "--virtual-time-budget=3000",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip
_MEASURE = """<script>
const all=of=>[...document.querySelectorAll(of)], edges=of=>of.getBoundingClientRect();
const inside=(a,b)=>a.left>b.left-1&&a.right<b.right+1&&a.top>b.top-1&&a.bottom<b.bottom+1;
const meet=(a,b)=>Math.min(a.right,b.right)-Math.max(a.left,b.left)>1
&&Math.min(a.bottom,b.bottom)-Math.max(a.top,b.top)>4;
const texts=all("svg text").filter(of=>of.textContent.trim());
parent.postMessage(JSON.stringify({
wide:document.documentElement.scrollWidth,
paper:getComputedStyle(document.body).backgroundColor,
ink:texts.length?getComputedStyle(texts[0]).fill:"",
outside:texts.filter(of=>!inside(edges(of),edges(of.ownerSVGElement))).map(of=>of.textContent),
overlapping:texts.flatMap((of,k)=>texts.slice(k+1).filter(each=>each.ownerSVGElement==of.ownerSVGElement
&&meet(edges(of),edges(each))).map(each=>of.textContent+" / "+each.textContent)),
empty:all("section,article,figure,.wide,table,ul,svg").filter(of=>edges(of).height<12||edges(of).width<12
||!of.textContent.trim()).map(of=>of.tagName+" "+of.id),
broken:all("dt,th,td").filter(of=>{const before=edges(of).width;of.style.overflowWrap="normal";
const after=edges(of).width;of.style.overflowWrap="";return after>before+1}).map(of=>of.textContent.slice(0,40)),
scrolled:all(".wide").filter(of=>of.scrollWidth>of.clientWidth+8).map(of=>of.textContent.slice(0,80))
}),"*")</script>"""
_AROUND = """<!doctype html><script>onmessage=event=>{document.documentElement.dataset.seen=event.data}</script>
<iframe src="measured.html" width="%d" height="900" style="border:0"></iframe>"""


@dataclass(frozen=True)
class Seen:
    """What came of opening a page: lines on the console, hosts that were asked, and the document afterwards."""

    console: list[str]
    hosts: set[str]
    document: str


@dataclass(frozen=True)
class Measured:
    """A page's width and colours, and its faults: texts of figures, empty elements, broken words, scrolled tables."""

    wide: int
    paper: str
    ink: str
    outside: list[str]
    overlapping: list[str]
    empty: list[str]
    broken: list[str]
    scrolled: list[str]


def _run(page: Path, *flags: str, dark: bool = False) -> subprocess.CompletedProcess[str]:
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [CHROMIUM, *_FLAGS, scheme, f"--user-data-dir={folder}/profile", *flags, page.absolute().as_uri()],
            capture_output=True, text=True, check=True, timeout=100,
        )  # fmt: skip


def opened(page: Path, *, dark: bool = False) -> Seen:
    """Open a page in a browser of its own."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "net.json"
        done = _run(page, "--window-size=1400,900", f"--log-net-log={log}", "--dump-dom", dark=dark)
        asked = re.findall(r'"url":("(?:[^"\\]|\\.)*")', log.read_text())
    hosts = {urlsplit(json.loads(url)).netloc for url in asked}
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Seen(console, hosts - {""}, done.stdout)


def screenshot(page: Path, to: Path, *, width: int, height: int) -> None:
    """Write a picture (PNG) of the top of a page."""
    _run(page, f"--window-size={width},{height}", f"--screenshot={to.absolute()}")


def n_printed_pages(page: Path, folder: Path) -> int:
    """Return the number of sheets on which a page is printed."""
    _run(page, f"--print-to-pdf={folder / 'printed.pdf'}")
    return len(re.findall(rb"/Type /Page\b", (folder / "printed.pdf").read_bytes()))


def measured(page: Path, folder: Path, *, width: int, dark: bool = False) -> Measured:
    """Measure a copy of a page that may run a script, in a frame: no window of the browser is as narrow as a phone."""
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text()).replace("</body>", f"{_MEASURE}</body>")
    (folder / "measured.html").write_text(text)
    (folder / "around.html").write_text(_AROUND % width)
    found = re.search(r'data-seen="([^"]*)"', opened(folder / "around.html", dark=dark).document)
    return Measured(**json.loads(html.unescape(found.group(1))))
