"""Options of every system: shown, copied, searched, and refused in the wrong place, in Python and in job files."""

from __future__ import annotations

import inspect
import json
import pickle
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

import treaty
from flat import CLASSES, common_of, option_lines
from tables import cut, real_table
from treaty.errors import ConfigError
from treaty.machine import process
from treaty.runs.job import Job
from treaty.runs.job_files import load_job
from treaty.systems import ESTIMATORS, OPTIONS, SYSTEMS, find_system, option_class, option_owners
from treaty.systems.logistic.options import RegressionOptions
from treaty.systems.options import SystemOptions, converted, given, names_of, place_of, public_terms
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.statistics.options import ColumnOptions
from treaty.systems.system import roles_of

REGRESSIONS = ESTIMATORS["logistic"]

EVERY = {name: option_class(name) for name in OPTIONS}
FEDERATED = [name for name in CLASSES if name != "pooled"]
SHARED = {"mode", "allow_insecure"}
DOCS = Path(__file__).parents[2] / "docs"
LINEAR = {"quasi-newton", "sgd"}
SHARED_OPTION = {**dict.fromkeys(LINEAR, "max_iter"), "statistics": "min_bin_rows"}


def estimator_of(protocol: str):
    if protocol == "statistics":
        return treaty.ColumnStatistics
    return treaty.LogisticRegression if protocol in LINEAR else treaty.GBDTClassifier


def other_value(kind, name):
    """Return a value of an option that is not its default."""
    hint = get_type_hints(kind)[name]
    for of in [hint] if get_origin(hint) is Literal else get_args(hint) or [hint]:
        if get_origin(of) is Literal:
            return next(value for value in reversed(get_args(of)) if value != getattr(kind, name))
        if of in (bool, int, float, str):
            return {bool: True, int: 128, float: 0.25, str: "sex"}[of]
        if get_origin(of) in (dict, Sequence):
            return {"shop.age": 0.25} if get_origin(of) is dict else [0.0, 9.0]
    raise AssertionError(name)


# ---------------------------------------------------------------- the classes


def test_every_public_class_belongs_to_the_record_of_its_name():
    assert set(EVERY) <= set(treaty.__all__)
    assert all(getattr(treaty, name) is kind for name, kind in EVERY.items())
    for model, systems in SYSTEMS.items():
        for name in systems:
            system = find_system(name, model)
            assert (system.name, system.options.system) == (name, name)
            assert system.options in EVERY.values()
            assert system.common is {"logistic": RegressionOptions, "statistics": ColumnOptions}.get(
                model, BoostingOptions
            )


@pytest.mark.parametrize("kind", EVERY.values(), ids=EVERY)
def test_options_show_what_was_changed_and_are_made_of_what_they_show(kind):
    assert repr(kind()) == f"{kind.__name__}()"
    for name in names_of(kind):
        changed = kind(**{name: other_value(kind, name)})
        assert repr(changed) == f"{kind.__name__}({name}={other_value(kind, name)!r})"
        assert eval(repr(changed), {kind.__name__: kind}) == changed != kind()
        assert pickle.loads(pickle.dumps(changed)) == changed


@pytest.mark.parametrize("kind", EVERY.values(), ids=EVERY)
def test_options_are_parameters_as_scikit_learn_has_them(kind):
    changed = kind(**{name: other_value(kind, name) for name in names_of(kind)})
    assert kind().get_params() == {name: getattr(kind, name) for name in names_of(kind)}
    assert clone(changed) == changed
    assert clone(changed) is not changed
    fresh = kind()
    assert fresh.set_params(**changed.get_params()) is fresh
    assert fresh == changed
    with pytest.raises(ConfigError, match=f"{kind.__name__} has no option 'colour'"):
        fresh.set_params(colour="red")


