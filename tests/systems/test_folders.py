"""A system is a folder, a line of the table in `treaty.systems`, and its public name in `treaty`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import treaty
from treaty.systems import OPTIONS, SYSTEMS

SRC = Path(treaty.__file__).parent
FOLDERS = sorted({where.split(".")[2] for named in SYSTEMS.values() for where in named.values()} - {"pooled"})
SHARED = ["alignment", "horizontal", "pooled", "vertical"]


def imported_by(folder: str) -> dict[str, set[str]]:
    """Return the folders of `systems` that each file of one of them imports."""
    found = {}
    for path in (SRC / "systems" / folder).rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        found[path.name] = {module.split(".")[2] for module in modules if module.startswith("treaty.systems.")}
    return found


@pytest.mark.parametrize("folder", [*FOLDERS, *SHARED])
def test_a_system_imports_no_other(folder):
    for path, folders in imported_by(folder).items():
        assert not folders & set(FOLDERS) - {folder}, path


def test_systems_are_named_in_two_places():
    """Apart from advice in texts and attacks on its own messages, the package does not name a system."""
    named = "|".join([*(f"treaty.systems.{folder}." for folder in FOLDERS), *(rf"{name}\b" for name in OPTIONS)])
    places = set()
    for path in SRC.rglob("*.py"):
        if not any(f"systems/{folder}/" in str(path) for folder in [*FOLDERS, "pooled"]):
            nodes = ast.walk(ast.parse(path.read_text()))
            texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
            code = [text for text in texts if re.fullmatch(f"({named}).*", text)]
            imports = re.findall(rf"^ *from treaty\.systems\.({'|'.join(FOLDERS)})\.", path.read_text(), re.M)
            if code or imports:
                places.add(str(path.relative_to(SRC)))
    assert places == {
        "__init__.py",
        "systems/__init__.py",
        "attacks/ciphertexts.py",  # what is attacked are messages of single systems
        "attacks/hidden_values.py",
        "attacks/nodes.py",
        "estimators/glm.py",  # options of every regression are in the folder of its systems
        "estimators/statistics.py",  # and those of statistics
        "runs/warm_up.py",  # kernels of trees are compiled by playing the smallest system
    }
