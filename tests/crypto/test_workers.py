import threading

import pytest

from treaty.crypto import workers
from treaty.crypto.workers import kernel, pieces, run_threads


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_run_threads_keeps_the_order_of_items(threads):
    assert run_threads(threads, lambda x: x * x, list(range(20))) == [x * x for x in range(20)]


def test_run_threads_uses_the_calling_thread_alone_when_asked():
    names = run_threads(1, lambda _: threading.current_thread(), [0, 1])
    assert set(names) == {threading.current_thread()}


def test_run_threads_raises_the_error_of_a_call():
    with pytest.raises(ZeroDivisionError):
        run_threads(2, lambda x: 1 // x, [1, 0, 2])


@pytest.mark.parametrize(("count", "length"), [(0, 3), (1, 3), (3, 3), (10, 3)])
def test_pieces_cover_the_range_once(count, length):
    covered = [i for part in pieces(count, length) for i in range(count)[part]]
    assert covered == list(range(count))


def test_kernel_works_where_nothing_can_be_cached(monkeypatch):
    compile_plain = workers.njit

    def no_locator(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return compile_plain(**options)

    monkeypatch.setattr(workers, "njit", no_locator)
    assert kernel(lambda x: x + 1)(2) == 3
