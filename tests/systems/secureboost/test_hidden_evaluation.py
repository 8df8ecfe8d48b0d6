"""The loss of rows whose margins are shared: the plain loss in pieces, rounded, and nothing else shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import treaty
from crypto.sealed.test_sealed import play
from crypto.sealed.used import Used
from crypto.sealed.watching import again, assert_refuses_garbage, fill, filled, uniform, views
from tables import cut, real_table, with_gaps
from treaty.crypto.transfer.shared_pieces import NUMBER_BITS
from treaty.crypto.transfer.stock import Steps, Transfers, open_transfers
from treaty.systems.secureboost import hidden_evaluation
from treaty.systems.secureboost.hidden_evaluation import loss_of_rows, squares_of_rows
from treaty.trees.logistic_pieces import LogisticPieces, loss_shift
from treaty.trees.number_losses import SquaredErrorSteps, squares_shift

WHOLE, UNIT = (1 << NUMBER_BITS) - 1, 2.0**-12
Ends = tuple[Transfers, Transfers]


@pytest.fixture(scope="module")
def ends() -> Ends:
    return play(open_transfers(0), open_transfers(1))


def shared(margins: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    masks = rng.integers(0, 1 << NUMBER_BITS, len(margins))
    return [masks.astype(np.uint32), ((margins - masks) & WHOLE).astype(np.uint32)]


def steps(ends: Ends, shares: list[np.ndarray], labels: np.ndarray, k: int) -> Steps[Any]:
    return loss_of_rows(ends[k], shares[k], labels if k == 0 else None, 16, k)


def squares(ends: Ends, shares: list[np.ndarray], labels: np.ndarray, k: int) -> Steps[Any]:
    return squares_of_rows(ends[k], shares[k], labels if k == 0 else None, k)


def opened(ends: Ends, margins: np.ndarray, labels: np.ndarray, rng: np.random.Generator, of: Any = steps) -> int:
    shares = shared(margins, rng)
    one, other = play(*(of(ends, shares, labels, k) for k in (0, 1)))
    return int((one + other)[0])


@pytest.mark.parametrize("n", [1, 2, 3, 100, 1023, 5000, 9000])
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_is_the_plain_one(ends: Ends, n: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_evaluation, "_ROWS_AT_ONCE", [1 << 17, 700, 64][seed])
    rng, loss = np.random.default_rng(seed), LogisticPieces()
    margins = np.rint(rng.normal(0, [0.3, 3, 60][seed], n) * 4096).astype(np.int64)
    margins, labels = np.clip(margins, -(120 << 12) + 1, (120 << 12) - 1), rng.integers(0, 2, n).astype(np.bool_)
    found = opened(ends, margins, labels, rng)
    unit = 2.0 ** (loss_shift(n, 16) - 16)
    assert found * unit / n == loss.loss(margins[:, None] * UNIT, labels.astype(float), None)
    assert found < 1 << 16
    assert unit == 1.0 + (n > 8191)


@pytest.mark.parametrize("n", [1, 2, 100, 5000, 9000])
@pytest.mark.parametrize("seed", range(3))
def test_squared_errors_are_the_plain_ones(ends: Ends, n: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_evaluation, "_ROWS_AT_ONCE", [1 << 17, 700, 64][seed])
    rng, loss = np.random.default_rng(seed), SquaredErrorSteps(base_score=40.0, grad_clip=16.0)
    unit = loss.margin_unit
    margins = np.clip(np.rint(rng.normal(0, [300, 4000, 60000][seed], n)), 1 - 15 * 4096, 15 * 4096 - 1).astype(int)
    y = 40.0 + rng.normal(0, [1.0, 5.0, 90.0][seed], n)
    found = opened(ends, margins, loss.in_units(y, 0.5), rng, squares)
    assert found == int(np.sum((margins - loss.in_units(y, 0.5)) ** 2)) >> squares_shift(n)
    assert loss.loss_of(found, n) == loss.loss(40.0 + margins[:, None] * unit, y, None)
    # as far as labels of the training may be from the start
    near = np.clip(y, 32.0, 48.0)
    exact, step = np.mean((40.0 + margins * unit - near) ** 2), 2.0 ** squares_shift(n) * unit**2 / n
    assert abs(exact - loss.loss_of(found, n) ** 2 - step / 2) <= step / 2 + unit * np.sqrt(exact)


def test_the_largest_squared_errors_do_not_wrap_around(ends: Ends) -> None:
    n, rng, far = 5000, np.random.default_rng(1), (1 << 17) - 1
    for sign in (-1, 1):
        margins, labels = np.full(n, sign * (1 << 16)), np.full(n, sign * ((1 << 16) - far))
        assert opened(ends, margins, labels, rng, squares) == n * far**2 >> squares_shift(n)
    assert opened(ends, np.zeros(n, int), np.zeros(n, int), rng, squares) == 0


def test_a_label_of_a_training_adds_few_units() -> None:
    assert [squares_shift(n) for n in (1, 100, 4096, 8191, 8192, 1 << 20)] == [19, 19, 19, 19, 20, 27]
    assert (1 << 11) ** 2 >> squares_shift(1) == 8


@pytest.mark.parametrize("wrong", [False, True])
def test_the_largest_and_the_smallest_loss_do_not_wrap_around(ends: Ends, wrong: bool) -> None:
    n, rng = 3000, np.random.default_rng(1)
    labels = np.arange(n) % 2 == 0
    margins = np.where(labels == wrong, -(119 << 12), 119 << 12)
    expected = 7.0 if wrong else 0.0
    assert opened(ends, margins, labels, rng) * 2.0 ** (loss_shift(n, 16) - 16) / n == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("of", [steps, squares])
@pytest.mark.parametrize("role", [0, 1])
@pytest.mark.parametrize("secret", [0, 1])
def test_all_that_is_received_is_uniform(ends: Ends, role: int, secret: int, of: Any) -> None:
    """Whatever labels are, and shares, of the other party."""
    n = 4096
    own = np.random.default_rng().integers(0, 1 << NUMBER_BITS, n).astype(np.uint32)
    shares = [own, own]
    shares[1 - role] = np.full(n, WHOLE * secret, np.uint32)
    fill(ends, 1 << 19)
    came, _ = views(lambda k: of(ends, shares, np.full(n, secret), k))[role]
    large = [array for of in came for array in of if array.size > 400]
    assert len(large) > (8 if of is steps else 2)
    assert all(uniform(array) for array in large)


@pytest.mark.parametrize("of", [steps, squares])
def test_the_passive_partys_share_of_a_loss_is_uniform(ends: Ends, of: Any) -> None:
    rng, labels = np.random.default_rng(5), np.ones(20, np.bool_)
    found = []
    for _ in range(120):
        shares = shared(np.full(20, 4096), rng)
        found.append(play(*(of(ends, shares, labels, k) for k in (0, 1)))[1])
    assert len({int(a) for a in np.concatenate(found)}) == 120
    assert uniform(np.concatenate(found))


@pytest.mark.parametrize("of_rows", [steps, squares])
def test_no_pad_of_a_loss_serves_twice(monkeypatch: pytest.MonkeyPatch, of_rows: Any) -> None:
    used, rng = Used(monkeypatch), np.random.default_rng(2)
    ends = play(open_transfers(0), open_transfers(1))
    for _ in range(2):
        opened(ends, rng.integers(-9000, 9000, 300), rng.integers(0, 2, 300).astype(np.bool_), rng, of_rows)
    for parts in used.hashed.values():
        of = np.concatenate(parts)
        assert len(np.unique(of[:, [0, 3, 4]], axis=0)) == len(of)  # one pad, one use
        assert len(np.unique(of[:, :3], axis=0)) == len(np.unique(of[:, 0]))  # one tweak, one row


@pytest.mark.parametrize("of", [steps, squares])
@pytest.mark.parametrize("role", [0, 1])
def test_messages_of_other_types_and_shapes_are_refused(role: int, of: Any) -> None:
    ends, shares, labels = filled(), [np.arange(9, dtype=np.uint32)] * 2, np.arange(9) % 2 == 0
    assert_refuses_garbage(lambda k: of((again(ends[0]), again(ends[1])), shares, labels, k), role, tries=1)


@pytest.mark.parametrize("task", ["multiclass", "regression"])
@pytest.mark.parametrize("stops", [False, True])
def test_losses_of_eval_sets_of_classes_and_numbers_are_the_pooled_growers(task: str, stops: bool) -> None:
    X, y = real_table(task, rows=300)
    numbers = task == "regression"
    kind = treaty.GBDTRegressor if numbers else treaty.GBDTClassifier
    tables = cut(with_gaps(X.iloc[:, :8]), 2)
    places = np.random.default_rng(0).permutation(len(y))
    first, second = ({name: table.iloc[of] for name, table in tables.items()} for of in (places[:100], places[-100:]))
    options = {"max_depth": 3, "max_bin": 16, "objective": "squared_error_steps" if numbers else "logistic_pieces"}
    options |= {"n_estimators": 30, "early_stopping_rounds": 2, "learning_rate": 1.2} if stops else {"n_estimators": 4}
    found = []
    for protocol in (treaty.SecureBoost(membership="hidden"), "pooled"):
        model = kind(protocol, n_jobs=1, **options)
        evals = [(second, y[places[-100:]]), (first, y[places[:100]])]
        found.append(model.fit(first, y[places[:100]], eval_set=evals))
    assert found[0].evals_result_ == found[1].evals_result_
    metric = "rmse" if numbers else "ovr-logloss"
    losses = found[0].evals_result_["eval_1"][metric]
    assert losses[-1] < losses[0]
    if stops:
        assert found[0].best_iteration_ == found[1].best_iteration_ < 28
