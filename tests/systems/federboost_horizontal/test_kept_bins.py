"""Bins are searched for once: a later training on the same rows finds them kept, and pays for the trees alone."""

from __future__ import annotations

import dataclasses
import logging
import re
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from flat import flat
from flips import damaged, flipped
from marks import all_but_first_slow
from systems.federboost_horizontal.playing import dealt, member, options_of, role_input, roles_of
from tables import real_table, with_categories, with_gaps
from treaty.data.table import to_table
from treaty.errors import PeerProtocolError
from treaty.estimators.trees import GBDTClassifier, GBDTRegressor
from treaty.files import read_file
from treaty.models.checkpoints import ledger_folder
from treaty.privacy.discrete_gaussian import rho_for
from treaty.privacy.ledger import DEFAULT_DELTA, read_ledger
from treaty.runs.threads import play
from treaty.systems.federboost_horizontal import setup as search
from treaty.systems.federboost_horizontal.federboost_horizontal import leader as leader_program
from treaty.systems.federboost_horizontal.setup import FORMAT, FREE_OF_BINS, kept_file
from treaty.systems.horizontal.random_trees import LeafNoise
from treaty.systems.horizontal.rows import ModelBegin, RowsDescription, describe
from treaty.systems.system import star

NAMES = ("north", "south", "east")
OPTIONS = {"n_estimators": 2, "min_child_samples": 5, "max_bin": 8, "n_jobs": 1}
OF_BINS = ("Count", "ProbeRequest", "CommonBins")
OF_LABELS = ("LabelUnits", "TrainingStart")
"""What is sent of bins and the search for them; participants' answers are `MaskedInput`, as those to trees are."""


@pytest.fixture(scope="module")
def rows():
    X, y = real_table("binary", rows=240)
    X = with_gaps(with_categories(X)).iloc[:, :6]
    return {name: (X.iloc[k::3], y[k::3]) for k, name in enumerate(NAMES)}


def fit(rows, folder, kind=GBDTClassifier, **options):
    return flat(kind, "federboost-horizontal", **{**OPTIONS, **options}).fit(rows, checkpoint=folder)


def searched(model) -> bool:
    """Return whether bins were searched for; a training that does not, sends nothing about bins at all."""
    steps = {step: sent for pair in model.communication_.values() for step, sent in pair["by_type"].items()}
    found = [step in steps for step in OF_BINS]
    assert len(set(found)) == 1
    noisy = getattr(model.protocol, "epsilon_total", None) is not None
    assert all((step in steps) == (found[0] and not noisy) for step in OF_LABELS)
    return found[0]


def total_bytes(model) -> int:
    return sum(pair["bytes"] for pair in model.communication_.values())


def alike(one, other) -> None:
    (first,), (second,) = one.parts_.values(), other.parts_.values()
    assert first.forest.trees == second.forest.trees
    assert repr(first.splits) == repr(second.splits)


@pytest.mark.parametrize("active", all_but_first_slow("server", "south"))
def test_a_second_fit_in_the_same_folder_sends_no_bins_and_gives_the_same_model(rows, tmp_path, active):
    first, again = (fit(rows, tmp_path, active=active) for _ in range(2))
    assert searched(first)
    assert not searched(again)
    alike(first, again)
    assert total_bytes(again) < total_bytes(first)
    for name in (*rows, active):
        assert kept_file(tmp_path, name).stat().st_mode & 0o077 == 0
    other = {"max_depth": 5, "learning_rate": 0.1, "n_estimators": 3, "reg_lambda": 2.0, "active": active}
    later, fresh = (fit(rows, folder, **other) for folder in (tmp_path, None))
    assert not searched(later)
    alike(later, fresh)


def test_a_regression_is_kept_with_its_bounds(tmp_path):
    X, y = real_table("regression", rows=150)
    parts = {name: (X.iloc[k::3], y[k::3]) for k, name in enumerate(NAMES)}
    first, again = (fit(parts, tmp_path, GBDTRegressor) for _ in range(2))
    assert not searched(again)
    alike(first, again)
    for model in (first, again):
        assert model.parts_["pooled"].forest.objective.base_score == np.float32(y.mean())
    scaled = {**parts, "east": (parts["east"][0], parts["east"][1] * 100)}
    larger, fresh = (fit(scaled, folder, GBDTRegressor) for folder in (tmp_path, None))
    assert searched(larger)
    alike(larger, fresh)


def less(parts, name):
    X, y = parts[name]
    return {**parts, name: (X.iloc[:-1], y[:-1])}


CHANGES = {
    "fewer-rows": lambda parts: less(parts, "east"),
    "order": lambda parts: {**parts, "south": (parts["south"][0].iloc[::-1], parts["south"][1][::-1])},
    "fewer-columns": lambda parts: {name: (X.iloc[:, 1:], y) for name, (X, y) in parts.items()},
    "renamed": lambda parts: {name: (X.rename(columns=str.upper), y) for name, (X, y) in parts.items()},
    "weights": lambda parts: {**parts, "east": (*parts["east"], np.linspace(0.5, 3.0, len(parts["east"][1])))},
    "other-labels": lambda parts: {**parts, "east": (parts["east"][0], 1 - parts["east"][1])},
    "fewer-participants": lambda parts: {name: parts[name] for name in ("north", "south")},
    "another-leader": lambda parts: dict(reversed(parts.items())),
}


