"""Treaty: train one model across organisations that may not pool their data."""

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

if TYPE_CHECKING:
    from treaty.estimators.align import align
    from treaty.estimators.linear import LogisticRegression
    from treaty.estimators.trees import GBDTClassifier, GBDTRegressor, load

__all__ = [
    "ConfigError",
    "CryptoError",
    "DataError",
    "GBDTClassifier",
    "GBDTRegressor",
    "LocalProtocolError",
    "LogisticRegression",
    "PeerAborted",
    "PeerError",
    "PeerLost",
    "PeerProtocolError",
    "PeerTimeout",
    "TreatyError",
    "align",
    "load",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: scikit-learn takes a second, which a party's process saves."""
    if name == "align":
        from treaty.estimators.align import align

        return align
    if name in ("GBDTClassifier", "GBDTRegressor", "load"):
        from treaty.estimators import trees as estimators

        return getattr(estimators, name)
    if name == "LogisticRegression":
        from treaty.estimators.linear import LogisticRegression

        return LogisticRegression
    raise AttributeError(f"module 'treaty' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
