"""The scikit-learn estimators, and what they do with tables and labels before a run."""
