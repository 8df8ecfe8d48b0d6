"""Take the screenshots of the pages in Debian's chromium: ``python docs/screenshots.py`` writes docs/pictures/NAME.png.

The report is that of ``treaty demo``. The node's page shows made-up jobs of a test.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image
from starlette.testclient import TestClient

from treaty.cli.main import app
from treaty.node import web

DOCS = Path(__file__).parent
sys.path.append(str(DOCS.parent / "tests"))

from node.made_up import USAGE, describe, made_up  # noqa: E402
from report.browser import screenshot  # noqa: E402

WIDTH = 900
HEIGHTS = {"report": 1190, "node": 990}


def write_pages(folder: Path, *options: str) -> dict[str, Path]:
    """Write the pages to show, and return their files by name. The options are those of ``treaty demo``."""
    pages = {name: folder / f"{name}.html" for name in HEIGHTS}
    app(["demo", "--report", str(pages["report"]), *options], standalone_mode=False)
    with (
        made_up(folder / "state") as store,
        TestClient(web.app(store, "clinic", describe, usage=lambda: USAGE), base_url="http://localhost") as client,
    ):
        pages["node"].write_text(client.get("/?still").text)
    return pages


def write_pictures(pages: dict[str, Path], folder: Path) -> None:
    """Write the pictures of pages, in 256 colours."""
    for name, page in pages.items():
        screenshot(page, folder / f"{name}.png", width=WIDTH, height=HEIGHTS[name])
        with Image.open(folder / f"{name}.png") as taken:
            taken.quantize(256, kmeans=2).save(folder / f"{name}.png", optimize=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(write_pages(Path(folder)), DOCS / "pictures")
