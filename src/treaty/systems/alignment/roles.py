"""Alignment: private set intersection by commutative encryption over ristretto255 (ECDH-PSI).

Agrawal, Evfimievski, Srikant, "Information Sharing Across Private Databases", SIGMOD 2003, section 3, in an elliptic
curve group with hash-to-group (RFC 9496, RFC 9380 appendix B); the asymmetric form of Liang and Chawathe, 2004.

Roles: one active party, any number of passive ones, each with a column of ids. Output: of each party, the rows whose
ids all parties hold, in one common random order.

====  =================  =================  ==================================================  ===================
step  message            from -> to         content                                             protection
====  =================  =================  ==================================================  ===================
1     `ListSummary`      both               kind of ids, bucket of the set's size, commitment   TLS, keyed hash
                                            to the set; of the active party the salt
2     `BlindedPoints`    active -> passive  H(id)^a and random points, shuffled                 secret a, DDH
3     `RaisedPoints`     passive -> active  (H(id)^a)^b, in the order received                  secret b, DDH
4     `BlindedPoints`    passive -> active  H(id)^b and random points, shuffled                 secret b, DDH
5     -                  active             raises 4 to a, compares with 3
6     `Matches`          active -> passive  of each id that all hold: its place in 4, and the   TLS
                                            double-encrypted value, by place
      `OrderKey`         active -> passive  key of the common order                             TLS
7     `Challenge`        passive -> active  key of another order, commitment to SHA-256 of the  hash
                                            double-encrypted values in both orders
      `OrderDigest`      active -> passive  the same of the active party, which is checked      hash
      `SealOpening`      passive -> active  opens the commitment, which is checked              TLS
8     `Copies`           passive -> active  rows of each common id; with "expand" alone         TLS
      `JoinLayout`       active -> passive  where an id's rows go; with "expand" alone          TLS
      `AlignmentEnd`     active -> passive  in place of 6 to 8 when only the active party
                                            learns the result
====  =================  =================  ==================================================  ===================

H is hash-to-group under a domain of job and salt; a and b are fresh in every run. Points travel in batches of `BATCH`,
each answered before the next but one is sent, so neither side holds more than two; long lists lie in files. Of a
double-encrypted value 16 bytes are kept and sent: among 2^24 ids two agree in them with probability below 2^-78.

Adversary: honest but curious. What each party learns is in `disclosures`; what step 7 detects of a party that departs
from the protocol is in `common_order`.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from treaty.compute import Integers, pieces
from treaty.crypto.psi import ristretto
from treaty.data.ids import RULES, Ids, OnDuplicate
from treaty.data.large import IN_MEMORY, WORDS, Scratch, SortedRecords, records
from treaty.data.run_log import RunLog
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.messaging.agreement import agree
from treaty.messaging.messages import Array, Message, clean, view
from treaty.messaging.party import Party
from treaty.systems.alignment.blinded_lists import (
    LARGEST,
    SMALLEST,
    OwnList,
    array_of,
    bucket,
    bytes_of,
    committed,
    from_bytes,
    points_of,
    to_bytes,
    valid,
    values_of,
)
from treaty.systems.alignment.common_order import prove, ranked, verify
from treaty.systems.alignment.joined_rows import arrange, arranged, joined
from treaty.systems.alignment.matches import MINE, PAIR, THEIRS, VALUE, confirmed, held_by_all, matched

ResultTo = Literal["both", "active"]
Progress = Callable[[int, int], None]
"""Called with points done and points in all."""

BATCH = 1 << 14
"""Points per message: half a megabyte, about a second's work."""

CAUSES = (
    "the usual causes are padding zeros that one party's file lost, upper and lower case, hashes of another form or "
    "salt, another column than the partners', and tables of other people"
)

_DOMAIN = b"treaty-alignment-v1-ristretto255_XMD:SHA-512_R255MAP_RO_"


