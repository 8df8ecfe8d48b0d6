"""Re-randomisation of shares before they are opened: their sum stays, and nothing else can be inferred from them.

Shares that two servers compute, as in `additive_routing`, consist of a dealer's random numbers and of what the servers
keep. A receiver of both shares who has the dealer's help could subtract these numbers and would be left with equations
about the rest: leaf values of other rows, thresholds, columns. So the two servers have a seed that the dealer never
sees, and change what they send by a keystream under it: one adds what the other subtracts, or both XOR it::

    keystream of message i = AES-256-CTR under HKDF-Expand-SHA256(seed, info = "treaty fresh shares" || i)

To everybody without the seed, the shares of a message are then uniform among all shares of the same numbers, whatever
else they know (HKDF and AES as pseudorandom functions). A server that has the seed knew its own share before, and the
other follows from what is opened.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.aggregation.masks import KEY_BYTES, mask_key
from treaty.crypto.keystream import Keystream
from treaty.crypto.sharing.shamir_field import Words
from treaty.errors import CryptoError

_PURPOSE = b"treaty fresh shares"


class FreshShares:
    """The end of server `own`, 0 or 1; only the other server has the seed, too, and it is used for nothing else."""

    def __init__(self, own: int, seed: bytes) -> None:
        if len(seed) != KEY_BYTES:
            raise CryptoError(f"expected a seed of {KEY_BYTES} bytes, got {len(seed)} - at shares for users")
        self._own, self._seed, self._last = own, seed, -1

    def numbers(self, message: int, shares: Words) -> Words:
        """Re-randomise additive shares modulo 2^64, uint64 (...).

        `message` is the same at both servers and must exceed that of every message before, of numbers or bits
        (CryptoError): the difference of two messages under one keystream would be that of the original shares.
        """
        mask = self._stream(message).bits(64, shares.size).reshape(shares.shape)
        fresh: Words = shares - mask if self._own else shares + mask
        return fresh

    def bits(self, message: int, shares: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Re-randomise XOR shares of bits, uint8 (...) of 0 and 1; see `numbers`."""
        drawn = np.frombuffer(self._stream(message).raw(-(-shares.size // 8)), np.uint8)
        return shares ^ np.unpackbits(drawn, count=shares.size).reshape(shares.shape)

    def _stream(self, message: int) -> Keystream:
        if message <= self._last:
            raise CryptoError(
                f"expected a message after number {self._last}, got {message}, whose keystream may have been used - at"
                " shares for users"
            )
        self._last = message
        return Keystream(mask_key(self._seed, _PURPOSE + message.to_bytes(8, "big")))
