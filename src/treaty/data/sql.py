"""Tables that are the result of an SQL query: read from PostgreSQL, kept as a snapshot in a Parquet file.

A job reads the snapshot, so that all of it, and a resumed training, sees the same rows. The query is one statement in a
read-only transaction under a time limit; its rows are written batch by batch. It needs the extra
``treaty-learn[sql]`` (ADBC).
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet

from treaty.data.columns import refuse_repeated
from treaty.errors import ConfigError, DataError
from treaty.files import replacing

CONNECT_SECONDS = 10
"""How long a database may take to answer, unless the URI sets (connect_timeout)."""

_SOURCES = '"env:NAME" (a variable of the environment) or "file:PATH" (a file of mode 0600) that has the URI'
# types that arrow has, too
_KEPT = (
    *("int2", "int4", "int8", "float4", "float8", "bool", "text", "varchar", "bpchar", "name", "char"),
    *("date", "timestamp", "timestamptz", "time"),
)
_SIGN = re.compile(
    r"""(?P<comment>--[^\n]*) | (?P<block>/\*) | (?P<text>[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*')
    | (?P<name>"(?:[^"]|"")*") | (?P<word>[^\W\d][\w$]*) | (?P<dollar>\$(?:[^\W\d]\w*)?\$) | (?P<space>\s+)
    | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def check_source(source: str) -> None:
    """Raise ConfigError unless `source` says where the URI of a database is; the error does not show it."""
    kind, _, where = source.partition(":")
    if (kind == "env" and re.fullmatch(r"[A-Za-z_]\w*", where, re.ASCII)) or (kind == "file" and where):
        return
    plain = "://" in source or "=" in source
    got = "a URI, whose password would stand in the file" if plain else "something else"
    raise ConfigError(f"expected database to be {_SOURCES}, got {got}")


def database_uri(source: str) -> str:
    """Return the URI of a PostgreSQL database from "env:NAME" or "file:PATH".

    Raises ConfigError, which never shows it, if it is not there, others may read the file, or it is no such URI.
    """
    check_source(source)
    kind, _, where = source.partition(":")
    if kind == "env":
        uri = os.environ.get(where, "")
        if not uri:
            raise ConfigError(f"expected a database's URI in the variable {where} of the environment, got nothing")
    else:
        try:
            mode = Path(where).stat().st_mode
            uri = Path(where).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(f"cannot read a database's URI: {reason} - at {where}") from None
        if mode & 0o077:
            raise ConfigError(f"expected that only its owner may read a database's URI, got mode {mode & 0o777:03o}; "
                              f"chmod 600 it - at {where}")  # fmt: skip
    return _checked(uri.strip(), source)


def check_query(query: str, *, ordered: bool) -> str:
    """Return the query without a final semicolon; raise ConfigError for anything but one SELECT (or WITH ... SELECT).

    With `ordered` it must state the order of rows. The database itself refuses writing, and several statements; this
    error comes before anything is asked.
    """
    signs, end = [], len(query)
    for depth, sign, place in _signs(query):
        if sign == ";":
            end = min(end, place)
        elif place > end:
            raise ConfigError("expected one SQL statement, got several: leave one SELECT")
        else:
            signs.append((depth, sign))
    if not signs or signs[0][1] not in ("SELECT", "WITH"):
        got = signs[0][1] if signs and signs[0][1].isalpha() else "something else" if signs else "nothing"
        raise ConfigError(f"expected an SQL query that begins with SELECT or WITH, got {got}")
    outer = [sign for depth, sign in signs if depth == 0]
    if ordered and ("ORDER", "BY") not in pairwise(outer):
        raise ConfigError(
            "expected ORDER BY at the end of the SQL query, by columns that distinguish all rows, got none; without it "
            "rows come in any order, and cannot be matched with the rows of the others: name a column of "
            "ids (id), or an order"
        )
    # a comment may end it
    return f"{query[:end]}\n"


def fetch(
    uri: str, query: str, to: Path, *, text: Sequence[str] = (), seconds: float = 3600.0, what: str = "the query"
) -> int:
    """Run a query, write its rows to the Parquet file `to`, whole or not at all, and return how many there are.

    Numbers of any precision (numeric) in columns of `text`, ids for example, are kept as text; others become floating
    point. The query may take so many `seconds`; `what` names it in errors.

    Raises ConfigError, which never shows the URI's password, if the extra is missing, the database cannot be reached or
    refuses the query, or the file cannot be written; DataError if there is no row, a column has no name of its own, or
    is of a type that must be cast.
    """
    uri = _checked(uri, what)
    query = check_query(query, ordered=False)
    try:
        dbapi = import_module("adbc_driver_postgresql.dbapi")
    except ImportError:
        raise ConfigError(
            "tables by SQL need ADBC's driver of PostgreSQL: pip install 'treaty-learn[sql]'",
            public="it lacks what its table needs; it has the details",
        ) from None
    with _translated(what, _secrets_of(uri)), dbapi.connect(_with_timeout(uri)) as connection:
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute(f"SET LOCAL statement_timeout = {max(1, int(min(seconds, 2e6) * 1000))}")
            cursor.execute(query)
            return _write(cursor.fetch_record_batch(), to, text, what)


def _write(reader: Any, to: Path, text: Sequence[str], what: str) -> int:
    names = [str(field.name) for field in reader.schema]
    refuse_repeated(names, what, "; name them: AS")
    converts = [_conversion(field, field.name in text, what) for field in reader.schema]
    schema = pa.schema([pa.field(name, kind) for name, (kind, _) in zip(names, converts, strict=True)])
    n_rows = 0
    to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(to, ".parquet") as whole:
        with pyarrow.parquet.ParquetWriter(whole, schema, compression="zstd") as writer:
            for batch in reader:
                columns = [convert(column) for (_, convert), column in zip(converts, batch.columns, strict=True)]
                writer.write_batch(pa.record_batch(columns, schema=schema))
                n_rows += batch.num_rows
        if n_rows == 0:
            raise DataError(f"{what}: expected at least one row of the query, got none")
        with whole.open("rb") as file:
            os.fsync(file.fileno())
    return n_rows


def _conversion(field: Any, as_text: bool, what: str) -> tuple[Any, Callable[[Any], Any]]:
    """Return the type of a column in the file, and the conversion of a batch's column."""
    kind = (field.metadata or {}).get(b"POSTGRESQL:type", b"").decode()
    if kind in _KEPT:
        return field.type, lambda column: column
    if kind == "numeric" and as_text:
        return pa.string(), lambda column: column.storage
    if kind == "numeric":
        return pa.float64(), lambda column: column.storage.cast(pa.float64())
    if kind == "uuid":
        return pa.string(), lambda column: pa.array(
            [None if value is None else str(uuid.UUID(bytes=value)) for value in column.storage.to_pylist()],
            pa.string(),
        )
    raise DataError(
        f"{what}: column {field.name!r} is of type {kind or field.type}, which no table has: cast it in the query, "
        f'"::text" or "::float8" say, or leave it out'
    )


@contextmanager
def _translated(what: str, hidden: Sequence[str]) -> Iterator[None]:
    """Raise errors of the driver, the database and the disk as ours, without the `hidden` texts."""
    try:
        yield
    except (import_module("adbc_driver_manager").Error, pa.ArrowException, OSError) as error:
        text = str(error)
        # prefixes of libpq and the driver
        for begins in ("Failed to connect: ", "ERROR:  ", "] "):
            text = text.partition(begins)[2] or text
        text = text.strip().partition("\n")[0]
        for secret in hidden:
            text = text.replace(secret, "***")
        if isinstance(error, OSError) and error.strerror:
            raise ConfigError(f"{what}: cannot write the rows of the query: {error.strerror}; make room") from None
        raise ConfigError(f"{what}: the database did not answer the query: {text}") from None


def _checked(uri: str, where: str) -> str:
    """Refuse a URI that is none of PostgreSQL or ambiguous, without showing it."""
    try:
        parts = urlsplit(uri)
        fine = parts.scheme in ("postgresql", "postgres") and "://" in uri and not re.search(r"\s", uri)
        odd = parts.netloc.count("@") > 1 or "@" in parts.path + parts.query or parts.fragment != ""
        badly = re.search(r"%(?![0-9A-Fa-f]{2})", uri) is not None
    except ValueError:
        fine, odd, badly = "postgres" in uri[:10], True, True
    if not fine:
        raise ConfigError(f"expected a URI that begins with postgresql://, got another scheme - at {where}")
    if odd or badly:
        raise ConfigError(
            "expected postgresql://USER:PASSWORD@HOST:PORT/DATABASE, got a URI that can be read in two ways: write "
            f"signs of the password as %XX (@ is %40, / is %2F, # is %23, ? is %3F, % is %25) - at {where}"
        )
    return uri


def _secrets_of(uri: str) -> list[str]:
    """Return what an error must not show: the URI, and its passwords as written and decoded; the longest first."""
    parts = urlsplit(uri)
    given = [parts.password or "", *(v for name, v in parse_qsl(parts.query) if "password" in name or "key" in name)]
    found = {uri, *given, *(unquote(secret) for secret in given)} - {""}
    return sorted(found, key=len, reverse=True)


def _with_timeout(uri: str) -> str:
    parts = urlsplit(uri)
    if "connect_timeout" in dict(parse_qsl(parts.query)):
        return uri
    return f"{uri}{'&' if parts.query else '?'}connect_timeout={CONNECT_SECONDS}"


def _signs(query: str) -> Iterator[tuple[int, str, int]]:
    """Yield the words and signs of a query with their depth in parentheses and their place, without comments.

    Texts and quoted names are represented by their quotation mark.
    """
    place, depth = 0, 0
    while place < len(query):
        found = _SIGN.match(query, place)
        # any character matches `other`
        assert found is not None
        kind, sign, begins, place = found.lastgroup, found[0], place, found.end()
        if kind == "block":
            place = _after_comment(query, place)
        elif kind == "dollar":
            place = query.find(sign, place) + len(sign)
            if place < found.end():
                raise ConfigError(f"expected the end of a text of the SQL query that begins with {sign}, got none")
            yield depth, "'", begins
        elif kind == "word":
            yield depth, sign.upper(), begins
        elif kind == "other":
            if sign in "'\"":
                raise ConfigError(f"expected the end of what begins with {sign} in the SQL query, got none")
            depth -= sign == ")"
            yield depth, sign, begins
            depth += sign == "("
        elif kind in ("text", "name"):
            yield depth, sign[-1], begins


def _after_comment(query: str, place: int) -> int:
    """Return where a comment ends that began before `place`; comments may hold comments."""
    depth = 1
    for mark in re.finditer(r"/\*|\*/", query[place:]):
        depth += 1 if mark[0] == "/*" else -1
        if depth == 0:
            return place + mark.end()
    raise ConfigError("expected the end of a comment of the SQL query, */, got none")
