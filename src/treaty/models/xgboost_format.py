"""Write trees as an XGBoost model (its JSON format, read by XGBoost 3)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.errors import ConfigError
from treaty.trees.ensemble import JoinedSplits, Tree
from treaty.trees.losses.fixed_point import Softmax
from treaty.trees.objectives import Objective

_HIGHEST = float(np.finfo(np.float32).max)  # stands for "every present value goes left": JSON has no infinity


def to_booster(
    trees: Sequence[Tree],
    splits: JoinedSplits,
    objective: Objective,
    feature_names: Sequence[str],
    categories: Sequence[Sequence[str | int | float | bool] | None],
) -> Any:
    """Build an `xgboost.Booster` that predicts the same margins (to float32).

    `splits`, `feature_names` and `categories` (None for numeric columns) are of the joined table. The booster knows
    categories by their codes alone: columns must come with the categories of training, in that order
    (``pandas.Categorical(values, categories=...)``); ``json.loads(booster.attr("categories"))`` has them by column.
    Margins that classes start from are in the leaves of the first round's trees. XGBoost sends codes it has never seen
    left, so predictions may differ on those alone. Raises ConfigError if XGBoost is not installed, or a column name has
    a character that XGBoost forbids.
    """
    try:
        import xgboost
    except ImportError as error:
        raise ConfigError("to_xgboost() needs XGBoost: pip install 'treaty-learn[xgboost]'") from error
    unusable = [name for name in feature_names if any(mark in name for mark in "[]<")]
    if unusable:
        raise ConfigError(f"XGBoost allows no '[', ']' or '<' in column names; rename {', '.join(unusable)}")
    n_features = len(feature_names)
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
                    "gbtree_model_param": {"num_trees": str(len(trees)), "num_parallel_tree": "1"},
                    "tree_info": [i % objective.n_outputs for i in range(len(trees))],
                    "iteration_indptr": list(range(0, len(trees) + 1, objective.n_outputs)),
                    "trees": [
                        _tree(number, tree, splits, n_features)
                        for number, tree in enumerate(_with_class_scores(trees, objective))
                    ],
                },
            },
            "learner_model_param": {
                "base_score": repr(objective.base_score),
                "num_class": str(objective.n_classes),
                "num_feature": str(n_features),
                "num_target": "1",
                "boost_from_average": "0",
            },
            "objective": {
                "name": objective.xgboost_name,
                **objective.xgboost_parameters,
            },
        },
    }
    booster = xgboost.Booster()
    # XGBoost does not decode \u escapes
    booster.load_model(bytearray(json.dumps(model, ensure_ascii=False).encode()))
    return booster


def _with_class_scores(trees: Sequence[Tree], objective: Objective) -> list[Tree]:
    """Add the margins that classes start from to the first round's leaves: XGBoost before 3.1 has one for all."""
    scores = objective.class_scores if isinstance(objective, Softmax) else ()
    first = [replace(tree, value=tree.value + score) for tree, score in zip(trees, scores, strict=False)]
    return [*first, *trees[len(first) :]]


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
        if len(going_right) == 0:  # only missing goes right; XGBoost refuses an empty set, so name a code never seen
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
