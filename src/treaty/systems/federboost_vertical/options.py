"""Options of FederBoost by column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Self

import msgspec

from treaty.errors import ConfigError
from treaty.systems.options import FEW_TREES, Positive, SystemOptions


@dataclass(kw_only=True, repr=False)
class FederBoostVertical(SystemOptions):
    """Vertical boosting on buckets that were randomised once (FederBoost, Tian et al. 2020, arXiv 2011.02796).

    Parameters
    ----------
    mode : {"safe", "paper"}, default "safe"
        "paper" permits buckets in the clear (``epsilon=inf``). Between organisations it also permits eval sets and rows
        to predict that have the values of training rows but no ids. Buckets are tie-aware in both modes.
    allow_insecure : bool, default False
        Without effect: in this system only `mode` needs consent.
    epsilon : float or None, default None
        Privacy parameter per value of each passive column. None is 4; infinite is no noise, in paper mode only. The
        epsilons of a person's values in all columns add up.
    epsilon_person : float or None, default None
        Privacy parameter per person, shared evenly by a party's columns; replaces `epsilon`.
    column_epsilon : dict of str to float or None, default None
        Privacy parameter per value of single passive columns, by "party.column". All other columns have `epsilon`, or
        share what these leave of `epsilon_person`. All parties see the names.
    buckets : int or None, default None
        Most buckets of a passive column of numbers, 2 to 255. None is `max_bin` if that is given, 16 in paper mode, and
        else 4 to 8: fewer if the column's epsilon is small. The active party's own columns have `max_bin` bins.

    See Also
    --------
    FederBoostHorizontal : The same paper's system for participants with rows.
    FedXGBoostLDP : Noise on labels instead of passive columns.

    Examples
    --------
    The shop's values cost epsilon 6 each; another column, if it had one, would cost 4:

    >>> import numpy as np, treaty
    >>> tables = {"bank": np.arange(100.0)[:, None], "shop": np.arange(100.0)[::-1, None] % 9}
    >>> y = tables["bank"][:, 0] > 50
    >>> options = treaty.FederBoostVertical(column_epsilon={"shop.f0": 6.0})
    >>> model = treaty.GBDTClassifier(options, n_estimators=3, max_depth=2).fit(tables, y)
    >>> bool(model.score(tables, y) > 0.9)
    True
    """

    system: ClassVar[str] = "federboost-vertical"
    limits_categories = True
    default_trees = FEW_TREES
    paper_bins: ClassVar[int | None] = 16
    may_be_infinite: ClassVar[frozenset[str]] = frozenset({"epsilon"})
    epsilon: Positive | None = None
    epsilon_person: Positive | None = None
    column_epsilon: dict[str, Positive] | None = None
    buckets: Annotated[int, msgspec.Meta(ge=2, le=255)] | None = None

    @property
    def value_epsilon(self) -> float:
        """`epsilon`, with its default."""
        return 4.0 if self.epsilon is None else self.epsilon

    def settled(self, common: Any) -> Self:
        """Return these options with `buckets` decided where `max_bin`, or the paper, names a number."""
        named = common.max_bin or (self.paper_bins if self.mode == "paper" else None)
        return replace(self, buckets=named) if self.buckets is None and named else self

    def epsilons(self, names: Sequence[str], party: str, owners: Sequence[str]) -> dict[str, float]:
        """Return the epsilon of a value in each of a passive party's columns; the active one has no `names`.

        Raises ConfigError for a `column_epsilon` of no such party or column, and if nothing of `epsilon_person` is left
        for the other columns.
        """
        own: dict[str, float] = {}
        for name, epsilon in (self.column_epsilon or {}).items():
            # of "shop" and "shop.eu", the longer name that fits
            owner = max((of for of in owners if name.startswith(f"{of}.")), key=len, default=None)
            column = name.removeprefix(f"{owner}.")
            if owner is None or (owner == party and column not in names):
                raise ConfigError(
                    f"column_epsilon names {name!r}: expected party.column, a column of a party without labels",
                    public="column_epsilon names a column that there is not",
                )
            if owner == party:
                own[column] = epsilon
        others, share = len(names) - len(own), self.value_epsilon
        if self.epsilon_person is not None:
            left = self.epsilon_person - sum(own.values())
            if left < -1e-9 * self.epsilon_person or (others and left <= 0.0):
                raise ConfigError(
                    f"column_epsilon takes {sum(own.values()):g} of epsilon_person={self.epsilon_person:g} at {party}, "
                    f"which has {others} other columns: lower it, or raise epsilon_person"
                )
            share = left / max(1, others)
        return {name: own.get(name, share) for name in names}

    def most_buckets(self, epsilon: float) -> int:
        """Return how many buckets a column of numbers has at most: `buckets`, or what suits its epsilon."""
        return self.buckets or round(min(8.0, max(4.0, 2.0 + 1.5 * epsilon)))

    def check(self, common: Any) -> None:
        common.refuse_outputs("its splits, of noisy buckets, were measured with one tree for each class alone")
        if self.epsilon is not None and self.epsilon_person is not None:
            raise ConfigError("expected epsilon (per value) or epsilon_person (per person, over columns), got both")
        for name, epsilon in (self.column_epsilon or {}).items():
            if "." not in name or not math.isfinite(epsilon):
                raise ConfigError(
                    f"expected column_epsilon to have a finite number above 0 for party.column, got {name!r}: {epsilon}"
                )
        if self.epsilon == math.inf and self.mode != "paper":
            raise ConfigError(
                'epsilon=inf sends buckets in the clear, and so the order of all values: it needs mode="paper"'
            )
