"""`treaty scorecard`: print, sign, join and refuse cards, and write reasons."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import treaty
from treaty.cli.main import app
from treaty.errors import ConfigError, DataError
from treaty.messaging.certificates import make_identity


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with both parts of a card, a table, and each party's keys."""
    folder = tmp_path_factory.mktemp("card")
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"customer": range(800), "age": rng.integers(18, 80, 800), "late": rng.poisson(1.0, 800)})
    y = (rng.random(800) < 1 / (1 + np.exp(2 - table.late + 0.02 * (table.age - 40)))).astype(int)
    tables = {"bank": table[["age"]], "bureau": table[["late"]]}
    treaty.Scorecard("quasi-newton").fit(tables, y).save(folder / "model")
    table.to_csv(folder / "rows.csv", index=False)
    for name in tables:
        made = make_identity(name)
        (folder / f"{name}.cert.pem").write_bytes(made.certificate)
        (folder / f"{name}.key.pem").write_bytes(made.key)
        (folder / f"{name}.key.pem").chmod(0o600)
    return folder


def call(folder, monkeypatch, *given):
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(app, ["scorecard", *given])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_a_party_prints_the_points_of_its_own_columns(folder, monkeypatch):
    text = call(folder, monkeypatch, "model/bureau.part")
    assert "late" in text
    assert "age" not in text
    assert "basepoints" not in text
    assert "basepoints" in call(folder, monkeypatch, "model/bank.part")


def test_a_signed_part_joins_a_partners_card(folder, monkeypatch):
    call(folder, monkeypatch, "model/bureau.part", "--sign", ".", "--edition", "3", "--output", "bureau.json")
    joined = "--partner", "bureau.json", "--certificate", "bureau.cert.pem"
    call(folder, monkeypatch, "model/bank.part", *joined, "--output", "card.json")
    card = json.loads((folder / "card.json").read_text())["card"]
    assert list(card) == ["basepoints", "bank.age", "bureau.late"]
    with pytest.raises(ConfigError, match="not signed, as it is here, by the owner"):
        call(folder, monkeypatch, "model/bank.part", "--partner", "bureau.json", "--certificate", "bank.cert.pem")
    with pytest.raises(ConfigError, match="a --certificate for each --partner"):
        call(folder, monkeypatch, "model/bank.part", "--partner", "bureau.json")
    with pytest.raises(ConfigError, match="each party's card of one model"):
        call(folder, monkeypatch, "model/bureau.part", *joined, "--output", "twice.json")


def test_an_unsigned_card_and_missing_files_are_refused(folder, monkeypatch):
    call(folder, monkeypatch, "model/bureau.part", "--output", "unsigned.json")
    with pytest.raises(ConfigError, match="not signed"):
        call(folder, monkeypatch, "model/bank.part", "--partner", "unsigned.json", "--certificate", "bureau.cert.pem")
    with pytest.raises(ConfigError, match="cannot read"):
        call(folder, monkeypatch, "model/bank.part", "--partner", "none.json", "--certificate", "bureau.cert.pem")
    with pytest.raises(ConfigError, match="cannot read"):
        call(folder, monkeypatch, "model/bank.part", "--partner", "unsigned.json", "--certificate", "none.pem")


def test_reasons_are_named_by_id(folder, monkeypatch):
    call(folder, monkeypatch, "model/bureau.part", "--rows", "rows.csv", "--id", "customer", "--reasons", "why.csv")
    found = pd.read_csv(folder / "why.csv")
    assert list(found) == ["customer", "reason_1", "lost_1"]
    table = pd.read_csv(folder / "rows.csv")
    late = found.merge(table, on="customer").groupby("late")["lost_1"].max()
    assert late.is_monotonic_increasing
    assert set(found["reason_1"].dropna()) == {"late"}
    (folder / "other.csv").write_text("customer,age\n1,30\n")
    with pytest.raises(DataError, match="late"):
        call(folder, monkeypatch, "model/bureau.part", "--rows", "other.csv")


def test_another_model_is_no_card(folder, monkeypatch):
    rng = np.random.default_rng(0)
    treaty.LogisticRegression().fit(rng.normal(size=(100, 2)), np.arange(100) % 2).save(folder / "other")
    with pytest.raises(ConfigError, match="expected a scorecard, got another linear model"):
        call(folder, monkeypatch, "other/pooled.part")
