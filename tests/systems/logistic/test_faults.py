"""Parties that send nonsense, or are gone, in a logistic regression: one clear error, and the others told."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from systems.logistic.playing import LEAD, linear_tables, play_logistic, role_input, solver
from treaty.crypto.additive.ciphers import generate_key, generate_paillier_key
from treaty.errors import CryptoError, PeerError, PeerLost, PeerProtocolError
from treaty.messaging.messages import Array, pack
from treaty.systems.logistic.coordinated import read_key
from treaty.systems.logistic.quasi_newton import active, coordinator, passive
from treaty.systems.logistic.setup import Setting

FORMS = {
    "lattice": {"encryption": "lattice"},
    "ou": {"encryption": "ou"},
    "ou-two": {"encryption": "ou", "coordinator": False},
    "ou-paper": {"encryption": "ou", "mode": "paper", "allow_insecure": True},
}
SHORT = {"max_iter": 1, "period": 1, "timeout": 20.0}


def tampering(party, step, change, *, at=None):
    """Let a party send something else in the place of messages of one type, to one other or to all."""
    send = party.send

    def other(to, message):
        send(to, change(message) if type(message).__name__ == step and at in (None, to) else message)

    party.send = other
    return party


def role(name, tables, y, form, wrap):
    program = {"p0": active, LEAD: coordinator}.get(name, passive)
    return lambda party: program(role_input(wrap(party), tables, y, **FORMS[form], max_iter=1, period=1))


def garbage(field, *, shape=None):
    """Replace an array field's bytes by all ones, or its shape."""

    def change(message):
        array = getattr(message, field)
        array = array[0] if isinstance(array, list) else array
        if shape is not None:
            wrong = Array.of(np.zeros(shape, array.dtype))
        else:
            wrong = Array(array.dtype, array.shape, memoryview(b"\xff" * array.data.nbytes))
        old = getattr(message, field)
        return msgspec.structs.replace(message, **{field: [wrong, *old[1:]] if isinstance(old, list) else wrong})

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "who", "step", "field"),
    [
        ("lattice", "p1", "VectorQuery", "payload"),
        ("lattice", "p0", "InnerProducts", "values"),
        ("lattice", LEAD, "StepCoefficients", "coefficients"),
        ("ou", "p1", "EncryptedVector", "rows"),
        ("ou", "p0", "EncryptedVector", "rows"),
        ("ou", "p1", "MaskedProducts", "products"),
        ("ou", LEAD, "DecryptedProducts", "numbers"),
        ("ou", "p0", "LossCipher", "hidden"),
        ("ou-two", "p1", "HiddenRows", "rows"),
        ("ou-two", "p0", "EncryptedProducts", "values"),
        ("ou-paper", "p1", "Margins", "rows"),
        ("ou-paper", "p0", "Gradient", "products"),
        ("ou-paper", LEAD, "StepPart", "step"),
    ],
)
@pytest.mark.parametrize("wrong_shape", [False, True], ids=["garbage", "shape"])
def test_nonsense_ends_the_job_with_an_error_about_it(form, who, step, field, wrong_shape):
    tables, y = linear_tables(2, rows=260)
    change = garbage(field, shape=(3, 2) if wrong_shape else None)
    replaced = {who: role(who, tables, y, form, lambda party: tampering(party, step, change))}
    with pytest.raises((PeerProtocolError, CryptoError)):
        play_logistic(tables, y, **FORMS[form], **SHORT, replace=replaced)


@pytest.mark.parametrize(
    ("form", "who"),
    # ou-two has no coordinator
    [(form, who) for form in FORMS for who in ("p0", "p1", LEAD) if (form, who) != ("ou-two", LEAD)],
)
def test_a_lost_party_ends_the_job_of_all(form, who):
    tables, y = linear_tables(2, rows=260)

    def dies(party):
        receive, count = party.receive, [0]

        def until(*args, **kwargs):
            count[0] += 1
            if count[0] > 7:
                party.channel.close()
                raise PeerLost("nobody", "the process was killed")
            return receive(*args, **kwargs)

        party.receive = until
        return party

    with pytest.raises((PeerLost, PeerError)):
        play_logistic(tables, y, **FORMS[form], **SHORT, replace={who: role(who, tables, y, form, dies)})


def test_a_passive_party_that_changes_its_share_of_the_seed_is_found_out():
    tables, y = linear_tables(2, rows=260)
    wrap = lambda party: tampering(party, "JointSeedShare", lambda m: msgspec.structs.replace(m, share=bytes(32)))  # noqa: E731
    with pytest.raises(PeerProtocolError, match="committed to"):
        play_logistic(tables, y, encryption="lattice", **SHORT, replace={"p1": role("p1", tables, y, "lattice", wrap)})


