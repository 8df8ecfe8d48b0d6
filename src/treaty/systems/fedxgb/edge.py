"""An edge server of FedXGB; see `server` for the messages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from treaty.crypto.sharing.hidden_splits import Layout
from treaty.crypto.sharing.secure_aggregation import RoundVoid
from treaty.errors import PeerProtocolError
from treaty.machine.process import stay_on_one_core
from treaty.messaging.conversation import MessageOrder
from treaty.messaging.messages import Array, Message, view
from treaty.systems.fedxgb.authority import Credentials, authority_of, gather_sound, patience_of, send_each_or_leave_out
from treaty.systems.fedxgb.cohorts import Rules, Standing
from treaty.systems.fedxgb.domain import DomainSums
from treaty.systems.fedxgb.kept import ROUNDS, DomainFile, digest
from treaty.systems.fedxgb.messages import (
    Attendance,
    RoundStart,
    RowSummary,
    ServerLimits,
    Task,
    UserOffer,
    edge_order,
    receive_task,
)
from treaty.systems.fedxgb.options import FedXGB, check_edges, domains
from treaty.systems.fedxgb.paper import HiddenThresholds, PaperDomainSums, SeenRows, paper_mode
from treaty.systems.fedxgb.pieces import RowShares, gather_rows, send_pieces_or_leave_out
from treaty.systems.fedxgb.secfind import Sum, SurvivorReport, Users
from treaty.systems.fedxgb.secpred import (
    HeldRows,
    HiddenRows,
    LeafShares,
    RowOwners,
    SplitShares,
    Turn,
    layout_of,
)
from treaty.systems.fedxgb.shares import Dealer, holders_of, shares_of
from treaty.systems.horizontal.masked_sums import MaskedInput
from treaty.systems.horizontal.members import Membership, SumRules, ToldDigest, join
from treaty.systems.horizontal.quantiles import CommonBins, ProbeRequest, most_rounds, note_search, unpack_bins
from treaty.systems.horizontal.rows import schema_of
from treaty.systems.system import RoleInput

logger = logging.getLogger(__name__)

Rows = SeenRows | HiddenRows | Dealer | None
"""An edge server's part in taking all rows down trees; None where users know the model, or others hold the shares."""


