"""A finished run as one HTML file that needs nothing else: what is in it, scores, figures, the page."""

# Names of models that are compared.
OURS, POOLED, OWN = "this model", "pooled", "own data only"
