"""What a node may be asked for: data sets, their policies, and verdicts on jobs."""
