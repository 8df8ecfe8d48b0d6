"""Alignment tells who holds an id; the run log limits how often it is asked, and shows that it was.

References: Guo et al., "Birds of a Feather Flock Together: How Set Bias Helps to Deanonymize You via Revealed
Intersection Sizes", USENIX Security 2022. Jiang, Du, Yan, "AnonPSI: An Anonymity Assessment Framework for PSI", NDSS
2024.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn.datasets import load_breast_cancer

from marks import slow
from treaty.attacks.views import Finding
from treaty.errors import ConfigError
from treaty.estimators.files import align
from treaty.privacy.ledger import MAX_RUNS, RunLog
from treaty.systems.alignment.alignment import ResultTo

ATTACKER, PARTNER = "attacker", "partner"


def membership_by_alignment(
    own: Sequence[Any],
    partners: Sequence[Any],
    asked: Sequence[Any],
    *,
    at_once: int = 1,
    active: bool = True,
    result_to: ResultTo = "both",
    log: Path | None = None,
    max_runs: int = MAX_RUNS,
) -> Finding:
    """Align again and again with some of the ids asked about, and decide for each whether the partner holds it.

    Both parties are played in this process, with the real protocol. The attacker has the list `own`, its partner the
    list `partners`, with some ids in common; none of the ids `asked` about, so many `at_once`, is in `own`. The
    attacker is the `active` party, or not; `result_to` says which parties learn the common ids. Both keep run logs in
    the folder `log`, if there is one, which allow `max_runs` alignments; after the partner refuses, the attacker
    guesses.

    Return the share of right answers; the baseline is the better of two guesses: that the partner holds all ids, or
    none. Raise what `treaty.align` raises at the first alignment.
    """
    held = np.isin(np.array(asked), np.array(partners))
    guess = max(held.mean(), 1.0 - held.mean())
    right = np.full(len(asked), guess)
    order = [ATTACKER, PARTNER] if active else [PARTNER, ATTACKER]
    for first in range(0, len(asked), at_once):
        part = slice(first, first + at_once)
        lists = {ATTACKER: [*own, *asked[part]], PARTNER: list(partners)}
        try:
            common = align(
                {name: pa.table({"id": lists[name]}) for name in order}, drop_id=False, result_to=result_to, log=log,
                max_runs=max_runs, n_jobs=1, progress=lambda done, steps: None,
            )  # fmt: skip
        except ConfigError:
            if not first:
                raise
            # the partner refuses, as it will the next time
            break
        if ATTACKER not in common:
            # the attacker does not learn the result
            break
        right[part] = np.isin(np.array(asked[part]), np.array(common[ATTACKER]["id"].to_pylist())) == held[part]
    return Finding(
        attack="repeated alignment (Guo 2022)", party=ATTACKER, target=f"ids of {PARTNER}", measure="share right",
        score=float(right.mean()), baseline=float(guess), error=float(np.sqrt(guess * (1.0 - guess) / len(asked))),
    )  # fmt: skip


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
