"""Alignment: find the rows whose ids all parties hold, by private set intersection, and put them in a common order.

Roles: one active party, any number of passive ones, each with a column of ids. Output: for each party, its rows whose
ids all parties hold, in one common random order. Ids are hidden by commutative encryption over ristretto255 (ECDH-PSI).

1. Parties exchange a `ListSummary` of their ids; the active party's has a salt.
2. The active party sends H(id)^a of its ids, with random points among them, shuffled (`BlindedPoints`).
3. Each passive party returns these raised to b, in the order received (`RaisedPoints`).
4. Each passive party sends H(id)^b of its own ids, with random points among them, shuffled (`BlindedPoints`).
5. The active party raises these to a and compares them with those of step 3: equal values are common ids.
6. It sends the places of the ids that all parties hold in the list of step 4, with their double-encrypted values
   (`Matches`), and the key of the common order (`OrderKey`).
7. Both sides show that they have the same ids in the same order (`common_rows`).
8. With "expand", they lay out the rows of repeated ids (`common_rows`).

If only the active party learns the result, `AlignmentEnd` replaces steps 6 to 8. Long lists take steps 2 to 5 by an
oblivious pseudorandom function (`kkrt`).

H is hash-to-group under a domain of job and salt; a and b are fresh in every run. Points travel in batches of `BATCH`,
each answered before the next but one is sent, so neither side holds more than two. Long lists lie in files. 16 bytes of
a double-encrypted value are kept and sent: two of 2^24 ids agree in them with probability below 2^-78.

Adversary: honest but curious; `leakage` has what each party learns. `common_rows` has what step 7 detects of a party
that departs from the protocol.

References: Agrawal, Evfimievski, Srikant, "Information Sharing Across Private Databases", SIGMOD 2003, section 3, in an
elliptic curve group with hash-to-group (RFC 9496, RFC 9380 appendix B); the asymmetric form of Liang and Chawathe,
2004.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

import numpy as np

from treaty.crypto.transfer import oprf
from treaty.data.ids import RULES, Ids, Psi
from treaty.data.large import IN_MEMORY, Scratch, SortedRecords, records
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.machine.arrays import Integers
from treaty.messaging.exchanges import agree
from treaty.messaging.messages import Array, Message, clean, leaks, view
from treaty.messaging.party import Party
from treaty.privacy.ledger import RunLog
from treaty.systems.alignment import ecdh
from treaty.systems.alignment.common_rows import arrange, arranged, prove, ranked, rows_of, verify
from treaty.systems.alignment.kkrt import SecretOrder, answer_values, confirm, find_by_values

ResultTo = Literal["both", "active"]

BATCH = 1 << 14
"""Points per message: half a megabyte, about a second of work."""

LONG = 1 << 13
"""The bucket of either list from which "auto" takes KKRT, whose base transfers take as long as 2000 ids' points."""

CAUSES = (
    "the usual causes are padding zeros that one party's file lost, upper and lower case, hashes of another form or "
    "salt, another column than the partners', and tables of different people"
)
"""Why parties may have few ids in common, for an error or a warning."""

_DOMAIN = b"treaty-alignment-v1-ristretto255_XMD:SHA-512_R255MAP_RO_"


@leaks("the kind of ids, the approximate size of the list and, with a log, whether ids have changed", "control")
class ListSummary(Message):
    """The kind of ids, the bucket of the set's size, a commitment to the set (empty without a log), and the salt."""

    kind: str
    size: int
    commitment: Array
    salt: Array | None = None


@leaks("which of its own ids all parties have", "exact", guard='result_to="active"')
class Matches(Message):
    """Common ids: places in the receiver's list, int32 (n,), and values, uint8 (n, 16)."""

    places: Array
    values: Array


@leaks("the key of the common order", "nothing")
class OrderKey(Message):
    """The key of the common order, uint8 (32,)."""

    key: Array


