"""``treaty keys``: an organisation's own keys, and the partners whose cards it trusts."""

from __future__ import annotations

import datetime
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from treaty.cli.logs import say
from treaty.errors import ConfigError
from treaty.files import explained, write_whole
from treaty.messaging.certificates import RENEW_WITHIN, fingerprint, read_secret
from treaty.node.cards import Card, check_endorsement, endorse, ends, fingerprint_of, read_card, read_small
from treaty.node.identity import make_keys, must_compare, own_cards, peers, revoke, rotate, trust

keys = typer.Typer(
    help="Make this organisation's keys, and manage whose cards it trusts.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Folder = Annotated[Path, typer.Option(help="The folder of keys.")]


@keys.command()
def new(
    name: Annotated[str, typer.Argument(help="The organisation's name, as in job files.")],
    folder: Folder = Path("keys"),
) -> None:
    """Make an organisation's private keys, certificate and card. Existing files are never replaced.

    Keep NAME.key.pem and NAME.sign.pem secret. Give NAME.card to the organisations whose nodes will work with yours,
    and compare its fingerprint with them over another channel. Parties that run job files without nodes need
    NAME.cert.pem instead.

    Examples
    --------
    treaty keys new bank
    treaty keys new bank --folder .
    """
    _say_new(folder, make_keys(folder, name))


@keys.command()
def show(
    file: Annotated[
        Path | None, typer.Argument(help="A card, NAME.card. Default: your own and all trusted ones.")
    ] = None,
    folder: Folder = Path("keys"),
) -> None:
    """Print a card, or your own and all trusted ones, with fingerprints and expiry dates.

    Examples
    --------
    treaty keys show
    treaty keys show shop.card
    """
    if file is not None:
        card = read_card(file, today=False)
        _row("name", card.name)
        _row("fingerprint", fingerprint_of(card))
        _row("certificate", fingerprint(card.certificate.encode()))
        _row("valid until", f"{ends(card):%Y-%m-%d}{_soon(card)}")
        if card.previous:
            _row("replaces", card.previous)
        return
    for name, card in own_cards(folder).items():
        _row(name, f"{fingerprint_of(card)}, own, until {ends(card):%Y-%m-%d}{_soon(card)}")
    for peer in peers(folder):
        if peer.card is None or peer.wrong:
            _row(peer.name, f"NOT TRUSTED: {peer.wrong}")
        else:
            dates = f"trusted on {peer.since:%Y-%m-%d}, until {ends(peer.card):%Y-%m-%d}{_soon(peer.card)}"
            _row(peer.name, f"{fingerprint_of(peer.card)}, {dates}")


@keys.command(name="trust")
def trust_card(
    file: Annotated[Path, typer.Argument(help="The card that a partner sent, NAME.card.")],
    fingerprint: Annotated[
        str | None, typer.Option(help="As the partner reads it to you over another channel; then no prompt appears.")
    ] = None,
    endorsement: Annotated[
        Path | None, typer.Option(help="The card's endorsement, instead of a comparison; with --ca and --domain.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="The certificate of an authority that you trust, PEM.")] = None,
    domain: Annotated[str | None, typer.Option(help="The partner's domain, as you know it: bank.example.org.")] = None,
    folder: Folder = Path("keys"),
) -> None:
    """Trust a partner's card from now on.

    You are asked to compare its fingerprint with the partner, for example by telephone. No comparison is needed for a
    card that replaces a trusted one and is signed by its key (treaty keys rotate), nor for a card with an endorsement
    (treaty keys endorse) by the owner of a domain, if you trust the authority that certifies the owner.

    Examples
    --------
    treaty keys trust shop.card
    treaty keys trust shop.card --endorsement shop.endorsement --ca authority.pem --domain shop.example.org
    """
    card = read_card(file)
    confirmed = fingerprint
    if endorsement is not None or ca is not None or domain is not None:
        if endorsement is None or ca is None or domain is None or confirmed is not None:
            raise ConfigError("expected --endorsement, --ca and --domain together, without --fingerprint")
        check_endorsement(endorsement, card, ca, domain)
        confirmed = fingerprint_of(card)
    if must_compare(folder, card) and confirmed is None:
        confirmed = _compared(card)
    trust(folder, card, confirmed)
    say(f"{card.name} is trusted: {fingerprint_of(card)}")


@keys.command(name="endorse")
def endorse_card(
    certificates: Annotated[
        Path, typer.Argument(help="This organisation's certificate by an authority, then intermediate ones, PEM.")
    ],
    key: Annotated[Path, typer.Argument(help="That certificate's private key, PEM, not encrypted.")],
    name: Annotated[str | None, typer.Argument(help="Whose card; needed if the folder has several.")] = None,
    folder: Folder = Path("keys"),
) -> None:
    """Sign this organisation's card with the key of the certificate that an authority issued for its domain.

    Partners who trust that authority can then trust the card without a telephone call: treaty keys trust NAME.card
    --endorsement NAME.endorsement --ca CA.pem --domain DOMAIN. Nodes still use the card's own keys.

    Examples
    --------
    treaty keys endorse chain.pem domain.key.pem
    """
    card = _one_of(folder, name)
    file = folder / f"{card.name}.endorsement"
    made = endorse(card, read_small(certificates), read_secret(key))
    with explained(f"cannot write {file}"):
        write_whole(file, [made], mode=0o644)
    _row("endorsement", f"{file}  (give it to your partners with the card)")


@keys.command(name="rotate")
def rotate_keys(
    name: Annotated[str | None, typer.Argument(help="Whose keys; needed if the folder has several.")] = None,
    folder: Folder = Path("keys"),
) -> None:
    """Replace this organisation's keys by new ones, before they expire or as a routine.

    The old key signs the new card, so partners who run treaty keys trust need not compare anything. Every partner must
    trust each card in turn: make no third card before all have the second (old ones are in the folder old). If a key
    may have been copied, this is not enough: partners must first run treaty keys revoke, then compare the new card.

    Examples
    --------
    treaty keys rotate
    """
    _say_new(folder, rotate(folder, _one_of(folder, name).name))
    say(
        "Restart the node: it then uses the new keys and signs its approvals of open jobs again. An endorsement is of "
        "the old card: make a new one."
    )


@keys.command(name="revoke")
def revoke_partner(
    name: Annotated[str, typer.Argument(help="The partner's name.")], folder: Folder = Path("keys")
) -> None:
    """Stop trusting a partner. Its present card is never trusted again; a new card must be compared.

    Examples
    --------
    treaty keys revoke shop
    """
    revoke(folder, name)
    say(f"{name} is no longer trusted")


def _one_of(folder: Path, name: str | None) -> Card:
    """Return the card of an organisation whose keys are in the folder: the named one, or the only one."""
    cards = own_cards(folder)
    if name is None and len(cards) == 1:
        return next(iter(cards.values()))
    if name is None or name not in cards:
        raise ConfigError(
            f"expected the name of an organisation whose keys are in {folder}: {', '.join(cards) or 'none'}"
        )
    return cards[name]


def _compared(card: Card) -> str:
    """Have a person compare a card's fingerprint with the partner; return it if they agree."""
    if not _at_terminal():
        raise ConfigError(
            f"expected a person at a terminal to compare the fingerprint of {card.name}'s card; run this in one, "
            'or give --fingerprint "SHA256:..." as the partner reads it to you'
        )
    whole = fingerprint_of(card)
    groups = whole.removeprefix("SHA256:").split()
    # two random groups: a person who always types the same ones may compare no others. An attacker can try keys until
    # three groups are right; these include one asked group with probability 3/16, both with 1/40
    asked = sorted(secrets.SystemRandom().sample(range(len(groups)), 2))
    shown = " ".join("...." if k in asked else group for k, group in enumerate(groups))
    _row("card of", f"{card.name}, valid until {ends(card):%Y-%m-%d}")
    _row("fingerprint", f"SHA256:{shown}")
    say(
        f"Ask {card.name} to read out the output of treaty keys show, over another channel than the one that brought "
        "the file. All groups must agree. Type the two groups that are hidden here."
    )
    for number in asked:
        typed = typer.prompt(f"Group {number + 1} of {len(groups)}, four characters, as {card.name} reads it")
        if typed.strip().lower() != groups[number]:
            raise ConfigError(f"group {number + 1} of the fingerprint is not {typed!r}: the card is not trusted")
    return whole


def _at_terminal() -> bool:
    return sys.stdin.isatty()


def _say_new(folder: Path, card: Card) -> None:
    name = card.name
    _row("private", f"{folder / name}.key.pem, {folder / name}.sign.pem  (never send them)")
    _row("card", f"{folder / name}.card  (give it to your partners)")
    _row("fingerprint", fingerprint_of(card))
    _row("certificate", f"{folder / name}.cert.pem  (in place of the card, for job files without nodes)")
    _row("fingerprint", fingerprint(card.certificate.encode()))


def _row(what: str, value: str) -> None:
    say(f"{what:<12} {value}")


def _soon(card: Card) -> str:
    left = ends(card) - datetime.datetime.now(datetime.UTC)
    if left < datetime.timedelta(0):
        return " (HAS ENDED: a new card is needed)"
    return f" ({left.days} days left" + (": a new card is needed soon)" if left < RENEW_WITHIN else ")")
