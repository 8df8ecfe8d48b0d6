"""What is known of columns before a model: bins with weight of evidence, correlations, stability."""

from treaty.statistics.bins import ColumnBins, Monotone, bins_as_columns, bins_of_columns, with_labels, woe_bins

__all__ = ["ColumnBins", "Monotone", "bins_as_columns", "bins_of_columns", "with_labels", "woe_bins"]
