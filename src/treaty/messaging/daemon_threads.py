"""Threads for calls that may lie open for as long as a job takes."""

import queue
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any


class DaemonThreads(futures.Executor):
    """Runs calls in daemon threads, as many as calls were ever under way at once.

    No call waits for another, and an open one does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)  # counts the threads that wait for a task

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "futures.Future[Any]":
        """Run a call in a thread that waits for one, else in a new one; see `futures.Executor.submit`."""
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._tasks.put(run)
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, name="treaty-grpc-call", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End each thread when it is idle; nothing may be submitted afterwards."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # releases the call
            self._idle.release()
        self._tasks.put(None)  # for the next thread
