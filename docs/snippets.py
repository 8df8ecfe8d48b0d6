"""Write the examples, and what they print, into the pages that show them (`make snippets`).

A page shows a file of examples/, or the part of it under a heading ``# %% Title``, in the block after a comment:

    <!-- examples/first_model.py: Train -->
    <!-- examples/first_model.py: Train, printed -->
    <!-- examples/first_steps/bank.sh: check, printed, 3 lines -->

So pages read the same in the repository and on the site. `tests/docs/test_examples.py` runs every file and compares.
Notebooks get what their cells print as outputs; `tests/docs/test_notebooks.py` runs those.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from treaty.runs.processes import free_ports

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("notebooks/*.ipynb"))
SETUP = EXAMPLES / "first_steps/setup.sh"
TERMINALS = {name: EXAMPLES / f"first_steps/{name}.sh" for name in ("bank", "shop")}
CARD = EXAMPLES / "scorecard"
CARD_TERMINALS = {name: CARD / f"{name}.sh" for name in ("bank", "bureau")}
TITLES = {
    "first_steps": ["keys", "exchange", "check", "train", "show", "predict", "report", "audit"],
    "scorecard": ["keys", "exchange", "train", "card", "export", "sign", "predict", "reasons"],
}
READERS_FOLDER = "/home/you/first"
_BLOCK = re.compile(
    r"(?P<mark><!-- examples/(?P<file>[\w./]+)(?:: (?P<title>[\w ]+))?"
    r"(?P<printed>, printed)?(?:, (?P<lines>\d+) lines)? -->\n)"
    r"(?P<fence>```\w*(?: \w+)?)\n(?P<text>.*?)```\n",
    flags=re.DOTALL,
)
_SPLIT = "\x1e"
# a line of a notebook that starts with ! is a command
_COMMAND = re.compile(r"^!((?:.*\\\n)*.*)$", flags=re.MULTILINE)
_BEFORE_CELLS = """import tempfile
tempfile.tempdir = {folder!r}

def _shell(command):
    import subprocess
    print(subprocess.check_output(command, shell=True, text=True, stderr=subprocess.STDOUT), end="")
"""


def parts(path: Path) -> dict[str, str]:
    """Return the parts of an example by their titles; "" is what stands before the first."""
    before, *rest = re.split(r"^# %% (.+)\n", path.read_text(), flags=re.MULTILINE)
    return {"": before, **{title: text.strip() + "\n" for title, text in zip(rest[::2], rest[1::2], strict=True)}}


def run_script(path: Path, folder: Path) -> dict[str, str]:
    """Run an example in a folder with the customers' tables, and return what each part printed."""
    marked = re.sub(r"^# %% .+\n", lambda _: f"print({_SPLIT!r}, end='')\n", path.read_text(), flags=re.MULTILINE)
    return dict(zip(parts(path), _run([sys.executable, "-c", marked], folder).split(_SPLIT), strict=True))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a notebook that have code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def as_python(source: str) -> str:
    """Return the source of a cell with its commands (``!treaty ...``) as Python."""
    return _COMMAND.sub(lambda found: f"_shell({found[1]!r})", source)


def run_notebook(path: Path, folder: Path) -> list[str]:
    """Run the code cells of a notebook in order, and return what each printed."""
    python = [as_python("".join(cell["source"])) for cell in code_cells(json.loads(path.read_text()))]
    before = _BEFORE_CELLS.format(folder=str(folder))
    program = f"\nprint({_SPLIT!r}, end='', flush=True)\n".join([before, *python])
    return _run([sys.executable, "-c", program], folder).split(_SPLIT)[1:]


def with_outputs(notebook: dict[str, Any], printed: list[str]) -> str:
    """Return the text of a notebook whose code cells have these outputs."""
    for number, (cell, text) in enumerate(zip(code_cells(notebook), printed, strict=True), 1):
        lines = re.sub(r" +$", "", text, flags=re.MULTILINE).splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def run_commands(path: Path, folder: Path) -> dict[str, str]:
    """Run a file of commands, and return what it printed as one part."""
    return {"": _run(["bash", "-e", str(path)], folder)}


def make_card_folder(folder: Path, data: Path) -> Path:
    """Prepare the folder of the scorecard's example, with the data set in a Parquet file."""
    for path in CARD.iterdir():
        shutil.copy(path, folder)
    shutil.copy(data, folder / "credit.parquet")
    for title in ("tables", "job"):
        _run(["bash", "-e", "-c", parts(CARD / "setup.sh")[title]], folder)
    return folder


