"""Checks of options that every system split by row has."""

from typing import Any

from treaty.errors import ConfigError


def refuse_goss(common: Any) -> None:
    """Refuse one-side sampling."""
    if common.goss:
        raise ConfigError("goss ranks rows by gradient, which participants cannot do together; use subsample")
