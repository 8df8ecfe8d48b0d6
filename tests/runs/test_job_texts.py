"""Job files as people write them: byte order marks, paths of one's own folder, and addresses that cannot be meant."""

from __future__ import annotations

from pathlib import Path

import pytest

import treaty
from treaty.messaging.certificates import load_certificate, make_identity
from treaty.node.cards import read_small
from treaty.runs.job_files import load_job

JOB = (
    'name = "t"\nactive = "a"\nlabel = "y"\noutput = "~/out"\nstore = "~"\n[align]\nlog = "~/runs"\n'
    '[parties.a]\naddress = "127.0.0.1:7431"\ntable = "~/a.csv"\neval_tables = ["~/e.csv"]\n'
    '[parties.b]\naddress = "127.0.0.1:7432"\ncertificate = "b.pem"\n'
)


def load(folder: Path, text: str):
    (folder / "job.toml").write_bytes(text.encode())
    return load_job(folder / "job.toml")


def test_a_tilde_is_ones_own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    job = load(tmp_path, JOB)
    own = job.parties["a"]
    assert (own.table, own.eval_tables) == ("/home/me/a.csv", ["/home/me/e.csv"])
    assert job.align is not None
    assert (job.output, job.store, job.align.log) == ("/home/me/out", "/home/me", "/home/me/runs")
    assert job.parties["b"].certificate == str(tmp_path / "b.pem")


def test_a_byte_order_mark_is_taken_off(tmp_path):
    assert load(tmp_path, "\ufeff" + JOB).name == "t"
    pem = make_identity("a").certificate
    (tmp_path / "a.pem").write_bytes(b"\xef\xbb\xbf" + pem)
    assert load_certificate(tmp_path / "a.pem") == pem
    assert read_small(tmp_path / "a.pem") == pem


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("https://127.0.0.1:7432", r"parties\.b\.address = 'https://127.*': expected host:port without https://"),
        ("::1:7432", r"parties\.b\.address = '::1:7432': expected an IPv6 address in brackets, such as \[::1\]:7000"),
        ("127.0.0.1:74320", r"parties\.b\.address = '127\.0\.0\.1:74320': expected a port from 1 to 65535"),
        (
            "me@shop:7432",
            r"parties\.b\.address = 'me@shop:7432': expected host:port, the name or number of a machine alone",
        ),
        ("127.0.0.1:7431", r"parties a and b have the same address, 127\.0\.0\.1:7431"),
    ],
)
def test_an_address_that_cannot_be_meant_is_refused_at_once(tmp_path, address, said):
    with pytest.raises(treaty.ConfigError, match=rf"{said}.* - in .*job\.toml"):
        load(tmp_path, JOB.replace("127.0.0.1:7432", address))
    assert load(tmp_path, JOB.replace("127.0.0.1:7432", "[::1]:7432")).parties["b"].address == "[::1]:7432"
