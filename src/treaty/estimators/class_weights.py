"""Weights of classes, as weights of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.class_weight import compute_sample_weight

from treaty.errors import ConfigError
from treaty.systems.options import SystemOptions
from treaty.systems.system import System


def refuse_told_labels(system: System, own: SystemOptions, class_weight: Any) -> None:
    """Raise ConfigError where weights of classes would say of labels what a system of boosted trees hides."""
    if own.label_epsilon is not None:
        raise ConfigError(
            "weights of classes would tell labels that noise is to hide: leave scale_pos_weight and class_weight out, "
            "or the noise"
        )
    if isinstance(class_weight, str) and class_weight == "balanced" and (system.split == "rows" or own.adds_noise):
        raise ConfigError(
            f"class_weight='balanced' counts the labels of all, which protocol {system.name!r} does not tell: name "
            "the weight of each class, class_weight={label: weight}"
        )


def weights_of_classes(
    target: NDArray[np.float64],
    classes: NDArray[Any],
    scale_pos_weight: float | None,
    class_weight: Any,
    weight: NDArray[np.float64] | None,
) -> NDArray[np.float64]:
    """Return each row's weight: its own times that of its class, `target` being numbers of `classes`.

    `scale_pos_weight` is the weight of the second class of two, as in XGBoost; `class_weight` names weights by label,
    or is "balanced", as in scikit-learn.
    """
    if scale_pos_weight is not None and class_weight is not None:
        raise ConfigError("expected scale_pos_weight or class_weight, got both")
    if scale_pos_weight is not None:
        if len(classes) != 2:
            raise ConfigError(f"scale_pos_weight is of two classes, got {len(classes)}: take class_weight")
        number = isinstance(scale_pos_weight, Real) and not isinstance(scale_pos_weight, bool)
        if not number or not np.isfinite(scale_pos_weight) or not scale_pos_weight > 0:
            raise ConfigError(f"expected a number scale_pos_weight above 0, got {scale_pos_weight!r}")
        of_rows = np.where(target == 1.0, float(scale_pos_weight), 1.0)
    else:
        if not isinstance(class_weight, str | Mapping):
            raise ConfigError(f"expected class_weight to be {{label: weight}} or 'balanced', got {class_weight!r}")
        try:
            of_rows = compute_sample_weight(class_weight, classes[target.astype(np.intp)])
        except (ValueError, TypeError) as error:
            raise ConfigError(f"class_weight={class_weight!r}: {error}") from None
        if not np.all(np.isfinite(of_rows) & (of_rows > 0.0)):
            raise ConfigError(
                f"expected weights above 0 for all classes, got class_weight={class_weight!r}: rows of weight 0 are "
                "left out at all parties, which would tell them labels; leave the class out of the tables instead"
            )
    return of_rows if weight is None else of_rows * weight
