"""Regressions on the whole table between parties: optima and standard errors are those of the joined table."""

from __future__ import annotations

import msgspec
import numpy as np
import pandas as pd
import pytest

from marks import all_but_first_slow
from systems.logistic.playing import LEAD, linear_tables, play_logistic, pooled_columns, role_input, said
from systems.logistic.test_faults import tampering
from systems.logistic.test_roles import received
from tables import real_table
from treaty.data.table import to_table
from treaty.errors import ConfigError, DataError, PeerError
from treaty.linear.preparation import SQUARED, TAYLOR
from treaty.linear.training import minimise, standard_errors
from treaty.messaging.messages import Array, decode_body, view
from treaty.systems.logistic import products as lattice_products
from treaty.systems.logistic.inference import CrossProducts
from treaty.systems.logistic.quasi_newton import active, coordinator, passive

FORMS = {
    "lattice": {"encryption": "lattice"},
    "lattice-two": {"encryption": "lattice", "coordinator": False},
    "ou": {"encryption": "ou"},
    "ou-two": {"encryption": "ou", "coordinator": False},
    "paillier-two": {"encryption": "paillier", "coordinator": False},
}
WHOLE = {"learning_rate": None, "max_iter": 30, "tol": 1e-6, "standard_errors": True}
LINEAR = {**WHOLE, "family": "linear"}


def diabetes(parties: int, rows: int = 340):
    """Return columns of few parties, and a number to predict."""
    X, _ = linear_tables(parties, rows=rows)
    _, y = real_table("regression", rows=rows)
    return X, y * 10.0 - 3.0


def optimum(tables, y, loss):
    """Return weights and errors of the joined table, the active party's after the intercept's as in its part."""
    X = pooled_columns(tables)
    fitted = minimise(X, y, loss, l2=0.0, tol=1e-14, max_iter=50)
    return fitted.weights, standard_errors(X, y, fitted.weights, loss)


def found_in(played, tables):
    parts = played.results
    weights = np.concatenate([*(parts[name].coef for name in tables), [parts["p0"].intercept]])
    own = [parts[name].errors for name in tables]
    return weights, np.concatenate([own[0][:-1], *own[1:], own[0][-1:]])


def same_as_pooled(tables, y, loss, **changes):
    played = play_logistic(tables, y, **changes)
    weights, errors = found_in(played, tables)
    expected, (expected_errors, degrees) = optimum(tables, y if loss is SQUARED else 2 * y - 1, loss)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6 * np.nanmin(expected_errors))
    np.testing.assert_allclose(errors, expected_errors, rtol=1e-5)
    assert {part.degrees for part in played.results.values() if part is not None} == {degrees}
    assert played.results["p0"].settled
    return played


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("parties", all_but_first_slow(2, 3))
def test_linear_regression_has_the_weights_and_errors_of_the_joined_table(form, parties):
    played = same_as_pooled(*diabetes(parties), SQUARED, **LINEAR, **FORMS[form])
    assert len(played.results["p0"].losses) <= 20


@pytest.mark.parametrize("form", all_but_first_slow("lattice-two", "ou"))
def test_logistic_regression_with_errors_has_the_taylor_optimum(form):
    tables, y = linear_tables(2, rows=340)
    few = {
        name: to_table(pd.DataFrame(dict(zip("abc", table.columns[:3], strict=True)))) for name, table in tables.items()
    }
    played = same_as_pooled(few, y, TAYLOR, **WHOLE, **FORMS[form])
    assert played.results["p0"].classes == [0, 1]
    assert played.results["p0"].calibration is not None


CLASSES = {**WHOLE, "family": "multiclass", "standard_errors": False}


@pytest.mark.parametrize("form", all_but_first_slow("lattice", "lattice-two", "ou", "ou-two"))
def test_more_classes_are_each_set_against_the_rest(form):
    tables, _ = diabetes(2)
    X = pooled_columns(tables)
    y = np.digitize(X[:, 2] + np.random.default_rng(0).normal(size=len(X)), [-0.7, 0.9]).astype(float)
    played = play_logistic(tables, y, **CLASSES, **FORMS[form])
    one, other = (played.results[name].of_classes for name in ("p0", "p1"))
    assert len(one) == len(other) == 3
    for k in range(3):
        expected = minimise(X, np.where(y == k, 1.0, -1.0), TAYLOR, l2=0.0, tol=1e-14, max_iter=50).weights
        np.testing.assert_allclose([*one[k].coef, *other[k].coef, one[k].intercept], expected, atol=1e-5)
        calibrated = 1 / (1 + np.exp(-one[k].log_odds(X @ expected)))
        assert calibrated.mean() == pytest.approx(np.mean(y == k), abs=0.01)
    margins = played.results["p0"].margins(tables["p0"]) + played.results["p1"].margins(tables["p1"])
    found = played.results["p0"].predictions(margins)
    assert list(found) == ["prediction", "probability_0", "probability_1", "probability_2"]
    np.testing.assert_allclose(sum(found[f"probability_{k}"] for k in range(3)), 1.0)
    assert np.mean(found["prediction"] == y) > 0.5
    assert "all of this for each class" in " ".join(said(list(tables), played.results["p0"], **CLASSES)["p1"])


