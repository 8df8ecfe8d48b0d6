"""What a passive party of a logistic regression learns of labels from sums over batches, in three attacks.

*Rows that stand alone*: by least squares over a batch's gradient a passive party reads the labels of rows whose
leverage in the batch is high. It knows the share of positive labels, and takes each row's residual to be what the sums
say in proportion to its leverage. One epoch of gradient descent at rate 0.05, batches of 1000; real tables.
*Lattice reduction*: in the first batch margins are 0, so X^T y is a sum of whole numbers, and the labels a short vector
of a lattice. LLL, then BKZ with blocks of 10, 20, 30 and 40, until the labels are found or the time is over. It needs
`fpylll` (no dependency of the project) and is left out where that is missing.
*Stacking*: least squares over all batches of 5, 30 and 60 epochs, one partition into batches or a fresh one each.

Writes `logistic_attacks_alone.csv`, `logistic_attacks_lattice.csv` and `logistic_attacks_stacking.csv`. Twenty minutes;
`--quick` one.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from numpy.typing import NDArray

from data import ROOT, Data, adult, arguments, default_of_credit_card_clients, give_me_some_credit, report
from treaty.data.table import to_table
from treaty.linear.lbfgs import batch_seed, partition
from treaty.models.linear import preparation_of
from treaty.systems.logistic.setup import fixed_columns

sys.path.insert(0, str(ROOT / "tests"))  # what the tests show in small
from systems.logistic.test_attacks import stacked_auc

BATCH, RATE, ALONE = 1000, 0.05, (1 / 3, 0.9)
LATTICES = [(4, 40), (6, 60), (10, 100), (1, 30), (2, 50), (3, 60), (4, 80), (2, 60)]  # columns, rows
BLOCKS = (10, 20, 30, 40)


def main() -> None:
    """Run the attacks that the arguments name."""
    quick = arguments(__doc__).parse_args().quick
    report("logistic_attacks_alone", [row for case in cases() for row in stand_alone(*case)], quick=quick)
    report("logistic_attacks_stacking", stacking((5, 30) if quick else (5, 30, 60)), quick=quick)
    if (rows := lattices(LATTICES[:2] if quick else LATTICES, 20.0 if quick else 200.0)) is not None:
        report("logistic_attacks_lattice", rows, quick=quick)


# ---------------------------------------------------------------- rows that stand alone


def cases() -> list[tuple[Data, str, NDArray[np.intp]]]:
    """Return data sets and the columns of the passive party."""
    credit, clients = give_me_some_credit(), default_of_credit_card_clients()
    categories = np.r_[18:34, 46:60, 82:123]
    return [
        (adult(), "education, occupation, country (71)", categories),
        (credit, "first five", np.arange(5)),
        (credit, "last five", np.arange(5, 10)),
        (clients, "last twelve", np.arange(11, 23)),
    ]


def prepared(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return columns as training takes them: filled, standardised, cut to their fixed point."""
    table = to_table(x)
    return fixed_columns(preparation_of(table).matrix(table.columns, table.n_rows)) * 2.0**-24


def stand_alone(data: Data, whose: str, columns: NDArray[np.intp]) -> list[dict[str, object]]:
    """Return, for each least leverage, how many rows have more and of how many the label was found."""
    own, others = prepared(data.x[:, columns]), prepared(np.delete(data.x, columns, axis=1))
    y = np.where(data.y > 0, 1.0, -1.0)
    n_rows = len(y) // BATCH * BATCH
    expected = 0.5 - np.mean(data.y)  # of a residual at margin 0: -1/2 where the label is 1, 1/2 where it is 0
    everything = np.hstack([own, others, np.ones((len(y), 1))])
    weights = np.zeros(everything.shape[1])
    found: dict[float, list[NDArray[np.float64]]] = {least: [] for least in ALONE}
    for rows in partition(len(y), BATCH, batch_seed(0)):
        residual = everything[rows] @ weights / 4 - y[rows] / 2
        basis, sizes, _ = np.linalg.svd(np.hstack([own[rows], np.ones((len(rows), 1))]), full_matrices=False)
        basis = basis[:, sizes > 1e-9 * sizes[0]]
        leverage = (basis**2).sum(axis=1)
        guess = basis @ (basis.T @ (residual - expected)) / np.maximum(leverage, 1e-9) + expected
        for least, rows_found in found.items():
            of = leverage > least
            rows_found.append(np.column_stack([y[rows][of], np.where(guess[of] < 0, 1.0, -1.0)]))
        weights -= RATE * everything[rows].T @ residual / len(rows)
    table = []
    for least, rows_found in found.items():
        labels, guesses = np.concatenate(rows_found).T
        right, positive = labels == guesses, labels > 0
        table.append(
            {
                "data": data.title, "columns": whose, "rows": n_rows, "leverage above": round(least, 2),
                "rows above": len(labels), "labels found": int(right.sum()), "positive": int(positive.sum()),
                "positive found": int((right & positive).sum()),
            }
        )  # fmt: skip
    return table


# ---------------------------------------------------------------- lattice reduction


def lattices(settings: list[tuple[int, int]], seconds: float) -> list[dict[str, object]] | None:
    """Return what lattice reduction found in about so many seconds of one core each; None without fpylll."""
    try:
        from fpylll import BKZ, LLL, IntegerMatrix
    except ImportError:
        print("left out: lattice reduction, for fpylll is not installed")
        return None
    table = []
    for n_columns, n_rows in settings:
        rng = np.random.default_rng(0)
        X, y = fixed_columns(rng.standard_normal((n_rows, n_columns))), np.where(rng.random(n_rows) < 0.4, 1, -1)
        # combinations of (e_i | X_i) and (1 | -X^T y) that have zeros at the end, and -1 or 1 before
        right = np.vstack([X, -(X.T @ y)]).astype(object) << 12
        basis = IntegerMatrix.from_matrix(np.hstack([np.eye(n_rows + 1, dtype=object), right]).astype(object).tolist())
        began, how = time.process_time(), "LLL"
        LLL.reduction(basis)
        correct = in_basis(basis, y)
        for block in BLOCKS:
            left = seconds - (time.process_time() - began)
            if correct == n_rows or left <= 0:
                break
            how = f"BKZ-{block}"
            BKZ.reduction(basis, BKZ.Param(block, max_time=left, flags=BKZ.MAX_TIME))
            correct = in_basis(basis, y)
        table.append(
            {
                "columns": n_columns, "rows": n_rows, "rows per column": n_rows // n_columns, "labels found": correct,
                "by": how if correct else f"not, up to {how}", "seconds": time.process_time() - began,
            }
        )  # fmt: skip
        print(table[-1])
    return table


def in_basis(basis: object, y: NDArray[np.int64]) -> int:
    """Return how many labels a vector of the basis has that can be the labels: all, or none."""
    for row in basis:  # type: ignore[attr-defined]
        values = np.array(list(row), dtype=object)
        ahead, behind = values[: len(y) + 1], values[len(y) + 1 :]
        if not behind.any() and all(abs(value) == 1 for value in ahead):
            return len(y) if np.array_equal(ahead[:-1] * ahead[-1], y) else 0
    return 0


# ---------------------------------------------------------------- stacking


def stacking(lengths: tuple[int, ...]) -> list[dict[str, object]]:
    """Return the AUC for labels after so many epochs, with one partition and with fresh ones."""
    return [
        {
            "epochs": epochs,
            **{name: stacked_auc(epochs, fresh=fresh) for name, fresh in (("one", False), ("fresh", True))},
        }
        for epochs in lengths
    ]


if __name__ == "__main__":
    main()
