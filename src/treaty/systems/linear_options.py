"""The options of a job of logistic regression: names, defaults, ranges and meaning, in this one place."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from treaty.errors import ConfigError
from treaty.systems.options import check_finite, check_own, convert_options

LINEAR_PROTOCOLS: dict[str, tuple[str, ...]] = {  # protocol -> the options it has beyond the common ones
    "pooled": ("solver", "loss"),
    "quasi-newton": ("coordinator", "encryption", "key_bits", "insecure_test_key_bits"),
    "sgd": ("coordinator", "encryption", "key_bits", "insecure_test_key_bits"),
}
FEDERATED = ("quasi-newton", "sgd")
LEARNING_RATES = {"sgd": 0.15, "quasi-newton": 0.05}

AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class LinearOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a job of logistic regression; None means the protocol's own default.

    Attributes
    ----------
    protocol : {"pooled", "quasi-newton", "sgd"}
        Where training happens: on one table; or between parties holding different columns of the same rows, under
        encryption, by the stochastic quasi-Newton method or by stochastic gradient descent.
    mode : {"safe", "paper"}
        "paper" is the protocol as published, for comparison.
    allow_insecure : bool
        Consent to what is known to be broken, in paper mode.
    max_iter : int
        Most epochs.
    batch_size : int
        Rows in a mini-batch; all of the table where it has fewer.
    learning_rate : float or None
        Factor on every step: None is 0.05 by quasi-Newton, 0.15 by gradient descent. Halved by itself when an epoch's
        loss rises by more than a tenth.
    tol : float
        Training ends when the losses of two epochs differ by less; 0 for all of `max_iter`.
    l2 : float
        Penalty of l2 / 2 times the sum of squared weights beside the mean loss; not on the intercept.
    memory, period : int
        Quasi-Newton: how many correction pairs are kept, and iterations from one to the next.
    fractional_bits : int
        Numbers are encrypted as multiples of 2^-fractional_bits.
    random_state : int or None
        Seed of the batches; between parties it counts if all who have data name the same.
    solver : {"quasi-newton", "sgd"} or None
        "pooled": how weights are found; None is "quasi-newton".
    loss : {"taylor", "logistic"} or None
        "pooled": the loss; None is "taylor", the second-order form that all encrypted protocols have.
    coordinator : bool or None
        Whether a third party without data holds the key (None is True), or the parties do without.
    encryption : {"auto", "lattice", "ou", "paillier"} or None
        Cipher of residuals and gradients; None, as "auto", chooses by mode, coordinator and keys named, see
        docs/logistic.md.
    key_bits : int or None
        Size of the modulus: 3072 (None) or 2048.
    insecure_test_key_bits : int or None
        A smaller key, for tests alone; every party must name the same.
    """

    protocol: Literal["pooled", "quasi-newton", "sgd"] = "pooled"
    mode: Literal["safe", "paper"] = "safe"
    allow_insecure: bool = False
    max_iter: AtLeastOne = 30
    batch_size: AtLeastOne = 1000
    learning_rate: Positive | None = None
    tol: NotNegative = 1e-5
    l2: NotNegative = 0.0
    memory: AtLeastOne = 5
    period: AtLeastOne = 4
    fractional_bits: Annotated[int, msgspec.Meta(ge=16, le=48)] = 32
    random_state: Seed | None = None
    solver: Literal["quasi-newton", "sgd"] | None = None
    loss: Literal["taylor", "logistic"] | None = None
    coordinator: bool | None = None
    encryption: Literal["auto", "lattice", "ou", "paillier"] | None = None
    key_bits: Literal[2048, 3072] | None = None
    insecure_test_key_bits: Annotated[int, msgspec.Meta(ge=128)] | None = None

    @property
    def method(self) -> str:
        """How weights are found: "quasi-newton" or "sgd"."""
        return (self.solver or "quasi-newton") if self.protocol == "pooled" else self.protocol

    @property
    def pairs(self) -> int:
        """How many correction pairs are kept: `memory`, or 0 for gradient descent."""
        return self.memory if self.method == "quasi-newton" else 0

    @property
    def first_rate(self) -> float:
        """`learning_rate`, resolved."""
        return self.learning_rate or LEARNING_RATES[self.method]

    @property
    def has_coordinator(self) -> bool:
        """`coordinator`, resolved."""
        return self.coordinator is not False


def linear_options(values: dict[str, Any]) -> LinearOptions:
    """Check option values and build the struct.

    Raises
    ------
    ConfigError
        For an unknown option, a wrong type or a value out of range, an option the protocol does not have, or options
        that do not go together.
    """
    options = convert_options(values, LinearOptions)
    for name in options.__struct_fields__:
        check_finite(name, getattr(options, name))
    check_own(options, options.protocol, LINEAR_PROTOCOLS)
    _check_keys(options)
    if options.protocol == "pooled" and options.mode == "paper":
        raise ConfigError("mode='paper' is about what parties send each other; protocol 'pooled' has no such mode")
    return options


def _check_keys(options: LinearOptions) -> None:
    """Refuse sizes of keys that would not be used."""
    named = [name for name in ("key_bits", "insecure_test_key_bits") if getattr(options, name) is not None]
    if named and options.encryption == "lattice":
        raise ConfigError(
            f"encryption='lattice' has no key: leave {' and '.join(named)} out, or take encryption='ou' or 'paillier'"
        )
    if len(named) > 1:
        raise ConfigError("expected key_bits or insecure_test_key_bits, got both")
