"""The web application: its paths and their description, access checks, limits, metrics, and the server."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from msgspec import json
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

import treaty
from treaty.data.columns import Category
from treaty.errors import ConfigError
from treaty.node.settings import asks_for
from treaty.node.web import Impatient
from treaty.report.page import templates
from treaty.serving.service import Keys, PredictionResponse, PredictionService, Refused, holder_of

# The API's description, for programs (OpenAPI) and for people (``/docs``), is made from the model.

_OF_TYPES = {str: "string", bool: "boolean", int: "number", float: "number"}
# Nothing is loaded and no script runs, as the page shows names of columns from a file.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Categories of a column on the page.
_SHOWN = 20


def request_schema(service: PredictionService) -> dict[str, Any]:
    """Return the JSON schema of a request's body."""
    schema, limits = service.model.schema, service.limits
    cells = dict(zip(schema.names, map(_cell, schema.categories), strict=True))
    row = {"type": "object", "additionalProperties": False, "required": list(cells), "properties": cells}
    properties: dict[str, Any] = {"rows": {"type": "array", "minItems": 1, "maxItems": limits.rows, "items": row}}
    if service.waits:
        properties["ids"] = {
            "type": "array", "items": {"type": "string"},
            "description": f"For each row, its id at {', '.join(service.model.needs)}.",
        }  # fmt: skip
    return {"type": "object", "additionalProperties": False, "required": list(properties), "properties": properties}


def answer_schema(service: PredictionService) -> dict[str, Any]:
    classes = service.model.classes
    kinds = {"number"} if classes is None else {_OF_TYPES[type(value)] for value in classes}
    row: dict[str, Any] = {"prediction": {"type": sorted(kinds)}}
    if classes is not None:
        row["prediction"]["enum"] = classes
        row |= {f"probability_{name}": {"type": "number"} for name in classes}
    return {
        "type": "object",
        "required": ["model", "fallback", "predictions"],
        "properties": {
            "model": {"type": "string"},
            "fallback": {"type": "boolean", "description": "Whether partners' columns were left out."},
            "predictions": {"type": "array", "items": {"type": "object", "properties": row}},
            "caution": {"type": "string", "description": "Present if probabilities are unreliable."},
        },
    }


def predict_operation(service: PredictionService) -> dict[str, Any]:
    """Return the OpenAPI description of ``POST /predict``."""
    refused = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {"type": "string"},
            "row": {"type": "integer", "description": "Counted from 0."},
            "column": {"type": "string"},
        },
    }
    said = {
        "400": "No JSON.", "401": "No key, or an unknown one.", "408": "The body did not arrive in time.",
        "413": "Too many bytes.", "415": "Another content type.",
        "422": "Rows that do not fit the model; the answer names row and column.",
        "503": "Too many requests under way, or needed partners are absent.",
    }  # fmt: skip
    answers = {status: {"description": why, "content": _json(refused)} for status, why in said.items()}
    return {
        "summary": "Predict rows",
        "requestBody": {"required": True, "content": _json(request_schema(service))},
        "responses": {"200": {"description": "Predictions, in the order of the rows.",
                              "content": _json(answer_schema(service))}, **answers},
    }  # fmt: skip


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _cell(values: tuple[Category, ...] | None) -> dict[str, Any]:
    if values is None:
        return {"type": ["number", "boolean", "null"]}
    kinds = sorted({_OF_TYPES[type(value)] for value in values} or {"string"})
    return {"type": [*kinds, "null"], "examples": list(values[:_SHOWN])}


_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Metrics:
    """The Prometheus metrics of one server: requests, times and numbers of rows, but no value of a row."""

    def __init__(self) -> None:
        made = self.registry = CollectorRegistry()
        by_status = "Requests for predictions, by HTTP status."
        self._requests = Counter("treaty_serve_requests", by_status, ["status"], registry=made)
        self._rows = Counter("treaty_serve_rows", "Rows predicted.", registry=made)
        without = "Rows predicted without partners, of all."
        self._fallback = Counter("treaty_serve_fallback_rows", without, registry=made)
        seconds = "Seconds from a request for predictions to its answer."
        self._seconds = Histogram("treaty_serve_seconds", seconds, buckets=_SECONDS, registry=made)
        under_way = "Requests for predictions that are being answered."
        self.under_way = Gauge("treaty_serve_under_way", under_way, registry=made)

    def answered(self, status: int, seconds: float, n_rows: int = 0, *, fallback: bool = False) -> None:
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)
        self._rows.inc(n_rows)
        if fallback:
            self._fallback.inc(n_rows)


