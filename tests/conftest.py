import os

import pytest
from hypothesis import settings

# The same examples in every run, whatever the machine's load: a failure is of a change. `HYPOTHESIS_PROFILE=explore`
# draws others.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files of processes first: they take longest, and a core that began one last would be alone in the end."""
    items.sort(key=lambda item: not item.path.stem.endswith("processes"))
