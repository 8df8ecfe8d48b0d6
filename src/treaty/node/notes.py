"""The messages between nodes, which a conversation (`exchange`) carries.

Decoding is strict: types, lengths and ranges are checked before anything is used.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from treaty.node.proposals import LARGEST
from treaty.node.store import TRANSITIONS

JobId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Name = Annotated[str, msgspec.Meta(max_length=63)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hello"):
    """The first note of each side: its name and version."""

    version: int
    name: Name
    treaty: Annotated[str, msgspec.Meta(max_length=40)]
    incarnation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class HeadNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="head"):
    """The newest entry of the sender's audit log, signed (`head_statement`). The receiver stores it as evidence."""

    entry: Count
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    signature: Signature


class Proposed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="proposed"):
    """A job, signed by the active party."""

    proposal: Annotated[bytes, msgspec.Meta(max_length=LARGEST)]
    signature: Signature


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="wanted"):
    """A request for the proposal of a job that the sender does not know."""

    job: JobId


class JobStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="view"):
    """The state of a job at the sender's node.

    Attributes
    ----------
    state, reason : str
        One of `store.TRANSITIONS`; and why, in words for other parties.
    asks, ready, runs, ended, kept, done : int
        Numbers of attempts, 0 for none: the one that the active party's node wants to start, the one for which this
        node reserves a slot, the one that runs, the last one that ended, the last one that stored this party's part,
        and the last one that succeeded.
    rounds, total : int
        Trees or epochs: finished, and in all.
    signed : dict of str to bytes
        Approvals that the sender has, by party: signatures of `statement("approve", job, party)`.
    count : int
        Increases with each status that a process of the node sends.
    """

    job: JobId
    state: Annotated[str, msgspec.Meta(pattern=rf"^({'|'.join(TRANSITIONS)})\Z")]
    reason: Text = ""
    asks: Count = 0
    ready: Count = 0
    runs: Count = 0
    ended: Count = 0
    kept: Count = 0
    done: Count = 0
    rounds: Count = 0
    total: Count = 0
    signed: Annotated[dict[Name, Signature], msgspec.Meta(max_length=1000)] = {}
    count: Count = 0


class Back(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="back"):
    """A request to dial the sender's door and connect it with the receiver's process of this job."""

    token: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    job: JobId


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="beat"):
    """Sent when there is nothing else to send, so that silence means that the peer is gone."""


Note = Hello | HeadNote | Proposed | Wanted | JobStatus | Back | Heartbeat
