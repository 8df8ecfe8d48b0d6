"""Records that parties keep for an audit of gradients on request, and the audit of them afterwards."""
