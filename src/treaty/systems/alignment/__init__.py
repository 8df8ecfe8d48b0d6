"""Private set intersection: bring the parties' rows into a common order."""
