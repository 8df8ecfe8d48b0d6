"""What the options of every system have in common: how they are checked, compared, copied and shown.

Options come in two groups. Those of a system (`SecureBoost(encryption="ou")`) are subclasses of `SystemOptions`, one in
each system's folder. Those of every boosting or regression (`n_estimators`, `max_iter`) belong to the estimator and to
the job file's ``[boosting]`` or ``[regression]`` table: `BoostingOptions` and `RegressionOptions`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from treaty.errors import ConfigError

AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
KeyBits = Literal[2048, 3072]
TestKeyBits = Annotated[int, msgspec.Meta(ge=128)]

FEW_TREES = (20, 3, 0.3)
"""`n_estimators`, `max_depth` and `learning_rate` in paper mode, and where noise grows with the trees."""

_OF_THE_ACTIVE_PARTY = ("random_state", "eval_metric")

# parameters that an estimator's error lists
_FEW = 16

Options = TypeVar("Options")
Documented = TypeVar("Documented")
Plain = str | int | float | bool | None
Term = Plain | list[Plain | list[Plain]] | dict[str, Plain]


@dataclasses.dataclass(kw_only=True, repr=False)
class SystemOptions:
    """Options that a system has beyond those of every boosting or regression; None means the system's own default.

    Parameters
    ----------
    mode : {"safe", "paper"}, default "safe"
        "paper" is the system as published, for comparison: options left open are then the paper's. Leaves may hold
        single rows (`min_child_samples`).
    allow_insecure : bool, default False
        Consent to what is known to be broken: in paper mode, and keys for tests in either mode. Every party has to give
        its own.
    """

    system: ClassVar[str]
    """The system's name, as job files have it, or ``package.module:NAME`` of a `System` defined elsewhere."""

    may_change: ClassVar[frozenset[str]] = frozenset()
    """Options that may differ between a training and its resumption."""

    may_be_infinite: ClassVar[frozenset[str]] = frozenset()
    """Options that may be infinite."""

    paper_bins: ClassVar[int | None] = None
    """The paper's number of bins, which `max_bin` is in paper mode unless given; None where it names none."""

    default_bins: ClassVar[int] = 32
    """What `max_bin` is unless it is given, and unless paper mode has a number of its own."""

    mode: Literal["safe", "paper"] = "safe"
    allow_insecure: bool = False

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Refuse unknown options; the error says which estimator or system has them."""
        unknown = [name for name in given if name not in names_of(cls)]
        if args or unknown:
            what = f"{args[0]!r} without a name" if args else f"option {unknown[0]!r}"
            known = names_of(cls)
            raise ConfigError(f"{cls.__name__} has no {what}; {advice('' if args else unknown[0], known, cls)}")
        return super().__new__(cls)

    @property
    def ciphers(self) -> Any:
        """The `CipherOptions` of a system whose parties ask each other for sums of bins; None of all others."""
        return None

    def settled(self, common: Any) -> Self:
        """Return these options with what was left open and depends on the `common` ones decided."""
        return self

    def why_open(self, common: Any) -> str:
        """Return why sums that are sealed under other options cannot be; nothing where they can, or never are."""
        return ""

    def check(self, common: Any) -> None:
        """Refuse options that do not go together; `common` are the `BoostingOptions` or `RegressionOptions`."""

    @property
    def label_epsilon(self) -> float | None:
        """Privacy parameter of the labels, where training uses labels that were randomised once."""
        return None

    @property
    def label_range(self) -> tuple[float, float] | None:
        """The stated ends of labels that were randomised once, if these are numbers."""
        return None

    @property
    def default_lambda(self) -> float:
        """What `reg_lambda` is unless it is given."""
        return 1.0

    @property
    def adds_noise(self) -> bool:
        """Whether everything made of labels carries noise; a `base_score` of None is then not estimated from them."""
        return False

    @property
    def holds_out_rows(self) -> bool:
        """Whether parties keep rows of their own back, whose metrics stand for those of an eval set."""
        return False

    @property
    def default_trees(self) -> tuple[int, int, float]:
        """What `n_estimators`, `max_depth` and `learning_rate` are unless they are given."""
        return FEW_TREES if self.mode == "paper" else (100, 5, 0.1)

    @property
    def default_parallel(self) -> int:
        """What `num_parallel_tree` is where neither it nor `n_estimators` is given."""
        return 1

    @property
    def limits_categories(self) -> bool:
        """Whether noise or cost grows with a column's categories, so that those beyond `max_bin` are joined."""
        return False

    @property
    def hides_decisions(self) -> bool:
        """Whether prediction keeps from the active party which way rows go at other parties' splits."""
        return False

    @property
    def hides_rows(self) -> bool:
        """Whether neither party learns in training which rows are in a node."""
        return False

    @property
    def shares_leaves(self) -> bool:
        """Whether no party learns the weights of leaves."""
        return False

    @property
    def rounds_margins(self) -> bool:
        """Whether predictions of a model with hidden rows are rounded, so that training rows are among them."""
        return False

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return all options by name; with it and `set_params`, scikit-learn sees them as ``protocol__NAME``."""
        return {name: getattr(self, name) for name in names_of(type(self))}

    def set_params(self, **given: Any) -> Self:
        """Set options by name; ConfigError for a name that this system does not have."""
        type(self)(**given)  # refuses unknown names
        for name, value in given.items():
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        changed = ", ".join(
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if repr(getattr(self, field.name)) != repr(field.default)
        )
        return f"{type(self).__name__}({changed})"


class CommonOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options that every boosting, or every regression, has in all systems; estimators and job files have them."""

    table: ClassVar[str]
    """Where a job file has them."""

    may_change: ClassVar[frozenset[str]]
    """Options that may differ between a training and its resumption."""

    @property
    def most_rounds(self) -> int:
        """Rounds of a training that does not stop early."""
        raise NotImplementedError

    def checked(self, own: SystemOptions) -> Self:
        """Return these options with those left open decided for a system's; refuse a contradiction."""
        raise NotImplementedError


