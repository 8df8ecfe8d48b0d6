"""TreeSHAP of a pooled model beside XGBoost's `pred_contribs` of the same model, from the same table.

Claim: exact contributions at least ten times as fast as XGBoost's, with the same values (XGBoost adds in float32). 100
trees of depth 6, 255 bins, two threads; compiled and warmed up before. The ratio is the median over alternating pairs.
The last columns say what contributions tell: the second half of the columns are taken for a passive party's, and
AUC is that of the sum of its values on rows that were not trained on, beside the whole model's. About 3 minutes;
`--quick` one.
"""

from __future__ import annotations

import numpy as np
import xgboost
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from data import Data, arguments, flights, give_me_some_credit, report, side_by_side, verdict
from treaty import GBDTClassifier
from treaty.data.table import to_table
from treaty.models.interpretation import explain_pooled, joined_booster

THREADS, BAR = 2, 0.1
SETTINGS = {"n_estimators": 100, "max_depth": 6, "max_bin": 255, "base_score": 0.5, "min_child_samples": 1}


def compare(data: Data, n_rows: int, pairs: int) -> dict[str, object]:
    x = data.x.astype(np.float32)
    explained = np.random.default_rng(0).permutation(len(x))[:n_rows]
    trained = np.ones(len(x), bool)
    trained[explained] = False
    parts = list(GBDTClassifier(n_jobs=THREADS, **SETTINGS).fit(x[trained], data.y[trained]).parts_.values())
    table = to_table(x[explained])
    booster = joined_booster(parts)
    booster.set_param({"nthread": THREADS})
    matrix = xgboost.DMatrix(x[explained], feature_names=booster.feature_names, nthread=THREADS)

    def ours() -> NDArray[np.float64]:
        return explain_pooled(parts, [table], THREADS)[0]

    def theirs() -> NDArray[np.float32]:
        return booster.predict(matrix, pred_contribs=True)

    found, expected = ours(), theirs()
    timing = side_by_side(ours, theirs, pairs)
    passive = found[:, x.shape[1] // 2 : -1].sum(axis=1)
    return {
        "data": data.title,
        "rows": n_rows,
        "features": x.shape[1],
        "rows/s": n_rows / timing.ours,
        "XGBoost rows/s": n_rows / timing.theirs,
        "time ratio": timing.ratio,
        f"<= {BAR}": verdict(timing.ratio, BAR),
        "others' cores": round(timing.others, 2),
        "largest difference": float(np.abs(found - expected).max()),
        "largest value": float(np.abs(found).max()),
        "AUC": f"{roc_auc_score(data.y[explained], found.sum(axis=1)):.4f}",
        "AUC of half the columns' values": f"{roc_auc_score(data.y[explained], passive):.4f}",
    }


def main() -> None:
    options = arguments(__doc__).parse_args()
    n_rows, pairs = (4000, 2) if options.quick else (20_000, 3)
    rows = [compare(data, n_rows, pairs) for data in (give_me_some_credit(), flights())]
    report("shap_speed", rows, quick=options.quick)


if __name__ == "__main__":
    main()
