"""The application over HTTP: who may ask, how much, what is counted, and what no log has."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fastapi.testclient import TestClient

import treaty
from serving.models import GOOD, active_part, rows_of, shared, whole
from treaty.errors import ConfigError
from treaty.serving.app import make_app
from treaty.serving.models import ServedModel
from treaty.serving.service import Keys, PredictionService, RequestLimits, add_key, new_key, read_keys

JSON = {"content-type": "application/json"}


def client(limits: RequestLimits | None = None, keys: Keys | None = None, **named: Any) -> TestClient:
    return TestClient(make_app(PredictionService(whole(), limits, **named), keys))


def test_a_prediction():
    answer = client().post("/predict", json={"rows": [GOOD, GOOD | {"income": None}]})
    assert answer.status_code == 200
    said = answer.json()
    assert said["model"] == whole().part.model_id
    assert said["fallback"] is False
    assert [set(row) for row in said["predictions"]] == [{"prediction", "probability_no", "probability_yes"}] * 2
    assert said["predictions"][0]["prediction"] in ("yes", "no")
    assert answer.headers["cache-control"] == "no-store"


def test_what_the_model_is_and_that_the_server_answers():
    asked = client()
    assert asked.get("/health").json() == {"status": "ok"}
    said = asked.get("/model").json()
    assert said["columns"] == [
        {"name": "age", "kind": "numeric"},
        {"name": "income", "kind": "numeric"},
        {"name": "member", "kind": "numeric"},
        {"name": "region", "kind": "categorical", "categories": ["south", "north"]},
    ]
    assert said["classes"] == ["no", "yes"]
    assert said["needs"] == []


def test_a_model_of_several_parties_shows_no_name_of_a_column_of_others():
    _, tables = shared()
    asked = TestClient(make_app(PredictionService(ServedModel(active_part()))))
    for path in ("/model", "/docs", "/openapi.json"):
        said = asked.get(path).text
        assert all(name in said for name in tables["bank"])
        assert not any(f'"{name}"' in said or f"{name}<" in said for name in tables["shop"])


def test_openapi_and_the_page_for_people():
    asked = client()
    operation = asked.get("/openapi.json").json()["paths"]["/predict"]["post"]
    row = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]["rows"]["items"]
    assert row["required"] == ["age", "income", "member", "region"]
    assert row["properties"]["region"] == {"type": ["string", "null"], "examples": ["south", "north"]}
    assert set(operation["responses"]) >= {"200", "401", "413", "422", "503"}
    page = asked.get("/docs")
    assert "<script" not in page.text
    assert "http" not in page.text.replace("http-equiv", "")
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_names_of_columns_are_escaped_on_the_page():
    X = pd.DataFrame({"<script>alert(1)</script>": np.arange(40.0)})
    part = treaty.GBDTRegressor("pooled", n_estimators=1).fit(X, np.arange(40.0)).parts_["pooled"]
    assert "<script" not in TestClient(make_app(PredictionService(ServedModel(part)))).get("/docs").text


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/predict", 405), ("POST", "/model", 405), ("GET", "/x", 404)]
)
def test_other_paths_and_methods_are_refused_with_those_there_are(method, path, status):
    answer = client().request(method, path)
    assert answer.status_code == status
    assert "POST /predict" in answer.json()["error"]


def test_a_cell_that_does_not_fit_is_named():
    answer = client().post("/predict", json={"rows": [GOOD, GOOD | {"age": "old"}]})
    assert answer.status_code == 422
    assert answer.json()["row"] == 1
    assert answer.json()["column"] == "age"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "text/json"])
def test_another_content_type_is_refused(kind):
    body = json.dumps({"rows": [GOOD]})
    answer = client().post("/predict", content=body, headers={"content-type": kind})
    assert answer.status_code == 415
    answer = client().post("/predict", content=body, headers=JSON | {"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert (
        client().post("/predict", content=body, headers={"content-type": "Application/JSON; charset=utf-8"}).is_success
    )


def test_a_large_body_is_refused_before_it_is_read():
    asked = client(RequestLimits(body_bytes=200))
    body = json.dumps({"rows": [GOOD] * 9}).encode()
    assert asked.post("/predict", content=body, headers=JSON).status_code == 413

    sent = []

    def pieces() -> Iterator[bytes]:  # without a length
        for _ in range(1000):
            sent.append(1)
            yield b" " * 150

    answer = asked.post("/predict", content=pieces(), headers=JSON)
    assert answer.status_code == 413
    assert "several requests" in answer.json()["error"]


def test_a_body_that_does_not_arrive_is_not_waited_for():
    async def ask() -> list[dict[str, Any]]:
        sent = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(60)
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/predict", "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await make_app(PredictionService(whole(), RequestLimits(body_seconds=0.05)))(scope, receive, send)
        return sent

    start, body = asyncio.run(ask())
    assert start["status"] == 408
    assert "did not arrive within 0.05 seconds" in json.loads(body["body"])["error"]


def test_more_requests_than_may_be_under_way_are_told_to_come_again():
    held, begun = threading.Event(), threading.Event()

    def partners(ids: Any, table: Any) -> Any:
        begun.set()
        assert held.wait(20)
        return np.zeros((len(ids), 1))

    service = PredictionService(ServedModel(active_part()), RequestLimits(under_way=1), partners=partners)
    body = {"rows": rows_of(shared()[1]["bank"].iloc[:1]), "ids": ["1"]}
    with TestClient(make_app(service)) as asked:
        first = threading.Thread(target=lambda: answers.append(asked.post("/predict", json=body)))
        answers: list[Any] = []
        first.start()
        assert begun.wait(20)
        busy = asked.post("/predict", json=body)
        assert busy.status_code == 503
        assert busy.headers["retry-after"] == "1"
        assert asked.get("/health").is_success
        assert "treaty_serve_under_way 1.0" in asked.get("/metrics").text
        held.set()
        first.join(20)
        assert answers[0].status_code == 200
        assert asked.post("/predict", json=body).status_code == 200
        assert "treaty_serve_under_way 0.0" in asked.get("/metrics").text


def test_large_requests_are_answered_by_another_thread():
    rows = [GOOD] * 2000
    answer = client(threads=2).post("/predict", json={"rows": rows})
    single = client().post("/predict", json={"rows": [GOOD]})
    assert answer.json()["predictions"] == single.json()["predictions"] * 2000


def test_what_is_counted():
    asked = client()
    asked.post("/predict", json={"rows": [GOOD] * 3})
    asked.post("/predict", json={"rows": [{}]})
    asked.post("/predict", content=b"{")
    counts = asked.get("/metrics").text
    assert 'treaty_serve_requests_total{status="200"} 1.0' in counts
    assert 'treaty_serve_requests_total{status="422"} 1.0' in counts
    assert 'treaty_serve_requests_total{status="415"} 1.0' in counts
    assert "treaty_serve_rows_total 3.0" in counts
    assert "treaty_serve_fallback_rows_total 0.0" in counts
    assert "treaty_serve_seconds_count 3.0" in counts


def test_no_log_has_a_value_of_a_row(caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    asked, secret = client(), "4242424242.125"
    asked.post("/predict", content=json.dumps({"rows": [GOOD | {"income": float(secret)}]}), headers=JSON)
    asked.post("/predict", content=json.dumps({"rows": [GOOD | {"income": secret}]}), headers=JSON)
    asked.post("/predict", content=json.dumps({"rows": [GOOD | {secret: secret}]}), headers=JSON)

    def fails(self: Any, matrix: Any, threads: int = 1) -> Any:
        raise ValueError(f"a value that is too large: {secret}")

    monkeypatch.setattr(ServedModel, "margins", fails)
    answer = asked.post("/predict", content=json.dumps({"rows": [GOOD]}), headers=JSON)
    assert answer.status_code == 500
    assert secret not in answer.text
    ours = [
        record.getMessage() for record in caplog.records if record.name.startswith(("treaty", "uvicorn", "fastapi"))
    ]
    assert any("a request failed with ValueError, at" in line for line in ours)
    assert not any(secret in line for line in ours)
    assert secret not in caplog.text


def test_whoever_has_a_key_may_ask_and_nobody_else(tmp_path):
    file = tmp_path / "keys"
    key, other = add_key(file, "shop"), add_key(file, "till-2")
    assert file.stat().st_mode & 0o777 == 0o600
    assert key not in file.read_text()
    assert hashlib.sha256(key.encode()).hexdigest() in file.read_text()
    asked = client(keys=read_keys(file))
    for path in ("/model", "/docs", "/openapi.json", "/metrics", "/nothing"):
        answer = asked.get(path)
        assert answer.status_code == 401, path
        assert answer.headers.get_list("www-authenticate")[0] == "Bearer"
    assert asked.post("/predict", json={"rows": [GOOD]}).status_code == 401
    assert asked.get("/health").is_success
    for given in (key, other):
        assert asked.post("/predict", json={"rows": [GOOD]}, headers={"authorization": f"Bearer {given}"}).is_success
        assert asked.get("/docs", auth=("anybody", given)).is_success  # what a browser sends
    wrong = [
        "Bearer ",
        f"Bearer {key}x",
        f"bearer {key[:-1]}",
        key,
        "Basic ???",
        f"Digest {key}",
        "Bearer schl\xfcssel",
    ]
    for given in wrong:
        answer = asked.post("/predict", json={"rows": [GOOD]}, headers={"authorization": given.encode("latin-1")})
        assert answer.status_code == 401, given


def test_keys_are_each_drawn_anew_and_files_of_keys_checked(tmp_path):
    assert new_key("a")[0] != new_key("a")[0]
    file = tmp_path / "keys"
    add_key(file, "a")
    with pytest.raises(ConfigError, match="'a' has a key already"):
        add_key(file, "a")
    with pytest.raises(ConfigError, match="expected a name of up to 64 letters"):
        new_key("a b")
    line = file.read_text()
    assert len(read_keys(tmp_path / "keys")) == 1
    for content, said in {
        "": "expected at least one key",
        "# nobody\n": "expected at least one key",
        f"{line}a 12\n": "at line 2 of",
        f"{line}{line}": "'a' occurs twice - at line 2",
        f"{line}b {'A' * 64}": "at line 2",
    }.items():
        file.write_text(content)
        with pytest.raises(ConfigError, match=said):
            read_keys(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "none")


def test_the_limit_of_a_body_is_of_all_its_pieces_together():
    taken: list[int] = []

    async def ask() -> list[dict[str, Any]]:
        sent = []

        async def receive() -> dict[str, Any]:
            taken.append(1)
            return {"type": "http.request", "body": b" " * 150, "more_body": len(taken) < 50}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": "/predict", "headers": headers}
        await make_app(PredictionService(whole(), RequestLimits(body_bytes=200)))(scope, receive, send)
        return sent

    assert asyncio.run(ask())[0]["status"] == 413
    assert len(taken) == 2
