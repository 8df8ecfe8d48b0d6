"""Connections of web servers that make no progress are closed: uvicorn itself waits for a first request without end."""

from __future__ import annotations

from asyncio import BaseTransport
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

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
