"""A node's jobs in words, on its page and as metrics."""
