"""What an active party has opened after a job is enough to work out a partner's bins, whatever the cipher."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tables import real_table
from treaty import FedXGBoostSMM, GBDTClassifier, SecureBoost
from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.privacy.exact_sums import OpenedNode, known_bins
from treaty.systems.observers import Recording, observing
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.vertical.exact_sums import expected_share


def opened_by(system: Any, **options: Any) -> list[OpenedNode]:
    """Train between two parties; return what the active one opened of the other's columns."""
    recording = Recording()
    X, y = real_table("binary")
    with observing(lambda inputs: [recording] if inputs.party.name == "a" else []):
        model = GBDTClassifier(system, n_jobs=1, random_state=0, max_bin=32, **options)
        model.fit({"a": X.iloc[:, :6], "b": X.iloc[:, 6:]}, y)
    return recording.nodes["b"]


def truth() -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return the passive party's codes and its columns' first slots."""
    table = to_table(real_table("binary")[0].iloc[:, 6:])
    bins = fit_bins(table, 32)
    return bins.transform(table), bins.offsets


def test_bins_are_worked_out_from_what_a_job_opened_whatever_the_cipher() -> None:
    codes, offsets = truth()
    systems = [
        SecureBoost(encryption="lattice", sums="open", allow_exact_sums=True),
        SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True),
        FedXGBoostSMM(backend="dealer", allow_exact_sums=True),
    ]
    found = [known_bins(opened_by(system), offsets, len(codes)) for system in systems]
    assert (found[0] == codes)[found[0] >= 0].all()
    assert 0.5 < (found[0] >= 0).mean() < expected_share(codes, BoostingOptions().checked(systems[0])) < 1.0
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize(
    "options",
    [
        {"subsample": 0.7},
        *(pytest.param(of, marks=pytest.mark.slow) for of in ({"goss": True}, {"colsample_bytree": 0.5})),
    ],
    ids=str,
)
def test_sampled_rows_and_columns_mislead_nobody(options: dict[str, Any]) -> None:
    codes, offsets = truth()
    system = SecureBoost(encryption="lattice", sums="open", allow_exact_sums=True)
    found = known_bins(opened_by(system, **options), offsets, len(codes))
    assert (found == codes)[found >= 0].all()
    assert (found >= 0).any()


@pytest.mark.slow
def test_nodes_hidden_by_the_purity_guard_mislead_nobody() -> None:
    codes, offsets = truth()
    guarded = SecureBoost(encryption="lattice", sums="open", allow_exact_sums=True, purity_guard=0.4)
    found = known_bins(opened_by(guarded), offsets, len(codes))
    assert (found == codes)[found >= 0].all()
