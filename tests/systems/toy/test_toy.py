"""A system in a folder of its own, outside the package, is trained like those inside: nothing else knows of it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

import treaty
from marks import all_but_first_slow
from runs.job_files import TREATY, finish, one_line, start
from systems.toy.system import SYSTEM, Toy
from tables import assert_same_trees, cut, real_table, with_categories, with_gaps
from treaty.machine import process
from treaty.machine.process import trust
from treaty.models.trees import load_part
from treaty.node.identity import make_keys
from treaty.runs.job_files import load_job
from treaty.runs.processes import free_ports
from treaty.systems.observers import Observer, observing

TESTS = Path(__file__).parents[2]
OPTIONS = {"n_estimators": 3, "min_child_samples": 5, "max_bin": 32, "n_jobs": 1}


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Let parties' processes import this folder, as they would an installed package."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])))


@pytest.fixture
def split():
    X, y = real_table("binary", rows=200)
    return cut(with_gaps(with_categories(X)), 3), y


class Diary(Observer):
    """What happens at every party, in order; it touches no role."""

    def __init__(self):
        self.lines = []

    def of_party(self, inputs):
        diary = self

        class Page(Observer):
            def started(self, given):
                assert given is inputs
                diary.lines.append((inputs.party.name, "started"))

            def message_sent(self, peer, message):
                diary.lines.append((inputs.party.name, f"{type(message).__name__} to {peer}"))

            def message_received(self, peer, message):
                diary.lines.append((inputs.party.name, f"{type(message).__name__} from {peer}"))

            def round_finished(self, rounds, state):
                diary.lines.append((inputs.party.name, f"{rounds} rounds"))

            def finished(self):
                diary.lines.append((inputs.party.name, "finished"))

        return [Page()]

    def of(self, name):
        return [line for party, line in self.lines if party == name and "Terms" not in line and "Verdict" not in line]


def test_an_observer_watches_every_role_without_touching_one(split):
    tables, y = split
    diary, two = Diary(), {"p0": tables["p0"], "p1": tables["p1"]}
    with observing(diary.of_party):
        model = treaty.GBDTClassifier(Toy(), **OPTIONS).fit(two, y)
    assert diary.of("p0") == [
        "started", "ToyBins from p1", "1 rounds", "2 rounds", "3 rounds", "ToySplits to p1", "finished",
    ]  # fmt: skip
    assert diary.of("p1") == ["started", "ToyBins to p0", "ToySplits from p0", "3 rounds", "finished"]
    before = len(diary.lines)
    assert_same_trees(treaty.GBDTClassifier(Toy(), **OPTIONS).fit(two, y), model)
    assert len(diary.lines) == before, "no longer attached"


def test_an_observers_error_ends_the_training_everywhere(split):
    tables, y = split

    class Full(Observer):
        closed = 0

        def message_received(self, peer, message):
            if type(message).__name__ == "ToyBins":
                raise OSError("disk full")

        def finished(self):
            Full.closed += 1

    with observing(lambda inputs: [Full()]), pytest.raises(OSError, match="disk full"):
        treaty.GBDTClassifier(Toy(), **OPTIONS).fit(tables, y)
    assert Full.closed == len(tables)


@pytest.mark.parametrize("transport", all_but_first_slow("memory", "tls"))
@pytest.mark.parametrize("protocol", [Toy(), Toy.system], ids=["options", "name"])
def test_an_estimator_trains_and_predicts_with_it(split, protocol, transport):
    tables, y = split
    if transport == "tls":
        tables = {"p0": tables["p0"], "p1": tables["p1"]}
    model = treaty.GBDTClassifier(protocol, transport=transport, **OPTIONS).fit(tables, y)
    pooled = treaty.GBDTClassifier(**OPTIONS).fit(tables, y)
    assert_same_trees(model, pooled)
    np.testing.assert_array_equal(model.predict_proba(tables), pooled.predict_proba(tables))
    assert model.disclosures_["p0"][:2] == [
        "the order of all rows in every column",
        f"every row's bin of every column (ToyBins from {' and '.join([*tables][1:])})",
    ]
    assert model.communication_["p1 -> p0"]["by_type"]["ToyBins"] > len(y)


def test_its_options_are_parameters_of_the_estimator(split):
    tables, y = split
    model = treaty.GBDTClassifier(Toy(most_columns=1), **OPTIONS)
    assert model.get_params()["protocol__most_columns"] == 1
    one = clone(model).fit(tables, y)
    assert clone(model).set_params(protocol__most_columns=None).protocol == Toy()
    assert (
        one.communication_["p1 -> p0"]["bytes"]
        < model.set_params(protocol__most_columns=4).fit(tables, y).communication_["p1 -> p0"]["bytes"]
    )
    with pytest.raises(treaty.ConfigError, match="Toy has no option 'encryption'; encryption is an option of Secure"):
        Toy(encryption="ou")
    with pytest.raises(treaty.ConfigError, match="most_columns=0"):
        treaty.GBDTClassifier(Toy(most_columns=0), **OPTIONS).fit(tables, y)
    with pytest.raises(treaty.ConfigError, match="the toy has no goss"):
        treaty.GBDTClassifier(Toy(), goss=True, **OPTIONS).fit(tables, y)


def test_a_grid_search_varies_its_options():
    X, y = real_table("binary", rows=120)

    class Halves(treaty.GBDTClassifier):
        """A search cuts one table into rows; the parties get their columns of them."""

        def fit(self, X, y):
            return super().fit(cut(X, 2), y)

        def predict(self, X):
            return super().predict(cut(X, 2))

    search = GridSearchCV(Halves(Toy(), **OPTIONS), {"protocol__most_columns": [1, None]}, cv=2, error_score="raise")
    assert search.fit(X, y).best_score_ > 0.85


def write_job(folder: Path, tables: dict, y: np.ndarray, *, alone: bool = False) -> Path:
    lines = [
        'name = "test"',
        f'protocol = "{Toy.system}"',
        'active = "p0"',
        'label = "y"',
        "timeout = 60",
        "n_jobs = 1",
    ]
    for (name, table), port in zip(tables.items(), free_ports(len(tables)), strict=True):
        (table.assign(y=y) if name == "p0" else table).to_csv(folder / f"{name}.csv", index=False)
        lines += [f"[parties.{name}]", f'table = "{name}.csv"', f'predict_table = "{name}.csv"']
        if alone:
            make_keys(folder, name)
            lines += [f'address = "127.0.0.1:{port}"', f'certificate = "{name}.cert.pem"', f'key = "{name}.key.pem"']
    lines += ["[toy]", "most_columns = 2", "[boosting]", "n_estimators = 3", "min_child_samples = 5"]
    lines += ["learning_rate = 0.3", "max_depth = 3"]
    (folder / "job.toml").write_text("\n".join(lines))
    return folder / "job.toml"


@pytest.mark.slow
def test_a_job_file_names_its_record_and_parties_train_apart(tmp_path, split, monkeypatch):
    tables, y = split
    tables = {name: table.select_dtypes("number") for name, table in tables.items()}
    path = write_job(tmp_path, tables, y, alone=True)
    with monkeypatch.context() as patched:
        patched.setattr(process, "_TRUSTED", set())
        with pytest.raises(treaty.ConfigError, match=r"the system 'systems.toy.system:SYSTEM' is code"):
            load_job(path)
    trust([Toy.system])
    assert load_job(path).system is SYSTEM
    ended = finish({name: start(path, name, more=["--trust", Toy.system]) for name in tables}, 60)
    assert {name: code for name, (code, _) in ended.items()} == dict.fromkeys(tables, 0), ended
    pooled = treaty.GBDTClassifier(learning_rate=0.3, max_depth=3, **OPTIONS)
    pooled.fit({name: table if name == "p0" else table.iloc[:, :2] for name, table in tables.items()}, y)
    parts = {name: load_part(tmp_path / "model" / f"{name}.part") for name in tables}
    assert [t.value.tolist() for t in parts["p0"].forest.trees] == [
        t.value.tolist() for t in pooled.parts_["pooled"].forest.trees
    ]
    subprocess.run([*TREATY, "predict", str(path), "--trust", Toy.system], check=True, capture_output=True)
    predicted = pd.read_csv(tmp_path / "model" / "predictions.csv")
    shown = {name: table if name == "p0" else table.iloc[:, :2] for name, table in tables.items()}
    np.testing.assert_allclose(predicted["probability_1"], pooled.predict_proba(shown)[:, 1], rtol=1e-12)


@pytest.mark.slow
def test_a_wrong_option_in_its_table_is_one_line(tmp_path, split):
    path = write_job(tmp_path, *split)
    path.write_text(path.read_text().replace("most_columns", "n_estimators"))
    done = subprocess.run(
        [*TREATY, "train", str(path), "--trust", Toy.system], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "[toy] has no option 'n_estimators'; it belongs in [boosting]" in one_line(done.stderr)


@pytest.mark.parametrize(
    "system",
    [
        treaty.SecureBoost(encryption="lattice", allow_exact_sums=True),
        treaty.FedXGBoostLDP(),
        treaty.FederBoostVertical(),
    ],
    ids=lambda system: system.system,
)
def test_every_party_reports_its_rounds_from_none_to_all(split, system):
    tables, y = split
    seen: dict[str, list[int]] = {}

    class Rounds(Observer):
        def __init__(self, inputs):
            self._rounds = seen.setdefault(inputs.party.name, [])

        def round_finished(self, rounds, state):
            self._rounds.append(rounds)

    with observing(lambda inputs: [Rounds(inputs)]):
        treaty.GBDTClassifier(system, **OPTIONS).fit(tables, y)
    assert seen.keys() == tables.keys()
    for rounds in seen.values():
        assert (rounds[0], rounds[-1]) == (0, OPTIONS["n_estimators"])
        assert rounds == sorted(rounds)
