"""What the active parties of vertical protocols share: terms, growing over a finder, checkpoints that all keep."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from treaty.messaging.messages import Message
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper
from treaty.systems.pooled.rounds import Keep, Kept
from treaty.systems.pooled.training import Begun, Labelled, Progress
from treaty.systems.tree_options import TreeOptions
from treaty.systems.vertical.decisions import Finish, decided_by_all
from treaty.trees.boosting import EvalSet, RoundState, boost
from treaty.trees.columns import SumsFinder, SumsSource
from treaty.trees.splits import SplitRules


class Start(Message):
    """The model's id. A protocol's own set-up is added to it.

    A resumed training has `resumed` set, and says how many of the passive party's records its kept rounds use.
    """

    model_id: str
    resumed: bool
    records: Annotated[int, msgspec.Meta(ge=0)]


def terms(options: TreeOptions, n_rows: int, eval_rows: Sequence[int]) -> Mapping[str, str | int | float | bool | None]:
    """Return what all parties must agree on before anything is sent: every option but the sampling seed, and rows."""
    return {**public_options(options), "training rows": n_rows, "eval rows": ", ".join(map(str, eval_rows))}


def public_options(options: TreeOptions) -> dict[str, str | int | float | bool | None]:
    """Return every option but the sampling seed, which is the active party's own."""
    return {name: getattr(options, name) for name in options.__struct_fields__ if name != "random_state"}


def grow(
    party: Party,
    data: Labelled,
    options: TreeOptions,
    begun: Begun,
    finder: SumsFinder,
    sources: Sequence[SumsSource],
    eval_sets: Sequence[Labelled],
    threads: int,
    progress: Progress | None,
    keeper: Keeper | None,
    rules: SplitRules | None = None,
) -> None:
    """Grow the trees of a training that has begun into its part.

    Every passive party answers `Keep` with `Kept` after a round, and `DecideRequest` for eval sets.

    Parameters
    ----------
    finder : SumsFinder
        Over `sources`, those of all parties in their order.
    eval_sets : sequence of Labelled
        Decided by all owners, by their number.
    rules : SplitRules or None
        Where sums are in another fixed point than the objective's. None: the options' own.
    party, data, options, begun, threads, progress, keeper
        As the protocols' `active` have them.
    """
    part, forest = begun.part, begun.forest

    def on_round(progressed: RoundState) -> None:
        if keeper is not None and keeper.due:
            began = time.perf_counter()
            for peer in party.peers:
                party.send(peer, Keep(progressed.rounds))
            for peer in party.peers:
                party.receive(peer, Kept)
            begun.keep(keeper, options, progressed, began)
        if progress is not None:
            progress(progressed.rounds, part)

    if progress is not None:
        progress(forest.rounds, part)
    boost(
        finder,
        data.y,
        data.weight,
        forest,
        rules or options.rules(forest.objective),
        options.plan(sum(len(source.categorical) for source in sources)),
        eval_sets=[
            EvalSet(rows.name, rows.y, rows.weight, decided_by_all(party, part, rows.table, number, threads))
            for number, rows in enumerate(eval_sets)
        ],
        on_round=on_round,
        resume=begun.resume,
        threads=threads,
    )


def finish(party: Party) -> None:
    """Tell all passive parties that training is over."""
    for peer in party.peers:
        party.send(peer, Finish())