_OURS = {
    **dict.fromkeys(("eta", "shrinkage", "shrinkage_rate", "learning_rate_init", "eta0"), "learning_rate"),
    **dict.fromkeys(("gamma", "min_gain_to_split", "min_impurity_decrease"), "min_split_loss"),
    **dict.fromkeys(("lambda", "lambda_", "lambda_l2", "l2_regularization", "reg_l2"), "reg_lambda"),
    **dict.fromkeys(("alpha", "lambda_l1", "reg_l1"), "reg_alpha"),
    **dict.fromkeys(
        ("num_boost_round", "num_round", "num_rounds", "num_iterations", "n_iter", "n_trees"), "n_estimators"
    ),
    "num_trees": "n_estimators",
    **dict.fromkeys(("nthread", "num_threads", "n_threads"), "n_jobs"),
    **dict.fromkeys(("seed", "random_seed", "bagging_seed", "data_random_seed"), "random_state"),
    **dict.fromkeys(("max_bins", "n_bins"), "max_bin"),
    **dict.fromkeys(("min_samples_leaf", "min_data_in_leaf"), "min_child_samples"),
    **dict.fromkeys(("feature_fraction", "max_features", "colsample"), "colsample_bytree"),
    **dict.fromkeys(("bagging_fraction", "sample_fraction", "max_samples", "bootstrap"), "subsample"),
    **dict.fromkeys(("early_stopping_round", "n_iter_no_change"), "early_stopping_rounds"),
    **dict.fromkeys(("min_delta", "tol"), "early_stopping_min_delta"),
    "eval_sample_weight": "sample_weight_eval_set",
    "init_score": "base_margin",
    "init_model": "xgb_model",
    "eval_init_score": "base_margin_eval_set",
    **dict.fromkeys(("verbosity", "silent", "verbose_eval"), "verbose"),
    **dict.fromkeys(("loss", "criterion", "application"), "objective"),
    **dict.fromkeys(("metric", "metrics", "feval", "custom_metric", "scoring", "eval_at"), "eval_metric"),
    **dict.fromkeys(("is_unbalance", "unbalance", "class_weights"), "class_weight"),
    **dict.fromkeys(("max_epochs", "epochs", "max_iterations"), "max_iter"),
    **dict.fromkeys(("min_samples_split", "min_weight_fraction_leaf"), "min_child_samples"),
    **dict.fromkeys(("min_split_gain", "ccp_alpha"), "min_split_loss"),
    **dict.fromkeys(("group", "groups"), "qid"),
    "eval_group": "eval_qid",
    **dict.fromkeys(("weight", "weights"), "sample_weight"),
    **dict.fromkeys(("evals", "validation_data", "X_val", "y_val", "X_valid", "y_valid"), "eval_set"),
    "max_cat_threshold": "max_cat_to_onehot",
    **dict.fromkeys(("num_leaves", "max_leaf_nodes"), "max_leaves"),
    "max_leaf_output": "max_delta_step",
    "boost_from_average": "base_score",
    **dict.fromkeys(("monotonic_cst", "monotone_constraint", "mc"), "monotone_constraints"),
    "interaction_cst": "interaction_constraints",
    "reg_param": "l2",
    "min_sum_hessian_in_leaf": "min_child_weight",
}
"""What XGBoost, LightGBM and scikit-learn call options of ours."""

