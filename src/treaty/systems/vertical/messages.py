"""Messages of a training on columns of several parties whose sums are hidden, in the order in which they come.

`leakage` at each class says what its receiver learns; `systems/vertical/leakage.py` who sends it to whom, and when.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.errors import PeerProtocolError
from treaty.machine.arrays import Int32s, Integers
from treaty.messaging.exchanges import send_rows, take_rows
from treaty.messaging.messages import Array, Arrays, Message, ModelId, RowSize, leaks, leaks_by, view
from treaty.messaging.party import Party

# Most trees of a round that grow together
MOST_TOGETHER = 16

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

# ---------------------------------------------------------------- set-up


@leaks(
    "how many columns and bins the sender has, which are categorical; where sums are open, which share of "
    "its bins they will show, by an estimate",
    "control",
)
class BinLayout(Message):
    """A passive party's bins: int32 (n_features + 1,) first slots, bool (n_features,) which features are categorical.

    A slot is a bin's place in a node's sums. `known` is the share of its bins that exact sums will show by its
    estimate, which goes by how evenly rows fill them; None where the sums are not of this kind.
    """

    offsets: Array
    categorical: Array
    known: Share | None = None


@leaks_by(
    open=(
        "how predictions may move with each of the sender's columns (monotone_constraints), and which of them are "
        "in which group (interaction_constraints), by the columns' numbers",
        "control",
    ),
    sealed=("how many columns the sender has", "control"),
)
class ColumnConstraints(Message):
    """Directions of the sender's columns, int8 (n_features,), and their groups, bool (n_groups, n_features).

    Under seal, where the sender keeps to its constraints itself, all columns are free and in all groups.
    """

    directions: Array
    groups: Array


@leaks("bytes without meaning, to measure the link", "nothing")
class LinkProbe(Message):
    """Meaningless bytes, to measure the link before a cipher is chosen or sums are sealed."""

    filler: bytes


@leaks("how much of the lattice map's leakage allowance is left", "control")
class LinkEcho(Message):
    """The probe's bytes, and how much the party's answers may still leak (`crypto.lattice.store`); 0 under seal."""

    filler: bytes
    left: float


@leaks("the model's number; how many of its splits kept rounds use", "control")
class Start(Message):
    """The model's id; each system's set-up message is a subclass.

    `resumed` is set for a resumed training, and `records` says how many of the passive party's records (splits of its
    own columns) the kept `rounds` use.
    """

    model_id: ModelId
    resumed: bool
    records: Annotated[int, msgspec.Meta(ge=0)]
    rounds: Annotated[int, msgspec.Meta(ge=0)]


@leaks("the model's number, the cipher, its public key, and the largest weight above 1 to a power of two", "control")
class Setup(Start):
    """The cipher's public set-up: its key, and bounds of sums.

    `encryption` is the cipher, which the active party chose where the job leaves it open; `audit` is the number of the
    record that it keeps for an audit of gradients, empty where it keeps none.
    """

    encryption: str
    payload: Arrays
    audit: bytes = b""


@leaks_by(
    dealer=("its bins under a mask that is used once", "masked"),
    keyed=("which bin of a column is fullest", "exact"),
    lattice=("the sender's bins, encrypted", "encrypted"),
)
class Hint(Message):
    """A piece of the cipher's answer to the set-up."""

    payload: Arrays


@leaks("that a piece of it has arrived", "nothing")
class HintReceipt(Message):
    """The piece has arrived; asks for the next."""


# ---------------------------------------------------------------- a tree's gradients


@leaks_by(
    hidden=("the tree's sample of its columns", "control"),
    named=("the tree's sample of rows and of its columns; gradients are encrypted", "exact"),
)
class TreeStart(Message):
    """A tree's sample of columns and rows (None: all), and its encrypted gradients.

    `rows`, int32, are the rows of these gradients, ascending; where there are more than that, up to `n_rows`, the rest
    follows in `TreeRows`. Where nodes are hidden there are no gradients yet, and `rows` is always None. In a dispute
    the commitment holds the active party to these gradients (`privacy.exact_sums`). Under the lattice map, so many
    `trees` of a round grow together.
    """

    rows: Array | None
    n_rows: RowSize
    columns: Array
    commitment: bytes
    payload: Arrays
    trees: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOGETHER)] = 1


@leaks("more rows of the sample, and more encrypted gradients", "exact")
class TreeRows(Message):
    """More of a tree's encrypted gradients, row after row, and of its sample of rows, as in `TreeStart`."""

    rows: Array | None
    payload: Arrays


@leaks_by(
    plain=("that a tree is grown; with an audit, signatures on what was sent", "control"),
    transferred=("approximately how many rows went left and right at each split it won", "aggregated"),
)
class TreeEnd(Message):
    """The tree is grown; the passive party drops its gradients.

    If the active party keeps a record for an audit, it signs all that it sent so far with its certificate's key. Where
    sides of the receiver's splits were transferred, `rows`, uint8 (k, 2), say about how many rows of each node went
    left and right, by which it counts what they reveal: x stands for n 2^(-x / 8).
    """

    signature: bytes = b""
    rows: Array | None = None


