"""Code that is named by text, ``package.module:NAME``: what may be imported, as importing a module runs it.

A name may come from a partner's proposal, a job file or a saved model. So nothing is imported but names that this
process was given as trusted: by an argument, on the command line, or by the policy of the party's own node.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from treaty.errors import ConfigError

_TRUSTED: set[str] = set()
_XGBOOST = ("binary", "count", "multi", "rank", "reg", "survival")  # before the colon in XGBoost's names of objectives


def trust(names: Iterable[Any]) -> None:
    """Let this process import these names; whatever is no ``package.module:NAME`` is passed over."""
    _TRUSTED.update(name for name in names if is_code(name))


def is_code(name: Any) -> bool:
    """Whether this is a name of code, and not one that XGBoost has for an objective: "reg:squarederror"."""
    return isinstance(name, str) and ":" in name and name.partition(":")[0] not in _XGBOOST


def check_trusted(name: str, what: str) -> None:
    """Raise ConfigError for a name of code that nobody here has called trusted; `what` names it: "the loss"."""
    if name not in _TRUSTED:
        raise ConfigError(
            f"{what} {name!r} is code, which is imported only where its user trusts it: give `--trust {name}` to the "
            f"command, trusted=[{name!r}] to treaty.load, or name it in the policy of a node's data set"
        )


def imported(name: str, what: str) -> Any:
    """Return what a trusted name stands for; ConfigError as `check_trusted`, and what importing raises."""
    check_trusted(name, what)
    module, _, attribute = name.partition(":")
    found: Any = import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
