"""Eval sets of a logistic regression: their losses are those of a pooled training, by consent, and may end it."""

from __future__ import annotations

import json

import numpy as np
import pytest

import treaty
from marks import slow
from systems.logistic.playing import linear_tables, play_logistic, weights_of
from systems.logistic.test_processes import job_file
from systems.logistic.test_resuming import FORMS, interrupted
from tables import cut_for_active, real_table
from treaty.data.table import Table
from treaty.errors import ConfigError, DataError
from treaty.messaging.messages import decode_body
from treaty.runs.job_files import load_job
from treaty.runs.prediction import find_part
from treaty.runs.processes import run_all
from treaty.systems.logistic.prediction import MarginPart

pytestmark = pytest.mark.filterwarnings("ignore:.*rows have a margin beyond 4:UserWarning")

GIVEN = {"batch_size": 120, "max_iter": 6, "period": 1, "tol": 0.0, "random_state": 3}
STEEP = GIVEN | {"max_iter": 12, "learning_rate": 0.6}  # the loss of eval rows rises again
KEYS = {"insecure_test_key_bits": 768, "allow_insecure": True}


CASES = [("lattice", 2), *(slow(form, n) for form in FORMS for n in (2, 3) if (form, n) != ("lattice", 2))]


def halves(parties=2):
    """Return tables and labels of 260 rows to train on and 90 to watch."""
    X, y = real_table("binary", rows=350)
    tables = cut_for_active(X, parties)
    first, rest = ({name: table[of] for name, table in tables.items()} for of in (slice(260), slice(260, None)))
    return (first, y[:260]), (rest, y[260:])


def taylor(model, X, y):
    margins = model.decision_function(X)  # of a model that is not calibrated
    signs = np.where(y == model.classes_[1], 1.0, -1.0)
    return np.mean(np.log(2.0) - signs * margins / 2.0 + margins**2 / 8.0)


@pytest.mark.parametrize(("form", "parties"), CASES)
def test_losses_between_parties_are_the_pooled_ones(form, parties):
    training, watched = halves(parties)
    own = {**FORMS[form], **({} if form.startswith("lattice") else KEYS)}
    ours = treaty.LogisticRegression(treaty.QuasiNewton(show_eval_margins=True, **own), calibrate=False, **GIVEN)
    alone = treaty.LogisticRegression("pooled", calibrate=False, **GIVEN)
    for model in (ours, alone):
        model.fit(*training, eval_set=[training, watched])
        assert list(model.evals_result_) == ["train", "eval_0", "eval_1"]
        assert len(model.evals_result_["eval_1"]["taylor"]) == model.n_iter_ == 6
        assert model.evals_result_["eval_1"]["taylor"][-1] == pytest.approx(taylor(model, *watched), abs=1e-8)
    for name, of in alone.evals_result_.items():
        np.testing.assert_allclose(ours.evals_result_[name]["taylor"], of["taylor"], atol=1e-8)


@pytest.mark.parametrize("protocol", ["pooled", treaty.QuasiNewton(show_eval_margins=True)])
def test_training_ends_when_eval_rows_get_no_better_and_keeps_the_best_weights(protocol, tmp_path):
    training, watched = halves()
    model = treaty.LogisticRegression(protocol, calibrate=False, early_stopping_rounds=2, **STEEP)
    model.fit(*training, eval_set=watched)
    losses = model.evals_result_["eval_0"]["taylor"]
    assert model.best_iteration_ == np.argmin(losses) == len(losses) - 3
    assert len(losses) < STEEP["max_iter"], "nothing ended it early: the test proves nothing"
    assert taylor(model, *watched) == pytest.approx(min(losses), abs=1e-8)
    model.save(tmp_path / "model")
    assert taylor(treaty.load(tmp_path / "model"), *watched) == pytest.approx(min(losses), abs=1e-8)


@pytest.mark.parametrize("protocol", ["pooled", treaty.QuasiNewton(show_eval_margins=True)])
def test_losses_are_printed(protocol, capsys):
    training, watched = halves()
    model = treaty.LogisticRegression(protocol, verbose=2, **GIVEN).fit(*training, eval_set=watched)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    losses = [model.evals_result_[name]["taylor"][::2] for name in ("train", "eval_0")]
    assert lines == [
        f"[{2 * k}]\ttrain-loss:{a:.5f}\teval_0-loss:{b:.5f}" for k, (a, b) in enumerate(zip(*losses, strict=True))
    ]


