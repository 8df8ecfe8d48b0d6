"""An edge server of FedXGB; see `fedxgb` for the messages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from treaty.crypto.aggregation.round import RoundVoid
from treaty.crypto.sharing.hidden_splits import Layout
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.systems.fedxgb.authority import Credentials, gather_sound, send_each_or_leave_out
from treaty.systems.fedxgb.cohorts import Rules, Standing
from treaty.systems.fedxgb.edge_sums import LEAST, DomainSums
from treaty.systems.fedxgb.paper.routing import HiddenThresholds, SeenRows, Shown
from treaty.systems.fedxgb.paper.sums import PaperDomainSums, paper_mode
from treaty.systems.fedxgb.secpred.dealer import Dealer
from treaty.systems.fedxgb.secpred.routing import (
    Everybody,
    Have,
    Hidden,
    HiddenLeaves,
    HiddenRows,
    Rows,
    Turn,
    layout_of,
)
from treaty.systems.fedxgb.secpred.shares import shares_of
from treaty.systems.fedxgb.server import (
    End,
    Here,
    Offer,
    Prepared,
    Roll,
    Splits,
    Task,
    Values,
    check_edges,
    receive_task,
)
from treaty.systems.fedxgb.server_sums import Sum, Survived, Users
from treaty.systems.horizontal.members import Heard, Masked, Membership, Vouching, join
from treaty.systems.horizontal.quantiles import Agreed, Asked, Count, unpack_bins
from treaty.systems.horizontal.rows import schema_of
from treaty.systems.tree_options import TreeOptions

logger = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds after which a silent user counts as lost for the tree, and one that takes no message for good."""


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
        Seconds after which a silent user counts as lost for the tree, and one that takes no message for good. With
        users lost one after another, others wait up to ten times as long: their `timeout` must not be shorter.
    vouching : Vouching
        Whose certificates are pinned; nobody's between threads.

    Raises
    ------
    ConfigError
        When options differ.
    CryptoError, PeerError
        When too few users of the domain come, or the server or another edge server is lost or sends what the protocol
        does not allow.
    """
    check_edges(options, len(edges))
    paper = paper_mode(options)
    party.may_lose([name for name in party.peers if name not in (server, *edges)])
    credentials = Credentials(party, authority, "edge")
    offers = _offers(party, credentials, users, patience)
    party.send(server, Users({name: offer.keys for name, offer in offers.items()}))
    task = receive_task(party, server, server, credentials, options)
    membership = join(party, server, edges, vouching, b"fedxgb edges", allow_two=True)
    domain = _domain(party, offers, task, rules or Rules(most=options.max_users), patience, paper=paper)
    at_start = domain.heard.digest
    agreed: Agreed | None = None
    rows = _RowsHere()
    kinds = (
        Count, Asked, Agreed, Prepared, Everybody, Roll, Sum, Splits, Shown, Values, Hidden, HiddenLeaves,
        HiddenThresholds, Turn, End,
    )  # fmt: skip
    while True:
        told = party.receive(server, *kinds, follow=True)
        match told:
            case Sum():
                _open_sum(party, server, domain, told, None if paper else membership)
                continue
            case HiddenThresholds() | Hidden() | HiddenLeaves() | Turn():
                _move_rows(party, server, domain, rows, told, patience)
                continue
        everybody = [name for name in party.peers if name not in (server, authority, *edges)]
        membership.hear(told)
        _pass_on(party, domain, told, everybody, at_start)
        match told:
            case Agreed():
                agreed = told
            case Prepared() if options.hides_model and agreed is not None:
                layout = _layout(agreed, told, task, options, server)
                rows = _rows_here(party, domain, options, edges, server, everybody, layout, patience, threads)
                if rows.seen is not None:  # otherwise `Everybody` is still to come
                    at_start = domain.heard.digest
            case Prepared():
                at_start = domain.heard.digest
            case Everybody() if options.hides_model:
                if rows.hidden is not None:
                    rows.hidden.keep(told.users)
                if rows.dealer is not None:
                    rows.dealer.serve()
                domain.only(told.users)
                at_start = domain.heard.digest
            case Roll():
                if rows.hidden is not None:
                    rows.hidden.start()
                if rows.seen is not None:
                    rows.seen.start()
                domain.choose(list(domain.gather(domain.there, Here)))
            case End():
                return


def _domain(
    party: Party, offers: Mapping[str, Offer], task: Task, rules: Rules, patience: float, *, paper: bool
) -> DomainSums:
    """Tell the users the task, and choose whose rows are in the first sum."""
    send_each_or_leave_out(party, dict.fromkeys(offers, task), patience)
    keys = {name: offer.keys for name, offer in offers.items() if name in party.peers}
    standings = {name: Standing(offer.activity, offer.stability) for name, offer in offers.items()}
    domain = (PaperDomainSums if paper else DomainSums)(party, keys, standings, rules, patience)
    domain.heard.hear(task)
    domain.choose(domain.there, everybody=True)  # who may ever take part is in the first sum
    return domain


def _open_sum(party: Party, server: str, domain: DomainSums, asked: Sum, membership: Membership | None) -> None:
    """Open the domain's next sum and give it to the server, under masks that edge servers share."""
    opened, remaining, attempt = domain.total(asked.number, asked.length)
    if membership is None:  # the paper's edge servers have no masks among them
        party.send(server, Masked(Array.of(opened.view(np.uint64))))
    else:
        membership.give(opened)
    party.send(server, Survived(remaining, attempt))