_OURS_OF_LINEAR = {"alpha": "l2", "lambda": "l2", "reg_lambda": "l2", "scale_pos_weight": "class_weight"}
"""The same where a linear model has no option that `_OURS` names."""

_NOT_NEEDED = {
    **dict.fromkeys(("tree_method", "sketch_eps", "updater"), "all trees are grown from histograms"),
    "grow_policy": "trees grow by best gain with max_leaves, and else by levels",
    "enable_categorical": "columns of a categorical type are always categories",
    **dict.fromkeys(("colsample_bylevel", "colsample_bynode"), "columns are drawn for each tree: colsample_bytree"),
    "feature_fraction_bynode": "columns are drawn for each tree: colsample_bytree",
    "subsample_for_bin": "bins are made of all rows",
    **dict.fromkeys(("cat_smooth", "cat_l2", "min_data_per_group"), "category_sets says how categories are split"),
    **dict.fromkeys(
        ("device", "device_type", "gpu_id", "n_gpus", "predictor"), "training runs on the processor, n_jobs threads"
    ),
    "booster": "boosters are of trees, and a linear one is LogisticRegression or LinearRegression",
    "validate_parameters": "parameters are always checked",
    "importance_type": "importances(kind) has gain, cover and count",
    "refresh_leaf": "process_type='update' always refreshes leaves",
    **dict.fromkeys(("deterministic", "force_row_wise", "force_col_wise", "dual"), "there is no choice of it"),
    **dict.fromkeys(("extra_trees", "linear_tree", "path_smooth", "oob_score", "positive"), "there is none such here"),
    **dict.fromkeys(("num_class", "use_label_encoder"), "classes are what the labels are, numbers or text"),
    **dict.fromkeys(("missing", "use_missing", "zero_as_missing"), "None, NaN and null are missing: replace others"),
    **dict.fromkeys(("penalty", "l1_ratio"), "the penalty is on squared weights, and l2 says how much"),
    "fit_intercept": "there is always an intercept",
    "solver": "it belongs to the system: Pooled(solver=...), or protocol='quasi-newton' and protocol='sgd'",
    "warm_start": "fit(..., xgb_model=MODEL) continues a finished model of trees",
    **dict.fromkeys(("xgb_model", "init_model"), "only models of trees can be continued"),
    "monotone_constraints_method": "bounds are computed as in XGBoost",
    "feature_weights": "columns are drawn alike, colsample_bytree of them for each tree",
    **dict.fromkeys(
        ("base_margin", "init_score", "base_margin_eval_set", "eval_init_score", "init"),
        "all rows start from the same margin",
    ),
    **dict.fromkeys(
        ("sample_weight_eval_set", "eval_sample_weight"), "rows of a linear model's eval sets all weigh the same"
    ),
    "eval_class_weight": "weights of rows of eval sets are sample_weight_eval_set",
    "eval_names": "eval sets are called eval_0, eval_1 and so on, in their order",
    **dict.fromkeys(
        ("validation_fraction", "early_stopping"),
        "rows to watch are named by fit(..., eval_set=(X, y)), or kept back by "
        "FederBoostHorizontal or FedXGB(validation_fraction=0.2)",
    ),
    **dict.fromkeys(("group", "groups", "qid", "eval_group", "eval_qid"), "only GBDTRanker.fit takes groups, as qid"),
    **dict.fromkeys(
        ("feature_name", "feature_names", "feature_types", "categorical_feature", "categorical_features"),
        "names and categories come from the dataframe's columns",
    ),
    **dict.fromkeys(("bagging_freq", "subsample_freq"), "rows are drawn for each tree: subsample"),
    **dict.fromkeys(("boosting_type", "sampling_method"), "no tree is dropped, and goss=True draws rows by gradients"),
    **dict.fromkeys(("boosting", "rate_drop", "drop_rate", "skip_drop"), "no tree is dropped"),
    "first_metric_only": "the last eval_metric decides early stopping",
    "kwargs": "parameters go by their own names",
}
"""Options of XGBoost, LightGBM and scikit-learn without a counterpart, and why."""


