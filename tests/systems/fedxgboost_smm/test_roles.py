"""FedXGBoost-SMM in safe mode: the pooled grower's trees whatever the backend, and one clear error for every fault."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import treaty
from marks import all_but_first_slow
from pace import within
from systems.fedxgboost_smm.playing import KEYS, options_of, play_secure, secure_seat
from systems.vertical.playing import tables_and_labels
from tables import assert_same_trees, cut, real_table, with_categories, with_gaps
from treaty.crypto.sums.triple_sums import TripleDealer
from treaty.errors import ConfigError, CryptoError, PeerAborted, PeerProtocolError
from treaty.messaging.messages import Array
from treaty.models.checkpoints import Keeper, checkpoint_file, load_checkpoint
from treaty.systems.fedxgboost_smm import fedxgboost_smm as smm
from treaty.systems.fedxgboost_smm.fedxgboost_smm import (
    AskerSeed,
    DealEnd,
    DealOrder,
    DealRequest,
    DealtShares,
    HolderSeed,
    dealer,
)
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.fedxgboost_smm.system import SYSTEM
from treaty.systems.options import converted
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import PartySpec, Roles
from treaty.systems.vertical import encrypted_columns
from treaty.systems.vertical.messages import Hint, Sums, SumsRequest

BACKENDS = pytest.mark.parametrize("backend", all_but_first_slow("lattice", "dealer", "ou"))
SMALL = {"n_estimators": 2, "max_depth": 3, "min_child_samples": 1, "max_bin": 6}


def fit_both(task, tables, y, weight=None, eval_set=None, backend="dealer", reveal=None, **options):
    kind = treaty.GBDTRegressor if task == "regression" else treaty.GBDTClassifier
    options = {**SMALL, **options}
    pooled = kind("pooled", **options).fit(tables, y, sample_weight=weight, eval_set=eval_set)
    secure = kind(FedXGBoostSMM(backend=backend, reveal=reveal, **KEYS[backend]), n_jobs=1, **options)
    return secure.fit(tables, y, sample_weight=weight, eval_set=eval_set), pooled


def assert_lossless(secure, pooled, tables):
    assert_same_trees(secure, pooled)
    predict = "predict_proba" if hasattr(pooled, "predict_proba") else "predict"
    np.testing.assert_array_equal(getattr(secure, predict)(tables), getattr(pooled, predict)(tables))


# ---------------------------------------------------------------- lossless


@BACKENDS
@pytest.mark.parametrize(
    ("task", "parties", "change"),
    [
        ("binary", 2, lambda X: with_categories(with_gaps(X))),
        ("multiclass", 5, with_gaps),
        ("regression", 3, with_categories),
    ],
    ids=["binary-2", "multiclass-5", "regression-3"],
)
def test_trees_and_predictions_equal_the_pooled_growers(backend, task, parties, change):
    X, y = real_table(task, rows=150)
    tables = cut(change(X), parties)
    secure, pooled = fit_both(task, tables, y, backend=backend)
    assert secure.parts_["p0"].encryption == backend
    assert "SplitColumns" in secure.communication_["p1 -> p0"]["by_type"]
    assert ("p1 -> dealer" in secure.communication_) == (backend == "dealer")
    assert_lossless(secure, pooled, tables)


def test_without_a_backend_the_lattice_map_is_taken():
    X, y = real_table("binary", rows=80)
    secure, _ = fit_both("binary", cut(X, 2), y, backend="lattice", n_estimators=1)
    default = treaty.GBDTClassifier("fedxgboost-smm", **{**SMALL, "n_estimators": 1}).fit(cut(X, 2), y)
    assert default.parts_["p0"].encryption == "lattice"
    assert_same_trees(default, secure)


def test_hints_of_the_lattice_map_serve_a_later_fit(tmp_path):
    X, y = real_table("binary", rows=80)
    tables, options = cut(X, 2), {**SMALL, "n_estimators": 1}
    sent = []
    for _ in range(2):
        model = treaty.GBDTClassifier(FedXGBoostSMM(backend="lattice", allow_exact_sums=True), n_jobs=1, **options)
        sent.append(model.fit(tables, y, checkpoint=tmp_path).communication_["p1 -> p0"]["by_type"]["Hint"])
    assert sent[1] < 1000 < sent[0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dealer", "ou"])
@pytest.mark.parametrize(
    "options",
    [
        {"subsample": 0.6, "colsample_bytree": 0.4, "random_state": 1},
        {"goss": True, "random_state": 5},
        {"max_depth": 6, "min_split_loss": 0.1, "n_estimators": 1},
        {"min_child_samples": 20, "reg_lambda": 0.1, "reg_alpha": 0.2},
        {"fractional_bits": 24, "max_bin": 255, "n_estimators": 1},
        {"max_depth": 1, "learning_rate": 1.0},
    ],
    ids="-".join,
)
def test_every_growth_option_gives_the_pooled_trees(backend, options):
    X, y = real_table("binary", rows=120)
    weight = np.random.default_rng(5).exponential(size=len(y)) * 3
    weight[:10] = 0.0
    tables = cut(with_categories(with_gaps(X)), 3)
    assert_lossless(*fit_both("binary", tables, y, weight, backend=backend, **options), tables)


@pytest.mark.slow
@BACKENDS
def test_a_node_told_to_the_owner_of_its_split_gives_the_same_trees(backend):
    X, y = real_table("binary", rows=120)
    tables = cut(with_gaps(X), 2)
    secure, pooled = fit_both("binary", tables, y, backend=backend, reveal="node")
    assert "SplitAnswer" in secure.communication_["p1 -> p0"]["by_type"]
    assert_lossless(secure, pooled, tables)


def unusual_tables():
    X, _ = real_table("binary", rows=120)
    X = X.assign(constant=1.0, nothing=np.nan, half=np.where(np.arange(len(X)) % 2, 1.0, np.nan))
    return {
        "no own features": {"bank": X.iloc[:, :0], "shop": X.iloc[:, :3], "telco": X.iloc[:, 3:6]},
        "one column": {"bank": X.iloc[:, 2:5], "shop": X.iloc[:, :1]},
        "nothing to split": {"bank": X.iloc[:, 2:5], "shop": X[["constant"]]},
        "constant and missing": {
            "bank": X[["mean radius", "nothing"]],
            "shop": X[["constant", "nothing"]],
            "telco": X[["nothing", "mean texture", "half"]],
        },
    }


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dealer", "ou"])
@pytest.mark.parametrize("case", unusual_tables())
def test_unusual_tables_give_the_pooled_trees(backend, case):
    tables, (_, y) = unusual_tables()[case], real_table("binary", rows=120)
    assert_lossless(*fit_both("binary", tables, y, backend=backend), tables)


@pytest.mark.parametrize("backend", ["dealer", "ou"])
def test_leaves_of_one_row_give_the_pooled_trees(backend):
    X, y = real_table("binary", rows=60)
    options = {"max_depth": 8, "min_child_weight": 0.0, "reg_lambda": 0.0, "n_estimators": 1}
    secure, pooled = fit_both("binary", cut(X, 2), y, backend=backend, **options)
    assert min(tree.count.min() for tree in pooled.parts_["pooled"].forest.trees) == 1
    assert_lossless(secure, pooled, cut(X, 2))


def test_imbalanced_labels_give_the_pooled_trees():
    X, y = real_table("binary", rows=300)
    keep = np.flatnonzero((y == 1) | (np.cumsum(y == 0) <= 5))
    X, y = X.iloc[keep].reset_index(drop=True), y[keep]
    tables = cut(X, 2)
    assert_lossless(*fit_both("binary", tables, y, min_child_weight=0.1), tables)


def test_eval_losses_and_early_stopping_equal_the_pooled_ones():
    X, y = real_table("binary", rows=300)
    tables, held = cut(X.iloc[:150], 3), cut(X.iloc[150:250], 3)
    watched = [(tables, y[:150]), (held, y[150:250])]
    options = {"n_estimators": 40, "early_stopping_rounds": 3, "learning_rate": 1.0}
    secure, pooled = fit_both("binary", tables, y[:150], eval_set=watched, **options)
    assert secure.evals_result_ == pooled.evals_result_
    assert secure.best_iteration_ == pooled.best_iteration_ < 39
    assert_lossless(secure, pooled, held)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_small_tables_give_the_pooled_trees(data):
    n, seed = data.draw(st.integers(8, 60)), data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    X = pd.DataFrame({f"x{k}": rng.integers(0, data.draw(st.integers(1, 9)), n).astype(float) for k in range(3)})
    X = with_gaps(X, data.draw(st.sampled_from([0.0, 0.3])), seed)
    X.iloc[0] = 1.0
    y = (X["x0"].fillna(3) + rng.normal(size=n) > np.median(X["x0"].fillna(3))).to_numpy().astype(int)
    y[:2] = [0, 1]
    tables = {"a": X.iloc[:, :1], "b": X.iloc[:, 1:]}
    secure, pooled = fit_both(
        "binary", tables, y, min_child_weight=0.0, max_depth=data.draw(st.integers(1, 4)), max_bin=16
    )
    np.testing.assert_array_equal(secure.predict_proba(tables), pooled.predict_proba(tables))


def test_levels_that_go_in_several_messages_give_the_pooled_trees(monkeypatch):
    monkeypatch.setattr("treaty.crypto.sums.triple_sums._QUERY_BYTES", 1)
    X, y = real_table("binary", rows=120)
    tables = cut(X, 2)
    secure, pooled = fit_both("binary", tables, y, max_depth=5)
    vectors = secure.communication_["dealer -> p1"]["messages"] - 3  # terms, verdict and seed
    assert vectors == secure.communication_["p0 -> dealer"]["messages"] - 4
    assert_lossless(secure, pooled, tables)


# ---------------------------------------------------------------- faults


def hostile(kind, change, role):
    """A role that follows the protocol, but sends something else in place of the messages of a class."""

    def run(party):
        send = party.send
        party.send = lambda to, message: send(to, change(message) if isinstance(message, kind) else message)
        return role(party)

    return run


def passive(party):
    return smm.passive(secure_seat(party, *tables_and_labels(), options_of()))


def dealing(party):
    return dealer(secure_seat(party, *tables_and_labels(), options_of()))


def words_of(array, dtype=np.uint64):
    return np.frombuffer(array.data, dtype).reshape(array.shape).copy()


def shifted(array):
    values = words_of(array)
    values.flat[0] += np.uint64(1)
    return Array.of(values)


@pytest.mark.parametrize(
    ("kind", "change", "error", "match"),
    [
        (Hint, lambda m: Hint([]), CryptoError, "expected 1 arrays, got 0 - in the masked bins of p1"),
        (Hint, lambda m: Hint([Array.of(words_of(m.payload[0])[:, :-1])]), CryptoError, "the masked bins of p1"),
        (Hint, lambda m: Hint([shifted(m.payload[0])]), CryptoError, "do not add up .* - in the answer of p1"),
        (Sums, lambda m: Sums([]), CryptoError, "expected 1 arrays, got 0 - in the answer of p1"),
        (Sums, lambda m: Sums([Array.of(words_of(m.payload[0])[:, :, :-1])]), CryptoError, "the answer of p1"),
        (Sums, lambda m: Sums([Array.of(words_of(m.payload[0], np.float64))]), CryptoError, "the answer of p1"),
        (Sums, lambda m: Sums([shifted(m.payload[0])]), CryptoError, "do not add up .* - in the answer of p1"),
        (Sums, lambda m: Sums([Array("object", (1,), m.payload[0].data)]), PeerProtocolError, "element type"),
    ],
    ids=["no bins", "short bins", "wrong bin", "no sums", "short sums", "floats", "wrong sum", "objects"],
)
def test_a_passive_party_that_sends_garbage_is_named(kind, change, error, match):
    with pytest.raises(error, match=match):
        play_secure(replace={"p1": hostile(kind, change, passive)})


@pytest.mark.parametrize(
    ("kind", "change", "error", "match"),
    [
        (
            AskerSeed,
            lambda m: AskerSeed(b"short"),
            PeerProtocolError,
            "expected 32 bytes - at AskerSeed.seed from dealer",
        ),
        (
            HolderSeed,
            lambda m: HolderSeed(b""),
            PeerProtocolError,
            "expected 32 bytes - at HolderSeed.seed from dealer",
        ),
        (AskerSeed, lambda m: AskerSeed(bytes(32)), CryptoError, "do not add up"),
        (HolderSeed, lambda m: HolderSeed(bytes(32)), CryptoError, "do not add up"),
        (DealtShares, lambda m: DealtShares(m.first, shifted(m.shares)), CryptoError, "do not add up"),
        (
            DealtShares,
            lambda m: DealtShares(m.first + 1, m.shares),
            PeerProtocolError,
            "expected shares for vector 0, got 1",
        ),
        (
            DealtShares,
            lambda m: DealtShares(m.first, Array.of(words_of(m.shares)[:, :, 1:])),
            PeerProtocolError,
            "DealtShares.shares",
        ),
        (DealtShares, lambda m: HolderSeed(bytes(32)), PeerProtocolError, "HolderSeed"),
    ],
    ids=["seed", "other seed", "wrong seed", "wrong other seed", "wrong share", "number", "shape", "message"],
)
def test_a_dealer_that_sends_garbage_is_one_clear_error(kind, change, error, match):
    with pytest.raises(error, match=match):
        play_secure(replace={"dealer": hostile(kind, change, dealing)})


def active(party):
    return smm.active(secure_seat(party, *tables_and_labels(), options_of()))


@pytest.mark.parametrize(
    ("kind", "change", "error", "match"),
    [
        (DealOrder, lambda m: DealOrder(m.rows, {"p1": 3}), PeerProtocolError, "expected the bins of p1, p2"),
        (DealOrder, lambda m: DealOrder(0, m.slots), PeerProtocolError, "rows"),
        (DealRequest, lambda m: DealRequest(m.first + 1, m.count), CryptoError, "deal for vector 0"),
        (DealRequest, lambda m: DealRequest(0, m.count), CryptoError, "a mask may be used only once"),
        (
            SumsRequest,
            lambda m: SumsRequest(m.payload[:1], m.last),
            CryptoError,
            "expected 2 arrays, got 1 - in a query",
        ),
        (
            SumsRequest,
            lambda m: SumsRequest([m.payload[0], Array.of(np.array([0]))], m.last),
            CryptoError,
            "a mask may be used only once",
        ),
    ],
    ids=["parties", "rows", "skipped", "repeated", "no number", "repeated vector"],
)
def test_an_active_party_that_asks_for_what_is_not_allowed_is_refused(kind, change, error, match):
    with pytest.raises(error, match=match):
        play_secure(replace={"p0": hostile(kind, change, active)})


@pytest.mark.parametrize("victim", ["dealer", "p1"])
def test_a_party_dying_in_the_second_tree_leaves_the_first(victim, monkeypatch):
    kept, died = {}, []

    def dying(party):
        if victim == "p1":
            return smm.passive(secure_seat(party, *tables_and_labels(), options_of(), progress=stop))
        monkeypatch.setattr(TripleDealer, "deal", deal)
        return dealing(party)

    def die():
        died.append(time.monotonic())
        raise KeyboardInterrupt

    def stop(done, part):
        if done == 1:
            die()

    def deal(self, first, count, honest=TripleDealer.deal):
        if len(kept["p0"].forest.trees) == 1:
            die()
        return honest(self, first, count)

    with pytest.raises(KeyboardInterrupt):
        play_secure(replace={victim: dying}, progress=lambda done, part: kept.__setitem__("p0", part))
    assert time.monotonic() - died[0] < within(10)
    assert len(kept["p0"].forest.trees) == 1


def test_others_are_told_that_the_dealer_stopped():
    seen = []

    def dying(party):
        party.receive("p0", DealRequest, DealEnd)  # other than `Terms`

    def watched(party):
        try:
            return passive(party)
        except PeerAborted as error:
            seen.append(str(error))
            raise

    with pytest.raises(PeerProtocolError):
        play_secure(replace={"dealer": dying, "p1": watched})
    assert len(seen) == 1
    assert "dealer stopped the job" in seen[0]


def test_a_dealer_with_other_options_is_told_so():
    def dealing_otherwise(party):
        return dealer(secure_seat(party, *tables_and_labels(), options_of(max_depth=2)))

    with pytest.raises(ConfigError, match="expected the same max_depth everywhere, got 2 at dealer and 3 at p"):
        play_secure(replace={"dealer": dealing_otherwise})


class Interrupted(Exception):
    """What a party is stopped with."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dealer", "ou"])
