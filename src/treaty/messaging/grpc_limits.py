"""What a listening party lets strangers and peers take of it: connections, calls, time for a handshake."""

from typing import Any

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

HANDSHAKE_TIMEOUT = 10.0
"""Seconds a connection may take to show its certificate; the C library's own default is two minutes."""

CALLS = 8
"""Calls that one peer may have under way, on all its connections. It needs two, and two more when it dials again."""

_DESCRIPTORS = 1 << 16  # as many as are asked for: some systems name a hard limit that they do not grant
_CONNECTIONS = 4096  # the most, whatever the system allows
_OF_A_PEER = 4  # connections: a watch and one for frames, twice while it dials again


def raise_descriptors() -> int:
    """Raise this process's limit of open files to what the system allows; return it."""
    if resource is None:
        return _DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):  # macOS grants less than its hard limit
            return soft
        return wanted
    return _DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def limiting_options(peers: int) -> list[tuple[str, Any]]:
    """Return a server's options: half of the open files are kept for tables, models and the party's own connections.

    Whoever is beyond is hung up on at once, so that connections which came before go on.
    """
    connections = max(_OF_A_PEER * peers + 16, min(raise_descriptors() // 2, _CONNECTIONS))
    return [
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT * 1000)),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_concurrent_streams", CALLS),
    ]
