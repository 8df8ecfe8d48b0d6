import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treaty.machine.process import trust
from treaty.models.checkpoints import ledger_folder
from treaty.node import policy as policies
from treaty.node.policy import Case, CheckFinding, DataSet, Policy, PolicyVerdict, verdict
from treaty.privacy.discrete_gaussian import epsilon_of, rho_for
from treaty.privacy.ledger import FILE, Ledger, LedgerEntry
from treaty.runs.job import Align, Job, Member
from treaty.systems import OPTIONS, SYSTEMS, option_class
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.secureboost.options import SecureBoost

ROWS = 400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"no": np.arange(ROWS), "age": rng.integers(18, 90, ROWS), "income": rng.random(ROWS),
                          "late": rng.integers(0, 2, ROWS)})  # fmt: skip
    frame.to_parquet(tmp_path / "t.parquet")
    return tmp_path


def job(protocol: str = "secureboost", *, columns: list[str] | None = None, **given: Any) -> Job:
    fields = {"name": "j", "active": "clinic", "label": "late", "align": Align(on="no"), **given}
    parties = {"clinic": Member(table="patients"), "bank": Member(table="t", columns=columns)}
    return Job(protocol=protocol, parties=parties, **fields)


def by_row(protocol: str = "federboost-horizontal", **given: Any) -> Job:
    parties = {name: Member(table="t") for name in ("clinic", "bank", "shop")}
    return Job(name="j", active="clinic", label="late", protocol=protocol, parties=parties, **given)


def asked(folder: Path, proposed: Job, verb: str = "train", party: str = "bank", **rules: Any) -> PolicyVerdict:
    given = {"peers": ["clinic", "shop", "bank"], **rules}
    data_set = DataSet(
        table=str(folder / "t.parquet"), id="no", policy=Policy(**given), name="t", folder=str(folder / "state")
    )
    return verdict(proposed, verb, party, data_set)


def found(rule: str, *args: Any, **given: Any) -> CheckFinding:
    (finding,) = [finding for finding in asked(*args, **given).findings if finding.what == rule]
    return finding


def check(fine: bool, said: str, rule: str, *args: Any, **given: Any) -> None:
    """Check a rule's finding, and that it alone decides."""
    whole = asked(*args, **given)
    finding = next(finding for finding in whole.findings if finding.what == rule)
    assert (finding.fine, finding.said) == (fine, said)
    assert whole.allowed == all(finding.fine for finding in whole.findings)
    assert [other.what for other in whole.findings if not other.fine] == ([] if fine else [rule])


def test_peers(folder: Path) -> None:
    check(True, "with 'clinic'; allowed: 'clinic'", "peers", folder, job(), peers=["clinic"])
    check(False, "with 'clinic'; allowed: none", "peers", folder, job(), peers=[])
    check(False, "with 'clinic', 'shop'; allowed: 'clinic'", "peers", folder, by_row(), peers=["clinic"])
    check(True, "with 'clinic', 'shop'; allowed: 'shop', 'clinic'", "peers", folder, by_row(), peers=["shop", "clinic"])


def test_systems(folder: Path) -> None:
    check(True, "system 'secureboost'; allowed: every built-in system", "systems", folder, job())
    check(True, "system 'secureboost'; allowed: 'sgd', 'secureboost'", "systems", folder, job(),
          systems=["sgd", "secureboost"])  # fmt: skip
    check(False, "system 'secureboost'; allowed: 'sgd'", "systems", folder, job(), systems=["sgd"])
    elsewhere = "treaty.systems.secureboost.system:SYSTEM"
    check(False, f"system '{elsewhere}'; allowed: every built-in system", "systems", folder,
          job(elsewhere))  # fmt: skip
    trust([elsewhere])  # as reading the node's settings does
    assert found("systems", folder, job(elsewhere), systems=[elsewhere]).fine


