"""Regressions trained on the whole table at every step, to their optimum, and the standard errors of their weights."""
