"""Verdicts that jobs wait for: tables are read, and queries run, in a few threads beside the node's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from treaty.node.rules.policy import Verdict

AT_ONCE = 4
"""Verdicts that are worked out at a time."""
OF_ONE = 2
"""Verdicts on jobs of one submitter that have begun, or wait for a thread, so that others' do not wait for it."""


class Verdicts:
    """The verdicts on jobs that wait to be approved here, each worked out once; `wake` is called when one is there."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._found: dict[str, Future[Verdict]] = {}
        self._under_way: list[tuple[str, Future[Verdict]]] = []  # with submitters; also on jobs that have ended
        self._readers = ThreadPoolExecutor(AT_ONCE, "treaty-verdict")

    def close(self) -> None:
        """Begin no more verdicts."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    def ask(self, job: str, submitter: str, find: Callable[[], Verdict]) -> Verdict | None:
        """Return what `find` has returned of a job, or raise what it has raised; None where it is not there yet.

        Ask again until it is: it begins when there is a place.
        """
        if job not in self._found:
            self._under_way = [each for each in self._under_way if not each[1].done()]
            if sum(of == submitter for of, _ in self._under_way) >= OF_ONE:
                return None
            self._found[job] = begun = self._readers.submit(find)
            self._under_way.append((submitter, begun))
            begun.add_done_callback(lambda _: self._wake())
        return self._found[job].result() if self._found[job].done() else None

    def there(self, job: str) -> Verdict | None:
        """Return the verdict on a job, None where there is none yet, or no more."""
        found = self._found.get(job)
        return found.result() if found is not None and found.done() and found.exception() is None else None

    def drop(self, job: str) -> None:
        """Forget a job that has ended; what has begun comes to its end all the same."""
        found = self._found.pop(job, None)
        if found is not None:
            found.cancel()
