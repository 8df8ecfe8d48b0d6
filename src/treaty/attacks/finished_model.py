"""What the finished model tells: who was among the training rows, and the model itself to who only asks it.

References
----------
Yeom et al., "Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting", 2018 (arXiv 1709.01604),
section 3.1: a row of little loss is taken for a training row. Tramèr et al., "Stealing Machine Learning Models via
Prediction APIs", 2016 (arXiv 1609.02943), section 4: a copy is trained on what the model answers.
"""

from __future__ import annotations

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier

from treaty.attacks.views import Finding, auc_error
from treaty.machine.arrays import Flags, Floats
from treaty.privacy.clustering import attack_auc

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
    if labels.all() or not labels.any():  # one class is no task: any row of the other makes it one
        labels = labels.copy()
        labels[0] = ~labels[0]
    return HistGradientBoostingClassifier(random_state=0).fit(x, labels)
