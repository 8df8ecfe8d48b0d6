"""Importances of a finished model's columns, contributions of single rows, and one joined XGBoost model.

A column's name belongs to its owner. A viewer sees a foreign column that some split uses under a pseudonym
("laboratory #3") unless its owner consents. Pseudonyms count a party's columns in the order of its records that first
use them: they are the same in every importance and every explanation of a model, and do not reveal a column's position.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from treaty.data.columns import quoted
from treaty.data.table import Table
from treaty.errors import ConfigError, DataError, warn_user
from treaty.machine.arrays import Floats, Int32s
from treaty.models.trees import ModelPart, decide, forest_of, with_weights
from treaty.trees.boosting import Forest
from treaty.trees.custom_losses import Custom
from treaty.trees.ensemble import JoinedSplits, SplitTable, Tree, join_splits
from treaty.trees.logistic_pieces import LogisticPieces, PiecesOfClasses
from treaty.trees.losses import Softmax
from treaty.trees.number_losses import Poisson, PseudoHuber, Quantile, SquaredErrorSteps, Tweedie
from treaty.trees.objectives import Objective
from treaty.trees.ranking_losses import PAIRED, LambdaMart
from treaty.trees.shap import contributions

# stands for "every present value goes left": JSON has no infinity
_HIGHEST = float(np.finfo(np.float32).max)


def to_booster(
    trees: Sequence[Tree],
    splits: JoinedSplits,
    objective: Objective,
    feature_names: Sequence[str],
    categories: Sequence[Sequence[str | int | float | bool] | None],
    parallel: int = 1,
) -> Any:
    """Build an `xgboost.Booster` that predicts the same margins (to float32).

    A round has `parallel` trees of each output. `splits`, `feature_names` and `categories` (None for numeric columns)
    are of the joined table. The booster knows categories by their codes alone: columns must come with the categories of
    training, in that order (``pandas.Categorical(values, categories=...)``); ``json.loads(booster.attr("categories"))``
    has them by column. XGBoost sends codes it has never seen left, so predictions may differ on those alone. Raises
    ConfigError if XGBoost is not installed, or a column name has a character that XGBoost forbids.
    """
    try:
        import xgboost
    except ImportError as error:
        raise ConfigError("to_xgboost() needs XGBoost: pip install 'treaty-learn[xgboost]'") from error
    if isinstance(objective, PiecesOfClasses):
        raise ConfigError("XGBoost has no loss of several classes, each against the rest: to_xgboost() has no model")
    unusable = [name for name in feature_names if any(mark in name for mark in "[]<")]
    if unusable:
        raise ConfigError(f"XGBoost allows no '[', ']' or '<' in column names; rename {', '.join(unusable)}")
    n_features = len(feature_names)
    # XGBoost before 3.1 has one base score for all classes: their scores go into the leaves of the first round's trees
    scores = objective.class_scores if isinstance(objective, Softmax) else ()
    start = objective.base_score
    if isinstance(objective, (LogisticPieces, SquaredErrorSteps)):  # starts from a rounded margin
        start = float(objective.predictions(objective.base_margins)[0])
    first = [replace(tree, value=tree.value + score) for tree, score in zip(trees, scores, strict=False)]
    scored = [*first, *trees[len(first) :]]
    of_column = {name: list(of) for name, of in zip(feature_names, categories, strict=True) if of is not None}
    model = {
        "version": [3, 0, 0],
        "learner": {
            "attributes": {"categories": json.dumps(of_column, ensure_ascii=False)} if of_column else {},
            "feature_names": list(feature_names),
            "feature_types": ["float" if c is None else "c" for c in categories],
            "gradient_booster": {
                "name": "gbtree",
                "model": {
                    "gbtree_model_param": {"num_trees": str(len(trees)), "num_parallel_tree": str(parallel)},
                    "tree_info": [i % objective.n_outputs for i in range(len(trees))],
                    "iteration_indptr": list(range(0, len(trees) + 1, objective.n_outputs * parallel)),
                    "trees": [_tree(number, tree, splits, n_features) for number, tree in enumerate(scored)],
                },
            },
            "learner_model_param": {
                "base_score": repr(start),
                "num_class": str(objective.n_outputs if isinstance(objective, Softmax) else 0),
                "num_feature": str(n_features),
                "num_target": "1",
                "boost_from_average": "0",
            },
            "objective": _xgboost_objective(objective),
        },
    }
    booster = xgboost.Booster()
    # XGBoost does not decode \u escapes
    booster.load_model(bytearray(json.dumps(model, ensure_ascii=False).encode()))
    return booster


def _xgboost_objective(objective: Objective) -> dict[str, Any]:
    """Return the objective as XGBoost's JSON format has it; a user's own loss becomes one with the same link."""
    name, parameters = objective.xgboost_name, {"reg_loss_param": {"scale_pos_weight": "1"}}
    match objective:
        case LogisticPieces():
            name = "binary:logistic"
        case SquaredErrorSteps():
            name = "reg:squarederror"
        case Softmax():
            parameters = {"softmax_multiclass_param": {"num_class": str(objective.n_outputs)}}
        case Poisson():
            parameters = {"poisson_regression_param": {"max_delta_step": repr(objective.max_delta_step)}}
        case Tweedie():
            power = repr(objective.tweedie_variance_power)
            parameters = {"tweedie_regression_param": {"tweedie_variance_power": power}}
        case PseudoHuber():
            parameters = {"pseudo_huber_param": {"huber_slope": repr(objective.huber_slope)}}
        case Quantile():
            parameters = {"quantile_loss_param": {"quantile_alpha": f"[{objective.quantile_alpha!r}]"}}
        case LambdaMart():
            pairs = {"lambdarank_pair_method": "topk", "lambdarank_num_pair_per_sample": str(PAIRED)}
            parameters = {"lambdarank_param": pairs}
        case Custom(link="log"):
            name, parameters = "count:poisson", {"poisson_regression_param": {"max_delta_step": "0.7"}}
        case Custom():
            name = "reg:squarederror" if objective.link == "identity" else "binary:logistic"
    return {"name": name, **parameters}


def _tree(number: int, tree: Tree, splits: JoinedSplits, n_features: int) -> dict[str, Any]:
    inner = tree.left >= 0
    split = np.where(inner, splits.base[np.maximum(tree.source, 0)] + tree.record, 0)
    parents = np.full(len(tree.left), 2**31 - 1, np.int64)
    parents[tree.left[inner]] = parents[tree.left[inner] + 1] = np.flatnonzero(inner)
    categories: list[int] = []
    segments: list[int] = []
    sizes: list[int] = []
    nodes: list[int] = []
    conditions = tree.value.astype(np.float32)
    split_type = np.zeros(len(tree.left), np.int64)
    for node in np.flatnonzero(inner):
        first, last = splits.category_start[split[node]], splits.category_start[split[node] + 1]
        if first == last:
            conditions[node] = min(splits.threshold[split[node]], _HIGHEST)
            continue
        split_type[node] = 1
        going_right = np.flatnonzero(splits.category_left[first : last - 1] == 0)
        # only missing values go right; XGBoost refuses an empty set, so name a code that never occurs
        if len(going_right) == 0:
            going_right = np.array([last - first - 1])
        segments.append(len(categories))
        sizes.append(len(going_right))
        nodes.append(int(node))
        categories.extend(going_right.tolist())
        conditions[node] = 0.0

    def at(values: NDArray[Any]) -> list[Any]:
        return list(np.where(inner, values, 0).tolist())

    return {
        "id": number,
        "tree_param": {
            "num_nodes": str(len(tree.left)),
            "num_feature": str(n_features),
            "num_deleted": "0",
            "size_leaf_vector": "1",
        },
        "left_children": tree.left.tolist(),
        "right_children": np.where(inner, tree.left + 1, -1).tolist(),
        "parents": parents.tolist(),
        "split_indices": at(splits.feature[split] if len(splits.feature) else split),
        "split_conditions": conditions.tolist(),
        "split_type": split_type.tolist(),
        "default_left": at(splits.missing_left[split] if len(splits.feature) else split),
        "loss_changes": tree.gain.tolist(),
        "sum_hessian": tree.cover.tolist(),
        "base_weights": tree.value.tolist(),
        "categories": categories,
        "categories_nodes": nodes,
        "categories_segments": segments,
        "categories_sizes": sizes,
    }


Kind = Literal["gain", "cover", "count"]


def order_of_first_use(columns: NDArray[np.integer[Any]]) -> Int32s:
    """Renumber the columns of records by where they first occur: 0, then 1, ..., int32 as long as `columns`."""
    _, first, number = np.unique(columns, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int32)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[number]


def pseudonym(party: str, number: int) -> str:
    """Return the pseudonym of the party's column of this number in `order_of_first_use`."""
    return f"{party} #{number + 1}"


