"""An audit of a finished training: whether passive parties received the gradients that the labels imply.

With the active party's record and a passive party's (`audit_record`), an auditor plays the training again from the
labels: gradients follow from labels and margins, margins from the leaves that rows came to, leaf weights from
gradients, samples from the generator's first state. On the way every recorded message is opened and compared:

* every ciphertext holds the gradient and hessian expected of its row; in vectors of nodes, or nothing;
* the rows of every node asked about are the sampled rows of a node of the tree;
* the tree's samples of rows and columns are those drawn, and its commitment opens to the expected gradients;
* at the passive party's splits rows went where it sent them;
* ciphertexts have the randomness that the protocol draws, and the active party signed what the other kept.

The audit relies on the active party for labels, weights and directions of monotone constraints, and for which way rows
went at its own splits. An active party that lies about these has trained on the lie. The auditor sees labels and
gradients, and no party's columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from treaty.crypto.sums.encrypted_sums import DisclosedKey, DisclosedLattice, bounds_of, disclosed_key
from treaty.errors import ConfigError, CryptoError, PeerProtocolError
from treaty.messaging.certificates import fingerprint
from treaty.messaging.messages import unpack, view
from treaty.systems.options import converted, names_of
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.pooled.system import loss_of
from treaty.systems.vertical.audit_messages import AuditShape, ReceivedTrees, Replay, Unsound, shape_of
from treaty.systems.vertical.audit_record import SUFFIX, ActiveHeader, KeptTree, PassiveHeader, read_parts
from treaty.systems.vertical.encrypted_columns import sums_bounds
from treaty.systems.vertical.messages import TreeEnd
from treaty.trees.boosting import Boosting, Forest, RoundState, TreeSample
from treaty.trees.constraints import Constraints

Progress = Callable[[int, int], None]
Header = TypeVar("Header", ActiveHeader, PassiveHeader)


@dataclass(slots=True)
class ReplayVerdict:
    """What was found of a training between the active and a passive party; trees are counted from 0.

    `findings` are sentences about differences, none of which holds a value; `notes` what could not be compared.
    `signed_by` is the fingerprint of the certificate under which all was signed; empty where nothing was.
    """

    active: str
    passive: str
    job: str
    model_id: str
    trees: int = 0
    vectors: int = 0
    signed_by: str = ""
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Run:
    """The two records of one run of a training, which a resumed training has several of."""

    active: ActiveHeader
    passive: PassiveHeader
    active_path: Path
    passive_path: Path


def audit(
    active: Path, passive: Path, *, unfinished: bool = False, threads: int = 1, progress: Progress | None = None
) -> list[ReplayVerdict]:
    """Compare all trainings of which the active party's folder and a passive party's both have records.

    With `unfinished` records count as far as they are whole; `progress` is called with trees done and most in all.
    Raises ConfigError for a folder without records, or records that are damaged or of different trainings.
    """
    kept = _headers(active, ActiveHeader, unfinished)
    received = _headers(passive, PassiveHeader, unfinished)
    for where, found, whose in ((active, kept, "the active party"), (passive, received, "a passive party")):
        if not found:
            raise ConfigError(f"expected records that {whose} kept for an audit, got none - at {where}")
    runs = [
        _Run(kept[header.number][0], header, kept[header.number][1], path)
        for header, path in received.values()
        if header.number in kept
    ]
    if not runs:
        raise ConfigError(f"expected two records of one training, got none - at {active} and {passive}")
    verdicts = []
    for passive_name, model in dict.fromkeys((run.passive.party, run.active.model_id) for run in runs):
        own = [run for run in runs if (run.passive.party, run.active.model_id) == (passive_name, model)]
        verdict = ReplayVerdict(own[0].active.party, passive_name, own[0].active.job, model)
        lacking = [h for h, _ in received.values() if h.model_id == model and h.number not in kept]
        if lacking:
            verdict.findings.append(f"{verdict.active} shows no record of {len(lacking)} runs of this training")
        _audit_runs(sorted(own, key=lambda run: run.active.rounds), verdict, unfinished, threads, progress)
        verdicts.append(verdict)
    return verdicts


def _headers(folder: Path, kind: type[Header], unfinished: bool) -> dict[bytes, tuple[Header, Path]]:
    """Return the headers of a kind, and their files, by the number of the record."""
    found = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        header = next(read_parts(path, unfinished=unfinished), None)
        if isinstance(header, kind):
            found[header.number] = header, path
    return found


def _audit_runs(
    runs: list[_Run], verdict: ReplayVerdict, unfinished: bool, threads: int, progress: Progress | None
) -> None:
    """Audit the runs of a training, the earliest first: a resumed one continues from margins of an earlier one."""
    passed: dict[int, RoundState] = {}
    for run in runs:
        verdict.signed_by = fingerprint(run.passive.certificate) if run.passive.certificate else ""
        try:
            _RunAudit(run, verdict, unfinished, threads, progress).play({r.active.rounds for r in runs}, passed)
        except (CryptoError, Unsound) as fault:
            verdict.findings.append(f"tree {verdict.trees}: {fault}")
        except PeerProtocolError as error:
            raise ConfigError(f"expected records of one training, got other parts: {error}") from None


class _RunAudit:
    """One run of a training, played again and compared with the records of both parties."""

    def __init__(
        self, run: _Run, verdict: ReplayVerdict, unfinished: bool, threads: int, progress: Progress | None
    ) -> None:
        self._run, self._verdict, self._threads, self._progress = run, verdict, threads, progress
        active, passive = run.active, run.passive
        for what in ("job", "model_id", "cipher", "terms", "setup", "seed"):
            mine, theirs = getattr(active, what), getattr(passive, what)
            if what == "setup":
                mine, theirs = ([(a.dtype, a.shape, bytes(a.data)) for a in side] for side in (mine, theirs))
            if mine != theirs:
                raise Unsound(f"the two records do not have the same {what} of the training")
        self._weight = None
        if active.weight is not None:
            self._weight = view(active.weight, np.float64, (passive.n_rows,), peer=active.party, what="weight")
        given = {name: passive.terms[name] for name in names_of(BoostingOptions) if name in passive.terms}
        self._common = converted(given, BoostingOptions, "the record")
        shape = (passive.n_rows, 2) if self._common.loss_class.takes == "groups" else (passive.n_rows,)
        self._y = view(active.y, np.float64, shape, peer=active.party, what="y")
        epsilon = passive.terms.get("epsilon") if passive.terms.get("mechanism") == "label_rr" else None
        self._loss = loss_of(self._y, self._weight, active.n_classes, epsilon, self._common)  # type: ignore[arg-type]
        self._of_round = self._loss.n_outputs * self._common.num_parallel_tree
        alone = passive.terms.get("rl_trees")
        self._alone = (alone if isinstance(alone, int) else 0) * self._of_round
        self._kept, self._parts = (
            islice(read_parts(path, unfinished=unfinished), 1, None) for path in (run.active_path, run.passive_path)
        )  # without their headers
        self._place = active.sources.index(passive.party)
        self._received = ReceivedTrees(
            passive, self._parts, self._make_opener(), active.blind,
            sum(active.widths[: self._place]), active.widths[self._place],
        )  # fmt: skip
        self._tree = active.rounds * self._of_round

    def play(self, wanted: set[int], passed: dict[int, RoundState]) -> None:
        """Play the run; note in `passed` the state after `wanted` rounds, from which other runs continued."""
        active, loss, common = self._run.active, self._loss, self._common
        begun = self._begun(passed)
        passed.setdefault(begun.rounds, begun)
        plan = replace(common.plan(sum(active.widths)), n_estimators=1 << 40, early_stopping_rounds=None)

        def on_round(state: RoundState) -> None:
            rounds = active.rounds + state.rounds
            if rounds in wanted:
                passed[rounds] = replace(state, rounds=rounds, margins=state.margins.copy())

        forest = Forest(loss, tuple(active.sources), parallel=common.num_parallel_tree)
        # a split's direction is in the record, not its column: all splits count as of one column
        bounded = Constraints(np.ones(1, np.int8), np.zeros((0, 1), np.bool_), np.arange(2))
        rules = common.rules(loss, bounded if common.monotone_constraints else None)
        boosting = Boosting(
            self._y, self._weight, forest, rules, plan,
            on_round=on_round, resume=replace(begun, rounds=0), threads=self._threads,
        )  # fmt: skip
        for a_round in boosting:
            for sample in a_round.trees():
                shape = self._next_shape()
                if shape is None or not self._compare(sample, shape):
                    boosting.stop()
                    break
                replay = Replay(shape, sample, common.fewest_rows)
                a_round.add(replay.grow(boosting.rules), replay)
        rest = list(map(type, chain(self._parts, self._kept)))  # to the ends, so that damage there shows, too
        if TreeEnd in rest:
            self._verdict.notes.append(f"tree {self._tree} and those after it are not in the record of {active.party}")
        elif rest:
            self._verdict.notes.append(f"tree {self._tree} started but did not finish: it is not compared")

    def _begun(self, passed: dict[int, RoundState]) -> RoundState:
        """Return what the run began with; Unsound unless that is the first margins, or those of an earlier run."""
        active, n_rows = self._run.active, len(self._y)
        margins = view(active.margins, np.float64, (self._loss.n_outputs, n_rows), peer=active.party, what="margins")
        if active.rounds == 0:
            fits = bool((margins == self._loss.base_margins[:, None]).all())
        else:
            earlier = passed.get(active.rounds)
            if earlier is None:
                raise Unsound(f"no record shows the {active.rounds} rounds before the run")
            fits = np.array_equal(earlier.margins, margins) and earlier.random_state == active.random_state
        if not fits:
            raise Unsound(f"the run begins with other margins than those after {active.rounds} rounds")
        return RoundState(active.rounds, margins, active.random_state)

    def _make_opener(self) -> DisclosedLattice | DisclosedKey:
        active, passive = self._run.active, self._run.passive
        setup = unpack(passive.setup, active.party, "Setup")
        bounds = sums_bounds(passive.n_rows, self._loss, self._common)
        if bounds_of(passive.cipher, setup) != bounds:
            raise Unsound("the bounds that were sent do not follow from the labels and options")
        if passive.cipher == "lattice":
            return DisclosedLattice(bounds, passive.seed, self._threads)
        numbers = [int(x, 16) for x in active.secret_numbers]
        key = disclosed_key(passive.cipher, setup, numbers, passive.short_key_bits)
        return DisclosedKey(key, bounds, self._threads)

    def _next_shape(self) -> AuditShape | None:
        part = next(self._kept, None)
        if part is None:
            return None
        if not isinstance(part, KeptTree):
            raise ConfigError(f"expected trees, got {type(part).__name__} - at {self._run.active_path}")
        self._kept_tree = part
        return shape_of(part, len(self._y), self._run.active.party)

    def _compare(self, sample: TreeSample, shape: AuditShape) -> bool:
        """Compare what was received of a tree with what its sample implies; return whether there was something."""
        number, verdict = self._tree, self._verdict
        self._tree += 1
        if number < self._alone:
            return True
        found = self._received.compare(number, sample, self._kept_tree, shape, self._place)
        if found is None:
            verdict.notes.append(f"tree {number} and those after it are not in the record of {verdict.passive}")
            return False
        verdict.findings += [f"tree {number}: {finding}" for finding in found.findings]
        verdict.trees += 1
        verdict.vectors += found.vectors
        if self._progress is not None:
            self._progress(verdict.trees, self._common.most_rounds * self._of_round)
        return True
