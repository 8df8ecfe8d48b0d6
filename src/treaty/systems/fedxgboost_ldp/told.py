"""What the messages of FedXGBoost-LDP tell."""

from __future__ import annotations

from treaty.systems.fedxgboost_ldp.roles import ColumnCount, NoiseSetup
from treaty.systems.fedxgboost_ldp.scoring import (
    LevelDivision,
    NoisyTree,
    ScoredSplitAnswer,
    ScoredSplitRequest,
    Scores,
)
from treaty.systems.told import ACTIVE, AGREEMENT, PASSIVE, Lines, Played, Told, When, lines
from treaty.systems.vertical.told import CHECKPOINTS, DECISIONS, EXPLAIN, FINISH, ONLINE, PREDICT

_PAPER = When('mode="paper"', lambda options, common: options.mode == "paper")
_SAFE = When('mode="safe"', lambda options, common: options.mode != "paper")

TOLD: dict[Played, Lines] = {
    "train": lines(
        AGREEMENT,
        Told(NoiseSetup, ACTIVE, PASSIVE, "bounds of gradients, so about the largest weight above 1", "control"),
        Told(ColumnCount, PASSIVE, ACTIVE, "how many columns the sender has", "control"),
        Told(
            NoisyTree,
            ACTIVE,
            PASSIVE,
            "of each row of the tree's sample the gradient under noise, so of its label no more than epsilon lets "
            "through",
            "noisy",
            guard="epsilon, epsilon_total",
            when=_SAFE,
        ),
        Told(
            NoisyTree,
            ACTIVE,
            PASSIVE,
            "of each row the gradient under noise, and exact totals beside them, so that no epsilon holds",
            "exact",
            guard='mode="safe"',
            when=_PAPER,
        ),
        Told(Scores, PASSIVE, ACTIVE, "of each node how good the sender's best split is", "aggregated"),
        Told(ScoredSplitRequest, ACTIVE, PASSIVE, "which nodes its own split won", "noisy", guard="epsilon"),
        Told(
            ScoredSplitAnswer,
            PASSIVE,
            ACTIVE,
            "which of a node's rows go left at a split of the sender",
            "exact",
            guard="min_child_samples",
        ),
        Told(
            LevelDivision,
            ACTIVE,
            PASSIVE,
            "which rows of each node go left at a split, whoever owns its column: of that column exact, of labels no "
            "more than epsilon lets through",
            "exact",
            guard="epsilon, for labels",
            when=_SAFE,
        ),
        Told(
            LevelDivision,
            ACTIVE,
            PASSIVE,
            "which rows of each node go left at a split, whoever owns its column, and exact sums of gradients",
            "exact",
            guard='mode="safe"',
            when=_PAPER,
        ),
        CHECKPOINTS,
        DECISIONS,
        FINISH,
        reference="arXiv 2106.10662; docs/fedxgboost.md, Who learns what",
    ),
    "predict": PREDICT,
    "explain": EXPLAIN,
    "online": ONLINE,
}
