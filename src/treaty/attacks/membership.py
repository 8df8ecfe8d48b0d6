"""Attacks on membership: from the finished model, by its losses and answers, and from repeated alignments.

References
----------
Yeom et al., "Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting", 2018 (arXiv 1709.01604),
section 3.1: a row with a small loss is taken for a training row. Tramèr et al., "Stealing Machine Learning Models via
Prediction APIs", 2016 (arXiv 1609.02943), section 4: a copy is trained on the model's answers. Guo et al., "Birds of a
Feather Flock Together: How Set Bias Helps to Deanonymize You via Revealed Intersection Sizes", USENIX Security 2022.
Jiang, Du, Yan, "AnonPSI: An Anonymity Assessment Framework for PSI", NDSS 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from sklearn.ensemble import HistGradientBoostingClassifier

from treaty.attacks.views import Finding, auc_error
from treaty.data.run_log import MAX_RUNS
from treaty.errors import ConfigError
from treaty.estimators.align import align
from treaty.machine.arrays import Flags, Floats
from treaty.privacy.label_leaks import attack_auc
from treaty.systems.alignment.alignment import ResultTo

_LEAST = 1e-12


def membership(held: Floats, held_labels: Flags, other: Floats, other_labels: Flags) -> Finding:
    """Take rows of little loss for training rows.

    `held` are the predicted probabilities (n,) of training rows, `other` (m,) of rows that were held back; labels are
    those of the class they are the probabilities of.
    """
    losses = np.concatenate([_losses(held, held_labels), _losses(other, other_labels)])
    members = np.concatenate([np.ones(len(held), np.bool_), np.zeros(len(other), np.bool_)])
    return Finding(
        attack="membership by loss (Yeom 2018)", party="who has the model, a row and its label", target="training rows",
        measure="AUC", score=attack_auc(-losses, members.astype(int)), baseline=0.5, error=auc_error(members),
    )  # fmt: skip


def extraction(asked: Floats, answers: Floats, test: Floats, truth: Floats, labels: Flags) -> Finding:
    """Train a copy on the answers to rows asked about, and see how often it decides as the model does.

    `asked` (n, n_columns) and `test` (m, n_columns) are rows of all columns, `answers` (n,) and `truth` (m,) the
    model's probabilities for them. The baseline is a model trained on the true `labels` (n,) of the rows asked about,
    which needs none of the answers.
    """
    copy = _trained(asked, answers > 0.5).predict_proba(test)[:, -1] > 0.5
    own = _trained(asked, labels).predict_proba(test)[:, -1] > 0.5
    decided = truth > 0.5
    return Finding(
        attack="copy from answers (Tramèr 2016)", party="who asks for predictions of whole rows", target="the model",
        measure="share of equal decisions", score=float((copy == decided).mean()),
        baseline=float((own == decided).mean()), error=float(0.5 / np.sqrt(len(truth))),
    )  # fmt: skip


def _losses(chance: Floats, labels: Flags) -> Floats:
    right = np.where(labels, chance, 1.0 - chance)
    losses: Floats = -np.log(np.maximum(right, _LEAST))
    return losses


def _trained(x: Floats, labels: Flags) -> HistGradientBoostingClassifier:
    # one class is no task: any row of the other makes it one
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
    """Align again and again with some of the ids asked about, and say of each whether the partner holds it.

    Both parties are played in this process, over the protocol itself.

    Parameters
    ----------
    own, partners : sequence of int or str
        Ids in the lists of the attacker and its partner, some of them common.
    asked : sequence of int or str
        Ids asked about, none of them in `own`.
    at_once : int, default 1
        Ids asked about in one alignment.
    active : bool, default True
        Whether the attacker is the active party.
    result_to : {"both", "active"}, default "both"
        Who learns what is common.
    log : Path, optional
        Folder of both parties' run logs; by default there are none.
    max_runs : int, default 20
        Alignments that a log allows. When the partner refuses, the attacker guesses.

    Returns
    -------
    Finding
        The share of right answers, and as baseline the better of two guesses: that the partner holds all, or none. A
        guess counts as the share that is right of it.

    Raises
    ------
    ConfigError, DataError
        As `treaty.align` does at the first alignment.
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
            # the partner refuses, and will again
            break
        if ATTACKER not in common:
            break  # it does not learn the result
        right[part] = np.isin(np.array(asked[part]), np.array(common[ATTACKER]["id"].to_pylist())) == held[part]
    return Finding(
        attack="repeated alignment (Guo 2022)", party=ATTACKER, target=f"ids of {PARTNER}", measure="share right",
        score=float(right.mean()), baseline=float(guess), error=float(np.sqrt(guess * (1.0 - guess) / len(asked))),
    )  # fmt: skip
