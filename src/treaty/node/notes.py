"""What nodes say to each other in a conversation: see `exchange`.

All is decoded strictly: types, lengths and ranges are checked before anything is looked at.
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
    """The first note of each: who speaks, and which version."""

    version: int
    name: Name
    treaty: Annotated[str, msgspec.Meta(max_length=40)]
    incarnation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class HeadNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="head"):
    """The newest entry of the sender's audit log, which the receiver remembers, signed as `audit.head_statement`."""

    entry: Count
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    signature: Signature


class Proposed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="proposed"):
    """A job, signed by the active party."""

    proposal: Annotated[bytes, msgspec.Meta(max_length=LARGEST)]
    signature: Signature


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="wanted"):
    """The sender does not know this job's proposal."""

    job: JobId


class JobStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="view"):
    """How a job stands at the sender's node.

    Attributes
    ----------
    state, reason : str
        One of `store.TRANSITIONS`; why, in words that other parties may read.
    asks, ready, runs, ended, kept, done : int
        Numbers of attempts: which one the active party's node wants to begin, which one this node holds a place for,
        which one its process plays, which one has ended last, which one has left this party's part in its place, and
        which one ended well. 0: none.
    rounds, total : int
        Trees, or epochs, that are done, and in all.
    signed : dict of str to bytes
        Signatures of `statement(state, job, party)`: approvals of all parties, as far as the sender has them.
    count : int
        Larger in each view that a process of the node sends.
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
    """Please dial my door, and connect what answers with your process of this job."""

    token: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    job: JobId


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="beat"):
    """Nothing new."""


Note = Hello | HeadNote | Proposed | Wanted | JobStatus | Back | Heartbeat
