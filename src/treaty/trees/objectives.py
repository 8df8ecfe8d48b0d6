"""The table of all losses, how one is made for labels, and the metrics of eval sets.

A new loss is a class in `losses` or another module of losses, and its name in the union `Objective`. A saved
forest names the class by its tag, a job by its tag or by XGBoost's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, get_args

import numpy as np
from msgspec.structs import replace

from treaty.errors import ConfigError, DataError
from treaty.machine.arrays import Floats
from treaty.machine.process import is_code
from treaty.trees.custom_losses import Custom, loss_at
from treaty.trees.logistic_pieces import LogisticPieces, PiecesOfClasses
from treaty.trees.losses import Logistic, Softmax, bound_of_weights
from treaty.trees.number_losses import Gamma, Poisson, PseudoHuber, Quantile, SquaredError, SquaredErrorSteps, Tweedie
from treaty.trees.ranking_losses import Ndcg, Pairwise, mean_average_precision, mean_ndcg

Objective = (
    Logistic | LogisticPieces | PiecesOfClasses | Softmax | SquaredError | Poisson | Tweedie | Gamma | PseudoHuber
    | Quantile | SquaredErrorSteps | Pairwise | Ndcg | Custom
)  # fmt: skip


def by_xgboost_name(kinds: Sequence[type[Objective]]) -> dict[str, str]:
    """Return the tag of each loss by its XGBoost name; raise ValueError where two losses have the same tag or name."""
    found: dict[str, str] = {}
    for kind in kinds:
        tag, name = str(kind.__struct_config__.tag), kind.xgboost_name
        # a job that names a loss would get whichever comes last
        if name in found or tag in found.values():
            raise ValueError(
                f"{kind.__name__}: another loss has the tag {tag!r} or the xgboost_name {name!r} already. Jobs and "
                "saved models find losses by these: give both names of their own"
            )
        found[name] = tag
    return found


_BY_XGBOOST_NAME = by_xgboost_name(get_args(Objective))
LOSSES: dict[str, type[Objective]] = dict(zip(_BY_XGBOOST_NAME.values(), get_args(Objective), strict=True))
OWN_METRICS = {kind.metric for kind in LOSSES.values()}
NAMED = [name for name, kind in LOSSES.items() if kind.takes != "classes" and kind is not Custom]
"""The objectives that can be named; those of classes follow from the labels."""
ABSOLUTE = ("reg:absoluteerror", "absolute_error", "mae", "l1")
"""The absolute error, which is the quantile loss of the median."""
_THEIRS = {
    **{theirs: name for theirs, name in _BY_XGBOOST_NAME.items() if theirs},
    **dict.fromkeys(ABSOLUTE, "quantile"),
    **dict.fromkeys(("reg:linear", "regression", "mse", "l2"), "squared_error"),
    "pseudo_huber": "huber",
    **dict.fromkeys(("reg:logistic", "log_loss", "binary"), "logistic"),
    **dict.fromkeys(("multi:softmax", "multiclass"), "softmax"),
    "lambdarank": "ndcg",
}
"""What XGBoost, scikit-learn and LightGBM call these losses."""


def loss_name(name: str | None) -> str | None:
    """Return our name of an objective that another library calls by this one; any other name as it is."""
    return _THEIRS.get(name or "", name)


def loss_class(name: str | None) -> type[Objective]:
    """Return the class of a named objective; None is squared error. ConfigError for an unknown name."""
    if is_code(name):
        return Custom
    own = loss_name(name) or "squared_error"
    if own not in NAMED and own not in _THEIRS.values():
        raise ConfigError(
            f"expected objective to be one of {', '.join(NAMED)}, what XGBoost calls one of these, or a class of your "
            f"own (treaty.CustomLoss), got {name!r}; for classes leave it out, or take 'logistic_pieces'"
        )
    return LOSSES[own]


def make_objective(
    name: str, y: Floats, weight: Floats | None, *, n_classes: int = 2, base_score: float | None = 0.5,
    start: Sequence[float] | None = None, fractional_bits: int = 16, epsilon: float | None = None,
    base_margin: Floats | None = None, **own: Any,
) -> Objective:  # fmt: skip
    """Return the loss of this name for these labels, with its public bounds; raise ConfigError as `check` does.

    A `base_score` of None is estimated from the labels, unless a `start` is given. `epsilon` is that of the randomised
    response which `y` went through (`privacy.randomised_response`), if it did. Of `own`, further fields by name, a loss
    takes those that it has. If rows start from a `base_margin` (n_rows, n_outputs), the loss starts from margin 0. The
    name may be ``package.module:CLASS``, see `treaty.trees.custom_losses`.
    """
    kind = LOSSES[name] if name in LOSSES else loss_class(name)
    loss = kind(
        n_outputs=n_classes if kind in (Softmax, PiecesOfClasses) else 1,
        base_score=0.5 if base_score is None else base_score,
        fractional_bits=fractional_bits,
        weight_bound=bound_of_weights(weight),
        epsilon=epsilon,
        **{field: value for field, value in {**own, "objective": name}.items() if field in kind.__struct_fields__},
    )
    if isinstance(loss, Custom):
        loss = replace(loss, link=loss_at(loss.objective).link)
    if base_margin is not None:
        # what a margin of 0 stands for; of several classes, these are scores
        zero = np.zeros((1, loss.n_outputs))
        start = (loss.predictions(zero) if loss.n_outputs == 1 else zero)[0].tolist()
    if start is not None or (base_score is None and len(y)):
        loss = loss.starting(loss.estimated_start(y, weight) if start is None else start)
    loss.check()
    if weight is not None:
        loss.check_weights(y, weight)
    return loss.bounded(y) if base_margin is None else loss.bounded_from(y, base_margin)


# ---------------------------- metrics of eval sets by XGBoost's names, besides a loss's own, computed where labels are
#
# scikit-learn has those of classes and numbers, `ranking_losses` those of rankings. Some names have a number:
# "error@0.3" is the error where a row counts as of the second class above 0.3; "ndcg@5" and "map@5" are of the five
# rows that come first in a group.

_OF_TWO = ("logloss", "auc", "aucpr", "error", "error@t")
_OF_SEVERAL = ("mlogloss", "merror", "auc")
_OF_NUMBERS = ("rmse", "mae", "mape", "rmsle")
_OF_GROUPS = ("ndcg", "ndcg@k", "map", "map@k")
_NAMES = tuple(dict.fromkeys((*_OF_TWO, *_OF_SEVERAL, *_OF_NUMBERS, *_OF_GROUPS)))
_HIGHER_IS_BETTER = ("auc", "aucpr", "ndcg", "map")
_OUR_METRICS = {
    **{"roc_auc": "auc", "average_precision": "aucpr", "multi_logloss": "mlogloss", "multi_error": "merror"},
    **dict.fromkeys(("log_loss", "binary_logloss", "cross_entropy"), "logloss"),
    **{"accuracy": "error", "binary_error": "error", "l1": "mae", "mean_absolute_error": "mae"},
    **dict.fromkeys(("mse", "l2", "mean_squared_error", "root_mean_squared_error"), "rmse"),
    **{"mean_absolute_percentage_error": "mape", "root_mean_squared_log_error": "rmsle"},
    **{"poisson-nloglik": "poisson-deviance", "gamma-nloglik": "gamma-deviance"},
}
"""What XGBoost, scikit-learn and LightGBM call metrics of ours, or those that rank models like them."""
_BROUGHT: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar("brought", default=MappingProxyType({}))
"""Functions that the user gave to this fit, by name; its parties' threads see them, and no other fit."""