@leaks("that the active party keeps its result", "nothing")
class AlignmentEnd(Message):
    """The active party keeps its result: the receiver does not learn whether any id is common."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """What a party learns from an alignment.

    `rows` are own rows in the common order, and `n_common` is the number of ids that all parties hold. If only the
    active party learns the result, they are empty and None at the others. `n_ids`, `n_null` and `n_repeated` count
    distinct own ids, own rows without an id, and own rows whose id an earlier row has. By peer: `sizes` has the buckets
    of the sets' sizes, `pairwise`, at the active party, the number of ids that the two share, and `changed`, with a
    log, a lower bound of how many of its ids differ from its most similar earlier run (None: there is none).
    """

    rows: Integers
    n_common: int | None
    n_ids: int
    n_null: int
    n_repeated: int
    sizes: dict[str, int]
    pairwise: dict[str, int] = field(default_factory=dict)
    changed: dict[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentOptions:
    """Options of an alignment; `psi`, `result_to`, `batch` and whether ids are committed to must agree at all parties.

    `psi` is how common ids are found; "auto" takes KKRT for long lists. `result_to` is who learns which ids all parties
    hold; under "active" the others do not learn how many there are. `batch` is the number of points per message. `log`
    records the runs with each partner and limits their number; with `commits`, it also has commitments to the ids,
    which show how many of them change. `progress` is called with the number of points done, and of all points. Lists of
    more than `in_memory` ids lie in temporary files.
    """

    psi: Psi = "auto"
    result_to: ResultTo = "both"
    batch: int = BATCH
    log: RunLog | None = None
    commits: bool = True
    threads: int = 1
    progress: ecdh.Progress | None = None
    in_memory: int = IN_MEMORY


_DEFAULTS = AlignmentOptions()


@dataclass(frozen=True, slots=True)
class _Met:
    """The result of step 1: the domain of H, and `sizes` and `changed` as in `Alignment`."""

    domain: bytes
    sizes: dict[str, int]
    changed: dict[str, int | None]


# ---------------------------------------------------------------- active party


def align_active(party: Party, ids: Ids, options: AlignmentOptions = _DEFAULTS) -> Alignment:
    """Align with every passive party; all parties must have read their ids with the same options.

    Raises ConfigError if parties disagree on an option or on the kind of their ids, or a peer has reached its limit of
    runs; DataError, which names only counts, if the parties have no id in common or "expand" gives too many rows;
    PeerProtocolError if a peer sends something that is not a point, or lists that do not fit together. Under "active"
    this party finishes the job before it raises DataError, so that its peers do not learn of it.
    """
    both, batch, threads = options.result_to == "both", options.batch, options.threads
    with Scratch(options.in_memory) as scratch:
        # step 1: with a fresh salt, points of this run match those of no other run
        met = _introduce(party, ids, secrets.token_bytes(32), options, scratch)
        # steps 2 to 5, with each peer separately: only this party knows which ids all parties hold
        pairs, faults = _find(party, ids, met, options, scratch)
        if both and faults:
            raise faults[0]
        pairwise = {peer: len(matches) for peer, matches in pairs.items()}
        pairs = ecdh.held_by_all(pairs, len(ids), scratch)
        n_common = len(pairs[party.peers[0]])
        if not both:
            # before anything that depends on the number of common ids, an error included
            for peer in party.peers:
                party.send(peer, AlignmentEnd())
            if faults:
                # an error sent now would show the peer that this party has ids for which it sent false values
                party.close()
                raise faults[0]
        if n_common == 0:
            if not both:
                # so that the error below does not reach the peers
                party.close()
                _finish(party, ids, met, options, np.zeros(0, np.int64), 0)
            shared = ", ".join(f"{count} with {peer}" for peer, count in pairwise.items())
            raise DataError(
                f"{party.name}: expected ids that all parties hold, got none ({len(ids)} ids here, {shared}); {CAUSES}",
                public=f"the parties have no id in common; {CAUSES}",
            )
        # steps 6 and 7, peer by peer: they differ in the values of an id, not in the order
        key = secrets.token_bytes(32)
        common = ranked(ids, pairs[party.peers[0]], key, threads, scratch)
        for number, peer in enumerate(party.peers if both else ()):
            _send_matches(party, peer, pairs[peer], met.sizes[peer], key, batch, scratch)
            if number:  # the same ids in the same order, but with values under this peer's key
                common.close()
                common = ranked(ids, pairs[peer], key, threads, scratch)
            prove(party, peer, ids, pairs[peer], common, threads, scratch)
            pairs[peer].close()
        rows = rows_of(ids, common, lambda own: arrange(party, own, batch) if both else (own, np.ones_like(own)))
    return _finish(party, ids, met, options, rows, n_common, pairwise)


def _find(
    party: Party, ids: Ids, met: _Met, options: AlignmentOptions, scratch: Scratch
) -> tuple[dict[str, SortedRecords], list[PeerProtocolError]]:
    """Run steps 2 to 5; return the common ids with each peer, of type `PAIR`, by number, and errors to raise later."""
    size, sizes = ecdh.bucket(len(ids)), met.sizes
    by_kkrt = [peer for peer in party.peers if _takes_kkrt(options.psi, size, sizes[peer])]
    by_ecdh = [peer for peer in party.peers if peer not in by_kkrt]
    advance = ecdh.counting(options.progress, size * (bool(by_kkrt) + bool(by_ecdh)) + sum(sizes.values()))
    pairs: dict[str, SortedRecords] = {}
    faults: list[PeerProtocolError] = []
    if by_ecdh:
        own = ecdh.OwnList(ids, met.domain, options.threads, scratch)
        mine, theirs = ecdh.exchange(party, by_ecdh, own, sizes, options.batch, scratch, advance)
        own.listed.close()
        pairs = {peer: ecdh.matched(mine[peer], theirs[peer], len(ids), peer, scratch) for peer in by_ecdh}
    if by_kkrt:
        found, faults = find_by_values(party, by_kkrt, ids, sizes, options.threads, scratch, advance)
        pairs |= found
    return {peer: pairs[peer] for peer in party.peers}, faults


def _send_matches(
    party: Party, peer: str, pairs: SortedRecords, size: int, key: bytes, batch: int, scratch: Scratch
) -> None:
    """Step 6: send a peer the common ids in the order of its list."""
    # another order would show how the other parties' lists are ordered
    in_their_order = scratch.sorted(ecdh.PAIR, "place", size, len(pairs))
    for part in pairs.parts():
        in_their_order.add(part)
    for part in in_their_order.pieces(batch):
        party.send(peer, Matches(Array.of(part["place"].copy()), Array.of(ecdh.to_bytes(part["value"]))))
    in_their_order.close()
    party.send(peer, OrderKey(ecdh.array_of(key)))


# ---------------------------------------------------------------- passive party


def align_passive(party: Party, ids: Ids, options: AlignmentOptions = _DEFAULTS) -> Alignment:
    """Align with the active party; result and errors are those of `align_active`."""
    (active,) = party.peers
    with Scratch(options.in_memory) as scratch:
        met = _introduce(party, ids, None, options, scratch)
        size = met.sizes[active]
        advance = ecdh.counting(options.progress, ecdh.bucket(len(ids)) + size)
        own: ecdh.OwnList | SecretOrder
        if _takes_kkrt(options.psi, size, ecdh.bucket(len(ids))):
            own = order = answer_values(party, active, ids, size, options.threads, scratch, advance)
            check = partial(confirm, own=order, active=active)
        else:
            own = ecdh.OwnList(ids, met.domain, options.threads, scratch)
            made = ecdh.answer_points(party, active, own, size, options.batch, scratch, advance)
            check = partial(ecdh.check_made, made=made, size=size, active=active, scratch=scratch)
        if options.result_to == "active":
            party.receive(active, AlignmentEnd)
            return _finish(party, ids, met, options, np.zeros(0, np.int64), None)
        pairs, key = _receive_matches(party, active, own, check, len(ids), scratch)
        common = ranked(ids, pairs, key, options.threads, scratch)
        verify(party, active, ids, pairs, common, options.threads, scratch)
        rows = rows_of(ids, common, lambda own: arranged(party, active, own, options.batch))
        return _finish(party, ids, met, options, rows, len(common))


def _receive_matches(
    party: Party,
    active: str,
    own: ecdh.OwnList | SecretOrder,
    check: Callable[[SortedRecords], None],
    n_ids: int,
    scratch: Scratch,
) -> tuple[SortedRecords, bytes]:
    """Step 6: return own common ids, of type `PAIR` and by number, and the key of the order; `check` checks values."""
    named = scratch.sorted(ecdh.THEIRS, "place", own.size, own.size)
    outside = twice = padding = False
    while not isinstance(message := party.receive(active, Matches, OrderKey), OrderKey):
        assert isinstance(message, Matches)
        place = view(message.places, np.int32, (None,), peer=active, what="Matches.places")
        if len(place) == 0 or len(named) + len(place) > own.size:
            raise PeerProtocolError(active, f"expected 1 to {own.size} places", at="Matches.places")
        outside |= bool(np.any(place < 0) or np.any(place >= own.size))
        values = ecdh.from_bytes(view(message.values, np.uint8, (len(place), 16), peer=active, what="Matches.values"))
        named.add(records(ecdh.THEIRS, value=values, place=np.clip(place, 0, own.size - 1)))
    key = ecdh.bytes_of(message.key, active, "OrderKey.key")
    if len(named) == 0:
        raise PeerProtocolError(active, f"expected common ids before OrderKey, got none - from {active}")
    # all parts are read before one is rejected: the time of an error shows nothing of where own ids lie
    pairs = scratch.sorted(ecdh.PAIR, "number", n_ids, n_ids)
    for part in named.parts() if not outside else ():
        if len(part):
            place = part["place"]
            number = own.numbers(slice(int(place[0]), int(place[-1]) + 1))[place - place[0]]
            twice |= bool(np.any(place[1:] == place[:-1]))
            padding |= bool(np.any(number >= n_ids))
            pairs.add(records(ecdh.PAIR, value=part["value"], place=place, number=np.minimum(number, n_ids - 1)))
    if outside or twice:
        raise PeerProtocolError(active, f"expected different places below {own.size}", at="Matches.places")
    if padding:
        raise PeerProtocolError(active, "expected no match of a random point", at="Matches.places")
    check(named)
    named.close()
    own.listed.close()
    return pairs, key


# ---------------------------------------------------------------- both parties


def _takes_kkrt(psi: Psi, active: int, passive: int) -> bool:
    """Return whether KKRT is used, given the buckets of the active and the passive party's lists."""
    long = max(active, passive) >= LONG and active <= oprf.MOST
    return psi == "kkrt" or (psi == "auto" and long)


