"""What a transfer takes that is made of little communication (Ferret, CCS 2020), beside those that are used.

Not the protocol: the two parts in which nearly all of its work is, for the parameters of the paper's one batch of ten
million transfers, as the sender does them: leaves of 1319 trees (AES), and a code whose words are sums of ten of
589,760 blocks. Both are lower bounds of what a transfer would take. Beside them are an end's extensions as they are:
`QUICK` for near links, `SHORT` for those below 250 Mbit/s. The last columns are the seconds and megabytes of the three
million transfers in either direction of a sealed tree (20 000 rows, 12 columns, depth 3, 32 bins), and the seconds on
links, as the busier of computing and sending. One thread. About a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from data import arguments, report, seconds
from treaty.crypto.transfer.aes import Streams
from treaty.crypto.transfer.extension import QUICK, SHORT, Receiver, SeedTrees, Sender
from treaty.machine.kernels import kernel

BLOCKS, READS, TREES, BATCH = 589_760, 10, 1319, 10_805_248
OF_A_TREE = 3_100_000
SENT_BITS = 0.44  # of a transfer, as the paper has it


@kernel
def add_up(blocks, seed, out):
    """Add to each word ten of the blocks, at places of a cheap generator: the paper's takes AES, and more time."""
    state = seed
    for row in range(out.shape[0]):
        low, high = out[row, 0], out[row, 1]
        for _ in range(READS):
            state ^= state << np.uint64(13)
            state ^= state >> np.uint64(7)
            state ^= state << np.uint64(17)
            place = np.int64(((state >> np.uint64(32)) * np.uint64(blocks.shape[0])) >> np.uint64(32))
            low ^= blocks[place, 0]
            high ^= blocks[place, 1]
        out[row, 0] = low
        out[row, 1] = high


def least(work: Callable[[], object]) -> float:
    return min(seconds(work) for _ in range(5))


def silent(quick: bool) -> float:
    """Return the seconds of a transfer's leaves and word."""
    count = BATCH // (100 if quick else 10)
    blocks = np.random.default_rng(0).integers(0, 2**64, (BLOCKS, 2), np.uint64)
    streams = Streams(np.random.default_rng(1).integers(0, 256, (TREES, 16), np.uint8))
    words, out = -(-count // TREES), np.zeros((count, 2), np.uint64)
    add_up(blocks, np.uint64(7), out[:10])
    # a tree makes two blocks for each leaf, of which a stream of 16 bytes is one
    leaves = 2 * least(lambda: streams.next_words(2 * words))
    return (leaves + least(lambda: add_up(blocks, np.uint64(7), out))) / count


def extended(shape: SeedTrees, quick: bool) -> float:
    """Return the seconds of a transfer at the slower end."""
    receiver = Receiver(shape)
    sender = Sender(receiver.offer, shape)
    sender.prepare(receiver.prepare(sender.points))
    count = 1 << (16 if quick else 20)
    message, *_ = receiver.extend(count)
    sender.extend(count, message)
    return max(least(lambda: receiver.extend(count)), least(lambda: sender.extend(count, message))) / count


def main(given: Sequence[str] | None = None) -> None:
    quick = arguments(__doc__).parse_args(given).quick
    rows = []
    for kind, took, bits in (
        ("QUICK", extended(QUICK, quick), QUICK.sent),
        ("SHORT", extended(SHORT, quick), SHORT.sent),
        ("silent, at least", silent(quick), SENT_BITS),
    ):
        # each party is the sender of as many as it receives
        computing, nbytes = 2 * took * OF_A_TREE / 2, bits / 8 * OF_A_TREE
        rows.append({
            "transfers": kind, "ns": 1e9 * took, "bits": bits, "s a tree": computing, "MB a tree": nbytes / 1e6,
            **{f"s at {rate} Mbit/s": max(computing, 8 * nbytes / 2 / (1e6 * rate)) for rate in (100, 1000)},
        })  # fmt: skip
        print(rows[-1], flush=True)
    report("silent_transfers", rows, quick=quick)


if __name__ == "__main__":
    main()
