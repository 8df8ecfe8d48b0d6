"""Write the tables of a bank and a bureau from Default of Credit Card Clients: `make_tables.py FILE`, Parquet.

The data set (UCI Machine Learning Repository, number 350; CC BY 4.0) has 30,000 customers of a bank, and whether each
defaulted in the next month. Here the bank keeps what it knows of the person and of late payments, the bureau amounts.
"""

import sys
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet

if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
    sys.exit("expected the Parquet file of Default of Credit Card Clients: make_tables.py FILE")
whole = pyarrow.parquet.read_table(sys.argv[1])
whole = whole.rename_columns(["defaulted" if name.startswith("default") else name for name in whole.column_names])
columns = {
    "bank": ["ID", "LIMIT_BAL", "AGE", "PAY_0", "PAY_2", "PAY_3", "defaulted"],
    "bureau": ["ID", "PAY_AMT1", "PAY_AMT2", "PAY_AMT3"],
}
for party, names in columns.items():
    Path(party).mkdir(exist_ok=True)
    # customers are those of whom the bank knows whether they paid; the others apply now
    for file, of in {"customers": slice(0, 8000), "applicants": slice(8000, 10000)}.items():
        table = whole.select(names).slice(of.start, of.stop - of.start)
        if file == "applicants" and party == "bank":
            pyarrow.csv.write_csv(table.select(["ID", "defaulted"]), "bank/outcomes.csv")
            table = table.drop_columns(["defaulted"])
        pyarrow.csv.write_csv(table, f"{party}/{file}.csv")
