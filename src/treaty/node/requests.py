"""Rows that a service predicts as they are asked for: its process takes requests, and an HTTP endpoint makes them.

The active party's process listens at a local socket (`Requests`), where the endpoint (`Partners`) asks. A request is
one line of JSON with ids and a matrix of own columns; the answer has margins, or an error. Requests that arrive during
a prediction are predicted together in the next one.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treaty.data.ids import Normalisation, canonical_ids
from treaty.data.table import Schema, Table
from treaty.errors import DataError, PeerLost
from treaty.systems.vertical.prediction import MOST_ROWS, Asked

# Maximum bytes of a request or an answer.
MOST_BYTES = 64 << 20
# Maximum rows that are predicted together, unless one request has more.
TOGETHER = 4096
# Seconds for the partners to answer.
ANSWER_TIMEOUT = 30.0
# Requests in the queue; further ones are refused.
_WAITING = 256


class OnlineRequest(msgspec.Struct, frozen=True):
    """Ids of rows, and their own columns as in `Table.matrix` (n_rows, n_features), row by row."""

    ids: list[str]
    matrix: bytes


class OnlineAnswer(msgspec.Struct, frozen=True):
    """Margins, float64 (n_rows, n_outputs), row by row; or unknown ids; or an error."""

    margins: bytes = b""
    n_outputs: int = 0
    unknown: list[str] = []
    wrong: str = ""


class UnknownIds(DataError):
    """Requested rows are not common to all parties, or must not be asked for."""


def id_value(canonical: str) -> str:
    """Return an id without the type that `canonical_ids` prepends: requests only have text."""
    return canonical.partition(" ")[2]


class Requests:
    """Receives requests at a socket, and yields them to the active party's role, one after the other.

    `numbers` are the numbers of the common rows, by `id_value`. Iterating yields requests, or None after a second
    without any; it ends with the process.
    """

    def __init__(self, path: Path, numbers: dict[str, int], schema: Schema, normalise: Sequence[Normalisation]) -> None:
        self._numbers, self._schema, self._normalise = numbers, schema, normalise
        self._waiting: queue.SimpleQueue[Asked] = queue.SimpleQueue()
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(64)
        threading.Thread(target=self._accept_all, name="treaty-online", daemon=True).start()

    def __iter__(self) -> Iterator[Asked | None]:
        while True:
            try:
                first = self._waiting.get(timeout=1.0)
            except queue.Empty:
                yield None
                continue
            batch, rows = [first], len(first.rows)
            while rows < TOGETHER and not self._waiting.empty():
                batch.append(self._waiting.get())
                rows += len(batch[-1].rows)
            yield first if len(batch) == 1 else self._together(batch)

    def _together(self, batch: list[Asked]) -> Asked:
        """Return several requests as one, whose answer is split among them."""
        ends = np.cumsum([len(one.rows) for one in batch])
        columns = [np.concatenate(of) for of in zip(*(one.table.columns for one in batch), strict=True)]
        table = Table(self._schema, columns, int(ends[-1]))

        def answer_each(margins: NDArray[np.float64]) -> None:
            for one, part in zip(batch, np.split(margins, ends[:-1]), strict=True):
                one.tell(part)

        return Asked(np.concatenate([one.rows for one in batch]), table, answer_each)

    def _accept_all(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="treaty-online", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream:
            # the rest of too long a line would count as further requests, and the next would get their answers
            while (line := stream.readline(MOST_BYTES)).endswith(b"\n"):
                try:
                    answer = self._answer(msgspec.json.decode(line, type=OnlineRequest))
                except (msgspec.MsgspecError, ValueError) as error:
                    answer = OnlineAnswer(wrong=str(error))
                try:
                    stream.write(msgspec.json.encode(answer) + b"\n")
                    stream.flush()
                except OSError:
                    # The client has disconnected.
                    return

    def _answer(self, request: OnlineRequest) -> OnlineAnswer:
        # partners end the service if they are asked for more rows, and do not answer if they are asked for none
        if not 0 < len(request.ids) <= MOST_ROWS - TOGETHER:
            return OnlineAnswer(wrong=f"expected 1 to {MOST_ROWS - TOGETHER} rows, got {len(request.ids)}")
        rows = self._rows(request.ids)
        unknown = [one for one, row in zip(request.ids, rows, strict=True) if row < 0]
        if unknown:
            return OnlineAnswer(unknown=unknown[:10])
        dtype = np.float64 if self._schema.origins else np.float32
        matrix = np.frombuffer(request.matrix, dtype).reshape(len(rows), len(self._schema.names))
        table = Table(self._schema, list(np.ascontiguousarray(matrix.T)), len(rows))
        # The role's thread puts the margins here; this one waits for them.
        answer: queue.SimpleQueue[NDArray[np.float64]] = queue.SimpleQueue()
        if self._waiting.qsize() >= _WAITING:
            return OnlineAnswer(wrong="too many requests wait for the partners")
        self._waiting.put(Asked(np.array(rows, np.int32), table, answer.put))
        try:
            margins = np.ascontiguousarray(answer.get(timeout=ANSWER_TIMEOUT), np.float64)
        except queue.Empty:
            return OnlineAnswer(wrong=f"partners have not answered within {ANSWER_TIMEOUT:g} s")
        return OnlineAnswer(margins=margins.tobytes(), n_outputs=margins.shape[1])

    def _rows(self, ids: list[str]) -> list[int]:
        """Return the numbers of the rows with these ids, -1 where there is none."""
        # ids as they were aligned need no conversion, which takes 50 us or more even of one
        rows = [self._numbers.get(one, -1) for one in ids]
        if -1 in rows:
            try:
                values = canonical_ids(pa.array(ids, pa.string()), normalise=self._normalise)
            except DataError:
                # an id with a character that this Python does not know, which no row has
                return [-1] if len(ids) == 1 else [row for one in ids for row in self._rows([one])]
            rows = [self._numbers.get(id_value(value), -1) for value in values]
        return rows


class Partners:
    """Asks the process at the socket that `find` returns; used by `treaty.serving` from several threads.

    Raises UnknownIds if rows are not common to all parties, and PeerLost if the process does not run, or has no answer.
    """

    def __init__(self, find: Callable[[], Path | None], names: Sequence[str]) -> None:
        self._find, self._names = find, ", ".join(names)
        self._idle: queue.LifoQueue[socket.socket] = queue.LifoQueue()

    def __call__(self, ids: Sequence[str], table: Table) -> NDArray[np.float64]:
        """Return margins, float64 (n_rows, n_outputs)."""
        request = msgspec.json.encode(OnlineRequest(list(ids), table.matrix().tobytes()))
        try:
            line = self._ask(request)
        except OSError as error:
            why = f"the process that is connected with {self._names} does not answer: {error}"
            raise PeerLost(self._names, why) from None
        answer = msgspec.json.decode(line, type=OnlineAnswer)
        if answer.unknown:
            raise UnknownIds(
                f"ids that not all parties have, or that hidden rows were trained on: {', '.join(answer.unknown)}"
            )
        if answer.wrong:
            raise PeerLost(self._names, answer.wrong)
        return np.frombuffer(answer.margins, np.float64).reshape(len(ids), answer.n_outputs)

    def close(self) -> None:
        while not self._idle.empty():
            self._idle.get().close()

    def _ask(self, request: bytes) -> bytes:
        connection = self._connection()
        try:
            connection.settimeout(ANSWER_TIMEOUT + 5.0)
            connection.sendall(request + b"\n")
            answer = bytearray()
            while not answer.endswith(b"\n"):
                if not (piece := connection.recv(1 << 16)):
                    raise ConnectionResetError("it has ended")
                answer += piece
        except BaseException:
            connection.close()
            raise
        self._idle.put(connection)
        return bytes(answer)

    def _connection(self) -> socket.socket:
        path = self._find()
        if path is None:
            raise FileNotFoundError("it does not run here")
        with suppress(queue.Empty):
            while True:
                connection = self._idle.get_nowait()
                # A live idle connection has nothing to read and would block; at its end, it reads as empty.
                connection.setblocking(False)
                try:
                    connection.recv(1, socket.MSG_PEEK)
                except BlockingIOError:
                    return connection
                except OSError:
                    pass
                connection.close()
        made = socket.socket(socket.AF_UNIX)
        try:
            made.settimeout(5.0)
            made.connect(str(path))
        except OSError:
            made.close()
            raise
        return made
