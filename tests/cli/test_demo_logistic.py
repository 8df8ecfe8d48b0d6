"""``treaty demo --model logistic``."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from marks import all_but_first_slow
from treaty.cli import demos
from treaty.cli.main import app
from treaty.errors import ConfigError

DEMO = ["demo", "--model", "logistic"]


def played(*options: str) -> str:
    done = CliRunner().invoke(app, [*DEMO, *options], catch_exceptions=False, env={"COLUMNS": "160"})
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("protocol", all_but_first_slow("quasi-newton", "sgd"))
def test_parties_fit_what_the_pooled_table_gives(protocol):
    shown = played("--protocol", protocol, "--transport", "memory", "--split", "mean radius,mean area/mean texture")
    (apart,) = re.findall(r"weights within (\S+)\)", shown)
    assert float(apart) < 1e-5  # rows come in another order each time; 2^-32 grew to 2e-7 in the worst of 14 trainings
    of = {line.split(",")[1].split()[0]: line.split()[-2] for line in shown.splitlines() if line.startswith("Treaty, ")}
    assert len(of) == 2, shown
    assert len(set(of.values())) == 1
    assert float(next(iter(of.values()))) > 0.85  # rows come in another order each time: 0.897 to 0.958 in six runs
    for words in ("clinic", "laboratory -> coordinator", "What each party learned", "scikit-learn's", "epochs"):
        assert words in shown


@pytest.mark.slow
def test_pooled_alone_needs_no_other_party():
    shown = played("--protocol", "pooled")
    assert "weights within" not in shown
    assert "everything: all columns and labels are in one place" in shown


def test_what_it_cannot_fit_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="one of pooled, quasi-newton, sgd, got 'secureboost': leave --model out"):
        played("--protocol", "secureboost")
    with pytest.raises(ConfigError, match=r"one of pooled, secureboost, .*, got 'sgd': add --model logistic"):
        CliRunner().invoke(app, ["demo", "--protocol", "sgd"], catch_exceptions=False)
    (tmp_path / "wine.csv").write_text("a,b,kind\n" + "\n".join(f"{k},{k % 7},{k % 3}" for k in range(30)) + "\n")
    with pytest.raises(ConfigError, match="two classes, got 3"):
        played("--protocol", "pooled", "--data", str(tmp_path / "wine.csv"), "--label", "kind")


@pytest.mark.parametrize("model", ["logistic", "trees"])
def test_a_cipher_that_there_is_not_is_refused_before_any_data_is_read(model, monkeypatch):
    monkeypatch.setattr(demos, "load_data", lambda *_: pytest.fail("data are read"))
    with pytest.raises(ConfigError, match="option encryption='foo'"):
        CliRunner().invoke(app, ["demo", "--model", model, "--encryption", "foo"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--model logistic --trees 5", "^--model logistic has no trees: leave --trees out$"),
        ("--protocol pooled --transport tls", "^protocol 'pooled' sends nothing: leave --transport out$"),
        ("--model logistic --protocol pooled --transport memory", "leave --transport out"),
        ("--split a/b --parties 2", "^--split says how many parties there are: leave --parties out$"),
        ("--protocol federboost-horizontal --split a/b", "splits rows: use --parties in place of --split$"),
        ("--protocol federboost-vertical --encryption ou", "has no cipher to choose: leave --encryption out$"),
        ("--protocol fedxgb --encryption ou", "^protocol 'fedxgb' has no cipher to choose: leave --encryption out$"),
        ("--model logistic --protocol pooled --encryption ou", "has no cipher to choose: leave --encryption out$"),
        ("--protocol fedxgboost-smm --open", "^protocol 'fedxgboost-smm' has no sealed sums: leave --open out$"),
        ("--encryption paillier", "^sums under paillier are open: add --open$"),
    ],
)
def test_an_option_that_would_not_be_used_is_refused(options, words, monkeypatch):
    monkeypatch.setattr(demos, "load_data", lambda *_: pytest.fail("data are read"))
    with pytest.raises(ConfigError, match=words):
        CliRunner().invoke(app, ["demo", *options.split()], catch_exceptions=False)


@pytest.mark.slow
def test_as_many_parties_as_there_are_names_have_rows_enough():
    shown = played("--protocol", "sgd", "--parties", "10", "--transport", "memory")
    assert "300 rows to train on, 49 held back" in shown


def test_too_few_rows_for_the_columns_are_refused(tmp_path):
    rows = "\n".join(f"{k % 5},{k % 7},{k % 3},{k % 2}" for k in range(100))
    (tmp_path / "small.csv").write_text(f"a,b,c,kind\n{rows}\n")
    with pytest.raises(ConfigError, match=r"expected 100 rows that all hold.*fewer --parties"):
        played("--data", str(tmp_path / "small.csv"), "--label", "kind", "--transport", "memory")
