import os
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from treaty.runs.warm_up import compile_kernels
from treaty.systems import SYSTEMS, find_system
from treaty.systems.vertical import exact_sums

# The same examples in every run, whatever the machine's load: a failure is of a change. `HYPOTHESIS_PROFILE=explore`
# draws others.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

SHARES = 48  # into which slow tests are divided, for CI plays one


def pytest_sessionstart() -> None:
    """Compile the kernels of all systems in each worker of several, of ciphers or of trees first.

    A worker loads what another has compiled: left to the tests, all would compile the same kernels at the same time.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker:
        kinds = list(SYSTEMS.items())
        for model, named in kinds if int(worker.removeprefix("gw")) % 2 == 0 else reversed(kinds):
            for name in reversed(named):
                compile_kernels(find_system(name, model))


@pytest.fixture(scope="session", autouse=True)
def small_tables_are_trained_on() -> Iterator[None]:
    """Lift the limit on what exact sums may show, in this process: nearly all tests' tables are small.

    Jobs between processes say `allow_exact_sums`; the limit itself is tested in `test_exact_sums`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_sums, "MOST_SHARE", 1.0)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=int, choices=range(1, SHARES + 1), help="play every 48th test, from this one")


@pytest.hookimpl(trylast=True)  # after those that are not to be played have gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files of processes and faults first: they take longest, and a core that began one last would be alone.

    Under `--share` every 48th test that is to be played stays: files differ too much in length to be dealt out whole.
    """
    items.sort(key=lambda item: not item.path.stem.endswith(("processes", "outages", "faults", "nodes")))
    share = config.getoption("share")
    if share:
        wanted = set(items[share - 1 :: SHARES])
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = [item for item in items if item in wanted]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function after whose call the named packages seem not to be installed."""

    class Missing:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] in hidden:
                raise ModuleNotFoundError(name)

    def hide(*packages: str) -> None:
        hidden.update(packages)
        for package in packages:
            monkeypatch.delitem(sys.modules, package, raising=False)

    hidden: set[str] = set()
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    return hide
