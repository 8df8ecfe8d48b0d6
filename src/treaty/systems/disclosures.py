"""What each party of a training learned, in words, for reports and before consent is given."""

from __future__ import annotations

import math
from collections.abc import Sequence

from treaty.systems.fedxgb.cohorts import Rules
from treaty.systems.fedxgboost_ldp.noise import DEFAULT_EPSILON, DEFAULT_MECHANISM
from treaty.systems.tree_options import TreeOptions

# what edge servers and users of a crowd are told alike
_TOLD_TO_A_CROWD = (
    "the bins of all columns, their names and categories, the classes, which columns have missing values, how many "
    "rows all users have, and the columns drawn for each tree"
)
_MODEL_OF_A_CROWD = (
    'the splits and leaf values of all trees, without gains or numbers of rows (expose="model"); in the first round '
    "they give away, for most leaves, how many rows of each class they have"
)
_SHOWN_OF_A_CROWD = 'the shape of all trees, the column of every split and all leaf values (expose="paper")'


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


def crowd_disclosures(options: TreeOptions, edges: int, spent: str = "") -> dict[str, list[str]]:
    """Say in words what each role of a training among users and edge servers learned beyond its own rows.

    Parameters
    ----------
    options : TreeOptions
    edges : int
        How many edge servers there were.
    spent : str
        Of the server's part: how small the groups were that the search for quantiles parted.

    Returns
    -------
    dict of str to list of str
        Of "server", "edge", "user" and "authority".
    """
    learned = {
        "server": _of_crowd_server(options, spent),
        "edge": _of_crowd_edge(options, edges),
        "user": _of_crowd_user(options),
    }
    if options.fewest_rows < 20:
        for role in ("server", "edge", "user") if options.expose in ("model", "paper") else ("server", "user"):
            learned[role].append(
                f"leaves of as few as {options.fewest_rows} training rows (min_child_samples is below 20), so that "
                "splits and leaf values may describe single rows"
            )
    learned["authority"] = [
        "names, roles and public keys; no data (it is trusted not to certify keys of its own in a user's name)"
    ]
    return learned


def _of_crowd_server(options: TreeOptions, spent: str) -> list[str]:
    """Say what the server of a crowd learned."""
    paper = options.mode == "paper"
    learned = [
        "sums over the users of all domains: at every node of every tree, of each bin of each column the sum of "
        "gradients, sum of hessians and number of rows; how many rows there are, in how many a column is present and "
        "in how many it has each category",
        "how many rows lie below each point that was tried in search of quantiles"
        + (f"; {spent}, whose values are known to lie between two such points" if spent else ""),
        "how many users have largest gradients and weights of which order of magnitude",
        "who the users are, in which domain, and whose rows are in each sum; where users came or went between two "
        f"sums, the sum of these alone, who are {1 if paper else Rules().least_change} or more of a domain",
        "the model, whole, with the gains of its splits and the sums of its nodes",
        "with the help of an edge server, everything above of that domain's users alone; with two thirds of the users "
        "of a domain besides, of each of its users",
    ]
    if paper:
        learned.append("the sums of each domain's users apart")
    return learned


def _of_crowd_edge(options: TreeOptions, edges: int) -> list[str]:
    """Say what an edge server learned; how much of a hidden model depends on how many look at it together."""
    learned = [
        "who its users are, how active and steady they say they are, and who takes part in which tree or is lost in it",
        _TOLD_TO_A_CROWD,
        "each of its users' sums, so labels and values of users with few rows: the masks do not hide them"
        if options.mode == "paper"
        else "no sum: those that it opens lie under masks that only the server can remove",
    ]
    if options.expose == "model":
        return [*learned, _MODEL_OF_A_CROWD]
    bound = (edges - 1) // 2
    if options.expose == "paper":
        return [
            *learned,
            _SHOWN_OF_A_CROWD,
            "of every row of all users the slot at each level of each tree, and so, with the leaf values, its margin; "
            f"nothing of thresholds while at most {bound} of {edges} edge servers look at their shares together",
        ]
    hidden, whole = "nothing of splits, leaf values or the way of rows", "all splits, all leaf values"
    return [
        *learned,
        "how many rows each user has; how many trees there are, all of them complete",
        f"{hidden} while at most {bound} of {edges} edge servers look at their shares together; {bound + 1} of them "
        f"have {whole} and the bins of every user's rows"
        if options.compares == "shamir"
        else f"{hidden} while no two of the first three edge servers, of whom two compute and one deals random "
        "numbers, look at what they have together (one of them and users have no more than these are told); any two "
        f'have {whole} and the bins of every user\'s rows (comparison="additive")',
    ]


def _of_crowd_user(options: TreeOptions) -> list[str]:
    """Say what a user learned."""
    learned = [
        "the names of the users of its domain, and who of them takes part in each sum",
        f"{_TOLD_TO_A_CROWD}; and the points that were tried in search of quantiles, and so about where quantiles of "
        "all users' rows lie and which categories are frequent",
    ]
    if options.mode != "paper":
        learned.append("no sum, and nothing of any other user alone")
    if options.expose == "model":
        return [*learned, _MODEL_OF_A_CROWD]
    if options.expose == "paper":
        return [
            *learned,
            _SHOWN_OF_A_CROWD,
            "of its own rows, the slot at each level; with rows made up for that, all thresholds",
        ]
    return [
        *learned,
        "of its own rows, the slot in the complete tree at each level and the leaf value: with many rows, or rows made "
        "up, about where the splits are and what leaves are worth",
    ]
