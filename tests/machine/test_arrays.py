"""Arrays that lie in files without a name."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from treaty.errors import ConfigError
from treaty.machine import arrays
from treaty.machine.arrays import check_room, contiguous, folder_of, forget, new, side_by_side


def open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_array_keeps_its_values_when_its_memory_is_given_back(tmp_path):
    array = new((3, 5000), np.float32, tmp_path)
    assert not array.any()
    array[:] = np.arange(15000).reshape(3, 5000)
    forget(array)
    forget(np.arange(5))
    assert np.array_equal(array, np.arange(15000).reshape(3, 5000))
    assert array.flags.writeable
    assert list(tmp_path.iterdir()) == []


def test_a_system_that_gives_files_no_room_at_once_writes_them(tmp_path, monkeypatch):
    monkeypatch.delattr("os.posix_fallocate")
    array = new((3, 1 << 20), np.uint8, tmp_path)
    assert not array.any()
    array[:] = 7
    assert (array == 7).all()


def test_parts_of_an_array_know_its_folder(tmp_path):
    array = new((3, 50), np.uint8, tmp_path)
    assert folder_of(array) == folder_of(array[1]) == folder_of(array.T[2:4]) == folder_of(array[0].reshape(-1, 1))
    assert folder_of(array) == tmp_path
    assert folder_of(array.copy()) is None
    assert folder_of(np.zeros(3)) is None
    assert new((0, 7), np.uint8, tmp_path).shape == (0, 7)


@pytest.mark.parametrize("step", [1, 100, 1 << 22])
@pytest.mark.parametrize("shape", [(70, 3), (3, 70), (1, 9), (9, 1)])
def test_what_is_made_of_an_array_on_disk_lies_there_and_is_right(tmp_path, shape, step, monkeypatch):
    monkeypatch.setattr(arrays, "_AT_ONCE", step)
    array = new(shape, np.uint8, tmp_path)
    array[:] = np.random.default_rng(0).integers(0, 255, shape)
    turned = contiguous(array.T)
    assert np.array_equal(turned, array.T)
    assert turned.flags.c_contiguous
    assert folder_of(turned) == tmp_path
    assert contiguous(array) is not None
    assert np.shares_memory(contiguous(array), array)
    beside = side_by_side([array.copy(), array, turned.T])
    assert np.array_equal(beside, np.concatenate([array] * 3, axis=1))
    assert folder_of(beside) == tmp_path
    assert folder_of(side_by_side([array.copy(), array.copy()])) is None
    assert folder_of(contiguous(array.copy().T)) is None


def test_files_are_closed_with_the_last_array_of_them(tmp_path):
    before = open_files()
    parts = [new((10, 10), np.uint8, tmp_path)[3] for _ in range(5)]
    assert open_files() == before + 5
    assert parts[0].sum() == 0
    del parts
    assert open_files() == before


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path):
    program = "import sys, time, pathlib, numpy; from treaty.machine.arrays import new; "
    program += (
        "array = new((1000, 1000), numpy.uint8, pathlib.Path(sys.argv[1])); array[:] = 1; print(); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_room_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"cannot keep a table .* in .*, which needs 10,[\d,]+\.\d GB there: .* are free;"
    ):
        check_room(tmp_path, 9 << 60)
    with pytest.raises(ConfigError, match=r"File too large|No space left"):
        new((1 << 62,), np.uint8, tmp_path)
    for use in (check_room, lambda folder, size: new((size,), np.uint8, folder)):
        with pytest.raises(ConfigError, match=r"cannot keep a table .* in .*nowhere.*: No such file") as caught:
            use(tmp_path / "nowhere", 5)
        assert str(tmp_path) not in caught.value.public


def test_a_copy_lies_on_disk_where_it_is_large_and_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    values = np.arange(12.0).reshape(3, 4)
    large, small = arrays.copied(values, values.nbytes), arrays.copied(values, values.nbytes + 1)
    assert arrays.folder_of(large) == tmp_path
    assert arrays.folder_of(small) is None
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    without_room = arrays.copied(values, 1)
    values[:] = 0.0
    for copy in (large, small, without_room):
        assert np.array_equal(copy.ravel(), np.arange(12.0))
