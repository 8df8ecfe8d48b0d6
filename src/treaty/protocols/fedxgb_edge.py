"""An edge server of FedXGB; see `fedxgb` for the messages."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from treaty.crypto.hidden_splits import Layout
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.messages import Array, view
from treaty.messaging.party import Party
from treaty.options import TreeOptions
from treaty.protocols.crowd_cohorts import Rules, Standing
from treaty.protocols.crowd_dealer import Dealer
from treaty.protocols.crowd_edges import LEAST, DomainSums
from treaty.protocols.crowd_keys import Credentials, gather_sound
from treaty.protocols.crowd_paper import PaperDomainSums, paper_mode
from treaty.protocols.crowd_routing import (
    Everybody,
    Have,
    Hidden,
    HiddenLeaves,
    HiddenRows,
    Rows,
    Turn,
    layout_of,
)
from treaty.protocols.crowd_server import Sum, Survived, Users
from treaty.protocols.crowd_shares import shares_of
from treaty.protocols.crowd_shown import HiddenThresholds, SeenRows, Shown
from treaty.protocols.fedxgb import End, Here, Offer, Prepared, Roll, Splits, Task, Values, check_edges, terms
from treaty.protocols.horizontal_bins import Agreed, Asked, Count, unpack_bins
from treaty.protocols.horizontal_rows import schema_of
from treaty.protocols.masked_members import Heard, Masked, Vouching, join

logger = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds after which a silent user counts as lost for the tree."""


