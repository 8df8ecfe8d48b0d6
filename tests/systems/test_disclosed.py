"""Every sentence about what parties learn, compared with a text that somebody has read: `disclosed.txt`."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

from systems import disclosed
from treaty.systems import OPTIONS, SYSTEMS, option_class
from treaty.systems.alignment import leakage as alignment
from treaty.systems.fedxgb.system import conclusions_of_prediction
from treaty.systems.options import names_of

WRITTEN = Path(disclosed.__file__).with_suffix(".txt")
SILENT = {
    "pooled": {"mode", "allow_insecure", "solver", "loss"},
    "secureboost": {"insecure_test_key_bits", "allow_exact_sums"},
    "fedxgboost-smm": {
        "key_bits",
        "insecure_test_key_bits",
        "null_vectors",
        "bit_columns",
        "normal_columns",
        "allow_exact_sums",
    },
    "fedxgboost-ldp": {"delta", "split_score", "clip", "clip_hess"},
    "federboost-vertical": {"allow_insecure", "buckets"},
    "federboost-horizontal": {"allow_insecure", "target_range", "weight_bound"},
    "fedxgb": {"dropout", "dropout_period", "edges", "max_users", "feature_sample", "target_range", "weight_bound"},
    "quasi-newton": {"key_bits", "allow_exact_sums"},
    "sgd": {
        "mode",
        "allow_insecure",
        "encryption",
        "key_bits",
        "insecure_test_key_bits",
        "show_weights",
        "show_eval_margins",
        "allow_exact_sums",
    },  # the same text
    "statistics": {"mode", "allow_insecure", "allow_exact_sums"},
}
"""Options that change no sentence; all others are in some case."""


def test_every_sentence_is_as_it_was_read():
    found = "\n".join(disclosed.lines())
    assert found == WRITTEN.read_text(), "read the difference; then: python tests/systems/disclosed.py > disclosed.txt"


def test_every_system_and_every_option_that_changes_a_sentence_has_a_case():
    assert set(disclosed.CASES) == {name for systems in SYSTEMS.values() for name in systems}
    for kind in map(option_class, OPTIONS):
        given = {name for case in disclosed.CASES[kind.system] for name in case.given}
        assert set(names_of(kind)) - given == SILENT[kind.system], kind.system


@pytest.mark.parametrize("name", disclosed.CASES)
def test_every_party_is_told_of_and_sentences_are_one_line_without_repetition(name):
    for case in disclosed.CASES[name]:
        found = disclosed.learned(name, case)
        for sentences in found.values():
            assert len(set(sentences)) == len(sentences)
            assert all(one == one.strip() and "\n" not in one and "  " not in one for one in sentences)


STATEMENTS = {"Route", "routes", "When", "System"}


def spoken(source: str) -> list[str]:
    """Return all text in the functions and constants of a module, but docstrings and dictionary keys' names."""
    tree = ast.parse(source)
    docs = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
    }
    # what routes and the record itself state stands in tables, which have tests of their own
    stated = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in STATEMENTS]
    docs |= {node.value for call in stated for node in ast.walk(call) if isinstance(node, ast.Constant)}
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text for text in texts if text not in docs and " " in text.strip()]


def modules_that_tell() -> dict[str, str]:
    systems = Path(import_module("treaty.systems").__file__).parent
    files = {}
    for path in sorted(systems.rglob("*.py")):
        for section in re.split("^# -{8,} ", path.read_text(), flags=re.MULTILINE):
            if re.search(r"^def conclusions\w*\(", section, re.MULTILINE):
                files[str(path.relative_to(systems))] = f"# {section}"
    assert len(files) >= 8
    files["fedxgb/service.py"] = inspect.getsource(
        conclusions_of_prediction
    )  # the rest of its section says other things
    return {**files, "alignment": inspect.getsource(alignment.disclosures)}


@pytest.mark.parametrize("where", modules_that_tell())
def test_no_part_of_a_sentence_is_in_no_case(where):
    """A sentence that no case brings about would be in no test: parts of f-strings are looked for, too."""
    whole = WRITTEN.read_text()
    texts = spoken(modules_that_tell()[where])
    assert texts
    assert [text for text in texts if text.strip("\n") not in whole] == []
