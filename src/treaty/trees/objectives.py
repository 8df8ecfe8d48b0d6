"""All losses by name, and how one is made for labels; `losses` has the classes.

A new loss is one class there and its name in the union `Objective`; a saved forest names the class by its tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from treaty.errors import ConfigError
from treaty.machine.arrays import Floats
from treaty.machine.process import is_code
from treaty.trees.losses.custom import Custom
from treaty.trees.losses.fixed_point import Logistic, Softmax, bound_of_weights
from treaty.trees.losses.numbers import Poisson, PseudoHuber, Quantile, SquaredError, Tweedie
from treaty.trees.losses.ranking import Ndcg, Pairwise

Objective = Logistic | Softmax | SquaredError | Poisson | Tweedie | PseudoHuber | Quantile | Pairwise | Ndcg | Custom
LOSSES: dict[str, type[Objective]] = {kind.__struct_config__.tag: kind for kind in get_args(Objective)}
OWN_METRICS = {kind.metric for kind in LOSSES.values()}
NAMED = [name for name, kind in LOSSES.items() if kind.takes != "classes" and kind is not Custom]
"""The objectives that can be named; those of classes follow from the labels."""
ABSOLUTE = ("reg:absoluteerror", "absolute_error", "mae", "l1")
"""The absolute error, which is the quantile loss of the median."""
_THEIRS = {
    **{kind.xgboost_name: name for name, kind in LOSSES.items() if kind is not Custom},
    **dict.fromkeys(ABSOLUTE, "quantile"),
    **dict.fromkeys(("reg:linear", "regression", "mse", "l2"), "squared_error"),
    **dict.fromkeys(("reg:logistic", "log_loss", "binary"), "logistic"),
    **dict.fromkeys(("multi:softmax", "multiclass"), "softmax"),
    "lambdarank": "ndcg",
}
"""What XGBoost, scikit-learn and LightGBM call losses that there are here."""


def loss_name(name: str | None) -> str | None:
    """Return an objective by our name, where another library has another one for it; all else as it is."""
    return _THEIRS.get(name or "", name)


def loss_class(name: str | None) -> type[Objective]:
    """Return the class of a named objective; None is squared error. ConfigError for an unknown name."""
    if is_code(name):
        return Custom
    own = loss_name(name) or "squared_error"
    if own not in NAMED and own not in _THEIRS.values():
        raise ConfigError(
            f"expected objective to be one of {', '.join(NAMED)}, what XGBoost calls one of these, or a class of your "
            f"own (treaty.CustomLoss), got {name!r}; for classes leave it out"
        )
    return LOSSES[own]


def make_objective(
    name: str,
    y: Floats,
    weight: Floats | None,
    *,
    n_classes: int = 2,
    base_score: float | None = 0.5,
    start: Sequence[float] | None = None,
    fractional_bits: int = 16,
    epsilon: float | None = None,
    **own: Any,
) -> Objective:
    """Return the loss of this name for these labels, with its public bounds; raise ConfigError as `check` does.

    A `base_score` of None is estimated from the labels, unless a `start` is given. `epsilon` is that of the randomised
    response which `y` went through (`privacy.randomised_response`), if it did. Of `own`, further fields by name, a loss
    takes those that it has. The name may be ``package.module:CLASS``, see `treaty.trees.losses.custom`.
    """
    kind = LOSSES[name] if name in LOSSES else loss_class(name)
    loss = kind(
        n_outputs=kind.outputs(n_classes),
        base_score=0.5 if base_score is None else base_score,
        fractional_bits=fractional_bits,
        weight_bound=bound_of_weights(weight),
        epsilon=epsilon,
        **{field: value for field, value in {**own, "objective": name}.items() if field in kind.__struct_fields__},
    )
    if isinstance(loss, Custom):
        loss = loss.named()
    if start is not None or (base_score is None and len(y)):
        loss = loss.starting(loss.estimated_start(y, weight) if start is None else start)
    loss.check()
    if weight is not None:
        loss.check_weights(y, weight)
    return loss.bounded(y)
