"""What a run of the tests plays, kernels compiled before it, and fixtures that any test may use.

`make test` plays a sample (`sampling`) that a seed chooses, `make test-rest` the others, `make test-all` both.
"""

import os
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import settings

import sampling

# The same examples in every run, whatever the machine's load: a failure is of a change. `HYPOTHESIS_PROFILE=explore`
# draws others.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

SHARES = 12  # into which the rest is divided: CI plays one
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
BEGAN = time.monotonic()
AT = pytest.StashKey[float]()  # the processor time when a test began
LEFT_OUT, LATE = pytest.StashKey[int](), pytest.StashKey[int]()  # tests not asked for; those that the time was over for


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("treaty")
    group.addoption("--sample", type=int, metavar="SEED", help="play a sample of the tests, the seed says which")
    group.addoption("--rest", type=int, metavar="SEED", help="play what a sample by this seed leaves out")
    group.addoption("--share", type=int, choices=range(1, SHARES + 1), help=f"of these every {SHARES}th, from this one")
    group.addoption("--measure", action="store_true", help="write the processor time of the tests played to costs.txt")
    group.addoption("--seconds", type=float, metavar="N", help="begin no test after so many seconds")


def seed_of(config: pytest.Config) -> int | None:
    """Return the seed of a sample, or of its rest; None where all tests are played."""
    given = config.getoption("rest")
    return config.getoption("sample") if given is None else given


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = config.stash[LATE] = 0
    if int(WORKER.removeprefix("gw") or 0) % 2 and config.args == config.getini("testpaths"):
        # Assertions of a file are rewritten once: by the worker that comes to it first, from the front or the back.
        files = sorted(str(path) for folder in config.args for path in (config.rootpath / folder).rglob("test_*.py"))
        config.args[:] = reversed(files)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Print the seed; in one of several workers compile the kernels of all systems, of ciphers or of trees first.

    A worker loads what another has compiled: left to the tests, all would compile the same kernels at the same time.
    """
    if not WORKER:
        seed = seed_of(session.config)
        if seed is not None:
            print(f"tests are sampled by seed {seed}")
        return
    from treaty.runs.warm_up import compile_kernels
    from treaty.systems import SYSTEMS, find_system

    kinds = list(SYSTEMS.items())
    for model, named in kinds if int(WORKER.removeprefix("gw")) % 2 == 0 else reversed(kinds):
        for name in reversed(named):
            compile_kernels(find_system(name, model))


@pytest.hookimpl(trylast=True)  # after those that are not asked for have gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a sample, of its rest, or of a share of these; put files that take longest first.

    Files of processes and faults take longest: a core that began one last would be alone.
    """
    items.sort(key=lambda item: (not item.path.stem.endswith(("processes", "outages", "faults", "nodes")), item.path))
    wanted, seed, share, everything = items[:], seed_of(config), config.getoption("share"), len(items)
    if seed is not None:
        sample = sampling.sample(items, seed)
        rest = config.getoption("rest") is not None
        wanted = [item for item in items if (item in sample) != rest]
        everything = len(wanted) if rest else len(items)
    if share:
        wanted = wanted[share - 1 :: SHARES]
    if config.getoption("seconds") and wanted:
        turn = (seed or 0) % len(wanted)  # what there is no time for is not the same in each run
        first = next(k for k, item in enumerate(wanted) if item.path == wanted[turn].path)
        wanted = wanted[first:] + wanted[:first]
    config.stash[LEFT_OUT] = everything - len(wanted)
    items[:] = wanted


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Leave a test out, without a report, where the time that was given is over."""
    seconds = item.config.getoption("seconds")
    if not seconds or time.monotonic() - BEGAN < seconds:
        item.stash[AT] = processor_seconds()
        return None
    item.config.stash[LATE] += 1
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        report.user_properties.append(("cost", (sampling.name(item), processor_seconds() - item.stash[AT])))
    return report


def processor_seconds() -> float:
    """Return what this process and those that it has started and seen end have taken."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Keep what tests took, where that was asked for."""
    if config.getoption("measure"):
        reports = terminalreporter.stats.get("", []) + terminalreporter.stats.get("passed", [])
        sampling.write(cost for report in reports for key, cost in report.user_properties if key == "cost")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if WORKER:
        stash = session.config.stash
        session.config.workeroutput |= {"left_out": stash[LEFT_OUT], "late": stash[LATE]}  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add up what workers did not play: all have collected, and left out, the same tests."""
    told = getattr(node, "workeroutput", {})
    node.config.stash[LEFT_OUT] = told.get("left_out", node.config.stash[LEFT_OUT])
    node.config.stash[LATE] += told.get("late", 0)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say in the last line how many tests were not played, and how they are."""
    missing = config.stash[LEFT_OUT] + config.stash[LATE]
    if WORKER or not missing:
        return
    late = f", {config.stash[LATE]} of them because the time was over" if config.stash[LATE] else ""
    seed = config.getoption("sample")
    again = "" if seed is None else f"; make test SEED={seed} plays the same sample again"
    print(f"{missing} tests were not played{late}: make test-all plays all{again}")


@pytest.fixture(scope="session", autouse=True)
def shipped_trees() -> Generator[object]:
    """Grow 20 trees of depth 3 where a test names no others: those that are shipped take ten times as long.

    Tests of what is shipped put this value back. Processes of their own know nothing of it.
    """
    from treaty.systems.options import FEW_TREES, SystemOptions

    with pytest.MonkeyPatch.context() as patched:
        shipped = vars(SystemOptions)["default_trees"]
        patched.setattr(SystemOptions, "default_trees", FEW_TREES)
        yield shipped


@pytest.fixture
def exact_sums_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lift the limit on what exact sums may show, for tests about something else on small tables."""
    from treaty.systems.vertical import exact_sums

    monkeypatch.setattr(exact_sums, "MOST_SHARE", 1.0)


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
