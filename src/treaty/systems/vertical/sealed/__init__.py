"""Sealed sums: the active party learns which splits are best, and no sum. `active` and `passive` are the two ends."""
