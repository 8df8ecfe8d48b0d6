"""What a passive party of SecureBoost finds of the labels in its own messages, guard by guard (docs/secureboost.md).

Claim: rows of nodes tell labels nearly as well as the model does; messages without rows tell nothing; guards that
change what is grown help as far as they keep pure nodes from being shown. Two parties: breast cancer, the passive party
with four columns that tell little themselves, and 4,000 rows of Default of Credit Card Clients, amounts at the passive
party and payment status at the other. Trees of depth 3, 512-bit keys, which the attack does not depend on.

`attack` is the AUC with which rows that shared many nodes are taken for one class (Kang et al. 2024), `model` the
training AUC of the same options. With `label_rr`, and with labels shuffled among rows, where 100 labels are known to
the attacker and only what trees of depth 6 learned by heart can leak: mean, least and largest of five draws (`model`:
of one more). A minute; `--quick`: 5 trees and two draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score

import treaty
from data import arguments, default_of_credit_card_clients, report
from treaty.data.table import to_table
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart
from treaty.privacy.leaks import attack_auc, cluster_scores, known_label_scores
from treaty.privacy.randomised_response import randomise_labels
from treaty.runs.threads import RunRecord, play
from treaty.systems.options import names_of
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.secureboost import secureboost
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import LabelledRows, PartySpec, RoleInput, star
from treaty.systems.vertical.exact_sums import node_sets_from_transcript
from treaty.systems.vertical.messages import SplitColumns
from treaty.systems.vertical.training import roles_by_column

FITTING = {"min_child_samples": 5, "insecure_test_key_bits": 512, "allow_insecure": True}
SHAPE = {"n_estimators": 20, "max_depth": 3, "learning_rate": 0.3, "base_score": 0.5, "max_bin": 32}
BY_HEART = {"max_depth": 6, "min_child_samples": 1}
EPSILON = 1.0
Tables = dict[str, pd.DataFrame]


def breast_cancer() -> tuple[str, Tables, np.ndarray]:
    X, y = load_breast_cancer(return_X_y=True, as_frame=True)
    passive = ["mean fractal dimension", "texture error", "smoothness error", "symmetry error"]
    return "breast cancer", {"p0": X.drop(columns=passive), "p1": X[passive]}, (y.to_numpy() == 0).astype(float)


def credit_cards() -> tuple[str, Tables, np.ndarray]:
    data = default_of_credit_card_clients()
    rows = np.random.default_rng(0).permutation(len(data.y))[:4000]
    X = pd.DataFrame(data.x[rows], columns=data.names)
    bills = [name for name in X if name.startswith("BILL_AMT")]
    passive = ["SEX", "EDUCATION", "MARRIAGE", "AGE", "PAY_5", "PAY_6", *bills, "PAY_AMT5", "PAY_AMT6"]
    return data.title, {"p0": X.drop(columns=passive), "p1": X[passive]}, data.y[rows].astype(float)


def played(tables: Tables, y: np.ndarray, **options: object) -> RunRecord:
    """Train with the contents of all messages recorded; labels under noise are given as they were drawn."""
    own, common = chosen(**options)
    held = {name: to_table(table, party=name) for name, table in tables.items()}
    roles = roles_by_column(dict.fromkeys(tables, PartySpec()), "p0", own)

    def role(party: Party) -> ModelPart:
        data = LabelledRows(held[party.name], y)
        program = secureboost.active if party.name == "p0" else secureboost.passive
        boosting = BoostingOptions(**{**SHAPE, **common}).checked(own)
        return program(RoleInput(party=party, options=own, common=boosting, roles=roles, data=data, classes=[0, 1]))

    return play(dict.fromkeys(tables, role), star(roles, own), job="attack", protocol=own.system, record_content=True)


def chosen(**options: object) -> tuple[SecureBoost, dict[str, Any]]:
    """Return SecureBoost's own options, and the others."""
    given = {**FITTING, **options}
    own = {name: value for name, value in given.items() if name in names_of(SecureBoost)}
    return SecureBoost(allow_exact_sums=True, **own), {name: value for name, value in given.items() if name not in own}


def seen(found: RunRecord, n_rows: int) -> list[list[np.ndarray]]:
    """Return the nodes whose rows the passive party was told, tree by tree."""
    return node_sets_from_transcript(found.transcripts["p1"], n_rows)


def attacked(tables: Tables, y: np.ndarray, trained_on: np.ndarray, **options: object) -> float:
    return attack_auc(cluster_scores(seen(played(tables, trained_on, **options), len(y)), len(y)), y)


