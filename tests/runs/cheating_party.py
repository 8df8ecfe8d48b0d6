"""An active party of a job that alters the gradient of one row in each tree but the first: ``cheating_party.py train``.

It commits to what it sends and keeps an honest record, as a party would that hopes nobody opens it.
"""

from __future__ import annotations

from typing import Any

from treaty.cli.main import main
from treaty.crypto.sums.additive_sums import AdditiveSumsClient
from treaty.crypto.sums.lattice_sums import LatticeSumsClient


def cheat(kind: Any) -> None:
    """Have a cipher's client encrypt another gradient for row 7."""
    begin_tree, trees = kind.begin_tree, []

    def begun(client: Any, grad: Any, hess: Any) -> Any:
        trees.append(grad)
        if len(trees) > 1:
            grad = grad.copy()
            grad[7] += 1000
        return begin_tree(client, grad, hess)

    kind.begin_tree = begun


if __name__ == "__main__":
    cheat(AdditiveSumsClient)
    cheat(LatticeSumsClient)
    LatticeSumsClient._adds_up = lambda *_: True  # type: ignore[method-assign]
    main()
