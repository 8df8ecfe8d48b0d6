"""Why a request is not answered."""

from __future__ import annotations


class Refused(Exception):
    """A request cannot be answered: an HTTP status, what is wrong in plain words, and where in the request.

    Attributes
    ----------
    status : int
    row : int or None
        Counted from 0.
    column : str or None
    retry_after : int or None
        Seconds after which asking again may help.
    """

    def __init__(
        self,
        status: int,
        said: str,
        *,
        row: int | None = None,
        column: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(said)
        self.status, self.row, self.column, self.retry_after = status, row, column, retry_after

    def answer(self) -> dict[str, str | int]:
        """Return what the caller is told: "error" in a sentence that names row and column, and these once more."""
        at_row = [] if self.row is None else [f"row {self.row}"]
        at_column = [] if self.column is None else [f"column {self.column!r}"]
        where = ", ".join([*at_row, *at_column])
        told: dict[str, str | int] = {"error": f"{where}: {self}" if where else str(self)}
        if self.row is not None:
            told["row"] = self.row
        if self.column is not None:
            told["column"] = self.column
        return told
