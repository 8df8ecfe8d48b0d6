"""FedXGB (Liu et al. 2020): a server trains on the rows of twenty users, whose sums edge servers mask."""

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score

import treaty

X, y = load_breast_cancer(return_X_y=True)
X = X[:, :10]
users = {f"user{n:02d}": (X[rows], y[rows]) for n, rows in enumerate(np.split(np.arange(400), 20))}

# What a partner could learn. The server learns the sums over all users. If the bins were more and the rows few, it
# could rebuild rows from them. An edge server learns no row, but two edge servers that collude learn the bins of all
# rows. A user learns of its own rows which slot of each level they pass, and their prediction.
model = treaty.GBDTClassifier(treaty.FedXGB(edges=3), n_estimators=5, max_depth=3, learning_rate=0.3, max_bin=8)
model.fit(users)
print(f"AUC {roc_auc_score(y[400:], model.predict_proba(X[400:])[:, 1]):.2f}")
for role, sentences in model.disclosures_.items():
    print(f"{role} learned:", sentences[0])
