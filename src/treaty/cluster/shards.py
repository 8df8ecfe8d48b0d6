"""A party's rows on several workers: each holds some stripes, and their results are combined.

The party's own process, the *driver*, keeps everything small: the tree, the partition of rows, keys, and the tables on
its disk. Work on every row is a *step*: a module-level function that is called at each worker with its `Shard` and its
rows of the arguments::

    shards.keep("codes", codes)                                # once
    parts = shards.each(bin_sums, offsets, ByRows(nodes))      # one result of each worker

Stripes of `STRIPE` rows are assigned in turn, so that any part of the table is spread over all workers. A step depends
only on its arguments and on the shard. So a lost worker can be replaced: the new one gets the same arrays and repeats
the step, with the same result.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.errors import ClusterLost, ConfigError, TreatyError
from treaty.files import write_whole
from treaty.machine.arrays import Int32s, Integers, forget, pieces
from treaty.machine.process import cores
from treaty.version import __version__

STRIPE = 1 << 14
"""Consecutive rows at one worker: whole blocks of the lattice map, whose degree divides this number."""

PIECE_BYTES = 32 << 20
"""Maximum bytes of an array in one message to a worker."""


@dataclass(slots=True)
class Shard:
    """What worker `number` of `count` holds: its rows of arrays, by name, and what steps computed from them.

    A step may use `threads` threads. Rows are numbered from 0 in the order of the table.
    """

    number: int
    count: int
    threads: int
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)
    _missing: dict[str, int] = field(default_factory=dict)
    _begun: int = 0
    _versions: dict[str, int] = field(default_factory=dict)
    _made: dict[str, tuple[list[int | None], Any]] = field(default_factory=dict)

    def begin(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """Allocate an array, replacing one of the same name."""
        self.drop(name)
        self._begun += 1
        self.arrays[name], self._versions[name] = np.empty(shape, dtype), self._begun
        self._missing[name] = shape[0]

    def fill(self, name: str, start: int, rows: NDArray[Any]) -> None:
        """Store rows of an array, from this worker's row `start` on; each row comes once."""
        self.arrays[name][start : start + len(rows)] = rows
        self._missing[name] -= len(rows)

    @property
    def is_whole(self) -> bool:
        """Whether all rows of all arrays have arrived."""
        return not any(self._missing.values())

    def drop(self, name: str) -> None:
        """Drop an array and what was computed from it."""
        self.arrays.pop(name, None)
        self._missing.pop(name, None)
        version = self._versions.pop(name, None)
        self._made = {key: made for key, made in self._made.items() if version not in made[0]}

    def made_of(self, key: str, names: Sequence[str], make: Callable[[], Any]) -> Any:
        """Return the cached result of `make`; it is dropped when one of the arrays `names` is replaced or dropped."""
        # Versions, not contents: a replaced array has a new version even if its values are equal.
        state = [self._versions[name] for name in names]
        if key not in self._made or self._made[key][0] != state:
            self._made[key] = [*state], make()
        return self._made[key][1]


@dataclass(frozen=True, slots=True)
class ByRows:
    """An argument of which each worker gets its rows, along `axis`; the array starts at row `first` of the table.

    With `places` (from the function `places`), the array holds any rows of the table, in any order.
    """

    array: NDArray[Any]
    axis: int = 0
    first: int = 0
    places: Sequence[Integers] | None = None

    def of(self, number: int, count: int) -> NDArray[Any]:
        if self.places is not None:
            return np.take(self.array, self.places[number], self.axis)
        if count == 1:
            return self.array
        along = (slice(None),) * (self.axis % self.array.ndim)
        length = int(self.array.shape[self.axis])
        found = [self.array[(*along, part)] for part in own_stripes(number, count, self.first, length)]
        return np.concatenate(found, self.axis) if found else self.array[(*along, slice(0, 0))]

    def parts(self, number: int, count: int, most: int) -> Iterator[NDArray[Any]]:
        """Yield the rows of one worker, at most `most` at a time, along axis 0."""
        if self.places is not None:
            at = self.places[number]
            yield from (self.array[at[part]] for part in pieces(len(at), most))
            return
        for stripe in own_stripes(number, count, self.first, len(self.array)):
            rows = self.array[stripe]
            yield from (rows[part] for part in pieces(len(rows), most))

    def size(self, number: int, count: int) -> int:
        if self.places is not None:
            return len(self.places[number])
        length = int(self.array.shape[self.axis])
        return sum(part.stop - part.start for part in own_stripes(number, count, self.first, length))


def own_stripes(number: int, count: int, first: int, length: int) -> list[slice]:
    """Return the worker's stripes among `length` rows from row `first` on, as slices relative to `first`."""
    begun = first // STRIPE
    # the worker's first stripe at or after the one that contains `first`
    stripe = begun + (number - begun) % count
    starts = range(stripe * STRIPE - first, length, count * STRIPE)
    return [slice(max(at, 0), min(at + STRIPE, length)) for at in starts if at + STRIPE > 0]


