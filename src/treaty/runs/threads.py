"""Play every role of a job on this machine, in threads over the in-memory channel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from treaty.compute import cores, stay_on_one_core
from treaty.data.table import Table
from treaty.errors import PeerAborted, PeerError
from treaty.messaging.memory import Link, memory_channels
from treaty.messaging.party import Party, run_role
from treaty.messaging.transcript import Transcript
from treaty.models.checkpoints import Keeper
from treaty.models.interpretation import Contributions, rows_first
from treaty.models.trees import ModelPart
from treaty.systems.federboost_horizontal import roles as federboost_horizontal
from treaty.systems.federboost_horizontal.noise import noise_ledger
from treaty.systems.fedxgboost_smm.dealer import DEALER, dealer
from treaty.systems.horizontal.members import Vouching
from treaty.systems.pooled.training import Labelled, Progress
from treaty.systems.secureboost.hidden_prediction import hidden_active, hidden_passive
from treaty.systems.tree_options import TreeOptions
from treaty.systems.vertical import decisions
from treaty.systems.vertical.by_name import SMM, train_active, train_passive
from treaty.systems.vertical.contributions import explain_active, explain_passive

Role = Callable[[Party], Any]
_FEW_CELLS = 1 << 20  # of a participant: summed in less time than it takes to say so


@dataclass(frozen=True, slots=True)
class Played:
    """What each role returned, and what each party sent and received."""

    results: dict[str, Any]
    transcripts: dict[str, Transcript]


def play(
    roles: Mapping[str, Role],
    links: Mapping[str, Sequence[str]],
    *,
    job: str,
    protocol: str,
    timeout: float = 3600.0,
    record_content: bool = False,
    link: Link | None = None,
    one_core: Collection[str] = (),
) -> Played:
    """Run every role in a thread of its own.

    Parameters
    ----------
    roles : mapping of party name to role
        A role takes its `Party`.
    links : mapping of party name to peers
        Who talks to whom.
    job, protocol : str
        Put on every message.
    timeout : float
        Seconds a party waits for a message.
    record_content : bool
        Keep the content of messages in the transcripts, for audits and tests.
    link : Link, optional
        How slow each party's line is; None: messages are there at once.
    one_core : collection of str
        Roles whose threads share one core, see `stay_on_one_core`: those that compute little between messages.

    Returns
    -------
    Played

    Raises
    ------
    Exception
        What the first role to fail raised; the others end with it.
    """
    channels = memory_channels(roles, link)
    parties = {
        name: Party(
            name, job, protocol, channels[name], links[name],
            Transcript(name, record_content=record_content), timeout,
        )
        for name in roles
    }  # fmt: skip
    results: dict[str, Any] = {}
    failures: list[BaseException] = []

    def run(name: str) -> None:
        if name in one_core:
            stay_on_one_core()
        try:
            results[name] = run_role(parties[name], lambda: roles[name](parties[name]))
        except BaseException as error:
            failures.append(error)
        finally:
            channels[name].close()

    threads = [threading.Thread(target=run, args=(name,), name=f"treaty-{name}", daemon=True) for name in roles]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            for thread in threads:  # not for ever: an interrupt is looked at between waits
                thread.join(0.1)
    except BaseException:
        for party in parties.values():
            party.abort("interrupted")
        raise
    if failures:
        raise root_cause(failures)
    return Played(results, {name: party.transcript for name, party in parties.items()})


def root_cause(failures: Sequence[BaseException]) -> BaseException:
    """Return the error the others followed from: one that is not about a peer, else one that is not an echo."""
    for echo in (PeerError, PeerAborted):
        for error in failures:
            if not isinstance(error, echo):
                return error
    return failures[0]


def star(active: str, parties: Iterable[str], helper: str | None = None) -> dict[str, list[str]]:
    """Link the active party with every other, and a helper with all; passive parties never talk to each other."""
    others = [name for name in parties if name not in (active, helper)]
    if helper is None:
        return {active: others, **{name: [active] for name in others}}
    return {active: [*others, helper], **{name: [active, helper] for name in others}, helper: [active, *others]}


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a run took.

    Attributes
    ----------
    totals : dict
        Of each ordered pair of parties ("clinic -> lab"): messages, bytes, and bytes by message type.
    seconds : dict
        The active party's phases, where it noted them itself.
    """

    totals: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def traffic_of(transcripts: Iterable[Transcript]) -> Traffic:
    """Add up what parties sent."""
    totals: dict[str, dict[str, Any]] = {}
    for transcript in transcripts:
        for entry in transcript.entries:
            if entry.direction == "sent":
                pair = totals.setdefault(
                    f"{transcript.party} -> {entry.peer}", {"messages": 0, "bytes": 0, "by_type": {}}
                )
                pair["messages"] += 1
                pair["bytes"] += entry.nbytes
                pair["by_type"][entry.step] = pair["by_type"].get(entry.step, 0) + entry.nbytes
    return Traffic(totals)


