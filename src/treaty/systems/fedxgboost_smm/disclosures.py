"""What each party of a FedXGBoost-SMM training learns beyond its own data and its own splits."""

from __future__ import annotations

from treaty.models.trees import ModelPart
from treaty.systems.fedxgboost_smm.options import PAPER_LEAKS, FedXGBoostSMM
from treaty.systems.options import learned_from_test_key
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Cast
from treaty.systems.vertical.encrypted_disclosures import learned_from_sums, small_leaves


def disclosures(
    cast: Cast, options: FedXGBoostSMM, common: BoostingOptions, part: ModelPart | None
) -> dict[str, list[str]]:
    """Say in words what each party learns, the dealer included; `part` has the estimate of what exact sums showed."""
    if options.mode == "paper":
        return _of_matrix_products(cast, options.version)
    learned = learned_from_sums(cast, options.ciphers, options.cipher, part)
    learned[cast.active] += small_leaves(options.mode, common)
    for name in learned:
        learned[name] += learned_from_test_key(options.insecure_test_key_bits)
    dealer = cast.holder("dealer")
    if dealer is None:
        return learned
    helped = f"with the help of {dealer}, who must not give it: "
    learned[cast.active].append(helped + "every bin of every row of the others")
    for name in cast.having("passive"):
        learned[name].append(helped + "all gradients, and so labels, and the rows of every node")
    learned[dealer] = [
        "how many rows there are, how many bins each passive party has, and how many nodes were asked about; it "
        "has no data (it is trusted to collude with nobody)"
    ]
    return learned


def _of_matrix_products(cast: Cast, version: int | None) -> dict[str, list[str]]:
    """Say what the published protocol shows, as measured by the attacks in `paper.attacks`."""
    active = cast.active
    split = (
        "of every split another party won: which of the node's training rows go left; for eval sets and at prediction, "
        "each row's side at every such split"
    )
    sides = ["which training rows are in each node asked about", "which of its own columns and bins were chosen"]
    sums, vectors = "the sums of gradients and hessians of each of its candidates, and of", "null vectors of"
    if version == 2:
        learned = {
            active: [
                f"{vectors} the others' candidates, and so which rows single bins hold in small nodes",
                "the gain of each party's best split of every node",
                split,
                "the shape of all trees and all leaf weights",
            ]
        }
        told = [
            f"{sums} every node; and from its null vectors, of two or three levels together, every row's gradient and "
            "hessian exactly, so every label, and in the first tree from one level, most of the time"
        ]
    else:
        learned = {
            active: [
                "of every column of the others (by number, not name) at every node the sum of gradients, sum of "
                "hessians and number of rows in each bin",
                "the bin of every row in every column of the others, exactly: by rounding what the first tree brings, "
                "or from the roots of several trees together",
                split,
                "the shape of all trees and all leaf weights",
            ]
        }
        told = [
            f"{vectors} every node's gradients; where they are nearly as many as the node has rows, every row's label"
        ]
    for name in cast.having("passive"):
        learned[name] = [*told, *sides]
    return {name: [*facts, PAPER_LEAKS] for name, facts in learned.items()}
