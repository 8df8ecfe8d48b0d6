"""A node's jobs, without a process: budgets, time limits, eval sets, jobs of other versions, parties that came late."""

import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from prometheus_client import generate_latest
from typer.testing import CliRunner

from node.hostile import JOB
from treaty.cli.main import app
from treaty.errors import BudgetSpent
from treaty.models.checkpoints import ledger_folder
from treaty.node.attempts import order_of
from treaty.node.identity import trusted
from treaty.node.job_views import describe, kept_for, verdict_on
from treaty.node.policy import Policy
from treaty.node.proposals import name_of
from treaty.node.store import JobRow
from treaty.node.usage import usage_of
from treaty.node.web import registry
from treaty.privacy.ledger import Ledger, LedgerEntry, model_job

NOISY = {
    **JOB, "protocol": "federboost-vertical", "federboost-vertical": {"epsilon": 0.25},
    "parties": {**JOB["parties"], "shop": {"table": "rows", "predict_table": "rows"}},
}  # fmt: skip


def with_policy(shop, **rules):
    """Change the rules of the shop's data set."""
    policy = Policy(peers=["bank", "lab"], **rules)
    rows = msgspec.structs.replace(shop.jobs.settings.data["rows"], policy=policy)
    shop.jobs.settings = msgspec.structs.replace(shop.jobs.settings, data={"rows": rows})


def test_an_attempt_is_refused_where_others_have_spent_unless_an_earlier_one_has_paid(shop):
    with_policy(shop, most_epsilon_total=1.0)
    at = shop.jobs.standings[shop.proposed(NOISY)]
    shop.jobs.check_budgets(at)  # nothing is spent yet: 0.75 of 1
    ledger = Ledger(ledger_folder(shop.jobs.settings.data["rows"].store, "shop", "noise"))
    ledger.spend([LedgerEntry("draw 1", "another job", "bucket_rr", "a column", 0.2)])
    shop.jobs.check_budgets(at)
    ledger.spend([LedgerEntry("draw 2", "another job", "bucket_rr", "a column", 0.05)])
    shop.jobs.change(at, state="approved")
    shop.jobs.change(at, state="running", event={"what": "started", "attempt": 1})
    ledger.spend([LedgerEntry("draw 3", "a third job", "bucket_rr", "a column", 0.05)])
    with pytest.raises(BudgetSpent, match=r"epsilon 0\.75 for .*epsilon 0\.3 so far"):  # the first attempt paid nothing
        shop.jobs.check_budgets(at)
    with_policy(shop, most_epsilon_total=1.06, most_epsilon=0.75)
    ledger.spend([LedgerEntry("draw 4", name_of(at.job, at.row.id), "bucket_rr", "columns", 0.75)])
    shop.jobs.check_budgets(at)  # its buckets have the same noise again


def test_budgets_are_counted_by_partner_and_disk_by_folder(shop):
    with_policy(shop, most_epsilon_total=1.0)
    settings = shop.jobs.settings
    assert usage_of(settings, shop.store)["Privacy budget"] == {}
    at = shop.jobs.standings[shop.proposed(NOISY)]
    folder = ledger_folder(settings.data["rows"].store, "shop", "noise")
    ledger = Ledger(folder)
    ledger.spend([LedgerEntry("draw 1", model_job(name_of(at.job, at.row.id), "a" * 32), "bucket_rr", "x", 0.25)])
    ledger.spend([LedgerEntry("draw 2", "by hand", "bucket_rr", "x", 0.5)])
    partners = "; ".join(f"with {party} 0.25" for party in sorted(at.job.parties) if party != "shop")
    expected = f"epsilon 0.75 of at most 1 spent per person; {partners}; with others 0.5"
    assert usage_of(settings, shop.store)["Privacy budget"] == {"rows": expected}
    models = Path(settings.folder) / "models" / "job"
    models.mkdir(parents=True)
    (models / "shop.part").write_bytes(bytes(1_200_000))
    disk = usage_of(settings, shop.store)["Disk"]
    assert disk["models"] == "1.2 MB"
    assert disk.keys() >= {"stores", "free"}
    (folder / "ledger").write_bytes(b"not a ledger")
    assert "ledger" in usage_of(settings, shop.store)["Privacy budget"]["rows"]


