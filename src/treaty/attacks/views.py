"""An attack's input and result: one party's view, the truth to compare with, and a finding."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA

from treaty.data.binning import MOST_BINS, MOST_CATEGORIES, Bins, fit_bins
from treaty.errors import DataError
from treaty.machine.arrays import Codes, Flags, Floats, Int32s
from treaty.messaging.transcript import Room
from treaty.privacy.leaks import attack_auc
from treaty.runs.report import OF_RUNS
from treaty.systems import SYSTEMS, find_system
from treaty.systems.alignment.leakage import ROUTES as ALIGNMENT
from treaty.systems.horizontal.rows import conform
from treaty.systems.leakage import sent
from treaty.systems.observers import Observer, Recording, observing
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import RoleInput


class View:
    """What one party of a training has: its inputs with its own rows, its messages, the sums it opened, and its result.

    `party` is its name, `system` the record of the system that was trained. `is_active` says whether it leads the
    training, `by_row` whether tables are split by row.
    """

    def __init__(self, inputs: RoleInput, recording: Recording) -> None:
        self.inputs, self.recording, self.transcript = inputs, recording, inputs.party.transcript
        self.party, named = inputs.party.name, inputs.options.system
        self.is_active = self.party == self.inputs.roles.active
        # trees and linear models share names: the options of every boosting or regression decide
        known = [find_system(named, model) for model, of in SYSTEMS.items() if named in of] or [find_system(named)]
        self.system = next((one for one in known if one.common is type(self.inputs.common)), known[0])
        self.by_row = self.system.split == "rows"

    def steps(self, *kinds: type[msgspec.Struct]) -> bool:
        """Return whether the party has sent or received a message of one of these classes."""
        names = {kind.__name__ for kind in kinds}
        return any(entry.step in names for entry in self.transcript.entries)

    def finding(
        self, attack: str, target: str, measure: str, score: float, baseline: float, error: float = 0.0
    ) -> Finding:
        """Return a finding of this party."""
        return Finding(
            attack=attack, party=self.party, target=target, measure=measure, score=score, baseline=baseline, error=error
        )

    def stated(self) -> tuple[list[str], list[str]]:
        """Compare the messages that the party received in the training with what is stated about them.

        Return what they are stated to show in the clear or under noise, from which attacks can start, and messages that
        no statement covers: a fault of the system's `routes`.
        """
        inputs, roles = self.inputs, self.inputs.roles.of
        lines = (*sent(self.system.routes.get("train", ()), inputs.options, inputs.common), *OF_RUNS, *ALIGNMENT)
        received = [entry for entry in self.transcript.entries if entry.direction == "received"]
        in_clear: dict[str, None] = {}
        unstated = []
        for step, peer in dict.fromkeys((entry.step, entry.peer) for entry in received):
            met = [line.leakage for line in lines if line.goes(step, roles[peer], roles[self.party])]
            in_clear |= {one.tells: None for one in met if one.form in ("exact", "aggregated", "noisy")}
            if not met:
                unstated.append(f"{step} from {peer}")
        return list(in_clear), unstated


@contextmanager
def recorded_views(megabytes: float = math.inf, kinds: Collection[str] | None = None) -> Iterator[dict[str, View]]:
    """Record what parties see of the training that this process plays within the block; yield it, by party.

    Contents are kept of these `kinds` of messages alone (None: of all). The training ends with ConfigError once what is
    kept of all parties takes more than so many `megabytes`.
    """
    views: dict[str, View] = {}
    room = Room(
        megabytes * 1e6, f"parties see more than {megabytes:g} MB: audit fewer rounds or rows, or raise megabytes"
    )

    def watch(inputs: RoleInput) -> list[Observer]:
        if inputs.party is None:
            return []
        inputs.party.transcript.keep_contents(room, kinds)
        views[inputs.party.name] = view = View(inputs, Recording(room=room))
        return [view.recording]

    with observing(watch):
        yield views
    # threads begin in any order
    for view in [*views.values()][:1]:
        for name in view.inputs.roles.of:
            views[name] = views.pop(name)


class Truth:
    """The labels, every party's columns, and the vectors that each party gave to masked sums (`given`).

    `views` are those of all parties with rows. With `by_row`, each has its own rows, which are put one after another.
    `targets` (n_rows,) are the true class numbers, or numbers, if the active party trains on randomised ones. `owners`
    are the parties with rows and columns.
    """

    def __init__(self, views: Mapping[str, View], *, by_row: bool, targets: Floats | None = None) -> None:
        self._targets = targets
        self._data = {name: view.inputs.data for name, view in views.items() if view.inputs.data is not None}
        self._data = {name: data for name, data in self._data.items() if data.table.n_rows}
        self.owners = [name for name, data in self._data.items() if data.table.schema.names]
        inputs = next(iter(views.values())).inputs
        self._active, common = inputs.roles.active, inputs.common
        self._limits = common.bin_limits if isinstance(common, BoostingOptions) else (MOST_BINS, MOST_CATEGORIES)
        self._classes = next((view.inputs.classes for view in views.values() if view.inputs.classes is not None), None)
        self.by_row = by_row
        self.given = {name: view.recording.given for name, view in views.items()}

    @cached_property
    def targets(self) -> Floats:
        """Class numbers, or numbers, float64 (n_rows,)."""
        if self._targets is not None:
            return self._targets
        return np.concatenate([data.y for data in self._data.values()]) if self.by_row else self._data[self._active].y

    @cached_property
    def labels(self) -> Flags:
        """Labels as two classes, (n_rows,): the rarest of several against the rest, numbers above the median."""
        if self._classes is None:
            return np.asarray(self.targets > np.median(self.targets))
        sizes = np.bincount(self.targets.astype(np.intp), minlength=len(self._classes))
        # an absent class is not the rarest
        return np.asarray(self.targets == np.argmin(np.where(sizes == 0, sizes.max() + 1, sizes)))

    def codes(self, party: str, most: list[int] | None = None) -> tuple[Codes, Int32s]:
        """Return the bins of a party's columns, `Bins.code_type` (n_rows, n_columns), and the columns' first slots.

        There are at most `max_bin` of each, or as many as `most` has for it.
        """
        table = self._data[party].table
        bins = fit_bins(table, most or self._limits[0], max_categories=self._limits[1])
        return bins.transform(table), bins.offsets

    def all_codes(self, bins: Bins) -> Codes | None:
        """Return the bins of all parties' rows, `Bins.code_type` (n_rows, n_columns); None if their columns differ."""
        try:
            tables = [conform(data.table, bins.schema, name) for name, data in self._data.items()]
        except DataError:
            return None
        return np.concatenate([bins.transform(table) for table in tables])


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How well one attack of one party succeeded.

    Attributes
    ----------
    attack : str
        The attack, with the paper's short name.
    party : str
        The attacker, which uses its own view alone.
    target : str
        What it looks for: ``"labels"``, ``"bins of lab"``.
    measure : str
        What `score` is: ``"AUC"``, ``"share known"``, ``"share right"``.
    score : float
        From 0 to 1.
    baseline : float
        The score of a guess that uses nothing of what the party saw.
    error : float
        Standard error of the score if nothing could be found.

    Examples
    --------
    An attack guesses labels better than chance, by more than four standard errors:

    >>> from treaty.attacks.views import Finding
    >>> finding = Finding(
    ...     attack="clustering", party="shop", target="labels", measure="AUC", score=0.7, baseline=0.5, error=0.01
    ... )
    >>> finding.finds, round(finding.advantage, 2)
    (True, 0.4)
    """

    attack: str
    party: str
    target: str
    measure: str
    score: float
    baseline: float
    error: float = 0.0

    @property
    def advantage(self) -> float:
        """The score's part of the way from a guess to everything: 0 at the baseline, 1 if all is found."""
        return (self.score - self.baseline) / max(1e-9, 1.0 - self.baseline)

    @property
    def finds(self) -> bool:
        """Whether the score exceeds the baseline by 0.02 and by four standard errors, because many attacks are tried.

        For what is known for certain, any score above the baseline is a finding.
        """
        if self.measure == "share known":
            return self.score > self.baseline
        return self.score - self.baseline > max(0.02, 4.0 * self.error)

    @property
    def verdict(self) -> str:
        """``"finds"`` or ``"no better than a guess"``."""
        return "finds" if self.finds else "no better than a guess"