def check_test_key(options: Any) -> None:
    """Refuse keys for tests, `insecure_test_key_bits`, unless this party's own options consent to what is broken."""
    if options.insecure_test_key_bits is not None and not options.allow_insecure:
        raise ConfigError(
            f"insecure_test_key_bits={options.insecure_test_key_bits}: expected allow_insecure=True with it, at "
            "every party, got False; anybody who factors such a key reads what it encrypts: use it only in tests"
        )


def learned_from_test_key(bits: int | None) -> list[str]:
    """Return what a party that gets ciphertexts learns under a key for tests (None: there is none)."""
    if bits is None:
        return []
    return [f"everything that is sent to it encrypted, if it factors the key, which is for tests alone: {bits} bits"]


def spelled_out(source: Any) -> Callable[[Documented], Documented]:
    """Replace "As for `NAME`." in the docstring of a class or function by the entries of `source`, which has this name.

    Then ``help()`` and the site describe every parameter, and the code describes it once. A function's line
    "Parameters and errors are as for `NAME`." stands for both sections.
    """
    entries, entry = dict[str, list[str]](), list[str]()
    for line in _doc(source).splitlines():
        if line[:1].strip():
            names, colon, kind = line.partition(" : ")
            entry = [f"{colon}{kind}"]
            entries.update(dict.fromkeys(names.split(", "), entry))
        elif line:
            entry.append(line)

    def written(listed: re.Match[str]) -> str:
        alike: dict[str, list[str]] = {}
        for name in re.split(r",\s+", listed[1]):
            alike.setdefault("\n".join(entries[name]), []).append(name)
        return "\n".join(f"{', '.join(names)}{entry}" for entry, names in alike.items())

    def fill(of: Documented) -> Documented:
        if of.__doc__:  # python -OO drops docstrings
            text, alike, rest = _doc(of).partition("Parameters and errors are as for `")
            if alike:
                known = [name for name in inspect.signature(cast("Any", of)).parameters if name in entries]
                errors = [name for name in entries if name.endswith("Error")]
                text += f"{_section('Parameters', known)}{rest.partition('.')[2]}\n\n{_section('Raises', errors)}"
            of.__doc__ = re.sub(r"^(\w+(?:,\s+\w+)*)\n {4}As for `[\w.]+`\.$", written, text, flags=re.M)
        return of

    return fill


def _section(title: str, names: Sequence[str]) -> str:
    return f"{title}\n{'-' * len(title)}\n{', '.join(names)}\n    As for `another`."


def _doc(of: Any) -> str:
    return inspect.cleandoc(of.__doc__ or "")


def names_of(kind: Any) -> list[str]:
    """Return the names of a class's options, in order."""
    if issubclass(kind, msgspec.Struct):
        return list(kind.__struct_fields__)
    return [field.name for field in dataclasses.fields(kind)]


