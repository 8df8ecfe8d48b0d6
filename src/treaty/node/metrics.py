"""What a node tells Prometheus: read from its database when it is asked, and from its process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import treaty
from treaty.node.page import JobView
from treaty.node.proposals import Verb
from treaty.node.store import FINAL, TRANSITIONS, JobRow, Store


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
