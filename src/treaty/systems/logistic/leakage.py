"""Which messages regressions between parties send to whom, and what each party can work out from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from treaty.messaging.exchanges import JointSeedCommitment, JointSeedShare
from treaty.models.linear import LinearPart
from treaty.systems.leakage import ACTIVE, AGREEMENT, PAPER, PASSIVE, SAFE, Route, Routes, Stage, When, between, routes
from treaty.systems.logistic import (
    batches,
    coordinated,
    inference,
    paper,
    poisson,
    prediction,
    products,
    scorecard,
    setup,
    steps,
    whole_table,
)
from treaty.systems.logistic.options import BATCH, FEWEST_OF_BIN, SMALL_TABLE, FederatedRegression, RegressionOptions
from treaty.systems.options import learned_from_test_key
from treaty.systems.system import Roles
from treaty.systems.vertical.exact_sums import ROWS_PER_VECTOR
from treaty.systems.vertical.prediction import Finish, OnlineRows

_DATA, _COORDINATOR, _OTHERS = ("active", "passive"), ("coordinator",), ("passive", "coordinator")
_POISSON = When('family="poisson"', lambda options, common: common.family == "poisson")
_LATTICE = When("the lattice map", lambda options, common: _cipher(options, common) == "lattice")
_KEYED = When("a cipher with keys", lambda options, common: _cipher(options, common) != "lattice")
_LED = When("coordinator=True", lambda options, common: options.has_coordinator)
_ALONE = When("coordinator=False", lambda options, common: not options.has_coordinator)
_WHOLE = When("all rows at every step", lambda options, common: common.whole_table)
_MARGINS_SHOWN = When(
    "calibrate=True or show_eval_margins=True",
    lambda options, common: common.calibrate or getattr(options, "show_eval_margins", False),
)
# the published protocol masks nothing but the sums of margins at its end
_MASKED = When('mode="safe" or calibrate=True', lambda options, common: options.mode != "paper" or common.calibrate)
_WEIGHTS_SHOWN = When("show_weights=True", lambda options, common: options.show_weights)
_LINEAR = When('family="linear"', lambda options, common: common.family == "linear")
_SCORECARD = When("pdo", lambda options, common: common.pdo is not None)
_ERRORS = When("standard_errors=True", lambda options, common: common.standard_errors)


def _cipher(options: object, common: object) -> str:
    return str(options.cipher(common.fractional_bits, common.family))  # type: ignore[attr-defined]


_SET_UP = routes(
    AGREEMENT,
    Route(setup.TableSize, PASSIVE, ACTIVE),
    Route(setup.TrainingSizes, ACTIVE, _OTHERS),
    Route(setup.PairKey, _DATA, _DATA, when=_MASKED),
    routes(
        between(_DATA, _DATA, batches.KnownBatches, batches.KeptBatches, JointSeedCommitment, JointSeedShare),
        reference="docs/logistic.md, One partition into batches",
    ),
    Route(batches.LoneRows, _DATA, _DATA, reference="docs/logistic.md, Rows that stand alone", when=SAFE),
    Route(batches.RowWeights, ACTIVE, PASSIVE, reference="docs/logistic.md, Weights of rows", when=_WEIGHTS_SHOWN),
    routes(
        Route(steps.KeptEpochs, _OTHERS, ACTIVE),
        Route(steps.NextEpoch, ACTIVE, _OTHERS),
        when=SAFE,
        reference="docs/logistic.md, Interruptions",
    ),
    reference="docs/logistic.md, Loss and gradients",
)

_COORDINATED = routes(
    Route(coordinated.SharedKey, _COORDINATOR, _DATA),
    Route(coordinated.EncryptedVector, PASSIVE, ACTIVE, "margins"),
    Route(coordinated.EncryptedVector, ACTIVE, PASSIVE, "residuals"),
    Route(coordinated.MaskedProducts, _DATA, _COORDINATOR),
    Route(coordinated.DecryptedProducts, _COORDINATOR, _DATA),
    Route(coordinated.LossPart, PASSIVE, _COORDINATOR),
    Route(coordinated.LossCipher, ACTIVE, _COORDINATOR),
    Route(coordinated.LossTotal, _COORDINATOR, ACTIVE),
    when=_LED & _KEYED,
    reference="arXiv 1912.00513; docs/logistic.md, With or without a coordinator",
)

_OWN_KEYS = routes(
    between(_DATA, _DATA, products.HiddenRows, products.EncryptedProducts),
    when=_ALONE & _KEYED & When('not family="poisson"', lambda options, common: common.family != "poisson"),
    reference="docs/logistic.md, With or without a coordinator",
)

_BY_LATTICE = routes(
    between(_DATA, _DATA, products.ColumnsHint, products.VectorQuery, products.HiddenProducts, products.ProductShares),
    when=_LATTICE,
    reference="docs/lattice.md, For the cryptographer; docs/logistic.md, Ciphers",
)

_RATES = routes(
    between(_DATA, _DATA, poisson.RateKey, poisson.HiddenFactors, poisson.MaskedRates, poisson.OpenedRates),
    when=_POISSON,
    reference="docs/logistic.md, Poisson regression",
)

_STEPS = routes(
    Route(steps.InnerProducts, _DATA, _COORDINATOR, "to_coordinator", when=_LED),
    Route(steps.StepCoefficients, _COORDINATOR, _DATA, when=_LED),
    Route(steps.InnerProducts, PASSIVE, ACTIVE, "to_active", when=_ALONE),
    Route(steps.StepCoefficients, ACTIVE, PASSIVE, when=_ALONE),
    reference="docs/logistic.md, The optimiser",
)

_WHOLE_TABLE = routes(
    Route(whole_table.LossShare, PASSIVE, ACTIVE, when=_WHOLE),
    Route(whole_table.TargetUnit, ACTIVE, PASSIVE, when=_LINEAR),
    routes(
        Route(inference.CrossProducts, _DATA, _COORDINATOR, "to_coordinator", when=_LED),
        Route(inference.InverseBlock, _COORDINATOR, _DATA, when=_LED),
        Route(inference.CrossProducts, PASSIVE, ACTIVE, "to_active", when=_ALONE),
        Route(inference.InverseBlock, ACTIVE, PASSIVE, when=_ALONE),
        Route(inference.ErrorVariance, ACTIVE, PASSIVE),
        when=_ERRORS,
        guard="standard_errors=False",
    ),
    reference="docs/logistic.md, Linear regression, and standard errors",
)

_CALIBRATION = "docs/logistic.md, Calibration"

_EPOCHS = routes(
    Route(steps.EpochEnd, ACTIVE, _OTHERS),
    Route(prediction.MarginPart, PASSIVE, ACTIVE, "training", reference=_CALIBRATION, when=_MARGINS_SHOWN),
    reference="docs/logistic.md, Epochs and learning rates",
)

_PUBLISHED = routes(
    Route(coordinated.SharedKey, _COORDINATOR, _DATA),
    Route(paper.Margins, PASSIVE, ACTIVE),
    Route(coordinated.EncryptedVector, ACTIVE, PASSIVE, "residuals"),
    Route(paper.Gradient, _DATA, _COORDINATOR),
    Route(paper.StepPart, _COORDINATOR, _DATA),
    Route(paper.EpochLoss, _COORDINATOR, ACTIVE),
    when=PAPER,
    guard='mode="safe"',
    reference="arXiv 1912.00513; docs/logistic.md, What each party learns",
)

_MARGINS = routes(
    Route(setup.PairKey, PASSIVE, PASSIVE),
    Route(prediction.MarginPart, PASSIVE, ACTIVE, "prediction"),
    reference="docs/logistic.md, Prediction",
)

_POINTS = routes(
    Route(scorecard.CalibrationSlope, ACTIVE, PASSIVE), when=_SCORECARD, reference="docs/logistic.md, Scorecards"
)

ROUTES: dict[Stage, Routes] = {
    "train": routes(
        _SET_UP,
        routes(_COORDINATED, _OWN_KEYS, _BY_LATTICE, _RATES, _STEPS, _WHOLE_TABLE, when=SAFE),
        _PUBLISHED,
        _EPOCHS,
        _POINTS,
        reference="docs/logistic.md, What each party learns",
    ),
    "predict": routes(AGREEMENT, _MARGINS),
    "online": routes(
        AGREEMENT,
        Route(OnlineRows, ACTIVE, PASSIVE),
        _MARGINS,
        Route(Finish, ACTIVE, PASSIVE),
        reference="docs/serving.md, Models with splits of partners",
    ),
}


# ---------------------------------------------------------------- what parties can work out from messages together


_FEW_COLUMNS = (
    "they determine the weight of a party with one column up to its sign, and the weights of a party with few columns "
    "up to a rotation"
)
_OPEN_BATCHES = f" (the whole table if it has at most {SMALL_TABLE} rows, else {BATCH} rows)"


def conclusions(
    roles: Roles, options: FederatedRegression, common: RegressionOptions, part: LinearPart | None
) -> dict[str, list[str]]:
    """Return what each party can work out.

    `part` is any part of the model, which knows the cipher and how many rows stand alone; None before training.
    """
    active, coordinator = roles.active, roles.holder("coordinator")
    if part is not None:
        common = msgspec.structs.replace(common, batch_size=part.batch_size or common.batch_size)
    passives = [name for name in roles.owners if name != active]
    if options.mode == "paper":
        learned = {
            active: [
                f"by colluding with {coordinator}, which has the key, passive parties' margins, and so their columns"
            ],
            str(coordinator): [
                "from every gradient, curvature and step of all parties, all weights; with the columns' marginals, the "
                "means of columns in either class"
            ],
        }
        residuals = "with batches of no more rows than it has columns, the residuals of rows and their labels"
        learned |= {name: [residuals] for name in passives}
    else:
        learned = _of_safe_mode(roles, passives, options, common, part)
    for name in learned.keys() - {coordinator}:
        learned[name] += learned_from_test_key(options.insecure_test_key_bits)
    return learned


def _of_safe_mode(
    roles: Roles, passives: list[str], options: FederatedRegression, common: RegressionOptions, part: LinearPart | None
) -> dict[str, list[str]]:
    active, coordinator = roles.active, roles.holder("coordinator")
    cipher = options.cipher(common.fractional_bits, common.family) if part is None else part.encryption
    alone = None if part is None else part.alone
    single, poisson = len(passives) == 1, common.family == "poisson"
    theirs = f"{passives[0]}'s part" if single else "the sum of the passive parties' parts"
    # sums of rates times two columns are shown to their owner
    pairs = poisson and common.standard_errors
    labels = "labels" if common.classifies else "targets"
    gradients, about, where = _of_gradients(labels, common, known=part is not None)
    others = "the other's" if single else "all others'"
    coefficients = (
        "the coefficients of every step in the last steps, curvatures and the gradient, from which nearly all inner "
        f"products of the joined vectors follow, and so {others} part of them; {_FEW_COLUMNS}"
    )
    products = (
        f"from {theirs} of the inner products of steps, curvatures and gradients, their lengths and angles; "
        f"{_FEW_COLUMNS}"
    )
    margins = (
        f"X' times the rates, in which the exponential of {passives[0]}'s part of the margin is a factor"
        if poisson
        else f"{theirs} of X'u over its own columns"
    )
    lone = "the rates and targets" if pairs else f"the {labels}"
    learned = {
        active: [
            f"{gradients}: so {margins}",
            _of_lone_rows(f"{theirs} of the margins", active, alone, where, pairs=pairs),
            products if coordinator is None else coefficients,
        ]
    }
    if options.show_eval_margins:
        owners = f"{passives[0]} has" if single else "the passive parties together have"
        learned[active].append(
            f"from {theirs} of margins of eval rows after as many epochs as {owners} columns, these columns' values in "
            "the rows up to a linear map"
        )
    for name in passives:
        learned[name] = [f"{gradients}: {about}", _of_lone_rows(lone, name, alone, where, pairs=pairs), coefficients]
    if poisson:
        for name, other in ((active, passives[0]), (passives[0], active)):
            targets = "" if name == active else ", and once the targets of as many"
            learned[name].append(
                f"if it deviates from the protocol, unnoticed: {other}'s factors of the rates of as many rows as it "
                f"has columns, of other rows each epoch{targets}"
            )
    beyond = [
        {} if coordinator is None else _of_coordinator(coordinator, active, passives, labels, cipher, common),
        _of_whole_table(active, passives, coordinator, common),
    ]
    for found in beyond:
        for name, more in found.items():
            learned.setdefault(name, []).extend(more)
    if common.pdo is not None:
        learned[active].append(
            f"from {theirs} of the margins and points of rows, which rows are in the same bins of all passive columns, "
            "as these have equal parts; where there are few such columns, in which bins"
        )
        for name in passives:
            learned[name].append(
                "how many rows have the second class, in all and in each bin of its own columns, of at least "
                f"{common.min_bin_rows or FEWEST_OF_BIN} rows. All passive parties together have at most one bin for "
                f"{ROWS_PER_VECTOR} rows over all jobs with these labels, unless allow_exact_sums is set"
            )
    if common.family == "multiclass":
        for name in learned:
            learned[name].append("all of this for each class against the rest")
    return learned


def _of_gradients(labels: str, common: RegressionOptions, *, known: bool) -> tuple[str, str, str]:
    """Say which gradients a party with data has, what a passive party learns from its own, and where rows are alone."""
    # before training the number of rows is not known, and so whether an open batch_size makes batches
    if common.whole_table and (known or not common.has_batches or common.pdo is not None):
        return (
            "in every epoch, the gradient of its own weights over all rows",
            f"linear equations about the residuals, of which at most one for each of its columns is about {labels}",
            "",
        )
    return (
        f"in every batch{_OPEN_BATCHES if common.whole_table else ''}, the gradient of its own weights; in "
        f"quasi-Newton training, for every {common.period}th batch, the Hessian's product with its own last "
        "steps; the rows of a batch never change",
        "linear equations about the residuals of the batch, of which at most one for each of its columns and batch is "
        "about labels",
        " in their batch",
    )


def _of_coordinator(
    coordinator: str, active: str, passives: Sequence[str], labels: str, cipher: str, common: RegressionOptions
) -> dict[str, list[str]]:  # fmt: skip
    """Say what a coordinator learns, and what others do with its help where it has a key."""
    keyed = cipher != "lattice" and common.family != "poisson"
    learned = {
        coordinator: [
            "from inner products of all parties' steps, curvatures and gradients, their lengths and angles, hence all "
            "weights up to a rotation, but no party's own part; the rest are uniform numbers"
        ]
    }
    if not keyed:
        return learned
    learned[active] = [
        f"passive parties' margins as ciphertexts under {coordinator}'s key: with its help it would have them, "
        "and from enough of them their columns; the two must not collude"
    ]
    rows = "rows" if common.whole_table else "rows of a batch"
    for name in (active, *passives):
        what = "margins" if name == active else f"residuals, and so their {labels},"
        learned.setdefault(name, []).append(
            f"if it deviates from the protocol, unnoticed: {what} of as many {rows} as it has columns, of other rows "
            f"each epoch, by having {coordinator} decrypt them; under the lattice map columns are fixed"
        )
    return learned


def _of_whole_table(
    active: str, passives: Sequence[str], coordinator: str | None, common: RegressionOptions
) -> dict[str, list[str]]:
    """Say what parties learn as well where training is on the whole table, above all with standard errors."""
    learned: dict[str, list[str]] = {name: [] for name in (active, *passives)}
    for name in passives:
        if common.family == "linear":
            learned[name].append("the standard deviation of the target")
        if common.standard_errors:
            what = "mean of the target" if common.family == "poisson" else "variance of the residuals"
            learned[name].append(f"the {what}")
    if not common.standard_errors:
        return learned
    for name in learned:
        if common.family == "poisson":
            learned[name].append(
                "its own block of the Hessian at the optimum: the sums of rates times any two of its columns"
            )
        others = [other for other in passives if other != name]
        if others:
            learned[name].append(
                f"for standard errors, the products of its own columns with the columns of {' and of '.join(others)}, "
                "each turned by a rotation that it does not know: how far these explain its own"
            )
        if name != active or coordinator is not None:
            learned[name].append(
                "its own block of the inverse Hessian, hence how far the others' columns together explain its own"
            )
    lead = coordinator or active
    if coordinator is not None or len(passives) > 1:
        learned.setdefault(lead, []).append(
            f"the canonical correlations between the columns of any two of {', '.join((active, *passives))}"
        )
    return learned


def _of_lone_rows(what: str, name: str, alone: Mapping[str, int] | None, where: str, *, pairs: bool = False) -> str:
    rows = None if alone is None else alone.get(name)
    among = "among its columns and products of two of them" if pairs else "among its columns"
    if rows == 0:
        return f"for no single row {what}: none stands alone{where.replace('their', 'its')} {among}"
    number = "rows, if there are such," if rows is None else "1 row," if rows == 1 else f"{rows} rows,"
    shown = "from its gradients and its block of the Hessian" if pairs else "from its gradients"
    return f"{shown}, {what} of {number} which stand alone{where} {among}"
