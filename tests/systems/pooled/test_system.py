"""Tables of several owners as one."""

from __future__ import annotations

import pandas as pd
import pytest

from treaty.data.table import to_table
from treaty.errors import DataError
from treaty.systems.pooled.system import side_by_side


def tables_of(**names: list[str]):
    return {party: to_table(pd.DataFrame({name: [0.0, 1.0] for name in of})) for party, of in names.items()}


def test_columns_are_named_by_their_party_where_there_are_several():
    assert side_by_side(tables_of(a=["x", "y"])).schema.names == ("x", "y")
    assert side_by_side(tables_of(a=["x"], b=["x", "y"])).schema.names == ("a.x", "b.x", "b.y")


def test_names_that_are_the_same_behind_their_party_are_refused():
    tables = tables_of(a=["b.x"]) | {"a.b": tables_of(c=["x"])["c"]}
    with pytest.raises(DataError, match=r"two columns have the same name 'party\.column': rename a party"):
        side_by_side(tables)
