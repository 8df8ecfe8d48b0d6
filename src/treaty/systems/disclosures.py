"""What each party of a training learned, in words, for reports and before consent is given."""

from __future__ import annotations

from treaty.systems.fedxgb.cohorts import Rules
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
