"""What a store of hints keeps, forgets and refuses, in memory, on disk and among processes."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from flips import damaged, flipped
from treaty.crypto.lattice import store as store_module
from treaty.crypto.lattice.store import KEPT, HintStore
from treaty.crypto.parameters import LEAK_LIMIT
from treaty.errors import ConfigError, CryptoError, LocalProtocolError
from treaty.machine.database import kept_file

SHAPE = (3, 2, 64)
HINT = np.random.default_rng(0).integers(-(2**15), 2**15, SHAPE, np.int16)
RANDOM = np.random.default_rng(1).integers(-1, 2, (5, 64), np.int16)
NONCE, SEED, TERMS = b"nonce", b"seed" * 8, b"terms"


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HintStore]:
    with HintStore(None if request.param == "memory" else tmp_path / "store") as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "party" / "store"


def keep(
    store: HintStore, peer: str, binding: bytes, seed: bytes = SEED, terms: bytes = TERMS, hint: np.ndarray = HINT
) -> np.ndarray:
    with store.new_hint(hint.shape) as new:
        for row, values in enumerate(hint):
            new.write(row, values[np.newaxis])
        return store.keep_hint(peer, binding, seed, terms, new)


def arrays(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("hints.sqlite"))


def run(code: str, *arguments: object, **options: object) -> subprocess.Popen[str]:
    """Another process of the same party; `line()` there waits for one from here."""
    start = "import sys\nimport time\nfrom pathlib import Path\nfrom treaty.crypto.lattice.store import HintStore\n"
    start += "from treaty.errors import CryptoError\nline = sys.stdin.readline\n"
    return subprocess.Popen(
        [sys.executable, "-c", start + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# Hints at the client


def test_hint_comes_back_as_it_was_written(store: HintStore) -> None:
    kept = keep(store, "shop", b"binding")
    assert np.array_equal(kept, HINT)
    again = store.hint("shop", b"binding")
    assert np.array_equal(again, HINT)
    assert kept.dtype == again.dtype == np.int16
    assert not kept.flags.writeable
    assert not again.flags.writeable


def test_hint_without_rows_is_kept(store: HintStore) -> None:
    empty = np.empty((0, 2, 64), np.int16)
    assert keep(store, "shop", b"binding", hint=empty).shape == empty.shape
    assert store.hint("shop", b"binding").shape == empty.shape


def test_hint_outlives_the_store_in_a_folder_alone(folder: Path) -> None:
    with HintStore(folder) as first:
        kept = keep(first, "shop", b"binding")
    assert np.array_equal(kept, HINT)  # arrays stay good
    with HintStore(folder) as second:
        assert second.offer({"shop": TERMS}) == (SEED, {"shop": b"binding"})
        assert np.array_equal(second.hint("shop", b"binding"), HINT)
    with HintStore(None) as first:
        keep(first, "shop", b"binding")
    with HintStore(None) as second:
        assert second.offer({"shop": TERMS}) is None


def test_hint_on_disk_is_mapped_and_not_read_into_memory(folder: Path) -> None:
    with HintStore(folder) as store:
        new = store.new_hint(SHAPE)
        arrays_met = [new.array]
        new.write(0, HINT)
        arrays_met += [store.keep_hint("shop", b"binding", SEED, TERMS, new), store.hint("shop", b"binding")]
    for array in arrays_met:
        while isinstance(array, np.ndarray):
            array = array.base
        assert type(array.obj if isinstance(array, memoryview) else array).__name__ == "mmap"


def test_offer_is_made_of_hints_of_all_peers_with_one_seed_and_these_terms(store: HintStore) -> None:
    keep(store, "shop", b"shop 1")
    keep(store, "club", b"club 1")
    assert store.offer({"shop": TERMS, "club": TERMS}) == (SEED, {"shop": b"shop 1", "club": b"club 1"})
    assert store.offer({"club": TERMS}) == (SEED, {"club": b"club 1"})
    assert store.offer({"shop": TERMS, "club": TERMS, "bank": TERMS}) is None
    assert store.offer({"shop": TERMS, "club": b"term"}) is None
    assert store.offer({}) is None
    keep(store, "club", b"club 2", seed=b"other" * 8)
    assert store.offer({"shop": TERMS, "club": TERMS}) is None
    assert store.offer({"club": TERMS}) == (b"other" * 8, {"club": b"club 2"})
    keep(store, "shop", b"shop 2", seed=b"other" * 8)
    assert store.offer({"shop": TERMS, "club": TERMS}) == (b"other" * 8, {"shop": b"shop 2", "club": b"club 2"})


def test_later_hint_replaces_that_of_the_same_peer_and_terms_with_its_file(folder: Path) -> None:
    with HintStore(folder) as store:
        old = keep(store, "shop", b"old")
        keep(store, "shop", b"other", terms=b"other")
        keep(store, "club", b"old")
        assert len(arrays(folder)) == 3
        keep(store, "shop", b"new", hint=HINT[::-1])
        assert len(arrays(folder)) == 3
        assert np.array_equal(old, HINT)  # who has it mapped keeps it
        assert np.array_equal(store.hint("shop", b"new"), HINT[::-1])
        assert np.array_equal(store.hint("shop", b"other"), HINT)
        assert np.array_equal(store.hint("club", b"old"), HINT)
        with pytest.raises(ConfigError, match="no hint of shop with this binding is stored"):
            store.hint("shop", b"old")


def test_hints_of_a_peer_older_than_it_can_have_kept_are_forgotten(folder: Path) -> None:
    with HintStore(folder) as store:
        keep(store, "club", b"club")
        for number in range(KEPT + 2):
            keep(store, "shop", bytes([number]), terms=bytes([number]))
        kept = [number for number in range(KEPT + 2) if store.offer({"shop": bytes([number])})]
        assert kept == list(range(2, KEPT + 2))
        assert store.offer({"club": TERMS})
        assert len(arrays(folder)) == KEPT + 1


def test_hints_of_a_peer_take_no_more_than_so_many_bytes(store: HintStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "KEPT_BYTES", 2 * HINT.nbytes + 300)
    for number in range(4):
        keep(store, "shop", bytes([number]), terms=bytes([number]))
    assert [number for number in range(4) if store.offer({"shop": bytes([number])})] == [2, 3]
    monkeypatch.setattr(store_module, "KEPT_BYTES", 1)  # the newest is kept, whatever its size
    keep(store, "shop", b"new", terms=b"new")
    assert store.offer({"shop": b"new"})
    assert store.offer({"shop": bytes([3])}) is None


def test_missing_hint_is_refused_without_telling_peers_where(store: HintStore) -> None:
    with pytest.raises(ConfigError, match="no hint of shop with this binding is stored") as caught:
        store.hint("shop", b"binding")
    assert caught.value.public == "its stored hint for the lattice map cannot be used; it has the details"


def spoil_value(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


DAMAGES = {
    "value": spoil_value,
    "cut off": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "empty": lambda path: os.truncate(path, 0),
    "shape": lambda path: np.save(path, HINT.reshape(2, 3, 64)),
    "dtype": lambda path: np.save(path, HINT.view(np.uint16)),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_hint_is_refused_and_not_offered_again(folder: Path, damage: object) -> None:
    with HintStore(folder) as store:
        keep(store, "shop", b"binding")
        (path,) = arrays(folder)
        damage(path)
        fault = "damaged" if path.exists() else "missing"
        with pytest.raises(ConfigError, match=f"a hint's file is {fault}: .*{path.name}; start again") as caught:
            store.hint("shop", b"binding")
        assert "array" not in str(caught.value.public)
        assert store.offer({"shop": TERMS}) is None
        assert arrays(folder) == []
        keep(store, "shop", b"binding")
        assert np.array_equal(store.hint("shop", b"binding"), HINT)


def test_hint_whose_file_cannot_be_read_is_refused_and_stays(folder: Path) -> None:
    with HintStore(folder) as store:
        keep(store, "shop", b"binding")
        (path,) = arrays(folder)
        moved = path.rename(folder / "moved")
        path.mkdir()
        with pytest.raises(ConfigError, match="Is a directory"):
            store.hint("shop", b"binding")
        path.rmdir()
        moved.rename(path)
        assert np.array_equal(store.hint("shop", b"binding"), HINT)


@pytest.mark.parametrize("end", ["drop", "with", "garbage"])
def test_unfinished_hint_leaves_no_file(folder: Path, end: str) -> None:
    with HintStore(folder) as store:
        new = store.new_hint(SHAPE)
        new.write(0, HINT[:1])
        assert len(arrays(folder)) == 1
        if end == "drop":
            with new:
                pass
        elif end == "with":
            with pytest.raises(ZeroDivisionError), new:
                raise ZeroDivisionError
        else:
            del new
        assert arrays(folder) == []
        assert store.offer({"shop": TERMS}) is None


def test_what_a_killed_process_left_is_swept_away_and_what_another_is_writing_is_not(folder: Path) -> None:
    code = """
