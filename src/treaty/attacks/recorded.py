"""Attacks on what parties of one training have recorded in files (`treaty audit RECORD ...`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from treaty.attacks.auditing import findings
from treaty.attacks.views import Finding, View
from treaty.errors import ConfigError
from treaty.runs.records import read_record


def findings_of_records(paths: Sequence[Path]) -> tuple[list[Finding], list[str]]:
    """Try every attack on each record; return the findings, and in words what could not be scored.

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
    return findings(views, by_row=by_row), unscored
