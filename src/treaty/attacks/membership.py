"""Attacks on a finished model: membership by its losses, and copies from its answers.

References: Yeom et al., "Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting", 2018 (arXiv
1709.01604), section 3.1, on rows of small loss. Tramèr et al., "Stealing Machine Learning Models via Prediction APIs",
2016 (arXiv 1609.02943), section 4, on copies trained on a model's answers.
"""

from __future__ import annotations

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier

from treaty.attacks.views import Finding, auc_error
from treaty.machine.arrays import Flags, Floats
from treaty.privacy.leaks import attack_auc


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
