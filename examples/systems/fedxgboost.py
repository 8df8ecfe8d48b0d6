"""FedXGBoost (Le et al. 2021): exact by secure matrix products (SMM), or fast with noise on labels (LDP)."""

from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score

import treaty

X, y = load_breast_cancer(return_X_y=True)
train = {"clinic": X[:400, :15], "laboratory": X[:400, 15:]}
test = {"clinic": X[400:, :15], "laboratory": X[400:, 15:]}

# What a partner could learn.
# SMM: the clinic sees exact sums over the laboratory's bins. On this table of 400 rows it can compute more than a
# quarter of the bins of single rows from them. So every party has to consent with allow_exact_sums=True.
# LDP: the laboratory gets every label, randomised once. With epsilon 2, a label is true with a probability of 88 %,
# and that is all that any number of trees shows of it. The clinic learns no sum of the laboratory's bins.
systems = {
    "SMM": treaty.FedXGBoostSMM(allow_exact_sums=True),
    "LDP": treaty.FedXGBoostLDP(mechanism="label_rr", epsilon=2),
}
for name, system in systems.items():
    model = treaty.GBDTClassifier(system, n_estimators=10, max_depth=3, learning_rate=0.3, random_state=0)
    model.fit(train, y[:400])
    print(f"{name}: AUC {roc_auc_score(y[400:], model.predict_proba(test)[:, 1]):.2f}")
    for party, sentences in model.disclosures_.items():
        print(f"  {party} learned:", sentences[0])
