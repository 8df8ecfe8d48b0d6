"""Buckets are sent once: a later training on the same table finds them kept, and pays for none again."""

from __future__ import annotations

import logging
import math
import re
import shutil
from itertools import chain

import numpy as np
import pandas as pd
import pytest

from flat import flat
from flips import damaged, flipped
from noise_keys import keep_key
from runs.test_resume import same
from systems.federboost_vertical.test_roles import decoded, messages, play_training
from systems.vertical.playing import tables_and_labels
from tables import cut, real_table, with_categories, with_gaps
from treaty import GBDTClassifier
from treaty.data.table import to_table
from treaty.errors import PeerProtocolError
from treaty.files import read_file
from treaty.messaging.messages import encode
from treaty.models.checkpoints import ledger_folder
from treaty.privacy.ledger import per_person, read_ledger
from treaty.systems.federboost_vertical import buckets
from treaty.systems.federboost_vertical.buckets import FORMAT, MOST_KEPT, Buckets, HeldBuckets, SameBuckets, kept_file

OPTIONS = {"n_estimators": 2, "min_child_samples": 5, "max_bin": 16, "n_jobs": 1}
OTHERS = ("p1", "p2")


@pytest.fixture(scope="module")
def table():
    X, y = real_table("binary", rows=150)
    return cut(with_gaps(with_categories(X)), 3), y


@pytest.fixture
def folder(tmp_path):
    """Return a folder with keys of two parties' noise: the same noise in every run."""
    for name in OTHERS:
        keep_key(ledger_folder(tmp_path, name, "noise"), name.encode() * 16)
    return tmp_path


def fit(tables, y, folder, **options) -> GBDTClassifier:
    model = flat(GBDTClassifier, "federboost-vertical", **{**OPTIONS, **options})
    return model.fit(tables, y, checkpoint=folder)


def bucket_bytes(model: GBDTClassifier) -> list[int]:
    """Return how many bytes of buckets each passive party has sent."""
    return [model.communication_[f"{name} -> p0"]["by_type"].get("Buckets", 0) for name in OTHERS]


def paid(folder) -> list[float]:
    return [per_person(read_ledger(ledger_folder(folder, name, "noise"))) for name in OTHERS]


def test_a_second_fit_in_the_same_folder_sends_no_bucket_and_pays_nothing(table, folder):
    tables, y = table
    first = fit(tables, y, folder)
    cost = paid(folder)
    again = fit(tables, y, folder)
    other = fit(tables, 1 - y, folder, max_depth=5, learning_rate=0.1, n_estimators=3)
    assert min(bucket_bytes(first)) > 500
    for later in (again, other):
        assert bucket_bytes(later) == [0, 0]
        for name in OTHERS:
            sent = later.communication_[f"{name} -> p0"]
            assert sent["by_type"]["SameBuckets"] < 300
            assert sent["bytes"] < first.communication_[f"{name} -> p0"]["bytes"]
    assert paid(folder) == cost
    same(first, again)
    fresh = fit(tables, 1 - y, None, max_depth=5, learning_rate=0.1, n_estimators=3)
    assert bucket_bytes(fresh) == bucket_bytes(first)


def test_buckets_in_the_clear_are_kept_as_well(table, tmp_path):
    tables, y = table
    chosen = {"epsilon": math.inf, "mode": "paper"}
    first, again = (fit(tables, y, tmp_path, **chosen) for _ in range(2))
    assert bucket_bytes(again) == [0, 0]
    same(first, again)


