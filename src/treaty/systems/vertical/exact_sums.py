"""What sums and splits reveal to the active party of a partner's bins: counted, estimated, limited.

The owner of columns counts what sides of its splits have revealed, over all jobs (`RevealedSides`). Both parties
estimate what exact sums will reveal and refuse too much (`check_share`). `node_sets_from_transcript` is the other way
round: what a passive party's messages reveal of nodes, the input of attacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import Bins
from treaty.errors import ConfigError, PeerProtocolError
from treaty.files import Format
from treaty.machine.arrays import Codes, Flags, Floats, Integers
from treaty.machine.database import SealedDatabase
from treaty.messaging.messages import Array, M, view
from treaty.messaging.transcript import Transcript, TranscriptEntry
from treaty.models.checkpoints import ledger_folder
from treaty.privacy.exact_sums import estimated_share
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import RoleInput
from treaty.systems.vertical import messages
from treaty.systems.vertical.cipher_options import CipherOptions
from treaty.trees.ensemble import SplitTable

# ------ what sides of splits reveal to an honest active party of a partner's bins, counted by the partner over all jobs
#
# Cuts of a column are nested. So a party that sees the sides of common rows at many splits finds out which are of one
# column, orders them, and knows a row's bin for certain once every other bin of the column is on the other side of some
# split that it saw the row at (`attacks.nodes`). The owner of the columns knows its splits. If it decides a node's own
# rows under pads, it does not know the rows, but about how many of them go left and right: that share of its rows on
# either side of the cut, and in the bins that earlier splits of the same column leave, was seen there. A second node
# with the same cut is taken to have mostly rows that were seen there before (`_NEW`), and the rows that were seen below
# a bin and above it to be the same as far as there are so many. On 20,000 rows of a real table the count is within a
# tenth of what the attack finds; on few rows, whose nodes the attack cannot always separate, it may be a third more.
#
# Splits are kept by the values of their thresholds and not by bins, so that other bins in a later job count them, too.

_PAIRS = 2048  # bins of a column beyond which pairs of them are not counted
_NEW = 0.25  # of the rows that another node with the same cut would add, if nodes of trees were independent
_SKEW = (0.2, 0.6, 2.2)  # times the mean: how often columns are split, each a third of them
_FORM = Format("sides", 1)
_TABLE = """CREATE TABLE sides (name TEXT NOT NULL, threshold TEXT NOT NULL, missing INTEGER NOT NULL,
    categories BLOB NOT NULL, below REAL NOT NULL, above REAL NOT NULL,
    PRIMARY KEY (name, threshold, missing, categories))"""


class RevealedSides:
    """The count of an owner's columns; `share` is that of rows times columns whose bin is known for certain.

    `codes` (n_rows, n_features) are its columns in `bins`; sides are kept in `folder`, for all jobs that use it
    (None: for this object).
    """

    def __init__(self, folder: Path | None, bins: Bins, codes: Codes) -> None:
        self._bins, self._size = bins, max(1, codes.size)
        self.counts = [np.bincount(codes[:, feature], minlength=int(of) + 1) for feature, of in enumerate(bins.n_bins)]
        self._apart: dict[int, Floats] = {}
        self._class: dict[int, Integers] = {}
        self._known: dict[int, float] = {}
        self.share = 0.0
        self._db = SealedDatabase(
            folder, "sides", _FORM, {"sides": _TABLE}, what="count of what splits reveal",
            lost="which bins of the table's rows earlier splits have revealed",
        )  # fmt: skip
        features = {name: feature for feature, name in enumerate(bins.schema.names)}
        with self._db.transaction() as db:
            for name, threshold, missing, categories, below, above in db.execute("SELECT * FROM sides"):
                if name in features:
                    self._count(features[name], float(threshold), bool(missing), categories, below, above)

    def add(
        self, splits: SplitTable, shares: Iterable[tuple[int, float, float]],
        check: Callable[[float], None] = lambda share: None,
    ) -> None:  # fmt: skip
        """Count sides of recorded splits: (record, the share seen of rows that go left, that of those going right).

        ``check(share)`` may raise, before any is shown: then nothing is kept of these.
        """
        with self._db.transaction() as db:
            for record, below, above in shares:
                feature, categories = splits.feature[record], splits.category_left[record] or b""
                what = float(splits.threshold[record]), bool(splits.missing_left[record]), categories
                key = (self._bins.schema.names[feature], repr(what[0]), int(what[1]), categories)
                of_key = "name = ? AND threshold = ? AND missing = ? AND categories = ?"
                was = db.execute(f"SELECT below, above FROM sides WHERE {of_key}", key).fetchone()  # noqa: S608
                if was != (1.0, 1.0):
                    both = [float(_together(a, b)) for a, b in zip(was or (0.0, 0.0), (below, above), strict=True)]
                    db.execute("INSERT OR REPLACE INTO sides VALUES (?, ?, ?, ?, ?, ?)", (*key, *both))
                    self._count(feature, *what, below, above)
            check(self.share)

    def _count(
        self, feature: int, threshold: float, missing: bool, categories: bytes, below: float, above: float
    ) -> None:
        counts = self.counts[feature]
        if len(counts) > _PAIRS:
            # too many pairs: bins that no split has parted yet share a number, and one that is alone counts as known
            for left in self._left(feature, threshold, categories):
                left[-1] = missing
                parted = 2 * self._class.get(feature, np.zeros(len(counts), np.int64)) + left
                self._class[feature] = np.unique(parted, return_inverse=True)[1]
            of_class = np.bincount(self._class[feature], counts > 0)[self._class[feature]]
            self._known[feature] = float(counts[of_class == 1].sum())
        else:
            # apart[a, b]: the share of the rows in bin a that were seen on another side of a cut than bin b
            apart = self._apart.setdefault(feature, np.eye(len(counts)))
            for left in self._left(feature, threshold, categories):
                left[-1] = missing
                seen = _together(apart, np.where(left, below, above)[:, None])
                np.copyto(apart, seen, where=left[:, None] != left)
            least = apart.min(axis=1, where=counts > 0, initial=1.0)
            self._known[feature] = float(counts @ least) if np.count_nonzero(counts) > 1 else 0.0
        self.share = sum(self._known.values()) / self._size

    def _left(self, feature: int, threshold: float, categories: bytes) -> list[Flags]:
        """Return which slots go left at a split by values; two ways where its threshold is within one of the bins."""
        n_bins, cuts = int(self._bins.n_bins[feature]), self._bins.cuts[feature]
        of_category = self._bins.category_bins[feature]
        if of_category is not None:
            left = np.zeros(n_bins + 1, np.bool_)
            if len(categories) == len(of_category):
                left[of_category[np.frombuffer(categories, np.uint8) == 1]] = True
            return [left]
        at = int(np.searchsorted(cuts, threshold)) if cuts is not None else 0
        # a threshold of an earlier job may lie within a bin, whose rows it then may have sent either way
        exact = cuts is None or at == len(cuts) or cuts[at] == threshold
        return [np.arange(n_bins + 1) < below for below in ([at + 1] if exact else [at, at + 1])]


def _together(seen: Floats | float, more: Floats | float) -> Floats:
    """Return the share of rows seen at one of two nodes with the same cut."""
    most = np.maximum(seen, more)
    return most + _NEW * (seen + more - seen * more - most)


def estimated_sides(
    counts: Sequence[NDArray[np.number]], depth: int, trees: float, owners: int, *, whole: bool
) -> float:
    """Return roughly the share of bins that sides of splits will reveal, before anything is known of the splits.

    `counts` has the rows of each bin, by column; all owners are taken to win as many splits. With `whole` owners decide
    all rows of the table at a split.
    """
    visits = trees * (2**depth - 1 if whole else depth) / owners / max(1, len(counts))
    found = 0.0
    for of_column in counts:
        shares = of_column[of_column > 0] / max(1, of_column.sum())
        for skew in _SKEW if len(shares) > 1 else ():
            # a bin at an end of the column is known by one cut, any other by the cuts on both of its sides
            cut = 1.0 - np.exp(-skew * visits / (len(shares) - 1))
            ends = shares[0] + shares[-1]
            found += (ends * cut + (1.0 - ends) * cut**2) / len(_SKEW)
    return float(found / max(1, len(counts)))


# ---------------------------------------------------------------- exact sums


# The largest estimated share of a party's bins that may become known without `allow_exact_sums`
MOST_SHARE = 0.1
# At most one vector of others is multiplied with a column, or with labels, for so many rows
ROWS_PER_VECTOR = 10
LABELS = ["(labels)"]  # among columns
# Trees of two classes after which rows' gradients differ about as much as a regression's do in the first
AHEAD = 4


def expected_share(codes: Codes, common: BoostingOptions, trees_a_round: int = 1, *, varied: bool = False) -> float:
    """Return the estimated share of bins, rows times columns, that an active party will work out from exact sums.

    `codes`, uint8 (n_rows, n_features), are the owner's binned columns; `varied` says that gradients differ between
    rows from the first tree on. Samples of rows do not help: a tree then has smaller bins, and another tree other rows.
    A column drawn for a quarter of the trees counts as if drawn for half of them: gradients differ more by then (all
    three measured, `benchmarks/secureboost_exact_sums.py`).
    """
    sampled = common.subsample if common.one_side is None else common.top_rate + common.other_rate
    trees = (common.most_rounds * trees_a_round + AHEAD * varied) * common.colsample_bytree**0.5
    counts = [np.bincount(codes[:, feature]) * sampled for feature in range(codes.shape[1])]
    return estimated_share(counts, common.rules_of(1.0, 1.0).full_depth, trees)


def expected_sides(
    codes: Codes, ciphers: CipherOptions, common: BoostingOptions, trees_a_round: int, owners: int, *,
    decided: bool = False,
) -> float:  # fmt: skip
    """Return roughly the share of bins that sides of splits are expected to reveal; `codes` as in `expected_share`.

    An open cipher counts as the lattice map. With `decided` for rows that the model is applied to: the active party
    learns their sides at all splits.
    """
    whole = decided or ciphers.reveals_columns("lattice" if ciphers.may_hint else ciphers.cipher)
    counts = [np.bincount(codes[:, feature]) for feature in range(codes.shape[1])]
    # multi-output trees have splits once for all classes
    trees = common.most_rounds * (common.num_parallel_tree if common.multi_output else trees_a_round)
    return estimated_sides(counts, common.rules_of(1.0, 1.0).full_depth, trees, owners, whole=whole)


def check_share(inputs: RoleInput[Any], owner: str, share: float) -> None:
    """Refuse a training in safe mode that would reveal too much of `owner`'s bins without the job's consent."""
    if inputs.options.mode != "safe" or inputs.options.allow_exact_sums or share <= MOST_SHARE:
        return
    why = inputs.options.why_open(inputs.common)
    text = (
        f"exact sums would show {inputs.roles.active}, by no breach of the protocol, the bins of single rows of "
        f"{owner}: an estimated {share:.0%} of all rows in all columns, expected at most {MOST_SHARE:.0%} "
        "(docs/secureboost.md, What exact sums show). Fewer trees, less depth, a smaller max_bin or "
        "colsample_bytree, and more rows make it "
        f"less; under sealed sums only sides of splits reveal bins (docs/sealed.md{'; ' if why else ''}{why}); "
        "allow_exact_sums=True, in every party's copy of the job, accepts it"
    )
    raise ConfigError(text, public=text)


def check_sides(inputs: RoleInput, share: float, grown: float) -> None:
    """Refuse another tree if an owner's limit would be passed by as much as the last tree revealed, `grown`."""
    most = inputs.most_recoverable
    if most is not None and share + grown > most:
        raise ConfigError(
            f"sides of splits show {inputs.roles.active} an estimated {share:.1%} of the bins of {inputs.party.name}, "
            f"over this and earlier jobs, and the next tree some {grown:.1%} more, expected at most {most:.1%} "
            '(most_recoverable): train fewer or shallower trees, under sealed sums without reveal="column", or have '
            f"{inputs.party.name} raise its limit",
            public="its limit on what splits may reveal of its rows (most_recoverable) is reached: train fewer trees",
        )


