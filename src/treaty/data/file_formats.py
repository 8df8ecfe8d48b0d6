"""CSV and Parquet files as arrow tables, and what is wrong with files that cannot be read as such.

A CSV file (comma-separated values in UTF-8 with a header) is parsed as one block, so that all values of a column decide
its type, not the first ones. A file that is too large for memory is read in pieces, with the types that the whole file
would have: arrow tries one type after the other until all cells of a column fit, and where pieces differ, the search
continues in arrow's order over all of them. A second pass writes columns of these types to a file.

A folder of Parquet files is one table: its files in the order of their names, all of one schema.
"""

from __future__ import annotations

import csv
import gzip
import io
import mmap
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from treaty.data.arrow_tables import typed_ids
from treaty.data.columns import quoted
from treaty.machine.arrays import Bytes, unusable
from treaty.machine.kernels import kernel

# arrow counts the bytes of a block in int32
_LARGEST_BLOCK = (1 << 31) - 1
_SMALLEST_BLOCK = 1 << 16
_MARK = "\ufeff".encode()
_OF_EXCEL = re.compile(r'"?sep=(.)"?,?\s*$', re.IGNORECASE)
_SEPARATORS = {";": "';'", "\t": "tabs", "|": "'|'"}
_BEGINNINGS = {
    b"PAR1": "a Parquet file: name it .parquet",
    b"ARROW1": "an arrow file: name it .arrow",
    b"\x1f\x8b": "a file packed by gzip: name it .csv.gz",
    b"PK\x03\x04": "a zip file or an Excel workbook: save the sheet as CSV, in UTF-8",
    b"\xff\xfe": "text in UTF-16: save the file as UTF-8",
    b"\xfe\xff": "text in UTF-16: save the file as UTF-8",
}


class FileProblem(ValueError):
    """Why a file or folder is no table; without its name and the party, which the caller adds."""


def read_csv(path: Path, text: Sequence[str]) -> Any:
    """Read a CSV file into an arrow table, with the columns `text` as text; raise FileProblem, and the system's."""
    with _opened(path) as file:
        content = file.read()
    if not content.strip():
        raise FileProblem("expected a table, got an empty file")
    content = beginning_of(content)
    try:
        return parse(content, dict.fromkeys(text, pa.string()))
    except (pa.ArrowException, UnicodeDecodeError):
        # arrow's message would show the values
        raise FileProblem(what_is_wrong(io.StringIO(content.decode("utf-8", errors="replace"), newline=""))) from None


def beginning_of(content: bytes) -> bytes:
    """Return a file's first bytes without byte order marks; raise FileProblem if they are of another kind of file."""
    for beginning, what in _BEGINNINGS.items():
        if content.startswith(beginning):
            raise FileProblem(f"expected comma-separated values, got {what}")
    # arrow removes one mark, and some programs write two
    while content.startswith(_MARK):
        content = content.removeprefix(_MARK)
    _refuse_other_separators(content)
    return content


def parse(
    content: bytes,
    kinds: Mapping[str, pa.DataType],
    names: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
) -> Any:
    """Parse lines into an arrow table, with the given `kinds` of columns and guessed ones for the others.

    With `names` there is no header; `only` restricts the columns. Raises arrow's errors, which show values.
    """
    table = pyarrow.csv.read_csv(
        io.BytesIO(content),
        read_options=pyarrow.csv.ReadOptions(
            block_size=min(max(len(content) + 1, _SMALLEST_BLOCK), _LARGEST_BLOCK), column_names=names
        ),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(strings_can_be_null=True, column_types=kinds, include_columns=only),
    )
    table.column_names  # noqa: B018 - names are decoded here, and may not be UTF-8
    return table


def lines_of(lines: Iterable[str], rows: Sequence[int]) -> list[int]:
    """Return the lines, from 1, in which `rows`, from 0 below the header and ascending, begin."""
    # slow, but only for files that are refused
    reader = csv.reader(lines)
    wanted, found = set(rows), []
    # the header is row -1
    row, begins = -1, 1
    for values in reader:
        # arrow skips empty lines
        if values:
            if row in wanted:
                found.append(begins)
            row += 1
        begins = reader.line_num + 1
        if len(found) == len(wanted):
            break
    return found


def _refuse_other_separators(content: bytes) -> None:
    """Refuse a header without commas that has another separator, and Excel's line that names one."""
    header = content.lstrip(b"\r\n").partition(b"\n")[0].decode("utf-8", errors="replace")
    if of_excel := _OF_EXCEL.match(header):
        other = "" if of_excel[1] == "," else ", and save the file with commas, and decimals with a point"
        raise FileProblem(
            f"expected the columns' names in the first line, got sep={of_excel[1]}, which is for Excel alone: remove "
            f"that line{other}"
        )
    if "," in header:
        return
    for separator, called in _SEPARATORS.items():
        if separator in header:
            raise FileProblem(
                f"expected commas between the columns, got a header that looks separated by {called}; save the file "
                "with commas, and decimals with a point"
            )