def attacked_by_columns(tables: Tables, y: np.ndarray, **options: object) -> float:
    """Cluster by which of its columns' splits were chosen, all that blind nodes leave to see."""
    entries = played(tables, y, encryption="lattice", **options).transcripts["p1"].entries
    answers = [entry.message(SplitColumns).new for entry in entries if entry.step == "SplitColumns"]
    bits = [np.frombuffer(answer.data, np.uint8).reshape(answer.shape) for answer in answers]
    packed = np.concatenate([np.zeros((0, -(-len(y) // 8)), np.uint8), *bits])  # perhaps none was chosen
    columns = np.unpackbits(packed, axis=1, count=len(y)).astype(np.int32)
    return attack_auc(cluster_scores([[column] for column in columns], len(y)), y)


def model(tables: Tables, y: np.ndarray, **options: object) -> float:
    own, common = chosen(**options)
    fitted = treaty.GBDTClassifier(own, **{**SHAPE, **common}).fit(tables, y)
    return float(roc_auc_score(y, fitted.predict_proba(tables)[:, 1]))


def drawn(found: list[float]) -> dict[str, float]:
    return {"attack": float(np.mean(found)), "least": min(found), "largest": max(found)}


def guards(title: str, tables: Tables, y: np.ndarray, trees: int, draws: int) -> Iterator[dict[str, object]]:
    """Yield what is left of the attack under each guard."""
    fitting = {"n_estimators": trees}

    def line(guard: str, found: dict[str, float], auc: float | str = "") -> dict[str, object]:
        return {"data": title, "trees": trees, "guard": guard, "least": "", "largest": "", "model": auc} | found

    told = {
        "plain": {},
        "rl_trees=1": {"rl_trees": 1},
        **{f"purity_guard={g}": {"purity_guard": g} for g in (0.4, 0.2, 0.1)},
        "lattice": {"encryption": "lattice"},
        'lattice, reveal="node"': {"encryption": "lattice", "reveal": "node"},
    }
    for guard, options in told.items():
        options = {"encryption": "ou", **fitting, **options}
        yield line(guard, {"attack": attacked(tables, y, y, **options)}, model(tables, y, **options))
    yield line("lattice, by chosen columns", {"attack": attacked_by_columns(tables, y, **fitting)})
    noise = {"encryption": "ou", "mechanism": "label_rr", "epsilon": EPSILON, **fitting}
    found = [attacked(tables, y, noisy(y), **noise) for _ in range(draws)]
    yield line(f"label_rr, epsilon {EPSILON:g}", drawn(found), model(tables, y, **noise))


def noisy(y: np.ndarray) -> np.ndarray:
    return randomise_labels(y, 2, EPSILON).astype(float)


def by_heart(title: str, tables: Tables, y: np.ndarray, trees: int, draws: int) -> Iterator[dict[str, object]]:
    """Yield what is found of labels that no feature tells."""
    fitting = {"encryption": "ou", "n_estimators": trees, **BY_HEART}
    plain, under_noise = [], []
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        shuffled = rng.permutation(y)
        known = np.concatenate([rng.choice(np.flatnonzero(shuffled == k), 50, replace=False) for k in (0, 1)])
        others = np.setdiff1d(np.arange(len(y)), known)
        for found, labels, options in (
            (plain, shuffled, {}),
            (under_noise, noisy(shuffled), {"mechanism": "label_rr", "epsilon": EPSILON}),
        ):
            nodes = seen(played(tables, labels, **fitting, **options), len(y))
            scores = known_label_scores(nodes, len(y), known, shuffled[known].astype(int))
            found.append(attack_auc(scores[others], shuffled[others]))
    for guard, found in (("plain", plain), (f"label_rr, epsilon {EPSILON:g}", under_noise)):
        yield {"data": f"{title}, labels shuffled", "trees": trees, "guard": guard, "model": "", **drawn(found)}


def main() -> None:
    quick = arguments(__doc__).parse_args().quick
    draws = 2 if quick else 5
    rows: list[dict[str, object]] = []
    for trees in (5,) if quick else (5, 10, 20):
        for data in (breast_cancer(), credit_cards()):
            rows += guards(*data, trees, draws)
    rows += by_heart(*breast_cancer(), 5 if quick else 10, draws)
    names = ("data", "trees", "guard", "attack", "least", "largest", "model")
    report("secureboost_attacks", [{name: row[name] for name in names} for row in rows], quick=quick)


if __name__ == "__main__":
    main()