class AnsweredVectors:
    """How many vectors of others a party has multiplied with its columns, or labels, over all jobs with its folder."""

    def __init__(self, inputs: RoleInput[Any, Any]) -> None:
        self._inputs, name = inputs, inputs.party.name
        folder = None if inputs.store is None else ledger_folder(inputs.store, name, "answers")
        self._db = SealedDatabase(
            folder, "answers", Format("answers", 1),
            {"answers": "CREATE TABLE answers (name TEXT PRIMARY KEY, vectors INTEGER NOT NULL)"},
            what="count of answered statistics", lost="how many sums over columns or labels others have received",
        )  # fmt: skip

    def add(self, vectors: int, whose: Sequence[str], what: str, remedy: str, job: str = "statistics") -> None:
        """Count vectors multiplied with each of own columns, or `LABELS`; ConfigError for more than the job allows."""
        name, n_rows = self._inputs.party.name, self._inputs.rows.table.n_rows
        with self._db.transaction() as db:
            before = dict(db.execute("SELECT name, vectors FROM answers"))
            counted = max((before.get(of, 0) for of in whose), default=0)
            if (counted + vectors) * ROWS_PER_VECTOR > n_rows and not self._inputs.options.allow_exact_sums:
                raise ConfigError(
                    f"{name}: {job} would multiply {vectors} vectors of the others with its {what}, after "
                    f"{counted} in earlier jobs, expected at most {n_rows // ROWS_PER_VECTOR}, one for "
                    f"{ROWS_PER_VECTOR} rows: {remedy}, or accept it with allow_exact_sums=True everywhere",
                    public=f"{job} would reveal too many sums over its {what} (allow_exact_sums)",
                )
            now = [(of, before.get(of, 0) + vectors) for of in whose]
            db.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?)", now)


