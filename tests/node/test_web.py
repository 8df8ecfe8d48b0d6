"""The node's page: what it shows, that it shows names as names, and that nothing can be changed or asked by others."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from html import unescape

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from html_pages import Parsed
from node.hostile import is_hung_up
from node.made_up import TITLES, describe, made_up
from pace import within
from treaty.errors import ConfigError
from treaty.node import web
from treaty.node.job_views import JobView, Progress
from treaty.node.store import JobRow, Store

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"
RUNNING = list(TITLES)[1]


@pytest.fixture
def store(tmp_path):
    with made_up(tmp_path / "state") as store:
        yield store


@pytest.fixture
def client(store):
    with TestClient(web.app(store, "clinic", describe), base_url="http://127.0.0.1") as client:
        yield client


def test_the_page_shows_jobs_by_what_is_to_be_done(client):
    sections = Parsed(client.get("/").text).sections
    assert list(sections) == ["to-approve", "under-way", "ended", "models", "peers"]
    asked = sections["to-approve"]
    for said in (
        TITLES["01" * 16],
        "bank proposed",
        "bank learns which of its rows",
        "9f3c2a11" * 8,
        "clinic approved",
    ):
        assert said in asked
    assert "refused least_rows: 812 rows, at least 1,000 are asked for" in asked
    going = sections["under-way"]
    assert "23 of 60 trees, about 4 minutes left" in going
    assert "telco is not connected; goes on from tree 12 when it is" in going
    assert "learns" not in going  # on the job's own page
    assert "failed" in sections["ended"]
    assert "clinic: its table has other ids" in sections["ended"]
    assert f"{TITLES['d4' * 16]} " in sections["models"]
    assert "· clinic.part" in sections["models"]
    assert "/var/lib" not in client.get("/").text
    assert "telco not connected since" in sections["peers"]


def test_a_node_of_which_nothing_is_known_says_so(tmp_path):
    with Store(tmp_path) as store, TestClient(web.app(store, "bank", describe), base_url="http://localhost") as client:
        sections = Parsed(client.get("/").text).sections
    assert sections["to-approve"].endswith("No job waits for an approval. ")
    assert all(" no " in said.lower() for said in sections.values())


def test_a_job_has_a_page_of_its_own(client):
    page = client.get(f"/jobs/{RUNNING}").text
    Parsed(page)
    for said in (TITLES[RUNNING], "clinic: 1.2 MB sent, 89.0 MB received", "telco: 800 Bytes sent, 0 Bytes received"):
        assert said in page
    for absent in ("nothing", RUNNING[:8], "", "%2e%2e", "%3Cscript%3E"):
        assert client.get(f"/jobs/{absent}").status_code == 404


def test_the_file_of_a_model_is_on_the_page_of_its_job(client):
    assert "<code>/var/lib/node/models/d4/clinic.part</code>" in client.get(f"/jobs/{'d4' * 16}").text


@pytest.mark.parametrize("fine", [True, False])
def test_a_waiting_proposal_has_the_commands_to_copy(store, fine):
    def of(job: JobRow) -> JobView:
        return replace(describe(job), verdict=[(True, "peers: bank may take part"), (fine, "rows: 812")])

    where = "/etc/our nodes/node.toml"
    with TestClient(web.app(store, "clinic", of, node=where), base_url="http://localhost") as client:
        for path in ("/", f"/jobs/{'01' * 16}"):
            text = unescape(client.get(path).text)
            commands = re.findall(r'<code class="command">([^<]+)</code>', text)
            approve, reject = (f"treaty {verb} 010101010101 --node '{where}'" for verb in ("approve", "reject"))
            assert commands == [*([approve] if fine else []), f'{reject} --reason "..."']
            assert ("policy refuses the job" in text) == (not fine)
        # it does not wait for an approval
        assert "treaty approve" not in client.get(f"/jobs/{RUNNING}").text


def test_disk_and_budgets_are_shown(store):
    usage = {"Privacy budget": {"payments": "epsilon 3 spent per person", HOSTILE: HOSTILE}, "Disk": {}}
    with TestClient(web.app(store, "clinic", describe, usage=lambda: usage), base_url="http://localhost") as client:
        text = client.get("/").text
    sections = Parsed(text).sections
    assert sections["privacy-budget"].startswith("Privacy budget payments epsilon 3 spent per person <script>")
    assert sections["disk"] == "Disk There is no entry. "
    assert "<script" not in text


def test_the_page_is_shown_anew_until_somebody_wants_it_as_it_is(client):
    refreshing = ("meta", {"http-equiv": "refresh", "content": "5"})
    assert refreshing in Parsed(client.get("/").text).tags
    assert refreshing not in Parsed(client.get("/?still").text).tags
    assert refreshing not in Parsed(client.get(f"/jobs/{'d4' * 16}").text).tags  # it has ended


def test_names_are_shown_as_names(tmp_path):
    def of(job: JobRow) -> JobView:
        some = [HOSTILE]
        return JobView(
            HOSTILE, {HOSTILE: HOSTILE}, HOSTILE, Progress(1, 2, HOSTILE), some, [(True, HOSTILE)], some, {HOSTILE: 1}
        )

    with Store(tmp_path) as store, TestClient(web.app(store, HOSTILE, of), base_url="http://localhost") as client:
        for state in ("proposed", "running", "failed", "finished"):
            store.add_job(JobRow(f"{state}{HOSTILE}", b"", b"", HOSTILE, HOSTILE, state, HOSTILE))
        store.set_peer(HOSTILE, True, HOSTILE)
        known = (
            "html head meta title style body header h1 h2 h3 h4 p main section article ul li a span code time strong"
        )
        store.add_job(JobRow("<script>", b"", b"", HOSTILE, HOSTILE, "proposed", HOSTILE))
        of_one = client.get("/jobs/%3Cscript%3E").text
        assert "What parties would learn" in of_one
        for page in (client.get("/").text, of_one):
            assert "<script" not in page
            assert "<img" not in page
        tags = Parsed(client.get("/").text).tags
        assert {name for name, _ in tags} == {*known.split(), "progress", "footer"}
        allowed = {
            "class",
            "id",
            "href",
            "value",
            "max",
            "aria-label",
            "aria-labelledby",
            "datetime",
            "lang",
            "charset",
        }
        assert {key for _, attributes in tags for key in attributes} <= {*allowed, "name", "content", "http-equiv"}
        links = [attributes["href"] or "" for name, attributes in tags if name == "a"]
        assert len(links) == 8  # two of them to jobs that have left a model
        assert all(re.fullmatch(r"\?still|/jobs/[\w%.-]+", link) for link in links)
        peer_up = client.get("/metrics").text
        labels = [
            dict(sample.labels) for family in text_string_to_metric_families(peer_up) for sample in family.samples
        ]
        assert {"peer": HOSTILE} in labels


@pytest.mark.parametrize("path", ["/", f"/jobs/{RUNNING}", "/metrics", "/health"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(client, path, method):
    assert client.request(method, path).status_code == 405


@pytest.mark.parametrize("path", ["/", "/metrics", "/health", "/nothing"])
def test_a_browser_may_load_and_run_nothing(client, path):
    headers = client.get(path).headers
    assert headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


def test_a_page_elsewhere_whose_name_leads_here_is_refused(store, client):
    for host, code in (
        ("127.0.0.1:7780", 200),
        ("LOCALHOST", 200),
        ("[::1]:80", 200),
        ("[::1]", 200),
        ("evil.example", 400),
        ("", 400),
    ):
        assert client.get("/", headers={"host": host}).status_code == code, host
    with TestClient(web.app(store, "clinic", describe, hosts=None), base_url="http://any.example") as anywhere:
        assert anywhere.get("/health").json() == {"status": "ok"}


def test_metrics_are_those_of_the_database(client, store):
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}

    def of(name: str, **labels: str) -> float:
        return next(s.value for s in families[name].samples if labels.items() <= s.labels.items())

    assert of("treaty_jobs", state="proposed") == 1
    assert of("treaty_jobs", state="rejected") == 0
    assert (of("treaty_job_rounds_done", job=RUNNING), of("treaty_job_rounds_planned", job=RUNNING)) == (23, 60)
    assert (of("treaty_peer_up", peer="clinic"), of("treaty_peer_up", peer="telco")) == (1, 0)
    assert of("treaty_audit_entries") == len(TITLES)
    assert of("treaty_node_info", node="clinic") == 1
    assert of("process_resident_memory_bytes") > 1e6
    assert of("process_open_fds") > 1


def test_messages_of_jobs_that_have_ended_are_read_once(store):
    described = []

    def counted(job: JobRow) -> JobView:
        described.append(job.state)
        return describe(job)

    with TestClient(web.app(store, "clinic", counted), base_url="http://localhost") as client:
        first = client.get("/metrics").text
        assert 'treaty_message_bytes_total{direction="sent",peer="clinic"} 3.703701e+06' in first
        assert sorted(described) == sorted(job.state for job in store.jobs())
        described.clear()
        assert client.get("/metrics").text.count("3.703701e+06") == 1
        assert set(described) == {"proposed", "running", "waiting", "queued"}


def test_a_database_that_cannot_be_used_is_said_without_where_it_is(store, client):
    store.connection.execute("DROP TABLE audit")
    for path in ("/", "/health"):
        answer = client.get(path)
        assert answer.status_code == 503
        assert str(store.path) not in answer.text


def test_only_the_newest_of_many_jobs_that_have_ended_are_shown(client, store):
    for number in range(40):
        store.add_job(replace(store.job("d4"), id=f"{number:032x}", created=1e9 + number, changed=1e9 + number))
    assert Parsed(client.get("/").text).sections["ended"].count("finished") == web.ENDED - 2
    assert [job.changed for job in store.jobs({"finished"}, newest=1)] == [store.job("d4").changed]


@pytest.fixture
def served(store):
    """Return the address of the page, served."""
    serving = web.Serving(store, "clinic", describe, "127.0.0.1:0")
    yield f"http://127.0.0.1:{serving.port}"
    serving.stop()


def test_it_is_served_at_an_address_that_nobody_has(served, store):
    answer = httpx2.get(f"{served}/health")
    assert (answer.json(), "server" in answer.headers) == ({"status": "ok"}, False)
    assert httpx2.get(f"{served}/", headers={"host": "evil.example"}).status_code == 400
    taken = served.removeprefix("http://")
    with pytest.raises(ConfigError, match=f"cannot listen at {taken}: Address already in use"):
        web.Serving(store, "clinic", describe, taken)


def flooded(connection, request):
    while True:
        connection.sendall(request)


def test_connections_without_progress_are_closed(monkeypatch, store):
    """One says nothing, one begins a request and another does not read what it asked for again and again."""
    monkeypatch.setattr(web, "IDLE", 0.3)
    serving, host = web.Serving(store, "clinic", describe, "127.0.0.1:0"), b"Host: localhost\r\n"
    try:
        with ExitStack() as held:
            silent, begun, deaf = (
                held.enter_context(socket.create_connection(("127.0.0.1", serving.port))) for _ in range(3)
            )
            begun.sendall(b"GET / HTTP/1.1\r\n" + host)
            deaf.settimeout(within(20))
            with pytest.raises(ConnectionError):  # until nothing more is taken from it, and it is closed
                flooded(deaf, b"GET / HTTP/1.1\r\n" + host + b"\r\n")
            assert is_hung_up(silent, within(5))
            assert is_hung_up(begun, within(5))
        for _ in range(3):
            assert httpx2.get(f"http://127.0.0.1:{serving.port}/health").status_code == 200
    finally:
        serving.stop()


@pytest.mark.parametrize(("listen", "refused"), [("[::1]:0", True), ("localhost:0", True), ("0.0.0.0:0", False)])
def test_only_where_others_reach_it_it_answers_to_any_name(store, listen, refused):
    serving = web.Serving(store, "clinic", describe, listen)
    try:
        url = f"http://{listen.removesuffix(':0').replace('0.0.0.0', '127.0.0.1')}:{serving.port}/health"
        assert httpx2.get(url).status_code == 200
        assert httpx2.get(url, headers={"host": "node.example"}).status_code == (400 if refused else 200)
    finally:
        serving.stop()


def test_a_browser_takes_the_page_with_its_style(served, tmp_path):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium here")
    quiet = "no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update"
    flags = [f"--{flag}" for flag in (*quiet.split(), "disable-sync", f"user-data-dir={tmp_path / 'browser'}")]
    command = [chromium, "--headless", *flags, "--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom"]
    done = subprocess.run([*command, f"{served}/?still"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    Parsed(done.stdout)
    assert TITLES[RUNNING] in done.stdout
    assert web.page_template()[1].strip().splitlines()[-1] in done.stdout
    assert "Content Security Policy" not in done.stderr  # as it says on its console of a style that the header forbids
