"""Encrypted prediction: the same margins, and nothing of anybody's decisions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from marks import all_but_first_slow
from systems.vertical.trained_models import at, grow, predict, split_table, take
from treaty.crypto.additive.ciphers import OUPublicKey
from treaty.crypto.payload import from_words, to_words
from treaty.errors import ConfigError, DataError, PeerProtocolError, TreatyError
from treaty.messaging.exchanges import Terms, Verdict
from treaty.messaging.messages import Array, decode_body, unpack
from treaty.models.trees import leaves
from treaty.systems.observers import Observers, ProgressCalls
from treaty.systems.secureboost import hidden_prediction, hidden_sums
from treaty.systems.secureboost.hidden_prediction import (
    ChainKey,
    EncryptedGains,
    EncryptedTotals,
    PredictionKey,
    SealedTerms,
    Station,
    hidden_active,
    hidden_passive,
)
from treaty.systems.secureboost.hidden_sums import (
    PRECISION_BITS,
    find_conditions,
    make_route,
    make_terms,
    pack_gains,
    values_and_gains,
)
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.vertical.prediction import Decisions, RecordCount, collect, predict_active, predict_passive
from treaty.trees.ensemble import SplitTable, Tree, Walk, join_splits
from trees.plain import leaves_from_values
from trees.test_ensemble import _random_forest

BITS = 512  # of test keys: two outputs in a plaintext


def key_of(bits=BITS):
    """Return options with keys of test size."""
    return SecureBoost(he_inference=True, insecure_test_key_bits=bits)


def play_hidden(parts, tables, replace=None, bits=BITS, **fields):
    active = at(hidden_active, parts, tables, key_of(bits), **fields)
    return predict(active, at(hidden_passive, parts, tables, key_of(bits)), list(tables), replace)


def play_plain(parts, tables, active=predict_active):
    return predict(at(active, parts, tables), at(predict_passive, parts, tables), list(tables))


def pooled(parts, tables):
    """Return the plain margins, and the sums of leaf values rounded one by one: what encrypted prediction gives."""
    forest = parts["p0"].forest
    splits = join_splits([parts[name].splits for name in tables], [len(table.columns) for table in tables.values()])
    matrix = np.concatenate([table.matrix() for table in tables.values()], axis=1)
    n_outputs, base = forest.objective.n_outputs, forest.objective.base_margins
    plain = np.full((len(matrix), n_outputs), base)
    Walk(forest.trees, splits).add_to(plain, matrix)
    largest = max(np.abs(tree.value).max() for tree in forest.trees)
    unit = 2.0 ** (np.frexp(largest)[1] - PRECISION_BITS)
    exact = np.zeros(plain.shape)
    for number, ends in enumerate(leaves_from_values(forest.trees, splits, matrix).T):
        exact[:, number % n_outputs] += np.rint(forest.trees[number].value / unit)[ends]
    return plain, base + exact * unit, unit


@pytest.mark.parametrize("dirty", all_but_first_slow(True, False), ids=["categories-and-missing", "numbers"])
@pytest.mark.parametrize("parties", all_but_first_slow(3, 2))
@pytest.mark.parametrize("task", ["binary", "multiclass", "regression"])
def test_hidden_margins_are_the_sums_of_rounded_leaf_values(task, parties, dirty):
    frames, y = split_table(task, parties, dirty=dirty)
    parts, tables = grow(frames, y, task)
    some = take(tables, slice(0, 61))
    plain, exact, unit = pooled(parts, some)
    found = play_hidden(parts, some).results["p0"]
    np.testing.assert_array_equal(found, exact)
    assert 0 < np.abs(found - plain).max() <= unit * len(parts["p0"].forest.trees)


def test_batches_and_threads_do_not_change_the_margins(monkeypatch):
    frames, y = split_table("multiclass", 3)
    parts, tables = grow(frames, y, "multiclass")
    some = take(tables, slice(0, 75))
    whole = play_hidden(parts, some).results["p0"]
    monkeypatch.setattr(hidden_prediction, "BATCH_BYTES", 1)  # eight rows each
    told = []
    watching = Observers([ProgressCalls(phase=lambda title, done, rows: told.append((title, done, rows)))])
    batched = play_hidden(parts, some, threads=2, observers=watching)
    np.testing.assert_array_equal(batched.results["p0"], whole)
    assert told == [("predicting", min(8 * k, 75) + 75 * group, 150) for group in range(2) for k in range(1, 11)]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [256, 768, 1280], ids=["one-output", "three-outputs", "two-rows-of-three-outputs"])
def test_any_number_of_rows_and_outputs_may_share_a_plaintext(bits):
    frames, y = split_table("multiclass", 2)
    parts, tables = grow(frames, y, "multiclass", n_estimators=2)
    some = take(tables, slice(0, 17))
    np.testing.assert_array_equal(play_hidden(parts, some, bits=bits).results["p0"], pooled(parts, some)[1])


def test_a_key_without_room_for_an_output_is_refused():
    frames, y = split_table("binary", 2)
    parts, tables = grow(frames, y, "binary", n_estimators=1)
    with pytest.raises(TreatyError, match="plaintexts of 66 bits"):
        play_hidden(parts, tables, bits=192)


def test_an_active_party_without_columns_predicts():
    frames, y = split_table("binary", 3)
    frames = {"p0": frames["p0"].iloc[:, :0], **{name: frames[name] for name in ("p1", "p2")}}
    parts, tables = grow(frames, y, "binary")
    some = take(tables, slice(0, 40))
    np.testing.assert_array_equal(play_hidden(parts, some).results["p0"], pooled(parts, some)[1])


def test_a_party_without_splits_is_left_in_peace():
    frames, y = split_table("binary", 2)
    frames["p2"] = frames["p1"].iloc[:, :1] * 0.0
    parts, tables = grow(frames, y, "binary")
    some = take(tables, slice(0, 20))
    played = play_hidden(parts, some)
    np.testing.assert_array_equal(played.results["p0"], pooled(parts, some)[1])
    assert [e.step for e in played.transcripts["p2"].entries if e.direction == "received"] == [
        "Terms", "Verdict", "Finish",
    ]  # fmt: skip


def test_a_model_of_own_splits_alone_needs_no_ciphertext():
    frames, y = split_table("binary", 2)
    frames["p1"] = frames["p1"].iloc[:, :1] * 0.0
    parts, tables = grow(frames, y, "binary")
    played = play_hidden(parts, tables)
    np.testing.assert_array_equal(played.results["p0"], pooled(parts, tables)[1])
    assert "EncryptedGains" not in {entry.step for entry in played.transcripts["p0"].entries}


# ---------------------------------------------------------------- what is learnt

TO_ACTIVE = {
    kind.__name__: kind for kind in (Terms, Verdict, ChainKey, SealedTerms, EncryptedTotals, RecordCount, Decisions)
}


def received(played, name, step):
    kinds = {"EncryptedGains": EncryptedGains, "PredictionKey": PredictionKey, "Station": Station, **TO_ACTIVE}
    return [
        decode_body(entry.content, kinds[step], peer=entry.peer)
        for entry in played.transcripts[name].entries
        if entry.direction == "received" and entry.step == step
    ]


def shown_decisions(played, parts, tables):
    """Return the records whose decisions, packed or not, either side, stand in a message to the active party."""
    entries = [e for e in played.transcripts["p0"].entries if e.direction == "received"]
    assert {e.step for e in entries} <= set(TO_ACTIVE), "a message the declared types do not know"
    contents = [bytes(entry.content) for entry in entries]
    found = set()
    for name in set(tables) - {"p0"}:
        bits = parts[name].splits.decide(tables[name].matrix())
        for record, packed in enumerate(bits):
            sides = np.unpackbits(packed, count=tables[name].n_rows)
            forms = [packed[:-1], ~packed[:-1], np.packbits(sides, bitorder="little")[:-1], sides, 1 - sides]
            if any(form.tobytes() in content for form in forms for content in contents):
                found.add((name, record))
    return found


def test_decisions_stand_in_no_message_to_the_active_party():
    frames, y = split_table("binary", 3)
    parts, tables = grow(frames, y, "binary")
    assert len(parts["p1"].splits)
    assert len(parts["p2"].splits)
    assert not shown_decisions(play_hidden(parts, tables), parts, tables)
    plain = play_plain(parts, tables)
    owned = {(name, record) for name in ("p1", "p2") for record in range(len(parts[name].splits))}
    assert shown_decisions(plain, parts, tables) == owned, "the search finds what plain prediction shows"


def products_of_kept(played, parts, tables):
    """Return each row's product of the ciphertexts its decisions keep, and what the only passive party sent back."""
    (key,), (station,) = received(played, "p1", "PredictionKey"), received(played, "p1", "Station")
    words = key.payload[0].shape[1]
    n, g, *_ = from_words(np.frombuffer(key.payload[0].data, np.uint64).reshape(-1, words))
    radix = OUPublicKey.from_payload(unpack(key.payload, "p0", "key"), BITS).modulus.radix
    (gains,), (totals,) = received(played, "p1", "EncryptedGains"), received(played, "p0", "EncryptedTotals")
    terms = np.frombuffer(gains.ciphertexts.data, np.uint64).reshape(*gains.ciphertexts.shape)
    term, record = (np.frombuffer(array.data, np.int32) for array in (station.term, station.record))
    left = np.frombuffer(station.left.data, np.bool_)
    packed = parts["p1"].splits.decide(tables["p1"].matrix())
    sides = np.unpackbits(packed, axis=1, count=len(terms)).astype(bool)
    away = pow(radix, -1, n)
    no_gain = pow(g, hidden_sums.NO_GAIN, n)
    expected = []
    for row in range(len(terms)):
        met = sides[record, row] == left
        product = 1
        for t in range(terms.shape[1]):
            ciphertext = int.from_bytes(terms[row, t].tobytes(), "little") * away % n
            product = product * (ciphertext if met[term == t].all() else no_gain) % n
        expected.append(product)
    back = np.frombuffer(totals.ciphertexts.data, np.uint64).reshape(-1, words)
    return expected, [c * away % n for c in from_words(back)], n


