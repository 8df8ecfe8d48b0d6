"""What trainings are expected to send, beside what they send."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

import treaty
from systems.alignment.playing import run as run_alignment
from treaty.data.binning import fit_bins
from treaty.data.table import to_table
from treaty.errors import ConfigError
from treaty.messaging.party import Party
from treaty.runs.threads import traffic_of
from treaty.systems import find_system
from treaty.systems.alignment.leakage import add_alignment
from treaty.systems.expected import Expected, Shape, slowness
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Roles, roles_of
from treaty.systems.vertical import hidden_cost
from treaty.systems.vertical.cipher_choice import Link, measure

FACTOR, SMALL = 1.3, 40_000
"""Of bytes expected and sent, by pair of parties; pairs that send less than so many bytes are left out."""
TREES = {"n_estimators": 4, "n_jobs": 2}
TEST_KEY = {"insecure_test_key_bits": 512, "allow_insecure": True}
LONGER_KEY = {"insecure_test_key_bits": 1024, "allow_insecure": True}
OPEN = {"allow_exact_sums": True}


def drawn(rows: int, columns: int, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    y = (x[:, 0] + x[:, columns // 2] * x[:, 1] + rng.standard_normal(rows) > 0).astype(int)
    return pd.DataFrame(x, columns=[f"c{k}" for k in range(columns)]), y


def by_column(kind: Any, rows: int, columns: int, parties: int, **common: Any) -> tuple[dict, dict]:
    """Train; return bytes expected and sent, by pair."""
    x, y = drawn(rows, columns * parties)
    tables = {f"p{k}": x.iloc[:, k * columns : (k + 1) * columns] for k in range(parties)}
    regression = kind.system in ("quasi-newton", "sgd")
    estimator = treaty.LogisticRegression if regression else treaty.GBDTClassifier
    model = estimator(kind, **common).fit(tables, y)
    return expected_of(kind, {name: to_table(table, party=name) for name, table in tables.items()}, rows, common), sent(
        model
    )


def by_row(kind: Any, rows: int, columns: int, parties: int, **common: Any) -> tuple[dict, dict]:
    owners = {f"p{k}": drawn(rows, columns, seed=k) for k in range(parties)}
    model = treaty.GBDTClassifier(kind, **common).fit(owners)
    tables = {name: to_table(x, party=name) for name, (x, _) in owners.items()}
    return expected_of(kind, tables, rows, common), sent(model)


def sent(model: Any) -> dict[tuple[str, ...], float]:
    return {tuple(pair.split(" -> ")): total["bytes"] for pair, total in model.communication_.items()}


def expected_of(kind: Any, tables: dict, rows: int, common: dict[str, Any]) -> dict[tuple[str, str], float]:
    system = find_system(kind.system)
    given = system.common(**{name: value for name, value in common.items() if name != "n_jobs"})
    own = kind.settled(given)
    given = given.checked(own)
    columns = {name: len(table.schema.names) for name, table in tables.items()}
    slots = columns
    if isinstance(given, BoostingOptions):
        slots = {name: int(fit_bins(table, given.most_bins, 1).offsets[-1]) for name, table in tables.items()}
    roles = roles_of(system, list(tables), None, own)
    return system.expected(roles, own, given, Shape(rows=rows, columns=columns, slots=slots)).sent


LEAVES = {"max_depth": None, "max_leaves": 10}
HIDDEN = {"n_estimators": 3, "n_jobs": 2, "max_bin": 16, "max_depth": 3, "objective": "logistic_pieces"}
EPOCHS = {"max_iter": 3, "tol": 0.0, "batch_size": 500}
VERTICAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "lattice": (treaty.SecureBoost(encryption="lattice", **OPEN), TREES),
    "lattice, leaves": (treaty.SecureBoost(encryption="lattice", **OPEN), {**TREES, **LEAVES}),
    "lattice, forest": (treaty.SecureBoost(encryption="lattice", **OPEN), {**TREES, "num_parallel_tree": 2}),
    "lattice, node": (treaty.SecureBoost(encryption="lattice", reveal="node", **OPEN), TREES),
    "sealed": (treaty.SecureBoost(), {**TREES, "max_bin": 16}),
    "hidden": (treaty.SecureBoost(membership="hidden"), HIDDEN),
    "hidden, deep": (treaty.SecureBoost(membership="hidden"), {**HIDDEN, "max_depth": 6, "max_bin": 8}),
    "ou": (treaty.SecureBoost(encryption="ou", **TEST_KEY, **OPEN), TREES),
    "paillier": (treaty.SecureBoost(encryption="paillier", **TEST_KEY, **OPEN), TREES),
    "smm, lattice": (treaty.FedXGBoostSMM(**OPEN), {**TREES, "max_depth": 4}),
    "smm, dealer": (treaty.FedXGBoostSMM(backend="dealer", **OPEN), TREES),
    "smm, ou": (treaty.FedXGBoostSMM(backend="ou", **TEST_KEY, **OPEN), TREES),
    "ldp": (treaty.FedXGBoostLDP(epsilon=4.0), {**TREES, "n_estimators": 8}),
    "federboost": (treaty.FederBoostVertical(epsilon=4.0), TREES),
    "quasi-newton, lattice": (treaty.QuasiNewton(), {**EPOCHS, "max_iter": 4}),
    "quasi-newton, ou": (treaty.QuasiNewton(encryption="ou", **LONGER_KEY), EPOCHS),
    "sgd, two parties": (treaty.SGD(coordinator=False, **LONGER_KEY), EPOCHS),
}  # fmt: skip
HORIZONTAL: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "federboost": (treaty.FederBoostHorizontal(), 3, TREES),
    "federboost, leaves": (treaty.FederBoostHorizontal(), 3, {**TREES, **LEAVES}),
    "fedxgb, model": (treaty.FedXGB(expose="model"), 9, TREES),
    "fedxgb": (treaty.FedXGB(), 9, TREES),
    "fedxgb, shamir": (treaty.FedXGB(comparison="shamir"), 9, TREES),
    "fedxgb, committees": (treaty.FedXGB(edges=5), 15, TREES),
}


def compare(expected: dict, found: dict) -> None:
    """Refuse pairs that send more, or less, than expected, and all parties together."""
    assert sum(found.values()) / FACTOR < sum(expected.values()) < FACTOR * sum(found.values())
    wrong = {
        pair: (expected.get(pair, 0.0), nbytes)
        for pair, nbytes in found.items()
        if nbytes > SMALL and not nbytes / FACTOR < expected.get(pair, 0.0) < FACTOR * nbytes
    }
    assert wrong == {}


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take links for the same in estimates and in trainings: where a step takes long, sealed sums send more at once."""
    link = Link(step=1e-4, byte=1e-9)

    def as_estimated(party: Party, peer: str) -> tuple[Link, float]:
        return link, measure(party, peer)[1]

    for where in ("vertical.cipher_choice", "secureboost.hidden_training"):
        monkeypatch.setattr(f"treaty.systems.{where}.measure", as_estimated)
    for where in ("expected_sums", "hidden_cost"):
        monkeypatch.setattr(f"treaty.systems.vertical.{where}.NEAR", link)


