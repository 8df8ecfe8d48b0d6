"""Options of the cipher of sums, for all systems whose active party gets encrypted sums."""

from dataclasses import dataclass
from typing import Any

from treaty.data.binning import MOST_BINS
from treaty.errors import ConfigError

MOST_LATTICE_FRACTION = 20
"""Most `fractional_bits` under the lattice map."""

CIPHER_BINS = 64
"""`max_bin` where sums of bins are encrypted: twice as many double what is sent or computed for a column, and show more
of its rows (`benchmarks/bins.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CipherOptions:
    """What a job says of the cipher of its sums.

    `cipher` is "lattice", "ou" or "paillier"; "auto", which leaves the choice to the active party; or "dealer", under
    which shares hide the sums. With `blind`, all rows are encrypted for each node under every cipher, so that passive
    parties do not see which rows are in it. With `sealed`, under the lattice map, nobody opens sums, and the active
    party learns the best splits alone.
    """

    cipher: str
    reveal: str | None = None
    key_bits: int | None = None
    insecure_test_key_bits: int | None = None
    rerandomise: bool = True
    blind: bool = False
    sealed: bool = False

    @property
    def may_hint(self) -> bool:
        """Whether the lattice map may be used, whose hints are kept for later jobs."""
        return self.cipher in ("auto", "lattice")

    def hides_nodes(self, cipher: str) -> bool:
        """Whether sums are asked for without naming rows, under this cipher."""
        return self.blind or cipher == "lattice"

    def reveals_columns(self, cipher: str) -> bool:
        """Whether passive parties decide all rows at a split, under this cipher."""
        return self.hides_nodes(cipher) and self.reveal != "node"


def unaudited(options: CipherOptions) -> str:
    """Say why no record can be kept for an audit of gradients; nothing where it can."""
    return "records are of open sums, and these are sealed; with sums='open' it can" if options.sealed else ""


def check_lattice_fraction(fractional_bits: int, remedy: str) -> None:
    """Refuse more `fractional_bits` than the lattice map takes; `remedy` tells the user what to choose instead."""
    if fractional_bits > MOST_LATTICE_FRACTION:
        raise ConfigError(
            f"expected fractional_bits of at most {MOST_LATTICE_FRACTION} under the lattice map, "
            f"got {fractional_bits}; {remedy}"
        )


def can_seal(common: Any) -> bool:
    """Whether sums can be sealed under these common options, and the lattice map."""
    try:
        check_sealed("lattice", common, "")
    except ConfigError:
        return False
    return True


def check_sealed(cipher: str, common: Any, option: str) -> None:
    """Refuse sealed sums, chosen by `option`, under another cipher or with gains that are no fractions of sums."""
    if cipher != "lattice":
        raise ConfigError(f"{option} needs the lattice map, got {cipher!r}: leave out the other cipher and its keys")
    check_lattice_fraction(common.fractional_bits, "or take open sums")
    least = 2.0**-common.fractional_bits
    for name, fits, needed in (
        ("max_cat_to_onehot", common.max_cat_to_onehot is None or common.max_cat_to_onehot > MOST_BINS, "left out"),
        ("reg_alpha", common.reg_alpha == 0.0, "0"),
        ("max_delta_step", common.delta_step == 0.0, "0"),
        ("reg_lambda", common.reg_lambda >= least, f"at least {least:g}, a step of the fixed point"),
        ("min_child_weight", common.min_child_weight > 0.0, "above 0"),
    ):
        if not fits:
            raise ConfigError(
                f"{option} compares gains as fractions of whole numbers and needs {name} to be {needed}, got "
                f"{getattr(common, name)}; or take open sums"
            )
