"""What FedXGBoost-SMM as published gives away, attack by attack (docs/explanation/fedxgboost_published.md).

Claim: there is no number r of null vectors that is safe. Few of them leave the answer so near to the truth that
rounding gives it, many show the sender's gradients by their shape, and whatever their number, what stays the same
over trees or levels follows by linear algebra. Data: 2,000 rows of Default of Credit Card Clients, whose bins of 20 are
a passive party's candidates and whose labels, with the gradients of a pooled training of 20 trees, are the active
party's. All vectors sent are used (r' = r), so that r'/n is what stands under `share`; lines named "training" are of
whole recorded trainings with the default sizes. For the attack on labels by skewness and kurtosis 5,000 are drawn, and
what U leaves over is drawn directly, distributed as U leaves it, which saves a minute; "as sent" is from vectors.

`right` is the share of entries (candidates, or labels) that the attack gets, `auc` that of the labels, `error` the
largest one of gradients (true ones up to 1) or of candidates. A minute; `--quick`: 600 rows.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score
from threadpoolctl import threadpool_limits

import treaty
from data import arguments, default_of_credit_card_clients, report
from treaty.attacks.hidden_values import (
    NodeExchange,
    SmmNode,
    left_over,
    products_from_transcript,
    rounded,
    solved,
    two_valued,
)
from treaty.crypto.keystream import Keystream
from treaty.data.binning import fit_bins
from treaty.data.table import Table, to_table
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart
from treaty.runs.threads import play
from treaty.systems.fedxgboost_smm import published as paper
from treaty.systems.fedxgboost_smm.node_products import chosen, disguised, empty_rows, null_vectors, response
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM, Sizes
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import LabelledRows, PartySpec, RoleInput, star
from treaty.systems.vertical.training import roles_by_column
from treaty.trees.histograms import candidate_columns, candidate_slots, count_bins

BINS, TREES, STEP = 20, 20, 2.0**16
RANDOM = Keystream()
Matrix = np.ndarray


def line(attack: str, version: int, attacker: str, rows: int, **found: float) -> dict[str, object]:
    """Return a line of results; what an attack has no number for is left empty."""
    names = ("share", "trees", "levels", "steps", "right", "auc", "error")
    return {"attack": attack, "version": version, "attacker": attacker, "rows": rows} | {
        name: found.get(name, "") for name in names
    }


def candidates_of(table: Table, rows: Matrix | None = None) -> Matrix:
    """Return a party's candidates of some rows, 0 and 1."""
    bins = fit_bins(table, BINS)
    codes = bins.transform(table) if rows is None else bins.transform(table)[rows]
    features = np.arange(codes.shape[1], dtype=np.int32)
    slots = candidate_slots(count_bins(codes, features, bins.offsets), features, bins.offsets)
    return candidate_columns(codes, slots, bins.offsets, np.zeros(len(features), np.bool_))


def answered(own: Matrix, secret: Matrix, share: float, rows: Matrix | None = None) -> NodeExchange:
    """Play a product in which all vectors are used, as many as `share` of the rows or as there are."""
    vectors = null_vectors(own, min(round(share * len(own)), len(own) - own.shape[1]), RANDOM)
    return NodeExchange(np.arange(len(own)) if rows is None else rows, vectors, response(secret, vectors))


def gradients_of_trees(tables: dict[str, pd.DataFrame], y: Matrix) -> list[Matrix]:
    """Return grad and hess of every tree of a pooled training."""
    model = treaty.GBDTClassifier(base_score=0.5, n_estimators=TREES, max_depth=3, learning_rate=0.3, max_bin=BINS).fit(
        tables, y
    )
    odds = [np.full(len(y), 0.5), *(p[:, 1] for p in model.staged_predict_proba(tables))]
    return [np.stack([p - y, p * (1 - p)], axis=1) for p in odds[:-1]]


def identification(gradients: Matrix, matrix: Matrix) -> list[dict[str, object]]:
    """Tell the vectors that were picked from the others."""
    found = []
    for version, own, secret in ((1, gradients, matrix), (2, matrix, gradients)):
        vectors = null_vectors(own, 32, RANDOM)
        used = chosen(vectors, RANDOM)
        truth = np.isin(vectors[0], used[0])
        found_used = NodeExchange(np.arange(len(own)), vectors, response(secret, used)).used
        seen = np.isin(vectors[0], found_used[0])
        found.append(line("which vectors are used", version, "receiver of W", len(own), right=np.mean(seen == truth)))
    return found


