"""Monotone and interaction constraints: the pooled trees in every system that has them, and refusals in the others."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import xgboost

import treaty
from marks import slow
from runs.job_files import train_in_threads
from systems.fedxgboost_smm.test_published import CONSENT
from tables import assert_same_trees, cut, real_table, with_gaps
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.models.trees import forest_of, load_part
from treaty.runs.job_files import load_job
from treaty.systems.vertical import training

OPTIONS = {"n_estimators": 4, "max_depth": 4, "min_child_samples": 3, "max_bin": 16, "n_jobs": 1}
BY_COLUMN = {
    "secureboost": treaty.SecureBoost(allow_exact_sums=True, encryption="lattice"),
    "secureboost-ou": treaty.SecureBoost(insecure_test_key_bits=512, allow_insecure=True, allow_exact_sums=True),
    "secureboost-node": treaty.SecureBoost(allow_exact_sums=True, encryption="lattice", reveal="node"),
    "smm-dealer": treaty.FedXGBoostSMM(backend="dealer", allow_exact_sums=True),
    "smm-paper": treaty.FedXGBoostSMM(version=1, **CONSENT),
    "federboost": treaty.FederBoostVertical(mode="paper", epsilon=math.inf),
}
NAMES = ["mean radius", "mean texture", "mean perimeter", "mean area", "mean smoothness", "mean compactness"]


def codes(seed=0, n_rows=400, missing=0.1):
    """Integer codes, and labels that rise with "a", fall with "b" and wave with all."""
    rng = np.random.default_rng(seed)
    X = pd.DataFrame(rng.integers(0, [12, 7, 16, 5], (n_rows, 4)).astype(float), columns=list("abcd"))
    y = 0.2 * X["a"] - 0.3 * X["b"] + np.sin(1.3 * X["a"]) + np.sin(1.9 * X["b"]) + 0.2 * X["c"] * (X["d"] > 2)
    y = (y + rng.normal(size=n_rows)).to_numpy()
    return X.mask(rng.random(X.shape) < missing), y


def grid(column, n_rows=40, seed=1):
    """Rows that are alike but for one column, which ascends: (rows, steps) of codes."""
    rng = np.random.default_rng(seed)
    X = pd.DataFrame(rng.integers(0, [12, 7, 16, 5], (n_rows, 4)).astype(float), columns=list("abcd"))
    values = np.arange(-1.0, 17.0)
    return pd.concat([X.assign(**{column: value}) for value in values], ignore_index=True), (len(values), n_rows)


def steps(model, column):
    """How predictions change from step to step as a column ascends, all else equal."""
    X, shape = grid(column)
    found = model.predict_proba(X)[:, 1] if hasattr(model, "predict_proba") else model.predict(X)
    return np.diff(found.reshape(shape), axis=0)


def paths(model):
    """Return the columns, by joined number, of each path from a root to a leaf."""
    from treaty.trees.ensemble import join_splits

    parts, found = list(model.parts_.values()), []
    splits = join_splits([part.splits for part in parts], [len(part.schema.names) for part in parts])
    for tree in forest_of(parts).trees:
        above = {0: frozenset()}
        for node in range(len(tree.left)):
            if tree.left[node] < 0:
                found.append(above[node])
                continue
            column = int(splits.feature[splits.base[tree.source[node]] + tree.record[node]])
            above[tree.left[node]] = above[tree.left[node] + 1] = above[node] | {column}
    return found


@pytest.mark.parametrize(
    ("system", "parties"),
    [("secureboost", 3), ("federboost", 2), *(slow(name, 3) for name in [*BY_COLUMN][1:]), slow("secureboost", 5)],
)  # fmt: skip
@pytest.mark.parametrize("asked", ["monotone", "interaction", "both"])
def test_owners_of_columns_grow_the_pooled_trees(system, parties, asked):
    X, y = real_table("binary")
    tables = cut(with_gaps(X[NAMES]), parties)
    names = [f"{party}.{name}" for party, table in tables.items() for name in table.columns]
    options = dict(OPTIONS)
    if asked != "interaction":
        options["monotone_constraints"] = {names[0]: -1, names[1]: 1, names[-1]: -1}
    if asked != "monotone":
        options["interaction_constraints"] = [[names[0], names[2]], [names[2], names[3], names[4]]]
    pooled = treaty.GBDTClassifier(**options).fit(tables, y)
    federated = treaty.GBDTClassifier(BY_COLUMN[system], **options).fit(tables, y)
    assert_same_trees(federated, pooled)
    np.testing.assert_array_equal(federated.predict_proba(tables), pooled.predict_proba(tables))
    free = treaty.GBDTClassifier(**OPTIONS).fit(tables, y)
    assert not np.array_equal(free.predict_proba(tables), pooled.predict_proba(tables))
    if asked != "monotone":
        groups = [{0, 2}, {2, 3, 4}, {1}, {5}]
        assert all(any(path <= group for group in groups) for path in paths(federated))
        assert not all(any(path <= group for group in groups) for path in paths(free))


def test_an_active_party_without_columns_and_passive_ones_without_constraints_grow_the_pooled_trees():
    X, y = real_table("regression")
    tables = {"bank": X.iloc[:, :0], "shop": X.iloc[:, :1], "telco": X.iloc[:, 1:5].assign(same=1.0, none=np.nan)}
    options = {**OPTIONS, "monotone_constraints": {"shop.age": 1, "telco.same": 1, "telco.none": -1}, "max_depth": 3}
    pooled = treaty.GBDTRegressor(**options).fit(tables, y)
    federated = treaty.GBDTRegressor(BY_COLUMN["secureboost"], active="bank", **options).fit(tables, y)
    assert_same_trees(federated, pooled)


@pytest.mark.parametrize("seed", [0, 1])
def test_predictions_move_with_constrained_columns_alone_in_their_direction(seed):
    X, y = codes(seed)
    options = {**OPTIONS, "n_estimators": 20}
    free = treaty.GBDTRegressor(**options).fit(X, y)
    kept = treaty.GBDTRegressor(monotone_constraints={"a": 1, "b": -1}, **options).fit(X, y)
    assert steps(kept, "a").min() >= 0.0 > -0.1 > steps(free, "a").min()
    assert steps(kept, "b").max() <= 0.0 < 0.1 < steps(free, "b").max()
    # which the constraints do not ask of these
    assert steps(kept, "c").min() < 0.0 < steps(kept, "c").max()


def test_directions_go_by_name_by_position_and_by_party():
    X, y = codes()
    options = {**OPTIONS, "interaction_constraints": [["a", "b"], ["c", "d"]]}
    by_name = treaty.GBDTRegressor(monotone_constraints={"a": 1, "b": -1}, **options).fit(X, y)
    by_position = treaty.GBDTRegressor(
        monotone_constraints=np.array([1, -1, 0, 0]), **{**OPTIONS, "interaction_constraints": [(0, 1), (2, 3)]}
    ).fit(X.to_numpy(), y)
    assert_same_trees(by_name, by_position)
    parties = {"bank": ["d", "a"], "shop": ["c", "b"]}
    system = BY_COLUMN["federboost"]
    first, second, third = (
        treaty.GBDTRegressor(system, parties=parties, monotone_constraints=of, **options).fit(X, y)
        for of in ({"a": 1, "b": -1}, {"bank.a": 1, "shop.b": -1}, (1, -1, 0, 0))
    )
    assert_same_trees(first, second)
    assert_same_trees(first, third)
    assert steps(first, "a").min() >= 0.0


def by_row(X, y, participants=("north", "south", "east")):
    who = np.random.default_rng(3).integers(0, len(participants), len(y))
    return {name: (X[who == k], y[who == k]) for k, name in enumerate(participants)}


def test_holders_of_rows_grow_the_pooled_trees():
    X, y = codes()
    y = (y > np.median(y)).astype(int)
    rows = by_row(X, y)
    options = {
        **OPTIONS, "monotone_constraints": {"a": 1, "b": -1}, "interaction_constraints": [["a", "c"], ["b", "d"]]
    }  # fmt: skip
    together = pd.concat([X for X, _ in rows.values()]), np.concatenate([y for _, y in rows.values()])
    pooled = treaty.GBDTClassifier(**options).fit(*together)
    federated = treaty.GBDTClassifier(treaty.FederBoostHorizontal(), **options).fit(rows)
    np.testing.assert_array_equal(federated.predict_proba(X), pooled.predict_proba(X))
    groups = [{0, 2}, {1, 3}]
    assert all(any(path <= group for group in groups) for path in paths(federated))


def test_noise_does_not_break_monotone_constraints():
    X, y = codes()
    y = (y > np.median(y)).astype(int)
    rose = []
    for epsilon in (30.0, 200.0, 1000.0):  # under much noise the column may have no split at all
        system = treaty.FederBoostHorizontal(epsilon_total=epsilon)
        model = treaty.GBDTClassifier(system, monotone_constraints={"a": 1}, **{**OPTIONS, "max_bin": 8})
        found = steps(model.fit(by_row(X, y)), "a")
        assert found.min() >= 0.0
        rose.append(found.max() > 0.0)
    assert any(rose)


@pytest.mark.slow
def test_users_of_fedxgb_grow_trees_within_constraints():
    X, y = codes(n_rows=300)
    y = (y > np.median(y)).astype(int)
    names = [f"user{k}" for k in range(9)]
    options = {**OPTIONS, "n_estimators": 2, "monotone_constraints": (1, -1, 0, 0)}
    options["interaction_constraints"] = [["a", "c"], ["b", "d"]]
    model = treaty.GBDTClassifier(treaty.FedXGB(expose="model"), **options).fit(by_row(X, y, names))
    pooled = treaty.GBDTClassifier(**options).fit(X, y)
    np.testing.assert_allclose(model.predict_proba(X), pooled.predict_proba(X), atol=1e-8)
    groups = [{0, 2}, {1, 3}]
    assert all(any(path <= group for group in groups) for path in paths(model))


class Stop(Exception):
    pass


def test_a_resumed_training_keeps_its_constraints(tmp_path, monkeypatch):
    X, y = real_table("binary", rows=120)
    tables = cut(X[NAMES], 2)
    names = [f"{party}.{name}" for party, table in tables.items() for name in table.columns]
    options = {**OPTIONS, "monotone_constraints": {names[1]: 1, names[3]: -1}}

    def model(**changed):
        return treaty.GBDTClassifier(BY_COLUMN["federboost"], **{**options, **changed})

    class Interrupts:
        def after_iteration(self, model, epoch, evals_log):
            if epoch == 1:
                raise Stop

    with pytest.raises(Stop):
        model(callbacks=[Interrupts()]).fit(tables, y, checkpoint=tmp_path)
    other = {**options["monotone_constraints"], names[1]: -1}
    with pytest.raises(ConfigError, match="cannot resume with other options: monotone_constraints"):
        model(monotone_constraints=other).fit(tables, y, checkpoint=tmp_path)
    resumed = model().fit(tables, y, checkpoint=tmp_path)
    assert_same_trees(resumed, model().fit(tables, y))


def test_models_with_constraints_are_saved_and_exported(tmp_path):
    X, y = codes(missing=0.0)
    options = {**OPTIONS, "monotone_constraints": (1, 0, 0, 0), "interaction_constraints": (("a", "b"), ("c",))}
    model = treaty.GBDTRegressor(**options).fit(X, y)
    model.save(tmp_path / "model")
    loaded = treaty.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict(X), model.predict(X))
    assert_same_trees(loaded.fit(X, y), model)
    exported = model.to_xgboost().predict(xgboost.DMatrix(X))
    np.testing.assert_allclose(exported, model.predict(X), rtol=1e-5)


REFUSED = {
    "sealed": (treaty.SecureBoost(sums="sealed"), {}, 'leave sums="sealed" out and set allow_exact_sums=True'),
    "argmax": (treaty.FedXGBoostSMM(reveal="argmax"), {}, 'reveal="argmax" hides the weights'),
    "ldp": (treaty.FedXGBoostLDP(), {}, "passive parties choose splits themselves"),
    "version 2": (treaty.FedXGBoostSMM(version=2, **CONSENT), {}, "take version=1"),
}


REFUSALS = [(name, "monotone_constraints") for name in REFUSED]
REFUSALS += [(name, "interaction_constraints") for name in ("ldp", "version 2")]


@pytest.mark.parametrize(("name", "option"), REFUSALS)
def test_systems_that_cannot_keep_constraints_say_why(name, option):
    system, options, words = REFUSED[name]
    X, y = real_table("binary")
    tables = cut(X[NAMES], 2)
    given = {"p0.mean radius": 1} if option == "monotone_constraints" else [["p0.mean radius"], ["p1.mean area"]]
    with pytest.raises(ConfigError, match=f"^{option}: ") as raised:
        treaty.GBDTClassifier(system, **{option: given, **options}).fit(tables, y)
    assert words in str(raised.value)
    assert str(raised.value).endswith(f"or leave {option} out")


def test_sums_that_would_be_sealed_are_open_and_need_consent():
    X, y = real_table("binary")
    tables = cut(X[NAMES], 2)
    model = treaty.GBDTClassifier(treaty.SecureBoost(), monotone_constraints={"p0.mean radius": 1}, n_jobs=1)
    with pytest.raises(ConfigError, match="allow_exact_sums"):
        model.fit(tables, y)


WRONG = {
    "unknown": ({"monotone_constraints": {"aa": 1}}, "'aa', and there is no such column; did you mean 'a'"),
    "direction": ({"monotone_constraints": {"a": 2}}, r"expected -1 \(falling\), 0 \(free\) or 1 \(rising\).*got 2"),
    "not whole": ({"monotone_constraints": {"a": 0.5}}, "option monotone_constraints=.*expected `int`, got `float`"),
    "nan": ({"monotone_constraints": {"a": float("nan")}}, "expected `int`, got `float`"),
    "too few": ({"monotone_constraints": [1, 0]}, "expected a direction of each of 4 columns, got 2"),
    "true": ({"monotone_constraints": True}, "True is for job files"),
    "text": ({"monotone_constraints": "rising"}, "option monotone_constraints='rising'"),
    "loss": ({"monotone_constraints": {"a": 1}, "objective": "quantile"}, "takes them from residuals"),
    "empty": ({"interaction_constraints": [["a"], []]}, "got an empty group"),
    "group": ({"interaction_constraints": [["a", "x"]]}, "interaction_constraints names 'x'"),
    "position": ({"interaction_constraints": [[0, 4]]}, "positions of columns from 0 to 3, got 4"),
    "names": ({"interaction_constraints": ["ab", "cd"]}, "option interaction_constraints=.*expected `array`"),
}


@pytest.mark.parametrize("case", WRONG)
def test_constraints_that_make_no_sense_are_refused(case):
    options, words = WRONG[case]
    X, y = codes(n_rows=60)
    with pytest.raises(ConfigError, match=words):
        treaty.GBDTRegressor(n_jobs=1, **options).fit(X, y)


def test_names_between_parties_say_whose_column_is_unknown():
    X, y = codes(n_rows=60)
    tables = {"bank": X[["a", "b"]], "shop": X[["b", "c"]].rename(columns={"c": "a b"})}
    with pytest.raises(ConfigError, match=r"monotone_constraints names 'b'.*did you mean 'bank.b' or 'shop.b'"):
        treaty.GBDTRegressor(BY_COLUMN["federboost"], monotone_constraints={"b": 1}).fit(tables, y)
    with pytest.raises(ConfigError, match=r"interaction_constraints names 'shop.c'"):
        treaty.GBDTRegressor(BY_COLUMN["federboost"], interaction_constraints=[["shop.c"]]).fit(tables, y)


@pytest.mark.parametrize("system", ["pooled", BY_COLUMN["federboost"]])
def test_a_column_of_categories_has_no_direction(system):
    X, y = codes(n_rows=60)
    X = X.assign(b=pd.Categorical(X["b"].map(str)))
    tables = cut(X, 2)
    with pytest.raises((ConfigError, DataError), match=r"column 'p?1?.?b' has categories, which have no order"):
        treaty.GBDTRegressor(system, monotone_constraints={"b": 1}, n_jobs=1).fit(tables, y)


def job(folder, protocol="secureboost", boosting="", bank="", shop="", tables=None, common=""):
    """Write a job file of two parties; return its path."""
    table = tables or {"bank": "bank.csv", "shop": "shop.csv"}
    text = f"""
        name = "credit"
        active = "bank"
        label = "y"
        protocol = "{protocol}"
        task = "regression"
        {common}
        [boosting]
        n_estimators = 2
        min_child_samples = 3
        {boosting}
        [parties.bank]
        table = "{table["bank"]}"
        {bank}
        [parties.shop]
        table = "{table["shop"]}"
        {shop}
    """
    path = folder / f"{len(list(folder.glob('*.toml')))}.toml"
    path.write_text("\n".join(line.strip() for line in text.splitlines()))
    return path


MISPLACED = {
    "names for all": (
        "secureboost", 'monotone_constraints = { "bank.a" = 1 }', "", "set monotone_constraints = true in .boosting."
    ),
    "not announced": ("secureboost", "", "monotone_constraints = { a = 1 }", "parties.shop has monotone_constraints"),
    "by row": (
        "federboost-horizontal", "monotone_constraints = { a = 1 }", "monotone_constraints = { a = 1 }",
        "name them in .boosting. monotone_constraints alone",
    ),
    "true by row": ("federboost-horizontal", "monotone_constraints = true", "", "alone - in "),
    "direction": (
        "secureboost", "monotone_constraints = true", "monotone_constraints = { a = 3 }", "parties.shop.*monotone"
    ),
    "sealed": ("secureboost", 'monotone_constraints = true\n[secureboost]\nsums = "sealed"', "", "needs max_depth=1"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISPLACED)
def test_job_files_with_constraints_in_the_wrong_place_say_where_they_belong(tmp_path, case):
    protocol, boosting, shop, words = MISPLACED[case]
    with pytest.raises(ConfigError, match=words):
        load_job(job(tmp_path, protocol, boosting, shop=shop))


def test_parties_state_directions_of_their_own_columns_in_their_own_files(tmp_path, monkeypatch):
    X, y = codes(n_rows=200, missing=0.0)
    X[["a"]].assign(y=y).to_csv(tmp_path / "bank.csv", index=False)
    X[["b", "c", "d"]].to_csv(tmp_path / "shop.csv", index=False)
    boosting = 'monotone_constraints = true\ninteraction_constraints = [["bank.a", "shop.b"], ["shop.c", "shop.d"]]'
    more = {"boosting": f"{boosting}\n[federboost-vertical]\nmode = 'paper'\nepsilon = inf"}
    jobs = {
        "bank": load_job(job(tmp_path, "federboost-vertical", bank="monotone_constraints = { a = 1 }", **more)),
        "shop": load_job(job(tmp_path, "federboost-vertical", shop="monotone_constraints = { b = -1 }", **more)),
    }
    assert train_in_threads(monkeypatch, jobs) == {}
    parts = {name: load_part(tmp_path / "model" / f"{name}.part") for name in jobs}
    pooled = treaty.GBDTRegressor(
        n_estimators=2, min_child_samples=3, max_bin=32, n_jobs=1, monotone_constraints={"a": 1, "b": -1},
        interaction_constraints=[["a", "b"], ["c", "d"]],
    ).fit(X, y)  # fmt: skip
    assert_same_trees(SimpleNamespace(parts_=parts), pooled)
    reports = {name: (tmp_path / "model" / f"{name}.report.json").read_text() for name in jobs}
    assert json.loads(reports["shop"])["options"]["monotone_constraints"] == {"b": -1}
    assert '"a"' not in reports["shop"]


def test_an_unknown_column_of_a_party_is_its_own_error(tmp_path, monkeypatch):
    X, y = codes(n_rows=80, missing=0.0)
    X[["a"]].assign(y=y).to_csv(tmp_path / "bank.csv", index=False)
    X[["b", "c", "d"]].to_csv(tmp_path / "shop.csv", index=False)
    more = {"boosting": "monotone_constraints = true\n[federboost-vertical]\nmode = 'paper'\nepsilon = inf"}
    path = job(tmp_path, "federboost-vertical", shop="monotone_constraints = { bb = -1 }", **more)
    said = train_in_threads(monkeypatch, dict.fromkeys(["bank", "shop"], load_job(path)))
    assert "shop: monotone_constraints names 'bb', and there is no such column; did you mean 'b'" in said["shop"]
    assert "bb" not in said["bank"]


GARBAGE = {
    "a direction beyond": (np.full(2, 5, np.int8), np.zeros((0, 2), np.bool_)),
    "fewer columns": (np.ones(1, np.int8), np.zeros((0, 1), np.bool_)),
    "more groups": (np.ones(2, np.int8), np.zeros((3, 2), np.bool_)),
    "other numbers": (np.ones(2), np.zeros((0, 2), np.bool_)),
}


@pytest.mark.parametrize("sent", GARBAGE)
def test_a_party_that_states_garbage_is_named(monkeypatch, sent):
    X, y = codes(n_rows=80)
    monkeypatch.setattr(training, "own_constraints", lambda common, given, schema, party, owners: (
        GARBAGE[sent] if party == "shop" else (np.zeros(2, np.int8), np.zeros((0, 2), np.bool_))
    ))  # fmt: skip
    tables = {"bank": X[["a", "b"]], "shop": X[["c", "d"]]}
    with pytest.raises(PeerProtocolError, match=r"ColumnConstraints.*from shop"):
        treaty.GBDTRegressor(BY_COLUMN["federboost"], monotone_constraints={"c": 1}, n_jobs=1).fit(tables, y)


@pytest.mark.slow
def test_processes_give_the_pooled_trees():
    X, y = codes()
    tables = {"bank": X[["a", "b"]], "shop": X[["c", "d"]]}
    options = {**OPTIONS, "monotone_constraints": {"bank.a": 1, "shop.d": 1}, "interaction_constraints": [["a", "c"]]}
    model = treaty.GBDTRegressor(BY_COLUMN["secureboost"], transport="tls", **options).fit(tables, y)
    assert_same_trees(model, treaty.GBDTRegressor(**options).fit(tables, y))
