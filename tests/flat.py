"""Options in one flat list, sorted to where they belong: tests often vary both kinds together."""

from __future__ import annotations

import json
from typing import Any

import treaty
from treaty.systems import OPTIONS, option_class
from treaty.systems.logistic.options import RegressionOptions
from treaty.systems.options import SystemOptions, names_of
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.statistics.options import ColumnOptions

OF_ESTIMATORS = {"active", "transport", "n_jobs"}
CLASSES = {option_class(name).system: option_class(name) for name in OPTIONS}


def common_of(protocol: str) -> Any:
    """Return the type of the common options of a system between parties."""
    kinds = {"quasi-newton": RegressionOptions, "sgd": RegressionOptions, "statistics": ColumnOptions}
    return kinds.get(protocol, BoostingOptions)


def flat(estimator: Any, protocol: str = "pooled", **options: Any) -> Any:
    """Make an estimator, the system's own options given to its class and all others to the estimator."""
    common = RegressionOptions if issubclass(estimator, treaty.LogisticRegression) else BoostingOptions
    shared = {name for name in options if name in names_of(common) or name in OF_ESTIMATORS}
    own = {name: value for name, value in options.items() if name not in shared}
    return estimator(CLASSES[protocol](**own) if own else protocol, **{name: options[name] for name in shared})


def own_and_common(protocol: str, **options: Any) -> tuple[SystemOptions, Any]:
    """Make a system's own options and the common ones, checked."""
    common = common_of(protocol)
    own = CLASSES[protocol](**{name: value for name, value in options.items() if name not in names_of(common)})
    return own, common(**{name: value for name, value in options.items() if name in names_of(common)}).checked(own)


def option_lines(protocol: str = "secureboost", **options: Any) -> tuple[str, list[str]]:
    """Return a job file's line that names the system, for its top, and its tables of options, for its end.

    It names few and small trees, unless others are given. Where exact sums would show rows of a test's small table,
    its job consents.
    """
    common = common_of(protocol)
    if common.table == "boosting" and "max_leaves" not in options:
        options = {"n_estimators": 20, "max_depth": 3, "learning_rate": 0.3, **options}
    if "allow_exact_sums" in names_of(CLASSES[protocol]) and common.table != "regression":
        options = {"allow_exact_sums": True, **options}
    shared = [name for name in options if name in names_of(common)]
    tables = {protocol: [name for name in options if name not in shared], common.table: shared}
    lines = []
    for table, names in tables.items():
        lines += [f"[{table}]", *(f"{name} = {json.dumps(options[name])}" for name in names)]
    return f'protocol = "{protocol}"', lines
