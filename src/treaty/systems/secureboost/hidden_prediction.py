"""Prediction that keeps each owner's decisions from the active party: one encrypted sum per row (Fed-EINI).

The active party encrypts, for each row and each passive party's split, what the margin gains if the row goes left
there (`hidden_terms`); passive parties replace the terms whose conditions the row does not meet by "gains nothing" and
add up the rest; the active party decrypts the sum. With several passive parties the terms and the sum so far pass from
one to the next, sealed end to end, the active party carrying them.

==============  =================  =======================================================================
message         from -> to         what it tells
==============  =================  =======================================================================
`Holding`       passive -> active  how many records it has; a key for the party before or after it
`Key`           active -> passive  the cipher's public key
`Station`       active -> passive  which of its records each term depends on, and the side; terms are in
                                   random order; how many come from, and go on to, other passive parties
`Weights`       active -> passive  encrypted gains of a batch of rows, and what the party before it sealed
`Sealed`        passive -> active  nothing: for the next passive party (AES-256-GCM)
`Totals`        last -> active     (encrypted) each row's sum over all terms, re-randomised
`Finish`        active -> passive  nothing more will be asked
==============  =================  =======================================================================

* *Active party*: each row's margin. By trying which leaves add up to it, it can find the decisions of small models:
  that is inherent in a margin one may see. Honest but curious: from gains of its own making (powers of two) it would
  read every decision, and with several passive parties it could put itself between two of them.
* *Passive party*: how many rows are predicted, its records in use, how they lie below each other in the trees, and how
  many splits of others lie below them. No margin, gain or decision of another party.
* *Together*: the active party and a later passive party learn an earlier one's decisions at the terms both work on,
  and its share of each margin.

Kept or not, every term costs the same products and is sent on alike, so time and size do not tell (but for the cache).

References
----------
Chen X. et al., Fed-EINI: An Efficient and Interpretable Inference Framework for Decision Tree Ensembles in Vertical
Federated Learning, IEEE Big Data 2021, arXiv 2105.09540.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from treaty.compute import pieces
from treaty.crypto import parameters
from treaty.crypto.additive.key_generation import generate_key
from treaty.crypto.additive.montgomery import from_words, to_words
from treaty.crypto.additive.okamoto_uchiyama import PrivateKey, PublicKey
from treaty.data.table import Table
from treaty.errors import CryptoError, PeerProtocolError
from treaty.messaging.agreement import OF_ONE_MODEL, Term, agree
from treaty.messaging.messages import Array, Message, view
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart
from treaty.systems.secureboost.hidden_sums import EXCHANGE_BYTES, Adder, Box, Words, fields_of
from treaty.systems.secureboost.hidden_terms import (
    FIELD_BITS,
    MOST_TERMS,
    Stop,
    Terms,
    find_conditions,
    fixed_point,
    make_route,
    make_terms,
    pack_gains,
    unpack_sums,
    weights,
)
from treaty.systems.vertical.decisions import Finish, check_present, decidable, used_records
from treaty.trees.ensemble import SplitTable

Progress = Callable[[int, int], None]

BATCH_BYTES = 16 << 20
"""Ciphertexts sent at a time; two batches are under way at once."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=MOST_TERMS)]


class Holding(Message):
    """How many records the party has, and a fresh X25519 key, uint8 (32,), for its neighbours in the chain."""

    records: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    exchange: Array


class Key(Message):
    """The Okamoto-Uchiyama public key: n, g, h as uint64 (3, words), and the bits of the order of h."""

    numbers: Array
    subgroup_bits: int


class Station(Message):
    """One party's share of the work on some outputs' trees.

    Its terms are first those that `passed` the party before it, then `fresh` ones; `onwards` bool (n_terms,) says which
    go on to the next party. Term int32, record int32 and left bool, (n_conditions,), are the conditions at own records,
    those of one term together; `before` and `after` are the neighbours' keys, uint8 (32,), or of no length at the ends
    of the chain.
    """

    number: _Count
    outputs: Annotated[int, msgspec.Meta(ge=1, le=64)]
    passed: _Count
    fresh: _Count
    onwards: Array
    term: Array
    record: Array
    left: Array
    before: Array
    after: Array


