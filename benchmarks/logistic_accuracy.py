"""Logistic regression by quasi-Newton steps and by gradient descent: epochs, loss and AUC beside published ones.

Claims, of Default of Credit Card Clients and of Give Me Some Credit, batches of 1000 and 3000 rows, over the ten kept
splits (80 % train, stratified, seeds 0 to 9): the Taylor loss on training rows, which is what the paper states, ends
within 0.002 of its optimum, a least-squares solution; it and the AUC on test rows are those published (Default: within
0.002 and 0.01; Give Me Some Credit: at most 0.315, at least 0.695); and quasi-Newton training needs fewer epochs than
gradient descent. Both at their default rates (all rates: logistic_rates.py), five pairs, one every four steps, columns
prepared as everywhere (docs/logistic.md); training ends when the losses of two epochs differ by less than 1e-5, after
60 at most, twice the default.

Epochs are counted in two ways. "epochs": as training ends, on the mean loss of an epoch's batches, each at the weights
it was met with: what parties have without another pass over the rows. These means keep trembling by some 1e-5 when
nothing is left to gain, and end training by chance. "epochs (table)": by the loss of all training rows at the epoch's
end, which only a pooled training can look at.

Trained on the pooled table: parties get the same weights. ``--federated`` trains between parties on the same splits,
with a coordinator and as published, and on the first one without a coordinator, and compares epochs and weights (half
an hour; `--quick` with it: Default of Credit Card Clients alone, two splits). scikit-learn's LogisticRegression has the
exact loss on the same columns. About two minutes;
`--quick`: the smaller data set, two splits.

`--starts` (`logistic_starts.csv`): the smaller data set from other start weights than 0, normal ones of deviation 0.1
and 1; three splits.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from itertools import product
from unittest.mock import patch

import numpy as np
from sklearn.linear_model import LogisticRegression as TheirRegression
from sklearn.metrics import log_loss, roc_auc_score

from data import Data, arguments, default_of_credit_card_clients, flat, give_me_some_credit, report, splits, verdict
from treaty import SGD, LogisticRegression, QuasiNewton
from treaty.data.table import to_table
from treaty.linear.lbfgs import Slice, batch_seed
from treaty.linear.preparation import TAYLOR, probabilities
from treaty.linear.training import Optimiser, Solver, train
from treaty.models.linear import preparation_of

Floats = np.ndarray
METHODS = {
    method.system: {"memory": memory, "learning_rate": method.first_rate, "decay": method.decay}
    for method, memory in ((SGD, 0), (QuasiNewton, 5))
}
TOL, MOST_EPOCHS, SPLITS = 1e-5, 60, 10
STARTS = (0.0, 0.1, 1.0)
FORMS = {
    "safe": {},
    "safe, no coordinator": {"coordinator": False},
    "paper": {"mode": "paper", "allow_insecure": True, "insecure_test_key_bits": 192},
}
ALONE = "safe, no coordinator"
PUBLISHED = {  # epochs, loss, AUC: Yang et al. 2019, whose "Credit 1" is Default of Credit Card Clients
    ("Default of Credit Card Clients", 1000, "sgd"): (12, 0.496218, 0.7224),
    ("Default of Credit Card Clients", 1000, "quasi-newton"): (3, 0.496600, 0.7222),
    ("Default of Credit Card Clients", 3000, "sgd"): (18, 0.496194, 0.7219),
    ("Default of Credit Card Clients", 3000, "quasi-newton"): (12, 0.496317, 0.7225),
    ("Give Me Some Credit", 1000, "sgd"): (12, 0.314555, 0.7033),
    ("Give Me Some Credit", 1000, "quasi-newton"): (4, 0.314643, 0.7061),
    ("Give Me Some Credit", 3000, "sgd"): (14, 0.314648, 0.6982),
    ("Give Me Some Credit", 3000, "quasi-newton"): (6, 0.314490, 0.7077),
}


def prepared(data: Data, rows: np.ndarray, test: np.ndarray) -> tuple[Floats, Floats]:
    """Return the columns of training and test rows, with one of ones."""
    table, held = to_table(data.x[rows]), to_table(data.x[test])
    made = preparation_of(table)
    return tuple(np.column_stack([made.matrix(t.columns, t.n_rows), np.ones(t.n_rows)]) for t in (table, held))


def taylor(weights: Floats, X: Floats, y: Floats) -> float:
    return float(np.mean(TAYLOR.values(X @ weights, y)))


def steady(losses: list[float]) -> int:
    """Return after how many epochs two losses differ by less than the tolerance."""
    near = np.flatnonzero(np.abs(np.diff(losses)) < TOL)
    return int(near[0]) + 2 if len(near) else len(losses)


def one_split(X: Floats, y: Floats, X_test: Floats, y_test: Floats, batch: int, method: str, seed: int) -> list[float]:
    """Return epochs in two ways, and training loss, its distance from the optimum, test loss, AUC, logistic loss."""
    of_table: list[float] = []
    settings = {"period": 4, "batch_size": batch, "max_iter": MOST_EPOCHS, "seed": batch_seed(seed), **METHODS[method]}
    whole, stopping = Optimiser(tol=0.0, **settings), Optimiser(tol=TOL, **settings)
    train(X, y, whole, on_epoch=lambda so_far: of_table.append(taylor(so_far.weights, X, y)))
    fitted = train(X, y, stopping)
    best = np.linalg.lstsq(X / 2, y, rcond=None)[0]
    margins = X_test @ fitted.weights
    loss = taylor(fitted.weights, X, y)
    return [
        len(fitted.losses), steady(of_table), loss, loss - taylor(best, X, y), taylor(fitted.weights, X_test, y_test),
        roc_auc_score(y_test, margins), log_loss(y_test, probabilities(margins)),
    ]  # fmt: skip


def yardsticks(X: Floats, y: Floats, X_test: Floats, y_test: Floats) -> list[float]:
    """Return loss and AUC on test rows of the least-squares optimum, and scikit-learn's logistic loss and AUC."""
    best = np.linalg.lstsq(X / 2, y, rcond=None)[0]
    theirs = TheirRegression(C=np.inf, max_iter=1000).fit(X[:, :-1], y)
    of_rows = theirs.decision_function(X_test[:, :-1])
    return [
        taylor(best, X_test, y_test), roc_auc_score(y_test, X_test @ best),
        log_loss(y_test, probabilities(of_rows)), roc_auc_score(y_test, of_rows),
    ]  # fmt: skip


