"""A holder's rows, put into the columns that all agreed on."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pandas as pd
import pytest

from treaty.data.table import to_table
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import decode_body
from treaty.systems.horizontal.rows import RowsDescription, common_rows
from treaty.systems.system import LabelledRows


@pytest.mark.parametrize(
    "change",
    [
        {"names": ["age"]}, {"names": ["age", "age"]}, {"names": ["age", "place", "place"]}, {"categories": [None]},
        {"empty": [False]}, {"origins": {"income": 5}}, {"empty": [True, False], "origins": {"age": 5}},
    ],
    ids=str,
)  # fmt: skip
def test_a_description_that_fits_no_table_is_refused_as_it_comes(change):
    fine = RowsDescription(["age", "place"], [None, ["a"]], [False, False], None, origins={"age": 5})
    fields = msgspec.structs.asdict(fine)
    assert decode_body(msgspec.msgpack.encode(fields), RowsDescription, peer="shop").origins == {"age": 5}
    with pytest.raises(PeerProtocolError, match=r"expected the kind of each column.* from shop"):
        decode_body(msgspec.msgpack.encode(fields | change), RowsDescription, peer="shop")


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
