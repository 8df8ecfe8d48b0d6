"""Label protection, and measuring what parties could infer."""