@pytest.mark.parametrize("blinded", [True, False], ids=["blinded", "planted-without-blinding"])
def test_sums_come_back_unrecognisable_to_the_owner_of_the_key(monkeypatch, blinded):
    frames, y = split_table("binary", 2)
    parts, tables = grow(frames, y, "binary")
    some = take(tables, slice(0, 9))
    monkeypatch.setattr(hidden_sums, "fields_of", lambda key: 1)  # a row in each ciphertext
    keys = []
    make = hidden_prediction.generate_key
    monkeypatch.setattr(hidden_prediction, "generate_key", lambda *a, **k: keys.append(make(*a, **k)) or keys[-1])
    if not blinded:
        exponents = hidden_sums.Randomiser.exponents
        monkeypatch.setattr(hidden_sums.Randomiser, "exponents", lambda self, rows: exponents(self, rows) * 0)
    played = play_hidden(parts, some)
    expected, back, n = products_of_kept(played, parts, some)
    p = keys[0].secret_numbers[0]
    q = n // p**2
    np.testing.assert_array_equal(played.results["p0"], pooled(parts, some)[1])
    for modulus in (p, q):  # it works modulo its factors apart
        assert [a % modulus == b % modulus for a, b in zip(expected, back, strict=True)] == [not blinded] * 9