store = HintStore(Path(sys.argv[1]))
new = store.new_hint((3, 2, 64))
print("ready", flush=True)
line()
"""
    with HintStore(folder) as store:
        keep(store, "shop", b"binding")
        (folder / "other.npy").touch()
        lost = folder / f"array-{'0' * 32}.npy"  # placed by a process that died before its record was there
        lost.touch()
        writing = store.new_hint(SHAPE)
        writing.write(0, -HINT)
        with run(code, folder) as process:
            assert process.stdout.readline() == "ready\n"
            HintStore(folder).close()
            assert len(arrays(folder)) == 4
            assert not lost.exists()
            process.kill()
        HintStore(folder).close()
        assert len(arrays(folder)) == 3
        assert (folder / "other.npy").exists()
        store.keep_hint("club", b"binding", SEED, TERMS, writing)
        assert np.array_equal(store.hint("club", b"binding"), -HINT)
        assert np.array_equal(store.hint("shop", b"binding"), HINT)


def test_large_hint_of_a_store_in_memory_lies_in_a_temporary_file_that_vanishes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = []

    def temporary_file(**options: object) -> object:
        made.append(temporary(dir=tmp_path, **options))
        return made[-1]

    temporary = store_module.tempfile.TemporaryFile
    monkeypatch.setattr(store_module.tempfile, "TemporaryFile", temporary_file)
    monkeypatch.setattr(store_module, "IN_MEMORY", HINT.nbytes - 1)
    with HintStore(None) as store:
        kept = keep(store, "shop", b"binding")
        assert len(made) == 1
        assert made[0].closed
        assert list(tmp_path.iterdir()) == []
        assert np.array_equal(store.hint("shop", b"binding"), HINT)
        assert not kept.flags.writeable
        with store.new_hint(SHAPE):
            pass
        assert made[1].closed
        monkeypatch.setattr(store_module, "IN_MEMORY", HINT.nbytes)
        keep(store, "shop", b"small")
        assert len(made) == 2
    assert np.array_equal(kept, HINT)


def test_hint_that_does_not_fit_the_disk_is_refused_before_it_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with HintStore(folder) as store:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ConfigError, match="No space left on device"), store.new_hint(SHAPE) as new:
            new.write(0, HINT)
        monkeypatch.undo()
        assert arrays(folder) == []
        keep(store, "shop", b"binding")


def test_hint_takes_the_disk_as_its_rows_arrive_whatever_was_announced(folder: Path) -> None:
    """A peer that declares 10,000 columns and sends 4 rows has 330 kB on the disk, not 210 GB."""
    with HintStore(folder) as store, store.new_hint((256 * 10_000, 5, 8192)) as new:
        (path,) = arrays(folder)
        assert path.stat().st_blocks * 512 <= 1 << 16
        for row in range(4):
            new.write(row, np.ones((1, 5, 8192), np.int16))
        assert path.stat().st_blocks * 512 <= 5 * 2 * 5 * 8192


def test_hint_that_cannot_take_its_place_leaves_the_earlier_one_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with HintStore(folder) as store:
        keep(store, "shop", b"old")
        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(ConfigError, match="No space left on device"):
            keep(store, "shop", b"new")
        assert store.offer({"shop": TERMS}) == (SEED, {"shop": b"old"})
        assert np.array_equal(store.hint("shop", b"old"), HINT)
        assert len(arrays(folder)) == 1


# The folder


def test_folder_and_files_are_for_the_owner_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        with HintStore(folder) as store:
            new = store.new_hint(SHAPE)
            assert [stat.S_IMODE(path.stat().st_mode) for path in arrays(folder)] == [0o600]
            store.keep_hint("shop", b"binding", SEED, TERMS, new)
            store.keep_own(b"own", NONCE, SEED, RANDOM)
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
            assert "hints.sqlite" in modes
            assert len(modes) == 3
            assert set(modes.values()) == {0o600}
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_folder_that_holds_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot use the store of hints: .* - at .*file"):
        HintStore(tmp_path / "file")
    (tmp_path / "hints.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match="file is not a database"):
        HintStore(tmp_path)


def test_store_of_a_later_version_is_refused(folder: Path) -> None:
    HintStore(folder).close()
    database = sqlite3.connect(folder / "hints.sqlite")
    database.execute("PRAGMA user_version = 4")
    database.close()
    with pytest.raises(
        ConfigError, match=f"expected the store of hints to be of version 3, got 4 - at {re.escape(str(folder))}"
    ):
        HintStore(folder)


def test_closed_store_is_refused(store: HintStore) -> None:
    store.close()
    with pytest.raises(ConfigError, match="closed database"):
        store.spent(["age"])


def test_store_is_refused_in_a_forked_process(store: HintStore, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    with pytest.raises(LocalProtocolError, match="fork"):
        store.own(b"own")


# Hints at the server


def test_own_comes_back_as_it_was_kept(store: HintStore) -> None:
    assert store.own(b"own") is None
    store.keep_own(b"own", NONCE, SEED, RANDOM)
    nonce, seed, random = store.own(b"own")
    assert (nonce, seed, random.dtype) == (NONCE, SEED, np.int16)
    assert np.array_equal(random, RANDOM)


def test_own_outlives_the_store_as_one_byte_a_number(folder: Path) -> None:
    with HintStore(folder) as store:
        store.keep_own(b"own", NONCE, SEED, RANDOM)
    (path,) = arrays(folder)
    assert np.load(path).dtype == np.int8
    with HintStore(folder) as store:
        assert np.array_equal(store.own(b"own")[2], RANDOM)


@pytest.mark.parametrize("number", [-2, 2, 255, 256])
def test_random_numbers_other_than_ternary_are_refused(store: HintStore, number: int) -> None:
    random = RANDOM.copy()
    random[4, 63] = number
    with pytest.raises(CryptoError, match="from -1 to 1"):
        store.keep_own(b"own", NONCE, SEED, random)
    assert store.own(b"own") is None


def test_second_hint_of_a_binding_is_refused_and_changes_nothing(folder: Path) -> None:
    with HintStore(folder) as store:
        store.keep_own(b"own", NONCE, SEED, RANDOM)
        with pytest.raises(CryptoError, match="stored already"):
            store.keep_own(b"own", b"other", SEED, -RANDOM)
        assert np.array_equal(store.own(b"own")[2], RANDOM)
        assert len(arrays(folder)) == 1


def test_damaged_own_is_refused_and_forgotten(folder: Path) -> None:
    with HintStore(folder) as store:
        store.keep_own(b"own", NONCE, SEED, RANDOM)
        (path,) = arrays(folder)
        spoil_value(path)
        with pytest.raises(ConfigError, match="a hint's file is damaged"):
            store.own(b"own")
        assert store.own(b"own") is None
        assert arrays(folder) == []


def test_newest_16_are_kept_and_older_ones_forgotten(tmp_path: Path) -> None:
    for where in (None, tmp_path / "store"):
        with HintStore(where) as store:
            keep(store, "shop", b"a hint received")
            for number in range(18):
                store.keep_own(bytes([number]), NONCE, SEED, RANDOM)
            assert [number for number in range(18) if store.own(bytes([number]))] == list(range(2, 18))
            store.hint("shop", b"a hint received")
    assert len(arrays(tmp_path / "store")) == 17


# The ledger


def test_leaks_of_all_hints_jobs_and_partners_add_up_across_reopening(folder: Path) -> None:
    for _ in range(3):
        with HintStore(folder) as store:
            store.reserve({"age": 2.0**-50, "income": 2.0**-51})
    with HintStore(folder) as store:
        assert store.spent(["age"]) == 3 * 2.0**-50
        assert store.spent(["age", "income", "age"]) == 4.5 * 2.0**-50
        assert store.spent(["other"]) == store.spent([]) == 0


def test_limit_itself_may_be_reached_and_what_goes_over_it_changes_nothing(store: HintStore) -> None:
    store.reserve({"age": LEAK_LIMIT / 2, "income": LEAK_LIMIT / 4})
    with pytest.raises(CryptoError, match=r"limit .* together .*: 75.0% of it so far, 100.0% with.*encryption=\"ou\""):
        store.reserve({"age": LEAK_LIMIT / 8, "income": np.nextafter(LEAK_LIMIT / 8, 1)})
    assert (store.spent(["age"]), store.spent(["income"])) == (LEAK_LIMIT / 2, LEAK_LIMIT / 4)
    store.reserve({"age": LEAK_LIMIT / 8, "income": LEAK_LIMIT / 8})
    assert store.spent(["age", "income"]) == LEAK_LIMIT
    with pytest.raises(CryptoError):
        store.reserve({"age": 5e-324, "income": 0.0})
    with pytest.raises(CryptoError):
        store.reserve({"age": 0.0, "income": 0.0, "new": 5e-324})
    store.reserve({"age": 0.0, "income": 0.0})


def test_peers_are_told_of_the_limit_that_it_is_reached_and_no_more(store: HintStore) -> None:
    with pytest.raises(CryptoError, match="encryption=") as caught:
        store.reserve({"age": 2 * LEAK_LIMIT})
    assert caught.value.public == "its answer budget for the lattice map is used up"
    assert CryptoError.public is None
    assert "age" not in str(caught.value)


def test_columns_not_named_do_not_count(store: HintStore) -> None:
    store.reserve({"age": LEAK_LIMIT})
    store.reserve({"income": LEAK_LIMIT})
    with pytest.raises(CryptoError):
        store.reserve({"age": 0.0, "other": 2.0**-60})


@pytest.mark.parametrize("leak", [-(2.0**-60), math.nan, math.inf, -math.inf])
def test_leaks_that_are_no_leaks_are_refused_and_change_nothing(store: HintStore, leak: float) -> None:
    store.reserve({"age": 2.0**-50})
    for change in (store.reserve, store.give_back):
        with pytest.raises(CryptoError, match="expected leaks of at least 0"):
            change({"age": 2.0**-60, "income": leak})
    assert store.spent(["age", "income"]) == 2.0**-50


def test_what_was_given_back_can_be_reserved_again_and_never_falls_below_zero(store: HintStore) -> None:
    store.reserve({"age": LEAK_LIMIT / 2, "income": LEAK_LIMIT / 2})
    store.give_back({"age": LEAK_LIMIT / 4, "income": LEAK_LIMIT, "other": 1.0})
    assert store.spent(["age"]) == LEAK_LIMIT / 4
    assert store.spent(["income", "other"]) == 0
    store.reserve({"age": LEAK_LIMIT / 4, "income": LEAK_LIMIT / 2})
    with pytest.raises(CryptoError):
        store.reserve({"age": 2.0**-92, "income": 0.0})


def test_leaks_far_below_the_limit_are_not_lost_to_rounding(store: HintStore) -> None:
    store.reserve({"age": LEAK_LIMIT / 2})
    for _ in range(100):
        store.reserve({"age": 2.0**-90})
    assert store.spent(["age"]) == LEAK_LIMIT / 2 + 100 * 2.0**-90


@pytest.mark.slow
def test_processes_that_reserve_at_once_lose_nothing_and_stop_at_the_limit_together(folder: Path) -> None:
    code = """
