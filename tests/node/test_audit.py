"""The audit log: any change of what was written is found, and what a chain cannot show is found by heads noted."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from treaty.cli.main import app
from treaty.node.cards import fingerprint_of
from treaty.node.identity import load_own, make_keys, rotate, sign, trust
from treaty.node.store import (
    EMPTY_HEAD,
    Store,
    canonical,
    digest_of,
    head_statement,
)

EVENTS = [
    {"what": "received", "job": "a1b2c3d4e5f6a7b8", "who": "bank"},
    {"what": "approved", "job": "a1b2c3d4e5f6a7b8", "who": "anna"},
    {"what": "peer down", "who": "clinic", "said": 'a "quoted" naïve\nline'},
    {"what": "started", "job": "a1b2c3d4e5f6a7b8", "attempt": 1},
    {"what": "refused", "job": "ffff", "reason": "nobody may"},
    {"what": "finished", "job": "a1b2c3d4e5f6a7b8", "epsilon": 0.5, "sent": {"clinic": 1200},
     "disclosures": ["the leaf weights", "which rows [both] have"]},
]  # fmt: skip
COLUMNS = ("seq", "time", "event", "previous", "digest", "job")


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Store:
    store = Store(tmp_path_factory.mktemp("node"))
    for event in EVENTS:
        store.note(event)
    assert store.verify_audit() == []
    return store


@contextmanager
def undone(log: Store) -> Iterator[sqlite3.Connection]:
    """Yield a log's connection; what is written meanwhile is undone."""
    with log.reading() as db:
        db.execute("BEGIN")
        try:
            yield db
        finally:
            db.execute("ROLLBACK")


values = st.one_of(
    st.binary(max_size=40), st.text(max_size=40), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False),
    st.sampled_from([bytes(32), "{}", "[]", '{"what":"approved"}']),
)  # fmt: skip


@given(st.integers(1, len(EVENTS)), st.sampled_from(COLUMNS), values)
def test_any_single_change_of_any_value_is_found(log, row, column, value):
    with undone(log) as db:
        before = db.execute("SELECT * FROM audit").fetchall()
        if column == "seq" and (not isinstance(value, int) or 1 <= value <= len(EVENTS)):
            return  # no number, or another row's: SQLite itself takes neither
        db.execute(f"UPDATE audit SET {column} = ? WHERE seq = ?", (value, row))
        assert log.verify_audit() or db.execute("SELECT * FROM audit").fetchall() == before