def edge(inputs: RoleInput[FedXGB]) -> None:
    """Serve a domain until training is over.

    Parameters
    ----------
    inputs : RoleInput
        Its party is connected with the authority, the server, the domain's users and, where the model is hidden, all
        users and edge servers. `vouching` checks edge servers' certificates.

    Raises
    ------
    ConfigError
        When options differ.
    CryptoError, PeerError
        When too few users of the domain come, or the server or another edge server is lost or sends what the protocol
        does not allow.
    """
    party, options, roles, patience = inputs.party, inputs.options, inputs.roles, patience_of(inputs)
    server, authority, edges = roles.active, authority_of(roles), roles.having("edge")
    if not (inputs.alone or options.hides_model):  # else edge servers compute, on the rows of all users
        stay_on_one_core()
    check_edges(options, len(edges))
    paper = paper_mode(options)
    party.may_lose([name for name in party.peers if name not in (server, *edges)])
    credentials = Credentials(party, authority, "edge")
    offers = _offers(inputs, credentials, domains(roles)[party.name], patience)
    party.send(server, Users({name: offer.keys for name, offer in offers.items()}))
    task = receive_task(inputs, server, credentials)
    inputs.model_id = task.model_id
    membership = join(party, server, edges, inputs.vouching, b"fedxgb edges", SumRules(allow_two=True))
    standings = {name: Standing(offer.activity, offer.stability) for name, offer in offers.items()}
    file = DomainFile(inputs.keeper, party.name, task.model_id, standings)
    domain = _domain(inputs, offers, task, standings, file, patience, paper=paper)
    at_start = domain.heard.digest
    agreed: CommonBins | None = None
    rows: Rows = None
    order = MessageOrder(edge_order(options, holds_shares=party.name in holders_of(options.compares, edges)), "domain")
    limits = ServerLimits(server, inputs.common.n_estimators, inputs.common.max_depth, most_rounds(task.origins))
    progress = inputs.progress or (lambda done, part: None)
    progress(0, None)
    while order.state != "over":
        told = party.receive(server, *order.allowed, follow=True)
        order.take(told)
        before = limits.finished
        limits.take(told)
        if limits.finished > before:
            progress(limits.finished, None)
        elif isinstance(told, ProbeRequest):
            note_search(inputs.phase, limits.probes)
        match told:
            case Sum():
                limits.sums.take(told.number)
                _open_sum(inputs, domain, told, None if paper else membership)
                continue
            case HiddenThresholds() | SplitShares() | LeafShares() | Turn():
                _move_rows(inputs, domain, rows, told, patience)
                continue
        everybody = [name for name in party.peers if name not in (server, authority, *edges)]
        membership.hear(told)
        _pass_on(inputs, domain, told, everybody, at_start)
        match told:
            case CommonBins():
                agreed = told
            case RowSummary():
                if options.hides_model:
                    assert agreed is not None
                    layout = _layout(inputs, agreed, told, task)
                    rows = _rows_here(
                        inputs, domain, everybody, layout, told.n_rows, file, patience, resumed=task.rounds > 0
                    )
                if order.state != "rows":  # otherwise `RowOwners` is still to come
                    at_start = domain.heard.digest
            case RowOwners():
                if isinstance(rows, HiddenRows):
                    rows.keep(told.users)
                elif isinstance(rows, Dealer):
                    rows.serve()
                domain.only(told.users)
                domain.keep()
                at_start = domain.heard.digest
            case RoundStart():
                if isinstance(rows, SeenRows | HiddenRows):
                    rows.start()
                domain.choose(domain.attending(Attendance))
                if inputs.keeper is not None and limits.rounds == ROUNDS:
                    inputs.keeper.keep_only(task.model_id)


def _offers(
    inputs: RoleInput[FedXGB], credentials: Credentials, users: Sequence[str], patience: float
) -> dict[str, UserOffer]:
    """Receive the users' keys; leave out users without keys that the authority certified."""
    party = inputs.party
    offers = gather_sound(party, users, UserOffer, timeout=patience)
    for name in users:
        try:
            if name in offers:
                credentials.check(name, "user", offers[name].keys, name)
                continue
            logger.warning("%s begins without %s, which has sent no keys", party.name, name)
        except PeerProtocolError as error:
            logger.warning("%s: %s", party.name, error)
            del offers[name]
        party.leave_out(name)
    least = inputs.options.group
    if len(offers) < least:
        raise RoundVoid(f"expected {least} users or more to come to the domain of {party.name}, got {len(offers)}")
    return offers


def _domain(
    inputs: RoleInput[FedXGB],
    offers: Mapping[str, UserOffer],
    task: Task,
    standings: dict[str, Standing],
    file: DomainFile,
    patience: float,
    *,
    paper: bool,
) -> DomainSums:
    """Tell the users the task, and choose whose rows are in the first sum."""
    party = inputs.party
    send_each_or_leave_out(party, dict.fromkeys(offers, task), patience)
    keys = {name: offer.keys for name, offer in offers.items() if name in party.peers}
    options = inputs.options
    rules = Rules(most=options.max_users, least_change=options.group, whole=options.group_size is not None)
    known = file.read(rules, np.random.default_rng()) if task.rounds else None
    domain = (PaperDomainSums if paper else DomainSums)(party, keys, standings, rules, patience, known, file.write)
    domain.heard.hear(task)
    if known is None:
        domain.choose(domain.there, everybody=True)  # nobody who misses the first sum takes part later
    return domain