def run_card(folder: Path) -> dict[str, dict[str, str]]:
    """Play the scorecard's example in its folder; return what each part printed, by file and title."""
    printed = run_terminals(folder, CARD_TERMINALS)
    return {**printed, "setup": {"compare": _run(["bash", "-e", "-c", parts(CARD / "setup.sh")["compare"]], folder)}}


def run_terminals(folder: Path, terminals: dict[str, Path] | None = None) -> dict[str, dict[str, str]]:
    """Type both organisations' lines in their folders; return what each part printed, by name and title.

    Titles come in the order in which they stand in all files together: a party that lacks one waits.

    The job file's ports are replaced by free ones, as something on this machine may have them.
    """
    ports = dict(zip(("7001", "7002"), map(str, free_ports(2)), strict=True))
    terminals = terminals or TERMINALS
    for name in terminals:
        job = folder / name / "job.toml"
        job.write_text(re.sub(r":(7001|7002)\b", lambda port: f":{ports[port[1]]}", job.read_text()))
    commands = {name: parts(path) for name, path in terminals.items()}
    printed: dict[str, dict[str, str]] = {name: {} for name in terminals}
    for title in TITLES[next(iter(terminals.values())).parent.name]:
        begun = {
            name: subprocess.Popen(  # noqa: S603
                ["bash", "-e", "-c", text[title]], cwd=folder / name, env=_environment(), text=True,  # noqa: S607
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for name, text in commands.items()
            if title in text
        }  # fmt: skip
        for name, process in begun.items():
            said, _ = process.communicate(timeout=240)
            if process.returncode != 0:
                raise RuntimeError(f"{name}, {title}: ended with {process.returncode}: {said}")
            for port, taken in ports.items():
                said = said.replace(f":{taken}", f":{port}")
            printed[name][title] = said.replace(str(folder), READERS_FOLDER)
    return printed


def make_folder(checkout: Path) -> Path:
    """Type the first lines of the tutorial in a folder that stands for a checkout, and return that of the tables."""
    (checkout / "examples").symlink_to(EXAMPLES)
    lines = parts(SETUP)
    _run(["bash", "-e", "-c", lines["tables"]], checkout)
    for name in TERMINALS:
        _run(["bash", "-e", "-c", lines["job"]], checkout / "first" / name)
    return checkout / "first"


def filled(page: str, printed: dict[str, dict[str, str]]) -> str:
    """Return a page with its blocks written anew: the examples, and of those that were run what they printed."""

    def block(found: re.Match[str]) -> str:
        file, title = found["file"], found["title"] or ""
        if found["printed"] is None:
            path = EXAMPLES / file
            text = parts(path)[title] if title else path.read_text()
        elif file in printed:
            text = printed[file][title] if title else "".join(printed[file].values())
            text = re.sub(r" +$", "", text, flags=re.MULTILINE)
            if found["lines"] is not None:
                text = "".join(text.splitlines(keepends=True)[: int(found["lines"])]) + "...\n"
        else:
            text = found["text"]
        return f"{found['mark']}{found['fence']}\n{text}```\n"

    return _BLOCK.sub(block, page)


def pages() -> list[Path]:
    """Return the pages that show examples."""
    return [path for path in sorted(ROOT.glob("docs/**/*.md")) if "<!-- examples/" in path.read_text()]


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(  # noqa: S603
        command,
        cwd=folder,
        env=_environment(),
        text=True,
        timeout=240,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        raise RuntimeError(f"ended with {done.returncode}: {done.stdout}")
    return done.stdout


def _environment() -> dict[str, str]:
    """Return an environment in which `treaty` is this Python's, and no width of a terminal cuts lines."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}


def main() -> None:
    """Run all examples, and write the pages."""
    for notebook in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as folder_of_cells:
            printed_by_cell = run_notebook(notebook, Path(folder_of_cells))
        notebook.write_text(with_outputs(json.loads(notebook.read_text()), printed_by_cell))
    with tempfile.TemporaryDirectory() as checkout:
        folder = make_folder(Path(checkout))
        printed = {path.name: run_script(path, folder) for path in SCRIPTS}
        printed |= {path.name: run_commands(path, folder) for path in EXAMPLES.glob("*.sh")}
        printed |= {f"first_steps/{name}.sh": each for name, each in run_terminals(folder).items()}
    data = Path(os.environ.get("TREATY_DATA", "")) / "credit2.parquet"
    if data.is_file():
        with tempfile.TemporaryDirectory() as folder_of_card:
            played = run_card(make_card_folder(Path(folder_of_card), data))
            printed |= {f"scorecard/{name}.sh": each for name, each in played.items()}
    for page in pages():
        page.write_text(filled(page.read_text(), printed))


if __name__ == "__main__":
    main()
