"""Job files: read from TOML or JSON, with errors in the words of the file that name the table and the field.

`struct_of` and `in_words` serve other TOML files as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec

from treaty.errors import ConfigError
from treaty.files import placed, without_mark
from treaty.machine.process import check_trusted, is_code, trust
from treaty.runs.job import NAME, Align, Job, Member, Name, between_parties, check_names
from treaty.systems import SYSTEMS

# fields of a job in seconds, or in words
DURATIONS = ("wait", "timeout", "reconnect")

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


def struct_of(where: str, raw: Any, kind: Any, places: Places, ready: Mapping[str, Any]) -> Any:
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
    _check_fields(where or "the file", raw, kind, places)
    plain = {name: value for name, value in raw.items() if name not in ready}
    try:
        return msgspec.structs.replace(msgspec.convert(plain, kind), **ready)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where or 'the file:'} {in_words(str(error), plain, kind)}") from None


def _check_fields(where: str, raw: Mapping[str, Any], kind: type[msgspec.Struct], places: Places) -> None:
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


def load_job(path: str | Path) -> Job:
    """Read a job from a TOML (or JSON) file; its paths become absolute. Raises as `read_job`."""
    return _absolute(read_job(path), Path(path).resolve().parent)


def read_job(path: str | Path) -> Job:
    """Read a job from a TOML (or JSON) file, and check it.

    Raises
    ------
    ConfigError
        If the file cannot be read, a field is unknown, missing, or of the wrong type, options or roles do not fit the
        system, or rows are to be aligned that are of different people.
    """
    path = Path(path)
    try:
        data = without_mark(path.read_bytes())
        decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
        job = _job_of(_named_tables(decode(data)))
        job.settings()
    except OSError as error:
        raise ConfigError(f"cannot read the job {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"{str(error).replace('| null`', '| None`')} - in the job {path}") from None
    check_whole(job, str(path))
    return job


def check_whole(job: Job, where: str) -> None:
    """Refuse a job whose fields contradict each other; `where` it is from, for the error.

    Raises
    ------
    ConfigError
    """
    if job.active not in job.parties:
        raise ConfigError(f"expected active to be one of {', '.join(job.parties)}, got {job.active!r} - in {where}")
    if len(job.parties) < 2:
        raise ConfigError(f"expected at least two parties, got {', '.join(job.parties)} - in {where}")
    used: dict[str, str] = {}
    for name, member in job.parties.items():
        for field, address in (("address", member.address), ("listen", member.listen)):
            if address is not None and (fault := fault_of(address, int(field == "address"))):
                raise ConfigError(f"parties.{name}.{field} = {address!r}: {fault} - in {where}")
        if member.address is not None and used.setdefault(member.address, name) != name:
            raise ConfigError(
                f"parties {used[member.address]} and {name} have the same address, {member.address}: expected one of "
                f"its own for each - in {where}"
            )
    if job.by_row and job.align is not None:
        raise ConfigError(
            f"expected no [align] with protocol {job.protocol!r}, whose parties hold different people's rows; take it "
            f"out - in {where}"
        )
    if job.task != "classification" and job.classes > 2:
        raise ConfigError(f'expected no classes with task = "{job.task}", got {job.classes} - in {where}')
    if (job.task == "ranking") != (job.group is not None):
        raise ConfigError(
            f'expected group, a column, with task = "ranking" and with no other, got task = "{job.task}" and '
            f"{'no group' if job.group is None else f'group = {job.group!r}'} - in {where}"
        )
    _check_classifies(job, where)


def fault_of(address: str, least: int) -> str:
    """Return what is wrong with an address of the form host:port, whose port is `least` or more; "" if nothing is."""
    scheme, _, rest = address.partition("://")
    if rest:
        return f"expected host:port without {scheme}://"
    host, _, port = address.rpartition(":")
    if set(host) & set(" /@") and not address.startswith("unix:"):
        return "expected host:port, the name or number of a machine alone"
    if port.isdecimal() and not least <= int(port) <= 65535:
        return f"expected a port from {least} to 65535"
    if ":" in host and not address.startswith("unix:") and not (host.startswith("[") and host.endswith("]")):
        return "expected an IPv6 address in brackets, [::1]:7000 say"
    return ""


def _job_of(fields: Any) -> Job:
    """Convert a file's fields; the error names the party, the field and what it should be."""
    parties = fields.get("parties") if isinstance(fields, dict) else None
    if isinstance(parties, dict):
        try:
            msgspec.convert(list(parties), list[Name])
        except msgspec.ValidationError:
            wrong = ", ".join(repr(name) for name in parties if not re.fullmatch(NAME, name))
            raise ConfigError(
                f"expected parties' names of letters, digits, - and _, at most 63 of them, got {wrong}"
            ) from None
        for name, member in parties.items():
            try:
                msgspec.convert(member, Member)
            except msgspec.ValidationError as error:
                raise ConfigError(f"[parties.{name}] {in_words(str(error), member, Member)}") from None
    try:
        return msgspec.convert(fields, Job)
    except msgspec.ValidationError as error:
        said = in_words(str(error), fields, Job, align=Align)
        raise ConfigError(f"the job {said}" if said.startswith("lacks") else said) from None


