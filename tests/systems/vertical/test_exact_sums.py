"""What exact sums will show is estimated before training, and refused without consent by whoever sees it coming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import treaty
from runs.job_files import train_in_threads
from tables import real_table
from treaty import FedXGBoostSMM, GBDTClassifier, GBDTRegressor, SecureBoost
from treaty.errors import ConfigError
from treaty.runs.job import Job, Member
from treaty.systems.vertical import exact_sums, setup

LATTICE = SecureBoost(encryption="lattice", sums="open")
LIMIT = 0.1


@pytest.fixture(autouse=True)
def the_limit_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_sums, "MOST_SHARE", LIMIT)


def fit(system: Any, **options: Any) -> GBDTClassifier:
    X, y = real_table("binary")
    return GBDTClassifier(system, n_jobs=1, **options).fit({"bank": X.iloc[:, :6], "shop": X.iloc[:, 6:]}, y)


@pytest.mark.parametrize("system", [LATTICE, FedXGBoostSMM()], ids=lambda of: of.system)
def test_a_small_table_is_refused_with_the_ways_out(system: Any) -> None:
    with pytest.raises(ConfigError, match=r"bins of single rows of shop: an estimated \d+%.*allow_exact_sums") as said:
        fit(system)
    for way in ("Fewer trees", "less depth", "max_bin", "colsample_bytree", "more rows", "sealed sums"):
        assert way in str(said.value)


@pytest.mark.parametrize("options", [{"n_estimators": 1, "max_depth": 2}, {"n_estimators": 1, "max_bin": 16}], ids=str)
def test_a_training_that_shows_little_goes_without_consent(options: dict[str, Any]) -> None:
    model = fit(LATTICE, **options)
    (share,) = model.parts_["bank"].exact_sums.values()
    assert share <= LIMIT


def test_gradients_that_differ_from_the_first_tree_on_show_more() -> None:
    """In a first tree of two classes rows mostly share a gradient; in a regression and under weights they do not."""
    X, y = real_table("binary")
    tables = {"bank": X.iloc[:, :6], "shop": X.iloc[:, 6:]}
    GBDTClassifier(LATTICE, n_estimators=1, n_jobs=1).fit(tables, y)
    with pytest.raises(ConfigError, match="exact sums would show bank"):
        GBDTClassifier(LATTICE, n_estimators=1, n_jobs=1).fit(tables, y, sample_weight=1 + np.arange(len(y)) / len(y))
    with pytest.raises(ConfigError, match="exact sums would show bank"):
        GBDTRegressor(LATTICE, n_estimators=1, n_jobs=1).fit(tables, X.iloc[:, 0].to_numpy())


def test_consent_is_enough_and_what_it_accepts_is_named() -> None:
    model = fit(SecureBoost(encryption="lattice", allow_exact_sums=True), n_estimators=10)
    shares = model.parts_["bank"].exact_sums
    assert shares == model.parts_["shop"].exact_sums
    assert shares["shop"] > LIMIT
    assert (
        "bins of single rows of the others, with certainty, from exact sums: by an estimate, "
        f"{shares['shop']:.2g} of shop's, of all rows and columns"
    ) in model.disclosures_["bank"]


def test_paper_mode_is_the_published_system_and_asks_for_no_consent() -> None:
    assert (
        fit(SecureBoost(mode="paper", encryption="lattice"), n_estimators=10).parts_["shop"].exact_sums["shop"] > LIMIT
    )


def copies(tmp_path: Path, **own: dict[str, Any]) -> dict[str, Job]:
    """Return each party's copy of a job about a small table, with its own options."""
    X, y = real_table("binary")
    tables = {"bank": X.iloc[:, :6].assign(y=y), "shop": X.iloc[:, 6:]}
    for name, table in tables.items():
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    members = {name: Member(table=str(tmp_path / f"{name}.csv")) for name in tables}
    plain = Job(
        name="small", active="bank", label="y", parties=members, output=str(tmp_path / "model"), n_jobs=1,
        own={"encryption": "lattice", "sums": "open"}, common={"n_estimators": 10},
    )  # fmt: skip
    return {name: msgspec.structs.replace(plain, own={**plain.own, **own.get(name, {})}) for name in tables}


def test_the_owner_refuses_by_itself_and_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An active party that consents, and would look away, gets no bin's sums, and not even how many bins there are."""
    checks = exact_sums.check_share
    got: list[str] = []
    monkeypatch.setattr(
        setup, "check_share", lambda inputs, *given: inputs.party.name == "bank" or checks(inputs, *given)
    )
    receive = treaty.messaging.party.Party.receive
    monkeypatch.setattr(
        treaty.messaging.party.Party,
        "receive",
        lambda party, peer, *kinds, **named: noted(got, party, receive(party, peer, *kinds, **named)),
    )
    said = train_in_threads(monkeypatch, copies(tmp_path, bank={"allow_exact_sums": True}))
    assert "bins of single rows of shop" in said["shop"]
    assert said["bank"] == f"shop stopped the job: {said['shop']}"
    assert got == []


def noted(got: list[str], party: Any, message: Any) -> Any:
    got.append(f"{party.name} got {type(message).__name__}")
    return message


def test_one_partys_consent_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = train_in_threads(monkeypatch, copies(tmp_path, shop={"allow_exact_sums": True}))
    assert "expected the same allow_exact_sums everywhere, got False at bank and True at shop" in said["shop"]
    assert "expected the same allow_exact_sums everywhere" in said["bank"]


def test_the_active_party_refuses_what_an_owner_has_let_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = exact_sums.check_share
    monkeypatch.setattr(
        setup, "check_share", lambda inputs, *given: inputs.party.name == "shop" or checks(inputs, *given)
    )
    said = train_in_threads(monkeypatch, copies(tmp_path))
    assert "exact sums would show bank" in said["bank"]
    assert said["shop"] == f"bank stopped the job: {said['bank']}"


def test_owners_know_a_regression_by_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = copies(tmp_path)
    plain = {name: msgspec.structs.replace(job, common={"n_estimators": 1}) for name, job in jobs.items()}
    assert train_in_threads(monkeypatch, plain) == {}
    regressions = {name: msgspec.structs.replace(job, task="regression") for name, job in plain.items()}
    assert "bins of single rows of shop" in train_in_threads(monkeypatch, regressions)["shop"]


def test_a_report_names_the_estimated_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    consent = {"allow_exact_sums": True}
    assert train_in_threads(monkeypatch, copies(tmp_path, bank=consent, shop=consent)) == {}
    for name in ("bank", "shop"):
        report = (tmp_path / "model" / f"{name}.report.json").read_text()
        assert '"exact_sums"' in report
        assert "from exact sums: by an estimate, 0." in report
