"""Options of regressions: common ones, and those of the two federated systems."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from treaty.data.binning import MOST_BINS
from treaty.errors import ConfigError
from treaty.statistics import Monotone
from treaty.systems import options

# Most `fractional_bits` under the lattice map
LATTICE_FRACTION = 40
# Rows of a mini-batch where `batch_size` is left open, as in Yang et al.
BATCH = 1000
# In a table of at most so many rows an open `batch_size` is all of them: an epoch of few batches has too few steps
SMALL_TABLE = 10 * BATCH
# Rows of a scorecard's bin where `min_bin_rows` is left open: this share of all, and this number at least
SHARE_OF_BIN, FEWEST_OF_BIN = 0.02, 20
OF_SCORECARDS = ("base_score", "base_odds", "round_points", "max_bin", "min_bin_rows", "monotone")


class RegressionOptions(options.CommonOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options that regressions have in every system.

    `treaty.LogisticRegression` documents all of them but `family`; docs/options.md has them in a table.

    Attributes
    ----------
    family : {"logistic", "multiclass", "linear", "poisson"}
        What is regressed: two classes, several classes one against the rest, a number by least squares, or a count.
        Estimators set it, and a job's `classes` above 2.
    pdo, base_score, base_odds, round_points, max_bin, min_bin_rows, monotone
        Of a scorecard, which a regression with `pdo` is; `treaty.Scorecard` documents them.
    """

    family: Literal["logistic", "multiclass", "linear", "poisson"] = "logistic"
    standard_errors: bool = False
    max_iter: options.AtLeastOne | None = None
    batch_size: options.AtLeastOne | None = None
    learning_rate: options.Positive | None = None
    tol: options.NotNegative = 1e-5
    l2: options.NotNegative = 0.0
    memory: options.AtLeastOne = 5
    period: options.AtLeastOne = 4
    hessian_batch_size: options.AtLeastOne | None = None
    fractional_bits: Annotated[int, msgspec.Meta(ge=16, le=48)] = 32
    calibrate: bool = True
    early_stopping_rounds: options.AtLeastOne | None = None
    random_state: options.Seed | None = None
    missing: Literal["median", "raise", "drop"] | None = None
    reference: Literal["first"] | None = None
    pdo: options.Positive | None = None
    base_score: float = 600.0
    base_odds: options.Positive = 50.0
    round_points: bool = True
    max_bin: Annotated[int, msgspec.Meta(ge=2, le=MOST_BINS)] = 10
    min_bin_rows: options.AtLeastOne | None = None
    monotone: Monotone = "auto"

    table: ClassVar[str] = "regression"
    may_change: ClassVar[frozenset[str]] = frozenset({"max_iter"})

    @property
    def most_rounds(self) -> int:
        return self.max_iter or (100 if self.whole_table else 30)

    @property
    def whole_table(self) -> bool:
        """Whether every step is on all rows, so that training ends at the optimum; of options that `on` has settled."""
        return self.batch_size is None or not self.has_batches

    @property
    def has_batches(self) -> bool:
        """Whether steps may be on batches: not of a regression with standard errors, which are about an optimum."""
        return self.family == "logistic" and not self.standard_errors

    def on(self, n_rows: int) -> RegressionOptions:
        """Return these options with an open `batch_size` settled for a table of so many rows."""
        open_ = self.batch_size is None and n_rows > SMALL_TABLE and self.pdo is None
        return msgspec.structs.replace(self, batch_size=BATCH) if open_ else self

    def least_rows(self, n_rows: int) -> int:
        """Return how many of a table's rows a bin must have."""
        return self.min_bin_rows or max(FEWEST_OF_BIN, math.ceil(SHARE_OF_BIN * n_rows))

    @property
    def classifies(self) -> bool:
        """Whether labels are classes."""
        return self.family in ("logistic", "multiclass")

    def check_eval_sets(self, own: options.SystemOptions) -> None:
        """Refuse eval sets where no epoch has a loss of them, or where not every party shows its part of margins."""
        if not self.has_batches or self.pdo is not None:
            raise ConfigError(
                "eval sets are of a logistic regression of two classes: other regressions, scorecards, and those with "
                "standard errors, go to the optimum of the whole table; leave eval sets out"
            )
        if own.mode == "paper":
            raise ConfigError("mode='paper' has no eval sets, as the paper has none: leave them out")
        if isinstance(own, FederatedRegression) and not own.show_eval_margins:
            raise ConfigError(
                "the active party gets the others' part of the margin of every row of an eval set, after every epoch; "
                "after as many epochs as these have columns it has the columns, up to a linear map; if it may, set "
                f"show_eval_margins=True in {type(own).__name__} at every party, or leave eval sets out"
            )

    def rows_of_batch(self, n_rows: int) -> int:
        """Return how many rows a step is on, in a table of so many."""
        return min(self.batch_size or n_rows, n_rows) if self.has_batches else n_rows

    def checked(self, own: options.SystemOptions) -> RegressionOptions:
        """Return these options; refuse a contradiction. What depends on the system is for its own `check`."""
        self._check_scorecard(own)
        size, batch_size = self.hessian_batch_size, self.batch_size or BATCH
        if size is not None and size > batch_size and size % batch_size:
            raise ConfigError(
                f"expected hessian_batch_size of at most batch_size={batch_size} or a multiple of it, got {size}"
            )
        if self.standard_errors and self.family == "multiclass":
            raise ConfigError(
                "standard errors exist for two classes and for numbers: with more classes leave standard_errors out"
            )
        if self.standard_errors and self.l2 > 0.0:
            raise ConfigError(
                f"expected l2=0 with standard_errors, which hold for weights without a penalty, got {self.l2}"
            )
        # an open batch_size is settled by name here, not by the table's size
        if self.pdo is not None:
            return self
        by_name = own.mode == "paper" or getattr(own, "solver", None) is not None or size is not None
        return msgspec.structs.replace(self, batch_size=batch_size) if by_name else self

    def _check_scorecard(self, own: options.SystemOptions) -> None:
        """Refuse options of a scorecard without `pdo`, and with it those that a scorecard does not have."""
        plain = RegressionOptions()
        if self.pdo is None:
            changed = [name for name in OF_SCORECARDS if getattr(self, name) != getattr(plain, name)]
            if changed:
                raise ConfigError(f"{changed[0]} is an option of scorecards: add pdo, or leave {changed[0]} out")
            return
        others = ("family", "batch_size", "hessian_batch_size", "early_stopping_rounds", "missing", "reference")
        named = [name for name in (*others, "calibrate") if getattr(self, name) != getattr(plain, name)]
        named += [name for name in ("solver", "mode") if getattr(own, name, None) not in (None, "safe")]
        if named:
            raise ConfigError(
                "a scorecard is a calibrated regression of two classes on the whole table, with bins of missing values "
                f"and of categories: leave {named[0]} out"
            )


