"""Write the tables of what messages tell into the pages of protocols, between their marks (`make docs`).

A page has ``<!-- messages: NAME -->`` where the table of a system begins, and ``<!-- end of messages -->`` where it
ends; what is between them is replaced. With ``--check`` nothing is written, and pages that differ are named.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from treaty.runs.report import OF_RUNS, table_of
from treaty.systems import find_system
from treaty.systems.alignment.leakage import ROUTES as ALIGNMENT
from treaty.systems.leakage import STAGES, Routes

DOCS = Path(__file__).parent
MARKED = re.compile(r"(<!-- messages: ([\w-]+)(?: (\w+))? -->\n).*?(<!-- end of messages -->)", re.DOTALL)
REFERENCE = re.compile(r"docs/(\w+\.md), ([^;|]+?)(?=;| \|)")
SHARED = {"alignment": ALIGNMENT, "runs": OF_RUNS}


def lines_of(name: str, what: str) -> Routes:
    """Return the lines of a system, of what is played; or those that systems share."""
    if name in SHARED:
        return SHARED[name]
    system = find_system(name)
    if what == "service" and system.service is not None:
        return system.service.routes
    return next(system.routes[phase] for phase in STAGES if phase == what)


def filled(page: str) -> str:
    """Return a page with all its tables as they are now."""
    return MARKED.sub(_filled, page)


def _filled(mark: re.Match[str]) -> str:
    table = table_of(lines_of(mark[2], mark[3] or "train"), conditions=True)
    return f"{mark[1]}\n{REFERENCE.sub(_linked, table)}\n\n{mark[4]}"


def _linked(reference: re.Match[str]) -> str:
    """Link a reference to its section, by the anchor that headings have."""
    page, heading = reference[1], reference[2]
    anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
    return f"[{heading}]({page}#{anchor})"


def outdated() -> list[Path]:
    """Return the pages whose tables are not those of the package."""
    return [path for path in sorted(DOCS.glob("*.md")) if filled(path.read_text()) != path.read_text()]


def main() -> int:
    """Write all pages, or with ``--check`` name those to be written; return the exit code."""
    pages = outdated()
    if "--check" in sys.argv:
        print("\n".join(f"{page.name}: run make docs" for page in pages))
        return 1 if pages else 0
    for page in pages:
        page.write_text(filled(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