# --------- what a passive party's transcript reveals of the rows of nodes: the input of the attacks in `treaty.privacy`

Cells = NDArray[np.int32]


def node_sets_from_transcript(transcript: Transcript, n_rows: int) -> list[list[Cells]]:
    """Return what a passive party of SecureBoost knows of the nodes of each tree it took part in.

    Of each pair of siblings it is asked about one alone, but the other is the rest of their parent. At its own splits
    it knows both sides, for it decided them. If nodes are hidden it knows nodes at its own splits alone, and these too
    only with ``reveal="node"``.

    Returns, for each tree, ever finer partitions of the rows, int32 (n_rows,): the number of each row's node as far as
    it is known after a message, from 0, or -1 where it is not. Messages that add nothing are left out, the root among
    them. `transcript` is the passive party's; raises ConfigError if it keeps no contents, PeerProtocolError if a
    recorded message is not what the system sends.
    """
    trees: list[list[Cells]] = []
    pieces: list[Array] = []
    rows = cells = np.arange(n_rows, dtype=np.int32)
    split, bits = NamedNodes(n_rows, 0), np.empty(0, np.bool_)
    for entry in transcript.entries:
        match entry.step:
            case "TreeStart":
                start = content_of(entry, messages.TreeStart)
                sample, cells = start.rows, np.zeros(n_rows, np.int32)
                rows = np.arange(n_rows, dtype=np.int32) if sample is None else array_of(entry, sample, "rows", None)
                # nothing is seen of trees that grow together
                trees.extend([] for _ in range(start.trees))
            case "TreeRows" if (more := content_of(entry, messages.TreeRows).rows) is not None:
                rows = np.append(rows, array_of(entry, more, "rows", None))
            case "SumsPiece" | "SumsRequest":
                query = content_of(entry, getattr(messages, entry.step)).payload
                if query and len(query[0].shape) > 1:  # vectors of nodes under the cipher, which name no rows
                    continue
                pieces += query[:1]
                if entry.step == "SumsPiece":
                    continue
                asked, pieces = _asked(pieces, entry, len(rows)), []
                finer = np.full(n_rows, -1, np.int64)
                finer[rows] = cells[rows] * (asked.max(initial=0) + 1) + asked
                cells = _keep_if_finer(trees[-1], cells, finer)
            case "SplitRequest":
                split, bits = NamedNodes(n_rows, content_of(entry, messages.SplitRequest).features.shape[0]), bits[:0]
            case "NamedRows":
                split.add(content_of(entry, messages.NamedRows), entry.peer)
            case "SplitAnswer":  # our own, to the request before it
                left = np.frombuffer(content_of(entry, messages.SplitAnswer).left.data, np.uint8)
                bits = np.append(bits, np.unpackbits(left))
                if len(bits) >= len(split.rows):
                    finer = cells.astype(np.int64)
                    finer[split.rows] = n_rows + 2 * split.nodes + bits[: len(split.rows)]
                    cells = _keep_if_finer(trees[-1], cells, finer)
    return trees


