"""Play every role of a job on this machine, in threads over the in-memory channel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treaty.errors import PeerAborted, PeerError
from treaty.messaging.memory import memory_channels
from treaty.messaging.party import Party, run_role
from treaty.messaging.transcript import Transcript

Role = Callable[[Party], Any]


@dataclass(frozen=True, slots=True)
class Played:
    """What each role returned, and what each party sent and received."""

    results: dict[str, Any]
    transcripts: dict[str, Transcript]


def play(
    roles: Mapping[str, Role],
    links: Mapping[str, Sequence[str]],
    *,
    job: str,
    protocol: str,
    timeout: float = 3600.0,
    record_content: bool = False,
) -> Played:
    """Run every role in a thread of its own.

    Parameters
    ----------
    roles : mapping of party name to role
        A role takes its `Party`.
    links : mapping of party name to peers
        Who talks to whom.
    job, protocol : str
        Put on every message.
    timeout : float
        Seconds a party waits for a message.
    record_content : bool
        Keep the content of messages in the transcripts, for audits and tests.

    Returns
    -------
    Played

    Raises
    ------
    Exception
        What the first role to fail raised; the others end with it.
    """
    channels = memory_channels(roles)
    parties = {
        name: Party(
            name, job, protocol, channels[name], links[name],
            Transcript(name, record_content=record_content), timeout,
        )
        for name in roles
    }  # fmt: skip
    results: dict[str, Any] = {}
    failures: list[BaseException] = []

    def run(name: str) -> None:
        try:
            results[name] = run_role(parties[name], lambda: roles[name](parties[name]))
        except BaseException as error:
            failures.append(error)
        finally:
            channels[name].close()

    threads = [threading.Thread(target=run, args=(name,), name=f"treaty-{name}", daemon=True) for name in roles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise root_cause(failures)
    return Played(results, {name: party.transcript for name, party in parties.items()})


def root_cause(failures: Sequence[BaseException]) -> BaseException:
    """Return the error the others followed from: one that is not about a peer, else one that is not an echo."""
    for echo in (PeerError, PeerAborted):
        for error in failures:
            if not isinstance(error, echo):
                return error
    return failures[0]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a run took.

    Attributes
    ----------
    totals : dict
        Of each ordered pair of parties ("clinic -> lab"): messages, bytes, and bytes by message type.
    seconds : dict
        The active party's phases, where it noted them itself.
    """

    totals: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def traffic_of(transcripts: Iterable[Transcript]) -> Traffic:
    """Add up what parties sent."""
    totals: dict[str, dict[str, Any]] = {}
    for transcript in transcripts:
        for entry in transcript.entries:
            if entry.direction == "sent":
                pair = totals.setdefault(
                    f"{transcript.party} -> {entry.peer}", {"messages": 0, "bytes": 0, "by_type": {}}
                )
                pair["messages"] += 1
                pair["bytes"] += entry.nbytes
                pair["by_type"][entry.step] = pair["by_type"].get(entry.step, 0) + entry.nbytes
    return Traffic(totals)
