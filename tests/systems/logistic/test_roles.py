"""Logistic regression between parties: the pooled optimiser's weights, whatever cipher, solver and roles."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from marks import all_but_first_slow, slow
from systems.logistic.playing import (
    LEAD,
    PAPER,
    linear_tables,
    options_of,
    play_logistic,
    pooled_weights,
    role_input,
    said,
    weights_of,
)
from tables import real_table, with_categories, with_gaps
from treaty.crypto.additive.montgomery import Modulus
from treaty.crypto.payload import from_words
from treaty.data.table import to_table
from treaty.errors import ConfigError, DataError
from treaty.files import read_file
from treaty.linear.preparation import fit_calibration
from treaty.messaging.messages import decode_body, view
from treaty.systems.logistic import products as lattice_products
from treaty.systems.logistic.batches import FORMAT, KeptBatches, _Kept
from treaty.systems.logistic.coordinated import DecryptedProducts, EncryptedVector, SharedKey
from treaty.systems.logistic.quasi_newton import active
from treaty.systems.logistic.steps import EpochEnd, InnerProducts
from treaty.systems.logistic.system import assign, helpers
from treaty.systems.system import PartySpec

FORMS = {
    "lattice": {"encryption": "lattice"},
    "lattice-two": {"encryption": "lattice", "coordinator": False},
    "ou": {"encryption": "ou"},
    "ou-two": {"encryption": "ou", "coordinator": False},
    "paillier": {"encryption": "paillier"},
    "paillier-two": {"encryption": "paillier", "coordinator": False},
    "ou-paper": {"encryption": "ou", **PAPER},
    "paillier-paper": {"encryption": "paillier", **PAPER},
}
SMALL = {"max_iter": 2, "period": 1}


def same_weights(tables, y, **changes):
    played = play_logistic(tables, y, **changes)
    _, fitted = pooled_weights(tables, y, **changes)
    found = weights_of(played, tables)
    assert np.abs(fitted.weights).max() > 0.01
    np.testing.assert_allclose(found, fitted.weights, rtol=0, atol=1e-9)  # the specification asks for 1e-6
    np.testing.assert_allclose(played.results["p0"].losses, fitted.losses, rtol=0, atol=1e-9)
    return played, fitted


@pytest.mark.parametrize(
    ("form", "parties"), [*((form, 3) for form in FORMS), *(slow(form, 2) for form in ("lattice-two", "ou", "ou-two"))]
)
def test_weights_are_those_of_the_pooled_optimiser(form, parties):
    same_weights(*linear_tables(parties, rows=260), **SMALL, **FORMS[form])


@pytest.mark.parametrize(
    ("form", "size"),
    [("lattice", 240), *(slow(form, 100) for form in ("lattice", "ou", "ou-two", "ou-paper")), slow("ou-two", 240)],
)
def test_hessian_products_are_over_as_many_rows_as_asked_for(form, size):
    """Two batches, or part of one."""
    tables, y = linear_tables(2, rows=260)
    given = {**SMALL, "hessian_batch_size": size}
    _, fitted = same_weights(tables, y, **given, **FORMS[form])
    assert np.abs(fitted.weights - pooled_weights(tables, y, **SMALL)[1].weights).max() > 1e-6


def test_hessian_products_over_too_few_rows_are_refused():
    with pytest.raises(ConfigError, match=r"hessian_batch_size of at least \d+ rows for \d+ columns, got 20"):
        play_logistic(*linear_tables(2, rows=260), encryption="lattice", hessian_batch_size=20)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["lattice", "lattice-two", "ou", "ou-two", "ou-paper"])
def test_five_parties_train_by_gradient_descent(form):
    same_weights(*linear_tables(5, rows=340), protocol="sgd", max_iter=2, batch_size=160, **FORMS[form])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ou-two", "paillier", "paillier-paper"])
def test_two_parties_train_by_gradient_descent(form):
    same_weights(*linear_tables(2, rows=260), protocol="sgd", max_iter=2, **FORMS[form])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["lattice", "ou", "ou-two", "ou-paper"])
def test_epochs_that_let_the_loss_rise_are_undone_alike(form):
    _, fitted = same_weights(*linear_tables(2, rows=260), **FORMS[form], protocol="sgd", learning_rate=2.5, max_iter=4)
    assert fitted.losses[1] > 1.1 * fitted.losses[0], "the loss did not rise: the test proves nothing"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["lattice", "ou-two", "ou-paper"])
def test_training_ends_with_a_steady_loss_and_with_a_penalty(form):
    _, fitted = same_weights(
        *linear_tables(2, rows=260), **FORMS[form], protocol="sgd", learning_rate=0.02, max_iter=30, tol=0.05, l2=0.1
    )
    assert 1 < len(fitted.losses) < 30


@pytest.mark.slow
@pytest.mark.parametrize("coordinator", [True, False])
def test_lattice_map_takes_rows_in_blocks_of_batches(coordinator, monkeypatch):
    monkeypatch.setattr(lattice_products, "DEGREE", 256)  # two batches of 120 rows in a block: the last has one
    same_weights(*linear_tables(3, rows=380), encryption="lattice", coordinator=coordinator, **SMALL)


def test_gaps_categories_constants_and_an_active_party_without_columns():
    X, y = real_table("binary", rows=320)
    X = with_categories(with_gaps(X.iloc[:, :5]))
    X["same"] = 3.0
    tables = {"p0": to_table(X[[]], party="p0", allow_no_features=True), "p1": to_table(X, party="p1")}
    played, _ = same_weights(tables, y.astype(float), **SMALL, encryption="lattice", batch_size=300)
    assert played.results["p1"].coef[-1] == 0.0
    assert len(played.results["p0"].coef) == 0


# ---------------------------------------------------------------- what parties are sent


def received(played, name, frm=None):
    return {e.step for e in played.transcripts[name].entries if e.direction == "received" and frm in (None, e.peer)}


SETUP = {"Terms", "Verdict"}
PAIRED = {"PairKey", "KnownBatches", "JointSeedCommitment", "JointSeedShare", "LoneRows"}


@pytest.mark.parametrize(
    ("form", "of_coordinator", "of_active", "of_passive"),
    [
        ("lattice", {"InnerProducts"}, {"StepCoefficients"}, {"StepCoefficients"}),
        ("ou", {"InnerProducts", "MaskedProducts", "LossPart", "LossCipher"},
         {"SharedKey", "EncryptedVector", "DecryptedProducts", "LossTotal", "StepCoefficients"},
         {"SharedKey", "EncryptedVector", "DecryptedProducts", "StepCoefficients"}),
        ("ou-two", set(), {"HiddenRows", "EncryptedProducts", "InnerProducts"},
         {"HiddenRows", "EncryptedProducts", "StepCoefficients"}),
    ],
)  # fmt: skip
def test_parties_are_sent_what_the_documentation_says(form, of_coordinator, of_active, of_passive):
    tables, y = linear_tables(3, rows=260)
    played = play_logistic(tables, y, **SMALL, **FORMS[form], random_state=None)
    lattice = {"ColumnsHint", "VectorQuery", "HiddenProducts", "ProductShares"} if "lattice" in form else set()
    goodbye = {"Goodbye"}
    assert received(played, "p0") - goodbye == SETUP | PAIRED | {"TableSize", "MarginPart"} | lattice | of_active
    assert received(played, "p1") - goodbye == SETUP | PAIRED | {"TrainingSizes", "EpochEnd"} | lattice | of_passive
    if of_coordinator:
        assert received(played, LEAD) - goodbye == SETUP | {"TrainingSizes", "EpochEnd"} | of_coordinator
    ends = [e for e in played.transcripts["p1"].entries if e.step == "EpochEnd" and e.direction == "received"]
    assert set(EpochEnd.__struct_fields__) == {"learning_rate", "back", "finished", "best"}, "others would see a loss"
    assert [decode_body(e.content, EpochEnd, peer="p0").best for e in ends] == [False] * 2


@pytest.mark.parametrize("form", all_but_first_slow("lattice", "lattice-two", "ou-two", "ou-paper"))
def test_calibration_is_that_of_the_pooled_margins(form):
    tables, y = linear_tables(3, rows=260)
    played = play_logistic(tables, y, **SMALL, **FORMS[form])
    X, fitted = pooled_weights(tables, y, **SMALL)
    found, expected = played.results["p0"].calibration, fit_calibration(X @ fitted.weights, y)
    np.testing.assert_allclose([found.slope, found.offset], [expected.slope, expected.offset], rtol=1e-6)
    assert [played.results[name].calibration for name in ("p1", "p2")] == [None, None]
    assert "of training rows (calibrate)" in " ".join(said(list(tables), **FORMS[form])["p0"])


def test_without_calibration_the_active_party_gets_no_margins():
    tables, y = linear_tables(2, rows=260)
    played = play_logistic(tables, y, **SMALL, **FORMS["lattice"], calibrate=False)
    assert "MarginPart" not in received(played, "p0")
    assert played.results["p0"].calibration is None
    assert "calibration" not in " ".join(said(list(tables), calibrate=False)["p0"])


def test_paper_form_is_that_of_the_paper():
    tables, y = linear_tables(2, rows=260)
    played = play_logistic(tables, y, **SMALL, **FORMS["ou-paper"])
    assert received(played, "p0", "p1") >= {"Margins"}
    assert received(played, "p1", "p0") >= {"EncryptedVector"}
    assert received(played, LEAD) - {"Goodbye"} == SETUP | {"TrainingSizes", "Gradient", "EpochEnd"}
    assert received(played, "p1", LEAD) - {"Goodbye"} == SETUP | {"SharedKey", "StepPart"}


def bits_of_products(played, name, frm):
    wanted = ("received", frm, "InnerProducts")
    entries = [e for e in played.transcripts[name].entries if (e.direction, e.peer, e.step) == wanted]
    numbers = [
        view(decode_body(e.content, InnerProducts, peer=frm).values, np.uint64, (None, 2), peer=frm, what="values")
        for e in entries
    ]
    return np.concatenate(numbers)


@pytest.mark.slow
@pytest.mark.parametrize("parties", [2, 3])
def test_coordinator_sees_uniform_numbers_of_each_party(parties):
    tables, y = linear_tables(parties, rows=260)
    played = play_logistic(tables, y, encryption="lattice", max_iter=20, period=1, memory=5, tol=0.0)
    for name in tables:
        numbers = bits_of_products(played, LEAD, name)
        assert len(numbers) > 1500
        for word in (0, 1):
            counts = np.bincount((numbers[:, word] >> np.uint64(60)).astype(np.int64), minlength=16)
            expected = len(numbers) / 16
            assert ((counts - expected) ** 2 / expected).sum() < 44.3  # chi-squared, 15 degrees: false alarm 1e-4


@pytest.mark.slow
def test_active_party_without_coordinator_learns_one_passive_partys_products_and_the_sum_of_several():
    tables, y = linear_tables(2, rows=260)
    played = play_logistic(tables, y, encryption="lattice", coordinator=False, **SMALL)
    plain = bits_of_products(played, "p0", "p1")
    assert (plain[:, 1] < 1 << 32).mean() > 0.4, "of a single passive party its part is learned, as documented"
    tables, y = linear_tables(3, rows=260)
    played = play_logistic(tables, y, encryption="lattice", coordinator=False, max_iter=10, period=1)
    masked = bits_of_products(played, "p0", "p1")
    counts = np.bincount((masked[:, 1] >> np.uint64(60)).astype(np.int64), minlength=16)
    expected = len(masked) / 16
    assert ((counts - expected) ** 2 / expected).sum() < 44.3


def vectors_between(played, sender, receiver):
    entries = [
        e
        for e in played.transcripts[receiver].entries
        if (e.direction, e.peer, e.step) == ("received", sender, "EncryptedVector")
    ]
    rows = decode_body(entries[0].content, EncryptedVector, peer=sender).rows
    return from_words(view(rows, np.uint64, (None, None), peer=sender, what="rows"))


def test_what_the_active_party_adds_does_not_show_in_the_quotient_of_ciphertexts():
    tables, y = linear_tables(2, rows=260)
    played = play_logistic(tables, y, encryption="paillier", protocol="sgd", max_iter=1)
    (entry,) = [e for e in played.transcripts["p1"].entries if e.step == SharedKey.__name__]
    payload = decode_body(entry.content, SharedKey, peer=LEAD).payload
    numbers = from_words(view(payload[0], np.uint64, (None, None), peer=LEAD, what="key"))
    modulus = Modulus(numbers[0] ** 2)
    sent, came = (vectors_between(played, *ends) for ends in (("p1", "p0"), ("p0", "p1")))
    # at the first step margins are 0: the active party adds 2 or -2 in fixed point, with the offset of signed numbers
    candidates = {(1 << 43) + sign * (2 << 32) for sign in (1, -1)}
    for own, total in zip(sent[:20], came[:20], strict=True):
        quotient = total * pow(own, -1, modulus.value) % modulus.value
        assert all(quotient != (1 + numbers[0] * m) % modulus.value for m in candidates)


# ---------------------------------------------------------------- batches and guards


def order_of(played):
    """Which partition was used, as the weights after the first epochs tell."""
    return weights_of(played, ["p0", "p1"])


KEEPING = {"encryption": "lattice", "protocol": "sgd", "max_iter": 1, "random_state": None}


def test_batches_are_kept_for_later_jobs_on_the_same_rows(tmp_path):
    tables, y = linear_tables(2, rows=260)
    given = {**KEEPING, "store": tmp_path}
    first, second = (play_logistic(tables, y, **given) for _ in range(2))
    np.testing.assert_array_equal(order_of(first), order_of(second))
    other = play_logistic(tables, y, **{**given, "store": tmp_path / "elsewhere"})
    assert np.abs(order_of(first) - order_of(other)).max() > 1e-6
    with pytest.raises(ConfigError, match="batch_size=120"):
        play_logistic(tables, y, **{**given, "batch_size": 130})
    with pytest.raises(ConfigError, match="as in the earlier job"):
        play_logistic(tables, y, **{**given, "random_state": 5})


def kept_seeds(folder, name):
    return [entry.seed for entry in read_file(folder / f"{name}.batches", _Kept, FORMAT).entries]


def test_changed_columns_do_not_give_new_batches(tmp_path):
    """Whichever party's columns change: it still has its folder and insists on the seed; the other has lost its own."""
    tables, y = linear_tables(2, rows=260)
    play_logistic(tables, y, **KEEPING, store=tmp_path)
    (seed,) = kept_seeds(tmp_path, "p0")
    for name, lost in (("p0", "p1"), ("p1", "p0")):
        (tmp_path / f"{lost}.batches").unlink()
        fewer = to_table(pd.DataFrame({k: c for k, c in zip("abcdefghi", tables[name].columns[1:], strict=False)}))
        played = play_logistic({**tables, name: fewer}, y, **KEEPING, store=tmp_path)
        assert any(e.step == KeptBatches.__name__ for e in played.transcripts[lost].entries)
        assert kept_seeds(tmp_path, name) == kept_seeds(tmp_path, lost) == [seed]


