"""FedXGBoost-LDP: loss tree by tree under noise, and the time it takes beside the plain grower.

Le et al. 2021, figures 4 and 5: loss on Give Me Some Credit and Default of Credit Card Clients with Laplace and Duchi
noise, epsilon 1 and 3 a tree, scores of the first and the second order; Table 1: seconds a tree on 2 x 16 cores under
Spark, XGBoost 69 and 260, Laplace 76 to 82 and 270, Duchi 67 to 73 and 204 to 240, Paillier 354 and 1560. A plain tree
of a minute is no library's: it is their own parties under Spark without protection. So the bar of 1.3 is taken here of
the same protocol between the same parties with nothing hidden (labels that flip with a chance of e^-60, no noise on
gradients). Beside it stand our grower and XGBoost on one table, of which Paillier is to take 4 times as long at least.

Writes `fedxgboost_ldp.csv` and `.png` (test loss and AUC after 20 trees of depth 3, mean and standard deviation over 5
fixed splits, each with noise of its own; columns in halves; what a tree and what a person pays), with all mechanisms,
randomised labels at the epsilon of one tree and at that of all 20, and noise on gradients at the epsilon of one label;
`fedxgboost_ldp_curves.csv` (loss after every tree) and `fedxgboost_ldp_speed.csv`. About
10 minutes, `--quick` one.

`--numbers` writes `fedxgboost_ldp_numbers.csv`: RMSE on arrival delays of flights, between -60 and 120 minutes, of
numbers that were randomised once. About a minute.

`--forecast` writes `noise_forecast.csv`: what `treaty plan` forecasts of FedXGBoost-LDP and FederBoost by column, and
what is lost, on three tables that its constants were fitted to and three that were kept back. About five minutes.

`--published` writes `fedxgboost_ldp_published.csv` and `.png` instead: the six published lines, Laplace and Duchi of
the second order and Duchi of the first at epsilon 1 and 3, as published (mode="paper") and without exact sums, with the
training loss, which the paper's figures have, and its fall from tree 5 to tree 20 as a share of plain boosting's
(figure 5(b): noisy lines fall as XGBoost's does). About 4 minutes; `--splits` makes it shorter.
"""

from __future__ import annotations

import time
from itertools import product
from statistics import mean, median, stdev

import numpy as np
import xgboost
from numpy.typing import NDArray
from pyarrow.parquet import read_table
from sklearn.metrics import roc_auc_score

from data import (
    Data,
    adult,
    arguments,
    cpu_of_others,
    default_of_credit_card_clients,
    find,
    flights,
    give_me_some_credit,
    higgs,
    report,
    seconds,
    splits,
    susy,
    verdict,
    write,
)  # fmt: skip
from figures import COLOURS, SHADES, band, panels, save
from treaty import GBDTClassifier, GBDTRegressor, Pooled
from treaty.runs.warm_up import compile_kernels
from treaty.systems import find_system
from treaty.systems.expected import Shape
from treaty.systems.federboost_vertical.options import FederBoostVertical
from treaty.systems.fedxgboost_ldp.options import FedXGBoostLDP
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import Roles

THREADS = 2
TREES = 20
FROM = 5
"""The tree from which figure 5(b)'s fall of the loss counts here: before it, all lines fall steeply."""
COMMON = {
    "base_score": 0.5,
    "n_estimators": TREES,
    "max_depth": 3,
    "learning_rate": 0.3,
    "min_child_samples": 20,
    "n_jobs": THREADS,
}
BAR, BAR_PAILLIER = 1.3, 4.0
PUBLISHED = {  # seconds a tree: Default of Credit Card Clients, Give Me Some Credit
    "nothing hidden": "69 / 260",
    "laplace 1 second_order": "82 / 270",
    "duchi 1 second_order": "71 / 240",
    "duchi 1 first_order": "67 / 212",
    "laplace 3 second_order": "76 / 270",
    "duchi 3 second_order": "73 / 235",
    "duchi 3 first_order": "70 / 204",
    "Paillier": "354 / 1560",
}
LINES = (("laplace", "second_order"), ("duchi", "second_order"), ("duchi", "first_order"))
"""The published ones, at each epsilon."""

System = str | FedXGBoostLDP


