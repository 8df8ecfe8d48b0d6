"""What the messages of regressions between parties tell: quasi-Newton steps or descent, by batches or on all rows."""

from __future__ import annotations

from treaty.systems.leakage import ACTIVE, AGREEMENT, PASSIVE, Route, Routes, Stage, When, routes
from treaty.systems.logistic.batches import JointSeedCommitment, JointSeedShare, KeptBatches, KnownBatches, LoneRows
from treaty.systems.logistic.coordinated import (
    DecryptedProducts,
    EncryptedVector,
    LossCipher,
    LossPart,
    LossTotal,
    MaskedProducts,
    SharedKey,
)
from treaty.systems.logistic.glm.inference import CrossProducts, ErrorVariance, InverseBlock
from treaty.systems.logistic.glm.poisson import HiddenFactors, MaskedRates, OpenedRates, RateKey
from treaty.systems.logistic.glm.training import LossShare, TargetUnit
from treaty.systems.logistic.lattice import ColumnsHint, HiddenProducts, ProductShares, VectorQuery
from treaty.systems.logistic.paper import EpochLoss, Gradient, Margins, StepPart
from treaty.systems.logistic.prediction import MarginPart
from treaty.systems.logistic.resuming import KeptEpochs, NextEpoch
from treaty.systems.logistic.row_weights import RowWeights
from treaty.systems.logistic.setup import PairKey, TableSize, TrainingSizes
from treaty.systems.logistic.steps import EpochEnd, InnerProducts, StepCoefficients
from treaty.systems.logistic.two_party import EncryptedProducts, HiddenRows
from treaty.systems.vertical.decisions import Finish
from treaty.systems.vertical.online import OnlineRows

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
