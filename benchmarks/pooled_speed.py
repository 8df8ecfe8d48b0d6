"""Pooled training and prediction beside XGBoost's `hist`, from the same table of floats.

Claim: the plain grower, which every lossless protocol shares, fits in at most 1.5 times XGBoost's time (binning
included on both sides) and predicts in at most twice its time. 100 trees of depth 6, 255 bins, two threads; compiled
and warmed up before. Ratios are medians over alternating pairs of one run. About 5 minutes; `--quick` one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import xgboost
from sklearn.metrics import roc_auc_score

from data import Data, arguments, flights, give_me_some_credit, report, seconds, side_by_side, verdict
from treaty import GBDTClassifier

THREADS, FIT_BAR, PREDICT_BAR = 2, 1.5, 2.0
SETTINGS = {"n_estimators": 100, "max_depth": 6, "learning_rate": 0.3, "max_bin": 255, "base_score": 0.5}
NATIVE = {
    "objective": "binary:logistic", "tree_method": "hist", "max_depth": 6, "learning_rate": 0.3, "max_bin": 255,
    "base_score": 0.5, "nthread": THREADS,
}  # fmt: skip


def xgboost_classifier(x: Any, y: Any) -> xgboost.XGBClassifier:
    return xgboost.XGBClassifier(tree_method="hist", n_jobs=THREADS, **SETTINGS).fit(x, y)


def xgboost_native(x: Any, y: Any) -> xgboost.Booster:
    """Train from a QuantileDMatrix, XGBoost's way without a copy of the table."""
    matrix = xgboost.QuantileDMatrix(x, y, max_bin=255, nthread=THREADS)
    return xgboost.train(NATIVE, matrix, SETTINGS["n_estimators"])


def faster(ways: list[Callable[[], object]], repeats: int = 3) -> Callable[[], object]:
    """Return the way whose best time is lower, after a run of each to warm up."""
    for way in ways:
        way()
    return min(ways, key=lambda way: min(seconds(way) for _ in range(repeats)))


def compare(data: Data, table: str, x: Any, pairs: int) -> dict[str, object]:
    def ours() -> GBDTClassifier:
        model = GBDTClassifier(protocol="pooled", min_child_samples=1, n_jobs=THREADS, **SETTINGS)
        return model.fit(x, data.y)

    theirs = faster([lambda: xgboost_native(x, data.y), lambda: xgboost_classifier(x, data.y)])
    model, classifier, booster = ours(), xgboost_classifier(x, data.y), xgboost_native(x, data.y)
    fit = side_by_side(ours, theirs, pairs)

    predict = faster([lambda: booster.inplace_predict(x), lambda: classifier.predict_proba(x)])
    model.predict_proba(x)
    use = side_by_side(lambda: model.predict_proba(x), predict, 2 * pairs)
    return {
        "data": data.title,
        "table": table,
        "rows": len(data.y),
        "features": data.x.shape[1],
        "fit s": fit.ours,
        "XGBoost s": fit.theirs,
        "fit ratio": fit.ratio,
        f"<= {FIT_BAR}": verdict(fit.ratio, FIT_BAR),
        "predict s": use.ours,
        "XGBoost predict s": use.theirs,
        "predict ratio": use.ratio,
        f"<= {PREDICT_BAR}": verdict(use.ratio, PREDICT_BAR),
        "others' cores": round(max(fit.others, use.others), 2),
        "AUC": f"{roc_auc_score(data.y, model.predict_proba(x)[:, 1]):.4f}",
        "XGBoost AUC": f"{roc_auc_score(data.y, booster.inplace_predict(x)):.4f}",
    }


def crowded() -> None:
    """Print the seconds of a fit by each library: of this process alone, or beside others of its kind."""
    data = give_me_some_credit()
    x = pd.DataFrame(data.x.astype(np.float32))
    for name, fit in {
        "Treaty": lambda: GBDTClassifier("pooled", min_child_samples=1, n_jobs=THREADS, **SETTINGS).fit(x, data.y),
        "XGBoost": lambda: xgboost_native(x, data.y),
    }.items():
        fit()
        print(f"{name}: {seconds(lambda fit=fit: [fit() for _ in range(8)]) / 8:.2f} s a fit", flush=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="alternating pairs of runs")
    parser.add_argument("--crowded", action="store_true", help="seconds of a fit; alone, and two at once")
    options = parser.parse_args()
    if options.crowded:
        return crowded()
    pairs = 3 if options.quick else options.pairs
    rows = []
    for data in (give_me_some_credit(), flights()):
        tables = {
            "float32": data.x.astype(np.float32),
            "float64": data.x,
            "pandas": pd.DataFrame(data.x, columns=data.names),
        }
        for table, x in tables.items():
            if not options.quick or table == "float32":
                rows.append(compare(data, table, x, pairs))
    report("pooled_speed", rows, quick=options.quick)


if __name__ == "__main__":
    main()
