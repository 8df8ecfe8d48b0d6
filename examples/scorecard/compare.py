"""Compare the card with other models on the applicants, as somebody can who has both parties' files: in a rehearsal."""

from pathlib import Path

import numpy as np
from pandas import concat, read_csv
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import treaty
from treaty.data.table import to_table
from treaty.models.linear import load_linear_part

parties = ["bank", "bureau"]
customers, applicants = (
    {party: read_csv(Path(party, file)).set_index("ID") for party in parties}
    for file in ("customers.csv", "applicants.csv")
)
y = customers["bank"].pop("defaulted")
outcomes = read_csv("bank/outcomes.csv").set_index("ID")["defaulted"]
points = read_csv("bank/model/predictions.csv").set_index("ID")["points"]
print(f"scorecard            AUC {roc_auc_score(outcomes, -points[outcomes.index]):.3f}")

joined, asked = (concat(tables.values(), axis=1) for tables in (customers, applicants))
plain = treaty.LogisticRegression().fit(joined, y)
print(f"without bins         AUC {roc_auc_score(outcomes, plain.decision_function(asked)):.3f}")


def woe(tables):
    """Return the weight of evidence of all columns, by the bins of the card."""
    found = []
    for party, table in tables.items():
        part = load_linear_part(f"{party}/model/{party}.part")
        made = to_table(table, party=party, schema=part.schema)
        found += [of.transform(made) for of in part.card.bins]
    return np.column_stack(found)


theirs = LogisticRegression(C=np.inf).fit(woe(customers), y)
print(f"scikit-learn, on WOE AUC {roc_auc_score(outcomes, theirs.decision_function(woe(applicants))):.3f}")
