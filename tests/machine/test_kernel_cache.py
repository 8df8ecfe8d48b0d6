"""Kernels are kept where the next process finds them, and each is compiled by one process alone."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core.errors import NumbaWarning

from treaty.cli.logs import log_of_all
from treaty.machine import kernels


def test_processes_that_compile_different_signatures_at_once_do_not_mix_them_up(tmp_path, monkeypatch):
    module = tmp_path / "halves.py"
    module.write_text(
        "from treaty.machine.kernels import kernel\n@kernel\ndef half(x):\n    return x / 2 if x > 1 else x - x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))

    def half(value):
        """Call the kernel as a process does that has just started."""
        sys.modules.pop("halves", None)
        return importlib.import_module("halves").half(value)

    assert half(np.float64(3)) == 1.5
    cache = Path(sys.modules["halves"].half.stats.cache_path)
    (listed,) = cache.glob("*.nbi")
    of_floats = listed.read_bytes()
    listed.unlink()  # the other process looked before this one had saved
    assert half(np.int64(6)) == 3
    listed.write_bytes(of_floats)  # and the list of this one was written last
    assert half(np.float64(5.5)) == 2.75
    assert half(np.int64(8)) == 4
    assert len(list(cache.glob("*.nbc"))) == 2
    monkeypatch.setattr(numba, "__version__", "another")  # of another environment, which shares the package's folder
    listed.unlink()
    assert half(np.int64(8)) == 4
    assert len(list(cache.glob("*.nbc"))) == 3


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs a package of a kernel and what it imports, and returns where that is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)  # of processes that a test starts

    def install(name, amount, extra=""):
        """Install into a folder of this name, and call the kernel as a process does that has just started."""
        package = tmp_path / name / "treaty_halves"
        package.mkdir(parents=True)
        (package / "amounts.py").write_text(f"AMOUNT = {amount}\n")
        (package / "halves.py").write_text(
            "from treaty.machine.kernels import kernel\nfrom treaty_halves.amounts import AMOUNT\n"
            f"@kernel\ndef less(x):\n    return x - AMOUNT\n{extra}"
        )
        for known in [known for known in sys.modules if known.startswith("treaty_halves")]:
            del sys.modules[known]
        with monkeypatch.context() as patch:
            patch.syspath_prepend(package.parent)
            found = importlib.import_module("treaty_halves.halves").less
        return found

    return install


def test_that_it_compiles_is_said_once_before_it_does(installed, monkeypatch, caplog, capsys):
    monkeypatch.setattr(kernels.KernelCache, "announced", False)
    monkeypatch.setattr(kernels.KernelCache, "printed", True)  # as estimators with verbose=True set it
    caplog.set_level("INFO", "treaty")
    first = installed("first", 1, "@kernel\ndef more(x):\n    return x + AMOUNT\n")
    assert not caplog.messages
    assert first(3) == 2
    assert sys.modules["treaty_halves.halves"].more(3) == 4
    assert caplog.messages == [kernels.COMPILING]
    assert capsys.readouterr().out == f"{kernels.COMPILING}\n"
    monkeypatch.setattr(kernels.KernelCache, "announced", False)
    assert installed("second", 1, "@kernel\ndef more(x):\n    return x + AMOUNT\n")(3) == 2  # loaded
    assert len(caplog.messages) == 1


def test_a_command_that_runs_all_parties_prints_that_it_compiles(installed, monkeypatch, capsys):
    monkeypatch.setattr(kernels.KernelCache, "announced", False)
    with log_of_all(False, None) as log:
        assert installed("first", 1)(3) == 2
    assert log == []
    assert capsys.readouterr().out == f"{kernels.COMPILING}\n"


def _hits(found):
    return sum(found.stats.cache_hits.values())


def test_a_second_installation_loads_what_the_first_has_compiled(installed, tmp_path):
    first, second = installed("first", 1), installed("second", 1)
    assert (first(5), second(5)) == (4, 4)
    assert (_hits(first), _hits(second)) == (0, 1)
    assert Path(second.stats.cache_path).is_relative_to(tmp_path / "home")
    assert not list(tmp_path.glob("*/treaty_halves/__pycache__/*.nbi"))


def test_a_kernel_is_compiled_again_when_a_module_that_it_imports_has_changed(installed):
    one, other = installed("one", 1), installed("other", 2)
    assert (one(5), other(5)) == (4, 3)
    assert _hits(other) == 0


def test_kernels_that_others_may_have_written_are_not_loaded(installed):
    first = installed("first", 1)
    assert first(5) == 4
    Path(first.stats.cache_path).chmod(0o777)
    second = installed("second", 1)
    assert second(5) == 4
    assert (_hits(second), second.stats.cache_path == first.stats.cache_path) == (0, False)


def test_kernels_that_are_not_used_for_long_are_deleted(installed):
    old, used = (Path(installed(name, 1, f"# {name}\n").stats.cache_path) for name in ("old", "used"))
    for folder, days in ((old, 100), (used, 80)):
        os.utime(folder, (time.time() - days * 24 * 3600,) * 2)
    installed("again", 1, "# used\n")
    assert time.time() - used.stat().st_mtime < 60  # loaded again: its time begins anew
    installed("new", 1, "# new\n")
    assert (old.exists(), used.exists()) == (False, True)


@pytest.mark.skipif(os.name != "posix", reason="the C library has another name")
def test_a_kernel_that_cannot_be_kept_is_warned_of_and_computes(installed):
    extra = (
        "import ctypes\nlabs = ctypes.CDLL(None).labs\nlabs.restype, labs.argtypes = ctypes.c_long, [ctypes.c_long]\n"
        "@kernel\ndef size(x):\n    return labs(x)\n"
    )
    installed("pointing", 1, extra)
    size = sys.modules["treaty_halves.halves"].size
    with pytest.warns(NumbaWarning, match="dynamic globals"):
        assert size(-3) == 3


def test_what_only_loads_kernels_does_not_load_the_compiler(installed):
    first = installed("first", 1)
    assert first(5) == 4
    folder = str(Path(sys.modules["treaty_halves"].__path__[0]).parent)
    check = (
        f"import sys; sys.path.insert(0, {folder!r}); from treaty_halves.halves import less; assert less(5) == 4\n"
        "assert 'numba.np.linalg' not in sys.modules\n"
        "assert less(5.0) == 4.0, 'compiled'\n"
        "assert 'numba.np.linalg' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


def _other_process(folder, cache):
    """Return a process that holds the turn to compile `less`, until it is told to save what it compiles."""
    program = (
        f"import sys; sys.path.insert(0, {folder!r}); from treaty_halves.halves import less\n"
        "less._cache._take_turn(); print('holds', flush=True); sys.stdin.readline(); less._cache._take_turn()\n"
        "less(5)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "XDG_CACHE_HOME": cache},
    )  # fmt: skip
    assert process.stdout.readline() == "holds\n"
    return process


def test_what_another_process_compiles_is_waited_for_and_loaded(installed, tmp_path):
    ours = installed("ours", 1)
    folder = str(tmp_path / "ours")
    with _other_process(folder, str(tmp_path / "home")) as other:
        results = []
        calling = threading.Thread(target=lambda: results.append(ours(5)))
        calling.start()
        calling.join(0.3)
        assert calling.is_alive()
        assert not results
        other.communicate("go on\n", timeout=60)
        calling.join(60)
    assert (results, _hits(ours)) == ([4], 1)


def test_a_process_that_never_ends_compiling_is_not_waited_for_for_ever(installed, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "_LONGEST", 0.1)
    ours = installed("ours", 1)
    with _other_process(str(tmp_path / "ours"), str(tmp_path / "home")) as other:
        assert (ours(5), _hits(ours)) == (4, 0)
        other.kill()


def test_a_process_does_not_wait_for_itself_after_a_compilation_that_failed(installed):
    less = installed("ours", 1, "@kernel\ndef strange(x):\n    return x.nothing\n")
    strange = sys.modules["treaty_halves.halves"].strange
    for _ in range(2):
        with pytest.raises(numba.TypingError, match="nothing"):
            strange(1)
    assert less(5) == 4
