"""A page opened in a real browser, Debian's chromium: what it says, asks for, and looks like."""

from __future__ import annotations

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
    "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=3000",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip
_MEASURE = """<script>parent.postMessage([document.documentElement.scrollWidth,
getComputedStyle(document.body).backgroundColor,getComputedStyle(document.querySelector("text")).fill].join(";"),"*")
</script>"""
_AROUND = """<!doctype html><script>onmessage=event=>{document.documentElement.dataset.seen=event.data}</script>
<iframe src="measured.html" width="%d" height="900" style="border:0"></iframe>"""


@dataclass(frozen=True)
class Seen:
    """What came of opening a page: lines on the console, hosts that were asked, and the document afterwards."""

    console: list[str]
    hosts: set[str]
    document: str


def opened(page: Path, *, dark: bool = False) -> Seen:
    """Open a page in a browser of its own."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "net.json"
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        done = subprocess.run(
            [CHROMIUM, *_FLAGS, scheme, "--window-size=1400,900", f"--user-data-dir={folder}/profile",
             f"--log-net-log={log}", "--dump-dom", page.absolute().as_uri()],
            capture_output=True, text=True, check=True, timeout=100,
        )  # fmt: skip
        asked = re.findall(r'"url":("(?:[^"\\]|\\.)*")', log.read_text())
    hosts = {urlsplit(json.loads(url)).netloc for url in asked}
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Seen(console, hosts - {""}, done.stdout)


def measured(page: Path, folder: Path, *, width: int, dark: bool) -> tuple[int, str, str]:
    """Return how wide a page is, its background, and the colour of letters in figures.

    Of a copy that may run a script, in a frame: no window of the browser is as narrow as a phone.
    """
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text()).replace("</body>", f"{_MEASURE}</body>")
    (folder / "measured.html").write_text(text)
    (folder / "around.html").write_text(_AROUND % width)
    found = re.search(r'data-seen="([^"]*)"', opened(folder / "around.html", dark=dark).document)
    wide, paper, ink = found.group(1).split(";")
    return int(wide), paper, ink
