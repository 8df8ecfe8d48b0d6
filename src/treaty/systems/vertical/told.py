"""What messages tell that systems split by column share: splits, decisions, predictions, and sums under a cipher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treaty.systems.pooled.system import checkpoints_told
from treaty.systems.told import ACTIVE, AGREEMENT, PASSIVE, Lines, Told, When, lines
from treaty.systems.vertical.contributions import ColumnNumbers, ColumnsRequest, OwnContributions
from treaty.systems.vertical.decisions import DecideRequest, Decisions, Finish, RecordCount
from treaty.systems.vertical.encrypted import Setup
from treaty.systems.vertical.encrypted_columns import (
    BinLayout,
    Hint,
    HintReceipt,
    SplitAnswer,
    SplitColumns,
    SplitRequest,
    Sums,
    SumsPiece,
    SumsRequest,
    ToldShare,
    TreeEnd,
    TreeRows,
    TreeStart,
)
from treaty.systems.vertical.links import LinkEcho, LinkProbe
from treaty.systems.vertical.named_rows import NamedRows
from treaty.systems.vertical.online import OnlineRows
from treaty.systems.vertical.public_seed import SeedCommitment, SeedCommitments, SeedOffer, SeedShare, SeedShares
from treaty.systems.vertical.sealed.level import (
    MovedShares,
    OwnerShares,
    SealedColumns,
    SealedStep,
    SealedSumsRequest,
    SideChoices,
    SplitSides,
    TournamentTerms,
    WonCandidates,
)

SECUREBOOST = "arXiv 1901.08755"
_WHO = "docs/secureboost.md, Who learns what, and who may collude"

# ---------------------------------------------------------------- decisions and predictions

FINISH = Told(Finish, ACTIVE, PASSIVE, "that nothing more is asked", "control", reference="docs/prediction.md, Plain")

DECISIONS = lines(
    Told(DecideRequest, ACTIVE, PASSIVE, "which of its own splits the trees use", "exact"),
    Told(
        Decisions,
        PASSIVE,
        ACTIVE,
        "of each row asked about, which side it takes at each split of the sender; sides at splits of one column order "
        "rows by it",
        "exact",
        guard="he_inference=True of SecureBoost, at prediction",
    ),
    reference="docs/prediction.md, What each learns, and who may collude",
)
"""Rows of eval sets in a training, and rows to predict."""

CHECKPOINTS = checkpoints_told("active", PASSIVE)

RECORDS = Told(
    RecordCount,
    PASSIVE,
    ACTIVE,
    "how many splits the sender keeps, which the active party chose",
    "control",
    reference="docs/prediction.md, Plain",
)

PREDICT: Lines = lines(AGREEMENT, RECORDS, DECISIONS, FINISH)

EXPLAIN: Lines = lines(
    PREDICT,
    Told(ColumnsRequest, ACTIVE, PASSIVE, "which of its own splits the trees use", "exact"),
    Told(ColumnNumbers, PASSIVE, ACTIVE, "which splits of the sender are on the same column, by number", "exact"),
    Told(
        OwnContributions,
        ACTIVE,
        PASSIVE,
        "what its own columns add to each row's prediction: parts of predictions, which tell of labels",
        "exact",
    ),
    reference="docs/interpretation.md, Who learns what",
)

ONLINE: Lines = lines(
    AGREEMENT,
    RECORDS,
    Told(OnlineRows, ACTIVE, PASSIVE, "which of the common rows are asked for, and when", "exact"),
    DECISIONS,
    FINISH,
    reference="docs/serving.md, Models with splits of partners",
)

# ---------------------------------------------------------------- sums under a cipher

LATTICE = When("the lattice map", lambda options, common: options.ciphers.may_hint)
KEYED = When("a cipher with keys", lambda options, common: options.cipher in ("auto", "ou", "paillier"))
SEALED = When("sealed sums", lambda options, common: options.ciphers.sealed)
OPEN = When("open sums", lambda options, common: not options.ciphers.sealed)
HIDDEN = When("hidden nodes", lambda options, common: _maybe(options, options.ciphers.hides_nodes(options.cipher)))
NAMED = When("named nodes", lambda options, common: _maybe(options, not options.ciphers.hides_nodes(options.cipher)))
BY_COLUMN = When(
    "whole columns answered", lambda options, common: _maybe(options, options.ciphers.reveals_columns(options.cipher))
)
BY_NODE = When("nodes answered", lambda options, common: _maybe(options, options.ciphers.names_rows(options.cipher)))
TRANSFERRED = When("sides transferred", lambda options, common: options.ciphers.transfers_sides)
PROBED = When(
    'encryption="auto", or sealed sums', lambda options, common: options.cipher == "auto" or options.ciphers.sealed
)
"""What the cipher decides; the active party chooses it where options say "auto", and so either may be."""


def _maybe(options: Any, so: bool) -> bool:
    return so or options.cipher == "auto"


LAYOUT = Told(
    BinLayout,
    PASSIVE,
    ACTIVE,
    "how many columns and bins the sender has, which are categorical; where sums are open, which share of its bins "
    "they will show, by an estimate",
    "control",
)
TREE_END = Told(TreeEnd, ACTIVE, PASSIVE, "that a tree is grown; with an audit, signatures on what was sent", "control")
SPLITS = Told(
    SplitRequest, ACTIVE, PASSIVE, "which of its own columns and bins were chosen, at how many nodes", "exact"
)
NODES_OF_SPLITS = Told(
    NamedRows,
    ACTIVE,
    PASSIVE,
    "which rows are in the nodes of its splits, so in part which have similar labels",
    "exact",
)
SPLIT_ANSWER = Told(
    SplitAnswer,
    PASSIVE,
    ACTIVE,
    "which of a node's rows go left at a split of the sender",
    "exact",
    guard="min_child_samples",
)


def public_seed(reference: str) -> Lines:
    return lines(
        Told(SeedOffer, ACTIVE, PASSIVE, "which answer to an earlier set-up the active party has kept", "control"),
        Told(SeedCommitment, PASSIVE, ACTIVE, "whether the sender has an earlier job's table and secrets", "control"),
        Told(
            SeedCommitments,
            ACTIVE,
            PASSIVE,
            "commitments; or that all have kept an earlier job's",
            "control",
        ),
        Told(SeedShare, PASSIVE, ACTIVE, "a random number", "nothing"),
        Told(SeedShares, ACTIVE, PASSIVE, "everybody's random numbers", "nothing"),
        reference=reference,
    )


def encrypted(seal: str, hide: str, guards: str, *, blind: bool = False) -> Lines:
    """Return the lines of a training over sums under a cipher, open or sealed.

    Of options, `seal` seals sums, `hide` has nodes hidden, and `guards` are those against what row sets tell. In a
    `blind` system nodes are hidden under any cipher.
    """
    return lines(
        _set_up(hide),
        _hidden_nodes(),
        () if blind else _named_nodes(hide, guards),
        _sums(seal),
        _sealed_sums(),
        lines(SPLITS, when=OPEN, reference=_WHO),
        lines(
            Told(
                SplitColumns,
                PASSIVE,
                ACTIVE,
                "which rows of the whole table go left at a split of the sender, those outside the node too",
                "exact",
                guard='reveal="node"',
            ),
            when=BY_COLUMN,
            reference=_WHO,
        ),
        lines(replace(NODES_OF_SPLITS, guard=guards), SPLIT_ANSWER, when=BY_NODE, reference=_WHO),
        lines(
            Told(SideChoices, ACTIVE, PASSIVE, "bits under masks, and what transfers are made of", "masked"),
            Told(
                SplitSides,
                PASSIVE,
                ACTIVE,
                "which of a node's own rows go left at a split of the sender; cuts of a column are nested",
                "exact",
                guard="min_child_samples, most_recoverable",
            ),
            Told(
                TreeEnd, ACTIVE, PASSIVE, "about how many rows went left and right at each split it won", "aggregated"
            ),
            when=TRANSFERRED,
            reference="docs/sealed.md, What splits tell",
        ),
        Told(
            ToldShare,
            PASSIVE,
            ACTIVE,
            "what share of the sender's bins sides of its splits have told, by its count over all jobs",
            "aggregated",
            reference="docs/sealed.md, What splits tell",
        ),
        TREE_END,
        CHECKPOINTS,
        DECISIONS,
        FINISH,
        AGREEMENT,
        reference="docs/secureboost.md, What happens",
    )


def _set_up(hide: str) -> Lines:
    return lines(
        LAYOUT,
        Told(
            Setup,
            ACTIVE,
            PASSIVE,
            "the model's number, the cipher, its public key, and the largest weight above 1 to a power of two",
            "control",
        ),
        lines(
            Told(LinkProbe, ACTIVE, PASSIVE, "bytes without meaning, to measure the link", "nothing"),
            Told(LinkEcho, PASSIVE, ACTIVE, "how much answers under the lattice map may still leak", "control"),
            when=PROBED,
        ),
        lines(public_seed("docs/lattice.md, For the cryptographer"), when=LATTICE),
        Told(Hint, PASSIVE, ACTIVE, "which bin of a column is fullest", "exact", guard=hide, when=KEYED),
        Told(Hint, PASSIVE, ACTIVE, "its bins under the cipher", "encrypted", when=LATTICE),
        Told(HintReceipt, ACTIVE, PASSIVE, "that a piece of it has arrived", "nothing"),
    )


def _hidden_nodes() -> Lines:
    return lines(
        Told(TreeStart, ACTIVE, PASSIVE, "the tree's sample of its columns", "control"),
        Told(SumsRequest, ACTIVE, PASSIVE, "how many nodes there are", "encrypted", when=OPEN),
        Told(SumsPiece, ACTIVE, PASSIVE, "that a request comes in parts", "encrypted"),
        when=HIDDEN,
        reference="docs/lattice.md, What the passive party sees",
    )


def _named_nodes(hide: str, guards: str) -> Lines:
    return lines(
        Told(
            TreeStart,
            ACTIVE,
            PASSIVE,
            "the tree's sample of rows and of its columns; gradients are under the cipher",
            "exact",
        ),
        Told(TreeRows, ACTIVE, PASSIVE, "more of the sample of rows, and of gradients under the cipher", "exact"),
        Told(
            SumsRequest,
            ACTIVE,
            PASSIVE,
            "which rows are in each node, and so in part which have similar labels",
            "exact",
            guard=f"{hide}, {guards}",
        ),
        Told(SumsPiece, ACTIVE, PASSIVE, "a part of such a request, about some rows", "exact", guard=hide),
        when=NAMED,
        reference=f"{SECUREBOOST}, algorithm 1",
    )


def _sums(seal: str) -> Lines:
    return lines(
        Told(
            Sums,
            PASSIVE,
            ACTIVE,
            "of each bin of each node asked about the sum of gradients, sum of hessians and number of rows; by these, "
            "bins of single rows",
            "aggregated",
            guard=seal,
            when=OPEN,
            reference="docs/secureboost.md, What exact sums show",
        ),
        Told(
            Sums,
            PASSIVE,
            ACTIVE,
            "sums under masks",
            "masked",
            when=SEALED,
            reference="docs/sealed.md, Who learns what",
        ),
    )


def _sealed_sums() -> Lines:
    return lines(
        Told(
            SealedSumsRequest,
            ACTIVE,
            PASSIVE,
            "how many nodes there are, which two have the same parent, who is compared with whom",
            "encrypted",
        ),
        Told(SealedColumns, PASSIVE, ACTIVE, "which columns have missing values", "control"),
        Told(TournamentTerms, ACTIVE, PASSIVE, "reg_lambda, how long a step takes, others' public keys", "control"),
        Told(SealedStep, ACTIVE, PASSIVE, "numbers under masks, or chosen by masked bits", "masked"),
        Told(SealedStep, PASSIVE, ACTIVE, "numbers under masks, or chosen by masked bits", "masked"),
        Told(MovedShares, PASSIVE, ACTIVE, "shares of the best split so far, for the next passive party", "masked"),
        Told(OwnerShares, PASSIVE, ACTIVE, "whose split is best at each node", "exact"),
        Told(WonCandidates, ACTIVE, PASSIVE, "its split of each node it won", "exact"),
        when=SEALED,
        reference="docs/sealed.md, Who learns what",
    )