def test_other_rows_get_other_batches_and_a_warning(tmp_path, caplog):
    for rows in (260, 261):
        play_logistic(*linear_tables(2, rows=rows), **KEEPING, store=tmp_path)
    assert len(set(kept_seeds(tmp_path, "p0"))) == 2
    assert "batches of 1 other sets of rows" in caplog.text


def test_tables_that_only_are_as_long_are_told_where_batches_are_kept(tmp_path):
    """A passive party without ids knows rows by their number."""
    tables, y = linear_tables(2, rows=260)
    given = {**KEEPING, "encryption": "lattice", "random_state": None}
    play_logistic(tables, y, **given, store=tmp_path)
    with pytest.raises(ConfigError, match=r"kept in .*p1\.batches; if these are other rows.*another store.*\[align\]"):
        play_logistic(tables, 1.0 - y, **{**given, "batch_size": 130}, store=tmp_path)


def test_parties_that_kept_different_batches_stop(tmp_path):
    tables, y = linear_tables(2, rows=260)
    for folder in ("one", "two"):
        play_logistic(tables, y, **KEEPING, store=tmp_path / folder)
    (tmp_path / "one" / "p1.batches").write_bytes((tmp_path / "two" / "p1.batches").read_bytes())
    with pytest.raises(ConfigError, match=r"insist on different batches.*p[01]\.batches; if these are other rows"):
        play_logistic(tables, y, **KEEPING, store=tmp_path / "one")


