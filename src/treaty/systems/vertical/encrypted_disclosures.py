"""What parties can work out wherever the active one gets encrypted sums; systems add what is theirs."""

from __future__ import annotations

from collections.abc import Mapping

from treaty.models.trees import ModelPart
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Roles
from treaty.systems.vertical.cipher_options import CipherOptions


def conclusions_from_sums(
    roles: Roles, options: CipherOptions, cipher: str, part: ModelPart | None, label_epsilon: float | None = None
) -> dict[str, list[str]]:
    """Return sentences by party.

    `cipher` is the one used; `part` has the estimate of what exact sums showed; `label_epsilon` is of labels randomised
    once, None where labels are as they are.
    """
    of_active = [
        "the shape of all trees and all leaf weights",
        "the bins of single rows of the others, for certain, as far as sides of splits give them away, cuts of a "
        "column being nested: " + _shown_by_sides(part.sides if part is not None else {}),
    ]
    if options.sealed:
        of_active.append(
            "of the others' columns no sum, number of rows or gain of a bin, nor which column or cut a split is, nor "
            "anything of splits that are not chosen"
        )
    else:
        of_active.append(
            "the bins of single rows of the others, for certain, as far as exact sums give them away: "
            + _estimates({} if part is None else part.exact_sums)
        )
    learned = {roles.active: of_active}
    for name in roles.having("passive"):
        learned[name] = [_of_labels(options.names_rows(cipher), label_epsilon)]
        if options.sealed and len(roles.having("passive")) > 1:
            learned[name].append(
                f"together with {roles.active}, who must not help it: how good the best split of the parties before it "
                "is at every node, as a fraction"
            )
        if part is not None and part.forest is not None and part.forest.objective.weight_bound > 1.0:
            most = f"{part.forest.objective.weight_bound:g}"
            learned[name].append(f"that the largest weight of a row is above half of {most} and at most {most}")
    return learned


def _of_labels(named: bool, label_epsilon: float | None) -> str:
    """Return what a passive party learns of labels; `named` says whether nodes' rows are named to it."""
    if not named:
        return "nothing of which rows are in a node, nor of labels, but by how its columns and bins were chosen"
    if label_epsilon is None:
        return "of labels, what follows from rows that are in a node together; gradients and labels stay encrypted"
    return (
        f"of a label no more than epsilon {label_epsilon:g} lets through, from all trees together: labels were "
        "randomised (true labels of eval sets, and weights that depend on labels, are not covered)"
    )


def _shown_by_sides(shares: Mapping[str, float]) -> str:
    """Say how much of each passive party's bins sides told, where they were counted."""
    if not shares:
        return "more with each split of theirs (docs/sealed.md, What splits tell); they count it"
    each = ", ".join(f"{share:.2g} of {name}'s" for name, share in shares.items())
    return f"by their count, over this and earlier jobs, {each}"


def _estimates(shares: Mapping[str, float]) -> str:
    """Say how much of each passive party's bins exact sums give away, where that was estimated."""
    if not shares:
        return (
            "nearly all in small tables, and columns of few or rare values in any (docs/secureboost.md, What exact "
            "sums show)"
        )
    each = ", ".join(f"{share:.2g} of {name}'s" if share else f"none of {name}'s" for name, share in shares.items())
    return f"an estimated share, of all rows in all columns, of {each}"


def small_leaves(mode: str, common: BoostingOptions) -> list[str]:
    """Return what the active party learns where leaves may be smaller than safe mode's own limit."""
    if mode != "safe" or common.fewest_rows >= 20:
        return []
    return [
        f"leaves of as few as {common.fewest_rows} training rows (min_child_samples was lowered from 20), so that "
        "sums and splits may describe single rows"
    ]