# ---------------------------------------------------------------- for the estimators' transport="memory"


def train_in_threads(
    data: Labelled,
    tables: Mapping[str, Table],
    evals: Sequence[tuple[str, Mapping[str, Table], NDArray[np.float64]]],
    active: str,
    classes: list[Any] | None,
    options: TreeOptions,
    n_jobs: int | None,
    progress: Progress,
    keepers: Mapping[str, Keeper],
    kept: Path | None,
    phase: Callable[[str, int, int], None],
) -> tuple[dict[str, ModelPart], Traffic]:
    """Train with every party in a thread of its own; return their parts and the traffic."""
    threads, helper = cores(n_jobs), DEALER if options.has_dealer else None
    watched = [Labelled(rows[active], labels, None, name) for name, rows, labels in evals]
    roles: dict[str, Role] = {
        name: lambda party, name=name: train_passive(  # type: ignore[misc]
            party,
            tables[name],
            options,
            eval_tables=[rows[name] for _, rows, _ in evals],
            threads=threads,
            progress=progress,
            keeper=keepers.get(name),
            kept=kept,
            dealer=helper,
        )
        for name in tables
    }
    roles[active] = lambda party: train_active(
        party, data, options, parties=list(tables), classes=classes, eval_sets=watched,
        threads=threads, progress=progress, keeper=keepers.get(active), kept=kept,
        hinting=partial(phase, "hints"), dealer=helper,
    )  # fmt: skip
    if helper is not None:
        roles[helper] = lambda party: dealer(party, options, lead=active, threads=threads)
    products = options.protocol == SMM and options.mode == "paper"
    with threadpool_limits(1, user_api="blas") if products else nullcontext():  # parties multiply side by side
        played = play(roles, star(active, tables, helper), job="fit", protocol=options.protocol)
    return {name: played.results[name] for name in tables}, traffic_of(played.transcripts.values())


