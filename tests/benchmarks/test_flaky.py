"""The tests that `benchmarks/flaky.py` plays again and again exist."""

from __future__ import annotations

import pytest

import flaky


@pytest.mark.parametrize("suspect", flaky.SUSPECTS)
def test_every_suspect_is_a_test(suspect: str) -> None:
    file, name = suspect.split("::")
    assert f"def {name}(" in (flaky.ROOT / file).read_text()
