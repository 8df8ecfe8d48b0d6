"""A pipeline of FATE (PSI, HeteroSecureBoost, evaluation) in one file. Run `python customers.py` there before."""

# %% Reader
import treaty

guest = treaty.read_table("bank/customers.csv")  # the guest: the active party, which has the labels
host = treaty.read_table("shop/customers.csv")

# %% PSI
tables = treaty.align({"guest": guest, "host": host}, on="customer", drop_id=False)
tables = {name: table.sort_by("customer").drop_columns(["customer"]) for name, table in tables.items()}
label = tables["guest"]["defaulted"].to_numpy()
tables["guest"] = tables["guest"].drop_columns(["defaulted"])

# %% HeteroSecureBoost
model = treaty.GBDTClassifier(
    treaty.SecureBoost(),
    n_estimators=10,  # num_trees
    max_depth=3,
    learning_rate=0.3,
    max_bin=32,
    reg_lambda=0.1,  # l2
    eval_metric=["auc"],
)
train = {name: table.slice(0, 1600) for name, table in tables.items()}
test = {name: table.slice(1600) for name, table in tables.items()}
model.fit(train, label[:1600], eval_set=[(test, label[1600:])])

# %% Evaluation
print("AUC by round:", [round(each, 2) for each in model.evals_result_["eval_0"]["auc"]])