def test_losses(folder: Path) -> None:
    """No person is needed to refuse a loss that is code; and none of it is run."""
    proposed = job(task="regression", common={"objective": "os:abort"})
    check(False, "loss 'os:abort'; allowed: none", "losses", folder, proposed, approve=False)
    check(False, "loss 'os:abort'; allowed: 'losses:Gamma'", "losses", folder, proposed, losses=["losses:Gamma"])
    check(True, "loss 'os:abort'; allowed: 'os:abort'", "losses", folder, proposed, losses=["os:abort"])
    assert "losses" not in [of.what for of in asked(folder, job()).findings]


def test_verbs(folder: Path) -> None:
    check(True, "to train; allowed: train, explain", "verbs", folder, job(), verbs=["train", "explain"])
    check(False, "to predict; allowed: train, explain", "verbs", folder, job(), "predict", verbs=["train", "explain"])
    assert "verbs" not in [finding.what for finding in asked(folder, job(), "predict").findings]


def test_nothing_more_is_looked_at_for_those_who_may_not_take_part(folder: Path) -> None:
    for rule in ("peers", "systems", "verbs"):
        findings = asked(folder / "nowhere", job(), least_rows=1, **{rule: []}).findings
        assert {finding.what for finding in findings} <= {"peers", "systems", "verbs"}


@pytest.mark.parametrize(
    ("proposed", "consent"),
    [
        (job(own={"allow_exact_sums": True}), "allow_exact_sums"),
        (job(own={"allow_insecure": True}), "allow_insecure"),
        (job("quasi-newton", own={"show_weights": True}), "show_weights"),
        (job("sgd", own={"show_eval_margins": True}), "show_eval_margins"),
        (job("federboost-vertical", own={"mode": "paper"}), "paper"),
        (by_row(own={"dropout": "accept"}), "dropout"),
    ],
)
def test_consents(folder: Path, proposed: Job, consent: str) -> None:
    check(False, f"consent to '{consent}'; allowed: none", "consents", folder, proposed)
    check(True, f"consent to '{consent}'; allowed: '{consent}'", "consents", folder, proposed, consents=[consent])
    check(True, "no consent to insecure or more revealing options", "consents", folder, job())


def test_every_option_that_is_a_consent_is_known() -> None:
    """What an option's documentation calls consent is asked about."""
    asking = set()
    for name in OPTIONS:
        kind, lines = option_class(name), (option_class(name).__doc__ or "").splitlines()
        for line, text in pairwise(lines):
            if text.strip().startswith("Consent") and line.partition(" : ")[0].strip() in kind.__dataclass_fields__:
                asking.add(line.partition(" : ")[0].strip())
    assert asking == {"allow_insecure", "allow_exact_sums", "show_weights", "show_eval_margins"}


def test_labels(folder: Path) -> None:
    brought = "its columns 'late' as label, weight or group"
    check(True, f"{brought}; allowed", "labels", folder, by_row())
    check(False, f"{brought}; its labels may not be used", "labels", folder, by_row(), labels=False)
    check(False, "its columns 'late', 'income' as label, weight or group; its labels may not be used", "labels",
          folder, changed_to(job(weight="income"), active="bank"), labels=False)  # fmt: skip
    for verb, proposed in (("train", job()), ("predict", by_row())):
        assert "labels" not in [of.what for of in asked(folder, proposed, verb, labels=False).findings]


def changed_to(proposed: Job, **changed: Any) -> Job:
    return Job(**{name: getattr(proposed, name) for name in Job.__struct_fields__} | changed)


def test_columns(folder: Path) -> None:
    allowed = "allowed: 'age', 'income'"
    rule: dict[str, Any] = {"columns": ["age", "income"]}
    check(True, f"columns 'age'; {allowed}", "columns", folder, job(columns=["age"]), **rule)
    check(False, f"columns 'late'; {allowed}", "columns", folder, job(), **rule)
    check(False, f"columns 'late'; {allowed}", "columns", folder, job(columns=["age", "late"]), **rule)
    check(False, f"columns 'late'; {allowed}", "columns", folder, by_row(), **rule)  # a label is used, too
    check(True, f"columns 'age', 'income'; {allowed}", "columns", folder, by_row(), "predict", **rule)
    assert asked(folder, job()).allowed  # no rule


