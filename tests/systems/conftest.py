"""Compile once, so that no test's time limit pays for it."""

import os

import pytest

from treaty.runs.warm_up import compile_kernels


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # one of several has compiled all kernels before its first test
        compile_kernels()
