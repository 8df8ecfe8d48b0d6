"""A holder's rows, put into the columns that all agreed on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from treaty.data.table import to_table
from treaty.systems.horizontal.rows import common_rows
from treaty.systems.system import LabelledRows


def test_what_is_said_of_an_eval_set_names_it(caplog):
    known = to_table(pd.DataFrame({"place": pd.Categorical(["a", "b"])})).schema
    data = LabelledRows(to_table(pd.DataFrame({"place": pd.Categorical(["a", "c"])})), np.zeros(2), None, "eval_0")
    common_rows(data, known, None, None, "north")
    common_rows(replace(data, name="train"), known, None, None, "north")
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(" rows have")[0] for text in said] == [
        "north: eval_0: column 'place': 1 of 2",
        "north: column 'place': 1 of 2",
    ]
