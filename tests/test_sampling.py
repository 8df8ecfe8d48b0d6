"""What a sample plays of a file, and that every test has its turn."""

from pathlib import Path

import pytest

import sampling
from sampling import OF_A_FILE, turns


@pytest.mark.parametrize("costs", [[0.02] * 7, [0.02] * 100, [0.1, 3.0, 0.1], [5.0], [0.5, 0.6, 0.7]], ids=str)
def test_every_test_has_its_turn_and_a_file_keeps_about_to_its_time(costs):
    n_seeds = 200 * len(costs)
    played = [turns(costs, seed) for seed in range(n_seeds)]
    assert {test for chosen in played for test in chosen} == set(range(len(costs)))
    assert sum(costs[test] for chosen in played for test in chosen) / n_seeds < 2 * OF_A_FILE
    assert all(len(chosen) == len(set(chosen)) for chosen in played)


def test_quick_files_are_played_whole():
    assert sorted(turns([0.02] * 10, 12345)) == list(range(10))


def test_costs_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "COSTS", tmp_path / "costs.txt")
    sampling.write([("test_b", 1.0), ("test_a", 0.2), ("test_b", 2.0), ("test_quick", 0.01)])
    assert sampling.read() == {"test_a": 0.2, "test_b": 1.5}


class Played:
    """A collected test, as far as sampling looks at it."""

    def __init__(self, originalname: str, mark: str = "") -> None:
        self.path, self.name, self.originalname, self.mark = Path("test_file.py"), originalname, originalname, mark

    def get_closest_marker(self, name: str) -> bool:
        return name == self.mark


def test_a_sample_has_no_slow_tests_and_all_that_are_always_played(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "COSTS", tmp_path / "costs.txt")
    sampling.write([("test_a", 2.0)])
    costly, always, slow = [Played("test_a") for _ in range(20)], Played("test_a", "always"), Played("test_b", "slow")
    for seed in range(20):
        chosen = sampling.sample([*costly, always, slow], seed)
        assert always in chosen
        assert slow not in chosen
        assert len(chosen) <= 2