def test_gains_that_are_no_units_are_not_valid():
    """A multiple of a factor of n would be one in the row's sum, whatever it is multiplied by."""
    key = hidden_prediction.generate_key(insecure_test_key_bits=BITS)
    adder = hidden_sums.Adder(key.public, 1)
    gains = key.encrypt(np.arange(6, dtype=np.uint64)[:, None], 1).reshape(2, 3, -1)
    assert adder.valid(gains)
    for factor in (key.secret_numbers[0], key.public.n // key.secret_numbers[0]):
        gains[1, 1] = to_words([factor], adder.words)[0]
        assert not adder.valid(gains)


def test_no_two_ciphertexts_sent_are_alike_and_sealed_ones_cannot_be_read(monkeypatch):
    frames, y = split_table("binary", 3)
    parts, tables = grow(frames, y, "binary", max_depth=4)
    opened = []
    open_box = hidden_sums.Box.open
    monkeypatch.setattr(hidden_sums.Box, "open", lambda *a: opened.append(open_box(*a)) or opened[-1])
    played = play_hidden(parts, take(tables, slice(0, 50)))
    (station,) = received(played, "p2", "Station")
    assert station.passed > 0, "no term of both: the test would prove nothing"
    ((first,), (second,)) = received(played, "p1", "EncryptedGains"), received(played, "p2", "EncryptedGains")
    size = 8 * first.ciphertexts.shape[-1]
    (content,) = opened
    sent = b"".join(bytes(m.ciphertexts.data) for m in (first, second)) + content
    ciphertexts = [sent[at : at + size] for at in range(0, len(sent), size)]
    assert len(set(ciphertexts)) == len(ciphertexts)
    (sealed,) = received(played, "p0", "SealedTerms")
    assert all(content[at : at + 16] not in bytes(sealed.box.data) for at in range(0, len(content), size))
    assert bytes(sealed.box.data) == bytes(second.box.data), "the active party only carries it"


def test_stations_name_terms_in_a_fresh_order_each_time():
    frames, y = split_table("binary", 2)
    parts, tables = grow(frames, y, "binary")
    orders = set()
    for _ in range(4):
        (station,) = received(play_hidden(parts, take(tables, slice(0, 8))), "p1", "Station")
        orders.add(tuple(np.frombuffer(station.term.data, np.int32)) + tuple(np.frombuffer(station.record.data, "<i4")))
    assert len(orders) > 1


def test_a_station_hears_of_its_own_records_alone():
    frames, y = split_table("binary", 3)
    parts, tables = grow(frames, y, "binary")
    played = play_hidden(parts, take(tables, slice(0, 8)))
    for number, name in ((1, "p1"), (2, "p2")):
        (station,) = received(played, name, "Station")
        named = set(np.frombuffer(station.record.data, np.int32).tolist())
        owned = {int(r) for tree in parts["p0"].forest.trees for r in tree.record[tree.source == number]}
        assert named == owned


def leaves_within_reach(tree, sides, row, node=0):
    """Return the leaves a row can end in, as far as the active party's own decisions tell."""
    if tree.left[node] < 0:
        return [node]
    children = [tree.left[node], tree.left[node] + 1]
    if tree.source[node] == 0:
        children = [children[0] if sides[tree.record[node], row] else children[1]]
    return [leaf for child in children for leaf in leaves_within_reach(tree, sides, row, child)]


def test_the_margin_of_a_few_trees_gives_their_leaves_away():
    """What the documentation warns of: the active party tries all leaves within reach."""
    frames, y = split_table("binary", 2)
    parts, tables = grow(frames, y, "binary", n_estimators=3, base_score=0.5)  # a first margin of 0
    some = take(tables, slice(0, 30))
    margins = play_hidden(parts, some).results["p0"][:, 0]
    trees, unit = parts["p0"].forest.trees, pooled(parts, some)[2]
    sides = np.unpackbits(parts["p0"].splits.decide(some["p0"].matrix()), axis=1, count=30)
    ends = leaves(play_plain(parts, some, collect).results["p0"])
    right = 0
    for row, margin in enumerate(margins):
        within = [leaves_within_reach(tree, sides, row) for tree in trees]
        found = [
            chosen
            for chosen in itertools.product(*within)
            if sum(np.rint(tree.value[leaf] / unit) for tree, leaf in zip(trees, chosen, strict=True)) == margin / unit
        ]
        right += found == [tuple(ends[row])]
    assert right == 30


# ---------------------------------------------------------------- what goes wrong


def test_an_absent_owner_is_named():
    frames, y = split_table("binary", 3)
    parts, tables = grow(frames, y, "binary")
    with pytest.raises(DataError, match=r"none of p2; the first \d of 5 rounds do without"):
        play_hidden(parts, {name: tables[name] for name in ("p0", "p1")})


def test_plain_and_hidden_prediction_do_not_mix():
    frames, y = split_table("binary", 2)
    parts, tables = grow(frames, y, "binary")
    plain = {"p1": at(predict_passive, parts, tables)}
    with pytest.raises(ConfigError, match="he_inference"):
        play_hidden(parts, tables, plain)


def test_rounds_whose_splits_a_party_lost_are_left_out(caplog):
    frames, y = split_table("binary", 2)
    parts, tables = grow(frames, y, "binary")
    trees = parts["p0"].forest.trees
    held = 1 + max(int(tree.record[tree.source == 1].max(initial=-1)) for tree in trees[:3])
    for name in SplitTable.__slots__:
        del getattr(parts["p1"].splits, name)[held:]
    some = take(tables, slice(0, 30))
    found = play_hidden(parts, some).results["p0"]
    assert "p1 lost later splits" in caplog.text
    del trees[3:]
    plain, _, unit = pooled(parts, some)
    assert np.abs(found - plain).max() <= 3 * unit * 8


def changed(message, **fields):
    return type(message)(**{name: getattr(message, name) for name in message.__struct_fields__} | fields)


def tampering(role, step, change):
    """Return the role with one kind of message changed before it is sent."""

    def tampered(party):
        send = party.send
        party.send = lambda to, m: send(to, change(m) if type(m).__name__ == step else m)
        return role(party)

    return tampered


def with_numbers(message, numbers):
    return changed(message, payload=[Array.of(numbers), message.payload[1]])


OF_ACTIVE = {
    "key-too-short": ("PredictionKey", lambda m: with_numbers(m, np.full((147, 2), 5, np.uint64)), "at PredictionKey"),
    "key-shape": ("PredictionKey", lambda m: with_numbers(m, np.zeros(3, np.uint64)), "public key - at PredictionKey"),
    "outputs": ("Station", lambda m: changed(m, outputs=9), "sums of 1 outputs"),
    "onwards-length": ("Station", lambda m: changed(m, onwards=Array.of(np.zeros(1, bool))), r"Station\.onwards"),
    "onwards-nobody": ("Station", lambda m: changed(m, onwards=Array.of(np.ones(m.fresh, bool))), "neighbour"),
    "term": ("Station", lambda m: changed(m, term=Array.of(np.full(m.term.shape, m.fresh, np.int32))), "conditions of"),
    "record": ("Station", lambda m: changed(m, record=Array.of(np.full(m.term.shape, 999, np.int32))), "records below"),
    "negative-record": ("Station", lambda m: changed(m, record=Array.of(np.full(m.term.shape, -1, np.int32))), "below"),
    "neighbour-key": ("Station", lambda m: changed(m, after=Array.of(np.zeros(32, np.uint8))), r"Station\.after"),
    "short-neighbour-key": ("Station", lambda m: changed(m, after=Array.of(np.ones(3, np.uint8))), r"Station\.after"),
    "no-rows": ("EncryptedGains",
                lambda m: changed(m, ciphertexts=Array.of(np.zeros((0, *m.ciphertexts.shape[1:]), "u8"))),
                "8 or all of the 24 rows"),
    "ciphertext-zero": ("EncryptedGains",
                        lambda m: changed(m, ciphertexts=Array.of(np.zeros(m.ciphertexts.shape, "u8"))),
                        r"ciphertexts in \[1, n\)"),
    "ciphertext-shape": ("EncryptedGains", lambda m: changed(m, ciphertexts=Array.of(np.zeros((3, 3), np.uint64))),
                         r"EncryptedGains\.ciphertexts"),
}  # fmt: skip


@pytest.fixture(scope="module")
def two():
    frames, y = split_table("binary", 2)
    parts, tables = grow(frames, y, "binary", n_estimators=2)
    return parts, take(tables, slice(0, 24))


@pytest.mark.parametrize("case", OF_ACTIVE)
def test_a_malformed_message_of_the_active_party_names_it(two, case):
    parts, tables = two
    step, change, expected = OF_ACTIVE[case]

    active = at(hidden_active, parts, tables, key_of())
    with pytest.raises(PeerProtocolError, match=expected) as caught:
        play_hidden(parts, tables, {"p0": tampering(active, step, change)})
    assert caught.value.peer == "p0"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda a: np.zeros_like(a), r"\[1, n\)", id="zero"),
        pytest.param(lambda a: a[:0], r"EncryptedTotals\.ciphertexts", id="none"),
        pytest.param(lambda a: a // np.uint64(2), r"EncryptedTotals\.ciphertexts", id="no-ciphertext-or-no-sum"),
    ],
)
def test_malformed_totals_name_the_passive_party(two, change, expected):
    parts, tables = two

    passive = at(hidden_passive, parts, tables, key_of())

    def totals(message):
        sent = np.frombuffer(message.ciphertexts.data, np.uint64).reshape(message.ciphertexts.shape)
        return EncryptedTotals(Array.of(change(sent)))

    with pytest.raises(PeerProtocolError, match=expected) as caught:
        play_hidden(parts, tables, {"p1": tampering(passive, "EncryptedTotals", totals)})
    assert caught.value.peer == "p1"


