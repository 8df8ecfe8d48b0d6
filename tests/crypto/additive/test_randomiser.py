import gc
import math
import os
import threading
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest

from crypto.asking import answered, asked, begun
from pace import wait_until
from treaty.crypto.additive.ciphers import generate_key
from treaty.crypto.additive.key_proofs import Randomiser, ReadyFactors, _table_size
from treaty.crypto.additive.montgomery import Modulus
from treaty.crypto.payload import from_words, to_words
from treaty.crypto.sums.encrypted_sums import SumsBounds, make_client, make_server


@pytest.fixture(scope="module")
def key():
    return generate_key(insecure_test_key_bits=256)


@pytest.fixture(scope="module")
def public(key):
    return key.public


@pytest.fixture
def drawn(monkeypatch):
    """Every exponent drawn for a factor."""
    seen = []
    factors = Randomiser.factors
    monkeypatch.setattr(Randomiser, "factors", lambda self, e: seen.extend(from_words(e)) or factors(self, e))
    return seen


@pytest.mark.parametrize(("n", "squared"), [(19 * 19 * 31, False), (11 * 17, True)], ids=["p^2 q", "p q, modulo n^2"])
def test_factors_are_uniform_among_all_nth_powers(n, squared):
    """And so is a product of one of them with any other, whichever it is."""
    size = n * n if squared else n
    randomiser = Randomiser(SimpleNamespace(n=n, modulus=Modulus(size)), 1)
    powers = sorted({pow(x, n, size) for x in range(n) if math.gcd(x, n) == 1})
    assert len(powers) == (10 * 16 if squared else 18 * 30)
    modulus = randomiser._powers._modulus
    factors = modulus.multiply(randomiser.factors(randomiser.exponents(40_000)), modulus.working([1]))
    found, counts = np.unique(modulus.pack(factors), return_counts=True)
    assert found.tolist() == powers
    expected, freedom = counts.mean(), len(powers) - 1
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 6 * np.sqrt(2 * freedom)  # alarms: below 1e-6


@pytest.mark.parametrize("bits", [512, 2048, 3072, 4096])
def test_bases_and_exponents_are_as_many_as_the_bound_of_the_text_needs(bits):
    windows, bases = _table_size(bits)
    w = 6 * windows
    assert w * bases >= bits + 160
    assert bases >= 162
    d, tail = np.arange(3, 1 << min(w, 12), dtype=float), 3 * w + bases * np.log2(1.25 / 4096) if w > 12 else -np.inf
    small = 2 * np.log2(d) + bases * (np.log2(1 + d * d / 4 ** (w + 1)) - np.log2(d))
    total = np.logaddexp2.reduce([bits - w * bases, np.log2(3) - bases, *small, tail])
    assert total / 2 - 1 < -80


def as_numbers(public, factors):
    return from_words(public.modulus.pack(factors.copy()))


def ready(store):
    return sum(map(len, store._ready))


def test_taken_factors_are_encryptions_of_zero_and_all_differ(key, public, drawn):
    store = ReadyFactors(Randomiser(public, 1), 40)
    taken = []
    for count in (3, 0, 40, 100, 1, 77):
        factors = store.take(count, 2)
        assert len(factors) == count
        taken += as_numbers(public, factors)
        store.prepare()
    wait_until(lambda: store._thread is None)
    taken += as_numbers(public, store.take(150, 1))
    assert len(set(taken)) == len(taken) == 3 + 40 + 100 + 1 + 77 + 150
    assert set(from_words(key.decrypt(to_words(taken, public.modulus.words), 1))) == {0}
    assert len(set(drawn)) == len(drawn)


def test_factors_are_made_ahead_up_to_the_largest_take(public):
    store = ReadyFactors(Randomiser(public, 1), 10)
    store.prepare()
    wait_until(lambda: store._thread is None)
    assert 10 <= ready(store) <= 10 + 32
    store.take(100, 1)
    assert ready(store) == 0
    store.prepare()
    wait_until(lambda: store._thread is None)
    assert 100 <= ready(store) <= 100 + 32


def test_factors_made_ahead_are_bounded(public, monkeypatch):
    monkeypatch.setattr("treaty.crypto.additive.key_proofs._MOST_BYTES", 64 * Randomiser(public, 1).factor_bytes)
    store = ReadyFactors(Randomiser(public, 1), 10_000)
    store.take(500, 1)
    store.prepare()
    wait_until(lambda: store._thread is None)
    assert 64 <= ready(store) <= 64 + 32


def test_ready_factors_are_taken_without_an_exponentiation(public, drawn):
    store = ReadyFactors(Randomiser(public, 1), 64)
    store.prepare()
    wait_until(lambda: store._thread is None)
    before = len(drawn)
    store.take(64, 1)
    assert len(drawn) == before