def test_labels_that_are_not_of_all_classes_are_refused():
    tables, y = diabetes(2)
    labels = np.arange(len(y)) % 3

    def of_four(party):
        inputs = role_input(party, tables, labels.astype(float), **CLASSES, **FORMS["lattice-two"])
        inputs.n_classes = 4
        return (active if party.name == "p0" else passive)(inputs)

    with pytest.raises(DataError, match="p0: expected labels of 4 classes, got 3 in 340 rows"):
        play_logistic(tables, labels, replace={"p0": of_four, "p1": of_four}, **CLASSES, **FORMS["lattice-two"])
    with pytest.raises(ConfigError, match="same classes everywhere"):
        play_logistic(tables, labels, replace={"p1": of_four}, **CLASSES, **FORMS["lattice-two"])
    with pytest.raises(ConfigError, match="with more classes leave standard_errors out"):
        play_logistic(tables, labels, **{**CLASSES, "standard_errors": True})


@pytest.mark.slow
def test_gradient_descent_gets_to_the_optimum_too():
    tables, y = diabetes(2)
    given = {**LINEAR, "max_iter": 300, "protocol": "sgd", "standard_errors": False, **FORMS["lattice-two"]}
    played = play_logistic(tables, y, **given)
    expected, (errors, _) = optimum(tables, y, SQUARED)
    weights = np.concatenate([*(played.results[name].coef for name in tables), [played.results["p0"].intercept]])
    assert np.abs((weights - expected) / errors).max() < 1e-2
    assert played.results["p0"].errors is None


def test_a_penalty_is_on_the_weights_and_not_on_their_coordinates():
    tables, y = diabetes(2)
    X, unit = pooled_columns(tables), y.std()
    given = {**LINEAR, "standard_errors": False, "l2": 0.3, **FORMS["lattice-two"]}
    played = play_logistic(tables, y, **given)
    expected = minimise(X, (y - y.mean()) / unit, SQUARED, l2=0.3, tol=1e-14, max_iter=50).weights * unit
    weights = np.concatenate([*(played.results[name].coef for name in tables), [played.results["p0"].intercept]])
    np.testing.assert_allclose(weights[:-1], expected[:-1], rtol=1e-4, atol=1e-5 * unit)


@pytest.mark.slow
def test_a_table_of_several_blocks_is_one_sum_to_its_owner(monkeypatch):
    monkeypatch.setattr(lattice_products, "DEGREE", 128)
    tables, y = diabetes(2)
    played = same_as_pooled(tables, y, SQUARED, **LINEAR, **FORMS["lattice-two"])
    steps = [e.step for e in played.transcripts["p1"].entries if (e.direction, e.peer) == ("received", "p0")]
    assert steps.count("VectorQuery") == 3 * steps.count("ProductShares")


def test_columns_that_repeat_and_constant_ones_have_errors_of_pseudoinverse_and_none():
    tables, y = diabetes(2)
    theirs = tables["p1"].columns
    repeated = pd.DataFrame({"a": theirs[0], "b": theirs[0], "c": np.full(len(y), 2.0, np.float32), "d": theirs[1]})
    played = same_as_pooled({**tables, "p1": to_table(repeated)}, y, SQUARED, **LINEAR, **FORMS["lattice-two"])
    part = played.results["p1"]
    assert part.coef[0] == pytest.approx(part.coef[1], rel=1e-6)
    assert np.isnan(part.errors).tolist() == [False, False, True, False]
    assert np.isnan(part.table()["p_value"]).tolist() == [False, False, True, False]


@pytest.mark.parametrize("form", all_but_first_slow("lattice", "lattice-two"))
def test_a_column_that_two_parties_have_is_named_as_the_reason_for_no_errors(form):
    tables, y = diabetes(2)
    theirs = pd.DataFrame({"a": tables["p0"].columns[2], "b": tables["p1"].columns[0]})
    with pytest.raises(DataError, match="columns of different parties depend on each other linearly"):
        play_logistic({**tables, "p1": to_table(theirs)}, y, **LINEAR, **FORMS[form])


def test_columns_that_explain_the_target_to_the_last_bit_have_no_errors_and_the_active_party_says_so():
    """What is left of the loss is then a matter of rounding."""
    tables, _ = diabetes(2)
    y = pooled_columns(tables) @ np.arange(1.0, pooled_columns(tables).shape[1] + 1.0)
    for noise in (0.0, 1e-5):
        told = y + noise * np.random.default_rng(0).standard_normal(len(y))
        with pytest.raises(DataError, match="p0: columns explain the target to the precision of training"):
            play_logistic(tables, told, **LINEAR, encryption="lattice")
    same_as_pooled(tables, y + 0.1 * np.random.default_rng(0).standard_normal(len(y)), SQUARED, **LINEAR)