def test_sizes_that_are_not_this_partys_are_refused():
    tables, y = linear_tables(2, rows=260)
    wrap = lambda party: tampering(  # noqa: E731
        party, "TrainingSizes", lambda m: msgspec.structs.replace(m, n_columns=[m.n_columns[0], m.n_columns[1] - 1])
    )
    with pytest.raises(PeerProtocolError, match="sizes of this party's table"):
        play_logistic(tables, y, encryption="lattice", **SHORT, replace={"p0": role("p0", tables, y, "lattice", wrap)})


def test_more_rows_that_stand_alone_than_there_are_are_refused():
    tables, y = linear_tables(2, rows=260)
    wrap = lambda party: tampering(party, "LoneRows", lambda m: msgspec.structs.replace(m, rows=241))  # noqa: E731
    with pytest.raises(PeerProtocolError, match=r"at most 240 rows - at LoneRows.rows"):
        play_logistic(tables, y, encryption="lattice", **SHORT, replace={"p1": role("p1", tables, y, "lattice", wrap)})


@pytest.mark.parametrize("form", ["lattice", "ou-paper"])
@pytest.mark.parametrize("told", ["p1", LEAD])
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("finished", False, "end after max_iter=1 epochs"), ("learning_rate", 0.2, "at most 0.15, got 0.2")],
)
def test_an_active_party_that_goes_on_longer_or_faster_than_agreed_is_stopped(form, told, field, value, words):
    tables, y = linear_tables(2, rows=260)
    change = lambda m: msgspec.structs.replace(m, **{field: value})  # noqa: E731
    wrap = lambda party: tampering(party, "EpochEnd", change, at=told)  # noqa: E731
    with pytest.raises(PeerProtocolError, match=words):
        play_logistic(tables, y, **FORMS[form], **SHORT, replace={"p0": role("p0", tables, y, form, wrap)})


def test_an_active_party_that_chooses_an_epoch_without_eval_rows_is_stopped():
    tables, y = linear_tables(2, rows=260)
    change = lambda m: msgspec.structs.replace(m, best=True)  # noqa: E731
    wrap = lambda party: tampering(party, "EpochEnd", change, at="p1")  # noqa: E731
    with pytest.raises(PeerProtocolError, match="expected no epoch to be best by eval rows - at EpochEnd from p0"):
        play_logistic(tables, y, **FORMS["lattice"], **SHORT, replace={"p0": role("p0", tables, y, "lattice", wrap)})


QUESTIONS = {
    "lattice": "VectorQuery",
    "ou": "EncryptedVector",
    "ou-two": "EncryptedProducts",
    "ou-paper": "EncryptedVector",
}


@pytest.mark.parametrize("form", FORMS)
def test_an_active_party_that_asks_about_a_batch_more_than_there_are_is_stopped(form):
    """Each product with a vector of its choice would be an equation about others' columns more than agreed."""
    tables, y = linear_tables(2, rows=260)

    def asks_again(party):
        send = party.send

        def twice(to, message):
            send(to, message)
            if type(message).__name__ == QUESTIONS[form]:
                send(to, message)

        party.send = twice
        return party

    with pytest.raises(PeerProtocolError, match=rf"^expected .*, got {QUESTIONS[form]}.* from p0 to "):
        play_logistic(tables, y, **FORMS[form], **SHORT, replace={"p0": role("p0", tables, y, form, asks_again)})


def setting(cipher, key_bits):
    return Setting(
        model_id="", active="p0", owners=["p0", "p1"], coordinator=None, n_rows=0, n_columns={}, batch_size=1,
        fractional_bits=32, cipher=cipher, key_bits=key_bits, insecure_test_key_bits=None, weighted=False,
        resumes=False, family="logistic", whole=False, solver=solver(),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cipher", ["ou", "paillier"])
def test_a_key_shorter_than_agreed_is_refused(cipher):
    """2048 bits are a size that others may agree on."""
    key = generate_key(2048) if cipher == "ou" else generate_paillier_key(2048)
    payload = pack(key.public.to_payload())
    read_key(payload, setting(cipher, 2048), "p1", "a test")
    with pytest.raises(PeerProtocolError, match="expected a key of 3072 bits, got 2048 - at a test from p1"):
        read_key(payload, setting(cipher, 3072), "p1", "a test")


def test_a_seed_that_does_not_match_its_digest_is_refused(tmp_path):
    tables, y = linear_tables(2, rows=260)
    given = {"encryption": "lattice", **SHORT, "random_state": None}
    play_logistic(tables, y, **given, store=tmp_path)

    def lying(party):
        changed = tampering(party, "KeptBatches", lambda m: msgspec.structs.replace(m, seed=bytes(32)))
        return active(
            role_input(
                changed, tables, y, encryption="lattice", max_iter=1, period=1, random_state=None, store=tmp_path
            )
        )

    with pytest.raises(PeerProtocolError, match="does not match its digest - at KeptBatches from p0"):
        play_logistic(tables, y, **given, replace={"p0": lying})