def _keep_if_finer(tree: list[Cells], cells: Cells, finer: NDArray[np.int64]) -> Cells:
    """Return the cells renumbered; add them to the tree's partitions if they are more than before."""
    known = finer >= 0
    numbered = np.full(len(cells), -1, np.int32)
    numbered[known] = np.unique(finer[known], return_inverse=True)[1]
    if numbered.max(initial=-1) > cells.max(initial=-1):
        tree.append(numbered)
    return numbered


def _asked(pieces: list[Array], entry: TranscriptEntry, n_sampled: int) -> NDArray[np.int64]:
    """Return 1 + the asked node of each sampled row, 0 for rows of no asked node."""
    dtype = np.uint16 if any(piece.dtype == "uint16" for piece in pieces) else np.uint8
    what = "SumsRequest.payload[0]"
    parts = [view(piece, dtype, (None,), peer=entry.peer, what=what) for piece in pieces]
    slots = np.concatenate([np.empty(0, dtype), *parts]).astype(np.int64)
    if len(slots) != n_sampled:
        raise PeerProtocolError(entry.peer, f"expected {n_sampled} rows, got {len(slots)}", at=what)
    return np.where(slots == np.iinfo(dtype).max, 0, slots + 1)


def content_of(entry: TranscriptEntry, kind: type[M]) -> M:
    """Return a recorded message; raise ConfigError when the transcript keeps no contents."""
    message = entry.message(kind)
    if message is None:
        raise ConfigError(f"expected a transcript with contents, got none - at {entry.step} with {entry.peer}")
    return message


