"""What the benchmarks' figures share: panels, written as PNG beside the CSV files."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")  # draws without a display; must come before pyplot

import numpy as np
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from data import RESULTS

COLOURS = {"SecureBoost": "#0b5fa5", "RL-SecureBoost": "#c1440e", "XGBoost": "#2a8c4a", "GBDT": "#7a7a7a"}
SHADES = ("#08306b", "#c1440e", "#8a63b0", "#d9a400")  # of up to four lines of one kind


def panels(titles: list[str], *, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel per title, four as two by two, more in rows of four, and the panels."""
    columns = 2 if len(titles) == 4 else min(len(titles), 4)
    shape = (-(-len(titles) // columns), columns)
    size = (4.6 * shape[1], 3.6 * shape[0])
    figure, axes = pyplot.subplots(*shape, figsize=size, squeeze=False, sharey=share_y, layout="constrained")
    for panel in axes.flat[len(titles) :]:
        panel.remove()
    for panel, title in zip(axes.flat, titles, strict=False):
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat[: len(titles)])


def band(panel: Axes, x: np.ndarray, mean: np.ndarray, sd: np.ndarray, label: str, **style: object) -> None:
    """Draw means (n_points,), and one standard deviation to either side."""
    panel.plot(x, mean, label=label, **style)
    panel.fill_between(x, mean - sd, mean + sd, alpha=0.15, linewidth=0, color=style.get("color"))


def save(figure: Figure, name: str, *, quick: bool) -> None:
    """Write results/<name>.png unless the run was a quick one."""
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        figure.savefig(RESULTS / f"{name}.png", dpi=150)
        print(f"written to benchmarks/results/{name}.png")
    pyplot.close(figure)
