"""Learning rates of logistic regression: epochs and loss by quasi-Newton and by gradient descent, each at every rate.

For Default of Credit Card Clients, Give Me Some Credit and Adult, batches of 1000 and 3000, the ten kept splits and the
stopping rule of logistic_accuracy.py (80 % train; two epochs' losses within 1e-5; at most 60 epochs). Rates are
constant or, of quasi-Newton steps, divided by 1 + k/8, 1 + k/4 or 1 + k/2 after k epochs. Trained on the pooled table:
parties take the same steps.

Two counts of epochs. "epochs": until training ends, and how far the Taylor loss of the training rows then is from its
optimum, a least-squares solution: a small rate ends early because it moves little. "to the optimum": until that loss is
within 0.001 of the optimum for the first time, which favours no rate for standing still. "undone": epochs whose loss
rose by a tenth, so that the rate was halved. The defaults are read off this table; the last rows, by method, give the
geometric mean of "to the optimum" over data and batches at each rate (a run that does not get there counts as 60).

About half an hour of processor time, a data set with `--data` a third; `--splits` makes it shorter. `--quick`: Default
of Credit Card Clients, one split, half of the rates.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import numpy as np

from data import RESULTS, Data, adult, arguments, default_of_credit_card_clients, give_me_some_credit, report, splits
from logistic_accuracy import METHODS, MOST_EPOCHS, SPLITS, TOL, prepared, taylor
from published import read_rows
from treaty.linear.lbfgs import batch_seed
from treaty.linear.training import FittedWeights, Optimiser, train

RATES = {  # and decays
    "sgd": [(rate, 0.0) for rate in (0.15, 0.3, 0.5, 1.0)],
    "quasi-newton": [(0.05, 0.0), (0.1, 0.0), (0.2, 0.0), (0.1, 1 / 8), (0.2, 1 / 4), (0.2, 1 / 2)],
}
SETS = {"default": default_of_credit_card_clients, "credit": give_me_some_credit, "adult": adult}
NEAR = 0.001


class Settled(Exception):
    """Nothing is left to see: training would have ended, and has been near the optimum."""


def one_run(X: np.ndarray, y: np.ndarray, best: float, seed: int, **given: float) -> list[float]:
    """Return epochs, distance from the optimum at the end, epochs to the optimum, and epochs undone."""
    of_table: list[float] = []
    whole: list[float] = []

    def watch(so_far: FittedWeights) -> None:
        of_table.append(taylor(so_far.weights, X, y) - best)
        whole[:] = so_far.losses
        if np.any(np.abs(np.diff(whole)) < TOL) and min(of_table) <= NEAR:
            raise Settled

    optimiser = Optimiser(tol=0.0, max_iter=MOST_EPOCHS, period=4, seed=batch_seed(seed), **given)
    with suppress(Settled):
        train(X, y, optimiser, on_epoch=watch)
    steady = np.flatnonzero(np.abs(np.diff(whole)) < TOL)  # where training ends with a tolerance
    epochs = int(steady[0]) + 2 if len(steady) else MOST_EPOCHS
    near = np.flatnonzero(np.array(of_table) <= NEAR)
    undone = sum(later > 1.1 * earlier for earlier, later in pairwise(whole[:epochs]))
    return [epochs, of_table[epochs - 1], int(near[0]) + 1 if len(near) else MOST_EPOCHS, undone]


def compare(data: Data, count: int, *, quick: bool) -> list[dict[str, object]]:
    """Return a row per batch size, method and rate."""
    parts = []
    for rows, test in splits(data, count, test_size=0.2):
        X, y = prepared(data, rows, test)[0], 2.0 * data.y[rows] - 1.0
        parts.append((X, y, taylor(np.linalg.lstsq(X / 2, y, rcond=None)[0], X, y)))
    table: list[dict[str, object]] = []
    for batch in (1000, 3000):
        for method, settings in METHODS.items():
            for rate, decay in RATES[method][:: 2 if quick else 1]:
                given = {**settings, "batch_size": batch, "learning_rate": rate, "decay": decay}
                found = [one_run(*part, seed, **given) for seed, part in enumerate(parts)]
                mean = np.mean(found, axis=0)
                table.append(
                    {
                        "data": data.title,
                        "batch": batch,
                        "method": method,
                        "rate": f"{rate:g}" + (f" / (1 + k/{1 / decay:g})" if decay else ""),
                        "splits": count,
                        "epochs": f"{mean[0]:.1f}",
                        "above optimum": f"{mean[1]:.5f}",
                        "to the optimum": f"{mean[2]:.1f}",
                        "undone": f"{mean[3]:.1f}",
                    }
                )
    return table


def overall(table: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return, for each method and rate, geometric means of epochs over data and batches, and the greatest distance.

    A rate that is not there for all data and batches has none.
    """
    rows, settings = [], len({(row["data"], str(row["batch"])) for row in table})
    for method, rate in dict.fromkeys((row["method"], row["rate"]) for row in table):
        of = [row for row in table if (row["method"], row["rate"]) == (method, rate)]
        if len(of) < settings:
            continue
        mean = {
            name: f"{np.exp(np.mean([np.log(float(str(row[name]))) for row in of])):.1f}"
            for name in ("epochs", "to the optimum")
        }
        rows.append(
            {
                "data": "all",
                "batch": "both",
                "method": method,
                "rate": rate,
                "splits": of[0]["splits"],
                **mean,
                "above optimum": max(str(row["above optimum"]) for row in of),
                "undone": f"{sum(float(str(row['undone'])) for row in of):.1f}",
            }
        )
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--data", choices=SETS, help="this data set alone; the others' results are taken from the CSV")
    options = parser.parse_args()
    chosen = ["default"] if options.quick else [options.data] if options.data else [*SETS]
    table = [
        row
        for name in chosen
        for row in compare(SETS[name](), 1 if options.quick else options.splits, quick=options.quick)
    ]
    if options.data:
        kept = read_rows(RESULTS / "logistic_rates.csv")
        table += [row for row in kept if row.pop("machine") and row["data"] not in ("all", table[0]["data"])]
    report("logistic_rates", table + overall(table), quick=options.quick)


if __name__ == "__main__":
    main()
