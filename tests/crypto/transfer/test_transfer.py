"""Transfers against their definitions: who has what, and that the other key, bit or row is not there."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.sealed.watching import play
from treaty.crypto.transfer import aes, extension, sodium
from treaty.crypto.transfer.extension import QUICK, SHORT, STEP, Receiver, SeedTrees, Sender
from treaty.crypto.transfer.stock import open_transfers
from treaty.errors import CryptoError


def words(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 64, (count, 2), dtype=np.uint64)


def unpacked(packed: np.ndarray, count: int) -> np.ndarray:
    return np.unpackbits(packed.view(np.uint8), bitorder="little")[:count].astype(bool)


# ---------------------------------------------------------------- points


def test_multiples_of_one_point_are_those_of_many() -> None:
    scalars = np.stack([sodium.random_scalar() for _ in range(5)])
    found = sodium.multiples(sodium.GENERATOR, scalars)
    expected = [sodium.multiply(sodium.GENERATOR[None], scalar)[0] for scalar in scalars]
    assert np.array_equal(found, expected)


def test_shifting_there_and_back() -> None:
    points = sodium.from_uniform(np.random.default_rng(0).integers(0, 256, (4, 64), dtype=np.uint8))
    there = sodium.shifted(points, sodium.GENERATOR)
    assert not np.array_equal(there, points)
    assert np.array_equal(sodium.shifted(there, sodium.GENERATOR, back=True), points)
    two = sodium.multiples(sodium.GENERATOR, np.eye(1, 32, dtype=np.uint8) * 2)
    assert np.array_equal(sodium.shifted(sodium.GENERATOR[None], sodium.GENERATOR), two)


# ---------------------------------------------------------------- base transfers


@settings(max_examples=10, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=9))
def test_receiver_has_the_chosen_key_of_each_pair(choices: list[bool]) -> None:
    secret, offered = extension.base_offer()
    keys, points = extension.base_choose(offered, np.array(choices))
    pairs = extension.base_pairs(secret, offered, points)
    number = np.arange(len(choices))
    assert np.array_equal(keys, pairs[number, np.array(choices, int)])
    assert len({key.tobytes() for key in pairs.reshape(-1, 16)}) == 2 * len(choices)
    apart = sodium.shifted(points, offered, back=True)  # equal scalars would show which choices are equal
    assert len({point.tobytes() for point in np.concatenate([points, apart])}) == 2 * len(choices)


def test_keys_are_hashes_of_the_shared_points() -> None:
    secret, offered = extension.base_offer()
    _, points = extension.base_choose(offered, np.array([False, True]))
    pairs = extension.base_pairs(secret, offered, points)
    shared = sodium.multiply(points, secret)
    text = b"treaty base transfer\0" + offered.tobytes() + bytes([1, 0, 0, 0]) + points[1].tobytes()
    assert pairs[1, 0].tobytes() == hashlib.sha256(text + shared[1].tobytes()).digest()[:16]
    other = sodium.multiply(sodium.shifted(points, offered, back=True)[1:], secret)
    assert pairs[1, 1].tobytes() == hashlib.sha256(text + other[0].tobytes()).digest()[:16]


@pytest.mark.parametrize("bad", [bytes(32), bytes([0xEC, *[0xFF] * 30, 0x7F])], ids=["identity", "no point"])
def test_points_that_are_none_are_refused(bad: bytes) -> None:
    wrong = np.frombuffer(bad, np.uint8)
    with pytest.raises(CryptoError, match="expected points of ristretto255"):
        extension.base_choose(wrong, np.array([True]))
    secret, offered = extension.base_offer()
    with pytest.raises(CryptoError, match="expected points of ristretto255"):
        extension.base_pairs(secret, offered, np.stack([offered, wrong]))


# ---------------------------------------------------------------- hash and kernels


def test_hash_is_the_one_of_the_paper() -> None:
    rows = words(5000)
    key = bytes(range(16))
    found = aes.Hash(key).rows(rows, 7, 2)

    def pi(block: bytes) -> bytes:
        return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block)

    permuted = aes.permuted(key, rows.reshape(50, 100, 2)).reshape(5000, 2)
    for row in (0, 1, 4095, 4096, 4999):
        inner = int.from_bytes(pi(rows[row].tobytes()), "little")
        assert int.from_bytes(permuted[row].tobytes(), "little") == inner
        for block in (0, 1):
            tweaked = inner ^ (7 + row) ^ (block << 64)
            outer = int.from_bytes(pi(tweaked.to_bytes(16, "little")), "little") ^ inner
            assert found[row, 2 * block : 2 * block + 2].tobytes() == outer.to_bytes(16, "little")


@pytest.mark.parametrize("threads", [1, 2])
def test_streams_go_on_where_they_were(threads: int) -> None:
    seeds = np.frombuffer(b"".join(bytes([k]) * 16 for k in range(40)), np.uint8).reshape(40, 16)
    whole, streams = aes.Streams(seeds).next_words(700), aes.Streams(seeds)
    assert np.array_equal(np.hstack([streams.next_words(16, threads), streams.next_words(684, threads)]), whole)
    plain = Cipher(algorithms.AES(seeds[39].tobytes()), modes.CTR(bytes(16))).encryptor().update(bytes(8 * 700))
    assert whole[39].tobytes() == plain


@pytest.mark.skipif(not aes.HAS_AES, reason="the processor has no instructions for AES: OpenSSL alone encrypts here")
def test_the_processors_aes_gives_what_openssl_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, rows = np.random.default_rng(2).integers(0, 256, (5, 16), dtype=np.uint8), words(777)

    def everything() -> list[np.ndarray]:
        some = (0, 1, 31, 32, 33, 777)
        own = aes.Hash(b"k" * 16)
        hashes = [own.rows(rows[:n], 1 << 40, blocks, rows[0]) for n in some for blocks in (1, 3)]
        hashes += [own.low_bits(rows[:n], 1 << 40, rows[:k], 2) for n in some for k in (1, 16)]
        return [aes.Streams(seeds).next_words(130), *hashes]

    fast = everything()
    monkeypatch.setattr(aes, "HAS_AES", False)
    for one, other in zip(fast, everything(), strict=True):
        assert np.array_equal(one, other)


def test_bits_of_hashes_lie_side_by_side() -> None:
    rows, offsets = words(70), words(5)
    own = aes.Hash(b"k" * 16)
    found = own.low_bits(rows, 9, offsets, 6)
    for number, offset in enumerate(offsets):
        expected = own.rows(rows, 9, offset=offset)[:, 0] & np.uint64(63)
        assert np.array_equal(found >> np.uint32(6 * number) & np.uint32(63), expected)


@pytest.mark.parametrize(("groups", "blocks"), [(1, 1), (2, 3), (8, 2)])
def test_transposing_is_numpys(groups: int, blocks: int) -> None:
    planes = np.random.default_rng(1).integers(0, 1 << 64, (64 * groups, 8 * blocks), dtype=np.uint64)
    rows = np.empty((512 * blocks, groups), np.uint64)
    extension.transpose(planes, rows, 0, blocks)
    table = np.unpackbits(planes.view(np.uint8), axis=1, bitorder="little").T
    assert np.array_equal(np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little"), table)


@pytest.mark.parametrize("fold", [1, 2, 4])
def test_folding_sums_leaves_by_the_bits_of_their_numbers(fold: int) -> None:
    leaves = np.random.default_rng(1).integers(0, 1 << 64, (3, 1 << fold, 16), dtype=np.uint64)
    planes = np.empty((3, fold, 16), np.uint64)
    summed = leaves.copy()
    extension.fold_trees(summed, planes)
    number = np.arange(1 << fold)
    for tree in range(3):
        for j in range(fold):
            assert np.array_equal(planes[tree, j], np.bitwise_xor.reduce(leaves[tree, number >> j & 1 == 1]))
        assert np.array_equal(summed[tree, 0], np.bitwise_xor.reduce(leaves[tree]))


# ---------------------------------------------------------------- extension


def ends(shape: SeedTrees = QUICK) -> tuple[Receiver, Sender]:
    receiver = Receiver(shape)
    sender = Sender(receiver.offer, shape)
    sender.prepare(receiver.prepare(sender.points))
    return receiver, sender


# one tree of all levels would send nothing, and have 2^128 leaves
SHAPES = {
    "quick": QUICK,
    "short": SHORT,
    "single bits": SeedTrees(((128, 1),)),
    "three groups": SeedTrees(((1, 7), (60, 2), (1, 1))),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_rows_differ_by_delta_where_the_bit_is_one(shape: SeedTrees) -> None:
    receiver, sender = ends(shape)
    for count in (STEP, 3 * STEP, (1 << 16) + STEP):  # the streams go on
        message, chosen, t = receiver.extend(count)
        assert message.shape == (len(shape.levels) - 1, count // 64)
        q = sender.extend(count, message)
        choices = unpacked(chosen, count)
        assert np.array_equal(q, t ^ (choices[:, None] * sender.delta))
        assert 0.4 < choices.mean() < 0.6
        assert len(np.unique(t[:, 0])) == count


def test_rows_and_bits_are_new_in_every_piece_and_every_session() -> None:
    seen = []
    for _ in range(2):
        receiver, sender = ends()
        for _ in range(2):
            message, chosen, t = receiver.extend(STEP)
            q = sender.extend(STEP, message)
            seen += [chosen[:, None], t, q, sender.delta[None] ^ q]
    values = np.concatenate([part.reshape(-1) for part in seen])
    shared = len(values) - len(np.unique(values))  # where the bit is 0, q is t; where 1, q less delta is
    assert shared == 4 * 2 * STEP


def test_each_sender_has_a_delta_of_its_own() -> None:
    offer = Receiver().offer
    deltas = np.stack([Sender(offer).delta for _ in range(9)])
    assert len(np.unique(deltas.reshape(-1))) == deltas.size
    ones = int(np.bitwise_count(deltas).sum())
    assert abs(ones - deltas.size * 32) < 6 * np.sqrt(deltas.size * 16)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_senders_message_says_nothing_of_the_bits_without_delta(shape: SeedTrees) -> None:
    """Each column of the message is masked by a stream of which the sender lacks one leaf: bits look fair to it."""
    receiver, _ = ends(shape)
    message, chosen, _ = receiver.extend(1 << 14)
    agree = [np.mean(unpacked(column ^ chosen, 1 << 14)) for column in message]
    assert np.all(np.abs(np.array(agree) - 0.5) < 6 * 0.5 / 2**7)


@pytest.mark.parametrize("count", [1, 64, STEP + 1, -STEP])
def test_numbers_of_transfers_that_do_not_fit_are_refused(count: int) -> None:
    receiver, _ = ends()
    with pytest.raises(CryptoError, match="expected a multiple of 512 transfers"):
        receiver.extend(count)


@pytest.mark.parametrize("short", [False, True])
def test_both_ends_take_the_shape_that_role_0_names(short: bool) -> None:
    first, second = play(open_transfers(0, short=short), open_transfers(1, short=not short))
    shapes = {end.shape for of in (first, second) for end in (of.sender, of.receiver)}
    assert shapes == {SHORT if short else QUICK}
    message, chosen, t = first.receiver.extend(STEP)
    q = second.sender.extend(STEP, message)
    assert np.array_equal(q, t ^ (unpacked(chosen, STEP)[:, None] * second.sender.delta))


def test_a_shape_that_there_is_not_is_refused() -> None:
    steps = open_transfers(1)
    offer, _ = next(steps)
    with pytest.raises(CryptoError, match="expected 0 or 1, got 2"):
        steps.send([offer, np.array([2], np.uint8)])


def test_message_of_another_length_is_refused() -> None:
    receiver, sender = ends()
    message, _, _ = receiver.extend(STEP)
    with pytest.raises(CryptoError, match="expected columns"):
        sender.extend(2 * STEP, message)


# ---------------------------------------------------------------- what is made of rows


@pytest.fixture(scope="module")
def made() -> tuple[tuple[Receiver, Sender], np.ndarray, np.ndarray, np.ndarray]:
    """Both ends, q, packed bits and t of 1024 transfers."""
    receiver, sender = ends()
    message, chosen, t = receiver.extend(2 * STEP)
    return (receiver, sender), sender.extend(2 * STEP, message), chosen, t


def test_random_pairs(made: tuple[np.ndarray, ...]) -> None:
    (receiver, sender), q, chosen, t = made
    pair = np.stack(extension.random_pairs(sender, q, 5, 3))
    choices, number = unpacked(chosen, len(t)), np.arange(len(t))
    assert np.array_equal(receiver.hash.rows(t, 5, 3), pair[choices.astype(int), number])
    assert len(np.unique(pair)) == pair.size
    assert abs(np.bitwise_count(pair).mean() - 32) < 0.2


def test_each_session_hashes_under_a_key_of_its_own_that_both_ends_have() -> None:
    """What somebody computes of one session's permutation says nothing of another's, nor does an end choose the key."""
    rows, (receiver, sender) = words(3), ends()
    assert np.array_equal(receiver.hash.rows(rows, 0), sender.hash.rows(rows, 0))
    same_offer = Sender(receiver.offer)
    of_sessions = [end.hash.rows(rows, 0) for end in (sender, same_offer, ends()[0], ends()[1])]
    assert len(np.unique(np.stack(of_sessions))) == 4 * 6
    receiver.prepare(same_offer.points)
    assert np.array_equal(receiver.hash.rows(rows, 0), same_offer.hash.rows(rows, 0))


def test_chosen_bits(made: tuple[np.ndarray, ...]) -> None:
    delta, (_, q, chosen, t) = made[0][1].delta, made
    wanted = np.random.default_rng(2).integers(0, 1 << 64, len(chosen), dtype=np.uint64)
    moved = extension.chosen(q, delta, chosen ^ wanted)
    assert np.array_equal(moved, t ^ (unpacked(wanted, len(t))[:, None] * delta))


def test_chosen_bits_of_a_number_of_transfers_that_fills_no_word(made: tuple[np.ndarray, ...]) -> None:
    delta, (_, q, chosen, t) = made[0][1].delta, made
    moved = extension.chosen(q[:70], delta, chosen[:2])
    assert np.array_equal(moved, t[:70])


def test_messages_of_one_of_many(made: tuple[np.ndarray, ...]) -> None:
    (receiver, sender), q, chosen, t = made
    for count in (1, 2, 3, 4):
        used = len(t) // count * count
        messages = extension.message_words(sender, extension.joined(q[:used], count), 3, count)
        choices = unpacked(chosen, used).reshape(-1, count) @ (1 << np.arange(count))
        taken, rows = messages[np.arange(len(messages)), choices], np.arange(len(messages))
        mine = receiver.hash.rows(extension.joined(t[:used], count), 3)[:, 0] & np.uint64((1 << 16) - 1)
        assert np.array_equal(mine, taken)
        equal = 2.0**-16  # how often another number's message is the same, by chance: six standard deviations
        for other in range(1, 1 << count):
            others = messages[rows, choices ^ other]
            assert abs((mine == others).mean() - equal) < 6 * (equal * (1 - equal) / len(mine)) ** 0.5 + 1 / len(mine)


def test_joined_rows_are_products_in_the_field() -> None:
    rows = words(4)

    def times_x(value: int) -> int:
        value <<= 1
        return value ^ (1 << 128 | 0x87) if value >> 128 else value

    expected, power = 0, [int.from_bytes(row.tobytes(), "little") for row in rows]
    for value in reversed(power):
        expected = times_x(expected) ^ value
    assert extension.joined(rows, 4)[0].tobytes() == expected.to_bytes(16, "little")
