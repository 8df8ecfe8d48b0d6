"""The ``treaty`` command.

Exit codes: 0 done; 1 the job ended with an error, said on standard error, which may be any party's where all run here;
2 the command line, the job file or, with --as, this party's own table is wrong.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

import treaty
from treaty.cli.logs import BY_SIGNAL, Ended, last_line
from treaty.errors import ConfigError, DataError, TreatyError
from treaty.machine.process import ended_by_signals

console = Console(markup=False)

_OF_NODES = "Nodes"
_COMMANDS = {
    "demo": ("demo", None),
    "check": ("check", None),
    "disclosures": ("disclosures", None),
    "train": ("jobs", None),
    "predict": ("jobs", None),
    "explain": ("jobs", None),
    "serve": ("serve", None),
    "show": ("show", None),
    "report": ("report", None),
    "audit": ("audit", None),
    "ledger": ("spent", None),
    "begin-anew": ("spent", None),
    "audit-gradients": ("audit_gradients", None),
    "keys": ("keys", None),
    "node": ("node", _OF_NODES),
    "submit": ("node", _OF_NODES),
    "jobs": ("node", _OF_NODES),
    "approve": ("node", _OF_NODES),
    "reject": ("node", _OF_NODES),
    "cancel": ("node", _OF_NODES),
    "logs": ("node", _OF_NODES),
    "models": ("node", _OF_NODES),
    "forget": ("forget", _OF_NODES),
    "audit-log": ("audit_log", _OF_NODES),
}
"""The module of each command, and where ``treaty --help`` lists it."""


class _Commands(TyperGroup):
    """The commands, each imported when it is asked for: all together take a second."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None where there is none of this name, and then all are known to suggest one."""
        for name in [cmd_name] if cmd_name in _COMMANDS else _COMMANDS:
            if name not in self.commands:
                self.add_command(_imported(name), name)
        return self.commands.get(cmd_name)


def _imported(name: str) -> Any:
    """Return what a command's module has under its name: a function, or an application with commands of its own."""
    module, panel = _COMMANDS[name]
    found = getattr(import_module(f"treaty.cli.{module}"), name.replace("-", "_"))
    own = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    if isinstance(found, typer.Typer):
        own.add_typer(found, name=name, rich_help_panel=panel)
        return typer.main.get_group(own).commands[name]
    own.command(name, rich_help_panel=panel)(found)
    return typer.main.get_command(own)


app = typer.Typer(
    cls=_Commands,
    help="Train one model across organisations that may not pool their data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"treaty {treaty.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Train one model across organisations that may not pool their data."""


def _at_home(given: re.Match[str]) -> str:
    """Return an option whose path begins with ``~``, which shells leave alone after a "="."""
    return given[1] + str(Path(given[2]).expanduser())


def main() -> NoReturn:
    """Run the command line; errors Treaty raises on purpose are one message, not a traceback."""
    gc.freeze()  # hundreds of messages would have Python look through all that is loaded for garbage, again and again
    sys.argv[1:] = [re.sub(r"^(--[\w-]+=)(~.*)", _at_home, given) for given in sys.argv[1:]]
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
            # at once: a call of gRPC that was cut off half-way can keep the interpreter from ending
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(ended.code))
        raise
    finally:
        gc.freeze()  # as Python ends it would look through everything once more, for half a second
    sys.exit(0)
