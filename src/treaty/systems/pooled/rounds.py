"""Checkpoint messages, which every system's leading party and the others exchange between rounds."""

from __future__ import annotations

from treaty.messaging.messages import Message


class CheckpointRequest(Message):
    """A round is finished: write a checkpoint. Tells how many rounds there are."""

    rounds: int


class CheckpointReceipt(Message):
    """The checkpoint is written, if one is."""
