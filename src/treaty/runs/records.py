"""A party's record of a training for `treaty audit`: its own rows, its messages, and the sums that it opened.

It is written if the party's own copy of the job asks for it, and never sent. Its readers learn what the party knows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import Bins
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError
from treaty.files import Format, read_file, write_file
from treaty.messaging.channel import memory_channels
from treaty.messaging.party import Party
from treaty.messaging.transcript import Room, Transcript, TranscriptEntry
from treaty.privacy.exact_sums import OpenedNode
from treaty.runs.job import Job
from treaty.runs.job_files import decoded_job
from treaty.runs.threads import RunTerms
from treaty.systems.observers import Recording
from treaty.systems.system import LabelledRows, RoleInput

logger = logging.getLogger(__name__)

FORMAT = Format("training-record", 3)

# messages whose contents attacks read: not the shares of sealed sums, by far the most of what these send
READ = frozenset(
    "BinLayout Buckets CandidateVectors InputAndShares MaskedCandidates MaskedGradients MaskedInput NamedRows NodeRows "
    "NoisyTree NullVectors PaperTree SealedSumsRequest Setup SplitAnswer SplitColumns SplitRequest Sums SumsPiece "
    "SumsRequest TreeRows TreeStart".split()
)


class _Table(msgspec.Struct):
    schema: Schema
    n_rows: int
    columns: list[NDArray[np.float64]]


class _Node(msgspec.Struct):
    # number of its gradients in the record: all nodes of a tree share them
    tree: Annotated[int, msgspec.Meta(ge=0)]
    rows: NDArray[np.int32]
    sums: NDArray[np.int64]


class _Tree(msgspec.Struct):
    nodes: list[int]
    sums: list[NDArray[np.int64]]
    left: NDArray[np.int32]


class _Bins(msgspec.Struct):
    schema: Schema
    n_bins: NDArray[np.int32]
    cuts: list[NDArray[np.float64] | None]
    category_bins: list[NDArray[np.int16] | None]
    has_other: list[bool]


class _Record(msgspec.Struct):
    party: str
    model_id: str
    job: bytes
    classes: list[Any] | None
    table: _Table | None
    y: NDArray[np.float64]
    messages: list[TranscriptEntry]
    # of the trees whose nodes were opened
    gradients: list[tuple[NDArray[np.int64], NDArray[np.int64]]]
    nodes: dict[str, list[_Node]]
    offsets: dict[str, NDArray[np.int32]]
    trees: list[_Tree]
    bins: _Bins | None
    given: list[NDArray[np.int64]]
    sides: dict[str, list[tuple[NDArray[np.int32], NDArray[np.uint8]]]] = {}


def begin_record(job: Job, party: Party) -> Recording | None:
    """Record messages from now on, if the party's own copy of the job asks for it; return the observer of sums.

    Once messages, or sums, take more than the party's `record_megabytes`, nothing is recorded, and no file is written.
    """
    member = job.parties[party.name]
    if member.record is None:
        return None
    party.transcript.keep_contents(Room(member.record_megabytes * 1e6), READ)
    return Recording(room=Room(member.record_megabytes * 1e6))


def write_record(job: Job, inputs: RoleInput, recording: Recording | None, model_id: str) -> None:
    """Write a finished training's record, if there is one; warn if that cannot be done."""
    member, name = job.parties[inputs.party.name], inputs.party.name
    if recording is None or member.record is None:
        return
    if not inputs.party.transcript.record_content or recording.room.left < 0:
        logger.warning(
            "%s: its record is not written: messages, or opened sums, took more than record_megabytes, %g MB", name,
            member.record_megabytes,
        )  # fmt: skip
        return
    try:
        write_file(Path(member.record) / f"{name}.record", _packed(job, inputs, recording, model_id), FORMAT, name)
    except (ConfigError, OSError) as error:  # a finished model is worth more
        logger.warning("%s: its record is not written: %s", name, error)


