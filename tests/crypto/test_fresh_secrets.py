"""Every secret, pad, mask and tweak of `treaty.crypto`: it differs from draw to draw, and serves once.

`LINES` has a line for each place in the source that draws from the system's generator, a keystream, a cipher's streams
or a curve, or that derives a mask's key; a place without a line fails, and so does a line without its place.
"""

from __future__ import annotations

import ast
import secrets
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import treaty
from crypto.aggregation import summing
from crypto.lattice.oracle import SEED
from crypto.sealed.test_sealed import play
from crypto.sealed.used import Used
from crypto.sharing.servers import Play
from crypto.sums.test_sealed_answers import Attacker
from crypto.vectors.test_lattice_vectors import both
from treaty import GBDTClassifier
from treaty.crypto.additive import ciphers, key_proofs
from treaty.crypto.additive.ciphers import generate_key, generate_paillier_key
from treaty.crypto.keystream import CancellingMasks, FreshShares, Keystream, PairStreams, pair_keys
from treaty.crypto.lattice.linear_map import LinearMapClient, LinearMapServer
from treaty.crypto.lattice.ring import packed_words
from treaty.crypto.parameters import DEGREE, Field, SecretMatrix, choose
from treaty.crypto.payload import SumsBounds
from treaty.crypto.sharing import additive_routing, shamir_routing
from treaty.crypto.sharing.key_agreement import EphemeralKeys, RoundKeys, seal
from treaty.crypto.sharing.shamir import make_shares, open_shares, random_numbers
from treaty.crypto.sums import triple_sums
from treaty.crypto.sums.hidden_vectors import Fields
from treaty.crypto.sums.shared_sums import FurtherSums, ServedColumns, SharedSums
from treaty.crypto.transfer import extension, oprf, sodium
from treaty.crypto.transfer.aes import Streams
from treaty.crypto.transfer.comparison import _digits, draw_quads
from treaty.crypto.transfer.correlations import draw
from treaty.crypto.transfer.extension import STEP
from treaty.crypto.transfer.hidden_best import left_sums
from treaty.crypto.transfer.hidden_rows import SharedNodes, bytes_of
from treaty.crypto.transfer.ring_products import Giver, Holder, RingKind, plan_of
from treaty.crypto.transfer.shared_pieces import Pieces, _carry, _look_up, _range
from treaty.crypto.transfer.shared_products import make
from treaty.crypto.transfer.stock import Correlation, Drawn, Steps, Transfers, open_transfers
from treaty.errors import CryptoError

CRYPTO = Path(treaty.__file__).parent / "crypto"
TEST_KEY = 384  # bits: more than any repetition by chance, and made in milliseconds

Rows = Iterable[Any]


# ---------------------------------------------------------------- what the lines draw: rows that never come twice


def ou_key() -> Rows:
    key = generate_key(insecure_test_key_bits=TEST_KEY)
    return [*key.secret_numbers[:2], key.secret_numbers[-1], key.public.g, key.public.h]


def paillier_key() -> Rows:
    key = generate_paillier_key(insecure_test_key_bits=TEST_KEY)
    return [key.public.n, key.public.h]


def random_powers() -> Rows:
    """Return exponents by which others than the owner of a key hide messages, and by which answers are hidden."""
    sources = key_proofs.KeyRandomness(OU.public), key_proofs.Randomiser(OU.public, 1)
    return [row for source in sources for row in source.exponents(20)]


OU, PAILLIER = generate_key(insecure_test_key_bits=TEST_KEY), generate_paillier_key(insecure_test_key_bits=TEST_KEY)
P, Q, U, _, A = OU.secret_numbers
FIVES = np.full((20, 1), 5, np.uint64)


def proofs() -> Rows:
    """Return two of one key: every message and root is another, and of 128 square roots some are."""
    proof = key_proofs.prove_okamoto_uchiyama(OU.public.n, OU.public.g, OU.public.h, P, Q, A)
    first = 2 * key_proofs.parameters.KEY_PROOF_ROOTS
    return [*proof[:first], repr(proof[first:]).encode()]


