"""The records of logistic regression, training on one table, and what runners ask of a part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from systems.logistic.playing import linear_tables, options_of, play_logistic, pooled_weights, solver
from treaty.errors import ConfigError
from treaty.linear.preparation import probabilities
from treaty.models.linear import LinearPart, label_holder, load_linear_part, pooled_margins
from treaty.systems import find_system
from treaty.systems.logistic.options import SGD, QuasiNewton, RegressionOptions
from treaty.systems.observers import Observers, ProgressCalls
from treaty.systems.pooled.options import Pooled
from treaty.systems.system import LabelledRows, PartySpec, RoleInput


def trained(progress: Any = None, **given: Any) -> tuple[dict[str, LinearPart], dict[str, Any], np.ndarray]:
    """Train three parties' tables in one place."""
    system, (tables, y) = find_system("pooled", "logistic"), linear_tables(3, rows=260)
    options = Pooled(**{name: given.pop(name) for name in ("solver", "loss") if name in given})
    common = RegressionOptions(**{"batch_size": 120, "max_iter": 2, "tol": 0.0, "random_state": 7, **given})
    roles = system.assign({name: PartySpec() for name in tables}, "p0", options)
    inputs: Any = RoleInput(
        party=None, options=options, common=common, roles=roles, data=LabelledRows(tables["p0"], y),
        classes=["no", "yes"],
        observers=Observers([ProgressCalls(progress)]),
    )  # fmt: skip
    assert system.alone is not None
    return system.alone(tables, inputs), tables, y


@pytest.mark.parametrize("method", ["quasi-newton", "sgd"])
def test_training_on_one_table_is_the_plain_optimiser(method):
    seen = []
    parts, tables, y = trained(
        lambda done, losses: seen.append((done, len(losses.get("train", [])))), solver=method, learning_rate=0.1
    )
    given = {"period": 4, "memory": 5, "learning_rate": 0.1, "encryption": "lattice"}
    X, fitted = pooled_weights(tables, y, protocol=method, **given)
    np.testing.assert_allclose(pooled_margins(parts, tables), X @ fitted.weights, rtol=0, atol=1e-12)
    assert parts["p0"].losses == fitted.losses
    assert seen == [(0, 0), (1, 1), (2, 2)]


def test_learning_rate_and_pairs_left_open_are_those_of_the_method():
    assert (solver(learning_rate=None).learning_rate, solver().memory) == (QuasiNewton.first_rate, 3)
    descent = solver(protocol="sgd", learning_rate=None)
    assert (descent.learning_rate, descent.memory) == (SGD.first_rate, 0)


def test_active_part_predicts_labels_and_probabilities_and_sums_up_training(tmp_path):
    parts, tables, _ = trained()
    holder = label_holder(parts.values())
    assert [part.is_active for part in parts.values()] == [True, False, False]
    margins = pooled_margins(parts, tables)
    found = holder.predictions(margins)
    assert list(found) == ["prediction", "probability_no", "probability_yes"]
    log_odds = holder.calibration.slope * margins + holder.calibration.offset
    np.testing.assert_array_equal(found["prediction"] == "yes", log_odds > 0)
    np.testing.assert_array_equal(found["probability_yes"], probabilities(log_odds))
    np.testing.assert_allclose(found["probability_no"] + found["probability_yes"], 1.0)
    assert holder.summary() == f"{len(holder.coef)} weights, loss {holder.losses[-1]:.6f} after 2 epochs"
    assert parts["p1"].summary() == f"{len(parts['p1'].coef)} weights"
    holder.save(tmp_path / "part")
    assert load_linear_part(tmp_path / "part").summary() == holder.summary()


def test_probabilities_without_calibration_are_of_the_margins():
    parts, tables, _ = trained(calibrate=False)
    holder, margins = label_holder(parts.values()), pooled_margins(parts, tables)
    assert holder.calibration is None
    np.testing.assert_array_equal(holder.predictions(margins)["probability_yes"], probabilities(margins))


def test_active_part_says_that_training_was_cut_off():
    cut, steady, all_epochs = (
        label_holder(trained(max_iter=epochs, tol=tol)[0].values()) for epochs, tol in ((3, 1e-5), (3, 10.0), (3, 0.0))
    )
    assert "after max_iter=3 epochs without a steady loss, which changed by 0." in cut.unsettled
    assert cut.summary().endswith("after 3 epochs, not converged")
    assert (steady.unsettled, all_epochs.unsettled) == ("", ""), "an epoch of all that were asked for is no surprise"
    assert len(steady.losses) == 2


def test_part_warns_of_margins_beyond_the_range_of_the_taylor_loss():
    parts, _, _ = trained()
    holder = label_holder(parts.values())
    assert holder.caution(np.array([-3.9, 0.5, 3.9])) is None
    assert "66.7% of rows have a margin beyond 4" in str(holder.caution(np.array([-4.1, 0.5, 4.1])))
    holder.loss = "logistic"
    assert holder.caution(np.array([-4.1, 0.5, 4.1])) is None


@pytest.mark.parametrize("name", ["quasi-newton", "sgd"])
def test_records_of_federated_systems_say_how_they_are_played(name):
    system = find_system(name)
    assert (system.name, system.options.system, system.split) == (name, name, "columns")
    assert set(system.train) == {"active", "passive", "coordinator"}
    assert set(system.predict) == system.has_model == {"active", "passive"}
    assert system.apart == {"coordinator"}
    assert system.orders_by_id
    assert system.cannot.keys() == {"explain"}
    options = system.options()
    places = {name: PartySpec() for name in ("a", "b")}
    roles = system.assign({**places, **system.helpers(places, options)}, "a", options)
    assert roles.of == {"a": "active", "b": "passive", "coordinator": "coordinator"}
    assert roles.owners == ["a", "b"]
    assert system.links(roles, options)["b"] == ["a", "coordinator"]


@pytest.mark.parametrize("options", [None, QuasiNewton(encryption="ou", key_bits=3072), QuasiNewton(coordinator=False)])
def test_kernels_are_compiled_by_trainings_of_a_few_rows(options):
    """A test key makes them short; under the lattice map there is none."""
    made = find_system("quasi-newton").warm_up(options)
    ciphers = [small.cipher(32) for small in made]
    assert ciphers == (["lattice", "ou"] if options is None else ["ou"])
    assert [small.insecure_test_key_bits for small in made] == [None if c == "lattice" else 768 for c in ciphers]
    tables, y = linear_tables(2, rows=260)
    for small in made:
        play_logistic(tables, y, max_iter=1, period=1, memory=1, **{**small.get_params(), "key_bits": None})


def test_precision_that_the_lattice_map_does_not_have_is_refused():
    with pytest.raises(ConfigError, match='at most 40 under the lattice map, got 41; take encryption="ou"'):
        options_of(encryption="lattice", fractional_bits=41)
    assert options_of(fractional_bits=41, insecure_test_key_bits=None)[0].cipher(41) == "ou"