@pytest.mark.usefixtures("link")
@pytest.mark.parametrize(("rows", "columns", "parties"), [(2000, 4, 2), (6000, 8, 3)])
@pytest.mark.parametrize("name", VERTICAL)
def test_bytes_are_as_expected_where_columns_are_split(name: str, rows: int, columns: int, parties: int) -> None:
    kind, common = VERTICAL[name]
    compare(*by_column(kind, rows, columns, parties, **common))


@pytest.mark.parametrize(("rows", "columns"), [(300, 4), (1500, 10)])
@pytest.mark.parametrize("name", HORIZONTAL)
def test_bytes_are_as_expected_where_rows_are_split(name: str, rows: int, columns: int) -> None:
    kind, parties, common = HORIZONTAL[name]
    compare(*by_row(kind, rows, columns, parties, **common))


@pytest.mark.parametrize(("psi", "ids"), [("ecdh", 900), ("auto", 2000), ("kkrt", 9000), ("auto", 12_000)])
def test_bytes_of_an_alignment_are_as_expected(psi: Any, ids: int) -> None:
    lists = {name: list(range(ids)) for name in ("a", "b", "c")}
    found = traffic_of(run_alignment(lists, psi=psi, batch=1 << 14).transcripts.values()).totals
    expected, roles = Expected(), Roles("a", dict.fromkeys(lists, "passive"), list(lists))
    add_alignment(expected, roles, psi, Shape(rows=ids, columns={}, slots={}))
    compare(expected.sent, {tuple(pair.split(" -> ")): total["bytes"] for pair, total in found.items()})


