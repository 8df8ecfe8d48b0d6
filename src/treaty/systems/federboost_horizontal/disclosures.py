"""What each party of a FederBoost training by row learns beyond its own rows."""

from __future__ import annotations

from treaty.models.trees import ModelPart
from treaty.privacy.ledger import DEFAULT_DELTA
from treaty.systems.federboost_horizontal.options import FederBoostHorizontal
from treaty.systems.horizontal.start import START, SUMS_OF_LABELS, starts_from_sums
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Cast


def disclosures(
    cast: Cast, options: FederBoostHorizontal, common: BoostingOptions, part: ModelPart | None
) -> dict[str, list[str]]:
    """Say in words what each party learned; the leader's `part` says what the search parted, or what noise cost."""
    everybody = _of_everybody(options, common)
    estimated = starts_from_sums(options, common)
    learned = {cast.active: _of_leader(cast, options, "" if part is None else part.spent, everybody)}
    if estimated:
        learned[cast.active].insert(1, SUMS_OF_LABELS)
        everybody = [START, *everybody]
    return learned | {name: _of_member(options, everybody) for name in cast.owners if name != cast.active}


def _of_everybody(options: FederBoostHorizontal, common: BoostingOptions) -> list[str]:
    """Return what the leader and members learned alike, about single rows."""
    learned = []
    if common.fewest_rows < 20:
        learned.append(
            f"leaves of as few as {common.fewest_rows} training rows (min_child_samples is below 20), so that splits "
            "and leaf values may describe single rows"
        )
    if options.epsilon_total is not None:
        learned.append(
            f"of any single row no more, from sums and model together, than ({options.epsilon_total:g}, "
            f"{options.delta or DEFAULT_DELTA:g}) differential privacy lets through (told as they are: names "
            "of columns, their categories, classes, and whether rows are those of an earlier training)"
        )
    return learned


def _of_leader(cast: Cast, options: FederBoostHorizontal, spent: str, everybody: list[str]) -> list[str]:
    noisy, has_rows = options.epsilon_total is not None, cast.active in cast.owners
    whose = "over all participants' rows" + (", and so, less its own, over the others'" if has_rows else "")
    search = "how many rows lie below each point that was tried in search of quantiles"
    if noisy:
        search += f", noisy as well ({spent})" if spent else ", noisy as well"
    elif spent:
        search += f"; {spent}, whose values are known to lie between two such points"
    learned = [
        f"sums {whose}{', under noise' if noisy else ''}: at every node of every tree, of each bin of each column "
        "the sum of gradients, sum of hessians and number of rows; how many rows there are, in how many a column "
        "is present and in how many it has each category",
        search,
        "of each participant: the names of its columns, their categories, which classes its rows have, and whether it "
        "has kept bins of earlier trainings of the same participants and options with the rows it has now",
        _model(options),
        "with the help of all other participants but one, everything above of that one's rows alone",
        *everybody,
    ]
    if not noisy:
        learned.insert(
            2, "how many participants have largest labels, gradients and weights of which order of magnitude"
        )
    if len(cast.owners) == 2:
        learned.append(
            f"the other participant's sums{', but for its noise' if noisy else ' exactly'}: a sum of two less its own"
            if has_rows
            else "sums of two participants alone: with the help of one, those of the other"
        )
    if options.dropout == "accept":
        learned.append(
            "should a participant be lost and training go on without: what its sums were, by comparing those before "
            'and after (dropout="accept")'
        )
    return learned


def _of_member(options: FederBoostHorizontal, everybody: list[str]) -> list[str]:
    bounds = (
        "" if options.epsilon_total is not None else ", and the order of magnitude of the largest target and weight"
    )
    return [
        _model(options),
        "the points that were tried in search of quantiles and the bins of all columns, and so about where "
        "quantiles of all participants' rows lie and which categories are frequent",
        f"the names and categories of the first participant's columns, all participants' classes{bounds}",
        "which of two sibling nodes has fewer rows of all; no sum, and nothing of any other participant alone",
        "whether all have kept the bins of an earlier training with the rows they have now, which are then used again",
        *everybody,
    ]


def _model(options: FederBoostHorizontal) -> str:
    counts = (
        ", which in the first round give away, for most leaves, how many rows of each class they have (of later rounds "
        "and inner nodes the model has no counts)"
    )
    whole = "the model, whole: all splits, their gains to three digits and all leaf values"
    return whole if options.epsilon_total is not None else whole + counts