@leaks(
    "the share of the sender's bins that sides at its splits have revealed, by its count over all jobs", "aggregated"
)
class RevealedShare(Message):
    """What share of the sender's bins sides of its splits have revealed for certain, by its count over all jobs."""

    share: Share


# ---------------------------------------------------------------- sums of a level's nodes


@leaks_by(
    hidden=("how many nodes there are", "encrypted"),
    named=("which rows are in each node, and so in part which have similar labels", "exact"),
)
class SumsRequest(Message):
    """Asks for the bin sums of nodes of a level; the level's last request has `last` set."""

    payload: Arrays
    last: bool


@leaks_by(
    hidden=("that a request comes in parts", "encrypted"), named=("a part of such a request, for some rows", "exact")
)
class SumsPiece(Message):
    """A part of a `SumsRequest`, about some rows; the rest follows."""

    payload: Arrays


@leaks_by(
    open=(
        "for each bin of each requested node, the sum of gradients, sum of hessians and number of rows, "
        "from which bins of single rows can follow",
        "aggregated",
    ),
    sealed=("sums under masks", "masked"),
    not_rerandomised=(
        "which rows are in a bin: it can recognise its own ciphertexts in answers",
        "exact",
        "rerandomise=True",
    ),
)
class Sums(Message):
    """Encrypted sums of grad, hess and count in every bin of the nodes asked about."""

    payload: Arrays


# ---------------------------------------------------------------- splits of open sums


@leaks("which of its own columns and bins were chosen, at how many nodes", "exact")
class SplitRequest(Message):
    """Splits won by the receiver: int32 features (k,), packed bits of bins left (k, width / 8).

    The width is that of the receiver's widest column (`trees.histograms.width_of`).
    The nodes' rows follow in `NamedRows`. With ``reveal="column"`` no rows are named; `SplitColumns` is the answer.
    """

    features: Array
    left_bins: Array


@leaks_by(
    all_nodes=("which rows are in each node", "exact"),
    own_splits=("which rows are in the nodes of its splits, so in part which have similar labels", "exact"),
)
class NamedRows(Message):
    """The node of each of some rows, in the table's order, by its number in the message before; the rest follows.

    Of fewer than 256 nodes uint8, of fewer than 65,536 uint16, else uint32; the type's largest number stands for rows
    of no node.
    """

    nodes: Array


@leaks("which of a node's rows go left at a split of the sender", "exact", guard="min_child_samples")
class SplitAnswer(Message):
    """Record numbers int32 (k,) and packed bits: which of the rows that were named go left, in the table's order.

    Many rows take several messages, each about the next rows.
    """

    records: Array
    left: Array


@leaks(
    "which rows of the whole table go left at a split of the sender, also outside the node",
    "exact",
    guard='reveal="node"',
)
class SplitColumns(Message):
    """Record numbers int32 (k,); int32 (k,) which column of bits decides each; uint8 (new, bytes) columns not sent yet.

    A column of bits says of all rows of the table which go left at a split. Columns are numbered from 0 as they are
    first sent. Many splits take several messages, each about the next splits; if one split has too many rows, each
    about its next rows.
    """

    records: Array
    columns: Array
    new: Array


# ---------------------------------------------------------------- sealed sums: comparisons on shares, sides under pads


MOST_STEP = 1 << 13
# Bytes sent at a step for later ones
MOST_AHEAD = 1 << 22
# Entries of the active party's own in a tournament, one for each run of its columns that are in the same groups
MOST_ENTRIES = 1 << 14
# Bits of a row in `SideChoices`
CHOICE_BITS = 32

SignedKey = tuple[Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)], bytes]


@leaks("which columns have missing values", "control")
class SealedColumns(Message):
    """Which columns have missing values, bool (features,), and a signed public key for moving shares."""

    missing: Array
    key: SignedKey


@leaks("reg_lambda, how long a step takes, others' public keys", "control")
class TournamentTerms(Message):
    """reg_lambda in units of hess; how many comparisons take as long as a step; other passive parties' signed keys."""

    ridge: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
    step: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEP)]
    keys: dict[str, SignedKey]


@leaks(
    "how many nodes there are, which are siblings, whose splits are compared and how many of the sender's, in the "
    "clear; rows are encrypted",
    "encrypted",
)
class SealedSumsRequest(SumsRequest):
    """Asks for the bin sums of nodes of a level, under masks.

    `parents`, int32 (nodes,): the place of each node's parent among the last level's nodes, -1 at the root. `chain` has
    the passive parties whose bests are compared, in this order (`parties`). So many entries of the active party's come
    before the receiver's candidates, `own_before`, and after them, `own_after`. At each step of the level about `ahead`
    bytes are sent either way for later ones.
    """

    parents: Array
    # names with zeros between: a message with a list in it would be bounded, and a query has all rows of the table
    chain: str
    ahead: Annotated[int, msgspec.Meta(ge=0, le=MOST_AHEAD)]
    own_before: Annotated[int, msgspec.Meta(ge=0, le=MOST_ENTRIES)]
    own_after: Annotated[int, msgspec.Meta(ge=0, le=MOST_ENTRIES)]

    @property
    def parties(self) -> list[str]:
        return self.chain.split("\0")


