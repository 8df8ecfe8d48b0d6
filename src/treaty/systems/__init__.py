"""One folder per published system: its options, its roles as programs, and what each role learns.

Each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from treaty.errors import ConfigError
from treaty.machine.process import imported, is_code
from treaty.systems.options import SystemOptions, names_of

if TYPE_CHECKING:
    from treaty.systems.system import System

Model = Literal["trees", "logistic", "statistics"]

# One line for each system: model, name in job files, folder, its record in the folder's `system.py`, and its public
# class in the folder's `options.py`. The only other place that names a system is `treaty/__init__.py`.
_TABLE: tuple[tuple[Model, str, str, str, str], ...] = (
    ("trees", "pooled", "pooled", "TREES", "Pooled"),
    ("trees", "secureboost", "secureboost", "SYSTEM", "SecureBoost"),
    ("trees", "fedxgboost-smm", "fedxgboost_smm", "SYSTEM", "FedXGBoostSMM"),
    ("trees", "fedxgboost-ldp", "fedxgboost_ldp", "SYSTEM", "FedXGBoostLDP"),
    ("trees", "federboost-vertical", "federboost_vertical", "SYSTEM", "FederBoostVertical"),
    ("trees", "federboost-horizontal", "federboost_horizontal", "SYSTEM", "FederBoostHorizontal"),
    ("trees", "fedxgb", "fedxgb", "SYSTEM", "FedXGB"),
    ("logistic", "pooled", "logistic", "POOLED", "Pooled"),
    ("logistic", "quasi-newton", "logistic", "QUASI_NEWTON", "QuasiNewton"),
    ("logistic", "sgd", "logistic", "SGD", "SGD"),
    ("statistics", "pooled", "statistics", "POOLED", "Pooled"),
    ("statistics", "statistics", "statistics", "SYSTEM", "Statistics"),
)

SYSTEMS: dict[Model, dict[str, str]] = {"trees": {}, "logistic": {}, "statistics": {}}
"""By model and name, where the system's record is: ``module:NAME``."""

OPTIONS: dict[str, str] = {}
"""By the name of a public class of options, the module that defines it."""

for _model, _name, _folder, _record, _options in _TABLE:
    SYSTEMS[_model][_name] = f"treaty.systems.{_folder}.system:{_record}"
    # Pooled, of all models, is in the first folder
    OPTIONS.setdefault(_options, f"treaty.systems.{_folder}.options")

ESTIMATORS: dict[Model, str] = {
    "trees": "GBDTClassifier and GBDTRegressor",
    "logistic": "LogisticRegression, LinearRegression and PoissonRegressor",
    "statistics": "ColumnStatistics",
}

# the estimators' own options: who takes them, and the class
_COMMON = {
    f"{ESTIMATORS['trees']} ([boosting] in a job file)": ("treaty.systems.pooled.options", "BoostingOptions"),
    f"{ESTIMATORS['logistic']} ([regression] in a job file)": ("treaty.systems.logistic.options", "RegressionOptions"),
    f"{ESTIMATORS['statistics']} ([columns] in a job file)": ("treaty.systems.statistics.options", "ColumnOptions"),
}
# further options of every estimator, and where a job file has them
_OF_ESTIMATORS = {
    **dict.fromkeys(("protocol", "active", "n_jobs"), "at the top of a job file"),
    "transport": "a job file has none: its parties talk over TLS",
}


def find_system(name: str, model: Model | None = None) -> System:
    """Return the record of a system: by its name in the table, or as ``package.module:NAME`` of one defined elsewhere.

    `model` says what it trains; None looks through both. ConfigError when there is none of that name, or it is code
    that is not trusted (`treaty.machine.process`).
    """
    known = {name: where for of, named in SYSTEMS.items() if model in (None, of) for name, where in named.items()}
    if name not in known and not is_code(name):
        other = "".join(f", a system of {ESTIMATORS[of]}" for of, named in SYSTEMS.items() if name in named)
        raise ConfigError(f"expected protocol to be one of {', '.join(known)}, got {name!r}{other}")
    module, _, attribute = known.get(name, "").partition(":")
    try:
        found = getattr(import_module(module), attribute) if module else imported(name, "the system")
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"cannot import the system {name!r}: {error}") from None
    # which imports much that a look at the table does not need
    from treaty.systems.system import System

    if not isinstance(found, System):
        raise ConfigError(f"expected {name!r} to be the record of a system (System), got {type(found).__name__}")
    return found


def option_class(name: str) -> type[SystemOptions]:
    """Return a public class of options by its name."""
    kind: type[SystemOptions] = getattr(import_module(OPTIONS[name]), name)
    return kind


def option_owners(name: str, but: Any) -> list[str]:
    """Return the estimators (with their table of a job file) and systems, other than `but`, that have this option."""
    owners = {who: getattr(import_module(module), kind) for who, (module, kind) in _COMMON.items()}
    owners |= {of: option_class(of) for of in OPTIONS}
    every = f"{', '.join(ESTIMATORS.values()).replace(' and ', ', ')} ({_OF_ESTIMATORS.get(name)})"
    found = [who for who, kind in owners.items() if kind is not but and name in names_of(kind)]
    return [every] if name in _OF_ESTIMATORS else found
