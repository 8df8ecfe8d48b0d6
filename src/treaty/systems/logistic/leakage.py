"""What the messages of regressions between parties tell: quasi-Newton steps or descent, by batches or on all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from treaty.models.linear import LinearPart
from treaty.systems.leakage import ACTIVE, AGREEMENT, PASSIVE, Route, Routes, Stage, When, routes
from treaty.systems.logistic.batches import (
    JointSeedCommitment,
    JointSeedShare,
    KeptBatches,
    KnownBatches,
    LoneRows,
    RowWeights,
)
from treaty.systems.logistic.coordinated import (
    DecryptedProducts,
    EncryptedVector,
    LossCipher,
    LossPart,
    LossTotal,
    MaskedProducts,
    SharedKey,
)
from treaty.systems.logistic.inference import CrossProducts, ErrorVariance, InverseBlock
from treaty.systems.logistic.options import BATCH, SMALL_TABLE, FederatedRegression, RegressionOptions
from treaty.systems.logistic.paper import EpochLoss, Gradient, Margins, StepPart
from treaty.systems.logistic.poisson import HiddenFactors, MaskedRates, OpenedRates, RateKey
from treaty.systems.logistic.prediction import MarginPart
from treaty.systems.logistic.products import (
    ColumnsHint,
    EncryptedProducts,
    HiddenProducts,
    HiddenRows,
    ProductShares,
    VectorQuery,
)
from treaty.systems.logistic.setup import PairKey, TableSize, TrainingSizes
from treaty.systems.logistic.steps import EpochEnd, InnerProducts, KeptEpochs, NextEpoch, StepCoefficients
from treaty.systems.logistic.whole_table import LossShare, TargetUnit
from treaty.systems.options import learned_from_test_key
from treaty.systems.system import Roles
from treaty.systems.vertical.prediction import Finish, OnlineRows

_DATA, _COORDINATOR, _ALL = ("active", "passive"), ("coordinator",), ("active", "passive", "coordinator")
_LEARNED = "docs/logistic.md, What each party learns"
_MASKED_VECTORS = "its own gradient: the products of its columns with the hidden vector, summed over all parties"

_NEARLY = "coefficients of the step: nearly the summed inner products"

_SAFE = When('mode="safe"', lambda options, common: options.mode != "paper")
_PAPER = When('mode="paper"', lambda options, common: options.mode == "paper")
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
_ERRORS = When("standard_errors=True", lambda options, common: common.standard_errors)


def _cipher(options: object, common: object) -> str:
    return str(options.cipher(common.fractional_bits, common.family))  # type: ignore[attr-defined]


_SET_UP = routes(
    AGREEMENT,
    Route(TableSize, PASSIVE, ACTIVE),
    Route(TrainingSizes, ACTIVE, ("passive", "coordinator")),
    Route(PairKey, _DATA, _DATA, when=_SAFE),
    routes(
        Route(KnownBatches, _DATA, _DATA),
        Route(KeptBatches, _DATA, _DATA),
        Route(JointSeedCommitment, _DATA, _DATA),
        Route(JointSeedShare, _DATA, _DATA),
        reference="docs/logistic.md, One partition into batches",
    ),
    Route(LoneRows, _DATA, _DATA, reference="docs/logistic.md, Rows that stand alone", when=_SAFE),
    Route(
        RowWeights,
        ACTIVE,
        PASSIVE,
        reference="docs/logistic.md, Weights of rows",
        when=When("show_weights=True", lambda options, common: options.show_weights),
    ),
    routes(
        Route(KeptEpochs, ("passive", "coordinator"), ACTIVE),
        Route(NextEpoch, ACTIVE, ("passive", "coordinator")),
        when=_SAFE,
        reference="docs/logistic.md, Interruptions",
    ),
    reference="docs/logistic.md, What is computed",
)

_COORDINATED = routes(
    Route(SharedKey, _COORDINATOR, _DATA),
    Route(EncryptedVector, PASSIVE, ACTIVE, "margins"),
    Route(EncryptedVector, ACTIVE, PASSIVE, "residuals"),
    Route(MaskedProducts, _DATA, _COORDINATOR),
    Route(DecryptedProducts, _COORDINATOR, _DATA),
    Route(LossPart, PASSIVE, _COORDINATOR),
    Route(LossCipher, ACTIVE, _COORDINATOR),
    Route(LossTotal, _COORDINATOR, ACTIVE),
    when=_LED & _KEYED,
    reference="arXiv 1912.00513; docs/logistic.md, With or without a coordinator",
)

_OWN_KEYS = routes(
    Route(HiddenRows, _DATA, _DATA),
    Route(EncryptedProducts, _DATA, _DATA),
    when=When(
        'coordinator=False; a cipher with keys; not family="poisson"',
        lambda options, common: (
            _ALONE.holds(options, common) and _KEYED.holds(options, common) and common.family != "poisson"
        ),
    ),
    reference="docs/logistic.md, With or without a coordinator",
)

_BY_LATTICE = routes(
    Route(ColumnsHint, _DATA, _DATA),
    Route(VectorQuery, _DATA, _DATA),
    Route(HiddenProducts, _DATA, _DATA),
    Route(ProductShares, _DATA, _DATA),
    when=_LATTICE,
    reference="docs/lattice.md, For the cryptographer; docs/logistic.md, Ciphers",
)

_RATES = routes(
    Route(RateKey, _DATA, _DATA),
    Route(HiddenFactors, _DATA, _DATA),
    Route(MaskedRates, _DATA, _DATA),
    Route(OpenedRates, _DATA, _DATA),
    when=_POISSON,
    reference="docs/logistic.md, Poisson regression",
)

_STEPS = routes(
    routes(
        Route(InnerProducts, _DATA, _COORDINATOR, "to_coordinator"),
        Route(StepCoefficients, _COORDINATOR, _DATA),
        when=_LED,
    ),
    routes(
        Route(InnerProducts, PASSIVE, ACTIVE, "to_active"),
        Route(StepCoefficients, ACTIVE, PASSIVE),
        when=_ALONE,
    ),
    reference="docs/logistic.md, The optimiser",
)

_WHOLE_TABLE = routes(
    Route(LossShare, PASSIVE, ACTIVE, when=_WHOLE),
    Route(TargetUnit, ACTIVE, PASSIVE, when=When('family="linear"', lambda options, common: common.family == "linear")),
    routes(
        routes(
            Route(CrossProducts, _DATA, _COORDINATOR, "to_coordinator"),
            Route(InverseBlock, _COORDINATOR, _DATA),
            when=_LED,
        ),
        routes(
            Route(CrossProducts, PASSIVE, ACTIVE, "to_active"),
            Route(InverseBlock, ACTIVE, PASSIVE),
            when=_ALONE,
        ),
        Route(ErrorVariance, ACTIVE, PASSIVE),
        when=_ERRORS,
        guard="standard_errors=False",
    ),
    reference="docs/logistic.md, Linear regression, and standard errors",
)

_EPOCHS = routes(
    Route(EpochEnd, ACTIVE, ("passive", "coordinator")),
    Route(
        MarginPart, PASSIVE, ACTIVE, "training", reference="docs/logistic.md, Calibration", when=_SAFE & _MARGINS_SHOWN
    ),
    reference="docs/logistic.md, Epochs and learning rates",
)

_PUBLISHED = routes(
    Route(SharedKey, _COORDINATOR, _DATA),
    Route(Margins, PASSIVE, ACTIVE),
    Route(EncryptedVector, ACTIVE, PASSIVE, "residuals"),
    Route(Gradient, _DATA, _COORDINATOR),
    Route(StepPart, _COORDINATOR, _DATA),
    Route(EpochLoss, _COORDINATOR, ACTIVE),
    when=_PAPER,
    guard='mode="safe"',
    reference="arXiv 1912.00513; docs/logistic.md, What each party learns",
)

_MARGINS = routes(
    Route(PairKey, PASSIVE, PASSIVE),
    Route(MarginPart, PASSIVE, ACTIVE, "prediction"),
    reference="docs/logistic.md, Prediction",
)

ROUTES: dict[Stage, Routes] = {
    "train": routes(
        _SET_UP,
        routes(_COORDINATED, _OWN_KEYS, _BY_LATTICE, _RATES, _STEPS, _WHOLE_TABLE, when=_SAFE),
        _PUBLISHED,
        _EPOCHS,
        reference=_LEARNED,
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


# ------------------------------------- what parties of a logistic regression can work out from their messages together

_FEW_COLUMNS = (
    "they determine the weight of a party with one column up to its sign, and the weights of a party with few columns "
    "up to a rotation"
)


_OPEN_BATCHES = f" (the whole table where it has at most {SMALL_TABLE} rows, else {BATCH} rows)"


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
        learned = _of_paper(active, passives, str(coordinator), common)
    else:
        learned = _of_safe_mode(roles, passives, options, common, part)
    for name in learned.keys() - {coordinator}:
        learned[name] += learned_from_test_key(options.insecure_test_key_bits)
    return learned


def _of_safe_mode(
    roles: Roles,
    passives: list[str],
    options: FederatedRegression,
    common: RegressionOptions,
    part: LinearPart | None,
) -> dict[str, list[str]]:
    active, coordinator = roles.active, roles.holder("coordinator")
    cipher = options.cipher(common.fractional_bits, common.family) if part is None else part.encryption
    alone = None if part is None else part.alone
    single, poisson = len(passives) == 1, common.family == "poisson"
    theirs = f"{passives[0]}'s part" if single else "the sum of the passive parties' parts"
    pairs = poisson and common.standard_errors  # sums of rates times two columns are shown to their owner
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
        learned[name] = [
            f"{gradients}: {about}",
            _of_lone_rows(lone, name, alone, where, pairs=pairs),
            coefficients,
        ]
    beyond = [
        _of_rates(active, passives[0]) if poisson else {},
        {} if coordinator is None else _of_coordinator(coordinator, active, passives, labels, cipher, common),
        _of_whole_table(active, passives, coordinator, common),
    ]
    for found in beyond:
        for name, more in found.items():
            learned.setdefault(name, []).extend(more)
    if common.family == "multiclass":
        for name in learned:
            learned[name].append("all this for each class against the rest")
    return learned


def _of_gradients(labels: str, common: RegressionOptions, *, known: bool) -> tuple[str, str, str]:
    """Say which gradients a party with data has, what a passive party learns from its own, and where rows are alone.

    Not `known` before training is how many rows there are, and so whether an open `batch_size` makes batches.
    """
    if common.whole_table and (known or not common.has_batches):
        return (
            "of every epoch the gradient of its own weights, over all rows",
            f"linear equations about the residuals, of which at most one for each of its columns is about {labels}",
            "",
        )
    return (
        f"of every batch{_OPEN_BATCHES if common.whole_table else ''} the gradient of its own weights, and in "
        f"quasi-Newton training of every {common.period}th the Hessian's product with its own last "
        "steps; the rows of a batch never change",
        "linear equations about the residuals of the batch, of which at most one for each of its columns and batch is "
        "about labels",
        " in their batch",
    )


def _of_rates(active: str, passive: str) -> dict[str, list[str]]:
    """Say what two parties see of each other's factors of a Poisson regression's rates."""
    return {
        name: [
            f"if it deviates from the protocol, unnoticed: {other}'s factors of the rates of as many rows as it has "
            f"columns, of other rows each epoch{'' if name == active else ', and once the targets of as many'}",
        ]
        for name, other in ((active, passive), (passive, active))
    }


def _of_coordinator(
    coordinator: str, active: str, passives: Sequence[str], labels: str, cipher: str, common: RegressionOptions
) -> dict[str, list[str]]:  # fmt: skip
    """Say what a coordinator learns, and what others do with its help where it has a key."""
    keyed = cipher != "lattice" and common.family != "poisson"
    learned = {
        coordinator: [
            "from inner products of all parties' steps, curvatures and gradients, their lengths and angles, hence all "
            "weights up to a rotation, but no party's own part; the rest are uniform numbers",
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
    """Say what parties learn beyond that where training is on the whole table, above all with standard errors."""
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
                f"for standard errors, the products of its own columns with those of {' and of '.join(others)}, each "
                "turned by a rotation that it does not know: how far these explain its own"
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
        return f"of no row {what} by itself: none stands alone{where.replace('their', 'its')} {among}"
    number = "rows, if there are such," if rows is None else "1 row," if rows == 1 else f"{rows} rows,"
    shown = "from its gradients and its block of the Hessian" if pairs else "from its gradients"
    return f"{shown}, {what} of {number} which stand alone{where} {among}"


def _of_paper(
    active: str, passives: Sequence[str], coordinator: str, common: RegressionOptions
) -> dict[str, list[str]]:
    learned = {
        active: [
            f"with {coordinator}'s help, who has the key, passive parties' margins, and so their columns",
        ],
        coordinator: [
            "from every gradient, curvature and step of all parties, all weights; with the columns' marginals, the "
            "means of columns in either class",
        ],
    }
    labels = "with batches of no more rows than it has columns, the residuals of rows and their labels"
    return learned | {name: [labels] for name in passives}
