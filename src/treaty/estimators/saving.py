"""A fitted estimator as a folder: a file per party, and one that says what the estimator was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from treaty.data.table import Schema
from treaty.errors import ConfigError
from treaty.files import Format, read_json, write_json
from treaty.machine.process import is_code, trust
from treaty.models.linear import LinearPart
from treaty.models.trees import ModelPart
from treaty.systems import find_system
from treaty.systems.options import converted

AnyPart = TypeVar("AnyPart", ModelPart, LinearPart)
FORMAT = Format("estimator", 1)


class SavedEstimator(msgspec.Struct, kw_only=True):
    """What is written beside the parts."""

    kind: str  # class of the estimator
    params: dict[str, Any]  # its parameters; `protocol` is the system's name
    system: dict[str, Any]  # the system's own options
    parties: list[str]  # owners of the parts, in the order of columns
    schemas: dict[str, Schema]  # of each table that `predict` expects
    feature_names: list[str] | None = None  # as scikit-learn remembers them, where the training table had any
    learned: dict[str, list[str]] = {}  # by each party, or role, in the training, in words
    positions: dict[str, list[int]] | None = None  # of each party's columns in one table, where `parties` says whose


def write_model(folder: Path, saved: SavedEstimator, parts: Mapping[str, ModelPart | LinearPart]) -> None:
    """Write a model to a folder, made when missing; ConfigError if it cannot be written."""
    try:
        finite = {name: "inf" if value == math.inf else value for name, value in saved.system.items()}  # JSON has none
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in parts.items():
            part.save(_part_file(folder, name))
        write_json(folder / "model.json", msgspec.structs.replace(saved, system=finite), FORMAT, "")
    except TypeError as error:
        raise ConfigError(f"a parameter cannot be saved: {error}") from None
    except OSError as error:
        raise ConfigError(f"cannot write the model to {folder}: {error.strerror}") from None


def read_saved(folder: Path) -> SavedEstimator:
    """Read what `write_model` wrote beside the parts; ConfigError if there is no such file, or it is another one."""
    return read_json(folder / "model.json", SavedEstimator, FORMAT)


def params_of(saved: SavedEstimator, trusted: Iterable[str]) -> dict[str, Any]:
    """Return an estimator's parameters, with the system's options as it had them.

    ConfigError for a system or a loss of code that is not among the `trusted` names; nothing is imported then.
    """
    name, given = saved.params["protocol"], list(trusted)
    for code in (name, saved.params.get("objective")):
        if is_code(code) and code not in given:
            raise ConfigError(
                f"the model names code, {code!r}, which is not imported: if you trust it, load(..., trusted=[{code!r}])"
            )
    trust(given)
    system = find_system(name, "trees" if saved.kind.startswith("GBDT") else "logistic")
    own = converted(saved.system, system.options, system.options.__name__)
    weights = saved.params.get("class_weight")
    pairs = {"class_weight": dict(weights)} if isinstance(weights, list) else {}
    return {**saved.params, **pairs, "protocol": own if own != system.options() else name}


def read_parts(folder: Path, saved: SavedEstimator, load: Callable[[Path, str], AnyPart]) -> dict[str, AnyPart]:
    """Read every party's part; ConfigError if a file is missing or is not one of a Treaty model."""
    return {name: load(_part_file(folder, name), name) for name in saved.parties}


def _part_file(folder: Path, party: str) -> Path:
    return folder / f"{quote(party, safe=' ')}.part"  # a party's name may hold what a file's may not
