"""A hostile server, and hostile edge servers, that ask for more rounds, levels or sums than the job says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from marks import all_but_first_slow
from systems.fedxgb.playing import Crowded, crowd_rows, laid_out, options_of, play_crowd, role_input
from treaty.errors import PeerProtocolError, TreatyError
from treaty.messaging.messages import Array
from treaty.systems.fedxgb import conversation
from treaty.systems.fedxgb.conversation import terms_of
from treaty.systems.fedxgb.messages import MOST_VOID, KnownSplits, LeafShares, RoundStart, RowSummary, SplitShares, Sum
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.fedxgb.order import ServerLimits, SumLimit, edge_order, user_order
from treaty.systems.fedxgb.secfind import ATTEMPTS, DomainSums
from treaty.systems.fedxgb.system import SYSTEM
from treaty.systems.horizontal.held_out import HeldOutRequest
from treaty.systems.horizontal.noisy_rounds import RandomStep
from treaty.systems.horizontal.quantiles import MOST_ROUNDS, Count, ProbeRequest
from treaty.systems.horizontal.rows import LabelUnits, TrainingStart

EDGES = ("edge0", "edge1", "edge2")
AGREED = {"n_estimators": 1, "max_depth": 2}
SHOWN = [{"expose": "model"}, {"expose": "nothing"}]


def play_hostile(
    monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], hostile: tuple[str, ...], shown: dict[str, Any]
) -> Crowded:
    """Train with a server, and perhaps edge servers, that say the options all agreed to and do others."""
    parts, _, classes = crowd_rows(users=9, rows=90)
    layout = laid_out(list(parts), 3)
    honest, others = options_of(**AGREED, **shown), options_of(**{**AGREED, **wanted}, **shown)
    told = terms_of(role_input(None, honest, layout))
    monkeypatch.setattr(conversation, "terms_of", lambda inputs: told)

    def program(role: str) -> Any:
        return lambda party: SYSTEM.train[role](
            role_input(
                party, others, layout, data=next(iter(parts.values())) if role == "server" else None, classes=classes
            )
        )

    roles = {name: program("server" if name == "server" else "edge") for name in hostile}
    return play_crowd(
        parts, honest, classes, layout=layout, roles=roles, patience=10.0, tolerate=("server", *EDGES)
    )  # fmt: skip


def refusals(crowded: Crowded, *names: str) -> list[str]:
    """Return what some parties refused, as the sender's fault."""
    return [str(crowded.failures[n]) for n in names if isinstance(crowded.failures.get(n), PeerProtocolError)]


@pytest.mark.parametrize("shown", all_but_first_slow(*SHOWN), ids=["model", "nothing"])
@pytest.mark.parametrize(
    ("wanted", "words"), [({"n_estimators": 3}, "1 rounds at most"), ({"max_depth": 4}, "one sum for each level")]
)
def test_edge_servers_follow_the_server_no_further_than_agreed(wanted, words, shown, monkeypatch):
    crowded = play_hostile(monkeypatch, {**wanted, "min_child_samples": 1}, ("server",), shown)
    found = refusals(crowded, *EDGES)
    assert found
    assert all(words in text and text.endswith("got more - from server") for text in found)
    assert isinstance(crowded.failures["server"], TreatyError)


@pytest.mark.parametrize("shown", all_but_first_slow(*SHOWN), ids=["model", "nothing"])
@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"n_estimators": 3}, "no more rounds than the job has"),
        ({"max_depth": 4}, "sums of no deeper levels than the job's"),
    ],
)
def test_users_follow_a_server_and_its_edge_servers_no_further_than_agreed(wanted, words, shown, monkeypatch):
    crowded = play_hostile(monkeypatch, {**wanted, "min_child_samples": 1}, ("server", *EDGES), shown)
    found = refusals(crowded, *(f"p{k}" for k in range(9)))
    assert found
    assert all(words in text for text in found)


def test_users_give_one_vector_for_a_level(monkeypatch):
    """The sum of another cohort over the same rows would show, by the difference, that of a few users."""
    total = DomainSums.total

    def again(self: DomainSums, number: int, length: int) -> Any:
        found = total(self, number, length)
        if self._party.name == "edge0" and self._party.round == 2:
            total(self, number + 50, length)
        return found

    monkeypatch.setattr(DomainSums, "total", again)
    crowded = play_hostile(monkeypatch, {}, (), {"expose": "model"})
    found = refusals(crowded, *(f"p{k}" for k in range(9)))
    assert len(found) == 3
    assert all("expected one sum for each level, in 6 attempts, got more - from edge0" in text for text in found)


def test_edge_servers_open_one_sum_for_a_level(monkeypatch):
    def twice(party: Any) -> Any:
        send = party.send
        party.send = lambda to, m: [send(to, m), send(to, Sum(m.number + 50, m.length)) if isinstance(m, Sum) else None]
        parts, _, classes = crowd_rows(users=9, rows=90)
        options, layout = options_of(**AGREED, expose="model"), laid_out(list(parts), 3)
        return SYSTEM.train["server"](role_input(party, options, layout, data=parts["p0"], classes=classes))

    parts, _, classes = crowd_rows(users=9, rows=90)
    crowded = play_crowd(
        parts, options_of(**AGREED, expose="model"), classes, layout=laid_out(list(parts), 3), roles={"server": twice},
        patience=10.0, tolerate=("server", *EDGES),
    )  # fmt: skip
    assert "expected one sum for each level" in refusals(crowded, *EDGES)[0]