@pytest.mark.parametrize("theirs", [None, 8])
def test_no_party_alone_chooses_the_batches(theirs, caplog):
    """A party that names a seed could try many until one sets rows of its own apart."""
    tables, y = linear_tables(2, rows=260)
    of_eight = order_of(play_logistic(tables, y, **{**KEEPING, "random_state": 8}))
    assert "random_state" not in caplog.text
    for changes in ({"theirs": {"random_state": 8}}, {"theirs": {"random_state": theirs}, "random_state": 7}):
        found = order_of(play_logistic(tables, y, **{**KEEPING, **changes}))
        assert np.abs(found - of_eight).max() > 1e-6
        assert "all parties with data must name the same" in caplog.text
        caplog.clear()


def test_rows_that_stand_alone_are_counted_and_warned_of(caplog):
    tables, y = linear_tables(2, rows=240)
    rare = np.zeros(240, np.float32)
    rare[[3, 77]] = 1.0  # the only row that has it, or one of two, in its batch
    columns = {"a": tables["p1"].columns[0] * 0, "b": rare}
    played = play_logistic({**tables, "p1": to_table(pd.DataFrame(columns))}, y, **{**KEEPING, "random_state": 7})
    counts = {name: played.results[name].alone for name in tables}
    assert counts["p0"]["p1"] == 2
    assert counts["p0"] == counts["p1"]
    assert "2 of 240 rows stand alone in their batch among p1's columns: its gradients show their labels" in caplog.text
    part = played.results["p1"]
    learned = said(list(tables), part, coordinator=False)
    assert any("the labels of 2 rows, which stand alone" in words for words in learned["p1"])
    assert any("of the margins of" in words for words in learned["p0"])
    part.alone = {"p0": 0, "p1": 0}
    none = said(list(tables), part, coordinator=False)
    assert any("for no single row the labels: none stands alone" in words for words in none["p1"])


