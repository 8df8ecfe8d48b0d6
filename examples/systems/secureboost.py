"""SecureBoost (Cheng et al. 2019): a clinic with labels and a laboratory grow the trees of the joined table."""

from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score

import treaty

X, y = load_breast_cancer(return_X_y=True)
train = {"clinic": X[:400, :15], "laboratory": X[:400, 15:]}
test = {"clinic": X[400:, :15], "laboratory": X[400:, 15:]}

# What a partner could learn. The clinic learns which rows go left at the laboratory's splits, and no sum of the
# laboratory's bins: sums are sealed by default. The more trees, the more the sides of rows show. The laboratory learns
# which of its columns and bins are used; if these predict the label, they hint at it.
model = treaty.GBDTClassifier(treaty.SecureBoost(), n_estimators=10, max_depth=3, learning_rate=0.3, random_state=0)
model.fit(train, y[:400])
print(f"AUC {roc_auc_score(y[400:], model.predict_proba(test)[:, 1]):.3f}")

# The model is that of one table with all columns and the same bins.
joined = treaty.GBDTClassifier("pooled", n_estimators=10, max_depth=3, learning_rate=0.3, max_bin=64, random_state=0)
joined.fit(X[:400], y[:400])
print("the same predictions:", (joined.predict_proba(X[400:]) == model.predict_proba(test)).all())
for party, sentences in model.disclosures_.items():
    print(f"{party} learned:", sentences[0])