def test_stopped_work_ends_and_may_begin_again(public):
    store = ReadyFactors(Randomiser(public, 1), 1 << 40)  # without an end but the bytes'
    store.prepare()
    thread = store._thread
    store.stop()
    thread.join(20)
    assert not thread.is_alive()
    done = ready(store)
    store.prepare()
    store.prepare()
    assert sum(t.name == "treaty-factors" for t in threading.enumerate()) == 1
    wait_until(lambda: ready(store) > done)
    store.stop()
    wait_until(lambda: store._thread is None)


def test_threads_that_take_at_once_never_share_a_factor(public):
    store, taken = ReadyFactors(Randomiser(public, 1), 300), []
    store.prepare()

    def take():
        for count in (1, 7, 40, 13):
            taken.extend(as_numbers(public, store.take(count, 1)))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: store._thread is None)
    assert len(set(taken)) == len(taken) == 4 * 61


def test_stop_takes_no_lock(public):
    """Garbage may be collected, and a server's finalizer run, in a thread that holds the lock."""
    store = ReadyFactors(Randomiser(public, 1), 10)
    stopping = threading.Thread(target=store.stop, daemon=True)
    with store._lock:
        stopping.start()
        stopping.join(5)
        assert not stopping.is_alive()


def test_server_collected_by_the_working_thread_ends_it(public):
    """As if a collection fell into the few lines in which that thread holds the lock."""
    store = ReadyFactors(Randomiser(public, 1), 1 << 40)

    class Collecting(deque):
        def append(self, made):
            super().append(made)
            store.stop()

    store._ready = Collecting()
    store.prepare()
    thread = store._thread
    thread.join(5)
    assert not thread.is_alive()
    assert ready(store) == 32


def test_failed_background_work_may_begin_again(public, monkeypatch):
    failures, factors = [], Randomiser.factors
    monkeypatch.setattr(threading, "excepthook", failures.append)

    def fail(self, exponents):
        raise MemoryError

    monkeypatch.setattr(Randomiser, "factors", fail)
    store = ReadyFactors(Randomiser(public, 1), 10)
    store.prepare()
    wait_until(lambda: store._thread is None)
    assert [failure.exc_type for failure in failures] == [MemoryError]
    monkeypatch.setattr(Randomiser, "factors", factors)
    store.prepare()
    wait_until(lambda: store._thread is None)
    assert ready(store) >= 10


def test_child_of_a_fork_takes_none_of_its_parents_factors(public, monkeypatch):
    store = ReadyFactors(Randomiser(public, 1), 50)
    store.prepare()
    wait_until(lambda: store._thread is None)
    parents = set(as_numbers(public, np.concatenate(list(store._ready))))
    real = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: real + 1)  # forking a process with threads would be a warning
    assert not parents & set(as_numbers(public, store.take(50, 1)))


@pytest.mark.parametrize("cipher", ["ou", "paillier"])
def test_no_two_answer_ciphertexts_share_an_exponent(drawn, cipher):
    """Over trees and levels, with factors made ahead in between; and every exponent is of full length."""
    rng = np.random.default_rng(8)
    codes, offsets = rng.integers(0, 9, (200, 3)).astype(np.uint8), np.array([0, 10, 20, 30], np.int32)
    size = {"threads": 1, "insecure_test_key_bits": 256}
    client = make_client(cipher, SumsBounds(200, 1 << 10, 1 << 8), **size)
    server = make_server(cipher, client.setup(), codes, offsets, **size)
    client.accept_hint("peer", next(server.hint()), offsets)
    used, take = [], server._factors.take
    server._factors.take = lambda count, threads: (used.append(take(count, threads)), used[-1])[1]
    made = 0
    for _ in range(3):
        payload = begun(client, rng.integers(-9, 9, 200), rng.integers(0, 9, 200))
        server.begin_tree(payload, np.arange(200, dtype=np.int32))
        for nodes in (1, 2):
            starts = np.linspace(0, 200, nodes + 1).astype(np.int32)
            made += len(answered(server, asked(client, np.arange(200, dtype=np.int32), starts))[1])
            wait_until(lambda: server._factors._thread is None)
        server.end_tree()
    public = client._key.public
    factors = [x for batch in used for x in as_numbers(public, batch)]
    assert len(set(factors)) == len(factors) == made
    assert len(set(drawn)) == len(drawn) >= made
    bits = server._factors._randomiser.exponent_bits
    assert bits >= 256 + 160
    assert bits - 12 <= max(drawn).bit_length() <= bits


@pytest.mark.slow
def test_background_work_ends_with_its_server():
    client = make_client("paillier", SumsBounds(4, 10, 10), threads=1, key_bits=2048)
    codes, offsets = np.zeros((4, 400), np.uint8), np.arange(401, dtype=np.int32) * 32
    server = make_server("paillier", client.setup(), codes, offsets, threads=1)
    server.begin_tree(begun(client, np.zeros(4, np.int64), np.zeros(4, np.int64)), np.arange(4, dtype=np.int32))
    thread = server._factors._thread
    assert thread.is_alive()
    del server
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
