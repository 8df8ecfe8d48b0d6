import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from urllib.parse import quote

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treaty.data.reading import read_table
from treaty.data.sql import check_query, check_source, database_uri, fetch
from treaty.errors import ConfigError, DataError

NASTY = 'a"; drop table x; --'
PASSWORD = "ge/h@im ö%"
URI = "postgresql://bank:geheim@127.0.0.1:1/customers"


def binaries() -> Path | None:
    """Return the folder of PostgreSQL's programs, the newest."""
    found = shutil.which("initdb")
    installed = [Path(found).parent] if found else []
    installed += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: float(folder.parent.name))
    return next((folder for folder in reversed(installed) if (folder / "initdb").exists()), None)


@pytest.fixture(scope="module")
def uri() -> Iterator[str]:
    """Start a PostgreSQL server with a password; it refuses to run as root, so an unprivileged user does."""
    programs = binaries()
    if programs is None:
        pytest.skip("PostgreSQL is not installed here")
    as_user = []
    if os.geteuid() == 0:
        if shutil.which("runuser") is None:
            pytest.skip("PostgreSQL does not run as root, and there is no runuser here")
        as_user = ["runuser", "-u", "nobody", "--"]
    folder = Path(tempfile.mkdtemp(prefix="treaty-postgres-"))
    (folder / "password").write_text(PASSWORD + "\n")
    if as_user:
        for path in (folder, folder / "password"):
            shutil.chown(path, "nobody")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(*command: str) -> None:
        done = subprocess.run([*as_user, *command], cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr

    data = str(folder / "data")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    try:
        run(str(programs / "initdb"), "-D", data, "-U", "bank", "-A", "scram-sha-256", "-E", "UTF8", "--no-locale",
            "-N", f"--pwfile={folder / 'password'}")  # fmt: skip
        run(str(programs / "pg_ctl"), "-D", data, "-w", "-l", str(folder / "log"), "-o", options, "start")
        yield f"postgresql://bank:{quote(PASSWORD, safe='')}@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run(
            [*as_user, str(programs / "pg_ctl"), "-D", data, "-m", "immediate", "stop"], cwd=folder, timeout=60,
            capture_output=True,
        )  # fmt: skip
        shutil.rmtree(folder, ignore_errors=True)


def test_a_query_is_kept_with_every_kind_of_value(uri: str, tmp_path: Path) -> None:
    to = tmp_path / "snapshots" / "s.parquet"
    rows = fetch(
        uri,
        """SELECT * FROM (VALUES
             (1, 1.5::numeric(8, 2), 12345678901234567890::numeric, 'Łódź ☃'::text, DATE '2020-02-29',
              TIMESTAMP '2020-01-01 12:00', TIMESTAMPTZ '2020-01-01 12:00+02', true, 0.25::float8,
              'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid, 'x'::char(1)),
             (2, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
             (3, 'NaN', 7, '', DATE '1900-01-01', TIMESTAMP '1900-01-01', TIMESTAMPTZ '1900-01-01 00:00+00', false,
              -0.5, 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12', 'y')
           ) AS t(no, amount, long_id, city, born, seen, seen_at, late, share, who, letter) ORDER BY no -- the end""",
        to,
        text=["long_id"],
    )
    assert rows == 3
    assert to.stat().st_mode & 0o777 == 0o600
    assert to.parent.stat().st_mode & 0o777 == 0o700
    table = read_table(to)
    assert [str(kind) for kind in table.schema.types] == [
        "int32", "double", "string", "string", "date32[day]", "timestamp[us]", "timestamp[us, tz=UTC]", "bool",
        "double", "string", "string",
    ]  # fmt: skip
    first, second, third = table.to_pylist()
    assert first == {
        "no": 1, "amount": 1.5, "long_id": "12345678901234567890", "city": "Łódź ☃", "born": date(2020, 2, 29),
        "seen": datetime(2020, 1, 1, 12), "seen_at": datetime(2020, 1, 1, 10, tzinfo=UTC), "late": True,
        "share": 0.25, "who": "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "letter": "x",
    }  # fmt: skip
    assert set(second.values()) == {2, None}
    assert third["amount"] != third["amount"]  # not a number
    assert third["city"] == ""


def test_names_of_columns_are_names_whatever_is_in_them(uri: str, tmp_path: Path) -> None:
    quoted = NASTY.replace('"', '""')
    fetch(uri, f"""SELECT 1 AS id, 2 AS "{quoted}", 3 AS "Spalte ü;" ;""", tmp_path / "s.parquet")
    assert read_table(tmp_path / "s.parquet").to_pydict() == {"id": [1], NASTY: [2], "Spalte ü;": [3]}