@dataclass(kw_only=True, repr=False)
class FederatedRegression(options.SystemOptions):
    """Options of both federated systems of regression: a cipher, its key, and perhaps a coordinator."""

    coordinator: bool | None = None
    encryption: Literal["auto", "lattice", "ou", "paillier"] | None = None
    key_bits: options.KeyBits | None = None
    insecure_test_key_bits: options.TestKeyBits | None = None
    show_weights: bool = False
    show_eval_margins: bool = False
    allow_exact_sums: bool = False

    # `learning_rate` where the estimator leaves it open
    first_rate: ClassVar[float]

    # Of the rate by epochs of batches, see `treaty.linear.training.Schedule`
    decay: ClassVar[float] = 0.0

    # Whether steps use correction pairs
    keeps_pairs: ClassVar[bool]

    @property
    def has_coordinator(self) -> bool:
        """`coordinator`, resolved."""
        return self.coordinator is not False

    def cipher(self, fractional_bits: int, family: str = "logistic") -> str:
        """Resolve `encryption`: "lattice", "ou" or "paillier".

        Left open, it is Okamoto-Uchiyama in a Poisson regression, and the paper's in paper mode. Otherwise it is the
        lattice map, under which the coordinator has no key. Without a coordinator, or where a key is named, it is
        Okamoto-Uchiyama: without a coordinator encrypted columns are then sent once, and little after that.
        """
        if self.encryption not in (None, "auto"):
            return self.encryption
        if family == "poisson":
            return "ou"
        if self.mode == "paper":
            return "paillier"
        keyed = self.key_bits or self.insecure_test_key_bits or fractional_bits > LATTICE_FRACTION
        return "ou" if keyed or not self.has_coordinator else "lattice"

    def check(self, common: Any) -> None:
        """Refuse contradictions between cipher, key, mode and kind of regression."""
        if common.pdo is not None and (common.min_bin_rows or FEWEST_OF_BIN) < FEWEST_OF_BIN:
            raise ConfigError(
                f"each party learns how many events there are in each of its bins: expected min_bin_rows of at least "
                f"{FEWEST_OF_BIN} between parties, got {common.min_bin_rows}"
            )
        if self.allow_exact_sums and common.pdo is None:
            raise ConfigError("allow_exact_sums is about counts in bins of a scorecard: add pdo, or leave it out")
        named = [name for name in ("key_bits", "insecure_test_key_bits") if getattr(self, name) is not None]
        if named and self.encryption == "lattice":
            raise ConfigError(
                f"encryption='lattice' has no key: leave {' and '.join(named)} out, or take encryption='ou' or "
                "'paillier'"
            )
        if len(named) > 1:
            raise ConfigError("expected key_bits or insecure_test_key_bits, got both")
        options.check_test_key(self)
        if self.mode == "paper" and not common.has_batches:
            raise ConfigError(
                "mode='paper' is the published logistic regression by mini-batches: it has no standard errors, and no "
                "other regression; leave it out"
            )
        if common.family == "poisson" and self.encryption == "lattice":
            raise ConfigError(
                "the lattice map multiplies columns that stay the same, but a Poisson regression's change with its "
                "weights: take encryption='ou' or 'paillier', or leave it out"
            )
        if self.encryption == "lattice" and common.fractional_bits > LATTICE_FRACTION:
            raise ConfigError(
                f"expected fractional_bits of at most {LATTICE_FRACTION} under the lattice map, got "
                f'{common.fractional_bits}; take encryption="ou"'
            )


