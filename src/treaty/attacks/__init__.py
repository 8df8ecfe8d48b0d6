"""Attacks on what each party of a training has seen: each a function, with its paper and its score.

`auditing.audit` trains a model with every party in a thread of its own, records what each sees, and lets every attack
that applies try to find what the party should not know. What is recorded stays in this process, and is dropped then.
"""
