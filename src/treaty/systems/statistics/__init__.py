"""Statistics of the columns of several parties, before a model."""
