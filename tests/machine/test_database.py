"""A database that must not forget: what is missing, damaged, emptied, replaced or rolled back is refused by name."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading

import pytest
from typer.testing import CliRunner

from flips import damaged, flipped
from treaty.cli.main import app
from treaty.errors import ConfigError
from treaty.machine import database
from treaty.machine.database import kept_file, mark_of, set_aside
from treaty.privacy.ledger import Ledger, LedgerEntry

ENTRIES = [LedgerEntry(f"draw {k}", "spring", "duchi", f"gradients of tree {k}", 1.0 / (k + 1)) for k in range(60)]


@pytest.fixture
def folder(tmp_path):
    """Return the folder of a ledger that was spent from twice."""
    folder = tmp_path / "bank.noise"
    ledger = Ledger(folder)
    ledger.spend(ENTRIES[:30])
    ledger.spend(ENTRIES[30:])
    return folder


FLIPS = pytest.mark.parametrize("flips", [60, pytest.param(3000, marks=pytest.mark.slow)])


@FLIPS
@pytest.mark.parametrize("name", ["ledger", "key", "kept"])
def test_no_flipped_bit_is_read_as_something_else(folder, name, flips):
    key, refused = Ledger(folder).key, 0
    for bit in flipped(kept_file(folder) if name == "kept" else folder / name, flips):
        try:
            ledger = Ledger(folder)
            assert (ledger.key, ledger.entries()) == (key, ENTRIES), bit
        except ConfigError:
            refused += 1
    assert refused > 0.2 * flips  # a page of SQLite has many bytes that nobody reads
    assert (Ledger(folder).key, Ledger(folder).entries()) == (key, ENTRIES)


@pytest.mark.slow
def test_no_flipped_bit_lets_a_draw_be_paid_twice_or_a_budget_be_passed(folder, tmp_path):
    kept, total = tmp_path / "kept", sum(entry.epsilon for entry in ENTRIES)
    shutil.copytree(folder, kept)
    mark = kept_file(folder).read_bytes()
    for bit in flipped(folder / "ledger", 500):
        try:
            Ledger(folder).spend([*ENTRIES, LedgerEntry("new", "fall", "duchi", "tree", 1.0)], most=total + 1.0)
            entries = Ledger(folder).entries()
            assert [entry.draw for entry in entries] == [*(entry.draw for entry in ENTRIES), "new"], bit
        except ConfigError:
            pass
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        kept_file(folder).write_bytes(mark)


@pytest.mark.parametrize("name", ["ledger", "key", "kept"])
def test_what_is_cut_off_emptied_deleted_or_overwritten_is_refused(folder, name):
    key = Ledger(folder).key
    for what in damaged(kept_file(folder) if name == "kept" else folder / name):
        if name == "ledger" and "random from" in what:  # perhaps where nobody reads
            with contextlib.suppress(ConfigError):
                assert (Ledger(folder).key, Ledger(folder).entries()) == (key, ENTRIES)
            continue
        with pytest.raises(ConfigError, match=str(folder)):
            Ledger(folder)


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        (
            "ledger",
            r"ledger is missing or empty, but bank\.noise\.kept is there - at .*bank\.noise; bring back",
        ),
        ("key", r"the key of the noise, key, is missing - at .*bank\.noise"),
        ("kept", r"bank\.noise\.kept is missing, which says how far it was - at .*bank\.noise"),
        ("folder", r"ledger is missing or empty, but bank\.noise\.kept is there"),
        ("folder but key", r"ledger is missing or empty, but key is there"),
    ],
)
def test_what_is_missing_is_refused_by_name_with_what_to_do(folder, lost, text):
    if lost == "folder":
        shutil.rmtree(folder)
    elif lost == "kept":
        kept_file(folder).unlink()
    elif lost == "folder but key":
        kept_file(folder).unlink()
        (folder / "ledger").unlink()
    else:
        (folder / lost).unlink()
    with pytest.raises(ConfigError, match=text) as caught:
        Ledger(folder)
    assert "A reset would forget what people have paid: they may then pay all of it once more: treaty " in str(
        caught.value
    )
    assert caught.value.public == "its privacy ledger cannot be used; it has the details"


def test_an_older_copy_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "copy")
    Ledger(folder).spend([LedgerEntry("new", "fall", "duchi", "tree", 1.0)])
    shutil.copytree(tmp_path / "copy", folder, dirs_exist_ok=True)
    with pytest.raises(ConfigError, match="is an older copy: 2 of 3 changes"):
        Ledger(folder)


def test_another_ledger_and_another_key_are_refused(folder, tmp_path):
    other = tmp_path / "other" / "bank.noise"
    Ledger(other).spend(ENTRIES[:30])
    shutil.copy(other / "key", folder / "key")
    with pytest.raises(ConfigError, match="the key of the noise, key, is of another ledger"):
        Ledger(folder)
    shutil.copy(other / "ledger", folder / "ledger")
    with pytest.raises(ConfigError, match=r"is another one than bank\.noise\.kept says"):
        Ledger(folder)
    shutil.move(other, tmp_path / "shop.noise")
    shutil.move(kept_file(other), kept_file(tmp_path / "shop.noise"))
    with pytest.raises(ConfigError):  # of another owner
        Ledger(tmp_path / "shop.noise")


def test_the_file_beside_may_be_behind_as_after_a_crash_but_not_ahead(folder):
    before = kept_file(folder).read_bytes()
    Ledger(folder).spend([LedgerEntry("new", "fall", "duchi", "tree", 1.0)])
    ahead = kept_file(folder).read_bytes()
    kept_file(folder).write_bytes(before)  # the crash came between
    ledger = Ledger(folder)
    assert len(ledger.entries()) == 61
    ledger.spend([LedgerEntry("newer", "fall", "duchi", "tree", 1.0)])
    assert kept_file(folder).read_bytes() != ahead
    assert mark_of(folder).changes == 4


def test_reading_changes_nothing(folder):
    before = (folder / "ledger").read_bytes(), kept_file(folder).read_bytes()
    ledger = Ledger(folder)
    ledger.spend(ENTRIES)  # all paid
    ledger.check([LedgerEntry("new", "fall", "duchi", "tree", 1.0)])
    assert ((folder / "ledger").read_bytes(), kept_file(folder).read_bytes()) == before
    assert sorted(path.name for path in folder.iterdir()) == ["key", "ledger"]


@pytest.mark.parametrize("after", ["made", "key"])
def test_a_crash_while_the_ledger_is_made_is_survived(tmp_path, after):
    folder = tmp_path / "bank.noise"
    script = (
        "import os, sys; from pathlib import Path; import treaty.privacy; from treaty.machine import database\n"
        "from treaty.privacy import ledger\n"
        "(database if sys.argv[2] == 'made' else ledger).write_file = lambda *_, **__: os._exit(9)\n"
        "ledger.Ledger(Path(sys.argv[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(folder), after], check=False).returncode == 9
    Ledger(folder).spend(ENTRIES)
    assert Ledger(folder).entries() == ENTRIES


def test_to_begin_anew_sets_the_old_one_aside_and_loses_nothing(folder):
    key = Ledger(folder).key
    (folder / "ledger").unlink()
    moved = set_aside(folder)
    assert not folder.exists()
    assert [path.name.partition(".until-")[0] for path in moved] == ["bank.noise", "bank.noise.kept"]
    assert (moved[0] / "key").exists()
    ledger = Ledger(folder)
    assert ledger.entries() == []
    assert ledger.key != key
    with pytest.raises(ConfigError, match=r"got nothing - at .*nowhere"):
        set_aside(folder.with_name("nowhere"))


@pytest.mark.slow
def test_jobs_that_make_a_ledger_at_once_share_it(tmp_path):
    script = (
        "import sys; from pathlib import Path; from treaty.privacy.ledger import LedgerEntry, Ledger\n"
        "sys.stdin.readline()\n"
        "ledger = Ledger(Path(sys.argv[1]))\n"
        "ledger.spend([LedgerEntry(sys.argv[2], 'job', 'duchi', 'tree', 1.0)])\n"
        "print(ledger.key.hex())\n"
    )
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "a.noise"), str(k)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for k in range(4)
    ]  # fmt: skip
    keys = {job.communicate("\n", timeout=120)[0] for job in jobs}
    assert keys == {Ledger(tmp_path / "a.noise").key.hex() + "\n"}
    assert sorted(entry.draw for entry in Ledger(tmp_path / "a.noise").entries()) == list("0123")


def test_the_command_asks_before_it_forgets(folder):
    kept_file(folder).unlink()
    asked = CliRunner().invoke(app, ["ledger", "reset", str(folder)], input="n\n")
    assert asked.exit_code == 1
    assert "so that all of it can be spent once more?" in asked.output
    assert folder.exists()
    said = CliRunner().invoke(app, ["ledger", "reset", str(folder), "--yes"])
    assert said.exit_code == 0
    assert said.output.startswith(f"moved to {folder}.until-")
    assert not folder.exists()
    assert Ledger(folder).entries() == []


def test_a_job_that_opens_a_ledger_while_another_spends_refuses_nothing(folder, monkeypatch):
    """Between its looks at the ledger and at the file beside it, another job would spend if it could."""
    other = threading.Thread(target=lambda: Ledger(folder).spend([LedgerEntry("new", "fall", "duchi", "tree", 1.0)]))

    def looks(of):
        if not other.ident:
            other.start()
            other.join(1.0)
        return mark_of(of)

    monkeypatch.setattr(database, "mark_of", looks)
    ledger = Ledger(folder)
    other.join()
    assert len(ledger.entries()) == 61
    assert mark_of(folder).changes == 3