store, done = HintStore(Path(sys.argv[1])), 0
print("ready", flush=True)
line()
try:
    while True:
        store.reserve({"age": 2.0**-49, "income": 2.0**-49})
        done += 1
        time.sleep(0.001)  # lets the other one in, as a job's work would
except CryptoError:
    print(done)
"""
    processes = [run(code, folder) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    done = [int(process.communicate()[0]) for process in processes]
    assert sum(done) == 256
    assert min(done) > 0, "one was done before the other began"
    with HintStore(folder) as store:
        assert store.spent(["age"]) == store.spent(["income"]) == LEAK_LIMIT / 2


def test_reservation_and_hint_outlive_a_killed_process(folder: Path) -> None:
    code = """
import numpy as np
store = HintStore(Path(sys.argv[1]))
store.keep_own(b"own", b"nonce", b"seed", np.ones((2, 64), np.int16))
store.reserve({"age": 2.0**-50})
print("ready", flush=True)
line()
"""
    with run(code, folder) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
    with HintStore(folder) as store:
        assert store.spent(["age"]) == 2.0**-50
        assert np.array_equal(store.own(b"own")[2], np.ones((2, 64)))


def test_threads_share_a_store(store: HintStore) -> None:
    store.keep_own(b"own", NONCE, SEED, RANDOM)
    read: list[bool] = []

    def work() -> None:
        for _ in range(20):
            store.reserve({"age": 2.0**-50})
            read.append(np.array_equal(store.own(b"own")[2], RANDOM))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.spent(["age"]) == 80 * 2.0**-50
    assert read == [True] * 80


@pytest.mark.slow
def test_processes_may_make_open_and_close_a_store_at_once(folder: Path) -> None:
    code = """
