import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files of processes first: they take longest, and a core that began one last would be alone in the end."""
    items.sort(key=lambda item: not item.path.stem.endswith("processes"))
