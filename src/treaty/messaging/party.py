"""A party: a role's view of the others, with every incoming message checked before the role sees it.

A role is a plain function that calls `Party.send` and `Party.receive` and reads like the paper's listing.
`run_role` runs it and makes sure that the others learn how it ended.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from treaty.errors import (
    LocalProtocolError,
    PeerAborted,
    PeerAbsent,
    PeerLost,
    PeerProtocolError,
    PeerTimeout,
    TreatyError,
)
from treaty.machine.process import concurrently
from treaty.messaging.channel import Arrival, Channel
from treaty.messaging.conversation import Conversation
from treaty.messaging.messages import Abort, Goodbye, M, Message, clean, encode
from treaty.messaging.transcript import Transcript

logger = logging.getLogger(__name__)

ABORT_NOTICE_TIMEOUT = 10.0
"""Seconds that an abort, or a goodbye to a peer that is not needed, may take per peer; both are best effort."""

Result = TypeVar("Result")


class MessageWatcher(Protocol):
    """Observes a party's messages, decoded and checked; what it raises is raised to the role."""

    def message_sent(self, peer: str, message: Message) -> None: ...
    def message_received(self, peer: str, message: Message) -> None: ...


class Party:
    """One party of one job, talking to the others over a channel.

    A role sets `round`, from 0: messages sent carry it, and messages received must. `peers` are the parties this one
    talks to, less those left out or set aside. Messages of another job or protocol are refused. The caller closes the
    channel after the job. `timeout` is the default of all calls, in seconds, for a message to come or a peer to take
    one. One thread receives; any thread may send. `waited` has the seconds spent waiting for each peer. `watcher`, if
    any, sees every message: those sent, and those received before the role gets them.

    Where peers may vanish, a role collects with `gather`, sends to many with `send_each`, and calls `leave_out` for
    each peer that was absent or not reached; `receive` and `send` still fail for a lost peer that is not left out.

    Methods that send or receive raise LocalProtocolError for a name that is no peer, and after this party has left.
    """

    def __init__(
        self,
        name: str,
        job: str,
        protocol: str,
        channel: Channel,
        peers: Sequence[str],
        transcript: Transcript | None = None,
        timeout: float = 3600.0,
    ) -> None:
        if channel.name != name:
            raise LocalProtocolError(f"expected the channel of {name}, got that of {channel.name}")
        if len({name, *peers}) != len(peers) + 1:
            raise LocalProtocolError(f"expected different peers other than {name}, got {list(peers)}")
        self.name = name
        self.job = job
        self.protocol = protocol
        self.channel = channel
        self.peers = self._heard = tuple(peers)
        self.transcript = Transcript(name) if transcript is None else transcript
        self.timeout = timeout
        self.round = 0
        self.waited: dict[str, float] = dict.fromkeys(peers, 0.0)
        self.watcher: MessageWatcher | None = None
        self._talks = {
            peer: Conversation(
                name, peer, job, protocol, partial(channel.mark_read, peer), partial(channel.refusal, peer)
            )
            for peer in peers
        }
        # a message gets its number and leaves under the peer's lock, or numbers could overtake each other
        self._sending = {peer: threading.Lock() for peer in peers}
        # held by the one thread that empties the channel
        self._reading = threading.Lock()
        self._aborted: dict[str, PeerAborted] = {}
        self._lost: dict[str, PeerLost] = {}
        self._expendable: frozenset[str] = frozenset()
        self._over = False

    def send(self, to: str, message: Message) -> None:
        """Send a message to one of `peers`; returns when it is on its way.

        Raises PeerAborted if any peer has stopped the job, PeerLost if `to` is gone or has left, PeerTimeout if it
        takes nothing for `timeout` seconds, PeerProtocolError if a peer has sent something wrong meanwhile or `to`
        refuses the connection or a message that is too large, and LocalProtocolError if the message cannot be encoded.
        """
        talk, doing = self._outgoing(to, message)
        with self._sending[to]:
            self._listen()
            self._raise_if_stopped([to], doing)
            self._raise_if_left(talk, doing)
            try:
                self._write(talk, message)
            except PeerLost:
                # a peer that stopped the job sent its reason before it went
                self._listen()
                self._raise_if_stopped([to], doing)
                raise

    def send_each(self, messages: Mapping[str, Message], timeout: float | None = None) -> list[str]:
        """Send a message to each of several peers, some of which may be gone; return those reached, in order.

        The others are gone, have left, have stopped the job or took nothing for `timeout` seconds: call `leave_out`
        for them, since they have missed a message.

        Raises PeerAborted if a peer not in `messages` has stopped the job, and PeerProtocolError if a peer has sent
        something wrong before, both with nothing sent; PeerProtocolError also if a peer refuses the connection.
        """
        outgoing = {to: self._outgoing(to, message) for to, message in messages.items()}
        self._listen()
        self._raise_if_stopped([], "", tolerated=messages)

        def reach(to: str) -> bool:
            talk, doing = outgoing[to]
            try:
                with self._sending[to]:
                    self._raise_if_stopped([to], doing, tolerated=self._talks)
                    self._raise_if_left(talk, doing)
                    self._write(talk, messages[to], timeout)
            except (PeerLost, PeerTimeout) as error:
                logger.info("%s has not reached %s: %s", self.name, to, error)
                return False
            return True

        # at once where each takes a round trip: a slow peer does not hold up the others
        reached = concurrently(reach, outgoing, len(outgoing) if self.channel.waits else 1)
        return [to for to, was in zip(outgoing, reached, strict=True) if was]

    def receive(self, frm: str, *kinds: type[M], timeout: float | None = None, follow: bool = False) -> M:
        """Wait for a peer's next message: one of the classes `kinds`, usually one, of the current `round`.

        With `follow` the peer counts the rounds: a message of a later round sets this party's `round`.

        Raises at once PeerAborted if any peer has stopped the job, and PeerLost if any peer is gone without goodbye, or
        `frm` has left and all its messages are read; PeerTimeout if nothing came for `timeout` seconds;
        PeerProtocolError if any peer sent something malformed, repeated or out of order, or `frm` a message of another
        class or round.
        """
        awaited = " or ".join(kind.__name__ for kind in kinds)
        talk = self._talk(frm, awaited)
        patience = self.timeout if timeout is None else timeout
        began = time.monotonic()
        deadline = began + patience
        doing = f"{self.name} was waiting for {awaited} of round {self.round} from {frm}"
        self._listen()
        while True:
            # a lost peer that others can do without ends this wait only if it is the one waited for
            needed = [peer for peer in self._heard if peer == frm or peer not in self._expendable]
            self._raise_if_stopped(needed, doing)
            talk.drop_late(self.round)
            if talk.unread:
                self.waited[frm] += time.monotonic() - began
                if follow:
                    self.round = max(self.round, talk.unread[0][0].round)
                message = talk.read(kinds, self.round)
                if self.watcher is not None:
                    self.watcher.message_received(frm, message)
                return message
            self._raise_if_left(talk, doing)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                standing = "connected but silent" if self.channel.is_up(frm) else "not reachable just now"
                raise PeerTimeout(frm, f"{doing} for {patience:g} s and got nothing; {frm} is {standing}")
            self._listen(remaining)

    def gather(self, peers: Iterable[str], *kinds: type[M], timeout: float | None = None) -> dict[str, M]:
        """Wait for the next message of each of several peers, some of which may vanish; return them by peer.

        Ends when nothing more can come, or after `timeout` seconds. Peers that are gone, have left, have stopped the
        job or are slow, and sent nothing before, are absent from the result. Peers that are neither among `peers` nor
        left out raise as in `receive`, and so does anything malformed.

        An error consumes nothing: the messages of others stay unread for another call. A caller may continue without
        the sender of something malformed, by ``leave_out(error.peer)`` and another call, so that one faulty party among
        hundreds cannot stop the rest. It is an error first, as it is a bug or an attack that the caller should log.

        A slow peer may be gathered from again. What it still sends for the round it missed is dropped once `round` is
        higher, by `gather` and `receive` alike. Within one round a late message looks like the next one, so a role that
        continues with slow peers increases `round` between two calls.
        """
        peers = list(peers)
        awaited = " or ".join(kind.__name__ for kind in kinds)
        talks = {peer: self._talk(peer, awaited) for peer in peers}
        waiting = dict(talks)
        began = time.monotonic()
        deadline = began + (self.timeout if timeout is None else timeout)
        doing = f"{self.name} was gathering {awaited} of round {self.round}"
        # peers that are not gathered from must still be there
        others = [peer for peer in self._heard if peer not in talks and peer not in self._expendable]
        found: dict[str, M] = {}
        self._listen()
        while True:
            self._raise_if_stopped(others, doing, tolerated=talks)
            for peer, talk in list(waiting.items()):
                talk.drop_late(self.round)
                if talk.unread:
                    # only peeked at until all are known to be well formed: an error consumes nothing
                    found[peer] = talk.peek(kinds, self.round)
                if peer in found or talk.left or peer in self._lost:
                    self.waited[peer] += time.monotonic() - began
                    del waiting[peer]
            remaining = deadline - time.monotonic()
            if not waiting or remaining <= 0:
                break
            self._listen(remaining)
        for peer, talk in talks.items():
            if peer in found:
                talk.drop_first()
            else:
                talk.missed = self.round
                logger.info("%s continues without %s of round %d from %s", self.name, awaited, self.round, peer)
        if self.watcher is not None:
            for peer, message in found.items():
                self.watcher.message_received(peer, message)
        return {peer: found[peer] for peer in talks if peer in found}

    def leave_out(self, peer: str) -> None:
        """Continue without one of `peers`, for good; it need not be gone. A second call does nothing.

        Its loss, abort, goodbye and messages are ignored from now on (well-formed ones are in the transcript), nothing
        can be sent to it, and `peers` no longer contains it. `abort` and `close` notify it, after the others.
        """
        if peer not in self._talks:
            raise LocalProtocolError(f"{peer!r} is no peer of {self.name} ({', '.join(self._heard)}) - at leave_out")
        self.peers = tuple(other for other in self.peers if other != peer)
        self._heard = tuple(other for other in self._heard if other != peer)
        self._talks[peer].drop_unread()

    def set_aside(self, peer: str) -> None:
        """Remove from `peers` a peer that helps without taking part, such as a dealer; its loss still ends the job."""
        self._talk(peer, "set_aside")
        self.peers = tuple(other for other in self.peers if other != peer)

    def drop_earlier(self, peers: Iterable[str]) -> None:
        """Drop what some peers have sent or still send for rounds before the current one."""
        for peer in peers:
            self._talks[peer].missed = self.round - 1

    def may_lose(self, peers: Iterable[str]) -> None:
        """Let the loss, abort or malformed frames of some peers end no calls except those that address them.

        What a lost peer sent before can still be gathered.
        """
        self._expendable = frozenset(peers)

    def heed(self) -> None:
        """Raise PeerAborted if a peer has stopped the job, which may explain a failure of the channel."""
        self._listen()
        self._raise_if_stopped([], "")

    def abort(self, reason: str) -> None:
        """Notify every peer, once and best effort, that this party stops the job.

        Peers show the reason, cut at 500 characters: it must contain no labels, keys, ids or values.
        """
        self._leave(Abort(clean(reason, 500)))

    def close(self) -> None:
        """Leave the job in good order: after this a lost connection is no failure to the peers."""
        self._leave(Goodbye())

    def _leave(self, message: Abort | Goodbye) -> None:
        if self._over:
            return
        self._over = True

        def send_last(peer: str) -> None:
            talk = self._talks[peer]
            # to a peer that misses the goodbye, the end of the connection is a failure: a broken one is given time
            waits_for_it = peer in self._heard and peer not in self._expendable and isinstance(message, Goodbye)
            patience = max(self.timeout, ABORT_NOTICE_TIMEOUT) if waits_for_it else ABORT_NOTICE_TIMEOUT
            # a thread stuck in `send` holds the lock: then the peer learns of the end by the broken connection
            if talk.left or peer in self._lost or not self._sending[peer].acquire(timeout=ABORT_NOTICE_TIMEOUT):
                return
            try:
                (frame,) = talk.write(message, self.round)
                self.channel.send(peer, frame, patience, receipt=True)
                if isinstance(message, Abort):
                    self._record_sent(peer, message, len(frame))
            except TreatyError as error:
                logger.debug("%s could not send its last message to %s: %s", self.name, peer, error)
            finally:
                self._sending[peer].release()

        others = [*self._heard, *(peer for peer in self._talks if peer not in self._heard)]
        # at once, so that no peer waits for another that is out of reach
        concurrently(send_last, others, len(others) if self.channel.waits else 1)

    def _outgoing(self, to: str, message: Message) -> tuple[Conversation, str]:
        """Check that a message may be sent; return its conversation, and the beginning of errors about it."""
        kind = type(message).__name__
        if kind in (Abort.__name__, Goodbye.__name__):
            raise LocalProtocolError(f"expected a protocol's own message, got {kind}; call abort() or close()")
        return self._talk(to, kind), f"{self.name} was sending {kind} of round {self.round}"

    def _write(self, talk: Conversation, message: Message, timeout: float | None = None) -> None:
        nbytes = 0
        # a long message is sent as several frames
        for frame in talk.write(message, self.round, self.channel.frame_bytes):
            self.channel.send(talk.peer, frame, self.timeout if timeout is None else timeout)
            talk.wrote()
            nbytes += len(frame)
        self._record_sent(talk.peer, message, nbytes)
        if self.watcher is not None:
            self.watcher.message_sent(talk.peer, message)

    def _talk(self, peer: str, kind: str) -> Conversation:
        if peer not in self._heard:
            left_out = " any more: it was left out" if peer in self._talks else ""
            raise LocalProtocolError(
                f"{peer!r} is no peer of {self.name} ({', '.join(self._heard)}){left_out} - at {kind}"
            )
        if self._over:
            raise LocalProtocolError(f"expected nothing more after {self.name} left the job, got {kind}")
        return self._talks[peer]

    def _raise_if_stopped(self, needed: Collection[str], doing: str, tolerated: Container[str] = ()) -> None:
        # a copy: another thread may add to it
        for peer, aborted in list(self._aborted.items()) if self._aborted else ():
            if peer in self._heard and peer not in tolerated and (peer not in self._expendable or peer in needed):
                raise aborted
        for peer in needed:
            if peer in self._lost:
                lost = self._lost[peer]
                # in public without the peer's address
                raise PeerLost(peer, f"{lost}; {doing}", public=f"{lost.public or lost}; {doing}")

    def _raise_if_left(self, talk: Conversation, doing: str) -> None:
        if talk.left:
            raise PeerLost(talk.peer, f"{talk.peer} has finished its part and left; {doing}")

    def _listen(self, timeout: float = 0.0) -> None:
        """Take in what the channel has, waiting up to `timeout` seconds for the first item."""
        if not self._reading.acquire(blocking=False):
            return  # another thread is receiving and takes in everything
        try:
            while True:
                try:
                    arrival = self.channel.receive(timeout)
                    if arrival is None:
                        return
                    self._take_in(arrival)
                except PeerLost as lost:
                    if lost.peer in self._talks and not self._talks[lost.peer].left:
                        self._lost[lost.peer] = lost
                except PeerProtocolError as error:
                    # a faulty peer that others can do without counts as lost
                    if error.peer in self._expendable:
                        self._lost.setdefault(error.peer, PeerLost(error.peer, f"{error.peer} counts as lost: {error}"))
                        self._talks[error.peer].drop_unread()
                    elif error.peer in self._heard or error.peer not in self._talks:
                        raise
                    logger.info("%s ignores what %s, left out, sent: %s", self.name, error.peer, error)
                timeout = 0.0
        finally:
            self._reading.release()

    def _take_in(self, arrival: Arrival) -> None:
        peer = arrival.sender
        if peer not in self._talks:
            raise PeerProtocolError(peer, f"expected messages of {', '.join(self._heard)} alone, got one from {peer}")
        talk = self._talks[peer]
        if isinstance(self._lost.get(peer), PeerAbsent):
            del self._lost[peer]
        taken = talk.take_in(arrival.frame)
        if talk.abort_reason is not None:
            self._aborted.setdefault(peer, PeerAborted(peer, f"{peer} stopped the job: {talk.abort_reason}"))
        if peer not in self._heard:
            talk.drop_unread()
        if taken is None:
            return
        envelope, nbytes = taken
        if envelope.step != Goodbye.__name__:
            step = clean(envelope.step)
            content = bytes(envelope.body) if self.transcript.keeps(step) else None
            self.transcript.record("received", peer, step, envelope.round, nbytes, content)
            logger.debug("%s <- %s: %s, round %d, %d bytes", self.name, peer, step, envelope.round, nbytes)

    def _record_sent(self, to: str, message: Message, nbytes: int) -> None:
        kind = type(message).__name__
        content = encode(message) if self.transcript.keeps(kind) else None
        self.transcript.record("sent", to, kind, self.round, nbytes, content)
        logger.debug("%s -> %s: %s, round %d, %d bytes", self.name, to, kind, self.round, nbytes)


def run_role(party: Party, role: Callable[[], Result]) -> Result:
    """Run a party's role, a callable without arguments; return its result and notify the peers of how it ended.

    `party.close` is called after success, `party.abort` after any exception, which is raised again. The channel stays
    open.
    """
    try:
        result = role()
    except BaseException as error:
        party.abort(_abort_reason(error))
        raise
    party.close()
    return result


def _abort_reason(error: BaseException) -> str:
    """Return what peers may learn of an error: public texts, and of errors that are not ours the type alone."""
    if isinstance(error, TreatyError):
        return error.public or str(error)
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted by its user"
    if isinstance(error, SystemExit):
        return "its process was asked to end"
    if isinstance(error, OSError):
        return f"a file of its own, or its system, failed ({errno.errorcode.get(error.errno or 0, 'unknown error')})"
    return f"internal error ({type(error).__name__})"