for number in sys.stdin:
    with HintStore(Path(sys.argv[1], number.strip())) as store:
        store.reserve({"age": 2.0**-60})
    print("done", flush=True)
"""
    processes = [run(code, folder) for _ in range(3)]
    for number in [*range(40), *[0] * 10]:
        for process in processes:
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
        for process in processes:
            assert process.stdout.readline() == "done\n"
    for process in processes:
        process.communicate()
    for number, times in ((0, 11), (39, 1)):
        with HintStore(folder / str(number)) as store:
            assert store.spent(["age"]) == 3 * times * 2.0**-60


@pytest.mark.slow
def test_second_opening_in_a_process_does_not_undo_the_locks_of_the_first(folder: Path) -> None:
    code = """
with HintStore(Path(sys.argv[1])) as store:
    store.reserve({"age": 2.0**-50})
    print(store.spent(["age"]))
"""
    with HintStore(folder) as first:
        HintStore(folder).close()
        first.reserve({"age": 2.0**-50})
        assert float(run(code, folder).communicate()[0]) == 2 * 2.0**-50  # and takes the log away, if nobody uses it
        first.reserve({"age": 2.0**-50})
        assert float(run(code, folder).communicate()[0]) == 4 * 2.0**-50


# Damage


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """Return the folder of a store with two hints, what two others were made with, and leaks."""
    folder = tmp_path / "shop.hints"
    with HintStore(folder) as store:
        keep(store, "bank", b"hint")
        keep(store, "club", b"other hint")
        for binding in (b"own", b"other"):
            store.keep_own(binding, NONCE, SEED, RANDOM)
        store.reserve({"age": 2.0**-50, "income": 2.0**-52})
    return folder


def content(folder: Path) -> list[object]:
    with HintStore(folder) as store:
        hints = [store.hint(peer, binding).tolist() for peer, binding in (("bank", b"hint"), ("club", b"other hint"))]
        own = [(kept[0], kept[1], kept[2].tolist()) for kept in (store.own(b"own"), store.own(b"other")) if kept]
        return [store.offer({"bank": TERMS, "club": TERMS}), hints, own, store.spent(["age"]), len(own)]


@pytest.mark.parametrize("flips", [40, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["hints.sqlite", "array", "kept"])
def test_no_flipped_bit_is_read_as_something_else(used: Path, name: str, flips: int) -> None:
    written, refused = content(used), 0
    everything = {path: path.read_bytes() for path in (*used.iterdir(), kept_file(used))}
    file = kept_file(used) if name == "kept" else arrays(used)[0] if name == "array" else used / name
    for bit in flipped(file, flips if name != "kept" else min(flips, 300)):
        try:
            assert content(used) == written, bit
        except ConfigError:
            refused += 1
        for path, data in everything.items():  # what is damaged may have been forgotten
            path.write_bytes(data)
    assert refused > 0
    assert content(used) == written


@pytest.mark.parametrize("name", ["hints.sqlite", "kept"])
def test_store_that_is_cut_off_emptied_or_deleted_is_refused(used: Path, name: str) -> None:
    written = content(used)
    for what in damaged(kept_file(used) if name == "kept" else used / name):
        if "random from" in what:  # perhaps where nobody reads
            with contextlib.suppress(ConfigError):
                assert content(used) == written
            continue
        with pytest.raises(ConfigError, match=re.escape(str(used))):
            content(used)


def test_store_that_is_missing_or_an_older_copy_is_refused(used: Path, tmp_path: Path) -> None:
    shutil.copytree(used, tmp_path / "copy")
    with HintStore(used) as store:
        store.reserve({"age": 2.0**-50})
    shutil.rmtree(used)
    text = r"the store of hints: hints\.sqlite is missing or empty, but shop\.hints\.kept is there - at .*shop\.hints;"
    with pytest.raises(ConfigError, match=text) as caught:
        HintStore(used)
    assert "A reset would forget what answers about the table have leaked: they may then leak" in str(caught.value)
    shutil.rmtree(used)
    shutil.copytree(tmp_path / "copy", used)
    with pytest.raises(ConfigError, match="the store of hints is an older copy: 1 of 2 changes"):
        HintStore(used)


def test_what_a_crash_left_in_the_journal_is_rolled_back_and_damage_to_it_is_refused(used: Path) -> None:
    written = content(used)
    code = """
import os, signal
store = HintStore(Path(sys.argv[1]))
store._db.connection.execute("PRAGMA cache_size = 1")  # the file changes before the end
with store._transaction(counts=True) as db:
    for k in range(2000):
        db.execute("INSERT INTO leaks VALUES (?, 1e-30)", (f"{k}" * 20,))
    db.execute("UPDATE leaks SET spent = 0")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    run(code, used).communicate()
    journal = used / "hints.sqlite-journal"
    left = {path: path.read_bytes() for path in (*used.iterdir(), kept_file(used))}
    assert len(left[journal]) > 0
    for bit in flipped(journal, 40):
        try:
            assert content(used) == written, bit
        except ConfigError:
            pass
        for path, data in left.items():
            path.write_bytes(data)
    assert content(used) == written