@pytest.mark.parametrize("rule", ["most_epsilon", "most_epsilon_total"])
def test_an_attempt_that_pays_again_is_refused_where_it_cannot(shop, rule):
    """By row noise on sums is drawn anew by each attempt."""
    by_row = {
        **JOB,
        "align": None,
        "protocol": "federboost-horizontal",
        "federboost-horizontal": {"epsilon_total": 0.6},
    }
    at = shop.jobs.standings[shop.proposed(by_row)]
    with_policy(shop, **{rule: 1.0})
    shop.jobs.check_budgets(at)
    ledger = Ledger(ledger_folder(shop.jobs.settings.data["rows"].store, "shop", "noise"))
    ledger.spend([LedgerEntry("a draw", model_job(name_of(at.job, at.row.id), "0123456789"), "any", "sums", 0.6)])
    with pytest.raises(BudgetSpent, match=r"epsilon 0\.6 (so far|in earlier attempts)"):
        shop.jobs.check_budgets(at)


def test_jobs_that_spend_of_one_budget_do_not_play_at_once(shop):
    one, other = (shop.jobs.standings[shop.proposed(NOISY)] for _ in range(2))
    assert not shop.jobs.share_budget(one, [other])
    with_policy(shop, most_epsilon_total=1.0)
    assert shop.jobs.share_budget(one, [other])
    assert not shop.jobs.share_budget(one, [one])
    twin = msgspec.structs.replace(shop.jobs.settings.data["rows"], name="twin", ledgers="rows")
    shop.jobs.settings = msgspec.structs.replace(shop.jobs.settings, data={**shop.jobs.settings.data, "twin": twin})
    shop_of = {"shop": {"table": "twin", "predict_table": "twin"}}
    of_twin = shop.jobs.standings[shop.proposed({**NOISY, "parties": {**NOISY["parties"], **shop_of}})]
    assert shop.jobs.share_budget(of_twin, [other])


def test_a_party_that_is_not_needed_ends_with_the_job_that_went_on_without_it(shop):
    job = shop.proposed()
    at = shop.jobs.standings[job]
    shop.jobs.change(at, state="approved")
    assert not shop.jobs.bring_on(at)
    shop.seen(job, state="finished")
    shop.jobs.bring_on(at)
    assert shop.store.job(job).state == "finished"


@pytest.mark.parametrize("state", ["proposed", "approved"])
def test_a_service_that_was_not_begun_ends_in_time(shop, state):
    training = shop.proposed()
    at = shop.jobs.standings[training]
    for each in ("approved", "queued"):
        shop.jobs.change(at, state=each)
    shop.jobs.end(training, "finished")
    parties = {name: {"predict_table": "rows"} for name in JOB["parties"]}
    job = shop.proposed({**JOB, "parties": parties}, verb="serve", model=training)
    at = shop.jobs.standings[job]
    if state == "approved":
        shop.jobs.change(at, state="approved")
    at.row = replace(at.row, created=time.time() - 200 * 3600.0)
    shop.jobs.bring_on(at)
    assert shop.store.job(job).state == "failed"


def test_an_eval_set_that_is_read_otherwise_is_refused(shop):
    rows = shop.jobs.settings.data["rows"]
    late = msgspec.structs.replace(rows, name="late", drop=["shop_0"], policy=rows.policy)
    settings = msgspec.structs.replace(shop.jobs.settings, data={"rows": rows, "late": late})
    parties = {**JOB["parties"], "shop": {"table": "rows", "eval_tables": ["late"]}}
    job = shop.jobs.standings[shop.proposed({**JOB, "parties": parties})].job
    broken = [each.what for each in verdict_on(settings, ["bank", "lab"], job, "train").findings if not each.fine]
    assert broken == ["eval_tables"]


