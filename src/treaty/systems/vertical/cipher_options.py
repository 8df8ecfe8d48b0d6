"""Limits of options that depend on the cipher of encrypted sums, in every system that has it."""

from treaty.errors import ConfigError

MOST_LATTICE_FRACTION = 20


def check_lattice_fraction(fractional_bits: int, remedy: str) -> None:
    """Refuse fixed points that are too fine for sums under the lattice map; `remedy` says what to take instead."""
    if fractional_bits > MOST_LATTICE_FRACTION:
        raise ConfigError(
            f"expected fractional_bits of at most {MOST_LATTICE_FRACTION} under the lattice map, "
            f"got {fractional_bits}; {remedy}"
        )
