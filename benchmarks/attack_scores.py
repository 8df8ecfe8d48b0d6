"""What attacks find from each party's view, for every system and its guards, beside the model's accuracy.

Claim: an attack finds something where no guard stops it, and no more than a guess where one is said to. Give Me Some
Credit, Default of Credit Card Clients and Adult (14 columns with categories): 3,000 rows of each, a third of them held
back; 20 trees of depth 3 (regressions: as many epochs as they take). Split by column: the active party has every other
column from the first on, one partner the rest. Split by row: three participants, twelve users under fedxgb. Attacks
are those of `treaty audit`; the score of one that is tried at several parties, or several times, is that furthest above
its guess. In paper mode keys are 1024 bits, as published; other keys are 3072. Half an hour; `--quick`: 600 rows of the
first set, 3 trees.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
from sklearn.model_selection import train_test_split

from data import RESULTS, arguments, default_of_credit_card_clients, find, give_me_some_credit, report
from treaty.attacks.auditing import Standing, compare, entrant
from treaty.attacks.views import Finding
from treaty.data.arrow_tables import with_categories

OPEN = "allow_exact_sums=true"
SYSTEMS = [
    f"secureboost:encryption=ou:{OPEN}",
    f"secureboost:encryption=ou:{OPEN}:rl_trees=1",
    f"secureboost:encryption=ou:{OPEN}:purity_guard=0.2",
    f"secureboost:encryption=ou:{OPEN}:mechanism=label_rr:epsilon=1",
    f"secureboost:mode=paper:allow_insecure=true:{OPEN}",
    f"secureboost:encryption=lattice:{OPEN}",
    "secureboost:sums=sealed",
    f"fedxgboost-smm:{OPEN}",
    "fedxgboost-smm:mode=paper:allow_insecure=true:version=1",
    "fedxgboost-smm:mode=paper:allow_insecure=true:version=2",
    "fedxgboost-ldp:mechanism=piecewise:epsilon=1",
    "fedxgboost-ldp:mechanism=piecewise:epsilon=8",
    "fedxgboost-ldp:mechanism=label_rr:epsilon=1",
    "federboost-vertical:epsilon=1",
    "federboost-vertical:epsilon=4",
    "federboost-vertical:epsilon=40",
    "federboost-horizontal",
    "federboost-horizontal:epsilon_total=16",
    "fedxgb",
    "quasi-newton",
    "sgd",
]
ADULT = (
    "age workclass fnlwgt education education_num marital_status occupation relationship race sex capital_gain "
    "capital_loss hours_per_week native_country income"
).split()


def adult() -> tuple[str, pd.DataFrame, np.ndarray] | None:
    """32,561 rows, 14 columns, 8 of them categories (UCI 2, its training rows)."""
    path = find("adult.data.gz")
    if path is None:
        return None
    with gzip.open(path, "rt") as file:
        x = pd.read_csv(file, names=ADULT, skipinitialspace=True, na_values="?")
    return "Adult", x, (x.pop("income") == ">50K").to_numpy().astype(int)


def tables(quick: bool) -> Iterator[tuple[str, pd.DataFrame, np.ndarray]]:
    for load in [give_me_some_credit] if quick else [give_me_some_credit, default_of_credit_card_clients]:
        data = load()
        yield data.title, pd.DataFrame(data.x, columns=data.names), data.y
    if not quick and (found := adult()) is not None:
        yield found


def lines(title: str, standing: Standing) -> Iterator[dict[str, object]]:
    """Give a line for each attack and kind of target, labels or bins: the finding furthest above its guess."""
    furthest: dict[tuple[str, str], Finding] = {}
    for finding in standing.findings:  # sorted by how far they are
        furthest.setdefault((finding.attack, finding.target.partition(" of ")[0]), finding)
    for finding in furthest.values():
        yield {
            "data": title, "system": standing.title, "AUC": standing.auc, "log-loss": standing.log_loss,
            "MB": standing.megabytes, "attack": finding.attack, "by": finding.party,
            "on": finding.target, "measure": finding.measure, "score": finding.score, "guess": finding.baseline,
            "standard error": finding.error,
            "verdict": finding.verdict,
        }  # fmt: skip


def page(found: Sequence[Mapping[str, str]]) -> str:
    """Return the results as a table in Markdown for each data set; what finds something is in bold."""
    text = []
    for title in dict.fromkeys(line["data"] for line in found):
        text += [
            f"**{title}**\n",
            "| system | AUC | MB | labels | others' columns | training rows, by the model |",
            "|---|---|---|---|---|---|",
        ]
        for system in dict.fromkeys(line["system"] for line in found if line["data"] == title):
            own = [line for line in found if (line["data"], line["system"]) == (title, system)]
            cells = [worst(own, *named) for named in (("labels",), ("bins", "buckets"), ("training rows",))]
            auc, megabytes = own[0]["AUC"], float(own[0]["MB"])
            text.append(f"| `{system}` | {float(auc):.3f} | {megabytes:.3g} | {' | '.join(cells)} |")
        text.append("")
    return "\n".join(text)


def worst(found: Sequence[Mapping[str, str]], *targets: str) -> str:
    """Return the score and guess of the attack on a kind of target that is furthest above its guess."""
    about = [line for line in found if line["on"].startswith(targets)]
    if not about:
        return ""
    scored = [(float(line["score"]), float(line["guess"]), line) for line in about]
    score, guess, line = max(scored, key=lambda of: (of[0] - of[1]) / (1.0 - of[1]))
    said = f"{score:.3f} ({guess:.3f})"
    return f"**{said}** {line['attack'].partition(' (')[0]}" if line["verdict"] == "finds" else said


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", help="play this system alone, and keep the results of all others")
    parser.add_argument("--page", action="store_true", help="print the kept results as docs/audit.md has them")
    given = parser.parse_args()
    if given.page:
        with (RESULTS / "attack_scores.csv").open() as file:
            print(page(list(csv.DictReader(file))))
        return
    quick = given.quick
    entrants = [entrant(name) for name in ([given.only] if given.only else SYSTEMS)]
    found: list[dict[str, object]] = []
    for title, x, y in tables(quick):
        kept = train_test_split(np.arange(len(y)), train_size=600 if quick else 3000, stratify=y, random_state=0)[0]
        columns, y = with_categories(pa.Table.from_pandas(x.iloc[kept], preserve_index=False)), y[kept]
        cut = {"active": columns.column_names[::2], "partner": columns.column_names[1::2]}
        train, test = train_test_split(np.arange(len(y)), test_size=1 / 3, stratify=y, random_state=0)
        for standing in compare(
            entrants, columns, y, cut, np.array_split(train, 3), test,
            trees=3 if quick else 20, begin=lambda name, title=title: print(f"{title}: {name}", flush=True),
        ):  # fmt: skip
            if standing.error:
                print(f"{title}: {standing.title} was not played: {standing.error}")
            found += lines(title, standing)
    report("attack_scores", found, quick=quick, keys=("data", "system") if given.only else ())


if __name__ == "__main__":
    main()
