"""Sums over users by way of edge servers: who takes part, what they send each other, what is opened."""
