"""`GBDTClassifier`, `GBDTRegressor` and `GBDTRanker`, for pooled and federated training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin, RegressorMixin

from treaty.data.columns import check_weights
from treaty.errors import ConfigError
from treaty.estimators.base import Scored, Settings, Tables, one_column
from treaty.estimators.boosted import BoostedTrees
from treaty.estimators.inputs import check_row_order, eval_sets_of
from treaty.machine.arrays import Floats
from treaty.models.trees import of_classes
from treaty.systems.options import spelled_out
from treaty.systems.pooled.system import check_numbers, check_relevance
from treaty.trees.ranking_losses import mean_ndcg


class GBDTClassifier(Scored, ClassifierMixin, BoostedTrees):
    """Gradient boosted trees for two or more classes.

    Parameters
    ----------
    protocol : str or SystemOptions, default "pooled"
        The system: its options, ``SecureBoost(encryption="ou")``, or its name alone for its defaults. One table:
        `treaty.Pooled`. Parties that hold different columns of the same rows: `treaty.SecureBoost`,
        `treaty.FedXGBoostSMM`, `treaty.FedXGBoostLDP`, `treaty.FederBoostVertical`. Participants that hold different
        rows of the same columns: `treaty.FederBoostHorizontal` for a few organisations, `treaty.FedXGB` for hundreds of
        users.
    n_estimators : int or None, default None
        Boosting rounds; one tree each, one per class for more than two classes. None is 100; in paper mode, and in
        systems whose noise grows with the trees, 20.
    max_depth : int or None, default None
        Levels of splits, 1 to 24, or 0 for no limit, with `max_leaves`. None is 5, or 3 if `n_estimators` is 20 by
        default; with `max_leaves` it is 0.
    max_leaves : int or None, default None
        Most leaves of a tree, 2 to 4096. Trees then grow by best gain, as in XGBoost with ``grow_policy="lossguide"``
        and in LightGBM; None grows them by levels. Between parties each split may take a round of messages.
    num_parallel_tree : int, default 1
        Trees of a round for each output, which grow from the same gradients and are averaged, as in XGBoost. A random
        forest is ``n_estimators=1, learning_rate=1, num_parallel_tree=100, subsample=0.8, colsample_bytree=0.5``.
    multi_strategy : {"one_output_per_tree", "multi_output_tree"}, default "one_output_per_tree"
        With more than two classes: whether a round grows a tree for each class, or one structure for all of them, whose
        splits gain most over all classes, as in XGBoost (docs/growth.md). On one table, and with SecureBoost and
        FedXGBoost-SMM. No effect with two classes or numbers.
    process_type : {"default", "update"}, default "default"
        "update" refreshes the leaves of a finished model, ``fit(X, y, xgb_model=model)``, as XGBoost's updater
        "refresh". All rounds keep their splits, and leaf weights, gains and covers come from the rows of this fit.
        `n_estimators` is ignored; in a job file it is the number of these rounds.
    learning_rate : float or None, default None
        Factor on every leaf weight. None is 0.1, or 0.3 if `n_estimators` is 20 by default.
    reg_lambda : float or None, default None
        L2 penalty on leaf weights, as in XGBoost. None is 1; with noise on labels or gradients (FedXGBoostLDP, and
        SecureBoost with a `mechanism`), it grows with the variance of the noise.
    reg_alpha : float, default 0
        L1 penalty on leaf weights, as in XGBoost.
    min_split_loss : float, default 0
        Minimum gain of a split, as in XGBoost.
    min_child_weight : float, default 1
        Minimum sum of hessians in a leaf, as in XGBoost.
    min_child_samples : int or None, default None
        Minimum training rows in a leaf, a privacy rule: None is 20 in safe mode, 1 in paper mode.
    subsample : float, default 1
        Share of rows drawn for each tree.
    colsample_bytree : float, default 1
        Share of columns drawn for each tree.
    goss : bool, default False
        Whether to draw the rows of a tree by gradient-based one-side sampling (Ke et al., LightGBM, 2017) instead of
        `subsample`.
    top_rate : float, default 0.2
        With `goss`: the share of rows, those with the largest gradients, that are all used.
    other_rate : float, default 0.1
        With `goss`: the share of all rows drawn from the rest; their gradients count (1 - top_rate) / other_rate times.
    objective : str, class or None, default None
        Loss of a numeric target: "squared_error" (the default), "poisson", "tweedie", "gamma", "huber", "quantile",
        "absolute_error" (the quantile 0.5) or "squared_error_steps" (by whole numbers alone), or a subclass of
        `CustomLoss`, as the class or ``package.module:CLASS``; of a ranking, "ndcg" or "pairwise". These may have
        XGBoost's names ("reg:squarederror"; docs/objectives.md).
        Classifiers use the log-loss of their classes; None, "binary:logistic" and "multi:softprob" mean this.
        Or "logistic_pieces": its derivatives are linear in pieces, margins are multiples of 2^-12, and of several
        classes each is trained against the rest.
    max_delta_step : float or None, default None
        Maximum absolute leaf weight, before the learning rate, as in XGBoost; 0: no limit. None is 0.7 for
        ``objective="poisson"``, else 0.
    max_cat_to_onehot : int or None, default None
        A column with fewer categories than this is split by one category against the rest, as in XGBoost; other columns
        by sets of categories (`category_sets`). None is 32; with noise, and under
        FedXGB and FedXGBoost, every column is split by one category against the rest.
    category_sets : {"halves", "sorted"}, default "halves"
        Which sets of categories are tried, with `max_cat_to_onehot`. "halves": the categories above the node's mean, or
        below, among those with at least half of `min_child_samples` rows in the node. It works under sealed sums, and
        overfits less with many categories. "sorted": prefixes of the categories in the order of their leaf weights, as
        in XGBoost; needs open sums (docs/growth.md).
    max_categories : int or None, default None
        Most bins of a column of categories, 2 to 32767. If there are more categories, the rarest share a bin, and
        `fit` warns. None: every category has a bin (up to 32767), whatever `max_bin` is. Where noise or cost grows with
        categories (FederBoost by column, or by row with noise, FedXGB, FedXGBoost), None is `max_bin`, and it is at
        most 255.
    tweedie_variance_power : float or None, default None
        With ``objective="tweedie"``: the variance is the mean to this power, above 1 and below 2; None is 1.5.
    huber_slope : float or None, default None
        With ``objective="huber"``: the residual above which the loss is linear; None is 1.
    quantile_alpha : float or None, default None
        With ``objective="quantile"``: the quantile that is predicted, above 0 and below 1; None is 0.5.
    monotone_constraints : dict of str to {-1, 0, 1}, sequence of {-1, 0, 1} or None, default None
        How predictions may move with a numeric column, all else equal: 1 never down, -1 never up, as in XGBoost. By
        name, or for all columns in their order. If several parties have columns, names are "party.column"; in a job
        file each party names its own. Under sealed sums only with ``max_depth=1`` (docs/growth.md).
    interaction_constraints : sequence of sequences of str or int, or None, default None
        Groups of columns, by name or position, as in XGBoost: all columns above a leaf are in one group; a column in no
        group is a group of its own. If several parties have columns, names are "party.column".
    base_score : float or None, default None
        Prediction that training starts from: a probability for two classes, a margin for more, else a mean or quantile.
        None: it is estimated from the labels of all participants, for more than two classes as a margin of each
        (docs/objectives.md); with noise on gradients or sums, it is 0.5.
    fractional_bits : int, default 16
        Gradients are rounded once to multiples of 2^-fractional_bits; at most 20 under the lattice map.
    max_bin : int or None, default None
        Maximum bins of a column of numbers, 2 to 255. None is 255 on one table, 64 under SecureBoost and
        FedXGBoost-SMM, else 32; in paper mode the paper's number, if it has one.
    eval_metric : str, function, list of these or None, default None
        Metrics of eval sets, several in one text with commas or as a list. Two classes: "logloss", "auc", "aucpr",
        "error" or "error@0.3". More classes: "mlogloss", "merror" or "auc". Numbers: "rmse", "mae", "mape" or "rmsle".
        Rankings: "ndcg", "ndcg@5", "map" or "map@5" ("map" needs relevance 0 or 1). None: the objective's own metric.
        The last metric decides early stopping. Only the party with the labels computes them. A function
        ``metric(y_true, y_pred)``, as in scikit-learn, gets the same arguments as in XGBoost: labels (numbers of
        classes) and predictions (two classes: the probability of the second; more: a column for each); lower is better.
        It is called only in this process (not with ``transport="tls"``), and neither sent nor saved.
    early_stopping_rounds : int or None, default None
        Stop when the last eval set's last metric has not improved for this many rounds.
    early_stopping_min_delta : float, default 0
        Minimum improvement that early stopping counts as one, as `min_delta` of XGBoost's ``EarlyStopping``; the model
        ends with the last round that improved the metric by more.
    random_state : int, RandomState or None, default None
        Seed of row and column sampling.
    n_jobs : int or None, default None
        Threads; None for all cores.
    active : str or None, default None
        The party with the labels; None for the first. `FederBoostHorizontal`: the participant that leads; with another
        name, a party without data leads. `FedXGB`: None.
    transport : {"memory", "tls"}, default "memory"
        How `fit` runs the parties: in threads, or in a process each, connected by mutual TLS on this machine.
    parties : dict of str to (list of str or int), or None, default None
        The columns of each party in one table. With ``{"bank": ["age", "income"], "shop": ["visits"]}``, all methods
        take one dataframe (or with positions, one array) instead of a mapping of tables, so that `cross_val_score`,
        `GridSearchCV`, `Pipeline` and other tools of scikit-learn work with parties. Not if participants have rows.
    scale_pos_weight : float or None, default None
        Weight of the rows of the second class of two, as in XGBoost; it multiplies their sample weights.
    class_weight : dict of label to float, "balanced" or None, default None
        Weights of classes, as in scikit-learn. "balanced" counts the labels of all rows, so it is not available if
        participants have rows, or under `FedXGBoostLDP`. Other parties may infer the largest weight, to a power of two,
        from bounds of gradients. With label noise, weights of classes raise ConfigError.
    callbacks : list or None, default None
        Objects with a method ``after_iteration(model, epoch, evals_log)``, called after every round with this estimator
        and `evals_result_` so far; training ends if one returns True. ``before_training(model)`` and
        ``after_training(model)`` are also called. Only with ``transport="memory"``.
    verbose : bool or int, default False
        Whether to print a line with the metrics after every round, or after every `verbose` rounds.

    Attributes
    ----------
    classes_ : ndarray (n_classes,)
    parts_ : dict of str to ModelPart
        Each party's part of the model; one part, "pooled", if the model is whole.
    evals_result_ : dict
        ``{"eval_0": {"logloss": [...]}}``, one number per round; `evals_result()` returns it.
    n_iter_ : int
        Rounds of the model.
    best_iteration_, best_score_ : int, float
        With early stopping: the last of these rounds, from 0, and its metric; also `best_iteration` and `best_score`.
    feature_names_in_ : ndarray of str (n_features,)
        The columns of dataframes; of a mapping of tables, ``"bank.age"``.
    warnings_ : list of str
        The warnings of `fit` about bins and trees.
    clipped_rows_ : int
        For a regression: the maximum number of rows in a round whose gradient was clipped.
    feature_importances_ : float64 (n_features,)
    communication_ : dict
        For each ordered pair of parties: messages, bytes, and bytes by message type. "fedxgb": besides users, "server",
        "edge0" and so on, and "authority".
    timeline_ : Timeline or None
        Bytes sent between each pair of parties over time, in up to 60 steps; None if nothing was sent.
    timings_ : dict
        Seconds of set-up (binning, keys), of boosting, and in total (with the start of processes).
    disclosures_ : dict
        What each party (under "fedxgb" each role) learned beyond its own data, in sentences.

    See Also
    --------
    GBDTRegressor : Numbers instead of classes.
    GBDTRanker : Order of the rows of a group.
    SecureBoost : The usual system for parties with different columns.
    load : Read a model from the folder that `save` wrote.

    Examples
    --------
    Train on one table:

    >>> import numpy as np, pandas as pd, treaty
    >>> age = np.arange(200) % 60 + 18
    >>> bank, shop = pd.DataFrame({"age": age}), pd.DataFrame({"orders": age * 7 % 11})
    >>> defaulted = np.where(age + shop["orders"] < 40, "yes", "no")
    >>> model = treaty.GBDTClassifier(n_estimators=5, max_depth=2).fit(bank, defaulted)
    >>> model.predict(pd.DataFrame({"age": [20, 70]}))
    array(['yes', 'no'], dtype='<U3')

    Train with both parties' columns, under encryption:

    >>> model = treaty.GBDTClassifier("secureboost", n_estimators=2, max_depth=2)
    >>> _ = model.fit({"bank": bank, "shop": shop}, defaulted)
    >>> sorted(model.parts_)
    ['bank', 'shop']
    >>> print(model.disclosures_["shop"][0])
    in training, no label, ...
    """

    @spelled_out(BoostedTrees.predict)
    def decision_function(self, X: Tables, *, base_margin: Any = None) -> Floats:
        """Return margins: log-odds of the second class (n_rows,), or (n_rows, n_classes) with more than two.

        Parameters and errors are as for `predict`.
        """
        margins = self._margins(X, base_margin)
        return margins[:, 0] if margins.shape[1] == 1 else margins

    @spelled_out(BoostedTrees.predict)
    def predict_proba(self, X: Tables, *, base_margin: Any = None) -> Floats:
        """Return class probabilities (n_rows, n_classes).

        Parameters and errors are as for `predict`.
        """
        return of_classes(self._predictions(X, base_margin))

    @spelled_out(BoostedTrees.staged_predict)
    def staged_predict_proba(self, X: Tables, *, base_margin: Any = None) -> Iterator[Floats]:
        """Yield class probabilities (n_rows, n_classes) after each round.

        Parameters and errors are as for `staged_predict`.
        """
        return map(of_classes, self._stages(X, base_margin))

    def _decide(self, outputs: Floats) -> NDArray[Any]:
        return np.asarray(self.classes_[np.argmax(of_classes(outputs), axis=1)])

    def _target(
        self, y: NDArray[Any] | None, party: str, n_rows: int, classes: list[Any] | None = None
    ) -> tuple[list[Any], Floats]:
        return self._class_numbers(one_column(y), party, n_rows, classes)


@spelled_out(GBDTClassifier)
class GBDTRegressor(Scored, RegressorMixin, BoostedTrees):
    """Gradient boosted trees for a numeric target.

    Parameters
    ----------
    protocol, n_estimators, max_depth, max_leaves, num_parallel_tree, multi_strategy, process_type, learning_rate,
    reg_lambda, reg_alpha, min_split_loss, min_child_weight, min_child_samples, subsample, colsample_bytree, goss,
    top_rate, other_rate
        As for `GBDTClassifier`.
    objective : str, class or None, default None
        Loss: "squared_error" (None), "poisson" for counts and rates, "tweedie" for amounts that are often 0, "gamma"
        for amounts above 0, "huber" for targets with outliers, "quantile" for a quantile, "absolute_error" for the
        median, "squared_error_steps" for the squared error by whole numbers alone, or a subclass of `CustomLoss`, as
        the class or ``package.module:CLASS``. XGBoost's names ("reg:squarederror") are accepted (docs/objectives.md).
    max_delta_step, max_cat_to_onehot, category_sets, max_categories, tweedie_variance_power, huber_slope,
    quantile_alpha, monotone_constraints, interaction_constraints
        As for `GBDTClassifier`.
    base_score : float or None, default None
        Prediction that training starts from. None: it is estimated from the labels of all participants. With noise on
        gradients or sums it is 0.5: set it near the mean of the labels, or near their quantile.
    fractional_bits, max_bin
        As for `GBDTClassifier`.
    eval_metric : str, function, list of these or None, default None
        Metrics of eval sets, several in one text with commas or as a list: "rmse", "mae", "mape" or "rmsle". None: the
        objective's own metric. The last metric decides early stopping. Only the party with the labels computes them. A
        function ``metric(y_true, y_pred)`` gets labels and predictions; lower is better. It is called only in this
        process (not with ``transport="tls"``), and neither sent nor saved.
    early_stopping_rounds, early_stopping_min_delta, random_state, n_jobs, active, transport, parties
        As for `GBDTClassifier`.
    scale_pos_weight, class_weight : None
        For classes alone; another value raises ConfigError.
    callbacks, verbose
        As for `GBDTClassifier`.

    Attributes
    ----------
    parts_, evals_result_, n_iter_, best_iteration_, best_score_, feature_names_in_, warnings_, clipped_rows_,
    feature_importances_, communication_, timeline_, timings_, disclosures_
        As for `GBDTClassifier`.

    See Also
    --------
    GBDTClassifier : Classes instead of numbers.
    LinearRegression : A linear model, with standard errors.
    CustomLoss : A loss of your own.

    Examples
    --------
    >>> import numpy as np, treaty
    >>> X = np.arange(100.0)[:, None]
    >>> price = np.where(X[:, 0] < 50, 2.0, 3.0)
    >>> model = treaty.GBDTRegressor(n_estimators=50, max_depth=1).fit(X, price)
    >>> model.predict([[10.0], [90.0]]).round(1)
    array([2., 3.])

    Predict a quantile instead of the mean:

    >>> model = treaty.GBDTRegressor(objective="quantile", quantile_alpha=0.9).fit(X, X[:, 0])
    >>> bool((model.predict(X) >= X[:, 0]).mean() > 0.8)
    True
    """

    def _target(
        self, y: NDArray[Any] | None, party: str, n_rows: int, classes: list[Any] | None = None
    ) -> tuple[None, Floats]:
        return None, check_numbers(one_column(y), party, n_rows, self.objective)


@spelled_out(GBDTClassifier)
class GBDTRanker(BoostedTrees):
    """Gradient boosted trees that rank the rows of a group (LambdaMART).

    Labels are relevance, whole numbers from 0 to 31, and `qid` assigns rows to groups; only the party with the labels
    has either. Systems split by row, and `FedXGBoostLDP`, cannot rank.

    Parameters
    ----------
    protocol, n_estimators, max_depth, max_leaves, num_parallel_tree, multi_strategy, process_type, learning_rate,
    reg_lambda, reg_alpha, min_split_loss, min_child_weight, min_child_samples, subsample, colsample_bytree, goss,
    top_rate, other_rate
        As for `GBDTClassifier`.
    objective : {"ndcg", "pairwise"} or None, default None
        "ndcg" (None) weights a pair of rows by its effect on NDCG; "pairwise" weights all pairs alike.
    max_delta_step, max_cat_to_onehot, category_sets, max_categories, tweedie_variance_power, huber_slope,
    quantile_alpha, monotone_constraints, interaction_constraints
        As for `GBDTClassifier`.
    base_score : float or None, default None
        Margin that training starts from; it changes no order.
    fractional_bits, max_bin
        As for `GBDTClassifier`.
    eval_metric : str, function, list of these or None, default None
        Metrics of eval sets, several in one text with commas or as a list: "ndcg", "ndcg@5", "map" or "map@5" ("map"
        needs relevance 0 or 1). None: the objective's own metric. The last metric decides early stopping. Only the
        party with the labels computes them. A function ``metric(y_true, y_pred)`` gets labels and predictions; lower is
        better. It is called only in this process (not with ``transport="tls"``), and neither sent nor saved.
    early_stopping_rounds, early_stopping_min_delta, random_state, n_jobs, active, transport, parties
        As for `GBDTClassifier`.
    scale_pos_weight, class_weight : None
        For classes alone; another value raises ConfigError.
    callbacks, verbose
        As for `GBDTClassifier`.

    Attributes
    ----------
    parts_, evals_result_, n_iter_, best_iteration_, best_score_, feature_names_in_, warnings_,
    feature_importances_, communication_, timeline_, timings_, disclosures_
        As for `GBDTClassifier`.

    See Also
    --------
    GBDTClassifier : Classes instead of an order.

    Examples
    --------
    Fifty queries with four documents each; longer documents are more relevant:

    >>> import numpy as np, treaty
    >>> query, length = np.repeat(np.arange(50), 4), np.tile([1.0, 2.0, 3.0, 4.0], 50)
    >>> model = treaty.GBDTRanker(n_estimators=3).fit(length[:, None], length >= 3, qid=query)
    >>> model.score(length[:, None], length >= 3, qid=query)
    1.0
    """

    @spelled_out(BoostedTrees.fit)
    def fit(
        self,
        X: Tables,
        y: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        eval_set: tuple[Tables, ArrayLike] | Sequence[tuple[Tables, ArrayLike]] | None = None,
        *,
        qid: ArrayLike | None = None,
        eval_qid: Sequence[ArrayLike] | None = None,
        **further: Any,
    ) -> Self:
        """Train, playing every party on this machine.

        Parameters
        ----------
        X
            As for `GBDTClassifier.fit`.
        y : array-like (n_rows,)
            Relevance, held by the active party.
        sample_weight : array-like (n_rows,) or None
            Weights of 0 or more, one for all rows of a group, held by the active party.
        eval_set
            As for `GBDTClassifier.fit`.
        qid : array-like (n_rows,)
            The group of each row, a number or text. Rows of a group need not be adjacent.
        eval_qid : list of array-like
            The groups of the rows of each eval set.
        **further
            By name:
        base_margin, sample_weight_eval_set, base_margin_eval_set, xgb_model, early_stopping_rounds, checkpoint, verbose
            As for `GBDTClassifier.fit`.

        Returns
        -------
        self

        Raises
        ------
        ConfigError, DataError
            As for `GBDTClassifier.fit`.
        """
        given = eval_sets_of(eval_set)
        groups = [] if eval_qid is None else list(eval_qid)
        if qid is None or len(groups) != len(given):
            raise ConfigError(
                "expected fit(X, y, qid=...), and eval_qid with the groups of each eval set, got "
                f"{'no qid' if qid is None else f'{len(groups)} of {len(given)} eval sets'}"
            )
        watched: Any = [(of.X, _Relevance(of.y, group), of.weight) for of, group in zip(given, groups, strict=True)]
        labels: Any = _Relevance(y, qid)
        return super().fit(X, labels, sample_weight, watched, **further)

    def score(self, X: Tables, y: ArrayLike, sample_weight: ArrayLike | None = None, *, qid: ArrayLike) -> float:
        """Return the mean over groups of NDCG of all their rows, 1 for the best order; ties keep their order."""
        check_row_order(X, {"y": y, "sample_weight": sample_weight, "qid": qid})
        predicted = self.predict(X)
        target = check_relevance(y, qid, "y", len(predicted), self.objective or "ndcg")
        weight = None if sample_weight is None else check_weights(sample_weight, n_rows=len(predicted), party="y")
        return mean_ndcg(predicted, target, weight, len(predicted))

    def _settings(self, **changed: Any) -> Settings:
        return super()._settings(**{"objective": self.objective or "ndcg", **changed})

    def _label_columns(self, y: Any) -> dict[str, Any]:
        return {"y": y.relevance, "qid": y.group}

    def _target(self, y: Any, party: str, n_rows: int, classes: list[Any] | None = None) -> tuple[None, Floats]:
        relevance, group = one_column(y.relevance), one_column(y.group)
        return None, check_relevance(relevance, group, party, n_rows, self.objective or "ndcg")


class _Relevance(NamedTuple):
    """Labels of a ranking, as the user passed them."""

    relevance: Any
    group: Any
