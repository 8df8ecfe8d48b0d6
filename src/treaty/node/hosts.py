"""Names by which a page of this machine is asked for: one elsewhere can have its own lead here (DNS rebinding)."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def asks_for(header: str, hosts: Collection[str] | None) -> bool:
    """Whether a request's header ``Host`` names one of these hosts, written in lower case; None: any will do."""
    name = header if header.endswith("]") else header.rpartition(":")[0] or header
    return hosts is None or name.lower() in hosts
