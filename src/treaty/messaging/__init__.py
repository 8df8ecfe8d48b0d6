"""Parties, their typed messages, and the channels that carry them."""
