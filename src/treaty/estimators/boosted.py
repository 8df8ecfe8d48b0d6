"""`BoostedTrees`: parameters, checks and training of the estimators of boosted trees."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin, is_classifier
from sklearn.utils.validation import validate_data

from treaty.data.binning import joined_categories
from treaty.data.columns import check_weights
from treaty.data.table import match_rows
from treaty.errors import ConfigError, DataError, warn_user
from treaty.estimators import inputs
from treaty.estimators.base import Settings, Tables, one_column, refuse_misplaced
from treaty.estimators.files import opened_by_participant, shown
from treaty.estimators.trained_trees import TrainedTrees
from treaty.files import as_path
from treaty.machine.arrays import Floats
from treaty.models.trees import ModelPart, forest_of
from treaty.runs.fit import no_rows, train
from treaty.runs.threads import Run, Watched
from treaty.systems import SYSTEMS, find_system
from treaty.systems.horizontal.rows import all_columns, describe, schema_of
from treaty.systems.options import SystemOptions
from treaty.systems.pooled.constraints import by_owner
from treaty.systems.pooled.continuing import check_start
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.pooled.system import ALONE, check_margins, refuse_margins, why_no_split
from treaty.systems.system import LabelledRows, roles_of
from treaty.trees.boosting import Forest
from treaty.trees.objectives import check_watched

# What an estimator keeps of the tables and labels that it was fitted on
_OF_TABLES = ("schemas_", "classes_", "n_features_in_", "feature_names_in_", "columns_by_party_", "positions_by_party_")


@dataclass(eq=False, repr=False)
class BoostedTrees(TrainedTrees):
    """Classifier, regressor and ranker without their checks of labels (`_target`)."""

    _model, _common = "trees", BoostingOptions
    _why_needed = "no party can decide rows at its splits"
    _rounds = "n_estimators"

    protocol: str | SystemOptions = "pooled"
    _: KW_ONLY
    n_estimators: int | None = None
    max_depth: int | None = None
    max_leaves: int | None = None
    num_parallel_tree: int = 1
    multi_strategy: str = "one_output_per_tree"
    process_type: str = "default"
    learning_rate: float | None = None
    reg_lambda: float | None = None
    reg_alpha: float = 0.0
    min_split_loss: float = 0.0
    min_child_weight: float = 1.0
    min_child_samples: int | None = None
    subsample: float = 1.0
    colsample_bytree: float = 1.0
    goss: bool = False
    top_rate: float = 0.2
    other_rate: float = 0.1
    max_bin: int | None = None
    objective: str | type | None = None
    max_delta_step: float | None = None
    max_cat_to_onehot: int | None = None
    category_sets: str = "halves"
    max_categories: int | None = None
    tweedie_variance_power: float | None = None
    huber_slope: float | None = None
    quantile_alpha: float | None = None
    monotone_constraints: Mapping[str, int] | Sequence[int] | None = None
    interaction_constraints: Sequence[Sequence[str | int]] | None = None
    base_score: float | None = None
    fractional_bits: int = 16
    eval_metric: str | Callable[..., float] | Sequence[Any] | None = None
    early_stopping_rounds: int | None = None
    early_stopping_min_delta: float = 0.0
    random_state: int | np.random.RandomState | None = None
    n_jobs: int | None = None
    active: str | None = None
    transport: Literal["memory", "tls"] = "memory"
    parties: Mapping[str, Iterable[Any]] | None = None
    scale_pos_weight: float | None = None
    class_weight: Mapping[Any, float] | Literal["balanced"] | None = None
    callbacks: Sequence[Any] | None = None
    verbose: bool | int = False

    # ------------------------------------------------------------ fit

    def fit(
        self,
        X: Tables,
        y: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
        eval_set: tuple[Tables, ArrayLike] | Sequence[tuple[Tables, ArrayLike]] | None = None,
        *,
        base_margin: ArrayLike | None = None,
        sample_weight_eval_set: Sequence[ArrayLike | None] | None = None,
        base_margin_eval_set: Sequence[ArrayLike] | None = None,
        xgb_model: BoostedTrees | str | Path | None = None,
        early_stopping_rounds: int | None = None,
        checkpoint: str | Path | None = None,
        verbose: bool | int | None = None,
        **unknown: Any,
    ) -> Self:
        """Train, playing every party on this machine.

        Parameters
        ----------
        X : table, or mapping of party name to table, or mapping of party name to (table, labels)
            A table is a dataframe, or a 2-D array or scipy sparse matrix (n_rows, n_features). Absent cells of a sparse
            matrix are the number 0, as in scikit-learn and LightGBM (in XGBoost they are missing). Vertical protocols
            take a mapping of party to table: each party's own columns of the same rows in the same order. The first
            party is the active one unless `active` names another; its table may have no column. Horizontal protocols
            take a mapping of participant to ``(X, y)`` or ``(X, y, sample_weight)``: its own rows of the same columns.
            Columns are matched by the first participant's names (a column that another lacks is missing there) or, if
            all tables are arrays, by position. With the parameter `parties`, X is one table. Rows are matched by
            position: if indexes of pandas objects, including labels and weights, differ or are in another order, fit
            raises DataError.
        y : array-like (n_rows,) or None
            Labels, held by the active party; None under a horizontal protocol.
        sample_weight : array-like (n_rows,) or None
            Weights of 0 or more, held by the active party; None under a horizontal protocol.
        eval_set : (X, y), (X, y, sample_weight), or list of them
            Evaluated after every round, see `evals_result_`; the last metric of the last set decides early stopping.
            Under a horizontal protocol, X is a plain table of the leader, or the server. `class_weight` and
            `scale_pos_weight` weigh training rows alone, as in XGBoost.
        base_margin : array-like (n_rows,) or (n_rows, n_classes), or None
            Margins from which the rows start instead of `base_score`, as in XGBoost (LightGBM's `init_score`): log-odds
            of two classes, scores of each of more, logarithms of means, else predictions. The active party has them,
            and `predict` needs those of its rows. Not with a horizontal protocol, or with noise.
        sample_weight_eval_set : list of (array-like (n_rows,) or None), or None
            Weights of 0 or more of the rows of each eval set, for its metrics and for early stopping; held by the
            active party. None: all rows of a set weigh the same.
        base_margin_eval_set : list of array-like
            Margins of the rows of each eval set, with `base_margin`.
        xgb_model : fitted estimator, path or None
            A finished model of the same kind, parties and columns, or the folder that `save` wrote: `n_estimators` more
            rounds are added to it, on the same rows or others. Its trees stay as they are, unless `process_type` is
            "update". On the same rows, the model is that of one fit with all rounds, bit for bit, unless rows or
            columns are drawn. `evals_result_` begins with the new rounds, and early stopping counts those alone.
        early_stopping_rounds : int or None
            For this fit, instead of the parameter of the same name.
        checkpoint : path or None
            Folder where each party saves its progress. A fit that finds there the progress of an interrupted fit, on
            the same rows with the same options (`n_estimators` may differ), resumes it and returns the same model. At
            the end of training, the folder keeps only what serves later fits on the same rows: hints of the lattice map
            and the ledger of what they reveal, the key of noise and the ledger of its cost, noisy buckets of other
            parties, and common bins. Without a folder, ledgers of each fit start at zero.
        verbose : bool, int or None
            For this fit, instead of the parameter of the same name.
        **unknown
            Other parameters raise ConfigError, which names the right ones.

        Returns
        -------
        self

        Raises
        ------
        ConfigError
            For an option that is invalid, unknown or not of this protocol.
        DataError
            For a table or label that cannot be used, or row counts that differ.

        Warns
        -----
        UserWarning
            If `base_score` of a regression is not estimated; if "pooled" joins the tables of several parties; if
            categories of a column share a bin; if no tree has a split, with the reason; and if the loss of the training
            rows increased.
        """
        refuse_misplaced(type(self), unknown, self.protocol, "fit")
        started, earlier = time.perf_counter(), self._earlier(xgb_model)
        self._forget()
        self.warnings_: list[str] = []
        watch = inputs.Watch(self, self.verbose if verbose is None else verbose)
        changed = {} if early_stopping_rounds is None else {"early_stopping_rounds": early_stopping_rounds}
        watched = inputs.eval_sets_of(eval_set, sample_weight_eval_set, base_margin_eval_set)
        given = inputs.GivenRows(X, y, sample_weight, base_margin)
        run = self._run(self._settings(**changed), given, watched, earlier)
        folder = None if checkpoint is None else as_path(checkpoint, "checkpoint")
        weighted = any(rows.weight is not None for rows in run.data.values())
        trained = train(
            run, transport=self.transport, checkpoint=folder, weighted=weighted, finished=self._finished, watch=watch
        )
        self._keep_training(trained, started)
        self._warn_of_trees(forest_of(list(self.parts_.values())), run)
        watch.call("after_training")
        return self

    def _run(
        self, settings: Settings, given: inputs.GivenRows, watched: Sequence[inputs.GivenRows],
        earlier: BoostedTrees | None,
    ) -> Run:  # fmt: skip
        """Return the run of a training, after the `earlier` model if there is one; refuse or warn of what is given."""
        if given.base_margin is not None:
            refuse_margins(*settings)
        if any((of.base_margin is None) != (given.base_margin is None) for of in watched):
            raise ConfigError("expected base_margin and base_margin_eval_set of all eval sets, or neither")
        check_start(*settings, goes_on=earlier is not None)
        if earlier is not None:
            self.__dict__.update({name: of for name, of in vars(earlier).items() if name in _OF_TABLES})
            new = 0 if settings[2].refreshes else settings[2].n_estimators
            n_estimators = new + forest_of(list(earlier.parts_.values())).rounds
            settings = (*settings[:2], msgspec.structs.replace(settings[2], n_estimators=n_estimators))
        prepare = self._on_rows if settings[0].split == "rows" else self._on_columns
        run = prepare(settings, given, watched)
        noisy = run.options.adds_noise and getattr(run.options, "target_range", None) is None
        if self.base_score is None and isinstance(self, RegressorMixin) and noisy:
            warn_user(
                f"training starts from base_score=0.5, since {settings[0].name!r} does not estimate it with these "
                "options: set base_score near the mean of the labels"
            )
        for party, rows in run.data.items():
            for joined in joined_categories(rows.table, run.common.most_categories):
                self._warn(joined if party == ALONE else f"{party}: {joined}")
        if run.common.early_stopping_rounds is not None and not (run.eval_sets or run.options.holds_out_rows):
            raise ConfigError("early_stopping_rounds needs an eval_set: fit(X, y, eval_set=(X_valid, y_valid))")
        if run.common.early_stopping_min_delta > 0.0 and run.common.early_stopping_rounds is None:
            raise ConfigError("early_stopping_min_delta needs early_stopping_rounds")
        return replace(run, earlier={} if earlier is None else earlier.parts_)

    def _earlier(self, given: Any) -> BoostedTrees | None:
        """Return the fitted model that training goes on from, apart from this estimator, which is fitted anew."""
        if given is None:
            return None
        if isinstance(given, str | Path):
            from treaty.estimators.loading import load  # imports this module

            given = load(given)
        if type(given) is not type(self) or not hasattr(given, "parts_"):
            raise ConfigError(f"expected xgb_model to be a fitted {type(self).__name__}, or its folder, got {given!r}")
        return copy(given)

    def _warn_of_trees(self, forest: Forest, run: Run) -> None:
        """Warn of a model that predicts the same for all rows, with the reason, and of a training loss that rose."""
        by_row = run.system.split == "rows"
        rows = [run.data[name] for name in (run.roles.owners if by_row else [run.roles.active])]
        tables = None if by_row else [of.table for of in run.data.values()]
        reason = why_no_split(forest, run.common, rows, tables, noise=run.options.adds_noise)
        for warning in filter(None, (reason, forest.diverged)):
            self._warn(warning)

    def _warn(self, sentence: str) -> None:
        self.warnings_.append(sentence)
        warn_user(sentence)

    def _on_columns(self, settings: Settings, given: inputs.GivenRows, watched: Sequence[inputs.GivenRows]) -> Run:
        """Return the run of a training on one table, or between parties that hold columns of the same rows."""
        X, y, sample_weight, base_margin = given
        if y is None and inputs.are_labelled(X):
            by_row = [name for name in SYSTEMS["trees"] if find_system(name, "trees").split == "rows"]
            raise DataError(
                f"protocol {settings[0].name!r} expects tables and labels as fit(X, y), got (X, y) by party, as for "
                f"{', '.join(map(repr, by_row))}"
            )
        columns = {"sample_weight": sample_weight, "base_margin": base_margin}
        # columns and classes of the model that training goes on from
        goes_on = hasattr(self, "schemas_")
        tables = self._tables(X, reset=not goes_on, **self._label_columns(y), **columns)
        active = self._active(tables)
        n_rows = next(iter(tables.values())).n_rows
        known = self.classes_.tolist() if hasattr(self, "classes_") else None
        classes, target = self._target(y, active, n_rows, known)
        match_rows(tables, target)
        inputs.refuse_labels(X, tables, one_column(self._label_columns(y)["y"]))
        weight = None if sample_weight is None else check_weights(sample_weight, n_rows=n_rows, party=active)
        weight = self._class_weights(settings, target, weight)
        # Rows of weight 0 must not shift the quantiles of bins either.
        margins = None if base_margin is None else self._margins_of(base_margin, active, n_rows, classes)
        tables, target, weight, margins = inputs.rows_with_weight(tables, target, weight, margins)
        self.schemas_ = {name: table.schema for name, table in tables.items()}
        common, directions = by_owner(
            settings[2], self.schemas_, getattr(self, "positions_by_party_", {}), self.n_features_in_
        )
        if settings[0].split == "columns" and common.monotone_constraints:
            # each party states its own
            common = msgspec.structs.replace(common, monotone_constraints=True)
        settings = *settings[:2], common
        run = self._run_on_columns(settings, tables, active, target, weight, classes=classes)
        data = {**run.data, active: replace(run.data[active], base_margin=margins)}
        evals = self._eval_sets(watched, active, classes, common.metrics)
        return replace(run, data=data, directions=directions, eval_sets=evals)

    def _on_rows(self, settings: Settings, rows_of_all: inputs.GivenRows, watched: Sequence[inputs.GivenRows]) -> Run:
        """Return the run of a training between participants that hold labelled rows of the same columns."""
        (system, own, common), (X, y, sample_weight, _) = settings, rows_of_all
        if self.parties is not None:
            self._by_party(X, system, reset=True)  # raises: participants have rows
        given, X = X, opened_by_participant(X)
        rows = inputs.participants(X, system.name)
        for name, of in rows.items():
            inputs.refuse_labels(given[name][0], {name: of.table}, of.y)
        if y is not None or sample_weight is not None:
            inside = f"protocol {system.name!r} takes labels and weights in X, with each participant's rows"
            raise ConfigError(f"{inside}: leave out y and sample_weight")
        if self.active is not None and (not isinstance(self.active, str) or not self.active):
            raise ConfigError(f"expected active to name a participant, or a party without data, got {self.active!r}")
        roles = roles_of(system, list(rows), self.active, own)
        if self.active not in (None, roles.active):
            server = f"protocol {system.name!r} has a server, {roles.active!r}, which fit plays"
            raise ConfigError(f"{server}: expected active=None, got {self.active!r}")
        validate_data(self, shown(X[next(iter(rows))][0]), reset=True, skip_check_array=True)
        described = [describe(of, None) for of in rows.values()]
        # The schema that the parties agree on in the protocol.
        self.schemas_ = {ALONE: schema_of(*all_columns(described))}
        labels: dict[str, Any] = {name: of.y for name, of in rows.items()}
        if is_classifier(self):
            inputs.check_one_kind(labels)
        else:
            labels = {name: self._target(of, name, len(of))[1] for name, of in labels.items()}
        # Classes are numbered over the labels of all participants, which then get their own rows back.
        ends = np.cumsum([of.table.n_rows for of in rows.values()])
        classes, target = self._target(np.concatenate(list(labels.values())), "all participants", int(ends[-1]))
        data = {}
        for (name, of), own_target in zip(rows.items(), np.split(target, ends[:-1]), strict=True):
            weight = self._class_weights(settings, own_target, of.weight)
            # As on one table, rows of weight 0 must not shift the quantiles of bins.
            kept, own_target, weight = inputs.rows_with_weight({ALONE: of.table}, own_target, weight)
            data[name] = LabelledRows(kept[ALONE], own_target, weight)
        # Roles that see columns without having rows, such as a server, get a table of none.
        data |= {
            name: no_rows(self.schemas_[ALONE], len(classes or ())) for name in roles.having(*system.shows_columns)
        }
        evals = [
            replace(of, tables={roles.active: of.tables[ALONE]})
            for of in self._eval_sets(watched, roles.active, classes, common.metrics)
        ]
        common, _ = by_owner(common, self.schemas_, {}, len(self.schemas_[ALONE].names))
        return Run(
            system=system, options=own, common=common, roles=roles, data=data, classes=classes, eval_sets=evals,
            n_jobs=self.n_jobs,
        )  # fmt: skip

    def _class_weights(self, settings: Settings, target: Floats, weight: Floats | None) -> Floats | None:
        """Return the weights of rows times those of their classes; ConfigError if these would reveal labels."""
        if self.scale_pos_weight is None and self.class_weight is None:
            return weight
        if not is_classifier(self):
            kind = type(self).__name__
            raise ConfigError(f"scale_pos_weight and class_weight are for classes, not for {kind}: use sample_weight")
        inputs.refuse_revealing_weights(settings[0], settings[1], self.class_weight)
        return inputs.weights_of_classes(target, self.classes_, self.scale_pos_weight, self.class_weight, weight)

    def _margins_of(self, given: Any, whose: str, n_rows: int, classes: list[Any] | None) -> Floats:
        return check_margins(given, whose, n_rows, len(classes) if classes is not None and len(classes) > 2 else 1)

    def _label_columns(self, y: Any) -> dict[str, Any]:
        return {"y": y}

    def _finished(self, parts: dict[str, ModelPart]) -> None:
        # If training is interrupted later, these parts can predict.
        self.parts_ = parts

    def _eval_sets(
        self, given: Sequence[inputs.GivenRows], active: str, classes: list[Any] | None, metrics: Sequence[str]
    ) -> list[Watched]:
        """Check eval sets against the training tables and the metrics."""
        evals = []
        for number, (X, y, sample_weight, base_margin) in enumerate(given):
            columns = {"sample_weight": sample_weight, "base_margin": base_margin}
            tables = self._tables(X, reset=False, **self._label_columns(y), **columns)
            n_rows, weight, margins, whose = next(iter(tables.values())).n_rows, None, None, f"{active}: eval_{number}"
            _, target = self._target(y, active, n_rows, classes)
            match_rows(tables, target)
            check_watched(metrics, target, len(classes or ()))
            if sample_weight is not None:
                weight = check_weights(sample_weight, n_rows=n_rows, party=whose)
            if base_margin is not None:
                margins = self._margins_of(base_margin, whose, n_rows, classes)
            evals.append(Watched(tables, target, weight, margins))
        return evals

    def _keep(self, parts: dict[str, ModelPart]) -> None:
        self.parts_, forest = parts, forest_of(list(parts.values()))
        # A training has set them with their own dtype.
        if forest.classes is not None and not hasattr(self, "classes_"):
            self.classes_ = np.array(forest.classes)
        self.evals_result_ = forest.history
        self.n_iter_ = forest.rounds
        # The last metric of the last eval set is the one that decides early stopping.
        if forest.best_round is not None:
            self.best_iteration_ = forest.best_round - 1
            values = list(list(forest.history.values())[-1].values())[-1]
            self.best_score_ = values[self.best_iteration_ - forest.before]
        self.clipped_rows_ = forest.clipped_rows
