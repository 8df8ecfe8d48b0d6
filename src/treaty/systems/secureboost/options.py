"""Options of SecureBoost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from treaty.crypto.transfer.hidden_rows import MOST_LEVELS
from treaty.errors import ConfigError
from treaty.privacy.mechanisms import fitted_lambda
from treaty.systems.options import KeyBits, Positive, SystemOptions, TestKeyBits, check_test_key
from treaty.systems.vertical import cipher_options

PAPER_KEY_BITS = 512
_WHY_NOT = {
    "objective": ": others sort residuals, divide or take exponentials, which are not exact on shares",
    "interaction_constraints": ": which columns a node may use would show the column of the split above",
    "eval_metric": ": others sort all rows, or take logarithms on shares",
}
"""Reasons why options are refused under hidden rows."""


@dataclass(kw_only=True, repr=False)
class SecureBoost(SystemOptions):
    """Lossless vertical boosting on encrypted gradients (Cheng et al. 2019, arXiv 1901.08755).

    Parameters
    ----------
    mode : {"safe", "paper"}, default "safe"
        "paper" uses the paper's Paillier with keys of 512 bits, and answers that are not re-randomised. Both need
        `allow_insecure`. To avoid that, set `key_bits` and ``rerandomise=True``, or another cipher.
    allow_insecure : bool, default False
        Consent to ``rerandomise=False``, or to short keys; every party must set it.
    encryption : {"auto", "lattice", "ou", "paillier"} or None, default None
        Cipher of encrypted sums. "lattice" is the hinted lattice map. It is by far the fastest, and passive parties do
        not see which rows are in a node. "ou" is Okamoto-Uchiyama; it sends less if tables are long and trees deep.
        "paillier" is the paper's cipher and many times slower. None is "paillier" in paper mode and "auto" in safe
        mode. "auto" is "lattice" under sealed sums; otherwise it chooses "lattice" or "ou" by the job's size and the
        speed of links. Set "lattice" if passive parties must never see rows of nodes.
    sums : {"open", "sealed"} or None, default None
        What the active party learns about passive parties' columns in training. "sealed": only which splits are best,
        and which rows they send left. It needs the lattice map, reg_lambda and min_child_weight above 0, no reg_alpha
        and no max_delta_step. It takes half a second to a second more for each tree, and longer with many columns
        (docs/sealed.md). "open": the sums of every bin of every node. None is "sealed" if the other options allow it,
        but "open" in paper mode and with `allow_exact_sums`.
    membership : {"known", "hidden"} or None, default None
        Which rows are in a node: "hidden" shares it, so that no party learns it in training, with margins, gradients
        and sums; needs ``objective="logistic_pieces"`` or "squared_error_steps", a depth of at most 6 and sealed sums,
        whole weights of rows up to 255, and at most two eval sets; predictions are ``inference="shared"``. The active
        party and the first passive one compute, and must not collude (docs/hidden.md). "known", which None is: the
        active party knows it.
    leaves : {"opened", "shared"} or None, default None
        What the active party learns of leaf weights with ``membership="hidden"``. "opened", which None is: all of them.
        "shared": nobody learns a weight; the active party and its partner keep shares of them, so that only predictions
        by both have them (docs/hidden.md).
    reveal : {"column", "node"} or None, default None
        How a passive party applies its split under the lattice map. "column": it answers which of all rows go left, and
        learns nothing about the node. "node": it answers for the node's rows only. With open sums it then sees these
        rows, and None is "column". With sealed sums the answer is transferred, so that it does not learn which rows
        they are, and None is "node" (docs/sealed.md).
    key_bits : {2048, 3072} or None, default None
        Size of the modulus; None is 3072, or 512 for the paper's Paillier. If `encryption` is not set, it selects "ou"
        in safe mode; the lattice map has no such key.
    insecure_test_key_bits : int or None, default None
        A smaller key, for tests only; needs `allow_insecure`, and every party must set the same.
    rerandomise : bool or None, default None
        Whether passive parties re-randomise their answers. None: yes, except under Paillier and Okamoto-Uchiyama in
        paper mode. False needs ``mode="paper"`` and `allow_insecure`.
    rl_trees : int or None, default None
        Reduced leakage (section 6 of the paper): the active party grows the trees of the first `rl_trees` rounds on its
        own columns only. None is 0.
    purity_guard : float or None, default None
        Passive parties are not shown the children of a node if the share of a class in one of them differs from its
        share in the whole table by more than this. Below such a node, the active party splits on its own columns only.
        Start with 0.2; None is off.
    mechanism : {"label_rr"} or None, default None
        "label_rr" trains on labels that were randomised once, which costs `epsilon` for all trees together.
    epsilon : float or None, default None
        Privacy parameter of `mechanism`, per label; the two go together.
    inference : {"plain", "shared"} or None, default None
        What the active party gets at prediction. "shared": only margins, which parties compute on shares, for trees of
        at most 6 levels of splits; no leaves, stages or contributions (docs/prediction.md). "plain": also each row's
        side at every split. None is "plain", but "shared" under hidden rows.
    training_rows : {"refused", "rounded"} or None, default None
        What predictions with ``membership="hidden"`` do with rows that the model was trained on. Every party recognises
        them, by ids or else by values, and refuses them; None is "refused". "rounded": they are predicted, but all
        margins of the prediction are rounded, to whole log-odds, or of numbers to an eighth of the labels' range
        (docs/hidden.md). Every party must set it.
    allow_exact_sums : bool, default False
        Consent, in safe mode, to open sums that would show the active party more than a tenth of a passive party's bins
        of single rows, by an estimate from rows, bins, depth and trees. Every party must set it.

    See Also
    --------
    FedXGBoostSMM : The same split of the table, by matrix products.
    FederBoostVertical : The same split of the table, with noise on passive columns.

    Examples
    --------
    Sums are sealed by default. Open sums are faster; the active party sees them, and both parties have to consent:

    >>> import numpy as np, treaty
    >>> tables = {"bank": np.arange(100.0)[:, None], "shop": np.arange(100.0)[::-1, None] % 9}
    >>> y = tables["bank"][:, 0] + 5 * tables["shop"][:, 0] > 70
    >>> options = treaty.SecureBoost(sums="open", encryption="lattice", allow_exact_sums=True)
    >>> model = treaty.GBDTClassifier(options, n_estimators=5, max_depth=2).fit(tables, y)
    >>> same = treaty.GBDTClassifier(n_estimators=5, max_depth=2, max_bin=64).fit(np.hstack(list(tables.values())), y)
    >>> bool(np.allclose(model.predict_proba(tables), same.predict_proba(np.hstack(list(tables.values())))))
    True
    """

    system: ClassVar[str] = "secureboost"
    default_bins: ClassVar[int] = cipher_options.CIPHER_BINS
    may_change: ClassVar[frozenset[str]] = frozenset(
        {"encryption", "reveal", "key_bits", "insecure_test_key_bits", "allow_exact_sums"}
    )
    encryption: Literal["auto", "lattice", "ou", "paillier"] | None = None
    sums: Literal["open", "sealed"] | None = None
    membership: Literal["known", "hidden"] | None = None
    leaves: Literal["opened", "shared"] | None = None
    reveal: Literal["column", "node"] | None = None
    key_bits: KeyBits | None = None
    insecure_test_key_bits: TestKeyBits | None = None
    rerandomise: bool | None = None
    rl_trees: Annotated[int, msgspec.Meta(ge=0)] | None = None
    purity_guard: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None
    mechanism: Literal["label_rr"] | None = None
    epsilon: Positive | None = None
    inference: Literal["plain", "shared"] | None = None
    training_rows: Literal["refused", "rounded"] | None = None
    allow_exact_sums: bool = False

    def settled(self, common: Any) -> Self:
        """Return these options with `sums` decided, and the cipher of multi-output trees."""
        own = replace(self, encryption="lattice") if common.multi_output and self.cipher == "auto" else self
        if own.sums is not None:
            return own
        if own.hides_rows:
            return replace(own, sums="sealed")
        accepted = own.mode == "paper" or own.allow_exact_sums
        return replace(own, sums="open" if accepted or own.why_open(common) else "sealed")

    def why_open(self, common: Any) -> str:
        return "" if self.mode == "paper" or self.allow_exact_sums else self._why_unsealed(common)

    def _why_unsealed(self, common: Any) -> str:
        if self.purity_guard is not None and common.interaction_constraints:
            # the active party splits nodes that others may not see alone, and does not know which groups are left there
            return "they cannot be sealed with purity_guard and interaction_constraints together"
        return cipher_options.why_unsealed(self.cipher, common)

    @property
    def cipher(self) -> str:
        """`encryption`; left open, it is the paper's in paper mode.

        In safe mode it is "ou" where a key is named, and "auto" where the active party is to choose.
        """
        if self.encryption not in (None, "auto"):
            return str(self.encryption)
        if self.sums == "sealed":
            return "lattice"
        if self.mode == "paper" and self.encryption is None and self.reveal is None:
            return "paillier"
        keyed = self.key_bits or self.insecure_test_key_bits or self.rerandomise is not None
        return "ou" if keyed else "auto" if self.reveal is None else "lattice"

    @property
    def short_key_bits(self) -> int | None:
        """`insecure_test_key_bits`; left open, the size of the paper's keys in paper mode."""
        papers = self.mode == "paper" and self.cipher == "paillier" and self.key_bits is None
        return self.insecure_test_key_bits or (PAPER_KEY_BITS if papers else None)

    @property
    def rerandomises(self) -> bool:
        """`rerandomise`; left open, only the published protocol does not."""
        as_published = self.mode == "paper" and self.cipher in ("ou", "paillier")
        return not as_published if self.rerandomise is None else self.rerandomise

    @property
    def ciphers(self) -> cipher_options.CipherOptions:
        """What these options say of the cipher of sums."""
        return cipher_options.CipherOptions(
            cipher=self.cipher,
            reveal=self.reveal,
            key_bits=self.key_bits,
            insecure_test_key_bits=self.short_key_bits,
            rerandomise=self.rerandomises,
            sealed=self.sums == "sealed",
            to_open='sums="open"',
        )

    @property
    def label_epsilon(self) -> float | None:
        return self.epsilon if self.mechanism == "label_rr" else None

    @property
    def default_lambda(self) -> float:
        return 1.0 if self.label_epsilon is None else fitted_lambda("label_rr", self.label_epsilon)

    @property
    def hides_rows(self) -> bool:
        """Whether neither party learns in training which rows are in a node."""
        return self.membership == "hidden"

    @property
    def hides_decisions(self) -> bool:
        # sides of training rows would tell which rows were in a node
        return self.inference == "shared" or self.hides_rows

    @property
    def shares_leaves(self) -> bool:
        return self.leaves == "shared"

    @property
    def rounds_margins(self) -> bool:
        return self.training_rows == "rounded"

    def check(self, common: Any) -> None:
        if common.goss and self.purity_guard is not None:
            raise ConfigError(
                "goss and purity_guard contradict each other: goss's samples show passive parties the rows with large "
                "gradients; use subsample"
            )
        cipher_options.check_outputs(self.cipher, common)
        if self.mechanism is not None:
            common.refuse_outputs("every leaf would have the noise of all classes")
        if (self.mechanism is None) != (self.epsilon is None):
            raise ConfigError("mechanism and epsilon go together: mechanism='label_rr', epsilon=1.0 for example")
        check_test_key(self)
        if self.reveal == "column" and self.cipher in ("ou", "paillier"):
            raise ConfigError(
                f'reveal="column" needs encryption="lattice"; {self.cipher!r}, which a named key chooses too, shows '
                "rows of nodes"
            )
        if self.sums == "sealed":
            cipher_options.check_sealed(self.cipher, common, 'sums="sealed"')
            if why := self._why_unsealed(common):
                raise ConfigError(f'expected sums="open": {why}; or leave one of them out')
        if self.hides_rows:
            self._check_hidden(common)
        elif self.training_rows is not None or self.leaves is not None:
            raise ConfigError('training_rows and leaves are for membership="hidden": leave them out')
        if self.hides_decisions and common.depth > MOST_LEVELS:
            what = 'membership="hidden"' if self.hides_rows else 'inference="shared"'
            raise ConfigError(
                f"{what} needs max_depth of at most {MOST_LEVELS}, got {common.depth}: each row has a bit for every "
                "node of a level"
            )
        if self.encryption == "lattice":
            cipher_options.check_lattice_fraction(common.fractional_bits, 'take encryption="ou"')
        if self.encryption == "lattice" and self.rerandomise is not None:
            raise ConfigError(
                "rerandomise is for ciphers with keys; the lattice map adds noise to every answer: leave it out"
            )
        if self.rerandomise is False and not (self.mode == "paper" and self.allow_insecure):
            raise ConfigError(
                "rerandomise=False lets the active party see which rows are in a bin; it needs mode='paper' and "
                "allow_insecure=True"
            )
        if not self.allow_insecure:
            self._refuse_papers_weaknesses()

    def _check_hidden(self, common: Any) -> None:
        """Refuse what trees on shared rows do not have yet, or cannot have."""
        # others would open more, or take logarithms on shares
        metrics = [["rmse"]] if common.objective == "squared_error_steps" else [["logloss"], ["ovr-logloss"]]
        own = {
            "mode": (self.mode, "safe"),
            "sums": (self.sums or "sealed", "sealed"),
            "encryption": (self.encryption if self.encryption in ("ou", "paillier") else None, None),
            "reveal": (self.reveal, None),
            "rl_trees": (self.rl_trees or None, None),
            "purity_guard": (self.purity_guard, None),
            "mechanism": (self.mechanism, None),
            "inference": (self.inference or "shared", "shared"),
            "objective": (
                "logistic_pieces" if common.objective == "squared_error_steps" else common.objective,
                "logistic_pieces",
            ),
            "fractional_bits": (common.fractional_bits, 16),
            "goss": (common.goss, False),
            "max_leaves": (common.max_leaves, None),
            "num_parallel_tree": (common.num_parallel_tree, 1),
            "process_type": (common.process_type, "default"),
            "monotone_constraints": (common.monotone_constraints or None, None),
            "interaction_constraints": (common.interaction_constraints or None, None),
            "eval_metric": (common.eval_metric if common.metrics not in ([], *metrics) else None, None),
        }
        for name, (given, needed) in own.items():
            if given != needed:
                what = "to be left out" if needed is None else f"to be {needed!r}"
                if name == "objective":
                    what += " or 'squared_error_steps'"
                why = _WHY_NOT.get(name, "")
                raise ConfigError(f'membership="hidden" needs {name} {what}, got {given!r}{why}')

    def _refuse_papers_weaknesses(self) -> None:
        """Refuse what paper mode brings unless it is named otherwise: short keys, answers that can be recognised."""
        weak, instead = [], []
        if self.short_key_bits is not None:
            weak.append(f"Paillier keys of {PAPER_KEY_BITS} bits, which can be factored")
            instead.append("key_bits=3072")
        if not self.rerandomises:
            weak.append("answers that are not re-randomised, from which the active party sees which rows are in a bin")
            instead.append("rerandomise=True")
        if weak:
            raise ConfigError(
                f"mode='paper' has, as published, {', and '.join(weak)}; it needs allow_insecure=True of every party, "
                f"or {' and '.join(instead)}",
                public="it does not consent to what secureboost shows as published (allow_insecure)",
            )
