"""Quasi-Newton logistic regression (Yang et al. 2019): each party ends up with the weights of its own columns."""

from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score

import treaty

X, y = load_breast_cancer(return_X_y=True)
train = {"clinic": X[:400, :5], "laboratory": X[:400, 5:10]}
test = {"clinic": X[400:, :5], "laboratory": X[400:, 5:10]}

# What a partner could learn. The clinic learns the laboratory's part of every margin, as one number a row. From rows
# whose values it knows, it can compute the laboratory's weights. The laboratory learns the gradients of its own
# weights: at most one linear equation about the labels for each of its columns. coordinator=False: no third party.
model = treaty.LogisticRegression(treaty.QuasiNewton(coordinator=False), l2=0.1, random_state=0)
model.fit(train, y[:400])
print(f"AUC {roc_auc_score(y[400:], model.decision_function(test)):.3f}")
for party, part in model.parts_.items():
    print(f"{party}'s weights:", part.coef.round(2))
for party, sentences in model.disclosures_.items():
    print(f"{party} learned:", sentences[0])