@given(st.integers(1, len(EVENTS)), st.sampled_from(COLUMNS[1:]), st.data())
def test_any_flipped_bit_is_found(log, row, column, data):
    with undone(log) as db:
        kind, value = db.execute(
            f"SELECT typeof({column}), CAST({column} AS BLOB) FROM audit WHERE seq = ?", (row,)
        ).fetchone()
        if not value:
            return  # what is about no job
        changed, bit = bytearray(value), data.draw(st.integers(0, 8 * len(value) - 1))
        changed[bit // 8] ^= 1 << bit % 8
        db.execute(f"UPDATE audit SET {column} = CAST(? AS {kind}) WHERE seq = ?", (bytes(changed), row))
        assert log.verify_audit()
        assert len(log.audit()) == len(EVENTS) if column in ("previous", "digest") else True


@pytest.mark.parametrize("job", ["a1b2c3d4e5f6a7b8", "", "ffff", "a1b2"])
def test_a_jobs_entries_are_those_that_name_it_and_no_others_are_read(log, job):
    with undone(log) as db:
        found = [entry.event for entry in log.audit(job=job)]
        assert found == [event for event in EVENTS if event.get("job", "") == job]
        (plan,) = db.execute("EXPLAIN QUERY PLAN SELECT * FROM audit WHERE seq > 0 AND job = ? ORDER BY seq", (job,))
        assert "audit_job (job=?" in plan[-1]
        db.execute("UPDATE audit SET job = 'ffff' WHERE seq = 2")
        assert log.verify_audit() == ["entry 2 was assigned to another job"]
        db.execute(
            "UPDATE audit SET job = CAST('a1b2c3d4e5f6a7b8' AS BLOB) WHERE seq = 2"
        )  # which is not found as text
        assert log.verify_audit() == ["entry 2 was changed"]


@given(st.integers(1, len(EVENTS) - 1), st.integers(1, len(EVENTS) - 1))
def test_entries_that_are_removed_are_named(log, first, count):
    last = min(first + count - 1, len(EVENTS) - 1)
    with undone(log) as db:
        db.execute("DELETE FROM audit WHERE seq BETWEEN ? AND ?", (first, last))
        gap = f"entry {first} is" if first == last else f"entries {first} to {last} are"
        assert log.verify_audit() == [f"{gap} missing"]


@given(st.permutations(range(1, len(EVENTS) + 1)))
def test_entries_in_another_order_are_found(log, order):
    with undone(log) as db:
        db.executemany("UPDATE audit SET seq = ? WHERE seq = ?", [(100 + new, old) for old, new in enumerate(order, 1)])
        db.execute("UPDATE audit SET seq = seq - 100")
        assert bool(log.verify_audit()) == (order != sorted(order))


@given(st.integers(1, len(EVENTS)), st.dictionaries(st.text(max_size=5), st.integers(), max_size=2))
def test_one_entry_written_anew_with_its_digest_does_not_fit_the_next(log, row, event):
    with undone(log) as db:
        time, previous = db.execute("SELECT time, previous FROM audit WHERE seq = ?", (row,)).fetchone()
        noted, text = log.head(), canonical(event)
        digest = digest_of(previous, row, time.encode(), text.encode())
        db.execute("UPDATE audit SET event = ?, digest = ?, job = '' WHERE seq = ?", (text, digest, row))
        if row < len(EVENTS):
            assert log.verify_audit() == [
                f"entry {row + 1} does not follow the entry before it: one of them was changed or moved"
            ]
        else:  # what the chain alone does not show
            assert log.verify_audit() == []
            assert not log.holds(noted)


def test_only_a_head_noted_elsewhere_shows_that_the_newest_entries_are_gone(log):
    with undone(log) as db:
        noted = log.head()
        assert noted.seq == len(EVENTS)
        assert log.holds(noted)
        db.execute("DELETE FROM audit WHERE seq > 4")
        assert log.verify_audit() == []
        assert not log.holds(noted)
        assert log.holds(log.head())
        assert log.holds(EMPTY_HEAD)


def test_the_digest_is_the_one_that_is_documented(log):
    import hashlib
    import json

    before = bytes(32)
    for entry in log.audit():
        whole = {"seq": entry.seq, "time": entry.time, "event": entry.event}
        text = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        assert entry.digest == hashlib.sha256(before + text.encode()).digest()
        before = entry.digest


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Return the settings of a node whose log has `EVENTS`."""
    settings = tmp_path / "NODE.toml"
    settings.write_text('name = "bank"\n')
    make_keys(tmp_path / "keys", "bank")
    monkeypatch.setenv("TREATY_NODE", str(settings))
    with Store(tmp_path / "state") as store:
        for event in EVENTS:
            store.note(event)
    return settings


def run(*more: str):
    return CliRunner().invoke(app, ["audit-log", *more])


def test_entries_are_printed_to_be_read(node):
    lines = run("show").stdout.splitlines()
    assert len(lines) == len(EVENTS) + 2
    assert lines[1].startswith("     2 20")
    assert lines[1].endswith("Z approved, job a1b2c3d4e5f6, who anna")
    assert lines[2].endswith(r'Z peer down, said a "quoted" naïve\nline, who clinic')  # one line, whatever a peer says
    assert lines[5].endswith('finished, epsilon 0.5, job a1b2c3d4e5f6, sent {"clinic": 1200}')
    assert lines[6:] == ["       - the leaf weights", "       - which rows [both] have"]
    assert [line.split()[0] for line in run("show", "--job", "a1b2", "-n", "3").stdout.splitlines()] == [
        "2", "4", "6", "-", "-"
    ]  # fmt: skip


def test_a_whole_log_and_heads_noted_are_said_to_be_so(node):
    with Store(node.parent / "state") as store:
        store.note_head("clinic", 7, bytes(range(32)), bytes(64))
        head = str(store.head())
    for more in ((), ("--head", head), ("--head", f"0:{bytes(32).hex()}")):
        done = run("verify", *more)
        assert done.exit_code == 0, done.output
        assert done.stdout.splitlines()[0].startswith("ok     the log is whole")
        assert re.search(rf"^head   {head}:[0-9a-f]{{128}}$", done.stdout, re.MULTILINE)
        assert f"noted  the log of clinic had the head 7:{bytes(range(32)).hex()}" in done.stdout


def test_a_broken_log_ends_with_1_and_says_where(node):
    with Store(node.parent / "state") as store:
        head = str(store.head())
        store.connection.execute("""UPDATE audit SET event = replace(event, 'anna', 'otto') WHERE seq = 2""")
    done = run("verify")
    assert (done.exit_code, done.stdout.splitlines()[0]) == (1, "WRONG  entry 2 was changed")
    with Store(node.parent / "state") as store:
        store.connection.execute("""UPDATE audit SET event = 'not JSON' WHERE seq = 2""")
        store.connection.execute("DELETE FROM audit WHERE seq = 6")
    assert "an entry that cannot be read" in run("show").stdout
    done = run("verify", "--head", head)
    assert done.exit_code == 1
    assert "WRONG  entry 6 is not the one that was noted" in done.stdout


@pytest.mark.parametrize(
    "head",
    ["7", "7:abc", f"7:{'0' * 64}:{'0' * 126}", f"7:{'0' * 64}:{'0' * 128}:00", "x:" + "0" * 64, "-1:" + "0" * 64],
)
def test_a_head_that_is_none_is_refused(node, head):
    done = run("verify", "--head", head)
    assert "expected a number, a colon and 64 hexadecimal digits" in str(done.exception)


def signed_head() -> str:
    """Return the head as the command prints it, signed with the node's key."""
    (line,) = [line for line in run("verify").stdout.splitlines() if line.startswith("head ")]
    assert re.fullmatch(r"head   \d+:[0-9a-f]{64}:[0-9a-f]{128}", line)
    return line.split()[1]


def written_anew(store, events):
    store.connection.execute("DELETE FROM audit")
    for event in events:
        store.note(event)


@pytest.mark.parametrize("kept", [0, 4, len(EVENTS)], ids=["all gone", "cut", "written anew from the start"])
def test_a_signed_head_kept_elsewhere_shows_that_a_log_was_cut_or_written_anew(node, kept):
    head = signed_head()
    assert run("verify", "--head", head).stdout.startswith(
        f"ok     the log is whole, and holds the entry {len(EVENTS)} that this node has signed"
    )
    with Store(node.parent / "state") as store:
        if kept == len(EVENTS):
            written_anew(store, [{**EVENTS[0], "who": "otto"}, *EVENTS[1:]])
        else:
            store.connection.execute("DELETE FROM audit WHERE seq > ?", (kept,))
    assert run("verify").exit_code == 0  # what the chain alone does not show
    done = run("verify", "--head", head)
    assert done.exit_code == 1
    assert f"WRONG  entry {len(EVENTS)} is not the one that this node has signed" in done.stdout
    if kept < len(EVENTS):  # and so where other entries were added since, up to the number of the head
        with Store(node.parent / "state") as store:
            for event in EVENTS:
                store.note({**event, "again": True})
        assert run("verify", "--head", head).exit_code == 1


def test_heads_signed_before_the_keys_were_replaced_are_still_the_nodes(node):
    head = signed_head()
    rotate(node.parent / "keys", "bank")
    assert run("verify", "--head", head).exit_code == 0
    assert signed_head() != head


def test_a_head_that_the_node_did_not_sign_is_none_of_its(node, tmp_path):
    seq, digest, signature = signed_head().split(":")
    make_keys(tmp_path / "thief", "bank")
    thief = load_own(tmp_path / "thief", "bank")
    right = head_statement("bank", int(seq), bytes.fromhex(digest))
    own = load_own(node.parent / "keys", "bank")
    wrong = [
        sign(thief, right).hex(),
        sign(own, head_statement("clinic", int(seq), bytes.fromhex(digest))).hex(),
        sign(own, head_statement("bank", int(seq) - 1, bytes.fromhex(digest))).hex(),
        signature[:-1] + ("0" if signature[-1] != "0" else "1"),
    ]
    for other in wrong:
        done = run("verify", "--head", f"{seq}:{digest}:{other}")
        assert done.exit_code == 1
        assert "is not signed with a key of this node" in done.stdout
        assert "that this node has signed" not in done.stdout


def test_of_peers_heads_those_are_marked_that_no_trusted_key_has_signed(node, tmp_path):
    card = make_keys(tmp_path / "clinic", "clinic")
    trust(node.parent / "keys", card, fingerprint_of(card))
    digest = bytes(range(32))
    signature = sign(load_own(tmp_path / "clinic", "clinic"), head_statement("clinic", 7, digest))
    for party in ("clinic", "shop"):
        with Store(node.parent / "state") as store:
            store.note_head(party, 7, digest, signature)
    told = [line for line in run("verify").stdout.splitlines() if line.startswith("noted ")]
    plain = f"7:{digest.hex()}:{signature.hex()}"
    assert told == [
        f"noted  the log of clinic had the head {plain}",
        f"noted  the log of shop had the head {plain} (signed with no key trusted now)",
    ]
