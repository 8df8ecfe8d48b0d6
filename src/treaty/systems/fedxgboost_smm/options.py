"""Options of FedXGBoost-SMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from treaty.errors import ConfigError
from treaty.systems.options import AtLeastOne, KeyBits, SystemOptions, TestKeyBits, check_test_key, names_of
from treaty.systems.pooled.constraints import refuse_constraints
from treaty.systems.vertical import cipher_options

PAPER_LEAKS = (
    "fedxgboost-smm as published shows each party the other's data, as measured on its own messages: in version 2 "
    "labels are rebuilt to AUC 1.000 from the first level of the first tree, and gradients exactly from two levels; in "
    "version 1 bins of the other party's columns come out exactly after one tree, or 2 to 11 trees where many null "
    "vectors are used, and these show labels by themselves (docs/fedxgboost.md)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The most vectors and columns that paper mode draws for a node; the paper names no numbers."""

    # columns of U, the paper's r
    null_vectors: int = 32
    # columns of 0 and 1 that candidates are mixed with, the paper's l1; None: two for each candidate
    bit_columns: int | None = None
    # columns of normal numbers that candidates are mixed with, the paper's l2
    normal_columns: int = 8

    def of_disguised(self, rows: int, columns: int) -> tuple[int, int, int] | None:
        """Return the numbers of bit columns, normal columns and null vectors for a matrix (rows, columns).

        With few rows the first, then the second, then the third shrink down to 1; None where even that is too many.
        """
        bits = 2 * columns if self.bit_columns is None else self.bit_columns
        normal, vectors = self.normal_columns, self.null_vectors
        fitted = []
        short = columns + bits + normal + vectors - rows
        for wanted in (bits, normal, vectors):
            fitted.append(max(1, wanted - max(0, short)))
            short -= wanted - fitted[-1]
        return None if short > 0 else (fitted[0], fitted[1], fitted[2])