def _open_sum(inputs: RoleInput, domain: DomainSums, told: Sum, membership: Membership | None) -> None:
    """Open the domain's next sum and give it to the server, under masks that edge servers share."""
    opened, remaining, attempt = domain.total(told.number, told.length)
    if inputs.recording is not None:
        inputs.recording.note_given(opened)
    if membership is None:  # the paper's edge servers have no masks among them
        inputs.party.send(inputs.roles.active, MaskedInput(Array.of(opened.view(np.uint64))))
    else:
        membership.give(opened)
    inputs.party.send(inputs.roles.active, SurvivorReport(remaining, attempt))


def _pass_on(inputs: RoleInput, domain: DomainSums, told: Message, everybody: Sequence[str], at_start: bytes) -> None:
    """Tell the users what the server tells everybody; masks depend on it from now on."""
    if isinstance(told, RowSummary | RoundStart):  # a new round: what was late for the last one is dropped unread
        inputs.party.drop_earlier(everybody)
    if isinstance(told, RoundStart):
        domain.heard = ToldDigest(at_start)
    domain.heard.hear(told)
    domain.send(dict.fromkeys(domain.there, told))


def _layout(inputs: RoleInput, agreed: CommonBins, summary: RowSummary, task: Task) -> Layout:
    """Return how rows are encoded, from the bins that the server tells everybody."""
    server = inputs.roles.active
    bins = unpack_bins(agreed, schema_of(task.names, task.categories, task.origins), inputs.common.most_bins, server)
    may_miss = view(summary.may_miss, np.bool_, (len(bins.n_bins),), peer=server, what="RowSummary.may_miss")
    return layout_of(bins, may_miss)


def _rows_here(
    inputs: RoleInput[FedXGB],
    domain: DomainSums,
    everybody: Sequence[str],
    layout: Layout,
    most: int,
    file: DomainFile,
    patience: float,
    *,
    resumed: bool,
) -> Rows:
    """Prepare to take all rows down trees that users do not know; a holder of shares receives those of the rows.

    Where a training goes on, they must be those that it received in the first run. A user that says it has more than
    `most` rows, as many as all together, is left out.
    """
    party, server, edges, comparison = (
        inputs.party,
        inputs.roles.active,
        inputs.roles.having("edge"),
        inputs.options.compares,
    )
    if inputs.options.exposes == "paper":
        return SeenRows(party, edges, server, everybody, layout, most, patience)
    shares = shares_of(comparison, layout, edges)
    if party.name not in shares.holders:
        return Dealer(party, edges, layout) if party.name == shares.dealer else None
    hidden = HiddenRows(party, edges, server, layout, comparison, inputs.threads if inputs.alone else 1)
    came = gather_rows(party, everybody, RowShares, hidden.form(most), patience)
    digests = {name: digest(pieces) for name, pieces in came.items()}
    if not resumed:
        file.shares = digests
    for name in [name for name in came if digests[name] != file.shares.get(name)]:
        logger.warning(
            "%s goes on without %s: its rows are not those that it shared in the first run", party.name, name
        )
        del came[name]
    domain.only(party.peers)
    party.send(server, HeldRows(hidden.take(came)))
    return hidden


def _move_rows(
    inputs: RoleInput,
    domain: DomainSums,
    rows: Rows,
    told: HiddenThresholds | SplitShares | LeafShares | Turn,
    patience: float,
) -> None:
    """Take all rows down a level, or find their leaf values; tell each user the results of its rows."""
    match told, rows:
        case HiddenThresholds(), SeenRows():
            sides = rows.route(told)
            domain.only(rows.users)
            send_pieces_or_leave_out(inputs.party, {name: sides[name] for name in domain.there}, patience)
            domain.only(inputs.party.peers)
        case SplitShares() | LeafShares(), HiddenRows():
            of_users = rows.route(told) if isinstance(told, SplitShares) else rows.value(told)
            there = {name: pieces for name, pieces in of_users.items() if name in inputs.party.peers}
            send_pieces_or_leave_out(inputs.party, there, patience)
            domain.only(inputs.party.peers)
        case Turn(), _:
            domain.send(dict.fromkeys(domain.there, told))
            if isinstance(rows, Dealer):
                rows.serve()
