"""Additively homomorphic ciphers, Okamoto-Uchiyama and Paillier, and their arithmetic."""