def key_agreement() -> Rows:
    return EphemeralKeys("job", "p0", b"scope").advertise(summing.SIGNING[0])[:2]


def round_keys() -> Rows:
    return [RoundKeys("job", "p0", b"scope", {}).public]


def boxes() -> Rows:
    found = [seal(bytes(32), bytes(64), b"bound") for _ in range(9)]
    return [part for box in found for part in (box[:12], box[12:])]


def round_of_sums() -> Rows:
    """Return zeros under masks, and sealed shares of the seeds of these."""
    this_round = summing.make_round(4, length=8)
    made = summing.Sum(this_round, dict.fromkeys(this_round.roster, np.zeros(8, np.int64)))
    shares = [box for of in made.boxes.values() for box in of.values()]
    of_seeds = np.sum(list(made.inputs.values()), axis=0)  # pairs' masks cancel
    return [*(m._self_seed for m in made.members.values()), *shares, *_words(*made.inputs.values(), of_seeds)]


def pair_masks() -> Rows:
    """Return the keys and the masks of two vectors."""
    seeds = {peer: secrets.token_bytes(32) for peer in "abd"}
    rows = [key for nonce in (b"1", b"2") for of in pair_keys("c", seeds, seeds, nonce) for key in of]
    streams, vectors = PairStreams("c", seeds), np.zeros((2, 16), np.uint64)
    for nonce, vector in zip((bytes(16), bytes([1] * 16)), vectors, strict=True):
        streams.add(vector, nonce)
    return [*rows, *_words(vectors)]


def cancelling() -> Rows:
    masks = CancellingMasks("job", "sum", "c", {peer: secrets.token_bytes(32) for peer in "abd"})
    return [x for place in (0, 1) for purpose in ("one", "two") for x in masks.draw(5, 128, place, purpose)]


def dealer() -> Rows:
    of = triple_sums.TripleDealer(16, {"a": 8, "b": 8})
    masks = [triple_sums.vector_mask(of.asker_seed, number, 16) for number in (0, 1)]
    products = [triple_sums.product_mask(of.asker_seed, holder, number, 8) for holder in "ab" for number in (0, 1)]
    matrices = np.zeros((2, 8, 16), np.uint64)
    for matrix, seed in zip(matrices, of.holder_seeds.values(), strict=True):
        triple_sums.subtract_matrix_mask(matrix, seed, 0)
    return [of.asker_seed, *of.holder_seeds.values(), *_words(*masks, *products, matrices)]


def lattice() -> Rows:
    """Return queries of zeros, a hint, and answers to one query."""
    codes = np.zeros((1, 40), np.uint8)
    matrix = SecretMatrix.of_bins(codes, np.array([0, 2]))
    parameters = choose(70, 40, 1 << 22, 40)
    client = LinearMapClient(parameters, [Field(0, 1 << 16)], SEED, 40)
    server = LinearMapServer(parameters, matrix, SEED)
    hint = np.concatenate(list(server.hint(2)))
    queries = [client.begin(2) for _ in range(2)]
    words = [query.encrypt([np.zeros((1, 40), np.int32)] * 2) for query in queries]
    errors = [query._error(vector, block) for query in queries for vector in (0, 1) for block in (0, 1)]
    answers = [server.answer(words[0], queries[0].own, np.array([0])) for _ in range(2)]
    flat = [row for query in queries for row in (*query.secrets, *query.own.reshape(-1, query.own.shape[-1]))]
    of_words = np.concatenate(words).reshape(-1, 40)
    return [
        *server.random,
        *hint.reshape(-1, hint.shape[-1]),
        *flat,
        *errors,
        *of_words,
        *np.concatenate(answers)[:, 0],
    ]