class Weights(Message):
    """Encrypted gains uint64 (n_rows, n_fresh, words) of the next rows; `box` uint8 is what the party before sealed."""

    ciphertexts: Array
    box: Array


class Sealed(Message):
    """For the next party: ciphertexts uint64 (n_rows, 1 + n_onwards, words) of the sum so far and terms, sealed."""

    box: Array


class Totals(Message):
    """Ciphertexts uint64 (n, words) of the rows' sums, as many rows in each as fit."""

    ciphertexts: Array


def hidden_active(
    party: Party,
    part: ModelPart,
    table: Table,
    *,
    key_bits: int | None = None,
    insecure_test_key_bits: int | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> NDArray[np.float64]:
    """Predict as the active party without seeing passive parties' decisions.

    Parameters
    ----------
    party : Party
        Its peers play `hidden_passive`.
    part : ModelPart
        The active party's own.
    table : Table
        The rows to predict, own columns.
    key_bits : int or None
        Size of the fresh Okamoto-Uchiyama key: 2048, 3072 (default) or 4096.
    insecure_test_key_bits : int or None
        Make a key of this size instead, at least 198. Tests only.
    threads : int, default 1
    progress : callable or None
        ``progress(rows_done, rows)``; rows count once for each group of outputs that share a plaintext.

    Returns
    -------
    float64 (n_rows, n_outputs)
        Margins: base plus the sum of leaf values, each rounded to `PRECISION_BITS` below the largest of the model (an
        error of at most n_rounds 2^-40 of the largest leaf value), added exactly.

    Raises
    ------
    DataError
        When an owner of splits is not among the peers.
    CryptoError
        When the key size is not accepted, or passive parties own more than 2^21 splits.
    PeerError
        When a peer is lost or sends something malformed.
    """
    forest = part.forest
    assert forest is not None, "the active party's part holds the trees"
    check_present(party, part, table)
    agree(party, _public(part, table), remedy=OF_ONE_MODEL)
    holding = {peer: party.receive(peer, Holding) for peer in party.peers}
    exchange = {
        peer: view(held.exchange, np.uint8, (EXCHANGE_BYTES,), peer=peer, what="Holding.exchange")
        for peer, held in holding.items()
    }
    trees = decidable(party, part, {peer: held.records for peer, held in holding.items()})
    used, own = used_records(trees, len(forest.sources)), forest.sources.index(party.name)
    decisions = part.splits.decide(table.matrix(), used[own], threads)
    bits = parameters.OU_DEFAULT_KEY_BITS if key_bits is None else key_bits
    key = generate_key(bits, insecure_test_key_bits=insecure_test_key_bits)
    for name, records in zip(forest.sources, used, strict=True):
        if name != party.name and len(records):
            party.send(name, _announce(key.public))

    n_outputs, exponent = forest.objective.n_outputs, fixed_point(trees)
    groups = pieces(n_outputs, fields_of(key.public)) if trees else []  # of outputs whose sums share plaintexts
    margins = np.full((table.n_rows, n_outputs), forest.objective.base_margin)
    for number, group in enumerate(groups):
        some = [tree for first in range(0, len(trees), n_outputs) for tree in trees[first : first + n_outputs][group]]
        terms = make_terms(some, own, used[own], exponent)
        asked = _Asked(terms, len(range(n_outputs)[group]), number, decisions, table.n_rows)
        chain = _send_stations(party, forest.sources, exchange, asked)
        for rows, sums in _add_up(party, key, chain, asked, threads):
            margins[rows, group] += np.ldexp(sums.astype(np.float64), -exponent)
            if progress is not None:
                progress(number * table.n_rows + rows.stop, len(groups) * table.n_rows)
    for peer in party.peers:
        party.send(peer, Finish())
    return margins


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is added up at once: the trees of some outputs, over all rows."""

    terms: Terms
    n_outputs: int
    number: int
    decisions: NDArray[np.uint8]  # the active party's, packed
    n_rows: int


class _Link(NamedTuple):
    name: str
    stop: Stop


def _public(part: ModelPart, table: Table) -> dict[str, Term]:
    return {"model": part.model_id, "rows to predict": table.n_rows, "he_inference": True}


def _announce(key: PublicKey) -> Key:
    return Key(Array.of(to_words([key.n, key.g, key.h], key.modulus.words)), key.subgroup_bits)


def _send_stations(
    party: Party, sources: Sequence[str], exchange: Mapping[str, NDArray[np.uint8]], asked: _Asked
) -> list[_Link]:
    """Tell passive parties their share of the work; return who works, in the order of the chain."""
    n_terms = len(asked.terms.node)
    if n_terms > MOST_TERMS:
        raise CryptoError(f"expected at most {MOST_TERMS} splits of passive parties, got {n_terms} - at prediction")
    conditions = find_conditions(asked.terms)
    chain = [_Link(sources[stop.source], stop) for stop in make_route(conditions, n_terms)]
    position = np.zeros(n_terms, np.int32)
    for place, (name, stop) in enumerate(chain):
        here = np.concatenate([stop.passed, stop.fresh])
        position[here] = np.arange(len(here))
        mine = conditions.source == stop.source
        before, after = (
            exchange[chain[at].name] if 0 <= at < len(chain) else np.zeros(0, np.uint8) for at in (place - 1, place + 1)
        )
        station = Station(
            number=asked.number,
            outputs=asked.n_outputs,
            passed=len(stop.passed),
            fresh=len(stop.fresh),
            onwards=Array.of(stop.onwards),
            term=Array.of(position[conditions.term[mine]]),
            record=Array.of(conditions.record[mine].astype(np.int32)),
            left=Array.of(conditions.left[mine]),
            before=Array.of(before),
            after=Array.of(after),
        )
        party.send(name, station)
    return chain


def _add_up(
    party: Party, key: PrivateKey, chain: Sequence[_Link], asked: _Asked, threads: int
) -> Iterator[tuple[slice, NDArray[np.int64]]]:
    """Yield the rows of each batch and their sums of leaf values, int64 (n, n_outputs), in fixed point."""
    words = key.public.modulus.words
    per_row = max(8 * words * len(asked.terms.node), 16 * len(asked.terms.left))

    def start(rows: slice) -> tuple[slice, NDArray[np.int64], list[Words]]:
        values, gains = weights(asked.terms, _sides(asked.decisions, rows))
        known = values.reshape(-1, asked.n_outputs, values.shape[1]).sum(axis=0).T
        fields = asked.terms.tree % asked.n_outputs
        encrypted = []
        for _, stop in chain:
            plaintexts = pack_gains(gains[stop.fresh], fields[stop.fresh], asked.n_outputs)
            ciphertexts = key.encrypt(plaintexts.reshape(-1, asked.n_outputs), threads)
            encrypted.append(ciphertexts.reshape(*plaintexts.shape[:2], words))
        if chain:
            party.send(chain[0].name, Weights(Array.of(encrypted.pop(0)), Array.of(np.zeros(0, np.uint8))))
        return rows, known, encrypted

    def finish(rows: slice, known: NDArray[np.int64], encrypted: list[Words]) -> tuple[slice, NDArray[np.int64]]:
        if not chain:
            return rows, known
        for (name, _), (following, _), ciphertexts in zip(chain[:-1], chain[1:], encrypted, strict=True):
            box = view(party.receive(name, Sealed).box, np.uint8, (None,), peer=name, what="Sealed.box")
            party.send(following, Weights(Array.of(ciphertexts), Array.of(box)))
        totals = party.receive(chain[-1].name, Totals)
        return rows, known + _open(key, totals, chain[-1].name, len(known), asked, threads)

    under_way = None
    for rows in pieces(asked.n_rows, max(8, BATCH_BYTES // per_row // 8 * 8)):
        started = start(rows)  # while passive parties work on the batch before
        if under_way is not None:
            yield finish(*under_way)
        under_way = started
    if under_way is not None:
        yield finish(*under_way)


def _open(key: PrivateKey, totals: Totals, peer: str, n_rows: int, asked: _Asked, threads: int) -> NDArray[np.int64]:
    """Decrypt the rows' sums of gains, int64 (n_rows, n_outputs)."""
    modulus = key.public.modulus
    rows_each = fields_of(key.public) // asked.n_outputs
    shape = (-(-n_rows // rows_each), modulus.words)
    ciphertexts = view(totals.ciphertexts, np.uint64, shape, peer=peer, what="Totals.ciphertexts")
    try:
        if not modulus.in_range(ciphertexts):
            raise CryptoError("expected ciphertexts in [1, n)")
        plaintexts = key.decrypt(ciphertexts, threads)
        return unpack_sums(plaintexts, n_rows, rows_each, asked.n_outputs, len(asked.terms.node))
    except (CryptoError, ValueError) as error:
        raise PeerProtocolError(peer, f"{error} - at Totals.ciphertexts from {peer}") from None


def _sides(packed: NDArray[np.uint8], rows: slice) -> NDArray[np.bool_]:
    """Unpack decisions on some rows, of which the first is a multiple of eight: bool (n_records, n)."""
    some = packed[:, rows.start // 8 : -(-rows.stop // 8)]
    return np.unpackbits(some, axis=1, count=rows.stop - rows.start).view(np.bool_)


# ---------------------------------------------------------------- the passive side


def hidden_passive(
    party: Party,
    part: ModelPart,
    table: Table,
    *,
    threads: int = 1,
    insecure_test_key_bits: int | None = None,
) -> None:
    """Answer the active party, `party.peers[0]`, which plays `hidden_active`.

    Parameters
    ----------
    party : Party
    part : ModelPart
        Own part.
    table : Table
        The rows to predict, own columns.
    threads : int, default 1
    insecure_test_key_bits : int or None
        Accept a key of at least this size. Tests only.

    Raises
    ------
    PeerError
        When the active party is lost or sends something malformed, or a key that is too short.
    """
    (lead,) = party.peers
    check_present(party, part, table)
    agree(party, _public(part, table), remedy=OF_ONE_MODEL)
    exchange = X25519PrivateKey.generate()
    public = np.frombuffer(exchange.public_key().public_bytes_raw(), np.uint8)
    party.send(lead, Holding(len(part.splits), Array.of(public)))
    adder: Adder | None = None
    while True:
        match party.receive(lead, Station if adder else Key, Finish):
            case Key() as key:
                adder = Adder(_read_key(key, lead, insecure_test_key_bits), threads)
            case Station() as station:
                assert adder is not None
                _work(party, _read_station(station, lead, adder, part.splits, exchange), adder, part.splits, table)
            case Finish():
                return


def _work(party: Party, share: _Share, adder: Adder, splits: SplitTable, table: Table) -> None:
    """Do this party's share for all rows, batch by batch."""
    (lead,) = party.peers
    records, own = np.unique(share.record, return_inverse=True)
    decisions = splits.decide(table.matrix(), records, adder.threads)
    first = 0
    while first < table.n_rows:
        sums, terms = _read_weights(party.receive(lead, Weights), share, adder, lead, first, table.n_rows)
        rows = slice(first, first + len(terms))
        kept = _kept(share, _sides(decisions, rows)[own])
        sums, passing = adder.select(sums, terms, kept, share.onwards, share.outputs)
        if share.after is None:
            rows_each = adder.fields // share.outputs
            party.send(lead, Totals(Array.of(adder.blind(sums, rows_each, FIELD_BITS * share.outputs))))
        else:
            following = np.concatenate([sums[:, None], passing], axis=1).reshape(-1, adder.words)
            box = share.after.seal(adder.blind(following).astype("<u8").tobytes(), f"{share.number}:{first}")
            party.send(lead, Sealed(Array.of(np.frombuffer(box, np.uint8))))
        first = rows.stop


@dataclass(frozen=True, slots=True)
class _Share:
    """A checked `Station`."""

    number: int
    outputs: int
    passed: int
    fresh: int
    onwards: NDArray[np.bool_]
    term: NDArray[np.int32]
    record: NDArray[np.int32]
    left: NDArray[np.bool_]
    before: Box | None
    after: Box | None


def _read_key(message: Key, lead: str, insecure_test_key_bits: int | None) -> PublicKey:
    numbers = view(message.numbers, np.uint64, (3, None), peer=lead, what="Key.numbers")
    n, g, h = from_words(numbers)
    try:
        key = PublicKey(n, g, h, message.subgroup_bits, insecure_test_key_bits=insecure_test_key_bits)
        fields_of(key)
    except CryptoError as error:
        raise PeerProtocolError(lead, f"{error} - at Key from {lead}") from None
    return key


def _read_station(station: Station, lead: str, adder: Adder, splits: SplitTable, exchange: X25519PrivateKey) -> _Share:
    n_terms = station.passed + station.fresh
    onwards = view(station.onwards, np.bool_, (n_terms,), peer=lead, what="Station.onwards")
    term = view(station.term, np.int32, (None,), peer=lead, what="Station.term")
    record = view(station.record, np.int32, (len(term),), peer=lead, what="Station.record")
    left = view(station.left, np.bool_, (len(term),), peer=lead, what="Station.left")
    boxes = []
    for what in ("before", "after"):
        key = view(getattr(station, what), np.uint8, (None,), peer=lead, what=f"Station.{what}")
        try:
            boxes.append(Box(exchange, key.tobytes(), sending=what == "after") if len(key) else None)
        except CryptoError as error:
            raise PeerProtocolError(lead, f"{error} - at Station.{what} from {lead}") from None
    before, after = boxes
    wrong = ""
    if station.outputs > adder.fields:
        wrong = f"expected at most {adder.fields} outputs, got {station.outputs}"
    elif len(term) and not 0 <= term.min() <= term.max() < n_terms:
        wrong = f"expected conditions of {n_terms} terms"
    elif len(record) and not 0 <= record.min() <= record.max() < len(splits):
        wrong = f"expected records below {len(splits)}"
    elif (station.passed and before is None) or (onwards.any() and after is None):
        wrong = "expected a neighbour where terms come from or go to"
    if wrong:
        raise PeerProtocolError(lead, f"{wrong} - at Station from {lead}")
    return _Share(
        station.number, station.outputs, station.passed, station.fresh, onwards, term, record, left, before, after
    )


def _read_weights(
    message: Weights, share: _Share, adder: Adder, lead: str, first: int, n_rows: int
) -> tuple[Words, Words]:
    """Return the sums so far (n, 1, words) and the terms (n, n_terms, words) of some of the rows from `first` on."""
    shape = (None, share.fresh, adder.words)
    fresh = view(message.ciphertexts, np.uint64, shape, peer=lead, what="Weights.ciphertexts")
    n, left = len(fresh), n_rows - first
    if not 0 < n <= left or (n % 8 and n != left):
        raise PeerProtocolError(lead, f"expected eights of the {left} rows left, got {n} - at Weights from {lead}")
    box = view(message.box, np.uint8, (None,), peer=lead, what="Weights.box")
    came = adder.one(n)
    if share.before is not None:
        try:
            content = share.before.open(box.tobytes(), f"{share.number}:{first}")
        except CryptoError as error:
            raise PeerProtocolError(lead, f"{error} - at Weights.box from {lead}") from None
        if len(content) != n * (1 + share.passed) * adder.words * 8:
            raise PeerProtocolError(lead, f"expected {n} rows, got {len(content)} bytes - at Weights.box from {lead}")
        came = np.frombuffer(content, "<u8").astype(np.uint64).reshape(n, 1 + share.passed, adder.words)
    if not adder.valid(fresh) or not adder.valid(came):
        raise PeerProtocolError(lead, f"expected ciphertexts in [1, n) - at Weights from {lead}")
    return came[:, :1], np.concatenate([came[:, 1:], fresh], axis=1)


def _kept(share: _Share, sides: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which terms' conditions rows meet, bool (n_terms, n_rows), from their sides at each condition."""
    kept = np.ones((share.passed + share.fresh, sides.shape[1]), np.bool_)
    starts = np.flatnonzero(np.diff(share.term, prepend=-1))
    if len(starts):
        kept[share.term[starts]] = np.logical_and.reduceat(sides == share.left[:, None], starts, axis=0)
    return kept