logger = logging.getLogger(__name__)

# An ASGI application: of scope, receive and send.
Application = Callable[[Any, Any, Any], Awaitable[None]]

# Bytes up to which a request is answered in this thread, as the hand-over would take longer.
_AT_ONCE = 1 << 16
_ASK_FOR_KEY = [(b"www-authenticate", b"Bearer"), (b"www-authenticate", b'Basic realm="treaty", charset="UTF-8"')]
_KEY = b"authorization"
_USUAL = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
_PATHS = "POST /predict, GET /model, /docs, /openapi.json, /metrics and /health"


def make_app(service: PredictionService, keys: Keys | None = None, hosts: Collection[str] | None = None) -> Application:
    """Return the ASGI application that serves a model.

    `keys` are the accepted keys, for all paths but ``/health``; None: no key is needed. `hosts` are the accepted host
    names; None: any.
    """
    metrics = Metrics()
    pages = FastAPI(title="Treaty", version=treaty.__version__, docs_url=None, redoc_url=None)

    @pages.get("/health")
    async def health() -> dict[str, str]:
        """Report that the server answers."""
        return {"status": "ok"}

    @pages.get("/model")
    async def model() -> dict[str, Any]:
        """Describe the columns of a row, and what may be predicted."""
        return service.described()

    @pages.get("/metrics", include_in_schema=False)
    async def counts() -> Response:
        return Response(generate_latest(metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    @pages.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        schema = service.model.schema
        columns = zip(schema.names, schema.kinds, schema.categories, strict=True)
        page = templates("treaty.serving").get_template("docs.html")
        text = page.render(service=service, model=service.model, columns=columns, most=_SHOWN)
        return HTMLResponse(text, headers={"content-security-policy": CONTENT_SECURITY_POLICY})

    async def in_our_words(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 500)
        said = "no such path" if status == 404 else f"{request.method} is not for this path"
        return JSONResponse({"error": f"{said}: there are {_PATHS}"}, status)

    for status in (404, 405):
        pages.add_exception_handler(status, in_our_words)
    # FastAPI caches this dictionary, so the change is kept.
    pages.openapi()["paths"]["/predict"] = {"post": predict_operation(service)}
    predictions = Predictions(service, metrics)

    # It handles predictions itself: FastAPI's routing takes longer than most predictions.
    async def front(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await pages(scope, receive, send)
        elif not asks_for(_header(scope, b"host"), hosts):
            said = "the header Host names another server; treaty serve --host NAME accepts a name"
            await _send(send, 400, json.encode({"error": said}))
        elif keys is not None and scope["path"] != "/health" and holder_of(keys, _header(scope, _KEY)) is None:
            said = "expected a key that this server knows, in the header Authorization: Bearer KEY"
            await _send(send, 401, json.encode({"error": said}), _ASK_FOR_KEY)
        elif scope["path"] == "/predict" and scope["method"] == "POST":
            await predictions(scope, receive, send)
        elif scope["path"] == "/predict":
            said = f"{scope['method']} is not for this path: there are {_PATHS}"
            await _send(send, 405, json.encode({"error": said}), [(b"allow", b"POST")])
        else:
            await pages(scope, receive, partial(_with_usual_headers, send))

    return front


class Predictions:
    """Receives, answers and counts requests for predictions, within limits of number and size."""

    def __init__(self, service: PredictionService, metrics: Metrics) -> None:
        self._service, self._metrics, self._under_way = service, metrics, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        began = time.perf_counter()
        self._under_way += 1
        self._metrics.under_way.inc()
        try:
            answer = await self._answer(scope, receive)
        except Refused as refused:
            again = [] if refused.retry_after is None else [(b"retry-after", str(refused.retry_after).encode())]
            self._metrics.answered(refused.status, time.perf_counter() - began)
            await _send(send, refused.status, json.encode(refused.answer()), again)
        else:
            self._metrics.answered(200, time.perf_counter() - began, answer.n_rows, fallback=answer.fallback)
            await _send(send, 200, answer.content)
        finally:
            self._under_way -= 1
            self._metrics.under_way.dec()

    async def _answer(self, scope: Any, receive: Any) -> PredictionResponse:
        limits = self._service.limits
        if self._under_way > limits.under_way:
            raise Refused(503, f"{limits.under_way} requests are under way; retry in a second", retry_after=1)
        try:
            async with asyncio.timeout(limits.body_seconds):
                content = await self._body(scope, receive)
        except TimeoutError:
            raise Refused(408, f"the request did not arrive within {limits.body_seconds:g} seconds") from None
        try:
            # Answers that wait for partners or take long must not block the event loop.
            if self._service.waits or len(content) > _AT_ONCE:
                return await asyncio.to_thread(self._service.answer, content)
            return self._service.answer(content)
        except Refused:
            raise
        except Exception as error:
            # Log no message: it may contain values of rows.
            lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
            logger.error("a request failed with %s, at %s", type(error).__name__, " ".join(lines[-4:]))
            raise Refused(500, "the request failed with an error of the server, which is in its log") from None

    async def _body(self, scope: Any, receive: Any) -> bytes:
        """Return a request's body; stop reading when it is too large."""
        most = self._service.limits.body_bytes
        kind = _header(scope, b"content-type").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise Refused(415, f"expected a body of type application/json, got {kind or 'none'}: see Content-Type")
        if _header(scope, b"content-encoding").lower() not in ("", "identity"):
            raise Refused(415, "expected a body that is not compressed")
        length = _header(scope, b"content-length")
        too_large = f"expected a body of up to {most} bytes, got {{}}; send the rows in several requests"
        if length.isdecimal() and int(length) > most:
            raise Refused(413, too_large.format(length))
        pieces, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(400, "the connection ended before the request did")
            piece, more = message.get("body", b""), message.get("more_body", False)
            size += len(piece)
            if size > most:
                raise Refused(413, too_large.format("more"))
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _send(send: Any, status: int, content: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    of_content = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*of_content, *_USUAL, *headers]})
    await send({"type": "http.response.body", "body": content})


async def _with_usual_headers(send: Any, message: Any) -> None:
    if message["type"] == "http.response.start":
        message["headers"] = [*message["headers"], *_USUAL]
    await send(message)


def _header(scope: Any, wanted: bytes) -> str:
    return next((str(value.decode("latin-1")) for name, value in scope["headers"] if name == wanted), "")


# Seconds for which a connection may be idle between requests; connections at a time, and those that wait for it.
_KEPT = 75
_CONNECTIONS = 1000
_WAITING = 2048


def listen(address: str) -> socket.socket:
    """Return a socket that listens at ``host:port``; ConfigError if it cannot."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sets TCP_NODELAY only on sockets with an explicit TCP protocol, which those of `socket.create_server`
        # lack: an answer of head and body would wait 40 ms for the receiver's delayed acknowledgment.
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen(_WAITING)
        except OSError:
            listening.close()
            raise
        return listening
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"cannot listen at {address}: {why}; choose another address with --listen") from None


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[host]:port``; ConfigError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"expected HOST:PORT, such as 127.0.0.1:8000, got {address!r} - at --listen")
    return host.removeprefix("[").removesuffix("]"), int(port)


def run(
    app: Any, listening: socket.socket, *, certificate: Path | None, key: Path | None, ready: Callable[[], None]
) -> None:
    """Serve an application until a signal; requests under way are answered first.

    `ready` is called when it listens. Raises ConfigError if certificate and key cannot be used.
    """
    config = uvicorn.Config(
        app, http=Impatient, ws="none", lifespan="off", access_log=False, log_config=None, server_header=False,
        ssl_certfile=certificate, ssl_keyfile=key, limit_concurrency=_CONNECTIONS, timeout_keep_alive=_KEPT,
        timeout_graceful_shutdown=30,
    )  # fmt: skip
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        why = error.strerror or error
        raise ConfigError(f"cannot use the certificate {certificate} with the key {key}: {why}") from None
    ready()
    server = uvicorn.Server(config)
    try:
        server.run(sockets=[listening])
    except (SystemExit, KeyboardInterrupt):
        # uvicorn raises the signal again after a graceful shutdown.
        if not server.should_exit:
            raise
