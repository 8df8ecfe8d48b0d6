"""A node's read-only web page, metrics and health check; needs the packages of the extra ``web``.

The page has no login, so it listens on this machine alone, or behind a server that authenticates. It shows
jobs, what parties learn, and names, but no row, id or value of a table. Nothing can be changed through it: approvals
are given, and signed, on the command line. HTML comes from ``templates/node.html``; no script runs, nothing is loaded.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
import socket
import threading
import time
from asyncio import BaseTransport
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any, get_args
from urllib.parse import quote

import uvicorn
from jinja2 import Template
from markupsafe import Markup
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

import treaty
from treaty.errors import ConfigError
from treaty.node.job_views import JobView
from treaty.node.proposals import Verb
from treaty.node.settings import LOCAL, asks_for, is_loopback
from treaty.node.store import FINAL, TRANSITIONS, JobRow, Store
from treaty.report.page import templates

# Seconds after which a connection without progress is closed; at most twice as many.
IDLE = 60.0
# Ended jobs on the page.
ENDED = 20
_CONNECTIONS = 100
# By title, lines by name.
Usage = Mapping[str, Mapping[str, str]]
_LOOKS = {
    "proposed": "wait", "approved": "busy", "queued": "busy", "running": "busy", "waiting": "wait",
    "finished": "good", "failed": "bad", "rejected": "bad", "cancelled": "dim",
}  # fmt: skip


@cache
def page_template() -> tuple[Template, str]:
    """Return the template of the pages, and their style sheet, whose hash the content security policy names."""
    environment = templates("treaty.node")
    environment.filters |= {
        "path": lambda id: quote(id, safe=""),
        "file": lambda path: path.rpartition("/")[2],
        "utc": lambda seconds, form: time.strftime(form, time.gmtime(seconds)),
    }
    style = "\n".join(environment.get_template(name).render() for name in ("base.css", "node.css"))
    environment.globals |= {"style": Markup(style), "looks": _LOOKS, "final": FINAL}  # noqa: S704 - our own files
    return environment.get_template("node.html"), style


def app(
    store: Store, name: str, describe: Callable[[JobRow], JobView], *, usage: Callable[[], Usage] = dict,
    node: str = "node.toml", hosts: Collection[str] | None = LOCAL,
) -> ASGIApp:  # fmt: skip
    """Return the application: ``/``, ``/jobs/ID``, ``/metrics`` and ``/health``, for GET alone.

    `name` is the organisation's, and `describe` returns what is shown of a job, `usage` what is shown of disk space and
    budgets. `node` is the node's settings file, for commands to copy. `hosts` are the host names that
    requests may ask for: this refuses pages elsewhere whose name resolves to this machine (DNS rebinding). None: any,
    if it listens to other machines, too.
    """
    metrics, (template, style) = registry(store, name, describe), page_template()

    def shown(**values: Any) -> Response:
        common = {"name": name, "node": shlex.quote(node), "head": store.head(), "now": time.time()}
        return HTMLResponse(template.render(**common, **values))

    def overview(request: Request) -> Response:
        jobs = [(job, describe(job)) for job in store.jobs(TRANSITIONS.keys() - FINAL)]
        ended = [(job, describe(job)) for job in store.jobs(FINAL, ENDED)]
        return shown(
            refresh="still" not in request.query_params, peers=store.peers(), ended=ended,
            asked=[each for each in jobs if each[0].state == "proposed"],
            going=[each for each in jobs if each[0].state != "proposed"],
            models=[(job, view) for job, view in ended if view.models], usage=usage(),
        )  # fmt: skip

    def one_job(request: Request) -> Response:
        if not store.has(request.path_params["id"]):
            return PlainTextResponse("There is no such job.\n", 404)
        job = store.job(request.path_params["id"])
        refresh = "still" not in request.query_params and job.state not in FINAL
        return shown(refresh=refresh, job=job, view=describe(job))

    def measured(request: Request) -> Response:
        return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)

    def health(request: Request) -> Response:
        store.head()
        return JSONResponse({"status": "ok"})

    # Why, and where it is, is in the node's log.
    def unusable(request: Request, error: Exception) -> Response:
        return JSONResponse({"status": "the node's database cannot be used; its log has the details"}, 503)

    paths = {"/": overview, "/jobs/{id}": one_job, "/metrics": measured, "/health": health}
    routes = [Route(path, handler) for path, handler in paths.items()]
    middleware = [Middleware(_Guard, hosts=hosts, style=style)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={ConfigError: unusable})


class _Guard:
    """Refuses requests for other hosts, and adds headers that limit what a browser does with any response."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None, style: str) -> None:
        style_hash = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
        self._app, self._hosts = app, hosts
        self._headers = {
            "content-security-policy": f"default-src 'none'; style-src 'sha256-{style_hash}'; base-uri 'none'; "
            "form-action 'none'; frame-ancestors 'none'",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cache-control": "no-store",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        if scope["type"] == "http" and not asks_for(Headers(scope=scope).get("host", ""), self._hosts):
            await PlainTextResponse("This page is not at that name.\n", 400)(scope, receive, with_headers)
        else:
            await self._app(scope, receive, with_headers)


class Impatient(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """One connection, closed if no request comes or the answer is not read: uvicorn waits for these without end."""

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        self._before: tuple[Any, int] = (None, 0)
        self._next = self.loop.call_later(IDLE, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._next.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        # The last request, and bytes that wait to be read.
        now = self.cycle, self.transport.get_write_buffer_size()
        computing = self.cycle is not None and not self.cycle.response_complete and not now[1]
        if now == self._before and not computing:
            self.transport.abort()
            return
        self._before = now
        self._next = self.loop.call_later(IDLE, self._look)


class Serving:
    """The page at `listen`, ``host:port``, served by a thread until `stop`; ConfigError if it cannot listen there.

    If only this machine can reach it, requests must ask for one of this machine's names. `shown` are `usage` and `node`
    of `app`.
    """

    def __init__(
        self, store: Store, name: str, describe: Callable[[JobRow], JobView], listen: str, **shown: Any
    ) -> None:
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        try:
            family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, int(port)), family=family)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"the page cannot listen at {listen}: {why} - at web.listen") from None
        application = app(store, name, describe, **shown, hosts=LOCAL if is_loopback(host) else None)
        config = uvicorn.Config(
            application, http=Impatient, ws="none", lifespan="off", access_log=False, log_config=None,
            server_header=False, limit_concurrency=_CONNECTIONS, timeout_graceful_shutdown=2,
        )  # fmt: skip
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="treaty-web", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop; on return nothing reads the database any more."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def registry(store: Store, name: str, describe: Callable[[JobRow], JobView]) -> CollectorRegistry:
    """Return what Prometheus reads: metrics of the node's database and of its process."""
    made = CollectorRegistry()
    made.register(_StoreCollector(store, name, describe))
    ProcessCollector(registry=made)
    return made