def what_is_wrong(lines: Iterable[str]) -> str:
    """Describe the first row whose length is not the header's."""
    rows = csv.reader(lines)
    header: list[str] | None = None
    for row in rows:
        if header is None:
            header = row or None
        elif row and len(row) != len(header):
            return f"expected {len(header)} values per row, as in the header, got {len(row)} in line {rows.line_num}"
    return "cannot read the file as comma-separated values in UTF-8"


# bytes of a file that are parsed at a time, and the most of one line, whose quoted cells may span several
PIECE, _LONGEST = 1 << 25, 1 << 28
# types in arrow's order; times with a zone come after those without
_ORDER = (
    pa.null(), pa.int64(), pa.bool_(), pa.date32(), pa.time32("s"), pa.timestamp("s"), pa.timestamp("ns"), pa.float64(),
    pa.string(), pa.binary(),
)  # fmt: skip


def csv_facts(path: Path, text: Sequence[str]) -> tuple[int, pa.Schema]:
    """Return the number of rows of a CSV file, and its schema; errors are those of `read_csv`."""
    names: list[str] = []
    found: dict[int, set[pa.DataType]] = {}
    rows = 0
    try:
        for piece in _pieces(path):
            table = parse(piece, dict.fromkeys(text, pa.string()), names or None)
            names = table.column_names
            rows += table.num_rows
            for place, kind in enumerate(table.schema.types):
                found.setdefault(place, set()).add(kind)
    except (pa.ArrowException, UnicodeDecodeError):
        # arrow's message would show the values
        with opened_text(path) as lines:
            raise FileProblem(what_is_wrong(lines)) from None
    if not names:
        raise FileProblem("expected a table, got an empty file")
    kinds = [_settled(path, names, place, found[place]) for place in range(len(names))]
    return rows, pa.schema(list(zip(names, kinds, strict=True)))


def write_csv_columns(path: Path, schema: pa.Schema, folder: Path) -> pa.Table:
    """Convert a CSV file with the schema of `csv_facts`; the table lies in an unnamed file of `folder`.

    Raises ConfigError if the folder has too little room.
    """
    kinds = dict(zip(schema.names, schema.types, strict=True))
    try:
        with tempfile.TemporaryFile(prefix="treaty-", dir=folder) as file:
            with pa.ipc.new_file(file, schema) as writer:
                for number, piece in enumerate(_pieces(path)):
                    writer.write_table(parse(piece, kinds, schema.names if number else None))
            file.flush()
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise unusable(folder, path.stat().st_size, error.strerror or str(error)) from None
    return pa.ipc.open_file(pa.py_buffer(content)).read_all()


def lossy_as_ids(path: Path, schema: pa.Schema) -> dict[str, pa.DataType]:
    """Return the types of the columns of numbers whose cells, as ids, are other texts: 007, 1e3."""
    kinds = {field.name: field.type for field in schema if field.type in (pa.int64(), pa.float64())}
    lossy: set[str] = set()
    names: list[str] = []
    for piece in _pieces(path):
        read = parse(piece, kinds, names or None, list(kinds) if names else None)
        # no id has a fraction: most columns of numbers need not be read as text (None: a piece without values)
        kinds = {
            name: kind
            for name, kind in kinds.items()
            if kind == pa.int64() or pc.all(pc.equal(pc.floor(read[name]), read[name])).as_py() is not False
        }
        if not kinds:
            break
        cells = parse(piece, dict.fromkeys(kinds, pa.string()), names or None, list(kinds))
        for name, ids in zip(kinds, cells.columns, strict=True):
            # some are there, and they are none of the numbers that they look like
            if ids.null_count < len(ids) and typed_ids(ids).type == ids.type:
                lossy.add(name)
        names = names or read.column_names
    return {name: kind for name, kind in kinds.items() if name in lossy}


def _settled(path: Path, names: list[str], place: int, found: set[pa.DataType]) -> pa.DataType:
    """Return the type of a column whose pieces have these types."""
    found = found - {pa.null()} or {pa.null()}
    # the caller refuses repeated names
    if len(found) == 1 or len(set(names)) < len(names):
        return found.pop()
    first = max(_ORDER.index(kind) if kind in _ORDER else _ORDER.index(pa.float64()) for kind in found)
    for kind in _ORDER[first:-1]:
        if all(_fits(piece, names, place, kind, number) for number, piece in enumerate(_pieces(path))):
            return kind
    return _ORDER[-1]


def _fits(piece: bytes, names: list[str], place: int, kind: pa.DataType, number: int) -> bool:
    try:
        parse(piece, {names[place]: kind}, names if number else None, [names[place]])
    except pa.ArrowInvalid:
        return False
    return True


