"""What each role of FedXGB learns beyond its own rows, in words."""

from __future__ import annotations

from treaty.models.trees import ModelPart
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.secpred.service import disclosures_of_prediction, refused
from treaty.systems.horizontal.start import START, SUMS_OF_LABELS, starts_from_sums
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Cast

_TOLD_TO_ALL = (
    "the bins of all columns, their names and categories, the classes, which columns have missing values, how many "
    "rows all users have, and the columns drawn for each tree"
)
_MODEL = (
    'the splits and leaf values of all trees, without gains or numbers of rows (expose="model"); in the first round '
    "they give away, for most leaves, how many rows of each class they have"
)
_SHOWN = 'the shape of all trees, the column of every split and all leaf values (expose="paper")'


def disclosures(cast: Cast, options: FedXGB, common: BoostingOptions, part: ModelPart | None) -> dict[str, list[str]]:
    """Say what the roles "server", "edge", "user" and "authority" learn; `part` is the server's."""
    learned = {
        "server": _of_server(options, "" if part is None else part.spent),
        "edge": _of_edge(options, len(cast.having("edge"))),
        "user": _of_user(options),
    }
    if starts_from_sums(options, common):
        learned["server"].insert(1, SUMS_OF_LABELS)
        for role in ("edge", "user"):
            learned[role].append(START)
    if common.fewest_rows < 20:
        for role in ("server", "edge", "user") if options.exposes in ("model", "paper") else ("server", "user"):
            learned[role].append(
                f"leaves of as few as {common.fewest_rows} training rows (min_child_samples is below 20), so that "
                "splits and leaf values may describe single rows"
            )
    if not refused(options):
        for role, facts in disclosures_of_prediction(cast, options).items():
            learned[role] += [f"where users have rows predicted later: {fact}" for fact in facts]
    learned["authority"] = [
        "names, roles and public keys; no data (it is trusted not to certify keys of its own in a user's name)"
    ]
    return learned


def _of_server(options: FedXGB, spent: str) -> list[str]:
    """`spent` says in words how small the groups of rows were that the search for quantiles told apart."""
    paper = options.mode == "paper"
    learned = [
        "sums over the users of all domains: at every node of every tree, of each bin of each column the sum of "
        "gradients, sum of hessians and number of rows; how many rows there are, in how many a column is present and "
        "in how many it has each category",
        "how many rows lie below each point that was tried in search of quantiles"
        + (f"; {spent}, whose values are known to lie between two such points" if spent else ""),
        "how many users' largest labels, gradients and weights have which order of magnitude",
        "who the users are, in which domain, and whose rows are in each sum; where users came or went between two "
        f"sums, the sum of these alone, who are {1 if paper else options.group} or more of a domain",
        *([] if paper else [_with_users(options)]),
        "the model, whole, with the gains of its splits and the sums of its nodes",
        "with the help of an edge server, everything above of that domain's users alone; with two thirds of the users "
        "of a domain besides, of each of its users",
    ]
    if paper:
        learned.append("the sums of each domain's users apart")
    return learned


def _with_users(options: FedXGB) -> str:
    """Say what users who tell the server their own vectors add to what it learns."""
    fewest = options.group - 1
    if options.group_size is not None:
        return (
            f"with {fewest} users of a group of {options.group}, the sums of the one left; with fewer, of nobody else"
        )
    return (
        "with two users of a group of three, the sums of the one left, and, where many different cohorts were summed, "
        "perhaps those of others; with one user, of nobody else (group_size)"
    )


def _of_edge(options: FedXGB, edges: int) -> list[str]:
    """Say what an edge server learns; of a hidden model, that depends on how many of the `edges` collude."""
    learned = [
        "who its users are, how active and steady they say they are, and who takes part in which tree or is lost in it",
        _TOLD_TO_ALL,
        "each of its users' sums, so labels and values of users with few rows: the masks do not hide them"
        if options.mode == "paper"
        else "no sum: those that it opens lie under masks that only the server can remove",
    ]
    if options.exposes == "model":
        return [*learned, _MODEL]
    bound = (edges - 1) // 2
    if options.exposes == "paper":
        return [
            *learned,
            _SHOWN,
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


def _of_user(options: FedXGB) -> list[str]:
    learned = [
        "the names of the users of its domain, and who of them takes part in each sum",
        f"{_TOLD_TO_ALL}; and the points that were tried in search of quantiles, and so about where quantiles of "
        "all users' rows lie and which categories are frequent",
    ]
    if options.mode != "paper":
        learned.append("no sum, and nothing of any other user alone")
    if options.exposes == "model":
        return [*learned, _MODEL]
    if options.exposes == "paper":
        return [
            *learned,
            _SHOWN,
            "of its own rows, the slot at each level; with rows made up for that, all thresholds",
        ]
    return [
        *learned,
        "of its own rows, the slot in the complete tree at each level and the leaf value: with many rows, or rows made "
        "up, about where the splits are and what leaves are worth",
    ]