def sealed_answers() -> Rows:
    attacker = Attacker()
    query = attacker.ask(2)
    opened = [attacker.open(query) for _ in range(2)]
    masks = np.concatenate(opened).astype(np.uint16)
    return [attacker.server._nonce, attacker.server.binding, *masks.reshape(-1, masks.shape[-1])]


def vector_answers() -> Rows:
    _, _, server, client = both(np.random.default_rng(0), columns=8)
    query = client.query(np.arange(3), np.zeros(3, np.int64))
    return [x for _ in range(2) for x in server.answer(query)[1]]


def compared_digits() -> Rows:
    """Return the sender's shares of digits whose differences from random ones are all 0: flips choose among eight."""
    ends = play(open_transfers(0), open_transfers(1))

    def unflipped(end: Transfers, count: int) -> Steps[Drawn]:
        yield from end.reserve(count)
        return end.drawn(count)

    for end in ends:
        end.draw_for = lambda choices, end=end: unflipped(end, len(choices))
    numbers = np.zeros((2048, 3), np.uint8)
    shares = play(*(_digits(end, numbers, numbers) for end in ends))
    return [row for of in shares for bits in of for row in np.packbits(bits[2048:]).reshape(-1, 32)]


def quads() -> Rows:
    """Return shares of the bits under which digits are joined."""
    ends = play(open_transfers(0), open_transfers(1))
    drawn = play(*(draw_quads(end, 2048) for end in ends))
    bits = [of >> np.uint32(place) & np.uint32(1) for of in drawn for place in range(1, 8)]
    return [row for of in bits for row in np.packbits(of.astype(np.uint8)).reshape(-1, 32)]


def triples() -> Rows:
    dealt = additive_routing.deal(640, 8)
    return [dealt[0].key, dealt[1].key, *_words(dealt[1].corrections)]


def shares_of_zeros() -> Rows:
    return _words(additive_routing.share_integers(np.zeros(64, np.int64)))


def routing() -> Rows:
    mask, keys = additive_routing.deal_mask(9, 3)
    zeros = np.zeros((9, 3), np.uint64)
    (_, seed), _ = Play([additive_routing.mask_rows(own, zeros, keys[own]) for own in (0, 1)]).results
    level, corrections = additive_routing.deal_level(mask, 2, 2, 8)
    leaves, products = additive_routing.deal_leaves(9, 2, 4)
    return [*keys, seed, *level, *leaves, *_words(mask, corrections, products)]


def fresh_shares() -> Rows:
    fresh, zeros = FreshShares(0, secrets.token_bytes(32)), np.zeros(128, np.uint8)
    bits = [np.packbits(fresh.bits(message, zeros)) for message in (3, 4)]
    return [*_words(*(fresh.numbers(message, np.zeros(16, np.uint64)) for message in (5, 6))), *bits]


def shamir() -> Rows:
    return [*_pairs(make_shares(np.zeros((9, 2), np.uint64), (1, 2, 3), 2)), *_pairs(random_numbers(9))]


def prepared() -> Rows:
    setting = shamir_routing.ServerSetting(servers=3, degree=1, bits=8)
    made = Play([shamir_routing.prepare(setting, own, 4) for own in range(3)])
    sent = [row for of in made.rounds[:1] for array in of.values() for row in _pairs(array)]
    masks = np.stack([numbers.take(4)[2] for numbers in made.results])
    return [*sent, *_pairs(open_shares(setting.points, masks))]


def extensions() -> Rows:
    receiver = extension.Receiver()
    sender = extension.Sender(receiver.offer)
    corrections = receiver.prepare(sender.points)
    sender.prepare(corrections)
    made = [receiver.extend(STEP, lane) for lane in (0, 1) for _ in range(2)]
    own = [sender.extend(STEP, np.zeros_like(made[0][0]), lane) for lane in (0, 1)]
    return [*own, *corrections.reshape(-1, 16), *_words(sender.delta, *(part for of in made for part in of))]


