"""What is compiled ahead: no more than the parties will need."""

from __future__ import annotations

import gc
import subprocess
import sys

import numpy as np
import pytest

from treaty import GBDTClassifier, SecureBoost
from treaty.runs import warm_up
from treaty.systems import find_system
from treaty.systems.observers import observing
from treaty.trees import ensemble


@pytest.mark.parametrize(
    ("psi", "compiled"), [("auto", {"points", "transfers"}), ("ecdh", {"points"}), ("kkrt", {"transfers"})]
)
def test_the_protocols_of_alignment_are_compiled_that_may_be_used(psi, compiled, monkeypatch):
    called = set()
    monkeypatch.setattr(warm_up.sodium, "validate", lambda points: called.add("points"))
    monkeypatch.setattr(warm_up, "_compile_oblivious", lambda: called.add("transfers"))
    monkeypatch.setattr(warm_up, "_train", lambda system, options: None)
    warm_up.compile_kernels(find_system("secureboost"), aligns=psi)
    assert called == compiled


def test_nothing_of_alignment_is_compiled_for_rows_that_are_in_order(monkeypatch):
    monkeypatch.setattr(warm_up, "_compile_alignment", lambda psi: pytest.fail(psi))
    monkeypatch.setattr(warm_up, "_train", lambda system, options: None)
    warm_up.compile_kernels(find_system("secureboost"), aligns=None)


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_garbage_is_collected_afterwards_as_before(enabled, monkeypatch):
    def fail(system, options):
        assert not gc.isenabled()
        raise ValueError("not compiled")

    monkeypatch.setattr(warm_up, "_train", fail)
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="not compiled"):
            warm_up.compile_trees()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_walks_are_compiled_as_predictions_need_them():
    warm_up.compile_trees()
    warm_up.compile_walks()
    kernels = (ensemble.record_bits, ensemble.walk_bits, ensemble.walk_values)
    before = [list(kernel.signatures) for kernel in kernels]
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2))
    y = (X[:, 0] > 0).astype(int)
    protocol = SecureBoost(allow_exact_sums=True)
    model = GBDTClassifier(protocol, n_estimators=1, transport="memory", min_child_samples=5)
    tables = {"one": X[:, :1], "other": X[:, 1:]}
    model.fit(tables, y).predict(tables)
    GBDTClassifier("pooled", n_estimators=1, min_child_samples=5).fit(X, y).predict(X)
    assert [list(kernel.signatures) for kernel in kernels] == before


def test_observers_of_this_process_do_not_see_what_is_played_to_compile():
    seen = []
    with observing(lambda inputs: seen.append(inputs) or []):
        warm_up.compile_trees()
    assert seen == []


def test_the_command_starts_without_what_only_regressions_need():
    check = "import sys; import treaty.cli.main; sys.exit('scipy.special' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
