"""What the messages of FederBoost by row tell."""

from __future__ import annotations

from dataclasses import replace

from treaty.systems.federboost_horizontal.roles import ModelEnd
from treaty.systems.federboost_horizontal.trees import TreeStep
from treaty.systems.horizontal.rows import ModelBegin, RowsDescription
from treaty.systems.horizontal.told import input_told, keys_told, lost_told, search_told
from treaty.systems.pooled.told import checkpoints_told
from treaty.systems.told import AGREEMENT, Lines, Played, Told, When, lines

_LEADER, _MEMBER = ("leader",), ("member",)
_PLAIN = When("without epsilon_total", lambda options, common: options.epsilon_total is None)
_NOISY = When("epsilon_total", lambda options, common: options.epsilon_total is not None)

TOLD: dict[Played, Lines] = {
    "train": lines(
        AGREEMENT,
        Told(
            RowsDescription,
            _MEMBER,
            _LEADER,
            "names of its columns, their categories, which are empty or have numbers beyond float32, which classes its "
            "rows have, and whether it has bins of an earlier training on these rows",
            "exact",
        ),
        Told(
            ModelBegin,
            _LEADER,
            _MEMBER,
            "the model's number, names and categories of the first participant's columns, everybody's classes, and "
            "whether all have kept bins",
            "control",
        ),
        lines(keys_told(_LEADER, _MEMBER), reference="docs/federboost.md, Masks"),
        search_told(_LEADER, _MEMBER),
        input_told(_MEMBER, _LEADER, "epsilon_total, min_child_samples", _PLAIN),
        replace(input_told(_MEMBER, _LEADER, "epsilon_total", _NOISY), form="noisy"),
        lines(
            lost_told(_LEADER, _MEMBER),
            when=When('dropout="accept"', lambda options, common: options.dropout == "accept"),
            reference="docs/federboost.md, When a participant is lost",
        ),
        Told(
            TreeStep,
            _LEADER,
            _MEMBER,
            "the model: splits, their gains to three digits, leaf values; which of two nodes has fewer rows",
            "aggregated",
            "epsilon_total, min_child_samples",
            when=_PLAIN,
        ),
        Told(
            TreeStep,
            _LEADER,
            _MEMBER,
            "the model, made of noisy sums: splits, their gains, leaf values",
            "noisy",
            "epsilon_total",
            when=_NOISY,
        ),
        checkpoints_told("leader", _MEMBER),
        Told(ModelEnd, _LEADER, _MEMBER, "how many rounds the model has", "control"),
        reference="arXiv 2011.02796; docs/federboost.md, Who learns what by row",
    )
}
