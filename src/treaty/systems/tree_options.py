"""The options of a tree job: names, defaults, ranges and meaning, in this one place."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec

from treaty.errors import ConfigError
from treaty.systems.options import check_finite, check_own, convert_options
from treaty.trees.boosting import BoostingPlan, OneSide
from treaty.trees.objectives import Objective
from treaty.trees.splits import SplitRules

PROTOCOLS: dict[str, tuple[str, ...]] = {  # protocol -> the options it has beyond the common ones
    "pooled": (),
    "secureboost": (
        "encryption",
        "reveal",
        "key_bits",
        "insecure_test_key_bits",
        "rerandomise",
        "rl_trees",
        "purity_guard",
        "mechanism",
        "epsilon",
        "he_inference",
    ),
    "federboost-vertical": ("epsilon", "epsilon_person", "unbiased"),
    "fedxgboost-smm": ("version", "backend", "reveal", "key_bits", "insecure_test_key_bits"),
    "fedxgboost-ldp": ("mechanism", "epsilon", "epsilon_total", "delta", "split_score", "clip", "clip_hess", "refit"),
    "federboost-horizontal": ("dropout", "epsilon_total", "delta"),
    "fedxgb": ("dropout", "edges", "max_users", "feature_sample", "expose", "comparison"),
}
HORIZONTAL = ("federboost-horizontal", "fedxgb")
VERTICAL = ("secureboost", "federboost-vertical", "fedxgboost-smm", "fedxgboost-ldp")

MOST_LATTICE_FRACTION = 20

SMM_PAPER_LEAKS = (
    "fedxgboost-smm as published shows each party the other's data, as measured on its own messages: in version 2 "
    "labels are rebuilt to AUC 1.000 from the first level of the first tree, and gradients exactly from two levels; in "
    "version 1 bins of the other party's columns come out exactly after one tree, or 2 to 11 trees where many null "
    "vectors are used, and these show labels by themselves (docs/fedxgboost.md)"
)

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class TreeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a tree job; common ones have the same default in every protocol, None means the protocol's own.

    Attributes
    ----------
    protocol : str, a name of `PROTOCOLS`
        Where training happens: on one table; between parties holding different columns of the same rows, exactly and
        under encryption, on buckets that passive parties randomise once, by matrix products, or on gradients under
        noise; or between parties holding different rows of the same columns, on sums of histograms that nobody sees the
        terms of: a few organisations, who all get the model, or hundreds of users by way of edge servers, for a server
        that keeps it.
    mode : {"safe", "paper"}
        "paper" is the protocol as published, for comparison; for SecureBoost, leaves of single rows.
    allow_insecure : bool
        Consent to what is known to be broken, in paper mode.
    n_estimators : int
        Boosting rounds; one tree each, one per class for more than two classes.
    max_depth : int
        Levels of splits, 1 to 24.
    learning_rate : float
        Factor on every leaf weight.
    reg_lambda, reg_alpha, min_split_loss, min_child_weight : float
        As in XGBoost.
    min_child_samples : int or None
        Fewest training rows in a leaf, a privacy rule: None is 20 in safe mode, 1 in paper mode.
    subsample, colsample_bytree : float
        Share of rows and of columns drawn for each tree.
    goss : bool
        Gradient-based one-side sampling (Ke et al., LightGBM, 2017) in place of `subsample`: of each tree, the
        `top_rate` share of rows with the largest gradients and `other_rate` of all rows drawn from the rest, whose
        gradients count (1 - top_rate) / other_rate times.
    top_rate, other_rate : float
        See `goss`.
    base_score : float
        Probability (classifiers of two classes) or margin that training starts from.
    fractional_bits : int
        Gradients are rounded once to multiples of 2^-fractional_bits; at most 20 under the lattice map.
    max_bin : int
        Most bins per feature, 2 to 255.
    early_stopping_rounds : int or None
        Stop when the last eval set's loss has not fallen for so many rounds.
    random_state : int or None
        Seed of row and column sampling.
    encryption : {"auto", "lattice", "ou", "paillier"} or None
        Cipher of encrypted sums: "lattice" is the hinted lattice map, by far the fastest, whose passive parties do not
        see which rows are in a node; "ou" is Okamoto-Uchiyama, which sends less where tables are long and trees deep;
        "paillier" is the papers' cipher, many times slower; "auto", which None is too, chooses one of the first two, by
        size and by the speed of links: name "lattice" where passive parties must not see rows of nodes in any case.
    reveal : {"column", "node"} or None
        How a passive party's split is applied under the lattice map: "column" (None) has it say which of all rows go
        left, so that it learns nothing of the node; with "node" it is told the node's rows and decides these alone.
    key_bits : int or None
        Size of the modulus: 3072 (None) or 2048. Without `encryption`, "ou" is meant; under "lattice" it is of
        `he_inference` alone.
    insecure_test_key_bits : int or None
        A smaller key, for tests alone; every party must name the same.
    rerandomise : bool or None
        Whether passive parties re-randomise their answers; False needs paper mode and `allow_insecure`.
    rl_trees : int or None
        Reduced leakage: the active party grows the trees of so many first rounds alone, on its own columns. None is 0.
    purity_guard : float or None
        Passive parties are not shown the children of a node when the share of a class in one of them differs from
        that in the whole table by more; the active party grows on alone there. 0.2 is a start; None is off.
    mechanism : {"label_rr", "laplace", "duchi", "piecewise", "hybrid"} or None
        Label protection: "label_rr" trains on labels randomised once, which all trees together cost `epsilon`. The
        others, of "fedxgboost-ldp" alone, put noise on every row's gradient, which each tree costs `epsilon`; None is
        "piecewise" there.
    epsilon : float or None
        Of `mechanism`, per label, to be named, or per gradient of one tree, 1 for None. "federboost-vertical": of the
        noise, per value of each passive column, 4 for None; infinite for none, in paper mode alone. A person's values
        in all columns add up.
    epsilon_person : float or None
        "federboost-vertical": of the noise, per person, shared evenly by a party's columns; in place of `epsilon`.
    unbiased : bool or None
        "federboost-vertical": whether splits on columns that no tree has used yet are chosen on sums corrected for the
        noise. None is False: no gain was measured.
    version : {1, 2} or None
        "fedxgboost-smm" in paper mode: whether the active party gets the sums of passive parties' candidates (1, which
        None is too), or each passive party those of its own, and says its best gain alone (2).
    backend : {"lattice", "dealer", "ou"} or None
        "fedxgboost-smm" in safe mode: what the exact matrix product comes from. "lattice", which None is too, needs
        nobody else; "dealer" has a third role without data hand out random matrices, and is by far the fastest once
        every bin of every row was sent under a mask, 8 bytes each; "ou" encrypts every row afresh for every node.
    he_inference : bool or None
        Predict on encrypted leaf weights, so that the active party does not see the others' decisions (Fed-EINI).
    dropout : {"accept"}, float or None
        "federboost-horizontal": what a lost participant means. None: training stops, and goes on from checkpoints when
        everybody is back. "accept": it goes on without, and the leader may tell the lost one's histograms apart.
        "fedxgb", where users may always vanish: the share of each domain's users, rounded down, that a simulation has
        lost at every tenth round, until the next tenth. None is 0.
    edges : int or None
        "fedxgb": how many edge servers `fit` plays, among whom users are dealt out. None is 3.
    max_users : int or None
        "fedxgb": most users of a domain that take part in a round, the steadiest. None: all.
    feature_sample : int or None
        "fedxgb": so many columns are drawn for each tree, in place of `colsample_bytree`.
    expose : {"nothing", "paper", "model"} or None
        "fedxgb": what users learn of the model. "nothing" (None): of their own rows, the slot at each level and the
        value at the end, which edge servers compute on shares. "model": all of it, many times faster. "paper": all but
        thresholds, while edge servers see the way of every row, for comparison; needs `allow_insecure`.
    comparison : {"shamir", "additive"} or None
        "fedxgb" with ``expose="nothing"``: how edge servers compute on shares of rows and splits. "shamir" (None): all
        of them, of whom at most (edges - 1) // 2 may collude. "additive": the first two, with random numbers of the
        third, several times faster; no two of these three may collude.
    split_score : {"first_order", "second_order"} or None
        "fedxgboost-ldp": what splits are chosen by: sums of gradients alone, or with hessians (None).
    clip, clip_hess : float or None
        "fedxgboost-ldp": gradients are clipped to [-clip, clip] before noise, and hessians, where they carry any, to
        [0, clip_hess]. None: the largest there can be, which for two classes is 1 and 1/4.
    refit : bool or None
        "fedxgboost-ldp": whether the model that is left has leaf values of true labels, which nobody is sent. None is
        False: leaf values are made of what was sent.
    epsilon_total, delta : float or None
        "fedxgboost-ldp": the most that all releases in the active party's ledger may cost a person; training ends where
        the next tree would pass it. `delta` has them added up by an accountant where that is less than their sum.
        "federboost-horizontal": noise on all that is opened, so that the whole training is (epsilon, delta)
        differentially private for every row. None: no noise; delta 1e-6.
    """

    protocol: Literal[
        "pooled",
        "secureboost",
        "federboost-vertical",
        "fedxgboost-smm",
        "fedxgboost-ldp",
        "federboost-horizontal",
        "fedxgb",
    ] = "pooled"
    mode: Literal["safe", "paper"] = "safe"
    allow_insecure: bool = False
    n_estimators: AtLeastOne = 20
    max_depth: Annotated[int, msgspec.Meta(ge=1, le=24)] = 3
    learning_rate: Annotated[float, msgspec.Meta(gt=0)] = 0.3
    reg_lambda: NotNegative = 1.0
    reg_alpha: NotNegative = 0.0
    min_split_loss: NotNegative = 0.0
    min_child_weight: NotNegative = 1.0
    min_child_samples: AtLeastOne | None = None
    subsample: Share = 1.0
    colsample_bytree: Share = 1.0
    goss: bool = False
    top_rate: Share = 0.2
    other_rate: Share = 0.1
    base_score: float = 0.5
    fractional_bits: Annotated[int, msgspec.Meta(ge=4, le=40)] = 16
    max_bin: Annotated[int, msgspec.Meta(ge=2, le=255)] = 32
    early_stopping_rounds: AtLeastOne | None = None
    random_state: Annotated[int, msgspec.Meta(ge=0)] | None = None
    encryption: Literal["auto", "lattice", "ou", "paillier"] | None = None
    reveal: Literal["column", "node"] | None = None
    key_bits: Literal[2048, 3072] | None = None
    insecure_test_key_bits: Annotated[int, msgspec.Meta(ge=128)] | None = None
    rerandomise: bool | None = None
    rl_trees: Annotated[int, msgspec.Meta(ge=0)] | None = None
    purity_guard: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    mechanism: Literal["label_rr", "laplace", "duchi", "piecewise", "hybrid"] | None = None
    epsilon: Annotated[float, msgspec.Meta(gt=0)] | None = None
    epsilon_person: Annotated[float, msgspec.Meta(gt=0)] | None = None
    unbiased: bool | None = None
    version: Literal[1, 2] | None = None
    backend: Literal["lattice", "dealer", "ou"] | None = None
    he_inference: bool | None = None
    dropout: Literal["accept"] | Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    split_score: Literal["first_order", "second_order"] | None = None
    clip: Annotated[float, msgspec.Meta(gt=0)] | None = None
    clip_hess: Annotated[float, msgspec.Meta(gt=0)] | None = None
    refit: bool | None = None
    epsilon_total: Annotated[float, msgspec.Meta(gt=0)] | None = None
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    edges: Annotated[int, msgspec.Meta(ge=2)] | None = None
    max_users: Annotated[int, msgspec.Meta(ge=3)] | None = None
    feature_sample: AtLeastOne | None = None
    expose: Literal["nothing", "paper", "model"] | None = None
    comparison: Literal["shamir", "additive"] | None = None

    @property
    def fewest_rows(self) -> int:
        """`min_child_samples`, resolved."""
        return self.min_child_samples or (20 if self.mode == "safe" else 1)

    @property
    def cipher(self) -> str:
        """`encryption`, resolved as far as options tell; "auto" where the active party is to choose.

        What is about keys names a cipher that has some, `reveal` the one that it is about.
        """
        if self.protocol == "fedxgboost-smm":
            return self.backend or "lattice"
        if self.encryption not in (None, "auto"):
            return self.encryption
        keyed = self.key_bits or self.insecure_test_key_bits or self.rerandomise is not None
        return "ou" if keyed else "auto" if self.reveal is None else "lattice"

    @property
    def may_hint(self) -> bool:
        """Whether the lattice map may be used, whose hints are worth keeping."""
        return self.protocol in ("secureboost", "fedxgboost-smm") and self.cipher in ("auto", "lattice")

    @property
    def hides_model(self) -> bool:
        """Whether users of "fedxgb" do not learn the model, or not all of it, and rows follow it on shares."""
        return self.protocol == "fedxgb" and self.expose != "model"

    @property
    def compares(self) -> Literal["shamir", "additive"]:
        """`comparison`, resolved."""
        return self.comparison or "shamir"

    def column_share(self, n_columns: int) -> float:
        """Return the share of columns drawn for each tree.

        Raises
        ------
        ConfigError
            When `feature_sample` is more than there are.
        """
        if self.feature_sample is None:
            return self.colsample_bytree
        if self.feature_sample > n_columns:
            raise ConfigError(f"expected feature_sample of at most {n_columns} columns, got {self.feature_sample}")
        return self.feature_sample / n_columns

    @property
    def has_dealer(self) -> bool:
        """Whether a third role without data deals random matrices."""
        return self.protocol == "fedxgboost-smm" and self.mode == "safe" and self.backend == "dealer"

    def hides_nodes(self, cipher: str) -> bool:
        """Whether sums are asked for without naming rows, under this cipher."""
        return cipher == "lattice" or self.protocol == "fedxgboost-smm"

    def reveals_columns(self, cipher: str) -> bool:
        """Whether passive parties decide all rows at a split, under this cipher."""
        return self.hides_nodes(cipher) and self.reveal != "node"

    @property
    def one_side(self) -> OneSide | None:
        """`goss` with its rates."""
        return OneSide(self.top_rate, self.other_rate) if self.goss else None

    def plan(self, n_columns: int) -> BoostingPlan:
        """Return the boosting loop's rounds, shares, seed and early stopping, for columns of all parties together."""
        return BoostingPlan(
            n_columns=n_columns,
            n_estimators=self.n_estimators,
            subsample=self.subsample,
            colsample_bytree=self.colsample_bytree,
            one_side=self.one_side,
            random_state=self.random_state,
            early_stopping_rounds=self.early_stopping_rounds,
        )

    def rules(self, objective: Objective) -> SplitRules:
        """Return the split rules for this objective's fixed point."""
        return self.rules_of(objective.grad_unit, objective.hess_unit)

    def rules_of(self, grad_unit: float, hess_unit: float) -> SplitRules:
        """Return the split rules for a fixed point, given what one step of a gradient and of a hessian is worth."""
        return SplitRules(
            grad_unit=grad_unit,
            hess_unit=hess_unit,
            reg_lambda=self.reg_lambda,
            reg_alpha=self.reg_alpha,
            min_split_loss=self.min_split_loss,
            min_child_weight=self.min_child_weight,
            min_child_samples=self.fewest_rows,
            max_depth=self.max_depth,
            learning_rate=self.learning_rate,
        )


