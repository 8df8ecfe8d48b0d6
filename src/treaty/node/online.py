"""The local socket between an HTTP endpoint and the process that predicts together with the partners.

A request is one line of JSON with ids and a matrix of own columns; the answer has margins, or an error. Requests that
arrive during a prediction are predicted together in the next one.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from treaty.data.ids import NORMALISE, Normalisation, canonical_ids
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError, DataError, PeerLost
from treaty.systems.vertical.prediction import Asked

MOST_BYTES = 64 << 20
"""Maximum bytes of a request or an answer."""
TOGETHER = 4096
"""Maximum rows that are predicted together, unless one request has more."""
ANSWER_TIMEOUT = 30.0
"""Seconds for the partners to answer."""
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
    """Requested rows are not common to all parties."""


def id_value(canonical: str) -> str:
    """Return an id without the type that `canonical_ids` prepends: requests only have text."""
    return canonical.partition(" ")[2]


class Requests:
    """Takes requests at a socket, and yields them to the active party's role, one after the other.

    `numbers` are the numbers of the common rows, by `id_value`. Iterating yields requests, or None after a second
    without any; it ends with the process.
    """

    def __init__(
        self,
        path: Path,
        numbers: dict[str, int],
        schema: Schema,
        normalise: Sequence[Normalisation] = NORMALISE,
    ) -> None:
        self._numbers, self._schema, self._normalise = numbers, schema, normalise
        self._waiting: queue.Queue[Asked] = queue.Queue(_WAITING)
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(64)
        threading.Thread(target=self._accept, name="treaty-online", daemon=True).start()

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
            yield self._together(batch)

    def _together(self, asked: list[Asked]) -> Asked:
        if len(asked) == 1:
            return asked[0]
        ends = np.cumsum([len(one.rows) for one in asked])
        columns = [np.concatenate(of) for of in zip(*(one.table.columns for one in asked), strict=True)]

        def answer_each(margins: NDArray[np.float64]) -> None:
            for one, part in zip(asked, np.split(margins, ends[:-1]), strict=True):
                one.tell(part)

        return Asked(
            np.concatenate([one.rows for one in asked]), Table(self._schema, columns, int(ends[-1])), answer_each
        )

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="treaty-online", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream:
            while line := stream.readline(MOST_BYTES):
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
        values = canonical_ids(pa.array(request.ids, pa.string()), normalise=self._normalise)
        rows = [self._numbers.get(id_value(value), -1) for value in values]
        unknown = [one for one, row in zip(request.ids, rows, strict=True) if row < 0]
        if unknown:
            return OnlineAnswer(unknown=unknown[:10])
        n_features = len(self._schema.names)
        dtype = np.float64 if self._schema.origins else np.float32
        matrix = np.frombuffer(request.matrix, dtype).reshape(len(rows), n_features)
        found: list[NDArray[np.float64]] = []
        answered = threading.Event()

        def answered_with(margins: NDArray[np.float64]) -> None:
            found.append(margins)
            answered.set()

        table = Table(self._schema, list(np.ascontiguousarray(matrix.T)), len(rows))
        try:
            self._waiting.put(Asked(np.array(rows, np.int32), table, answered_with), timeout=1.0)
        except queue.Full:
            return OnlineAnswer(wrong="too many requests wait for the partners")
        if not answered.wait(ANSWER_TIMEOUT):
            return OnlineAnswer(wrong=f"partners have not answered within {ANSWER_TIMEOUT:g} s")
        margins = np.ascontiguousarray(found[0], np.float64)
        return OnlineAnswer(margins=margins.tobytes(), n_outputs=margins.shape[1])


class Partners:
    """Asks the process at the socket that `find` returns; used by `treaty.serving` from several threads.

    Raises
    ------
    UnknownIds
        If rows are not common to all parties.
    PeerLost
        If the process does not run now, or has no answer.
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
            raise PeerLost(
                self._names, f"the process that is connected with {self._names} does not answer: {error}"
            ) from None
        answer = msgspec.json.decode(line, type=OnlineAnswer)
        if answer.unknown:
            raise UnknownIds(f"ids that not all parties have: {', '.join(answer.unknown)}")
        if answer.wrong:
            raise PeerLost(self._names, answer.wrong)
        return np.frombuffer(answer.margins, np.float64).reshape(len(ids), answer.n_outputs)

    def close(self) -> None:
        """Close idle connections."""
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
        while not self._idle.empty():
            try:
                connection = self._idle.get_nowait()
            except queue.Empty:
                break
            connection.setblocking(False)
            try:
                if not connection.recv(1, socket.MSG_PEEK):
                    connection.close()
                    continue
            except BlockingIOError:
                return connection
            except OSError:
                connection.close()
        made = socket.socket(socket.AF_UNIX)
        try:
            made.settimeout(5.0)
            made.connect(str(path))
        except OSError:
            made.close()
            raise
        return made


def serving_socket(folder: Path, job: str) -> Path:
    """Return the socket of a service's process; `folder` has the sockets of the node."""
    return folder / job[:16] / "online"


def find_socket(state: Path, job: str) -> Path | None:
    """Return the socket of a service of the node whose folder is `state`; None if it does not run now."""
    try:
        folder = Path((state / "sockets").read_text())
    except OSError as error:
        raise ConfigError(f"cannot read where the node's sockets are: {error.strerror}; has it been started?") from None
    path = serving_socket(folder, job)
    return path if path.exists() else None
