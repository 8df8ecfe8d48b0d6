"""The protocols for tables split by column, by name: both roles of whichever a job asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treaty.crypto.lattice.store import HintStore
from treaty.data.columns import Category
from treaty.data.table import Table
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper, hints_folder, noise_folder
from treaty.models.trees import ModelPart
from treaty.privacy.bucket_rr import BucketLedger
from treaty.privacy.ledger import Ledger
from treaty.systems.federboost_vertical import roles as federboost_vertical
from treaty.systems.fedxgboost_ldp import roles as fedxgboost_ldp
from treaty.systems.fedxgboost_smm import roles as smm_secure
from treaty.systems.fedxgboost_smm.paper import roles as fedxgboost_smm
from treaty.systems.pooled.training import Labelled, Progress
from treaty.systems.secureboost import roles as secureboost
from treaty.systems.tree_options import TreeOptions

FEDERBOOST = "federboost-vertical"
SMM = "fedxgboost-smm"
LDP = "fedxgboost-ldp"


def train_active(
    party: Party,
    data: Labelled,
    options: TreeOptions,
    *,
    parties: Sequence[str],
    classes: list[Category] | None,
    eval_sets: Sequence[Labelled],
    threads: int,
    progress: Progress | None,
    keeper: Keeper | None,
    kept: Path | None,
    hinting: Callable[[int, int], None] | None = None,
    dealer: str | None = None,
) -> ModelPart:
    """Train as the active party of the protocol that the options name.

    Parameters
    ----------
    kept : Path or None
        Folder for what serves later jobs about the same table. None: nothing is kept.
    dealer : str or None
        Who deals random matrices, where options ask for it.
    party, data, options, parties, classes, eval_sets, threads, progress, keeper, hinting
        See the protocols' own `active`.
    """
    if options.protocol == FEDERBOOST:
        return federboost_vertical.active(
            party, data, options, parties=parties, classes=classes, eval_sets=eval_sets,
            threads=threads, progress=progress, keeper=keeper,
        )  # fmt: skip
    if options.protocol == LDP:
        return fedxgboost_ldp.active(
            party, data, options, parties=parties, classes=classes, eval_sets=eval_sets,
            threads=threads, progress=progress, keeper=keeper,
            ledger=Ledger(None if kept is None else noise_folder(kept, party.name)),
        )  # fmt: skip
    if options.protocol == SMM and options.mode == "paper":
        return fedxgboost_smm.active(
            party, data, options, parties=parties, classes=classes, eval_sets=eval_sets,
            threads=threads, progress=progress, keeper=keeper,
        )  # fmt: skip
    with HintStore(hints_folder(kept, party.name) if kept is not None and options.may_hint else None) as store:
        if options.protocol == SMM:
            return smm_secure.active(
                party, data, options, parties=parties, classes=classes, dealer=dealer, eval_sets=eval_sets,
                threads=threads, progress=progress, keeper=keeper, store=store, hinting=hinting,
            )  # fmt: skip
        return secureboost.active(
            party, data, options, parties=parties, classes=classes, eval_sets=eval_sets,
            threads=threads, progress=progress, keeper=keeper, store=store, hinting=hinting,
        )  # fmt: skip


def train_passive(
    party: Party,
    table: Table,
    options: TreeOptions,
    *,
    eval_tables: Sequence[Table],
    threads: int,
    progress: Progress | None,
    keeper: Keeper | None,
    kept: Path | None,
    row_numbers: NDArray[np.int64] | None = None,
    hinting: Callable[[int, int], None] | None = None,
    dealer: str | None = None,
) -> ModelPart:
    """Train as a passive party of the protocol that the options name.

    Parameters
    ----------
    kept : Path or None
        Folder for what serves later jobs about the same table, ledgers above all. None: nothing is kept.
    row_numbers : ndarray of int64, shape (rows,), optional
        Of each row in the party's own table, where rows were aligned.
    dealer : str or None
        As `train_active` has it.
    party, table, options, eval_tables, threads, progress, keeper, hinting
        See the protocols' own `passive`.
    """
    if options.protocol == FEDERBOOST:
        return federboost_vertical.passive(
            party, table, options, eval_tables=eval_tables, threads=threads, progress=progress, keeper=keeper,
            ledger=BucketLedger(None if kept is None else noise_folder(kept, party.name)), row_numbers=row_numbers,
        )  # fmt: skip
    if options.protocol == LDP:
        return fedxgboost_ldp.passive(
            party, table, options, eval_tables=eval_tables, threads=threads, progress=progress, keeper=keeper
        )
    if options.protocol == SMM and options.mode == "paper":
        return fedxgboost_smm.passive(
            party, table, options, eval_tables=eval_tables, threads=threads, progress=progress, keeper=keeper
        )
    with HintStore(hints_folder(kept, party.name) if kept is not None and options.may_hint else None) as store:
        if options.protocol == SMM:
            return smm_secure.passive(
                party, table, options, dealer=dealer, eval_tables=eval_tables,
                threads=threads, progress=progress, keeper=keeper, store=store, hinting=hinting,
            )  # fmt: skip
        return secureboost.passive(
            party, table, options, eval_tables=eval_tables,
            threads=threads, progress=progress, keeper=keeper, store=store, hinting=hinting,
        )  # fmt: skip
