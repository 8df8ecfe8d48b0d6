"""What the systems share whose tables are split by row."""
