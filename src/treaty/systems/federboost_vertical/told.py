"""What the messages of FederBoost by column tell."""

from __future__ import annotations

from treaty.systems.federboost_vertical.buckets import Buckets
from treaty.systems.federboost_vertical.kept_buckets import HeldBuckets, SameBuckets
from treaty.systems.federboost_vertical.roles import ChosenSplits, UsedColumns
from treaty.systems.told import ACTIVE, AGREEMENT, PASSIVE, Lines, Played, Told, When, lines
from treaty.systems.vertical.active import Start
from treaty.systems.vertical.told import CHECKPOINTS, DECISIONS, EXPLAIN, FINISH, ONLINE, PREDICT, RECORDS

TOLD: dict[Played, Lines] = {
    "train": lines(
        AGREEMENT,
        Told(HeldBuckets, ACTIVE, PASSIVE, "which of its buckets the active party has kept", "control"),
        Told(
            Buckets,
            PASSIVE,
            ACTIVE,
            "of every column how many buckets it has and whether values are missing, and of every row which bucket its "
            "value is in, under randomised response",
            "noisy",
            guard="epsilon, epsilon_person",
        ),
        Told(SameBuckets, PASSIVE, ACTIVE, "that buckets are those of an earlier training", "control"),
        Told(Start, ACTIVE, PASSIVE, "the model's number; how many of its splits kept rounds use", "control"),
        Told(
            UsedColumns,
            PASSIVE,
            ACTIVE,
            "nothing new: which of the sender's columns have splits, which the active party chose",
            "nothing",
            when=When("unbiased=True", lambda options, common: bool(options.unbiased)),
        ),
        Told(ChosenSplits, ACTIVE, PASSIVE, "which of its columns and buckets splits are on, and how often", "exact"),
        RECORDS,
        CHECKPOINTS,
        DECISIONS,
        FINISH,
        reference="arXiv 2011.02796; docs/federboost.md, Who learns what by column",
    ),
    "predict": PREDICT,
    "explain": EXPLAIN,
    "online": ONLINE,
}
