"""What each party of a training learned, in words, for reports and before consent is given."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treaty.systems.fedxgboost_ldp.noise import DEFAULT_EPSILON, DEFAULT_MECHANISM
from treaty.systems.tree_options import SMM_PAPER_LEAKS, TreeOptions


def disclosures(
    lead: str, others: Sequence[str], options: TreeOptions, cipher: str, dealer: str = "dealer"
) -> dict[str, list[str]]:
    """Say in words what each party of a vertical training learned beyond its own data and its own splits.

    Parameters
    ----------
    lead : str
        The active party.
    others : sequence of str
    options : TreeOptions
    cipher : {"lattice", "ou", "paillier", "dealer"}
        The one it was trained under.
    dealer : str
        Who dealt random matrices, where options ask for it.
    """
    if options.protocol == "federboost-vertical":
        return _of_noisy_buckets(lead, others, options)
    if options.protocol == "fedxgboost-ldp":
        return _of_noisy_gradients(lead, others, options)
    if options.protocol == "fedxgboost-smm" and options.mode == "paper":
        return _of_matrix_products(lead, others, options)
    blind, columns = options.hides_nodes(cipher), options.reveals_columns(cipher)
    whose = "all" if columns else "the node's"
    learned = {
        lead: [
            "of every column of the others (by number, not name): how many bins it has"
            + (", which of them is fullest" if cipher in ("ou", "paillier") else "")
            + ", and at every node the sum of gradients, sum of hessians and number of rows in each bin",
            f"of every split another party won: which of {whose} training rows go left"
            f"{', those outside the node too' if columns else ''}; for eval sets and at prediction, each row's side at "
            "every such split; several splits of one column order the rows by it",
            "the shape of all trees and all leaf weights",
        ]
    }
    if options.he_inference:
        learned[lead][1] = (
            f"of every split another party won: which of {whose} training rows go left, and of eval sets each row's "
            "side; at prediction one sum of leaf weights per row, which gives away the decisions on the row's paths "
            "unless the model is large (docs/prediction.md)"
        )
    if options.rerandomise is False:
        learned[lead].append("which rows are in a bin, if it looks: answers were not re-randomised")
    if options.mode == "safe" and options.fewest_rows < 20:
        learned[lead].append(
            f"leaves of as few as {options.fewest_rows} training rows (min_child_samples was lowered from 20), so that "
            "sums and splits may describe single rows"
        )
    together = f"each node {lead} asked it about" if not blind else "each node that one of its own columns splits"
    rows = f"which training rows are together in {together}, and so in part which have similar "
    kept_from = (
        f"labels, as randomised with epsilon {options.epsilon:g} (gradients stay encrypted; all trees together tell no "
        "more of a label than that; true labels of eval sets, and weights that depend on labels, are not covered)"
        if options.epsilon is not None
        else "labels (gradients and labels themselves stay encrypted)"
    )
    for name in others:
        learned[name] = [
            "nothing of which rows are in a node, nor of labels, but by how its columns and bins were chosen"
            if columns
            else rows + kept_from,
            "which of its own columns and bins were chosen, at how many nodes",
            f"the number of trees and levels{', how many nodes were asked about' if blind else ''}, and each tree's "
            f"sample of {'' if blind else 'rows and of '}its own columns",
        ]
        if options.rl_trees:
            learned[name].append(f"nothing of the trees of the first {options.rl_trees} rounds")
        if options.purity_guard is not None:
            learned[name].append(
                f"nothing of nodes below a split with a child whose class shares differ from the table's by more than "
                f"{options.purity_guard:g}, but that there is such a child"
                + ("" if columns else "; at a split of its own, which rows are in it")
            )
        if options.goss and not blind:
            learned[name].append(
                "that rows in many trees' samples have large gradients: they are predicted worst (goss)"
            )
    if options.has_dealer:
        learned[lead].append(f"with the help of {dealer}, who must not give it: every bin of every row of the others")
        for name in others:
            learned[name].append(
                f"with the help of {dealer}, who must not give it: all gradients, and so labels, and the rows of every "
                "node"
            )
        learned[dealer] = [
            "how many rows there are, how many bins each passive party has, and how many nodes were asked about; it "
            "has no data (it is trusted to collude with nobody)"
        ]
    return learned


def _of_matrix_products(lead: str, others: Sequence[str], options: TreeOptions) -> dict[str, list[str]]:
    """Say what FedXGBoost-SMM as published showed, `privacy.smm_attacks` being what everybody can run."""
    split = (
        "of every split another party won: which of the node's training rows go left; for eval sets and at prediction, "
        "each row's side at every such split"
    )
    sides = ["which training rows are in each node asked about", "which of its own columns and bins were chosen"]
    sums, vectors = "the sums of gradients and hessians of each of its candidates, and of", "null vectors of"
    if options.version == 2:
        learned = {
            lead: [
                f"{vectors} the others' candidates, and so which rows single bins hold in small nodes",
                "the gain of each party's best split of every node",
                split,
                "the shape of all trees and all leaf weights",
            ]
        }
        told = [
            f"{sums} every node; and from its null vectors, of two or three levels together, every row's gradient and "
            "hessian exactly, so every label, and in the first tree from one level, most of the time"
        ]
    else:
        learned = {
            lead: [
                "of every column of the others (by number, not name) at every node the sum of gradients, sum of "
                "hessians and number of rows in each bin",
                "the bin of every row in every column of the others, exactly: by rounding what the first tree brings, "
                "or from the roots of several trees together",
                split,
                "the shape of all trees and all leaf weights",
            ]
        }
        told = [
            f"{vectors} every node's gradients; where they are nearly as many as the node has rows, every row's label"
        ]
    for name in others:
        learned[name] = [*told, *sides]
    return {name: [*facts, SMM_PAPER_LEAKS] for name, facts in learned.items()}


def _of_noisy_buckets(lead: str, others: Sequence[str], options: TreeOptions) -> dict[str, list[str]]:
    cost = (
        f"epsilon {options.epsilon_person:g} per person, shared by the party's columns"
        if options.epsilon_person is not None
        else f"epsilon {4.0 if options.epsilon is None else options.epsilon:g} per value, and per person as many times "
        "that as the party has columns (its report has the sum)"
    )
    told = (
        "the order of all values of every column of the others, to within buckets, in the clear (epsilon=inf)"
        if options.epsilon == math.inf
        else f"of every column of the others and every row a bucket of values, right or randomised: {cost}, whatever "
        "is done with them later. This is data about each aligned person, under local differential privacy"
    )
    learned = {
        lead: [
            told,
            "how many buckets each column of the others has (by number, not name), whether it holds categories and "
            "whether values are missing",
            "for eval sets and at prediction, each row's true side at every split in use",
            "the shape of all trees and all leaf weights",
        ]
    }
    for name in others:
        learned[name] = [
            "which of its own columns and buckets were chosen, at how many nodes of which tree",
            "nothing of labels, gradients or which rows are in a node, beyond that",
        ]
    return learned


def _of_noisy_gradients(lead: str, others: Sequence[str], options: TreeOptions) -> dict[str, list[str]]:
    mechanism, epsilon = options.mechanism or DEFAULT_MECHANISM, options.epsilon or DEFAULT_EPSILON
    most = "" if options.epsilon_total is None else f", {options.epsilon_total:g} at most with all in {lead}'s ledger"
    if mechanism == "label_rr":
        told = f"labels, as randomised once with epsilon {epsilon:g} each, which is also what a person pays"
    else:
        told = (
            f"of every row and every tree a gradient under noise ({mechanism}): epsilon {epsilon:g} per value, and per "
            f"person as many times that as there are trees{most} ({lead}'s report has the sum)"
        )
    together = "which training rows are together in each node above the leaves, how large gradients may be"
    if options.mode == "paper":
        told += "; and the exact sums of gradients of every node beside it, so that no epsilon holds (mode='paper')"
    else:
        together += "; all of it made of what was randomised, so that of labels it tells no more than that epsilon"
    learned = {
        lead: [
            "of every other party at every node how good its best split is; how many columns it has",
            "of every split another party won: which of the node's training rows go left; for eval sets and at "
            "prediction, each row's side at every such split; several splits of one column order the rows by it",
            "the shape of all trees and all leaf values",
        ]
    }
    if options.refit:
        learned[lead].append("of all training rows, those outside the node too, the side at every split (refit)")
    for name in others:
        learned[name] = [
            told,
            together,
            "which of its own columns and bins were chosen, at which nodes",
            "of every split on a column of another party, unprotected: which of the node's rows go left",
            "not covered by epsilon: when training stops early by labels of eval sets, and the order of magnitude of "
            "the largest weight or target",
        ]
    return learned
