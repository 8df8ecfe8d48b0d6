"""Random complete trees and rows, walked plainly: what rows routed on shares are compared with."""

import numpy as np

from treaty.systems.fedxgb.pieces import Layout

LAYOUT = Layout(
    n_bins=[8, 3, 1, 5, 4, 8], categorical=[False, True, False, True, False, False], may_miss=[True, True, 0, 0, 1, 0]
)


class Tree:
    """A complete random tree, some splits dummies: features[k, node], left_bins[k][node], values[leaf]."""

    def __init__(self, depth, rng, layout=LAYOUT):
        self.layout, self.depth = layout, depth
        self.features = [rng.integers(-1, len(layout.n_bins), 1 << level) for level in range(depth)]
        self.left_bins = [rng.random((1 << level, 256)) < 0.5 for level in range(depth)]
        for features, left in zip(self.features, self.left_bins, strict=True):
            for feature, bins in zip(features, left, strict=True):
                if feature >= 0 and not layout.categorical[feature]:
                    count = layout.n_bins[feature]
                    bins[:count] = np.arange(count) < rng.integers(0, count + 1)
        self.values = rng.integers(-(2**40), 2**40, 1 << depth)

    def walk(self, codes):
        """Plainly: the side in each level, and the last node."""
        node, sides = np.zeros(len(codes), int), []
        for features, bins in zip(self.features, self.left_bins, strict=True):
            code = codes[np.arange(len(codes)), features[node]]
            sides.append((features[node] >= 0) & bins[node, code])
            node = 2 * node + 1 - sides[-1]
        return sides, node

    def encoded(self, level):
        splits = [
            self.layout.encode_split(f, left)
            for f, left in zip(self.features[level], self.left_bins[level], strict=True)
        ]
        weights, thresholds = zip(*splits, strict=True)
        return np.stack(weights), np.array(thresholds)


def random_codes(rows, rng, layout=LAYOUT):
    highest = np.array(layout.n_bins) + np.array(layout.may_miss) - 1
    return rng.integers(0, highest + 1, (rows, len(highest))).astype(np.uint8)
