"""What the passive parties of vertical protocols share: their part, new or resumed, checkpoints and eval rows."""

from __future__ import annotations

from collections.abc import Sequence

from treaty.data.table import Table
from treaty.errors import ConfigError
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper, checkpoint_of, fingerprint
from treaty.models.trees import ModelPart, keep_records
from treaty.systems.tree_options import TreeOptions
from treaty.systems.vertical.active import Kept, Start
from treaty.systems.vertical.decisions import DecideRequest, decide
from treaty.trees.ensemble import SplitTable


class Following:
    """A passive party's end of what is alike in all vertical protocols, once the active one has begun.

    Parameters
    ----------
    start : Start
        What the active party, `party.peers[0]`, began with.
    party, table, options, eval_tables, keeper
        As the protocols' `passive` have them.

    Attributes
    ----------
    part : ModelPart
        New; or gone on with, and then with the records of the rounds that the active party kept.

    Raises
    ------
    ConfigError
        When training goes on, and the checkpoint is none or of another training.
    """

    def __init__(
        self,
        party: Party,
        start: Start,
        table: Table,
        options: TreeOptions,
        eval_tables: Sequence[Table],
        keeper: Keeper | None,
    ) -> None:
        (self._lead,) = party.peers
        self._party, self._options, self._keeper = party, options, keeper
        self._printed = b"" if keeper is None else fingerprint([(rows, ()) for rows in (table, *eval_tables)])
        self.part = (
            self._resumed(start)
            if start.resumed
            else ModelPart(model_id=start.model_id, party=party.name, schema=table.schema, splits=SplitTable())
        )
        self._matrices = [rows.matrix() for rows in (*eval_tables, *([table] if options.refit else []))]

    def decide(self, request: DecideRequest, threads: int) -> None:
        """Tell the active party which rows of an eval set go left; under `refit` training rows are the last set."""
        self._party.send(self._lead, decide(request, self._lead, self._matrices, self.part.splits, threads))

    def keep(self) -> None:
        """Write a checkpoint, where they are kept, and say so."""
        if self._keeper is not None:
            self._keeper.keep(lambda: checkpoint_of(self.part, self._options, self._printed))
        self._party.send(self._lead, Kept())

    def _resumed(self, start: Start) -> ModelPart:
        keeper = self._keeper
        found = None if keeper is None else keeper.found()
        if found is None or found.part.model_id != start.model_id or len(found.part.splits) < start.records:
            raise ConfigError(
                f"cannot resume: expected a checkpoint of model {start.model_id[:8]} with {start.records} splits, got "
                + ("none" if found is None else f"one of model {found.part.model_id[:8]} with {len(found.part.splits)}")
                + f" - at {keeper.path if keeper else 'this party, which keeps none'}",
                public="it has no checkpoint of the training to resume",
            )
        found.check(self._options, (), self._printed)
        keep_records(found.part.splits, start.records)
        return found.part