class ListSummary(Message):
    """Tells the kind of ids, the size's bucket and, by a commitment (empty without a log), whether ids changed."""

    kind: str
    size: int
    commitment: Array
    salt: Array | None = None


class BlindedPoints(Message):
    """Points uint8 (n, 32): own ids under the own key, and padding. Tell nothing without the key."""

    points: Array


class RaisedPoints(Message):
    """The receiver's points, raised to the sender's key as well, in the order they came."""

    points: Array


class Matches(Message):
    """Common ids: int32 places in the receiver's list, values uint8 (n, 16). Tell which of its ids all hold."""

    places: Array
    values: Array


class OrderKey(Message):
    """Key of the common order, uint8 (32,). Tells nothing."""

    key: Array


class AlignmentEnd(Message):
    """The active party has its result and keeps it. Tells nothing, not even whether any id is common."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """What a party learns from an alignment.

    `rows` are own rows in the common order, int64 (n,), none for a passive party where the active one alone learns;
    `n_common` of its `n_ids` distinct ids all hold, None where not learned. `n_null` own rows have no id, `n_repeated`
    one that an earlier row has. By peer: `sizes`, the bucket of its set's size; `pairwise`, at the active party alone,
    how many ids the two share; `changed`, with a log, at least how many of its ids differ from those of its most
    similar earlier run (None: there is no earlier run).
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
    """How to align; `result_to`, `batch` and whether ids are committed to must be the same at all parties.

    `result_to` is who learns which ids all hold; under "active" nobody else learns even how many, or that there are
    none. `batch` is points per message. `log` is where runs are noted, whose number it limits; None: they are neither
    counted nor limited. With `commits` the log holds commitments to the ids as well, else it counts alone. `progress`
    is called with points done and points in all. Lists longer than `in_memory` lie in temporary files
    (`treaty.data.large`).
    """

    result_to: ResultTo = "both"
    batch: int = BATCH
    log: RunLog | None = None
    commits: bool = True
    threads: int = 1
    progress: Progress | None = None
    in_memory: int = IN_MEMORY


_DEFAULTS = AlignmentOptions()


@dataclass(frozen=True, slots=True)
class _Lists:
    """The outcome of step 1: the own blinded list; `sizes` and `changed` of the peers' as in `Alignment`."""

    own: OwnList
    sizes: dict[str, int]
    changed: dict[str, int | None]


# ---------------------------------------------------------------- active party


def align_active(party: Party, ids: Ids, options: AlignmentOptions = _DEFAULTS) -> Alignment:
    """Align with every passive party, `party.peers`; all parties must have read their ids with the same options.

    Raises ConfigError when parties disagree on an option or on the kind of their ids, or a peer has reached its limit
    of runs; DataError, which tells counts only, when the parties have no id in common or "expand" gives too many rows
    (under "active" this party has then left the job in good order, so that its peers do not learn of it);
    PeerProtocolError when a peer sends something that is no point, or lists that do not fit together.
    """
    both, batch, threads = options.result_to == "both", options.batch, options.threads
    with Scratch(options.in_memory) as scratch:
        lists = _introduce(party, ids, secrets.token_bytes(32), options, scratch)
        mine, theirs = _exchange(party, lists, options, scratch)
        lists.own.close()
        pairs = {peer: matched(mine[peer], theirs[peer], len(ids), peer, scratch) for peer in party.peers}  # step 5
        pairwise = {peer: len(matches) for peer, matches in pairs.items()}
        pairs = held_by_all(pairs, len(ids), scratch)
        n_common = len(pairs[party.peers[0]])
        if not both:  # before anything that depends on the number of common ids
            for peer in party.peers:
                party.send(peer, AlignmentEnd())
        if n_common == 0:
            if not both:
                party.close()  # otherwise peers would be told of the error below
                _note_end(party, lists, options, 0)
            shared = ", ".join(f"{count} with {peer}" for peer, count in pairwise.items())
            raise DataError(
                f"{party.name}: expected ids that all parties hold, got none ({len(ids)} ids here, {shared}); {CAUSES}",
                public=f"the parties have no id in common; {CAUSES}",
            )
        key = secrets.token_bytes(32)
        common = ranked(ids, pairs[party.peers[0]], key, threads, scratch)
        for number, peer in enumerate(party.peers if both else ()):
            _send_matches(party, peer, pairs[peer], lists.sizes[peer], key, batch, scratch)
            if number:  # the same ids, with values under this peer's key
                common.close()
                common = ranked(ids, pairs[peer], key, threads, scratch)
            prove(party, peer, ids, pairs[peer], common, threads, scratch)
            pairs[peer].close()
        rows = _common_rows(ids, common, lambda own: arrange(party, own, batch) if both else (own, np.ones_like(own)))
        _note_end(party, lists, options, n_common)
    return _learned(ids, lists, rows, n_common, pairwise)


