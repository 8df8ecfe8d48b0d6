"""A bank scores customers with columns of a shop. Run `python customers.py` in the same folder before."""

# %% Read
from sklearn.metrics import brier_score_loss, roc_auc_score

import treaty

paths = {"bank": "bank/customers.csv", "shop": "shop/customers.csv"}
tables = treaty.align(paths, on="customer", drop_id=False)
tables = {name: table.sort_by("customer").drop_columns(["customer"]) for name, table in tables.items()}
defaulted = tables["bank"]["defaulted"].to_numpy()
tables["bank"] = tables["bank"].drop_columns(["defaulted"])
train = {name: table.slice(0, 1600) for name, table in tables.items()}
test = {name: table.slice(1600) for name, table in tables.items()}

# %% Scorecard
scorecard = treaty.LogisticRegression(treaty.QuasiNewton(coordinator=False), reference="first")
scorecard.fit(train, defaulted[:1600])
probability = scorecard.predict_proba(test)[:, 1]
print(f"scorecard: AUC {roc_auc_score(defaulted[1600:], probability):.2f}")
bank = scorecard.parts_["bank"]
for column, weight in zip(bank.column_names(), bank.coef, strict=True):
    print(f"  {column:20} {weight:+.2f}")

# %% Trees
trees = treaty.GBDTClassifier(treaty.SecureBoost(sums="sealed"), n_estimators=12, max_depth=3, learning_rate=0.3)
trees.fit(train, defaulted[:1600])
probability = trees.predict_proba(test)[:, 1]
print(f"trees: AUC {roc_auc_score(defaulted[1600:], probability):.2f}", end=", ")
print(f"Brier score {brier_score_loss(defaulted[1600:], probability):.2f}")

# %% Reasons
reasons = trees.contributions_frame({name: table.slice(0, 1) for name, table in test.items()}).to_pylist()[0]
for column, added in sorted(reasons.items(), key=lambda each: -abs(each[1]))[:5]:
    print(f"  {column:14} {added:+.2f}")
