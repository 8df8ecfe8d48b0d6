"""What is counted of requests, for Prometheus: how many, how long, how many rows. No value of a row is among it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Metrics:
    """The counts of one server, in a registry of their own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "treaty_serve_requests", "Requests for predictions, by HTTP status.", ["status"], registry=self._registry
        )
        self._rows = Counter("treaty_serve_rows", "Rows predicted.", registry=self._registry)
        self._fallback = Counter(
            "treaty_serve_fallback_rows", "Rows predicted without partners, of all.", registry=self._registry
        )
        self._seconds = Histogram(
            "treaty_serve_seconds", "Seconds from a request for predictions to its answer.", buckets=_SECONDS,
            registry=self._registry,
        )  # fmt: skip
        self._under_way = Gauge(
            "treaty_serve_under_way", "Requests for predictions that are being answered.", registry=self._registry
        )

    def began(self) -> None:
        """Count a request that is being answered."""
        self._under_way.inc()

    def ended(self) -> None:
        """Count it no more."""
        self._under_way.dec()

    def answered(self, status: int, seconds: float, n_rows: int = 0, *, fallback: bool = False) -> None:
        """Count an answer, with the rows that were predicted."""
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)
        self._rows.inc(n_rows)
        if fallback:
            self._fallback.inc(n_rows)

    def page(self) -> bytes:
        """Return all counts as Prometheus reads them."""
        return generate_latest(self._registry)