# ---------------------------------------------------------------- counters


def test_a_sum_may_be_tried_a_few_times_and_numbers_rise():
    limit = SumLimit("edge0")
    with pytest.raises(
        PeerProtocolError, match=r"expected one sum for each level, in 6 attempts, got more - from edge0"
    ):
        limit.take(1)
    limit.due()
    limit.take(1)
    for attempt in range(1, ATTEMPTS):
        limit.take(1, attempt)
    for number, attempt in ((1, ATTEMPTS), (1, 1), (2, 0), (2, 1)):
        with pytest.raises(PeerProtocolError):
            limit.take(number, attempt)
    limit.due()
    for number, attempt in ((1, 2), (1, 0), (0, 0), (2, ATTEMPTS)):
        with pytest.raises(PeerProtocolError):
            limit.take(number, attempt)
    limit.take(5, 1)  # an attempt may be missed
    limit.due(one=False)
    with pytest.raises(PeerProtocolError):
        limit.take(6)


NONE = Array("int32", (0,), b"")
LEVELS = {"model": KnownSplits(NONE, NONE), "shares": SplitShares(NONE, NONE)}


@pytest.mark.parametrize("kind", LEVELS)
def test_the_server_asks_for_a_sum_for_the_search_each_probe_and_each_level_above_the_last(kind):
    counted, numbers = ServerLimits("server", 2, 3, MOST_ROUNDS), iter(range(1000))

    def sums(of: int) -> None:
        for _ in range(of):
            counted.sums.take(next(numbers))
        with pytest.raises(PeerProtocolError):
            counted.sums.take(next(numbers))

    sums(0)
    counted.take(Count())
    sums(1)
    counted.take(LabelUnits(1.0, 1.0, 40))
    sums(1)
    counted.take(TrainingStart(NONE))
    sums(1)
    for _ in range(MOST_ROUNDS):
        counted.take(ProbeRequest(NONE, NONE))
        sums(1)
    with pytest.raises(PeerProtocolError, match=f"{MOST_ROUNDS} requests for probes at most, got more - from server"):
        counted.take(ProbeRequest(NONE, NONE))
    counted.take(RowSummary(1, NONE))
    for _ in range(2):
        counted.take(RoundStart(NONE, NONE))
        sums(1)
        for level in (1, 2, 3):
            counted.take(LEVELS[kind])
            sums(1 if level < 3 else 0)
        with pytest.raises(PeerProtocolError, match="3 levels in a tree at most, got more - from server"):
            counted.take(LEVELS[kind])
        counted.take(LeafShares(NONE))
    with pytest.raises(PeerProtocolError, match="2 rounds at most, got more - from server"):
        counted.take(RoundStart(NONE, NONE))


def test_a_round_begins_again_before_its_first_level_alone_and_so_often_in_a_job():
    counted = ServerLimits("server", 2, 3, MOST_ROUNDS)
    for _ in range(2):
        counted.take(RoundStart(NONE, NONE))
        for _ in range(MOST_VOID // 2):
            counted.take(RoundStart(NONE, NONE))
        counted.take(SplitShares(NONE, NONE))
    with pytest.raises(PeerProtocolError, match="2 rounds at most, got more - from server"):
        counted.take(RoundStart(NONE, NONE))
    counted = ServerLimits("server", 2, 3, MOST_ROUNDS)
    for _ in range(1 + MOST_VOID):
        counted.take(RoundStart(NONE, NONE))
    with pytest.raises(PeerProtocolError, match="10 rounds at most that begin again, got more - from server"):
        counted.take(RoundStart(NONE, NONE))


@pytest.mark.parametrize("order", [user_order, edge_order])
def test_under_noise_nothing_may_come_that_has_no_part_of_the_budget(order):
    def states_with(kind, **options):
        return {state for state, of in order(FedXGB(epsilon_total=1.0, **options)).items() if kind in of}

    assert not states_with(LabelUnits)
    assert not states_with(TrainingStart)
    assert not states_with(HeldOutRequest)
    assert states_with(HeldOutRequest, validation_fraction=0.2) == {"trees"}
    assert states_with(Count) == {"domain"}
    assert states_with(ProbeRequest) == {"search"}
    assert states_with(RandomStep) == {"bins", "trees"}


@pytest.mark.parametrize(("trees", "most"), [(1, 2), (0, 3)])
def test_edge_servers_count_rounds_under_noise(trees, most):
    # sums of the last trees come without new ones, and before held-out rows are counted
    limits, none = ServerLimits("server", 2, 2, 5), np.zeros((trees, 0), np.int32)
    step = RandomStep(Array.of(none), Array.of(none), Array.of(none))
    for number in range(most):
        limits.take(step)
        if trees:
            limits.sums.take(number)
    with pytest.raises(PeerProtocolError, match="one sum for each level"):
        limits.sums.take(most)
    with pytest.raises(PeerProtocolError, match="2 rounds at most"):
        limits.take(step)
