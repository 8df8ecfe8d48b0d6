"""Reduced-leakage SecureBoost (RL) beside plain SecureBoost: what predictions lose, and how pure leaves are.

Claims (Cheng et al. 2021): without its first tree shown to passive parties, RL predicts as plain SecureBoost does
(accuracy, AUC, F1 at 0.5; two-sided Wilcoxon test over ten splits at 0.05; largest |difference of AUC| at most 0.005),
and leaves of the second tree, RL's first that passive parties see, are less pure than those of the first. Purity is
reported raw as in the paper, class-balanced and adjusted; the paper's "just above 0.6" can only be the balanced one,
which is expected in 0.62-0.75 for tree 1 and 0.59-0.75 for tree 2. Purity is that of all training rows, and does not
say that passive parties see whole leaves.

Two more tables. First trees: accuracy, AUC and F1 after the first round, which RL grows on the active party's columns
alone, beside plain SecureBoost's. Theorem 2: a leaf's share of positives follows from its weight; the purity that leaf
weights of the first tree give beside the one that labels give, with and without the theorem's neglect of lambda, and
with the sign as printed.
20 trees, depth 3, rate 0.3, `subsample=0.8`, 32 bins, start at probability 0.5, ten fixed splits, two thirds training;
columns in halves, either half with the labels. RL trains between parties, under a key of 1024 bits to save time, which
changes no sum; plain by the pooled grower, and on split 0 between parties too, where both must predict the same bit for
bit. About 6 minutes; `--quick`: the smaller data set, three splits. `--first-trees`: only their two tables. `--rate-1`
writes `secureboost_leaf_purity_rate_1.csv` instead: the purity of the first two trees at learning rate 1; two minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import wilcoxon
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

import figures
from data import (
    Data,
    arguments,
    default_of_credit_card_clients,
    flat,
    give_me_some_credit,
    report,
    splits,
    verdict,
    write,
)
from leaf_purity import leaf_purity, shares_from_weights
from treaty import GBDTClassifier

KEY = 1024
BAR, LEVEL = 0.005, 0.05
EXPECTED = {1: (0.62, 0.75), 2: (0.59, 0.75)}  # RL's balanced purity by tree
TREES_SHOWN = (1, 2, 3, 5, 10, 20)
METRICS, FORMS = ("accuracy", "AUC", "F1"), ("raw", "balanced", "adjusted")
MODELS = ("SecureBoost", "RL-SecureBoost")
HALVES = ("first half", "second half")  # whose columns the active party holds
SETTINGS = {
    "n_estimators": 20,
    "max_depth": 3,
    "learning_rate": 0.3,
    "subsample": 0.8,
    "max_bin": 32,
    "base_score": 0.5,
}


@dataclass(frozen=True, slots=True)
class Found:
    """What one division of a data set's columns gave.

    Attributes
    ----------
    scores : float64 (2 models, n_splits, 3 metrics)
    purity : float64 (2 models, n_splits, 3 forms, n_trees)
    """

    data: Data
    active: str
    scores: np.ndarray
    purity: np.ndarray


def parties(x: np.ndarray, active: str) -> dict[str, np.ndarray]:
    middle = x.shape[1] // 2
    halves = [x[:, :middle], x[:, middle:]]
    return dict(zip(("active", "passive"), halves if active == HALVES[0] else halves[::-1], strict=True))


def compare(data: Data, active: str, n_splits: int) -> Found:
    scores, purity = np.empty((2, n_splits, 3)), np.empty((2, n_splits, 3, SETTINGS["n_estimators"]))
    for seed, (train, test) in enumerate(splits(data, n_splits)):
        tables = [parties(data.x[rows], active) for rows in (train, test)]
        own = {"random_state": seed, **SETTINGS}
        between = {"insecure_test_key_bits": KEY, "allow_insecure": True, **own}
        plain = GBDTClassifier("pooled", **own).fit(tables[0], data.y[train])
        reduced = flat(GBDTClassifier, "secureboost", rl_trees=1, **between).fit(tables[0], data.y[train])
        if seed == 0:
            apart = flat(GBDTClassifier, "secureboost", **between).fit(tables[0], data.y[train])
            if not np.array_equal(apart.predict_proba(tables[1]), plain.predict_proba(tables[1])):
                raise AssertionError(f"{data.title}: secureboost and pooled predict differently")
        for k, model in enumerate((plain, reduced)):
            p, y = model.predict_proba(tables[1])[:, 1], data.y[test]
            scores[k, seed] = scores_of(y, p)
            found = leaf_purity(model.predict_leaf(tables[0]), data.y[train], 2)
            purity[k, seed] = found.raw, found.balanced, found.adjusted
    return Found(data, active, scores, purity)


def scores_of(y: np.ndarray, p: np.ndarray) -> tuple[float, float, float]:
    return accuracy_score(y, p > 0.5), roc_auc_score(y, p), f1_score(y, p > 0.5)


def first_trees(data: Data, active: str, n_splits: int) -> dict[str, object]:
    """Say how the models predict after their first tree; passive parties hear nothing of RL's."""
    scores = np.empty((2, n_splits, 3))
    for seed, (train, test) in enumerate(splits(data, n_splits)):
        own = {**SETTINGS, "random_state": seed, "n_estimators": 1}
        tables = [parties(data.x[rows], active) for rows in (train, test)]
        plain = GBDTClassifier("pooled", **own).fit(tables[0], data.y[train])
        between = {"insecure_test_key_bits": KEY, "allow_insecure": True, **own}
        reduced = flat(GBDTClassifier, "secureboost", rl_trees=1, **between).fit(tables[0], data.y[train])
        for k, model in enumerate((plain, reduced)):
            scores[k, seed] = scores_of(data.y[test], model.predict_proba(tables[1])[:, 1])
    row: dict[str, object] = {"data": data.title, "active party holds": active, "splits": n_splits}
    for k, name in enumerate(METRICS):
        row |= {name: spread(scores[0, :, k]), f"RL {name}": spread(scores[1, :, k])}
    return row


