"""Oblivious transfer: base transfers on a curve, and as many more as wanted from symmetric ciphers alone."""
