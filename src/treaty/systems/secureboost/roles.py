"""SecureBoost: lossless vertical boosting on encrypted gradients.

Cheng, Fan, Jin, Liu, Chen, Papadopoulos, Yang, "SecureBoost: A Lossless Federated Learning Framework", IEEE
Intelligent Systems 2021 (arXiv 1901.08755); packing after Chen et al., SecureBoost+ (arXiv 2110.10927).

Roles: one active party (labels, perhaps features), any number of passive parties (features). Rows are aligned.
Output: the active party gets the trees and all leaf weights, every party its own splits. The trees are, bit for bit,
those of the plain grower on the joined table. Messages are those of `vertical.encrypted`, under the lattice map (blind)
or a cipher with keys; prediction, and the eval sets watched in training, are in `vertical.decisions`.

Reduced leakage (`rl_trees`, paper, section 6): the active party grows the first rounds' trees on its own columns, and
passive parties are told nothing of them. With `purity_guard` they are not asked about nodes that would show labels.

Adversary: honest but curious, no party colluding with the active one. What each learns is in `disclosures`.
Deviations from the paper: candidates are not shuffled, for their sums are nested and show the order anyway; the active
party computes leaf weights from its own gradients. ``mode="paper"`` has the paper's cipher, keys, and answers without
re-randomisation.
"""

from __future__ import annotations

from treaty.errors import ConfigError
from treaty.models.trees import ModelPart
from treaty.privacy.label_leaks import mixed_nodes
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import RoleInput
from treaty.systems.vertical import encrypted
from treaty.trees.columns import MayShow


def active(inputs: RoleInput[SecureBoost]) -> ModelPart:
    """Train as the active party, with labels that for `label_rr` are the noisy ones."""
    return encrypted.train_active(
        inputs, inputs.options.ciphers, alone_rounds=inputs.options.rl_trees or 0, may_show=_guard(inputs)
    )


def passive(inputs: RoleInput) -> ModelPart:
    """Train as a passive party: answer the active one until it is done."""
    return encrypted.train_passive(inputs, inputs.options.ciphers)


def _guard(inputs: RoleInput[SecureBoost]) -> MayShow | None:
    if inputs.options.purity_guard is None:
        return None
    if inputs.classes is None:
        raise ConfigError("purity_guard is about classes; a regression has none: leave it out (None)")
    return mixed_nodes(inputs.rows.y, len(inputs.classes), inputs.options.purity_guard)