def correlations() -> Rows:
    """Return what senders offer in products, and the pads that hide it: one for each word of each bit."""
    ends = play(open_transfers(0), open_transfers(1))
    made = [of for _ in range(2) for of in play(*(draw(end, Correlation(3, 2, 2, 128), 40) for end in ends))]
    return _words(*(array for of in made for array in (of.numbers, of.last, of.pads, of.begun.message)))


RING = RingKind(64, 64, 64)


def ring_answers() -> Rows:
    """Return answers to one ciphertext: the same numbers under other floods and zeros."""
    plan = plan_of(RING)
    holder, nothing = Holder(plan.rings[0], bytes(32)), np.zeros((2, DEGREE), np.uint32)
    giver = Giver(holder.ring, bytes(32), holder.encrypt(0))
    sent = holder.encrypt(1, nothing)
    return [row for _ in range(2) for row in giver.answer(1, sent, nothing, nothing)]


def ring_secrets() -> Rows:
    return [np.stack(Holder(plan_of(RING).rings[0], bytes(32))._secret) for _ in range(3)]


def ring_encryptions() -> Rows:
    """Return encryptions of zero of one holder by the same public element: they differ by errors."""
    holder = Holder(plan_of(RING).rings[0], bytes(32))
    return [holder.encrypt(1) for _ in range(4)]


def ring_numbers() -> Rows:
    ends = play(open_transfers(0), open_transfers(1))
    play(*(make(end, RING, DEGREE) for end in ends))
    made = [part for end in ends for part in end.rings[RING].stock.draw(DEGREE)]
    return _words(*(getattr(of, name)[:512, :1] for of in made for name in ("r", "y", "given")))


def base_transfers() -> Rows:
    secret, offered = extension.base_offer()
    keys, points = extension.base_choose(offered, np.zeros(20, np.bool_))
    return [secret, offered, *keys, *points, *(sodium.random_scalar() for _ in range(9))]


def hidden_sides() -> Rows:
    """Return shares of sides by the party that splits all nodes of a level."""
    ends, zeros = play(open_transfers(0), open_transfers(1)), np.zeros(2048, np.uint8)
    both, found = [SharedNodes(end, 2048) for end in ends], []
    play(*(rows.multiplied(zeros, None, 1, (True, True)) for rows in both))
    for owner in (0, 1):
        sides = zeros.astype(np.uint32)
        shares = play(*(rows.side_of_rows(sides, (k == owner, k != owner)) for k, rows in enumerate(both)))
        found.append(np.packbits(shares[owner]).reshape(-1, 32))
    return list(np.concatenate(found))


def hidden_weights() -> Rows:
    ends = play(open_transfers(0), open_transfers(1))
    both = [SharedNodes(end, 512) for end in ends]
    play(*(rows.multiplied(np.zeros(512, np.uint8), None, 1, (True, True)) for rows in both))
    shares, _ = play(both[0].weight_of_rows(np.zeros((1, 2), np.int64)), both[1].weight_of_rows(None))
    return list(bytes_of(shares, 3).reshape(-1, 24))


def shared_carries() -> Rows:
    """Return one end's shares of carries, which are 0: of one half its own masks, of the other the other end's."""
    ends, zeros = play(open_transfers(0), open_transfers(1)), np.zeros(2048, np.uint8)
    shares = [play(*(_carry(end, zeros, of, role) for role, end in enumerate(ends)))[0] for of in (None, zeros)]
    return list(np.packbits(np.concatenate(shares)).reshape(-1, 32))


def shared_ranges() -> Rows:
    ends, zeros = play(open_transfers(0), open_transfers(1)), np.zeros(2048, np.uint8)
    (inside, above), _ = play(*(_range(end, zeros, zeros, role) for role, end in enumerate(ends)))
    return [*np.packbits(inside).reshape(-1, 32), *(above[::2] << 4 | above[1::2]).reshape(-1, 32)]