def test_columns_that_the_data_set_leaves_out(folder: Path) -> None:
    data_set = DataSet(
        table=str(folder / "t.parquet"), columns=["age", "income"], drop=["late"], policy=Policy(peers=["clinic"]),
        name="t", folder=str(folder),
    )  # fmt: skip
    assert verdict(job(), "train", "bank", data_set).allowed
    for column in ("late", "no"):
        findings = verdict(job(columns=["age", column]), "train", "bank", data_set).findings
        (finding,) = [of for of in findings if not of.fine]
        assert finding == CheckFinding("columns", False, f"columns '{column}', which the data set excludes")


def test_ids_that_the_job_names_count_as_used(folder: Path) -> None:
    for on, fine in (("age", True), ("late", False)):
        data_set = DataSet(
            table=str(folder / "t.parquet"), policy=Policy(peers=["clinic"], columns=["age", "income"]), name="t",
            folder=str(folder),
        )  # fmt: skip
        proposed = job(columns=["income"], align=Align(on=on))
        assert verdict(proposed, "train", "bank", data_set).allowed is fine


def test_alignments(folder: Path) -> None:
    said = "at most 50 alignments with a partner in 30 days (align.max_runs); allowed: "
    proposed = job(align=Align(on="no", max_runs=50))
    check(False, f"{said}20", "most_alignments", folder, proposed)
    check(True, f"{said}50", "most_alignments", folder, proposed, most_alignments=50)
    assert "most_alignments" not in [finding.what for finding in asked(folder, by_row()).findings]


def test_rows(folder: Path) -> None:
    for verb in ("train", "predict"):
        check(True, "400 rows; allowed: 400 or more", "least_rows", folder, job(), verb, least_rows=400)
        check(False, "400 rows; allowed: 401 or more", "least_rows", folder, job(), verb, least_rows=401)
    (folder / "t.parquet").unlink()
    finding = found("least_rows", folder, job(), least_rows=1)
    assert not finding.fine
    assert finding.said.startswith("cannot be decided: bank: expected a file at")


def test_leaves(folder: Path) -> None:
    rule = "least_min_child_samples"
    check(True, "leaves of 20 rows (min_child_samples); allowed: 20 or more", rule, folder, job(), **{rule: 20})
    check(False, "leaves of 5 rows (min_child_samples); allowed: 20 or more", rule, folder,
          job(common={"min_child_samples": 5}), **{rule: 20})  # fmt: skip
    check(False, "cannot be decided: models of 'sgd' have no leaves whose rows could be counted", rule, folder,
          job("sgd"), **{rule: 20})  # fmt: skip
    assert asked(folder, job(common={"min_child_samples": 5}), "predict", **{rule: 20}).allowed


def test_sums(folder: Path) -> None:
    check(True, "sealed sums; allowed: sealed", "sums", folder, job(), sums=["sealed"])
    check(False, "open sums; allowed: sealed", "sums", folder, job(own={"sums": "open"}), sums=["sealed"])
    check(False, "open sums; allowed: sealed", "sums", folder, job(common={"reg_alpha": 1.0}), sums=["sealed"])
    check(False, "sealed sums; allowed: open", "sums", folder, job(), sums=["open"])
    check(True, "sealed sums; allowed: sealed", "sums", folder, job("fedxgboost-smm", own={"reveal": "argmax"}),
          sums=["sealed"])  # fmt: skip
    check(False, "open sums; allowed: sealed", "sums", folder, job("fedxgboost-smm"), sums=["sealed"])
    for proposed in (job("sgd"), job("federboost-vertical"), job("fedxgboost-ldp"), by_row(), by_row("fedxgb")):
        finding = found("sums", folder, proposed, sums=["sealed"])
        assert finding == CheckFinding(
            "sums", False,
            f"cannot be decided: system {proposed.protocol!r} has neither open nor sealed sums of bins",
        )  # fmt: skip
        assert "sums" not in [of.what for of in asked(folder, proposed, sums=["sealed", "open"]).findings]


