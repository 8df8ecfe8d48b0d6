"""A job as organisations propose and approve it: the same bytes at every node, identified by their hash.

The active party's node signs the proposal, and each party's node signs its approval of the hash (Ed25519). An approved
job cannot change: any other option gives another hash. A proposal has no addresses, keys, files or folders; a party's
table is named by a data set that its node declares. The notes that nodes exchange about jobs are below.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from treaty.errors import ConfigError, TreatyError
from treaty.messaging.certificates import check_names
from treaty.messaging.messages import clean
from treaty.node.store import TRANSITIONS
from treaty.runs.job import Job, Member
from treaty.runs.job_files import check_whole, decoded_job, names_of_code, read_job
from treaty.runs.prediction import check_explainable, check_online, predicting
from treaty.systems import SYSTEMS
from treaty.systems.pooled.continuing import check_start
from treaty.systems.system import Roles

Verb = Literal["train", "predict", "explain", "serve"]
Kind = Literal[Verb, "check"]

# Maximum bytes of a proposal.
LARGEST = 256 << 10
# How long a proposal may wait for all approvals.
OPEN_FOR = timedelta(days=30)
# Allowed difference between the clocks of two organisations.
CLOCK_SLACK = timedelta(hours=24)
# Maximum parties of a job between nodes: each status may hold the approval of every one.
MOST_PARTIES = 1000
# Maximum data sets of a party in a job.
MOST_DATA_SETS = 100
# Maximum characters of a name, an option or a column in a proposal.
LONGEST_TEXT = 1000
# Maximum seconds for which a proposal may let parties wait for a message.
LONGEST_WAIT = 30 * 86400.0
# Maximum classes of a job between nodes: parties keep a column of numbers for each.
MOST_CLASSES = 10_000

# Fields that each node decides for itself; they are no part of a proposal.
_OF_NODES = ("from_model", "output", "checkpoints", "store", "wait", "n_jobs", "inbox_limit")
_OF_MEMBERS = (
    "address", "listen", "proxy", "certificate", "key", "id", "noisy_labels", "keep_for_audit", "audit_gigabytes",
    "cluster", "cluster_workers", "record", "record_megabytes", "most_recoverable", "most_epsilon",
    "most_epsilon_total",
)  # fmt: skip


class Proposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a node signs and sends."""

    # The job, JSON as `Job.encoded` writes it.
    job: Annotated[str, msgspec.Meta(max_length=LARGEST)]
    verb: Verb
    # The id of the training, for all verbs but "train".
    model: Annotated[str, msgspec.Meta(pattern=r"^(|[0-9a-f]{64})\Z")] = ""
    # The id of the finished training that a training goes on from.
    from_model: Annotated[str, msgspec.Meta(pattern=r"^(|[0-9a-f]{64})\Z")] = ""
    # Date and time, UTC.
    submitted: Annotated[str, msgspec.Meta(max_length=40)]
    # Random, so that a job that is submitted twice has two ids.
    nonce: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    # Nodes only check whether they could take part: no person is asked, and nothing runs.
    trial: bool = False

    @property
    def kind(self) -> Kind:
        """The verb, or "check" for a trial, as in the node's database."""
        return "check" if self.trial else self.verb

    def described(self) -> Job:
        """Return the job.

        Raises ConfigError if the job is invalid, or has fields that each node decides for itself.
        """
        try:
            job = decoded_job(self.job.encode())
            # a prediction names the options of its training, and no earlier model
            if self.verb == "train":
                check_start(job.system, *job.settings(), goes_on=self.from_model != "")
            check_whole(job, "the proposal")
        except TreatyError:
            raise
        # From msgspec, and for numbers that are too large.
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"cannot read the job in the proposal: {error}") from None
        check_shared(job)
        return msgspec.structs.replace(job, from_model=self.from_model or None)


def proposed(file: Path, verb: Verb, model: str = "", from_model: str = "", *, trial: bool = False) -> bytes:
    """Return the proposal of a job file.

    Raises ConfigError if the file is wrong, or has fields that each node decides for itself.
    """
    job = read_job(file)
    check_shared(job)
    roles_of(job, verb)
    now, encoded = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), job.encoded().decode()
    _check_job(encoded, [job.protocol, str(job.common.get("objective"))])
    nonce = secrets.token_hex(16)
    content = msgspec.json.encode(
        Proposal(job=encoded, verb=verb, model=model, from_model=from_model, submitted=now, nonce=nonce, trial=trial)
    )
    if len(content) > LARGEST:
        raise ConfigError(f"expected a job of at most {LARGEST} bytes, got {len(content)} - in the job {file}")
    return content


