"""The group, hashes and bindings behind private set intersection."""
