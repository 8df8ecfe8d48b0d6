"""Time and bytes of a SecureBoost tree with hidden rows, beside sealed and open sums with the same objective.

Two parties, a core each: threads of one process, or ("tls") a process each, over mutual TLS. A tree is the difference
between trainings of 2 and of more trees, so that set-up is not in it. The objective is `logistic_pieces`. Each part can
be run alone, and writes its own file:

`--tree` (`hidden_tree.csv`): Default of Credit Card Clients, 20 000 rows, 11 columns with the labels, 12 at the passive
party, depth 3, 32 bins. Bars: 1.2 s and 40 MB a tree. About 2 minutes.

`--deep` (`hidden_deep.csv`): 50 000 drawn rows, 10 + 10 columns, depth 6, 16 bins. Bars: 5 s and 250 MB. 2 minutes.
Squirrel (Lu et al., USENIX Security 2023), the one published system for two parties that hides as much, states less
than 6 s at 50 000 rows; its columns, bins and link were not at hand.

`--many-rows` (`hidden_many_rows.csv`): 1 000 000 drawn rows, 10 + 10 columns, depth 3, 32 bins. Bars: 9 s, 600 MB,
6 GB of memory a party. 4 minutes. Squirrel states 90 s above a million rows, over a wide area.

`--links` (`hidden_links.csv`): the first table's tree on played links of 1 Gbit/s and 0.5 ms, and of 100 Mbit/s and
20 ms round trip. 2 minutes.

`--predict` (`hidden_predict.csv`): predictions of 10 000 rows, and of one, by 50 trees of depth 3, and the megabytes of
a row. Bar: 60 ms for one row, of which base transfers take most. 1 minute.

`--parties` (`hidden_parties.csv`): the first table's columns at two parties, 8 + 15, and at three, 8 + 8 + 7. 1 minute.

`--equal` (`hidden_equal.csv`): six real tables, two thirds of their rows, one half of the columns at each party: are
all predictions those of the pooled grower with the same objective, bit for bit? AUC on the other rows, beside the
logistic loss's. Bars: all equal, AUC at most 0.003 below. 5 minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
from sklearn.metrics import roc_auc_score

import sealed_sums
from data import (
    adult,
    arguments,
    default_of_credit_card_clients,
    flights,
    give_me_some_credit,
    higgs,
    report,
    seconds,
    splits,
    susy,
    verdict,
)
from sealed_sums import SETTINGS, SYSTEMS, drawn, one_tree, peak_mb, played, tables_of_clients
from treaty import GBDTClassifier
from treaty.runs.warm_up import compile_kernels

PIECES = {"objective": "logistic_pieces"}


def compared(kinds: Sequence[str], tables, y, trees: int, bars: tuple[float, float], transport: str, **options) -> list:
    rows = []
    for kind in kinds:
        found = one_tree(tables, y, kind, trees, transport, **PIECES, **options)
        rows.append({"rows": len(y), "kind": kind, "transport": transport, **found})
        for bar, unit in zip(bars, ("s", "MB"), strict=True):
            rows[-1][f"<= {bar:g} {unit}"] = verdict(found[f"{unit} a tree"], bar) if kind == "hidden" else ""
        rows[-1]["peak MB"] = peak_mb()
        print(rows[-1], flush=True)
    return rows


def tree(quick: bool) -> list[dict]:
    tables, y = tables_of_clients()
    kinds, trees, found = ("open", "sealed", "hidden"), 2 if quick else 10, []
    for transport in ("memory", "tls"):
        found += compared(kinds, tables, y, trees, (1.2, 40.0), transport)
    return found


def deep(quick: bool) -> list[dict]:
    tables, y = drawn(5_000 if quick else 50_000, 10)
    few = {"max_depth": 6, "max_bin": 16}
    return compared(("sealed", "hidden"), tables, y, 1 if quick else 4, (5.0, 250.0), "memory", **few)


def many_rows(quick: bool) -> list[dict]:
    tables, y = drawn(50_000 if quick else 1_000_000, 10)
    return compared(("sealed", "hidden"), tables, y, 1 if quick else 3, (9.0, 600.0), "memory")


def links(quick: bool) -> list[dict]:
    tables, y = tables_of_clients()
    found = []
    for rate, round_trip in ((1e9, 0.5e-3),) if quick else ((1e9, 0.5e-3), (100e6, 20e-3)):
        with patch.object(sealed_sums, "RATE", rate), played(round_trip):
            for kind in ("sealed", "hidden"):
                of = one_tree(tables, y, kind, 1 if quick else 3, "memory", **PIECES)
                found.append({"Mbit/s": rate / 1e6, "round trip ms": 1e3 * round_trip, "kind": kind, **of})
                print(found[-1], flush=True)
    return found


def parties(quick: bool) -> list[dict]:
    tables, y = tables_of_clients()
    x, found = np.concatenate(list(tables.values()), axis=1), []
    for cuts in ([8], [8, 16]):
        columns = np.split(x, cuts, axis=1)
        given = dict(zip(("active", "passive", "further"), columns, strict=False))
        one = one_tree(given, y, "hidden", 2 if quick else 10, "memory", **PIECES)
        found.append({"columns": " + ".join(str(part.shape[1]) for part in columns), **one, "peak MB": peak_mb()})
        print(found[-1], flush=True)
    return found


def predict(quick: bool) -> list[dict]:
    tables, y = tables_of_clients()
    model = GBDTClassifier(SYSTEMS["hidden"], n_estimators=5 if quick else 50, n_jobs=1, **SETTINGS, **PIECES)
    model.fit(tables, y)
    found = []
    for count in (1, 100 if quick else 10_000):
        some = {name: x[:count] for name, x in tables.items()}
        model.predict_proba(some)
        took = min(seconds(lambda some=some: model.predict_proba(some)) for _ in range(5))
        found.append(
            {
                "rows": count,
                "trees": model.n_estimators,
                "ms": 1e3 * took,
                "<= 60 ms": verdict(1e3 * took, 60.0) if count == 1 else "",
            }
        )
        print(found[-1], flush=True)
    return found


def equal(quick: bool) -> list[dict]:
    found = []
    for load in (default_of_credit_card_clients, give_me_some_credit, adult, flights, susy, higgs):
        data = load()
        train, test = splits(data, 1)[0]
        train = train[: 1_000 if quick else len(train)]
        half = data.x.shape[1] // 2
        for depth, trees in ((2, 2),) if quick else ((3, 20), (6, 5)):
            options = {"n_estimators": trees, "max_depth": depth, "max_bin": 32, "base_score": None}
            train_x, test_x = (
                {"active": data.x[of][:, :half], "passive": data.x[of][:, half:]} for of in (train, test)
            )
            hidden = GBDTClassifier(SYSTEMS["hidden"], **options, **PIECES).fit(train_x, data.y[train])
            pooled, usual = (
                GBDTClassifier("pooled", **options, objective=objective).fit(data.x[train], data.y[train])
                for objective in ("logistic_pieces", None)
            )
            ours = hidden.predict_proba(test_x)[:, 1]
            theirs, logistic = (model.predict_proba(data.x[test])[:, 1] for model in (pooled, usual))
            auc, before = (roc_auc_score(data.y[test], of) for of in (ours, logistic))
            found.append({
                "table": data.title, "rows": len(train), "columns": data.x.shape[1], "depth": depth, "trees": trees,
                "equal": bool(np.array_equal(ours, theirs)), "AUC": auc, "AUC, logistic": before,
                ">= -0.003": verdict(before - auc, 0.003),
            })  # fmt: skip
            print(found[-1], flush=True)
    return found


PARTS = {
    "equal": equal, "tree": tree, "deep": deep, "many_rows": many_rows, "links": links, "parties": parties,
    "predict": predict,
}  # fmt: skip


def main(given: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    for part in PARTS:
        parser.add_argument(f"--{part.replace('_', '-')}", action="store_true", help="this part alone")
    options = parser.parse_args(given)
    compile_kernels()
    chosen = [part for part in PARTS if vars(options)[part]] or [*PARTS]
    for part in chosen:
        report(f"hidden_{part}", PARTS[part](options.quick), quick=options.quick)


if __name__ == "__main__":
    main()