def tree_options(values: dict[str, Any]) -> TreeOptions:
    """Check option values and build the struct.

    Raises
    ------
    ConfigError
        For an unknown option, a wrong type or a value out of range, or an option the protocol does not have.
    """
    values = {name: math.inf if value == "inf" else value for name, value in values.items()}  # JSON has no infinity
    options = convert_options(values, TreeOptions)
    for name in options.__struct_fields__:
        value = getattr(options, name)
        no_noise = name == "epsilon" and value == math.inf and options.protocol == "federboost-vertical"
        if not no_noise:
            check_finite(name, value)
    check_own(options, options.protocol, PROTOCOLS)
    _check_together(options)
    return options


def check_smm_consent(options: TreeOptions) -> None:
    """Refuse FedXGBoost-SMM as published where these options, those of this very party, do not consent to it."""
    if options.mode != "paper" or not options.allow_insecure:
        raise ConfigError(
            f"{SMM_PAPER_LEAKS}; mode='paper' needs allow_insecure=True of every party",
            public="it does not consent to what fedxgboost-smm shows as published (allow_insecure)",
        )


def check_ldp_consent(options: TreeOptions) -> None:
    """Refuse FedXGBoost-LDP as published where these options, those of this very party, do not consent to it."""
    if options.mode == "paper" and not options.allow_insecure:
        raise ConfigError(
            "mode='paper' sends the exact sum of gradients of every node beside the noisy ones, and no epsilon holds; "
            "it needs allow_insecure=True of every party",
            public="it does not consent to what fedxgboost-ldp shows as published (allow_insecure)",
        )