def test_a_check_is_listed_as_one_and_not_as_a_training(shop):
    shop.proposed()
    check = shop.proposed(trial=True)
    shop.store.change(check, state="approved")
    row = shop.store.change(check, state="finished")
    assert row.total == 0  # no rounds are planned
    listed = CliRunner().invoke(app, ["jobs", "--node", str(shop.made["shop"].settings)]).output
    assert [line.split()[1] for line in listed.splitlines()[1:] if line.strip()] == ["train:", "check"]
    assert describe(shop.store, shop.settings, row).title.startswith("check only, nothing is trained: a job")
    counts = registry(shop.store, "shop", lambda row: describe(shop.store, shop.settings, row))
    shown = generate_latest(counts).decode()
    assert 'treaty_jobs{kind="check",state="finished"} 1.0' in shown
    assert 'treaty_jobs{kind="train",state="finished"} 0.0' in shown


def test_a_job_of_another_version_is_shown_and_stops_nothing(shop):
    row = JobRow("c" * 64, b'{"from": "a later version"}', bytes(64), "bank", "train")
    shop.store.add_job(row)
    shop.jobs.load(all_states=True)
    assert shop.store.job(row.id).state == "failed"
    view = describe(shop.store, shop.settings, shop.store.job(row.id))
    assert view.title == "train: a job of another version of Treaty"


def test_a_training_goes_on_from_a_finished_one_of_the_same_parties(shop):
    training = shop.proposed()
    shop.proposed({**JOB, "name": "too early"}, from_model=training)
    assert "expected the id of a finished training" in shop.refusal()
    for each in ("approved", "queued"):
        shop.jobs.change(shop.jobs.standings[training], state=each)
    shop.jobs.end(training, "finished")
    longer = {**JOB, "name": "more", "boosting": {**JOB["boosting"], "n_estimators": 9}}
    job = shop.proposed(longer, from_model=training)
    at = shop.jobs.standings[job]
    assert at.job.from_model == training
    view = describe(shop.store, shop.jobs.settings, at.row)
    assert f"from the model of job {training[:12]} on" in view.title
    assert any(
        "which side each training row takes at every split of the earlier model" in of for of in view.disclosures
    )
    assert f"needs the model of job {training[:12]}" in kept_for(shop.store, shop.store.job(training))
    cards, unix = trusted(shop.jobs.settings.keys), dict.fromkeys(JOB["parties"], "unix:x")
    order = order_of(at, shop.own["shop"], cards, shop.jobs.settings, unix, Path(shop.jobs.settings.folder))
    local = msgspec.json.decode(order.job)
    assert local["from_model"].endswith(f"models/{training}")
    assert local["output"].endswith(f"models/{job}")
    # a refreshed model predicts
    update = {**JOB, "boosting": {**JOB["boosting"], "process_type": "update"}}
    refreshed = shop.proposed(update, from_model=training)
    for each in ("approved", "queued"):
        shop.jobs.change(shop.jobs.standings[refreshed], state=each)
    shop.jobs.end(refreshed, "finished")
    assert shop.proposed(update, verb="predict", model=refreshed) in shop.jobs.standings
    for changes, fields, why in (
        ({"task": "regression"}, {}, "equal the training's; these differ: task"),
        ({"parties": {**JOB["parties"], "lab": {"table": "rows"}}}, {}, "these differ: parties"),
        ({"protocol": "fedxgboost-ldp", "fedxgboost-ldp": {"epsilon": 1.0}}, {}, "would be shown without the noise"),
        ({"protocol": "quasi-newton", "boosting": None}, {}, "only models of trees can"),
        ({}, {"from_model": "a" * 64}, "expected the id of a finished training"),
        (
            {},
            {"verb": "predict", "model": training},
            "expected a training that continues a model, got a job to predict",
        ),
        ({"boosting": {"process_type": "update"}}, {"from_model": ""}, "refreshes the leaves of a finished model"),
    ):
        fitting = {name: of for name, of in {**JOB, **changes}.items() if of is not None}
        shop.proposed(fitting, **{"from_model": training, **fields})
        shop.refusal()
        # people of the party that refuses get the details
        assert why in [event["why"] for event in shop.events() if event["what"] == "refused"][-1]
