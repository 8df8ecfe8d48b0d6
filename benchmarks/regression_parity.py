"""Linear and Poisson regression and exact logistic regression beside statsmodels: weights, standard errors, p-values.

Claim: weights and standard errors are those of statsmodels on the joined, prepared table to 1e-4 of each, on one table
and between parties. Linear: scikit-learn's diabetes table; Poisson: the number of real estate loans of the first 6,000
complete rows of Give Me Some Credit; logistic, on one table alone, its label. All options are left at their defaults
but `standard_errors`; between parties there is no coordinator.

Needs statsmodels, which no other part of the project does: `pip install statsmodels`. Two minutes; `--quick`: 1,000
rows and test keys, which is a few seconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import statsmodels.api as sm
from sklearn.datasets import load_diabetes

from data import arguments, give_me_some_credit, report, verdict
from treaty import LinearRegression, LogisticRegression, PoissonRegressor, Pooled, QuasiNewton
from treaty.data.table import to_table
from treaty.models.linear import preparation_of

COUNT = "NumberRealEstateLoansOrLines"


def prepared(X: np.ndarray) -> np.ndarray:
    """Return the columns that enter the model, and one of ones."""
    table = to_table(X)
    return np.column_stack([preparation_of(table).matrix(table.columns, table.n_rows), np.ones(len(X))])


def side_by_side(values: Mapping[str, Any]) -> np.ndarray:
    """Put parties' numbers together, the intercept's of the first party last."""
    first, *others = values.values()
    return np.concatenate([first[:-1], *others, first[-1:]])


def compare(name: str, model: Any, X: np.ndarray, y: np.ndarray, parties: int, theirs: Any) -> dict[str, object]:
    """Fit on tables cut by column, and compare with a fitted model of statsmodels."""
    cuts = np.array_split(np.arange(X.shape[1]), parties)
    model.fit({f"p{k}": X[:, of] for k, of in enumerate(cuts)}, y)
    coef = {of: np.ravel(weights) for of, weights in model.standardized_coef_.items()}
    coef["p0"] = np.append(coef["p0"], np.ravel(model.standardized_intercept_))
    weights, errors = side_by_side(coef), side_by_side(model.standardized_errors_)
    off = max(float(np.abs(weights / theirs.params - 1).max()), float(np.abs(errors / theirs.bse - 1).max()))
    return {
        "regression": name,
        "rows": len(X),
        "columns": X.shape[1],
        "parties": parties if "protocol=Q" in repr(model) else "one table",
        "steps": model.n_iter_,
        "weights, relative": float(np.abs(weights / theirs.params - 1).max()),
        "errors, relative": float(np.abs(errors / theirs.bse - 1).max()),
        "p-values, absolute": float(np.abs(side_by_side(model.p_values_) - theirs.pvalues).max()),
        "<= 1e-4": verdict(off, 1e-4),
    }


def main() -> None:
    options = arguments(__doc__).parse_args()
    warnings.filterwarnings("ignore", message=".*rows have a margin beyond 4")
    short = {"insecure_test_key_bits": 1536, "allow_insecure": True} if options.quick else {}
    between = QuasiNewton(coordinator=False, **short)
    X, y = load_diabetes(return_X_y=True)
    ordinary = sm.OLS(y, prepared(X)).fit()
    rows = [
        compare("linear", LinearRegression(protocol, standard_errors=True), X, y, parties, ordinary)
        for protocol, parties in (("pooled", 2), (between, 2), (between, 3))
    ]
    data = give_me_some_credit()
    whole = np.flatnonzero(~np.isnan(data.x).any(axis=1))[: 1000 if options.quick else 6000]
    at = data.names.index(COUNT)
    X, count, label = np.delete(data.x[whole], at, axis=1), data.x[whole, at], data.y[whole].astype(float)
    poisson = sm.GLM(count, prepared(X), family=sm.families.Poisson()).fit(tol=1e-14, maxiter=200)
    rows += [
        compare("Poisson", PoissonRegressor(protocol, standard_errors=True), X, count, 2, poisson)
        for protocol in ("pooled", between)
    ]
    exact = LogisticRegression(Pooled(loss="logistic"), standard_errors=True)
    logit = sm.Logit(label, prepared(X)).fit(disp=0, tol=1e-12, maxiter=200)
    rows.append(compare("logistic, exact loss", exact, X, label, 2, logit))
    report("regression_parity", rows, quick=options.quick)


if __name__ == "__main__":
    main()