def importances(
    parts: Sequence[ModelPart],
    viewer: str,
    kind: Kind = "gain",
    consent: Iterable[str] | None = (),
    *,
    normalised: bool = False,
) -> dict[str, dict[str, float]]:
    """Return each column's importance, by party, from all parties' parts, with the names that `viewer` may see.

    Kinds are the total gain of the splits on a column, the total cover (sum of hess) of their
    nodes, or their count; XGBoost calls these total_gain, total_cover and weight. The viewer and parties that
    `consent` (None: all) have every column, 0.0 without a split; others the columns with splits, by pseudonym.
    `normalised` divides by the sum over all parties. Raises ConfigError for another kind, a name that is no party, or
    covers or gains of a model without them; DataError if the parts are not those of one model, or lack splits.
    """
    if kind not in ("gain", "cover", "count"):
        raise ConfigError(f"expected importance kind 'gain', 'cover' or 'count', got {kind!r}")
    forest = forest_of(parts)
    if kind == "cover":
        check_covers(forest, "importances of this kind")
    if kind == "gain" and not forest.has_gains:
        raise ConfigError("nobody knows the gains of splits under hidden rows: take importances by count")
    known = willing([part.party for part in parts], consent) | willing([part.party for part in parts], [viewer])
    by_name = {part.party: part for part in parts}
    found: dict[str, dict[str, float]] = {}
    for source, party in enumerate(forest.sources):
        part = by_name[party]
        records, amounts = _amounts(forest, source, kind)
        columns = _columns_of(part, records)
        if party in known:
            totals = np.bincount(columns, amounts, len(part.schema.names))
            found[party] = dict(zip(part.schema.names, totals.tolist(), strict=True))
        else:
            totals = np.bincount(order_of_first_use(columns), amounts)
            found[party] = {pseudonym(party, number): total for number, total in enumerate(totals.tolist())}
    whole = sum(sum(of_party.values()) for of_party in found.values()) if normalised else 1.0
    scale = 1.0 / whole if whole > 0.0 else 0.0
    return {party: {name: scale * total for name, total in of_party.items()} for party, of_party in found.items()}


