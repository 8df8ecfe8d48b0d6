"""What later steps will need, made while earlier ones are on their way.

A tree takes about what the last one took: as much is kept in stock, so that of a step only what depends on numbers is
sent when it is due. Both ends make the same, at the same steps, in messages of about `nbytes`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

import numpy as np

from treaty.crypto.transfer.comparison import make_quads
from treaty.crypto.transfer.correlations import make
from treaty.crypto.transfer.ring_products import plan_of
from treaty.crypto.transfer.shared_products import make as make_in_ring
from treaty.crypto.transfer.stock import OF_A_TRANSFER, Arrays, Steps, Stock, Transfers, sizes_of

_OF_A_QUAD = 22  # bytes that are sent to make one
_MOST = 1 << 26  # bytes sent for what is kept, which takes several times as many in memory


class Ahead:
    """Makes one end's stocks ahead, with another's; nothing until a tree has shown what one takes.

    `nbytes` are sent at each step; both ends set them between the same steps.
    """

    def __init__(self, transfers: Transfers) -> None:
        self.transfers, self.nbytes = transfers, 0
        self._steps = self._last_steps = self._owed = 0
        self._begins = False
        self._making: list[_Making] = []
        self._sent: deque[list[_Making]] = deque()
        self.due = 0

    def begin_tree(self) -> None:
        """Expect of a tree what the last one took."""
        self._last_steps, self._steps, self._begins = self._steps, 0, True
        for stock, _, _ in self._stocks():
            stock.wanted, stock.drawn = stock.drawn if self.nbytes else 0, 0
        if (total := self._total) > _MOST:
            for stock, _, _ in self._stocks():
                stock.wanted = stock.wanted * _MOST // total
        # trees of other samples of columns draw products of other kinds, and few products leave transfers over
        if sum(stock.left * nbytes for stock, nbytes, _ in self._stocks()) > _MOST:
            rings = (end.stock for end in self.transfers.rings.values())
            for stock in (self.transfers.rows, *self.transfers.products.values(), *rings):
                stock.drop(max(0, stock.left - max(stock.wanted, stock.few)))

    @property
    def evenly(self) -> int:
        """Bytes of each step that make what a tree takes in as many steps as the last one had."""
        return -(-self._total // max(1, self._last_steps))

    def message(self) -> Arrays | None:
        """Return what is to be sent to the other end at a step, or None if there is nothing to make.

        `due` is then how many of its messages of earlier steps come before the step's own.
        """
        self._steps, self.due = self._steps + 1, len(self._sent)
        # whole ciphertexts take the room of the steps after the one that begins them
        room, self._owed = (0, self._owed - self.nbytes) if self._owed > self.nbytes else (self.nbytes, 0)
        stocks = self._stocks() if room else ()
        short = [(stock.short, nbytes, stock, more) for stock, nbytes, more in stocks if stock.short > 0]
        # a message costs something however little is in it: but for the rest at the beginning of a tree, it is full
        if not self._begins and sum(count * nbytes for count, nbytes, _, _ in short) < room:
            short = []
        self._begins = False
        for missing, nbytes, stock, make_more in short:
            if room > 0:
                count = stock.whole(min(missing, math.ceil(room / nbytes)))
                room -= round(count * nbytes)
                stock.coming += count
                steps = make_more(count)
                with self.transfers.apart():
                    self._making.append(_Making(stock, count, steps, next(steps)))
        self._owed += max(0, -room)
        if not self._making:
            return None
        made, self._making = self._making, []
        self._sent.append(made)
        return [np.array([len(each.sent) for each in made]), *chain(*(each.sent for each in made))]

    def take(self, came: Arrays) -> None:
        """Take the other end's message of the same step as the oldest one that was sent and not answered yet."""
        making = self._sent.popleft()
        counts, parts = sizes_of(came, len(making)), iter(came[1:])
        for each, count in zip(making, counts, strict=True):
            try:
                each.sent = each.steps.send(list(islice(parts, count)))
                self._making.append(each)
            except StopIteration:
                each.stock.coming -= each.count

    @property
    def under_way(self) -> int:
        """How many messages were sent whose counterparts were not taken yet."""
        return len(self._sent)

    def _stocks(self) -> Iterator[tuple[Stock, float, Callable[[int], Steps[None]]]]:
        """Yield each stock, the bytes that an end sends to make one, and what makes more."""
        transfers = self.transfers
        yield transfers.rows, OF_A_TRANSFER, transfers.extend
        yield transfers.quads, _OF_A_QUAD, partial(make_quads, transfers)
        for kind, stock in transfers.products.items():
            yield stock, kind.nbytes, partial(make, transfers, kind)
        for of_ring, end in transfers.rings.items():
            yield end.stock, plan_of(of_ring).nbytes, partial(make_in_ring, transfers, of_ring, apart=True)

    @property
    def _total(self) -> int:
        return round(sum(stock.wanted * nbytes for stock, nbytes, _ in self._stocks()))


@dataclass(slots=True)
class _Making:
    """Things that are being made, and what is to be sent for them at the next step."""

    stock: Stock
    count: int
    steps: Steps[None]
    sent: Arrays