def shown(values: Floats, digits: int) -> str:
    """Write a mean and, in brackets, a standard deviation."""
    spread = values.std(ddof=1) if len(values) > 1 else 0.0
    return f"{values.mean():.{digits}f} ({spread:.{digits}f})"


def compare(data: Data, count: int) -> list[dict[str, object]]:
    """Return a row per batch size and method."""
    parts, rulers = [], []
    for rows, test in splits(data, count, test_size=0.2):
        X, X_test = prepared(data, rows, test)
        parts.append((X, 2.0 * data.y[rows] - 1.0, X_test, 2.0 * data.y[test] - 1.0))
        rulers.append(yardsticks(*parts[-1]))
    ruler = np.array(rulers)
    default = data.title.startswith("Default")
    table: list[dict[str, object]] = []
    for batch in (1000, 3000):
        found = {
            method: np.array([one_split(*part, batch, method, seed) for seed, part in enumerate(parts)])
            for method in METHODS
        }
        for method, values in found.items():
            epochs, loss, auc = PUBLISHED[data.title, batch, method]
            mean = values.mean(axis=0)
            reached = (
                abs(mean[2] - loss) <= 0.002 and abs(mean[5] - auc) <= 0.01
                if default
                else mean[2] <= 0.315 and mean[5] >= 0.695
            )
            fewer = found["quasi-newton"][:, :2].mean(axis=0) < found["sgd"][:, :2].mean(axis=0)
            table.append(
                {
                    "data": data.title,
                    "batch": batch,
                    "method": method,
                    "splits": count,
                    "epochs": shown(values[:, 0], 1),
                    "epochs (table)": shown(values[:, 1], 1),
                    "published epochs": epochs,
                    "fewer than sgd": ""
                    if method == "sgd"
                    else " and ".join("yes" if less else "NO" for less in fewer),
                    "loss": shown(values[:, 2], 5),
                    "above optimum": f"{mean[3]:.5f}",
                    "<= 0.002": verdict(mean[3], 0.002),
                    "test loss": shown(values[:, 4], 5),
                    "optimum's": f"{ruler[:, 0].mean():.5f}",
                    "published loss": loss,
                    "test AUC": shown(values[:, 5], 4),
                    "optimum's AUC": shown(ruler[:, 1], 4),
                    "published AUC": auc,
                    "as published": "kept" if reached else "missed",
                    "logistic loss": f"{mean[6]:.4f}",
                    "scikit-learn's": f"{ruler[:, 2].mean():.4f}",
                    "scikit-learn's AUC": shown(ruler[:, 3], 4),
                }
            )
    return table


