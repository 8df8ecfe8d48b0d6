"""What the messages of regressions between parties tell: quasi-Newton steps or descent, by batches or on all rows."""

from __future__ import annotations

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
from treaty.systems.told import ACTIVE, AGREEMENT, PASSIVE, Lines, Played, Told, When, lines
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
_ERRORS = When("standard_errors=True", lambda options, common: common.standard_errors)


def _cipher(options: object, common: object) -> str:
    return str(options.cipher(common.fractional_bits, common.family))  # type: ignore[attr-defined]


_SET_UP = lines(
    AGREEMENT,
    Told(TableSize, PASSIVE, ACTIVE, "how many rows and prepared columns the sender has; rows of eval sets", "control"),
    Told(
        TrainingSizes,
        ACTIVE,
        ("passive", "coordinator"),
        "everybody's numbers of columns and rows, whether rows have weights, whether training is resumed",
        "control",
    ),
    Told(PairKey, _DATA, _DATA, "a public key of this job", "control", when=_SAFE),
    lines(
        Told(KnownBatches, _DATA, _DATA, "whether the sender had an earlier job on these rows", "control"),
        Told(KeptBatches, _DATA, _DATA, "which rows are in a batch, as all parties with data know", "control"),
        Told(JointSeedCommitment, _DATA, _DATA, "a commitment", "nothing"),
        Told(JointSeedShare, _DATA, _DATA, "a random number", "nothing"),
        reference="docs/logistic.md, One partition into batches",
    ),
    Told(
        LoneRows,
        _DATA,
        _DATA,
        "how many rows of all batches stand alone among the sender's columns",
        "aggregated",
        guard="batch_size",
        reference="docs/logistic.md, Rows that stand alone",
        when=_SAFE,
    ),
    Told(
        RowWeights,
        ACTIVE,
        PASSIVE,
        "the weights of all rows, and what they were made of: weights of classes tell labels",
        "exact",
        guard="show_weights=False",
        reference="docs/logistic.md, Weights of rows",
        when=When("show_weights=True", lambda options, common: options.show_weights),
    ),
    lines(
        Told(KeptEpochs, ("passive", "coordinator"), ACTIVE, "after which epochs the sender kept its state", "control"),
        Told(NextEpoch, ACTIVE, ("passive", "coordinator"), "after which epoch training goes on", "control"),
        when=_SAFE,
        reference="docs/logistic.md, Interruptions",
    ),
    reference="docs/logistic.md, What is computed",
)

_COORDINATED = lines(
    Told(SharedKey, _COORDINATOR, _DATA, "the coordinator's public key", "control"),
    Told(EncryptedVector, PASSIVE, ACTIVE, "the sender's part of margins, under the coordinator's key", "encrypted"),
    Told(EncryptedVector, ACTIVE, PASSIVE, "residuals of all rows, under the coordinator's key", "encrypted"),
    Told(MaskedProducts, _DATA, _COORDINATOR, "products under masks; how many columns", "masked"),
    Told(DecryptedProducts, _COORDINATOR, _DATA, _MASKED_VECTORS, "aggregated", guard="batch_size"),
    Told(LossPart, PASSIVE, _COORDINATOR, "a part of an epoch's loss", "masked"),
    Told(LossCipher, ACTIVE, _COORDINATOR, "a part of an epoch's loss", "masked"),
    Told(LossTotal, _COORDINATOR, ACTIVE, "the mean loss of an epoch", "aggregated"),
    when=_LED & _KEYED,
    reference="arXiv 1912.00513; docs/logistic.md, With or without a coordinator",
)

_OWN_KEYS = lines(
    Told(HiddenRows, _DATA, _DATA, "the sender's columns, and labels, under its own key", "encrypted"),
    Told(EncryptedProducts, _DATA, _DATA, _MASKED_VECTORS, "aggregated", guard="batch_size"),
    when=When(
        'coordinator=False; a cipher with keys; not family="poisson"',
        lambda options, common: (
            _ALONE.holds(options, common) and _KEYED.holds(options, common) and common.family != "poisson"
        ),
    ),
    reference="docs/logistic.md, With or without a coordinator",
)

_BY_LATTICE = lines(
    Told(ColumnsHint, _DATA, _DATA, "the sender's columns, under the lattice map", "encrypted"),
    Told(VectorQuery, _DATA, _DATA, "the sender's part of residuals, under the lattice map", "encrypted"),
    Told(HiddenProducts, _DATA, _DATA, "uniform numbers: products under masks", "masked"),
    Told(ProductShares, _DATA, _DATA, _MASKED_VECTORS, "aggregated", guard="batch_size"),
    when=_LATTICE,
    reference="docs/lattice.md, For the cryptographer; docs/logistic.md, Ciphers",
)

_RATES = lines(
    Told(RateKey, _DATA, _DATA, "a public key", "control"),
    Told(HiddenFactors, _DATA, _DATA, "the sender's factor of each row's rate, under its own key", "encrypted"),
    Told(MaskedRates, _DATA, _DATA, "products under masks; how many columns", "masked"),
    Told(OpenedRates, _DATA, _DATA, _MASKED_VECTORS, "aggregated"),
    when=_POISSON,
    reference="docs/logistic.md, Poisson regression",
)

