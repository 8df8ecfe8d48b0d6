"""`treaty convert` makes job files of other libraries' parameters, and lists what has no equivalent."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from treaty.cli import convert
from treaty.cli.main import app
from treaty.errors import ConfigError
from treaty.runs.job_files import load_job
from treaty.systems.logistic.options import RegressionOptions
from treaty.systems.options import names_of
from treaty.systems.pooled.options import BoostingOptions

XGBOOST = {
    "eta": 0.1, "max_depth": 4, "lambda": 2, "eval_metric": ["logloss", "auc"], "objective": "binary:logistic",
    "max_bin": 256, "seed": 3, "nthread": 4, "tree_method": "hist",
}  # fmt: skip
PLUGIN = {
    "dmlc_communicator": "federated", "federated_server_address": "server:9091", "federated_world_size": 3,
    "federated_rank": 0, "federated_server_cert_path": "server.pem",
}  # fmt: skip
TREES = {
    "task_type": "classification", "objective_param": {"objective": "cross_entropy"}, "num_trees": 3,
    "validation_freqs": 1, "encrypt_param": {"method": "Paillier"}, "tree_param": {"max_depth": 4},
}  # fmt: skip
READERS = {
    role: {"0": {"reader_0": {"table": {"name": f"breast_{role}", "namespace": "experiment"}}}}
    for role in ("guest", "host")
}
ROLES = {"role": {"host": [9998], "guest": [9999]}, "initiator": {"role": "guest", "party_id": 9999}}
FATE_1 = {
    "dsl_version": 2, **ROLES,
    "component_parameters": {
        "common": {"hetero_secure_boost_0": TREES, "evaluation_0": {"eval_type": "binary"}}, "role": READERS
    },
}  # fmt: skip
EARLY_FATE_1 = {
    **ROLES, "role_parameters": READERS, "job_parameters": {"dsl_version": 2},
    "algorithm_parameters": {"hetero_secure_boost_0": TREES, "evaluation_0": {"eval_type": "binary"}},
}  # fmt: skip
FATE_2 = {
    "dag": {
        "parties": [{"party_id": ["9999"], "role": "guest"}, {"party_id": ["9998", "10000"], "role": "host"}],
        "party_tasks": {
            "guest_9999": {
                "parties": [{"party_id": ["9999"], "role": "guest"}],
                "tasks": {"reader_0": {"parameters": {"name": "breast_guest", "namespace": "experiment"}}},
            },
        },
        "stage": "train",
        "tasks": {
            "reader_0": {"component_ref": "reader", "parameters": {}, "stage": "default"},
            "psi_0": {"component_ref": "psi", "dependent_tasks": ["reader_0"], "parameters": {}},
            "sbt_0": {
                "component_ref": "hetero_secureboost", "dependent_tasks": ["psi_0"],
                "parameters": {
                    "num_trees": 2, "max_depth": 3, "max_bin": 16, "l2": 0.5, "goss": True, "top_rate": 0.2,
                    "objective": "multi:ce", "num_class": 3, "he_param": {"kind": "paillier", "key_length": 1024},
                },
            },
            "eval_0": {"component_ref": "evaluation", "parameters": {"metrics": ["auc"]}},
        },
    },
    "schema_version": "2.1.0", "kind": "fate",
}  # fmt: skip
NVFLARE = {
    "format_version": 2,
    "workflows": [
        {"id": "other", "path": "nvflare.app_common.workflows.scatter_and_gather.ScatterAndGather"},
        {
            "id": "xgb_controller",
            "path": "nvflare.app_opt.xgboost.histogram_based_v2.fed_controller.XGBFedController",
            "args": {
                "num_rounds": 10, "data_split_mode": 1, "secure_training": True, "xgb_params": XGBOOST,
                "xgb_options": {"early_stopping_rounds": 2}, "client_ranks": {"site-2": 1, "site-1": 0},
            },
        }
    ],
}  # fmt: skip


@pytest.fixture
def made(tmp_path):
    """Return a function that converts a file's content; it returns the job, and the lines of what is not converted."""

    def convert_to_job(content, *options, name="conf.json"):
        (tmp_path / name).write_bytes(
            (msgspec.yaml if name.endswith("yaml") else msgspec.json).encode(content)
        )  # fmt: skip
        done = CliRunner().invoke(app, ["convert", str(tmp_path / name), *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        (tmp_path / "job.toml").write_text(done.stdout)
        job = load_job(tmp_path / "job.toml")
        job.roles()
        job.settings()
        return job, [line for line in done.stdout.splitlines() if line.startswith("# - ")]

    return convert_to_job


def test_parameters_of_xgboost_become_a_job(made):
    job, left = made(
        {"params": XGBOOST, "num_boost_round": 50}, "--parties", "bank, shop", "--label", "paid", "--id", "customer"
    )
    assert (job.name, job.active, job.label, job.align.on) == ("conf", "bank", "paid", "customer")
    assert (list(job.parties), job.protocol, job.n_jobs) == (["bank", "shop"], "secureboost", 4)
    assert job.common == {
        "learning_rate": 0.1, "max_depth": 4, "reg_lambda": 2, "eval_metric": "logloss,auc", "max_bin": 255,
        "random_state": 3, "n_estimators": 50,
    }  # fmt: skip
    assert left == ['# - tree_method = "hist": leave it out: all trees are grown from histograms']


def test_what_xgboost_does_by_default_is_written_out(made):
    job, left = made({"objective": "reg:squarederror"})
    assert job.common == {"learning_rate": 0.3, "max_depth": 6, "objective": "squared_error"}
    assert (job.task, left) == ("regression", [])


def test_a_converted_job_trains_as_xgboost_does(made):
    xgboost = pytest.importorskip("xgboost")
    from treaty import GBDTRegressor

    rng = np.random.default_rng(0)
    X = rng.integers(0, 20, size=(600, 4)).astype(float)  # so few values that both have the same bins
    y = X[:, 0] + 0.1 * X[:, 1] * X[:, 2] + rng.normal(size=600)
    params = {"objective": "reg:squarederror", "gamma": 0.4, "lambda": 3, "base_score": 5.0, "min_child_weight": 4}
    job, left = made({"params": params, "num_boost_round": 4})
    assert left == []
    ours = GBDTRegressor("pooled", **job.common, min_child_samples=1).fit(X, y).predict(X)
    theirs = xgboost.train(params, xgboost.DMatrix(X, y), num_boost_round=4).predict(xgboost.DMatrix(X))
    assert np.abs(ours - theirs).max() < 0.01
    others = GBDTRegressor("pooled", **{**job.common, "max_depth": 5}, min_child_samples=1).fit(X, y).predict(X)
    assert np.abs(others - theirs).max() > 0.1


def test_the_removed_plugin_gives_parties_and_the_split(made):
    job, left = made({**XGBOOST, **PLUGIN, "data_split_mode": 0})
    assert (job.protocol, list(job.parties), job.align) == ("federboost-horizontal", ["rank0", "rank1", "rank2"], None)
    assert left[0].startswith("# - dmlc_communicator, federated_server_address, federated_rank, federated_server_cert_")
    assert left[0].endswith("addresses and certificates are in [parties.NAME] (docs/jobs.md)")


def test_open_sums_are_not_hidden(made):
    assert made({"alpha": 0.5})[1] == ["# - sums are open: they cannot be sealed with reg_alpha=0.5"]
    assert made({"alpha": 0})[1] == []


@pytest.mark.parametrize("content", [FATE_1, EARLY_FATE_1], ids=["FATE 1", "early FATE 1"])
def test_a_conf_of_fate_1_becomes_a_job(made, content):
    job, left = made(content)
    assert (job.active, list(job.parties)) == ("guest_9999", ["guest_9999", "host_9998"])
    assert job.parties["host_9998"].table.endswith("/breast_host.csv")
    assert job.common == {
        "n_estimators": 3, "max_depth": 4, "learning_rate": 0.3, "max_bin": 32, "reg_lambda": 0.1,
        "min_split_loss": 0.001, "base_score": 0.5,
    }  # fmt: skip
    assert [line.split(" = ")[0] for line in left] == ["# - validation_freqs", "# - encrypt_param"]


def test_parameters_of_fate_1_have_their_names_here(made):
    parameters = {
        **TREES, "tree_param": {"criterion_params": [0.3, 0], "min_leaf_node": 30, "min_impurity_split": 0.1},
        "bin_num": 20, "subsample_feature_rate": 0.8, "random_seed": 100, "complete_secure": True, "run_goss": True,
        "top_rate": 0.3, "other_rate": 0.2, "n_iter_no_change": True, "tol": 0.1, "cipher_compress_error": 8,
        "metrics": ["auc", "ks"], "num_trees": None,
    }  # fmt: skip
    content = {**ROLES, "component_parameters": {"common": {"hetero_secureboost_3": parameters, "hetero_nn_0": {}}}}
    job, left = made(content)
    assert job.own == {"rl_trees": 1}
    assert job.common == {
        "reg_lambda": 0.3, "reg_alpha": 0, "min_child_samples": 30, "min_split_loss": 0.1, "max_bin": 20,
        "colsample_bytree": 0.8, "random_state": 100, "goss": True, "top_rate": 0.3, "other_rate": 0.2,
        "n_estimators": 5, "learning_rate": 0.3, "max_depth": 3, "base_score": 0.5,
    }  # fmt: skip
    names = {line.removeprefix("# - ").split(" = ")[0] for line in left}
    assert names == {
        "validation_freqs", "encrypt_param", "n_iter_no_change", "tol", "cipher_compress_error", "metrics",
        "hetero_nn_0: there is no such component",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["dag.json", "dag.yaml"])
def test_a_dag_of_fate_2_becomes_a_job(made, name):
    job, left = made(FATE_2, name=name)
    assert list(job.parties) == ["guest_9999", "host_9998", "host_10000"]
    assert job.parties["guest_9999"].table.endswith("/breast_guest.csv")
    assert (job.classes, job.common["goss"], job.common["max_bin"], job.common["reg_lambda"]) == (3, True, 16, 0.5)
    assert (job.common["n_estimators"], job.common["min_split_loss"]) == (2, 0.01)
    assert [line.split(" = ")[0] for line in left] == ["# - he_param"]


@pytest.mark.parametrize(
    ("component", "family", "coordinator"),
    [("hetero_lr_0", None, True), ("hetero_linr_0", "linear", True), ("hetero_sshe_lr_0", None, False)],
)
def test_a_regression_of_fate_keeps_its_arbiter(made, component, family, coordinator):
    parameters = {
        "penalty": "L2", "alpha": 0.01, "optimizer": "sqn", "batch_size": -1, "max_iter": 10, "learning_rate": 0.15,
        "sqn_param": {"update_interval_L": 3, "memory_M": 5},
    }  # fmt: skip
    content = {"role": {**ROLES["role"], "arbiter": [7]}, "component_parameters": {"common": {component: parameters}}}
    job, left = made(content)
    assert (job.protocol, job.own) == ("quasi-newton", {"coordinator": coordinator})
    assert (job.common.pop("family", None), job.task == "regression") == (family, family is not None)
    assert job.common == {"max_iter": 10, "period": 3, "memory": 5}
    assert ("arbiter_7" in job.parties) == coordinator
    assert len(left) == 4


def test_a_leaf_of_one_row_is_not_converted(made):
    parameters = {"num_trees": 3, "tree_param": {"min_leaf_node": 1}}
    job, left = made({**ROLES, "component_parameters": {"common": {"hetero_secureboost_0": parameters}}})
    assert "min_child_samples" not in job.common
    assert left == ["# - min_leaf_node = 1: a leaf has 20 rows or more, for privacy; min_child_samples = 1 allows one"]


def test_penalties_of_a_regression_of_fate_are_halved(made):
    # FATE's gradients and hessians of the squared error are twice Treaty's
    parameters = {"objective": "regression:l2", "l1": 0.5, "l2": 0.7, "num_trees": 3, "complete_secure": 1}
    tasks = {"sbt_0": {"component_ref": "hetero_secureboost", "parameters": parameters}}
    job, left = made({"dag": {"parties": FATE_2["dag"]["parties"], "tasks": tasks}})
    assert job.common == {
        "objective": "squared_error", "reg_alpha": 0.25, "reg_lambda": 0.35, "min_split_loss": 0.005,
        "min_child_weight": 0.5, "n_estimators": 3, "learning_rate": 0.3, "max_depth": 3, "max_bin": 32,
    }  # fmt: skip
    assert left == ["# - sums are open: they cannot be sealed with reg_alpha=0.25"]


def test_components_before_a_regression_say_what_to_do(made):
    tasks = {
        name: {"component_ref": name} for name in ("psi", "feature_scale", "statistics", "coordinated_lr", "union")
    }
    parties = [*FATE_2["dag"]["parties"], {"party_id": ["1"], "role": "arbiter"}]
    _, left = made({"dag": {"parties": parties, "tasks": tasks}})
    assert left == [
        "# - feature_scale: owners standardise the columns of a linear model",
        '# - statistics: run a job with protocol = "statistics" first',
        "# - union: there is no such component",
    ]


def test_a_homo_secureboost_is_split_by_row(made):
    common = {"homo_secureboost_0": {"num_trees": 4, "objective_param": {"objective": "lse"}}}
    job, left = made({"role": {"guest": [1], "host": [2, 3]}, "component_parameters": {"common": common}})
    assert (job.protocol, job.task, job.align, left) == ("federboost-horizontal", "regression", None, [])


def test_a_controller_of_nvflare_becomes_a_job(made):
    job, left = made(NVFLARE)
    assert (job.active, list(job.parties)) == ("site-1", ["site-1", "site-2"])
    assert (job.common["n_estimators"], job.common["early_stopping_rounds"]) == (10, 2)
    assert left[0].startswith("# - secure_training = true: ")


def test_parameters_of_secretflow_become_a_job(made):
    # SecretFlow 1.14 grows the same trees from such parameters (docs/howto/from_fate.md)
    job, left = made({"num_boost_round": 3, "sketch_eps": 0.05, "gamma": 1, "seed": 7, "enable_packbits": True})
    assert (job.protocol, list(job.parties), job.own) == ("secureboost", ["active", "passive"], {"rl_trees": 1})
    assert job.common == {
        "n_estimators": 3, "max_bin": 20, "min_split_loss": 1, "random_state": 7, "learning_rate": 0.3,
        "max_depth": 5, "min_child_weight": 0.01, "base_score": 0.5,
    }  # fmt: skip
    assert left == ["# - enable_packbits = true: docs/options.md lists all options"]


def test_leaves_goss_and_early_stopping_of_secretflow(made):
    content = {
        "tree_growing_method": "leaf", "max_leaf": 6, "max_depth": 4, "objective": "linear", "base_score": 1.5,
        "first_tree_with_label_holder_feature": False, "enable_goss": True, "rowsample_by_tree": 1.0,
        "colsample_by_tree": 0.5, "enable_early_stop": True, "stopping_rounds": 3, "eval_metric": "rmse",
    }  # fmt: skip
    job, left = made(content)
    assert (job.task, job.own) == ("regression", {})
    assert job.common == {
        "max_leaves": 7, "max_depth": 0, "objective": "squared_error", "base_score": 1.5, "goss": True,
        "top_rate": 0.3, "other_rate": 0.5, "colsample_bytree": 0.5, "early_stopping_rounds": 3, "subsample": 1.0,
        "early_stopping_min_delta": 0.0, "eval_metric": "rmse", "n_estimators": 10, "learning_rate": 0.3,
        "max_bin": 10, "min_child_weight": 0.01,
    }  # fmt: skip
    assert left == ["# - sums are open: they cannot be sealed with max_leaves=7"]


@pytest.mark.parametrize(("objective", "start"), [("logistic", 0.6224593), ("linear", 0.5), ("tweedie", 1.6487213)])
def test_the_start_of_secretflow_is_a_margin(made, objective, start):
    job, _ = made({"objective": objective, "base_score": 0.5, "eval_metric": "roc_auc", "enable_goss": False})
    assert job.common["base_score"] == pytest.approx(start, abs=1e-6)
    assert job.common["eval_metric"] == "auc"


def test_a_value_that_treaty_refuses_is_listed(made):
    job, left = made({"subsample": 1.5, "eta": "0.3", "objective": "survival:cox", "monotone_constraints": "(1,-1)"})
    assert job.common == {"learning_rate": 0.3, "max_depth": 6}
    assert [line.split(" = ")[0] for line in left] == [
        "# - subsample", "# - eta", "# - objective", "# - monotone_constraints"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "got DecodeError("),
        ("[1]", "got"),
        ('"role"', "got"),
        ('{"role": {"guest": [1]}}', "no component hetero_secureboost or hetero_lr"),
        ('{"role": {"guest": [1], "host": [2]}, "component_parameters": {"common": {"homo_nn_0": {}}}}', "homo_nn_0"),
        ('{"dag": {"tasks": {}}}', "KeyError('parties')"),
        ('{"role": {}, "component_parameters": {"role": {"guest": {"0": {}}}}}', "KeyError('guest')"),
        ('{"objective": ["a"]}', "TypeError"),
        ('{"max_depth": 0}', "max_depth=0 sets no limit"),
        ('{"federated_world_size": 1}', "two parties"),
        ('{"sketch_eps": 0, "max_leaf": 3}', "ZeroDivisionError"),
        ('{"objective": "logistic", "base_score": 1e9}', "OverflowError"),
        ('{"workflows": [{"id": 1}, {"args": {"num_rounds": 3}}]}', "StopIteration"),
    ],
)
def test_another_file_is_refused(tmp_path, text, says):
    (tmp_path / "conf.json").write_text(text)
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, ["convert", str(tmp_path / "conf.json")], catch_exceptions=False)
    assert says in str(refused.value)


