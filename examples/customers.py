"""Made-up customers of a bank and a shop, as CSV files, for the tutorial: ``python customers.py``.

Nobody's data: numbers are drawn. Who defaults follows in part from what the bank has (income, debt, late payments), in
part from what the shop has (returns, invoices paid late). Each has customers that the other lacks, in its own order.

=========================  =================================================================
bank/customers.csv         2,700 customers: ``customer`` (id), seven columns and ``defaulted``
bank/new.csv               900 later customers, without ``defaulted``
bank/later.csv             what became of these: ``customer`` and ``defaulted``
shop/customers.csv         2,700 customers: ``customer`` and five columns
shop/new.csv               900 later ones
=========================  =================================================================
"""

import csv
from pathlib import Path

import numpy as np

N_CUSTOMERS, N_NEW = 3000, 1000
LABEL = "defaulted"


def draw(n_rows, seed):
    """Return the bank's columns, the shop's and who defaulted: two dicts of lists, and a list of 0 and 1."""
    rng = np.random.default_rng(seed)
    trouble = rng.normal(size=n_rows)  # nobody sees it; both sides have traces of it
    income = np.round(np.exp(rng.normal(7.9, 0.4, n_rows) - 0.15 * trouble))
    debt = np.round(income * rng.gamma(2.0, 2.0, n_rows) * np.exp(0.2 * trouble))
    bank = {
        "age": rng.integers(18, 80, n_rows).tolist(),
        "income": [int(each) if known else "" for each, known in zip(income, rng.random(n_rows) > 0.05, strict=True)],
        "debt": debt.astype(int).tolist(),
        "months_known": rng.integers(1, 240, n_rows).tolist(),
        "late_payments": rng.poisson(np.exp(0.5 * trouble - 0.5)).tolist(),
        "cards": rng.integers(0, 5, n_rows).tolist(),
        "housing": rng.choice(["owned", "rented", "with parents"], n_rows, p=[0.4, 0.5, 0.1]).tolist(),
    }
    orders = rng.poisson(12, n_rows) + 1
    shop = {
        "orders": orders.tolist(),
        "basket": np.round(rng.gamma(3.0, 20.0, n_rows), 2).tolist(),
        "returns": rng.binomial(orders, np.clip(0.1 + 0.06 * trouble, 0.01, 0.6)).tolist(),
        "invoices_late": rng.binomial(orders, np.clip(0.12 + 0.1 * trouble, 0.01, 0.8)).tolist(),
        "device": rng.choice(["phone", "desktop"], n_rows).tolist(),
    }
    risk = 1.3 * trouble + 0.25 * np.log1p(debt / income) + 0.2 * rng.normal(size=n_rows) - 2.0
    return bank, shop, (rng.random(n_rows) < 1 / (1 + np.exp(-risk))).astype(int).tolist()


def write(path, ids, rows, columns):
    """Write these rows of columns, with their ids, to a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["customer", *columns])
        writer.writerows([ids[row], *(column[row] for column in columns.values())] for row in rows)
    print(f"{path.as_posix()}: {len(rows):,} rows; customer, {', '.join(columns)}")


def main(folder="."):
    """Write the five files into folders of the two organisations."""
    rng = np.random.default_rng(2)
    for name, first, n_rows in (("customers", 0, N_CUSTOMERS), ("new", N_CUSTOMERS, N_NEW)):
        bank, shop, labels = draw(n_rows, seed=first)
        ids = [100_000 + first + row for row in range(n_rows)]
        has = {party: rng.permutation(n_rows)[: int(0.9 * n_rows)] for party in ("bank", "shop")}
        known = {LABEL: labels} if name == "customers" else {}
        write(Path(folder, "bank", f"{name}.csv"), ids, has["bank"], {**bank, **known})
        write(Path(folder, "shop", f"{name}.csv"), ids, has["shop"], shop)
        if name == "new":
            write(Path(folder, "bank", "later.csv"), ids, has["bank"], {LABEL: labels})


if __name__ == "__main__":
    main()
