"""Treaty: train one model across organisations that may not pool their data."""

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
from treaty.estimators import GBDTClassifier, GBDTRegressor, load

__all__ = [
    "ConfigError",
    "CryptoError",
    "DataError",
    "GBDTClassifier",
    "GBDTRegressor",
    "LocalProtocolError",
    "PeerAborted",
    "PeerError",
    "PeerLost",
    "PeerProtocolError",
    "PeerTimeout",
    "TreatyError",
    "load",
]
__version__ = "0.1.0"
