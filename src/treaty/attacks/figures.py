"""Figures of audits, drawn by matplotlib: what attacks find beside a guess, and beside how good each model is."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treaty.attacks.comparing import Standing
from treaty.attacks.views import Finding
from treaty.errors import ConfigError

FINDS, GUESSES = "tab:red", "tab:gray"


def draw_standings(standings: Sequence[Standing], path: Path) -> None:
    """Draw how good each model is against what the most successful attack on its training finds.

    Raises ConfigError without matplotlib, which ``pip install "treaty-learn[report]"`` brings, and for a file that
    cannot be written or is of no kind that matplotlib knows.
    """
    drawn = [(standing, standing.worst) for standing in standings if standing.worst is not None]
    picture, (quality, danger) = _picture(len(drawn), 2)
    places = np.arange(len(drawn))[::-1]
    quality.plot([standing.auc for standing, _ in drawn], places, "o", color="tab:blue")
    quality.set(
        xlabel="AUC on rows held back", yticks=places, yticklabels=[_wrapped(standing.title) for standing, _ in drawn]
    )
    for place, (_, worst) in zip(places, drawn, strict=True):
        danger.barh(place, max(0.0, worst.advantage), color=FINDS if worst.finds else GUESSES, alpha=0.6)
        said = f"{worst.attack}, {worst.party}"
        danger.annotate(said, (0.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=7)
    danger.set(xlabel="most successful attack: way from a guess to all", xlim=(0.0, 1.0))
    _save(picture, path)


def draw_findings(found: Sequence[Finding], path: Path) -> None:
    """Draw each finding's score beside its guess; raises as `draw_standings`."""
    picture, (axes,) = _picture(len(found), 1)
    places = np.arange(len(found))[::-1]
    axes.barh(places, [one.score for one in found], color=[FINDS if one.finds else GUESSES for one in found], alpha=0.6)
    axes.plot([one.baseline for one in found], places, "|", color="black", markersize=18, label="guess")
    titles = [_wrapped(f"{one.attack}, {one.party}, {one.target} ({one.measure})") for one in found]
    axes.set(xlabel="score", xlim=(0.0, 1.0), yticks=places, yticklabels=titles)
    axes.legend(loc="lower right")
    _save(picture, path)


def _picture(lines: int, columns: int) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError('a figure needs matplotlib: pip install "treaty-learn[report]"') from None
    picture = Figure(figsize=(10, 0.7 * max(1, lines) + 1.6), layout="constrained")
    axes = list(picture.subplots(1, columns, sharey=True, squeeze=False)[0])
    for each in axes:
        each.grid(axis="x", alpha=0.3)
    return picture, axes


def _save(picture: Any, path: Path) -> None:
    try:
        picture.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the figure {path} cannot be written: {error}") from None


def _wrapped(title: str) -> str:
    """Break a long title between words, or at a system's options."""
    return "\n".join(textwrap.wrap(title.replace(":", ": "), 36, break_on_hyphens=False)).replace(": ", ":")
