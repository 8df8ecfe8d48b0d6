import pytest

from node.shop import Shop


@pytest.fixture
def shop(tmp_path):
    made = Shop(tmp_path)
    yield made
    made.jobs.verdicts.close()
    made.store.close()
