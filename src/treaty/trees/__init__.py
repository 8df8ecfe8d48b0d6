"""Boosting itself: it knows nothing of parties, messages or secrecy."""
