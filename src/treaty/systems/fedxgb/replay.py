"""Going on with an interrupted training: finished trees are told again, and edge servers know what they opened.

All roles start anew, with new keys. The server has the model so far, and takes all rows down its trees once more, by
the messages of training without those of sums, so that users have their margins again. What was opened before still
counts: an edge server keeps its domain's cohorts in a file, written before a sum is opened, and chooses later ones
beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from treaty.data.binning import Bins
from treaty.errors import ConfigError
from treaty.files import Format, read_file, write_file
from treaty.systems.fedxgb.cohorts import Cohorts, Rules
from treaty.trees.ensemble import SplitTable, Tree
from treaty.trees.slots import SlotSplits

_FORMAT = Format("cohorts", 1)


class _Kept(msgspec.Struct):
    """What an edge server keeps of its domain: the users of the first sum, independent cohorts, the groups."""

    model_id: str
    users: list[str]
    opened: list[list[str]]
    groups: list[list[str]]


def keep_cohorts(path: Path, owner: str, model_id: str, cohorts: Cohorts) -> None:
    """Write an edge server's file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = _Kept(
        model_id,
        sorted(cohorts.users or ()),
        [sorted(cohort) for cohort in cohorts.opened.independent],
        [sorted(group) for group in cohorts.groups],
    )
    write_file(path, kept, _FORMAT, owner)


def kept_cohorts(path: Path | None, owner: str, model_id: str, rules: Rules, rng: np.random.Generator) -> Cohorts:
    """Return the cohorts of a training that goes on; ConfigError where they are not known."""
    kept = read_file(path, _Kept, _FORMAT, owner) if path is not None and path.exists() else None
    if kept is None or kept.model_id != model_id:
        got = "none" if kept is None else f"those of model {kept.model_id[:8]}"
        raise ConfigError(
            f"cannot resume: expected the cohorts whose sums were opened for model {model_id[:8]}, got {got} - at "
            f"{path or owner}; begin anew: run the job without --resume, or remove the server's checkpoint",
            public="it does not know whose sums were opened before",
        )
    return Cohorts.known(rules, rng, kept.users, kept.opened, kept.groups)


# ---------------------------------------------------------------- finished trees


class ToldTrees(NamedTuple):
    """A round's trees as they are told: splits of each level and tree, and leaf values, float64 (trees, slots)."""

    levels: list[list[SlotSplits]]
    values: NDArray[np.float64]


def told(trees: Sequence[Tree], splits: SplitTable, bins: Bins, full_depth: int | None) -> ToldTrees:
    """Return a round's trees as they were told when they grew, of `full_depth` levels or as many as they have."""
    walked = [_by_level(tree) for tree in trees]
    depth = max(1, *(len(levels) - 1 for levels in walked)) if full_depth is None else full_depth
    told_levels = [
        [_splits_of(tree, levels[k] if k < len(levels) else {}, k, splits, bins)
         for tree, levels in zip(trees, walked, strict=True)]
        for k in range(depth)
    ]  # fmt: skip
    values = np.zeros((len(trees), 1 << depth))
    for of_tree, tree, levels in zip(values, trees, walked, strict=True):
        for k, nodes in enumerate(levels):
            for slot, node in nodes.items():
                if tree.left[node] < 0:
                    of_tree[((slot + 1) << (depth - k)) - 1] = tree.value[node]
    return ToldTrees(told_levels, values)


def _by_level(tree: Tree) -> list[dict[int, int]]:
    """Return each level's nodes by slot."""
    levels = [{0: 0}]
    while True:
        below = {
            2 * slot + side: int(tree.left[node]) + side
            for slot, node in levels[-1].items()
            if tree.left[node] >= 0
            for side in (0, 1)
        }
        if not below:
            return levels
        levels.append(below)


def _splits_of(tree: Tree, nodes: dict[int, int], depth: int, splits: SplitTable, bins: Bins) -> SlotSplits:
    found = SlotSplits(np.full(1 << depth, -1, np.int32), np.zeros((1 << depth, 256), np.bool_))
    for slot, node in nodes.items():
        if tree.left[node] >= 0:
            record = int(tree.record[node])
            found.features[slot] = splits.feature[record]
            found.left_bins[slot] = left_bins(splits, record, bins)
    return found


def left_bins(splits: SplitTable, record: int, bins: Bins) -> NDArray[np.bool_]:
    """Return which bins of its feature a recorded split sends left, bool (256,); see `record_split`."""
    feature, going = splits.feature[record], splits.category_left[record]
    n_bins, cuts, of_category = int(bins.n_bins[feature]), bins.cuts[feature], bins.category_bins[feature]
    left = np.zeros(256, np.bool_)
    if going is not None and of_category is not None:
        left[of_category] = np.frombuffer(going, np.uint8).astype(np.bool_)
    elif cuts is None or np.isinf(splits.threshold[record]):
        left[:n_bins] = True
    else:
        left[: int(np.searchsorted(cuts, np.float32(splits.threshold[record]))) + 1] = True
    left[n_bins] = splits.missing_left[record]
    return left
