"""Options of FederBoost by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from treaty.errors import ConfigError
from treaty.systems.horizontal.rows import refuse_goss, refuse_objectives
from treaty.systems.options import Positive, SystemOptions


@dataclass(kw_only=True, repr=False)
class FederBoostHorizontal(SystemOptions):
    """Boosting between holders of rows, on securely summed histograms (FederBoost, Tian et al. 2020, arXiv 2011.02796).

    Parameters
    ----------
    mode : {"safe", "paper"}, default "safe"
        "paper" permits two participants, each of whom sees the other's part of a sum. The search for quantiles is the
        same in both modes.
    allow_insecure : bool, default False
        Without effect: this system has nothing that needs consent beside `mode`.
    dropout : {"accept"} or None, default None
        What a lost participant means. None: training stops, and goes on from checkpoints when everybody is back.
        "accept": it goes on without, and the leader may tell the lost one's histograms apart.
    epsilon_total : float or None, default None
        Noise on all that is opened, so that the whole training is (epsilon_total, delta) differentially private for
        every row. None: no noise.
    delta : float or None, default None
        See `epsilon_total`; None is 1e-6.
    """

    system: ClassVar[str] = "federboost-horizontal"
    paper_bins: ClassVar[int | None] = 24  # of two of its three data sets; 26 for the third
    dropout: Literal["accept"] | None = None
    epsilon_total: Positive | None = None
    delta: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None

    @property
    def adds_noise(self) -> bool:
        return self.epsilon_total is not None

    @property
    def estimates_base_score(self) -> bool:
        """From sums of all labels; under noise these would have to be paid for."""
        return self.epsilon_total is None

    def check(self, common: Any) -> None:
        refuse_goss(common)
        refuse_objectives(common)
        if self.epsilon_total is not None and common.subsample < 1.0:
            raise ConfigError(
                "epsilon_total needs every row to change its own part of a sum alone, and a sample of fixed size "
                "depends on all rows: leave subsample at 1"
            )
        if self.delta is not None and self.epsilon_total is None:
            raise ConfigError("delta goes with epsilon_total; give both or leave delta out")