def rounding(gradients: Matrix, matrix: Matrix, few: Matrix, y: Matrix) -> list[dict[str, object]]:
    """Round W, with and without decoding."""
    found = []
    for share in (0.01, 0.05, 0.1, 0.2, 0.25, 0.3):
        seen = answered(gradients, matrix, share)
        for steps in (0, 1, 5):
            right = np.mean(rounded(seen, steps=steps) == matrix)
            found.append(line("rounding", 1, "active", len(y), share=share, steps=steps, right=right))
    mixed = disguised(few, 2 * few.shape[1], 8, RANDOM)[0]
    for share in (0.1, 0.25, 0.5, 0.9):
        if share > 1 - mixed.shape[1] / len(mixed):
            continue  # a quick run has too few rows
        seen = answered(mixed, gradients, share)
        auc = roc_auc_score(y, -seen.masked[:, 0])
        for steps in (0, 1, 5):
            right = np.mean((rounded(seen, (-0.5, 0.5), steps)[:, 0] < 0) == y)
            found.append(line("rounding", 2, "passive", len(y), share=share, steps=steps, right=right, auc=auc))
    return found


def over_trees(gradients: list[Matrix], matrix: Matrix) -> list[dict[str, object]]:
    """Solve for the root's candidates, which are the same in every tree."""
    found = []
    for share in (0.1, 0.5, 0.7, 0.9):
        answers: list[NodeExchange] = []
        for of_tree in gradients:
            answers.append(answered(of_tree, matrix, share))
            if len(answers) * (1 - share) < 1:
                continue
            values, known = solved(answers, len(matrix))
            if known.all():
                break
        numbers = {"trees": len(answers), "right": known.mean(), "error": np.abs(values - matrix).max()}
        found.append(line("linear algebra over trees", 1, "active", len(matrix), share=share, **numbers))
    return found


def over_levels(gradients: Matrix, table: Table) -> list[dict[str, object]]:
    """Solve for a tree's gradients, which are the same at every level; nodes are halves of halves."""
    found, order = [], np.random.default_rng(0).permutation(len(gradients))
    for share in (0.1, 0.5, 0.6, 0.7, 0.8):
        answers: list[NodeExchange] = []
        for level in range(6):
            for rows in np.array_split(order, 1 << level):
                own = disguised(candidates_of(table, rows), 1, 1, RANDOM)[0]
                answers.append(answered(own, gradients[rows], share, rows))
            values, known = solved(answers, len(gradients))
            if known.all():
                break
        numbers = {"levels": level + 1, "right": known.mean(), "error": np.abs(values - gradients).max()}
        found.append(line("linear algebra over levels", 2, "passive", len(gradients), share=share, **numbers))
    return found


def shape(rows: int) -> list[dict[str, object]]:
    """Look for labels among what many vectors leave over."""
    found, rng = [], np.random.default_rng(0)
    for positives in (0.07, 0.21, 0.5):
        for left in (round(0.85 * rows**0.5), round(3 * rows**0.5)):
            y = rng.random(rows) < positives
            gradients = np.stack([0.5 - y, np.full(rows, 0.25)], axis=1)
            space = np.linalg.qr(np.concatenate([gradients, rng.normal(size=(rows, left - 2))], axis=1))[0]
            auc = roc_auc_score(y, two_valued(space, tries=30, steps=100))
            name = f"skewness and kurtosis, {left} columns left over, {positives:.0%} positive"
            found.append(line(name, 1, "passive", rows, share=1 - left / rows, auc=max(auc, 1 - auc)))
    return found


def shape_of_vectors(y: Matrix) -> list[dict[str, object]]:
    """Do the same with vectors that were made as the protocol makes them."""
    rows = min(len(y), 1000)
    left = round(0.7 * rows**0.5)
    gradients = np.stack([0.5 - y[:rows], np.full(rows, 0.25)], axis=1)
    auc = roc_auc_score(y[:rows], two_valued(left_over(null_vectors(gradients, rows - left, RANDOM))))
    name = f"skewness and kurtosis, {left} columns left over, as sent"
    return [line(name, 1, "passive", rows, share=1 - left / rows, auc=max(auc, 1 - auc))]


def from_totals(answered: NodeExchange, totals: Matrix) -> Matrix:
    """Solve for the gradients of a node, float64 (n, c), where one null vector was sent and the totals are known.

    A passive party may pretend to have n - 1 columns, which have one null vector. The active party cannot check that. W
    then lacks one number per column, which follows from the totals.
    """
    (vector,) = answered.used.T
    missing = (totals - answered.masked.sum(axis=0)) / vector.sum()
    found: Matrix = answered.masked + vector[:, None] * missing
    return found