@pytest.mark.parametrize("kind", EVERY.values(), ids=EVERY)
def test_an_option_of_elsewhere_is_refused_with_the_place_it_belongs_to(kind):
    own = names_of(kind)
    foreign = {name for other in EVERY.values() for name in names_of(other) if name not in own}
    for name in sorted(foreign):
        owners = [who for who, other in EVERY.items() if name in names_of(other)]
        with pytest.raises(ConfigError) as caught:
            kind(**{name: 1})
        assert str(caught.value).startswith(f"{kind.__name__} has no option '{name}'; {name} is an option of ")
        assert all(who in str(caught.value) for who in owners)
    for name in set(names_of(BoostingOptions)) - set(own):
        with pytest.raises(
            ConfigError, match=rf"has no option '{name}'.*of GBDTClassifier and GBDTRegressor \(\[boost"
        ):
            kind(**{name: 1})
    with pytest.raises(ConfigError, match=rf"max_iter is an option of {REGRESSIONS} \(\[regression\] in a job"):
        kind(max_iter=3)
    with pytest.raises(ConfigError, match=rf"{kind.__name__} has no 'ou' without a name; it has mode"):
        kind("ou")


@pytest.mark.parametrize("kind", EVERY.values(), ids=EVERY)
def test_what_belongs_to_the_estimator_is_refused_with_its_place(kind):
    for name, where in [("active", "at the top of a job file"), ("n_jobs", "at the top"), ("transport", "has none")]:
        every = ", ".join(ESTIMATORS.values()).replace(" and ", ", ")
        words = f"no option '{name}'; {name} is an option of {every}"
        with pytest.raises(ConfigError, match=rf"{words} \(.*{where}"):
            kind(**{name: 1})


def test_a_name_with_a_slip_is_recognised_everywhere(tmp_path):
    for wrong in (lambda: treaty.SecureBoost(encrypton="ou"), lambda: treaty.SecureBoost().set_params(encrypton="ou")):
        with pytest.raises(ConfigError, match=r"^SecureBoost has no option 'encrypton'; did you mean 'encryption'\?$"):
            wrong()
    for wrong in (lambda: treaty.GBDTClassifier(max_dept=3), lambda: treaty.GBDTClassifier().set_params(max_dept=3)):
        with pytest.raises(ConfigError, match=r"GBDTClassifier has no parameter 'max_dept'; did you mean 'max_depth'"):
            wrong()
    with pytest.raises(ConfigError, match=r"the job has no field 'activ'; did you mean 'active'\?"):
        load_job(written(tmp_path, job_text("secureboost", head='activ = "a"')))


def test_what_may_be_left_out_is_called_none():
    with pytest.raises(ConfigError, match=r"^option rl_trees='x': expected `int \| None`, got `str`$"):
        converted({"rl_trees": "x"}, treaty.SecureBoost, "SecureBoost")


def test_nobody_has_an_option_that_nobody_has():
    assert option_owners("colour", None) == []
    assert place_of("colour", BoostingOptions) == ""
    assert option_owners("n_estimators", BoostingOptions) == []
    with pytest.raises(ConfigError, match=r"^\[boosting\] has no option 'max_dept'; did you mean 'max_depth'\?$"):
        converted({"max_dept": 3}, BoostingOptions, "[boosting]")


@pytest.mark.parametrize("kind", EVERY.values(), ids=EVERY)
def test_values_of_the_wrong_type_are_named(kind):
    for name in names_of(kind):
        with pytest.raises(ConfigError, match=f"option {name}="):
            converted({name: b"?"}, kind, kind.__name__)


@pytest.mark.parametrize(
    ("kind", "name", "refused", "taken"),
    [
        (BoostingOptions, "learning_rate", [0.0, -0.1], 1e-9),
        (RegressionOptions, "learning_rate", [0.0, -0.1], 1e-9),
        (treaty.SecureBoost, "purity_guard", [0.0, 1.0, -0.1, 1.1], 0.999),
    ],
)
def test_values_that_would_switch_an_option_off_are_refused(kind, name, refused, taken):
    """Without a rate nothing is learned; a guard of 0 shows nothing and one of 1 everything."""
    assert getattr(converted({name: taken}, kind, ""), name) == taken
    for value in refused:
        with pytest.raises(ConfigError, match=rf"^option {name}={value}: expected `float` [<>]"):
            converted({name: value}, kind, "")


