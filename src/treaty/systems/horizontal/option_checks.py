"""Checks of options that every system split by row has."""

from typing import Any

from treaty.errors import ConfigError


def refuse_goss(common: Any) -> None:
    if common.goss:
        raise ConfigError("goss ranks rows by gradient, which participants cannot do together; use subsample")


def refuse_objectives(common: Any) -> None:
    """Refuse objectives whose gradients, bounds or leaf values participants cannot know."""
    if common.loss_class.takes == "groups":
        raise ConfigError(
            f"objective={common.objective!r} ranks rows within groups, and rows of a group may be with several "
            "participants: take a system split by column"
        )
    if common.loss_class.refreshes_leaves:
        raise ConfigError(
            f"objective={common.objective!r} has leaf values that are quantiles of the residuals of all participants' "
            'rows, and sums of gradients do not tell them: take "huber", or a system split by column'
        )
