"""No message grows with the number of rows: small jobs of every system, with tables of two sizes and a low bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from systems import routes
from systems.test_leakage import JOBS
from treaty.crypto.sums import additive_sums, lattice_sums
from treaty.machine import arrays
from treaty.runs.threads import RunRecord
from treaty.systems import find_system

FEW, MANY, BOUND = 160, 800, 16  # rows, rows, bytes of a message

BOUNDED = {
    "Margins": "of a mini-batch",
    "VectorQuery": "of a mini-batch, or of as many rows as the lattice's degree",
    "SumsRequest": "under the lattice map of as many rows as its degree; see secureboost/test_lossless.py",
    "SealedSumsRequest": "as SumsRequest",
    "SealedStep": "of as many rows as one step is about; see crypto/sealed/test_hidden_rows.py",
    "SidesRequest": "of splits of the trees, which have more nodes on more rows",
    "MaskedAnswer": "of bins, which are at most as many as max_bin",
    "CountShares": "as MaskedAnswer",
    "InnerProducts": "of directions of steps, which are more the longer a training takes",
}
"""Messages that grow between tables as small as these, but not for ever."""


def largest(name: str, folder: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Play all jobs of a system on so many rows; return the bytes of the largest message of each class."""
    found: dict[str, int] = {}

    def note(records: list[RunRecord], roles: object) -> set[routes.Route]:
        for record in records:
            for transcript in record.transcripts.values():
                for entry in transcript.entries:
                    found[entry.step] = max(found.get(entry.step, 0), entry.nbytes)
        return set()

    monkeypatch.setattr(routes, "N_ROWS", rows)
    monkeypatch.setattr(routes, "routes_of", note)
    for number, job in enumerate(JOBS[name]):
        (folder / f"{rows}-{number}").mkdir()
        routes.routes(find_system(name), job, folder / f"{rows}-{number}")
    return found


@pytest.mark.parametrize("name", [name for name in JOBS if name != "fedxgb"])  # see fedxgb/test_pieces.py
def test_no_message_grows_with_rows(name, tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "PIECE_BYTES", BOUND)
    for module in (additive_sums, additive_sums, lattice_sums):
        monkeypatch.setattr(module, "PIECE_BYTES", BOUND)
    for module in (additive_sums, additive_sums):
        monkeypatch.setattr(module, "LEAST_ROWS", 1)
    few, many = (largest(name, tmp_path, rows, monkeypatch) for rows in (FEW, MANY))
    assert few.keys() == many.keys()
    grown = {step: (few[step], many[step]) for step in few if many[step] > 1.1 * few[step] + 60}
    assert grown.keys() <= BOUNDED.keys(), grown