@pytest.mark.parametrize("change", ["repeated", "outputs", "plaintext"])
def test_an_owner_adds_up_as_many_outputs_as_its_model_has(change):
    """Else one prediction would give the active party as many sums of every row as it likes, with gains of its own."""
    frames, y = split_table("multiclass", 2)
    parts, tables = grow(frames, y, "multiclass", n_estimators=1)
    tables = take(tables, slice(0, 16))
    if change == "outputs":
        parts = {**parts, "p1": replace(parts["p1"], trees_a_round=2)}  # two agreed on, and three asked for
    if change == "plaintext":
        parts = {**parts, "p1": replace(parts["p1"], trees_a_round=64)}
    honest, sent = at(hidden_active, parts, tables, key_of()), []

    def hostile(party):
        send = party.send

        def again(to, message):
            sent.append(message)
            stations = [one for one in sent if isinstance(one, Station)]
            if isinstance(message, Station) and change == "repeated" and len(stations) == 2:
                message = stations[0]
            if isinstance(message, Station) and change == "plaintext":
                message = replace(message, outputs=3)
            send(to, message)

        party.send = again
        return honest(party)

    words = "at most 2 outputs, got 3" if change == "plaintext" else "sums of . outputs for every row, each once"
    with pytest.raises(PeerProtocolError, match=f"expected {words}.*Station from p0"):
        play_hidden(parts, tables, {"p0": hostile})


