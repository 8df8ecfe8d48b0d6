"""What messages about checkpoints tell, in every system whose parties exchange them."""

from __future__ import annotations

from treaty.systems.pooled.rounds import CheckpointReceipt, CheckpointRequest
from treaty.systems.told import Lines, Told, lines


def checkpoints_told(lead: str, others: tuple[str, ...]) -> Lines:
    """Return the lines of checkpoints, which `lead` asks the `others` for between rounds."""
    return lines(
        Told(CheckpointRequest, (lead,), others, "how many rounds are finished", "control"),
        Told(CheckpointReceipt, others, (lead,), "that a checkpoint is written, if one is", "control"),
        reference="docs/jobs.md, A party's files",
    )