def train_horizontal_in_threads(
    shards: Mapping[str, Labelled],
    evals: Sequence[Labelled],
    lead: str,
    classes: list[Any] | None,
    options: TreeOptions,
    n_jobs: int | None,
    progress: Progress,
    keepers: Mapping[str, Keeper],
    kept: Path | None = None,
) -> tuple[dict[str, ModelPart], Traffic]:
    """Train with every participant in a thread of its own; return the model as each has it, and the traffic.

    Parameters
    ----------
    shards : mapping of str to Labelled
        Every participant's rows; `lead` need not be among them.
    evals : sequence of Labelled
        Watched by the leader.
    progress : callable
        Called by the leader alone: participants follow it tree by tree.
    kept : Path or None
        Folder of participants' privacy ledgers.
    """
    members, every = list(shards), cores(n_jobs)
    each = max(1, every // len(members))  # participants work at the same time, and a leader without data waits then
    roles: dict[str, Role] = {
        name: lambda party, name=name: federboost_horizontal.participate(  # type: ignore[misc]
            party,
            shards[name],
            options,
            members=members,
            classes=classes,
            threads=each,
            keeper=keepers.get(name),
            vouching=Vouching(),
            ledger=noise_ledger(options, kept, name),
        )
        for name in members
    }
    roles[lead] = lambda party: federboost_horizontal.lead(
        party, shards.get(lead), options, members=members, classes=classes, eval_sets=evals,
        threads=each if lead in shards else every, progress=progress, keeper=keepers.get(lead), vouching=Vouching(),
        ledger=noise_ledger(options, kept, lead),
    )  # fmt: skip
    cells = max(data.table.n_rows * len(data.table.columns) for data in shards.values())
    one_core = roles if cells < _FEW_CELLS else ()
    played = play(roles, star(lead, roles), job="fit", protocol=options.protocol, one_core=one_core)
    return {name: played.results[name] for name in roles}, traffic_of(played.transcripts.values())


def predict_in_threads(
    parts: Mapping[str, ModelPart],
    tables: Mapping[str, Table],
    options: TreeOptions,
    n_jobs: int | None,
    steps: Callable[[int, int], None] | None = None,
) -> NDArray[np.float64]:
    """Predict with every party in a thread of its own; return the margins (n_rows, n_outputs)."""
    threads = cores(n_jobs)
    if options.he_inference:
        bits = options.insecure_test_key_bits
        return np.asarray(
            _with_model(
                parts,
                lambda party, part: hidden_active(
                    party, part, tables[party.name],
                    key_bits=options.key_bits, insecure_test_key_bits=bits, threads=threads, progress=steps,
                ),
                lambda party, part: hidden_passive(
                    party, part, tables[party.name], insecure_test_key_bits=bits, threads=threads
                ),
            )[active_of(parts)]
        )  # fmt: skip
    decided = decide_in_threads(parts, tables, n_jobs)
    forest = parts[active_of(parts)].forest
    assert forest is not None
    return decisions.margins(decided, forest.objective, threads)


def decide_in_threads(
    parts: Mapping[str, ModelPart], tables: Mapping[str, Table], n_jobs: int | None
) -> decisions.Decided:
    """Have every party decide its splits in a thread of its own; return what the active one gets."""
    threads = cores(n_jobs)
    found: decisions.Decided = _with_model(
        parts,
        lambda party, part: decisions.collect(party, part, tables[party.name], threads),
        lambda party, part: decisions.predict_passive(party, part, tables[party.name], threads),
    )[active_of(parts)]
    return found


def explain_in_threads(
    parts: Mapping[str, ModelPart], tables: Mapping[str, Table], n_jobs: int | None
) -> Contributions:
    """Have every party get its own columns' contributions in a thread of its own; return all parties' values."""
    threads, lead = cores(n_jobs), active_of(parts)
    found = _with_model(
        parts,
        lambda party, part: explain_active(party, part, tables[party.name], threads=threads),
        lambda party, part: explain_passive(party, part, tables[party.name], threads=threads),
    )
    own = {name: found[lead].own if name == lead else found[name] for name in parts}
    return Contributions({name: rows_first(values) for name, values in own.items()}, found[lead].bias)


def active_of(parts: Mapping[str, ModelPart]) -> str:
    """Return the party that holds the trees."""
    return next(name for name, part in parts.items() if part.forest is not None)


def _with_model(
    parts: Mapping[str, ModelPart],
    active: Callable[[Party, ModelPart], Any],
    passive: Callable[[Party, ModelPart], Any],
) -> dict[str, Any]:
    """Play a role of the active and one of all other owners of a model; return what each returned."""
    lead = active_of(parts)
    roles: dict[str, Role] = {
        name: lambda party, role=active if name == lead else passive: role(party, parts[party.name])  # type: ignore[misc]
        for name in parts
    }
    return play(roles, star(lead, parts), job="predict", protocol="secureboost").results
