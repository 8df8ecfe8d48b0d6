"""FederBoost by row under noise, where each round sums a random sample of the rows: AUC at the same epsilon.

Before each round every participant draws its own rows, each with probability q, and shows nobody which. It multiplies
its sums by 1/q. A row that is seldom in a sum pays less for it (privacy amplification), so that the noise on one sum
may be smaller; noise and sums are multiplied alike. Only the sample and the deviation of the noise on leaves differ
from `FederBoostHorizontal(epsilon_total=...)`. q = 1 is Treaty as it is.

**Accounting.** The Rényi divergence of a round, at integer orders, is that of the sampled Gaussian (Mironov, Talwar,
Zhang, arXiv 1908.10530). It holds for discrete noise, too: (1 - q + q L)^a has only whole powers k of the likelihood
ratio L, and L^k shifts the noise by k times the row's vector. That vector has integers, so that the mean is the
continuous Gaussian's. Their bound on the other direction needs a reflection that swaps noise with and without the row,
and integers have it. With 2^16 steps to a unit, a sum of shares differs from a discrete Gaussian by less than floats
can show. Rounds, and the search for bins without a sample, add up at each order, and become epsilon and delta as in
`epsilon_of`.

A sample has to be secret from all others, the leader included. Five splits; ten of SUSY, with three trainings on each,
as AUC varies most on the smallest table. About 15 minutes; `--quick`: two splits of SUSY.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

import dp_accounting
import numpy as np
from dp_accounting import rdp

from data import Data, arguments, default_of_credit_card_clients, flat, give_me_some_credit, report, splits, susy
from federboost_horizontal import DELTA, PROTOCOL, THREADS, at_random, auc, spread
from treaty import GBDTClassifier
from treaty.privacy.discrete_gaussian import Releases, rho_for
from treaty.runs.warm_up import compile_kernels
from treaty.systems.horizontal.random_trees import NOISY_PARALLEL, NOISY_TREES, LeafNoise, RandomTrees
from treaty.systems.horizontal.sum_noise import OF_OPENING, OF_SEARCH

ROUNDS, _, RATE = NOISY_TREES
# one in so many rows is in a round's sums, rounds; steps are as long in all
VARIANTS = ((1, ROUNDS), (2, ROUNDS), (4, ROUNDS), (10, ROUNDS), (1, 4 * ROUNDS), (10, 4 * ROUNDS))
ORDERS = [*range(2, 64), *range(64, 256, 2), *range(256, 1025, 8)]


@cache
def times_the_noise(epsilon: float, one_in: int, rounds: int) -> float:
    """Return the least deviation of the noise on multiplied sums, over that of as many rounds with all rows."""
    rho = rho_for(epsilon, DELTA)
    of_bins = dp_accounting.ZCDpEvent((OF_OPENING + OF_SEARCH) * rho)
    # of one round with all rows, in norms of a row
    full = math.sqrt(rounds / (2.0 * (1.0 - OF_OPENING - OF_SEARCH) * rho))
    if one_in == 1:
        return 1.0

    def spent(sigma: float) -> float:
        noisy = dp_accounting.PoissonSampledDpEvent(1.0 / one_in, dp_accounting.GaussianDpEvent(sigma))
        accountant = rdp.RdpAccountant(ORDERS, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        return float(accountant.compose(noisy, rounds).compose(of_bins).get_epsilon(DELTA))

    low, high = 0.1, 10.0 * full
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
    return high * one_in / full


@contextmanager
def sampled(one_in: int, factor: float) -> Iterator[None]:
    """Let each participant sum a sample of its rows, multiplied, under `factor` times the noise."""
    sums, planned = RandomTrees.sums, LeafNoise.releases

    def of_sample(self: RandomTrees, columns: Any, grad: Any, hess: Any) -> Any:
        # seeded by the operating system, anew for each round
        drawn = one_in * (np.random.default_rng().integers(one_in, size=grad.shape[1]) == 0)
        return sums(self, columns, grad * drawn, hess * drawn)

    def with_factor(self: LeafNoise, *given: Any) -> Releases:
        found = planned(self, *given)
        return replace(found, sigma=found.sigma * factor)

    with patch.object(RandomTrees, "sums", of_sample), patch.object(LeafNoise, "releases", with_factor):
        yield


def measured(data: Data, epsilons: Sequence[float], seeds: int, draws: int = 1) -> list[dict[str, object]]:
    """Return a row for each epsilon and variant: AUC between three participants, of `draws` trainings on each split."""
    x, y, rows = data.x.astype(np.float32), data.y, []
    for epsilon in epsilons:
        found: dict[tuple[int, int], list[float]] = {}
        for one_in, rounds in VARIANTS:
            factor, aucs = times_the_noise(epsilon, one_in, rounds), found.setdefault((one_in, rounds), [])
            make = partial(flat, GBDTClassifier, PROTOCOL, n_jobs=THREADS, epsilon_total=epsilon, delta=DELTA)
            for seed, (train, test) in enumerate(draws * splits(data, seeds)):
                model = make(
                    n_estimators=rounds, num_parallel_tree=NOISY_PARALLEL, learning_rate=RATE * ROUNDS / rounds,
                    random_state=seed,
                )  # fmt: skip
                with sampled(one_in, factor):
                    model.fit(at_random(x[train], y[train], 3, seed))
                aucs.append(auc(model, x[test], y[test]))
            more = [a - b for a, b in zip(aucs, found[1, ROUNDS], strict=True)]
            rows.append({
                "data": data.title,
                "rows": len(train),
                "trainings": len(aucs),
                "epsilon_total": f"{epsilon:g}",
                "q": f"{1 / one_in:g}",
                "rounds": rounds,
                "noise, times that of all rows": factor,
                "AUC": spread(aucs)[0],
                "sd": spread(aucs)[1],
                "more than all rows": f"{mean(more):+.4f}",
                "sd of that": f"{stdev(more):.4f}",
            })  # fmt: skip
    return rows


def main() -> None:
    quick = arguments(__doc__).parse_args().quick
    compile_kernels()
    epsilons = (0.5, 1.0, 4.0)
    rows = measured(susy(), (1.0,), 2) if quick else measured(susy(), epsilons, 10, 3)
    if not quick:
        for load in (default_of_credit_card_clients, give_me_some_credit):
            rows += measured(load(), epsilons, 5)
    report("noisy_samples", rows, quick=quick)


if __name__ == "__main__":
    main()
