"""The attack by nested sides on sealed trainings, beside what the columns' owner counts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from marks import slow
from systems.vertical.playing import play_training, role_input, tables_and_labels
from tables import real_table
from treaty import GBDTClassifier, SecureBoost
from treaty.attacks.auditing import audit
from treaty.attacks.nodes import grouped, known_share
from treaty.data.binning import fit_bins
from treaty.errors import ConfigError, TreatyError
from treaty.models.checkpoints import ledger_folder
from treaty.systems.secureboost import secureboost
from treaty.systems.vertical.exact_sums import RevealedSides
from treaty.systems.vertical.messages import TreeEnd

REPOSITORY = Path(__file__).parents[2]
JOB = {"n_estimators": 12, "max_depth": 3, "max_bin": 32, "learning_rate": 0.3, "n_jobs": 1}


def clients(rows: int = 3000) -> tuple[pd.DataFrame, np.ndarray]:
    """Return rows of Default of Credit Card Clients, the label last; skip where the file is not here."""
    for folder in (os.environ.get("TREATY_DATA"), REPOSITORY.parent / "shared" / "data"):
        file = None if folder is None else Path(folder) / "credit2.parquet"
        if file is not None and file.exists():
            table = pd.read_parquet(file).sample(rows, random_state=0, ignore_index=True)
            return table.drop(columns="ID", errors="ignore").iloc[:, :-1], table.iloc[:, -1].to_numpy()
    pytest.skip("real data set credit2.parquet is not here; set TREATY_DATA to the folder that has it")


def played(system: SecureBoost, X: pd.DataFrame, y: np.ndarray) -> tuple[float, Any]:
    half = X.shape[1] // 2
    done = audit(GBDTClassifier(system, **JOB), {"p0": X.iloc[:, :half], "p1": X.iloc[:, half:]}, y)
    (finding,) = [one for one in done.findings if one.attack == "nested sides"]
    assert (finding.party, finding.target) == ("p0", "bins of p1")
    return finding.score, done.model


@pytest.mark.parametrize("reveal", [None, slow("column")])
def test_the_owner_counts_what_the_attack_finds_under_sealed_sums(reveal: Any) -> None:
    score, model = played(SecureBoost(sums="sealed", reveal=reveal), *clients())
    count = model.parts_["p1"].sides["p1"]
    assert score > 0.0
    assert abs(count - score) <= 0.1 * score
    assert model.parts_["p0"].sides == model.parts_["p1"].sides
    assert f"{count:.2g} of p1's" in " ".join(model.disclosures_["p0"])


def test_sides_of_whole_columns_tell_more() -> None:
    open_sums = SecureBoost(encryption="lattice", allow_exact_sums=True)
    (of_nodes, _), (of_columns, model) = (
        played(system, *real_table("binary", rows=600)) for system in (SecureBoost(sums="sealed"), open_sums)
    )
    assert of_columns > 1.5 * of_nodes
    assert abs(model.parts_["p1"].sides["p1"] - of_columns) <= 0.1 * of_columns


def test_nested_cuts_are_put_together_and_crossing_ones_apart() -> None:
    codes = np.random.default_rng(0).integers(0, 8, (1000, 2)).astype(np.uint8)
    rows = np.arange(1000, dtype=np.int32)
    told = [(rows, codes[:, column] < below) for below in (2, 5, 3) for column in (0, 1)]
    assert grouped(told, 1000).tolist() == [0, 1, 0, 1, 0, 1]
    assert known_share(told, codes, np.array([8, 8])) == np.isin(codes, [2]).mean()


def test_an_owner_that_reaches_its_limit_ends_the_job() -> None:
    tables, y = tables_and_labels(parties=2)
    options = {
        "insecure_test_key_bits": None, "allow_insecure": False, "sums": "sealed", "reveal": "column", "max_bin": 4,
        "n_estimators": 30, "max_depth": 3, "min_child_samples": 5,
    }  # fmt: skip

    def passive(party: Any) -> Any:
        return secureboost.passive(role_input(party, tables, y, options, most_recoverable=0.05))

    with pytest.raises(TreatyError, match=r"expected at most 5\.0% \(most_recoverable\): train fewer or shallower"):
        play_training(tables, y, replace={"p1": passive}, **options)


def test_a_tree_that_is_broken_off_is_counted(tmp_path: Path) -> None:
    """An active party could else have most of a tree's sides told, end the attempt, and have a new one begun."""
    tables, y = tables_and_labels(parties=2)
    options = {
        "insecure_test_key_bits": None, "allow_insecure": False, "sums": "sealed", "max_bin": 6, "n_estimators": 1,
        "max_depth": 3, "min_child_samples": 5,
    }  # fmt: skip

    def passive(store: str) -> Any:
        return lambda party: secureboost.passive(role_input(party, tables, y, options, store=tmp_path / store))

    def active(party: Any) -> Any:
        send = party.send

        def until_the_end(to: str, sent: Any) -> None:
            if isinstance(sent, TreeEnd):
                raise ConfigError("it has seen enough")
            send(to, sent)

        party.send = until_the_end
        return secureboost.active(role_input(party, tables, y, options))

    with pytest.raises(ConfigError, match="seen enough"):
        play_training(tables, y, replace={"p0": active, "p1": passive("broken off")}, **options)
    play_training(tables, y, replace={"p1": passive("whole")}, **options)
    bins = fit_bins(tables["p1"], 6, 1)
    shares = [
        RevealedSides(ledger_folder(tmp_path / store, "p1", "sides"), bins, bins.transform(tables["p1"], 1)).share
        for store in ("whole", "broken off")
    ]
    assert 0.0 < shares[0] < 2 * shares[1] < 0.1
