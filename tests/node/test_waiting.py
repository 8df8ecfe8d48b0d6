"""Verdicts that jobs wait for: each is worked out once, a few at a time, and a slow one keeps nobody else waiting."""

import threading
import time
from collections import Counter

import pytest

from node.hostile import JOB
from node.nodes import wait_for
from treaty.node import jobs as all_jobs
from treaty.node.jobs import AT_ONCE, OF_ONE, Verdicts
from treaty.node.policy import PolicyVerdict

YES = PolicyVerdict(True, False, [])


@pytest.fixture
def slow():
    """Yield what works a verdict out until the event is set, and counts how often it was begun."""
    made = Slow()
    yield made
    made.let.set()
    made.verdicts.close()


class Slow:
    def __init__(self):
        self.let, self.woken, self.begun = threading.Event(), threading.Event(), Counter()
        self.verdicts = Verdicts(self.woken.set)

    def ask(self, job, submitter):
        def find():
            self.begun[job] += 1
            assert self.let.wait(30.0)
            return YES

        return self.verdicts.ask(job, submitter, find)

    def begin(self, number):
        """Wait until so many have begun, and see that no more do."""
        wait_for("start", lambda: self.begun.total() >= number)
        time.sleep(0.1)
        assert self.begun.total() == number


def test_a_verdict_is_worked_out_once_however_often_it_is_asked_for(slow):
    for _ in range(5):
        assert slow.ask("a", "bank") is None
        slow.begin(1)
    slow.let.set()
    assert slow.woken.wait(10.0)
    assert [slow.ask("a", "bank"), slow.verdicts.there("a")] == [YES, YES]
    assert slow.begun == {"a": 1}


def test_slow_verdicts_of_one_submitter_leave_places_for_others(slow):
    for number in range(10):
        slow.ask(f"bank {number}", "bank")
    slow.begin(OF_ONE)
    assert wait_for("other's verdict", lambda: slow.verdicts.ask("lab 1", "lab", lambda: YES), 10.0) == YES


def test_all_together_are_no_more_than_the_threads(slow):
    for number in range(10):
        slow.ask(f"job {number}", f"peer {number}")
    slow.begin(AT_ONCE)
    slow.let.set()
    assert wait_for("place", lambda: slow.ask("job 9", "peer 9"), 10.0) == YES


def test_a_job_that_has_ended_holds_its_place_until_its_verdict_is_there(slow):
    """Else somebody who proposes jobs and cancels them would have any number of queries run."""
    for number in range(10):
        slow.ask(f"bank {number}", "bank")
        slow.begin(min(number + 1, OF_ONE))
        slow.verdicts.drop(f"bank {number}")


def test_an_error_is_raised_where_the_verdict_is_asked_for_and_shown_nobody(slow):
    def wrong():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        wait_for("error", lambda: slow.verdicts.ask("a", "bank", wrong), 10.0)
    assert slow.verdicts.there("a") is None


def test_a_slow_query_of_one_job_stalls_no_other(shop, monkeypatch):
    let, verdict_on = threading.Event(), all_jobs.verdict_on

    def held_up(settings, cards, job, verb):
        assert job.name != "slow" or let.wait(30.0)
        return verdict_on(settings, cards, job, verb)

    monkeypatch.setattr(all_jobs, "verdict_on", held_up)
    slow, quick = shop.proposed({**JOB, "name": "slow"}), shop.proposed()
    for job in (slow, quick):
        shop.jobs.bring_on(shop.jobs.standings[job])

    def judged():
        shop.jobs.bring_on(shop.jobs.standings[quick])
        return shop.jobs.verdicts.there(quick)

    try:
        assert wait_for("verdict", judged, 10.0).allowed
        assert shop.jobs.verdicts.there(slow) is None
    finally:
        let.set()