def test_hidden_rows(folder: Path) -> None:
    rule = {"membership": "hidden"}
    hidden = job(own=rule, common={"objective": "logistic_pieces"})
    for verb in ("train", "predict"):
        said = 'rows of nodes are hidden from all parties; allowed: "hidden"'
        check(True, said, "membership", folder, hidden, verb, **rule)
        for proposed in (job(), job(own={"inference": "shared"}), job("fedxgboost-smm"), job("sgd"), by_row()):
            check(False, 'rows of nodes are known; allowed: "hidden"', "membership", folder, proposed, verb, **rule)
        assert "membership" not in [of.what for of in asked(folder, hidden, verb).findings]
    elsewhere = "treaty.systems.secureboost.system:SYSTEM"
    trust([elsewhere])
    proposed = job(elsewhere, own=rule, common={"objective": "logistic_pieces"})
    assert not found("membership", folder, proposed, systems=[elsewhere], **rule).fine
    refused = found("membership", folder, job(own=rule), **rule)
    assert not refused.fine
    assert refused.said.startswith('cannot be decided: membership="hidden" needs objective')
    check(True, "neither sums of bins nor sides of splits are revealed; allowed: 0% of the bins of its rows",
          "most_recoverable", folder, hidden, most_recoverable=0.0)  # fmt: skip


def test_what_open_sums_give_away(folder: Path) -> None:
    rule = "most_recoverable"
    few = found(rule, folder, job(common={"n_estimators": 1, "max_depth": 1}), most_recoverable=0.1)
    assert few.said.startswith("sides of splits reveal to clinic an estimated ")
    assert few.fine
    for own in ({}, {"reveal": "column"}):
        many = job(own=own, common={"n_estimators": 500, "max_depth": 6})
        assert not found(rule, folder, many, most_recoverable=0.05).fine
    many = job(own={"sums": "open"}, common={"n_estimators": 100, "max_depth": 6})
    few = job(own={"sums": "open"}, common={"n_estimators": 1, "max_depth": 1, "max_bin": 4})
    of_many, of_few = (found(rule, folder, proposed, most_recoverable=0.1) for proposed in (many, few))
    assert (of_many.fine, of_few.fine) == (False, True)
    assert of_many.said.startswith("open sums, from which clinic may recover an estimated ")
    share = float(of_many.said.split("estimated ")[1].split("%")[0]) / 100
    assert found(rule, folder, many, most_recoverable=min(1.0, share + 0.001)).fine
    own = found(rule, folder, changed_to(many, active="bank"), most_recoverable=0.0)
    assert own == CheckFinding(
        rule, True, "no sum of bins of its own columns is revealed; allowed: 0% of the bins of its rows"
    )
    for proposed in (job("federboost-vertical"), job("sgd"), by_row(), job("fedxgboost-ldp")):
        assert not found(rule, folder, proposed, most_recoverable=1.0).fine
    paper = job("fedxgboost-smm", own={"mode": "paper", "allow_insecure": True})
    assert not found(rule, folder, paper, most_recoverable=1.0).fine


def test_what_sides_of_splits_give_away_counts_whatever_the_job_does_with_the_rows(folder: Path) -> None:
    """A model of sealed sums that is applied to the rows it was trained on tells their sides at all its splits."""
    rule, common = "most_recoverable", {"n_estimators": 20, "max_depth": 6}

    def share(proposed: Job, verb: str = "train") -> float:
        finding = found(rule, folder, proposed, verb, most_recoverable=0.0)
        assert not finding.fine
        assert finding.said.startswith("sides of splits reveal to clinic an estimated ")
        return float(finding.said.split("estimated ")[1].split("%")[0])

    sealed = job(common=common)
    watched = changed_to(sealed, parties={**sealed.parties, "bank": Member(table="t", eval_tables=["t"])})
    whole = share(job(own={"reveal": "column"}, common=common))
    assert whole > 1.5 * share(sealed)
    going_on = changed_to(sealed, from_model="a" * 64)
    assert [share(watched), share(going_on)] == [whole] * 2
    assert [share(sealed, verb) for verb in ("predict", "explain", "serve")] == [whole] * 3
    stump = job(own={"sums": "open"}, common={"n_estimators": 1, "max_depth": 1, "max_bin": 4})
    assert not found(rule, folder, stump, most_recoverable=0.05).fine  # its sides tell more than its sums
    assert asked(folder, job("sgd"), "predict", most_recoverable=0.0).allowed


