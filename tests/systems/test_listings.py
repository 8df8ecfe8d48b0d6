"""Each published algorithm can be read on one page: its file cites every line of the paper's listing, in order.

A line is cited by a comment of the form ``[Alg. 2, line 5]``, ``[Alg. 2, lines 5-7]`` or ``[Prot. 3, step 2]``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import treaty

SYSTEMS = Path(treaty.__file__).parent / "systems"
LISTINGS = {  # file, label of the algorithm, number of its lines or steps
    "FedXGBoost-SMM, safe form": ("fedxgboost_smm/fedxgboost_smm.py", "SMM safe", 6),
    "FedXGBoost-SMM, version 1": ("fedxgboost_smm/published.py", "SMM 1", 5),
    "FedXGBoost-SMM, version 2": ("fedxgboost_smm/published.py", "SMM 2", 7),
    "SecureBoost, aggregation": ("secureboost/secureboost.py", "Alg. 1", 7),
    "SecureBoost, split finding": ("secureboost/secureboost.py", "Alg. 2", 22),
    "FedXGBoost-LDP": ("fedxgboost_ldp/fedxgboost_ldp.py", "Alg. 5", 5),
    "FederBoost's quantiles": ("horizontal/quantiles.py", "Quantiles", 5),
    "FederBoost by row": ("federboost_horizontal/federboost_horizontal.py", "Training", 4),
    "SecBoost": ("fedxgb/secboost.py", "SecBoost", 8),
    "SecFind": ("fedxgb/secfind.py", "SecFind", 9),
    "SecPred": ("fedxgb/secpred.py", "SecPred", 8),
    "FederBoost by column": ("federboost_vertical/federboost_vertical.py", "Vertical", 6),
    "Quasi-Newton": ("logistic/quasi_newton.py", "Alg. 1", 5),
}
MOST_LINES = 350
FEATURES = {"audit", "record", "recording", "cluster", "shards", "checkpoint", "keeper", "notes", "progress"}


def cited(text: str, label: str) -> list[int]:
    """Return the line numbers of an algorithm that comments cite, in the order of the file."""
    found = re.findall(rf"#.*\[{re.escape(label)}, (?:lines?|steps?) (\d+)(?:-(\d+))?\]", text)
    return [number for first, last in found for number in range(int(first), int(last or first) + 1)]


@pytest.mark.parametrize(("file", "label", "lines"), LISTINGS.values(), ids=LISTINGS)
def test_every_line_of_the_papers_listing_is_cited_once_and_in_order(file: str, label: str, lines: int) -> None:
    assert cited((SYSTEMS / file).read_text(), label) == list(range(1, lines + 1))


@pytest.mark.parametrize("file", sorted({file for file, _, _ in LISTINGS.values()}))
def test_a_listing_fits_on_a_page_and_has_no_branch_for_a_feature_that_watches(file: str) -> None:
    text = (SYSTEMS / file).read_text()
    assert len(text.splitlines()) < MOST_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If):
            names = {
                name.id if isinstance(name, ast.Name) else name.attr
                for name in ast.walk(node.test)
                if isinstance(name, ast.Name | ast.Attribute)
            }
            assert not names & FEATURES, f"{file}, line {node.lineno}"


def test_citations_are_found() -> None:
    text = "x = 1  # [Alg. 2, line 1] first\n# [Alg. 2, lines 2-3]\ny = '[Alg. 2, line 9]'  # [Prot. 2, step 4]"
    assert cited(text, "Alg. 2") == [1, 2, 3]
    assert cited(text, "Prot. 2") == [4]