def read_record(path: Path) -> tuple[RoleInput, Recording]:
    """Read what `write_record` wrote, messages into the party's transcript; ConfigError for other or damaged files."""
    record = read_file(path, _Record, FORMAT)
    job, name = decoded_job(record.job), record.party
    transcript = Transcript(name, record_content=True)
    transcript.restore(record.messages)
    roles = job.roles()
    data = None
    if record.table is not None:
        schema = record.table.schema
        data = LabelledRows(Table(schema, _narrowed(schema, record.table.columns), record.table.n_rows), record.y)
    peers = [other for other in roles.of if other != name]
    party = Party(name, job.name, job.system.name, memory_channels([name, *peers])[name], peers, transcript)
    terms = RunTerms(job.system, *job.settings(), roles)
    inputs = replace(
        terms.inputs(party, 1), data=data, classes=record.classes, n_classes=job.classes, model_id=record.model_id
    )
    return inputs, _opened(record)


def _packed(job: Job, inputs: RoleInput, recording: Recording, model_id: str) -> _Record:
    # gradients are written once a tree, not once a node: by identity, for all nodes hold the same arrays
    gradients: list[tuple[Any, Any]] = []
    known: dict[int, int] = {}
    nodes: dict[str, list[_Node]] = {}
    for owner, opened in recording.nodes.items():
        nodes[owner] = []
        for node in opened:
            if id(node.grad) not in known:
                known[id(node.grad)] = len(gradients)
                gradients.append((node.grad, node.hess))
            nodes[owner].append(_Node(known[id(node.grad)], node.rows, node.sums.ravel()))
    data, bins = inputs.data, recording.bins
    return _Record(
        party=inputs.party.name, model_id=model_id, job=job.encoded(), classes=inputs.classes,
        table=None if data is None else _Table(
            data.table.schema, data.table.n_rows, [of.astype(np.float64) for of in data.table.columns]
        ),
        y=np.zeros(0) if data is None else data.y,
        messages=list(inputs.party.transcript.entries),
        gradients=gradients, nodes=nodes, offsets=recording.offsets,
        trees=[
            _Tree(list(asked), [sums.ravel() for sums in asked.values()], left) for asked, left in recording.trees
        ],
        bins=None if bins is None else _Bins(
            bins.schema, bins.n_bins, [None if of is None else of.astype(np.float64) for of in bins.cuts],
            list(bins.category_bins), list(bins.has_other),
        ),
        given=recording.given,
        sides={
            owner: [(rows, np.packbits(left)) for rows, left in of] for owner, of in recording.sides.items()
        },
    )  # fmt: skip


def _opened(record: _Record) -> Recording:
    recording = Recording(offsets=dict(record.offsets), given=record.given)
    for owner, splits in record.sides.items():
        recording.sides[owner] = [(rows, np.unpackbits(left, count=len(rows)).view(np.bool_)) for rows, left in splits]
    for owner, nodes in record.nodes.items():
        recording.nodes[owner] = [
            OpenedNode(node.rows, *record.gradients[node.tree], node.sums.reshape(-1, 3)) for node in nodes
        ]
    recording.trees = [
        ({node: sums.reshape(-1, 3) for node, sums in zip(tree.nodes, tree.sums, strict=True)}, tree.left)
        for tree in record.trees
    ]
    if (bins := record.bins) is not None:
        cuts = tuple(_narrowed(bins.schema, bins.cuts))
        recording.bins = Bins(bins.schema, cuts, tuple(bins.category_bins), tuple(bins.has_other), bins.n_bins)
    return recording


def _narrowed(schema: Schema, arrays: Sequence[NDArray[Any] | None]) -> list[Any]:
    """Return the columns' arrays, as float32 unless a column has an origin and so is float64."""
    return [
        of if of is None or name in schema.origins else of.astype(np.float32)
        for name, of in zip(schema.names, arrays, strict=True)
    ]