def test_parties_that_no_job_can_have_are_refused(tmp_path):
    (tmp_path / "conf.json").write_text(json.dumps(XGBOOST))
    for parties in ("bank", "bank,the shop"):
        with pytest.raises(ConfigError, match="two parties or more"):
            CliRunner().invoke(
                app, ["convert", str(tmp_path / "conf.json"), "--parties", parties], catch_exceptions=False
            )
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json: No such file"):
        CliRunner().invoke(app, ["convert", str(tmp_path / "none.json")], catch_exceptions=False)


def test_no_name_ends_a_comment(made):
    job, left = made({'x\n[secureboost]\nsums = "open"\n#': 1})
    assert job.own == {}
    assert len(left) == 1


def test_every_name_here_is_an_option():
    known = {*names_of(BoostingOptions), *names_of(RegressionOptions), "rl_trees", "classes"}
    assert set(convert._NAMES.values()) <= known
    assert {name for of in convert._DEFAULTS.values() for name in of} <= known


def test_the_page_shows_what_the_command_prints():
    root = Path(__file__).parents[2]
    page = (root / "docs/howto/from_fate.md").read_text()
    program, *words = (root / "examples/from_fate.sh").read_text().split()
    done = CliRunner().invoke(app, [word.replace("../", f"{root}/") for word in words], catch_exceptions=False)
    shown = page.partition("<!-- examples/from_fate.sh, printed -->\n```toml\n")[2].partition("```")[0]
    assert (program, done.stdout) == ("treaty", shown), "run `make snippets`"
