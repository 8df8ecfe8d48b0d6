"""Where the application listens, and until when."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from treaty.errors import ConfigError
from treaty.node.shown.impatience import Impatient

_KEPT = 75  # seconds for which a connection may be silent between requests
_CONNECTIONS = 1000
_WAITING = 2048  # connections that are not yet taken up


def listen(address: str) -> socket.socket:
    """Return a socket that listens at ``host:port``; ConfigError where that is not possible."""
    host, port = split_address(address)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sends at once on sockets that say TCP, which those of `socket.create_server` do not: an answer, head
        # and body, would wait 40 ms for the receiver's delayed acknowledgment
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
        raise ConfigError(
            f"cannot listen at {address}: {error.strerror or error}; name another with --listen"
        ) from None


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[host]:port``; ConfigError for anything else."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"expected HOST:PORT, such as 127.0.0.1:8000, got {address!r} - at --listen")
    return host.removeprefix("[").removesuffix("]"), int(port)


def run(
    app: Any,
    listening: socket.socket,
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve an application until a signal ends it; requests under way are answered first.

    `ready` is called when it listens. Raises ConfigError where certificate and key cannot be used.
    """
    config = uvicorn.Config(
        app, http=Impatient, ws="none", lifespan="off", access_log=False, log_config=None, server_header=False,
        ssl_certfile=certificate, ssl_keyfile=key, limit_concurrency=_CONNECTIONS, timeout_keep_alive=_KEPT,
        timeout_graceful_shutdown=30,
    )  # fmt: skip
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"cannot use the certificate {certificate} with the key {key}: {error.strerror or error}"
        ) from None
    ready()
    server = uvicorn.Server(config)
    try:
        server.run(sockets=[listening])
    except (SystemExit, KeyboardInterrupt):  # uvicorn raises the signal again that it has ended for
        if not server.should_exit:
            raise
