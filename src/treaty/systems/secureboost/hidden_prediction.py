"""Prediction that keeps each owner's decisions from the active party: one encrypted sum per row (Fed-EINI).

The active party encrypts, for each row and each passive party's split, what the margin gains if the row goes left
there (`hidden_sums`); passive parties replace the terms whose conditions the row does not meet by encryptions of no
gain and add up the rest; the active party decrypts the sum. With several passive parties, terms and the sum so far pass
from one to the next, encrypted between these two, and the active party carries them.

* *Active party*: learns each row's margin. By trying which leaves add up to it, it can find the decisions of small
  models, as anyone who sees a margin can. It is honest but curious: with gains of its own making (powers of two) it
  would read every decision, and with several passive parties it could put itself between two of them.
* *Passive party*: learns how many rows are predicted, its records in use, how they lie below each other in the trees,
  and how many splits of others lie below them. No margin, gain or decision of another party.
* *Together*: the active party and a later passive party learn an earlier one's decisions at the terms both work on,
  and its share of each margin.

Kept or not, every term costs the same products and is sent on alike, so time and size (but for the processor's cache)
do not reveal which were kept.

Chen X. et al., Fed-EINI: An Efficient and Interpretable Inference Framework for Decision Tree Ensembles in Vertical
Federated Learning, IEEE Big Data 2021, arXiv 2105.09540.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from treaty.crypto import parameters
from treaty.crypto.additive.ciphers import OUPrivateKey, OUPublicKey, generate_key
from treaty.data.table import Table
from treaty.errors import CryptoError, PeerProtocolError
from treaty.machine.arrays import pieces
from treaty.messaging.exchanges import OF_ONE_MODEL, Term, agree
from treaty.messaging.messages import Array, Arrays, Message, leaks, pack, unpack, view
from treaty.messaging.party import Party
from treaty.models.trees import decide, used_records
from treaty.systems.secureboost import hidden_sums
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import RoleInput
from treaty.systems.vertical.prediction import Finish, check_present, decidable
from treaty.trees.ensemble import SplitTable

# Ciphertexts sent at a time; two batches are under way at once
BATCH_BYTES = 16 << 20

_Count = Annotated[int, msgspec.Meta(ge=0, le=hidden_sums.MOST_TERMS)]
# The passive parties that terms pass, and each one's share of the work
_Chain = Sequence[tuple[str, hidden_sums.Stop]]


@leaks("how many splits the sender keeps; a public key", "control")
class ChainKey(Message):
    """How many records the party has, and a fresh X25519 key, uint8 (32,), for its neighbours in the chain."""

    records: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    exchange: Array


@leaks("the cipher's public key", "control")
class PredictionKey(Message):
    """The Okamoto-Uchiyama public key, uint64 (numbers, words) and int64 (1,); see `OUPublicKey.from_payload`."""

    payload: Arrays


@leaks(
    "which of its splits the trees use, how they lie below each other, how many splits of others lie below them",
    "exact",
)
class Station(Message):
    """One party's share of the work on the trees of group `number` of outputs.

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


@leaks("how many rows are predicted", "encrypted")
class EncryptedGains(Message):
    """Encrypted gains uint64 (n_rows, n_fresh, words) of the next rows; `box` uint8 is what the party before sealed."""

    ciphertexts: Array
    box: Array


@leaks("what the next passive party alone can open", "encrypted")
class SealedTerms(Message):
    """For the next party: ciphertexts uint64 (n_rows, 1 + n_onwards, words) of the sum so far and terms, sealed."""

    box: Array


@leaks("each row's sum of leaf weights, from which decisions of small models follow", "exact")
class EncryptedTotals(Message):
    """Ciphertexts uint64 (n, words) of the rows' sums, as many rows in each as fit."""

    ciphertexts: Array


# ---------------------------------------------------------------- active party