CHANGES = {
    "order": lambda tables: {name: part.iloc[::-1] for name, part in tables.items()},
    "fewer-rows": lambda tables: {name: part.iloc[:-1] for name, part in tables.items()},
    "renamed": lambda tables: {name: part.rename(columns=lambda c: f"{c} 2") for name, part in tables.items()},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_table_that_has_changed_is_sent_and_paid_anew(table, folder, change):
    tables, y = table
    fit(tables, y, folder)
    cost = paid(folder)
    changed = CHANGES[change](tables)
    rows = len(changed["p0"])
    for sends in (True, False):
        assert (min(bucket_bytes(fit(changed, y[:rows], folder))) > 400) == sends
        assert paid(folder) == [2.0 * before for before in cost]


def test_of_fewer_columns_the_same_noise_is_sent_which_costs_nothing(table, folder):
    tables, y = table
    fit(tables, y, folder)
    cost = paid(folder)
    fewer = {name: part.iloc[:, 1:] for name, part in tables.items()}
    assert min(bucket_bytes(fit(fewer, y, folder))) > 400
    assert paid(folder) == cost


def test_other_persons_with_the_same_buckets_have_noise_of_their_own(tmp_path):
    tables, y = tables_and_labels(parties=2)
    for persons, times in ((b"some", 1), (b"some", 1), (b"others", 2)):
        fields = {name: {"store": tmp_path, "digest": persons} for name in tables}
        spent = play_training(tables, y, fields=fields).results["p1"].spent
        assert f"; {4 * times * len(tables['p1'].schema.names)} per person with all draws" in spent


def sent_codes(tables, y, folder):
    """Train, and return the noisy buckets that the second party sends."""
    fields = {name: {"store": folder} for name in tables}
    played = play_training({name: to_table(part, party=name) for name, part in tables.items()}, y, fields=fields)
    return decoded(messages(played, Buckets, "p1")[0], len(y))


def test_whose_value_has_changed_does_not_show(table, folder):
    tables, y = table
    tables = {name: tables[name] for name in ("p0", "p1")}
    name = next(c for c in tables["p1"].columns if tables["p1"][c].dtype == "category")
    values = tables["p1"][name].to_numpy().copy()
    rows = np.random.default_rng(0).choice(len(y), 8, replace=False)
    values[rows] = np.roll(values[rows], 1)  # as many of each category: its buckets are the same
    column = tables["p1"].columns.get_loc(name)
    changed = tables["p1"].assign(**{name: pd.Categorical(values, tables["p1"][name].cat.categories)})
    moved = changed[name].to_numpy() != tables["p1"][name].to_numpy()
    moved &= ~(pd.isna(values) & pd.isna(tables["p1"][name].to_numpy()))
    assert 2 <= moved.sum() <= 8
    first = sent_codes(tables, y.astype(float), folder)
    second = sent_codes({**tables, "p1": changed}, y.astype(float), folder)
    differ = first != second
    assert not np.delete(differ, column, axis=1).any()
    assert differ[~moved, column].mean() > 0.1  # it was less than none before
    entries = read_ledger(ledger_folder(folder, "p1", "noise"))
    assert sorted(e.what for e in entries) == sorted([*tables["p1"].columns, name])


@pytest.mark.parametrize("options", [{"max_bin": 12}, {"epsilon": 2.0}, {"epsilon_person": 8.0}], ids="-".join)
def test_other_buckets_and_other_noise_are_sent_and_those_of_before_still_kept(table, folder, options):
    tables, y = table
    first = fit(tables, y, folder)
    cost = paid(folder)
    assert min(bucket_bytes(fit(tables, y, folder, **options))) > 400
    assert all(now > before for now, before in zip(paid(folder), cost, strict=True))
    back = fit(tables, y, folder)
    assert bucket_bytes(back) == [0, 0]
    same(first, back)


def test_only_the_partner_whose_table_has_changed_sends(table, folder):
    tables, y = table
    fit(tables, y, folder)
    last = tables["p2"].columns[-1]
    moved = tables["p2"].assign(**{last: tables["p2"][last].to_numpy()[::-1]})
    unchanged, changed = bucket_bytes(fit({**tables, "p2": moved}, y, folder))
    assert unchanged == 0 < changed


def test_of_each_partner_the_newest_are_kept_for_their_owner_alone(table, folder):
    tables, y = table
    for max_bin in range(4, 6 + MOST_KEPT):
        fit(tables, y, folder, max_bin=max_bin)
    for name in OTHERS:
        file = kept_file(folder, "p0", name)
        assert file.stat().st_mode & 0o077 == file.parent.stat().st_mode & 0o077 == 0
        assert len(read_file(file, buckets._KeptBuckets, FORMAT, "p0").tables) == MOST_KEPT
    assert min(bucket_bytes(fit(tables, y, folder, max_bin=5))) > 0
    assert bucket_bytes(fit(tables, y, folder, max_bin=5 + MOST_KEPT)) == [0, 0]


# ---------------------------------------------------------------- faults


def test_a_file_that_is_gone_is_made_anew_with_the_same_noise(table, folder):
    tables, y = table
    first = fit(tables, y, folder)
    cost = paid(folder)
    shutil.rmtree(kept_file(folder, "p0", "p1").parent)
    again = fit(tables, y, folder)
    assert bucket_bytes(again) == bucket_bytes(first)
    same(first, again)
    assert paid(folder) == cost
    assert bucket_bytes(fit(tables, y, folder)) == [0, 0]


def test_a_damaged_file_is_reported_and_made_anew(table, folder, caplog):
    tables, y = table
    first = fit(tables, y, folder)
    file = kept_file(folder, "p0", "p1")
    file.write_bytes(file.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        again = fit(tables, y, folder)
    assert bucket_bytes(again) == [bucket_bytes(first)[0], 0]
    same(first, again)
    assert re.search(r"earlier jobs cannot be used, and is made again: .*cut off - at .*p1\.buckets", caplog.text)
    assert bucket_bytes(fit(tables, y, folder)) == [0, 0]


@pytest.mark.parametrize("flips", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_damaged_file_is_read_as_something_else(table, folder, flips):
    fit(*table, folder)
    file = kept_file(folder, "p0", "p1")
    whole = buckets._read(file, "p0")
    assert len(whole) == 1
    for what in chain(flipped(file, flips), damaged(file)):
        assert buckets._read(file, "p0") == {}, what
    assert buckets._read(file, "p0") == whole
    assert buckets._read(file, "p9") == {}


def test_a_passive_party_whose_key_is_another_sends_and_pays_anew(table, folder):
    tables, y = table
    fit(tables, y, folder)
    cost = paid(folder)
    for path in (ledger_folder(folder, "p1", "noise"), ledger_folder(folder, "p1", "noise").with_name("p1.noise.kept")):
        (shutil.rmtree if path.is_dir() else type(path).unlink)(path)
    unchanged = fit(tables, y, folder)
    assert bucket_bytes(unchanged)[0] > 500
    assert bucket_bytes(unchanged)[1] == 0
    assert paid(folder) == cost  # in a ledger that begins anew: the other one is gone


def test_where_buckets_cannot_be_kept_they_are_sent_each_time_and_a_warning_names_the_file(table, folder, caplog):
    """A job's `store` is by default the folder of the table, which need not be writable."""
    kept_file(folder, "p0", "p1").parent.write_text("a file in the way")
    with caplog.at_level(logging.WARNING):
        sent = [bucket_bytes(fit(*table, folder)) for _ in range(2)]
    assert sent[0] == sent[1]
    assert min(sent[0]) > 0
    assert re.search(r"p0: nothing is kept for later jobs: .* - at .*p0\.buckets/p1\.buckets", caplog.text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"SameBuckets": lambda m: SameBuckets(b"1" * 32)}, "expected buckets that were offered, .* from p1"),
        ({"Buckets": lambda m: SameBuckets(b"")}, "expected buckets that were offered, .* from p1"),
        ({"HeldBuckets": lambda m: HeldBuckets(b"1" * 31)}, "expected at most 4 digests of 32 bytes .* from p0"),
        ({"HeldBuckets": lambda m: HeldBuckets(b"1" * 32 * 5)}, "expected at most 4 digests of 32 bytes .* from p0"),
    ],
)
def test_what_was_not_offered_and_malformed_offers_end_the_job(tmp_path, change, text):
    tables, y = tables_and_labels(parties=2)
    fields = {name: {"store": tmp_path} for name in tables}
    if "SameBuckets" in change:
        play_training(tables, y, fields=fields)
    with pytest.raises(PeerProtocolError, match=text):
        play_training(tables, y, fields=fields, change=change)


def test_an_offer_and_its_answer_hold_digests_alone(tmp_path):
    tables, y = tables_and_labels(parties=2)
    fields = {name: {"store": tmp_path} for name in tables}
    first, again = (play_training(tables, y, fields=fields) for _ in range(2))
    (sent,) = [e for e in first.transcripts["p1"].entries if e.step == "Buckets"]
    steps = [(e.step, e.content) for e in again.transcripts["p1"].entries]
    digest = buckets._digest([sent.content])
    assert ("HeldBuckets", encode(HeldBuckets(digest))) in steps
    assert ("SameBuckets", encode(SameBuckets(digest))) in steps
    assert first.results["p0"].forest.trees == again.results["p0"].forest.trees


@pytest.mark.slow
def test_a_second_fit_between_processes_sends_no_bucket(table, folder):
    tables, y = table
    first, again = (fit(tables, y, folder, transport="tls") for _ in range(2))
    assert min(bucket_bytes(first)) > 500
    assert bucket_bytes(again) == [0, 0]
    same(first, again)