def _exchange(
    party: Party, lists: _Lists, options: AlignmentOptions, scratch: Scratch
) -> tuple[dict[str, SortedRecords], dict[str, SortedRecords]]:
    """Go through steps 2 to 4 with all peers at once; return, by peer, the own and its list double-encrypted.

    The next batch is sent before answers to the last are awaited, so that both sides compute at the same time.
    """
    own, sizes = lists.own, lists.sizes
    mine, theirs = (
        {peer: scratch.sorted(kind, "value", WORDS, max(own.size, size)) for peer, size in sizes.items()}
        for kind in (MINE, THEIRS)
    )
    parts = pieces(own.size, options.batch)
    their_parts = {peer: pieces(size, options.batch) for peer, size in sizes.items()}
    done, total = 0, own.size + sum(sizes.values())

    def advance(points: int) -> None:
        nonlocal done
        done += points
        if options.progress is not None:
            options.progress(done, total)

    def send(number: int) -> None:
        if number < len(parts):
            blinded = BlindedPoints(Array.of(own.blinded(parts[number])))
            for peer in party.peers:
                party.send(peer, blinded)
            advance(parts[number].stop - parts[number].start)

    send(0)
    for number in range(max(len(parts), *map(len, their_parts.values()))):
        send(number + 1)
        for peer in party.peers:
            if number < len(parts):
                raised = points_of(party.receive(peer, RaisedPoints).points, parts[number], peer, "RaisedPoints")
                valid(peer, "RaisedPoints", lambda raised=raised: ristretto.validate(raised, own.threads))  # type: ignore[misc]
                mine[peer].add(records(MINE, value=values_of(raised), number=own.numbers(parts[number])))
            if number < len(their_parts[peer]):
                part = their_parts[peer][number]
                raised = own.raised(party.receive(peer, BlindedPoints).points, part, peer)
                theirs[peer].add(records(THEIRS, value=values_of(raised), place=np.arange(part.start, part.stop)))
                advance(part.stop - part.start)
    return mine, theirs


def _send_matches(
    party: Party, peer: str, pairs: SortedRecords, size: int, key: bytes, batch: int, scratch: Scratch
) -> None:
    """Step 6: tell a peer the common ids in the order of its own list; any other would tell of the others' lists."""
    told = scratch.sorted(PAIR, "place", size, len(pairs))
    for part in pairs.parts():
        told.add(part)
    for part in told.pieces(batch):
        party.send(peer, Matches(Array.of(part["place"].copy()), Array.of(to_bytes(part["value"]))))
    told.close()
    party.send(peer, OrderKey(array_of(key)))


# ---------------------------------------------------------------- passive party


