"""`treaty serve`: the command, the socket, TLS, and its end."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pace import within
from serving.models import GOOD, active_part, whole
from treaty.cli.main import app
from treaty.errors import ConfigError
from treaty.node.identity import make_keys
from treaty.node.settings import is_loopback
from treaty.serving.app import listen, split_address
from treaty.serving.service import add_key

TREATY = [sys.executable, "-m", "treaty"]


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a server; yield its process and port."""
    command = [*TREATY, "serve", *arguments, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("serving "), (line, process.communicate(timeout=within(20)))
            yield process, int(line.partition("127.0.0.1:")[2].split()[0])
        finally:
            process.kill()


def ask(connection: http.client.HTTPConnection, **headers: str) -> tuple[int, dict]:
    connection.request(
        "POST", "/predict", json.dumps({"rows": [GOOD]}), {"Content-Type": "application/json", **headers}
    )
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["serve", *arguments])
    assert isinstance(done.exception, ConfigError), done.output
    return str(done.exception)


@pytest.fixture
def part(tmp_path: Path) -> str:
    whole().part.save(tmp_path / "bank.part")
    return str(tmp_path / "bank.part")


def test_a_server_answers_keeps_connections_and_ends_at_a_signal(part):
    with served(part) as (process, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=within(20))
        for _ in range(3):
            status, said = ask(connection)
            assert status == 200
            assert said["model"] == whole().part.model_id
        # a large body is refused from its head; the connection, whose rest nobody reads, is given up
        connection.putrequest("POST", "/predict")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(1 << 40))
        connection.endheaders()
        assert connection.getresponse().status == 413
        connection.close()
        assert ask(connection)[0] == 200
        connection.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(within(20)) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_pages_elsewhere_cannot_ask_under_a_name_of_their_own(part):
    """A page at evil.example whose name is made to lead to this machine (DNS rebinding) asks with its own name."""
    hosts = {"localhost": 200, "127.0.0.1:1": 200, "[::1]:1": 200, "Scores.bank.example:80": 200}
    hosts |= {"evil.example": 400, "evil.example:8000": 400, "localhost.evil.example": 400, "": 400}
    with served(part, "--host", "scores.Bank.example") as (_, port):
        for host, status in hosts.items():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=within(20))
            assert ask(connection, Host=host)[0] == status, host
            connection.close()


def test_keys_and_tls(part, tmp_path):
    key = add_key(tmp_path / "keys", "shop")
    make_keys(tmp_path, "bank")
    tls = ["--certificate", str(tmp_path / "bank.cert.pem"), "--key", str(tmp_path / "bank.key.pem")]
    with served(part, "--api-keys", str(tmp_path / "keys"), *tls) as (process, port):
        trusting = ssl.create_default_context(cafile=str(tmp_path / "bank.cert.pem"))
        trusting.check_hostname = False
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=within(20), context=trusting)
        assert ask(connection)[0] == 401
        assert ask(connection, Authorization=f"Bearer {key}")[0] == 200
        connection.close()
        plain = http.client.HTTPConnection("127.0.0.1", port, timeout=within(20))
        with pytest.raises((http.client.HTTPException, OSError)):
            ask(plain)
        plain.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(within(20)) == 0


def test_a_model_that_needs_partners_says_so_at_the_start(tmp_path):
    active_part().save(tmp_path / "bank.part")
    with served(str(tmp_path / "bank.part")) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert "no prediction can be made without shop" in process.communicate(timeout=within(20))[1]


def test_what_other_machines_reach_needs_keys_or_consent(part, tmp_path):
    assert "can be reached from other machines" in refused(part, "--listen", "0.0.0.0:0")
    assert "can be reached from other machines" in refused(part, "--listen", "[::]:0")
    assert "got both" in refused(part, "--no-keys", "--api-keys", str(tmp_path / "keys"))
    assert "expected --certificate and --key" in refused(part, "--certificate", part)
    assert "expected a model to serve" in refused()
    assert "expected HOST:PORT" in refused(part, "--listen", "8000")
    assert "got a passive" not in refused(part, "--api-keys", str(tmp_path / "none"))


def test_addresses():
    assert split_address("[::1]:80") == ("::1", 80)
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org")))
    for wrong in ("8000", ":8000", "a:b", "a:70000"):
        with pytest.raises(ConfigError, match="expected HOST:PORT"):
            split_address(wrong)
    with listen("127.0.0.1:0") as taken:
        assert taken.proto == socket.IPPROTO_TCP  # by which asyncio sends without delay
        with pytest.raises(ConfigError, match="cannot listen at"):
            listen(f"127.0.0.1:{taken.getsockname()[1]}")


def test_a_certificate_that_cannot_be_used_is_refused(part, tmp_path):
    (tmp_path / "bad.pem").write_text("nothing")
    said = refused(part, "--listen", "127.0.0.1:0", "--certificate", str(tmp_path / "bad.pem"), "--key", part)
    assert "cannot use the certificate" in said


def test_a_new_key_is_shown_once_and_only_its_digest_kept(tmp_path):
    file = tmp_path / "keys"
    done = CliRunner().invoke(app, ["serve", "--api-keys", str(file), "--new-key", "shop"])
    key = done.stdout.split()[-1]
    assert key.startswith("treaty_")
    assert key not in file.read_text()
    printed = CliRunner().invoke(app, ["serve", "--new-key", "shop"]).stdout
    assert "line for the file of keys: shop " in printed


def test_without_the_extra_it_says_what_to_install(part, without):
    for name in [name for name in sys.modules if name.startswith("treaty.serving.")]:
        pytest.MonkeyPatch().delitem(sys.modules, name)
    without("fastapi", "uvicorn", "prometheus_client")
    assert "pip install 'treaty-learn[web]'" in refused(part)


def test_the_command_line_loads_no_web_packages():
    code = "import sys; import treaty.cli.main; print([m for m in sys.modules if m.partition('.')[0] in sys.argv[1:]])"
    done = subprocess.run(
        [sys.executable, "-c", code, "fastapi", "uvicorn", "prometheus_client", "pydantic", "starlette"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
