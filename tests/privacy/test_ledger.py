"""The privacy ledger: what adds up, what is refused before it is released, and what survives a process."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import treaty
from flat import flat
from pace import within
from tables import real_table
from treaty.cli.main import app
from treaty.errors import BudgetSpent, ConfigError
from treaty.privacy.discrete_gaussian import epsilon_of, rho_for
from treaty.privacy.ledger import EpsilonLimits, Ledger, LedgerEntry, cost, model_job, per_person, read_ledger
from treaty.privacy.randomised_response import BucketLedger, RandomisedColumn


def entry(number, epsilon=1.0, **others):
    return LedgerEntry(f"draw {number}", "job", "duchi", f"gradients of tree {number}", epsilon, **others)


def sums(rho, delta=1e-6):
    return LedgerEntry(f"sums {rho}", "job", "discrete Gaussian", "sums of a training", rho=rho, delta=delta)


# ---------------------------------------------------------------- adding up


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.0, 100.0), max_size=30))
def test_without_delta_epsilons_add_up(epsilons):
    entries = [entry(k, epsilon) for k, epsilon in enumerate(epsilons)]
    assert per_person(entries) == math.fsum(epsilons)


@pytest.mark.slow
def test_at_a_delta_many_small_epsilons_cost_less_than_their_sum_and_never_more():
    small = [entry(k, 0.05) for k in range(400)]
    assert per_person(small) == pytest.approx(20.0)
    assert 4.0 < per_person(small, 1e-6) < 6.0
    for epsilon, count in product((0.01, 0.5, 3.0, 50.0), (1, 3)):
        few = [entry(k, epsilon) for k in range(count)]
        assert per_person(few, 1e-9) == pytest.approx(epsilon * count)
    assert per_person(small, 1e-9) > per_person(small, 1e-6) > per_person(small, 1e-3)


def test_the_accountant_is_above_what_randomised_response_truly_costs():
    """Exact delta of 40 answers of randomised response at epsilon 0.2, from the binomial distribution."""
    epsilon, count, delta = 0.2, 40, 1e-5
    bound = per_person([entry(k, epsilon) for k in range(count)], delta)
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    kept = np.arange(count + 1)
    ways = np.array([math.comb(count, int(k)) for k in kept], float)
    one, other = ways * p**kept * (1 - p) ** (count - kept), ways * p ** (count - kept) * (1 - p) ** kept
    exact = np.maximum(one - math.exp(bound) * other, 0.0).sum()
    assert exact <= delta
    assert np.maximum(one - math.exp(0.6 * bound) * other, 0.0).sum() > delta  # not by far, though


def test_noise_on_sums_is_counted_as_its_job_counted_it_and_fourfold_beside_values():
    alone = [sums(0.05)]
    assert per_person(alone) == pytest.approx(epsilon_of(0.05, 1e-6))
    both = [*alone, entry(1, 0.001)]
    assert per_person(both) == pytest.approx(epsilon_of(0.2, 1e-6), rel=0.02)
    assert per_person(both) > per_person([sums(0.05), sums(0.06)]) > per_person(alone)


def test_no_noise_costs_infinitely_whatever_is_beside_it():
    for entries in ([entry(1, math.inf)], [entry(1, math.inf), sums(0.1), entry(2)]):
        assert per_person(entries) == per_person(entries, 1e-6) == math.inf


@pytest.mark.parametrize("delta", [-1e-6, 1.0, 2.0])
def test_a_delta_that_is_none_is_refused(delta):
    with pytest.raises(ConfigError, match="expected a delta above 0 and below 1"):
        per_person([entry(1)], delta)


@pytest.mark.parametrize(
    ("entries", "delta", "text"),
    [
        ([], None, "epsilon none per value; 0 per person over 0 releases"),
        ([entry(1), entry(2)], None, "epsilon 1 per value; 2 per person over 2 releases"),
        ([entry(1, 0.5), entry(2, 2.0)], None, "epsilon 0.5 to 2 per value; 2.5 per person over 2 releases"),
        ([sums(0.05)], None, "rho 0.05 per row; epsilon 1.472 at delta 1e-06 per row added or removed over 1 release"),
        ([entry(1), entry(2)], 1e-6, "epsilon 1 per value; 2 per person over 2 releases"),
    ],
)  # fmt: skip
def test_the_cost_is_printed_per_value_and_per_person(entries, delta, text):
    assert cost(entries, delta) == text


def test_a_sum_that_an_accountant_beats_is_printed_with_its_delta():
    text = cost([entry(k, 0.05) for k in range(400)], 1e-6)
    assert text.startswith("epsilon 0.05 per value; epsilon 5.1")
    assert text.endswith("at delta 1e-06 per person over 400 releases")


# ---------------------------------------------------------------- spending


@pytest.fixture(params=["file", "memory"])
def ledger(request, tmp_path):
    return Ledger(tmp_path / "a.noise" if request.param == "file" else None)


def test_entries_stay_in_order_and_a_draw_is_paid_once(ledger):
    ledger.spend([entry(2), entry(1)])
    ledger.spend([entry(1), entry(3), entry(3)])
    assert ledger.entries() == [entry(2), entry(1), entry(3)]
    assert ledger.entries() == [entry(2), entry(1), entry(3)]


def test_of_one_draw_that_is_entered_twice_the_dearer_cost_counts(ledger):
    """Else the limit of a release would be checked, and written down, at its cheaper price."""
    for number, costs in enumerate([(1.0, 3.0), (3.0, 1.0)]):
        twice = [entry(number, epsilon) for epsilon in costs]
        with pytest.raises(BudgetSpent, match="would pay"):
            ledger.check(twice, most=2.0 + 3.0 * number)
        ledger.spend(twice)
        assert ledger.entries()[number] == entry(number, 3.0)
    on_sums = [LedgerEntry("sums", "job", "discrete Gaussian", "sums", rho=rho, delta=1e-6) for rho in (0.2, 0.1)]
    ledger.spend(on_sums)
    assert ledger.entries()[2].rho == 0.2


def test_what_would_cost_too_much_is_refused_whole_and_leaves_no_trace(ledger):
    ledger.spend([entry(1), entry(2)], most=2.0)
    with pytest.raises(BudgetSpent, match=r"may pay epsilon 2, has paid 2 and would pay 4 with gradients of tree 3"):
        ledger.spend([entry(3), entry(4)], most=2.0)
    assert ledger.entries() == [entry(1), entry(2)]
    ledger.spend([entry(1), entry(2)], most=1.0)  # paid long ago
    ledger.spend([entry(3)], most=3.0)
    assert len(ledger.entries()) == 3


def test_ten_tenths_are_one_and_no_more(ledger):
    for k in range(10):
        ledger.spend([entry(k, 0.1)], most=1.0)
    with pytest.raises(BudgetSpent):
        ledger.spend([entry(11, 1e-6)], most=1.0)


def test_the_limit_is_on_everything_in_the_ledger_whatever_it_is_for(ledger):
    ledger.spend([sums(0.05)])
    with pytest.raises(BudgetSpent):
        ledger.spend([entry(1)], most=2.0)
    ledger.spend([entry(1)], most=6.0)


def test_a_delta_lets_more_be_spent(ledger):
    many = [entry(k, 0.05) for k in range(200)]
    with pytest.raises(BudgetSpent):
        ledger.spend(many, most=5.0)
    ledger.spend(many, most=5.0, delta=1e-6)
    with pytest.raises(BudgetSpent):
        ledger.spend([entry(k, 0.05) for k in range(500)], most=5.0, delta=1e-6)


def test_the_partys_own_limits_hold_whatever_limit_a_job_has(tmp_path):
    ledger = Ledger(tmp_path, EpsilonLimits(job=2.0, total=3.0))

    def of(job, number):
        return LedgerEntry(f"{job} {number}", model_job(job, f"{number:08x}"), "duchi", "gradients", 1.0)

    ledger.spend([of("one", 1), of("one", 2)], most=9.0, delta=1e-6)
    with pytest.raises(BudgetSpent, match=r"may pay epsilon 2 in one job \(most_epsilon\), has paid 2 and would pay 3"):
        ledger.spend([of("one", 3)])  # another model, of another attempt at the same job
    with pytest.raises(BudgetSpent, match="in one job"):
        ledger.check([of("one", 3)])
    ledger.spend([of("one", 1)])  # paid
    ledger.spend([of("two", 1)])
    with pytest.raises(BudgetSpent, match=r"may pay epsilon 3 here \(most_epsilon_total\), has paid 3 and would pay 4"):
        ledger.spend([of("two", 2)], most=9.0)
    Ledger(tmp_path).spend([of("two", 2)])  # without limits of its own


def test_the_partys_own_limits_hold_whatever_delta_a_job_states(tmp_path):
    """At a delta of 0.99 a rho of 4.5 would cost an epsilon of 0.1: nearly no noise, for a limit of 1."""
    ledger, rho = Ledger(tmp_path, EpsilonLimits(total=1.0)), rho_for(0.1, 0.99)
    with pytest.raises(BudgetSpent, match=r"has paid 0 and would pay 19.3699 with"):
        ledger.spend([sums(rho, delta=0.99)])
    ledger.spend([sums(rho_for(0.5, 1e-9), delta=1e-9)])
    assert per_person(ledger.entries()) == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("wrong", [entry(1, -1.0), entry(1, math.nan), sums(-0.1), sums(math.inf), sums(math.nan)])
def test_costs_that_are_none_are_refused(ledger, wrong):
    with pytest.raises(ConfigError, match="expected costs of 0 or more"):
        ledger.spend([wrong])
    assert ledger.entries() == []


# ---------------------------------------------------------------- keeping


def test_all_mechanisms_of_a_party_are_in_one_file(tmp_path):
    codes = np.zeros((5, 1), np.uint8)
    BucketLedger(tmp_path).noisy(codes, [RandomisedColumn("age", 4, 2.0, b"")], np.arange(5), "spring")
    Ledger(tmp_path).spend([entry(1), sums(0.1)])
    found = read_ledger(tmp_path)
    assert [(e.job, e.mechanism, e.what, e.epsilon) for e in found[:1]] == [("spring", "bucket_rr", "age", 2.0)]
    assert found[1:] == [entry(1), sums(0.1)]
    assert read_ledger(tmp_path / "ledger") == found == BucketLedger(tmp_path).entries()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "ledger"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())


def test_the_key_stays_and_other_folders_have_others(tmp_path):
    keys = [Ledger(tmp_path / name).key for name in ("a", "a", "b")]
    assert keys[0] == keys[1] != keys[2]
    assert len(keys[0]) == 32
    assert Ledger(None).key != Ledger(None).key


@pytest.mark.slow
def test_two_jobs_at_once_cannot_both_take_the_last_of_a_budget(tmp_path):
    script = (
        "import sys; from pathlib import Path; from treaty.privacy.ledger import LedgerEntry, Ledger\n"
        "from treaty.errors import BudgetSpent\n"
        "ledger, taken = Ledger(Path(sys.argv[1])), 0\n"
        "for k in range(30):\n"
        "    try:\n"
        "        ledger.spend([LedgerEntry(f'{sys.argv[2]} {k}', sys.argv[2], 'duchi', 'tree', 1.0)], most=40.0)\n"
        "        taken += 1\n"
        "    except BudgetSpent:\n"
        "        pass\n"
        "print(taken)\n"
    )
    jobs = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path), name], stdout=subprocess.PIPE, text=True)
        for name in ("one", "other")
    ]
    taken = [int(job.communicate(timeout=within(120))[0]) for job in jobs]
    assert sum(taken) == len(read_ledger(tmp_path)) == 40
    assert per_person(read_ledger(tmp_path)) == 40.0


def test_a_job_that_dies_while_it_writes_leaves_all_or_nothing(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.spend([entry(1)])

    def dies():
        with ledger._db.transaction() as db:
            db.execute("INSERT INTO entries VALUES ('half', 'job', 'duchi', 'tree', 1.0, 0.0, 0.0)")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dies()
    assert read_ledger(tmp_path) == [entry(1)]


def test_a_ledger_is_read_after_a_job_was_killed_while_it_wrote(tmp_path):
    script = (
        "import os, signal, sys; from pathlib import Path; from treaty.privacy.ledger import LedgerEntry, Ledger\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "ledger.spend([LedgerEntry('draw 1', 'job', 'duchi', 'gradients of tree 1', 1.0)])\n"
        "ledger._db.connection.execute('PRAGMA cache_size = 1')\n"  # the file changes before the end
        "with ledger._db.transaction() as db:\n"
        "    for k in range(2000):\n"
        "        row = (f'{k}' * 20, 'job', 'duchi', 'tree', 1.0, 0.0, 0.0)\n"
        "        db.execute('INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)', row)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert (tmp_path / "ledger-journal").stat().st_size > 0
    assert read_ledger(tmp_path) == [entry(1)]


def test_a_later_version_and_a_wrong_number_are_refused(tmp_path):
    Ledger(tmp_path)
    with sqlite3.connect(tmp_path / "ledger") as db, pytest.raises(sqlite3.IntegrityError):
        db.execute("INSERT INTO entries VALUES ('a', 'job', 'duchi', 'tree', 'much', 0.0, 0.0)")
    db.execute("PRAGMA user_version = 3")
    db.close()
    with pytest.raises(ConfigError, match="expected the privacy ledger to be of version 2, got 3"):
        Ledger(tmp_path)


@pytest.mark.parametrize("content", [None, b"garbage" * 2000], ids=["none", "garbage"])
def test_reading_what_is_no_ledger_is_a_config_error(tmp_path, content):
    if content is not None:
        (tmp_path / "ledger").write_bytes(content)
    with pytest.raises(ConfigError, match="no such file" if content is None else "privacy ledger is damaged"):
        read_ledger(tmp_path)


@pytest.mark.slow
def test_noise_on_sums_is_entered_by_every_participant_and_jobs_add_up(tmp_path):
    X, y = real_table("binary", rows=150)
    rows = {name: (X.iloc[k::3], y[k::3]) for k, name in enumerate(("north", "south", "east"))}
    spent = []
    for _ in range(2):
        model = treaty.GBDTClassifier(
            treaty.FederBoostHorizontal(epsilon_total=8.0), n_estimators=1, max_depth=1, max_bin=4, n_jobs=1
        )
        spent.append(model.fit(rows, checkpoint=tmp_path).parts_["pooled"].spent)
    for name in rows:
        one, search, other = read_ledger(tmp_path / f"{name}.noise")  # the second training searches for no bins
        assert one.mechanism == search.mechanism == other.mechanism == "discrete Gaussian"
        assert per_person([one, search]) == pytest.approx(8.0, rel=1e-3)
        assert per_person([one, search]) < per_person([one, search, other]) < 16.0
    assert spent[0].endswith("over 2 releases")
    assert "over 3 releases" in spent[1]


def test_the_command_prints_what_was_paid(tmp_path):
    Ledger(tmp_path).spend([entry(1), entry(2), LedgerEntry("labels", "spring", "label_rr", "labels", 1.5)])
    result = CliRunner().invoke(app, ["ledger", str(tmp_path)])
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "job, duchi, gradients of tree 1 to gradients of tree 2: epsilon 1 per value; 2 per person over 2 releases",
        "spring, label_rr, labels: epsilon 1.5 per value; 1.5 per person over 1 release",
        "all: epsilon 1 to 1.5 per value; 3.5 per person over 3 releases",
    ]
    assert isinstance(CliRunner().invoke(app, ["ledger", str(tmp_path / "none")]).exception, ConfigError)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["fedxgboost-ldp", "federboost-horizontal"])
def test_every_fit_has_a_line_of_its_own(tmp_path, protocol):
    X, y = real_table("binary", rows=150)
    halves = {"a": X.iloc[:, :5], "b": X.iloc[:, 5:]}
    thirds = {name: (X.iloc[k::3], y[k::3]) for k, name in enumerate("abc")}
    given = (halves, y) if protocol == "fedxgboost-ldp" else (thirds,)
    own = {"mechanism": "piecewise"} if protocol == "fedxgboost-ldp" else {}
    models = [
        flat(
            treaty.GBDTClassifier, protocol, **own, n_estimators=2, max_depth=1, max_bin=4, epsilon_total=8.0, n_jobs=1
        ).fit(*given, checkpoint=tmp_path)
        for _ in range(3)
    ]
    lines = CliRunner().invoke(app, ["ledger", str(tmp_path / "a.noise")]).output.splitlines()
    ids = [next(iter(model.parts_.values())).model_id[:8] for model in models]
    assert [line.split(", ")[0] for line in lines[:3]] == ["fit"] * 3
    assert [line.split(", ")[1] for line in lines[:3]] == [f"model {name}" for name in ids]
    assert lines[3].startswith("all: ")


def test_an_epsilon_beyond_floats_is_not_understated():
    both = [
        LedgerEntry("a", "job", "duchi", "x", 1000.0),
        LedgerEntry("b", "job", "gaussian", "y", rho=0.05, delta=1e-6),
    ]
    assert per_person(both) == math.inf
    assert per_person(both[:1], 1e-6) == 1000.0
