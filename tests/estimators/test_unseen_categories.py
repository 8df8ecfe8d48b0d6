"""Categories that training did not have are warned of at prediction, in every system, of the columns of their owner."""

from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from flat import flat
from tables import cut, real_table
from treaty.estimators.linear import LogisticRegression
from treaty.estimators.trees import GBDTClassifier
from treaty.runs.job import Job, Member
from treaty.runs.table_files import read_rows

TREES = {"n_estimators": 1, "max_depth": 2, "n_jobs": 1}
BY_COLUMN: dict[str, dict[str, Any]] = {
    "secureboost": {"insecure_test_key_bits": 512, "allow_insecure": True, "allow_exact_sums": True} | TREES,
    "fedxgboost-smm": {"backend": "dealer", "allow_exact_sums": True} | TREES,
    "fedxgboost-ldp": {"mechanism": "label_rr", "epsilon": 50.0} | TREES,
    "federboost-vertical": {"epsilon": 50.0} | TREES,
    "quasi-newton": {"max_iter": 2, "n_jobs": 1},
}
BY_ROW: dict[str, dict[str, Any]] = {
    "pooled": TREES,
    "federboost-horizontal": TREES,
    "fedxgb": {"expose": "model", "max_bin": 8} | TREES,
}


def with_towns() -> tuple[pd.DataFrame, np.ndarray]:
    """Return a real table with a column of towns."""
    X, y = real_table("binary")
    return X.assign(town=pd.Categorical(np.where(X["mean radius"] > 14, "Rome", "Oslo"))), y


def elsewhere(X: pd.DataFrame) -> pd.DataFrame:
    """Move the people of six rows to towns that training does not know."""
    town = X["town"].astype(object)
    town.iloc[:6] = ["Bergen", "Bergen", "Malmö", "Turku", "Vaasa", "Vaasa"]
    return X.assign(town=pd.Categorical(town))


SAID = (
    r"^{}: column 'town': 6 of 240 rows \(2\.5%\) have categories that training did not have, 'Bergen', 'Malmö', "
    r"'Turku' and 1 more, which count as one unknown category$"
)


def check_warned(model: Any, rows: Any, of_others: Any, party: str) -> None:
    """Compare what prediction says of rows as in training, of which nothing is warned, and of those of others."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(model.predict(rows)) == 240
    with pytest.warns(UserWarning, match=SAID.format(party)) as told:
        assert len(model.predict(of_others)) == 240
    assert len(told) == 1


@pytest.mark.parametrize("system", BY_COLUMN)
def test_owners_of_columns_warn_of_unseen_categories(system: str) -> None:
    X, y = with_towns()
    parties = cut(X[["mean radius", "mean texture", "mean area", "town"]], 2)
    kind = LogisticRegression if system == "quasi-newton" else GBDTClassifier
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = flat(kind, system, **BY_COLUMN[system]).fit(parties, y)
    check_warned(model, parties, {**parties, "p1": elsewhere(parties["p1"])}, "p1")


@pytest.mark.parametrize("system", BY_ROW)
def test_who_has_the_whole_model_warns_of_unseen_categories(system: str) -> None:
    X, y = with_towns()
    model = flat(GBDTClassifier, system, **BY_ROW[system])
    shares = {f"p{k}": (X.iloc[k::9], y[k::9]) for k in range(9)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X, y) if system == "pooled" else model.fit(shares)
    check_warned(model, X, elsewhere(X), "the table")


def test_many_unseen_categories_are_asked_how_they_are_written() -> None:
    X, y = with_towns()
    model = GBDTClassifier("pooled", n_estimators=1).fit(X, y)
    lower = X.assign(town=X["town"].str.lower().astype("category"))
    with pytest.warns(UserWarning, match=r"240 of 240 rows \(100\.0%\) .* are they written as in training"):
        model.predict(lower)


def test_jobs_log_unseen_categories_at_their_owner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    X, y = with_towns()
    X.assign(y=y).to_csv(tmp_path / "t.csv", index=False)
    elsewhere(X).to_csv(tmp_path / "new.csv", index=False)
    member = Member(table=str(tmp_path / "t.csv"))
    job = Job(name="t", active="p1", label="y", parties={"p1": member}, protocol="federboost-horizontal")
    schema = read_rows(job.table_rules("p1"), str(member.table)).features.schema
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    read_rows(job.table_rules("p1"), str(tmp_path / "new.csv"), schema)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert re.match(SAID.format("p1"), record.getMessage())
