"""Fresh encryptions of zero that hide a product of ciphertexts from the key's owner, and a store of them.

Factors do not depend on what they hide, so a server makes them while it waits for the active party; an answer then
takes them instead of waiting for its own exponentiations. **No factor is handed out twice**: the quotient of two
answers under one factor shows the key's owner the quotient of two products of ciphertexts that it knows.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treaty.compute import concurrently, pieces
from treaty.crypto.additive.montgomery import FixedBase, Modulus
from treaty.crypto.keystream import Keystream

Words = NDArray[np.uint64]

_WINDOW = 6  # bits per table look-up
_CHUNK = 32  # factors a thread makes at a time
_MOST_BYTES = 32 << 20  # factors kept ready


class RandomisableKey(Protocol):
    """A public key's randomness: the ciphertexts' modulus, the base w and the length of r in w^r."""

    @property
    def modulus(self) -> Modulus: ...  # noqa: D102
    @property
    def randomiser_base(self) -> int: ...  # noqa: D102
    @property
    def randomness_bits(self) -> int: ...  # noqa: D102


class Randomiser:
    """Fresh encryptions of zero, w^r; w is h for Okamoto-Uchiyama, h^n for Paillier."""

    def __init__(self, key: RandomisableKey) -> None:
        self._bits = key.randomness_bits
        self._modulus = key.modulus
        self._powers = FixedBase(key.modulus, key.randomiser_base, self._bits, _WINDOW)

    @property
    def factor_bytes(self) -> int:
        """Bytes of one factor."""
        return 8 * self._modulus.width

    def exponents(self, rows: int) -> Words:
        """Draw uniform exponents r below 2^randomness_bits, uint64 (rows, limbs), from a fresh keystream."""
        return Keystream().bits(self._bits, rows)

    def factors(self, exponents: Words) -> Words:
        """Return w^r for each exponent: working Montgomery forms."""
        return self._powers.power(exponents)


class ReadyFactors:
    """Factors w^r made ahead by a thread of their own, each handed out once; `expected` are wanted at first.

    The thread runs from `prepare` until as many factors are ready as were ever taken between two calls of `prepare` (at
    most 32 MB of them), until `stop`, or until the program ends. Factors outlive trees: they belong to the key. The
    thread is no daemon, which could be cut off inside compiled code that is being unloaded: the program waits for it,
    for the milliseconds of a chunk.
    """

    def __init__(self, randomiser: Randomiser, expected: int) -> None:
        self._randomiser = randomiser
        self._most = max(_CHUNK, _MOST_BYTES // randomiser.factor_bytes)
        self._wanted = min(expected, self._most)
        self._taken, self._stopped = 0, False
        self._process, self._lock = os.getpid(), threading.Lock()
        self._ready: deque[Words] = deque()
        self._thread: threading.Thread | None = None

    def take(self, count: int, threads: int) -> Words:
        """Return `count` factors, working Montgomery forms; missing ones are made now."""
        with self._own_lock():
            self._taken += count
            taken, missing = [], count
            while self._ready and missing:
                chunk = self._ready.popleft()
                if len(chunk) > missing:
                    self._ready.appendleft(chunk[missing:])
                taken.append(chunk[:missing])
                missing -= len(taken[-1])
        exponents = self._randomiser.exponents(missing)
        made = concurrently(lambda part: self._randomiser.factors(exponents[part]), pieces(missing, _CHUNK), threads)
        return np.concatenate([self._randomiser.factors(exponents[:0]), *taken, *made])

    def prepare(self) -> None:
        """Start to make factors in the background, unless this is running already."""
        with self._own_lock():
            self._wanted, self._taken = min(max(self._wanted, self._taken), self._most), 0
            self._stopped = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="treaty-factors")
                self._thread.start()

    def stop(self) -> None:
        """Ask the background work to end, which takes it a few milliseconds; ready factors are kept.

        Takes no lock: as a finalizer it runs wherever garbage is collected, also in a thread that holds the lock.
        """
        self._stopped = True

    def _own_lock(self) -> threading.Lock:
        if os.getpid() != self._process:  # a fork: the parent uses these factors, and may have held the lock
            self._process, self._lock, self._thread = os.getpid(), threading.Lock(), None
            self._ready = deque()
        return self._lock

    def _work(self) -> None:
        try:
            while True:
                with self._lock:
                    full = sum(map(len, self._ready)) >= self._wanted
                    # the program waits for this thread at its end: do not make factors that nobody will take
                    if full or self._stopped or not threading.main_thread().is_alive():
                        self._thread = None
                        return
                made = self._randomiser.factors(self._randomiser.exponents(_CHUNK))
                with self._lock:
                    self._ready.append(made)
        finally:
            with self._lock:
                if self._thread is threading.current_thread():  # an error; `prepare` may begin again
                    self._thread = None
