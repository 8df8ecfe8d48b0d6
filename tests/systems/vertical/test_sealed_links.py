"""How an active party measures its links under sealed sums, and what it says beforehand of a training's cost."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import treaty
from tables import cut, real_table
from treaty.crypto.payload import SumsBounds
from treaty.crypto.transfer.sealed_sums import Widths
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.channel import LinkSpeed as PlayedLink
from treaty.messaging.party import Party
from treaty.runs import threads
from treaty.systems.vertical import cipher_choice, setup
from treaty.systems.vertical.cipher_choice import (
    Estimate,
    JobSize,
    Link,
    comparisons_of_a_step,
    cost_of_sealing,
    measure,
)
from treaty.systems.vertical.messages import MOST_STEP, LinkEcho, LinkProbe
from treaty.trees.splits import SplitRules

WIDTHS = Widths(count=16, hess=36, node_grad=36)
LAN, WAN = Link(1e-3, 1e-9), Link(50e-3, 80e-9)


def played(line: PlayedLink | None, answers: int = cipher_choice.PROBES) -> Link:
    """Measure a link whose other end echoes so many probes."""

    def active(party: Party) -> Link:
        return measure(party, "b")[0]

    def passive(party: Party) -> None:
        for _ in range(answers):
            party.send("a", LinkEcho(party.receive("a", LinkProbe).filler, 1.0))

    roles = {"a": active, "b": passive}
    ends = {"a": ["b"], "b": ["a"]}
    found: Link = threads.play(roles, ends, job="test", protocol="secureboost", timeout=20, link=line).results["a"]
    return found


def test_a_played_link_is_found_as_it_is() -> None:
    found = played(PlayedLink(bits_per_second=100e6, delay=10e-3))
    assert 10e-3 <= found.step < 40e-3
    assert 70e-9 < found.byte < 200e-9  # 80 ns are 100 Mbit/s


def test_a_link_costs_something_however_fast_it_seems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cipher_choice.time, "perf_counter", lambda: 1.0)
    assert played(None) == Link(0.0, 1e-10)


class ClockedParty:
    """Has its probes echoed after given times, by a clock of its own; `change` makes the peer's echo another."""

    def __init__(self, times: list[float], change: int = 0) -> None:
        self.now, self.sent, self._times, self._change = 0.0, list[int](), times, change

    def send(self, _: str, message: LinkProbe) -> None:
        self.sent.append(len(message.filler))

    def receive(self, _: str, kind: type[LinkEcho]) -> LinkEcho:
        self.now += self._times[len(self.sent) - 1]
        return kind(bytes(max(0, self.sent[-1] + self._change)), float(len(self.sent)))


@pytest.mark.parametrize(
    ("loads", "sent", "loaded"),
    [
        ([2.5, 2.0, 0.2, 0.2, 0.2], 2, 2.0),  # loads that take 2 s are long enough
        ([2.5, 1.9, 2.0, 0.2, 0.2], 3, 1.9),
        ([0.6, 0.5, 0.4, 2.1, 0.2], 4, 0.4),
        ([1.9, 1.9, 1.9, 1.9, 0.3], 5, 0.3),  # the passive party answers no more
    ],
)
def test_measuring_ends_after_a_load_that_took_long(
    monkeypatch: pytest.MonkeyPatch, loads: list[float], sent: int, loaded: float
) -> None:
    """The first answer waits for other work of the peer, and does not count."""
    party = ClockedParty([7.0, 0.2, 0.1, *loads])
    monkeypatch.setattr(cipher_choice.time, "perf_counter", lambda: party.now)
    link, left = measure(party, "b")  # type: ignore[arg-type]
    assert party.sent == [0, 0, 0, *[cipher_choice.PROBE_BYTES] * sent]
    assert link.step == pytest.approx(0.05)
    assert link.byte == pytest.approx((loaded - 0.1) / (2 * cipher_choice.PROBE_BYTES))
    assert left == 3 + sent  # as the last answer says
    assert len(party.sent) <= cipher_choice.PROBES


def test_a_load_that_comes_back_sooner_than_nothing_does_not_make_a_byte_free(monkeypatch: pytest.MonkeyPatch) -> None:
    party = ClockedParty([7.0, 3.0, 3.0, *[1.0] * 5])
    monkeypatch.setattr(cipher_choice.time, "perf_counter", lambda: party.now)
    assert measure(party, "b")[0] == Link(1.5, 1e-10)  # type: ignore[arg-type]