def test_regressions_and_classes_give_away_more(folder: Path) -> None:
    def share(**given: Any) -> float:
        said = found("most_recoverable", folder, job(own={"sums": "open"}, **given), most_recoverable=1.0).said
        return float(said.split("estimated ")[1].split("%")[0])

    assert share() <= share(task="regression", common={})
    assert share() < share(classes=5)
    assert share() <= share(weight="income")


NOTHING = "no noisy release of this table, so no epsilon is paid"


@pytest.mark.parametrize(
    ("proposed", "party", "epsilon", "said"),
    [
        (job(), "bank", 0.0, NOTHING),
        (job(), "clinic", 0.0, NOTHING),
        (job(own={"mechanism": "label_rr", "epsilon": 2.0}), "clinic", 2.0, "epsilon 2 for labels randomised once"),
        (job(own={"mechanism": "label_rr", "epsilon": 2.0}), "bank", 0.0, NOTHING),
        (job("fedxgboost-smm"), "clinic", 0.0, NOTHING),
        (job("sgd"), "clinic", 0.0, NOTHING),
        (job("quasi-newton"), "bank", 0.0, NOTHING),
        (by_row("fedxgb"), "bank", 0.0, NOTHING),
        (job("fedxgboost-ldp"), "bank", 0.0, NOTHING),
        (job("fedxgboost-ldp"), "clinic", 1.0, "epsilon 1 for labels randomised once"),
        (
            job("fedxgboost-ldp", own={"mechanism": "duchi"}), "clinic", 20.0,
            "epsilon 20 for noise on gradients of 20 trees",
        ),
        (
            job("fedxgboost-ldp", classes=3, common={"n_estimators": 2}, own={"mechanism": "duchi", "epsilon": 0.5}),
            "clinic", 3.0,
            "epsilon 3 for noise on gradients of 6 trees",
        ),
        (
            job("fedxgboost-ldp", own={"mechanism": "duchi", "epsilon_total": 4.0}), "clinic", 4.0,
            "epsilon 4 for noise on gradients of 20 trees",
        ),
        (
            job("fedxgboost-ldp", own={"mechanism": "duchi", "epsilon_total": 4.0, "delta": 1e-5}), "clinic", 20.0,
            "epsilon 20 for noise on gradients of 20 trees",
        ),
        (
            job("fedxgboost-ldp", own={"mechanism": "label_rr", "epsilon": 1.5}), "clinic", 1.5,
            "epsilon 1.5 for labels randomised once",
        ),
        (by_row(), "bank", 0.0, NOTHING),
        (by_row(own={"epsilon_total": 3.0}), "bank", 3.0, "epsilon 3 for noise on sums (epsilon_total)"),
        (by_row("fedxgb", own={"epsilon_total": 3.0}), "bank", 3.0, "epsilon 3 for noise on sums (epsilon_total)"),
        (
            by_row(own={"epsilon_total": 0.1, "delta": 0.99}), "bank", epsilon_of(rho_for(0.1, 0.99), 1e-6),
            "epsilon 19.3699 for noise on sums (epsilon_total)",
        ),
        (job("federboost-vertical"), "clinic", 0.0, NOTHING),
        (job("federboost-vertical"), "bank", 12.0, "epsilon 12 for randomised buckets of 3 columns"),
        (
            job("federboost-vertical", columns=["age"], own={"epsilon": 1.0}), "bank", 1.0,
            "epsilon 1 for randomised buckets of 1 columns",
        ),
        (
            job("federboost-vertical", own={"epsilon_person": 1.0}), "bank", 1.0,
            "epsilon 1 for randomised buckets of 3 columns",
        ),
        (
            job("federboost-vertical", own={"epsilon": 2.0, "column_epsilon": {"bank.age": 0.5}}), "bank", 4.5,
            "epsilon 4.5 for randomised buckets of 3 columns",
        ),
    ],
)  # fmt: skip
def test_what_a_job_costs(folder: Path, proposed: Job, party: str, epsilon: float, said: str) -> None:
    for rule, more in (("most_epsilon", ""), ("most_epsilon_total", ", and epsilon 0 so far")):
        together = " together" if more else ""
        check(True, f"{said}{more}; allowed: epsilon {epsilon:g}{together}", rule, folder, proposed, party=party,
              **{rule: epsilon})  # fmt: skip
        if epsilon:
            less = epsilon - 0.1
            check(False, f"{said}{more}; allowed: epsilon {less:g}{together}", rule, folder, proposed, party=party,
                  **{rule: less})  # fmt: skip


