"""The verdict at the top of a report: what it says of the model, and of what partners add."""

from __future__ import annotations

import pytest

from html_pages import Parsed
from treaty.report import OWN
from treaty.report.contents import Contents, Curve, ModelScores
from treaty.report.page import page
from treaty.report.verdict import figures, verdict


def contents(**fields) -> Contents:
    return Contents(title="t", facts=[], whose="", viewer="bank", **fields)


def scored(metric: str, *, by_chance: bool = False, **values: float) -> Contents:
    models = {{"ours": "this model", "alone": OWN}[name]: {metric: of} for name, of in values.items()}
    return contents(scores=ModelScores(of="80 rows", values=models, by_chance=by_chance))


@pytest.mark.parametrize(
    ("found", "state", "said"),
    [
        (scored("AUC", ours=0.9, alone=0.8), "good", "helps: AUC is 0.9 with it and 0.8 without."),
        (scored("AUC", ours=0.803, alone=0.8), "wait", "adds almost nothing: AUC is 0.803 with it"),
        (scored("AUC", ours=0.99, alone=0.98), "good", "helps: AUC is 0.99 with it and 0.98 without."),
        (scored("AUC", ours=0.9, alone=0.8, by_chance=True), "wait", "seems to help: AUC is 0.9 with it and 0.8"),
        (scored("AUC", ours=0.8, alone=0.8), "wait", "adds nothing: AUC is 0.8 with it"),
        (scored("RMSE", ours=2.0, alone=3.0), "good", "helps: RMSE is 2 with it and 3 without."),
        (scored("RMSE", ours=3.0, alone=2.0), "wait", "adds nothing: RMSE is 3 with it"),
        (scored("AUC", ours=0.55), "bad", "hardly separates the classes: AUC is 0.55; 0.5 is guessing."),
        (scored("AUC", ours=0.9), "good", "The model separates the classes"),
        (scored("R²", ours=0.01), "bad", "hardly predicts the numbers"),
        (contents(curves=[Curve("e", "loss", [0.6, 0.3])]), "good", "loss on e is 0.6 after the first round and 0.3"),
        (contents(curves=[Curve("e", "auc", [0.9, 0.6])]), "bad", "did not learn: auc on e is 0.9 after"),
        (contents(curves=[Curve("e", "loss", [0.6, 0.7])]), "bad", "did not learn"),
        (contents(splits="gain", importances={"bank": {"x": 1.0}, "b": {"b": 0.0}}), "wait", "no split is on one"),
        (contents(splits="number", importances={"bank": {"x": 3.0}}), "good", "3 splits of the model are on columns"),
        (contents(splits="number", importances={"bank": {"x": 0.0}}), "wait", "0 splits of the model"),
    ],
)
def test_a_verdict_in_words(found, state, said):
    assert [shown for shown, sentence in verdict(found) if said in sentence] == [state]
    text = page(found)
    assert ("p", {"class": f"verdict {state}"}) in Parsed(text).tags
    assert text.index('class="verdict') < text.index("<main>")


def test_of_eval_sets_the_round_that_was_kept_counts():
    curves = [
        Curve("training rows", "loss", [0.6, 0.1], at=[1, 3]),
        Curve("e", "loss", [0.6, 0.4, 0.5]),
        Curve("e", "loss", [0.1], pooled=True),
        Curve(f"e, {OWN}", "loss", [0.6, 0.55, 0.58], alone=True),
    ]
    kept, last = (list(verdict(contents(curves=curves, best=best))) for best in (2, None))
    assert "loss is 0.4 with it and 0.55 without" in kept[1][1]
    assert "loss is 0.5 with it and 0.58 without" in last[1][1]


def test_a_report_without_losses_and_labels_says_that_it_has_no_verdict():
    said = "This report has no losses and no labels: it cannot say how good the model is."
    assert list(verdict(contents())) == [("", said)]
    assert list(figures(contents())) == []


def test_figures_are_of_the_slowest_party_and_all_bytes():
    found = contents(seconds={"a": {"x": 1.0}, "b": {"x": 1.0, "y": 2.0}}, sent={"a -> b": {"bytes": 2_000_000}})
    assert list(figures(found)) == [("3.0 s", "training"), ("2.00 MB", "sent")]
