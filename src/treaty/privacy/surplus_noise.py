"""Noise on a sum of which contributors may be lost, without the noise that is too much if few are lost.

Jiang, Wang, Chen, "Dordis: Efficient Federated Learning with Dropout-Resilient Differential Privacy", EuroSys 2024
(arXiv 2209.12528), XNoise. Of n contributors at least m survive, and the party that sees the sum may know the noise of
`known` of them. Each survivor of s has to add a variance of sigma^2 / (s - known), and s is unknown when it adds its
noise. So it adds as much as for m survivors, in parts: one for n survivors, and one for each step of `counts` from n
down to m. Part k makes up the difference between `counts[k]` survivors and `counts[k - 1]`, which are fewer. Once s is
known, parts 1 to r are removed from the sum, where r is the largest k with ``counts[k] <= s``. The others stay:
together they are of a variance of sigma^2 / (counts[r] - known) a survivor, so that the sum's is sigma^2 or more.

A part is drawn from a secret, and each secret is the hash of the next part's. The secret of part r thus gives all parts
that are removed, and none that stays. What stays in any case is drawn from the operating system's generator.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence

import numpy as np

from treaty.errors import ConfigError
from treaty.machine.arrays import Floats, Integers
from treaty.privacy.discrete_gaussian import LEAST_SHARE, discrete_gaussian

MOST_PARTS = 8
# covers the errors of floats in a part's standard deviation
_ABOVE = 1.0 + 2.0**-48


def least_share(members: int) -> int:
    """Return h so that no part of noise of `members` contributors or fewer is of a variance below sigma^2 / h."""
    # 1 / (s - 1 - known) - 1 / (s - known) is more than 1 / s^2; there are not more than h shares in the sum, either
    return members * max(members, MOST_PARTS + 1)


def draw_noise(sigma: Floats, counts: Sequence[int], known: int) -> tuple[Integers, list[bytes]]:
    """Draw one contributor's noise, int64 (length,), and the secrets of its parts 1 to ``len(counts) - 1``.

    `sigma`, (length,), is the least standard deviation of the sum's noise. Raises ConfigError if a part's would be
    below `LEAST_SHARE`.
    """
    secret = [secrets.token_bytes(32)]
    for _ in range(len(counts) - 2):
        secret.append(_before(secret[-1]))
    secret = secret[::-1] if len(counts) > 1 else []
    noise = _drawn(sigma, 1.0 / (counts[-1] - known), None)
    return noise + (removable_noise(sigma, counts, known, len(secret), secret[-1]) if secret else 0), secret


def removable_noise(sigma: Floats, counts: Sequence[int], known: int, removed: int, secret: bytes) -> Integers:
    """Return parts 1 to `removed` of a contributor's noise, int64 (length,), from the secret of part `removed`."""
    noise = np.zeros(len(sigma), np.int64)
    for part in range(removed, 0, -1):
        share = 1.0 / (counts[part - 1] - known) - 1.0 / (counts[part] - known)
        noise += _drawn(sigma, share, hashlib.sha256(b"treaty noise key" + secret).digest())
        secret = _before(secret)
    return noise


def _before(secret: bytes) -> bytes:
    return hashlib.sha256(b"treaty noise part" + secret).digest()


def _drawn(sigma: Floats, share: float, key: bytes | None) -> Integers:
    """Draw noise of a variance of `share` sigma^2."""
    each = sigma * (math.sqrt(share) * _ABOVE)
    if not np.all(each >= LEAST_SHARE):
        raise ConfigError(f"expected parts of noise of a standard deviation of 1 or more, got {np.min(each):g}")
    return discrete_gaussian(each, key)