def _check_together(options: TreeOptions) -> None:
    """Refuse options that do not go together."""
    if options.protocol == "fedxgboost-smm":
        _check_smm(options)
    if options.goss and options.subsample < 1.0:
        raise ConfigError("goss draws the rows of each tree itself; leave subsample at 1")
    if options.goss and options.top_rate + options.other_rate > 1.0:
        raise ConfigError(f"expected top_rate + other_rate of at most 1, got {options.top_rate} + {options.other_rate}")
    if options.goss and options.purity_guard is not None:
        raise ConfigError(
            "goss and purity_guard contradict each other: goss's samples show passive parties the rows with large "
            "gradients; use subsample"
        )
    if options.goss and options.protocol in HORIZONTAL:
        raise ConfigError("goss ranks rows by gradient, which participants cannot do together; use subsample")
    if options.protocol in HORIZONTAL and options.epsilon_total is not None and options.subsample < 1.0:
        raise ConfigError(
            "epsilon_total counts on a row changing nothing but its own part of sums, and a sample of fixed size "
            "changes with every row: leave subsample at 1"
        )
    if options.protocol == "federboost-horizontal" and isinstance(options.dropout, float):
        raise ConfigError(f"option dropout={options.dropout}: expected \"accept\" or nothing; a share is for 'fedxgb'")
    if options.protocol == "fedxgb" and options.dropout == "accept":
        raise ConfigError('option dropout="accept": expected a share; users of fedxgb may always vanish')
    if options.feature_sample is not None and options.colsample_bytree < 1.0:
        raise ConfigError("feature_sample and colsample_bytree say the same in two ways; give one")
    if options.expose == "paper" and not options.allow_insecure:
        raise ConfigError(
            'expose="paper" shows users the columns and leaf values of all trees, so that thresholds are found by '
            "bisection with rows made up for that, and edge servers every comparison, so the way of everybody's rows; "
            "it needs allow_insecure=True"
        )
    if options.comparison is not None and options.expose not in (None, "nothing"):
        raise ConfigError(
            f'comparison is about rows that follow a hidden model, and expose="{options.expose}" tells users of it; '
            "leave one of them out"
        )
    if options.delta is not None and options.epsilon_total is None:
        raise ConfigError("delta goes with epsilon_total; give both or leave delta out")
    if options.protocol == "federboost-vertical":
        _check_noise(options)
    elif options.protocol == "fedxgboost-ldp":
        _check_noisy_gradients(options)
    elif options.mechanism not in (None, "label_rr"):
        raise ConfigError(
            f"protocol {options.protocol!r} has mechanism='label_rr' alone; noise on gradients is for 'fedxgboost-ldp'"
        )
    elif (options.mechanism is None) != (options.epsilon is None):
        raise ConfigError("mechanism and epsilon go together: mechanism='label_rr', epsilon=1.0 for example")
    if options.reveal == "column" and options.cipher in ("ou", "paillier") and not options.hides_nodes(options.cipher):
        raise ConfigError(
            f'reveal="column" needs encryption="lattice"; {options.cipher!r}, which naming a key means too, shows rows '
            "of nodes"
        )
    if options.encryption == "lattice" and options.fractional_bits > MOST_LATTICE_FRACTION:
        raise ConfigError(
            f"expected fractional_bits of at most {MOST_LATTICE_FRACTION} under the lattice map, got "
            f'{options.fractional_bits}; take encryption="ou"'
        )
    if options.encryption == "lattice" and options.rerandomise is not None:
        raise ConfigError("rerandomise is about ciphers with keys; the lattice map floods every answer: leave it out")
    if options.rerandomise is False and not (options.mode == "paper" and options.allow_insecure):
        raise ConfigError(
            "rerandomise=False lets the active party tell which rows are in a bin; it needs mode='paper' and "
            "allow_insecure=True"
        )