def test_numpys_numbers_count_as_pythons_and_infinity_where_it_means_something():
    found = converted({"epsilon": np.float64(2.0)}, treaty.FederBoostVertical, "")
    assert (found.epsilon, type(found.epsilon)) == (2.0, float)
    assert converted({"epsilon": "inf"}, treaty.FederBoostVertical, "").epsilon == float("inf")
    with pytest.raises(ConfigError, match="epsilon=inf: expected a finite number"):
        converted({"epsilon": "inf"}, treaty.SecureBoost, "")


@pytest.mark.parametrize(
    ("options", "common"),
    [
        (treaty.SecureBoost(insecure_test_key_bits=512), BoostingOptions(min_child_samples=20)),
        (treaty.FedXGBoostSMM(backend="ou", insecure_test_key_bits=512), BoostingOptions(min_child_samples=20)),
        (treaty.QuasiNewton(insecure_test_key_bits=512), RegressionOptions()),
        (treaty.SGD(insecure_test_key_bits=512), RegressionOptions()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_keys_for_tests_need_consent_and_are_in_what_is_learned(options, common):
    with pytest.raises(ConfigError, match="insecure_test_key_bits=512: expected allow_insecure=True with it"):
        options.check(common)
    options.allow_insecure = True
    options.check(common)
    system = find_system(options.system)
    roles = roles_of(system, ["bank", "shop"], "bank", options)
    learned = system.disclosures(roles, options, common, None)
    assert all("the key, which is for tests alone: 512 bits" in " ".join(learned[name]) for name in roles.owners)
    options.insecure_test_key_bits = None
    assert "for tests alone" not in str(system.disclosures(roles, options, common, None))


def test_parties_agree_on_all_options_but_those_of_the_active_party():
    own, common = treaty.SecureBoost(rl_trees=1), BoostingOptions(random_state=3)
    every = given(own, common)
    assert set(every) == {"protocol", *names_of(treaty.SecureBoost), *names_of(BoostingOptions)}
    assert (every["protocol"], every["rl_trees"], every["random_state"]) == ("secureboost", 1, 3)
    assert set(every) - set(public_terms(own, common)) == {"random_state", "eval_metric"}


@pytest.mark.parametrize("kind", EVERY.values(), ids=EVERY)
def test_docstrings_describe_every_option(kind):
    described = {
        name
        for line in inspect.cleandoc(kind.__doc__).splitlines()
        if not line.startswith(" ")
        for name in line.partition(" : ")[0].replace(",", " ").split()
    }
    assert set(names_of(kind)) <= described


def test_the_page_of_options_is_what_the_classes_say(capsys):
    runpy.run_path(str(DOCS / "options.py"))
    page = (DOCS / "options.md").read_text()
    assert capsys.readouterr().out == page, "run `make docs`"
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    assert {*EVERY, "Of the estimator alone"} <= set(sections)
    for title, text in sections.items():
        rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
        assert all(kind and "As for" not in meaning for _, _, kind, meaning in rows), title
        assert len({meaning for *_, meaning in rows}) == len(rows), f"two options of {title} have one meaning"
        assert ("In a job file: `protocol" in text) == (title in EVERY and title != "Pooled")


# ---------------------------------------------------------------- on estimators


@pytest.mark.parametrize("name", CLASSES)
def test_an_estimator_has_its_systems_options_as_nested_parameters(name):
    kind, estimator = CLASSES[name], estimator_of(name)
    chosen = kind(mode="paper", allow_insecure=True)
    model = estimator(chosen, n_jobs=1)
    assert model.protocol is chosen
    nested = {key for key in model.get_params() if key.startswith("protocol__")}
    assert nested == {f"protocol__{option}" for option in names_of(kind)}
    assert not any("__" in key for key in model.get_params(deep=False))
    again = clone(model)
    assert again.protocol == chosen
    assert again.protocol is not chosen
    again.set_params(protocol__mode="safe", n_jobs=2)
    assert (again.protocol.mode, chosen.mode, again.n_jobs) == ("safe", "paper", 2)
    named = estimator(name).set_params(protocol__mode="paper")
    assert named.protocol == kind(mode="paper")
    assert estimator(name).protocol == name
    assert kind.__name__ in repr(model)


@pytest.mark.parametrize("before", ["pooled", treaty.SecureBoost()], ids=str)
@pytest.mark.parametrize("after", ["fedxgboost-ldp", treaty.FedXGBoostLDP()], ids=str)
def test_a_system_and_its_options_can_be_set_together(before, after):
    model = treaty.GBDTClassifier(before).set_params(protocol=after, protocol__epsilon=2.0)
    assert model.protocol == treaty.FedXGBoostLDP(epsilon=2.0)


def test_a_model_is_saved_with_numpy_values_of_its_systems_options(tmp_path):
    X, y = real_table("binary", rows=60)
    chosen = treaty.FedXGBoostLDP(epsilon=np.float32(20.0), allow_insecure=np.False_)
    treaty.GBDTClassifier(chosen, n_estimators=np.int64(1), n_jobs=1).fit(cut(X, 2), y).save(tmp_path)
    assert treaty.load(tmp_path).protocol == treaty.FedXGBoostLDP(epsilon=20.0)


def test_the_pooled_system_serves_both_kinds_of_model():
    trees = treaty.GBDTClassifier().set_params(protocol__mode="paper").protocol
    assert (
        trees == treaty.LogisticRegression().set_params(protocol__mode="paper").protocol == treaty.Pooled(mode="paper")
    )
    X, y = real_table("binary", rows=60)
    with pytest.raises(ConfigError, match="is for LogisticRegression: boosted trees have no solver"):
        treaty.GBDTClassifier(treaty.Pooled(solver="sgd")).fit(X, y)


class ByParty(treaty.GBDTClassifier):
    """A search cuts one table into rows; the parties get their columns of them."""

    def fit(self, X, y):
        return super().fit(cut(X, 2), y)

    def predict(self, X):
        return super().predict(cut(X, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("protocol", "option", "values"),
    [
        (treaty.SecureBoost(insecure_test_key_bits=512, allow_insecure=True), "rl_trees", [0, 1]),
        ("fedxgboost-ldp", "epsilon", [10.0, 20.0]),
        (treaty.FedXGBoostSMM(backend="dealer"), "reveal", ["node", "column"]),
        ("federboost-vertical", "epsilon", [20.0, 40.0]),
        ("pooled", "mode", ["safe", "paper"]),
    ],
    ids=str,
)
def test_a_grid_search_varies_a_systems_options(protocol, option, values):
    X, y = real_table("binary", rows=120)
    model = ByParty(protocol, n_estimators=2, max_bin=8, min_child_samples=3, n_jobs=1)
    search = GridSearchCV(model, {f"protocol__{option}": values}, cv=2, error_score="raise").fit(X, y)
    assert [tried[f"protocol__{option}"] for tried in search.cv_results_["params"]] == values
    assert search.best_score_ > 0.5
    assert getattr(search.best_estimator_.protocol, option) in values


@pytest.mark.parametrize("estimator", [treaty.GBDTClassifier, treaty.GBDTRegressor, treaty.LogisticRegression])
def test_an_estimator_refuses_a_systems_option_with_its_place(estimator):
    for name, where in [("encryption", "SecureBoost"), ("mode", "Pooled"), ("epsilon_total", "FedXGBoostLDP")]:
        with pytest.raises(ConfigError, match=f"{estimator.__name__} has no parameter '{name}'; .*{where}"):
            estimator(**{name: 1})
    with pytest.raises(ConfigError, match=f"{estimator.__name__} has no parameter 'colour'"):
        estimator(colour="red")
    other = "l2" if estimator is not treaty.LogisticRegression else "max_depth"
    with pytest.raises(ConfigError, match=f"has no parameter '{other}'; {other} is an option of "):
        estimator(**{other: 1})


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            treaty.GBDTClassifier(treaty.QuasiNewton()),
            f"^QuasiNewton is a system of {REGRESSIONS}, not of GBDTClassifier$",
        ),
        (
            treaty.GBDTRegressor("sgd"),
            f"one of pooled, secureboost, .* got 'sgd', a system of {REGRESSIONS}$",
        ),
        (
            treaty.LogisticRegression(treaty.SecureBoost()),
            "^SecureBoost is a system of GBDTClassifier and GBDTRegressor, not of LogisticRegression$",
        ),
        (
            treaty.GBDTClassifier("secure-boost"),
            "expected protocol to be one of pooled, secureboost, .* 'secure-boost'",
        ),
        (treaty.GBDTClassifier("no.such.module:SYSTEM"), "cannot import the system 'no.such.module:SYSTEM'"),
        (treaty.GBDTClassifier([3]), "protocol"),
        (treaty.GBDTClassifier(treaty.SecureBoost), "protocol"),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value),
)
def test_a_system_of_another_kind_of_model_is_refused(model, words):
    X, y = real_table("binary", rows=60)
    with pytest.raises(ConfigError, match=words):
        model.fit(cut(X, 2), y)


# ---------------------------------------------------------------- in job files


def job_text(protocol: str, *, own: str = "", common: str = "", head: str = "") -> str:
    table = common_of(protocol).table
    lines = ['name = "t"', f'protocol = "{protocol}"', 'active = "a"', 'label = "y"', head]
    lines += ["[parties.a]", 'table = "a.csv"', "[parties.b]", 'table = "b.csv"']
    return "\n".join([*lines, f"[{protocol}]", own, f"[{table}]", common])


def written(folder: Path, text: str) -> Path:
    (folder / "job.toml").write_text(text)
    return folder / "job.toml"


def test_a_job_says_how_many_classes_labels_have_where_there_are_some(tmp_path):
    assert load_job(written(tmp_path, job_text("secureboost"))).classes == 2
    assert load_job(written(tmp_path, job_text("secureboost", head="classes = 5"))).classes == 5
    several = load_job(written(tmp_path, job_text("quasi-newton", head="classes = 5")))
    assert (several.classes, several.settings()[1].family) == (5, "multiclass")
    for protocol, head, words in (
        ("secureboost", 'classes = 3\ntask = "regression"', 'expected no classes with task = "regression", got 3'),
        ("quasi-newton", 'classes = 3\ntask = "regression"', 'expected no classes with task = "regression", got 3'),
        ("quasi-newton", 'task = "regression"', 'expected task = "classification" with family = "logistic", got task'),
        ("secureboost", "classes = 1", "classes"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_job(written(tmp_path, job_text(protocol, head=head)))


@pytest.mark.parametrize("name", FEDERATED)
def test_a_job_file_has_a_table_for_each_kind_of_option(tmp_path, name):
    common = f"{SHARED_OPTION.get(name, 'n_estimators')} = 3"
    job = load_job(written(tmp_path, job_text(name, own="allow_insecure = true", common=common)))
    assert (job.protocol, job.own) == (name, {"allow_insecure": True})
    own, shared = job.settings()
    assert own == CLASSES[name](allow_insecure=True).settled(converted(job.common, type(shared), ""))
    assert getattr(shared, common.split()[0]) == 3
    (tmp_path / "job.json").write_bytes(job.encoded())
    assert {name, common_of(name).table} <= set(json.loads(job.encoded()))
    assert load_job(tmp_path / "job.json") == job


def test_a_job_without_a_protocol_is_of_secureboost(tmp_path):
    text = job_text("secureboost", own="rl_trees = 1").replace('protocol = "secureboost"\n', "")
    assert load_job(written(tmp_path, text)).settings()[0] == treaty.SecureBoost(rl_trees=1, sums="sealed")
    assert Job(name="t", active="a", label="y", parties={}).protocol == "secureboost"


@pytest.mark.parametrize("name", FEDERATED)
def test_a_job_file_with_an_option_in_the_wrong_table_says_which_is_right(tmp_path, name):
    table = common_of(name).table
    shared = SHARED_OPTION.get(name, "n_estimators")
    with pytest.raises(ConfigError, match=rf"\[{name}\] has no option '{shared}'; it belongs in \[{table}\] - in"):
        load_job(written(tmp_path, job_text(name, own=f"{shared} = 3")))
    with pytest.raises(ConfigError, match=rf"\[{table}\] has no option 'mode'; it belongs in \[{name}\] - in"):
        load_job(written(tmp_path, job_text(name, common='mode = "paper"')))
    with pytest.raises(ConfigError, match=rf"\[{name}\] has no option 'colour'"):
        load_job(written(tmp_path, job_text(name, own='colour = "red"')))
    with pytest.raises(ConfigError, match=rf"no field '{shared}'; it belongs in \[{table}\]"):
        load_job(written(tmp_path, job_text(name, head=f"{shared} = 3")))
    other = "fedxgb" if name != "fedxgb" else "secureboost"
    with pytest.raises(ConfigError, match=rf"expected options in \[{name}\] and \[{table}\], got a table \[{other}\]"):
        load_job(written(tmp_path, job_text(name) + f'\n[{other}]\nmode = "paper"'))
    with pytest.raises(ConfigError, match=rf"expected options in \[{name}\] and \[{table}\], got a table \[options\]"):
        load_job(written(tmp_path, job_text(name) + '\n[options]\nmode = "paper"'))
    for of, right in [
        ('active = "a"', "at the top of the job"), ("n_jobs = 1", "at the top of the job"),
        ("timeout = 5", "at the top of the job"), ('role = "edge"', r"in \[parties.NAME"), ('on = "id"', r"in \[align"),
    ]:  # fmt: skip
        for place, line in [(name, {"own": of}), (table, {"common": of})]:
            with pytest.raises(ConfigError, match=rf"\[{place}\] has no option '{of.split()[0]}'; it belongs {right}"):
                load_job(written(tmp_path, job_text(name, **line)))
    with pytest.raises(ConfigError, match=rf"\[{table}\] has no option 'transport'; .*\(a job file has none: its par"):
        load_job(written(tmp_path, job_text(name, common='transport = "tls"')))
    for field in ("own", "common"):  # what the tables are called inside
        with pytest.raises(ConfigError, match=f"the job has no field '{field}'"):
            load_job(written(tmp_path, job_text(name) + f'\n[{field}]\nmode = "paper"'))
    text = job_text(name, head=f"{table} = 5").replace(f"\n[{table}]", "")
    with pytest.raises(ConfigError, match=rf"expected \[{table}\] to be a table of options, got 5 - in the job"):
        load_job(written(tmp_path, text))


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ('mode = "paper"', r"it belongs in \[secureboost\]"),
        ("max_depth = 3", r"it belongs in \[boosting\]"),
        ("timeout = 5", "it belongs at the top of the job"),
        ('tabel = "a.csv"', "did you mean 'table'"),
        ('colour = "red"', "it has address, listen, proxy, certificate, key, id, table, "),
    ],
)
def test_a_field_that_a_party_or_the_alignment_lacks_is_refused_with_its_place(tmp_path, line, right):
    text = job_text("secureboost").replace("[parties.b]", f"[parties.b]\n{line}")
    name = line.split()[0]
    with pytest.raises(ConfigError, match=rf"^\[parties.b\] has no field '{name}'; {right}.* - in the job"):
        load_job(written(tmp_path, text))
    text = job_text("secureboost") + f"\n[align]\n{line}"
    with pytest.raises(ConfigError, match=rf"^\[align\] has no field '{name}'; "):
        load_job(written(tmp_path, text))


def test_what_is_no_table_of_a_party_is_one_error_and_what_may_be_left_out_is_none(tmp_path):
    text = job_text("secureboost").replace('[parties.b]\ntable = "b.csv"', "[parties]\nb = 5")
    with pytest.raises(ConfigError, match=r"^\[parties.b\] expected a table, got a whole number - in the job"):
        load_job(written(tmp_path, text))
    with pytest.raises(ConfigError, match=r"^n_jobs = 'x': expected a whole number, got text - in the job"):
        load_job(written(tmp_path, job_text("secureboost", head='n_jobs = "x"')))


@pytest.mark.parametrize("name", ["pooled", "secure-boost", "no.such.module:SYSTEM"])
def test_a_job_file_of_no_system_between_parties_is_refused(tmp_path, name):
    text = f'name = "t"\nactive = "a"\nlabel = "y"\nprotocol = "{name}"\n[parties.a]\n[parties.b]\n'
    with pytest.raises(ConfigError, match=f"{name}.* - in the job |{name}"):
        load_job(written(tmp_path, text))


@pytest.mark.parametrize("wrong", ["5", '["secureboost"]', '"treaty.systems:SYSTEMS"'])
def test_a_protocol_that_is_no_systems_name_is_one_error(tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(process, "_TRUSTED", {"treaty.systems:SYSTEMS"})
    text = job_text("secureboost").replace('protocol = "secureboost"', f"protocol = {wrong}")
    with pytest.raises(ConfigError, match=r"expected (protocol|'treaty.systems:SYSTEMS') to be .* - in the job"):
        load_job(written(tmp_path, text))


def test_infinity_in_a_job_file_reaches_the_parties_processes(tmp_path):
    text = job_text("federboost-vertical", own='mode = "paper"\nallow_insecure = true\nepsilon = inf')
    job = load_job(written(tmp_path, text))
    (tmp_path / "job.json").write_bytes(job.encoded())
    assert load_job(tmp_path / "job.json").settings()[0].epsilon == np.inf == job.settings()[0].epsilon


def test_lines_of_options_are_those_that_a_job_file_has(tmp_path):
    protocol, lines = option_lines("federboost-vertical", epsilon=2.0, n_estimators=3)
    assert (protocol, lines) == (
        'protocol = "federboost-vertical"',
        [
            "[federboost-vertical]",
            "epsilon = 2.0",
            "[boosting]",
            "n_estimators = 3",
            "max_depth = 3",
            "learning_rate = 0.3",
        ],
    )


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (treaty.Pooled(), (100, 5, 0.1)),
        (treaty.SecureBoost(), (100, 5, 0.1)),
        (treaty.FedXGBoostSMM(), (100, 5, 0.1)),
        (treaty.FederBoostHorizontal(), (100, 5, 0.1)),
        (treaty.FedXGB(), (100, 5, 0.1)),
        (treaty.FederBoostHorizontal(epsilon_total=1.0), (50, 3, 0.6)),
        (treaty.FederBoostVertical(), (20, 3, 0.3)),
        (treaty.FedXGBoostLDP(), (20, 3, 0.3)),
        (treaty.FedXGB(mode="paper", allow_insecure=True), (20, 3, 0.3)),
    ],
    ids=repr,
)
def test_the_trees_that_are_shipped(shipped_trees, monkeypatch, system, expected):
    monkeypatch.setattr(SystemOptions, "default_trees", shipped_trees)
    common = BoostingOptions().checked(system)
    assert (common.most_rounds, common.depth, common.rate) == expected
    given = BoostingOptions(n_estimators=7, max_depth=2, learning_rate=0.5).checked(system)
    assert (given.most_rounds, given.depth, given.rate) == (7, 2, 0.5)


