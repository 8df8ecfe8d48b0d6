"""What each party of a logistic regression learned, in words, for reports and before consent is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from treaty.models.linear import LinearPart
from treaty.systems.logistic.options import FederatedRegression, RegressionOptions
from treaty.systems.options import learned_from_test_key
from treaty.systems.system import Cast

_FEW_COLUMNS = (
    "they determine the weight of a party with one column up to its sign, and the weights of a party with few columns "
    "up to a rotation"
)


def disclosures(
    cast: Cast, options: FederatedRegression, common: RegressionOptions, part: LinearPart | None
) -> dict[str, list[str]]:
    """Say in words what each party learned beyond its own data and its own weights.

    `part` is any part of the model, which knows the cipher and how many rows stand alone; None before training.
    """
    active, coordinator = cast.active, cast.holder("coordinator")
    passives = [name for name in cast.owners if name != active]
    everybody = "how many rows and prepared columns every party has, and how many epochs there were"
    if options.mode == "paper":
        learned = _of_paper(active, passives, str(coordinator), everybody)
    else:
        learned = _of_safe_mode(cast, passives, everybody, options, common, part)
    for name in learned.keys() - {coordinator}:
        learned[name] += learned_from_test_key(options.insecure_test_key_bits)
    return learned


def _of_safe_mode(
    cast: Cast,
    passives: list[str],
    everybody: str,
    options: FederatedRegression,
    common: RegressionOptions,
    part: LinearPart | None,
) -> dict[str, list[str]]:
    active, coordinator = cast.active, cast.holder("coordinator")
    cipher = options.cipher(common.fractional_bits) if part is None else part.encryption
    alone = None if part is None else part.alone
    single = len(passives) == 1
    theirs = f"{passives[0]}'s part" if single else "the sum of the passive parties' parts"
    everybody_with_data = f"{everybody}; of every party with data, how many rows stand alone in their batch"
    gradients = "of every batch the gradient of its own weights, and in quasi-Newton training of every "
    gradients += f"{common.period}th the Hessian's product with its own last steps; the rows of a batch never change"
    others = "the other's" if single else "all others'"
    coefficients = (
        "the coefficients of every step in the last steps, curvatures and the gradient, from which nearly all inner "
        f"products of the joined vectors follow, and so {others} part of them; {_FEW_COLUMNS}"
    )
    learned = {
        active: [
            everybody_with_data,
            f"{gradients}: so {theirs} of X'u over its own columns",
            _of_lone_rows(f"{theirs} of the margins", active, alone),
            "the mean loss of every epoch",
            f"at prediction, {theirs} of every row's margin",
        ]
    }
    if coordinator is None:
        learned[active].append(
            f"of every step {theirs} of the inner products of steps, curvatures and gradients: their lengths and "
            f"angles; {_FEW_COLUMNS}"
        )
    else:
        learned[active].append(coefficients)
    for name in passives:
        learned[name] = [
            everybody_with_data,
            f"{gradients}: linear equations about the residuals of the batch, of which at most one for each of its "
            "columns and batch is about labels",
            _of_lone_rows("the labels", name, alone),
            coefficients,
        ]
        if cipher != "lattice" and coordinator is None:
            learned[name].append("of the others' columns, ciphertexts under keys of their owners")
    if coordinator is not None:
        learned[coordinator] = [
            everybody + ("" if cipher == "lattice" else "; the key"),
            "of every step the summed inner products of all parties' steps, curvatures and gradients: their lengths "
            "and angles, hence all weights up to a rotation, but no party's own part; the rest are uniform numbers",
            "whether the loss rose by a tenth in an epoch",
        ]
        if cipher != "lattice":
            learned[active].append(
                f"passive parties' margins as ciphertexts under {coordinator}'s key: with its help it would have them, "
                "and from enough of them their columns; the two must not collude"
            )
            for name in (active, *passives):
                what = "margins" if name == active else "residuals, and so their labels,"
                learned[name].append(
                    f"if it deviates from the protocol, unnoticed: {what} of as many rows of a batch as it has "
                    f"columns, of other rows each epoch, by having {coordinator} decrypt them; under the lattice map "
                    "columns are fixed"
                )
    return learned


def _of_lone_rows(what: str, name: str, alone: Mapping[str, int] | None) -> str:
    rows = None if alone is None else alone.get(name)
    if rows == 0:
        return f"of no row {what} by itself: none stands alone in its batch among its columns"
    number = "rows, if there are such," if rows is None else "1 row," if rows == 1 else f"{rows} rows,"
    return f"from its gradients, {what} of {number} which stand alone in their batch among its columns"


def _of_paper(active: str, passives: Sequence[str], coordinator: str, everybody: str) -> dict[str, list[str]]:
    learned = {
        active: [
            everybody,
            "the steps of its own weights, and the mean loss of every epoch",
            f"passive parties' margins as ciphertexts under {coordinator}'s key: with its help it would have them, and "
            "their columns",
        ],
        coordinator: [
            everybody,
            "every gradient, curvature, step and loss of all parties, hence all weights; with the columns' marginals, "
            "the means of columns in either class",
        ],
    }
    for name in passives:
        learned[name] = [
            everybody,
            "the steps of its own weights: with batches of no more rows than it has columns, the residuals of rows and "
            "their labels",
        ]
    return learned