def hidden_active(inputs: RoleInput[SecureBoost]) -> NDArray[np.float64]:
    """Return margins, float64 (n_rows, n_outputs), of the role's rows without seeing passive parties' decisions.

    A margin is the base plus the sum of leaf values, each rounded to `PRECISION_BITS` below the largest of the model
    (an error of at most n_rounds 2^-40 of the largest leaf value), added exactly. The options give the size of the
    fresh Okamoto-Uchiyama key: `key_bits`, or `insecure_test_key_bits` (at least 198) in tests. Observers are shown
    rows done, once for each group of outputs that share a plaintext. Raises CryptoError if the key size is not
    accepted, or passive parties own more than 2^21 splits.
    """
    party, part, table = inputs.party, inputs.part, inputs.rows.table
    steps = partial(inputs.observers.set_up, "predicting")
    forest = part.grown
    _agree(inputs)
    keys = {peer: party.receive(peer, ChainKey) for peer in party.peers}
    exchange = {
        peer: view(key.exchange, np.uint8, (hidden_sums.EXCHANGE_BYTES,), peer=peer, what="ChainKey.exchange")
        for peer, key in keys.items()
    }
    trees = decidable(party, part, {peer: key.records for peer, key in keys.items()})
    used, own = used_records(trees, len(forest.sources)), forest.sources.index(party.name)
    decisions = decide(part.splits, table, used[own], inputs.threads)
    bits = parameters.OU_DEFAULT_KEY_BITS if inputs.options.key_bits is None else inputs.options.key_bits
    key = generate_key(bits, insecure_test_key_bits=inputs.options.insecure_test_key_bits)
    for name, records in zip(forest.sources, used, strict=True):
        if name != party.name and len(records):
            party.send(name, PredictionKey(pack(key.public.to_payload())))

    n_outputs, exponent = forest.objective.n_outputs, hidden_sums.fixed_point(trees)
    # of outputs whose sums share plaintexts
    groups = pieces(n_outputs, hidden_sums.fields_of(key.public)) if trees else []
    margins = np.full((table.n_rows, n_outputs), forest.objective.base_margins)
    for number, group in enumerate(groups):
        some = [tree for first in range(0, len(trees), n_outputs) for tree in trees[first : first + n_outputs][group]]
        terms = hidden_sums.make_terms(some, own, used[own], exponent)
        outputs = _OutputGroup(terms, len(range(n_outputs)[group]), number, decisions, table.n_rows)
        chain = _send_stations(party, forest.sources, exchange, outputs)
        for rows, sums in _add_up(party, key, chain, outputs, inputs.threads):
            margins[rows, group] += np.ldexp(sums.astype(np.float64), -exponent)
            steps(number * table.n_rows + rows.stop, len(groups) * table.n_rows)
    for peer in party.peers:
        party.send(peer, Finish())
    return margins


@dataclass(frozen=True, slots=True)
class _OutputGroup:
    """Outputs whose sums share plaintexts: their trees' terms, over all rows."""

    terms: hidden_sums.TreeTerms
    n_outputs: int
    number: int
    decisions: NDArray[np.uint8]  # the active party's, packed
    n_rows: int


def _agree(inputs: RoleInput[SecureBoost]) -> None:
    part, table = inputs.part, inputs.rows.table
    check_present(inputs.party, part, table)
    terms: dict[str, Term] = {"model": part.model_id, "rows to predict": table.n_rows, "he_inference": True}
    agree(inputs.party, terms, remedy=OF_ONE_MODEL)


