"""``treaty keys``: an organisation's own keys, and the partners whose cards it trusts."""

from __future__ import annotations

import datetime
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from treaty.errors import ConfigError
from treaty.files import write_whole
from treaty.messaging.certificates import RENEW_WITHIN, fingerprint, read_secret
from treaty.node.cards import Card, check_endorsement, endorse, ends, fingerprint_of, read_card, read_small
from treaty.node.identity import make_keys, must_compare, own_cards, peers, revoke, rotate, trust

keys = typer.Typer(
    help="Make this organisation's keys, and say whose cards it trusts.", no_args_is_help=True, rich_markup_mode="rich"
)
console = Console(markup=False)

Folder = Annotated[Path, typer.Option(help="The folder of keys.")]


@keys.command()
def new(
    name: Annotated[str, typer.Argument(help="The organisation's name, as in job files.")],
    folder: Folder = Path("keys"),
) -> None:
    """Make an organisation's private keys, certificate and card; files that exist are never replaced.

    Keep NAME.key.pem and NAME.sign.pem to yourself. Give NAME.card to the organisations whose nodes are to work with
    yours, and compare its fingerprint with them over another channel. Where parties run job files without nodes, they
    need NAME.cert.pem in its place.
    """
    _say_new(folder, make_keys(folder, name))


@keys.command()
def show(
    file: Annotated[Path | None, typer.Argument(help="A card, NAME.card. Default: one's own, and all trusted.")] = None,
    folder: Folder = Path("keys"),
) -> None:
    """Print a card, or one's own and all trusted ones, with their fingerprints and when they end."""
    if file is not None:
        card = read_card(file, today=False)
        _say("name", card.name)
        _say("fingerprint", fingerprint_of(card))
        _say("certificate", fingerprint(card.certificate.encode()))
        _say("valid until", f"{ends(card):%Y-%m-%d}{_soon(card)}")
        if card.previous:
            _say("replaces", card.previous)
        return
    for name, card in own_cards(folder).items():
        _say(name, f"{fingerprint_of(card)}, own, until {ends(card):%Y-%m-%d}{_soon(card)}")
    for peer in peers(folder):
        if peer.card is None or peer.wrong:
            _say(peer.name, f"NOT TRUSTED: {peer.wrong}")
        else:
            dates = f"trusted on {peer.since:%Y-%m-%d}, until {ends(peer.card):%Y-%m-%d}{_soon(peer.card)}"
            _say(peer.name, f"{fingerprint_of(peer.card)}, {dates}")