def test_a_fit_broken_off_goes_on_with_fresh_masks_to_the_same_model(monkeypatch, tmp_path, backend):
    X, y = real_table("binary", rows=120)
    tables = cut(with_gaps(X), 2)
    options = {**SMALL, "n_estimators": 4, "subsample": 0.7, "random_state": 3}

    def fit(folder=None):
        secure = treaty.GBDTClassifier(FedXGBoostSMM(backend=backend, **KEYS[backend]), n_jobs=1, **options)
        return secure.fit(tables, y, checkpoint=folder)

    start_tree, count = encrypted_columns.EncryptedGradients.start_tree, itertools.count()

    def stopping(self, *arguments):
        if next(count) == 2:
            raise Interrupted
        return start_tree(self, *arguments)

    monkeypatch.setattr(Keeper, "due", True)
    with monkeypatch.context() as patch:
        patch.setattr(encrypted_columns.EncryptedGradients, "start_tree", stopping)
        with pytest.raises(Interrupted):
            fit(tmp_path)
    assert load_checkpoint(checkpoint_file(tmp_path, "p0")).rounds == 2
    assert_same_trees(fit(tmp_path), fit())
    assert not checkpoint_file(tmp_path, "p0").exists()


# ---------------------------------------------------------------- options and job files


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"backend": "triples"}, "option backend='triples': expected one of lattice, dealer, ou"),
        ({"insecure_test_key_bits": 512}, 'key_bits and insecure_test_key_bits are for backend="ou" alone'),
        (
            {"backend": "lattice", "fractional_bits": 24},
            'at most 20 under the lattice map, got 24; take backend="dealer"',
        ),
        ({"version": 1}, "in safe mode the active party gets the sums"),
        ({"null_vectors": 5}, "option null_vectors is for mode='paper', which draws null vectors; leave it out"),
        ({"null_vectors": 0}, "option null_vectors=0: expected `int` >= 1"),
        ({"mode": "paper", "allow_insecure": True}, "option backend is for safe mode of 'fedxgboost-smm'"),
        ({"encryption": "ou"}, "FedXGBoostSMM has no option 'encryption'; encryption is an option of .*SecureBoost"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_that_do_not_fit_are_refused(options, match):
    common = {"fractional_bits": options.pop("fractional_bits")} if "fractional_bits" in options else {}
    with pytest.raises(ConfigError, match=match):
        converted({"backend": "dealer", **options}, FedXGBoostSMM, "FedXGBoostSMM").check(BoostingOptions(**common))


def test_sums_too_long_for_the_ring_are_refused():
    X, y = real_table("binary", rows=100)
    kind = treaty.GBDTClassifier(FedXGBoostSMM(backend="dealer", allow_exact_sums=True), fractional_bits=40)
    with pytest.raises(CryptoError, match="sums would exceed 63 bits"):
        kind.fit(cut(X, 2), y, sample_weight=np.full(len(y), 4096.0))


def test_a_party_called_like_the_dealer_is_refused():
    X, y = real_table("binary", rows=60)
    tables = {"bank": X.iloc[:, :3], "dealer": X.iloc[:, 3:]}
    with pytest.raises(ConfigError, match="fit adds a dealer of the name 'dealer'"):
        treaty.GBDTClassifier(FedXGBoostSMM(backend="dealer")).fit(tables, y)


def roles_of(places: dict[str, PartySpec], active: str = "bank", backend: str = "dealer") -> Roles:
    return SYSTEM.assign(places, active, FedXGBoostSMM(backend=backend))


def test_disclosures_say_who_must_not_collude():
    options = FedXGBoostSMM(backend="dealer")
    roles = SYSTEM.assign(
        {"p0": PartySpec(), "p1": PartySpec(), **SYSTEM.helpers(["p0", "p1"], options)}, "p0", options
    )
    told = SYSTEM.disclosures(roles, options, BoostingOptions().checked(options), None)
    assert set(told) == {"p0", "p1", "dealer"}
    assert "only by colluding with dealer, which is not allowed: every bin of every row of the others" in told["p0"]
    assert any("by colluding with dealer" in fact and "labels" in fact for fact in told["p1"])
    assert any("not which rows are in a node" in fact for fact in told["p1"])
    assert "trusted not to collude with any party" in told["dealer"][0]


DEALS = PartySpec(role="dealer", has_rows=False)
PLACES = {"bank": PartySpec(), "shop": PartySpec(), "helper": DEALS}


def test_a_dealer_has_no_rows_and_is_linked_with_all_owners():
    roles = roles_of(PLACES)
    assert roles.of == {"bank": "active", "shop": "passive", "helper": "dealer"}
    assert roles.owners == ["bank", "shop"]
    assert SYSTEM.links(roles, FedXGBoostSMM(backend="dealer")) == {
        "bank": ["shop", "helper"],
        "shop": ["bank", "helper"],
        "helper": ["bank", "shop"],
    }


@pytest.mark.parametrize(
    ("change", "active", "backend", "match"),
    [
        ({"shop": DEALS}, "bank", "dealer", 'expected role = "dealer" at one party.* shop, helper'),
        ({}, "bank", "ou", 'and backend = "dealer"; got it at helper'),
        ({"helper": PartySpec(role="dealer")}, "bank", "dealer", "helper cannot be the dealer: a dealer has no table"),
        ({}, "helper", "dealer", "is not the active party"),
        ({"shop": None}, "bank", "dealer", "at least one passive party"),
        ({"helper": None}, "bank", "dealer", "needs a party without data: add"),
        ({"shop": PartySpec(role="user")}, "bank", "dealer", "expected no role and edge .* at shop"),
        ({"shop": PartySpec(has_rows=False)}, "bank", "dealer", "got none at shop"),
        ({"shop": None, "helper": None}, "bank", "lattice", "at least two parties with rows"),
        ({"helper": None}, "mall", "lattice", "expected active to be one of bank, shop, got 'mall'"),
    ],
    ids=[
        "two", "not asked for", "with data", "active", "nobody to deal for", "none", "another role", "no rows", "alone",
        "unknown active party",
    ],
)  # fmt: skip
def test_misplaced_roles_are_refused(change, active, backend, match):
    places = {name: place for name, place in {**PLACES, **change}.items() if place is not None}
    with pytest.raises(ConfigError, match=match):
        roles_of(places, active, backend)
