"""Alignment of lists too long to hold: the same messages and results, from files, in memory that does not grow."""

from __future__ import annotations

import gc
import hashlib
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from treaty.crypto.keystream import Keystream
from treaty.crypto.transfer import sodium
from treaty.data.ids import Psi, read_ids
from treaty.data.large import Scratch
from treaty.errors import CryptoError, DataError, PeerProtocolError
from treaty.messaging.party import Party
from treaty.privacy.ledger import RunLog
from treaty.runs.threads import RunRecord, play, star
from treaty.systems.alignment import ecdh, kkrt
from treaty.systems.alignment.alignment import Alignment, AlignmentOptions, align_active, align_passive
from treaty.systems.alignment.ecdh import committed

pytestmark = pytest.mark.slow

Columns = dict[str, Any]
SMALLEST, BATCH = 64, 16
HELD, FEW = 1 << 20, 20


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short lists; a folder of temporary files of our own, in which no name is ever to be seen."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(ecdh, "SMALLEST", SMALLEST)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []
    gc.collect()  # errors kept at the channels' ends hold on to the ids
    assert open_files(tmp_path) == 0


def open_files(folder: Path) -> int:
    """How many files in a folder this process has open or mapped; libsodium's own one aside."""
    used = Path("/proc/self/maps").read_text().splitlines()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the listing
            used.append(str(descriptor.readlink()))
    return sum(str(folder) in name and ".so" not in name for name in used)


def run(columns: Columns, in_memory: int, *, how: Any = "error", logs: Path | None = None, **options: Any) -> RunRecord:
    lead = next(iter(columns))

    def role(name: str) -> Callable[[Party], Alignment]:
        align = align_active if name == lead else align_passive
        log = None if logs is None else RunLog(logs / f"{name}.runs")
        own = AlignmentOptions(**{"batch": BATCH, "log": log, "in_memory": in_memory, **options})
        return lambda party: align(party, read_ids(columns[name], on_duplicate=how, in_memory=in_memory), own)

    roles = {name: role(name) for name in columns}
    return play(
        roles, star(lead, columns), job="test", protocol="alignment", timeout=20, record_content=True
    )  # fmt: skip


