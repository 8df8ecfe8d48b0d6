"""Losses as classes: derivatives with respect to the margin, their public bounds, base score and link."""
