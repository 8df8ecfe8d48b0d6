from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treaty.machine import process, shared_work
from treaty.machine.process import concurrently, cores, keep_to, stay_on_one_core, usable_cores
from treaty.machine.shared_work import share
from treaty.runs import processes


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


def test_share_within_a_share_is_done_too():
    marks = np.zeros((4, 8), int)

    def row(first, last):
        def cells(begin, end):
            marks[first:last, begin:end] += 1

        share(cells, 8, 2)

    share(row, 4, 4)
    assert np.all(marks == 1)


@pytest.fixture
def own_helpers(monkeypatch):
    """Two helpers that nobody else has."""
    helpers = [shared_work._Helper(), shared_work._Helper()]
    monkeypatch.setattr(shared_work, "_FREE", list(helpers))
    monkeypatch.setattr(shared_work, "_MADE", list(helpers))
    yield helpers
    for helper in helpers:
        helper.dismiss()


@pytest.fixture
def deaf(own_helpers):
    """Helpers that hear of nothing, as if there were no processor for them."""
    for helper in own_helpers:
        while not helper._asleep:
            time.sleep(0.001)
        helper._asleep = False
    return own_helpers


def test_what_no_helper_has_begun_the_caller_does(deaf):
    done = []
    share(lambda first, last: done.append((first, threading.get_ident())), 3, 3)
    assert done == [(number, threading.get_ident()) for number in range(3)]
    for helper in deaf:
        helper._asleep = True
    test_share_runs_parts_on_different_threads()


@pytest.mark.parametrize("failing", [0, 1], ids=["own-part", "part-taken-back"])
def test_what_has_not_begun_when_a_part_fails_never_does(deaf, failing):
    done = []

    def work(first, last):
        done.append(first)
        if first == failing:
            raise ValueError("this part")

    with pytest.raises(ValueError, match="this part"):
        share(work, 3, 3)
    for helper in deaf:
        helper._wake.put(None)
    time.sleep(0.05)
    assert done == list(range(failing + 1))


@pytest.mark.usefixtures("own_helpers")
def test_what_has_begun_when_a_part_fails_is_waited_for():
    begun, ended = threading.Event(), threading.Event()

    def work(first, last):
        if first == 0:
            assert begun.wait(10)
            raise ValueError("this part")
        begun.set()
        time.sleep(0.05)
        ended.set()

    with pytest.raises(ValueError, match="this part"):
        share(work, 2, 2)
    assert ended.is_set()
    share(lambda first, last: None, 2, 2)  # raises nothing of the last one's


def test_an_interrupt_while_others_work_ends_them_and_leaves_room_for_new_ones(own_helpers, monkeypatch):
    going_on, all_begun = threading.Event(), threading.Barrier(3, timeout=10)

    def interrupted(self):
        raise KeyboardInterrupt

    def work(first, last):
        all_begun.wait()
        assert first == 0 or going_on.wait(10)

    with monkeypatch.context() as patch:
        patch.setattr(shared_work._Helper, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            share(work, 3, 3)
    assert shared_work._MADE == []
    going_on.set()
    test_share_runs_parts_on_different_threads()
    assert not set(shared_work._MADE) & set(own_helpers)
    for helper in own_helpers:
        helper._thread.join(10)
        assert not helper._thread.is_alive()


def test_work_and_errors_are_not_kept(own_helpers):
    class Work:
        def __call__(self, first, last):
            if first:
                raise ValueError("this part")

    work = Work()
    gone = weakref.ref(work)
    with pytest.raises(ValueError, match="this part"):
        share(work, 3, 3)
    del work
    gc.collect()
    assert gone() is None


def test_without_threads_for_helpers_the_caller_does_all(monkeypatch):
    def full(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(shared_work, "_FREE", [])
    monkeypatch.setattr(shared_work, "_MADE", [])
    monkeypatch.setattr(threading.Thread, "start", full)
    done = []
    share(lambda first, last: done.append((first, last)), 4, 2)
    assert done == [(0, 4)]


INTERRUPTED = """
import signal
import numpy as np
from treaty.machine.shared_work import share

def interrupt(*_):
    raise KeyboardInterrupt

rng, interrupted, marks = np.random.default_rng(0), 0, np.zeros(9, int)
share(lambda first, last: None, 3, 3)
signal.signal(signal.SIGALRM, interrupt)
for _ in range(3000):
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 6e-5))
        share(lambda first, last: None, 3, 3)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
signal.signal(signal.SIGALRM, signal.SIG_IGN)
assert interrupted > 100, interrupted

def mark(first, last):
    marks[first:last] += 1

share(mark, 9, 3)
assert np.all(marks == 1), marks
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timers that interrupt")
def test_interrupts_at_any_time_neither_hang_nor_lose_parts_of_later_work():
    subprocess.run([sys.executable, "-c", INTERRUPTED], check=True, timeout=120)


def test_a_helper_that_slept_hears_of_the_next_part():
    for pause in (0.0, 0.0, 1e-4, 1e-3, 5e-3, 0.05):
        time.sleep(pause)
        test_share_runs_parts_on_different_threads()


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
    monkeypatch.setattr(process.os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert cores(n_jobs) == threads


def test_cores_falls_back_to_the_core_count(monkeypatch):
    monkeypatch.delattr(process.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(process.os, "cpu_count", lambda: None)
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
    assert processes._cores_of_each(["a", "b", "c"]) == expected
