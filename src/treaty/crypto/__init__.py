"""Ciphers and encrypted sums; knows nothing of parties, messages or trees."""
