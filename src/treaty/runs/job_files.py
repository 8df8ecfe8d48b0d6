"""Job files: read from TOML or JSON and checked, with errors that name the table and the field as the file does.

Node settings use `struct_of` as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import load_pem_x509_certificate

from treaty.cluster.shards import Cluster
from treaty.errors import ConfigError
from treaty.files import placed, without_mark
from treaty.machine.process import check_trusted, is_code, trust
from treaty.messaging.certificates import load_certificate
from treaty.runs.job import NAME, Align, Job, Member, Name, between_parties, check_names
from treaty.systems import SYSTEMS
from treaty.systems.pooled.continuing import check_start
from treaty.systems.pooled.system import refuse_margins
from treaty.systems.system import Roles

# fields of a job that are durations: seconds, or text such as "2m"
DURATIONS = ("wait", "timeout", "reconnect")
_PATHS_OF_JOB = ("output", "checkpoints", "store", "from_model")
_PATHS_OF_MEMBER = ("certificate", "key", "table", "predict_table", "noisy_labels", "keep_for_audit", "record")

# the tables that a file may have: by where each is ("in [web]"), its struct and the names of its fields
Places = Mapping[str, tuple[type[msgspec.Struct], Sequence[str]]]

_WORDS = {
    "`str`": "text", "`int`": "a whole number", "`float`": "a number", "`bool`": "true or false",
    "`array`": "a list", "`object`": "a table",
}  # fmt: skip


def struct_of(where: str, raw: Any, kind: Any, places: Places, ready: Mapping[str, Any]) -> Any:
    """Convert a table to its struct; raise ConfigError if that cannot be done.

    `where` is the table's name in errors ("[web]"; "" for the whole file), `places` all tables of the file, to suggest
    where a misplaced name belongs, and `ready` fields that are converted already.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"expected {where} to be a table, got {raw!r}")
    here = next(names for of, names in places.values() if of is kind)
    for name in raw:
        if name not in here:
            near = get_close_matches(name, here, 1, 0.65)
            elsewhere = next((place for place, (_, names) in places.items() if name in names), None)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(here)}"
            raise ConfigError(
                f"{where or 'the file'} has no field {name!r}; {f'it belongs {elsewhere}' if elsewhere else hint}"
            )
    plain = {name: value for name, value in raw.items() if name not in ready}
    try:
        return msgspec.structs.replace(msgspec.convert(plain, kind), **ready)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where or 'the file:'} {in_words(str(error), plain, kind)}") from None


def in_words(message: str, fields: Any, kind: Any, **nested: Any) -> str:
    """Translate an error of msgspec into the words of the file: output = 5: expected text, got a whole number.

    `fields` are the values that do not fit the struct `kind`; `nested` has the structs of its tables, by name.
    """
    text, _, path = message.replace(" | null`", "`").partition(" - at `$")
    names, value = re.findall(r"\.(\w+)", path), fields
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", text):
        return f"lacks the field {missing[1]!r}{f' in {names[-1]}' if names else ''}"
    text = re.sub(r"`str` matching regex '.*'", "host:port", text)
    for theirs, ours in _WORDS.items():
        text = text.replace(theirs, ours)
    for name in names:
        kind = nested.get(name, kind)
        value = value.get(name) if isinstance(value, dict) else value
    if "enum" in text:
        text = f"expected one of {', '.join(_choices(get_type_hints(kind)[names[-1]]))}"
    text = text[0].lower() + text[1:]
    return f"{path.strip('`.')} = {value!r}: {text}" if names else text


def _choices(hint: Any) -> list[str]:
    """Return the values of a `Literal`, which may be nested in the arguments of a type."""
    return [text for of in get_args(hint) for text in ([of] if isinstance(of, str) else _choices(of))]


def load_job(path: str | Path) -> Job:
    """Read a job from a TOML (or JSON) file as `read_job` does, and make its paths absolute."""
    job, here = read_job(path), Path(path).resolve().parent

    def placed_in(of: Job | Member, fields: Sequence[str], **more: Any) -> Any:
        named = {field: placed(here, given) for field in fields if (given := getattr(of, field)) is not None}
        return msgspec.structs.replace(of, **named, **more)

    parties = {
        name: placed_in(member, _PATHS_OF_MEMBER, eval_tables=[placed(here, table) for table in member.eval_tables])
        for name, member in job.parties.items()
    }
    align = job.align and msgspec.structs.replace(job.align, log=job.align.log and placed(here, job.align.log))
    found: Job = placed_in(job, _PATHS_OF_JOB, parties=parties, align=align)
    return found


