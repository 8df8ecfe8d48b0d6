"""How an active party measures its links under sealed sums, and what it says beforehand of a training's cost."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import treaty
from tables import cut, real_table
from treaty.crypto.sealed.sums import Widths
from treaty.errors import ConfigError
from treaty.messaging.memory import Link as PlayedLink
from treaty.runs import threads
from treaty.systems.vertical import encrypted
from treaty.systems.vertical.cipher_choice import Estimate
from treaty.systems.vertical.sealed import links
from treaty.systems.vertical.sealed.links import ECHOES, Link, comparisons_of_a_step, estimate

WIDTHS = Widths(count=16, hess=36, node_grad=36)
LAN, WAN = Link(1e-3, 1e-9), Link(50e-3, 80e-9)


@pytest.mark.parametrize("ahead", [0.0, 0.5, 1.0])
def test_a_link_is_measured_though_one_end_is_ahead(ahead: float) -> None:
    even = 10e-3 + 80e-9 * ECHOES
    took = even * np.where(np.arange(len(ECHOES)) % 2, 1 + ahead, 1 - ahead)
    found = Link.of(took.tolist())
    assert (found.step, found.byte) == pytest.approx((10e-3, 80e-9), rel=0.02)


def test_a_link_that_took_less_for_bytes_costs_nothing_for_them() -> None:
    assert Link.of([2e-3] * 4 + [1e-3] * 4).byte == 0.0


def test_a_step_counts_for_more_comparisons_where_it_is_slow_and_for_fewer_where_bytes_are() -> None:
    lan, far, slow = (comparisons_of_a_step(link, WIDTHS) for link in (LAN, Link(50e-3, 1e-9), Link(1e-3, 1e-6)))
    assert slow < lan < far
    assert slow >= 1
    assert comparisons_of_a_step(Link(1e9, 0.0), WIDTHS) == links.MOST_STEP


def test_a_played_link_is_found_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Link] = []
    measure, play, line = links.measure, threads.play, PlayedLink(bits_per_second=100e6, delay=10e-3)
    monkeypatch.setattr("treaty.runs.threads.play", lambda *given, **named: play(*given, **{**named, "link": line}))
    monkeypatch.setattr(
        "treaty.systems.vertical.sealed.active.measure", lambda *given: found.append(measure(*given)) or found[-1]
    )
    X, y = real_table("binary", rows=100)
    treaty.GBDTClassifier(treaty.SecureBoost(), n_estimators=1, max_depth=1, max_bin=3).fit(cut(X, 2), y)
    assert 10e-3 <= found[0].step < 40e-3
    assert 70e-9 < found[0].byte < 200e-9  # 80 ns are 100 Mbit/s


def test_the_estimate_is_about_what_a_training_sends() -> None:
    X, y = real_table("binary")
    tables, options = cut(X, 3), {"n_estimators": 3, "max_bin": 16, "n_jobs": 1}
    sent = {}
    for sums in ("sealed", "open"):
        model = treaty.GBDTClassifier(treaty.SecureBoost(encryption="lattice", sums=sums), **options).fit(tables, y)
        sent[sums] = sum(pair["bytes"] for pair in model.communication_.values()) / 1e6
        if sums == "sealed":
            told = model.parts_["p0"].choice
    before, _, after = told.partition(" MB more for 3 trees")
    assert before.startswith("sums are sealed, which takes about")
    assert after == ""
    megabytes = float(before.rpartition(" ")[2].replace(",", ""))
    assert megabytes / 2 < sent["sealed"] - sent["open"] < 2 * megabytes


def test_the_estimate_grows_with_everything_that_costs() -> None:
    def of(
        link: Link = LAN, candidates: float = 300, trees: int = 10, depth: int = 3, peers: int = 1, nodes: int = 1000
    ) -> Estimate:
        names = [f"p{k}" for k in range(peers)]
        end: Any = SimpleNamespace(widths=WIDTHS, step=comparisons_of_a_step(link, WIDTHS))
        return estimate(dict.fromkeys(names, link), dict.fromkeys(names, candidates), end, trees, depth, nodes)

    plain = of()
    assert of(trees=20).seconds == pytest.approx(2 * plain.seconds)
    for more in (of(candidates=3000), of(depth=4), of(peers=2)):
        assert more.seconds > plain.seconds
        assert more.nbytes > plain.nbytes
    assert of(link=WAN).seconds > plain.seconds
    assert of(candidates=0).nbytes == 0.0
    few = of(depth=20, nodes=50)  # no level has more nodes than rows allow
    assert few.nbytes < 20 * 50 / 7 * plain.nbytes


@pytest.mark.parametrize(("most", "level"), [(1e9, logging.INFO), (0.0, logging.WARNING)])
def test_a_long_training_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, most: float, level: int
) -> None:
    monkeypatch.setattr(encrypted, "LONG", most)
    X, y = real_table("binary", rows=100)
    with caplog.at_level(logging.INFO, logger=encrypted.logger.name):
        treaty.GBDTClassifier(treaty.SecureBoost(), n_estimators=1, max_depth=1, max_bin=3).fit(cut(X, 2), y)
    (record,) = [record for record in caplog.records if record.name == encrypted.logger.name]
    assert record.levelno == level
    assert "p0: sums are sealed, which takes about" in record.getMessage()
    assert 'sums="open" does without' in record.getMessage()


def test_sums_that_cannot_be_sealed_are_said_to_be_open_and_why(caplog: pytest.LogCaptureFixture) -> None:
    X, y = real_table("binary", rows=100)
    model = treaty.GBDTClassifier(treaty.SecureBoost(), n_estimators=1, max_depth=1, max_bin=3, reg_alpha=0.5)
    with caplog.at_level(logging.INFO, logger=encrypted.logger.name):
        model.fit(cut(X, 2), y)
    assert "p0: sums are open: they cannot be sealed with reg_alpha=0.5" in caplog.text
    assert model.parts_["p0"].choice.endswith("; sums are open: they cannot be sealed with reg_alpha=0.5")


def test_weights_beyond_the_lattice_map_are_refused_with_what_to_do() -> None:
    X, y = real_table("binary", rows=100)
    weight = np.ones(len(y))
    weight[0] = 1e9
    with pytest.raises(ConfigError, match=r'cannot be sealed here: .*fractional_bits or weights; or take sums="open"'):
        treaty.GBDTClassifier(treaty.SecureBoost(), n_estimators=1).fit(cut(X, 2), y, sample_weight=weight)
