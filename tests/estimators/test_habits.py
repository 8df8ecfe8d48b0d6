"""Parameters of the wrong type, a ranker's score, seeds drawn once, and where warnings point."""

import warnings

import numpy as np
import pytest
from sklearn.datasets import make_classification
from sklearn.metrics import ndcg_score

import treaty
from treaty.errors import ConfigError

X, Y = make_classification(200, 6, random_state=0)


@pytest.mark.parametrize(
    ("estimator", "named"),
    [
        (treaty.GBDTClassifier(scale_pos_weight="2"), "scale_pos_weight above 0, got '2'"),
        (treaty.GBDTClassifier(class_weight={0: 0.0, 1: 1.0}), "and so learn labels"),
        (treaty.LogisticRegression(C=[1]), r"number C above 0 .* got C=\[1\]"),
        (treaty.GBDTClassifier(callbacks=print), "callbacks in a list, got builtin_function_or_method"),
        (treaty.GBDTClassifier(callbacks="log"), "callbacks in a list, got str"),
    ],
)
def test_a_parameter_of_another_type_is_named(estimator, named):
    with pytest.raises(ConfigError, match=named):
        estimator.fit(X, Y)


def test_a_rankers_score_is_the_mean_ndcg_of_groups():
    rng = np.random.default_rng(0)
    qid, relevance = np.repeat(np.arange(10), 20), rng.integers(0, 4, 200)
    model = treaty.GBDTRanker(n_estimators=40, max_depth=6, min_child_weight=0.0, max_bin=255).fit(
        X, relevance, qid=qid
    )
    groups = [qid == k for k in range(10)]
    gains = 2.0**relevance - 1.0
    scores = model.predict(X)
    assert len(set(scores)) == len(scores)  # scikit-learn has another rule for ties
    expected = np.mean([ndcg_score([gains[of]], [scores[of]]) for of in groups])
    assert model.score(X, relevance, qid=qid) == pytest.approx(expected)
    shuffled = rng.permutation(200)
    assert model.score(X[shuffled], relevance[shuffled], qid=qid[shuffled]) == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:training ended after max_iter")
def test_a_random_state_is_drawn_from_once_a_fit():
    parties = {"a": X[:, :3], "b": X[:, 3:]}
    states = [np.random.RandomState(3), np.random.RandomState(3)]
    for state, penalty in zip(states, ({"C": 1.0}, {"l2": 0.01}), strict=True):
        protocol = treaty.QuasiNewton(coordinator=False, encryption="lattice")
        treaty.LogisticRegression(protocol, max_iter=2, random_state=state, **penalty).fit(parties, Y)
    assert states[0].randint(10**9) == states[1].randint(10**9)


@pytest.mark.parametrize(
    "fit",
    [
        lambda: treaty.GBDTClassifier(n_estimators=1).fit({"a": X[:, :3], "b": X[:, 3:]}, Y),
        lambda: treaty.GBDTClassifier(n_estimators=1, min_child_weight=1e6).fit(X, Y),
        lambda: treaty.LogisticRegression(max_iter=1).fit(X, Y),
    ],
)
def test_a_warning_points_to_the_users_line(fit):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit()
    assert caught
    assert {one.filename for one in caught} == {__file__}
