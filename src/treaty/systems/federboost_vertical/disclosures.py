"""What each party of a FederBoost training by column learns beyond its own data and its own splits."""

from __future__ import annotations

import math

from treaty.models.trees import ModelPart
from treaty.systems.federboost_vertical.options import FederBoostVertical
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Cast


def disclosures(
    cast: Cast, options: FederBoostVertical, common: BoostingOptions, part: ModelPart | None
) -> dict[str, list[str]]:
    cost = (
        f"epsilon {options.epsilon_person:g} per person, shared by the party's columns"
        if options.epsilon_person is not None
        else f"epsilon {options.value_epsilon:g} per value, and per person as many times that as the party has columns "
        "(its report has the sum)"
    )
    told = (
        "the order of all values of every column of the others, to within buckets, in the clear (epsilon=inf)"
        if options.epsilon == math.inf
        else f"of every column of the others and every row a bucket of values, right or randomised: {cost}, whatever "
        "is done with them later. This is data about each aligned person, under local differential privacy"
    )
    sides = (
        "the true one"
        if options.epsilon == math.inf
        else "of rows trained on, as far as they are recognised by ids, that of the bucket above; of all others the "
        "true one"
    )
    learned = {
        cast.active: [
            told,
            "where it has a folder for later trainings, a copy of these buckets, which it keeps there (NAME.buckets)",
            "how many buckets each column of the others has (by number, not name), whether it holds categories and "
            "whether values are missing",
            "of each column of the others, whether its rows, their order and all their buckets are those of an earlier "
            "training: it is then sent as it was, and else with new noise in all rows, which is paid for",
            f"for eval sets and at prediction, each row's side at every split in use: {sides}",
            "the shape of all trees and all leaf weights",
        ]
    }
    for name in cast.having("passive"):
        learned[name] = [
            "which of its own columns and buckets were chosen, at how many nodes of which tree",
            "of how many of its earlier buckets the active party has kept a copy, and whether these are among them",
            "nothing of labels, gradients or which rows are in a node, beyond that",
        ]
    return learned
