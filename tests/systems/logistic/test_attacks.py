"""What a passive party reads in its gradients: labels, as published; in safe mode not, however long it looks."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from systems.logistic.playing import LEAD, OPTIONS, PAPER, linear_tables, play_logistic, said, solver
from treaty.crypto.keystream import from_fixed, total
from treaty.data.table import to_table
from treaty.errors import ConfigError
from treaty.linear.lbfgs import Coordinator, Slice, batch_seed, fewest_rows, partition
from treaty.linear.preparation import TAYLOR
from treaty.messaging.messages import decode_body, view
from treaty.models.linear import preparation_of
from treaty.systems.logistic.paper import StepPart
from treaty.systems.logistic.setup import fixed_columns
from treaty.systems.logistic.steps import InnerProducts

pytestmark = pytest.mark.slow

# ---------------------------------------------------------------- residues of a batch, from real messages


def recovered(played, table, **changes):
    """Solve X_A^T d = |S| g_A for the first batch's d from what p1 received; return its rows and d."""
    batch_size = changes["batch_size"]
    entries = [e for e in played.transcripts["p1"].entries if e.direction == "received" and e.step == StepPart.__name__]
    message = decode_body(entries[0].content, StepPart, peer="coordinator")
    step = view(message.step, np.float64, (None,), peer="coordinator", what="step")
    gradient = step / solver(**changes).learning_rate  # of gradient descent; the first step is not capped
    X = fixed_columns(preparation_of(table).matrix(table.columns, table.n_rows)) * 2.0**-24
    rows = partition(table.n_rows, batch_size, batch_seed(OPTIONS["random_state"]))[0]
    return rows, np.linalg.lstsq(X[rows].T, batch_size * gradient, rcond=None)[0]


def test_passive_party_solves_for_labels_of_small_batches_in_the_papers_form():
    tables, y = linear_tables(2, rows=240, wide=True)
    changes = {"batch_size": 10, "protocol": "sgd", "max_iter": 1, "encryption": "ou"}
    played = play_logistic(tables, y, **changes, **PAPER)
    rows, d = recovered(played, tables["p1"], **changes)
    np.testing.assert_array_equal(d < 0, y[rows] > 0.5)
    np.testing.assert_allclose(d, -0.5 * (2 * y[rows] - 1), atol=1e-5)
    with pytest.raises(ConfigError, match="can be solved for"):
        play_logistic(tables, y, **changes)


def test_passive_party_does_not_solve_for_labels_of_batches_ten_times_its_columns():
    tables, y = linear_tables(2, rows=240, wide=True)
    changes = {"batch_size": 120, "protocol": "sgd", "max_iter": 1, "encryption": "ou"}
    played = play_logistic(tables, y, **changes, **PAPER)  # to have g_A from the same message; it is that of safe mode
    rows, d = recovered(played, tables["p1"], **changes)
    residual = -0.5 * (2 * y[rows] - 1)
    assert np.abs(d - residual).max() > 0.1


# ---------------------------------------------------------------- stacking, over many epochs

ROWS, PASSIVE, ACTIVE, BATCH = 600, 6, 2, 60  # |S| = 10 n_A: enough against least squares, not against lattices


def views_of_passive_party(epochs, *, fresh):
    """Train in one place; return what the passive party has of every batch: rows, own part of margins, own slice of g.

    Its slice is what `test_roles` shows a passive party to get, to 1e-9.
    """
    rng = np.random.default_rng(5)
    X = np.hstack([rng.standard_normal((ROWS, PASSIVE + ACTIVE)), np.ones((ROWS, 1))])
    y = np.where(0.4 * X[:, 0] + 0.4 * X[:, PASSIVE] + rng.standard_normal(ROWS) > 0.3, 1.0, -1.0)
    slice_, coordinator = Slice(X.shape[1], memory=0, period=4), Coordinator(memory=0, learning_rate=0.15)
    seed, views = batch_seed(1), []
    batches = partition(ROWS, BATCH, seed)
    for epoch in range(epochs):
        if fresh:
            batches = partition(ROWS, BATCH, batch_seed(1000 + epoch))
        for rows in batches:
            u = X[rows] @ slice_.weights
            grad = X[rows].T @ TAYLOR.residuals(u, y[rows]) / len(rows)
            views.append((rows, X[rows, :PASSIVE] @ slice_.weights[:PASSIVE], grad[:PASSIVE]))
            slice_.step(coordinator.decide(slice_.products(grad)))
    return X[:, :PASSIVE], y, views


def stacked_auc(epochs, *, fresh):
    """AUC for labels of the least-squares solution of all equations that the passive party has.

    Unknown for each row are its label and the active party's part of its margin, which hardly moves after a few epochs:
    z = y / 2 - u_B / 4, of which the sum over a batch of z x is that of u_A x / 4, less |S| g_A.
    """
    X, y, views = views_of_passive_party(epochs, fresh=fresh)
    equations, right = [], []
    for rows, u, grad in views:
        of_rows = np.zeros((PASSIVE, ROWS))
        of_rows[:, rows] = X[rows].T
        equations.append(of_rows)
        right.append(X[rows].T @ u / 4 - BATCH * grad)
    A, b = np.vstack(equations), np.concatenate(right)
    gram = A @ A.T if len(A) < ROWS else A.T @ A
    ridge = 1e-6 * np.trace(gram) / len(gram) * np.eye(len(gram))
    z = A.T @ np.linalg.solve(gram + ridge, b) if len(A) < ROWS else np.linalg.solve(gram + ridge, A.T @ b)
    return roc_auc_score(y, z)


