"""Parameters of tests that `make test` leaves out."""

from __future__ import annotations

from typing import Any

import pytest


def slow(value: Any) -> Any:
    """Mark a value of a parameter as slow."""
    return pytest.param(value, marks=pytest.mark.slow)


def all_but_first_slow(first: Any, *others: Any) -> list[Any]:
    """Mark all values of a parameter but the first one as slow: they are variants of it."""
    return [first, *map(slow, others)]
