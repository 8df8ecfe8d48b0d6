import stat
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treaty.data.reading import read_table
from treaty.errors import ConfigError
from treaty.node.policy import DataSet, Policy
from treaty.node.settings import NodeLimits, PeerSettings, Settings, Web, load_settings
from treaty.runs.job import Member

WHOLE = """
name = "bank"
listen = "0.0.0.0:7700"
folder = "state"
keys = "keys"
max_running = 4
[web]
listen = "127.0.0.1:7780"
[limits]
job_hours = 24
max_queued = 5
[peers.clinic]
address = "clinic.example.org:7700"
[peers.shop]
[data.customers]
table = "customers.parquet"
id = "customer_no"
drop = ["name"]
categorical = ["postcode"]
columns = ["age", "income"]
[data.customers.policy]
peers = ["clinic"]
systems = ["secureboost"]
verbs = ["train", "predict", "explain"]
sums = ["sealed"]
membership = "hidden"
columns = ["age", "income", "late"]
labels = true
consents = ["allow_exact_sums"]
most_alignments = 3
least_rows = 1000
least_min_child_samples = 20
most_recoverable = 0.05
most_epsilon = 1.0
most_epsilon_total = 4
approve = false
[data.payments]
sql = "SELECT no, amount FROM payments"
database = "file:database.uri"
id = "no"
"""


def load(folder: Path, content: str) -> Settings:
    (folder / "node.toml").write_text(content)
    return load_settings(folder / "node.toml")


def test_a_whole_file_is_read_with_absolute_paths(tmp_path: Path) -> None:
    settings = load(tmp_path, WHOLE)
    policy = Policy(
        peers=["clinic"], systems=["secureboost"], verbs=["train", "predict", "explain"], sums=["sealed"],
        membership="hidden", columns=["age", "income", "late"], labels=True, consents=["allow_exact_sums"],
        most_alignments=3, least_rows=1000, least_min_child_samples=20, most_recoverable=0.05,
        most_epsilon=1.0, most_epsilon_total=4.0, approve=False,
    )  # fmt: skip
    state = str(tmp_path / "state")
    customers = DataSet(
        table=str(tmp_path / "customers.parquet"), id="customer_no", drop=["name"], categorical=["postcode"],
        columns=["age", "income"], policy=policy, name="customers", folder=state,
    )  # fmt: skip
    payments = DataSet(
        sql="SELECT no, amount FROM payments", database=f"file:{tmp_path / 'database.uri'}", id="no", name="payments",
        folder=state,
    )  # fmt: skip
    assert settings == Settings(
        name="bank", listen="0.0.0.0:7700", folder=state, keys=str(tmp_path / "keys"), max_running=4,
        web=Web(listen="127.0.0.1:7780"), limits=NodeLimits(job_hours=24.0, max_queued=5),
        peers={"clinic": PeerSettings(address="clinic.example.org:7700"), "shop": PeerSettings()},
        data={"customers": customers, "payments": payments},
    )  # fmt: skip
    assert settings.dialled == {"clinic": "clinic.example.org:7700"}
    assert customers.path == str(tmp_path / "customers.parquet")
    assert payments.path == f"{state}/snapshots/payments.parquet"
    assert payments.store == f"{state}/stores/payments"


def test_little_is_needed_and_nothing_is_allowed_by_default(tmp_path: Path) -> None:
    settings = load(tmp_path, 'name = "bank"\n[data.t]\ntable = "t.csv"\n')
    assert (settings.listen, settings.web, settings.max_running, settings.peers) == (None, None, 2, {})
    assert settings.limits == NodeLimits(job_hours=168.0, max_queued=100)
    policy = settings.data["t"].policy
    assert (policy.peers, policy.consents, policy.approve) == ([], [], True)


def test_a_data_set_may_have_a_cluster(tmp_path: Path) -> None:
    data = load(tmp_path, f'{DATA}table = "t.csv"\ncluster = "ray://10.0.0.5:6379"\ncluster_workers = 8').data["t"]
    assert (data.cluster, data.cluster_workers) == ("ray://10.0.0.5:6379", 8)
    with pytest.raises(ConfigError, match='expected cluster = "ray"'):
        load(tmp_path, f'{DATA}table = "t.csv"\ncluster = "dask"')


