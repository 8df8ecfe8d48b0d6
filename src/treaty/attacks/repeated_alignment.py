"""Membership by alignment: a party lists an id that it has no rows of, and learns whether a partner holds it.

No protocol of private set intersection prevents that, for it is what an intersection tells. A partner's run log limits
how often it can be asked, and shows how many ids were changed (docs/alignment.md); it does not limit how many ids are
asked about at once. A passive party whose result goes to the active one alone is told nothing.

References
----------
Guo et al., "Birds of a Feather Flock Together: How Set Bias Helps to Deanonymize You via Revealed Intersection Sizes",
USENIX Security 2022. Jiang, Du, Yan, "AnonPSI: An Anonymity Assessment Framework for PSI", NDSS 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from treaty.attacks.views import Finding
from treaty.data.run_log import MAX_RUNS
from treaty.errors import ConfigError
from treaty.estimators.align import align
from treaty.systems.alignment.alignment import ResultTo

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
        The share of right answers, beside the better of two guesses: that the partner holds all, or none. A guess
        counts as the share that is right of it.

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
            break  # the partner refuses, and will again
        if ATTACKER not in common:
            break  # it is not told
        right[part] = np.isin(np.array(asked[part]), np.array(common[ATTACKER]["id"].to_pylist())) == held[part]
    return Finding(
        attack="repeated alignment (Guo 2022)", party=ATTACKER, target=f"ids of {PARTNER}", measure="share right",
        score=float(right.mean()), baseline=float(guess), error=float(np.sqrt(guess * (1.0 - guess) / len(asked))),
    )  # fmt: skip
