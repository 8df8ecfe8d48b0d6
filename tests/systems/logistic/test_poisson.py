"""Poisson regression between two parties: the joined table's optimum and errors, and nothing plain on the way."""

from __future__ import annotations

import msgspec
import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import PoissonRegressor

from marks import all_but_first_slow
from systems.logistic.playing import play_logistic, pooled_columns, role_input, said
from systems.logistic.test_faults import garbage, tampering
from systems.logistic.test_roles import received
from tables import real_table
from treaty.data.table import to_table
from treaty.errors import ConfigError, CryptoError, DataError, PeerError
from treaty.systems.logistic.quasi_newton import passive

GIVEN = {
    "family": "poisson", "standard_errors": True, "learning_rate": None, "max_iter": 30, "tol": 1e-6,
    "encryption": "ou", "coordinator": False, "insecure_test_key_bits": 1536,
}  # fmt: skip
FORMS = {
    "ou-two": {},
    "ou": {"coordinator": True},
    "paillier-two": {"encryption": "paillier", "insecure_test_key_bits": 768},
}


def counts(rows: int = 300):
    """Return two and three columns of two parties, and counts that depend on them."""
    X, _ = real_table("regression", rows=rows)
    X = (X - X.mean()) / X.std()
    rate = np.exp(0.8 + 0.5 * X.iloc[:, 2] + 0.3 * X.iloc[:, 8] - 0.2 * X.iloc[:, 3])
    y = np.random.default_rng(0).poisson(rate).astype(float)
    tables = {"p0": X.iloc[:, [0, 2]], "p1": X.iloc[:, [3, 4, 8]]}
    return {name: to_table(table, party=name) for name, table in tables.items()}, y


def textbook(tables, y):
    """Return the weights that scikit-learn finds, the intercept's last, and errors of Fisher's information."""
    X = pooled_columns(tables)
    theirs = PoissonRegressor(alpha=0.0, tol=1e-12, max_iter=10_000, solver="newton-cholesky").fit(X[:, :-1], y)
    weights = np.append(theirs.coef_, theirs.intercept_)
    information = X.T @ (X * np.exp(X @ weights)[:, None])
    return weights, np.sqrt(np.diag(np.linalg.inv(information)))


@pytest.mark.parametrize("form", all_but_first_slow(*FORMS))
def test_weights_and_errors_are_those_of_the_joined_table(form):
    tables, y = counts()
    played = play_logistic(tables, y, **{**GIVEN, **FORMS[form]})
    one, other = played.results["p0"], played.results["p1"]
    weights, errors = textbook(tables, y)
    np.testing.assert_allclose([*one.coef, *other.coef, one.intercept], weights, atol=1e-6)
    np.testing.assert_allclose([*one.errors[:-1], *other.errors, one.errors[-1]], errors, rtol=1e-6)
    assert one.settled
    assert np.abs(weights[:-1] / errors[:-1]).max() > 3.0, "no column matters: the comparison would prove nothing"
    assert one.losses[-1] < one.losses[0]
    assert one.predictions(np.array([0.0, 1.0]))["prediction"].tolist() == [1.0, np.e]


def test_rows_alone_among_products_of_two_columns_are_counted_where_these_are_shown():
    """Two columns of categories of which no cell but one is rare: no row is alone in either column."""
    rng = np.random.default_rng(0)
    left, right = rng.integers(0, 3, 600), rng.integers(0, 3, 600)
    left[(left == 2) & (right == 2)] = 1
    left[0] = right[0] = 2
    kinds = pd.DataFrame({"left": left, "right": right}).astype("category")
    tables, y = (
        {"p0": to_table(pd.DataFrame({"x": rng.normal(size=600)})), "p1": to_table(kinds)},
        rng.poisson(2.0, 600),
    )
    alone = play_logistic(tables, y.astype(float), **GIVEN | {"max_iter": 2}).results["p0"].alone
    assert alone == {"p0": 0, "p1": 1}
    without = play_logistic(tables, y.astype(float), **GIVEN | {"max_iter": 2, "standard_errors": False})
    assert without.results["p0"].alone == {"p0": 0, "p1": 0}


def test_a_party_is_sent_ciphertexts_and_opens_masked_numbers():
    tables, y = counts()
    played = play_logistic(tables, y, **{**GIVEN, "standard_errors": False, "max_iter": 3})
    both = {"Terms", "Verdict", "PairKey", "LoneRows", "RateKey", "HiddenFactors", "MaskedRates", "OpenedRates"}
    assert received(played, "p0") - {"Goodbye"} == both | {"TableSize", "LossShare", "InnerProducts"}
    assert received(played, "p1") - {"Goodbye"} == both | {"TrainingSizes", "EpochEnd", "StepCoefficients"}
    learned = said(["p0", "p1"], played.results["p0"], **GIVEN)
    assert "the sender's factor of each row's rate, under its own key" in " ".join(learned["p0"])


def test_what_a_poisson_regression_cannot_be_is_refused():
    tables, y = counts()
    three = {**tables, "p2": to_table(pd.DataFrame({"z": tables["p1"].columns[0]}))}
    with pytest.raises(ConfigError, match="between two parties with data, got p0, p1, p2"):
        play_logistic(three, y, **GIVEN)
    with pytest.raises(ConfigError, match="the lattice map multiplies columns that stay the same"):
        play_logistic(tables, y, **{**GIVEN, "encryption": "lattice"})
    with pytest.raises(
        DataError, match="p0: expected counts, 0 or more and not all 0, got 3 negative ones in 300 rows"
    ):
        play_logistic(tables, np.where(np.arange(300) < 3, -1.0, y), **GIVEN)
    with pytest.raises(DataError, match="got only zeros in 300 rows"):
        play_logistic(tables, np.zeros(300), **GIVEN)
    few, short = counts(150)
    wide = {name: to_table(pd.DataFrame({k: table.columns[0] + k for k in range(5)})) for name, table in few.items()}
    with pytest.raises(ConfigError, match=r"times any two of its 6 columns.*at least 210 rows, got 150"):
        play_logistic({**wide, "p1": few["p1"]}, short, **GIVEN)


@pytest.mark.parametrize(
    ("step", "field", "shape"),
    [("HiddenFactors", "values", None), ("MaskedRates", "values", None), ("OpenedRates", "numbers", (1, 1))],
)
def test_nonsense_ends_the_job_with_an_error_about_it(step, field, shape):
    tables, y = counts()

    def role(party):
        wrapped = tampering(party, step, garbage(field, shape=shape))
        return passive(role_input(wrapped, tables, y, **GIVEN))

    with pytest.raises((CryptoError, PeerError)):
        play_logistic(tables, y, replace={"p1": role}, **GIVEN)


def test_more_products_than_agreed_are_not_opened():
    """A party that asks for products with made-up columns would get plain rates of rows."""
    tables, y = counts()

    def more(message):
        values = message.values
        doubled = np.frombuffer(values.data, np.uint64).reshape(values.shape).repeat(2, axis=0)
        return msgspec.structs.replace(message, values=type(values).of(doubled))

    def role(party):
        return passive(role_input(tampering(party, "MaskedRates", more), tables, y, **GIVEN))

    with pytest.raises(PeerError, match=r"MaskedRates\.values"):
        play_logistic(tables, y, replace={"p1": role}, **GIVEN)