def test_data_sets_over_one_file_have_one_ledger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.csv").write_text("a\n1\n")
    (tmp_path / "link.csv").symlink_to("t.csv")
    tables = ('table = "t.csv"', f'table = "{tmp_path}/./link.csv"', 'table = "other.csv"', 'table = "./other.csv"')
    queries = [f'sql = "SELECT a FROM {of} ORDER BY a"\ndatabase = "env:URI"' for of in "ppq"]
    given = 'name = "bank"\n' + "".join(f"[data.d{k}]\n{of}\n" for k, of in enumerate([*tables, *queries]))

    def stores() -> list[str]:
        return [Path(of.store).name for of in load(tmp_path, given).data.values()]

    assert stores() == ["d0", "d0", "d2", "d2", "d4", "d4", "d6"]
    (tmp_path / "state" / "stores" / "d1").mkdir(parents=True)
    assert stores()[:2] == ["d1", "d1"]  # where something was spent
    assert not caplog.messages
    (tmp_path / "state" / "stores" / "d0").mkdir()
    assert stores()[:2] == ["d0", "d1"]
    assert caplog.messages == [
        "data sets 'd0', 'd1' have the same table but separate ledgers: its people pay the budgets of all"
    ]


def test_a_page_is_for_this_machine_alone_or_for_all_by_consent(tmp_path: Path) -> None:
    for listen in ("127.0.0.1:1", "localhost:1", "[::1]:1"):
        load(tmp_path, f'name = "bank"\n[web]\nlisten = "{listen}"')
    assert load(tmp_path, 'name = "bank"\n[web]\nlisten = "0.0.0.0:1"\nopen = true').web == Web(
        listen="0.0.0.0:1", open=True
    )


def test_a_data_set_is_found_by_name(tmp_path: Path) -> None:
    settings = load(tmp_path, WHOLE)
    assert settings.data_set("payments").id == "no"
    with pytest.raises(ConfigError, match=r"got 'paymnts'; it has 'customers', 'payments'") as error:
        settings.data_set("paymnts")
    assert error.value.public == "bank has no data set 'paymnts'"