def purity_at_rate_1(data: Data, active: str, n_splits: int) -> list[dict[str, object]]:
    """Say how pure the leaves of the first two trees are at learning rate 1, which leaves less for the second."""
    purity = np.empty((2, n_splits, 3, 2))
    for seed, (train, _) in enumerate(splits(data, n_splits)):
        own = {**SETTINGS, "random_state": seed, "n_estimators": 2, "learning_rate": 1.0}
        table, y = parties(data.x[train], active), data.y[train]
        between = {"insecure_test_key_bits": KEY, "allow_insecure": True, **own}
        plain = GBDTClassifier("pooled", **own).fit(table, y)
        reduced = flat(GBDTClassifier, "secureboost", rl_trees=1, **between).fit(table, y)
        for k, model in enumerate((plain, reduced)):
            found = leaf_purity(model.predict_leaf(table), y, 2)
            purity[k, seed] = found.raw, found.balanced, found.adjusted
    return purities(Found(data, active, np.empty(0), purity), (1, 2))


def theorem_2(data: Data, n_splits: int) -> dict[str, object]:
    """Compare the purity of the first tree's leaves with what their weights give; all training rows, no sample."""
    found = np.empty((n_splits, 5))
    lam, rate = 1.0, SETTINGS["learning_rate"]
    for seed, (train, _) in enumerate(splits(data, n_splits)):
        own = {**SETTINGS, "subsample": 1.0, "n_estimators": 1, "reg_lambda": lam}
        model = GBDTClassifier("pooled", **own).fit(data.x[train], data.y[train])
        (tree,) = model.parts_["pooled"].forest.trees
        ends = np.flatnonzero(tree.left < 0)
        weights, hess, counts = tree.value[ends] / rate, tree.cover[ends], tree.count[ends]
        leaves = model.predict_leaf(data.x[train])
        true = np.array([data.y[train][leaves[:, 0] == leaf].mean() for leaf in ends])
        given = [
            shares_from_weights(weights, hess, reg_lambda=lam),
            shares_from_weights(weights, hess),
            1.0 - shares_from_weights(weights, hess),  # the printed sign, at base 1/2
        ]
        pure = [(counts * np.maximum(share, 1.0 - share)).sum() / counts.sum() for share in given[:2]]
        errors = [np.abs(share - true).max() for share in given]
        assert abs(pure[0] - leaf_purity(leaves, data.y[train].astype(np.int64), 2).raw[0]) < 1e-3
        found[seed] = pure + errors
    return {
        "data": data.title,
        "splits": n_splits,
        "purity by weights": spread(found[:, 0]),
        "lambda left out": spread(found[:, 1]),
        "largest error of a leaf's share": f"{found[:, 2].max():.2g}",
        "its, lambda left out": f"{found[:, 3].max():.2g}",
        "its, sign as printed": f"{found[:, 4].max():.2g}",
    }


def predictions(found: Found) -> dict[str, object]:
    """Say how RL's predictions compare."""
    plain, reduced = found.scores
    difference = reduced - plain
    row: dict[str, object] = {
        "data": found.data.title,
        "active party holds": found.active,
        "splits": len(plain),
        "RL key bits": KEY,
    }
    for k, name in enumerate(METRICS):
        p = wilcoxon(difference[:, k]).pvalue if np.any(difference[:, k]) else 1.0
        row |= {
            name: spread(plain[:, k]),
            f"RL {name}": spread(reduced[:, k]),
            f"{name} difference": spread(difference[:, k]),
            f"{name} p": f"{p:.3f}",
            f"{name} p >= {LEVEL}": "kept" if p >= LEVEL else "missed",
        }
    largest = float(np.abs(difference[:, 1]).max())
    return row | {
        "largest |AUC difference|": f"{largest:.5f}",
        f"<= {BAR}": verdict(largest, BAR),
        f"|mean| <= {BAR}": verdict(abs(difference[:, 1].mean()), BAR),
        "equals pooled, split 0": "bit for bit",
    }