def own_importances(part: ModelPart) -> dict[str, dict[str, float]]:
    """Return the importances of a party's own columns from its part alone, by kind.

    The count of splits, and where the part has the trees, their gain as well.
    """
    names, n_splits = part.schema.names, len(part.splits)
    of_kinds: dict[str, tuple[Int32s, Floats]] = {"count": (np.arange(n_splits, dtype=np.int32), np.ones(n_splits))}
    if part.forest is not None:
        source = part.forest.sources.index(part.party)
        gains = {"gain": _amounts(part.forest, source, "gain")} if part.forest.has_gains else {}
        of_kinds = {**gains, "count": _amounts(part.forest, source, "count")}
    totals = {kind: np.bincount(_columns_of(part, of), size, len(names)) for kind, (of, size) in of_kinds.items()}
    return {kind: dict(zip(names, total.tolist(), strict=True)) for kind, total in totals.items()}


def _amounts(forest: Forest, source: int, kind: Kind) -> tuple[Int32s, Floats]:
    """Return the records of a source that trees use, ascending, and each one's gain, cover or 1."""
    mine = [tree.source == source for tree in forest.trees]
    records = np.concatenate(
        [t.record[at] for t, at in zip(forest.trees, mine, strict=True)] or [np.zeros(0, np.int32)]
    )
    if kind == "count":
        amounts = np.ones(len(records))
    else:
        amounts = np.concatenate([getattr(t, kind)[at] for t, at in zip(forest.trees, mine, strict=True)] or [records])
    # ascending, so that amounts line up with the party's own list of splits
    order = np.argsort(records, kind="stable")
    return records[order], amounts[order].astype(np.float64)


def check_covers(forest: Forest, what: str) -> None:
    """Raise ConfigError for a model without covers."""
    if not forest.covered:
        why = (
            "and a model trained on several participants' rows leaves these out: from them a participant could "
            "reconstruct rows of others. Importances by gain and by count are there"
            if forest.has_gains
            else "which nobody knows under hidden rows. Importances by count are there"
        )
        raise ConfigError(f"{what} are made from covers (how many rows, and how much hess, a node has), {why}")


def _columns_of(part: ModelPart, records: Int32s) -> Int32s:
    if len(records) and records.max() >= len(part.splits):
        raise DataError(
            f"expected {records.max() + 1} splits of {part.party}, got {len(part.splits)}: later ones are lost"
        )
    return np.array(part.splits.feature, np.int32)[records]


def willing(parties: Iterable[str], consent: Iterable[str] | None) -> set[str]:
    """Return the parties that consent (None: all); raise ConfigError for names of others."""
    known = set(parties)
    given = known if consent is None else {consent} if isinstance(consent, str) else set(consent)
    if not given <= known:
        strangers = ", ".join(sorted(map(str, given - known)))
        raise ConfigError(f"expected some of the parties {', '.join(sorted(known))}, got {strangers}")
    return given