@pytest.mark.parametrize(
    ("proposed", "party"),
    [
        (job("federboost-vertical", own={"mode": "paper", "epsilon": "inf"}), "bank"),
        (job("fedxgboost-ldp", own={"mode": "paper", "allow_insecure": True}), "clinic"),
    ],
)
def test_where_no_epsilon_holds_none_is_enough(folder: Path, proposed: Job, party: str) -> None:
    assert not found("most_epsilon", folder, proposed, party=party, most_epsilon=1e6).fine
    assert not found("most_epsilon_total", folder, proposed, party=party, most_epsilon_total=1e6).fine


def test_the_ledger_counts(folder: Path) -> None:
    proposed = job(own={"mechanism": "label_rr", "epsilon": 0.1})
    rule: dict[str, Any] = {"party": "clinic", "most_epsilon_total": 1.0}
    ledger = ledger_folder(folder / "state" / "stores" / "t", "clinic", "noise")
    Ledger(ledger).spend([LedgerEntry(str(k), "earlier", "label_rr", "labels", 0.1) for k in range(9)])
    check(True, "epsilon 0.1 for labels randomised once, and epsilon 0.9 so far; allowed: epsilon 1 together",
          "most_epsilon_total", folder, proposed, **rule)  # fmt: skip
    Ledger(ledger).spend([LedgerEntry("more", "earlier", "label_rr", "labels", 0.1)])
    check(False, "epsilon 0.1 for labels randomised once, and epsilon 1 so far; allowed: epsilon 1 together",
          "most_epsilon_total", folder, proposed, **rule)  # fmt: skip
    assert found("most_epsilon_total", folder, job(), **rule).fine  # which costs nothing
    (ledger / FILE).write_bytes(b"damaged")
    finding = found("most_epsilon_total", folder, proposed, **rule)
    assert not finding.fine
    assert finding.said.startswith("cannot be decided: ")


def test_a_system_whose_cost_is_not_known_is_not_fine(folder: Path) -> None:
    elsewhere = "treaty.systems.secureboost.system:SYSTEM"
    trust([elsewhere])
    given: dict[str, Any] = {"systems": [elsewhere], "sums": ["sealed"], "most_recoverable": 1.0, "most_epsilon": 1e6}
    wrong = [finding.what for finding in asked(folder, job(elsewhere), **given).findings if not finding.fine]
    assert wrong == ["sums", "most_recoverable", "most_epsilon"]


@pytest.mark.parametrize("protocol", [name for of in SYSTEMS.values() for name in of if name != "pooled"])
def test_every_system_can_be_priced(folder: Path, protocol: str) -> None:
    split = by_row if protocol in ("federboost-horizontal", "fedxgb") else job
    for party in ("clinic", "bank"):
        assert "unknown" not in found("most_epsilon", folder, split(protocol), party=party, most_epsilon=0.0).said


def test_a_person_is_needed_unless_the_policy_says_otherwise(folder: Path) -> None:
    assert asked(folder, job()).needs_person
    assert not asked(folder, job(), approve=False).needs_person