def auc_error(labels: Flags, auc: float = 0.5) -> float:
    """Return the standard error of an AUC over so many rows of two classes (Hanley and McNeil, 1982, equation 1)."""
    ones = max(1, int(labels.sum()))
    zeros = max(1, len(labels) - ones)
    q1, q2 = auc / (2.0 - auc), 2.0 * auc**2 / (1.0 + auc)
    spread = auc * (1.0 - auc) + (ones - 1) * (q1 - auc**2) + (zeros - 1) * (q2 - auc**2)
    return float(np.sqrt(spread / (ones * zeros)))


def error_of_best(error: float, tries: int) -> float:
    """Return the standard error by which four of them are as unlikely for the best of several tries as for one."""
    # the tail of a normal beyond z falls as exp(-z^2 / 2), so the best of k goes beyond sqrt(z^2 + 2 ln k) as often
    return error * float(np.sqrt(16.0 + 2.0 * np.log(max(1, tries)))) / 4.0


def label_finding(attack: str, view: View, truth: Truth, scores: Floats) -> Finding:
    """Return how well scores (n_rows,) separate labels, compared with a guess from the party's own columns.

    That guess orders rows by the first principal component of the columns' bins.
    """
    codes, baseline = truth.codes(view.party)[0], 0.5
    if codes.shape[1]:
        own = PCA(1, random_state=0).fit_transform(standardised(codes))[:, 0]
        baseline = attack_auc(own, truth.labels.astype(int))
    score = attack_auc(scores, truth.labels.astype(int))
    return view.finding(attack, "labels", "AUC", score, baseline, auc_error(truth.labels, baseline))


def standardised(codes: NDArray[np.uint8]) -> Floats:
    """Return bins (n_rows, n_columns), each column with a mean of 0 and a standard deviation of 1."""
    values = codes - codes.mean(axis=0)
    spread = values.std(axis=0)
    return np.asarray(values / np.where(spread > 0, spread, 1.0))
