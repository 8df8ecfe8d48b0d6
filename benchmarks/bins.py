"""How many bins: accuracy, what ciphers cost, and what exact sums show, at 16, 32, 64, 128 and 255 bins of a column.

`bins_accuracy.csv`: test AUC or R^2 of the pooled grower, whose trees those of every exact system are to the last bit,
on real tables, and how far it is from 255 bins; mean over splits (two thirds train). Two shapes of model: the default
one (20 trees of depth 3, rate 0.3) and a larger one (100 trees of depth 6, rate 0.1).
`bins_cost.csv`: Default of Credit Card Clients, 20,000 rows, features in halves, depth 3, both parties in one process:
processor seconds, which other work on the machine changes less than it does time, and megabytes of a tree and of all
before the first, by cipher, from two trainings of different length; the estimate, of all rows and columns of the
passive party, of what 20 trees' exact sums show.

Claim: with 64 bins, the default of ciphers, no table's mean AUC is more than 0.001 below that of 255. About half an
hour; `--quick`: one split. Tables and ciphers may be measured one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
from numpy.typing import NDArray
from sklearn.metrics import r2_score, roc_auc_score
from sklearn.model_selection import train_test_split

from data import (
    FLIGHTS,
    Data,
    adult,
    arguments,
    default_of_credit_card_clients,
    find,
    flat,
    flights,
    give_me_some_credit,
    higgs,
    report,
    susy,
)
from treaty import GBDTClassifier, GBDTRegressor, SecureBoost
from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.runs.warm_up import compile_kernels
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.vertical.exact_sums import expected_share

BINS = (16, 32, 64, 128, 255)
SHAPES = [(20, 3, 0.3), (100, 6, 0.1)]
CIPHERS = {
    "lattice map": ({"protocol": "secureboost", "encryption": "lattice"}, (2, 12)),
    "Okamoto-Uchiyama, 3072 bits": ({"protocol": "secureboost", "encryption": "ou"}, (1, 4)),
    "Paillier, 2048 bits": ({"protocol": "secureboost", "encryption": "paillier", "key_bits": 2048}, (1, 3)),
    "dealer": ({"protocol": "fedxgboost-smm", "backend": "dealer"}, (2, 12)),
}
"""By cipher: the estimator's options, and how many trees the two trainings have."""

Task = tuple[str, NDArray[np.float64], NDArray[Any], type]
"""Title, columns, labels, estimator."""


def late(dropped: str = "") -> Task:
    """Return flights as a regression of minutes late, perhaps without a column."""
    kept = [k for k, name in enumerate(FLIGHTS) if name != dropped]
    y = parquet.read_table(find("flights.parquet"))["arr_delay"].to_numpy().astype(np.float64)
    title = "flights, minutes late" + (f", without {dropped}" if dropped else "")
    return title, flights().x[:, kept], y, GBDTRegressor


def classes(load: Callable[[], Data]) -> Callable[[], Task]:
    """Return a function that loads a table of two classes."""

    def task() -> Task:
        data = load()
        return data.title, data.x, data.y, GBDTClassifier

    return task


TABLES: dict[str, tuple[Callable[[], Task], int]] = {
    "credit1": (classes(give_me_some_credit), 5),
    "credit2": (classes(default_of_credit_card_clients), 5),
    "adult": (classes(adult), 5),
    "susy": (classes(susy), 20),  # smaller tests vary more
    "higgs": (classes(higgs), 20),
    "late": (late, 3),
    "late-unknown": (partial(late, "dep_delay"), 3),
    "flights": (classes(flights), 3),
}
"""By a short name: how a table is loaded, and the number of splits."""


def accuracy(name: str, quick: bool) -> Iterator[dict[str, object]]:
    """Yield a row per shape of model and number of bins."""
    load, splits = TABLES[name]
    title, x, y, estimator = load()
    splits = 1 if quick else splits
    regression = estimator is GBDTRegressor
    strata = None if regression else y
    cut = [train_test_split(np.arange(len(y)), test_size=1 / 3, stratify=strata, random_state=k) for k in range(splits)]
    for trees, depth, rate in SHAPES:
        found = np.zeros((len(BINS), splits))
        for at, bins in enumerate(BINS):
            for split, (train, test) in enumerate(cut):
                model = estimator("pooled", n_estimators=trees, max_depth=depth, learning_rate=rate, max_bin=bins)
                model.fit(x[train], y[train])
                if regression:
                    found[at, split] = r2_score(y[test], model.predict(x[test]))
                else:
                    found[at, split] = roc_auc_score(y[test], model.predict_proba(x[test])[:, 1])
        off = found - found[-1]
        for at, bins in enumerate(BINS):
            yield {
                "table": title,
                "rows": len(y),
                "trees": trees,
                "depth": depth,
                "splits": splits,
                "measure": "R^2" if regression else "AUC",
                "bins": bins,
                "mean": f"{found[at].mean():.4f}",
                "from 255 bins": f"{off[at].mean():+.4f}",
                "lowest, highest": f"{off[at].min():+.4f}, {off[at].max():+.4f}",
            }


def cost(cipher: str, quick: bool) -> Iterator[dict[str, object]]:
    """Yield a row per number of bins."""
    data = default_of_credit_card_clients()
    of = np.random.default_rng(0).permutation(len(data.y))[:20_000]
    tables, y = {"active": data.x[of, :11], "passive": data.x[of, 11:]}, data.y[of]
    options, lengths = CIPHERS[cipher]
    for bins in BINS[:2] if quick else BINS:
        spent, sent = [], []
        for trees in (lengths[0], *lengths):  # the first one compiles
            model = flat(GBDTClassifier, **options, n_estimators=trees, max_depth=3, learning_rate=0.3, max_bin=bins)
            start = time.process_time()
            model.fit(tables, y)
            spent.append(time.process_time() - start)
            sent.append(sum(pair["bytes"] for pair in model.communication_.values()) / 1e6)
        more = lengths[1] - lengths[0]
        tree_s, tree_mb = (spent[2] - spent[1]) / more, (sent[2] - sent[1]) / more
        yield {
            "cipher": cipher,
            "bins": bins,
            "processor s/tree": tree_s,
            "MB/tree": tree_mb,
            "processor s before": spent[1] - lengths[0] * tree_s,
            "MB before": sent[1] - lengths[0] * tree_mb,
            "estimate of bins shown": f"{estimate(tables['passive'], bins):.1%}",
        }


def estimate(x: NDArray[np.float64], max_bin: int) -> float:
    """Return the share of bins that exact sums are estimated to show in 20 trees of depth 3."""
    table = to_table(x)
    return expected_share(
        fit_bins(table, max_bin).transform(table), BoostingOptions(n_estimators=20, max_depth=3).checked(SecureBoost())
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tables", nargs="*", choices=TABLES, default=list(TABLES), help="accuracy of these alone")
    parser.add_argument("--ciphers", nargs="*", choices=CIPHERS, default=list(CIPHERS), help="cost of these alone")
    options = parser.parse_args()
    compile_kernels()
    for table in options.tables:
        report("bins_accuracy", list(accuracy(table, options.quick)), quick=options.quick, keys=["table"])
    for cipher in options.ciphers:
        report("bins_cost", list(cost(cipher, options.quick)), quick=options.quick, keys=["cipher"])


if __name__ == "__main__":
    main()