def many_columns(gradients: Matrix, few: Matrix) -> list[dict[str, object]]:
    """Send the one null vector of as many columns as can be."""
    bits, normal, vectors = Sizes(null_vectors=1, bit_columns=10**6).of_disguised(*few.shape) or (0, 0, 0)
    own = disguised(few, bits, normal, RANDOM)[0]
    sent = null_vectors(own, vectors, RANDOM)
    found = from_totals(NodeExchange(np.arange(len(own)), sent, response(gradients, sent)), gradients.sum(axis=0))
    return [line("many columns", 2, "passive", len(own), levels=1, error=np.abs(found - gradients).max())]


def trained(tables: dict[str, Table], y: Matrix, version: int) -> list[list[list[SmmNode]]]:
    """Train with the default sizes; return what the sender of null vectors recorded."""
    options = FedXGBoostSMM(mode="paper", allow_insecure=True, version=version)
    common = BoostingOptions(n_estimators=2, max_depth=3, learning_rate=0.3, max_bin=BINS, base_score=0.5).checked(
        options
    )
    roles = roles_by_column(dict.fromkeys(tables, PartySpec()), "bank", options)

    def role(party: Party) -> ModelPart:
        data = LabelledRows(tables[party.name], y)
        program = paper.active if party.name == "bank" else paper.passive
        return program(RoleInput(party=party, options=options, common=common, roles=roles, data=data, classes=[0, 1]))

    played = play(
        dict.fromkeys(tables, role), star(roles, options), job="attacked", protocol=options.system, record_content=True
    )
    who, peer = (("bank", "shop"), ("shop", "bank"))[version - 1]
    return products_from_transcript(played.transcripts[who], peer, len(y))


def whole_trainings(tables: dict[str, Table], y: Matrix) -> list[dict[str, object]]:
    """Attack recorded trainings."""
    found, matrix = [], candidates_of(tables["shop"])
    (root,) = trained(tables, y, 1)[0][0]
    right = np.mean(rounded(root.answered, steps=1) == matrix)
    found.append(line("training: rounding", 1, "active", len(y), trees=1, steps=1, right=right))
    levels = trained(tables, y, 2)[0]
    root = levels[0][0]
    labels = rounded(root.answered, (-STEP / 2, STEP / 2))[:, 0] < 0
    auc = roc_auc_score(y, -root.answered.masked[:, 0])
    found.append(
        line("training: rounding", 2, "passive", len(y), levels=1, steps=1, right=np.mean(labels == y), auc=auc)
    )
    for count in (1, 2):
        values, known = solved([node.answered for level in levels[:count] for node in level], len(y))
        auc = roc_auc_score(y[known], -values[known, 0])
        error = np.abs(values[known, 0] / STEP - (0.5 - y[known])).max()
        numbers = {"levels": count, "right": known.mean(), "auc": auc, "error": error}
        found.append(line("training: linear algebra over levels", 2, "passive", len(y), **numbers))
    for number, level in enumerate(levels):
        nodes = [node.answered for node in level]
        shown = sum(int(empty_rows(node.vectors).sum()) for node in nodes) / sum(len(node.rows) for node in nodes)
        found.append(line("training: rows in no vector", 2, "passive", len(y), levels=number + 1, right=shown))
    return found


def main() -> None:
    quick = arguments(__doc__).parse_args().quick
    data = default_of_credit_card_clients()
    taken = np.random.default_rng(0).permutation(len(data.y))[: 600 if quick else 2000]
    X, y = pd.DataFrame(data.x[taken], columns=data.names), data.y[taken].astype(float)
    frames = {"bank": X.iloc[:, :11], "shop": X.iloc[:, 11:]}
    tables = {name: to_table(frame, party=name) for name, frame in frames.items()}
    few = candidates_of(to_table(X.iloc[:, 11:14], party="shop"))
    one = to_table(X.iloc[:, 11:12], party="shop")
    gradients, matrix = gradients_of_trees(frames, y), candidates_of(tables["shop"])
    lines = identification(gradients[0], matrix) + rounding(gradients[0], matrix, few, y)
    lines += over_trees(gradients, matrix) + over_levels(gradients[1], one)
    lines += shape(1000 if quick else 5000) + shape_of_vectors(y) + many_columns(gradients[1], few)
    report("smm_attacks", lines + whole_trainings(tables, y), quick=quick)


if __name__ == "__main__":
    with threadpool_limits(1, user_api="blas"):  # parties in threads multiply side by side
        main()
