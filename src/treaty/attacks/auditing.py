"""Train with every party's view recorded, and try every attack on each view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import clone

from treaty.attacks import (
    ciphertexts,
    communities,
    exact_sums,
    histograms,
    leaf_purity,
    masks,
    matrix_products,
    nested_sides,
    noisy_buckets,
    noisy_gradients,
    repeated_ciphertexts,
    row_sets,
)
from treaty.attacks.views import Finding, Truth, View
from treaty.errors import ConfigError
from treaty.machine.arrays import Floats

Attack = Callable[[View, Truth], Iterator[Finding]]

ATTACKS: tuple[Attack, ...] = tuple(
    module.attack
    for module in (
        row_sets,
        noisy_gradients,
        exact_sums,
        nested_sides,
        noisy_buckets,
        histograms,
        communities,
        leaf_purity,
        repeated_ciphertexts,
        ciphertexts,
        matrix_products,
        masks,
    )
)
"""Each is given the view of one party, and yields nothing where it does not apply."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What attacks found in a training.

    Attributes
    ----------
    model : GBDTClassifier, GBDTRegressor or LogisticRegression
        The trained model.
    findings : list of Finding
        One for each attack that applies, party and target.
    """

    model: Any
    findings: list[Finding]


def audit(model: Any, X: Any, y: Any = None, sample_weight: Any = None) -> Audit:
    """Train a copy of a model and attack it from every party's view.

    All parties are played in this process, as `fit` plays them; what they see is recorded, with the contents of all
    messages, and dropped at the end. Memory is that of all messages together.

    Parameters
    ----------
    model : GBDTClassifier, GBDTRegressor, LogisticRegression, ...
        Its parameters; it is not changed.
    X, y, sample_weight
        As `fit` takes them.

    Returns
    -------
    Audit

    Raises
    ------
    ConfigError
        For a protocol without messages, ``"pooled"``, and for ``transport="grpc"``; and as `fit` does.
    DataError
        As `fit` does.
    """
    copy = clone(model)
    if copy.transport != "memory":
        raise ConfigError('an audit records what parties see in this process: expected transport="memory"')
    copy._recorded = {}
    given = (X,) if y is None else (X, y)
    copy.fit(*given, **({} if sample_weight is None else {"sample_weight": sample_weight}))
    recorded, copy._recorded = copy._recorded, None
    if not recorded:
        raise ConfigError(f"protocol {copy.protocol!r} sends nothing that could be attacked: name another")
    views = {name: View(of) for name, of in recorded.items()}
    by_row = next(iter(views.values())).by_row
    return Audit(copy, findings(views, by_row=by_row, targets=None if by_row else _true_labels(views, y)))


def _true_labels(views: Mapping[str, View], y: Any) -> Floats | None:
    """Return labels as they were before they were randomised, if they were: class numbers (n_rows,); else None."""
    inputs = next(view.inputs for view in views.values() if view.is_active)
    if inputs.options.label_epsilon is None or inputs.classes is None:
        return None
    return np.searchsorted(np.asarray(inputs.classes), np.asarray(y)).astype(np.float64)


def findings(views: Mapping[str, View], *, by_row: bool, targets: Floats | None = None) -> list[Finding]:
    """Try every attack on every party's view; most successful first. Arguments are those of `Truth`."""
    truth = Truth(views, by_row=by_row, targets=targets)
    found = [finding for view in views.values() for attack in ATTACKS for finding in attack(view, truth)]
    return sorted(found, key=lambda finding: finding.baseline - finding.score)
