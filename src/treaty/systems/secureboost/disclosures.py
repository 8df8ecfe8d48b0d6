"""What each party of a SecureBoost training learns beyond its own data and its own splits."""

from __future__ import annotations

from treaty.models.trees import ModelPart
from treaty.systems.options import learned_from_test_key
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import Cast
from treaty.systems.vertical.encrypted_disclosures import learned_from_sums, small_leaves


def disclosures(
    cast: Cast, options: SecureBoost, common: BoostingOptions, part: ModelPart | None
) -> dict[str, list[str]]:
    """Say in words what each party learns.

    `part` tells which cipher was used; without it, the options' cipher is meant, for "auto" one with keys.
    """
    ciphers = options.ciphers
    cipher = part.encryption if part is not None and part.encryption else ciphers.cipher
    learned = learned_from_sums(cast, ciphers, cipher, part, options.epsilon)
    columns = ciphers.reveals_columns(cipher)
    whose = "all" if columns else "the node's"
    if options.hides_decisions:
        learned[cast.active][1] = (
            f"of every split another party won: which of {whose} training rows go left, and of eval sets each row's "
            "side; at prediction one sum of leaf weights per row, which gives away the decisions on the row's paths "
            "unless the model is large (docs/prediction.md)"
        )
    if not ciphers.rerandomise:
        learned[cast.active].append("which rows are in a bin, if it looks: answers were not re-randomised")
    learned[cast.active] += small_leaves(options.mode, common)
    if cipher != "lattice" or options.hides_decisions:
        for name in learned:
            learned[name] += learned_from_test_key(options.short_key_bits)
    for name in cast.having("passive"):
        if options.rl_trees:
            learned[name].append(f"nothing of the trees of the first {options.rl_trees} rounds")
        if options.purity_guard is not None:
            learned[name].append(
                f"nothing of nodes below a split with a child whose class shares differ from the table's by more than "
                f"{options.purity_guard:g}, but that there is such a child"
                + ("; at a split of its own, which rows are in it" if ciphers.names_rows(cipher) else "")
            )
        if common.goss and not ciphers.hides_nodes(cipher):
            learned[name].append(
                "that rows in many trees' samples have large gradients: they are predicted worst (goss)"
            )
    return learned
