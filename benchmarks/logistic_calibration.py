"""Probabilities of logistic regression: their mean beside the rate of the labels, without and with calibration.

Claim, of Adult, Give Me Some Credit and Default of Credit Card Clients, pooled and between two parties (each has half
of the columns), by quasi-Newton and by gradient descent, all options left at their defaults, on test rows of fixed
splits (80 % train, stratified): calibrated, the mean probability is within 0.01 of the rate. Beside it the logistic
loss (mean over test rows), and that of scikit-learn's LogisticRegression without penalty on the same prepared columns.

Five splits pooled, the first one between parties. A few minutes; `--quick`: the first split alone, quasi-Newton alone.
"""

from __future__ import annotations

import warnings

import numpy as np
from sklearn.linear_model import LogisticRegression as TheirRegression
from sklearn.metrics import log_loss

from data import (
    Data,
    adult,
    arguments,
    default_of_credit_card_clients,
    flat,
    give_me_some_credit,
    report,
    splits,
    verdict,
)
from treaty import LogisticRegression
from treaty.data.table import to_table
from treaty.linear.preparation import probabilities
from treaty.models.linear import preparation_of


def scikit_learns(data: Data, rows: np.ndarray, test: np.ndarray) -> tuple[float, float]:
    """Return the mean probability and logistic loss of scikit-learn's model on the same prepared columns."""
    table, held = to_table(data.x[rows]), to_table(data.x[test])
    made = preparation_of(table)
    X, X_test = (made.matrix(of.columns, of.n_rows) for of in (table, held))
    p = TheirRegression(C=np.inf, max_iter=1000).fit(X, data.y[rows]).predict_proba(X_test)[:, 1]
    return float(p.mean()), float(log_loss(data.y[test], p))


def one_fit(data: Data, rows: np.ndarray, test: np.ndarray, method: str, form: str, seed: int) -> list[float]:
    """Return the rate, then without and with calibration the mean probability's distance from it and logistic loss."""
    half = data.x.shape[1] // 2
    train, held = ({"active": data.x[of][:, :half], "passive": data.x[of][:, half:]} for of in (rows, test))
    given = {"protocol": "pooled", "solver": method} if form == "pooled" else {"protocol": method}
    model = flat(LogisticRegression, random_state=seed, **given).fit(train, data.y[rows])
    log_odds, rate = model.decision_function(held), float(data.y[test].mean())
    found = [rate]
    made = model.calibration_
    for p in (probabilities((log_odds - made.offset) / made.slope), probabilities(log_odds)):
        found += [float(p.mean()) - rate, float(log_loss(data.y[test], p))]
    return found


def compare(data: Data, count: int, methods: list[str]) -> list[dict[str, object]]:
    drawn = splits(data, count, test_size=0.2)
    theirs = np.mean([scikit_learns(data, *split) for split in drawn], axis=0)
    table: list[dict[str, object]] = []
    for method in methods:
        for form, used in (("pooled", drawn), ("between parties", drawn[:1])):
            found = np.array([one_fit(data, *split, method, form, seed) for seed, split in enumerate(used)])
            mean, worst = found.mean(axis=0), float(np.abs(found[:, 3]).max())
            table.append(
                {
                    "data": data.title,
                    "method": method,
                    "form": form,
                    "splits": len(used),
                    "rate": f"{mean[0]:.4f}",
                    "mean p, uncalibrated": f"{mean[0] + mean[1]:.4f}",
                    "mean p": f"{mean[0] + mean[3]:.4f}",
                    "furthest from rate": f"{worst:.4f}",
                    "<= 0.01": verdict(worst, 0.01),
                    "logistic loss, uncalibrated": f"{mean[2]:.4f}",
                    "logistic loss": f"{mean[4]:.4f}",
                    "scikit-learn's mean p": f"{theirs[0]:.4f}",
                    "scikit-learn's loss": f"{theirs[1]:.4f}",
                }
            )
    return table


def main() -> None:
    options = arguments(__doc__).parse_args()
    warnings.filterwarnings("ignore", message=".*rows have a margin beyond 4")
    warnings.filterwarnings("ignore", message="training ended after max_iter")
    sets = [adult(), give_me_some_credit(), default_of_credit_card_clients()]
    count, methods = (1, ["quasi-newton"]) if options.quick else (5, ["quasi-newton", "sgd"])
    report("logistic_calibration", [row for data in sets for row in compare(data, count, methods)], quick=options.quick)


if __name__ == "__main__":
    main()
