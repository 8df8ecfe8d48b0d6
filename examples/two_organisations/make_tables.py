"""Make an organisation's small tables for the tutorial: ``python make_tables.py bank``, or ``shop``.

The numbers are scikit-learn's breast-cancer data, which stand in for those of customers: 569 rows of 30 columns. The
bank gets the label and ten columns, the shop the other twenty. Each lacks some customers of the other, and has them in
an order of its own. ``customers.csv`` is for training; ``new.csv`` has new ones, without labels, and ``row.json`` one
of these as `treaty serve` is asked for it.
"""

import csv
import json
import sys

import numpy as np
from sklearn.datasets import load_breast_cancer

OWN = {"bank": slice(0, 10), "shop": slice(10, 30)}
N_ROWS, N_NEW = 569, 100
FILES = {"customers.csv": range(N_ROWS - N_NEW), "new.csv": range(N_ROWS - N_NEW, N_ROWS)}


def main(name: str) -> None:
    """Write the files to the working folder."""
    data = load_breast_cancer()
    columns = [title.replace(" ", "_") for title in data.feature_names[OWN[name]]]
    for file in FILES:
        labels = name == "bank" and file == "customers.csv"
        with open(file, "w", newline="") as out:
            writer = csv.writer(out)
            writer.writerow(["customer", *(["good"] if labels else []), *columns])
            for row in rows_of(name, file):
                writer.writerow([id_of(row), *([data.target[row]] if labels else []), *data.data[row, OWN[name]]])
        print(f"{file}: {len(rows_of(name, file))} rows, {len(columns)} columns{', and labels' if labels else ''}")
    row = max(set(rows_of("bank", "new.csv")) & set(rows_of("shop", "new.csv")))
    asked = {"rows": [dict(zip(columns, data.data[row, OWN[name]].tolist(), strict=True))], "ids": [id_of(row)]}
    with open("row.json", "w") as out:
        json.dump(asked, out)


def rows_of(name: str, file: str) -> list[int]:
    """Return the rows that an organisation has of those of a file, in an order of its own."""
    rows = FILES[file]
    return np.random.default_rng([*name.encode(), len(rows)]).permutation(rows)[: int(0.95 * len(rows))].tolist()


def id_of(row: int) -> str:
    """Return a customer's number."""
    return f"C{row:05d}"


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in OWN:
        sys.exit(f"usage: python make_tables.py {'|'.join(OWN)}")
    main(sys.argv[1])
