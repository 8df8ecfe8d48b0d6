"""A first model of two tables, both parties played on this machine. Run `python customers.py` there before."""

# %% Read
from sklearn.metrics import roc_auc_score

import treaty

bank = treaty.read_table("bank/customers.csv")
shop = treaty.read_table("shop/customers.csv")
print("bank:", bank.num_rows, "rows; shop:", shop.num_rows, "rows")

# %% Align
common = treaty.align({"bank": bank, "shop": shop}, on="customer", drop_id=False)
common = {name: table.sort_by("customer").drop_columns(["customer"]) for name, table in common.items()}
y = common["bank"]["defaulted"].to_numpy()
common["bank"] = common["bank"].drop_columns(["defaulted"])
print("both have", len(y), "customers; columns:", {name: table.num_columns for name, table in common.items()})

# %% Train
train = {name: table.slice(0, 1600) for name, table in common.items()}
test = {name: table.slice(1600) for name, table in common.items()}

small = {"n_estimators": 20, "max_depth": 3, "learning_rate": 0.3}  # the default, 100 trees of depth 5, takes longer
model = treaty.GBDTClassifier(treaty.SecureBoost(), **small)
model.fit(train, y[:1600])
print("the bank learned:")
for sentence in model.disclosures_["bank"][:3]:  # the most telling ones
    print(" *", sentence)

# %% Compare
alone = treaty.GBDTClassifier("pooled", **small).fit({"bank": train["bank"]}, y[:1600])
auc_alone = roc_auc_score(y[1600:], alone.predict_proba({"bank": test["bank"]})[:, 1])
auc_together = roc_auc_score(y[1600:], model.predict_proba(test)[:, 1])
print(f"AUC of the bank alone {auc_alone:.2f}, with the shop's columns {auc_together:.2f}")

# %% Report
model.report("report.html", test, y[1600:])
print("wrote report.html")