def test_a_box_changed_on_its_way_is_refused():
    frames, y = split_table("binary", 3)
    parts, tables = grow(frames, y, "binary", n_estimators=2)
    tables = take(tables, slice(0, 16))

    active = at(hidden_active, parts, tables, key_of())

    def change(message):
        box = np.frombuffer(message.box.data, np.uint8).copy()
        box[-1:] ^= 1
        return changed(message, box=Array.of(box))

    with pytest.raises(PeerProtocolError, match="party before sealed"):
        play_hidden(parts, tables, {"p0": tampering(active, "EncryptedGains", change)})


def test_a_real_key_is_demanded_where_no_test_key_is_allowed(two):
    parts, tables = two
    strict = {"p1": at(hidden_passive, parts, tables, SecureBoost(he_inference=True))}
    with pytest.raises(PeerProtocolError, match="key of"):
        play_hidden(parts, tables, strict)


# ---------------------------------------------------------------- arithmetic


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**32),
    n_owners=st.integers(1, 4),
    n_outputs=st.integers(1, 3),
    n_rounds=st.integers(1, 3),
    depth=st.integers(0, 5),
)
def test_terms_kept_along_the_route_add_up_to_the_leaf_values(seed, n_owners, n_outputs, n_rounds, depth):
    n_rows = 8
    trees, tables, matrices = _random_forest(seed, n_rows, n_owners, n_outputs, n_rounds, depth)
    own = seed % n_owners
    exponent = hidden_sums.fixed_point(trees)
    terms = make_terms(trees, own, np.arange(len(tables[own]), dtype=np.int32), exponent)
    sides = [
        np.unpackbits(table.decide(part), axis=1, count=n_rows).astype(bool)
        for table, part in zip(tables, matrices, strict=True)
    ]
    values, gains = values_and_gains(terms, sides[own])
    assert np.abs(gains).max(initial=0) <= hidden_sums.NO_GAIN
    conditions = find_conditions(terms)
    met = np.ones(gains.shape, bool)
    for t, s, r, left in zip(conditions.term, conditions.source, conditions.record, conditions.left, strict=True):
        assert s != own
        met[t] &= sides[s][r] == left
    total = values + np.array([(gains * met)[terms.tree == k].sum(axis=0) for k in range(len(trees))])
    splits = join_splits(tables, [part.shape[1] for part in matrices])
    ends = leaves_from_values(trees, splits, np.hstack(matrices))
    expected = [np.rint(np.ldexp(tree.value, exponent))[leaf] for tree, leaf in zip(trees, ends.T, strict=True)]
    np.testing.assert_array_equal(total, expected)
    route = make_route(conditions, len(terms.node))
    started, ended = [], []
    for stop in route:
        here = np.concatenate([stop.passed, stop.fresh])
        assert set(conditions.term[conditions.source == stop.source]) <= set(here)
        started += stop.fresh.tolist()
        ended += here[~stop.onwards].tolist()
    assert sorted(started) == sorted(ended) == list(range(len(terms.node)))