@dataclass(kw_only=True, repr=False)
class QuasiNewton(FederatedRegression):
    """Vertical logistic regression by stochastic quasi-Newton steps (Yang et al. 2019, arXiv 1912.00513).

    Parameters
    ----------
    mode : {"safe", "paper"}, default "safe"
        "paper" shows the coordinator every gradient, step and loss; it needs `allow_insecure`.
    allow_insecure : bool, default False
        Consent to paper mode, or to keys for tests; every party has to give its own.
    coordinator : bool or None, default None
        Whether a third party without data holds the key (None is True), or the parties do without.
    encryption : {"auto", "lattice", "ou", "paillier"} or None, default None
        Cipher of residuals and gradients; None, as "auto", chooses by mode, coordinator and keys named, see
        docs/logistic.md.
    key_bits : {2048, 3072} or None, default None
        Size of the modulus; None is 3072.
    insecure_test_key_bits : int or None, default None
        A smaller key, for tests only; needs `allow_insecure`, and every party must set the same.
    show_weights : bool, default False
        Consent to weights of rows, which the active party then sends to all parties with data.
    show_eval_margins : bool, default False
        Consent to eval sets, of whose rows the active party then gets the others' part of the margin after every epoch.
    allow_exact_sums : bool, default False
        Of a scorecard: consent to labels counted in more of the others' bins, over all jobs, than a tenth of the rows.
        Every party has to give its own.

    See Also
    --------
    SGD : Gradient descent, with the same options.
    LogisticRegression : The estimator, which has the other parameters.

    Examples
    --------
    Two parties and a coordinator, which has no key under the lattice map:

    >>> import numpy as np, treaty
    >>> tables = {"bank": np.arange(100.0)[:, None], "shop": np.arange(100.0)[::-1, None] % 9}
    >>> y = tables["bank"][:, 0] > 50
    >>> model = treaty.LogisticRegression(treaty.QuasiNewton(encryption="lattice")).fit(tables, y)
    >>> model.score(tables, y) > 0.9
    True
    """

    system: ClassVar[str] = "quasi-newton"
    first_rate: ClassVar[float] = 0.2
    decay: ClassVar[float] = 0.5
    keeps_pairs: ClassVar[bool] = True


@options.spelled_out(QuasiNewton)
@dataclass(kw_only=True, repr=False)
class SGD(FederatedRegression):
    """Vertical logistic regression by stochastic gradient descent, otherwise as `QuasiNewton`.

    Parameters
    ----------
    mode, allow_insecure, coordinator, encryption, key_bits, insecure_test_key_bits, show_weights, show_eval_margins,
    allow_exact_sums
        As for `QuasiNewton`.

    See Also
    --------
    QuasiNewton : Fewer epochs for the same loss.

    Examples
    --------
    >>> import numpy as np, treaty
    >>> tables = {"bank": np.arange(100.0)[:, None], "shop": np.arange(100.0)[::-1, None] % 9}
    >>> y = tables["bank"][:, 0] > 50
    >>> model = treaty.LogisticRegression(treaty.SGD(), batch_size=50, tol=0.1, random_state=0).fit(tables, y)
    >>> model.score(tables, y) > 0.9
    True
    """

    system: ClassVar[str] = "sgd"
    first_rate: ClassVar[float] = 0.3
    keeps_pairs: ClassVar[bool] = False