def _check_smm(options: TreeOptions) -> None:
    """Refuse options of either mode of "fedxgboost-smm" that do not go together."""
    if options.mode == "paper":
        check_smm_consent(options)
        for name in ("backend", "reveal", "key_bits", "insecure_test_key_bits"):
            if getattr(options, name) is not None:
                raise ConfigError(f"option {name} is of 'fedxgboost-smm' in safe mode; leave it out in paper mode")
        return
    if options.version is not None:
        raise ConfigError(
            "version is of 'fedxgboost-smm' as published; in safe mode the active party gets the sums: leave it out"
        )
    if (options.key_bits or options.insecure_test_key_bits) and options.backend != "ou":
        raise ConfigError('key_bits and insecure_test_key_bits are of backend="ou" alone; the others have no such key')
    if options.cipher == "lattice" and options.fractional_bits > MOST_LATTICE_FRACTION:
        raise ConfigError(
            f'expected fractional_bits of at most {MOST_LATTICE_FRACTION} with backend="lattice", got '
            f'{options.fractional_bits}; take "dealer" or "ou"'
        )


def _check_noisy_gradients(options: TreeOptions) -> None:
    labels = options.mechanism == "label_rr"
    if labels and options.epsilon is None:
        raise ConfigError("mechanism='label_rr' goes with the epsilon that labels may cost: epsilon=1.0 for example")
    if labels and (options.clip is not None or options.clip_hess is not None):
        raise ConfigError("clip and clip_hess are about noise on gradients, which mechanism='label_rr' has not")
    if labels and options.refit:
        raise ConfigError("refit takes true labels, and mechanism='label_rr' has them randomised once; leave one out")
    if labels and options.mode == "paper":
        raise ConfigError(
            "mode='paper' is the protocol as published, noise on gradients beside exact sums; mechanism='label_rr' is "
            "none of its mechanisms and sends no exact sum: take mode='safe'"
        )
    if options.goss:
        raise ConfigError("goss draws rows by their true gradients, and so shows which are large; use subsample")
    if options.reg_lambda == 0.0:
        raise ConfigError("expected reg_lambda above 0: sums of noise are divided by it")
    if options.mode == "paper":
        check_ldp_consent(options)
    if options.mode == "paper" and options.epsilon_total is not None:
        raise ConfigError("mode='paper' has no epsilon that epsilon_total could limit: leave it out")


def _check_noise(options: TreeOptions) -> None:
    if options.epsilon is not None and options.epsilon_person is not None:
        raise ConfigError("expected epsilon (per value) or epsilon_person (per person, over columns), got both")
    if options.epsilon == math.inf and options.mode != "paper":
        raise ConfigError(
            'epsilon=inf sends buckets in the clear, and so the order of all values; it needs mode="paper"'
        )
