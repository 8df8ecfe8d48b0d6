"""What each party of a FedXGBoost-LDP training learns beyond its own data and its own splits."""

from __future__ import annotations

from treaty.models.trees import ModelPart
from treaty.systems.fedxgboost_ldp.options import FedXGBoostLDP
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Cast


def disclosures(
    cast: Cast, options: FedXGBoostLDP, common: BoostingOptions, part: ModelPart | None
) -> dict[str, list[str]]:
    active, mechanism, epsilon = cast.active, options.noise_mechanism, options.noise_epsilon
    most = "" if options.epsilon_total is None else f", {options.epsilon_total:g} at most with all in {active}'s ledger"
    if mechanism == "label_rr":
        told = f"labels, as randomised once with epsilon {epsilon:g} each, which is also what a person pays"
    else:
        told = (
            f"of every row and every tree a gradient under noise ({mechanism}): epsilon {epsilon:g} per value, and per "
            f"person as many times that as there are trees{most} ({active}'s report has the sum)"
        )
    together = "which training rows are together in each node above the leaves, how large gradients may be"
    if options.mode == "paper":
        told += "; and the exact sums of gradients of every node beside it, so that no epsilon holds (mode='paper')"
    else:
        together += "; all of it made of what was randomised, so that of labels it tells no more than that epsilon"
    learned = {
        active: [
            "of every other party at every node how good its best split is; how many columns it has",
            "of every split another party won: which of the node's training rows go left; for eval sets and at "
            "prediction, each row's side at every such split; several splits of one column order the rows by it",
            "the shape of all trees and all leaf values",
        ]
    }
    if options.refit:
        learned[active].append("of all training rows, those outside the node too, the side at every split (refit)")
    for name in cast.having("passive"):
        learned[name] = [
            told,
            together,
            "which of its own columns and bins were chosen, at which nodes",
            "of every split on a column of another party, unprotected: which of the node's rows go left",
            "not covered by epsilon: when training stops early by labels of eval sets, and the order of magnitude of "
            "the largest weight or target",
        ]
    return learned