@pytest.mark.parametrize("short", [False, True])
def test_bytes_of_hidden_rows_count_eval_sets_weights_and_short_transfers(
    monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    link = Link(step=1e-4, byte=64e-9 if short else 1e-9)
    measured = "treaty.systems.secureboost.hidden_training.measure"
    monkeypatch.setattr(measured, lambda party, peer: (link, measure(party, peer)[1]))
    monkeypatch.setattr(hidden_cost, "NEAR", link)
    x, y = drawn(12_000, 4)
    tables = {"p0": x.iloc[:, :2], "p1": x.iloc[:, 2:]}
    weights = np.random.default_rng(0).integers(1, 256, 12_000).astype(float)
    weights[0] = 255.0
    found, given = {}, {**HIDDEN, "max_bin": 8}
    common = BoostingOptions(**{name: value for name, value in given.items() if name != "n_jobs"})
    for name, more in {"plain": {}, "eval sets": {"eval_set": [(tables, y)] * 2}, "weights": {}}.items():
        model = treaty.GBDTClassifier(treaty.SecureBoost(membership="hidden"), **given)
        model.fit(tables, y, weights if name == "weights" else None, **more)
        shape = Shape(
            rows=12_000, columns=dict.fromkeys(tables, 2), slots=dict.fromkeys(tables, 18),
            watched=24_000 if name == "eval sets" else 0, weighted=name == "weights",
        )  # fmt: skip
        system, own = find_system("secureboost"), model.protocol
        expected = system.expected(roles_of(system, list(tables), None, own), own, common.checked(own), shape).sent
        compare(expected, sent(model))
        found[name] = sum(expected.values())
    assert min(found["eval sets"], found["weights"]) > 1.2 * found["plain"]


def test_candidates_of_a_wide_table_under_hidden_rows_are_in_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(columns: int) -> int:
        system, own = find_system("secureboost"), treaty.SecureBoost(membership="hidden")
        given = BoostingOptions(objective="logistic_pieces", max_depth=3, max_cat_to_onehot=300).checked(own)
        sizes, slots = dict.fromkeys(("a", "b"), columns), dict.fromkeys(("a", "b"), 256 * columns)
        roles = roles_of(system, ["a", "b"], None, own)
        found = system.expected(roles, own, given, Shape(rows=2000, columns=sizes, slots=slots))
        return int(min(found.memory.values()))

    # an end took 8 kB for each further candidate of one node, from 2,000 to 10,000, and 11 kB for each of 10,000
    whole = of(columns=100)
    monkeypatch.setattr(hidden_cost, "_CANDIDATE", 0.0)
    assert whole - of(columns=100) > 2 * 100 * 250 * 11_000


def test_deeper_trees_more_trees_rows_and_columns_take_more_of_everything() -> None:
    def of(rows: int = 20_000, columns: int = 10, **common: Any) -> Expected:
        system = find_system("secureboost")
        own = treaty.SecureBoost(encryption="lattice", **OPEN)
        given = BoostingOptions(**common).checked(own)
        sizes, slots = dict.fromkeys(("a", "b"), columns), dict.fromkeys(("a", "b"), 65 * columns)
        roles = roles_of(system, ["a", "b"], None, own)
        return system.expected(roles, own, given, Shape(rows=rows, columns=sizes, slots=slots))

    plain = of()
    for more in (of(rows=200_000), of(columns=20), of(n_estimators=100), of(max_depth=6)):
        assert more.seconds > plain.seconds
        assert sum(more.sent.values()) > sum(plain.sent.values())
    assert of(columns=20).memory["b"] > plain.memory["b"]
    few = of(rows=100, max_depth=12)  # of 20 rows and more, so at most 5 nodes a level
    assert few.sent["a", "b"] < 12 * 5 / 4 * of(rows=100).sent["a", "b"]


@pytest.mark.parametrize(("categories", "max_bin"), [(200, 16), (50, 64)])
def test_bytes_of_sealed_halves_are_as_expected_for_more_categories_than_bins_of_numbers_and_fewer(
    categories: int, max_bin: int, link: None
) -> None:
    x, y = drawn(2000, 2)
    codes = np.random.default_rng(0).integers(0, categories, 2000)
    tables = {"p0": x, "p1": pd.DataFrame({"code": pd.Categorical([f"k{code}" for code in codes])})}
    common = {**TREES, "max_bin": max_bin, "max_depth": 4}
    model = treaty.GBDTClassifier(treaty.SecureBoost(), **common).fit(tables, y)
    bins = {name: fit_bins(to_table(table, party=name), max_bin) for name, table in tables.items()}
    shape = Shape(
        rows=2000, columns={"p0": 2, "p1": 1}, slots={name: int(of.offsets[-1]) for name, of in bins.items()},
        halved={"p1": (1, categories)},
    )  # fmt: skip
    system, own = find_system("secureboost"), treaty.SecureBoost()
    given = system.common(**{name: value for name, value in common.items() if name != "n_jobs"})
    own = own.settled(given)
    compare(
        system.expected(roles_of(system, list(tables), None, own), own, given.checked(own), shape).sent, sent(model)
    )


@pytest.mark.parametrize("correlation", ["pearson", "none"])
def test_bytes_of_statistics_are_as_expected(correlation: Any) -> None:
    x, y = drawn(3000, 9)
    tables = {f"p{k}": x.iloc[:, 3 * k : 3 * k + 3] for k in range(3)}
    kind = treaty.Statistics(allow_exact_sums=True)
    model = treaty.ColumnStatistics(kind, correlation=correlation, max_bin=10).fit(tables, y)
    system = find_system("statistics")
    shape = Shape(rows=3000, columns=dict.fromkeys(tables, 3), slots=dict.fromkeys(tables, 3))
    roles, given = roles_of(system, list(tables), None, kind), system.common(correlation=correlation, max_bin=10)
    compare(system.expected(roles, kind, given, shape).sent, sent(model))


def test_leaves_of_a_finished_model_are_refreshed_without_sums() -> None:
    tables = {name: to_table(drawn(2000, 4)[0]) for name in ("p0", "p1")}
    for kind in (treaty.SecureBoost(), treaty.SecureBoost(sums="open"), treaty.FedXGBoostSMM(backend="dealer")):
        grown, refreshed, longer = (
            sum(expected_of(kind, tables, 2000, {"n_estimators": rounds, "process_type": of}).values())
            for rounds, of in ((20, "default"), (20, "update"), (60, "update"))
        )
        assert refreshed == longer < grown


def test_a_form_without_a_formula_says_so() -> None:
    with pytest.raises(ConfigError, match="no formula says what the published form takes"):
        by_row(treaty.FedXGB(mode="paper", allow_insecure=True), 50, 3, 9, **{**TREES, "n_estimators": 1})


def test_a_machine_is_as_fast_as_itself() -> None:
    assert 0.05 < slowness() < 50.0