def edge(
    party: Party,
    options: TreeOptions,
    *,
    users: Sequence[str],
    server: str,
    edges: Sequence[str],
    authority: str,
    rules: Rules | None = None,
    patience: float = PATIENCE,
    threads: int = 1,
    vouching: Vouching,
) -> None:
    """Serve a domain until training is over.

    Parameters
    ----------
    party : Party
        Connected with the authority, the server, the own users and, where the model is hidden, all users and edges.
    users : sequence of str
        Of the domain.
    edges : sequence of str
        All of them, in the job's order.
    rules : Rules, optional
        How cohorts are chosen.
    patience : float
        Seconds after which a silent user counts as lost for the tree.
    vouching : Vouching
        Whose certificates are pinned; nobody's between threads.

    Raises
    ------
    ConfigError
        When options differ, or the domain has too few users.
    CryptoError, PeerError
        When the server or another edge server is lost, or sends what the protocol does not allow.
    """
    check_edges(options, len(edges))
    paper = paper_mode(options)
    party.may_lose([name for name in party.peers if name not in (server, *edges)])
    credentials = Credentials(party, authority, "edge")
    offers = _offers(party, credentials, users, patience)
    party.send(server, Users({name: offer.keys for name, offer in offers.items()}))
    task = party.receive(server, Task)
    credentials.check(server, "server", task.server, server)
    if task.options != terms(options):
        raise ConfigError(f"expected the options of {server}, got others at {party.name}; compare the job files")
    membership = join(party, server, edges, vouching, b"fedxgb edges", allow_two=True)
    standings = {name: Standing(offer.activity, offer.stability) for name, offer in offers.items()}
    party.send_each(dict.fromkeys(offers, task))
    domain = (PaperDomainSums if paper else DomainSums)(
        party, {name: offer.keys for name, offer in offers.items()}, standings, rules or Rules(most=options.max_users),
        patience,
    )  # fmt: skip
    domain.heard.hear(task)
    domain.choose(domain.there, everybody=True)  # who may ever take part is in the first sum
    at_start = domain.heard.digest
    hidden: HiddenRows | None = None
    dealer: Dealer | None = None
    seen: SeenRows | None = None
    agreed: Agreed | None = None
    kinds = (
        Count, Asked, Agreed, Prepared, Everybody, Roll, Sum, Splits, Shown, Values, Hidden, HiddenLeaves,
        HiddenThresholds, Turn, End,
    )  # fmt: skip
    while True:
        told = party.receive(server, *kinds, follow=True)
        match told:
            case Sum():
                opened, remaining, attempt = domain.total(told.number, told.length)
                if paper:  # the paper's edge servers have no masks among them
                    party.send(server, Masked(Array.of(opened.view(np.uint64))))
                else:
                    membership.give(opened)
                party.send(server, Survived(remaining, attempt))
                continue
            case HiddenThresholds():
                if seen is None:
                    raise PeerProtocolError(server, f"expected no thresholds, or bins before - from {server}")
                sides = seen.route(told)
                domain.only(seen.users)
                domain.send(sides)
                continue
            case Hidden() | HiddenLeaves():
                if hidden is None:
                    raise PeerProtocolError(server, f"expected a model that users know - from {server}")
                sides_or_values = hidden.route(told) if isinstance(told, Hidden) else hidden.value(told)
                party.send_each({name: said for name, said in sides_or_values.items() if name in party.peers})
                continue
            case Turn():
                domain.send(dict.fromkeys(domain.there, told))
                if dealer is not None:
                    dealer.serve()
                continue
        membership.hear(told)
        everybody = [name for name in party.peers if name not in (server, authority, *edges)]
        if isinstance(told, Prepared | Roll):  # a new round: what was late for the last one is dropped unread
            party.drop_earlier(everybody)
        if isinstance(told, Roll):
            domain.heard = Heard(at_start)
        domain.heard.hear(told)
        domain.send(dict.fromkeys(domain.there, told))
        match told:
            case Agreed():
                agreed = told
            case Prepared() if options.expose == "paper" and agreed is not None:
                layout = _layout(agreed, told, task, options, server)
                seen = SeenRows(party, edges, server, everybody, layout, patience)
                at_start = domain.heard.digest
            case Prepared() if options.hides_model and agreed is not None:
                layout = _layout(agreed, told, task, options, server)
                shares = shares_of(options.compares, layout, edges)
                if party.name == shares.dealer:
                    dealer = Dealer(party, edges, layout)
                if party.name in shares.holders:
                    hidden = HiddenRows(party, edges, server, layout, options.compares, threads)
                    came = gather_sound(party, everybody, Rows, timeout=patience)
                    domain.only(party.peers)
                    party.send(server, Have(hidden.take(came)))
            case Prepared():
                at_start = domain.heard.digest
            case Everybody() if options.hides_model:
                if hidden is not None:
                    hidden.keep(told.users)
                if dealer is not None:
                    dealer.serve()
                domain.only(told.users)
                at_start = domain.heard.digest
            case Roll():
                if hidden is not None:
                    hidden.start()
                if seen is not None:
                    seen.start()
                domain.choose(list(domain.gather(domain.there, Here)))
            case End():
                return


def _layout(agreed: Agreed, prepared: Prepared, task: Task, options: TreeOptions, server: str) -> Layout:
    """Return how rows are encoded, from the bins that the server tells everybody."""
    bins = unpack_bins(agreed, schema_of(task.names, task.categories), options.max_bin, server)
    may_miss = view(prepared.may_miss, np.bool_, (len(bins.n_bins),), peer=server, what="Prepared.may_miss")
    return layout_of(bins, may_miss)


def _offers(party: Party, credentials: Credentials, users: Sequence[str], patience: float) -> dict[str, Offer]:
    """Receive the users' keys; who offers none that the authority certified is no user."""
    offers = gather_sound(party, users, Offer, timeout=patience)
    for name in users:
        try:
            if name in offers:
                credentials.check(name, "user", offers[name].keys, name)
                continue
            logger.warning("%s begins without %s, which has not offered itself", party.name, name)
        except PeerProtocolError as error:
            logger.warning("%s: %s", party.name, error)
            del offers[name]
        party.leave_out(name)
    if len(offers) < LEAST:
        raise ConfigError(f"expected {LEAST} users or more in the domain of {party.name}, got {len(offers)}")
    return offers