def _send_stations(
    party: Party, sources: Sequence[str], exchange: Mapping[str, NDArray[np.uint8]], group: _OutputGroup
) -> _Chain:
    """Send passive parties their share of the work; return who works, in the order of the chain."""
    n_terms = len(group.terms.node)
    if n_terms > hidden_sums.MOST_TERMS:
        raise CryptoError(
            f"expected at most {hidden_sums.MOST_TERMS} splits of passive parties, got {n_terms} - at prediction"
        )
    conditions = hidden_sums.find_conditions(group.terms)
    chain = [(sources[stop.source], stop) for stop in hidden_sums.make_route(conditions, n_terms)]
    position = np.zeros(n_terms, np.int32)
    for place, (name, stop) in enumerate(chain):
        here = np.concatenate([stop.passed, stop.fresh])
        position[here] = np.arange(len(here))
        mine = conditions.source == stop.source
        before, after = (
            exchange[chain[at][0]] if 0 <= at < len(chain) else np.zeros(0, np.uint8) for at in (place - 1, place + 1)
        )
        station = Station(
            number=group.number,
            outputs=group.n_outputs,
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
    party: Party, key: OUPrivateKey, chain: _Chain, group: _OutputGroup, threads: int
) -> Iterator[tuple[slice, NDArray[np.int64]]]:
    """Yield the rows of each batch and their sums of leaf values, int64 (n, n_outputs), in fixed point."""
    words = key.public.modulus.words
    per_row = max(8 * words * len(group.terms.node), 16 * len(group.terms.left))

    def start(rows: slice) -> tuple[slice, NDArray[np.int64], list[hidden_sums.Words]]:
        values, gains = hidden_sums.values_and_gains(group.terms, _sides(group.decisions, rows))
        known = values.reshape(-1, group.n_outputs, values.shape[1]).sum(axis=0).T
        fields = group.terms.tree % group.n_outputs
        encrypted = []
        for _, stop in chain:
            plaintexts = hidden_sums.pack_gains(gains[stop.fresh], fields[stop.fresh], group.n_outputs)
            ciphertexts = key.encrypt(plaintexts.reshape(-1, group.n_outputs), threads)
            encrypted.append(ciphertexts.reshape(*plaintexts.shape[:2], words))
        if chain:
            party.send(chain[0][0], EncryptedGains(Array.of(encrypted.pop(0)), Array.of(np.zeros(0, np.uint8))))
        return rows, known, encrypted

    def finish(
        rows: slice, known: NDArray[np.int64], encrypted: list[hidden_sums.Words]
    ) -> tuple[slice, NDArray[np.int64]]:
        if not chain:
            return rows, known
        for (name, _), (following, _), ciphertexts in zip(chain[:-1], chain[1:], encrypted, strict=True):
            box = view(party.receive(name, SealedTerms).box, np.uint8, (None,), peer=name, what="SealedTerms.box")
            party.send(following, EncryptedGains(Array.of(ciphertexts), Array.of(box)))
        last, _ = chain[-1]
        totals = party.receive(last, EncryptedTotals)
        return rows, known + _open(key, totals, last, len(known), group, threads)

    under_way = None  # a batch that passive parties work on while the next is encrypted
    for rows in pieces(group.n_rows, max(8, BATCH_BYTES // per_row // 8 * 8)):
        started = start(rows)
        if under_way is not None:
            yield finish(*under_way)
        under_way = started
    if under_way is not None:
        yield finish(*under_way)


def _open(
    key: OUPrivateKey, totals: EncryptedTotals, peer: str, n_rows: int, group: _OutputGroup, threads: int
) -> NDArray[np.int64]:
    """Decrypt the rows' sums of gains, int64 (n_rows, n_outputs)."""
    modulus = key.public.modulus
    rows_each = hidden_sums.fields_of(key.public) // group.n_outputs
    shape = (-(-n_rows // rows_each), modulus.words)
    ciphertexts = view(totals.ciphertexts, np.uint64, shape, peer=peer, what="EncryptedTotals.ciphertexts")
    try:
        if not modulus.in_range(ciphertexts):
            raise CryptoError("expected ciphertexts in [1, n)")
        plaintexts = key.decrypt(ciphertexts, threads)
        return hidden_sums.unpack_sums(plaintexts, n_rows, rows_each, group.n_outputs, len(group.terms.node))
    except (CryptoError, ValueError) as error:
        raise PeerProtocolError(peer, str(error), at="EncryptedTotals.ciphertexts") from None


def _sides(packed: NDArray[np.uint8], rows: slice) -> NDArray[np.bool_]:
    """Unpack decisions on some rows, of which the first is a multiple of eight: bool (n_records, n)."""
    some = packed[:, rows.start // 8 : -(-rows.stop // 8)]
    return np.unpackbits(some, axis=1, count=rows.stop - rows.start).view(np.bool_)


# ---------------------------------------------------------------- passive party


def hidden_passive(inputs: RoleInput[SecureBoost]) -> None:
    """Answer the active party, which plays `hidden_active` on the same rows.

    A key that is shorter than accepted is refused; `insecure_test_key_bits` lets shorter ones pass in tests.
    """
    party, part, table = inputs.party, inputs.part, inputs.rows.table
    (active,) = party.peers
    _agree(inputs)
    exchange = X25519PrivateKey.generate()
    public = np.frombuffer(exchange.public_key().public_bytes_raw(), np.uint8)
    party.send(active, ChainKey(len(part.splits), Array.of(public)))
    adder: hidden_sums.Adder | None = None
    last, outputs = -1, 0
    while True:
        match party.receive(active, Station if adder else PredictionKey, Finish):
            case PredictionKey() as sent:
                payload = unpack(sent.payload, active, "PredictionKey")
                try:
                    key = OUPublicKey.from_payload(payload, inputs.options.insecure_test_key_bits)
                    adder = hidden_sums.Adder(key, inputs.threads)
                except CryptoError as error:
                    raise PeerProtocolError(active, str(error), at="PredictionKey") from None
            case Station() as station:
                assert adder is not None
                outputs += station.outputs
                if station.number <= last or outputs > part.trees_a_round:
                    most = f"sums of {part.trees_a_round} outputs for every row, each once"
                    raise PeerProtocolError(active, f"expected {most}", at="Station")
                last = station.number
                _StationWork(station, active, adder, part.splits, exchange).do(party, part.splits, table)
            case Finish():
                return


class _StationWork:
    """A passive party's share of the work at one `Station`, whose arrays and neighbours' keys are checked first."""

    def __init__(
        self, station: Station, active: str, adder: hidden_sums.Adder, splits: SplitTable, exchange: X25519PrivateKey
    ) -> None:
        self._station, self._active, self._adder = station, active, adder
        n_terms = station.passed + station.fresh
        self._onwards = view(station.onwards, np.bool_, (n_terms,), peer=active, what="Station.onwards")
        self._term = term = view(station.term, np.int32, (None,), peer=active, what="Station.term")
        self._record = record = view(station.record, np.int32, (len(term),), peer=active, what="Station.record")
        self._left = view(station.left, np.bool_, (len(term),), peer=active, what="Station.left")
        boxes = []
        for what in ("before", "after"):
            key = view(getattr(station, what), np.uint8, (None,), peer=active, what=f"Station.{what}")
            try:
                boxes.append(hidden_sums.Box(exchange, key.tobytes(), sending=what == "after") if len(key) else None)
            except CryptoError as error:
                raise PeerProtocolError(active, str(error), at=f"Station.{what}") from None
        self._before, self._after = boxes
        wrong = ""
        if station.outputs > adder.fields:
            wrong = f"expected at most {adder.fields} outputs, got {station.outputs}"
        elif len(term) and not 0 <= term.min() <= term.max() < n_terms:
            wrong = f"expected conditions of {n_terms} terms"
        elif len(record) and not 0 <= record.min() <= record.max() < len(splits):
            wrong = f"expected records below {len(splits)}"
        elif (station.passed and self._before is None) or (self._onwards.any() and self._after is None):
            wrong = "expected a neighbour where terms come from or go to"
        if wrong:
            raise PeerProtocolError(active, wrong, at="Station")

    def do(self, party: Party, splits: SplitTable, table: Table) -> None:
        """Keep or replace the terms of all rows, batch by batch, and send on what comes out."""
        active, adder, outputs, number = self._active, self._adder, self._station.outputs, self._station.number
        records, own = np.unique(self._record, return_inverse=True)
        decisions = decide(splits, table, records, adder.threads)
        first = 0
        while first < table.n_rows:
            sums, terms = self._read_gains(party.receive(active, EncryptedGains), first, table.n_rows)
            rows = slice(first, first + len(terms))
            kept = self._kept(_sides(decisions, rows)[own])
            sums, passing = adder.select(sums, terms, kept, self._onwards, outputs)
            if self._after is None:
                totals = adder.blind(sums, adder.fields // outputs, bits=hidden_sums.FIELD_BITS * outputs)
                party.send(active, EncryptedTotals(Array.of(totals)))
            else:
                following = np.concatenate([sums[:, None], passing], axis=1).reshape(-1, adder.words)
                box = self._after.seal(adder.blind(following, full=True).astype("<u8").tobytes(), f"{number}:{first}")
                party.send(active, SealedTerms(Array.of(np.frombuffer(box, np.uint8))))
            first = rows.stop

    def _read_gains(
        self, message: EncryptedGains, first: int, n_rows: int
    ) -> tuple[hidden_sums.Words, hidden_sums.Words]:
        """Return the sums so far (n, 1, words) and the terms (n, n_terms, words) of some rows from `first` on."""
        active, adder, passed = self._active, self._adder, self._station.passed
        shape = (None, self._station.fresh, adder.words)
        fresh = view(message.ciphertexts, np.uint64, shape, peer=active, what="EncryptedGains.ciphertexts")
        n, left = len(fresh), n_rows - first
        if not 0 < n <= left or (n % 8 and n != left):
            wrong = f"expected a multiple of 8 or all of the {left} rows left, got {n}"
            raise PeerProtocolError(active, wrong, at="EncryptedGains")
        box = view(message.box, np.uint8, (None,), peer=active, what="EncryptedGains.box")
        came = np.repeat(adder.one[None], n, axis=0)
        if self._before is not None:
            try:
                content = self._before.open(box.tobytes(), f"{self._station.number}:{first}")
                if len(content) != n * (1 + passed) * adder.words * 8:
                    raise CryptoError(f"expected {n} rows, got {len(content)} bytes")
            except CryptoError as error:
                raise PeerProtocolError(active, str(error), at="EncryptedGains.box") from None
            came = np.frombuffer(content, "<u8").astype(np.uint64).reshape(n, 1 + passed, adder.words)
        if not adder.valid(fresh) or not adder.valid(came):
            raise PeerProtocolError(active, "expected ciphertexts in [1, n), prime to n", at="EncryptedGains")
        return came[:, :1], np.concatenate([came[:, 1:], fresh], axis=1)

    def _kept(self, sides: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which terms' conditions rows meet, bool (n_terms, n_rows), from their sides at each condition."""
        kept = np.ones((len(self._onwards), sides.shape[1]), np.bool_)
        starts = np.flatnonzero(np.diff(self._term, prepend=-1))
        if len(starts):
            kept[self._term[starts]] = np.logical_and.reduceat(sides == self._left[:, None], starts, axis=0)
        return kept
