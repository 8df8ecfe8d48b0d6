"""Parameters of tests that `make test` leaves out, and tests that need what not every processor has."""

from __future__ import annotations

from typing import Any

import pytest

from treaty.crypto.additive.multiplier import HAS_FMA, HAS_IFMA
from treaty.machine.kernels import processor_has

NEEDS_WIDE_VECTORS = pytest.mark.skipif(
    not processor_has("avx2"),
    reason="no AVX2: the usual build has no wider vectors than the plain one, and would be compared with itself",
)
# of modular arithmetic: what any processor can do, and what some have instructions for
FORMS = pytest.mark.parametrize(
    "form",
    [
        "words",
        pytest.param(
            "fma", marks=pytest.mark.skipif(not HAS_FMA, reason="no AVX2 with FMA: no such instructions here")
        ),
        pytest.param(
            "ifma", marks=pytest.mark.skipif(not HAS_IFMA, reason="no AVX-512 IFMA: no such instructions here")
        ),
    ],
)


def slow(*values: Any) -> Any:
    """Mark a value of a parameter, or the values of several parameters together, as slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def all_but_first_slow(first: Any, *others: Any) -> list[Any]:
    """Mark all values of a parameter but the first one as slow: they are variants of it."""
    return [first, *map(slow, others)]
