"""What the messages of SecureBoost tell."""

from __future__ import annotations

from treaty.systems.secureboost.hidden_prediction import (
    ChainKey,
    EncryptedGains,
    EncryptedTotals,
    PredictionKey,
    SealedTerms,
    Station,
)
from treaty.systems.told import ACTIVE, AGREEMENT, PASSIVE, Lines, Played, Told, When, lines
from treaty.systems.vertical.encrypted_columns import Sums
from treaty.systems.vertical.told import EXPLAIN, FINISH, ONLINE, PREDICT, encrypted

_PLAIN = When("without he_inference", lambda options, common: not options.hides_decisions)
_HIDDEN = When("he_inference=True", lambda options, common: options.hides_decisions)

_HIDDEN_PREDICTION = lines(
    AGREEMENT,
    Told(ChainKey, PASSIVE, ACTIVE, "how many splits the sender keeps; a public key", "control"),
    Told(PredictionKey, ACTIVE, PASSIVE, "the cipher's public key", "control"),
    Told(
        Station,
        ACTIVE,
        PASSIVE,
        "which of its splits the trees use, how they lie below each other, how many splits of others lie below them",
        "exact",
    ),
    Told(EncryptedGains, ACTIVE, PASSIVE, "how many rows are predicted", "encrypted"),
    Told(SealedTerms, PASSIVE, ACTIVE, "what the next passive party alone can open", "encrypted"),
    Told(
        EncryptedTotals,
        PASSIVE,
        ACTIVE,
        "each row's sum of leaf weights, from which decisions of small models follow",
        "exact",
    ),
    FINISH,
    reference="arXiv 2105.09540; docs/prediction.md, What each learns, and who may collude",
)

_PLAIN_ANSWERS = When("answers not re-randomised", lambda options, common: not options.ciphers.rerandomise)

TOLD: dict[Played, Lines] = {
    "train": lines(
        encrypted(
            seal='sums="sealed"', hide='encryption="lattice"', guards='rl_trees, purity_guard, mechanism="label_rr"'
        ),
        Told(
            Sums,
            PASSIVE,
            ACTIVE,
            "which rows are in a bin, if it looks: its own ciphertexts are known again in answers",
            "exact",
            guard="rerandomise=True",
            when=_PLAIN_ANSWERS,
            reference="docs/audit.md, The attacks",
        ),
    ),
    "predict": lines(lines(PREDICT, when=_PLAIN), lines(_HIDDEN_PREDICTION, when=_HIDDEN)),
    "explain": lines(EXPLAIN, when=_PLAIN),
    "online": lines(ONLINE, when=_PLAIN),
}