def test_passive_party_reads_labels_by_stacking_fresh_batches():
    short, long = (stacked_auc(epochs, fresh=True) for epochs in (5, 60))
    assert long > 0.99
    assert long - short > 0.05


def test_passive_party_gains_nothing_by_stacking_epochs_of_one_partition():
    short, long = (stacked_auc(epochs, fresh=False) for epochs in (5, 60))
    assert long - short < 0.02
    assert long < 0.9


# ---------------------------------------------------------------- exact sums, by lattice reduction


def reduced(basis):
    """Reduce the rows of an integer basis (Lenstra, Lenstra, Lovasz 1982), squares and products in floating point."""
    rows, k = [np.array(row, dtype=object) for row in basis], 1
    mu, norm = np.zeros((len(rows), len(rows))), np.zeros(len(rows))

    def project(i):
        parts = np.zeros(i)
        for j in range(i):
            parts[j] = float((rows[i] * rows[j]).sum()) - mu[j, :j] @ parts[:j]
            mu[i, j] = parts[j] / norm[j]
        norm[i] = float((rows[i] * rows[i]).sum()) - mu[i, :i] @ parts

    project(0)
    while k < len(rows):
        changed = True
        while changed:
            project(k)
            changed = False
            for j in reversed(range(k)):
                if times := round(mu[k, j]):
                    rows[k], changed = rows[k] - times * rows[j], True
                    mu[k, :j] -= times * mu[j, :j]
        if norm[k] >= (0.99 - mu[k, k - 1] ** 2) * norm[k - 1]:
            k += 1
        else:
            rows[k - 1], rows[k] = rows[k], rows[k - 1]
            k = max(k - 1, 1)
            project(k - 1)
    return rows


@pytest.mark.parametrize(("n_columns", "n_rows", "found"), [(2, 20, True), (3, 30, True), (1, 40, False)])
def test_passive_party_finds_labels_as_a_short_vector_where_the_guard_refuses(n_columns, n_rows, found):
    """Ten rows a column are too few: margins are 0 in the first batch, so a passive party has X^T y in integers."""
    rng = np.random.default_rng(0)
    X, y = fixed_columns(rng.standard_normal((n_rows, n_columns))), np.where(rng.random(n_rows) < 0.4, 1, -1)
    # combinations of (e_i | X_i) and (1 | -X^T y) that have zeros at the end, and -1 or 1 before
    basis = np.hstack([np.eye(n_rows + 1, dtype=np.int64), np.vstack([X, -(X.T @ y)]) << 12])
    short = [row for row in reduced(basis.tolist()) if not any(row[n_rows + 1 :]) and set(np.abs(row)) <= {0, 1}]
    whole = [row[:n_rows] * row[n_rows] for row in short if all(row[: n_rows + 1])]
    assert any(np.array_equal(labels, y) for labels in whole) == found
    assert (n_rows < fewest_rows(n_columns, of_labels=True)) == found


# ---------------------------------------------------------------- inner products of a party with one column


def test_active_party_without_coordinator_reads_the_weight_of_a_passive_party_with_one_column():
    """Of one coordinate a length leaves the sign alone open, as `disclosures_` says."""
    tables, y = linear_tables(2, rows=240)
    one = to_table(pd.DataFrame({"x": tables["p1"].columns[0]}))
    changes = {"encryption": "lattice", "coordinator": False, "protocol": "sgd", "max_iter": 1, "batch_size": 240}
    played = play_logistic({**tables, "p1": one}, y, **changes)
    (entry,) = [e for e in played.transcripts["p0"].entries if (e.direction, e.step) == ("received", "InnerProducts")]
    values = view(
        decode_body(entry.content, InnerProducts, peer="p1").values, np.uint64, (1, 2), peer="p1", what="values"
    )
    (square,) = from_fixed(total([values]))
    weight = solver(**changes).learning_rate * np.sqrt(square)
    assert weight > 0.01
    assert weight == pytest.approx(abs(played.results["p1"].coef[0]), abs=1e-6)


def test_disclosures_say_what_lengths_tell_and_what_who_deviates_could_have():
    for form, deviates in (({"encryption": "ou"}, True), ({"encryption": "lattice"}, False)):
        learned = said(["p0", "p1", "p2"], **form)
        for name in ("p0", "p1", "p2"):
            words = " ".join(learned[name])
            assert "the weight of a party with one column up to its sign" in words
            assert ("if it deviates from the protocol, unnoticed" in words) == deviates
        assert "all weights up to a rotation" in " ".join(learned[LEAD])
    learned = said(["p0", "p1"], coordinator=False)
    assert "the weight of a party with one column up to its sign" in " ".join(learned["p0"])