def noisy(mechanism: str, epsilon: float, order: str = "second_order", **others: object) -> FedXGBoostLDP:
    return FedXGBoostLDP(mechanism=mechanism, epsilon=epsilon, split_score=order, **others)


def labels(epsilon: float) -> FedXGBoostLDP:
    return FedXGBoostLDP(mechanism="label_rr", epsilon=epsilon)


def settings(quick: bool) -> dict[str, System]:
    """Return the system of every line by its name."""
    lines: dict[str, System] = {"plain": "pooled"}
    for epsilon in (1.0, 3.0):
        for mechanism in ("laplace", "duchi"):
            for order in ("first_order", "second_order"):
                lines[f"{mechanism} {epsilon:g} {order}"] = noisy(mechanism, epsilon, order)
        lines[f"labels {epsilon:g}"] = labels(epsilon)
        lines[f"labels {epsilon * TREES:g}"] = labels(epsilon * TREES)
    if not quick:
        for epsilon in (1.0, 3.0):
            for of_a_tree in (epsilon, epsilon / TREES):
                lines[f"piecewise {of_a_tree:g} second_order"] = noisy("piecewise", of_a_tree)
        lines["piecewise 1 second_order, refit"] = noisy("piecewise", 1.0, refit=True)
    return lines


def published_lines() -> dict[str, System]:
    """Return the six published lines, as published and without exact sums, and one without noise."""
    lines: dict[str, System] = {"plain": "pooled"}
    for epsilon in (1.0, 3.0):
        for mechanism, order in LINES:
            name, paper = f"{mechanism} {epsilon:g} {order}", {"mode": "paper", "allow_insecure": True}
            lines[f"{name}, as published"] = noisy(mechanism, epsilon, order, **paper)
            lines[name] = noisy(mechanism, epsilon, order)
    return lines


