"""A user's own loss: the base class that users fill in, and the loss that training makes of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self, get_args

import numpy as np
from msgspec.structs import replace

from treaty.errors import ConfigError
from treaty.machine.arrays import Floats, Integers
from treaty.machine.process import imported
from treaty.trees.losses import FixedPointLoss, power_of_two

Link = Literal["identity", "log", "logistic"]


class CustomLoss(ABC):
    """Base of the classes that `objective` may name; they are made without arguments, at parties with labels alone.

    Methods are given copies, which they may change.

    Attributes
    ----------
    link : {"identity", "log", "logistic"}
        How predictions follow from margins: as they are, exp(margin), or 1 / (1 + exp(-margin)).

    See Also
    --------
    GBDTRegressor : Takes the class as `objective`.

    Examples
    --------
    An error above the label costs three times as much as one below:

    >>> import numpy as np, treaty
    >>> class Cautious(treaty.CustomLoss):
    ...     link = "identity"
    ...     def bounds(self, y):
    ...         return 3 * np.ptp(y), 3.0
    ...     def gradients(self, margins, y):
    ...         weight = np.where(margins > y, 3.0, 1.0)
    ...         return weight * (margins - y), weight
    ...     def loss(self, margins, y):
    ...         return np.where(margins > y, 1.5, 0.5) * (margins - y) ** 2
    >>> X, y = np.zeros((100, 1)), np.arange(100) % 2.0
    >>> loss = Cautious()
    >>> gradients, hessians = loss.gradients(np.array([0.5, 0.5]), np.array([0.0, 1.0]))
    >>> gradients
    array([ 1.5, -0.5])

    In a module ``losses.py``, ``GBDTRegressor(objective=losses.Cautious)`` trains with it.
    """

    link: Link

    @abstractmethod
    def bounds(self, y: Floats) -> tuple[float, float]:
        """Return the largest absolute gradient and the largest hessian of a row of weight 1, both above 0.

        What `gradients` returns beyond is clipped, and the rows are counted.

        Parameters
        ----------
        y : float64 (n_rows,)
            The training labels; where rows are split, those of one participant, and the largest bounds among all count.
        """

    @abstractmethod
    def gradients(self, margins: Floats, y: Floats) -> tuple[Floats, Floats]:
        """Return first and second derivatives of the loss with respect to the margin, float64 (n_rows,) both.

        Hessians must not be negative. Sample weights are multiplied in afterwards. The result must depend on each row's
        own margin and label alone, as rows come in blocks.

        Parameters
        ----------
        margins, y : float64 (n_rows,)
            Of some of the rows.
        """

    @abstractmethod
    def loss(self, margins: Floats, y: Floats) -> Floats:
        """Return each row's loss, float64 (n_rows,), whose weighted mean eval sets show.

        Parameters
        ----------
        margins, y : float64 (n_rows,)
        """


class Custom(FixedPointLoss, frozen=True, tag="custom"):
    """A `CustomLoss` under its name, ``package.module:CLASS``; predicting needs no more than its link."""

    objective: str = ""
    link: Link = "identity"
    hess_scale: float = 1.0
    metric: ClassVar[str] = "custom"
    xgboost_name: ClassVar[str] = ""
    hess_tells_labels: ClassVar[bool] = True

    def check(self) -> None:
        super().check()
        b = self.base_score
        if (self.link == "log" and b <= 0.0) or (self.link == "logistic" and not 0.0 < b < 1.0):
            raise ConfigError(f"expected a base_score that the link {self.link!r} of {self.objective} gives, got {b}")

    def start_of(self, totals: Sequence[int], label_unit: float) -> tuple[float, ...]:
        (mean,) = super().start_of(totals, label_unit)
        given = self.link == "identity" or (mean > 0.0 if self.link == "log" else 0.0 < mean < 1.0)
        return (mean if given else self.base_score,)

    def bounded(self, y: Floats) -> Self:
        # without labels, as at a server, there are no bounds yet
        if not len(y):
            return self
        found = _ask(self.objective, "bounds", y)
        bounds = _numbers(found, (2,))
        if bounds is None or not np.all(bounds > 0.0):
            raise ConfigError(f"expected {self.objective}.bounds to return two numbers above 0, got {found!r}")
        grad_bound, hess_bound = map(power_of_two, bounds.tolist())
        return replace(self, grad_clip=grad_bound, hess_scale=hess_bound)

    @property
    def clips(self) -> tuple[float, ...]:
        return self.grad_clip, self.hess_scale

    def agreed(self, clips: Sequence[float], weight_bound: float) -> Self:
        return replace(super().agreed(clips, weight_bound), hess_scale=clips[1])

    @property
    def hess_clip(self) -> float:
        return self.hess_scale

    @property
    def base_margins(self) -> Floats:
        b = self.base_score
        if self.link == "identity":
            return np.array([b])
        return np.array([math.log(b) if self.link == "log" else math.log(b / (1.0 - b))])

    def predictions(self, margins: Floats) -> Floats:
        with np.errstate(over="ignore"):
            if self.link == "identity":
                return margins
            return np.asarray(np.exp(margins) if self.link == "log" else 1.0 / (1.0 + np.exp(-margins)))

    def row_losses(self, margins: Floats, y: Floats) -> Floats:
        """Return what the class's `loss` gives; raise ConfigError unless it is a finite number of each row."""
        found = _ask(self.objective, "loss", margins[:, 0], y)
        each = _numbers(found, y.shape)
        if each is None:
            raise ConfigError(
                f"expected {self.objective}.loss to return an array of {len(y)} finite numbers, got {_form(found)}"
            )
        return each

    def write_derivatives(self, margins: Floats, y: Floats, scales: Floats, grad: Integers, hess: Integers) -> int:
        found = _ask(self.objective, "gradients", margins[:, 0], y)
        several = isinstance(found, tuple | list) or getattr(found, "ndim", 0) > 0
        parts = list(found) if several and len(found) == 2 else [found]
        values = [part for part in (_numbers(part, y.shape) for part in parts) if part is not None]
        if len(values) != 2:
            raise ConfigError(
                f"expected {self.objective}.gradients to return two arrays of {len(y)} finite numbers, got "
                f"{', '.join(map(_form, parts))}"
            )
        g, h = values[0] / self.grad_clip, values[1] / self.hess_scale
        if np.any(h < 0.0):
            raise ConfigError(f"expected no hessian below 0 of {self.objective}.gradients, got {np.sum(h < 0.0)}")
        grad[0], hess[0] = np.rint(np.clip(g, -1.0, 1.0) * scales), np.rint(np.minimum(h, 1.0) * scales)
        return int(np.count_nonzero((np.abs(g) > 1.0) | (h > 1.0)))


