"""Tables as scipy sparse matrices: the same models and predictions as of dense tables, without a dense copy."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone

import treaty
from treaty.data.binning import fit_bins
from treaty.data.sparse import SparseColumns
from treaty.data.table import to_table
from treaty.errors import DataError

FORMATS: list[Callable[[Any], Any]] = [
    sparse.csr_matrix, sparse.coo_matrix, sparse.dok_matrix, sparse.lil_matrix, sparse.bsr_matrix,
    sparse.csc_array, sparse.coo_array, sparse.dok_array,
]  # fmt: skip
N_ROWS = 400
RNG = np.random.default_rng(5)


def drawn(n_columns: int = 6) -> np.ndarray:
    """Mostly zeros, with negative numbers, stored missing values, a constant column and one without a number."""
    X = np.where(RNG.random((N_ROWS, n_columns)) < 0.75, 0.0, np.round(RNG.normal(size=(N_ROWS, n_columns)), 2))
    X[RNG.random(N_ROWS) < 0.1, 0] = np.nan
    X[:, -1], X[:, -2] = 0.0, np.nan
    return X


DENSE = drawn()
Y = (np.nan_to_num(DENSE[:, 0]) + DENSE[:, 1] > RNG.normal(0.0, 0.3, N_ROWS)).astype(int)
OPTIONS = {"n_estimators": 3, "n_jobs": 1, "min_child_samples": 5}


def same_model(one: Any, other: Any) -> None:
    assert one.parts_.keys() == other.parts_.keys()
    for name, part in one.parts_.items():
        assert part.splits == other.parts_[name].splits
        if part.forest is not None:
            assert part.forest.trees == other.parts_[name].forest.trees
            assert part.forest.history == other.parts_[name].forest.history


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_the_model_of_the_dense_table(kind):
    given, weight = kind(DENSE), RNG.integers(0, 3, N_ROWS).astype(float)
    dense, of_sparse = (
        treaty.GBDTClassifier(**OPTIONS).fit(X, Y, sample_weight=weight, eval_set=(X, Y)) for X in (DENSE, given)
    )
    same_model(dense, of_sparse)
    for method in ("predict_proba", "predict_contributions", "apply"):
        np.testing.assert_array_equal(getattr(of_sparse, method)(given), getattr(dense, method)(DENSE))
        # a model takes either, whichever it was trained on
        np.testing.assert_array_equal(getattr(dense, method)(given), getattr(dense, method)(DENSE))


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint16, np.int64, np.float32, np.float64])
def test_every_type_of_number_is_read_as_in_a_dense_table(dtype):
    numbers = np.where(RNG.random((N_ROWS, 3)) < 0.5, 0, RNG.integers(0, 100, (N_ROWS, 3)))
    dense = numbers.astype(dtype)
    assert_tables_equal(sparse.csr_array(dense), dense)


def test_numbers_that_float32_would_change_are_read_as_in_a_dense_table():
    long = np.where(RNG.random((N_ROWS, 2)) < 0.5, 0, (1 << 60) + RNG.integers(0, 1 << 20, (N_ROWS, 2)))
    assert_tables_equal(sparse.csc_array(long), long)
    times = np.where(RNG.random((N_ROWS, 2)) < 0.1, 0, 1.7e12 + RNG.integers(0, 1 << 20, (N_ROWS, 2)))
    times[:, 1] = RNG.random(N_ROWS)
    assert_tables_equal(sparse.csc_array(times), times)


def assert_tables_equal(given: Any, dense: np.ndarray) -> None:
    table, expected = to_table(given), to_table(dense)
    assert isinstance(table.columns, SparseColumns)
    assert table.schema == expected.schema
    for column, of_dense in zip(table.columns, expected.columns, strict=True):
        assert column.dtype == of_dense.dtype
        np.testing.assert_array_equal(column, of_dense)
    some = slice(16, 80)
    np.testing.assert_array_equal(table.matrix(some), expected.matrix(some))
    assert table.matrix().dtype == expected.matrix().dtype
    chosen = RNG.random(len(dense)) < 0.5
    np.testing.assert_array_equal(table.rows(chosen).matrix(), expected.rows(chosen).matrix())
    bins = fit_bins(table, 16)
    np.testing.assert_array_equal(bins.transform(table), fit_bins(expected, 16).transform(expected))
    # a table of a known schema, as at prediction
    np.testing.assert_array_equal(to_table(given, schema=expected.schema).matrix(), expected.matrix())
    np.testing.assert_array_equal(to_table(table, schema=expected.schema).matrix(), expected.matrix())


def test_repeated_entries_are_added_and_the_given_matrix_is_not_changed():
    rows, columns, values = [0, 0, 1, 2], [0, 0, 1, 0], [1.5, 2.0, 0.0, 4.0]
    given = sparse.coo_array((values, (rows, columns)), shape=(3, 2))
    assert to_table(given).matrix().tolist() == [[3.5, 0.0], [0.0, 0.0], [4.0, 0.0]]
    assert given.nnz == 4
    csc = sparse.csc_array(DENSE)
    table = to_table(csc)
    csc.data[:] = 7.0
    np.testing.assert_array_equal(table.matrix(), to_table(DENSE).matrix())


@pytest.mark.parametrize(
    "system",
    [treaty.SecureBoost(allow_exact_sums=True), treaty.SecureBoost(sums="sealed"), treaty.FederBoostVertical()],
    ids=["open", "sealed", "buckets"],
)
def test_parties_train_on_sparse_tables_as_on_dense_ones(system):
    cut = {"a": DENSE[:, 1:2], "b": DENSE[:, [0]], "c": DENSE[:, 2:]}
    given = {"a": cut["a"], "b": sparse.csr_matrix(cut["b"]), "c": sparse.dok_array(cut["c"])}
    models = [
        treaty.GBDTClassifier(system, random_state=1, **OPTIONS).fit(tables, Y, eval_set=(tables, Y))
        for tables in (cut, given)
    ]
    if not isinstance(system, treaty.FederBoostVertical):  # whose buckets are drawn anew in every fit
        same_model(*models)
    for tables in (cut, given):
        np.testing.assert_array_equal(models[1].predict_proba(tables), models[1].predict_proba(cut))


def test_sparse_tables_are_joined_and_split_like_dense_ones():
    cut = {"a": DENSE[:, :2], "b": DENSE[:, 2:]}
    given = {name: sparse.csr_array(of) for name, of in cut.items()}
    with pytest.warns(UserWarning, match="joins the tables"):
        same_model(*(treaty.GBDTClassifier(**OPTIONS).fit(tables, Y) for tables in (cut, given)))
    columns = {"a": [0, 1], "b": range(2, 6)}
    model = treaty.GBDTClassifier(treaty.SecureBoost(allow_exact_sums=True), parties=columns, **OPTIONS)
    same_model(model.fit(sparse.csc_array(DENSE), Y), clone(model).fit(DENSE, Y))


def test_participants_by_row_train_on_sparse_tables():
    thirds = [slice(0, 150), slice(150, 300), slice(300, None)]
    models = [
        treaty.GBDTClassifier("federboost-horizontal", **OPTIONS).fit(
            {name: (kind(DENSE[of]), Y[of]) for name, of in zip("abc", thirds, strict=True)}
        )
        for kind in (np.asarray, sparse.csr_array)
    ]
    np.testing.assert_array_equal(models[0].predict_proba(DENSE), models[1].predict_proba(sparse.coo_array(DENSE)))


def test_no_dense_copy_is_made():
    wide = sparse.random_array((12000, 500), density=0.002, rng=np.random.default_rng(0), format="csr")
    y = (wide[:, [0]].toarray()[:, 0] > 0).astype(int) | (np.arange(12000) % 5 == 0)
    model = treaty.GBDTClassifier(n_estimators=2, max_bin=8, n_jobs=1).fit(wide[:400], y[:400])  # kernels are compiled
    dense_bytes = 12000 * 500 * np.dtype(np.float32).itemsize
    tracemalloc.start()
    model.fit(wide, y)
    _, trained = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # codes of bins have one byte a cell, by row and by column
    assert trained < 0.75 * dense_bytes


def test_predictions_copy_few_cells_at_a_time(monkeypatch):
    model = treaty.GBDTClassifier(**OPTIONS).fit(sparse.csr_array(DENSE), Y)
    expected, sizes, copied = model.predict_proba(DENSE), [], SparseColumns.block
    monkeypatch.setattr(SparseColumns, "block", lambda self, rows: sizes.append(rows) or copied(self, rows))
    monkeypatch.setattr(treaty.models.trees, "_CELLS_AT_ONCE", 600)
    np.testing.assert_array_equal(model.predict_proba(sparse.csr_array(DENSE)), expected)
    assert [of.stop - of.start for of in sizes] == [96] * 4 + [16]


def test_unusable_matrices_are_named():
    model = treaty.GBDTClassifier(**OPTIONS)
    infinite = DENSE.copy()
    infinite[3, 1] = np.inf
    beyond, before, cut_off = (sparse.csr_array(DENSE) for _ in range(3))
    beyond.indices[0], before.indices[0], cut_off.indptr[-1] = 77, -5, 10**6
    for given, words in [
        (beyond, "indices must be < 6 - at a sparse matrix"),
        (before, "indices must be >= 0 - at a sparse matrix"),
        (cut_off, "Last value of index pointer should be less than the size of index"),
        (sparse.csr_array(infinite), "column 'f1': 1 rows are infinite"),
        (sparse.csr_array(DENSE.astype(complex)), "Complex data not supported"),
        (sparse.coo_array(np.ones(4)), "Expected 2D array, got a sparse 1D array"),
        (sparse.csr_array((0, 3)), "0 sample"),
        (sparse.csr_array((400, 0)), "0 feature"),
    ]:
        with pytest.raises(DataError, match=words):
            model.fit(given, Y)
    model.fit(DENSE, Y)
    with pytest.raises((DataError, ValueError), match="3 features"):
        model.predict(sparse.csr_array(DENSE[:, :3]))


def test_numbers_do_not_pass_for_categories():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"c": pandas.Categorical(np.where(DENSE[:, 1] > 0, "x", "y"))})
    model = treaty.GBDTClassifier(**OPTIONS).fit(frame, Y)
    with pytest.raises(DataError, match="expected categories, as in training, got numbers"):
        to_table(sparse.csr_array(DENSE[:, 1:2]), schema=model.schemas_["pooled"])
