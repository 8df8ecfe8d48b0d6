"""`Shards` on Ray: every worker is an actor of the party's own cluster, or of one that is started on this machine.

Ray runs whatever those who reach its ports send it: keep a cluster within the party's own network, and its token on
(``RAY_AUTH_MODE=token``, which is set here where nothing else is). Actors get no data when they are made, so that a
cluster keeps none of it for later; rows travel in calls of at most `PIECE_BYTES`. Calls are made at most once; what a
lost actor had to do, another does from the start.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.cluster.shards import PIECE_BYTES, ByRows, Shard, cut_arguments
from treaty.errors import ClusterLost, ConfigError, TreatyError
from treaty.files import write_whole
from treaty.machine.arrays import forget
from treaty.machine.process import cores

logger = logging.getLogger(__name__)

_AUTH = "RAY_AUTH_MODE"
_STORE_BYTES = 1 << 30  # of the object store of a cluster on this machine, through which arguments and results go
_START = 180.0  # seconds that workers may take to begin, some of which import and compile
_REPLACEMENTS = 3  # times that a step is begun again, before the cluster counts as lost


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where a party's workers are: "ray" starts them on this machine, "ray://host:port" names the head of a cluster.

    `workers` is their number, by default one for each node of the cluster, two on this machine; their cores are divided
    among them.
    """

    address: str
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.address != "ray" and not self.address.removeprefix("ray://").partition(":")[2].isdecimal():
            raise ConfigError(f'expected cluster = "ray", or "ray://host:port" of its head, got {self.address!r}')
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"expected cluster_workers to be 1 or more, got {self.workers}")


class _NotWhole(Exception):
    """Rows of an array have not come."""


class _Actor:
    """Runs steps on its shard. Made an actor by `RayShards`."""

    def __init__(self, number: int, count: int, threads: int) -> None:
        self._shard = Shard(number, count, threads)

    def call(self, method: str, *args: Any) -> None:
        """Begin, fill or drop an array."""
        getattr(self._shard, method)(*args)

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Return what a step gives for the shard."""
        if not self._shard.is_whole:  # a call that failed, out of memory say: as if the worker were lost
            raise _NotWhole
        return step(self._shard, *args)

    def process(self) -> tuple[int, str]:
        """Return the number of the actor's process, and its version of Treaty."""
        return os.getpid(), version("treaty-learn")


@contextmanager
def opened(cluster: Cluster | None) -> Iterator[RayShards | None]:
    """Connect with a party's cluster and make its workers; take them away at the end. None gives None.

    Raises ConfigError where Ray is not installed, the cluster is not reached, or its token is missing.
    """
    if cluster is None:
        yield None
        return
    with ExitStack() as held:
        try:
            shards = _begun(cluster, held)
        except TreatyError:
            raise
        except Exception as error:  # Ray has no class of its own for what keeps it from starting
            raise ConfigError(
                f"the cluster {cluster.address!r} is not reached: {_lines(error)[0]}; docs/clusters.md helps",
                public="its cluster is not reached",
            ) from error
        yield shards


