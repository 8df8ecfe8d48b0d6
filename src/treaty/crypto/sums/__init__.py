"""Sums of hidden gradients over another party's bins, under every cipher."""
