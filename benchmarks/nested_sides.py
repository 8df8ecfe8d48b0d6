"""What sides of splits tell under sealed sums: the attack's finding, and the owner's count and estimate beforehand.

Default of Credit Card Clients, 20 000 rows, 11 columns with the labels, 12 at the passive party, 20 trees of depth 3
and 32 bins, by `reveal`. Bars: at most 5 % of bins for certain by default, counted within a tenth. About 2 minutes.
"""

from __future__ import annotations

import numpy as np

from data import arguments, report, verdict
from sealed_sums import tables_of_clients
from treaty import GBDTClassifier, SecureBoost
from treaty.attacks.auditing import audit
from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.systems.vertical.exact_sums import estimated_sides

MOST, WITHIN = 0.05, 0.1
TREES, DEPTH, BINS = 20, 3, 32


def one(reveal: str, quick: bool) -> dict:
    tables, y = tables_of_clients()
    rows = slice(0, 2000 if quick else None)
    tables = {name: x[rows] for name, x in tables.items()}
    system = SecureBoost(encryption="lattice", sums="sealed", reveal=reveal)
    model = GBDTClassifier(system, n_estimators=TREES, max_depth=DEPTH, max_bin=BINS, learning_rate=0.3, n_jobs=1)
    done = audit(model, tables, y[rows])
    (found,) = [finding.score for finding in done.findings if finding.attack == "nested sides"]
    count = done.model.parts_["passive"].sides["passive"]
    table = to_table(tables["passive"])
    codes = fit_bins(table, BINS).transform(table)
    counts = [np.bincount(column) for column in codes.T]
    return {
        "reveal": reveal, "rows": len(codes), "found by the attack": found, "counted by the owner": count,
        "estimated before": estimated_sides(counts, DEPTH, TREES, 2, whole=reveal == "column"),
        f"found <= {MOST}": verdict(found, MOST) if reveal == "node" else "",
        f"count within {WITHIN}": verdict(abs(count - found) / max(found, 1e-9), WITHIN),
    }  # fmt: skip


if __name__ == "__main__":
    quick = arguments(__doc__).parse_args().quick
    report("nested_sides", [one(reveal, quick) for reveal in ("node", "column")], quick=quick)
