"""Paper mode: what an option that is left open means in it, in every system, and what has to be consented to."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import treaty
from flat import flat
from tables import assert_same_trees, cut, cut_for_active, real_table
from treaty.errors import ConfigError
from treaty.systems import OPTIONS, option_class
from treaty.systems.fedxgboost_smm.options import Sizes
from treaty.systems.logistic.options import RegressionOptions
from treaty.systems.pooled.options import BoostingOptions

PAGE = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
PAPER = {"mode": "paper", "allow_insecure": True}
FIT = {"n_estimators": 2, "n_jobs": 1}


def chosen(kind, **named):
    """Return what options and common ones mean where only these are named."""
    own = {name: value for name, value in named.items() if name != "max_bin"}
    options = kind(**PAPER, **own)
    common = BoostingOptions(max_bin=named.get("max_bin")).checked(options)
    options.check(common)
    return SimpleNamespace(own=options, bins=common.max_bin, fewest=common.fewest_rows)


def of_secureboost(found):
    ciphers = found.own.ciphers
    return ciphers.cipher, ciphers.key_bits, ciphers.insecure_test_key_bits, ciphers.rerandomise


def of_ldp(found):
    return found.own.noise_mechanism, found.own.noise_epsilon, found.own.first_order


@pytest.mark.parametrize(
    ("kind", "meaning", "paper", "named", "instead"),
    [
        (treaty.SecureBoost, of_secureboost, ("paillier", None, 512, False), {"key_bits": 2048, "rerandomise": True},
         ("paillier", 2048, None, True)),
        (treaty.SecureBoost, of_secureboost, ("paillier", None, 512, False), {"encryption": "ou"},
         ("ou", None, None, False)),
        (treaty.SecureBoost, of_secureboost, ("paillier", None, 512, False), {"encryption": "lattice"},
         ("lattice", None, None, True)),
        (treaty.SecureBoost, of_secureboost, ("paillier", None, 512, False), {"encryption": "auto"},
         ("auto", None, None, True)),
        (treaty.FedXGBoostSMM, lambda found: (found.own.version != 2, found.own.sizes, found.bins),
         (True, Sizes(null_vectors=32, bit_columns=None, normal_columns=8), 20),
         {"version": 2, "null_vectors": 5, "bit_columns": 6, "normal_columns": 7, "max_bin": 9},
         (False, Sizes(null_vectors=5, bit_columns=6, normal_columns=7), 9)),
        (treaty.FedXGBoostLDP, of_ldp, ("duchi", 1.0, True),
         {"mechanism": "laplace", "epsilon": 3.0, "split_score": "second_order"}, ("laplace", 3.0, False)),
        (treaty.FederBoostVertical, lambda found: (found.own.value_epsilon, found.bins), (4.0, 16),
         {"epsilon": 2.0, "max_bin": 14}, (2.0, 14)),
        (treaty.FederBoostHorizontal, lambda found: found.bins, 24, {"max_bin": 26}, 26),
        (treaty.FedXGB, lambda found: found.own.exposes, "paper", {"expose": "nothing"}, "nothing"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)  # fmt: skip
def test_an_option_left_open_is_the_papers_and_a_named_one_is_as_named(kind, meaning, paper, named, instead):
    assert meaning(chosen(kind)) == paper
    assert meaning(chosen(kind, **named)) == instead
    assert chosen(kind).fewest == 1


@pytest.mark.parametrize("kind", [treaty.QuasiNewton, treaty.SGD])
def test_a_regression_in_paper_mode_has_the_papers_cipher_with_secure_keys(kind):
    options = kind(**PAPER)
    assert (options.cipher(32), options.key_bits, options.has_coordinator) == ("paillier", None, True)
    assert kind(**PAPER, encryption="ou").cipher(32) == "ou"
    common = RegressionOptions().checked(options)
    assert (common.batch_size, common.period, common.tol) == (1000, 4, 1e-5)


def test_bins_are_as_many_as_cost_little_where_a_paper_names_none_and_in_safe_mode():
    for name in OPTIONS:
        kind = option_class(name)
        assert kind.paper_bins == {"FedXGBoostSMM": 20, "FederBoostVertical": 16, "FederBoostHorizontal": 24}.get(name)
        free = {"Pooled": 255, "SecureBoost": 64, "FedXGBoostSMM": 64}
        assert BoostingOptions().checked(kind()).max_bin == free.get(name, 32)
        assert BoostingOptions(max_bin=16).checked(kind()).max_bin == 16
    assert BoostingOptions().checked(treaty.SecureBoost(**PAPER)).max_bin == 64


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({}, r"keys of 512 bits, which can be factored, and answers .* or key_bits=3072 and rerandomise=True"),
        ({"key_bits": 2048}, r"has, as published, answers that are not re-randomised.* or rerandomise=True"),
        ({"rerandomise": True}, r"has, as published, Paillier keys of 512 bits.* or key_bits=3072"),
        ({"encryption": "ou"}, r"answers that are not re-randomised"),
    ],
    ids=str,
)
def test_what_is_insecure_about_a_paper_is_refused_by_name_without_consent(named, words):
    with pytest.raises(ConfigError, match=words):
        treaty.SecureBoost(mode="paper", **named).check(BoostingOptions())
    treaty.SecureBoost(mode="paper", key_bits=2048, rerandomise=True).check(BoostingOptions())
    X, y = real_table("binary", rows=60)
    with pytest.raises(ConfigError, match=r"option key_bits=512"):
        treaty.GBDTClassifier(treaty.SecureBoost(key_bits=512)).fit(cut(X, 2), y)


def test_fedxgbs_published_sums_are_refused_before_its_published_predictions():
    with pytest.raises(ConfigError, match=r"every edge server can read the histograms"):
        treaty.FedXGB(mode="paper").check(BoostingOptions())


# ---------------------------------------------------------------- trainings


def test_secureboost_trains_as_published_and_says_so():
    X, y = real_table("binary", rows=120)
    tables = cut(X, 2)
    fit = {**FIT, "max_bin": 32}
    model = flat(treaty.GBDTClassifier, "secureboost", **PAPER, **fit).fit(tables, y)
    assert model.parts_["p0"].encryption == "paillier"
    assert any("512 bits" in line for line in model.disclosures_["p0"])
    assert any("answers were not re-randomised" in line for line in model.disclosures_["p0"])
    assert_same_trees(model, flat(treaty.GBDTClassifier, mode="paper", **fit).fit(tables, y))
    safer = flat(treaty.GBDTClassifier, "secureboost", mode="paper", key_bits=2048, rerandomise=True, **fit)
    told = str(safer.fit(tables, y).disclosures_)
    assert "512 bits" not in told
    assert "re-randomised" not in told
    assert safer.communication_["p0 -> p1"]["bytes"] > model.communication_["p0 -> p1"]["bytes"]
    assert_same_trees(safer, model)


def test_fedxgboost_ldp_sends_gradients_alone_under_duchis_noise_of_the_whole_epsilon():
    X, y = real_table("binary")
    model = flat(treaty.GBDTClassifier, "fedxgboost-ldp", **PAPER, **FIT).fit(cut(X, 2), y)
    assert "(duchi): epsilon 1 per value" in str(model.disclosures_["p1"])
    sent = model.communication_["p0 -> p1"]["by_type"]["NoisyTree"]
    second = flat(treaty.GBDTClassifier, "fedxgboost-ldp", **PAPER, split_score="second_order", **FIT)
    more = second.fit(cut(X, 2), y).communication_["p0 -> p1"]["by_type"]["NoisyTree"]
    assert more - sent >= 2 * 4 * len(y)  # hessians of two trees


def test_the_sizes_of_matrix_products_are_those_named():
    X, y = real_table("binary")
    sent = {}
    for vectors in (None, 8):
        model = flat(treaty.GBDTClassifier, "fedxgboost-smm", **PAPER, null_vectors=vectors, max_depth=1, **FIT)
        sent[vectors] = model.fit(cut(X, 2), y).communication_["p0 -> p1"]["by_type"]["NullVectors"]
    assert sent[None] - sent[8] == 2 * 8 * (32 - 8) * len(y)  # two roots, float64


@pytest.mark.slow
def test_fedxgb_shows_users_columns_of_splits():
    X, y = real_table("binary", rows=120)
    rows = {f"user {k}": (X[k::9], y[k::9]) for k in range(9)}
    for named, step in ({}, "ShownSplits"), ({"expose": "model"}, "KnownSplits"):
        model = flat(treaty.GBDTClassifier, "fedxgb", **PAPER, **named, **FIT).fit(rows)
        assert step in model.communication_["server -> edge0"]["by_type"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_a_regression_as_published_is_under_paillier():
    X, y = real_table("binary")
    common = {"batch_size": 40, "max_iter": 1, "insecure_test_key_bits": 512, "n_jobs": 1}
    model = flat(treaty.LogisticRegression, "quasi-newton", **PAPER, **common).fit(cut_for_active(X.iloc[:, :4], 2), y)
    assert model.parts_["p0"].encryption == "paillier"


# ---------------------------------------------------------------- the page


# no paper has pooled training or statistics
@pytest.mark.parametrize("name", sorted({*OPTIONS} - {"Pooled", "Statistics"}))
def test_the_page_has_a_row_for_every_system(name):
    rows = [line for line in PAGE.splitlines() if re.match(rf"\| .*`{name}`", line)]
    assert rows, f"docs/experiments.md says nothing of {name} in its table of paper mode"
    bins = option_class(name).paper_bins
    assert bins is None or any(f"`max_bin={bins}`" in row for row in rows)