def shared_values() -> Rows:
    ends, nothing = play(open_transfers(0), open_transfers(1)), np.zeros(512, np.uint64)
    zeros = Pieces(np.zeros(16, np.uint64), np.zeros(16, np.uint64), 64)
    digits = nothing.astype(np.uint8)
    return _words(play(*(_look_up(end, digits, nothing, zeros, role) for role, end in enumerate(ends)))[0])


def shared_left_sums() -> Rows:
    ends, owners = play(open_transfers(0), open_transfers(1)), np.array([1, 2] * 20, np.uint8)
    left, numbers = np.zeros((40, 3, 3, 2), np.uint64), np.zeros(40, np.int64)
    return _words(play(*(left_sums(end, left, owners, numbers, role) for role, end in enumerate(ends)))[0])


def sums_of_shares() -> Rows:
    """Return the answerers' shares of sums of zeros."""
    codes, offsets = np.zeros((9, 1), np.uint8), np.array([0, 30], np.int32)
    ends = [SharedSums(SumsBounds(9, 1 << 16, 1 << 14), codes, offsets, [30], SEED) for _ in range(2)]
    play(*(end.exchange_hints() for end in ends))
    found = play(*(end.sums(np.zeros((9, 2, 2), np.uint64)) for end in ends))
    return [row for own, _ in found for row in own.reshape(-1, own.shape[-1])]


def further_answers() -> Rows:
    """Return a further party's answers to vectors of zeros, without a pad."""
    codes, offsets = np.zeros((9, 1), np.uint8), np.array([0, 30], np.int32)
    table = ServedColumns(SumsBounds(9, 1 << 16, 1 << 14), codes, offsets, SEED, 1, further=True)
    request = FurtherSums(table, 2, np.zeros(1, np.int32))
    request.add([np.zeros((2, packed_words(table.parameters, size)), np.uint32) for size in (9, DEGREE)] * 2)
    answers = request.answers(np.zeros(request.shape, np.uint16))
    return [row for of in answers for row in of.reshape(-1, of.shape[-1])]


def oblivious_values() -> Rows:
    receiver = oprf.OprfReceiver()
    sender = oprf.OprfSender(receiver.offer)
    receiver.accept(sender.points)
    codes = np.zeros((STEP, oprf.WORDS), np.uint64)
    made = [receiver.extend(codes, first) for first in (0, STEP)]
    rows = sender.extend(np.zeros_like(made[0][0]))
    return _words(sender._secret, rows, *(part for of in made for part in of))


def _words(*arrays: Any) -> Rows:
    """Return words of 64 bits, of which none may come again."""
    return list(np.concatenate([array.reshape(-1, 1) for array in arrays]))


def _pairs(array: Any) -> Rows:
    return list(array.reshape(-1, 2))


# ---------------------------------------------------------------- the lines


class Line(NamedTuple):
    """What to draw, and whether its bits are even."""

    draw: Callable[[], Rows]
    even: bool = True


NOT_SECRET = {
    "lattice/ring.public_ring_elements: Keystream": "expanded from a public seed, by everybody alike",
    "lattice/store.HintStore.new_hint: token_hex": "the name of a file",
    "lattice/store.HintStore._place: token_hex": "the name of a file",
    "sharing/key_agreement.is_mask_key: generate": "thrown away: it tries another's public key",
    "transfer/oprf.placed: randbits": "which items push others out: nobody else sees the table",
    "sharing/aggregator.Aggregator.open: mask_key": "a mask made before, to be taken off",
    "sharing/aggregator.Aggregator._keys_with: mask_key": "a mask made before, to be taken off",
    "sharing/secure_aggregation.Participant.unmask_for: mask_key": "the key of a mask made before, to be taken off",
}