def read_proposal(content: bytes, code: Collection[str] = ()) -> Proposal:
    """Decode a proposal from a peer, without importing any code that it names.

    `code` are the custom systems and losses, ``package.module:NAME``, that this node's settings allow.

    Raises ConfigError if it is no proposal, too old or from the future; if its system or loss is not allowed; or if it
    has texts or numbers beyond the limits.
    """
    if len(content) > LARGEST:
        raise ConfigError(f"expected a proposal of at most {LARGEST} bytes, got {len(content)}")
    try:
        proposal = msgspec.json.decode(content, type=Proposal)
        submitted = datetime.strptime(proposal.submitted, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the proposal: {error}") from None
    if (proposal.verb == "train") != (proposal.model == ""):
        raise ConfigError("expected the id of a training exactly if the job is a prediction, explanation or service")
    if proposal.from_model and proposal.verb != "train":
        raise ConfigError(f"expected a training that continues a model, got a job to {proposal.verb}")
    age = datetime.now(UTC) - submitted
    if not -CLOCK_SLACK <= age <= OPEN_FOR:
        raise ConfigError(
            f"expected a proposal of the last {OPEN_FOR.days} days, got one of {proposal.submitted}; submit it again, "
            "or compare the clocks"
        )
    _check_job(proposal.job, code)
    return proposal


def _check_job(encoded: str, code: Collection[str]) -> None:
    """Refuse a job before it is interpreted: looking up a system or a loss by its name would run its module."""
    try:
        raw = msgspec.json.decode(encoded)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the job in the proposal: {error}") from None
    if not isinstance(raw, dict) or not isinstance(parties := raw.get("parties"), dict):
        raise ConfigError("the job in the proposal has no parties")
    known = {name for named in SYSTEMS.values() for name in named} | set(code)
    protocol = raw.get("protocol", "secureboost")
    allowed = "or one that a policy here allows"
    if not isinstance(protocol, str) or protocol not in known:
        raise ConfigError(f"expected a built-in system, {allowed}, got {clean(repr(protocol), 80)}")
    if stray := [name for name in names_of_code(raw).values() if name not in code]:
        raise ConfigError(f"expected a built-in loss, {allowed}, got {clean(repr(stray[0]), 80)}")
    if not 2 <= len(parties) <= MOST_PARTIES:
        raise ConfigError(f"expected 2 to {MOST_PARTIES} parties, got {len(parties)}")
    check_names(parties)
    for text in _texts(raw):
        # Texts are shown to people, also on terminals.
        if len(text) > LONGEST_TEXT or not text.isprintable():
            raise ConfigError(
                f"expected printable texts of at most {LONGEST_TEXT} characters in a job, got {clean(repr(text), 80)}"
            )


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in decoded JSON, including field names, at any depth."""
    left = [value]
    while left:
        inner = left.pop()
        if isinstance(inner, str):
            yield inner
        elif isinstance(inner, dict):
            left += [*inner, *inner.values()]
        elif isinstance(inner, list):
            left += inner


def id_of(content: bytes) -> str:
    """Return a proposal's hash, the id of the job at all nodes: SHA-256, 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def name_of(job: Job, job_id: str) -> str:
    """Return the unique name of a job in its processes and in ledgers."""
    return f"{job.name[:180]} {job_id[:16]}"


def statement(what: str, job: str, who: str) -> bytes:
    """Return the bytes that `who` signs to "submit" or "approve" a job."""
    return b"\0".join([b"treaty node 1", what.encode(), job.encode(), who.encode()])


def check_shared(job: Job) -> None:
    """Refuse a job that names addresses, keys, files or folders: each node decides these for itself."""
    usual = {field.name: field.default for field in msgspec.structs.fields(Job)}
    wrong = [name for name in _OF_NODES if getattr(job, name) != usual[name]]
    if job.align is not None and job.align.log is not None:
        wrong.append("align.log")
    plain = Member()
    for party, member in job.parties.items():
        wrong += [f"parties.{party}.{of}" for of in _OF_MEMBERS if getattr(member, of) != getattr(plain, of)]
        if (count := len(member.eval_tables)) > MOST_DATA_SETS:
            raise ConfigError(f"expected at most {MOST_DATA_SETS} eval_tables of {party}, got {count}")
        named = [name for name in (member.table, *member.eval_tables, member.predict_table) if name is not None]
        try:
            check_names(named)
        except ConfigError as error:
            raise ConfigError(f"parties.{party} must name a data set of its node: {error}") from None
    for name, seconds in (("timeout", job.timeout), ("reconnect", job.reconnect)):
        if seconds > LONGEST_WAIT:
            raise ConfigError(f"expected {name} of at most {LONGEST_WAIT / 86400:g} days, got {seconds:g} seconds")
    if job.classes > MOST_CLASSES:
        raise ConfigError(f"expected at most {MOST_CLASSES} classes, got {job.classes}")
    if wrong:
        raise ConfigError(
            f"expected a job for nodes without {', '.join(wrong)}: each organisation's NODE.toml has the address of "
            "its node and how its data sets are read; the job only describes the training"
        )


def roles_of(job: Job, verb: Verb) -> Roles:
    """Return who plays which role; helpers of a training play none in a prediction.

    Raises ConfigError if roles are wrong, or the verb is not for this system.
    """
    if verb != "train" and job.by_row:
        raise ConfigError(
            f"expected no {verb} job with protocol {job.protocol!r}: each party with a model has all of it and "
            "predicts alone (treaty predict, treaty serve)"
        )
    if verb == "explain":
        check_explainable(job)
    if verb == "serve":
        check_online(job)
    reason = job.system.only_simulated(job.settings()[0])
    if reason:
        raise ConfigError(reason)
    return job.roles() if verb == "train" else predicting(job)


def check_same(job: Job, training: Job) -> None:
    """Refuse a job whose parties or active party differ from those of the training, or options if it is no training."""
    roles = [[(name, member.role) for name, member in each.parties.items()] for each in (job, training)]
    # a training that goes on may have other options than the earlier one
    fields = ("protocol", "active", "task", "classes", *(() if job.from_model else ("own", "common")))
    differ = [field for field in fields if getattr(job, field) != getattr(training, field)]
    differ += ["parties"] if roles[0] != roles[1] else []
    if differ:
        text = f"the parties and options must equal the training's; these differ: {', '.join(differ)}"
        raise ConfigError(text, public=text)


def data_sets(job: Job, party: str, verb: Verb) -> list[str]:
    """Return the names of the party's data sets that a job reads."""
    member = job.parties[party]
    named = [member.table, *member.eval_tables] if verb == "train" else [member.predict_table]
    return list(dict.fromkeys(name for name in named if name is not None))


def rounds_of(job: Job, kind: Kind) -> int:
    """Return the maximum rounds or epochs of a training; 0 for anything else."""
    return int(job.settings()[1].most_rounds) if kind == "train" else 0


def in_words(job: Job, kind: Kind) -> str:
    """Describe a job in one line: verb, name, system and parties."""
    of = {"train": "", "check": " only, nothing is trained"}.get(kind, " of a model")
    earlier = f", from the model of job {job.from_model[:12]} on" if job.from_model else ""
    return f"{kind}{of}: {job.name} ({job.protocol}), {job.active} with the labels, {len(job.parties)} parties{earlier}"


# A conversation (`exchange`) carries them. Decoding is strict: msgspec checks types, lengths and ranges before anything
# is used.

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
    """The state of a job at the sender's node."""

    job: JobId
    # One of `store.TRANSITIONS`; and why, in words for other parties.
    state: Annotated[str, msgspec.Meta(pattern=rf"^({'|'.join(TRANSITIONS)})\Z")]
    reason: Text = ""
    # Numbers of attempts, 0 for none: the one that the active party's node wants to start, the one for which this node
    # reserves a slot, the one that runs, the last one that ended, the last one that stored this party's part, and the
    # last one that succeeded.
    asks: Count = 0
    ready: Count = 0
    runs: Count = 0
    ended: Count = 0
    kept: Count = 0
    done: Count = 0
    # Trees or epochs: finished, and in all.
    rounds: Count = 0
    total: Count = 0
    # Approvals that the sender has, by party: signatures of `statement("approve", job, party)`.
    signed: Annotated[dict[Name, Signature], msgspec.Meta(max_length=1000)] = {}
    # Increases with each status that a process of the node sends.
    count: Count = 0


class Back(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="back"):
    """A request to dial the sender's door and connect it with the receiver's process of this job."""

    token: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    job: JobId


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="beat"):
    """Sent when there is nothing else to send, so that silence means that the peer is gone."""


Note = Hello | HeadNote | Proposed | Wanted | JobStatus | Back | Heartbeat
