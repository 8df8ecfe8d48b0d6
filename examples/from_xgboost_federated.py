"""What XGBoost's federated mode did, by column and by row, and a booster of XGBoost's in the end."""

# %% Data
import xgboost
from sklearn.datasets import load_breast_cancer

import treaty

X, y = load_breast_cancer(return_X_y=True)
X = X[:, :10]
test = slice(400, None)

# %% Columns
shape = {"n_estimators": 10, "max_depth": 3, "learning_rate": 0.3, "random_state": 0}
model = treaty.GBDTClassifier(treaty.SecureBoost(), **shape)
model.fit({"rank0": X[:400, :4], "rank1": X[:400, 4:]}, y[:400])
print("columns:", model.predict_proba({"rank0": X[test, :4], "rank1": X[test, 4:]})[:2, 1].round(3))

# %% Rows
by_row = treaty.GBDTClassifier(treaty.FederBoostHorizontal(), **shape)
by_row.fit({"rank0": (X[:150], y[:150]), "rank1": (X[150:280], y[150:280]), "rank2": (X[280:400], y[280:400])})
print("rows:", by_row.predict_proba(X[test])[:2, 1].round(3))

# %% Booster
booster = by_row.to_xgboost()
print("as XGBoost:", booster.predict(xgboost.DMatrix(X[test], feature_names=booster.feature_names))[:2].round(3))