def decoded_job(data: bytes, *, trusted: bool = False) -> Job:
    """Return the job that `Job.encoded` encoded; `trusted`: by the process that has started this one."""
    raw = msgspec.json.decode(data)
    if trusted:
        trust(names_of_code(raw).values())
    return msgspec.convert(_named_tables(raw), Job)


def names_of_code(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of code in a job's fields, by what they name; nothing of the job is looked up for that."""
    boosting = raw.get("boosting")
    named = {
        "the system": raw.get("protocol"),
        "the loss": boosting.get("objective") if isinstance(boosting, dict) else None,
    }
    return {what: str(name) for what, name in named.items() if is_code(name)}


def _named_tables(raw: Any) -> Any:
    """Put a file's tables of options, named by the system, into the fields `own` and `common`."""
    if not isinstance(raw, dict):
        return raw
    protocol = raw.get("protocol", "secureboost")
    if not isinstance(protocol, str):
        raise ConfigError(f"expected protocol to be a system's name, got {protocol!r}")
    for what, name in names_of_code(raw).items():
        check_trusted(name, what)
    system = between_parties(protocol)
    tables = {"own": system.name, "common": system.common.table}
    others = {"options", "boosting", "regression", *(name for systems in SYSTEMS.values() for name in systems)}
    for name in raw:
        if name in others and name not in tables.values():
            raise ConfigError(
                f"expected options in [{system.name}] and [{system.common.table}], got a table [{name}]: the job's "
                f"protocol is {system.name!r}"
            )
        if name in tables.values() and not isinstance(raw[name], dict):
            raise ConfigError(f"expected [{name}] to be a table of options, got {raw[name]!r}")
    fields = {name: value for name, value in raw.items() if name not in tables.values()}
    fields |= {name: seconds_of(name, fields[name]) for name in DURATIONS if isinstance(fields.get(name), str)}
    check_names("the job", fields, Job, system)
    check_names("[align]", raw.get("align"), Align, system)
    parties = raw.get("parties")
    for name, member in parties.items() if isinstance(parties, dict) else ():
        check_names(f"[parties.{name}]", member, Member, system)
    return fields | {field: raw.get(table, {}) for field, table in tables.items()}


def seconds_of(name: str, text: str) -> float:
    """Return the seconds of a duration in words: "90s", "2m", "1h30m"."""
    found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.replace(" ", ""))
    if found is None or not any(found.groups()):
        raise ConfigError(f'expected {name} to be seconds, or "90s", "2m", "1h30m" or "2d", got {text!r}')
    return float(sum(int(n or 0) * unit for n, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True)))


def _check_classifies(job: Job, where: str) -> None:
    """Refuse what a job of trees may ask for and a linear model does not have, or not in this family."""
    if job.system.common.table != "regression":
        return
    common = job.settings()[1]
    family, expected = common.family, "classification" if common.classifies else "regression"
    if job.task != expected:
        raise ConfigError(
            f'expected task = "{expected}" with family = "{family}", got task = "{job.task}" - in {where}'
        )
    if family == "multiclass" and job.classes == 2:
        raise ConfigError(f'expected the number of classes with family = "multiclass", classes = 5 say - in {where}')
    asked = ["group"] if job.group is not None else []
    asked += [f"parties.{name}.noisy_labels" for name, member in job.parties.items() if member.noisy_labels]
    if asked:
        raise ConfigError(
            f"expected no group and no noisy_labels with protocol {job.protocol!r}, got {', '.join(asked)} - in {where}"
        )
    if any(member.eval_tables for member in job.parties.values()):
        common.check_eval_sets(job.settings()[0])


def _absolute(job: Job, here: Path) -> Job:
    def absolute(name: str | None) -> str | None:
        return None if name is None else placed(here, name)

    parties = {
        name: msgspec.structs.replace(
            member,
            certificate=absolute(member.certificate),
            key=absolute(member.key),
            table=absolute(member.table),
            eval_tables=[placed(here, table) for table in member.eval_tables],
            predict_table=absolute(member.predict_table),
            noisy_labels=absolute(member.noisy_labels),
            keep_for_audit=absolute(member.keep_for_audit),
            record=absolute(member.record),
        )
        for name, member in job.parties.items()
    }
    align = job.align and msgspec.structs.replace(job.align, log=absolute(job.align.log))
    return msgspec.structs.replace(
        job,
        parties=parties,
        align=align,
        output=placed(here, job.output),
        checkpoints=absolute(job.checkpoints),
        store=absolute(job.store),
    )
