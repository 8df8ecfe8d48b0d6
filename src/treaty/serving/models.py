"""A model to be served: read from a part, and asked for margins and predictions of a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treaty.data.columns import Category
from treaty.data.table import Schema, Table
from treaty.errors import ConfigError
from treaty.estimators.saving import read_saved
from treaty.files import kind_of
from treaty.models.checkpoints import FORMAT as CHECKPOINT
from treaty.models.linear import FORMAT as LINEAR
from treaty.models.linear import LinearPart, load_linear_part
from treaty.models.trees import FORMAT as TREES
from treaty.models.trees import ModelPart, load_part
from treaty.serving.expectations import expected_walk
from treaty.serving.walks import absent_owners, forest_of_active, whole_walk
from treaty.trees.ensemble import Walk

Margins = NDArray[np.float64]


class ServedModel:
    """The active party's part of a model, or a whole model, ready to predict rows of its own columns.

    Attributes
    ----------
    part : ModelPart or LinearPart
    needs : tuple of str
        Parties without whom there is no prediction: owners of splits in use, or of weights.
    """

    def __init__(self, part: ModelPart | LinearPart, needs: Sequence[str] | None = None) -> None:
        """`needs` are the other owners of a linear model, whose part does not name them; of trees leave it out.

        Raises
        ------
        ConfigError
            Where the part is a passive party's.
        """
        if not part.is_active:
            holds = "trees" if isinstance(part, ModelPart) else "intercept"
            raise ConfigError(
                f"expected the part of the active party, which has the {holds}, got that of {part.party}, "
                "a passive one: serve the model at the party with the labels"
            )
        self.part = part
        if isinstance(part, ModelPart):
            self.needs = absent_owners(part)
        else:
            self.needs = _other_owners(part) if needs is None else tuple(needs)
        self._margins: Callable[[NDArray[Any], int], Margins] | None = None
        if not self.needs:
            self._margins = self._by_walk(part, whole_walk(part)) if isinstance(part, ModelPart) else self._linear

    @property
    def schema(self) -> Schema:
        """The columns that a row to be predicted has."""
        return self.part.schema

    @property
    def classes(self) -> list[Category] | None:
        """The labels that may be predicted; None where these are numbers."""
        return self.part.classes if isinstance(self.part, LinearPart) else forest_of_active(self.part).classes

    def margins(self, matrix: NDArray[Any], threads: int = 1) -> Margins:
        """Return the margins of rows (n_rows, n_features) of a model that needs no partner."""
        assert self._margins is not None, "the model needs partners"
        return self._margins(matrix, threads)

    def fallback(self) -> Callable[[NDArray[Any], int], Margins]:
        """Return a function that gives the margins of rows of which only the own columns are known.

        Partners' columns count as they are on average: of trees see `treaty.serving.expectations`; in a linear model
        prepared columns have mean zero.

        Raises
        ------
        ConfigError
            Where the part does not hold what is needed for it.
        """
        return self._by_walk(self.part, expected_walk(self.part)) if isinstance(self.part, ModelPart) else self._linear

    def predictions(self, margins: Margins) -> list[dict[str, Any]]:
        """Return what rows of these margins are predicted to be: of each the columns that ``treaty predict`` writes."""
        if isinstance(self.part, LinearPart) and not self.part.of_classes:
            margins = margins.reshape(-1)  # partners give them as (n_rows, 1)
        columns = self.part.predictions(margins)
        names = tuple(columns)
        by_row = zip(*(values.tolist() for values in columns.values()), strict=True)
        return [dict(zip(names, row, strict=True)) for row in by_row]

    def table(self, matrix: NDArray[Any]) -> Table:
        """Return rows as a table of the party's own columns."""
        return Table(self.schema, list(np.ascontiguousarray(matrix.T)), len(matrix))

    def described(self) -> dict[str, Any]:
        """Return what a caller has to know: columns with their kinds and categories, classes, who else is needed."""
        names, kinds, categories = self.schema.names, self.schema.kinds, self.schema.categories
        of_kind = zip(names, kinds, categories, strict=True)
        columns = [
            {"name": name, "kind": kind} | ({} if values is None else {"categories": list(values)})
            for name, kind, values in of_kind
        ]
        return {
            "model": self.part.model_id, "party": self.part.party, "summary": self.part.summary(), "columns": columns,
            "classes": self.classes, "needs": list(self.needs),
        }  # fmt: skip

    def _by_walk(self, part: ModelPart, walk: Walk) -> Callable[[NDArray[Any], int], Margins]:
        objective = forest_of_active(part).objective
        base, n_outputs = np.asarray(objective.base_margins, np.float64), objective.n_outputs

        def margins(matrix: NDArray[Any], threads: int) -> Margins:
            found = np.full((len(matrix), n_outputs), base)
            walk.add_to(found, matrix, threads)
            return found

        return margins

    def _linear(self, matrix: NDArray[Any], threads: int) -> Margins:
        assert isinstance(self.part, LinearPart)
        return self.part.margins(self.table(matrix))


def load_model(path: Path) -> ServedModel:
    """Read a model to be served: a part that a job left (NAME.part), or the folder of a model of one party.

    Raises
    ------
    ConfigError
        For a file that is no finished part of a model, or a passive party's, or a folder with several parts.
    """
    if path.is_dir():
        path = _only_part(path)
    kind = kind_of(path)
    if kind == TREES.kind:
        return ServedModel(load_part(path))
    if kind == LINEAR.kind:
        return ServedModel(linear := load_linear_part(path), _owners_beside(path, linear.party))
    if kind == CHECKPOINT.kind:
        raise ConfigError(f"expected a finished model, got a checkpoint; end the training first - at {path}")
    raise ConfigError(f"expected a part of a model, got {kind or 'something else'} - at {path}")


def _only_part(folder: Path) -> Path:
    parts = sorted(folder.glob("*.part"))
    if len(parts) != 1:
        named = f"{len(parts)} of them: name the active party's file" if parts else "none"
        raise ConfigError(f"expected a folder with one part of a model, got {named} - at {folder}")
    return parts[0]


def _owners_beside(path: Path, party: str) -> list[str] | None:
    """Return the other owners of a model that was saved as a whole, with the estimator's file beside the part."""
    if not path.with_name("model.json").is_file():
        return None
    return [name for name in read_saved(path.parent).parties if name != party]


def _other_owners(part: LinearPart) -> tuple[str, ...]:
    """Return the other owners as far as the part tells: one that was trained with others names its cipher."""
    if not part.encryption:
        return ()
    return tuple(name for name in part.alone if name != part.party) or ("the other parties",)
