"""Who would learn what, before a job: by `treaty.disclosures`, on the command line, and on the pages of protocols."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

import treaty
from cli.test_check import write_job
from treaty.cli.main import app
from treaty.errors import ConfigError
from treaty.messaging.transcript import Transcript
from treaty.runs import report
from treaty.runs.job import Align
from treaty.runs.report import disclosures, learned_by, of_job, table_of
from treaty.systems import SYSTEMS

NUMBERS = np.random.default_rng(0).normal(size=(60, 4))
DOCS = Path(__file__).parents[2] / "docs"


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["disclosures", *words])


@pytest.mark.parametrize(("model", "name"), [(model, name) for model, named in SYSTEMS.items() for name in named])
def test_every_system_says_before_training_what_its_parties_learn(model, name):
    found = disclosures(name, model=model)
    assert found.system == name
    assert all(found.learned.values())
    tables = found.messages
    assert tables == {} if name == "pooled" else tables["training"] and tables["every job between processes"]
    assert all(f"{party}: {facts[0]}" in str(found) for party, facts in found.learned.items())


def test_options_decide_on_sentences_and_on_messages():
    def names(**options):
        found = treaty.disclosures(treaty.SecureBoost(**options), parties=["bank", "shop"])
        return found, {line.message.__name__ for line in found.messages["training"]}

    sealed, messages = names(sums="sealed")
    assert {"SealedSumsRequest", "WonCandidates"} <= messages
    assert "SumsRequest" not in messages
    keyed, messages = names(encryption="ou", allow_exact_sums=True)
    assert "SumsRequest" in messages
    assert not {"SealedSumsRequest", "SeedOffer", "SplitColumns"} & messages
    assert list(sealed.learned) == list(keyed.learned) == ["bank", "shop"]
    assert sealed.learned["shop"] != keyed.learned["shop"]


def test_the_form_of_a_message_follows_options():
    def form(step, **options):
        found = disclosures("federboost-horizontal", **options).messages["training"]
        return {line.leakage.form for line in found if line.message.__name__ == step}

    assert form("MaskedInput") == {"aggregated"}
    assert form("MaskedInput", epsilon_total=2.0) == {"noisy"}
    assert form("SumVoid") == set()
    assert form("SumVoid", dropout="accept") == {"control"}


def test_sentences_are_those_that_a_fit_has_afterwards():
    X, y = {"bank": NUMBERS[:, :2], "shop": NUMBERS[:, 2:]}, (NUMBERS.sum(axis=1) > 0).astype(int)
    model = treaty.GBDTClassifier("federboost-vertical", n_estimators=1, max_depth=2, min_child_samples=5).fit(X, y)
    found = disclosures("federboost-vertical", parties=list(X), n_estimators=1, max_depth=2, min_child_samples=5)
    assert found.learned == model.disclosures_


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"parties": ["bank"]}, "at least"),
        ({"encryption": "rot13"}, "expected one of"),
        ({"depth": 3}, "has no option 'depth'"),
        ({"align": {"psi": "none"}}, "psi"),
    ],
)
def test_what_does_not_go_together_is_refused(words, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        disclosures("secureboost", **words)
    with pytest.raises(ConfigError, match="expected protocol to be one of"):
        disclosures("secretboost")


def test_own_options_are_not_given_twice():
    with pytest.raises(ConfigError, match="estimator with SecureBoost, got 'sums'"):
        disclosures(treaty.SecureBoost(), sums="open")


def test_a_job_file_is_disclosed_with_its_alignment(tmp_path):
    job = write_job(tmp_path, "federboost-vertical")
    found = of_job(job)
    assert found.learned == learned_by(job, job.roles())
    assert "alignment" not in found.messages
    aligned = of_job(replace(job, align=Align(psi="kkrt")))
    steps = {line.message.__name__ for line in aligned.messages["alignment"]}
    assert "OprfValues" in steps
    assert "BlindedPoints" not in steps
    assert any("KKRT" in fact for fact in aligned.learned["a"])
    done = run(str(tmp_path / "job.toml"))
    assert done.exit_code == 0, done.output
    for party, facts in found.learned.items():
        assert all(f"  {party}: {fact}" in done.stdout for fact in facts)
    for title, table in found.messages.items():
        assert f"Messages: {title}" in done.stdout
        assert all(line.message.__name__ in done.stdout for line in table)


def test_the_command_prints_a_protocol_under_options_as_markdown():
    words = "--set encryption=lattice --set max_depth=3 --party bank --party shop --markdown --align"
    done = run("secureboost", *words.split())
    assert done.exit_code == 0, done.output
    options = {"encryption": "lattice", "max_depth": 3}
    expected = disclosures("secureboost", parties=["bank", "shop"], align={}, **options)
    assert done.stdout == expected.markdown() + "\n"
    assert done.stdout.startswith("# What each party learns: secureboost\n\n## bank\n\n- ")
    assert "## Messages: alignment" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| `SplitSides` |")]
    assert row.count("|") == table_of(()).splitlines()[0].count("|")


def test_settings_of_a_job_file_are_refused_beside_it(tmp_path):
    write_job(tmp_path, "federboost-vertical")
    done = run(str(tmp_path / "job.toml"), "--set", "epsilon=1")
    assert isinstance(done.exception, ConfigError)
    assert isinstance(run("secureboost", "--set", "epsilon").exception, ConfigError)


def test_pages_have_the_tables_of_the_package():
    script = runpy.run_path(str(DOCS / "disclosures.py"))
    assert script["outdated"]() == [], "make docs"
    marked = re.findall(r"<!-- messages: ([\w-]+)(?: (\w+))? -->", "".join(p.read_text() for p in DOCS.glob("*.md")))
    own = {name for name, what in marked if not what}
    assert own == {name for named in SYSTEMS.values() for name in named} - {"pooled", "sgd"} | {"alignment", "runs"}
    page = (DOCS / "fedxgb.md").read_text()
    assert script["filled"](page.replace("`KeyRequest`", "`KeyWish`")) == page


def test_a_saved_model_keeps_its_sentences(tmp_path):
    X, y = {"bank": NUMBERS[:, :2], "shop": NUMBERS[:, 2:]}, (NUMBERS.sum(axis=1) > 0).astype(int)
    model = treaty.GBDTClassifier("federboost-vertical", n_estimators=1, max_depth=2).fit(X, y)
    model.save(tmp_path / "trees")
    assert treaty.load(tmp_path / "trees").disclosures_ == model.disclosures_
    assert set(model.disclosures_) == {"bank", "shop"}


def test_of_an_alignment_only_what_applies_is_said(tmp_path):
    job = replace(write_job(tmp_path, "secureboost"), align=Align(on="id"))
    roles = job.roles()

    def about(log=None, psi=None, *seen):
        party = SimpleNamespace(name="a", transcript=Transcript("a"))
        for step in seen:
            party.transcript.record("sent", "b", step, 0, 10)
        of = replace(job, align=replace(job.align, log=log))
        said = str(learned_by(of, roles, None, psi or report._psi_used(roles, party)))
        return [words for words in ("run log", "8,192 ids or more (KKRT)", "by KKRT") if words in said]

    assert about() == ["8,192 ids or more (KKRT)"]  # before the job nobody knows how long the others' lists are
    assert about("runs") == ["run log", "8,192 ids or more (KKRT)"]
    assert about(None, None, "ListSummary", "BlindedPoints") == []
    assert about(None, None, "ListSummary", "OprfOffer") == ["by KKRT"]