@leaks("numbers under masks, or chosen by masked bits", "masked")
class SealedStep(Message):
    """A step of computing on shares."""

    payload: Arrays


@leaks(
    "the owner of each node's split; which of its own splits were chosen, and at which nodes; where leaf weights stay "
    "shared, that margins are not too large",
    "exact",
)
class OpenedStep(Message):
    """A step by which shares are opened to the other party."""

    payload: Arrays


Step = SealedStep | OpenedStep


@leaks("shares of the best split so far, for the next passive party", "masked")
class MovedShares(Message):
    """Shares of the best so far, under a mask of two passive parties, uint64 (nodes, 4, words)."""

    shares: Array


@leaks("which groups its splits leave, for other passive parties", "masked")
class MovedGroups(Message):
    """Which groups have all columns that the sender used above each node, uint8 (others, nodes, groups) of 0 and 1.

    They are for the other passive parties of the chain, each under a mask of its own.
    """

    bits: Array


@leaks("which party has the best split at each node", "exact")
class OwnerShares(Message):
    """Shares of whose split is best, uint64 (nodes,), which the active party opens."""

    shares: Array


@leaks("which of its own splits were chosen, and at which nodes", "exact")
class WonCandidates(Message):
    """Nodes won by the receiver, int32 (k,) ascending, and uint64 (k,) shares of its candidates' numbers.

    Where the tree has columns with sets of categories, a transfer of the sets that won follows (`SealedStep`), then
    `SideChoices`, unless whole columns are answered.
    """

    nodes: Array
    numbers: Array


@leaks("bits under masks, and messages of oblivious transfers", "masked")
class SideChoices(Message):
    """Transfers of a bit of each of some rows, for every level that had none so far (`transfer.stock`).

    The bit says whether the row is in the node asked about or in its sibling: `message`, uint64 (lines, words), extends
    the transfers, and `flips`, uint64 (words,), are the bits under a mask.
    """

    message: Array
    flips: Array


@leaks(
    "which of a node's own rows go left at a split of the sender; many splits together narrow down a row's value",
    "exact",
    guard="min_child_samples, most_recoverable",
)
class SplitSides(Message):
    """Record numbers int32 (k,), and packed bits uint8 (nodes, bytes): rows' sides at the nodes won, under pads.

    Many nodes take several messages, each about the next nodes; if one node has too many rows, each about its next
    rows.
    """

    records: Array
    left: Array


# ---------------------------------------------------------------- the rows of nodes, as `NamedRows`


Positions = NDArray[np.intp]


def node_type(count: int) -> np.dtype[np.unsignedinteger]:
    """Return the type in which numbers of `count` nodes are sent."""
    return np.dtype(next(kind for kind in (np.uint8, np.uint16, np.uint32) if count <= np.iinfo(kind).max))


def send_nodes(party: Party, peer: str, rows: Int32s, starts: Integers, n_rows: int) -> None:
    """Send a peer the node of each of the table's `n_rows` rows; node k has rows[starts[k] : starts[k + 1]]."""
    count = len(starts) - 1
    kind = node_type(count)
    nodes = np.full(n_rows, np.iinfo(kind).max, kind)
    nodes[rows] = np.repeat(np.arange(count).astype(kind), np.diff(starts))
    send_rows(party, peer, n_rows, 8 * kind.itemsize, lambda of: NamedRows(Array.of(nodes[of])))


def take_nodes(party: Party, active: str, count: int, n_rows: int) -> Iterator[tuple[Positions, Integers]]:
    """Receive what `send_nodes` sends; of each piece yield the rows in nodes, ascending, and the node of each."""
    for of, named in take_rows(party, active, n_rows, 8 * node_type(count).itemsize, NamedRows):
        rows, nodes = read_nodes(named, count, of.stop - of.start, active)
        yield rows + of.start, nodes


def read_nodes(named: NamedRows, count: int, n_rows: int, active: str) -> tuple[Positions, Integers]:
    """Return which of a piece's `n_rows` rows are in one of `count` nodes, ascending, and in which."""
    kind = node_type(count)
    nodes = view(named.nodes, kind, (n_rows,), peer=active, what="NamedRows.nodes")
    rows = np.flatnonzero(nodes != np.iinfo(kind).max)
    found = nodes[rows].astype(np.int64)
    if len(found) and found.max() >= count:
        raise PeerProtocolError(active, f"expected nodes below {count}", at="NamedRows.nodes")
    return rows, found
