"""Shares made anew for who is to open them: what they add up to stays, and nothing else of how they came about.

Shares that two servers end with, as in `additive_routing`, are made of a dealer's random numbers and of what the
servers keep. Who is sent both could take these numbers off with the dealer's help, and is left with equations in the
rest: leaf values of other leaves than its rows', thresholds, columns. So the two servers have a seed that the dealer
never sees, and change what they send by a keystream under it: one adds what the other subtracts, or both XOR it::

    keystream of message i = AES-256-CTR under HKDF-Expand-SHA256(seed, info = "treaty fresh shares" || i)

To all who do not have the seed, shares of a message are then uniform among those of the same numbers, whatever else
they know (HKDF and AES as pseudorandom functions). A server that has it knew its own share before, and what is opened
says the other.
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
    """One server's end.

    Parameters
    ----------
    own : int
        This server, 0 or 1.
    seed : bytes of length 32
        Which the other server has, too, and nobody else; used for nothing else.

    Raises
    ------
    CryptoError
        When the seed has another length.
    """

    def __init__(self, own: int, seed: bytes) -> None:
        if len(seed) != KEY_BYTES:
            raise CryptoError(f"expected a seed of {KEY_BYTES} bytes, got {len(seed)} - at shares for users")
        self._own, self._seed, self._last = own, seed, -1

    def numbers(self, message: int, shares: Words) -> Words:
        """Make shares of numbers anew.

        Parameters
        ----------
        message : int
            The same at both servers, and above that of every message before, be it of numbers or bits.
        shares : uint64 (...)
            Additive, modulo 2^64.

        Returns
        -------
        uint64 (...)

        Raises
        ------
        CryptoError
            When the message's number is not above all before: of two messages under one keystream who opens them has
            the difference of the shares as they were.
        """
        mask = self._stream(message).bits(64, shares.size).reshape(shares.shape)
        fresh: Words = shares - mask if self._own else shares + mask
        return fresh

    def bits(self, message: int, shares: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Make XOR shares of bits anew, uint8 (...) of 0 and 1; see `numbers`."""
        drawn = np.frombuffer(self._stream(message).raw(-(-shares.size // 8)), np.uint8)
        return shares ^ np.unpackbits(drawn, count=shares.size).reshape(shares.shape)

    def _stream(self, message: int) -> Keystream:
        if message <= self._last:
            raise CryptoError(
                f"expected a message after number {self._last}, got {message}, whose keystream may be used - at shares "
                "for users"
            )
        self._last = message
        return Keystream(mask_key(self._seed, _PURPOSE + message.to_bytes(8, "big")))
