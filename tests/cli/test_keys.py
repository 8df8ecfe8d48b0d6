"""`treaty keys`: what it prints, asks and refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from terminal import compare_at_terminal
from treaty.cli import keys as commands
from treaty.cli.main import app
from treaty.errors import ConfigError
from treaty.node.cards import fingerprint_of, read_card
from treaty.node.identity import make_keys, own_cards, trusted


def keys(*arguments: object, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, ["keys", *map(str, arguments)], input=typed)


def refused(*arguments: object, typed: str | None = None) -> str:
    done = keys(*arguments, typed=typed)
    assert isinstance(done.exception, ConfigError), done.output
    return str(done.exception)


@pytest.fixture
def bank(tmp_path, monkeypatch) -> Path:
    """A folder to work in: the bank's keys in `keys`, the clinic's in `clinic`."""
    monkeypatch.chdir(tmp_path)
    make_keys("keys", "bank")
    make_keys("clinic", "clinic")
    return tmp_path


CARD = Path("clinic") / "clinic.card"


def test_new_keys_are_shown_with_what_to_give_to_whom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = keys("new", "bank")
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert fingerprint_of(read_card("keys/bank.card")) in said
    assert "keys/bank.key.pem, keys/bank.sign.pem (never send them)" in said
    assert "existing keys/bank.key.pem" in refused("new", "bank")
    assert "expected a name" in refused("new", "ba nk")


def test_trust_in_scripts_needs_the_whole_fingerprint(bank):
    fingerprint = fingerprint_of(read_card(CARD))
    assert "a person at a terminal" in refused("trust", CARD, typed=fingerprint[-4:])
    assert "has another fingerprint" in refused("trust", CARD, "--fingerprint", fingerprint[:-1] + "!")
    assert trusted("keys") == {}
    done = keys("trust", CARD, "--fingerprint", fingerprint.lower().replace(" ", "  "))
    assert done.exit_code == 0, done.output
    assert f"clinic is trusted: {fingerprint}" in done.output
    assert list(trusted("keys")) == ["clinic"]
    assert keys("trust", CARD).exit_code == 0


def test_a_person_types_the_two_groups_that_are_asked_for(bank, monkeypatch):
    monkeypatch.setattr(commands, "_at_terminal", lambda: True)
    monkeypatch.setattr(commands.secrets.SystemRandom, "sample", lambda self, among, count: [11, 4][:count])
    fingerprint = fingerprint_of(read_card(CARD))
    groups = fingerprint.removeprefix("SHA256:").split()
    done = keys("trust", CARD, typed="nope\n")
    said = f"{done.output}{done.exception}"
    assert "the card is not trusted" in said
    assert f"SHA256:{' '.join([*groups[:4], '....', *groups[5:11], '....', *groups[12:]])}" in said
    assert groups[4] not in said  # what is asked for is not shown
    for wrong in (f"{groups[4][1:]}\n", f"{groups[4]}\nnope\n", f"{groups[4]}\n{groups[4]}\n"):
        assert "the card is not trusted" in refused("trust", CARD, typed=wrong)
    for few in ("", f"{groups[4]}\n"):
        assert keys("trust", CARD, typed=few).exit_code == 1
    assert trusted("keys") == {}
    done = keys("trust", CARD, typed=f"{groups[4].upper()}\n{groups[11]}\n")
    assert done.exit_code == 0, done.output
    assert fingerprint in done.output
    assert list(trusted("keys")) == ["clinic"]


def test_a_person_is_asked_at_a_real_terminal(bank):
    command = [sys.executable, "-m", "treaty", "keys", "trust", str(CARD)]
    code, said = compare_at_terminal(command, fingerprint_of(read_card(CARD)))
    assert code == 0, said
    assert "clinic is trusted" in said


def test_rotated_cards_are_followed_without_a_question(bank):
    keys("trust", CARD, "--fingerprint", fingerprint_of(read_card(CARD)))
    old = read_card(CARD)
    done = keys("rotate", "--folder", "clinic")
    assert done.exit_code == 0, done.output
    new = read_card(CARD)
    assert fingerprint_of(new) in done.output
    assert f"replaces     {fingerprint_of(old)}" in keys("show", CARD).output
    assert keys("trust", CARD).exit_code == 0
    assert trusted("keys") == {"clinic": new}


def test_rotate_needs_a_name_where_a_folder_has_several(bank):
    keys("new", "shop")
    before = own_cards("keys")
    assert "in keys: bank, shop" in refused("rotate")
    assert keys("rotate", "shop").exit_code == 0
    after = own_cards("keys")
    assert after["bank"] == before["bank"]
    assert after["shop"] != before["shop"]
    assert "in .: none" in refused("rotate", "--folder", ".")
    assert "in keys: bank, shop" in refused("rotate", "nobody")


def test_revoked_partners_are_shown_no_more_and_refused(bank):
    fingerprint = fingerprint_of(read_card(CARD))
    keys("trust", CARD, "--fingerprint", fingerprint)
    assert keys("revoke", "clinic").output.strip() == "clinic is no longer trusted"
    assert "clinic" not in keys("show").output
    assert "revoked or replaced" in refused("trust", CARD, "--fingerprint", fingerprint)
    assert "expected a trusted partner" in refused("revoke", "clinic")


def test_show_lists_own_and_trusted_cards_with_dates(bank, monkeypatch):
    keys("trust", CARD, "--fingerprint", fingerprint_of(read_card(CARD)))
    lines = keys("show").output.splitlines()
    own, clinic = read_card("keys/bank.card"), read_card(CARD)
    assert re.fullmatch(rf"bank +{fingerprint_of(own)}, own, until \d{{4}}-\d\d-\d\d \(728 days left\)", lines[0])
    dates = r"trusted on \d{4}-\d\d-\d\d, until \d{4}-\d\d-\d\d \(728 days left\)"
    assert re.fullmatch(rf"clinic +{fingerprint_of(clinic)}, {dates}", lines[1])
    real = commands.ends
    for days, words in ((-700, "(28 days left: a new card is needed soon)"), (-800, "HAS ENDED")):
        monkeypatch.setattr(commands, "ends", lambda card, days=days: real(card) + commands.datetime.timedelta(days))
        assert all(words in line for line in keys("show").output.splitlines())
        assert words in keys("show", CARD).output
    (bank / "keys" / "peers" / "clinic.card").write_text("damaged")
    assert "clinic       NOT TRUSTED: expected a card of an organisation" in keys("show").output


def test_what_is_no_card_is_one_line_and_exit_code_2(bank):
    (bank / "a.card").write_text("[1]")
    done = subprocess.run(
        [sys.executable, "-m", "treaty", "keys", "trust", "a.card"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert re.fullmatch(r"treaty: expected a card of an organisation, got another file - at a\.card .*\n", done.stderr)
