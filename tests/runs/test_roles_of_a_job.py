"""What a job file says of roles: checked before anybody connects, in training and in prediction."""

from __future__ import annotations

import msgspec
import pytest

from treaty.errors import ConfigError
from treaty.runs.job import Job, Member
from treaty.runs.job_files import check_training
from treaty.runs.party import train_party
from treaty.runs.prediction import owners_of_model


def job_of(protocol: str, **parties: Member) -> Job:
    return Job(name="t", active="a", label="y", protocol=protocol, parties=parties)


@pytest.mark.parametrize("wrong", [Member(role="edge"), Member(role="dealer"), Member(role="king"), Member(edge="a")])
def test_a_role_that_a_system_by_column_does_not_have_is_refused_at_prediction_too(wrong):
    job = job_of("secureboost", a=Member(table="a.csv"), b=Member(), c=wrong)
    for check in (owners_of_model, check_training):
        with pytest.raises(ConfigError, match=r"expected no role and (no )?edge .* at c"):
            check(job)


def test_helpers_of_a_training_have_no_part_of_the_model():
    for protocol, role in [("fedxgboost-smm", "dealer"), ("quasi-newton", "coordinator")]:
        assert owners_of_model(job_of(protocol, a=Member(), b=Member(), c=Member(role=role))) == ["a", "b"]


def test_a_file_for_prediction_of_rows_need_not_name_training_tables():
    job = job_of("federboost-horizontal", a=Member(), b=Member(predict_table="b.csv"), c=Member())
    assert owners_of_model(job) == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="expected a table of every party but the active one, got none of b, c"):
        check_training(job)


@pytest.mark.parametrize("name", [None, "a"])
def test_a_server_without_examples_is_refused_before_anybody_connects(name, tmp_path):
    roles = {"key": Member(role="authority"), **{f"e{k}": Member(role="edge") for k in range(3)}}
    users = {f"u{k}": Member(table=f"u{k}.csv") for k in range(9)}
    job = job_of("fedxgb", a=Member(), **roles, **users)
    with pytest.raises(ConfigError, match=r"defines the columns and classes: expected parties\.a\.table"):
        check_training(job, name)
    assert check_training(job, "u0").of["u0"] == "user"
    with pytest.raises(ConfigError, match=r"to run as u0 alone the job must name parties\.u0\.address"):
        train_party(msgspec.structs.replace(job, output=str(tmp_path)), "u0")


def test_a_limit_that_nobody_would_keep_to_is_refused():
    limited = {"a": Member(table="a.csv"), "b": Member(table="b.csv", most_recoverable=0.05)}
    check_training(job_of("secureboost", **limited), "a")
    paper = msgspec.structs.replace(job_of("fedxgboost-smm", **limited), own={"mode": "paper", "allow_insecure": True})
    for job in (job_of("federboost-vertical", **limited), job_of("fedxgboost-ldp", **limited), paper):
        with pytest.raises(ConfigError, match=f"b sets the limit most_recoverable, .* protocol '{job.protocol}' with"):
            check_training(job, "a")
