"""Accuracy of SecureBoost between two parties beside XGBoost's `hist` on the pooled table.

Claim: being lossless, SecureBoost differs from central XGBoost with the same number of bins by at most 0.002 in test
AUC, in the mean over fixed splits (bins are chosen differently, and XGBoost has no smallest leaf size). 20 trees, depth
3, rate 0.3, 32 bins, `base_score=0.5`; two thirds of the rows train (stratified, seeds 0 to 11), the columns are halved
between the parties. The first split trains between the parties and checks that the pooled grower predicts bit for bit
the same; the others are pooled alone. XGBoost given our bins tells how much of a difference comes of choosing bins. A
table of every split is written as well. About 2 minutes; `--quick`: only the smaller data set, two splits.
"""

from __future__ import annotations

import numpy as np
import xgboost
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

from data import Data, arguments, default_of_credit_card_clients, give_me_some_credit, report, verdict
from treaty import GBDTClassifier, SecureBoost
from treaty.data.binning import fit_bins
from treaty.data.table import to_table

BAR = 0.002
SETTINGS = {"n_estimators": 20, "max_depth": 3, "learning_rate": 0.3, "max_bin": 32, "base_score": 0.5}


def halves(x: np.ndarray) -> dict[str, np.ndarray]:
    middle = x.shape[1] // 2
    return {"active": x[:, :middle], "passive": x[:, middle:]}


def one_split(data: Data, seed: int, least: int, between_parties: bool) -> tuple[float, ...]:
    """Return the test AUC of ours, of XGBoost, and of XGBoost given our bins."""
    train, test = train_test_split(np.arange(len(data.y)), test_size=1 / 3, stratify=data.y, random_state=seed)
    x, y = data.x, data.y
    pooled = GBDTClassifier(protocol="pooled", min_child_samples=least, **SETTINGS).fit(halves(x[train]), y[train])
    ours = pooled.predict_proba(halves(x[test]))[:, 1]
    if between_parties:
        federated = GBDTClassifier(SecureBoost(allow_exact_sums=True), min_child_samples=least, **SETTINGS)
        apart = federated.fit(halves(x[train]), y[train]).predict_proba(halves(x[test]))[:, 1]
        if not np.array_equal(apart, ours):
            raise AssertionError(f"{data.title}: secureboost and pooled predict differently")
    central = xgboost.XGBClassifier(tree_method="hist", n_jobs=2, **SETTINGS).fit(x[train], y[train])
    theirs = central.predict_proba(x[test])[:, 1]
    codes = our_bins(x, train)
    binned = xgboost.XGBClassifier(tree_method="hist", n_jobs=2, **{**SETTINGS, "max_bin": 256})
    same_bins = binned.fit(codes[train], y[train]).predict_proba(codes[test])[:, 1]
    return tuple(float(roc_auc_score(y[test], scores)) for scores in (ours, theirs, same_bins))


def our_bins(x: np.ndarray, train: np.ndarray) -> np.ndarray:
    """Return the numbers of the bins that we use, NaN where missing: XGBoost then has no bins to choose."""
    bins = fit_bins(to_table(x[train]), SETTINGS["max_bin"])
    codes = bins.transform(to_table(x)).astype(np.float32)
    codes[codes == bins.n_bins] = np.nan
    return codes


def compare(data: Data, least: int, splits: int) -> tuple[dict[str, object], list[dict[str, object]]]:
    found = np.array([one_split(data, seed, least, between_parties=seed == 0) for seed in range(splits)])
    difference = found[:, 0] - found[:, 1]
    mean, sd = found.mean(axis=0), found.std(axis=0, ddof=1)
    summary = {
        "data": data.title,
        "train rows": len(data.y) * 2 // 3,
        "smallest leaf": least,
        "splits": splits,
        "AUC": f"{mean[0]:.4f} ({sd[0]:.4f})",
        "XGBoost AUC": f"{mean[1]:.4f} ({sd[1]:.4f})",
        "XGBoost on our bins": f"{mean[2]:.4f} ({sd[2]:.4f})",
        "difference": f"{difference.mean():+.5f} ({difference.std(ddof=1):.5f})",
        f"|mean| <= {BAR}": verdict(abs(difference.mean()), BAR),
        "lowest, highest": f"{difference.min():+.4f}, {difference.max():+.4f}",
        "splits within bar": f"{int((np.abs(difference) <= BAR).sum())} of {splits}",
        "equals pooled": "bit for bit",
    }
    each = [
        {
            "data": data.title,
            "smallest leaf": least,
            "seed": seed,
            "AUC": f"{ours:.5f}",
            "XGBoost AUC": f"{theirs:.5f}",
            "XGBoost on our bins": f"{binned:.5f}",
        }
        for seed, (ours, theirs, binned) in enumerate(found)
    ]
    return summary, each


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--splits", type=int, default=12)
    options = parser.parse_args()
    sets = [default_of_credit_card_clients()] + ([] if options.quick else [give_me_some_credit()])
    found = [compare(data, least, 2 if options.quick else options.splits) for data in sets for least in (20, 1)]
    report("secureboost_accuracy", [summary for summary, _ in found], quick=options.quick)
    report("secureboost_accuracy_splits", [row for _, each in found for row in each], quick=options.quick)


if __name__ == "__main__":
    main()
