"""Time, bytes and message rounds of a SecureBoost tree under sealed sums, beside open ones and XGBoost.

Both parties on two cores, `n_jobs=1` each, threads of one process unless said ("tls": a process each, over mutual
TLS). A tree is the difference between trainings of 2 and of more trees, so that set-up, which is its own column, is not
in it. Lattice map, 3072-bit class. Each part can be run alone, and writes its own file:

`--tree` (`sealed_tree.csv`): Default of Credit Card Clients, 20 000 rows, 11 columns with the labels, 12 at the passive
party, depth 3, 32 bins. Bars: 0.6 s and 60 MB a tree. About 2 minutes.

`--rows` (`sealed_rows.csv`): 1 000 000 drawn rows, 10 + 10 columns, depth 3, 32 bins. Bar: 0.6 s more than open. About
10 minutes, 6 GB.

`--squirrel` (`sealed_squirrel.csv`): 50 000 drawn rows, depth 6. The columns and bins of Squirrel's table 4 (Lu et al.,
USENIX Security 2023) were not at hand: 10 + 10 columns and 8, 16 and 32 bins are tried. Bar: 1.5 s a tree. 3 minutes.

`--links` (`sealed_links.csv`): the first table's tree on played links of 0.2, 20 and 100 ms round trip (100 Mbit/s), by
how many comparisons are taken to cost as much as a step: as measured when the job begins, and others. 5 minutes. Bars:
2 s at 20 ms, 4.5 s at 100 ms.

`--shaped` (`sealed_shaped.csv`): the first table's tree, open and sealed, at 20 and 100 ms round trip (100 Mbit/s), by
threads on a played link, and between two processes in network namespaces. Bar: the same seconds within 10 %. Needs
root. 5 minutes.

`--classes` (`sealed_classes.csv`): rounds of three classes on the first table, whose trees grow together or one after
another, on played links of 0.2, 20 and 100 ms round trip (100 Mbit/s). 4 minutes.

`--open` (`sealed_open.csv`): the same rounds with open sums. 1 minute.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import xgboost
from numpy.typing import NDArray

from data import arguments, cpu_of_others, default_of_credit_card_clients, report, seconds, verdict
from namespaces import NotPermitted, train_in_namespaces
from treaty import GBDTClassifier, SecureBoost
from treaty.messaging.channel import LinkSpeed
from treaty.runs import threads
from treaty.runs.warm_up import compile_kernels
from treaty.systems.vertical.cipher_choice import best_step

PARTS = ("tree", "rows", "squirrel", "links", "shaped", "classes", "open")
SLOWEST, LARGEST, MORE_THAN_OPEN, SLOWEST_DEEP = 0.6, 60.0, 0.6, 1.5
RATE, APART = 100e6, 0.1  # bits per second, and how far a played link may be from a real one
FEW = 2
SETTINGS = {"max_depth": 3, "learning_rate": 0.3, "max_bin": 32, "base_score": 0.5}

SYSTEMS = {
    "open": SecureBoost(encryption="lattice", sums="open", allow_exact_sums=True),
    "sealed": SecureBoost(encryption="lattice", sums="sealed", allow_exact_sums=True),
    "hidden": SecureBoost(membership="hidden"),
}

Tables = dict[str, NDArray[np.float32]]


def tables_of_clients() -> tuple[Tables, NDArray[np.int64]]:
    data = default_of_credit_card_clients()
    rows = np.random.default_rng(0).permutation(len(data.y))[:20_000]
    x = data.x[rows].astype(np.float32)
    return {"active": x[:, :11], "passive": x[:, 11:]}, data.y[rows]


def drawn(n_rows: int, columns: int) -> tuple[Tables, NDArray[np.int64]]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n_rows, 2 * columns), np.float32)
    y = (x[:, 0] + x[:, columns] * x[:, 1] + rng.standard_normal(n_rows, np.float32) > 0).astype(np.int64)
    return {"active": x[:, :columns], "passive": x[:, columns:]}, y


def one_tree(tables: Tables, y: NDArray[np.int64], sums: str, trees: int, transport: str, **options: Any) -> dict:
    """Return seconds, megabytes and messages of a tree, and the seconds of set-up."""
    settings, system = SETTINGS | options, SYSTEMS[sums]
    took, moved, messages = {}, {}, {}
    before = cpu_of_others()
    for count in (FEW, FEW + trees):
        model = GBDTClassifier(system, n_estimators=count, n_jobs=1, transport=transport, **settings)
        whole = seconds(lambda model=model: model.fit(tables, y))
        took[count] = model.timings_["boosting"]
        setting_up = whole - took[count]
        moved[count] = sum(of["bytes"] for of in model.communication_.values()) / 1e6
        messages[count] = model.communication_["passive -> active"]["messages"]
    return {
        "s a tree": (took[FEW + trees] - took[FEW]) / trees,
        "MB a tree": (moved[FEW + trees] - moved[FEW]) / trees,
        "messages a tree": round((messages[FEW + trees] - messages[FEW]) / trees),
        "set-up s": setting_up,
        "others' cores": round(max(0.0, (cpu_of_others() - before) / (took[FEW] + took[FEW + trees])), 2),
    }


def xgboost_tree(tables: Tables, y: NDArray[np.int64], **options: Any) -> float:
    """Return XGBoost's seconds for a tree on all columns."""
    settings = {"max_depth": 3, "learning_rate": 0.3, "max_bin": 32, "tree_method": "hist", "n_jobs": 2, **options}
    x = np.concatenate(list(tables.values()), axis=1)
    model = xgboost.XGBClassifier(n_estimators=20, **settings)
    model.fit(x, y)
    return seconds(lambda: model.fit(x, y)) / 20


