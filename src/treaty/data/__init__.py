"""One party's own table: reading it, checking it, and binning it for tree growing."""
