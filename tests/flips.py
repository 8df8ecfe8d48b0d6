"""Files with one bit changed, and damaged in other ways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np


def flipped(file: Path, count: int, seed: int = 0) -> Iterator[str]:
    """Change one bit of a file at a time, `count` of them, and yield which; at the end the file is as it was.

    All bits of the first 128 bytes are among them where there are enough, for what the rest means stands there.
    """
    whole = file.read_bytes()
    early = np.arange(min(8 * 128, 8 * len(whole)))
    drawn = np.random.default_rng(seed).integers(0, 8 * len(whole), count)
    for bit in [*early[:: max(1, 2 * len(early) // count)], *drawn][:count]:
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        yield f"bit {bit} of {file.name}"
    file.write_bytes(whole)


def damaged(file: Path, seed: int = 0) -> Iterator[str]:
    """Cut a file off, empty it, delete it, overwrite all or some of it; at the end it is as it was."""
    whole, mode, rng = file.read_bytes(), file.stat().st_mode, np.random.default_rng(seed)
    lengths = sorted({0, 1, len(whole) // 2, len(whole) - 1, *rng.integers(0, len(whole), 5).tolist()})
    changes = {f"cut to {length} bytes": whole[:length] for length in lengths}
    changes |= {"random": rng.bytes(len(whole)), "zeros": bytes(len(whole))}
    for at in rng.integers(0, len(whole), 5).tolist():
        changes[f"random from {at}"] = whole[:at] + rng.bytes(min(16, len(whole) - at)) + whole[at + 16 :]
    for what, content in changes.items():
        file.write_bytes(content)
        yield f"{file.name}: {what}"
    file.unlink()
    yield f"{file.name}: deleted"
    file.write_bytes(whole)
    file.chmod(mode)
