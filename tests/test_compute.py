from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.errors import NumbaWarning

from treaty import compute
from treaty.compute import concurrently, cores, keep_to, kernel, share, stay_on_one_core, usable_cores
from treaty.runs import processes


def test_what_a_first_kernel_needs_can_be_loaded_ahead():
    check = (
        "import sys; import numpy as np; from treaty.compute import load_compiler; from treaty.crypto.wide import add\n"
        "before = set(sys.modules); load_compiler(); ahead = set(sys.modules)\n"
        "add(np.ones((1, 2), np.uint64), np.ones((1, 2), np.uint64))\n"
        "assert 'numba.np.arraymath' in ahead - before, 'loaded already'\n"
        "assert not [name for name in set(sys.modules) - ahead if name.startswith('numba.np')]\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


@settings(deadline=None, max_examples=60)
@given(total=st.integers(0, 200), threads=st.integers(1, 5), least=st.integers(0, 60))
def test_share_covers_every_item_once_in_parts_worth_a_thread(total, threads, least):
    seen = np.zeros(total, int)
    parts = []

    def work(first, last):
        seen[first:last] += 1
        parts.append(last - first)

    share(work, total, threads, least)
    assert np.all(seen == 1)
    assert len(parts) <= threads
    assert len(parts) == 1 or min(parts) >= least


def test_share_runs_parts_on_different_threads():
    together = threading.Barrier(3, timeout=10)
    share(lambda first, last: together.wait(), 3, 3)


@pytest.mark.parametrize("failing", [0, 1, 2], ids=["own-part", "second-part", "last-part"])
def test_share_raises_what_a_part_raises(failing):
    def work(first, last):
        if first == failing:
            raise ValueError("this part")

    with pytest.raises(ValueError, match="this part"):
        share(work, 3, 3)


def test_share_serves_many_parties_at_once():
    totals = np.zeros(8, int)

    def party(number):
        for _ in range(50):
            marks = np.zeros(64, int)

            def work(first, last, marks=marks):
                marks[first:last] += 1

            share(work, len(marks), 2)
            totals[number] += marks.sum()

    parties = [threading.Thread(target=party, args=(number,)) for number in range(len(totals))]
    for thread in parties:
        thread.start()
    for thread in parties:
        thread.join(30)
    assert np.all(totals == 50 * 64)


def test_share_waits_for_all_parts_when_one_fails():
    ended = threading.Event()

    def work(first, last):
        if first == 0:
            raise ValueError("this part")
        time.sleep(0.1)
        ended.set()

    with pytest.raises(ValueError, match="this part"):
        share(work, 2, 2)
    assert ended.is_set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork where there are threads
def test_share_works_in_a_child_of_a_process_that_has_shared():
    share(lambda first, last: None, 2, 2)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # else it would wait for ever, if at all
        parts = []
        share(lambda first, last: parts.append(first), 2, 2)
        os._exit(0 if sorted(parts) == [0, 1] else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(("n_jobs", "threads"), [(None, 3), (-1, 3), (-2, 2), (-9, 1), (7, 7)], ids=str)
def test_cores_counts_from_every_usable_core(n_jobs, threads, monkeypatch):
    monkeypatch.setattr(compute.os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert cores(n_jobs) == threads


def test_cores_falls_back_to_the_core_count(monkeypatch):
    monkeypatch.delattr(compute.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(compute.os, "cpu_count", lambda: None)
    assert cores() == 1


def test_cores_takes_the_number_asked_for():
    assert cores(7) == 7


@pytest.mark.parametrize("threads", [1, 3], ids=["one-thread", "three-threads"])
def test_concurrently_returns_results_in_order(threads):
    def slow(number):
        time.sleep(0.01 * (3 - number))
        return number

    assert concurrently(slow, range(4), threads) == [0, 1, 2, 3]


@pytest.mark.parametrize("threads", [1, 2], ids=["one-thread", "two-threads"])
def test_concurrently_raises_what_an_item_raises(threads):
    with pytest.raises(ZeroDivisionError):
        concurrently(lambda number: 1 // number, [1, 0], threads)


def test_concurrently_gives_the_next_item_to_a_thread_that_is_done():
    released = threading.Event()

    def work(number):
        if number == 0:  # holds one of two threads until the other has done all the rest
            return released.wait(10)
        if number == 5:
            released.set()
        return True

    assert concurrently(work, range(6), 2) == [True] * 6


def test_concurrently_of_nothing_is_nothing():
    assert concurrently(str, [], 4) == []


def _add_up(values):
    total = 0
    for value in values:
        total += value
    return total


def test_kernel_computes_without_a_place_to_cache(monkeypatch):
    def nowhere(function):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(compute, "_KernelCache", nowhere)
    assert kernel(_add_up)(np.arange(5)) == 10


def _invert(value):
    return 1.0 / value


def test_kernel_divides_by_zero_as_numpy_does():
    assert np.isinf(kernel(_invert)(0.0))


def in_a_thread(work):
    """Return what `work` returns in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not tell threads' cores")
def test_threads_keep_to_cores_without_keeping_others():
    every = usable_cores()

    def kept():
        stay_on_one_core()
        alone = usable_cores()
        with ThreadPoolExecutor(1) as pool:
            started_from_here = pool.submit(usable_cores).result()
        return alone, started_from_here, concurrently(lambda _: usable_cores(), range(2), 2)

    alone, started_from_here, of_pool = in_a_thread(kept)
    assert alone == started_from_here == [max(every)]  # all that ask share a core
    assert of_pool == [every, every]  # which work without the interpreter's lock
    assert in_a_thread(lambda: keep_to(every[:1]) or usable_cores()) == every[:1]
    assert usable_cores() == every
    assert cores() == len(every)


@pytest.mark.parametrize(
    ("usable", "expected"),
    [
        ([0], {"a": "0", "b": "0", "c": "0"}),
        ([2, 5], {"a": "2", "b": "5", "c": "2"}),
        ([0, 1, 2, 3], {"a": "0", "b": "1", "c": "2"}),
        (range(6), {"a": "0,1", "b": "2,3", "c": "4,5"}),
    ],
)
def test_processes_are_dealt_the_cores_there_are(monkeypatch, usable, expected):
    monkeypatch.setattr(processes, "usable_cores", lambda: list(usable))
    assert processes._dealt_out(["a", "b", "c"]) == expected


def test_processes_that_compile_different_signatures_at_once_do_not_mix_them_up(tmp_path, monkeypatch):
    module = tmp_path / "halves.py"
    module.write_text(
        "from treaty.compute import kernel\n@kernel\ndef half(x):\n    return x / 2 if x > 1 else x - x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))

    def half(value):
        """Call the kernel as a process does that has just started."""
        sys.modules.pop("halves", None)
        return importlib.import_module("halves").half(value)

    assert half(np.float64(3)) == 1.5
    cache = Path(sys.modules["halves"].half.stats.cache_path)
    (listed,) = cache.glob("*.nbi")
    of_floats = listed.read_bytes()
    listed.unlink()  # the other process looked before this one had saved
    assert half(np.int64(6)) == 3
    listed.write_bytes(of_floats)  # and the list of this one was written last
    assert half(np.float64(5.5)) == 2.75
    assert half(np.int64(8)) == 4
    assert len(list(cache.glob("*.nbc"))) == 2
    monkeypatch.setattr(numba, "__version__", "another")  # of another environment, which shares the package's folder
    listed.unlink()
    assert half(np.int64(8)) == 4
    assert len(list(cache.glob("*.nbc"))) == 3


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs a package of a kernel and what it imports, and returns where that is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")

    def install(name, amount, extra=""):
        """Install into a folder of this name, and call the kernel as a process does that has just started."""
        package = tmp_path / name / "treaty_halves"
        package.mkdir(parents=True)
        (package / "amounts.py").write_text(f"AMOUNT = {amount}\n")
        (package / "halves.py").write_text(
            "from treaty.compute import kernel\nfrom treaty_halves.amounts import AMOUNT\n"
            f"@kernel\ndef less(x):\n    return x - AMOUNT\n{extra}"
        )
        for known in [known for known in sys.modules if known.startswith("treaty_halves")]:
            del sys.modules[known]
        with monkeypatch.context() as patch:
            patch.syspath_prepend(package.parent)
            found = importlib.import_module("treaty_halves.halves").less
        return found

    return install


def _hits(found):
    return sum(found.stats.cache_hits.values())


def test_a_second_installation_loads_what_the_first_has_compiled(installed, tmp_path):
    first, second = installed("first", 1), installed("second", 1)
    assert (first(5), second(5)) == (4, 4)
    assert (_hits(first), _hits(second)) == (0, 1)
    assert Path(second.stats.cache_path).is_relative_to(tmp_path / "home")
    assert not list(tmp_path.glob("*/treaty_halves/__pycache__/*.nbi"))


def test_a_kernel_is_compiled_again_when_a_module_that_it_imports_has_changed(installed):
    one, other = installed("one", 1), installed("other", 2)
    assert (one(5), other(5)) == (4, 3)
    assert _hits(other) == 0


def test_kernels_that_others_may_have_written_are_not_loaded(installed):
    first = installed("first", 1)
    assert first(5) == 4
    Path(first.stats.cache_path).chmod(0o777)
    second = installed("second", 1)
    assert second(5) == 4
    assert (_hits(second), second.stats.cache_path == first.stats.cache_path) == (0, False)


def test_kernels_that_are_not_used_for_long_are_deleted(installed):
    old, used = (Path(installed(name, 1, f"# {name}\n").stats.cache_path) for name in ("old", "used"))
    for folder, days in ((old, 100), (used, 80)):
        os.utime(folder, (time.time() - days * 24 * 3600,) * 2)
    installed("again", 1, "# used\n")
    assert time.time() - used.stat().st_mtime < 60  # loaded again: its time begins anew
    installed("new", 1, "# new\n")
    assert (old.exists(), used.exists()) == (False, True)


@pytest.mark.skipif(os.name != "posix", reason="the C library has another name")
def test_a_kernel_that_cannot_be_kept_is_warned_of_and_computes(installed):
    extra = (
        "import ctypes\nlabs = ctypes.CDLL(None).labs\nlabs.restype, labs.argtypes = ctypes.c_long, [ctypes.c_long]\n"
        "@kernel\ndef size(x):\n    return labs(x)\n"
    )
    installed("pointing", 1, extra)
    size = sys.modules["treaty_halves.halves"].size
    with pytest.warns(NumbaWarning, match="dynamic globals"):
        assert size(-3) == 3