def loss_at(name: str) -> CustomLoss:
    """Return an instance of the class called ``package.module:CLASS``; raise ConfigError if there is none that fits."""
    # only trusted names are imported (`treaty.machine.process`), and only subclasses of `CustomLoss` are called
    try:
        kind = imported(name, "the loss")
        if not (isinstance(kind, type) and issubclass(kind, CustomLoss)):
            raise TypeError("it is no subclass of treaty.CustomLoss")
        loss = kind()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"cannot make the loss {name!r}: {error}; expected package.module:CLASS, a class at the top of a module "
            "that every party with labels can import"
        ) from None
    if getattr(loss, "link", None) not in get_args(Link):
        raise ConfigError(
            f"expected {name!r} to have a link of {', '.join(get_args(Link))}, got {getattr(loss, 'link', None)!r}"
        )
    return loss


def _ask(objective: str, method: str, *arrays: Floats) -> Any:
    """Return what a method of the class returns for copies of arrays, as it may work in place."""
    asked = getattr(loss_at(objective), method)
    try:
        return asked(*(np.array(values) for values in arrays))
    except Exception as error:
        raise ConfigError(f"{objective}.{method} raised {type(error).__name__}: {error}") from error


def _numbers(found: Any, shape: tuple[int, ...]) -> Floats | None:
    """Return what a method gave as float64 of this shape; None for anything else, or numbers that are not finite."""
    try:
        values = np.asarray(found, np.float64)
    except (TypeError, ValueError):
        return None
    return values if values.shape == shape and np.isfinite(values).all() else None


def _form(found: Any) -> str:
    """Describe what a method gave: its type and shape, and how many of its numbers are not finite."""
    kind = type(found).__name__
    try:
        values = np.asarray(found, np.float64)
    except (TypeError, ValueError):
        return kind
    odd = int(np.count_nonzero(~np.isfinite(values)))
    return f"{kind} {values.shape}" + (f" with {odd} not finite" if odd else "")
