"""Treaty: train one model across organisations that may not pool their data."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from treaty.errors import (
    ConfigError,
    CryptoError,
    DataError,
    LocalProtocolError,
    PeerAborted,
    PeerError,
    PeerLost,
    PeerProtocolError,
    PeerTimeout,
    TreatyError,
)
from treaty.version import __version__ as __version__

if TYPE_CHECKING:
    from treaty.estimators.files import align, open_table, read_table
    from treaty.estimators.glm import LinearRegression, PoissonRegressor
    from treaty.estimators.linear import LogisticRegression
    from treaty.estimators.loading import load
    from treaty.estimators.scorecard import Scorecard
    from treaty.estimators.statistics import ColumnStatistics, permutation_importance
    from treaty.estimators.trees import GBDTClassifier, GBDTRanker, GBDTRegressor
    from treaty.runs.report import disclosures
    from treaty.systems.federboost_horizontal.options import FederBoostHorizontal
    from treaty.systems.federboost_vertical.options import FederBoostVertical
    from treaty.systems.fedxgb.options import FedXGB
    from treaty.systems.fedxgboost_ldp.options import FedXGBoostLDP
    from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
    from treaty.systems.logistic.options import SGD, QuasiNewton
    from treaty.systems.pooled.options import Pooled
    from treaty.systems.secureboost.options import SecureBoost
    from treaty.systems.statistics.options import Statistics
    from treaty.trees.custom_losses import CustomLoss

__all__ = [
    "SGD", "ColumnStatistics", "ConfigError", "CryptoError", "CustomLoss", "DataError", "FedXGB", "FedXGBoostLDP",
    "FedXGBoostSMM", "FederBoostHorizontal", "FederBoostVertical", "GBDTClassifier", "GBDTRanker", "GBDTRegressor",
    "LinearRegression", "LocalProtocolError", "LogisticRegression", "PeerAborted", "PeerError", "PeerLost",
    "PeerProtocolError", "PeerTimeout", "PoissonRegressor", "Pooled", "QuasiNewton", "Scorecard", "SecureBoost",
    "Statistics", "TreatyError", "align", "disclosures", "load", "open_table", "permutation_importance", "read_table",
]  # fmt: skip

_LATE = {
    "CustomLoss": "treaty.trees.custom_losses",
    "ColumnStatistics": "treaty.estimators.statistics",
    "align": "treaty.estimators.files",
    "disclosures": "treaty.runs.report",
    "GBDTClassifier": "treaty.estimators.trees",
    "GBDTRanker": "treaty.estimators.trees",
    "GBDTRegressor": "treaty.estimators.trees",
    "load": "treaty.estimators.loading",
    "open_table": "treaty.estimators.files",
    "permutation_importance": "treaty.estimators.statistics",
    "read_table": "treaty.estimators.files",
    "LogisticRegression": "treaty.estimators.linear",
    "Scorecard": "treaty.estimators.scorecard",
    "LinearRegression": "treaty.estimators.glm",
    "PoissonRegressor": "treaty.estimators.glm",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: scikit-learn takes a second, which a party's process saves."""
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    if name in __all__:
        from treaty.systems import option_class

        return option_class(name)
    raise AttributeError(f"module 'treaty' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
