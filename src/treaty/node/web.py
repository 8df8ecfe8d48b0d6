"""A node's read-only web page, its metrics and its health, for those who run the node; part of the extra ``web``.

Nobody is asked who they are, so it listens on this machine alone, or behind a server that asks. It shows jobs,
sentences on what is learned, and names: no row, id or value of a table. Nothing can be changed by it; approvals are
given by the command line, where they are signed.
"""

from __future__ import annotations

import socket
import threading
import time
from asyncio import BaseTransport
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, get_args

import uvicorn
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
from treaty.node.page import STYLE_HASH, JobView, Shown, job_page, overview
from treaty.node.proposals import Verb
from treaty.node.settings import LOCAL, asks_for, is_loopback
from treaty.node.store import FINAL, TRANSITIONS, JobRow, Store

# ----------------------------------------------------------------
# Connections of web servers that make no progress are closed: uvicorn itself waits for a first request without end.

IDLE = 60.0
"""Seconds after which a connection that makes no progress is closed, twice as many at most."""


class Impatient(AutoHTTPProtocol):  # type: ignore[valid-type, misc]
    """One connection: closed where no request has come, or nobody takes the answer."""

    def connection_made(self, transport: BaseTransport) -> None:
        """Begin to look after the connection."""
        super().connection_made(transport)
        self._before: tuple[Any, int] = (None, 0)
        self._next = self.loop.call_later(IDLE, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._next.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        now = self.cycle, self.transport.get_write_buffer_size()  # the last request, and what waits to be taken
        computing = self.cycle is not None and not self.cycle.response_complete and not now[1]
        if now == self._before and not computing:
            self.transport.abort()
            return
        self._before = now
        self._next = self.loop.call_later(IDLE, self._look)


# ------------------------- what a node tells Prometheus: read from its database when it is asked, and from its process


def registry(store: Store, name: str, describe: Callable[[JobRow], JobView]) -> CollectorRegistry:
    """Return the metrics of a node called `name`."""
    made = CollectorRegistry()
    made.register(_OfStore(store, name, describe))
    ProcessCollector(registry=made)
    return made


class _OfStore(Collector):
    """Metrics of jobs, peers and the audit log. Messages of jobs that have ended are added up once."""

    def __init__(self, store: Store, name: str, describe: Callable[[JobRow], JobView]) -> None:
        self._store, self._name, self._describe = store, name, describe
        self._ended: dict[str, Counter[tuple[str, str]]] = {}  # by job: bytes by peer and direction

    def describe(self) -> list[Metric]:
        """Return nothing: names are not looked for when the metrics are registered, before there is a database."""
        return []

    def collect(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("treaty_node_info", "The node and its version; always 1.", labels=["node", "version"])
        info.add_metric([self._name, treaty.__version__], 1)
        yield info
        states = self._store.states()
        jobs = GaugeMetricFamily("treaty_jobs", "Jobs by kind and state.", labels=["kind", "state"])
        counts = Counter(states.values())
        for kind in (*get_args(Verb), "check"):
            for state in TRANSITIONS:
                jobs.add_metric([kind, state], counts[kind, state])
        yield jobs
        yield from self._rounds()
        up = GaugeMetricFamily("treaty_peer_up", "Whether a peer's node is connected.", labels=["peer"])
        for party, peer in self._store.peers().items():
            up.add_metric([party], peer.up)
        yield up
        yield CounterMetricFamily(
            "treaty_audit_entries", "Entries of the audit log; fewer than before: it was cut.", self._store.head().seq
        )
        yield self._messages(states)

    def _rounds(self) -> Iterator[Metric]:
        done = GaugeMetricFamily("treaty_job_rounds_done", "Rounds done of each running job.", labels=["job"])
        planned = GaugeMetricFamily("treaty_job_rounds_planned", "Rounds of each running job in all.", labels=["job"])
        for job in self._store.jobs({"running"}):
            done.add_metric([job.id], job.rounds)
            planned.add_metric([job.id], job.total)
        yield done
        yield planned

    def _messages(self, states: Mapping[str, tuple[str, str]]) -> Metric:
        messages = CounterMetricFamily(
            "treaty_message_bytes", "Bytes of jobs' messages by peer.", labels=["peer", "direction"]
        )
        sums: Counter[tuple[str, str]] = Counter()
        for id, (_, state) in states.items():
            if id in self._ended:
                counted = self._ended[id]
            else:
                counted = self._count(id)
                if state in FINAL:
                    self._ended[id] = counted
            sums.update(counted)
        for (peer, direction), count in sorted(sums.items()):
            messages.add_metric([peer, direction], count)
        return messages

    def _count(self, id: str) -> Counter[tuple[str, str]]:
        view = self._describe(self._store.job(id))
        sent = {(peer, "sent"): count for peer, count in view.sent.items()}
        return Counter(sent | {(peer, "received"): count for peer, count in view.received.items()})


# ---------------------------------------------------------------- web


ENDED = 20  # how many of the jobs that have ended the page shows
_CONNECTIONS = 100

_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src '{STYLE_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def app(
    store: Store, name: str, describe: Callable[[JobRow], JobView], *, hosts: Collection[str] | None = LOCAL
) -> ASGIApp:
    """Return the application: ``/``, ``/jobs/ID``, ``/metrics`` and ``/health``, for GET alone.

    Parameters
    ----------
    store : Store
        The node's database.
    name : str
        The organisation's name.
    describe : callable
        Returns what is shown of a job.
    hosts : collection of str or None
        The names by which it may be asked for: a page elsewhere whose name is made to lead to this machine is refused.
        None: any, where it listens to others than this machine.
    """
    metrics = registry(store, name, describe)

    def shown(states: Collection[str], newest: int | None = None) -> list[Shown]:
        return [(job, describe(job)) for job in store.jobs(states, newest)]

    def page(request: Request) -> Response:
        still = "still" in request.query_params
        open_jobs, ended = shown(TRANSITIONS.keys() - FINAL), shown(FINAL, ENDED)
        peers, head = store.peers(), store.head()
        return HTMLResponse(overview(name, open_jobs, ended, peers, head, refresh=not still, now=time.time()))

    def one_job(request: Request) -> Response:
        still = "still" in request.query_params
        if not store.has(request.path_params["id"]):
            return PlainTextResponse("There is no such job.\n", 404)
        job = store.job(request.path_params["id"])
        return HTMLResponse(job_page(name, job, describe(job), store.head(), refresh=not still, now=time.time()))

    def measured(request: Request) -> Response:
        return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)

    def health(request: Request) -> Response:
        store.head()
        return JSONResponse({"status": "ok"})

    routes = [Route("/", page), Route("/jobs/{id}", one_job), Route("/metrics", measured), Route("/health", health)]
    return Starlette(
        routes=routes, middleware=[Middleware(_Guard, hosts=hosts)], exception_handlers={ConfigError: _unusable}
    )