@pytest.fixture
def nothing_is_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the same keys, salts and orders in every run, also where they are drawn at other times."""

    def token_bytes(count: int) -> bytes:
        return hashlib.shake_256(b"%d" % count).digest(count) if count < 1000 else padding(count)

    def padding(count: int) -> bytes:
        return hashlib.shake_256(b"padding").digest(count)

    init = Keystream.__init__
    monkeypatch.setattr(Keystream, "__init__", lambda self, key=None: init(self, bytes(32) if key is None else key))
    monkeypatch.setattr("secrets.token_bytes", token_bytes)
    monkeypatch.setattr("secrets.randbelow", lambda bound: bound // 3)


CASES: dict[str, tuple[Columns, dict[str, Any]]] = {
    "numbers": ({"a": list(range(64)), "b": list(range(20, 84))}, {}),
    "three parties": (
        {"a": list(range(64)), "b": list(range(20, 84)), "c": [*range(0, 40), *range(1000, 1024)]}, {},
    ),
    "only the active party": ({"a": list(range(64)), "b": list(range(20, 84))}, {"result_to": "active"}),
    "unicode": (
        {
            "a": [*(f"caf\u00e9 {k}" for k in range(48)), *(chr(0x4E00 + k) for k in range(16))],
            "b": [*(f"  cafe\u0301 {k}" for k in range(64))],
        },
        {},
    ),
    "first of repeated ids": ({"a": [k % 64 for k in range(130)], "b": [None, *range(32, 96), 95]}, {"how": "first"}),
    "all repeated ids": (
        {"a": [k % 64 for k in range(130)], "b": [*range(32, 96), 33, 33, None], "c": [*range(40, 104), 50]},
        {"how": "expand"},
    ),
}  # fmt: skip


def messages(played: RunRecord, name: str) -> dict[tuple[str, str], list[tuple[str, bytes | None]]]:
    """All that a party sent and received, in order for each peer: whose messages come first depends on the threads."""
    found: dict[tuple[str, str], list[tuple[str, bytes | None]]] = {}
    for entry in played.transcripts[name].entries:
        found.setdefault((entry.direction, entry.peer), []).append((entry.step, entry.content))
    return found


@pytest.mark.usefixtures("nothing_is_random")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_files_change_neither_messages_nor_results(case: tuple[Columns, dict[str, Any]]) -> None:
    columns, options = case
    held, stored = run(columns, HELD, **options), run(columns, FEW, **options)
    for name in columns:
        assert stored.results[name].rows.tolist() == held.results[name].rows.tolist()
        assert stored.results[name].n_common == held.results[name].n_common
        assert stored.results[name].pairwise == held.results[name].pairwise
        assert messages(held, name) == messages(stored, name)
    assert len(held.results["a"].rows) >= 16
    assert held.results["a"].rows.tolist() != sorted(held.results["a"].rows)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kkrt_from_files_gives_the_rows_of_ecdh(case: tuple[Columns, dict[str, Any]]) -> None:
    columns, options = case
    found = []
    for psi, in_memory in (("ecdh", HELD), ("kkrt", FEW)):
        results = run(columns, in_memory, psi=psi, **options).results
        told = [result.rows.tolist() for result in (results[name] for name in columns) if len(result.rows)]
        found.append((sorted(zip(*told, strict=True)), results["a"].n_common, results["a"].pairwise))
    assert found[0] == found[1]
    assert len(found[0][0]) >= 16


def test_padded_lists_in_files_are_aligned() -> None:
    columns = {"a": [f"id {k}" for k in range(70)], "b": [f"id {k}" for k in range(140, 30, -1)]}
    results = run(columns, FEW).results
    pairs = sorted(zip(results["a"].rows.tolist(), results["b"].rows.tolist(), strict=True))
    assert pairs == [(k, 140 - k) for k in range(31, 70)]


def test_commitment_is_the_same_from_files() -> None:
    ids = read_ids([f"id {k}" for k in range(500)], in_memory=30)
    key = bytes(range(32))
    expected = sodium.commit(sodium.digests(ids.data.copy(), ids.offsets.copy(), np.arange(500), key), key)
    with Scratch(30) as scratch:
        assert np.array_equal(committed(ids, key, 1, scratch), expected)


@pytest.mark.parametrize("failing", ["a point that is none", "no id in common", "a failing curve"])
def test_files_are_gone_after_an_error(monkeypatch: pytest.MonkeyPatch, folder: Path, failing: str) -> None:
    seen: list[int] = []
    columns = {"a": list(range(100)), "b": list(range(50, 150))}
    if failing == "no id in common":
        columns["b"] = list(range(1000, 1100))
        expected: type[Exception] = DataError
    elif failing == "a point that is none":
        made = ecdh.OwnList.blinded
        monkeypatch.setattr(ecdh.OwnList, "blinded", lambda own, part: made(own, part) * np.uint8(part.start < 40))
        expected = PeerProtocolError
    else:
        expected = CryptoError
    raised = ecdh.OwnList.raised

    def noting(*args: Any) -> NDArray[np.uint8]:
        seen.append(open_files(folder))
        if failing == "a failing curve" and len(seen) > 4:
            raise CryptoError("the library failed")
        return raised(*args)

    monkeypatch.setattr(ecdh.OwnList, "raised", noting)
    with pytest.raises(expected):
        run(columns, FEW)
    assert max(seen) >= 12  # of both parties: four of the ids, the own list, and what became of it
    # that they are gone by now is seen by the fixture


# ---------------------------------------------------------------- memory


@pytest.fixture
def free_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose operations cost nothing: adding words of 64 bits."""

    def added(points: NDArray[np.uint8], scalar: NDArray[np.uint8], threads: int = 1) -> NDArray[np.uint8]:
        return (np.ascontiguousarray(points).view(np.uint64) + scalar.view(np.uint64)).view(np.uint8)

    monkeypatch.setattr(sodium, "multiply", added)
    monkeypatch.setattr(sodium, "validate", lambda points, threads=1: None)
    monkeypatch.setattr(sodium, "from_uniform", lambda uniform, threads=1: np.ascontiguousarray(uniform[:, :32]))


def peak(count: int, in_memory: int, psi: Psi = "ecdh") -> int:
    """Peak of what both parties allocate, in bytes; half of the ids are common. The columns are not counted."""
    columns = {
        name: pa.array(np.random.default_rng(first).permutation(count) + first)
        for name, first in (("a", 0), ("b", count // 2))
    }

    def role(align: Callable[..., Alignment], name: str) -> Callable[[Party], Alignment]:
        options = AlignmentOptions(psi=psi, batch=1024, in_memory=in_memory)
        return lambda party: align(party, read_ids(columns[name], in_memory=in_memory), options)

    tracemalloc.start()
    try:
        results = play(
            {"a": role(align_active, "a"), "b": role(align_passive, "b")}, {"a": ["b"], "b": ["a"]},
            job="test", protocol="alignment", timeout=60,
        ).results  # fmt: skip
        assert len(results["a"].rows) == len(results["b"].rows) == count // 2
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.usefixtures("free_curve")
def test_memory_grows_by_the_result_alone() -> None:
    peak(1 << 10, 1 << 8)  # what is loaded once
    few, many = 1 << 13, 1 << 15
    stored, held = ((peak(many, limit) - peak(few, limit)) / (many - few) for limit in (1 << 12, 1 << 20))
    # Bytes per id of one party: 8 for each of its rows in the result, half of them, at both parties.
    assert stored < 16
    assert held > 160  # without files: what the limit above would notice


def test_memory_of_kkrt_grows_by_the_table_and_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kkrt, "BINS", 1 << 10)
    monkeypatch.setattr(kkrt, "VALUES", 1 << 10)
    peak(1 << 10, 1 << 8, "kkrt")  # what is loaded once
    few, many = 1 << 15, 1 << 17  # both more messages than are on the way
    stored, held = (
        (peak(many, limit, "kkrt") - peak(few, limit, "kkrt")) / (many - few) for limit in (1 << 13, 1 << 20)
    )
    # Bytes per id: 16 of a digest and 5 to 6 of bins, at the active party; at both 8 for each row in the result.
    assert stored < 40
    assert held > 160
