"""Do tests fail now and then on a busy machine? Plays them many times while every core is kept busy.

Without names it plays `SUSPECTS`: the tests that depend most on how fast threads and connections come to their turn.
Names are as pytest takes them, without parameters: `benchmarks/flaky.py tests/node/test_door.py::test_...`. Prints how
often each was played and failed, and its longest time; ends with 1 if any failed. About 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SUSPECTS = [
    "tests/node/test_door.py::test_a_connection_through_which_nothing_goes_is_closed",
    "tests/node/test_door.py::test_connections_that_have_stood_are_not_given_up_for_new_ones",
    "tests/node/test_door.py::test_one_address_has_its_share_of_standing_connections",
    "tests/node/test_door.py::test_a_token_that_comes_late_is_none",
    "tests/node/test_door.py::test_a_wish_to_be_dialled_back_is_met_for_open_jobs_of_peers_with_an_address_alone",
    "tests/node/test_exchange.py::test_a_flood_of_notes_is_slowed_down",
    "tests/node/test_exchange.py::test_long_notes_count_by_their_length",
    "tests/node/test_exchange.py::test_a_slow_desk_makes_the_sender_wait",
    "tests/node/test_exchange.py::test_proposals_and_questions_count_more",
    "tests/node/test_exchange.py::test_views_of_one_job_are_sent_once_however_often_it_changes",
    "tests/node/test_waiting.py::test_slow_verdicts_of_one_submitter_leave_places_for_others",
    "tests/node/test_waiting.py::test_all_together_are_no_more_than_the_threads",
    "tests/systems/fedxgb/test_pieces.py::test_a_silent_user_holds_up_nobodys_pieces_and_no_longer_than_allowed",
    "tests/systems/fedxgb/test_pieces.py::test_who_takes_a_piece_and_not_the_next_is_left_out_and_others_get_theirs",
    "tests/systems/secureboost/test_faults.py::test_a_passive_party_dying_in_the_second_tree_leaves_the_first",
    "tests/messaging/test_flooding.py::test_a_message_in_parts_takes_its_size_of_the_share_until_it_is_read",
    "tests/messaging/test_tls_link.py::test_a_peer_that_takes_nothing_is_given_up_after_the_timeout_and_gets_what_had_left",
    "tests/messaging/test_tls_link.py::test_closing_ends_a_delivery_under_way",
    "tests/messaging/test_channel.py::test_receive_without_arrival_returns_none_after_its_timeout",
    "tests/messaging/test_party.py::test_messages_of_others_do_not_prolong_the_timeout",
]
ROOT = Path(__file__).parents[1]


class Repeated:
    """A plugin that plays every test a number of times, and counts."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.played, self.failed, self.longest = Counter[str](), Counter[str](), Counter[str]()

    @pytest.fixture
    def time_number(self, request: pytest.FixtureRequest) -> int:
        return request.param

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.fixturenames.append("time_number")
        metafunc.parametrize("time_number", range(self.times), indirect=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.split("[")[0]
        self.played[name] += report.when == "call"
        self.failed[name] += report.failed
        self.longest[name] = max(self.longest[name], report.duration)


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keep so many cores busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", nargs="*", default=SUSPECTS)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1, help="processes that keep cores busy")
    given = parser.parse_args()
    os.chdir(ROOT)
    counts = Repeated(given.times)
    with busy(given.busy):
        status = pytest.main([*given.tests, "-q", "-p", "no:cacheprovider", "--tb=short"], plugins=[counts])
    for name in sorted(counts.played, key=lambda name: (-counts.failed[name], name)):
        print(
            f"{counts.failed[name]} of {counts.played[name]} failed, at most {counts.longest[name]:.1f} s: "
            f"{name.rpartition('/')[2]}"
        )
    sys.exit(status)


if __name__ == "__main__":
    main()
