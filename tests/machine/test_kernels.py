from __future__ import annotations

import numpy as np
import pytest

from treaty.machine import kernels
from treaty.machine.kernels import kernel, new_array


def _add_up(values):
    total = 0
    for value in values:
        total += value
    return total


def test_kernel_computes_without_a_place_to_cache(monkeypatch):
    def nowhere(function):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(kernels, "KernelCache", nowhere)
    assert kernel(_add_up)(np.arange(5)) == 10


def _invert(value):
    return 1.0 / value


def test_kernel_divides_by_zero_as_numpy_does():
    assert np.isinf(kernel(_invert)(0.0))


@pytest.mark.parametrize("shape", [5, (3, 4)], ids=["one-dimension", "two-dimensions"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64], ids=["uint8", "float32", "int64"])
def test_kernels_make_arrays_of_a_shape_and_type(shape, dtype):
    def make(shape):
        return new_array(shape, dtype)

    made = kernel(make)(shape)
    expected = np.empty(shape, dtype)
    assert (made.shape, made.dtype, made.strides) == (expected.shape, expected.dtype, expected.strides)
    made[:] = 1
