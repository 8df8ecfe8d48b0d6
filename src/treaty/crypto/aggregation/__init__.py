"""Secure aggregation: sums of vectors whose terms nobody sees."""