@dataclass(kw_only=True, repr=False)
class FedXGBoostSMM(SystemOptions):
    """Vertical boosting by secure matrix products (FedXGBoost-SMM, Le et al. 2021, arXiv 2106.10662).

    Parameters
    ----------
    mode : {"safe", "paper"}, default "safe"
        "paper" is the published protocol, which is broken; it needs `allow_insecure`.
    allow_insecure : bool, default False
        Consent to paper mode, or to keys for tests. Every party must give its own.
    backend : {"lattice", "dealer", "ou"} or None, default None
        In safe mode, how the exact matrix product is computed. "lattice" (None) needs no third party. With "dealer" a
        third party without data hands out random matrices. This is by far the fastest, but first every bin of every row
        is sent once under a mask, 8 bytes each. "ou" encrypts every row again for every node.
    reveal : {"column", "node", "argmax"} or None, default None
        "column" (None) and "node" as for `SecureBoost`. With "argmax", in safe mode on the lattice map, the active
        party learns no sums, only which splits are best. This is ``SecureBoost(sums="sealed")``, with the same
        requirements.
    key_bits : {2048, 3072} or None, default None
        With ``backend="ou"``: size of the modulus; None is 3072.
    insecure_test_key_bits : int or None, default None
        With ``backend="ou"``: a smaller key, for tests only. It needs `allow_insecure`, and the same size at every
        party.
    version : {1, 2} or None, default None
        In paper mode: 1 (None) gives the active party the sums of passive parties' candidates. 2 gives each passive
        party the sums of its own candidates, of which it sends only the best gain.
    null_vectors : int or None, default None
        In paper mode: how many null vectors are drawn for a node, the paper's r; None is 32. This and the next two
        numbers shrink where a node has few rows.
    bit_columns : int or None, default None
        In version 2: how many columns of random bits the candidates of a node are mixed with, the paper's l1. None is
        twice the number of candidates.
    normal_columns : int or None, default None
        In version 2: how many columns of normal numbers the candidates of a node are mixed with, the paper's l2; None
        is 8.
    allow_exact_sums : bool, default False
        Consent, in safe mode, to a training whose exact sums would show the active party more than a tenth of a passive
        party's bins, row by row, by an estimate from rows, bins, depth and trees. Every party must give its own.

    See Also
    --------
    SecureBoost : The same split of the table, by encryption.
    FedXGBoostLDP : The same paper's other system, with noise.

    Examples
    --------
    A third party without data deals random matrices:

    >>> import numpy as np, treaty
    >>> tables = {"bank": np.arange(100.0)[:, None], "shop": np.arange(100.0)[::-1, None] % 9}
    >>> y = tables["bank"][:, 0] > 50
    >>> options = treaty.FedXGBoostSMM(backend="dealer", allow_exact_sums=True)
    >>> model = treaty.GBDTClassifier(options, n_estimators=3, max_depth=2).fit(tables, y)
    >>> model.score(tables, y)
    0.99
    """

    system: ClassVar[str] = "fedxgboost-smm"
    limits_categories = True
    default_bins: ClassVar[int] = cipher_options.CIPHER_BINS
    paper_bins: ClassVar[int | None] = 20
    may_change: ClassVar[frozenset[str]] = frozenset(
        {"backend", "reveal", "key_bits", "insecure_test_key_bits", "allow_exact_sums"}
    )
    backend: Literal["lattice", "dealer", "ou"] | None = None
    reveal: Literal["column", "node", "argmax"] | None = None
    key_bits: KeyBits | None = None
    insecure_test_key_bits: TestKeyBits | None = None
    version: Literal[1, 2] | None = None
    null_vectors: AtLeastOne | None = None
    bit_columns: AtLeastOne | None = None
    normal_columns: AtLeastOne | None = None
    allow_exact_sums: bool = False

    @property
    def cipher(self) -> str:
        """`backend`, with its default."""
        return self.backend or "lattice"

    @property
    def ciphers(self) -> cipher_options.CipherOptions:
        """How sums are hidden in safe mode."""
        return cipher_options.CipherOptions(
            cipher=self.cipher,
            reveal=None if self.reveal == "argmax" else self.reveal,
            key_bits=self.key_bits,
            insecure_test_key_bits=self.insecure_test_key_bits,
            blind=True,
            sealed=self.reveal == "argmax",
            to_open='another reveal than "argmax"',
        )

    @property
    def has_dealer(self) -> bool:
        """Whether a third party without data hands out random matrices."""
        return self.mode == "safe" and self.backend == "dealer"

    @property
    def sizes(self) -> Sizes:
        """The most null vectors and random columns that paper mode draws."""
        named = {name: getattr(self, name) for name in names_of(Sizes)}
        return Sizes(**{name: value for name, value in named.items() if value is not None})

    def check(self, common: Any) -> None:
        """Raise ConfigError for options that do not fit together, in either mode."""
        mixing = "bit_columns", "normal_columns"
        if self.mode == "paper":
            common.refuse_leaves("mode='paper' is the published protocol, which grows them by levels")
            common.refuse_outputs("mode='paper' is the published protocol, whose vectors have one gradient a row")
            check_consent(self)
            for name in ("backend", "reveal", "key_bits", "insecure_test_key_bits"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"option {name} is for safe mode of 'fedxgboost-smm'; leave it out in paper mode")
            for name in mixing if self.version != 2 else ():
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"option {name} is about what version 2 mixes candidates with; leave it out, or take version=2"
                    )
            if self.version == 2:
                refuse_constraints(
                    common, "in version 2 passive parties choose splits, and do not know leaf weights: take version=1"
                )
            return
        if self.version is not None:
            raise ConfigError("version is for mode='paper'; in safe mode the active party gets the sums: leave it out")
        for name in ("null_vectors", *mixing):
            if getattr(self, name) is not None:
                raise ConfigError(f"option {name} is for mode='paper', which draws null vectors; leave it out")
        if (self.key_bits or self.insecure_test_key_bits) and self.backend != "ou":
            raise ConfigError(
                'key_bits and insecure_test_key_bits are for backend="ou" alone; the others have no such key'
            )
        check_test_key(self)
        cipher_options.check_outputs(self.cipher, common)
        if self.reveal == "argmax":
            cipher_options.check_sealed(self.cipher, common, 'reveal="argmax"')
        if self.cipher == "lattice":
            cipher_options.check_lattice_fraction(common.fractional_bits, 'take backend="dealer" or "ou"')


def check_consent(options: FedXGBoostSMM) -> None:
    """Refuse the published protocol unless this party's own options consent to it."""
    if options.mode != "paper" or not options.allow_insecure:
        raise ConfigError(
            f"{PAPER_LEAKS}; mode='paper' needs allow_insecure=True of every party",
            public="it does not consent to what fedxgboost-smm shows as published (allow_insecure)",
        )
