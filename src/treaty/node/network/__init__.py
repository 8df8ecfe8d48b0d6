"""The one port, and what nodes say to each other over it."""
