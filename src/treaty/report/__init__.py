"""A finished run as one HTML file that needs nothing else: what is in it, scores, figures, the page."""