def joined_booster(parts: Sequence[ModelPart], consent: Iterable[str] = ()) -> Any:
    """Join the parts of the active party and of those that consent, in any order, into one XGBoost model.

    The `xgboost.Booster` has the columns of the consenting parties side by side, in the order of the training parties,
    with the party's name in front (``"bank.age"``) where the model has several. Raises ConfigError if a party owns
    splits that the trees use, or shares of weights, but does not consent or its part is not here, for a consenting name
    that is no party, or if XGBoost is not installed; DataError if the parts are not those of one model, or lack splits.
    """
    forests = [part.forest for part in parts if part.forest is not None]
    if len(forests) != 1 or len({part.model_id for part in parts}) != 1 or len({p.party for p in parts}) != len(parts):
        raise DataError(f"expected the parts of one model, got {', '.join(part.party for part in parts)}")
    (forest,) = forests
    agreed = willing(forest.sources, consent or ())
    here = {part.party: part for part in parts if part.party in agreed or part.forest is not None}
    used = {party: _amounts(forest, source, "count")[0] for source, party in enumerate(forest.sources)}
    sharing = {part.party for part in parts if part.leaves is not None}
    lacking = [party for party in forest.sources if party not in here and (len(used[party]) or party in sharing)]
    if lacking:
        named = [party for party in forest.sources if party in lacking or party in agreed]
        raise ConfigError(
            f"expected consent and part of {', '.join(lacking)}, whose splits or shares the trees use, got no consent "
            "or part: joining reveals their columns' names, thresholds and categories. Once they have agreed, pass "
            f"consent={named} - at the joined XGBoost model"
        )
    forest = with_weights(forest, list(here.values()))
    if not forest.has_gains:
        warn_user(
            "XGBoost has the same predictions, but importances by gain or cover and contributions of this model would "
            "be made from zeros: under hidden rows nobody knows gains and covers"
        )
    splits, sizes, names = [], [], []
    categories: list[Sequence[Any] | None] = []
    for party in forest.sources:
        if party not in here:
            splits.append(SplitTable())
            sizes.append(0)
            continue
        part = here[party]
        columns = [part.schema.names[feature] for feature in _columns_of(part, used[party])]
        wide = {name for name, of in zip(columns, used[party], strict=True) if np.isfinite(part.splits.threshold[of])}
        wide &= set(part.schema.origins)
        if wide:
            raise ConfigError(
                f"XGBoost rounds numbers to float32, which makes different values of {quoted(sorted(wide))} equal: it "
                "would predict otherwise; subtract an offset from these columns, or divide, and train again"
            )
        splits.append(part.splits)
        sizes.append(len(part.schema.names))
        names += [f"{party}.{name}" if len(forest.sources) > 1 else name for name in part.schema.names]
        categories += part.schema.categories
    return to_booster(forest.trees, join_splits(splits, sizes), forest.objective, names, categories, forest.parallel)


@dataclass(frozen=True, slots=True)
class Contributions:
    """What columns add to rows' margins (TreeSHAP), by party.

    `values` has each party's own columns in the order of its table, float64 (n_rows, n_features), or (n_rows,
    n_outputs, n_features) with several outputs. `bias` (n_outputs,) is what every row starts from; with the values of
    all parties it adds up to the margin.
    """

    values: dict[str, Floats]
    bias: Floats

    def joined(self) -> Floats:
        """Return XGBoost's ``pred_contribs`` of the joined model: all columns side by side, the bias last."""
        columns = list(self.values.values())
        bias = np.broadcast_to(self.bias[:, None] if columns[0].ndim == 3 else self.bias, (*columns[0].shape[:-1], 1))
        return np.concatenate([*columns, bias], axis=-1)


def rows_first(values: Floats) -> Floats:
    """Turn (n_outputs, n_rows, n) into (n_rows, n) for one output, else (n_rows, n_outputs, n), as XGBoost does."""
    return np.ascontiguousarray(values[0] if len(values) == 1 else values.transpose(1, 0, 2))


def explain_pooled(parts: Sequence[ModelPart], tables: Sequence[Table], threads: int = 1) -> Floats:
    """Return TreeSHAP (`trees.shap.contributions`) of complete parts and tables, in the order of the sources.

    Raises ConfigError for a model without covers.
    """
    forest = forest_of(parts)
    check_covers(forest, "contributions")
    splits = join_splits([part.splits for part in parts], [len(part.schema.names) for part in parts])
    decided = [decide(part.splits, table, None, threads) for part, table in zip(parts, tables, strict=True)]
    return contributions(
        forest.trees, splits.base, np.concatenate(decided), splits.feature, n_rows=tables[0].n_rows,
        n_features=sum(len(part.schema.names) for part in parts), n_outputs=forest.objective.n_outputs,
        base_margins=forest.objective.base_margins, threads=threads,
    )  # fmt: skip
