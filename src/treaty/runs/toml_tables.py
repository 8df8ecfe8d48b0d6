"""Tables of a TOML file as structs, with errors in the words of the file that name table and field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args, get_type_hints

import msgspec

from treaty.errors import ConfigError

Places = Mapping[str, tuple[type[msgspec.Struct], Sequence[str]]]
"""The tables that the file may have: where each is, "in [web]", its struct, and the names of its fields."""

_WORDS = {
    "`str`": "text",
    "`int`": "a whole number",
    "`float`": "a number",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "a table",
}


def converted(where: str, raw: Any, kind: Any, places: Places, ready: Mapping[str, Any]) -> Any:
    """Convert a table to its struct.

    Parameters
    ----------
    where : str
        What an error calls the table: "[web]", empty for the file.
    raw : dict
    kind : type
    places : Places
        Where a name belongs that this table does not have.
    ready : dict
        Fields of it that are converted already.

    Raises
    ------
    ConfigError
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"expected {where} to be a table, got {raw!r}")
    _check_names(where or "the file", raw, kind, places)
    plain = {name: value for name, value in raw.items() if name not in ready}
    try:
        return msgspec.structs.replace(msgspec.convert(plain, kind), **ready)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where or 'the file:'} {in_words(str(error), plain, kind)}") from None


def _check_names(where: str, raw: Mapping[str, Any], kind: type[msgspec.Struct], places: Places) -> None:
    """Refuse a name that a table does not have; the error says where it belongs, or what is meant."""
    here = next(names for of, names in places.values() if of is kind)
    for name in raw:
        if name not in here:
            near = get_close_matches(name, here, 1, 0.65)
            elsewhere = next((place for place, (_, names) in places.items() if name in names), None)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(here)}"
            raise ConfigError(f"{where} has no field {name!r}; {f'it belongs {elsewhere}' if elsewhere else hint}")


def in_words(message: str, fields: Any, kind: Any, **nested: Any) -> str:
    """Put msgspec's message in the words of a file: output = 5: expected text, got a whole number.

    `fields` are what did not fit `kind`, a struct; `nested` are the structs of its tables, by their names.
    """
    text, _, path = message.replace(" | null`", "`").partition(" - at `$")
    names, value = re.findall(r"\.(\w+)", path), fields
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", text):
        return f"lacks the field {missing[1]!r}{f' in {names[-1]}' if names else ''}"
    text = re.sub(r"`str` matching regex '.*'", "host:port", text)
    for said, meant in _WORDS.items():
        text = text.replace(said, meant)
    for name in names:
        kind = nested.get(name, kind)
        value = value.get(name) if isinstance(value, dict) else value
    if "enum" in text:
        text = f"expected one of {', '.join(_choices(get_type_hints(kind)[names[-1]]))}"
    text = text[0].lower() + text[1:]
    return f"{path.strip('`.')} = {value!r}: {text}" if names else text


def _choices(hint: Any) -> list[str]:
    """Return the texts among a type's arguments, and theirs."""
    return [text for of in get_args(hint) for text in ([of] if isinstance(of, str) else _choices(of))]