def halves(x: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    return dict(zip(("p0", "p1"), np.array_split(x, 2, axis=1), strict=True))


def paid(system: System) -> tuple[str, str]:
    """Return the epsilon of a value and of a person."""
    if isinstance(system, str):
        return "none", "none"
    if system.mode == "paper":
        return f"{system.epsilon:g}, void", "no bound"
    times = 1 if system.mechanism == "label_rr" else TREES
    return f"{system.epsilon:g}", f"{system.noise_epsilon * times:g}"


def trajectories(
    data: Data, lines: dict[str, System], seeds: int
) -> dict[str, tuple[NDArray[np.float64], list[float]]]:
    """Return of every line the losses after each tree (seeds, training and test, trees), and AUC at the end."""
    x = data.x.astype(np.float32)
    found: dict[str, tuple[NDArray[np.float64], list[float]]] = {}
    cuts = splits(data, seeds)
    for name, system in lines.items():
        losses, scores = [], []
        for train, test in cuts:
            model = GBDTClassifier(system, **COMMON)
            known, held = (halves(x[train]), data.y[train]), (halves(x[test]), data.y[test])
            model.fit(*known, eval_set=[known, held])
            losses.append([model.evals_result_[f"eval_{k}"]["logloss"] for k in range(2)])
            scores.append(roc_auc_score(held[1], model.predict_proba(held[0])[:, 1]))
        found[name] = np.array(losses), scores
    return found


def rows_of(data: Data, lines: dict[str, System], found: dict) -> list[dict[str, object]]:
    rows, plain = [], found["plain"][0][:, 0].mean(axis=0)
    for name, (losses, scores) in found.items():
        value, person = paid(lines[name])
        fall = losses[:, 0].mean(axis=0)
        rows.append({
            "data": data.title,
            "noise": name,
            "epsilon a value": value,
            "a person": person,
            "splits": len(losses),
            "training loss": f"{losses[:, 0, -1].mean():.4f}",
            "sd of training loss": f"{losses[:, 0, -1].std(ddof=1):.4f}",
            "fall, of plain's": f"{(fall[FROM - 1] - fall[-1]) / (plain[FROM - 1] - plain[-1]):.3f}",
            "log loss": f"{losses[:, 1, -1].mean():.4f}",
            "sd": f"{losses[:, 1, -1].std(ddof=1):.4f}",
            "AUC": f"{mean(scores):.4f}",
            "sd of AUC": f"{stdev(scores):.4f}",
        })  # fmt: skip
    return rows


def numbers(seeds: int) -> list[dict[str, object]]:
    """Return RMSE on held-back arrival delays of flights by epsilon, over random thirds that are held back."""
    data, ends = flights(), (-60.0, 120.0)
    x = data.x.astype(np.float32)
    y = np.clip(read_table(find("flights.parquet"), columns=["arr_delay"])["arr_delay"].to_numpy(), *ends)
    rows = []
    for epsilon in (0.5, 1.0, 2.0, 4.0, None):
        found = []
        for seed in range(seeds):
            order = np.random.default_rng(seed).permutation(len(y))
            test, train = np.split(order, [len(y) // 3])
            system = Pooled() if epsilon is None else FedXGBoostLDP(epsilon=epsilon, target_range=ends)
            shown = (lambda of: x[of]) if epsilon is None else (lambda of: halves(x[of]))
            model = GBDTRegressor(system, n_estimators=TREES, max_depth=3, learning_rate=0.3, n_jobs=THREADS)
            predicted = model.fit(shown(train), y[train]).predict(shown(test))
            found.append(float(np.sqrt(np.mean((predicted - y[test]) ** 2))))
        rows.append({
            "data": "flights, minutes late",
            "a person": "none" if epsilon is None else f"{epsilon:g}",
            "RMSE": f"{mean(found):.2f}",
            "sd of RMSE": f"{stdev(found):.2f}",
            "sd of labels": f"{y.std():.2f}",
            "bar": "" if epsilon != 1.0 else verdict(mean(found), 18.5),
        })  # fmt: skip
    return rows


def auc_of(system: System, data: Data, train: NDArray[np.intp], test: NDArray[np.intp]) -> float:
    x = data.x.astype(np.float32)
    shown = {name: x[of] if system == "pooled" else halves(x[of]) for name, of in (("train", train), ("test", test))}
    model = GBDTClassifier(system, n_estimators=TREES, max_depth=3, learning_rate=0.3, n_jobs=THREADS)
    model.fit(shown["train"], data.y[train])
    return float(roc_auc_score(data.y[test], model.predict_proba(shown["test"])[:, 1]))


def forecasts() -> list[dict[str, object]]:
    """Return what is forecast and what is lost, of AUC above 1/2, by table, rows, system and epsilon."""
    fitted, held = [default_of_credit_card_clients(), susy(), give_me_some_credit()], [higgs(), flights(), adult()]
    rows = []
    for data in (*fitted, *held):
        order = np.random.default_rng(1).permutation(len(data.y))
        test, rest = np.split(order, [min(10_000, len(order) // 3)])

        for n_rows, kinds in ((2_000, [FedXGBoostLDP]), (10_000, [FedXGBoostLDP, FederBoostVertical])):
            train = rest[:n_rows]
            gain = auc_of("pooled", data, train, test) - 0.5
            columns = dict(zip(("p0", "p1"), (part.shape[1] for part in halves(data.x[:1]).values()), strict=True))
            share = float(min(data.y.mean(), 1.0 - data.y.mean()))
            shape = Shape(rows=len(train), columns=columns, slots={}, rarer=share)
            roles = Roles("p0", {"p0": "active", "p1": "passive"}, ["p0", "p1"])
            for kind, epsilon in product(kinds, (0.5, 1.0, 2.0, 4.0)):
                own = kind(epsilon=epsilon)
                of = find_system(kind.system).forecast(roles, own, BoostingOptions().checked(own), shape, None)
                rows.append({
                    "data": data.title,
                    "kept back": "yes" if any(data is of for of in held) else "no",
                    "rows": len(train),
                    "system": kind.system,
                    "epsilon": f"{epsilon:g}",
                    "lost": f"{1.0 - (auc_of(own, data, train, test) - 0.5) / gain:.3f}",
                    "forecast": f"{of.lost:.3f}",
                    "from": f"{of.between[0]:.3f}",
                    "to": f"{of.between[1]:.3f}",
                })  # fmt: skip
    return rows


def draw(results: dict[str, dict], quick: bool) -> None:
    """Draw the figures' four panels: data sets by epsilon."""
    figure, axes = panels([f"{title}, epsilon {epsilon:g} a tree" for title in results for epsilon in (1.0, 3.0)])
    trees = np.arange(1, TREES + 1)
    for panel, (title, epsilon) in zip(
        axes, [(title, epsilon) for title in results for epsilon in (1.0, 3.0)], strict=True
    ):
        shown = {
            "plain": ("plain", COLOURS["XGBoost"], "-"),
            f"laplace {epsilon:g} first_order": ("Laplace, first order", SHADES[1], ":"),
            f"laplace {epsilon:g} second_order": ("Laplace, second order", SHADES[1], "-"),
            f"duchi {epsilon:g} first_order": ("Duchi, first order", SHADES[0], ":"),
            f"duchi {epsilon:g} second_order": ("Duchi, second order", SHADES[0], "-"),
            f"labels {epsilon:g}": (f"labels, epsilon {epsilon:g} in all", SHADES[2], "-"),
            f"labels {epsilon * TREES:g}": (f"labels, epsilon {epsilon * TREES:g} in all", SHADES[3], "-"),
        }
        for name, (label, colour, style) in shown.items():
            losses = results[title][name][0][:, 1]
            band(panel, trees, losses.mean(axis=0), losses.std(axis=0, ddof=1), label, color=colour, linestyle=style)
        panel.set_xlabel("trees")
        panel.set_ylabel("test log loss")
        top = min(0.75, max(float(results[title][name][0][:, 1].mean(axis=0).max()) for name in shown))
        panel.set_ylim(None, top)
    axes[0].legend(fontsize=7)
    save(figure, "fedxgboost_ldp", quick=quick)


def draw_published(results: dict[str, dict], quick: bool) -> None:
    """Draw the training loss of the published lines: as published, and without exact sums."""
    figure, axes = panels([f"{title}, epsilon {epsilon:g} a tree" for title in results for epsilon in (1.0, 3.0)])
    for panel, (title, epsilon) in zip(axes, product(results, (1.0, 3.0)), strict=True):
        found = {name: losses[:, 0].mean(axis=0) for name, (losses, _) in results[title].items()}
        panel.plot(np.arange(1, TREES + 1), found["plain"], color=COLOURS["XGBoost"], label="no noise")
        for (mechanism, order), colour in zip(LINES, SHADES, strict=False):
            name, label = f"{mechanism} {epsilon:g} {order}", f"{mechanism.title()}, {order.replace('_', ' ')}"
            panel.plot(np.arange(1, TREES + 1), found[f"{name}, as published"], color=colour, label=label)
            panel.plot(np.arange(1, TREES + 1), found[name], ":", color=colour, label=f"{label}, no exact sums")
        panel.set(xlabel="trees", ylabel="training log loss")
        panel.set_ylim(None, min(0.75, max(float(line.max()) for line in found.values())))
    axes[0].legend(fontsize=7)
    save(figure, "fedxgboost_ldp_published", quick=quick)


def speed(data: Data, passes: int, paillier_rows: int) -> list[dict[str, object]]:
    """Time trees, set-up left out, method after method in every pass; times and ratios are medians over passes."""
    x, y = data.x.astype(np.float32), data.y
    cut = halves(x)
    noise = {name: system for name, system in settings(quick=True).items() if name.startswith(("laplace", "duchi"))}
    noise["piecewise 1 second_order"] = noisy("piecewise", 1.0)
    every = {**noise, "nothing hidden": labels(60.0), "one table": "pooled"}
    models = {name: GBDTClassifier(system, **COMMON).fit(cut, y) for name, system in every.items()}
    matrix = xgboost.QuantileDMatrix(x, y, max_bin=32)
    settled = {"objective": "binary:logistic", "tree_method": "hist", "max_bin": 32, "base_score": 0.5}
    settled |= {"max_depth": COMMON["max_depth"], "eta": COMMON["learning_rate"], "nthread": THREADS}
    taken: dict[str, list[float]] = {name: [] for name in [*models, "XGBoost"]}
    others = []
    for _ in range(passes):
        before, began = cpu_of_others(), time.perf_counter()
        for name, model in models.items():
            taken[name].append(model.fit(cut, y).timings_["boosting"] / TREES)
        taken["XGBoost"].append(seconds(lambda: xgboost.train(settled, matrix, TREES)) / TREES)
        others.append((cpu_of_others() - before) / (time.perf_counter() - began))
    a_tree = {name: median(values) for name, values in taken.items()}
    rows = []
    for name in models:
        ratio, of_one_table, of_xgboost = (
            median(mine / other for mine, other in zip(taken[name], taken[than], strict=True))
            for than in ("nothing hidden", "one table", "XGBoost")
        )
        rows.append({
            "data": data.title,
            "rows": len(y),
            "noise": name,
            "ms a tree": 1e3 * a_tree[name],
            "times nothing hidden": ratio,
            "bar": BAR if name in noise else "",
            "": verdict(ratio, BAR) if name in noise else "",
            "times one table": of_one_table,
            "times XGBoost": of_xgboost,
            "published s": PUBLISHED.get(name, ""),
            "cores others used": median(others),
        })  # fmt: skip
    few = {name: part[:paillier_rows] for name, part in cut.items()}
    one = {**COMMON, "n_estimators": 1}
    secure = GBDTClassifier(SecureBoost(encryption="paillier", key_bits=2048, allow_exact_sums=True), **one)
    alone = GBDTClassifier(**one).fit(few, y[:paillier_rows])
    secure.fit(few, y[:paillier_rows])
    ours, theirs = secure.timings_["boosting"], alone.timings_["boosting"]
    ratio = ours / theirs
    rows.append({
        "data": data.title,
        "rows": paillier_rows,
        "noise": "Paillier (SecureBoost, 2048 bit)",
        "ms a tree": 1e3 * ours,
        "times nothing hidden": "",
        "bar": f">= {BAR_PAILLIER:g}",
        "": "kept" if ratio >= BAR_PAILLIER else "missed",
        "times one table": ratio,
        "times XGBoost": "",
        "published s": PUBLISHED["Paillier"],
        "cores others used": "",
    })  # fmt: skip
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--speed", action="store_true", help="the time fits take, alone")
    parser.add_argument("--forecast", action="store_true", help="what treaty plan forecasts, alone")
    parser.add_argument("--numbers", action="store_true", help="a regression on numbers randomised once, alone")
    parser.add_argument("--published", action="store_true", help="losses of the six published lines, alone")
    parser.add_argument("--splits", type=int, default=5, help="of --published")
    options = parser.parse_args()
    compile_kernels(find_system("fedxgboost-ldp"))
    seeds, lines = (2 if options.quick else 5), settings(options.quick)
    sets = [give_me_some_credit(), default_of_credit_card_clients()]
    if options.forecast:
        report("noise_forecast", forecasts(), quick=options.quick)
        return
    if options.numbers:
        report("fedxgboost_ldp_numbers", numbers(seeds), quick=options.quick)
        return
    if options.published:
        lines = published_lines()
        results = {data.title: trajectories(data, lines, 2 if options.quick else options.splits) for data in sets}
        rows = [row for data in sets for row in rows_of(data, lines, results[data.title])]
        report("fedxgboost_ldp_published", rows, quick=options.quick)
        draw_published(results, options.quick)
        return
    if not options.speed:
        results = {data.title: trajectories(data, lines, seeds) for data in sets}
        rows = [row for data in sets for row in rows_of(data, lines, results[data.title])]
        # tables that no factor was chosen on: HIGGS; and SUSY, which has few rows
        few = {name: lines[name] for name in ("plain", "labels 1", "labels 3", "duchi 1 second_order")}
        rows += [row for data in (susy(), higgs()) for row in rows_of(data, few, trajectories(data, few, seeds))]
        report("fedxgboost_ldp", rows, quick=options.quick)
        draw(results, options.quick)
        if not options.quick:
            curves = [
                {"data": title, "noise": name, "trees": k + 1, "log loss": f"{loss:.5f}"}
                for title, found in results.items()
                for name, (losses, _) in found.items()
                for k, loss in enumerate(losses[:, 1].mean(axis=0))
            ]
            write("fedxgboost_ldp_curves", curves)
    passes, rows_under_paillier = (1, 2_000) if options.quick else (25, 30_000)
    timed = [row for data in sets for row in speed(data, passes, rows_under_paillier)]
    report("fedxgboost_ldp_speed", timed, quick=options.quick)


if __name__ == "__main__":
    main()
