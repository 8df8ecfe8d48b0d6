"""One party's own table: reading it, checking it, and binning it for tree growing."""

from treaty.data.binning import Bins, fit_bins
from treaty.data.columns import Category
from treaty.data.labels import check_labels, check_targets, check_weights
from treaty.data.sources import read_table, write_predictions
from treaty.data.table import Schema, Table, match_rows, to_table

__all__ = [
    "Bins",
    "Category",
    "Schema",
    "Table",
    "check_labels",
    "check_targets",
    "check_weights",
    "fit_bins",
    "match_rows",
    "read_table",
    "to_table",
    "write_predictions",
]