def _unusable(request: Request, error: Exception) -> Response:
    """Say that the database cannot be used; why, and where it is, stands in the node's log."""
    return JSONResponse({"status": "the node's database cannot be used; its log has the details"}, 503)


class _Guard:
    """Refuses requests for other hosts, and puts what a browser may do with them on all responses."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        if scope["type"] == "http" and not asks_for(Headers(scope=scope).get("host", ""), self._hosts):
            await PlainTextResponse("This page is not at that name.\n", 400)(scope, receive, with_headers)
        else:
            await self._app(scope, receive, with_headers)


class Serving:
    """The page at an address, served by a thread until `stop`; ConfigError where it cannot listen there.

    Parameters
    ----------
    listen : str
        ``host:port``. Where only this machine can reach it, it answers to this machine's names alone, see `app`.
    """

    def __init__(self, store: Store, name: str, describe: Callable[[JobRow], JobView], listen: str) -> None:
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        try:
            family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, int(port)), family=family)
        except OSError as error:
            raise ConfigError(
                f"the page cannot listen at {listen}: {error.strerror or error} - at web.listen"
            ) from None
        application = app(store, name, describe, hosts=LOCAL if is_loopback(host) else None)
        config = uvicorn.Config(
            application, http=Impatient, ws="none", lifespan="off", access_log=False, log_config=None,
            server_header=False, limit_concurrency=_CONNECTIONS, timeout_graceful_shutdown=2,
        )  # fmt: skip
        self.port: int = self._socket.getsockname()[1]
        self._server = uvicorn.Server(config)
        run = {"sockets": [self._socket]}
        self._thread = threading.Thread(target=self._server.run, kwargs=run, name="treaty-web", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and return when nothing is read from the database any more."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()