def _pass_on(party: Party, domain: DomainSums, told: Message, everybody: Sequence[str], at_start: bytes) -> None:
    """Tell the users what the server tells everybody; masks depend on it from now on."""
    if isinstance(told, Prepared | Roll):  # a new round: what was late for the last one is dropped unread
        party.drop_earlier(everybody)
    if isinstance(told, Roll):
        domain.heard = Heard(at_start)
    domain.heard.hear(told)
    domain.send(dict.fromkeys(domain.there, told))


@dataclass(frozen=True, slots=True)
class _RowsHere:
    """An edge server's part in taking everybody's rows down trees: none where users know the model.

    Attributes
    ----------
    seen : SeenRows or None
        Where thresholds alone are hidden.
    hidden : HiddenRows or None
        Where the model is, at a holder of shares.
    dealer : Dealer or None
        Where the model is, at the one that deals random numbers.
    """

    seen: SeenRows | None = None
    hidden: HiddenRows | None = None
    dealer: Dealer | None = None


def _rows_here(
    party: Party,
    domain: DomainSums,
    options: TreeOptions,
    edges: Sequence[str],
    server: str,
    everybody: Sequence[str],
    layout: Layout,
    patience: float,
    threads: int,
) -> _RowsHere:
    """Get ready to take everybody's rows down trees that users do not know; take in shares of rows, as a holder."""
    if options.expose == "paper":
        return _RowsHere(seen=SeenRows(party, edges, server, everybody, layout, patience))
    shares = shares_of(options.compares, layout, edges)
    dealer = Dealer(party, edges, layout) if party.name == shares.dealer else None
    if party.name not in shares.holders:
        return _RowsHere(dealer=dealer)
    hidden = HiddenRows(party, edges, server, layout, options.compares, threads)
    came = gather_sound(party, everybody, Rows, timeout=patience)
    domain.only(party.peers)
    party.send(server, Have(hidden.take(came)))
    return _RowsHere(hidden=hidden, dealer=dealer)


def _move_rows(
    party: Party,
    server: str,
    domain: DomainSums,
    rows: _RowsHere,
    told: HiddenThresholds | Hidden | HiddenLeaves | Turn,
    patience: float,
) -> None:
    """Take everybody's rows down a level, or find their leaf values; tell users of theirs."""
    match told:
        case HiddenThresholds():
            if rows.seen is None:
                raise PeerProtocolError(server, f"expected no thresholds, or bins before - from {server}")
            sides = rows.seen.route(told)
            domain.only(rows.seen.users)
            domain.send(sides)
        case Hidden() | HiddenLeaves():
            if rows.hidden is None:
                raise PeerProtocolError(server, f"expected a model that users know - from {server}")
            sides_or_values = rows.hidden.route(told) if isinstance(told, Hidden) else rows.hidden.value(told)
            there = {name: said for name, said in sides_or_values.items() if name in party.peers}
            send_each_or_leave_out(party, there, patience)
            domain.only(party.peers)
        case Turn():
            domain.send(dict.fromkeys(domain.there, told))
            if rows.dealer is not None:
                rows.dealer.serve()


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
        raise RoundVoid(f"expected {LEAST} users or more to come to the domain of {party.name}, got {len(offers)}")
    return offers