@settings(deadline=None, max_examples=60)
@given(
    n_rows=st.integers(1, 9), rows_each=st.integers(1, 4), n_fields=st.integers(1, 3), n_terms=st.integers(0, 5),
    seed=st.integers(0, 2**32), limit=st.booleans(),
)  # fmt: skip
def test_packed_gains_add_up_to_what_unpacking_returns(n_rows, rows_each, n_fields, n_terms, seed, limit):
    rng = np.random.default_rng(seed)
    most = hidden_sums.NO_GAIN
    gains = rng.integers(-most, most + 1, (n_terms, n_rows))
    if limit:
        gains = np.sign(gains) * most
    fields = rng.integers(0, n_fields, n_terms)
    plaintexts = [
        [sum(int(limb) << 64 * i for i, limb in enumerate(term)) for term in row]
        for row in pack_gains(gains, fields, n_fields)
    ]
    joined = []
    for first in range(0, n_rows, rows_each):
        whole = 0
        for row in plaintexts[first : first + rows_each]:
            whole = (whole << 64 * n_fields) + sum(row)
        joined.append([whole >> 64 * i & (1 << 64) - 1 for i in range(13)])
    sums = hidden_sums.unpack_sums(np.array(joined, np.uint64), n_rows, rows_each, n_fields, n_terms)
    expected = np.stack([gains[fields == field].sum(axis=0) for field in range(n_fields)], axis=1)
    np.testing.assert_array_equal(sums, expected)