def converted(values: Mapping[str, Any], kind: type[Options], owner: str) -> Options:
    """Build options of a `SystemOptions` or a struct of common ones from plain values; refuse wrong types and ranges.

    Numpy's numbers count as Python's, "inf" as infinity. `owner` says where the values were given: ``[boosting]``.
    """
    values = {name: plain(value) for name, value in values.items()}
    unknown = [name for name in values if name not in names_of(kind)]
    if unknown:
        raise ConfigError(f"{owner} has no option {unknown[0]!r}; {advice(unknown[0], names_of(kind), kind)}")
    try:
        options = msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(_explained(str(error), values, kind)) from None
    infinite: Iterable[str] = getattr(kind, "may_be_infinite", ())
    for name in names_of(kind):
        value = getattr(options, name)
        if isinstance(value, float) and not math.isfinite(value) and not (name in infinite and value == math.inf):
            raise ConfigError(f"option {name}={value}: expected a finite number")
    return options


def given(options: SystemOptions, common: CommonOptions) -> dict[str, Any]:
    """Return all options by name in plain values, with the system's name as ``protocol``, for files and comparison."""
    own = options.get_params()
    return {"protocol": options.system, **msgspec.to_builtins(own), **msgspec.to_builtins(common)}


def public_terms(options: SystemOptions, common: CommonOptions) -> dict[str, Term]:
    """Return what parties agree on first: every option but those that the active party keeps to itself."""
    return {name: value for name, value in given(options, common).items() if name not in _OF_THE_ACTIVE_PARTY}


def place_of(name: str, kind: Any) -> str:
    """Say which estimators and systems, other than `kind`, have this option; empty where none has."""
    # imported late, as it imports this module
    from treaty.systems import option_owners

    owners = option_owners(name, kind)
    return f"{name} is an option of {', '.join(owners)}" if owners else ""


def called_here(name: str, known: Sequence[str]) -> str | None:
    """Return what an option of another library is called among the `known` ones; None where none is the same."""
    return next((of[name] for of in (_OURS, _OURS_OF_LINEAR) if of.get(name) in known), None)


def advice(name: str, known: Sequence[str], kind: Any) -> str:
    """Say what to do about a name that is not among the `known` ones of `kind`: take it elsewhere, or write another."""
    ours = called_here(name, known)
    if ours is not None:
        return f"it is called {ours!r} here"
    # a linear model's `missing` is not what trees' users mean by it
    if name in _NOT_NEEDED and (name == "missing" or not place_of(name, kind)):
        return f"leave it out: {_NOT_NEEDED[name]}"
    near = get_close_matches(name, known, 1, 0.75)
    many = kind is None and len(known) > _FEW
    listed = "docs/options.md lists all options" if many else f"it has {', '.join(known)}"
    return place_of(name, kind) or (f"did you mean {near[0]!r}?" if near else listed)


def plain(value: Any) -> Any:
    """Return an option's value without numpy's types; "inf" stands for infinity, which JSON lacks.

    A class is named by its module and name, so that it can be found where it is needed.
    """
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, dict):
        return {key: plain(of) for key, of in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return (
        math.inf
        if isinstance(value, str) and value == "inf"
        else value.item()
        if isinstance(value, np.generic)
        else value
    )


def _explained(message: str, values: Mapping[str, Any], kind: type) -> str:
    """Put the option's name and value into msgspec's words."""
    text, _, path = message.partition(" - at `$.")
    # of a part of an option, the option
    text, name = text.replace("null", "None"), path.rstrip("`").partition("[")[0]
    if name not in values:
        return message
    hint = get_type_hints(kind, include_extras=False).get(name)
    kinds = get_args(hint) or (hint,)
    allowed = [value for of in kinds if get_origin(of) is Literal for value in get_args(of)] or [
        value for value in kinds if isinstance(value, str)
    ]
    known = f": expected one of {', '.join(map(str, allowed))}" if allowed and "enum" in text else ""
    return f"option {name}={values[name]!r}{known or f': {text[0].lower()}{text[1:]}'}"
