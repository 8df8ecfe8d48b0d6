"""The ``treaty`` command.

Exit codes: 0 done; 1 the job ended with an error, which is on standard error and may be any party's if all run here; 2
the command line, the job file or, with --as, this party's own table is wrong.
"""

from __future__ import annotations

import gc
import inspect
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import treaty
from treaty.cli.logs import BY_SIGNAL, Ended, last_line, say
from treaty.errors import ConfigError, DataError, TreatyError
from treaty.machine.process import ended_by_signals

# the module of each command, and where ``treaty --help`` lists it
_COMMANDS = {
    name: (module, panel)
    for module, panel, names in (
        ("check", None, ("demo", "check", "plan", "disclosures")),
        ("jobs", None, ("train", "predict", "explain", "serve")),
        ("results", None, ("show", "report")),
        ("scorecards", None, ("scorecard",)),
        ("results", None, ("audit", "ledger", "audit-gradients")),
        ("keys", None, ("keys",)),
        ("convert", None, ("convert",)),
        ("node", "Nodes", ("node", "submit", "jobs", "approve", "reject", "cancel")),
        ("node_records", "Nodes", ("logs", "models", "forget", "audit-log")),
    )
    for name in names
}


class _Commands(TyperGroup):
    """Imports a command's module only when the command is used: importing all takes a second."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None for an unknown name, after importing all, so that a similar one can be suggested."""
        for name in [cmd_name] if cmd_name in _COMMANDS else _COMMANDS:
            if name not in self.commands:
                self.add_command(_imported(name), name)
        return self.commands.get(cmd_name)


def _imported(name: str) -> Any:
    """Import a command's module; the command is its function, or its Typer app, of the same name."""
    module, panel = _COMMANDS[name]
    found = getattr(import_module(f"treaty.cli.{module}"), name.replace("-", "_"))
    own = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    if isinstance(found, typer.Typer):
        examples = [_put_examples_last(command) for command in found.registered_commands]
        own.add_typer(found, name=name, rich_help_panel=panel, epilog=examples[0])
        return typer.main.get_group(own).commands[name]
    own.command(name, rich_help_panel=panel)(found)
    _put_examples_last(own.registered_commands[0])
    return typer.main.get_command(own)


def _put_examples_last(command: Any) -> str:
    """Show the docstring's section "Examples" after the options, each on a line of its own; return what is shown."""
    text, _, examples = (inspect.getdoc(command.callback) or "").partition("\n\nExamples\n--------\n")
    command.help, command.epilog = text, "\n\n".join(["Examples:", *examples.splitlines()])
    return str(command.epilog)


app = typer.Typer(
    cls=_Commands, help="Train one model across organisations that may not pool their data.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
    epilog="Examples:\n\ntreaty demo --report out.html\n\ntreaty train --help",
)  # fmt: skip


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"treaty {treaty.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train one model across organisations that may not pool their data."""


def main() -> NoReturn:
    """Run the command line. Errors that Treaty raises on purpose are one line, not a traceback."""
    # otherwise each garbage collection, of which hundreds of messages cause many, scans all loaded modules
    gc.freeze()
    # shells do not expand ~ in --option=~/path
    sys.argv[1:] = [
        re.sub(r"^(--[\w-]+=)(~.*)", lambda match: match[1] + str(Path(match[2]).expanduser()), given)
        for given in sys.argv[1:]
    ]
    try:
        with ended_by_signals():
            app(standalone_mode=True)
    except (ConfigError, DataError) as error:
        print(last_line(error), file=sys.stderr)
        sys.exit(2)
    except (TreatyError, OSError) as error:
        print(last_line(error), file=sys.stderr)
        sys.exit(1)
    except SystemExit as ended:
        if ended.code in BY_SIGNAL:
            party = re.search(r" --as[ =](\S+)", " ".join(sys.argv))
            usual = Ended(int(ended.code), f"{BY_SIGNAL[int(ended.code)]}{f' at {party[1]}' if party else ''}")
            print(last_line(ended if isinstance(ended, Ended) else usual), file=sys.stderr)
            # at once: a thread that still sends to a peer would be waited for
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(ended.code))
        raise
    finally:
        # otherwise Python scans everything once more at exit, for half a second
        gc.freeze()
    sys.exit(0)
