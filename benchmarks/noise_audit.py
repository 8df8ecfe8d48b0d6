"""Epsilon of FederBoost by row under noise, audited: a membership attack on trainings with and without one row.

The attacker knows all rows but one (the canary: large values, and the label that does not fit them), the opened sums of
all leaves, and the trees. It adds up the log-likelihood ratio of the sums with the canary and without it, which is the
best test there is of Gaussian noise. From half of the trainings a threshold is chosen. The other half gives the rates
of right and wrong guesses, and Clopper and Pearson's bounds of these a lower bound of epsilon, with 95 % confidence
(Jagielski, Ullman, Oprea, "Auditing Differentially Private Machine Learning", NeurIPS 2020). It has to stay below the
stated epsilon. With a tenth of the noise it has to exceed it, so that the attack can be seen to work. About half an
hour; `--quick`: 40 trainings of each kind.
"""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from sklearn.datasets import load_breast_cancer

from data import arguments, report
from treaty import FederBoostHorizontal, GBDTClassifier
from treaty.data.table import to_table
from treaty.privacy.discrete_gaussian import noise_share
from treaty.runs.warm_up import compile_kernels
from treaty.systems.federboost_horizontal import noisy
from treaty.systems.horizontal import random_trees
from treaty.systems.horizontal.random_trees import LeafShard, RandomTrees
from treaty.trees.splits import SplitRules

DELTA = 1e-5
ROUNDS = {"n_estimators": 20, "num_parallel_tree": 5}


class Seen:
    """What the leader of one training has opened; with the noise that was planned for it."""

    def __init__(self) -> None:
        self.rounds: list[tuple[RandomTrees, NDArray[np.int64], SplitRules]] = []
        self.own: Any = None
        self.noise: Any = None

    def __enter__(self) -> Seen:
        opened, finished = noisy.random_round, noisy._finished

        def note_noise(inputs: Any, collector: Any, steps: Any, own: Any, rules: Any, noise: Any, n_rows: int) -> Any:
            self.own, self.noise = own, noise
            return opened(inputs, collector, steps, own, rules, noise, n_rows)

        def note(own: Any, trees: RandomTrees, sums: NDArray[np.int64], rules: SplitRules) -> Any:
            if own is self.own:
                self.rounds.append((trees, sums, rules))
            return finished(own, trees, sums, rules)

        self._patches = [
            patch("treaty.systems.federboost_horizontal.federboost_horizontal.random_round", note_noise),
            patch.object(noisy, "_finished", note),
        ]
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *error: object) -> None:
        for each in self._patches:
            each.stop()


def score(seen: Seen, x: NDArray[np.float32], y: NDArray[np.float64]) -> float:
    """Return the log-likelihood ratio of what was opened: with the last row, and without it."""
    own, objective = seen.own, seen.own.forest.objective
    shards = []
    for rows in (slice(None, -1), slice(-1, None)):
        codes = own.bins.transform(to_table(x[rows]))
        shards.append(LeafShard(codes, own.bins.offsets, y[rows], None, objective))
    deviation, found = seen.noise.units(objective) * seen.noise.sigma, 0.0
    for trees, sums, rules in seen.rounds:
        others, canary = (shard.leaf_sums(trees, seen.noise.limit(objective)) for shard in shards)
        shift, noise = canary / deviation, (sums - others) / deviation
        found += float((shift * noise).sum() - (shift**2).sum() / 2.0)
        grown = trees.grown(sums, rules, 0)
        for shard in shards:
            shard.add(grown)
    return found


def lower_bound(inside: NDArray[np.float64], outside: NDArray[np.float64], threshold: float) -> float:
    """Return the epsilon that guesses above (or below) a threshold prove, with 95 % confidence."""
    found = 0.0
    for right, wrong in ((inside > threshold, outside > threshold), (outside <= threshold, inside <= threshold)):
        least = stats.beta.ppf(0.025, right.sum(), len(right) - right.sum() + 1) if right.any() else 0.0
        most = stats.beta.ppf(0.975, wrong.sum() + 1, len(wrong) - wrong.sum()) if not wrong.all() else 1.0
        if least > DELTA:
            found = max(found, math.log((least - DELTA) / most))
    return found


def audit(epsilon: float, trainings: int, share: float) -> dict[str, object]:
    """Attack so many trainings with the canary and without it; `share` is that of the planned noise which is drawn."""
    x, y = load_breast_cancer(return_X_y=True)
    x, y = x[:121, :6].astype(np.float32), y[:121].astype(np.float64)
    x[-1], y[-1] = 10.0 * x.max(axis=0), 1.0
    scores: dict[bool, list[float]] = {True: [], False: []}
    for member in (True, False):
        rows = np.arange(len(y) if member else len(y) - 1)
        given = {f"p{k}": (x[rows[k::3]], y[rows[k::3]]) for k in range(3)}
        for _ in range(trainings):
            model = GBDTClassifier(FederBoostHorizontal(epsilon_total=epsilon, delta=DELTA), **ROUNDS, n_jobs=1)
            with (
                Seen() as seen,
                patch.object(random_trees, "noise_share", lambda sigma, honest: noise_share(sigma * share, honest)),
            ):
                model.fit(given)
            scores[member].append(score(seen, x, y))
    inside, outside = (np.array(scores[member]) for member in (True, False))
    half = trainings // 2
    threshold = max(
        np.concatenate([inside[:half], outside[:half]]),
        key=lambda at: lower_bound(inside[:half], outside[:half], float(at)),
    )
    return {
        "epsilon_total": f"{epsilon:g}",
        "delta": f"{DELTA:g}",
        "noise drawn": f"{share:g} of the planned",
        "trainings": 2 * trainings,
        "mean score with": inside.mean(),
        "mean score without": outside.mean(),
        "sd": outside.std(),
        "lower bound of epsilon": lower_bound(inside[half:], outside[half:], float(threshold)),
    }


def main() -> None:
    options = arguments(__doc__).parse_args()
    compile_kernels()
    trainings = 20 if options.quick else 500
    rows = [audit(epsilon, trainings, 1.0) for epsilon in ((4.0,) if options.quick else (1.0, 4.0, 10.0))]
    rows.append(audit(4.0, trainings, 0.1))
    report("noise_audit", rows, quick=options.quick)


if __name__ == "__main__":
    main()
