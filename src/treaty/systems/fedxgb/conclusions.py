"""What each role of FedXGB can work out from a training and from predictions, beyond its messages."""

from __future__ import annotations

from treaty.models.trees import ModelPart
from treaty.privacy.ledger import DEFAULT_DELTA
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.roles import refused
from treaty.systems.horizontal import leakage
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Roles


def conclusions(roles: Roles, options: FedXGB, common: BoostingOptions, part: ModelPart | None) -> dict[str, list[str]]:
    """Return what the roles "server", "edge", "user" and "authority" can work out; `part` is the server's."""
    learned = {
        "server": _of_server(options, "" if part is None else part.spent),
        "edge": _of_edge(options, len(roles.having("edge"))),
        "user": _of_user(options),
    }
    found_by_server, found_by_others = leakage.learned_in_search(options, common)
    learned["server"][1:1] = found_by_server
    if options.holds_out_rows:
        learned["server"].insert(1, leakage.kept_back(options, common))
    for role in ("edge", "user"):
        learned[role] += found_by_others
    if options.adds_noise:
        whom = "about any user" if options.user_rows else "about any single row"
        for role in ("server", "edge", "user"):
            learned[role].append(
                f"{whom}, from sums and model together, no more than ({options.epsilon_total:g}, "
                f"{options.delta or DEFAULT_DELTA:g}) differential privacy permits, if at most one user of each "
                "domain tells the server its noise and no edge server helps it (sent without noise: names of columns, "
                "their categories, classes)"
            )
    elif common.fewest_rows < 20:
        for role in ("server", "edge", "user") if options.exposes in ("model", "paper") else ("server", "user"):
            learned[role].append(
                f"leaves of as few as {common.fewest_rows} training rows (min_child_samples is below 20), so that "
                "splits and leaf values may describe single rows"
            )
    if not refused(options):
        for role, facts in conclusions_of_prediction(roles, options).items():
            learned[role] += [f"if users have rows predicted later: {fact}" for fact in facts]
    learned["authority"] = ["no data: it is trusted not to certify keys of its own in a user's name"]
    return learned


def _of_server(options: FedXGB, spent: str) -> list[str]:
    """`spent` states how small the groups of rows were that the search for quantiles parted."""
    published, group = options.mode == "paper", options.group
    learned = ["the model, whole, with the gains of its splits and the sums of its nodes"]
    if options.adds_noise:
        return [
            *learned,
            "how many rows lie between trial values in the search for bin edges, under noise"
            + (f" ({spent})" if spent else ""),
            "by colluding with an edge server, the sums over that domain's users, under its part of the noise",
        ]
    if spent:
        learned.append(f"{spent}, whose values are known to lie between two trial values")
    learned.append(
        "if users join or leave between two sums, the sum over these users alone "
        f"({1 if published else group} or more of a domain)"
    )
    if not published and options.group_size is not None:
        learned.append(
            f"by colluding with {group - 1} users of a group of {group}, the sums of the last one; by colluding "
            "with fewer, of no other user"
        )
    elif not published:
        learned.append(
            "by colluding with two users of a group of three, the sums of the third and, if many cohorts were "
            "summed, perhaps of others; with one user, of no other user (group_size)"
        )
    learned.append(
        "by colluding with an edge server, the sums over that domain's users; with two thirds of the users of a domain "
        "as well, the sums of each of its users"
    )
    return learned


_COUNTS_OF_LEAVES = (
    'the splits and leaf values of all trees (expose="model"), which in the first round give away, for most leaves, '
    "how many rows of each class they have"
)


def _shown(options: FedXGB) -> list[str]:
    """Return what the model shows to those who have it besides the server."""
    return (
        ["the model, and the noisy sums of its leaves (epsilon_total)"] if options.adds_noise else [_COUNTS_OF_LEAVES]
    )


def _of_edge(options: FedXGB, edges: int) -> list[str]:
    """Return what an edge server can work out; of a hidden model, that depends on how many of the `edges` collude."""
    learned = [
        "each of its users' sums, so labels and values of users with few rows: the masks do not hide them"
        if options.mode == "paper"
        else "no sum: the sums that it opens are under masks that only the server can remove"
    ]
    if options.exposes == "model":
        return [*learned, *_shown(options)]
    if options.exposes == "paper":
        bound = (edges - 1) // 2
        return [
            *learned,
            'the shape of all trees, the column of every split and all leaf values (expose="paper")',
            "of every row, the slot at each level of each tree, and so, with the leaf values, its margin; "
            f"nothing about thresholds while at most {bound} of {edges} edge servers combine their shares",
        ]
    size, bound = options.committee_size(edges), options.may_collude(edges)
    whose = "every user's rows" if size == edges else "the rows of the users of the domains that these serve together"
    row = "" if size == edges else " (a committee: an edge server and the next ones, in the job's order)"
    dealt = '; two of the three compute and one deals random numbers (comparison="additive")'
    return [
        *learned,
        f"nothing about splits, leaf values or paths of rows while at most {bound} of the {size} edge servers of a "
        f"committee combine what they have, with or without users; {bound + 1} of a committee have all splits, all "
        f"leaf values and the bins of {whose}{row}{dealt if options.compares == 'additive' else ''}",
    ]


def _of_user(options: FedXGB) -> list[str]:
    learned = [] if options.mode == "paper" else ["no sum, and nothing about any other single user"]
    if options.exposes == "model":
        return [*learned, *_shown(options)]
    if options.exposes == "paper":
        return [*learned, "for its own rows, the slot at each level; with made-up rows, all thresholds"]
    return [
        *learned,
        "for its own rows, the slot in the complete tree at each level and the leaf value; with many or made-up rows, "
        "approximately where the splits are and what leaves are worth",
    ]


# ---------------------------------------------------------------- predictions


def conclusions_of_prediction(roles: Roles, options: FedXGB) -> dict[str, list[str]]:
    """Return what the roles "server", "edge" and "user" can work out from a prediction, and from all together."""
    edges, most = len(roles.having("edge")), options.queries
    together = (
        f"at most {options.may_collude(edges)} of the first {options.committee_size(edges)} edge servers combine their "
        "shares"
        if options.compares == "shamir"
        else "no two of the first three edge servers, of whom two compute and one deals random numbers, combine what "
        "they have"
    )
    return {
        "server": ["that rows are predicted, and how long it takes; no row, no prediction, and not which users ask"],
        "edge": [
            "which users have rows predicted, how many, and how many over all runs (the one that deals random numbers: "
            "only the total)",
            f"nothing about rows, predictions, splits or leaf values while {together}",
        ],
        "user": [
            f"with up to {most} rows over all runs of a model, real or made up, an imitation of the model that "
            "improves with every row; several users can combine their rows"
        ],
    }
