"""Sums of gradients over bins, for the nodes of one tree after another.

Where possible, a row's grad, hess and a 1 for its count share one 64-bit word, so that one addition serves three sums.
Words are added up in small tables that stay in the first-level cache, and unpacked into the int64 sums before a field
can overflow, so that the result is exact. Codes are read row by row, with prefetching, as a row's codes lie together.

A histogram slot holds three int64: sum of grad, sum of hess, number of rows. Slots lie one feature after another
(`offsets`), each feature's last slot being its missing values. Integer sums do not depend on the order of additions,
so neither the number of threads nor the party that computes them can change a tree.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from treaty.machine.arrays import Codes, Flags, Floats, Int32s, Integers
from treaty.machine.kernels import inner, kernel
from treaty.machine.shared_work import share

# Indices in loops over rows are unsigned: numba then leaves out the test for negative ones, which halves their time.

# rows to prefetch: about as many as are added up while one comes from memory
AHEAD = 16
# features added up together: their words, 2 kB each for codes of uint8, stay in the first-level cache
TABLES = 12
# bits of the count below which unpacking words costs more than it saves
_FEWEST = 7
# cells (a row's value of a feature) that are summed before a second thread starts
_SMALL = 1 << 15


def width_of(offsets: Int32s) -> int:
    """Return the length of lists of a column's bins: 256 for codes of uint8, else a multiple of 8 with all slots."""
    return max(256, -(-int(np.diff(offsets).max(initial=0)) // 8) * 8)


class Histograms:
    """Bin sums of binned rows.

    `codes`, (n_rows, n_features), and `columns`, its transpose, are both in C order: gradients that fit no word are
    added up feature by feature. `offsets` has the first slot of each feature in a node's sums.
    """

    def __init__(self, codes: Codes, columns: Codes, offsets: Int32s, threads: int = 1) -> None:
        self._flat, self._columns, self._offsets, self._threads = codes.reshape(-1), columns, offsets, threads
        self._words = np.empty(len(codes), np.int64)
        # width of a word's lower fields, hess and count; all have room for the sums of 2**count_bits - 1 rows
        self._hess_bits, self._count_bits = 25, 10

    def start_tree(self, grad: Integers, hess: Integers, features: Int32s) -> None:
        """Take a tree's gradients (n_rows,) and features, ascending."""
        self._grad, self._hess = grad, hess
        # read-only arrays, as of a message, are another type to numba
        self._features = features.copy()
        self._packed = self._pack()

    def end_tree(self) -> None:
        del self._grad, self._hess

    def sums(self, rows: Int32s, starts: Integers, firsts: Integers | None = None) -> Integers:
        """Return sums of grad and hess and the number of rows per bin and node, int64 (n_nodes, slots, 3).

        Node k holds ``starts[k + 1] - starts[k]`` of `rows`, from ``firsts[k]`` on (None: ``starts[k]``). Features
        outside the tree's sample stay 0.
        """
        features, offsets = self._features, self._offsets
        sums = np.zeros((len(starts) - 1, int(offsets[-1]), 3), np.int64)
        if self._packed:
            self._add_words(rows, starts, starts if firsts is None else firsts, sums)
            return sums
        if firsts is not None:
            stops = firsts + np.diff(starts)
            rows = np.concatenate([rows[:0], *(rows[a:b] for a, b in zip(firsts, stops, strict=True))])
        pairs = np.empty((len(rows), 2), np.int64)
        share(lambda a, b: gather_pairs(self._grad, self._hess, rows, a, b, pairs), len(pairs), self._threads, 1 << 15)
        where, least = (pairs, rows, starts, features, offsets), 1 + _SMALL // (len(rows) + 1)
        share(lambda a, b: add_histograms(self._columns, *where, a, b, sums), len(features), self._threads, least)
        return sums

    def _add_words(self, rows: Int32s, starts: Integers, firsts: Integers, sums: Integers) -> None:
        """Add rows to `sums`, each thread some of them."""
        features, bits, wide = self._features, (self._hess_bits, self._count_bits), width_of(self._offsets)
        begun: list[tuple[int, Integers]] = []

        def work(first: int, last: int) -> None:
            node = int(np.searchsorted(starts, first, side="right")) - 1
            rest = np.zeros((sums.shape[1] if first > starts[node] else 0, 3), np.int64)
            # made here: what makes arrays takes long to compile
            tables, parts = np.zeros((TABLES, wide), np.int64), np.zeros((len(features), 3, wide), np.int64)
            add_packed(
                self._flat, self._words, rows, firsts, starts, features, self._offsets, bits, first, last,
                tables, tables.reshape(-1), parts, sums, rest,
            )  # fmt: skip
            # a node that another thread began gets its rest at the end
            if len(rest):
                begun.append((node, rest))

        share(work, int(starts[-1]), self._threads, least=1 + _SMALL // (len(features) + 1))
        for node, rest in begun:
            sums[node] += rest

    def _pack(self) -> bool:
        """Pack the tree's gradients; return False if they are too large or a hess is negative."""
        grad_size, hess_size = self._fill()
        of_hess, of_count = self._hess_bits, self._count_bits
        # the last tree's widths mostly fit: one pass over the rows instead of two
        if hess_size + of_count <= of_hess and 1 + grad_size + of_count + of_hess + of_count <= 64:
            return True
        of_count = (63 - grad_size - hess_size) // 3
        if of_count < _FEWEST:
            return False
        self._hess_bits, self._count_bits = hess_size + of_count, of_count
        self._fill()
        return True

    def _fill(self) -> tuple[int, int]:
        """Fill the words; return the bits of the longest grad and hess, 64 where a hess is negative."""
        used = [(0, 0)]

        def work(first: int, last: int) -> None:
            used.append(pack(self._grad, self._hess, self._hess_bits, self._count_bits, first, last, self._words))

        share(work, len(self._words), self._threads, least=1 << 14)
        grads, hesses = (reduce(or_, numbers) for numbers in zip(*used, strict=True))
        return grads.bit_length(), hesses.bit_length() if hesses >= 0 else 64


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(_: Any, array: Any, index: Any) -> Any:
    """Prefetch ``array[index]`` into the first-level cache."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        at = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        whole = ir.IntType(32)
        form = ir.FunctionType(ir.VoidType(), [at.type, whole, whole, whole])
        function = builder.module.declare_intrinsic("llvm.prefetch", [at.type], form)
        builder.call(function, [at, whole(0), whole(3), whole(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


@kernel
def pack(grad: Any, hess: Any, hess_bits: int, count_bits: int, first: int, last: int, words: Any) -> Any:
    """Pack the grad, hess and count 1 of each of rows ``first..last`` into one 64-bit word, grad in the highest bits.

    Returns two numbers with as many bits as the longest grad and hess; the second is negative if some hess is.
    """
    grads = hesses = np.int64(0)
    for i in range(np.uint64(first), np.uint64(last)):
        grads |= grad[i] ^ (grad[i] >> 63)
        hesses |= hess[i]
        words[i] = (grad[i] << (hess_bits + count_bits)) + (hess[i] << count_bits) + 1
    return grads, hesses


@inner
def _take_apart(tables: Any, features: Any, offsets: Any, bits: tuple[int, int], parts: Any) -> None:
    """Add the words' sums to `parts`, int64 (n_features, 3, width), and clear the tables."""
    hess_bits, count_bits = bits
    of_hess, of_count = (np.int64(1) << hess_bits) - 1, (np.int64(1) << count_bits) - 1
    for k in range(features.shape[0]):
        words = tables[k]
        grad, hess, count = parts[k, 0], parts[k, 1], parts[k, 2]
        for code in range(np.uint64(offsets[features[k] + 1] - offsets[features[k]])):
            word = words[code]
            words[code] = 0
            grad[code] += word >> (hess_bits + count_bits)
            hess[code] += (word >> count_bits) & of_hess
            count[code] += word & of_count


@inner
def _write_slots(parts: Any, features: Any, offsets: Any, slots: Any) -> None:
    """Write a node's `parts` into its slots, (slots, 3), and clear them."""
    for k in range(features.shape[0]):
        mine = slots[offsets[features[k]] : offsets[features[k] + 1]]
        grad, hess, count = parts[k, 0], parts[k, 1], parts[k, 2]
        for code in range(np.uint64(mine.shape[0])):
            mine[code, 0], mine[code, 1], mine[code, 2] = grad[code], hess[code], count[code]
            grad[code] = hess[code] = count[code] = 0


@inner
def _add_adjoining(
    flat: Any, width: Any, words: Any, rows: Any, first: int, last: int, column: Any, count: Any, tables: Any, wide: Any
) -> None:  # fmt: skip
    """Add ``rows[first:last]`` to the tables, `wide` words each, of `count` adjacent features from `column` on."""
    # a block's last rows prefetch the next block's first
    end = np.uint64(rows.shape[0] - 1)
    for i in range(np.uint64(first), np.uint64(last)):
        ahead = np.uint64(rows[min(i + np.uint64(AHEAD), end)])
        _prefetch(words, ahead)
        _prefetch(flat, ahead * width + column)
        row = np.uint64(rows[i])
        word = words[row]
        at = row * width + column
        for k in range(count):
            tables[np.uint64(k) * wide + np.uint64(flat[at + k])] += word


@kernel
def add_packed(
    codes: Any, words: Any, rows: Any, firsts: Any, starts: Any, features: Any, offsets: Any, bits: tuple[int, int],
    first: int, last: int, tables: Any, flat_tables: Any, parts: Any, sums: Any, rest: Any,
) -> None:  # fmt: skip
    """Write sums of words, of `pack`, into `sums`, int64 (n_nodes, slots, 3), for all `features`.

    Node k holds ``starts[k + 1] - starts[k]`` of `rows`, from ``firsts[k]`` on. Of all nodes' rows, one node after the
    other, those from `first` to `last` are added; sums of a node that begins before are written into `rest` (slots, 3).
    `codes` is (n_rows * n_features,), row after row; `bits` are the widths of a word's hess and count fields,
    which, as grad's, have room for the sums of ``2**count_bits - 1`` rows. `tables`, int64 (TABLES, width), and the
    same as one row, and `parts`, int64 (n, 3, width) for n `features`, are 0 before and after.
    """
    width, wide = np.uint64(codes.shape[0] // max(1, words.shape[0])), np.uint64(tables.shape[1])
    most = (1 << bits[1]) - 1
    for node in range(starts.shape[0] - 1):
        moved = firsts[node] - starts[node]
        begin, end = max(starts[node], first) + moved, min(starts[node + 1], last) + moved
        if begin >= end:
            continue
        for block in range(begin, end, most):
            stop = min(block + most, end)
            after = 0
            while after < features.shape[0]:
                here = after
                after += 1
                while after < min(features.shape[0], here + TABLES) and features[after] == features[after - 1] + 1:
                    after += 1
                column, count = np.uint64(features[here]), np.uint64(after - here)
                _add_adjoining(codes, width, words, rows, block, stop, column, count, flat_tables, wide)
                _take_apart(tables, features[here:after], offsets, bits, parts[here:after])
        _write_slots(parts, features, offsets, rest if starts[node] < first else sums[node])


@kernel
def gather_pairs(grad: Any, hess: Any, rows: Any, first: int, last: int, pairs: Any) -> None:
    """Copy grad and hess of ``rows[first:last]`` side by side into ``pairs[first:last]``."""
    for i in range(np.uint64(first), np.uint64(last)):
        row = np.uint64(rows[i])
        pairs[i, 0] = grad[row]
        pairs[i, 1] = hess[row]


@kernel
def add_histograms(
    columns: Any, pairs: Any, rows: Any, starts: Any, features: Any, offsets: Any, first: int, last: int, sums: Any
) -> None:
    """Add rows to the histograms `sums`, int64 (n_nodes, slots, 3), for ``features[first:last]``.

    `columns` is (n_features, n_rows); node k holds ``rows[starts[k]:starts[k + 1]]``, whose grad and hess are in
    the same lines of `pairs`, int64 (m, 2).
    """
    for position in range(first, last, 2):
        # two features at a time share the loads of row number and gradient; the last one may be alone
        both = np.int64(position + 1 < last)
        feature, feature2 = features[position], features[position + both]
        column, column2 = columns[feature], columns[feature2]
        offset, offset2 = np.uint64(offsets[feature]), np.uint64(offsets[feature2])
        for node in range(starts.shape[0] - 1):
            slots = sums[node]
            for i in range(np.uint64(starts[node]), np.uint64(starts[node + 1])):
                row = np.uint64(rows[i])
                slot = offset + np.uint64(column[row])
                slot2 = offset2 + np.uint64(column2[row])
                grad, hess = pairs[i, 0], pairs[i, 1]
                slots[slot, 0] += grad
                slots[slot, 1] += hess
                slots[slot, 2] += 1
                slots[slot2, 0] += both * grad
                slots[slot2, 1] += both * hess
                slots[slot2, 2] += both


# -------------------------------------------- candidates as columns of 0 and 1, and bin sums recovered from their sums
#
# A column stands for a candidate with missing values going right: of a number, the rows in bin k or a lower one; of a
# category, the rows that have it, for which categories form a candidate is known only once their sums are. Empty bins
# have no column. Nor has each feature's last bin with rows: it holds the rest of the node's total.


def count_bins(codes: Codes, features: Int32s, offsets: Int32s) -> Int32s:
    """Return the number of a node's rows in each slot, int32 (slots,), from their codes (n_rows, n_features).

    Slots of features outside the tree's column sample `features` stay 0.
    """
    slots = (codes[:, features].astype(np.int64) + offsets[features]).ravel()
    return np.bincount(slots, minlength=int(offsets[-1])).astype(np.int32)


def candidate_slots(counts: Int32s, features: Int32s, offsets: Int32s) -> Int32s:
    """Return the slots with a column of their own, int32 (columns,), ascending."""
    filled = [offsets[f] + np.flatnonzero(counts[offsets[f] : offsets[f + 1]])[:-1] for f in features]
    return np.concatenate([np.empty(0, np.int32), *filled]).astype(np.int32)


def candidate_columns(codes: Codes, slots: Int32s, offsets: Int32s, categorical: Flags) -> Floats:
    """Return the columns of `candidate_slots`, float64 (n_rows, columns) of 0 and 1."""
    feature = np.searchsorted(offsets, slots, side="right") - 1
    bins, of_rows = slots - offsets[feature], codes[:, feature]
    return np.where(categorical[feature], of_rows == bins, of_rows <= bins).astype(np.float64)


def whole_numbers(sums: Floats) -> Integers:
    """Round float64 sums of whole numbers to int64; raise ValueError if one is more than 1/4 from a whole number."""
    rounded = np.rint(sums)
    with np.errstate(invalid="ignore"):
        fine = (np.abs(sums - rounded) <= 0.25) & (np.abs(sums) < 2.0**62)
    if not fine.all():
        raise ValueError("expected sums of whole numbers")
    return rounded.astype(np.int64)


def bin_sums(
    columns: Integers, slots: Int32s, counts: Int32s, totals: Integers, features: Int32s, offsets: Int32s,
    categorical: Flags,
) -> Integers:  # fmt: skip
    """Return the sums of all bins of a node, int64 (slots, 3), from those of its candidates.

    `columns` (2, columns) are sums of grad and of hess of the candidates in `slots`, `counts` (slots,) the rows of all
    slots, and `totals` the node's, grad and hess first.
    """
    sums = np.zeros((len(counts), 3), np.int64)
    sums[:, 2] = counts
    starts = np.searchsorted(slots, offsets)
    for f in features.tolist():
        of_candidates = columns[:, starts[f] : starts[f + 1]]
        if not categorical[f]:
            of_candidates = np.diff(of_candidates, axis=1, prepend=0)
        sums[slots[starts[f] : starts[f + 1]], :2] = of_candidates.T
        filled = np.flatnonzero(counts[offsets[f] : offsets[f + 1]])
        if len(filled):
            sums[offsets[f] + filled[-1], :2] = totals[:2] - of_candidates.sum(axis=1)
    return sums


def undivided(totals: Integers, features: Int32s, offsets: Int32s) -> Integers:
    """Return sums of a node without candidates, int64 (slots, 3): all its rows in one bin of each feature."""
    sums = np.zeros((int(offsets[-1]), 3), np.int64)
    sums[offsets[features + 1] - 1] = totals
    return sums