LINES: dict[str, Line] = {
    "additive/ciphers._candidate: randbelow": Line(
        lambda: [ciphers._candidate(256, 3, 7)[0] for _ in range(9)], even=False
    ),
    "additive/ciphers._element_of_order: randbelow": Line(
        lambda: [ciphers._element_of_order(U, P * (P - 1), P * P) for _ in range(9)], even=False
    ),
    "additive/ciphers._random_prime: randbits": Line(
        lambda: [ciphers._random_prime(127) for _ in range(9)], even=False
    ),
    "additive/ciphers.generate_key: randbelow randbelow randbelow": Line(ou_key, even=False),
    "additive/ciphers.generate_paillier_key: randbelow": Line(paillier_key, even=False),
    "additive/key_proofs._square_roots: randbelow": Line(proofs, even=False),
    "additive/key_proofs.prove_okamoto_uchiyama: randbelow randbelow": Line(proofs, even=False),
    "additive/ciphers.OUPrivateKey.encrypt: Keystream": Line(lambda: OU.encrypt(FIVES, 1), even=False),
    "additive/ciphers.PaillierPrivateKey.encrypt: Keystream": Line(lambda: PAILLIER.encrypt(FIVES, 1), even=False),
    "additive/key_proofs.RandomPowers.exponents: Keystream": Line(random_powers, even=False),
    "additive/key_proofs._units: Keystream": Line(lambda: key_proofs._units(OU.public.n, 20), even=False),
    "sharing/key_agreement.EphemeralKeys.__init__: generate generate": Line(key_agreement, even=False),
    "sharing/key_agreement.seal: token_bytes": Line(boxes),
    "keystream.PairStreams.__init__: mask_key": Line(pair_masks),
    "keystream.pair_keys: mask_key mask_key": Line(pair_masks),
    "sharing/secure_aggregation.Participant.__init__: token_bytes": Line(round_of_sums),
    "sharing/secure_aggregation.Participant.masked_input: mask_key": Line(round_of_sums),
    "sharing/key_agreement.RoundKeys.__init__: generate": Line(round_keys, even=False),
    "keystream.Keystream.__init__: token_bytes": Line(lambda: [Keystream().raw(32) for _ in range(9)]),
    "lattice/linear_map.EncryptedQuery._error: Keystream": Line(lattice, even=False),
    "lattice/linear_map.LinearMapClient.begin: Keystream": Line(lattice, even=False),
    "lattice/linear_map.LinearMapServer._hint_of: Keystream": Line(lattice, even=False),
    "lattice/linear_map.PartialSums.answer: Keystream": Line(lattice, even=False),
    "transfer/sodium.random_scalar: randbelow": Line(base_transfers, even=False),
    "transfer/comparison.make_quads: Keystream": Line(quads),
    "transfer/correlations._begin: Keystream": Line(correlations),
    "transfer/hidden_rows.SharedNodes._side_of: Keystream": Line(hidden_sides),
    "transfer/shared_pieces._carry: Keystream": Line(shared_carries),
    "transfer/shared_pieces._range: Keystream": Line(shared_ranges),
    "transfer/hidden_best.left_sums: Keystream": Line(shared_left_sums),
    "transfer/ring_products.Giver.answer: Keystream": Line(ring_answers, even=False),
    "transfer/ring_products.Holder.__init__: Keystream": Line(ring_secrets, even=False),
    "transfer/ring_products.Holder.encrypt: Keystream": Line(ring_encryptions, even=False),
    "transfer/shared_products.make: Keystream": Line(ring_numbers),
    "sharing/additive_routing.deal: token_bytes token_bytes": Line(triples),
    "sharing/additive_routing._DealerNumbers.__init__: token_bytes token_bytes": Line(routing),
    "sharing/additive_routing._ServerNumbers.__init__: Keystream": Line(lambda: [*triples(), *routing()]),
    "sharing/additive_routing.mask_rows: token_bytes": Line(routing),
    "sharing/additive_routing.share_integers: Keystream": Line(shares_of_zeros),
    "keystream.FreshShares._stream: Keystream mask_key": Line(fresh_shares),
    "sharing/shamir.make_shares: random_numbers": Line(shamir, even=False),
    "sharing/shamir_routing.prepare: Keystream random_numbers": Line(prepared, even=False),
    "sharing/shamir.random_numbers: Keystream": Line(shamir, even=False),
    "sums/lattice_sums.LatticeSumsServer._masks: Keystream": Line(sealed_answers),
    "sums/lattice_sums.LatticeSumsServer.settle: token_bytes": Line(sealed_answers),
    "sums/shared_sums.FurtherSums.answers: Keystream": Line(further_answers),
    "sums/shared_sums.SharedSums.sums: Keystream": Line(sums_of_shares, even=False),
    "transfer/extension.base_choose: random_scalar": Line(base_transfers, even=False),
    "transfer/extension.base_offer: random_scalar": Line(base_transfers, even=False),
    "transfer/extension.Receiver.prepare: token_bytes": Line(extensions),
    "transfer/extension.Sender.__init__: token_bytes": Line(extensions),
    "transfer/extension._lanes: Streams Streams": Line(extensions),
    "transfer/oprf.OprfReceiver.accept: Streams Streams": Line(oblivious_values),
    "transfer/oprf.OprfSender.__init__: Streams token_bytes": Line(oblivious_values),
    "keystream.CancellingMasks.draw: Keystream": Line(cancelling, even=False),
    "sums/hidden_vectors.Fields.masks: randbits": Line(lambda: Fields.of(40, 1000, masks=1).masks(99), even=False),
    "sums/hidden_vectors.VectorServer.answer: Keystream": Line(vector_answers, even=False),
    "sums/triple_sums.TripleDealer.__init__: token_bytes token_bytes": Line(dealer),
    "sums/triple_sums._mask: mask_key": Line(dealer),
    "sums/triple_sums.subtract_matrix_mask.one: mask_key": Line(dealer),
}