def purities(found: Found, trees: tuple[int, ...] = TREES_SHOWN) -> list[dict[str, object]]:
    """Say how pure the leaves of some of the trees are."""
    result = []
    for k, model in enumerate(MODELS):
        for tree in trees:
            values = found.purity[k, :, :, tree - 1]
            row: dict[str, object] = {
                "data": found.data.title,
                "active party holds": found.active,
                "model": model,
                "tree": tree,
                "seen by passive party": "no" if k == 1 and tree == 1 else "yes",
                "splits": len(values),
            }
            row |= {form: spread(values[:, number]) for number, form in enumerate(FORMS)}
            judged = k == 1 and tree in EXPECTED
            low, high = EXPECTED.get(tree, (0.0, 1.0))
            inside = "kept" if low <= values[:, 1].mean() <= high else "missed"
            row["balanced expected"] = f"{low}-{high} {inside}" if judged else ""
            result.append(row)
    return result


def spread(values: np.ndarray) -> str:
    """Mean and standard deviation."""
    return f"{values.mean():.4f} ({values.std(ddof=1):.4f})"


def draw(results: list[Found], *, quick: bool) -> None:
    titles = [f"{found.data.title},\n{found.active} with the labels" for found in results]
    figure, axes = figures.panels(titles, share_y=True)
    for panel, found in zip(axes, results, strict=True):
        number = np.arange(1, found.purity.shape[-1] + 1)
        for k, model in enumerate(MODELS):
            for form, line in (("balanced", "-"), ("adjusted", ":")):
                runs = found.purity[k, :, FORMS.index(form)]
                style = {"color": figures.COLOURS[model], "linestyle": line}
                figures.band(panel, number, runs.mean(axis=0), runs.std(axis=0, ddof=1), f"{model}, {form}", **style)
        panel.set(xlabel="tree", ylabel="leaf purity", ylim=(0, 1), xticks=[1, 5, 10, 15, 20])
    axes[0].legend(fontsize=7)
    figures.save(figure, "secureboost_leaf_purity", quick=quick)
    figure, axes = figures.panels(titles, share_y=True)
    for panel, found in zip(axes, results, strict=True):
        difference = found.scores[1] - found.scores[0]
        panel.boxplot(difference, tick_labels=METRICS)
        panel.axhline(0.0, color="grey", linewidth=0.8)
        panel.set(ylabel="RL-SecureBoost - SecureBoost")
    figures.save(figure, "secureboost_reduced_leakage", quick=quick)


def every_split(results: list[Found]) -> list[dict[str, object]]:
    """Return what the tests compare."""
    return [
        {
            "data": found.data.title,
            "active party holds": found.active,
            "split": split,
            "model": model,
            **{name: f"{value:.6f}" for name, value in zip(METRICS, found.scores[k, split], strict=True)},
        }
        for found in results
        for split in range(found.scores.shape[1])
        for k, model in enumerate(MODELS)
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--first-trees", action="store_true", help="scores of first trees, and Theorem 2, alone")
    parser.add_argument("--rate-1", action="store_true", help="leaf purity at learning rate 1, alone")
    options = parser.parse_args()
    n_splits = 3 if options.quick else 10
    sets = [default_of_credit_card_clients()] + ([] if options.quick else [give_me_some_credit()])
    if options.rate_1:
        rows = [row for data in sets for active in HALVES for row in purity_at_rate_1(data, active, n_splits)]
        report("secureboost_leaf_purity_rate_1", rows, quick=options.quick)
        return
    of_first = [first_trees(data, active, n_splits) for data in sets for active in HALVES]
    report("secureboost_first_trees", of_first, quick=options.quick)
    report("secureboost_theorem_2", [theorem_2(data, n_splits) for data in sets], quick=options.quick)
    if options.first_trees:
        return
    results = [compare(data, active, n_splits) for data in sets for active in HALVES]
    report("secureboost_reduced_leakage", [predictions(found) for found in results], quick=options.quick)
    report("secureboost_leaf_purity", [row for found in results for row in purities(found)], quick=options.quick)
    draw(results, quick=options.quick)
    if not options.quick:
        write("secureboost_reduced_leakage_splits", every_split(results))


if __name__ == "__main__":
    main()