_STEPS = lines(
    lines(
        Told(
            InnerProducts,
            _DATA,
            _COORDINATOR,
            "inner products of steps and gradients, summed over all parties that mask their parts",
            "aggregated",
        ),
        Told(
            StepCoefficients,
            _COORDINATOR,
            _DATA,
            _NEARLY,
            "aggregated",
        ),
        when=_LED,
    ),
    lines(
        Told(
            InnerProducts,
            PASSIVE,
            ACTIVE,
            "inner products of steps and gradients: of several passive parties their sum, of one its part",
            "aggregated",
        ),
        Told(
            StepCoefficients,
            ACTIVE,
            PASSIVE,
            _NEARLY,
            "aggregated",
        ),
        when=_ALONE,
    ),
    reference="docs/logistic.md, The optimiser",
)

_WHOLE_TABLE = lines(
    Told(
        LossShare,
        PASSIVE,
        ACTIVE,
        "the sender's part of the mean loss; of several passive parties their sum",
        "aggregated",
        when=_WHOLE,
    ),
    Told(
        TargetUnit,
        ACTIVE,
        PASSIVE,
        "the target's standard deviation",
        "aggregated",
        when=When('family="linear"', lambda options, common: common.family == "linear"),
    ),
    lines(
        lines(
            Told(CrossProducts, _DATA, _COORDINATOR, "canonical correlations between parties' columns", "aggregated"),
            Told(InverseBlock, _COORDINATOR, _DATA, "how its columns correlate with the others'", "aggregated"),
            when=_LED,
        ),
        lines(
            Told(CrossProducts, PASSIVE, ACTIVE, "correlations between parties' columns, rotated", "aggregated"),
            Told(InverseBlock, ACTIVE, PASSIVE, "how its columns correlate with the others'", "aggregated"),
            when=_ALONE,
        ),
        Told(ErrorVariance, ACTIVE, PASSIVE, "the variance of residuals", "aggregated"),
        when=_ERRORS,
        guard="standard_errors=False",
    ),
    reference="docs/logistic.md, Linear regression, and standard errors",
)

_EPOCHS = lines(
    Told(
        EpochEnd,
        ACTIVE,
        ("passive", "coordinator"),
        "the next learning rate: whether the loss rose by a tenth, and whether that of eval rows is the lowest so far",
        "aggregated",
    ),
    Told(
        MarginPart,
        PASSIVE,
        ACTIVE,
        "its parts of margins, of training rows (calibrate) or eval rows; of several passive parties their sum",
        "exact",
        guard="calibrate=False, show_eval_margins=False",
        when=_SAFE,
        reference="docs/logistic.md, Calibration",
    ),
    reference="docs/logistic.md, Epochs and learning rates",
)

_PUBLISHED = lines(
    Told(SharedKey, _COORDINATOR, _DATA, "the coordinator's public key", "control"),
    Told(
        Margins,
        PASSIVE,
        ACTIVE,
        "the sender's part of margins under the coordinator's key; with its help they tell the sender's columns",
        "encrypted",
    ),
    Told(EncryptedVector, ACTIVE, PASSIVE, "residuals of all rows, under the coordinator's key", "encrypted"),
    Told(Gradient, _DATA, _COORDINATOR, "gradients and losses of every batch, so all weights", "aggregated"),
    Told(StepPart, _COORDINATOR, _DATA, "the step of its own weights, so about its gradient: labels", "aggregated"),
    Told(EpochLoss, _COORDINATOR, ACTIVE, "the mean loss of an epoch", "aggregated"),
    when=_PAPER,
    guard='mode="safe"',
    reference="arXiv 1912.00513; docs/logistic.md, What each party learns",
)

_MARGINS = lines(
    Told(PairKey, PASSIVE, PASSIVE, "a public key", "control"),
    Told(
        MarginPart,
        PASSIVE,
        ACTIVE,
        "the sender's parts of margins; of several passive parties their sum. From many rows of one whose values it "
        "knows, weights follow",
        "exact",
    ),
    reference="docs/logistic.md, Prediction",
)

TOLD: dict[Played, Lines] = {
    "train": lines(
        _SET_UP,
        lines(_COORDINATED, _OWN_KEYS, _BY_LATTICE, _RATES, _STEPS, _WHOLE_TABLE, when=_SAFE),
        _PUBLISHED,
        _EPOCHS,
        reference=_LEARNED,
    ),
    "predict": lines(AGREEMENT, _MARGINS),
    "online": lines(
        AGREEMENT,
        Told(OnlineRows, ACTIVE, PASSIVE, "which of the common rows are asked for, and when", "exact"),
        _MARGINS,
        Told(Finish, ACTIVE, PASSIVE, "that nothing more is asked", "control"),
        reference="docs/serving.md, Models with splits of partners",
    ),
}