def as_text(given: Any, *, in_processes: bool) -> str | None:
    """Return one or several metrics as one text; functions, which this fit then finds by their names, included."""
    several = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    named = [getattr(of, "__name__", type(of).__name__) if callable(of) else str(of) for of in several]
    brought = {name: of for name, of in zip(named, several, strict=True) if callable(of)}
    _BROUGHT.set(brought)
    if taken := [name for name in brought if _form(name) in _NAMES or name in OWN_METRICS]:
        raise ConfigError(f"expected a function as eval_metric with a name that is no metric's here, got {taken[0]!r}")
    if brought and in_processes:
        raise ConfigError("a function as eval_metric cannot go to other processes: take transport='memory'")
    return ",".join(named) or None


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigError for a name of no metric, for any labels, and for a repeated one."""
    for name in names:
        if _form(name) not in _NAMES and name not in OWN_METRICS and name not in _BROUGHT.get():
            lower = name.lower().removeprefix("neg_")
            ours = _OUR_METRICS.get(lower, lower)
            if ours != name and (_form(ours) in _NAMES or ours in OWN_METRICS):
                raise ConfigError(f"expected eval_metric {ours!r} in place of {name!r}")
            raise ConfigError(
                f"expected eval_metric of {', '.join(_NAMES)}, with a share t and a number of rows k, or an "
                f"objective's own ({', '.join(sorted(OWN_METRICS.difference(_NAMES)))}), got {name!r}"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"expected every eval_metric once, got {', '.join(names)}")


def check_metrics(names: Sequence[str], objective: Objective) -> None:
    """Raise ConfigError for a metric that does not fit labels of this loss."""
    fitting = {
        "classes": _OF_TWO if objective.n_outputs == 1 else _OF_SEVERAL,
        "numbers": _OF_NUMBERS,
        "groups": _OF_GROUPS,
    }
    known = list(dict.fromkeys((objective.metric, *fitting[objective.takes])))
    for name in names:
        if name != objective.metric and _form(name) not in known and name not in _BROUGHT.get():
            raise ConfigError(f"expected eval_metric of {', '.join(known)} for these labels, got {name!r}")


def check_watched(names: Sequence[str], y: Floats, n_classes: int) -> None:
    """Raise DataError for labels of an eval set that do not suit a metric; `n_classes` is 0 where there are none."""
    for name in names:
        base = name.partition("@")[0]
        if base in ("auc", "aucpr") and len(np.unique(y)) < n_classes:
            raise DataError(f"eval_metric={name!r} needs rows of every class in the eval set, got {len(np.unique(y))}")
        if base == "rmsle" and np.any(y <= -1.0):
            raise DataError(
                f"eval_metric={name!r} expects labels above -1, as it takes logarithms of 1 + label, got "
                f"{np.count_nonzero(y <= -1.0)} others of {len(y)} in the eval set: take 'rmse' or 'mae'"
            )
        if base == "map" and y.ndim == 2 and np.any(y[:, 0] > 1.0):
            raise DataError(
                f"eval_metric={name!r} expects relevance of 0 or 1, got {np.count_nonzero(y[:, 0] > 1.0)} others of "
                f"{len(y)} in the eval set: take 'ndcg'"
            )


def higher_is_better(name: str, objective: Objective) -> bool:
    """Whether larger values of a metric are better."""
    if name == objective.metric:
        return objective.higher_is_better
    return name.partition("@")[0] in _HIGHER_IS_BETTER


def evaluate(name: str, objective: Objective, margins: Floats, y: Floats, weight: Floats | None) -> float:
    """Return a metric of rows, given their margins (n_rows, n_outputs) and labels, which go with `name`.

    "aucpr" is the average precision, "auc" of several classes the mean of each against the rest, by their share.
    """
    if name in _BROUGHT.get():
        return _brought(name, objective, margins, y, weight)
    if name == objective.metric:
        return objective.loss(margins, y, weight)
    base, _, number = name.partition("@")
    if objective.takes == "groups":
        of_groups = mean_ndcg if base == "ndcg" else mean_average_precision
        return of_groups(margins[:, 0], y, weight, int(number) if number else len(y))
    from sklearn import metrics  # imported late: a party's process does without it

    predicted = objective.predictions(margins)
    if objective.n_outputs == 1:
        predicted = predicted[:, 0]
    by_weight: dict[str, Any] = {"sample_weight": weight}
    if name == "auc" and objective.n_outputs > 1:
        by_weight |= {"multi_class": "ovr", "average": "weighted"}
    if base in ("error", "merror"):
        chosen = predicted > float(number or 0.5) if base == "error" else np.argmax(predicted, axis=1)
        return 1.0 - float(metrics.accuracy_score(y, chosen.astype(np.float64), **by_weight))
    if name == "rmsle" and np.any(predicted <= -1.0):
        raise DataError(
            f"eval_metric='rmsle' takes logarithms of 1 + prediction, and {np.count_nonzero(predicted <= -1.0)} of "
            f"{len(y)} rows of the eval set are predicted as -1 or less: take 'rmse' or 'mae', or objective='poisson' "
            "or 'tweedie', whose predictions are above 0",
            public="its eval metric does not fit its predictions; it has the details",
        )
    functions = {
        "auc": metrics.roc_auc_score,
        "aucpr": metrics.average_precision_score,
        "rmse": metrics.root_mean_squared_error,
        "mae": metrics.mean_absolute_error,
        "mape": metrics.mean_absolute_percentage_error,
        "rmsle": metrics.root_mean_squared_log_error,
    }
    return float(functions[name](y, predicted, **by_weight))


def _brought(name: str, objective: Objective, margins: Floats, y: Floats, weight: Floats | None) -> float:
    """Return what a user's function gives for labels and predictions, in XGBoost's shapes."""
    predicted = objective.predictions(margins)
    labels, shown = y[:, 0] if y.ndim == 2 else y, predicted[:, 0] if objective.n_outputs == 1 else predicted
    try:
        return float(_BROUGHT.get()[name](labels, shown, **({} if weight is None else {"sample_weight": weight})))
    except Exception as error:
        of, hint = "labels and predictions", ""
        if objective.takes == "classes":
            of, hint = "class numbers and probabilities", "; if it needs classes, wrap it in a function that decides"
        raise ConfigError(f"eval_metric {name}, given {of}, raised {type(error).__name__}: {error}{hint}") from error


def _form(name: str) -> str:
    """Return a name with t or k in place of its number, if the metric can have that number; else the name."""
    base, _, number = name.partition("@")
    if base in ("ndcg", "map") and number.isdecimal() and int(number) > 0:
        return f"{base}@k"
    try:
        return "error@t" if base == "error" and 0.0 <= float(number) <= 1.0 else name
    except ValueError:
        return name