@pytest.mark.parametrize("change", all_but_first_slow(*CHANGES))
def test_whatever_has_changed_bins_are_searched_for_anew(rows, tmp_path, change):
    mode = {"mode": "paper"}  # two participants may train
    fit(rows, tmp_path, **mode)
    changed = CHANGES[change](rows)
    later, fresh = (fit(changed, folder, **mode) for folder in (tmp_path, None))
    assert searched(later)
    alike(later, fresh)
    assert not searched(fit(changed, tmp_path, **mode))


@pytest.mark.parametrize("options", [{"max_bin": 6}, {"min_child_samples": 9}, {"mode": "paper"}], ids="-".join)
def test_bins_of_other_options_are_searched_for_and_those_of_before_still_kept(rows, tmp_path, options):
    first = fit(rows, tmp_path)
    assert searched(fit(rows, tmp_path, **options))
    back = fit(rows, tmp_path)
    assert not searched(back)
    alike(first, back)


def test_every_option_counts_that_is_not_known_to_be_free_of_bins():
    options = options_of()
    every = {field for of in options for field in (getattr(of, "__struct_fields__", None) or dataclasses.asdict(of))}
    assert FREE_OF_BINS <= every
    assert every - FREE_OF_BINS == {
        "base_score", "bins", "delta", "dropout", "epsilon_total", "huber_slope", "max_bin", "max_categories",
        "min_child_samples", "mode", "objective", "quantile_alpha", "random_state", "target_range",
        "tweedie_variance_power", "validation_fraction", "weight_bound",
    }  # fmt: skip


def test_rows_are_the_same_whether_all_classes_are_known_or_their_own_alone():
    """In threads a participant is told all classes, a file of its own has those of its rows."""

    def digest(y: list[float], classes: list[str]) -> bytes:
        data = SimpleNamespace(table=to_table(np.ones((4, 1))), y=np.array(y), weight=None)
        return search._rows_of(SimpleNamespace(data=data, classes=classes))

    among_all = digest([0.0, 2.0, 2.0, 0.0], ["a", "b", "c"])
    assert among_all == digest([0.0, 1.0, 1.0, 0.0], ["a", "c"])
    assert among_all != digest([0.0, 1.0, 1.0, 0.0], ["a", "b"])
    assert among_all != digest([0.0, 2.0, 2.0, 2.0], ["a", "b", "c"])