def test_settings_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory"):
        load_settings(tmp_path / "node.toml")
    with pytest.raises(ConfigError, match=r"Invalid value.* - in the node's settings .*node\.toml"):
        load(tmp_path, "name =")
    (tmp_path / "node.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigError, match=r"in the node's settings"):
        load_settings(tmp_path / "node.toml")


DATA = 'name = "bank"\nlisten = "0.0.0.0:7700"\n[peers.clinic]\n[data.t]\n'
POLICY = f'{DATA}table = "t.csv"\n[data.t.policy]\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", r"the file: lacks the field 'name'"),
        ("name = 5", r"name = 5: expected text, got a whole number"),
        ('name = "-bank"', r"expected a name of 1 to 63"),
        ('nam = "bank"', r"the file has no field 'nam'; did you mean 'name'\?"),
        ('name = "bank"\nleast_rows = 5', r"no field 'least_rows'; it belongs in \[data.NAME.policy\]"),
        ('name = "bank"\nquite_else = 5', r"no field 'quite_else'; it has name, listen"),
        ('name = "bank"\nlisten = "here"', r"listen = 'here': expected host:port"),
        ('name = "bank"\nlisten = "unix:/tmp/x"', r"expected host:port"),
        ('name = "bank"\nlisten = "https://a:1"', r"listen = 'https://a:1': expected host:port without https://"),
        ('name = "bank"\nlisten = "::1:7700"', r"expected an IPv6 address in brackets"),
        ('name = "bank"\nlisten = "here:70000"', r"listen = 'here:70000': expected a port from 0 to 65535"),
        ('name = "bank"\nmax_running = 0', r"max_running = 0: expected a whole number >= 1"),
        ('name = "bank"\nmax_running = "many"', r"expected a whole number, got text"),
        ('name = "bank"\nweb = 5', r"expected \[web\] to be a table, got 5"),
        ('name = "bank"\n[web]\nlisten = "0.0.0.0:1"', r"can be reached from other machines, .*set open = true"),
        ('name = "bank"\n[web]\nlisten = "[::]:1"', r"can be reached from other machines"),
        ('name = "bank"\n[web]\nlisten = "bank.example.org:1"', r"can be reached from other machines"),
        ('name = "bank"\n[web]', r"\[web\] lacks the field 'listen'"),
        ('name = "bank"\nlisten = "a:1"\n[web]\nlisten = "a:1"', r"expected `listen` and \[web\] listen to differ"),
        ('name = "bank"\n[limits]\njob_hours = 0', r"\[limits\] job_hours = 0: expected a number > 0"),
        ('name = "bank"\n[limits]\njob_hours = nan', r"\[limits\] job_hours = nan"),
        ('name = "bank"\npeers = ["clinic"]', r"expected tables \[peers.NAME\], got peers = \['clinic'\]"),
        ('name = "bank"\n[peers]\nclinic = 5', r"expected \[peers.clinic\] to be a table"),
        ('name = "bank"\n[peers."a b"]', r"\[peers.a b\] expected a name"),
        ('name = "bank"\n[peers.clinic]', r"\[peers.clinic\] needs an address, or this node `listen`"),
        ('name = "bank"\n[peers.clinic]\naddres = "a:1"', r"\[peers.clinic\] .* did you mean 'address'\?"),
        ('name = "bank"\n[peers.clinic]\naddress = "a:0"', r"expected a port from 1 to 65535"),
        ('name = "bank"\n[peers.bank]\naddress = "a:1"', r"\[peers.bank\] is this node itself"),
        ('name = "bank"\n[data."../x"]\ntable = "t.csv"', r"\[data.../x\] expected a name"),
        (DATA, r"\[data.t\] expected a table or a query \(sql\), got neither"),
        (f'{DATA}table = "t.csv"\nsql = "SELECT 1"', r"\[data.t\] expected a table or a query \(sql\), got both"),
        (f'{DATA}table = "t.xlsx"', r"\[data.t\] .*expected a file ending in .csv"),
        (f'{DATA}table = ["t.csv"]', r"\[data.t\] table = \['t.csv'\]: expected text, got a list"),
        (f'{DATA}table = "t.csv"\nname = "u"', r"\[data.t\] has no field 'name'; it belongs at the top"),
        (f'{DATA}table = "t.csv"\ndropp = ["x"]', r"\[data.t\] has no field 'dropp'; did you mean 'drop'\?"),
        (f'{DATA}table = "t.csv"\ndrop = "x"', r"\[data.t\] drop = 'x': expected a list, got text"),
        (f'{DATA}table = "t.csv"\ndrop = ["x"]\ncolumns = ["x"]', r"to use or to drop, got 'x' in both"),
        (f'{DATA}table = "t.csv"\ndatabase = "env:X"', r"expected sql and database .* together"),
        (f'{DATA}sql = "SELECT 1"\nid = "x"', r"expected sql and database .* together"),
        (f'{DATA}sql = "SELECT 1"\ndatabase = "env:X"', r"\[data.t\] expected ORDER BY"),
        (f'{DATA}sql = "DROP TABLE x"\ndatabase = "env:X"\nid = "x"', r"\[data.t\] .*got DROP"),
        (f'{DATA}sql = "SELECT 1"\ndatabase = "env:X"\nid = "x"\nsql_seconds = 0', r"sql_seconds = 0: expected"),
        (f"{POLICY}least_row = 5", r"\[data.t.policy\] has no field 'least_row'; did you mean 'least_rows'\?"),
        (f"{POLICY}least_rows = -1", r"\[data.t.policy\] least_rows = -1: expected a whole number >= 1"),
        (f'{POLICY}approve = "no"', r"\[data.t.policy\] approve = 'no': expected true or false, got text"),
        (f'{POLICY}verbs = ["trian"]', r"verbs\[0\] = \['trian'\]: expected one of train, predict, explain"),
        (f'{POLICY}sums = ["exact"]', r"expected one of open, sealed"),
        (f'{POLICY}membership = "known"', r"expected .*hidden"),
        (f'{POLICY}consents = ["all"]', r"expected one of paper, allow_insecure"),
        (f'{POLICY}peers = ["clinik"]', r"'clinik', which is no peer of this node; did you mean 'clinic'\?"),
        (f'{POLICY}peers = ["other"]', r"'other', which is no peer of this node; declare \[peers.other\]"),
        (f'{POLICY}systems = ["secure-boost"]', r"no system between parties; did you mean 'secureboost'\?"),
        (f'{POLICY}systems = ["pooled"]', r"'pooled', which is no system between parties"),
        (f'{POLICY}systems = ["no.such.module:SYSTEM"]', r"cannot import the system"),
        (f"{POLICY}most_recoverable = 5", r"most_recoverable = 5: expected a number <= 1.0"),
        (f"{POLICY}most_epsilon = nan", r"most_epsilon = nan"),
        (f'{DATA}table = "t.csv"\ncolumns = ["x", "y"]\n[data.t.policy]\ncolumns = ["x"]', r"columns lacks 'y'"),
        (f'{DATA}table = "t.csv"\npolicy = "none"', r"expected \[data.t.policy\] to be a table, got 'none'"),
    ],
)
def test_what_is_wrong_is_said_with_its_table_and_field(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        load(tmp_path, content)
    assert str(error.value).endswith(f"- in the node's settings {tmp_path / 'node.toml'}")


@pytest.mark.parametrize("uri", ["postgresql://bank:geheim@db/x", "host=db password=geheim"])
def test_a_uri_in_the_file_is_refused_with_advice_and_not_shown(tmp_path: Path, uri: str) -> None:
    content = f'{DATA}sql = "SELECT 1"\nid = "x"\ndatabase = "{uri}"'
    with pytest.raises(ConfigError, match=r'"env:NAME".* or "file:PATH".* got a URI, whose password') as error:
        load(tmp_path, content)
    assert "geheim" not in str(error.value)


def test_a_folder_may_be_a_table_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "t.2026").mkdir()
    assert load(tmp_path, f'{DATA}table = "t.2026"').data["t"].path == str(tmp_path / "t.2026")


