"""How option values become a checked struct, with errors that name the option and what it may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from treaty.errors import ConfigError

Options = TypeVar("Options", bound=msgspec.Struct)


def convert_options(values: Mapping[str, Any], kind: type[Options]) -> Options:
    """Build the struct, with types and ranges checked.

    Raises
    ------
    ConfigError
        For an unknown option, a wrong type or a value out of range.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), values, kind)) from None


def check_finite(name: str, value: Any) -> None:
    """Refuse a number that is infinite or none."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"option {name}={value}: expected a finite number")


def check_own(options: msgspec.Struct, protocol: str, protocols: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse options, other than None, that other protocols have but this one does not.

    Parameters
    ----------
    protocols : mapping of str to tuple of str
        Names of the options each protocol has beyond the common ones.
    """
    for name in {name for names in protocols.values() for name in names}:
        if name not in protocols[protocol] and getattr(options, name) is not None:
            raise ConfigError(f"protocol {protocol!r} has no option {name!r}; leave it out (None)")


def _explain(message: str, values: Mapping[str, Any], kind: type[msgspec.Struct]) -> str:
    """Put the option's name and value into msgspec's words."""
    text, _, path = message.partition(" - at `$.")
    name = path.rstrip("`")
    if name in values:
        hint = get_type_hints(kind).get(name)
        kinds = get_args(hint) or (hint,)
        allowed = [value for of in kinds if get_origin(of) is Literal for value in get_args(of)] or [
            value for value in kinds if isinstance(value, str)
        ]
        known = f": expected one of {', '.join(map(str, allowed))}" if allowed and "enum" in text else ""
        return f"option {name}={values[name]!r}{known or f': {text[0].lower()}{text[1:]}'}"
    unknown = text.replace("Object contains unknown field", "unknown option")
    near = get_close_matches(unknown.split("`")[1], kind.__struct_fields__, 1, 0.85) if "`" in unknown else []
    return unknown + (f"; did you mean `{near[0]}`?" if near else "")