def align_passive(party: Party, ids: Ids, options: AlignmentOptions = _DEFAULTS) -> Alignment:
    """Align with the active party, `party.peers[0]`; result and errors as of `align_active`."""
    (active,) = party.peers
    with Scratch(options.in_memory) as scratch:
        lists = _introduce(party, ids, None, options, scratch)
        own, size = lists.own, lists.sizes[active]
        made = scratch.sorted(VALUE, "value", WORDS, size)
        parts, own_parts = pieces(size, options.batch), pieces(own.size, options.batch)
        done = 0
        for number in range(max(len(parts), len(own_parts))):
            if number < len(parts):  # step 3: the order is what links the answer with the active party's ids
                raised = own.raised(party.receive(active, BlindedPoints).points, parts[number], active)
                party.send(active, RaisedPoints(Array.of(raised)))
                made.add(records(VALUE, value=values_of(raised)))
                done += len(raised)
            if number < len(own_parts):  # step 4
                blinded = own.blinded(own_parts[number])
                party.send(active, BlindedPoints(Array.of(blinded)))
                done += len(blinded)
            if options.progress is not None:
                options.progress(done, size + own.size)
        if options.result_to == "active":
            party.receive(active, AlignmentEnd)
            _note_end(party, lists, options, None)
            return _learned(ids, lists, np.zeros(0, np.int64), None)
        pairs, key = _receive_matches(party, active, own, made, size, len(ids), scratch)
        common = ranked(ids, pairs, key, options.threads, scratch)
        verify(party, active, ids, pairs, common, options.threads, scratch)
        rows = _common_rows(ids, common, lambda own: arranged(party, active, own, options.batch))
        _note_end(party, lists, options, len(common))
    return _learned(ids, lists, rows, len(common))


def _receive_matches(
    party: Party, active: str, own: OwnList, made: SortedRecords, size: int, n_ids: int, scratch: Scratch
) -> tuple[SortedRecords, bytes]:
    """Step 6: return own common ids, of type `PAIR` and by number, and the key of the order."""
    told = scratch.sorted(THEIRS, "place", own.size, own.size)
    outside = False
    while not isinstance(answer := party.receive(active, Matches, OrderKey), OrderKey):
        assert isinstance(answer, Matches)
        place = view(answer.places, np.int32, (None,), peer=active, what="Matches.places")
        if len(place) == 0 or len(told) + len(place) > own.size:
            raise PeerProtocolError(active, f"expected 1 to {own.size} places - at Matches.places from {active}")
        outside |= bool(np.any(place < 0) or np.any(place >= own.size))
        values = from_bytes(view(answer.values, np.uint8, (len(place), 16), peer=active, what="Matches.values"))
        told.add(records(THEIRS, value=values, place=np.clip(place, 0, own.size - 1)))
    key = bytes_of(answer.key, active, "OrderKey.key")
    if len(told) == 0:
        raise PeerProtocolError(active, f"expected common ids before OrderKey, got none - from {active}")
    if outside:
        raise PeerProtocolError(active, f"expected different places below {own.size} - at Matches.places from {active}")
    return confirmed(told, own, made, size, n_ids, active, scratch), key


# ---------------------------------------------------------------- both