@pytest.mark.parametrize(
    ("plaintexts", "n_rows"),
    [
        pytest.param([[2**45, 0, 0]], 1, id="beyond-any-sum"),
        pytest.param([[1, 0, 1]], 2, id="above-the-fields"),
        pytest.param([[1, 1, 0], [1, 1, 0]], 3, id="a-row-that-is-none"),
    ],
)
def test_plaintexts_that_are_no_sums_are_refused(plaintexts, n_rows):
    with pytest.raises(ValueError, match="expected sums of 3 terms"):
        hidden_sums.unpack_sums(np.array(plaintexts, np.uint64), n_rows, 2, 1, 3)


def leaf(value):
    dtypes = (np.int16, np.int32, np.int32, np.float64, np.float64, np.float64, np.int64)
    return Tree(*(np.array([x], dtype) for x, dtype in zip((-1, -1, -1, value, 0, 0, 0), dtypes, strict=True)))


@pytest.mark.parametrize("value", [1e-300, 3e-7, 0.3, 1.0, 2.0, 7e5], ids=str)
def test_the_largest_leaf_value_takes_the_precision_bits(value):
    scaled = np.ldexp(value, hidden_sums.fixed_point([leaf(value / 3), leaf(-value)]))
    assert 2.0 ** (PRECISION_BITS - 1) <= scaled <= 2.0**PRECISION_BITS
    assert hidden_sums.fixed_point([leaf(0.0)]) == PRECISION_BITS