@pytest.fixture
def offers(monkeypatch):
    """Return a list of how many bins each participant's description offers."""
    found: list[int] = []

    def describing(data, classes, bins=b""):
        found.append(len(bins) // 32)
        return describe(data, classes, bins)

    monkeypatch.setattr(search, "describe", describing)
    return found


def test_bins_of_trainings_with_others_or_of_other_options_are_not_offered(rows, tmp_path, offers):
    X, y = rows["east"]
    far = {"west": (X.iloc[::-1], y[::-1]), "north": rows["north"], "south": rows["south"]}
    fit(rows, tmp_path)
    for parts, options, offered in (
        (rows, {"max_bin": 6}, 0),
        (rows, {"max_depth": 5, "max_delta_step": 0.5}, 3),
        (rows, {"active": "south"}, 0),
        (far, {}, 0),
        ({name: rows[name] for name in ("north", "south")}, {"mode": "paper"}, 0),
        (rows, {}, 3),
    ):
        offers.clear()
        assert searched(fit(parts, tmp_path, n_estimators=1, **options)) == (offered == 0)
        assert sum(offers) == offered


def test_the_newest_are_kept(monkeypatch, rows, tmp_path):
    monkeypatch.setattr(search, "MOST_KEPT", 2)
    for max_bin in (3, 4, 5):
        fit(rows, tmp_path, max_bin=max_bin, n_estimators=1)
    for name in NAMES:
        assert len(read_file(kept_file(tmp_path, name), search._File, FORMAT, name).entries) == 2
    assert not searched(fit(rows, tmp_path, max_bin=5))
    assert searched(fit(rows, tmp_path, max_bin=3))


# ---------------------------------------------------------------- noise


def test_under_noise_the_search_is_paid_once_and_the_trees_each_time(monkeypatch, rows, tmp_path):
    seen, depth = [], LeafNoise.depth

    def deep(self, n_rows, *of):
        seen.append(n_rows)
        return depth(self, n_rows, *of)

    monkeypatch.setattr(LeafNoise, "depth", deep)
    models = [fit(rows, tmp_path, epsilon_total=8.0, random_state=1) for _ in range(3)]
    assert [searched(model) for model in models] == [True, False, False]
    # the noisy number of rows is kept with the bins
    assert len(set(seen)) == 1
    for name in NAMES:
        paid = [(entry.what, entry.rho) for entry in read_ledger(ledger_folder(tmp_path, name, "noise"))]
        trees = [rho for what, rho in paid if what == "sums of leaves"]
        (search,) = (rho for what, rho in paid if what == "search for bins")
        assert len(trees) == 3
        assert len(set(trees)) == 1
        assert 0.9 * rho_for(8.0, DEFAULT_DELTA) < search + trees[0] <= rho_for(8.0, DEFAULT_DELTA)
        assert 0.1 < search / trees[0] < 0.2
    first, again, _ = (model.parts_["pooled"] for model in models)
    assert ", with bins of an earlier training, which paid for them. In the ledger: " in again.spent
    assert "with bins" not in first.spent
    assert first.forest.trees != again.forest.trees  # other noise
    assert searched(fit(rows, tmp_path, epsilon_total=50.0))
    assert searched(fit(rows, tmp_path))


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("who", all_but_first_slow("south", "north", "east"))
@pytest.mark.parametrize("how", ["gone", "damaged", "another's"])
def test_a_file_lost_or_damaged_at_anybody_means_a_new_search(rows, tmp_path, caplog, who, how):
    first = fit(rows, tmp_path)
    file = kept_file(tmp_path, who)
    if how == "gone":
        file.unlink()
    elif how == "damaged":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        other = next(name for name in NAMES if name != who)
        file.write_bytes(kept_file(tmp_path, other).read_bytes())
    with caplog.at_level(logging.WARNING):
        again = fit(rows, tmp_path)
    assert searched(again)
    alike(first, again)
    said = re.search(rf"earlier jobs cannot be used, and is made again: .* at .*{who}\.bins", caplog.text)
    assert (said is None) == (how == "gone")
    assert not searched(fit(rows, tmp_path))


@pytest.mark.parametrize("flips", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_damaged_file_is_read_as_something_else(rows, tmp_path, flips):
    fit(rows, tmp_path)
    file = kept_file(tmp_path, "south")
    for what in chain(flipped(file, flips), damaged(file)):
        assert search.read_cached(file, search._File, FORMAT, "south") is None, what
    assert search.read_cached(file, search._File, FORMAT, "south") is not None


def test_where_bins_cannot_be_kept_they_are_searched_for_each_time(rows, tmp_path, caplog):
    kept_file(tmp_path, "south").mkdir()
    with caplog.at_level(logging.WARNING):
        assert [searched(fit(rows, tmp_path)) for _ in range(2)] == [True, True]
    assert re.search(r"south: nothing is kept for later jobs: .*south\.bins", caplog.text)


def spoilt(tmp_path, change):
    """Train twice in one folder, the second time with messages changed by `change`, by name."""
    parts, _, classes = dealt("binary", 3)
    options = options_of()

    def roles(change):
        def role(party):
            send = party.send
            party.send = lambda to, m: send(to, change.get(type(m).__name__, lambda m: m)(m))
            if party.name == "p0":
                return leader_program(role_input(party, parts, options, classes, store=tmp_path))
            return member(party, parts, options, classes, store=tmp_path)

        return dict.fromkeys(parts, role)

    links = star(roles_of(parts), options.own)
    settings = {"job": "job", "protocol": "federboost-horizontal", "timeout": 20.0}
    play(roles({}), links, **settings)
    return play(roles(change), links, **settings)


@pytest.mark.parametrize(
    ("kind", "bins", "text"),
    [
        (ModelBegin, b"1" * 32, "expected bins that were offered and fit - at ModelBegin.bins from p0"),
        (RowsDescription, b"1" * 31, "expected at most 16 digests of 32 bytes - at RowsDescription.bins from p1"),
        (RowsDescription, b"1" * 32 * 17, "expected at most 16 digests of 32 bytes - at RowsDescription.bins from p1"),
    ],
)
def test_bins_that_were_not_offered_and_malformed_offers_end_the_job(tmp_path, kind, bins, text):
    with pytest.raises(PeerProtocolError, match=text):
        spoilt(tmp_path, {kind.__name__: lambda message: replace(message, bins=bins)})


def test_a_leader_that_names_bins_of_other_terms_is_refused(tmp_path):
    def widened(message):
        return replace(message, names=[*message.names, "more"], categories=[*message.categories, None])

    with pytest.raises(PeerProtocolError, match="expected bins that were offered and fit - at ModelBegin"):
        spoilt(tmp_path, {"ModelBegin": widened})


@pytest.mark.slow
def test_a_second_fit_between_processes_searches_for_no_bins(rows, tmp_path):
    first, again = (fit(rows, tmp_path, transport="tls", active="server") for _ in range(2))
    assert searched(first)
    assert not searched(again)
    table = real_table("binary", rows=240)[0]
    table = with_gaps(with_categories(table)).iloc[:, :6]
    np.testing.assert_array_equal(first.predict_proba(table), again.predict_proba(table))