def test_options_that_do_not_go_together_are_not_fine(folder: Path) -> None:
    wrong = [of for of in asked(folder, job(own={"mechanism": "label_rr"}), most_epsilon=9.0).findings if not of.fine]
    assert {of.what for of in wrong} == {"consents", "most_epsilon"}
    assert all(of.said.startswith("cannot be decided: mechanism and epsilon go together") for of in wrong)


def test_facts_are_those_of_the_table_and_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    look = policies.table_facts
    monkeypatch.setattr(policies, "table_facts", lambda *args, **given: calls.append(1) or look(*args, **given))
    data_set = DataSet(table=str(folder / "t.parquet"), name="t", folder=str(folder))
    case = Case(job(), "train", "bank", data_set)
    assert not calls
    assert case.facts == (ROWS, ["no", "age", "income", "late"])
    assert case.features() == ["age", "income", "late"]
    assert len(calls) == 1
    assert case.codes(["age", "late"], BoostingOptions(max_bin=8).checked(SecureBoost())).shape == (ROWS, 2)


def test_a_query_is_run_once_and_only_for_rules_that_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def fetch(uri: str, query: str, to: Path, **given: object) -> None:
        runs.append(query)
        to.parent.mkdir(exist_ok=True)
        pd.DataFrame({"no": [1, 2], "age": [3, 4]}).to_parquet(to)

    monkeypatch.setattr("treaty.node.policy.fetch", fetch)
    monkeypatch.setenv("BANK_DB", "postgresql://bank@db/x")

    def of(**rules: Any) -> PolicyVerdict:
        data_set = DataSet(
            sql="SELECT 1", database="env:BANK_DB", id="no", policy=Policy(**rules), name="q", folder=str(tmp_path)
        )
        return verdict(job(), "train", "bank", data_set)

    assert of(peers=["clinic"]).allowed
    assert not of(peers=[], least_rows=2).allowed  # strangers cannot have it run
    assert runs == []
    assert of(peers=["clinic"], least_rows=2, columns=["age"]).allowed
    assert runs == ["SELECT 1"]
    monkeypatch.delenv("BANK_DB")
    finding = of(peers=["clinic"], least_rows=2).findings[-1]
    assert not finding.fine
    assert finding.said.startswith("cannot be decided: expected a database's URI in the variable BANK_DB")


@given(
    st.lists(st.sampled_from(["clinic", "shop"]), unique=True), st.sampled_from(["train", "predict", "explain"]),
    st.none() | st.lists(st.sampled_from(["secureboost", "sgd"])), st.integers(1, 40), st.integers(1, 40),
    st.booleans(), st.floats(0, 5), st.floats(0, 5),
)  # fmt: skip
def test_a_stricter_policy_never_allows_more(
    peers: list[str], verb: str, systems: list[str] | None, asked_leaf: int, leaf: int, sealed: bool, most: float,
    cost: float,
) -> None:  # fmt: skip
    proposed = job(
        own={"mechanism": "label_rr", "epsilon": cost + 0.01}, common={"min_child_samples": asked_leaf},
        active="bank",
    )  # fmt: skip
    rules: dict[str, Any] = {
        "peers": peers, "systems": systems, "verbs": ["train"], "least_min_child_samples": leaf,
        "sums": ["sealed"] if sealed else ["open"], "most_epsilon": most,
    }  # fmt: skip
    whole = DataSet(table="/nowhere.csv", policy=Policy(**rules), name="t", folder="/nowhere")
    allowed = verdict(proposed, verb, "bank", whole).allowed
    each = []
    for rule, value in rules.items():
        alone = Policy(**{"peers": ["clinic", "shop"], rule: value})
        one = DataSet(table="/nowhere.csv", policy=alone, name="t", folder="/nowhere")
        each.append(verdict(proposed, verb, "bank", one).allowed)
    assert allowed == all(each)


def test_findings_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CheckFinding("peers", True, "").fine = False  # type: ignore[misc]
