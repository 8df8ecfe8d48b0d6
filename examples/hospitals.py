"""Three hospitals have the same measurements of patients of their own, and train one model of all."""

# %% Hospitals
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score

import treaty

X, y = load_breast_cancer(return_X_y=True)
order = np.random.default_rng(0).permutation(len(y))
test, *owns = np.split(order, [200, 250, 330])
hospitals = {name: (X[rows], y[rows]) for name, rows in zip(["north", "south", "east"], owns, strict=True)}
print({name: len(labels) for name, (_, labels) in hospitals.items()}, "patients;", len(test), "held back")

# %% Alone
for name, (rows, labels) in hospitals.items():
    alone = treaty.GBDTClassifier("pooled", n_estimators=20, max_depth=3, learning_rate=0.3).fit({name: rows}, labels)
    print(f"{name} alone: AUC {roc_auc_score(y[test], alone.predict_proba({name: X[test]})[:, 1]):.3f}")

# %% Together
model = treaty.GBDTClassifier(treaty.FederBoostHorizontal(), n_estimators=20, max_depth=3, learning_rate=0.3)
model.fit(hospitals)
print(f"together: AUC {roc_auc_score(y[test], model.predict_proba(X[test])[:, 1]):.3f}")
for sentence in model.disclosures_["south"]:
    print(" *", sentence)
