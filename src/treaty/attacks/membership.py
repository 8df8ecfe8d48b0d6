"""Attacks on membership: by the losses and answers of the finished model, and by repeated alignments.

References: Yeom et al., "Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting", 2018 (arXiv
1709.01604), section 3.1, on rows of small loss. Tramèr et al., "Stealing Machine Learning Models via Prediction APIs",
2016 (arXiv 1609.02943), section 4, on copies trained on a model's answers. Guo et al., "Birds of a Feather Flock
Together: How Set Bias Helps to Deanonymize You via Revealed Intersection Sizes", USENIX Security 2022. Jiang, Du, Yan,
"AnonPSI: An Anonymity Assessment Framework for PSI", NDSS 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from sklearn.ensemble import HistGradientBoostingClassifier

from treaty.attacks.views import Finding, auc_error
from treaty.errors import ConfigError
from treaty.estimators.files import align
from treaty.machine.arrays import Flags, Floats
from treaty.privacy.leaks import attack_auc
from treaty.privacy.ledger import MAX_RUNS
from treaty.systems.alignment.alignment import ResultTo


def membership(held: Floats, held_labels: Flags, other: Floats, other_labels: Flags) -> Finding:
    """Take rows of small loss for training rows.

    `held` (n,) and `other` (m,) are predicted probabilities of one class, for training rows and for rows that were held
    back; `held_labels` and `other_labels` say whether the rows are of that class.
    """
    chance, labels = np.concatenate([held, other]), np.concatenate([held_labels, other_labels])
    losses = -np.log(np.maximum(np.where(labels, chance, 1.0 - chance), 1e-12))
    members = np.concatenate([np.ones(len(held), np.bool_), np.zeros(len(other), np.bool_)])
    return Finding(
        attack="membership by loss (Yeom 2018)", party="who has the model, a row and its label", target="training rows",
        measure="AUC", score=attack_auc(-losses, members.astype(int)), baseline=0.5, error=auc_error(members),
    )  # fmt: skip


def extraction(asked: Floats, answers: Floats, test: Floats, truth: Floats, labels: Flags) -> Finding:
    """Train a copy of the model on its `answers`, and count how often it decides as the model does.

    The baseline is a model trained on true `labels`, which needs no answers. Probabilities `answers` and `truth` are
    the model's for rows of all columns: `asked` (n, n_columns), to train the copy on, and `test` (m, n_columns), to
    compare decisions on.
    """
    copy = _trained(asked, answers > 0.5).predict_proba(test)[:, -1] > 0.5
    own = _trained(asked, labels).predict_proba(test)[:, -1] > 0.5
    decided = truth > 0.5
    return Finding(
        attack="copy from answers (Tramèr 2016)", party="who asks for predictions of whole rows", target="the model",
        measure="share of equal decisions", score=float((copy == decided).mean()),
        baseline=float((own == decided).mean()), error=float(0.5 / np.sqrt(len(truth))),
    )  # fmt: skip


def _trained(x: Floats, labels: Flags) -> HistGradientBoostingClassifier:
    # a classifier needs two classes: if there is one, a row is moved to the other
    if labels.all() or not labels.any():
        labels = labels.copy()
        labels[0] = ~labels[0]
    return HistGradientBoostingClassifier(random_state=0).fit(x, labels)


ATTACKER, PARTNER = "attacker", "partner"


def membership_by_alignment(
    own: Sequence[Any],
    partners: Sequence[Any],
    asked: Sequence[Any],
    *,
    at_once: int = 1,
    active: bool = True,
    result_to: ResultTo = "both",
    log: Path | None = None,
    max_runs: int = MAX_RUNS,
) -> Finding:
    """Align again and again with some of the ids asked about, and decide for each whether the partner holds it.

    Both parties are played in this process, with the real protocol. The attacker has the list `own`, its partner the
    list `partners`, with some ids in common; none of the ids `asked` about, so many `at_once`, is in `own`. The
    attacker is the `active` party, or not; `result_to` says which parties learn the common ids. Both keep run logs in
    the folder `log`, if there is one, which allow `max_runs` alignments; after the partner refuses, the attacker
    guesses.

    Return the share of right answers; the baseline is the better of two guesses: that the partner holds all ids, or
    none. Raise what `treaty.align` raises at the first alignment.
    """
    held = np.isin(np.array(asked), np.array(partners))
    guess = max(held.mean(), 1.0 - held.mean())
    right = np.full(len(asked), guess)
    order = [ATTACKER, PARTNER] if active else [PARTNER, ATTACKER]
    for first in range(0, len(asked), at_once):
        part = slice(first, first + at_once)
        lists = {ATTACKER: [*own, *asked[part]], PARTNER: list(partners)}
        try:
            common = align(
                {name: pa.table({"id": lists[name]}) for name in order}, drop_id=False, result_to=result_to, log=log,
                max_runs=max_runs, n_jobs=1, progress=lambda done, steps: None,
            )  # fmt: skip
        except ConfigError:
            if not first:
                raise
            # the partner refuses, as it will the next time
            break
        if ATTACKER not in common:
            # the attacker does not learn the result
            break
        right[part] = np.isin(np.array(asked[part]), np.array(common[ATTACKER]["id"].to_pylist())) == held[part]
    return Finding(
        attack="repeated alignment (Guo 2022)", party=ATTACKER, target=f"ids of {PARTNER}", measure="share right",
        score=float(right.mean()), baseline=float(guess), error=float(np.sqrt(guess * (1.0 - guess) / len(asked))),
    )  # fmt: skip
