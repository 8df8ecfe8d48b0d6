"""Compile once, so that no test's time limit pays for it."""

import pytest

from treaty.runs.warm_up import compile_kernels


@pytest.fixture(scope="session", autouse=True)
def compiled() -> None:
    compile_kernels()
