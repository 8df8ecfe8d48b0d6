"""Hints of the lattice map serve later fits on the same rows, and the ledger goes on over all of them."""

import numpy as np
import pytest

from flat import flat
from treaty import GBDTClassifier
from treaty.crypto.lattice.linear_map import LinearMapClient
from treaty.crypto.lattice.store import HintStore
from treaty.crypto.sums.lattice_sums import LatticeSumsClient
from treaty.errors import CryptoError, TreatyError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 4))
Y = (X[:, 0] + X[:, 2] > 0).astype(int)
TABLES = {"bank": X[:, :2], "shop": X[:, 2:]}
SETTINGS = {
    "encryption": "lattice",
    "sums": "open",
    "n_estimators": 2,
    "max_depth": 2,
    "max_bin": 4,
    "min_child_samples": 5,
}


def hint_bytes(model: GBDTClassifier) -> int:
    return model.communication_["shop -> bank"]["by_type"]["Hint"]


def spent(folder, model: GBDTClassifier) -> float:
    with HintStore(folder / "shop.hints") as store:
        return store.spent(model.schemas_["shop"].names)


def test_a_second_fit_on_the_same_rows_sends_no_hint_and_gives_the_same_model(tmp_path):
    first = flat(GBDTClassifier, "secureboost", **SETTINGS).fit(TABLES, Y, checkpoint=tmp_path)
    once = spent(tmp_path, first)
    again = flat(GBDTClassifier, "secureboost", **SETTINGS).fit(TABLES, Y, checkpoint=tmp_path)
    assert hint_bytes(first) > 100_000 > 1000 > hint_bytes(again)
    assert np.array_equal(first.predict_proba(TABLES), again.predict_proba(TABLES))
    assert 0 < once < spent(tmp_path, first) <= 2.01 * once


def test_sealed_sums_keep_hints_and_spend_nothing(tmp_path):
    for _ in range(2):
        given = {**SETTINGS, "sums": "sealed"}
        model = flat(GBDTClassifier, "secureboost", **given).fit(TABLES, Y, checkpoint=tmp_path)
    assert hint_bytes(model) < 1000
    assert spent(tmp_path, model) == 0.0


def test_no_secret_serves_twice_under_one_hint(tmp_path, monkeypatch):
    begin, drawn = LinearMapClient.begin, []

    def watched(client, vectors):
        made = begin(client, vectors)
        drawn.extend(secret.tobytes() for secret in made.secrets)
        return made

    monkeypatch.setattr(LinearMapClient, "begin", watched)
    once = []
    for _ in range(2):  # the second time with the hint kept, as a resumed training has it
        model = flat(GBDTClassifier, "secureboost", **SETTINGS).fit(TABLES, Y, checkpoint=tmp_path)
        once.append(len(drawn))
    assert hint_bytes(model) < 1000
    assert once[1] == 2 * once[0] >= 4
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "when they are encrypted"])
def test_what_is_wrong_with_gradients_is_told_to_their_owner_alone(monkeypatch, late):
    def refuse(*_):
        raise CryptoError("a gradient exceeds its declared bound")

    begin_tree = (lambda *_: map(refuse, [0])) if late else refuse
    monkeypatch.setattr(LatticeSumsClient, "begin_tree", begin_tree)
    with pytest.raises(CryptoError) as caught:
        flat(GBDTClassifier, "secureboost", **SETTINGS).fit(TABLES, Y)
    assert caught.value.public == "its gradients cannot be encrypted; it has the details"


def test_changed_rows_get_a_new_hint(tmp_path):
    flat(GBDTClassifier, "secureboost", **SETTINGS).fit(TABLES, Y, checkpoint=tmp_path)
    order = RNG.permutation(len(Y))
    moved = flat(GBDTClassifier, "secureboost", **SETTINGS).fit(
        {name: table[order] for name, table in TABLES.items()}, Y[order], checkpoint=tmp_path
    )
    assert hint_bytes(moved) > 100_000


@pytest.mark.slow
def test_a_table_about_which_enough_was_told_is_asked_nothing_more(tmp_path):
    model = flat(GBDTClassifier, "secureboost", **SETTINGS).fit(TABLES, Y, checkpoint=tmp_path)
    left = 1.5 * spent(tmp_path, model)
    with HintStore(tmp_path / "shop.hints") as store:
        store.reserve({model.schemas_["shop"].names[0]: 2.0**-40 - spent(tmp_path, model) - left})
    flat(GBDTClassifier, "secureboost", **SETTINGS).fit(TABLES, Y, checkpoint=tmp_path)
    with pytest.raises(TreatyError, match="limit of what they may leak"):
        flat(GBDTClassifier, "secureboost", **SETTINGS).fit(TABLES, Y, checkpoint=tmp_path)
    flat(
        GBDTClassifier,
        "secureboost",
        **{**SETTINGS, "encryption": "ou"},
        insecure_test_key_bits=512,
        allow_insecure=True,
    ).fit(TABLES, Y)