@pytest.mark.parametrize(("change", "probes"), [(1, 1), (1 << 20, 1), (-1, 4)])
def test_an_echo_of_another_size_ends_the_job(change: int, probes: int) -> None:
    party = ClockedParty([0.0] * cipher_choice.PROBES, change)
    with pytest.raises(PeerProtocolError, match=r"expected \d+ bytes, got"):
        measure(party, "b")  # type: ignore[arg-type]
    assert len(party.sent) == probes


def test_a_step_counts_for_more_comparisons_where_it_is_slow_and_for_fewer_where_bytes_are() -> None:
    lan, far, slow = (comparisons_of_a_step(link, WIDTHS) for link in (LAN, Link(50e-3, 1e-9), Link(1e-3, 1e-6)))
    assert slow < lan < far
    assert slow >= 1
    assert comparisons_of_a_step(Link(1e9, 0.0), WIDTHS) == MOST_STEP


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
        link: Link = LAN,
        candidates: float = 300,
        trees: int = 10,
        depth: int = 3,
        peers: int = 1,
        nodes: int = 1000,
        categories: float = 0,
    ) -> Estimate:
        names = [f"p{k}" for k in range(peers)]
        rules = SplitRules(
            grad_unit=1.0, hess_unit=1.0, reg_lambda=1.0, max_depth=depth, min_child_samples=1000 // nodes
        )
        job = JobSize(SumsBounds(1000, 1 << 16, 1 << 14), rules, trees, threads=1)
        step = comparisons_of_a_step(link, WIDTHS)
        return cost_of_sealing(dict.fromkeys(names, link), dict.fromkeys(names, (candidates, categories)), job, step)

    plain = of()
    assert of(trees=20).seconds == pytest.approx(2 * plain.seconds)
    for more in (of(candidates=3000), of(depth=4), of(peers=2), of(categories=300)):
        assert more.seconds > plain.seconds
        assert more.nbytes > plain.nbytes
    assert of(link=WAN).seconds > plain.seconds
    assert of(candidates=0).nbytes == 0.0
    # halves of categories take seven steps a level before their columns' candidates are compared
    assert of(WAN, categories=1).seconds - of(WAN).seconds == pytest.approx(10 * 3 * 7 * WAN.step, rel=0.1)
    few = of(depth=20, nodes=50)  # no level has more nodes than rows allow
    assert few.nbytes < 20 * 50 / 7 * plain.nbytes


def test_under_seal_nobody_tells_what_answers_may_still_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    told, send = [], Party.send
    monkeypatch.setattr(Party, "send", lambda party, peer, message: told.append(message) or send(party, peer, message))
    X, y = real_table("binary", rows=100)
    treaty.GBDTClassifier(treaty.SecureBoost(), n_estimators=1, max_depth=1, max_bin=3).fit(cut(X, 2), y)
    echoes = [message.left for message in told if isinstance(message, LinkEcho)]
    assert echoes == [0.0] * cipher_choice.PROBES


@pytest.mark.parametrize(("most", "level"), [(1e9, logging.INFO), (0.0, logging.WARNING)])
def test_a_long_training_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, most: float, level: int
) -> None:
    monkeypatch.setattr(cipher_choice, "LONG", most)
    X, y = real_table("binary", rows=100)
    with caplog.at_level(logging.INFO, logger=cipher_choice.logger.name):
        treaty.GBDTClassifier(treaty.SecureBoost(), n_estimators=1, max_depth=1, max_bin=3).fit(cut(X, 2), y)
    (record,) = [record for record in caplog.records if record.name == cipher_choice.logger.name]
    assert record.levelno == level
    assert "p0: sums are sealed, which takes about" in record.getMessage()
    assert 'sums="open" does without' in record.getMessage()


def test_sums_that_cannot_be_sealed_are_said_to_be_open_and_why(caplog: pytest.LogCaptureFixture) -> None:
    X, y = real_table("binary", rows=100)
    model = treaty.GBDTClassifier(treaty.SecureBoost(), n_estimators=1, max_depth=1, max_bin=3, reg_alpha=0.5)
    with caplog.at_level(logging.INFO, logger=setup.logger.name):
        model.fit(cut(X, 2), y)
    assert "p0: sums are open: they cannot be sealed with reg_alpha=0.5" in caplog.text
    assert model.parts_["p0"].choice.endswith("; sums are open: they cannot be sealed with reg_alpha=0.5")


def test_weights_beyond_the_lattice_map_are_refused_with_what_to_do() -> None:
    X, y = real_table("binary", rows=100)
    weight = np.ones(len(y))
    weight[0] = 1e9
    with pytest.raises(ConfigError, match=r'cannot be sealed here: .*fractional_bits or weights; or take sums="open"'):
        treaty.GBDTClassifier(treaty.SecureBoost(), n_estimators=1).fit(cut(X, 2), y, sample_weight=weight)