def _begun(cluster: Cluster, held: ExitStack) -> RayShards:
    """Connect and make workers; `held` takes them away."""
    ray, started_here = _connected(cluster)
    if started_here:
        held.callback(ray.shutdown)
    count = cluster.workers or (2 if cluster.address == "ray" else _nodes(ray))
    shards = RayShards(ray, count, max(1, int(ray.cluster_resources().get("CPU", 1)) // count))
    held.callback(shards.close)
    shards.wait_for_all(_START)
    return shards


def _connected(cluster: Cluster) -> tuple[Any, bool]:
    """Return Ray, connected, and whether it was not before."""
    if "ray" not in sys.modules:  # it reads this when it is imported
        os.environ.setdefault(_AUTH, "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # which would be sent to Ray's makers
    try:
        import ray  # takes seconds, and few need it
    except ImportError:
        raise ConfigError("a cluster needs Ray, which is not installed: pip install 'treaty-learn[ray]'") from None
    if os.environ.get(_AUTH, "token") != "token":
        raise ConfigError(
            f"expected {_AUTH}=token, got {os.environ[_AUTH]!r}: whoever reaches the cluster could use it"
        )
    if ray.is_initialized():
        return ray, False
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    if cluster.address == "ray":
        _make_token()
        ray.init("local", num_cpus=cores(), object_store_memory=_STORE_BYTES, **quiet)
    else:
        ray.init(cluster.address.removeprefix("ray://"), log_to_driver=False, logging_level=logging.ERROR)
    return ray, True


def _make_token() -> None:
    """Make the token that Ray else makes itself, in a file that others may read."""
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return
    token = Path.home() / ".ray" / "auth_token"
    if not token.exists():
        token.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(token, [secrets.token_hex(32).encode()], replace=False)


def _nodes(ray: Any) -> int:
    return sum(node["Alive"] for node in ray.nodes())


class RayShards:
    """See `Shards`; `replaced` counts the workers that were lost and replaced."""

    def __init__(self, ray: Any, count: int, threads: int) -> None:
        self.count, self.replaced = count, 0
        self._ray, self._threads = ray, threads
        # no cores are set aside, for which a second job would wait; a lost actor is not made again by Ray, which would
        # not know what it kept, and no call is made twice
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD", "max_restarts": 0, "max_task_retries": 0}
        self._kind = ray.remote(**options)(_Actor)
        self._kept: dict[str, ByRows] = {}
        self._actors = [self._made(number) for number in range(count)]

    def _made(self, number: int) -> Any:
        return self._kind.remote(number, self.count, self._threads)

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all workers are there; raise ConfigError where the cluster has no room for them."""
        waited = [actor.process.remote() for actor in self._actors]
        ready, late = self._ray.wait(waited, num_returns=len(waited), timeout=seconds)
        if late:
            raise ConfigError(
                f"{len(ready)} of {self.count} workers of the cluster began within {seconds:g} s: see `ray status`, "
                "and whether the same Treaty is installed on all its machines"
            )
        try:
            versions = {release for _, release in self._ray.get(waited)}
        except self._ray.exceptions.RayError as error:
            raise ConfigError(
                f"a worker of the cluster could not begin: {_lines(error)[-1]}; is the same Treaty installed on all "
                f"its machines, and were all started with {_AUTH}=token?"
            ) from None
        if versions != {version("treaty-learn")}:
            raise ConfigError(
                f"expected Treaty {version('treaty-learn')} on all machines of the cluster, got {sorted(versions)}"
            )

    def processes(self) -> list[int]:
        """Return the numbers of the workers' processes."""
        return [number for number, _ in self._ray.get([actor.process.remote() for actor in self._actors])]

    def keep(
        self, name: str, array: NDArray[Any], places: Sequence[NDArray[np.int64]] | None = None, first: int = 0
    ) -> None:
        self._kept[name] = ByRows(array, 0, first, places)
        self._of_all(lambda number: self._give(number, name))

    def drop(self, name: str) -> None:
        self._kept.pop(name, None)
        self._of_all(lambda number: self._actors[number].call.remote("drop", name))

    def each(self, step: Callable[..., Any], *args: Any) -> list[Any]:
        """See `Shards`; raises what a step raises, and ClusterLost where workers are lost again and again."""
        return self._of_all(
            lambda number: self._actors[number].run.remote(step, *cut_arguments(args, number, self.count))
        )

    def close(self) -> None:
        """Take the workers away."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []

    def _give(self, number: int, name: str) -> Any:
        """Send a worker its rows of an array in pieces; return the last call."""
        kept, actor = self._kept[name], self._actors[number]
        array, start = kept.array, 0
        last = actor.call.remote("begin", name, (kept.size(number, self.count), *array.shape[1:]), array.dtype.str)
        most = max(1, PIECE_BYTES // max(1, array[:1].nbytes))
        for rows in kept.parts(number, self.count, most):
            self._ray.wait([last])  # one piece at a time is in the object store; `_NotWhole` tells what fails
            last = actor.call.remote("fill", name, start, np.ascontiguousarray(rows))
            start += len(rows)
            forget(array)
        return last

    def _of_all(self, begin: Callable[[int], Any]) -> list[Any]:
        """Begin a call at every worker, and return the results; do it again at those that are replaced meanwhile."""
        found: dict[int, Any] = {}
        for attempt in range(1 + _REPLACEMENTS):
            calls, lost = dict[int, Any](), dict[int, BaseException]()
            for number in range(self.count):
                if number not in found:
                    try:
                        calls[number] = begin(number)
                    except self._ray.exceptions.RayError as error:
                        lost[number] = error
            for number, call in calls.items():
                try:
                    found[number] = self._ray.get(call)
                except self._ray.exceptions.RayError as error:
                    lost[number] = self._loss(error)
            for number, loss in lost.items():
                logger.warning("worker %d of %d is lost: %s", number, self.count, _lines(loss)[0])
                if attempt < _REPLACEMENTS:
                    self._replace(number)
            if not lost:
                return [found[number] for number in range(self.count)]
        raise ClusterLost(f"workers of the cluster were lost {1 + _REPLACEMENTS} times in one step; see Ray's own logs")

    def _loss(self, error: Any) -> BaseException:
        """Return an error that means that a worker is lost; raise what a step itself raised, without Ray's text."""
        cause = getattr(error, "cause", None)  # Ray's text names machines and files, which peers are not told
        if cause is None or isinstance(cause, _NotWhole | MemoryError | self._ray.exceptions.RayError):
            return error  # type: ignore[no-any-return]
        raise cause from None

    def _replace(self, number: int) -> None:
        """Make a worker in a lost one's place, and give it what that kept."""
        self._ray.kill(self._actors[number])  # one that only could not be reached must not go on
        self.replaced += 1
        self._actors[number] = self._made(number)
        for name in self._kept:
            self._give(number, name)


def _lines(error: BaseException) -> list[str]:
    return str(error).strip().splitlines() or [type(error).__name__]
