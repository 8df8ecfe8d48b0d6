"""Learning rates of logistic regression: epochs and loss by quasi-Newton and by gradient descent, each at every rate.

For Default of Credit Card Clients, Give Me Some Credit and Adult, batches of 1000 and 3000, the first two splits and
the stopping rule of logistic_accuracy.py (80 % train; two epochs' losses within 1e-5), at most 60 epochs. Trained on
the pooled table: parties take the same steps.

Two counts of epochs. "epochs": until training ends, and how far the Taylor loss of the training rows then is from its
optimum, a least-squares solution: a small rate ends early because it moves little. "to the optimum": until that loss is
within 0.001 of the optimum for the first time, which favours no rate for standing still. "undone": epochs whose loss
rose by a tenth, so that the rate was halved. The defaults are read off this table; the last rows, by method, give the
geometric mean of "to the optimum" over data and batches at each rate (a run that does not get there counts as 60).

About seven minutes of processor time; `--quick`: Default of Credit Card Clients, one split, three rates.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from data import Data, adult, arguments, default_of_credit_card_clients, give_me_some_credit, report, splits
from logistic_accuracy import METHODS, TOL, prepared, taylor
from treaty.linear.lbfgs import batch_seed
from treaty.linear.training import FittedWeights, Optimiser, train

RATES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)
MOST_EPOCHS, NEAR = 60, 0.001


def one_run(X: np.ndarray, y: np.ndarray, best: float, batch: int, memory: int, rate: float, seed: int) -> list[float]:
    """Return epochs, distance from the optimum at the end, epochs to the optimum, and epochs undone."""
    given = {"memory": memory, "period": 4, "batch_size": batch, "seed": batch_seed(seed), "learning_rate": rate}
    of_table: list[float] = []

    def watch(so_far: FittedWeights) -> None:
        of_table.append(taylor(so_far.weights, X, y) - best)

    whole = train(X, y, Optimiser(tol=0.0, max_iter=MOST_EPOCHS, **given), on_epoch=watch).losses
    steady = np.flatnonzero(np.abs(np.diff(whole)) < TOL)  # where training ends with a tolerance
    epochs = int(steady[0]) + 2 if len(steady) else MOST_EPOCHS
    near = np.flatnonzero(np.array(of_table) <= NEAR)
    undone = sum(later > 1.1 * earlier for earlier, later in pairwise(whole[:epochs]))
    return [epochs, of_table[epochs - 1], int(near[0]) + 1 if len(near) else MOST_EPOCHS, undone]


def compare(data: Data, count: int, rates: tuple[float, ...]) -> list[dict[str, object]]:
    """Return a row per batch size, method and rate."""
    parts = []
    for rows, test in splits(data, count, test_size=0.2):
        X, y = prepared(data, rows, test)[0], 2.0 * data.y[rows] - 1.0
        parts.append((X, y, taylor(np.linalg.lstsq(X / 2, y, rcond=None)[0], X, y)))
    table: list[dict[str, object]] = []
    for batch in (1000, 3000):
        for method, settings in METHODS.items():
            for rate in rates:
                found = [one_run(*part, batch, int(settings["memory"]), rate, seed) for seed, part in enumerate(parts)]
                mean = np.mean(found, axis=0)
                table.append(
                    {
                        "data": data.title,
                        "batch": batch,
                        "method": method,
                        "rate": rate,
                        "splits": count,
                        "epochs": f"{mean[0]:.1f}",
                        "above optimum": f"{mean[1]:.5f}",
                        "to the optimum": f"{mean[2]:.1f}",
                        "undone": f"{mean[3]:.1f}",
                    }
                )
    return table


def overall(table: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return, for each method and rate, geometric means of epochs over data and batches, and the greatest distance."""
    rows = []
    for method, rate in dict.fromkeys((row["method"], row["rate"]) for row in table):
        of = [row for row in table if (row["method"], row["rate"]) == (method, rate)]
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
    options = arguments(__doc__).parse_args()
    sets = [default_of_credit_card_clients()] + ([] if options.quick else [give_me_some_credit(), adult()])
    count, rates = (1, RATES[::3]) if options.quick else (2, RATES)
    table = [row for data in sets for row in compare(data, count, rates)]
    report("logistic_rates", table + overall(table), quick=options.quick)


if __name__ == "__main__":
    main()