def test_rare_categories_have_the_errors_of_the_joined_table():
    """Clipped, their columns would depend on the intercept, which another party has."""
    rng = np.random.default_rng(4)
    tables, y = diabetes(2)
    rare = pd.Series(np.where(np.arange(len(y)) % 150 == 7, "rare", "common"), dtype="category")
    tables["p1"] = to_table(pd.DataFrame({"x": rng.normal(size=len(y)), "kind": rare}))
    same_as_pooled(tables, y + 50.0 * (rare == "rare").to_numpy(), SQUARED, **LINEAR, encryption="lattice")


def test_a_target_that_does_not_vary_and_too_few_rows_are_refused():
    tables, y = diabetes(2)
    with pytest.raises(DataError, match="p0: expected a target that varies"):
        play_logistic(tables, np.full(len(y), 0.3), **LINEAR, **FORMS["lattice-two"])
    few, short = diabetes(2, rows=100)
    with pytest.raises(ConfigError, match="the table has only 100 rows: bring more"):
        play_logistic(few, short, **LINEAR, **FORMS["lattice-two"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "paper", "allow_insecure": True}, "no standard errors, and no other regression"),
        ({"l2": 0.1}, "expected l2=0 with standard_errors"),
        ({"family": "logistic"}, "same"),
    ],
    ids=["paper", "penalty", "families"],
)
def test_what_does_not_go_together_is_refused(changes, words):
    tables, y = diabetes(2)
    theirs = changes if words == "same" else None
    with pytest.raises(ConfigError, match=words):
        play_logistic(tables, y, theirs=theirs, **({**LINEAR, **changes} if theirs is None else LINEAR))


# ---------------------------------------------------------------- what parties are sent


SETUP = {"Terms", "Verdict"}
LATTICE = {"JointSeedCommitment", "JointSeedShare", "ColumnsHint", "VectorQuery", "HiddenProducts", "ProductShares"}


def test_parties_are_sent_what_the_documentation_says():
    tables, y = diabetes(3)
    played = play_logistic(tables, y, **LINEAR, **FORMS["lattice"])
    between = SETUP | LATTICE | {"PairKey", "LoneRows", "StepCoefficients", "InverseBlock"}
    found = {name: received(played, name) - {"Goodbye"} for name in ("p0", "p1", LEAD)}
    assert found["p0"] == between | {"TableSize", "LossShare"}
    assert found["p1"] == between | {"TrainingSizes", "EpochEnd", "TargetUnit", "ErrorVariance"}
    assert found[LEAD] == SETUP | {"TrainingSizes", "EpochEnd", "InnerProducts", "CrossProducts"}
    alone = play_logistic(*diabetes(2), **LINEAR, **FORMS["lattice-two"])
    from_active = {e.step for e in alone.transcripts["p1"].entries if (e.direction, e.peer) == ("received", "p0")}
    assert from_active >= {"InverseBlock", "ErrorVariance"}
    (entry,) = [e for e in alone.transcripts["p0"].entries if e.step == "CrossProducts"]
    told = decode_body(entry.content, CrossProducts, peer="p1")
    assert told.products.shape == (3, 0), "the only passive party has nothing to tell"


def test_a_coordinator_sees_other_cross_products_every_time():
    tables, y = diabetes(2)

    def seen():
        played = play_logistic(tables, y, **LINEAR, **FORMS["lattice"])
        (entry,) = [e for e in played.transcripts[LEAD].entries if (e.step, e.peer) == ("CrossProducts", "p0")]
        products = decode_body(entry.content, CrossProducts, peer="p0").products
        return view(products, np.float64, (10, 3), peer="p0", what="products")

    one, other = seen(), seen()
    assert np.abs(one - other).max() > 1e-2, "the same rotations"
    values = [np.linalg.svd(products, compute_uv=False) for products in (one, other)]
    np.testing.assert_allclose(*values, atol=1e-6)  # canonical correlations, which no rotation hides


@pytest.mark.parametrize(
    ("who", "step", "field", "value", "words"),
    [
        ("p0", "CrossProducts", "products", np.full((10, 3), 2.0), "size 1 at most"),
        ("p1", "CrossProducts", "rank", 99, "size 1 at most"),
        (LEAD, "InverseBlock", "block", np.full((3, 3), np.nan), "finite|InverseBlock"),
        ("p0", "CrossProducts", "products", np.zeros((2, 2)), "CrossProducts"),
        ("p1", "LossShare", "part", np.zeros((3, 3), np.uint64), "LossShare"),
    ],
)
def test_nonsense_ends_the_job_with_an_error_about_it(who, step, field, value, words):
    tables, y = diabetes(2)
    told = Array.of(value) if isinstance(value, np.ndarray) else value
    program = {"p0": active, LEAD: coordinator}.get(who, passive)

    def role(party):
        wrapped = tampering(party, step, lambda message: msgspec.structs.replace(message, **{field: told}))
        return program(role_input(wrapped, tables, y, **LINEAR, encryption="lattice"))

    with pytest.raises(PeerError, match=words):
        play_logistic(tables, y, replace={who: role}, **LINEAR, encryption="lattice", timeout=60.0)