@keys.command(name="trust")
def trust_card(
    file: Annotated[Path, typer.Argument(help="The card that a partner sent, NAME.card.")],
    fingerprint: Annotated[
        str | None, typer.Option(help="As the partner says it over another channel; then nobody is asked.")
    ] = None,
    endorsement: Annotated[
        Path | None, typer.Option(help="The card's endorsement, in place of a comparison; with --ca and --domain.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="The certificate of the authority that you believe, PEM.")] = None,
    domain: Annotated[str | None, typer.Option(help="The partner's domain, as you know it: bank.example.org.")] = None,
    folder: Folder = Path("keys"),
) -> None:
    """Trust a partner's card from now on.

    Asks to compare its fingerprint with the partner, by telephone, say. A card that replaces a trusted one, and is
    signed by its key (treaty keys rotate), needs no comparison. Nor does one with an endorsement (treaty keys endorse)
    by the owner of a domain, where you believe the authority that says who owns it.
    """
    card = read_card(file)
    said = fingerprint
    if endorsement is not None or ca is not None or domain is not None:
        if endorsement is None or ca is None or domain is None or said is not None:
            raise ConfigError("expected --endorsement, --ca and --domain together, without --fingerprint")
        check_endorsement(endorsement, card, ca, domain)
        said = fingerprint_of(card)
    if must_compare(folder, card) and said is None:
        said = _compared(card)
    trust(folder, card, said)
    console.print(f"{card.name} is trusted: {fingerprint_of(card)}", soft_wrap=True, highlight=False)


@keys.command(name="endorse")
def endorse_card(
    certificates: Annotated[
        Path, typer.Argument(help="This organisation's certificate of an authority, and those between them, PEM.")
    ],
    key: Annotated[Path, typer.Argument(help="That certificate's private key, PEM, not encrypted.")],
    name: Annotated[
        str | None, typer.Argument(help="Whose card; needed where the folder has those of several.")
    ] = None,
    folder: Folder = Path("keys"),
) -> None:
    """Sign this organisation's card with the key of a certificate that an authority issued to it for its domain.

    Partners who believe that authority trust the card by NAME.endorsement without a telephone call: treaty keys trust
    NAME.card --endorsement NAME.endorsement --ca CA.pem --domain DOMAIN. Nodes use the card's own keys as ever.
    """
    card = _one_of(folder, name)
    file = folder / f"{card.name}.endorsement"
    made = endorse(card, read_small(certificates), read_secret(key))
    try:
        write_whole(file, [made], mode=0o644)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
    _say("endorsement", f"{file}  (give it to your partners with the card)")


@keys.command(name="rotate")
def rotate_keys(
    name: Annotated[
        str | None, typer.Argument(help="Whose keys; needed where the folder has those of several.")
    ] = None,
    folder: Folder = Path("keys"),
) -> None:
    """Make new keys in place of this organisation's own, before they end or as a matter of course.

    The old key signs the new card, so partners who run treaty keys trust need not compare anything. Each of them must
    trust every card in turn: make no third before all have the second (old ones are in the folder old). Where a key
    may have been copied, this is not enough: partners must first run treaty keys revoke, then compare the new card.
    """
    _say_new(folder, rotate(folder, _one_of(folder, name).name))
    console.print(
        "Start the node again: it takes the new keys up and signs its approvals of open jobs with them. An endorsement "
        "is of the old card: make another.",
        soft_wrap=True,
        highlight=False,
    )


@keys.command(name="revoke")
def revoke_partner(
    name: Annotated[str, typer.Argument(help="The partner's name.")],
    folder: Folder = Path("keys"),
) -> None:
    """Trust a partner no more; its present card is not trusted again either, only a new one that is compared anew."""
    revoke(folder, name)
    console.print(f"{name} is not trusted any more", soft_wrap=True, highlight=False)


def _one_of(folder: Path, name: str | None) -> Card:
    """Return the card of the organisation of that name whose keys are in a folder, or of the only one."""
    cards = own_cards(folder)
    if name is None and len(cards) == 1:
        return next(iter(cards.values()))
    if name is None or name not in cards:
        raise ConfigError(f"expected the name of one whose keys are in {folder}: {', '.join(cards) or 'nobody'}")
    return cards[name]


def _compared(card: Card) -> str:
    """Have a person compare a card's fingerprint with the partner; return it where they are the same."""
    if not _at_terminal():
        raise ConfigError(
            f"expected a person at a terminal to compare the fingerprint of {card.name}'s card, got none; or give "
            '--fingerprint "SHA256:..." as the partner says it'
        )
    whole = fingerprint_of(card)
    groups = whole.removeprefix("SHA256:").split()
    # who always types the same ones may compare no others; keys can be tried until three groups are right, which meet
    # one that is asked for with a probability of 3 in 16, and two with 1 in 40
    asked = sorted(secrets.SystemRandom().sample(range(len(groups)), 2))
    shown = " ".join("...." if k in asked else group for k, group in enumerate(groups))
    _say("card of", f"{card.name}, valid until {ends(card):%Y-%m-%d}")
    _say("fingerprint", f"SHA256:{shown}")
    console.print(
        f"Have {card.name} read out what treaty keys show prints there, over another channel than the one that brought "
        "the file. All groups must be the same; the two that are not shown here are asked for.",
        soft_wrap=True,
        highlight=False,
    )
    for number in asked:
        heard = typer.prompt(f"Group {number + 1} of {len(groups)}, four characters, as you heard it")
        if heard.strip().lower() != groups[number]:
            raise ConfigError(f"group {number + 1} of the fingerprint is not {heard!r}: the card is not trusted")
    return whole


def _at_terminal() -> bool:
    return sys.stdin.isatty()


def _say_new(folder: Path, card: Card) -> None:
    name = card.name
    _say("private", f"{folder / name}.key.pem, {folder / name}.sign.pem  (never send them)")
    _say("card", f"{folder / name}.card  (give it to your partners)")
    _say("fingerprint", fingerprint_of(card))
    _say("certificate", f"{folder / name}.cert.pem  (in place of the card, for job files without nodes)")
    _say("fingerprint", fingerprint(card.certificate.encode()))


def _say(what: str, value: str) -> None:
    console.print(f"{what:<12} {value}", soft_wrap=True, highlight=False)


def _soon(card: Card) -> str:
    left = ends(card) - datetime.datetime.now(datetime.UTC)
    if left < datetime.timedelta(0):
        return " (HAS ENDED: a new card is needed)"
    return f" ({left.days} days left" + (": a new card is needed soon)" if left < RENEW_WITHIN else ")")
