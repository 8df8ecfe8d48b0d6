"""Train with every party's view recorded, or read recorded views, and try every attack on each view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import clone

from treaty.attacks.ciphertexts import learned_from_ciphertexts, recognised_ciphertexts
from treaty.attacks.hidden_values import likeliest_buckets, matrix_products, noisy_gradients, repeated_masks
from treaty.attacks.opened_sums import exact_sums, inverted_histograms, nested_sides
from treaty.attacks.row_sets import instance_clustering, row_communities, set_purity
from treaty.attacks.views import Finding, Truth, View
from treaty.errors import ConfigError
from treaty.machine.arrays import Floats
from treaty.runs.records import read_record

Attack = Callable[[View, Truth], Iterator[Finding]]

ATTACKS: tuple[Attack, ...] = (
    instance_clustering,
    noisy_gradients,
    exact_sums,
    nested_sides,
    likeliest_buckets,
    inverted_histograms,
    row_communities,
    set_purity,
    recognised_ciphertexts,
    learned_from_ciphertexts,
    matrix_products,
    repeated_masks,
)
"""Each is given the view of one party, and yields nothing where it does not apply."""


@dataclass(frozen=True, slots=True)
class Audit:
    """What attacks found in a training.

    Attributes
    ----------
    model : GBDTClassifier, GBDTRegressor or LogisticRegression
        The trained model.
    findings : list of Finding
        One for each attack that applies, party and target.
    in_clear : dict of str to list of str
        By party, what the messages it received are stated to show in the clear or under noise: attacks can start from
        these alone, unless a statement is wrong.
    unstated : list of str
        Messages that no statement covers, by receiver; empty unless the system's `routes` have a fault.
    """

    model: Any
    findings: list[Finding]
    in_clear: dict[str, list[str]]
    unstated: list[str]


def audit(model: Any, X: Any, y: Any = None, sample_weight: Any = None) -> Audit:
    """Train a copy of a model and attack it from every party's view.

    All parties are played in this process, as `fit` plays them; what they see is recorded, with the contents of all
    messages, and dropped at the end. Memory is that of all messages together.

    Parameters
    ----------
    model : GBDTClassifier, GBDTRegressor, LogisticRegression, ...
        Its parameters; it is not changed.
    X, y, sample_weight
        As `fit` takes them.

    Returns
    -------
    Audit

    Raises
    ------
    ConfigError
        For a protocol without messages, ``"pooled"``, and for ``transport="grpc"``; and as `fit` does.
    DataError
        As `fit` does.
    """
    copy = clone(model)
    if copy.transport != "memory":
        raise ConfigError('an audit records what parties see in this process: expected transport="memory"')
    copy._recorded = {}
    given = (X,) if y is None else (X, y)
    copy.fit(*given, **({} if sample_weight is None else {"sample_weight": sample_weight}))
    recorded, copy._recorded = copy._recorded, None
    if not recorded:
        raise ConfigError(f"protocol {copy.protocol!r} sends nothing that could be attacked: name another")
    views = {name: View(of) for name, of in recorded.items()}
    by_row = next(iter(views.values())).by_row
    found = findings(views, by_row=by_row, targets=None if by_row else _true_labels(views, y))
    return Audit(copy, found, *compare_with_statements(views))


def compare_with_statements(views: Mapping[str, View]) -> tuple[dict[str, list[str]], list[str]]:
    """Return what the received messages are stated to show by party, and those that no statement covers."""
    stated = {name: view.stated() for name, view in views.items()}
    unstated = [f"{name} received {one}, which no statement covers" for name, (_, of) in stated.items() for one in of]
    return {name: in_clear for name, (in_clear, _) in stated.items()}, unstated


def _true_labels(views: Mapping[str, View], y: Any) -> Floats | None:
    """Return labels as they were before they were randomised, if they were: class numbers (n_rows,); else None."""
    inputs = next(view.inputs for view in views.values() if view.is_active)
    if inputs.options.label_epsilon is None or inputs.classes is None:
        return None
    return np.searchsorted(np.asarray(inputs.classes), np.asarray(y)).astype(np.float64)


def findings(views: Mapping[str, View], *, by_row: bool, targets: Floats | None = None) -> list[Finding]:
    """Try every attack on every party's view; most successful first. Arguments are those of `Truth`."""
    truth = Truth(views, by_row=by_row, targets=targets)
    found = [finding for view in views.values() for attack in ATTACKS for finding in attack(view, truth)]
    return sorted(found, key=lambda finding: finding.baseline - finding.score)


def findings_of_records(paths: Sequence[Path]) -> tuple[list[Finding], dict[str, list[str]], list[str]]:
    """Try every attack on each record.

    Returns the findings; by party, what its messages are stated to show in the clear; and in words what could not be
    scored, and messages that no statement covers.

    Parameters
    ----------
    paths : sequence of Path
        Records of one training, of different parties. A folder stands for the records in it.

    Raises
    ------
    ConfigError
        For records that are damaged, of several trainings, or twice the same party's; and where one is missing without
        which nothing can be scored: that of the active party, who has the labels, or, of tables split by row, of any
        party with rows.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.record")) if path.is_dir() else [path])]
    if not files:
        raise ConfigError(f"expected records in {', '.join(map(str, paths))}, found no file *.record")
    views: dict[str, View] = {}
    for file in files:
        view = View(read_record(file))
        if view.party in views:
            raise ConfigError(f"expected one record of each party, got another of {view.party} - at {file}")
        views[view.party] = view
    first = next(iter(views.values())).inputs
    ids = {view.inputs.model_id for view in views.values() if view.inputs.model_id}
    if len(ids) > 1:
        raise ConfigError(
            f"expected records of one training, got those of {len(ids)} - at {', '.join(map(str, files))}"
        )
    by_row = next(iter(views.values())).by_row
    missing = [name for name in first.roles.owners if name not in views]
    needed = missing if by_row else [first.roles.active] if first.roles.active in missing else []
    if needed:
        raise ConfigError(
            f"nothing can be scored without the record of {', '.join(needed)}: a rehearsal with made-up or public rows "
            "has those of all parties"
        )
    unscored = [f"{name}: what others found of its columns cannot be scored without its record" for name in missing]
    if first.options.label_epsilon is not None:
        unscored.append("labels are those that the active party has randomised, which its record has")
    in_clear, unstated = compare_with_statements(views)
    return findings(views, by_row=by_row), in_clear, unscored + unstated
