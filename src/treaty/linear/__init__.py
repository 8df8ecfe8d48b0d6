"""Logistic regression and its optimisers, knowing nothing of parties or secrecy."""
