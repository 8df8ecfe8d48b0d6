"""Alignment tells who holds an id; the run log limits how often it is asked, and shows that it was."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

from marks import slow
from treaty.attacks.membership import ATTACKER, PARTNER, membership_by_alignment
from treaty.errors import ConfigError
from treaty.privacy.ledger import RunLog

MALIGNANT = np.flatnonzero(load_breast_cancer().target == 0)
BENIGN = np.flatnonzero(load_breast_cancer().target == 1)
CLINIC = MALIGNANT.tolist()  # who is in its list is ill
SHOP = [*MALIGNANT[:40].tolist(), *BENIGN[:40].tolist()]
ASKED = [int(id) for pair in zip(MALIGNANT[100:], BENIGN[100:], strict=False) for id in pair][:40]


def found_by(**options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*of its.*ids")
        return membership_by_alignment(SHOP, CLINIC, options.pop("asked", ASKED[:12]), **options)


@pytest.mark.parametrize("active", [True, slow(False)], ids=["active", "passive"])
def test_who_aligns_again_learns_of_every_id_whether_the_partner_holds_it(active):
    found = found_by(active=active, asked=ASKED[:20])
    assert (found.score, found.baseline) == (1.0, 0.5)
    assert found.finds


def test_passive_party_that_is_not_told_the_result_learns_nothing():
    found = found_by(active=False, result_to="active")
    assert found.score == found.baseline == 0.5
    assert not found.finds


def test_run_log_limits_how_often_and_shows_how_many_ids_changed(tmp_path):
    found = found_by(log=tmp_path, max_runs=4)
    assert found.score == pytest.approx((4 + 8 * 0.5) / 12)
    partners = RunLog(tmp_path / f"{PARTNER}.runs", max_runs=4)
    started = [entry for entry in partners.entries() if entry.event == "started"]
    assert [entry.peer for entry in started] == [ATTACKER] * 4
    assert started[0].changed is None
    assert all(1 <= entry.changed <= 2 for entry in started[1:])  # one id out, another in


def test_limit_of_runs_is_none_of_the_ids_asked_about_at_once(tmp_path):
    found_by(log=tmp_path, asked=ASKED[:1])
    assert found_by(log=tmp_path, asked=ASKED, at_once=40, max_runs=2).score == 1.0
    (_, second) = [e for e in RunLog(tmp_path / f"{PARTNER}.runs").entries() if e.event == "started"]
    assert second.changed > 25  # of 39 ids: some share one of the 256 hashes


def test_partner_that_refuses_from_the_beginning_is_an_error(tmp_path):
    found_by(log=tmp_path, asked=ASKED[:1])
    with pytest.raises(ConfigError, match="the limit is 1"):
        found_by(log=tmp_path, max_runs=1)
