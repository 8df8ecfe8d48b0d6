"""Processes that play this organisation's party in a job."""