def read_job(path: str | Path) -> Job:
    """Read a job from a TOML (or JSON) file, and check it.

    ConfigError if the file cannot be read; if a field is unknown, missing or of the wrong type; if options or roles do
    not fit the system; or if rows of different people are to be aligned.
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
    """Raise ConfigError if the fields of a job contradict each other; `where` names its source in the error."""
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
                f"parties {used[member.address]} and {name} have the same address, {member.address}: give each its own "
                f"- in {where}"
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
    _check_constraints(job, where)
    _check_classifies(job, where)


def _check_constraints(job: Job, where: str) -> None:
    """Refuse monotone constraints in the wrong place: of columns that all parties have, or of a party's own."""
    given = getattr(job.settings()[1], "monotone_constraints", None)
    stating = [f"parties.{name}" for name, member in job.parties.items() if member.monotone_constraints]
    own = "each party's own columns belong in [parties.NAME] monotone_constraints"
    if job.by_row and (given is True or stating):
        fault = "all parties have the same columns: name them in [boosting] monotone_constraints alone"
    elif not job.by_row and given not in (None, True):
        fault = f"set monotone_constraints = true in [boosting]; {own}"
    elif stating and not given:
        fault = f"{', '.join(stating)} has monotone_constraints: set monotone_constraints = true in [boosting]"
    else:
        return
    raise ConfigError(f"{fault} - in {where}")


def check_training(job: Job, name: str | None = None, *, resume: bool = False) -> Roles:
    """Raise ConfigError if roles, options or tables of a training cannot work; return who plays which role.

    `name` is the party that this process runs; None: all parties run on this machine.
    """
    roles, system, (own, common) = job.roles(), job.system, job.settings()
    _check_starts(job)
    if simulated := system.only_simulated(own):
        raise ConfigError(simulated)
    if resume and "resume" in system.cannot:
        raise ConfigError(system.cannot["resume"])
    _check_helpers(job, roles)
    kept = [party for party, member in job.parties.items() if member.keep_for_audit is not None]
    if kept and (reason := system.unaudited(own)):
        raise ConfigError(
            f"expected no keep_for_audit with protocol {job.protocol!r} and these options, got it at "
            f"{', '.join(kept)}: {reason}"
        )
    for party, member in job.parties.items():
        if member.most_recoverable is not None and (own.ciphers is None or own.mode == "paper"):
            raise ConfigError(
                f"{party} sets the limit most_recoverable, but protocol {job.protocol!r} with these options does not "
                "count all that it reveals: remove the limit, or use a system that counts sides of splits "
                "(docs/sealed.md)"
            )
        cluster_of(member)
        if member.cluster is not None and roles.of[party] not in system.on_clusters(own):
            raise ConfigError(
                f"expected no cluster at {party}, got one, which would have nothing to do: it is the "
                f"{roles.of[party]} of protocol {job.protocol!r} with these options (docs/clusters.md)"
            )
    for party in roles.owners if name is None else [name]:
        if not job.by_row and party in roles.owners and job.parties[party].table is None:
            raise ConfigError(f"the job names no table of {party}: add parties.{party}.table")
    lead = job.active
    if name not in (None, lead) or job.parties[lead].eval_tables:
        return roles
    for needs_rows in ("early_stopping_rounds", "eval_weight"):
        if own.holds_out_rows and needs_rows == "early_stopping_rounds":
            continue
        if getattr(common, needs_rows, None) is not None or getattr(job, needs_rows, None) is not None:
            raise ConfigError(f"{needs_rows} needs rows to watch: name parties.{lead}.eval_tables")
    if roles.of[lead] in system.shows_columns and job.parties[lead].table is None:
        raise ConfigError(
            f"the {roles.of[lead]} defines the columns and classes: expected parties.{lead}.table, with example rows "
            f"that it does not train on, or parties.{lead}.eval_tables, got neither"
        )
    return roles


def _check_starts(job: Job) -> None:
    """Refuse a start from rows' own margins, or from a finished model, where there is none; and audits of either."""
    (own, common), columns = job.settings(), job.table_rules(job.active).base_margin
    check_start(job.system, own, common, goes_on=job.from_model is not None)
    if columns:
        refuse_margins(job.system, own, common)
        if len(columns) != (expected := job.classes if job.classes > 2 else 1):
            raise ConfigError(f"expected {expected} columns as base_margin, got {len(columns)}")
    kept = [name for name, member in job.parties.items() if member.keep_for_audit is not None]
    if kept and (columns or job.from_model):
        raise ConfigError(f"audits replay trainings from one start: expected no keep_for_audit at {kept[0]}")
    if kept and getattr(common, "multi_output", False):
        raise ConfigError(f"audits replay trees of one output: expected no keep_for_audit at {kept[0]}")