def test_a_party_has_its_own_fields_of_the_data_set() -> None:
    data_set = DataSet(
        table="/t.csv", id="no", columns=["x", "y"], drop=["name"], categorical=["y"], name="t", folder="/state"
    )
    proposed = Member(table="t", id="else", drop=["z"], categorical=["w", "y"], role="edge")
    found = data_set.member(proposed, aligned=True)
    assert found == Member(
        table="/t.csv", id="no", columns=["x", "y"], drop=["name", "z"], categorical=["y", "w"], role="edge"
    )
    assert data_set.member(proposed, aligned=False).drop == ["name", "no", "z"]  # ids are no feature
    assert data_set.member(Member(columns=["x"]), aligned=True).columns == ["x"]
    without = DataSet(table="/t.csv", name="t", folder="/state")
    assert without.member(Member(id="else"), aligned=True).id == "else"


def test_fetching_a_file_leaves_it_where_it_is(tmp_path: Path) -> None:
    settings = load(tmp_path, f'{DATA}table = "t.csv"')
    assert settings.data["t"].fetch() == tmp_path / "t.csv"


def test_a_query_is_fetched_to_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def fetch(uri: str, query: str, to: Path, **given: object) -> int:
        asked.update(given, uri=uri, query=query)
        to.parent.mkdir(parents=True)
        to.write_text("id,x\n1,2\n")
        return 1

    monkeypatch.setattr("treaty.node.policy.fetch", fetch)
    content = f'{DATA}sql = "SELECT 1"\nid = "no"\ncategorical = ["x"]\ndatabase = "file:uri"\nsql_seconds = 5'
    data_set = load(tmp_path, content).data["t"]
    with pytest.raises(ConfigError, match=r"cannot read a database's URI: No such file"):
        data_set.fetch()
    (tmp_path / "uri").write_text("postgresql://bank:geheim@db/x")
    (tmp_path / "uri").chmod(stat.S_IRUSR)
    assert data_set.fetch() == Path(data_set.path)
    assert asked == {
        "uri": "postgresql://bank:geheim@db/x", "query": "SELECT 1", "text": ["no", "x"], "seconds": 5.0,
        "what": "data.t",
    }  # fmt: skip
    assert data_set.fetch(tmp_path / "other" / "t.csv") == tmp_path / "other" / "t.csv"
    assert read_table(tmp_path / "other" / "t.csv").num_rows == 1


NAMES = [*Settings.__struct_fields__, *DataSet.__struct_fields__, *Policy.__struct_fields__, "x"]
PLAIN = st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TABLES = st.recursive(
    PLAIN, lambda of: st.lists(of, max_size=2) | st.dictionaries(st.sampled_from(NAMES), of, max_size=3), max_leaves=8
)


@given(st.dictionaries(st.sampled_from(NAMES), TABLES, max_size=3) | TABLES)
def test_any_file_is_read_or_refused_in_words(tmp_path_factory: pytest.TempPathFactory, content: object) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    fields = content if isinstance(content, dict) else {"data": {"t": {"policy": content}}}
    lines = [f"{name} = {toml(value)}\n" for name, value in ({"name": "bank"} | fields).items()]
    file.write_text("".join(lines), "utf-8", "surrogatepass")
    with suppress(ConfigError):
        assert isinstance(load_settings(file), Settings)


def toml(value: object) -> str:
    """Return a value in the words of a TOML file, which its texts may not be."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {toml(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def test_a_tilde_is_the_users_own_folder_and_a_byte_order_mark_is_taken_off(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    settings = load(tmp_path, f'\ufeffkeys = "~/keys"\nfolder = "~/state"\n{DATA}table = "~/t.csv"')
    assert (settings.keys, settings.folder, settings.data["t"].table) == (
        "/home/me/keys", "/home/me/state", "/home/me/t.csv",
    )  # fmt: skip