def rows_before(number: int, count: int, first: int) -> int:
    """Return how many rows before row `first` of the table belong to a worker."""
    begun, within = divmod(first, STRIPE)
    rows = (begun // count + (begun % count > number)) * STRIPE
    return rows + within if begun % count == number else rows


def places(rows: Int32s, count: int) -> list[Integers]:
    """Return, for each of `count` workers, the positions in `rows` (row numbers) of its own rows."""
    owner = rows // STRIPE % count
    return [np.flatnonzero(owner == number) for number in range(count)]


def local_rows(rows: Int32s, count: int) -> Int32s:
    """Return the numbers of rows of the table within their workers."""
    stripe, within = np.divmod(rows, STRIPE)
    return np.asarray(stripe // count * STRIPE + within, np.int32)


def cut_arguments(args: Sequence[Any], number: int, count: int) -> list[Any]:
    """Return the arguments of a step for one worker."""
    return [arg.of(number, count) if isinstance(arg, ByRows) else arg for arg in args]


def added_up(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the sum of the workers' results."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


# ----------------- workers on Ray: each is an actor of the party's own cluster, or of one started on this machine
#
# Ray runs any code that reaches its ports: keep a cluster within the party's own network, with its token on
# (``RAY_AUTH_MODE=token``, the default here). Actors get no data when they are created, as Ray would keep it; rows
# travel in calls of at most `PIECE_BYTES`. No call is retried: the step of a lost actor is started again at another
# one.

logger = logging.getLogger(__name__)

_AUTH = "RAY_AUTH_MODE"
# Size of the object store of a local cluster, which holds arguments and results of calls.
_STORE_BYTES = 1 << 30
# Seconds for workers to start, including imports and compiling.
_START = 180.0
# How often a step is restarted before the cluster counts as lost.
_REPLACEMENTS = 3


@dataclass(frozen=True, slots=True)
class Cluster:
    """A party's cluster: "ray" starts it on this machine, "ray://host:port" is the head of a running one.

    `workers` is the number of workers, by default one for each node of the cluster, two on this machine. They share the
    cores equally.
    """

    address: str
    workers: int | None = None

    def __post_init__(self) -> None:
        if self.address != "ray" and not self.address.removeprefix("ray://").partition(":")[2].isdecimal():
            raise ConfigError(f'expected cluster = "ray", or "ray://host:port" of its head, got {self.address!r}')
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"expected cluster_workers to be 1 or more, got {self.workers}")


class _NotWhole(Exception):
    """Some rows of an array are missing."""


class _Actor:
    """Runs steps on its shard; `Shards` makes it a Ray actor."""

    def __init__(self, number: int, count: int, threads: int) -> None:
        self._shard = Shard(number, count, threads)

    def call(self, method: str, *args: Any) -> None:
        getattr(self._shard, method)(*args)

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        # A call has failed, for example out of memory: treat the worker as lost.
        if not self._shard.is_whole:
            raise _NotWhole
        return step(self._shard, *args)

    def process(self) -> tuple[int, str]:
        """Return the actor's process id, and its version of Treaty."""
        return os.getpid(), __version__


@contextmanager
def opened(cluster: Cluster | None) -> Iterator[Shards | None]:
    """Connect to a party's cluster and start workers; end them on exit. None yields None.

    Raises ConfigError if Ray is not installed, the cluster cannot be reached, or its token is missing.
    """
    if cluster is None:
        yield None
        return
    with ExitStack() as held:
        try:
            ray, started_here = _connected(cluster)
            if started_here:
                held.callback(ray.shutdown)
            nodes = 2 if cluster.address == "ray" else sum(node["Alive"] for node in ray.nodes())
            count = cluster.workers or nodes
            shards = Shards(ray, count, max(1, int(ray.cluster_resources().get("CPU", 1)) // count))
            held.callback(shards.close)
            shards.wait_for_all(_START)
        except TreatyError:
            raise
        except Exception as error:
            # Ray has no exception class of its own for failed starts.
            raise ConfigError(
                f"cannot reach the cluster {cluster.address!r}: {_lines(error)[0]}; see docs/clusters.md",
                public="its cluster cannot be reached",
            ) from error
        yield shards


def _connected(cluster: Cluster) -> tuple[Any, bool]:
    """Connect to Ray; return it, and whether it was not connected before."""
    # Ray reads this variable when it is imported.
    if "ray" not in sys.modules:
        os.environ.setdefault(_AUTH, "token")
    # Usage statistics would be sent to Ray's makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        # Imported here, as it takes seconds and few users need it.
        import ray
    except ImportError:
        raise ConfigError("a cluster needs Ray, which is not installed: pip install 'treaty-learn[ray]'") from None
    if os.environ.get(_AUTH, "token") != "token":
        raise ConfigError(
            f"expected {_AUTH}=token, got {os.environ[_AUTH]!r}: everyone who reaches the cluster could use it"
        )
    if ray.is_initialized():
        return ray, False
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    if cluster.address == "ray":
        # Ray would make the token in a file that other users can read.
        token = Path.home() / ".ray" / "auth_token"
        given = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
        if not given and not token.exists():
            token.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(token, [secrets.token_hex(32).encode()], replace=False)
        ray.init("local", num_cpus=cores(), object_store_memory=_STORE_BYTES, **quiet)
    else:
        ray.init(cluster.address.removeprefix("ray://"), log_to_driver=False, logging_level=logging.ERROR)
    return ray, True


class Shards:
    """A party's workers, `count` Ray actors; `replaced` counts those that were lost and replaced."""

    def __init__(self, ray: Any, count: int, threads: int) -> None:
        self.count, self.replaced = count, 0
        self._ray, self._threads = ray, threads
        # Reserve no cores, or a second job would wait for them. Ray must not restart a lost actor, whose arrays it does
        # not know, nor retry a call.
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD", "max_restarts": 0, "max_task_retries": 0}
        self._kind = ray.remote(**options)(_Actor)
        self._kept: dict[str, ByRows] = {}
        self._actors = [self._kind.remote(number, count, threads) for number in range(count)]

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all workers have started; raise ConfigError if the cluster has no room for them."""
        waited = [actor.process.remote() for actor in self._actors]
        ready, late = self._ray.wait(waited, num_returns=len(waited), timeout=seconds)
        if late:
            raise ConfigError(
                f"{len(ready)} of {self.count} workers of the cluster started within {seconds:g} s: see `ray status`, "
                "and check that the same Treaty is installed on all its machines"
            )
        try:
            versions = {release for _, release in self._ray.get(waited)}
        except self._ray.exceptions.RayError as error:
            raise ConfigError(
                f"a worker of the cluster could not start: {_lines(error)[-1]}; is the same Treaty installed on all "
                f"its machines, and were all started with {_AUTH}=token?"
            ) from None
        if versions != {__version__}:
            raise ConfigError(f"expected Treaty {__version__} on all machines of the cluster, got {sorted(versions)}")

    def processes(self) -> list[int]:
        """Return the workers' process ids."""
        return [number for number, _ in self._ray.get([actor.process.remote() for actor in self._actors])]

    def keep(self, name: str, array: NDArray[Any], places: Sequence[Integers] | None = None, first: int = 0) -> None:
        """Give workers their rows of an array (rows, ...), until `drop` or another array of this name.

        The array must not change: a worker that replaces a lost one gets it again. `places` and `first` as in `ByRows`.
        """
        self._kept[name] = ByRows(array, 0, first, places)
        self._of_all(lambda number: self._give(number, name))

    def drop(self, name: str) -> None:
        """Drop an array at all workers."""
        self._kept.pop(name, None)
        self._of_all(lambda number: self._actors[number].call.remote("drop", name))

    def each(self, step: Callable[..., Any], *args: Any) -> list[Any]:
        """Return ``step(shard, *args)`` of each worker, in order; each gets its rows of `ByRows` arguments.

        Raises what the step raises, or ClusterLost if workers are lost again and again.
        """
        return self._of_all(
            lambda number: self._actors[number].run.remote(step, *cut_arguments(args, number, self.count))
        )

    def close(self) -> None:
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
            # Keep one piece at a time in the object store. Errors are ignored here: `_NotWhole` reveals them.
            self._ray.wait([last])
            last = actor.call.remote("fill", name, start, np.ascontiguousarray(rows))
            start += len(rows)
            forget(array)
        return last

    def _of_all(self, begin: Callable[[int], Any]) -> list[Any]:
        """Start a call at each worker and return the results; repeat it at workers that were replaced."""
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
        """Return an error that means that a worker is lost; raise the step's own error, without Ray's text."""
        # Ray's text names machines and files, which peers must not learn.
        cause = getattr(error, "cause", None)
        if cause is None or isinstance(cause, _NotWhole | MemoryError | self._ray.exceptions.RayError):
            return error  # type: ignore[no-any-return]
        raise cause from None

    def _replace(self, number: int) -> None:
        """Replace a lost worker, and give the new one its arrays."""
        # It may only be unreachable, and must not continue.
        self._ray.kill(self._actors[number])
        self.replaced += 1
        self._actors[number] = self._kind.remote(number, self.count, self._threads)
        for name in self._kept:
            self._give(number, name)


def _lines(error: BaseException) -> list[str]:
    return str(error).strip().splitlines() or [type(error).__name__]
