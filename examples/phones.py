"""Thirty phones hold a few rows each; a server gets a model of all of them, and no row."""

# %% Phones
import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

import treaty

X, digit = load_digits(return_X_y=True)
even = (digit % 2 == 0).astype(int)
order = np.random.default_rng(0).permutation(len(X))
test, rest = order[:597], order[597:]
phones = {f"phone{n:02d}": (X[rows], even[rows]) for n, rows in enumerate(np.split(rest, 30))}
print(len(phones), "phones of", len(rest) // 30, "rows")

# %% Train
model = treaty.GBDTClassifier(treaty.FedXGB(edges=3), n_estimators=8, max_depth=3, learning_rate=0.3, max_bin=8)
model.fit(phones)
print(f"AUC {roc_auc_score(even[test], model.predict_proba(X[test])[:, 1]):.2f}")

# %% Learned
for role in ("user", "edge"):
    print(f"a {role} learned:")
    for sentence in model.disclosures_[role][:4]:
        print(" *", sentence)