def test_a_long_result_comes_in_batches_and_in_order(uri: str, tmp_path: Path) -> None:
    columns = "g AS id, g::numeric / 4 AS x, repeat('ab', 150) || g AS long"
    query = f"SELECT {columns} FROM generate_series(1, 100000) g ORDER BY g"
    assert fetch(uri, query, tmp_path / "s.parquet") == 100_000
    assert pyarrow.parquet.ParquetFile(tmp_path / "s.parquet").num_row_groups > 1
    table = read_table(tmp_path / "s.parquet", columns=["id", "x"])
    assert table["id"].to_pylist() == list(range(1, 100_001))
    assert table["x"][99_999].as_py() == 25_000.0


def test_a_snapshot_is_replaced_by_a_whole_one_only(uri: str, tmp_path: Path) -> None:
    to = tmp_path / "s.parquet"
    fetch(uri, "SELECT 1 AS id", to)
    with pytest.raises(ConfigError, match="division by zero"):
        fetch(uri, "SELECT 1 / (90000 - g) AS id FROM generate_series(1, 100000) g", to)
    with pytest.raises(DataError, match="at least one row"):
        fetch(uri, "SELECT 1 AS id WHERE false", to)
    assert read_table(to).to_pydict() == {"id": [1]}
    fetch(uri, "SELECT 2 AS id", to)
    assert read_table(to).to_pydict() == {"id": [2]}
    assert [path.name for path in tmp_path.iterdir()] == ["s.parquet"]


@pytest.mark.parametrize(
    "query",
    [
        "WITH gone AS (DELETE FROM t RETURNING id) SELECT * FROM gone",
        "WITH more AS (INSERT INTO t VALUES (9) RETURNING id) SELECT * FROM more",
        "SELECT id INTO u FROM t",
        "SELECT nextval('s') AS id",
        "SELECT set_config('transaction_read_only', 'off', false) AS id",
    ],
)
def test_nothing_can_be_written(uri: str, tmp_path: Path, query: str) -> None:
    dbapi = pytest.importorskip("adbc_driver_postgresql.dbapi")
    with dbapi.connect(uri) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE TABLE IF NOT EXISTS t AS SELECT 1 AS id")
        cursor.execute("CREATE SEQUENCE IF NOT EXISTS s")
        connection.commit()
    with pytest.raises(ConfigError, match=r"read-only|before any query"):
        fetch(uri, query, tmp_path / "s.parquet")
    fetch(uri, "SELECT id FROM t", tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet").to_pydict() == {"id": [1]}


def test_a_query_has_a_time_limit(uri: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match="statement timeout"):
        fetch(uri, "SELECT g AS id, pg_sleep(0.01)::text AS x FROM generate_series(1, 6000) g", tmp_path / "s.parquet",
              seconds=0.5)  # fmt: skip
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT 1 AS a, 2 AS a", "data.x: expected unique column names, .* 'a'"),
        ("SELECT 5::money AS owed", "data.x: column 'owed' is of type money, .*cast it in the query"),
        ("SELECT interval '1 day' AS age", "data.x: column 'age' is of type interval"),
        ("SELECT ARRAY[1] AS list", "data.x: column 'list' is of type _int4"),
        ("SELECT 'x'::bytea AS raw", "data.x: column 'raw' is of type bytea"),
    ],
)
def test_columns_that_no_table_has_are_named(uri: str, tmp_path: Path, query: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        fetch(uri, query, tmp_path / "s.parquet", what="data.x")
    assert not list(tmp_path.iterdir())


def test_errors_do_not_show_the_password(uri: str, tmp_path: Path) -> None:
    wrong = uri.replace("bank:", "bank:x")
    elsewhere = uri.rpartition("/")[0]
    for given_uri, query, said in [
        (wrong, "SELECT 1", "password authentication failed"),
        (elsewhere + "/nowhere", "SELECT 1", "does not exist"),
        (f"{elsewhere}/{quote(PASSWORD, safe='')}", "SELECT 1", "does not exist"),
        (uri, "SELECT * FROM nowhere", 'relation "nowhere" does not exist'),
        (uri + "?sslmode=verify-full&sslpassword=geheim", "SELECT 1", "SSL|root certificate"),
        (URI, "SELECT 1", "Connection refused"),
        (f"{URI}?geheim=1", "SELECT 1", "parameter"),
        (uri, f"SELECT '{PASSWORD}'::int", "invalid input syntax"),
    ]:
        with pytest.raises(ConfigError, match=said) as error:
            fetch(given_uri, query, tmp_path / "s.parquet")
        assert PASSWORD not in str(error.value)
        assert quote(PASSWORD, safe="") not in str(error.value)
        assert "geheim" not in str(error.value)
        assert error.value.__suppress_context__  # a traceback would show it


@pytest.mark.parametrize(
    "uri",
    [
        "mysql://bank:geheim@db/x",
        "host=db password=geheim",
        "geheim",
        "",
        "postgresql://bank:ge@heim@db/x",
        "postgresql://bank:ge/heim@db/x",
        "postgresql://bank:ge?heim@db/x",
        "postgresql://bank:ge#heim@db/x",
        "postgresql://bank:geheim%zz@db/x",
        "postgresql://bank:ge heim@db/x",
        "postgresql://bank:geheim@[db/x",
    ],
)
def test_a_uri_that_could_be_read_in_two_ways_is_refused_and_not_shown(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BANK_DB", uri)
    with pytest.raises(ConfigError, match="expected") as error:
        database_uri("env:BANK_DB")
    assert "heim" not in str(error.value)


def test_a_uri_comes_from_the_environment_or_a_file_of_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BANK_DB", URI)
    assert database_uri("env:BANK_DB") == URI
    with pytest.raises(ConfigError, match="variable OTHER_DB of the environment, got nothing"):
        database_uri("env:OTHER_DB")
    file = tmp_path / "uri"
    with pytest.raises(ConfigError, match=r"No such file.*uri"):
        database_uri(f"file:{file}")
    file.write_text(f"{URI}\n")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"got mode 640; chmod 600 it - at .*uri"):
        database_uri(f"file:{file}")
    file.chmod(0o600)
    assert database_uri(f"file:{file}") == URI
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="it is no text"):
        database_uri(f"file:{file}")
    for source in [URI, "host=db password=geheim", "env:", "env:A-B", "file:", "vault:x", ""]:
        with pytest.raises(ConfigError, match=r'expected database to be "env:NAME"') as error:
            check_source(source)
        assert "geheim" not in str(error.value)


