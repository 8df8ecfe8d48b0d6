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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.machine.arrays import pieces

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
    places: Sequence[NDArray[np.int64]] | None = None

    def of(self, number: int, count: int) -> NDArray[Any]:
        if self.places is not None:
            return np.take(self.array, self.places[number], self.axis)
        if count == 1:
            return self.array
        along = (slice(None),) * (self.axis % self.array.ndim)
        found = [self.array[(*along, part)] for part in own_stripes(number, count, self.first, self._length())]
        return np.concatenate(found, self.axis) if found else self.array[(*along, slice(0, 0))]

    def parts(self, number: int, count: int, most: int) -> Iterator[NDArray[Any]]:
        """Yield the rows of one worker, at most `most` at a time, along axis 0."""
        if self.places is not None:
            at = self.places[number]
            yield from (self.array[at[part]] for part in pieces(len(at), most))
            return
        for stripe in own_stripes(number, count, self.first, self._length()):
            rows = self.array[stripe]
            yield from (rows[part] for part in pieces(len(rows), most))

    def size(self, number: int, count: int) -> int:
        if self.places is not None:
            return len(self.places[number])
        return sum(part.stop - part.start for part in own_stripes(number, count, self.first, self._length()))

    def _length(self) -> int:
        return int(self.array.shape[self.axis])


def own_stripes(number: int, count: int, first: int, length: int) -> list[slice]:
    """Return the worker's stripes among `length` rows from row `first` on, as slices relative to `first`."""
    begun = first // STRIPE
    # The worker's first stripe at or after the one that contains `first`.
    stripe = begun + (number - begun) % count
    starts = range(stripe * STRIPE - first, length, count * STRIPE)
    return [slice(max(at, 0), min(at + STRIPE, length)) for at in starts if at + STRIPE > 0]


def rows_before(number: int, count: int, first: int) -> int:
    """Return how many rows before row `first` of the table belong to a worker."""
    begun, within = divmod(first, STRIPE)
    rows = (begun // count + (begun % count > number)) * STRIPE
    return rows + within if begun % count == number else rows


class Shards(Protocol):
    """A party's workers, as the protocols use them."""

    @property
    def count(self) -> int: ...

    def keep(
        self, name: str, array: NDArray[Any], places: Sequence[NDArray[np.int64]] | None = None, first: int = 0
    ) -> None:
        """Give workers their rows of an array (rows, ...), until `drop` or another array of this name.

        The array must not change: a worker that replaces a lost one gets it again. `places` and `first` as in `ByRows`.
        """

    def drop(self, name: str) -> None:
        """Drop an array at all workers."""

    def each(self, step: Callable[..., Any], *args: Any) -> list[Any]:
        """Return ``step(shard, *args)`` of each worker, in order; each gets its rows of `ByRows` arguments."""


def places(rows: NDArray[np.int32], count: int) -> list[NDArray[np.int64]]:
    """Return, for each of `count` workers, the positions in `rows` (row numbers) of its own rows."""
    owner = rows // STRIPE % count
    return [np.flatnonzero(owner == number) for number in range(count)]


def local_rows(rows: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Return the numbers of rows of the table within their workers."""
    stripe, within = np.divmod(rows, STRIPE)
    local: NDArray[np.int32] = (stripe // count * STRIPE + within).astype(np.int32)
    return local


def cut_arguments(args: Sequence[Any], number: int, count: int) -> list[Any]:
    """Return the arguments of a step for one worker."""
    return [arg.of(number, count) if isinstance(arg, ByRows) else arg for arg in args]


def added_up(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the sum of the workers' results."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total
