"""Products of hidden vectors with another party's integer matrix."""
