"""Records that come back sorted, from memory or from files that nobody else can read."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.data import large
from treaty.data.large import WORDS, Scratch, SortedRecords, records
from treaty.errors import ConfigError
from treaty.machine.arrays import FileColumn, forget

NUMBERED = np.dtype([("key", np.int32), ("at", np.int64)])
HASHED = np.dtype([("key", np.uint64, (2,)), ("at", np.int64)])
TAGGED = np.dtype([("key", np.uint64), ("at", np.int64)])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def fill(scratch: Scratch, count: int, *, seed: int = 0) -> SortedRecords:
    made = scratch.sorted(HASHED, "key", WORDS, count)
    key = np.random.default_rng(seed).integers(0, 1 << 64, (count, 2), np.uint64)
    made.add(records(HASHED, key=key, at=np.arange(count)))
    return made


@settings(max_examples=90, deadline=None)
@given(st.data(), st.sampled_from([1, 7, 40, 10**6]), st.integers(1, 300), st.sampled_from([NUMBERED, HASHED, TAGGED]))
def test_records_come_back_in_the_order_of_a_stable_sort(
    data: st.DataObject, in_memory: int, span: int, dtype: np.dtype[Any]
) -> None:
    keys = data.draw(st.lists(st.integers(0, span - 1), max_size=120, unique=data.draw(st.booleans())))
    key: np.ndarray[Any, Any] = np.array(keys, np.int64)
    if dtype == HASHED:
        key = np.stack([key.astype(np.uint64) // 2 << np.uint64(60), key.astype(np.uint64) % 2], axis=1) % 2**63
    elif dtype == TAGGED:
        key = key.astype(np.uint64) << np.uint64(55)
    rows = records(dtype, key=key, at=np.arange(len(keys)))
    expected = rows[np.lexsort(key.T[::-1]) if key.ndim == 2 else np.argsort(key, kind="stable")]
    with Scratch(in_memory) as scratch:
        made = scratch.sorted(dtype, "key", span if dtype == NUMBERED else WORDS, len(keys))
        for cut in np.array_split(rows, data.draw(st.integers(1, 5))):
            made.add(cut)
        assert len(made) == len(keys)
        assert np.array_equal(np.concatenate(list(made.parts())), expected)
        assert np.array_equal(made.column("at"), expected["at"])
        start, length = data.draw(st.integers(0, 130)), data.draw(st.integers(1, 50))
        assert np.array_equal(made[start : start + length], expected[start : start + length])
        assert [piece.tobytes() for piece in made.pieces(length)] == [
            expected[at : at + length].tobytes() for at in range(0, len(keys), length)
        ]


def test_short_lists_need_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large.arrays, "open_unnamed", lambda: pytest.fail("opened a file"))
    with Scratch(100) as scratch:
        assert len(fill(scratch, 100)[:]) == 100


def test_files_have_no_name_and_are_open_to_nobody_else(folder: Path) -> None:
    with Scratch(10) as scratch:
        made = fill(scratch, 1000)
        assert made._file is not None
        about = os.fstat(made._file.fileno())
        assert about.st_size == 1000 * HASHED.itemsize
        assert about.st_nlink == 0
        assert stat.S_IMODE(about.st_mode) & 0o077 == 0
        assert list(folder.iterdir()) == []


def test_files_are_closed_at_the_end_and_on_an_error() -> None:
    with pytest.raises(ZeroDivisionError), Scratch(10) as scratch:  # noqa: PT012
        made = [fill(scratch, 50), fill(scratch, 60)]
        assert all(one._file is not None and not one._file.closed for one in made)
        raise ZeroDivisionError
    assert all(one._file is not None and one._file.closed for one in made)


def test_mapped_columns_outlive_their_file_and_leave_memory_when_forgotten(folder: Path) -> None:
    column = FileColumn(np.int64)
    for start in range(0, 1 << 18, 1 << 16):
        column.append(np.arange(start, start + (1 << 16)))
    values = column.mapped()
    column.close()
    assert int(values.sum()) == (1 << 18) * ((1 << 18) - 1) // 2
    assert resident("Shared_Clean", "Shared_Dirty", "Private_Clean", "Private_Dirty") >= 2 << 20
    forget(values)
    assert resident("Shared_Clean", "Shared_Dirty", "Private_Clean", "Private_Dirty") == 0
    assert int(values[-1]) == (1 << 18) - 1
    assert list(folder.iterdir()) == []


def resident(*kinds: str) -> int:
    """Bytes that this process holds in memory of files in the folder of temporary ones."""
    text = Path("/proc/self/smaps").read_text().splitlines()
    total, inside = 0, False
    for line in text:
        name, _, value = line.partition(":")
        if "-" in name.split(" ")[0]:
            inside = str(tempfile.gettempdir()) in line
        elif inside and name in kinds:
            total += 1024 * int(value.split()[0])
    return total


@pytest.mark.parametrize("when", ["opening", "writing"])
def test_folder_that_cannot_be_used_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    if when == "opening":
        monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    else:
        monkeypatch.setattr(large.arrays, "open_unnamed", lambda: Path("/dev/full").open("r+b", buffering=0))
    with pytest.raises(ConfigError, match=r"cannot use the folder of temporary files.*set TMPDIR") as caught:
        with Scratch(10) as scratch:
            fill(scratch, 100)[:]
    assert "/nowhere" not in str(caught.value.public)


def test_no_memory_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="in_memory of at least 1"):
        Scratch(0)


def test_a_key_beyond_the_span_is_refused() -> None:
    for key, span in ((np.int32(-3), 100), (np.int32(100), 100)):
        with Scratch(4) as scratch:
            some = scratch.sorted(np.dtype([("key", np.int32)]), "key", span, 10)
            with pytest.raises(ValueError, match="expected keys below 100"):
                some.add(np.array([(key,)] * 4, [("key", np.int32)]))
