"""Two parties compute on numbers that neither knows: products, comparisons and the largest fraction, from transfers."""
