"""Options of statistics between parties, and of statistics in any place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

import msgspec

from treaty.errors import ConfigError
from treaty.statistics import Correlation, Monotone
from treaty.systems.options import CommonOptions, SystemOptions


class ColumnOptions(CommonOptions, frozen=True):
    """Options of statistics: `ColumnStatistics` documents them."""

    table: ClassVar[str] = "columns"
    may_change: ClassVar[frozenset[str]] = frozenset()

    max_bin: Annotated[int, msgspec.Meta(ge=2, le=255)] = 20
    min_bin_rows: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] = 20
    monotone: Monotone = "auto"
    correlation: Correlation = "pearson"

    @property
    def most_rounds(self) -> int:
        return 1

    def checked(self, own: SystemOptions) -> Self:
        if own.mode == "paper":
            raise ConfigError("statistics have no published form: leave mode='paper' out")
        return self


@dataclass(kw_only=True, repr=False)
class Statistics(SystemOptions):
    """Statistics of columns split between parties: masked products of hidden labels and columns.

    Parameters
    ----------
    mode : {"safe"}
        There is no published form.
    allow_insecure : bool, default False
        Without effect.
    reveal : {"active", "passive"}, default "active"
        Who learns how many rows of each label are in each bin of a passive party's column. "active": the active party,
        which sends the column's IV to its owner. "passive": the owner, which sends the IV to the active party; it then
        has the WOE of its bins, which scorecards need, and knows the share of bad rows in each of its own bins.
    allow_exact_sums : bool, default False
        Consent to more products about a party's columns or labels, over all jobs on its table, than a tenth of its
        rows, and to labels of which one occurs in fewer rows than `min_bin_rows`, or eval sets of fewer rows. Every
        party has to give its own.

    See Also
    --------
    ColumnStatistics : The estimator, which has the other parameters.

    Examples
    --------
    The shop, not the bank, learns the weight of evidence of the shop's bins:

    >>> import numpy as np, treaty
    >>> tables = {"bank": np.arange(400.0)[:, None], "shop": np.arange(400.0)[:, None] % 9}
    >>> found = treaty.ColumnStatistics(treaty.Statistics(reveal="passive")).fit(tables, np.arange(400) % 9 > 4)
    >>> [len(bins) for bins in found.transform(tables).values()]
    [400, 400]
    """

    system: ClassVar[str] = "statistics"
    reveal: Literal["active", "passive"] = "active"
    allow_exact_sums: bool = False
