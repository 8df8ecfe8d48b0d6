"""Options of the cipher of sums, for all systems whose active party gets encrypted sums."""

from dataclasses import dataclass
from typing import Any

from treaty.data.binning import MOST_CATEGORIES
from treaty.errors import ConfigError
from treaty.systems.pooled.constraints import MONOTONE, refuse_constraints

# Most `fractional_bits` under the lattice map
MOST_LATTICE_FRACTION = 20

# `max_bin` where sums of bins are encrypted: twice as many double what is sent or computed for a column, and show more
# of its rows (`benchmarks/bins.py`)
CIPHER_BINS = 64


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
    to_open: str = ""  # the option that opens sealed sums

    @property
    def may_hint(self) -> bool:
        """Whether the lattice map may be used, whose hints are kept for later jobs."""
        return self.cipher in ("auto", "lattice")

    def hides_nodes(self, cipher: str) -> bool:
        """Whether sums are asked for without naming rows, under this cipher."""
        return self.blind or cipher == "lattice"

    def reveals_columns(self, cipher: str) -> bool:
        """Whether passive parties decide all rows at a split, under this cipher."""
        return self.hides_nodes(cipher) and (self.reveal == "column" if self.sealed else self.reveal != "node")

    @property
    def transfers_sides(self) -> bool:
        """Whether sides of a node's own rows are transferred, so that the column's owner does not learn the rows."""
        return self.sealed and self.reveal != "column"

    def names_rows(self, cipher: str) -> bool:
        """Whether passive parties see the rows of the nodes that they split, under this cipher."""
        return not self.reveals_columns(cipher) and not self.transfers_sides


def unaudited(options: CipherOptions) -> str:
    """Return why no record can be kept for an audit of gradients; empty if it can."""
    return f"records are of open sums, and these are sealed; take {options.to_open}" if options.sealed else ""


def check_lattice_fraction(fractional_bits: int, remedy: str) -> None:
    """Refuse more `fractional_bits` than the lattice map takes; `remedy` is what to choose instead."""
    if fractional_bits > MOST_LATTICE_FRACTION:
        raise ConfigError(
            f"expected fractional_bits of at most {MOST_LATTICE_FRACTION} under the lattice map, "
            f"got {fractional_bits}; {remedy}"
        )


def why_unsealed(cipher: str, common: Any) -> str:
    """Return why sums cannot be sealed under these options; empty if they can."""
    if cipher not in ("auto", "lattice"):
        return f"they cannot be sealed under {cipher!r}"
    if common.fractional_bits > MOST_LATTICE_FRACTION:
        return f"they cannot be sealed with fractional_bits above {MOST_LATTICE_FRACTION}"
    bounded = common.monotone_constraints and common.max_depth != 1
    unfit = [f"{MONOTONE} and max_depth={common.max_depth}"] if bounded else []
    unfit += [f"{name}={given}" for name, fits, _, given in _needs(common) if not fits]
    return f"they cannot be sealed with {' and '.join(unfit)}" if unfit else ""


def _needs(common: Any) -> list[tuple[str, bool, str, Any]]:
    """Return the common options that sealed sums limit: name, whether it fits, what it has to be, its value."""
    # left open, it is 1 or more
    least, penalty = 2.0**-common.fractional_bits, 1.0 if common.reg_lambda is None else common.reg_lambda
    return [
        (
            "category_sets",
            common.category_sets == "halves" or common.onehot_below > MOST_CATEGORIES,
            "left out",
            "sorted",
        ),
        # the order of leaves by gain would be known only from the sides of leaves that are never split
        ("max_leaves", common.max_leaves is None, "left out", common.max_leaves),
        ("multi_strategy", not common.multi_output, "left out", common.multi_strategy),
        ("reg_alpha", common.reg_alpha == 0.0, "0", common.reg_alpha),
        ("max_delta_step", common.delta_step == 0.0, "0", common.delta_step),
        ("reg_lambda", penalty >= least, f"at least {least:g}, a step of the fixed point", penalty),
        ("min_child_weight", common.min_child_weight > 0.0, "above 0", common.min_child_weight),
    ]


def check_outputs(cipher: str, common: Any) -> None:
    """Refuse multi-output trees under a cipher whose encrypted rows are sent once a tree."""
    if common.multi_output and cipher not in ("lattice", "dealer"):
        raise ConfigError(
            f"multi_strategy='multi_output_tree' needs the lattice map or a dealer: under {cipher!r} each row has one "
            "encrypted gradient a tree, and not one for each class; leave the other cipher and its keys out"
        )


def check_sealed(cipher: str, common: Any, option: str) -> None:
    """Refuse sealed sums, chosen by `option`, under another cipher or with gains that are no fractions of sums."""
    if cipher != "lattice":
        raise ConfigError(f"{option} needs the lattice map, got {cipher!r}: leave out the other cipher and its keys")
    check_lattice_fraction(common.fractional_bits, f"lower it, or leave {option} out")
    if common.max_depth != 1:
        refuse_constraints(
            common,
            f"{option} hides the weights of children, which bound those below, so that it needs max_depth=1: leave "
            f"{option} out and set allow_exact_sums=True at every party",
            [MONOTONE],
        )
    for name, fits, needed, given in _needs(common):
        if not fits:
            raise ConfigError(
                f"{option} compares gains as fractions of whole numbers and needs {name} to be {needed}, got {given}; "
                f"or leave {option} out"
            )