class _StoreCollector(Collector):
    """Metrics of jobs, peers and the audit log. The messages of an ended job are added up only once."""

    def __init__(self, store: Store, name: str, describe: Callable[[JobRow], JobView]) -> None:
        self._store, self._name, self._describe = store, name, describe
        # By job: bytes by peer and direction.
        self._ended: dict[str, Counter[tuple[str, str]]] = {}

    def describe(self) -> list[Metric]:
        # Else registering the metrics would read the database.
        return []

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("treaty_node_info", "The node and its version; always 1.", labels=["node", "version"])
        yield _with(info, {(self._name, treaty.__version__): 1})
        states = self._store.states()
        jobs = GaugeMetricFamily("treaty_jobs", "Jobs by kind and state.", labels=["kind", "state"])
        counts = Counter(states.values())
        yield _with(jobs, {of: counts[of] for of in product((*get_args(Verb), "check"), TRANSITIONS)})
        done = GaugeMetricFamily("treaty_job_rounds_done", "Rounds done of each running job.", labels=["job"])
        planned = GaugeMetricFamily("treaty_job_rounds_planned", "Rounds of each running job in all.", labels=["job"])
        running = self._store.jobs({"running"})
        yield _with(done, {(job.id,): job.rounds for job in running})
        yield _with(planned, {(job.id,): job.total for job in running})
        up = GaugeMetricFamily("treaty_peer_up", "Whether a peer's node is connected.", labels=["peer"])
        yield _with(up, {(party,): peer.up for party, peer in self._store.peers().items()})
        entries = "Entries of the audit log; if there are fewer than before, it was cut."
        yield CounterMetricFamily("treaty_audit_entries", entries, self._store.head().seq)
        yield self._messages(states)

    def _messages(self, states: Mapping[str, tuple[str, str]]) -> Metric:
        labels = ["peer", "direction"]
        messages = CounterMetricFamily("treaty_message_bytes", "Bytes of jobs' messages by peer.", labels=labels)
        sums: Counter[tuple[str, str]] = Counter()
        for id, (_, state) in states.items():
            counted = self._ended.get(id)
            if counted is None:
                view = self._describe(self._store.job(id))
                counted = Counter({(peer, "sent"): count for peer, count in view.sent.items()})
                counted.update({(peer, "received"): count for peer, count in view.received.items()})
                if state in FINAL:
                    self._ended[id] = counted
            sums.update(counted)
        return _with(messages, dict(sorted(sums.items())))


def _with(metric: GaugeMetricFamily | CounterMetricFamily, values: Mapping[tuple[str, ...], float]) -> Metric:
    """Add values, by their labels, to a metric."""
    for labels, value in values.items():
        metric.add_metric(labels, value)
    return metric