def _pieces(path: Path) -> Iterator[bytes]:
    """Yield a file's content in pieces of whole lines; raise FileProblem if it begins like another kind of file."""
    rest, first = b"", True
    with _opened(path) as file:
        while block := file.read(PIECE):
            rest = beginning_of(rest + block) if first else rest + block
            first = False
            if len(rest) > max(_LONGEST, 2 * PIECE):
                raise FileProblem(
                    f"expected lines, got none that ends within {len(rest)} bytes; is a quote not closed?"
                )
            if end := _end_of_lines(np.frombuffer(rest, np.uint8)):
                yield rest[:end]
                rest = rest[end:]
    if rest.strip():
        yield rest


def opened_text(path: Path) -> IO[str]:
    """Open a CSV file, packed or not, for its lines."""
    return io.TextIOWrapper(_opened(path), "utf-8-sig", errors="replace", newline="")


def _opened(path: Path) -> BinaryIO:
    opened = gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")
    return cast(BinaryIO, opened)


@kernel
def _end_of_lines(content: Bytes) -> int:
    """Return where the last whole line ends."""
    # as arrow sees it: a quote at the beginning of a field opens it (34 is ", 44 a comma, 10 and 13 end lines)
    end = 0
    begins, quoted = True, False
    for i in range(content.size - 1):
        at = content[i]
        if quoted:
            quoted = at != 34
            # a doubled quote closes and, as the next one, opens again
            begins = not quoted and content[i + 1] == 34
        elif at == 34 and begins:
            quoted = True
        else:
            if at == 10 or (at == 13 and content[i + 1] != 10):
                end = i + 1
            begins = at == 44 or at == 10 or at == 13
    return end


def files_of(path: Path) -> list[Path]:
    """Return the files of a Parquet table, itself or a folder's in the order of their names; raise FileProblem."""
    if not path.is_dir():
        return [path]
    files = sorted(path.iterdir(), key=lambda file: file.name)
    # a hidden file, half a copy or a second table must not become part of the table, or be missed in it, unnoticed
    strays = [
        file.name
        for file in files
        if file.name.startswith(".") or not (file.is_file() and file.name.lower().endswith(".parquet"))
    ]
    if strays:
        raise FileProblem(
            f"expected a folder of Parquet files alone, got one with {quoted(strays)}; move what is not of the table "
            "elsewhere"
        )
    if not files:
        raise FileProblem("expected a folder of Parquet files, got an empty one")
    return files


def read_parquet(path: Path) -> Any:
    """Read a Parquet file, or a folder of them as one table; raise FileProblem, or arrow's error for a single file."""
    files = files_of(path)
    if files == [path]:
        return pyarrow.parquet.read_table(path, partitioning=None)
    first = _schema_of(path, files)
    schema = pa.schema([pa.field(field.name, field.type) for field in first], first.metadata)
    tables = []
    for file in files:
        with _named(file):
            tables.append(pyarrow.parquet.read_table(file, partitioning=None).cast(schema))
    return pa.concat_tables(tables).unify_dictionaries()


def parquet_facts(path: Path) -> tuple[int, Any]:
    """Return the number of rows and the schema of a Parquet file or folder, without its rows; errors as of reading."""
    files = files_of(path)
    schema = _schema_of(path, files)
    return sum(pyarrow.parquet.read_metadata(file).num_rows for file in files), schema


def _schema_of(path: Path, files: list[Path]) -> Any:
    """Return the schema of all files of a table; refuse a folder whose files differ in it."""
    if files == [path]:
        return pyarrow.parquet.read_schema(path)
    schemas = []
    for file in files:
        with _named(file):
            schemas.append(pyarrow.parquet.read_schema(file))
    _refuse_others(files, schemas)
    return schemas[0]


@contextmanager
def _named(file: Path) -> Iterator[None]:
    """Raise FileProblem, with the file's name, if it cannot be read."""
    try:
        yield
    except (pa.ArrowException, OSError):
        raise FileProblem(
            f"expected a folder of Parquet files, got one whose file {file.name} is damaged, cut off or of another kind"
        ) from None


def _refuse_others(files: list[Path], schemas: list[Any]) -> None:
    """Refuse files whose columns, their order or types differ from those of the first."""
    first = schemas[0]
    for file, schema in zip(files, schemas, strict=True):
        if schema.names == first.names and schema.types == first.types:
            continue
        more = [name for name in schema.names if name not in first.names]
        fewer = [name for name in first.names if name not in schema.names]
        differences = [f"{what} {quoted(names)}" for what, names in (("has also", more), ("lacks", fewer)) if names]
        differences += [
            f"has {name!r} as {schema.field(name).type}, not {first.field(name).type}"
            for name in first.names
            if schema.names.count(name) == first.names.count(name) == 1
            and schema.field(name).type != first.field(name).type
        ]
        how = "; ".join(differences) or "has the columns in another order"
        raise FileProblem(f"expected files with the columns of {files[0].name}, got {file.name}, which {how}")
