"""Linear maps of encrypted vectors under Ring-LWE with a precomputed hint; see docs/lattice.md."""
