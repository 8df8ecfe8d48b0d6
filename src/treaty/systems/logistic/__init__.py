"""Vertical logistic regression (Yang et al. 2019) by quasi-Newton steps or gradient descent."""