def test_leaves_are_the_only_limit_unless_a_depth_is_given():
    common = BoostingOptions(max_leaves=20).checked(treaty.Pooled())
    assert (common.max_depth, common.depth) == (0, 19)


@pytest.mark.parametrize(
    ("place", "line", "said"),
    [
        ("[parties.b]", "drop = 5", r"\[parties.b\] drop = 5: expected a list, got a whole number"),
        ("[parties.b]", 'address = "here"', r"\[parties.b\] address = 'here': expected host:port"),
        ("[parties.b]", 'tables = "b.csv"', r"\[parties.b\] has no field 'tables'; did you mean 'table'\?"),
        ("[parties.b]", "[parties.'b c']", r"expected parties' names of letters, .*, got 'b c'"),
        ("[parties.b]", "[party.c]", r"the job has no field 'party'; did you mean 'parties'\?"),
        ("[parties.b]", "[bosting]", r"the job has no field 'bosting'; did you mean 'boosting'\?"),
        ('name = "', 'task = "classify"', "task = 'classify': expected one of classification, regression, ranking"),
        (
            "[boosting]",
            '[align]\nnormalise = ["up"]',
            r"align.normalise\[0\] = \['up'\]: expected .* nfc, strip, lower",
        ),
    ],
    ids=["type", "address", "misspelt", "party name", "parties", "table", "value", "alignment"],
)
def test_a_wrong_field_is_named_with_its_party_and_what_is_meant(tmp_path, place, line, said):
    text = job_text("secureboost")
    changed = f"{line}\n{place}" if not place.startswith("[parties") else f"{place}\n{line}"
    with pytest.raises(ConfigError, match=rf"^{said}.* - in the job"):
        load_job(written(tmp_path, text.replace(place, changed, 1)))
