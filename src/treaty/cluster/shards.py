"""A party's rows on several workers: each holds some stripes of them, and one result is made of all.

The party's own process, the *driver*, keeps everything that grows slowly: the tree, the partition of rows, keys, and
the tables on its disk. What takes long for every row is a *step*, a function of a module that is called at each worker
with its `Shard` and its rows of the arguments::

    shards.keep("codes", codes)                                # once
    parts = shards.each(bin_sums, offsets, ByRows(nodes))      # one result of each worker

Stripes of `STRIPE` rows are dealt out in turn, so that any part of the table is spread over all workers. Steps depend
on nothing but what they are given and what the shard keeps: a worker that is lost is replaced, gets what it kept, and
does its step again, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.machine.arrays import pieces

STRIPE = 1 << 14
"""Rows that lie at one worker, one after the other: whole blocks of the lattice map, whose degree divides it."""

PIECE_BYTES = 32 << 20
"""Most bytes of an array that travel to a worker at once."""


@dataclass(slots=True)
class Shard:
    """What worker `number` of `count` keeps: its rows of arrays, by name, and what steps made of them.

    `threads` are those a step may use. Rows are numbered from 0 in the order of the table.
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
        """Make room for an array, which replaces one of the same name."""
        self.drop(name)
        self._begun += 1
        self.arrays[name], self._versions[name] = np.empty(shape, dtype), self._begun
        self._missing[name] = shape[0]

    def fill(self, name: str, start: int, rows: NDArray[Any]) -> None:
        """Take some rows of an array, from row `start` of this worker on, each once."""
        self.arrays[name][start : start + len(rows)] = rows
        self._missing[name] -= len(rows)

    @property
    def is_whole(self) -> bool:
        """Whether all rows of all arrays have come."""
        return not any(self._missing.values())

    def drop(self, name: str) -> None:
        """Forget an array and what was made of it."""
        self.arrays.pop(name, None)
        self._missing.pop(name, None)
        version = self._versions.pop(name, None)
        self._made = {key: made for key, made in self._made.items() if version not in made[0]}

    def made_of(self, key: str, names: Sequence[str], make: Callable[[], Any]) -> Any:
        """Return what `make` makes of arrays; it is kept until one of them is replaced or forgotten."""
        state = [self._versions[name] for name in names]
        if key not in self._made or self._made[key][0] != state:
            self._made[key] = [*state], make()
        return self._made[key][1]


@dataclass(frozen=True, slots=True)
class ByRows:
    """An argument of which each worker gets its rows: along `axis`, from row `first` of the table on.

    With `places` (of `places`), rows are some of the table's, in any order.
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
        """Return the rows of one worker, at most `most` at a time; of rows along axis 0."""
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
    """Return which of `length` rows from row `first` on are a worker's: slices that count from `first`."""
    begun = first // STRIPE
    stripe = begun + (number - begun) % count  # the first own one, from the one that `first` is in
    starts = range(stripe * STRIPE - first, length, count * STRIPE)
    return [slice(max(at, 0), min(at + STRIPE, length)) for at in starts if at + STRIPE > 0]


def rows_before(number: int, count: int, first: int) -> int:
    """Return how many of the rows before row `first` of the table are a worker's."""
    begun, within = divmod(first, STRIPE)
    rows = (begun // count + (begun % count > number)) * STRIPE
    return rows + within if begun % count == number else rows


class Shards(Protocol):
    """A party's workers."""

    @property
    def count(self) -> int: ...

    def keep(
        self, name: str, array: NDArray[Any], places: Sequence[NDArray[np.int64]] | None = None, first: int = 0
    ) -> None:
        """Give workers their rows of an array, (rows, ...), until another of this name comes, or `drop`.

        The array must not change meanwhile: a worker that replaces a lost one is given it again. `places` and `first`
        as in `ByRows`.
        """

    def drop(self, name: str) -> None:
        """Let workers forget an array."""

    def each(self, step: Callable[..., Any], *args: Any) -> list[Any]:
        """Return ``step(shard, *args)`` of every worker, in order; of `ByRows` each gets its rows."""


def places(rows: NDArray[np.int32], count: int) -> list[NDArray[np.int64]]:
    """Return at which places of `rows`, row numbers of the table, each of `count` workers finds its own."""
    owner = rows // STRIPE % count
    return [np.flatnonzero(owner == number) for number in range(count)]


def local_rows(rows: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """Return the numbers that rows of the table have at their workers."""
    stripe, within = np.divmod(rows, STRIPE)
    local: NDArray[np.int32] = (stripe // count * STRIPE + within).astype(np.int32)
    return local


def cut_arguments(args: Sequence[Any], number: int, count: int) -> list[Any]:
    """Return what one worker gets of a step's arguments."""
    return [arg.of(number, count) if isinstance(arg, ByRows) else arg for arg in args]


def added_up(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the sum of the workers' results."""
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total