def array_of(entry: TranscriptEntry, array: Array, field: str, length: int | None) -> Cells:
    """Return an int32 field of a recorded message, checked."""
    return view(array, np.int32, (length,), peer=entry.peer, what=f"{entry.step}.{field}")


class NamedNodes:
    """The rows of nodes in recorded messages of `send_nodes`; `rows` and their `nodes` are those of the pieces so far.

    Pieces may be of any length, as the limits on messages may have been others when they were sent.
    """

    def __init__(self, n_rows: int, count: int) -> None:
        self._left, self._count = n_rows, count
        self._n_rows = n_rows
        self.rows: messages.Positions = np.empty(0, np.intp)
        self.nodes: Integers = np.empty(0, np.int64)

    def add(self, named: messages.NamedRows, active: str) -> None:
        """Take the next piece; PeerProtocolError if it has more rows than are left."""
        length = named.nodes.shape[0] if len(named.nodes.shape) == 1 else 0
        if not 0 < length <= self._left:
            raise PeerProtocolError(active, f"expected 1 to {self._left} rows, got {length}", at="NamedRows.nodes")
        rows, nodes = messages.read_nodes(named, self._count, length, active)
        self.rows = np.append(self.rows, rows + self._n_rows - self._left)
        self.nodes = np.append(self.nodes, nodes)
        self._left -= length
