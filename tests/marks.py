"""Parameters of tests that `make test` leaves out."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Mark a value of a parameter, or the values of several parameters together, as slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def all_but_first_slow(first: Any, *others: Any) -> list[Any]:
    """Mark all values of a parameter but the first one as slow: they are variants of it."""
    return [first, *map(slow, others)]
