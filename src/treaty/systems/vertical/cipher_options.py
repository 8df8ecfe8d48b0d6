"""Options about the cipher of encrypted sums, in every system that has it."""

from dataclasses import dataclass

from treaty.errors import ConfigError

MOST_LATTICE_FRACTION = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CipherOptions:
    """What a job says of the cipher of its sums; "auto" leaves it to the active party, "dealer" is not a cipher.

    `blind`: under every cipher, encrypt all rows for each node, so that passive parties see no rows of nodes.
    """

    cipher: str
    reveal: str | None = None
    key_bits: int | None = None
    insecure_test_key_bits: int | None = None
    rerandomise: bool = True
    blind: bool = False

    @property
    def may_hint(self) -> bool:
        """Whether the lattice map may be used, whose hints are worth keeping."""
        return self.cipher in ("auto", "lattice")

    def hides_nodes(self, cipher: str) -> bool:
        """Whether sums are asked for without naming rows, under this cipher."""
        return self.blind or cipher == "lattice"

    def reveals_columns(self, cipher: str) -> bool:
        """Whether passive parties decide all rows at a split, under this cipher."""
        return self.hides_nodes(cipher) and self.reveal != "node"


def check_lattice_fraction(fractional_bits: int, remedy: str) -> None:
    """Refuse fixed points that are too fine for sums under the lattice map; `remedy` says what to take instead."""
    if fractional_bits > MOST_LATTICE_FRACTION:
        raise ConfigError(
            f"expected fractional_bits of at most {MOST_LATTICE_FRACTION} under the lattice map, "
            f"got {fractional_bits}; {remedy}"
        )
