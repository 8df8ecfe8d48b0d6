"""Files that Treaty keeps: whole or not there at all, and refused by name where they are not what is looked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from treaty import files
from treaty.errors import ConfigError
from treaty.files import Format, read_file, read_json, write_file, write_json, write_whole

FORM = Format("list-of-rows", 3)


class Kept(msgspec.Struct):
    name: str
    rows: NDArray[np.int64]


class Said(msgspec.Struct):
    name: str
    seconds: dict[str, float]


KEPT = Kept("crème", np.arange(40, dtype=np.int64))
SAID = Said("crème", {"setup": 0.25, "boosting": 1e-9})


def write(path, kind):
    if kind == "struct":
        write_file(path, KEPT, FORM, "bank of ä")
    else:
        write_json(path, SAID, FORM, "bank of ä")


def read(path, kind, form=FORM, owner=None):
    return read_file(path, Kept, form, owner) if kind == "struct" else read_json(path, Said, form, owner)


def same(found, kind):
    if kind == "json":
        return found == SAID
    return found.name == KEPT.name and np.array_equal(found.rows, KEPT.rows) and found.rows.dtype == np.int64


KINDS = pytest.mark.parametrize("kind", ["struct", "json"])


@KINDS
def test_what_was_written_is_read_by_its_owner_alone(tmp_path, kind):
    path = tmp_path / "file"
    write(path, kind)
    assert same(read(path, kind), kind)
    assert same(read(path, kind, owner="bank of ä"), kind)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@KINDS
def test_no_flipped_bit_is_read_as_something_else(tmp_path, kind):
    path = tmp_path / "file"
    write(path, kind)
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):  # every one
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(ConfigError, match=str(path)):
            read(path, kind)


@KINDS
def test_what_was_cut_off_emptied_overwritten_or_made_longer_is_refused(tmp_path, kind):
    path, rng = tmp_path / "file", np.random.default_rng(0)
    write(path, kind)
    whole = path.read_bytes()
    noise = [rng.bytes(int(n)) for n in rng.integers(1, 2000, 50)]
    shorter = [whole[:length] for length in range(len(whole))]
    patched = [whole[:at] + rng.bytes(8) + whole[at + 8 :] for at in range(0, len(whole) - 8, 3)]
    for changed in [*shorter, *noise, *patched, whole + b"\n", whole + whole, bytes(len(whole))]:
        path.write_bytes(changed)
        with pytest.raises(ConfigError, match=str(path)):
            read(path, kind)


@KINDS
def test_another_kind_version_or_owner_is_said(tmp_path, kind):
    path = tmp_path / "file"
    write(path, kind)
    with pytest.raises(ConfigError, match=rf"expected a checkpoint, got a list of rows - at {path}"):
        read(path, kind, Format("checkpoint", 3))
    with pytest.raises(ConfigError, match=r"of version 2, got 3: a newer Treaty wrote it; update this one - at"):
        read(path, kind, Format("list-of-rows", 2))
    with pytest.raises(ConfigError, match=r"of version 4, got 3: an earlier Treaty wrote it - at"):
        read(path, kind, Format("list-of-rows", 4))
    with pytest.raises(ConfigError, match=r"expected a list of rows of shop, got one of bank of ä - at"):
        read(path, kind, owner="shop")
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere: No such file"):
        read(tmp_path / "nowhere", kind)


def test_faults_are_told_apart(tmp_path):
    path = tmp_path / "file"
    write(path, "struct")
    whole = path.read_bytes()
    for changed, text in (
        (b"", "got an empty file"),
        (b"\x00" * 99, "got a file of another kind"),
        (whole[:-5], "it was cut off"),
        (whole[:-1] + b"?", "the file is damaged"),
    ):
        path.write_bytes(changed)
        with pytest.raises(ConfigError, match=text):
            read(path, "struct")


def test_another_content_of_the_same_format_is_refused(tmp_path):
    write_file(tmp_path / "file", SAID, FORM, "bank")
    with pytest.raises(ConfigError, match=r"cannot read the content of the .*rows.* - at .*file"):
        read_file(tmp_path / "file", Kept, FORM)


def test_without_replace_the_first_file_stays(tmp_path):
    for text in (b"first", b"second"):
        write_whole(tmp_path / "file", [text], replace=False)
    assert (tmp_path / "file").read_bytes() == b"first"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["fsync", "fchmod", "replace"])
def test_a_failed_write_leaves_the_earlier_file_and_no_other(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    write(path, "struct")

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((Path, call) if call == "replace" else (files.os, call)), fails)
    with pytest.raises(ConfigError, match=rf"cannot write {path}: No space left on device") as caught:
        write_file(path, Kept("other", KEPT.rows), FORM, "bank")
    assert caught.value.public == "its files cannot be written; it has the details"
    monkeypatch.undo()
    assert same(read(path, "struct"), "struct")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_file_beyond_what_the_system_lets_it_be_leaves_nothing(tmp_path):
    """As a full disk does, which needs rights that a test does not have."""
    script = (
        "import resource, signal, sys\n"
        "from treaty.errors import ConfigError\n"
        "from treaty.files import write_whole\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    write_whole(sys.argv[1], [bytes(100), bytes(100_000)])\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    path = tmp_path / "file"
    path.write_bytes(b"earlier")
    said = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True).stdout
    assert said == f"cannot write {path}: File too large\n"
    assert path.read_bytes() == b"earlier"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_leaves_the_earlier_file_and_no_other(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        path = tmp_path / "file"
        write(path, "struct")
        with pytest.raises(ConfigError, match="No space left on device"):
            write_file(path, Kept("large", np.zeros(10**5, np.int64)), FORM, "bank")
        assert same(read(path, "struct"), "struct")
        assert os.listdir(tmp_path) == ["file"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