def cluster_of(member: Member) -> Cluster | None:
    """Return a party's own cluster, checked; None without one."""
    return None if member.cluster is None else Cluster(member.cluster, member.cluster_workers)


def _check_helpers(job: Job, roles: Roles) -> None:
    """Refuse a helper that is one of the data parties under another name, as far as certificates show it."""
    keys = {}
    for name, member in job.parties.items():
        if member.certificate:
            key = load_pem_x509_certificate(load_certificate(member.certificate)).public_key()
            keys[name] = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    for helper in roles.having(*job.system.apart):
        same = [name for name, key in keys.items() if name != helper and key == keys.get(helper)]
        if same:
            role = roles.of[helper]
            raise ConfigError(
                f"{helper}, the {role}, has the same key as {', '.join(same)}: a party with data must not be the "
                f"{role}; use a third party, or {role} = false"
            )


def fault_of(address: str, least: int) -> str:
    """Return what is wrong with an address host:port whose port must be at least `least`; "" if nothing is."""
    scheme, _, rest = address.partition("://")
    if rest:
        return f"expected host:port without {scheme}://"
    host, _, port = address.rpartition(":")
    if set(host) & set(" /@") and not address.startswith("unix:"):
        return "expected host:port, the name or number of a machine alone"
    if port.isdecimal() and not least <= int(port) <= 65535:
        return f"expected a port from {least} to 65535"
    if ":" in host and not address.startswith("unix:") and not (host.startswith("[") and host.endswith("]")):
        return "expected an IPv6 address in brackets, such as [::1]:7000"
    return ""


def _job_of(fields: Any) -> Job:
    """Convert a file's fields; an error names the party, the field and what was expected."""
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
        text = in_words(str(error), fields, Job, align=Align)
        raise ConfigError(f"the job {text}" if text.startswith("lacks") else text) from None


def decoded_job(data: bytes, *, trusted: bool = False) -> Job:
    """Decode a job that `Job.encoded` encoded; `trusted`: it comes from the process that started this one."""
    raw = msgspec.json.decode(data)
    if trusted:
        trust(names_of_code(raw).values())
    return msgspec.convert(_named_tables(raw), Job)


def names_of_code(raw: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of code in a job's raw fields, by what they name, without importing any of it."""
    boosting = raw.get("boosting")
    named = {
        "the system": raw.get("protocol"),
        "the loss": boosting.get("objective") if isinstance(boosting, dict) else None,
    }
    return {what: str(name) for what, name in named.items() if is_code(name)}


def _named_tables(raw: Any) -> Any:
    """Move a file's tables of options, whose names depend on the system, to the fields `own` and `common`."""
    if not isinstance(raw, dict):
        return raw
    protocol = raw.get("protocol", "secureboost")
    if not isinstance(protocol, str):
        raise ConfigError(f"expected protocol to be a system's name, got {protocol!r}")
    for what, name in names_of_code(raw).items():
        check_trusted(name, what)
    system = between_parties(protocol)
    tables = {"own": system.name, "common": system.common.table}
    others = {"options", "boosting", "regression", "columns"}.union(*SYSTEMS.values())
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
    """Return the seconds of a duration such as "90s", "2m" or "1h30m"; `name` is its name in an error."""
    found = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.replace(" ", ""))
    if found is None or not any(found.groups()):
        raise ConfigError(f'expected {name} to be seconds, or "90s", "2m", "1h30m" or "2d", got {text!r}')
    return float(sum(int(n or 0) * unit for n, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True)))


def _check_classifies(job: Job, where: str) -> None:
    """Refuse, for a linear model, what only trees have or what its family does not have."""
    if job.system.common.table != "regression":
        return
    common = job.settings()[1]
    family, expected = common.family, "classification" if common.classifies else "regression"
    if job.task != expected:
        raise ConfigError(
            f'expected task = "{expected}" with family = "{family}", got task = "{job.task}" - in {where}'
        )
    if family == "multiclass" and job.classes == 2:
        raise ConfigError(f'expected the number of classes with family = "multiclass", e.g. classes = 5 - in {where}')
    asked = [name for name in ("group", "eval_weight", "base_margin", "from_model") if getattr(job, name) is not None]
    asked += [f"parties.{name}.noisy_labels" for name, member in job.parties.items() if member.noisy_labels]
    if asked:
        raise ConfigError(
            f"expected no group, eval_weight, base_margin, from_model and noisy_labels with protocol {job.protocol!r}, "
            f"got {', '.join(asked)} - in {where}"
        )
    if any(member.eval_tables for member in job.parties.values()):
        common.check_eval_sets(job.settings()[0])