DRAWING = frozenset(
    """token_bytes token_hex token_urlsafe randbelow randbits urandom getrandom generate generate_private_key
    Keystream Streams random_scalar random_numbers mask_key default_rng Generator RandomState SystemRandom Random
    randrange randint getrandbits shuffle permutation uuid4""".split()
)
"""Calls that draw or derive secrets. Those from `default_rng` on would be wrong here: no line has them."""


def places(module: Path) -> Iterator[str]:
    """Name the functions of a module that draw, and what from."""
    found = defaultdict[str, list[str]](list)

    def look(node: ast.AST, path: list[str]) -> None:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            if isinstance(child, ast.Call):
                name = ast.unparse(child.func).rpartition(".")[2]
                if name in DRAWING:
                    found[".".join(path)].append(name)
            look(child, [*path, child.name] if named else path)

    look(ast.parse(module.read_text(encoding="utf-8")), [])
    where = module.relative_to(CRYPTO).with_suffix("").as_posix()
    yield from (f"{where}.{path}: {' '.join(sorted(names))}" for path, names in found.items())


def test_every_place_that_draws_has_a_line() -> None:
    assert sorted(place for module in CRYPTO.rglob("*.py") for place in places(module)) == sorted(LINES | NOT_SECRET)


# ---------------------------------------------------------------- differs from draw to draw


def fresh(line: Line) -> bool:
    """Draw twice; tell whether no row comes again, and bits are even where they are to be."""
    rows = [_bytes(row) for _ in range(2) for row in line.draw()]
    bits = np.unpackbits(np.frombuffer(b"".join(rows), np.uint8))
    even = abs(bits.mean(dtype=np.float64) - 0.5) < 3 / np.sqrt(bits.size)  # six standard deviations
    return len(set(rows)) == len(rows) > 1 and (bool(even) or not line.even)


@pytest.mark.parametrize("draw", [compared_digits, hidden_weights, shared_values])
def test_masks_that_pads_give_differ_from_each_other(draw: Callable[[], Rows]) -> None:
    assert fresh(Line(draw))


