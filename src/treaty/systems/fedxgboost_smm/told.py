"""What the messages of FedXGBoost-SMM tell, in both modes."""

from __future__ import annotations

from dataclasses import replace

from treaty.systems.fedxgboost_smm.dealer import AskerSeed, DealEnd, DealOrder, DealRequest, DealtShares, HolderSeed
from treaty.systems.fedxgboost_smm.paper.candidates import BestGains, CandidateVectors, MaskedGradients, WonNodes
from treaty.systems.fedxgboost_smm.paper.levels import NodeRows, NullVectors, PaperTree
from treaty.systems.fedxgboost_smm.paper.roles import PaperSetup
from treaty.systems.fedxgboost_smm.paper.sums import MaskedCandidates
from treaty.systems.told import ACTIVE, AGREEMENT, PASSIVE, Lines, Played, Told, When, lines
from treaty.systems.vertical.encrypted_columns import Hint
from treaty.systems.vertical.named_rows import NamedRows
from treaty.systems.vertical.told import (
    CHECKPOINTS,
    DECISIONS,
    EXPLAIN,
    FINISH,
    LAYOUT,
    ONLINE,
    PREDICT,
    SPLIT_ANSWER,
    SPLITS,
    TREE_END,
    encrypted,
)

_DEALER = ("dealer",)
_SAFE = When('mode="safe"', lambda options, common: options.mode != "paper")
_PAPER = When('mode="paper"', lambda options, common: options.mode == "paper")
_FIRST = When("version=1", lambda options, common: options.version != 2)
_SECOND = When("version=2", lambda options, common: options.version == 2)

_DEALT = lines(
    Told(DealOrder, ACTIVE, _DEALER, "how many rows there are, and bins at each passive party", "control"),
    Told(AskerSeed, _DEALER, ACTIVE, "a seed of its masks", "nothing"),
    Told(HolderSeed, _DEALER, PASSIVE, "a seed of its mask", "nothing"),
    Told(Hint, PASSIVE, ACTIVE, "its bins under a mask that is used once", "masked"),
    Told(DealRequest, ACTIVE, _DEALER, "how many nodes are asked about", "control"),
    Told(DealtShares, _DEALER, PASSIVE, "how many nodes there are; random numbers", "masked"),
    Told(DealEnd, ACTIVE, _DEALER, "that training is over", "control"),
    when=When('backend="dealer"', lambda options, common: options.has_dealer),
    reference="docs/fedxgboost.md, With a dealer",
)

_PUBLISHED = lines(
    AGREEMENT,
    LAYOUT,
    Told(PaperSetup, ACTIVE, PASSIVE, "the order of magnitude of labels", "control"),
    Told(PaperTree, ACTIVE, PASSIVE, "which of its columns the tree may use", "control"),
    Told(NodeRows, ACTIVE, PASSIVE, "how many nodes there are", "control"),
    Told(NamedRows, ACTIVE, PASSIVE, "which rows are in each node", "exact"),
    lines(
        Told(
            NullVectors,
            ACTIVE,
            PASSIVE,
            "vectors orthogonal to gradients: with few rows, or after some trees, the labels",
            "exact",
        ),
        Told(
            MaskedCandidates,
            PASSIVE,
            ACTIVE,
            "the sums of every candidate, and in time which rows are in which bin",
            "exact",
        ),
        SPLITS,
        when=_FIRST,
    ),
    lines(
        Told(CandidateVectors, PASSIVE, ACTIVE, "vectors orthogonal to every candidate's column of bins", "exact"),
        Told(
            MaskedGradients,
            ACTIVE,
            PASSIVE,
            "the sums of its candidates and of the node, and, in one tree or less, every row's gradients, so the "
            "labels",
            "exact",
        ),
        Told(BestGains, PASSIVE, ACTIVE, "the gain of the sender's best split of each node", "aggregated"),
        Told(WonNodes, ACTIVE, PASSIVE, "which nodes its split won", "exact"),
        when=_SECOND,
    ),
    SPLIT_ANSWER,
    TREE_END,
    CHECKPOINTS,
    DECISIONS,
    FINISH,
    guard='mode="safe"',
    reference="arXiv 2106.10662; docs/fedxgboost.md, What leaks in paper mode",
)

_SAFELY = lines(
    *(
        replace(one, reference="docs/fedxgboost.md, Who learns what in safe mode")
        if one.reference.startswith("docs/secureboost.md, Who") or one.reference.startswith("arXiv")
        else one
        for one in encrypted(seal='reveal="argmax"', hide='backend="lattice"', guards='reveal="column"', blind=True)
    ),
    _DEALT,
)

TOLD: dict[Played, Lines] = {
    "train": lines(lines(_SAFELY, when=_SAFE), lines(_PUBLISHED, when=_PAPER)),
    "predict": PREDICT,
    "explain": EXPLAIN,
    "online": ONLINE,
}