def test_the_exact_loss_on_one_table_is_watched_too():
    training, watched = halves()
    model = treaty.LogisticRegression(treaty.Pooled(loss="logistic"), **GIVEN).fit(*training, eval_set=watched)
    signs = np.where(watched[1] == model.classes_[1], 1.0, -1.0)
    last = np.mean(np.logaddexp(0.0, -signs * model.decision_function(watched[0])))
    assert model.evals_result_["eval_0"]["logistic"][-1] == pytest.approx(last, abs=1e-9)


def tables_of(parties: int) -> tuple[dict[str, Table], np.ndarray, tuple[dict[str, Table], np.ndarray]]:
    tables, y = linear_tables(parties, rows=350)
    rest = {name: Table(table.schema, [column[260:] for column in table.columns], 90) for name, table in tables.items()}
    first = {
        name: Table(table.schema, [column[:260] for column in table.columns], 260) for name, table in tables.items()
    }
    return first, y[:260], (rest, y[260:])


def margin_parts(played, sender: str) -> list[np.ndarray]:
    """Return what a party sent of eval rows' margins, by epoch."""
    found = [
        decode_body(entry.content, MarginPart, peer=sender).values
        for entry in played.transcripts[sender].entries
        if entry.direction == "sent" and entry.step == "MarginPart"
    ]  # fmt: skip
    return [np.frombuffer(values.data, np.uint64) for values in found if len(values.data) == 8 * 90]


def test_of_several_passive_parties_the_active_one_gets_sums_alone():
    tables, y, evals = tables_of(3)
    given = {"encryption": "lattice", "max_iter": 3, "calibrate": False, "show_eval_margins": True}
    played = play_logistic(tables, y, evals=evals, **given)
    parts = {name: margin_parts(played, name) for name in ("p1", "p2")}
    assert [len(of) for of in parts.values()] == [3, 3]
    for name in parts:
        own = played.results[name].margins(evals[0][name])
        masked = parts[name][-1].view(np.int64) * 2.0**-32
        assert np.abs(masked).mean() > 1e6 * np.abs(own).mean()
    summed = (parts["p1"][-1] + parts["p2"][-1]).view(np.int64) * 2.0**-32
    theirs = sum(played.results[name].margins(evals[0][name]) for name in parts)
    np.testing.assert_allclose(summed, theirs, atol=1e-8)
    assert np.any(parts["p1"][0] - parts["p1"][1] != parts["p1"][1] - parts["p1"][2]), "one mask for all epochs"


def test_a_resumed_training_ends_as_an_undisturbed_one(tmp_path):
    tables, y, evals = tables_of(2)
    given = {
        "encryption": "lattice", "max_iter": 20, "learning_rate": 1.0, "show_eval_margins": True,
        "early_stopping_rounds": 4, "period": 1, "evals": evals,
    }  # fmt: skip
    whole = play_logistic(tables, y, **given)
    losses = whole.results["p0"].eval_losses["eval_0"]
    best = int(np.argmin(losses)) + 1
    interrupted(tables, y, tmp_path, after=best + 2, **given)  # the best weights are those of a kept epoch before
    resumed = play_logistic(tables, y, checkpoints=tmp_path, **given)
    assert resumed.results["p0"].eval_losses["eval_0"] == losses
    np.testing.assert_array_equal(weights_of(resumed, tables), weights_of(whole, tables))
    assert sum(entry.step == "EpochEnd" for entry in resumed.transcripts["p1"].entries) < len(losses)
    other = evals[0] | {"p1": Table(evals[0]["p1"].schema, [-column for column in evals[0]["p1"].columns], 90)}
    interrupted(tables, y, tmp_path / "other", after=2, **given)
    with pytest.raises(ConfigError, match="p1: cannot resume: the training rows, eval sets"):
        play_logistic(tables, y, checkpoints=tmp_path / "other", **given | {"evals": (other, evals[1])})