def tree(quick: bool) -> list[dict]:
    tables, y = tables_of_clients()
    theirs = xgboost_tree(tables, y)
    rows = []
    for sums, transport in (("open", "memory"), ("sealed", "memory"), ("open", "tls"), ("sealed", "tls")):
        found = one_tree(tables, y, sums, 2 if quick else 20, transport)
        rows.append({
            "sums": sums,
            "transport": transport,
            **found,
            f"<= {SLOWEST} s": verdict(found["s a tree"], SLOWEST),
            f"<= {LARGEST:g} MB": verdict(found["MB a tree"], LARGEST),
            "times XGBoost": found["s a tree"] / theirs,
            "peak MB": peak_mb(),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def many_rows(quick: bool) -> list[dict]:
    tables, y = drawn(50_000 if quick else 1_000_000, 10)
    found = {sums: one_tree(tables, y, sums, 2 if quick else 5, "memory") for sums in ("open", "sealed")}
    more = found["sealed"]["s a tree"] - found["open"]["s a tree"]
    return [
        {"sums": sums, "rows": len(y), **of, "s more than open": more if sums == "sealed" else "",
         f"<= {MORE_THAN_OPEN} s": verdict(more, MORE_THAN_OPEN) if sums == "sealed" else "", "peak MB": peak_mb()}
        for sums, of in found.items()
    ]  # fmt: skip


def squirrel(quick: bool) -> list[dict]:
    tables, y = drawn(5_000 if quick else 50_000, 10)
    rows = []
    for bins in (8,) if quick else (8, 16, 32):
        found = one_tree(tables, y, "sealed", 1 if quick else 4, "memory", max_depth=6, max_bin=bins)
        rows.append({
            "rows": len(y), "columns of a party": 10, "depth": 6, "bins": bins, **found,
            f"<= {SLOWEST_DEEP} s": verdict(found["s a tree"], SLOWEST_DEEP),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


@contextmanager
def played(round_trip: float) -> Iterator[None]:
    """Have threads of this process talk over a line of `RATE`."""
    play, line = threads.play, LinkSpeed(bits_per_second=RATE, delay=round_trip / 2)

    def slowly(*given: Any, **named: Any) -> Any:
        return play(*given, **{**named, "link": line})

    with patch("treaty.runs.threads.play", slowly):
        yield


def links(quick: bool) -> list[dict]:
    tables, y = tables_of_clients()
    rows = []
    for round_trip in (0.2e-3,) if quick else (0.2e-3, 20e-3, 100e-3):
        for step in (0, 1) if quick else (0, 1, 100):  # 0: as measured
            said: list[int] = []

            def taken(*given: Any, step: int = step, said: list[int] = said) -> int:
                said.append(step or best_step(*given))
                return said[-1]

            with (
                played(round_trip),
                patch("treaty.systems.vertical.sealed_active.best_step", taken),
            ):
                found = one_tree(tables, y, "sealed", 1 if quick else 4, "memory")
            rows.append({
                "round trip ms": 1e3 * round_trip,
                "comparisons a step": said[-1],
                "measured": not step,
                **found,
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def shaped(quick: bool) -> list[dict]:
    tables, y = tables_of_clients()
    columns = {"active": (tables["active"], y), "passive": (tables["passive"], None)}
    rows = []
    for sums, round_trip in product(("open", "sealed"), (20e-3,) if quick else (20e-3, 100e-3)):
        # open trees are short
        trees = 10 if sums == "open" else 1 if quick else 2
        with played(round_trip):
            in_threads = one_tree(tables, y, sums, trees, "memory")
        own = {"encryption": "lattice", "sums": sums, "allow_exact_sums": True}
        try:
            few, many = (
                train_in_namespaces(
                    columns, "secureboost", SETTINGS | {"n_estimators": count}, RATE, round_trip / 2, own=own, n_jobs=1
                )
                for count in (FEW, FEW + trees)
            )
        except NotPermitted as error:
            print(f"skipped: {error}")
            break
        took = (many.boosting - few.boosting) / trees
        ratio = in_threads["s a tree"] / took
        rows.append({
            "sums": sums, "round trip ms": 1e3 * round_trip, "s a tree, played": in_threads["s a tree"],
            "s a tree, namespaces": took, "ratio": ratio, f"within {APART:.0%}": verdict(abs(ratio - 1.0), APART),
            "set-up s, played": in_threads["set-up s"], "set-up s, namespaces": many.setup, "by": many.by,
            "others' cores": max(in_threads["others' cores"], few.others, many.others),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def classes(quick: bool, sums: str = "sealed", rounds: int = 3) -> list[dict]:
    """Rounds of three classes, whose trees grow together or one after another."""
    tables, y = tables_of_clients()
    first = tables["active"][:, 0]
    y = y + (first > np.median(first))
    rows = []
    for round_trip in (20e-3,) if quick else (0.2e-3, 20e-3, 100e-3):
        found = {}
        for way, together in (("one after another", 1), ("together", 3)):
            with played(round_trip), patch("treaty.systems.vertical.setup.trees_together", lambda *_, k=together: k):
                found[way] = one_tree(tables, y, sums, 1 if quick else rounds, "memory")
        for way, of in found.items():
            named = {name.replace("a tree", "a round"): value for name, value in of.items()}
            saved = 1.0 - of["s a tree"] / found["one after another"]["s a tree"]
            rows.append({"round trip ms": 1e3 * round_trip, "three trees": way, **named, "saved": saved})
            print(rows[-1], flush=True)
    return rows


def main(given: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    for part in PARTS:
        parser.add_argument(f"--{part}", action="store_true", help="this part alone")
    options = parser.parse_args(given)
    compile_kernels()
    chosen = [part for part in PARTS if vars(options)[part]] or PARTS
    of_open = partial(classes, sums="open", rounds=10)
    for part, measure in zip(PARTS, (tree, many_rows, squirrel, links, shaped, classes, of_open), strict=True):
        if part in chosen:
            report(f"sealed_{part}", measure(options.quick), quick=options.quick)


if __name__ == "__main__":
    main()
