"""Proposals that peers may send: what is refused before it is understood, and that nothing of it is run."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.hostile import JOB, content, mutated, without_side_effects
from treaty.errors import ConfigError
from treaty.node import proposals
from treaty.node.proposals import (
    LARGEST,
    check_same,
    id_of,
    in_words,
    proposed,
    read_proposal,
    roles_of,
    rounds_of,
    statement,
)

PATHS = ["/etc/passwd", "../../keys/bank", "..", "rows/../rows", "C:\\rows", "~/rows", "file:rows"]
CONTROLS = ["\0", "\n", "\x1b[2J", "\x1b]0;title\x07", "\r", "\u202e", "\u200b", "\x9b31m"]


def taken(job=JOB, **fields):
    """Take in a proposal as a node does, all but signatures; return the job."""
    proposal = read_proposal(content(job, **fields))
    described = proposal.described()
    roles_of(described, proposal.verb)
    rounds_of(described, proposal.verb)
    return described


def test_a_proposal_of_today_is_taken():
    assert list(taken().parties) == ["bank", "shop"]


@pytest.mark.parametrize("submitted", ["2020-01-01T00:00:00Z", "2999-01-01T00:00:00Z", "yesterday", "", "9" * 40])
def test_an_old_proposal_and_one_from_the_future_are_refused(submitted):
    with pytest.raises(ConfigError, match=r"cannot read the proposal|expected a proposal of the last 30 days"):
        taken(submitted=submitted)


@pytest.mark.parametrize("fields", [{"nonce": "0" * 32 + "\n"}, {"model": "0" * 64 + "\n"}, {"model": "../../x"}])
def test_what_stands_in_names_of_files_has_its_one_form(fields):
    with pytest.raises(ConfigError, match="matching regex"):
        taken(**fields)


@pytest.mark.parametrize(
    "protocol",
    ["node.imported:SYSTEM", "antigravity:x", ".:x", ":", "\0:x", "a" * 9000 + ":x", "no.such.module:X", "pooled2", 5],
)
def test_a_proposal_never_imports_what_it_names(protocol):
    with (
        without_side_effects() as imported,
        pytest.raises(ConfigError, match="expected a built-in system"),
    ):
        taken({**JOB, "protocol": protocol})
    assert imported == []


@pytest.mark.parametrize("loss", ["os:abort", "antigravity:x", ":", "\0:x", "a" * 900 + ":x", "a.b.c:D.e"])
def test_a_proposal_never_imports_the_loss_that_it_names(loss):
    job = {**JOB, "task": "regression", "boosting": {"objective": loss}}
    with (
        without_side_effects() as imported,
        pytest.raises(ConfigError, match="expected a built-in loss, or one that a policy here allows"),
    ):
        taken(job)
    assert imported == []
    read_proposal(content({**job, "boosting": {"objective": "losses:Gamma"}}), ["losses:Gamma"])


def test_a_later_field_does_not_hide_an_earlier_one():
    """The proposal is decoded twice; both must see the same protocol."""
    twice = '{"protocol":"antigravity:x",' + msgspec.json.encode({**JOB, "protocol": "secureboost"}).decode()[1:]
    assert taken(twice).protocol == "secureboost"
    with without_side_effects() as imported, pytest.raises(ConfigError):
        taken(twice.replace("secureboost", "none").replace("antigravity:x", "secureboost"))
    assert imported == []


def test_a_system_from_elsewhere_is_taken_where_settings_name_it():
    name = "treaty.systems.secureboost.record:SYSTEM"
    read_proposal(content({**JOB, "protocol": name}), [name])
    with pytest.raises(ConfigError):
        read_proposal(content({**JOB, "protocol": name}), ["treaty.systems.secureboost.record:OTHER"])


@pytest.mark.parametrize(
    "more",
    [
        {"output": "/tmp/x"},
        {"checkpoints": "x"},
        {"store": "../x"},
        {"n_jobs": 1000},
        {"wait": 1e9},
        {"inbox_limit": 1 << 30},
        {"align": {"on": "id", "log": "x"}},
    ],
)
def test_what_is_a_nodes_own_business_is_refused(more):
    with pytest.raises(ConfigError, match=rf"without (align\.)?{next(iter(more)) if 'align' not in more else 'log'}"):
        taken({**JOB, **more})


@pytest.mark.parametrize(
    "more",
    [
        {"address": "evil.example:1"},
        {"listen": "0.0.0.0:1"},
        {"certificate": "x"},
        {"key": "/keys/shop.key.pem"},
        {"id": "salary"},
        {"noisy_labels": "x"},
        {"keep_for_audit": "/tmp"},
        {"audit_gigabytes": 1e9},
    ],
)
def test_what_is_a_members_own_business_is_refused(more):
    parties = {**JOB["parties"], "shop": {"table": "rows", **more}}
    with pytest.raises(ConfigError, match=f"without parties.shop.{next(iter(more))}"):
        taken({**JOB, "parties": parties})


@pytest.mark.parametrize(
    "name", ["../shop", "shop/x", "shop\n", "shop\0", "\u0455hop", "shop ", ".", "", "-shop", "s" * 64]
)
def test_a_partys_name_is_one_that_certificates_hold(name):
    with pytest.raises(ConfigError):
        taken({**JOB, "parties": {**JOB["parties"], name: {"table": "rows"}}})


@pytest.mark.parametrize("text", CONTROLS)
@pytest.mark.parametrize("place", ["name", "label", "weight", "group", "on", "table", "columns", "field"])
def test_no_text_of_a_proposal_can_move_a_terminals_cursor(text, place):
    job = {**JOB, place: f"x{text}y"}
    if place in ("on", "table", "columns", "field"):
        job.pop(place)
        shop = {"table": f"x{text}", "columns": [f"y{text}"]}
        job["parties"] = {**JOB["parties"], "shop": shop}
        job |= {"align": {"on": text}} if place == "on" else {text: 1} if place == "field" else {}
    with pytest.raises(ConfigError, match="expected printable texts") as refused:
        taken(job)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", ["table", "eval_tables", "predict_table"])
def test_a_path_is_no_name_of_a_data_set(path, field):
    shop = {"table": "rows", field: [path] if field == "eval_tables" else path}
    with pytest.raises(ConfigError, match=r"parties\.shop must name a data set"):
        taken({**JOB, "parties": {**JOB["parties"], "shop": shop}})


@pytest.mark.parametrize(
    "job",
    [
        "[" * 100_000 + "]" * 100_000,
        msgspec.json.encode(JOB).decode()[:-1] + ',"secureboost":{"x":' + "[" * 900 + "]" * 900 + "}}",
        msgspec.json.encode(JOB).decode()[:-1] + ',"secureboost":{"x":' + "[" * 60_000 + "]" * 60_000 + "}}",
        '{"parties":' * 900 + "1" + "}" * 900,
        "",
        "{",
        "[]",
        "null",
        "1e999",
        '{"parties":[]}',
        '{"parties":null}',
    ],
    ids=range(11),
)
def test_json_that_is_no_job_is_refused(job):
    with pytest.raises(ConfigError):
        taken(job)


@pytest.mark.parametrize(
    "more",
    [
        {"timeout": 1e308},
        {"timeout": "9" * 5000 + "d"},
        {"timeout": "9" * 900 + "d"},
        {"reconnect": 1e300},
        {"classes": 2**62},
        {"classes": 10**4000},
        {"classes": 10_001},
        {"parties": {"bank": {"table": "rows"}, "shop": {"eval_tables": [f"t{k}" for k in range(101)]}}},
        {"boosting": {"n_estimators": 2**63}},
        {"boosting": {"n_estimators": 10**400}},
        {"boosting": {"max_depth": 10**9}},
        {"boosting": {"max_bin": 10**9}},
        {"secureboost": {"key_bits": 10**9}},
        {"secureboost": {"x" * 999: 1}},
        {"align": {"on": "id", "max_runs": 2**70, "normalise": ["x"]}},
        {"x" * 200_000: 1},
        {"label": "x" * 1001},
    ],
    ids=lambda more: next(iter(more))[:20],
)
def test_huge_numbers_and_names_are_refused_and_shown_shortened(more):
    with pytest.raises(ConfigError) as refused:
        taken({**JOB, **more})
    assert len(proposals.clean(str(refused.value), 500)) <= 500


def test_ten_thousand_parties_are_refused_before_anything_is_worked_out(monkeypatch):
    monkeypatch.setattr(proposals, "decoded_job", lambda data: pytest.fail("it was looked into"))
    parties = {f"p{number}": {} for number in range(10_000)}
    with pytest.raises(ConfigError, match="expected 2 to 1000 parties, got 10002"):
        taken({**JOB, "parties": {**JOB["parties"], **parties}})
    with pytest.raises(ConfigError, match="got 1"):
        taken({**JOB, "parties": {"bank": {"table": "rows"}}})


def test_an_oversized_proposal_is_not_decoded(monkeypatch):
    monkeypatch.setattr(msgspec.json, "decode", lambda *_, **__: pytest.fail("it was decoded"))
    with pytest.raises(ConfigError, match=f"at most {LARGEST} bytes"):
        read_proposal(b" " * (LARGEST + 1))


def test_a_users_own_job_is_held_to_what_peers_take(tmp_path):
    """Otherwise it would be refused by each peer alone, later."""
    file = tmp_path / "job.json"
    file.write_bytes(msgspec.json.encode({**JOB, "name": "a\x1b[2J"}))
    with pytest.raises(ConfigError, match="printable"):
        proposed(file, "train")
    file.write_bytes(msgspec.json.encode(JOB))
    assert read_proposal(proposed(file, "train")).described().name == JOB["name"]


def test_a_signature_says_what_it_is_for_and_of_whom():
    said = {statement(what, job, who) for what in ("submit", "approve") for job in ("a" * 64, "b" * 64) for who in "xy"}
    assert len(said) == 8
    assert id_of(content()) != id_of(content())  # the same job twice is two jobs


@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_whatever_is_sent_is_a_proposal_or_a_config_error(seed):
    try:
        proposal = read_proposal(mutated(content(), seed))
        job = proposal.described()
        roles_of(job, proposal.verb)
    except ConfigError:
        return
    assert len(job.parties) >= 2
    assert in_words(job, proposal.verb).isprintable()


@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_whatever_job_is_in_a_proposal_is_one_or_a_config_error(seed):
    try:
        with without_side_effects() as imported:
            job = taken(mutated(msgspec.json.encode(JOB), seed).decode(errors="replace"))
    except ConfigError:
        return
    assert imported == []
    assert job.protocol in proposals.SYSTEMS["trees"] or job.protocol in proposals.SYSTEMS["linear"]


PREDICTING = {**JOB, "parties": {name: {"predict_table": "rows"} for name in JOB["parties"]}}


@pytest.mark.parametrize(
    ("differs", "changes"),
    [
        ("protocol", {"protocol": "fedxgboost-ldp", "fedxgboost-ldp": {"epsilon": 1.0}}),
        ("active", {"active": "shop"}),
        ("own", {"secureboost": {"allow_exact_sums": True}}),
        ("common", {"boosting": {**JOB["boosting"], "max_depth": 2}}),
        ("task", {"task": "regression"}),
        ("classes", {"classes": 3}),
        ("parties", {"parties": {**PREDICTING["parties"], "lab": {"predict_table": "rows"}}}),
        ("parties", {"parties": dict(reversed(PREDICTING["parties"].items()))}),
    ],
)
def test_a_prediction_is_made_under_the_options_of_its_training(differs, changes):
    training = taken()
    check_same(taken(PREDICTING, verb="predict", model="a" * 64), training)
    with pytest.raises(ConfigError, match=f"equal the training's; these differ: .*{differs}"):
        check_same(taken({**PREDICTING, **changes}, verb="predict", model="a" * 64), training)