def _introduce(party: Party, ids: Ids, salt: bytes | None, options: AlignmentOptions, scratch: Scratch) -> _Lists:
    """Step 1: agree on options, exchange summaries of the lists, and log the run before any id is used.

    `salt` is the active party's, None at a passive one.
    """
    result_to, batch, log = options.result_to, options.batch, options.log
    if result_to not in get_args(ResultTo):
        raise ConfigError(f"expected result_to of {', '.join(get_args(ResultTo))}, got {result_to!r}")
    if batch < 1:
        raise ConfigError(f"expected batch of at least 1, got {batch}")
    if len(ids) > LARGEST:
        raise DataError(
            f"{party.name}: expected at most {LARGEST} ids, got {len(ids)}", public="its table is too large"
        )
    agree(
        party,
        {
            "rules of equal ids": RULES, "normalise": list(ids.normalise), "on_duplicate": ids.on_duplicate,
            "result_to": result_to, "batch": batch, "run log": options.commits and log is not None,
        },
    )  # fmt: skip
    commitment = np.zeros((0, 32), np.uint8)
    if log is not None and options.commits:
        commitment = committed(ids, log.key, options.threads, scratch)
    told_salt = None if salt is None else array_of(salt)
    summary = ListSummary(ids.kind, bucket(len(ids)), Array.of(commitment), told_salt)
    for peer in party.peers:
        party.send(peer, summary)
    sizes, theirs = {}, {}
    for peer in party.peers:
        answer = party.receive(peer, ListSummary)
        size = sizes[peer] = answer.size
        if not SMALLEST <= size <= LARGEST or bucket(size) != size:
            expected = f"expected a bucket of at least {SMALLEST}, got {size}"
            raise PeerProtocolError(peer, f"{expected} - at ListSummary from {peer}")
        theirs[peer] = view(answer.commitment, np.uint8, commitment.shape, peer=peer, what="ListSummary.commitment")
        if answer.kind != ids.kind:
            raise ConfigError(
                f"expected ids of one kind everywhere, got {ids.kind} at {party.name} and {clean(answer.kind, 20)} at "
                f"{peer}; convert the column of one of them, or, in a job, say text = true under [align] where a CSV "
                "file has the numbers"
            )
        if salt is None:
            if answer.salt is None:
                raise PeerProtocolError(peer, f"expected a salt, got none - at ListSummary from {peer}")
            salt = bytes_of(answer.salt, peer, "ListSummary.salt")
    assert salt is not None
    changed: dict[str, int | None] = {}
    if log is not None:
        for peer in party.peers:
            changed[peer] = log.start(party.job, peer, bucket(len(ids)), sizes[peer], commitment, theirs[peer])
    domain = _DOMAIN + hashlib.sha256(party.job.encode() + b"\0" + salt).digest()
    return _Lists(OwnList(ids, domain, options.threads, scratch), sizes, changed)


def _common_rows(ids: Ids, common: SortedRecords, lay_out: Callable[[Integers], tuple[Integers, Integers]]) -> Integers:
    """Return own rows in the common order: one of each id or, with "expand", all, laid out by their numbers."""
    if ids.on_duplicate != "expand":
        return common.column("row")
    number = common.column("number")
    return joined(ids, number, *lay_out(np.diff(ids.starts)[number]))


def _note_end(party: Party, lists: _Lists, options: AlignmentOptions, n_common: int | None) -> None:
    """Note in the log, if there is one, that the run is over, and how many common ids this party learned of."""
    if options.log is not None:
        for peer, size in lists.sizes.items():
            options.log.finish(party.job, peer, lists.own.size, size, n_common)


def _learned(
    ids: Ids, lists: _Lists, rows: Integers, n_common: int | None, pairwise: dict[str, int] | None = None
) -> Alignment:
    return Alignment(rows, n_common, len(ids), ids.n_null, ids.n_repeated, lists.sizes, pairwise or {}, lists.changed)


def disclosures(
    active: str, others: Sequence[str], result_to: ResultTo = "both", on_duplicate: OnDuplicate = "error"
) -> dict[str, list[str]]:
    """Say in words what each party learned beyond its own ids, by party; `active` is the active one."""
    sizes = "of each partner: how many distinct ids it has, to within an eighth, and of what kind they are"
    log = "with a run log: about by how many ids a partner's differ from the nearest it aligned with before"
    learned = {active: [f"which of its own ids each of {', '.join(others)} holds, row by row", sizes, log]}
    for name in others:
        found = (
            f"which of its own ids all parties hold (that {active} shares further ones with others it does not learn)"
        )
        learned[name] = [*([found] if result_to == "both" else []), sizes.replace("each partner", active), log]
    if on_duplicate == "expand" and result_to == "both":
        learned[active].append(f"of each common id: how many rows each of {', '.join(others)} has of it")
        for place, name in enumerate(others):
            parties = [list(part) for part in ([active, *others[:place]], others[place + 1 :]) if part]
            products = [" times ".join(f"those of {party}" for party in part) for part in parties]
            learned[name].append(f"of each common id: how many rows it has elsewhere ({'; '.join(products)})")
    return learned