def started(deviation: float) -> AbstractContextManager[object]:
    """Have weights start at normal numbers of this deviation."""
    rng, plain = np.random.default_rng(0), Solver.slice

    def begun(solver: Solver, n_columns: int, **given: bool) -> Slice:
        made = plain(solver, n_columns, **given)
        made.weights[:] = rng.normal(scale=deviation, size=n_columns)
        return made

    return patch.object(Solver, "slice", begun)


def from_starts(data: Data, count: int) -> list[dict[str, object]]:
    """Return a row per batch size, method and deviation of normal start weights."""
    parts = []
    for rows, test in splits(data, count, test_size=0.2):
        X, X_test = prepared(data, rows, test)
        parts.append((X, 2.0 * data.y[rows] - 1.0, X_test, 2.0 * data.y[test] - 1.0))
    table: list[dict[str, object]] = []
    for batch, method, deviation in product((1000, 3000), METHODS, STARTS):
        with started(deviation):
            values = np.array([one_split(*part, batch, method, seed) for seed, part in enumerate(parts)])
        table.append(
            {
                "data": data.title,
                "batch": batch,
                "method": method,
                "deviation": f"{deviation:g}",
                "splits": count,
                "epochs": shown(values[:, 0], 1),
                "loss": shown(values[:, 2], 5),
                "test AUC": shown(values[:, 5], 4),
            }
        )
    return table


def between_parties(data: Data, count: int) -> list[dict[str, object]]:
    """Train between two parties, as parties do by default, with no coordinator (first split) and as published.

    Options of the methods are at their defaults, so training ends after 30 epochs at most. As published with keys of
    192 bits: weights do not depend on them, and with long ones an epoch takes minutes.
    """
    x, middle = data.x, data.x.shape[1] // 2
    cuts = [
        tuple(({"active": x[rows][:, :middle], "passive": x[rows][:, middle:]}, data.y[rows]) for rows in split)
        for split in splits(data, count, test_size=0.2)
    ]
    table: list[dict[str, object]] = []
    for batch, method in product((1000, 3000), METHODS):
        common = {"batch_size": batch}
        pooled = [
            flat(LogisticRegression, solver=method, random_state=seed, **common).fit(*given)
            for seed, (given, _) in enumerate(cuts)
        ]
        for name, form in FORMS.items():
            found, furthest, same = [], 0.0, True
            for seed, (alone, (given, (tables, y))) in enumerate(
                zip(pooled, cuts[: 1 if name == ALONE else count], strict=False)
            ):
                apart = flat(LogisticRegression, method, random_state=seed, **common, **form).fit(*given)
                gaps = [
                    np.abs(apart.standardized_coef_[party] - alone.standardized_coef_[party]).max() for party in tables
                ]
                furthest, same = max(furthest, *gaps), same and apart.n_iter_ == alone.n_iter_
                margins = apart.decision_function(tables)
                found.append([
                    apart.n_iter_, np.mean(TAYLOR.values(margins, 2.0 * y - 1.0)), roc_auc_score(y, margins),
                    sum(pair["bytes"] for pair in apart.communication_.values()) / 1e6,
                ])  # fmt: skip
            values = np.array(found)
            epochs, loss, auc = PUBLISHED[data.title, batch, method]
            table.append(
                {
                    "data": data.title,
                    "batch": batch,
                    "method": method,
                    "form": name,
                    "cipher": apart.parts_["active"].encryption,
                    "splits": len(found),
                    "epochs": shown(values[:, 0], 1),
                    "as pooled": "yes" if same else "NO",
                    "published epochs": epochs,
                    "test loss": shown(values[:, 1], 5),
                    "published loss": loss,
                    "test AUC": shown(values[:, 2], 4),
                    "published AUC": auc,
                    "weights apart": furthest,
                    "<= 1e-6": verdict(furthest, 1e-6),
                    "MB a fit": values[:, 3].mean(),
                }
            )
    return table


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--federated", action="store_true", help="train between parties")
    parser.add_argument("--starts", action="store_true", help="train from other start weights than 0")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*rows have a margin beyond 4")
    warnings.filterwarnings("ignore", message="training ended after max_iter")
    sets = [default_of_credit_card_clients()] + ([] if options.quick else [give_me_some_credit()])
    count = 2 if options.quick else SPLITS
    if options.federated:
        report(
            "logistic_federated", [row for data in sets for row in between_parties(data, min(count, 5))],
            quick=options.quick,
        )  # fmt: skip
    elif options.starts:
        report("logistic_starts", from_starts(sets[0], min(count, 3)), quick=options.quick)
    else:
        report("logistic_accuracy", [row for data in sets for row in compare(data, count)], quick=options.quick)


if __name__ == "__main__":
    main()
