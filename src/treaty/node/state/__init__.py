"""What a node keeps: its database, and the audit log in it."""