def _bytes(row: Any) -> bytes:
    if isinstance(row, int):
        return row.to_bytes(128, "big", signed=True)
    return row if isinstance(row, bytes) else np.asarray(row).tobytes()


@pytest.mark.parametrize("place", LINES)
def test_draws_differ_from_each_other(place: str) -> None:
    assert fresh(LINES[place])


ONE_KEY = X25519PrivateKey.generate()
ALIKE: dict[str, Callable[..., Any]] = {
    "token_bytes": bytes,
    "randbelow": lambda bound: 12345 % bound,
    "randbits": lambda bits: (1 << bits) - 1,
    "Keystream": lambda key=None, number=0: Keystream(bytes(32), number),
    "Streams": lambda seeds, first=0: Streams(np.zeros_like(seeds), first),
    "generate": lambda: ONE_KEY,
    "random_scalar": lambda: np.full(32, 1, np.uint8),
    "random_numbers": lambda *shape, key=None: np.zeros((*shape, 2), np.uint64),
    "mask_key": lambda seed, nonce: bytes(32),
}
OWNERS = {"token_bytes": "secrets", "randbelow": "secrets", "randbits": "secrets",
          "random_numbers": "field", "generate": "X25519PrivateKey"}  # fmt: skip


@pytest.mark.parametrize("place", LINES)
def test_a_line_sees_draws_that_are_alike(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line fails where its place draws the same again and again."""
    where, _, names = place.partition(": ")
    module, _, path = where.partition(".")
    of = import_module(f"treaty.crypto.{module.replace('/', '.')}")
    for name in set(names.split()):
        owner = getattr(of, OWNERS.get(name, ""), of)
        draw = getattr(owner, name)

        def drawing(*args: Any, draw: Any = draw, name: str = name, **by_name: Any) -> Any:
            caller = sys._getframe(1).f_code
            parts = [part for part in caller.co_qualname.split(".") if not part.startswith("<")]
            here = caller.co_filename == of.__file__ and ".".join(parts) == path
            return (ALIKE[name] if here else draw)(*args, **by_name)

        monkeypatch.setattr(owner, name, drawing)
    try:
        assert not fresh(LINES[place])
    except CryptoError:
        pass  # a square of zero, say, is refused


# ---------------------------------------------------------------- is used once


def test_a_sealed_training_uses_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a keystream nor a seed; nor, under a key of the hash, a tweak, a row or a pad."""
    streams, seeds = list[bytes](), list[bytes]()
    used = Used(monkeypatch)
    of_stream, of_seeds = Keystream.__init__, Streams.__init__

    def stream(self: Keystream, key: bytes | None = None, number: int = 0) -> None:
        key = secrets.token_bytes(32) if key is None else key
        if sys._getframe(1).f_code.co_qualname != "public_ring_elements":  # whose seeds are public
            streams.append(key + number.to_bytes(8, "big"))
        of_stream(self, key, number)

    def of_trees(self: Streams, given: np.ndarray, first: int = 0) -> None:
        if sys._getframe(2).f_code.co_qualname == "Receiver.prepare":  # the sender has all but one of each tree, too
            seeds.extend(seed.tobytes() + first.to_bytes(8, "big") for seed in given)
        of_seeds(self, given, first)

    monkeypatch.setattr(Keystream, "__init__", stream)
    monkeypatch.setattr(Streams, "__init__", of_trees)
    rng = np.random.default_rng(3)
    X, y = rng.normal(size=(200, 3)), rng.integers(0, 2, 200)
    tables = {"a": pd.DataFrame(X[:, :1], columns=["x"]), "b": pd.DataFrame(X[:, 1:], columns=["y", "z"])}
    GBDTClassifier("secureboost", n_estimators=3, max_depth=3, max_bin=4, min_child_samples=3).fit(tables, y)
    for drawn in (streams, seeds):
        assert len(set(drawn)) == len(drawn) > 9
    assert len(used.hashed) == 4  # a sender's and a receiver's at either party
    used.assert_nothing_twice(least=1 << 14)
