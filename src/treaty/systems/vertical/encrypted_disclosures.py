"""What parties learn wherever the active one gets encrypted sums, in words; systems add what is theirs."""

from __future__ import annotations

from collections.abc import Mapping

from treaty.models.trees import ModelPart
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Roles
from treaty.systems.vertical.cipher_options import CipherOptions


def learned_from_sums(
    roles: Roles, options: CipherOptions, cipher: str, part: ModelPart | None, label_epsilon: float | None = None
) -> dict[str, list[str]]:
    """Return sentences by party; the active party's are about sums, splits, the model and single rows, in this order.

    `cipher` is the one used; `part` has the estimate of what exact sums showed; `label_epsilon` is of labels randomised
    once, None where labels are as they are.
    """
    blind, columns = options.hides_nodes(cipher), options.reveals_columns(cipher)
    named = options.names_rows(cipher)
    whose = "all" if columns else "the node's"
    of_columns = "of every column of the others (by number, not name): how many bins it has"
    if options.sealed:
        of_columns += (
            ", and whether it has missing values; at every node whose split is best, but no sum, number of rows or "
            "gain of a bin, nor which column or cut it is, nor anything of splits that are not chosen"
        )
    else:
        fullest = ", which of them is fullest" if cipher in ("ou", "paillier") else ""
        of_columns += (
            f"{fullest}, and at every node the sum of gradients, sum of hessians and number of rows in each bin"
        )
    learned = {
        roles.active: [
            of_columns,
            f"of every split another party won: which of {whose} training rows go left"
            f"{', those outside the node too' if columns else ''}; for eval sets and at prediction, each row's side at "
            "every such split; several splits of one column order the rows by it",
            "the shape of all trees and all leaf weights",
            "the bins of single rows of the others, for certain, as far as sides of splits give them away, cuts of a "
            "column being nested: " + _told(part.sides if part is not None else {}),
        ]
    }
    if not options.sealed:
        learned[roles.active].append(
            "the bins of single rows of the others, for certain, as far as exact sums give them away: "
            + _estimates({} if part is None else part.exact_sums)
        )
    together = (
        f"each node {roles.active} asked it about" if not blind else "each node that one of its own columns splits"
    )
    rows = f"which training rows are together in {together}, and so in part which have similar "
    kept_from = (
        f"labels, as randomised with epsilon {label_epsilon:g} (gradients stay encrypted; all trees together tell no "
        "more of a label than that; true labels of eval sets, and weights that depend on labels, are not covered)"
        if label_epsilon is not None
        else "labels (gradients and labels themselves stay encrypted)"
    )
    for name in roles.having("passive"):
        learned[name] = [
            rows + kept_from
            if named
            else "nothing of which rows are in a node, nor of labels, but by how its columns and bins were chosen",
            "which of its own columns and bins were chosen, at how many nodes",
            f"the number of trees and levels{', how many nodes were asked about' if blind else ''}"
            f"{', which two of them have the same parent' if options.sealed else ''}, and each tree's "
            f"sample of {'' if blind else 'rows and of '}its own columns",
        ]
        if options.sealed and len(roles.having("passive")) > 1:
            learned[name].append(
                f"together with {roles.active}, who must not help it: how good the best split of the parties before it "
                "is at every node, as a fraction"
            )
        if part is not None and part.forest is not None and part.forest.objective.weight_bound > 1.0:
            most = f"{part.forest.objective.weight_bound:g}"
            learned[name].append(f"that the largest weight of a row is above half of {most} and at most {most}")
    return learned


def _told(shares: Mapping[str, float]) -> str:
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