def test_a_model_trained_without_eval_sets_is_kept_whatever_is_set_afterwards(tmp_path):
    training, watched = halves()
    model = treaty.LogisticRegression("pooled", **GIVEN).fit(*training)
    model.set_params(early_stopping_rounds=2).save(tmp_path / "model")
    loaded = treaty.load(tmp_path / "model")
    assert not hasattr(loaded, "best_iteration_")
    np.testing.assert_array_equal(loaded.predict(watched[0]), model.predict(watched[0]))


def test_what_does_not_go_together_is_refused():
    training, watched = halves()
    for protocol in ("quasi-newton", "sgd"):
        with pytest.raises(ConfigError, match=r"set show_eval_margins=True in .* at every party"):
            treaty.LogisticRegression(protocol, **GIVEN).fit(*training, eval_set=watched)
    shown = treaty.QuasiNewton(show_eval_margins=True)
    with pytest.raises(ConfigError, match="eval sets are of a logistic regression of two classes"):
        treaty.LogisticRegression(shown, standard_errors=True).fit(*training, eval_set=watched)
    paper = treaty.QuasiNewton(mode="paper", allow_insecure=True, show_eval_margins=True)
    with pytest.raises(ConfigError, match="mode='paper' has no eval sets"):
        treaty.LogisticRegression(paper, **GIVEN).fit(*training, eval_set=watched)
    with pytest.raises(ConfigError, match="early_stopping_rounds needs an eval_set"):
        treaty.LogisticRegression(shown, early_stopping_rounds=2, **GIVEN).fit(*training)
    with pytest.raises(ConfigError, match=r"expected eval_set=\(X, y\)"):
        treaty.LogisticRegression("pooled").fit(*training, eval_set=watched[0])
    with pytest.raises(DataError, match="expected the labels seen in training"):
        treaty.LogisticRegression("pooled").fit(*training, eval_set=(watched[0], np.full(90, 7)))


def test_parties_without_consent_or_with_other_eval_rows_are_refused():
    tables, y, evals = tables_of(2)
    given = {"encryption": "lattice", "max_iter": 1, "show_eval_margins": True}
    with pytest.raises(ConfigError, match="set show_eval_margins=True in QuasiNewton at every party"):
        play_logistic(tables, y, evals=evals, **given, theirs={"show_eval_margins": False})
    fewer = Table(evals[0]["p1"].schema, [column[:80] for column in evals[0]["p1"].columns], 80)
    with pytest.raises(DataError, match=r"expected eval sets of the same rows, got \[90\] rows at p0 and \[80\] at p1"):
        play_logistic(tables, y, evals=(evals[0] | {"p1": fewer}, evals[1]), **given)


@pytest.mark.slow
def test_fit_between_processes_watches_too():
    training, watched = halves()
    system = treaty.QuasiNewton(coordinator=False, encryption="lattice", show_eval_margins=True)
    model = treaty.LogisticRegression(system, transport="tls", **GIVEN).fit(*training, eval_set=watched)
    alone = treaty.LogisticRegression("pooled", **GIVEN).fit(*training, eval_set=watched)
    np.testing.assert_allclose(
        model.evals_result_["eval_0"]["taylor"], alone.evals_result_["eval_0"]["taylor"], atol=1e-8
    )


@pytest.mark.slow
def test_a_job_watches_eval_tables_and_its_report_has_their_losses(tmp_path):
    training, watched = halves(3)
    shown = {"show_eval_margins": True, "calibrate": False, "early_stopping_rounds": 2}
    path = job_file(tmp_path, training, **STEEP, **shown)
    job = path.read_text()
    for name, part in watched[0].items():
        table = part.assign(id=[f"another {k}" for k in range(len(part))])
        if name == "p0":
            table["kind"] = watched[1]
        table.iloc[::-1].to_csv(tmp_path / f"{name}.eval.csv", index=False)
        job = job.replace(
            f'table = "{name}.csv"\npredict', f'table = "{name}.csv"\neval_tables = ["{name}.eval.csv"]\npredict'
        )
    path.write_text(job)
    run_all(load_job(path), "train")
    part = find_part(load_job(path), "p0")
    losses = part.eval_losses["eval_0"]
    assert len(losses) - 1 - int(np.argmin(losses)) == 2, "nothing ended it early: the test proves nothing"
    assert json.loads((tmp_path / "model" / "p0.report.json").read_text())["losses"]["eval_0"] == losses