def _introduce(party: Party, ids: Ids, salt: bytes | None, options: AlignmentOptions, scratch: Scratch) -> _Met:
    """Step 1: agree on options, exchange summaries of the lists, and log the run before any id is used.

    `salt` is the active party's, None at a passive one.
    """
    result_to, batch, log, leads = options.result_to, options.batch, options.log, salt is not None
    for name, given, allowed in (("result_to", result_to, ResultTo), ("psi", options.psi, Psi)):
        if given not in get_args(allowed):
            raise ConfigError(f"expected {name} of {', '.join(get_args(allowed))}, got {given!r}")
    if batch < 1:
        raise ConfigError(f"expected batch of at least 1, got {batch}")
    if len(ids) > ecdh.LARGEST:
        raise DataError(
            f"{party.name}: expected at most {ecdh.LARGEST} ids, got {len(ids)}", public="its table is too large"
        )
    if options.psi == "kkrt" and leads and len(ids) > oprf.MOST:
        raise DataError(
            f'{party.name}: expected at most {oprf.MOST} ids of the active party with psi "kkrt", got {len(ids)}; '
            'use "auto" or "ecdh"',
            public='its table is too large for psi "kkrt"',
        )
    agree(
        party,
        {
            "rules of equal ids": RULES, "normalise": list(ids.normalise), "on_duplicate": ids.on_duplicate,
            "psi": options.psi, "result_to": result_to, "batch": batch, "run log": options.commits and log is not None,
        },
    )  # fmt: skip
    # under the log's own key: partners see how many ids change from run to run, and nothing else
    commitment = np.zeros((0, 32), np.uint8)
    if log is not None and options.commits:
        commitment = ecdh.committed(ids, log.key, options.threads, scratch)
    # points of one run must not match those of another: the active party's salt is part of H's domain
    salted = None if salt is None else ecdh.array_of(salt)
    summary = ListSummary(ids.kind, ecdh.bucket(len(ids)), Array.of(commitment), salted)
    for peer in party.peers:
        party.send(peer, summary)
    sizes, theirs = {}, {}
    for peer in party.peers:
        answer = party.receive(peer, ListSummary)
        size = sizes[peer] = answer.size
        if not ecdh.SMALLEST <= size <= ecdh.LARGEST or ecdh.bucket(size) != size:
            expected = f"expected a bucket of at least {ecdh.SMALLEST}, got {size}"
            raise PeerProtocolError(peer, expected, at="ListSummary")
        if options.psi == "kkrt" and not leads and size > oprf.MOST:
            raise PeerProtocolError(peer, f"expected at most {oprf.MOST}, got {size}", at="ListSummary")
        theirs[peer] = view(answer.commitment, np.uint8, commitment.shape, peer=peer, what="ListSummary.commitment")
        if answer.kind != ids.kind:
            raise ConfigError(
                f"expected ids of one kind everywhere, got {ids.kind} at {party.name} and {clean(answer.kind, 20)} at "
                f"{peer}; restore padding zeros that one file has lost, convert the column of one of them, or set "
                "text = true under [align] in the job file"
            )
        if salt is None:
            if answer.salt is None:
                raise PeerProtocolError(peer, "expected a salt, got none", at="ListSummary")
            salt = ecdh.bytes_of(answer.salt, peer, "ListSummary.salt")
    assert salt is not None
    changed: dict[str, int | None] = {}
    if log is not None:
        for peer in party.peers:
            changed[peer] = log.start(party.job, peer, ecdh.bucket(len(ids)), sizes[peer], commitment, theirs[peer])
    return _Met(_DOMAIN + hashlib.sha256(party.job.encode() + b"\0" + salt).digest(), sizes, changed)


def _finish(
    party: Party,
    ids: Ids,
    met: _Met,
    options: AlignmentOptions,
    rows: Integers,
    n_common: int | None,
    pairwise: dict[str, int] | None = None,
) -> Alignment:
    """Record in the log, if there is one, that the run has ended; return what this party learned."""
    if options.log is not None:
        for peer, size in met.sizes.items():
            options.log.finish(party.job, peer, ecdh.bucket(len(ids)), size, n_common)
    return Alignment(rows, n_common, len(ids), ids.n_null, ids.n_repeated, met.sizes, pairwise or {}, met.changed)