@pytest.mark.parametrize("label", [0, 1])
def test_passive_party_reads_the_label_of_a_row_that_stands_alone(label):
    """The only row of a category in its batch has nearly all of its weight's first step."""
    tables, y = linear_tables(2, rows=240)
    row = int(np.flatnonzero(y == label)[5])
    rare = np.arange(240) == row
    rare_column = to_table(pd.DataFrame({"rare": rare.astype(np.float32)}))
    played = play_logistic({**tables, "p1": rare_column}, y, **{**KEEPING, "batch_size": 240})
    assert played.results["p1"].alone["p1"] == 1
    read = 1 if played.results["p1"].coef[0] > 0 else 0
    assert read == label


@pytest.mark.parametrize("form", ["lattice", "ou", "ou-two"])
def test_small_batches_are_refused(form):
    with pytest.raises(ConfigError, match="at least 100 rows for the 9 columns of p0"):
        play_logistic(*linear_tables(2, rows=260), **FORMS[form], batch_size=99)
    with pytest.raises(ConfigError, match="at least 120 rows for the 3 columns of p1 and p2"):
        play_logistic(*linear_tables(3, rows=260), **FORMS[form], batch_size=119)


SHORT = {"encryption": "ou", "insecure_test_key_bits": None, "allow_insecure": False}