def test_without_the_driver_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adbc_driver_postgresql.dbapi", None)
    with pytest.raises(ConfigError, match=r"pip install 'treaty-learn\[sql\]'"):
        fetch(URI, "SELECT 1", tmp_path / "s.parquet")


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("SELECT 1", "SELECT 1"),
        ("select 1;", "select 1"),
        ("\nSELECT 1 ; ; -- the end; really\n", "\nSELECT 1 "),
        ("-- first;\n/* ; /* nested ; */ */ SELECT 1 -- ;", "-- first;\n/* ; /* nested ; */ */ SELECT 1 -- ;"),
        ("SELECT ';', E'\\';', 'it''s;', $$;$$, $t$ ; $$ ; $t$, \";\", \"a\"\";\"", None),
        ("WITH a AS (SELECT 1) SELECT * FROM a", None),
    ],
)
def test_one_query_is_taken_without_its_semicolon(query: str, found: str | None) -> None:
    assert check_query(query, ordered=False) == f"{found or query}\n"


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("", "got nothing"),
        ("-- SELECT 1", "got nothing"),
        (";", "got nothing"),
        ("SELECT 1; DROP TABLE x", "several"),
        ("SELECT 1; SELECT 2;", "several"),
        ("SELECT 'a\\'; DROP TABLE x; --'", "several"),  # the backslash escapes nothing: the text ends there
        ("DELETE FROM x", "got DELETE"),
        ("COPY x TO PROGRAM 'sh'", "got COPY"),
        ("EXPLAIN ANALYZE SELECT 1", "got EXPLAIN"),
        ("(SELECT 1)", "got something else"),
        ("SELECT 'abc", "expected the end of what begins with '"),
        ('SELECT "abc', 'expected the end of what begins with "'),
        ("SELECT $$abc", "expected the end of a text"),
        ("SELECT /* abc", "expected the end of a comment"),
    ],
)
def test_anything_but_one_query_is_refused(query: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("$", r"\$")):
        check_query(query, ordered=False)


@pytest.mark.parametrize(
    ("query", "ordered"),
    [
        ("SELECT * FROM t ORDER BY a, b", True),
        ("select * from t order /* by what */ by a limit 5", True),
        ("WITH a AS (SELECT 1 AS x) SELECT x FROM a ORDER BY x", True),
        ("SELECT * FROM t", False),
        ("WITH a AS (SELECT 1 AS x ORDER BY x) SELECT x FROM a", False),
        ("SELECT row_number() OVER (ORDER BY a) FROM t", False),
        ("SELECT 'ORDER BY' FROM t", False),
        ("SELECT a -- ORDER BY a\n FROM t", False),
        ('SELECT "ORDER", "BY" FROM t', False),
    ],
)
def test_rows_without_ids_need_an_order(query: str, ordered: bool) -> None:
    check_query(query, ordered=False)
    if ordered:
        check_query(query, ordered=True)
    else:
        with pytest.raises(ConfigError, match="expected ORDER BY"):
            check_query(query, ordered=True)


@given(st.text(st.sampled_from("ab';\"$-/*\\E()\n "), max_size=30))
def test_any_text_is_taken_or_refused_in_words(text: str) -> None:
    try:
        found = check_query(f"SELECT {text}", ordered=False)
    except ConfigError:
        return
    assert found.startswith("SELECT")


@given(st.text(max_size=40))
def test_any_value_can_stand_in_a_text_or_a_name(value: str) -> None:
    text, name = value.replace("'", "''"), value.replace('"', '""')
    query = f"""SELECT '{text}' AS "{name}" FROM t"""
    assert check_query(query, ordered=False) == f"{query}\n"
