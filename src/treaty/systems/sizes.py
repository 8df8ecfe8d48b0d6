"""Bounds of sizes that a party says of itself and nobody has agreed to, so that no number alone takes memory."""

from typing import Annotated

import msgspec

MOST_COLUMNS = 1 << 20
"""Columns of one party."""

MOST_SLOTS = 1 << 24
"""Slots of one party's columns in a node's sums: 400 MB of them."""

MOST_ROWS = (1 << 31) - 1
"""Rows of a table: their numbers are int32."""

ColumnSize = Annotated[int, msgspec.Meta(ge=0, le=MOST_COLUMNS)]
RowSize = Annotated[int, msgspec.Meta(ge=0, le=MOST_ROWS)]