@pytest.mark.parametrize(
    ("changes", "theirs", "words"),
    [
        ({**SHORT, "mode": "paper"}, None, "every gradient, step and loss.*allow_insecure=True"),
        ({**PAPER, **SHORT, "allow_insecure": True}, SHORT, "every gradient, step and loss.*allow_insecure=True"),
        ({**PAPER, "encryption": "lattice"}, None, "encryption 'paillier' or 'ou'"),
        ({**PAPER, "encryption": "ou", "coordinator": False}, None, "needs a coordinator"),
        ({"encryption": "lattice", "fractional_bits": 41}, None, "at most 40"),
        ({"encryption": "lattice"}, {"period": 3}, "same period everywhere"),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes, theirs, words):
    with pytest.raises(ConfigError, match=words):
        play_logistic(*linear_tables(2, rows=260), theirs=theirs, **changes)


def test_roles_that_do_not_go_together_are_refused():
    options, _ = options_of(encryption="lattice")
    rows, lead = PartySpec(), PartySpec(role=LEAD, has_rows=False)
    for places, words in (
        ({"p0": rows, "p1": rows, LEAD: PartySpec(role=LEAD)}, "a party with data must not coordinate"),
        ({"p0": PartySpec(role=LEAD, has_rows=False), "p1": rows}, "not to be the active party"),
        ({"p0": rows, "p1": rows}, "expected a coordinator"),
        ({"p0": rows, "p1": rows, "a": lead, "b": lead}, "at one party"),
        ({"p0": rows, LEAD: lead}, "at least two parties with data"),
        ({"p0": rows, "p1": PartySpec(role="dealer"), LEAD: lead}, 'role = "dealer" at p1'),
        ({"p0": rows, "p1": PartySpec(edge="e"), LEAD: lead}, "edge at p1"),
    ):
        with pytest.raises(ConfigError, match=words):
            assign(places, "p0", options)
    with pytest.raises(ConfigError, match="only with coordinator = true"):
        assign({"p0": rows, "p1": rows, LEAD: lead}, "p0", options_of(coordinator=False)[0])


def test_fit_plays_a_coordinator_whose_name_no_party_has():
    options, _ = options_of()
    assert list(helpers(["bank", "coordinator"], options)) == ["coordinator-2"]
    assert helpers(["bank", "shop"], options_of(coordinator=False)[0]) == {}
    (place,) = helpers(["bank", "shop"], options).values()
    assert (place.role, place.has_rows) == ("coordinator", False)


@pytest.mark.parametrize("form", ["lattice", "ou", "ou-paper"])
def test_tables_of_other_rows_and_labels_of_one_class_are_refused(form):
    tables, y = linear_tables(2, rows=260)
    with pytest.raises(DataError, match="two classes, got 1 in 260 rows"):
        play_logistic(tables, np.ones(260), **FORMS[form])
    longer = linear_tables(2, rows=270)[0]
    with pytest.raises(DataError, match="260 rows at p0 and 270 at p1"):
        play_logistic({"p0": tables["p0"], "p1": longer["p1"]}, y, **FORMS[form])


def test_a_training_that_diverges_says_so():
    with pytest.raises((DataError, ConfigError), match="lower learning_rate"):
        play_logistic(*linear_tables(2, rows=260), encryption="lattice", protocol="sgd", learning_rate=1e6)


WEIGHT = np.random.default_rng(3).choice([0.5, 1.0, 4.0], 260)


@pytest.mark.parametrize(
    ("form", "parties"),
    [("lattice", 3), *(slow(form, 3) for form in ("ou", "ou-two", "paillier-two")), slow("ou-two", 2)],
)
def test_weighted_rows_give_the_weights_of_the_pooled_optimiser(form, parties):
    tables, y = linear_tables(parties, rows=260)
    played, fitted = same_weights(tables, y, **SMALL, **FORMS[form], weight=WEIGHT, show_weights=True)
    assert np.abs(fitted.weights - pooled_weights(tables, y, **SMALL)[1].weights).max() > 1e-3
    X, _ = pooled_weights(tables, y, **SMALL)
    found, expected = played.results["p0"].calibration, fit_calibration(X @ fitted.weights, y, WEIGHT)
    np.testing.assert_allclose([found.slope, found.offset], [expected.slope, expected.offset], rtol=1e-6)
    assert received(played, "p1", "p0") >= {"RowWeights"}
    assert "weights of all rows" in " ".join(said(list(tables), show_weights=True)["p1"])


@pytest.mark.parametrize(
    ("weight", "changes", "words"),
    [
        (WEIGHT, {"show_weights": False}, r"set show_weights=True in QuasiNewton at every party"),
        (WEIGHT, PAPER, "mode='paper' has no weights of rows"),
        (np.where(np.arange(260) == 3, 1e6, 1.0), {}, "p0: expected weights of at most 256 times their mean, got 260"),
        (np.where(np.arange(260) % 3 == 0, 0.0, 1.0), {}, r"of rows that weigh .* at least \d+ rows .* got [78]\d"),
    ],
    ids=["not-shown", "paper", "too-large", "too-few-rows"],
)
def test_weights_of_rows_that_cannot_be_had_are_refused(weight, changes, words):
    given = {"encryption": None, "show_weights": True, **changes}
    with pytest.raises((ConfigError, DataError), match=words):
        play_logistic(*linear_tables(2, rows=260), **given, weight=weight, max_iter=1)


def test_weights_that_tell_labels_are_warned_of(caplog):
    tables, y = linear_tables(2, rows=260)
    given = {"encryption": "lattice", "show_weights": True, "max_iter": 1}
    play_logistic(tables, y, **given, weight=WEIGHT)
    assert "reveal labels" not in caplog.text
    play_logistic(tables, y, **given, weight=np.where(y == 1, 1.0, 2.0))
    assert "p0: weights of rows, which all parties with data receive, reveal labels with AUC 1.00" in caplog.text


def test_labels_of_more_classes_are_refused():
    tables, y = linear_tables(2, rows=260)

    def of_three(party):
        inputs = role_input(party, tables, y, encryption="lattice")
        inputs.classes = ["a", "b", "c"]
        return active(inputs)

    with pytest.raises(DataError, match="two classes, got 3 in 260 rows"):
        play_logistic(tables, y, encryption="lattice", replace={"p0": of_three})


def test_numbers_that_the_coordinator_decrypts_are_uniform():
    tables, y = linear_tables(2, rows=260)
    played = play_logistic(tables, y, encryption="ou", protocol="sgd", max_iter=12, insecure_test_key_bits=768)
    top = []
    for entry in played.transcripts[LEAD].entries:
        if (entry.direction, entry.step) == ("sent", DecryptedProducts.__name__):
            numbers = decode_body(entry.content, DecryptedProducts, peer=LEAD).numbers
            top += [
                x.bit_length() for x in from_words(view(numbers, np.uint64, (None, None), peer=LEAD, what="numbers"))
            ]
    lengths = max(top) - np.array(top)  # of uniform numbers below a power of two, half have full length, and so on
    assert len(lengths) > 250
    expected = len(lengths) * np.array([0.5, 0.25, 0.125, 0.125])
    counts = np.bincount(np.minimum(lengths, 3), minlength=4)
    assert ((counts - expected) ** 2 / expected).sum() < 21.1  # chi-squared, 3 degrees: false alarm 1e-4
