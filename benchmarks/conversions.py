"""Train one table with another library, and with Treaty from the parameters that `treaty convert` makes of the other's.

    python benchmarks/conversions.py [--secretflow PYTHON] [--fate PYTHON]

XGBoost is the installed one. PYTHON is the interpreter of an environment with secretflow 1.14 (Python 3.10 or 3.11), or
with pyfate 2.2 and torch; both play two parties on this machine. Columns have so few values that all libraries have the
same bins. docs/howto/from_fate.md and docs/howto/from_xgboost_federated.md have the results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SPLIT = 3  # columns of the first party
XGBOOST = {"objective": "binary:logistic", "max_depth": 3, "eta": 0.3}
SGB = {"num_boost_round": 3, "max_depth": 3, "objective": "logistic", "sketch_eps": 0.05}
OPEN_SGB = {**SGB, "first_tree_with_label_holder_feature": False}
BY_LEAF = {"tree_growing_method": "leaf", "max_leaf": 6, "gamma": 2.0, "base_score": 0.7}
FATE = {"num_trees": 3, "max_depth": 3, "max_bin": 32, "learning_rate": 0.3, "objective": "binary:bce"}


def table(rows: int, seed: int) -> tuple[Any, Any]:
    """Return features of whole numbers from 0 to 14, float32 (rows, 6), and labels 0 and 1."""
    rng = np.random.default_rng(seed)
    X = rng.integers(0, 15, size=(rows, 6)).astype(np.float32)
    score = X[:, 0] - 7 + 0.2 * (X[:, 3] - 7) * (X[:, 5] - 7) + 0.6 * X[:, 4] - 4
    return X, (score + rng.normal(size=rows) * 4 > 0).astype(np.float32)


def train_xgboost(params: dict[str, Any], X: Any, y: Any, test: Any) -> Any:
    """Return the predictions of XGBoost on the pooled table."""
    import xgboost

    rounds = params["num_boost_round"]
    params = {name: value for name, value in params.items() if name != "num_boost_round"}
    return xgboost.train(params, xgboost.DMatrix(X, label=y), rounds).predict(xgboost.DMatrix(test))


def train_secretflow(params: dict[str, Any], X: Any, y: Any, test: Any) -> Any:
    """Return the predictions of SecretFlow's SGB between two parties, under Okamoto-Uchiyama encryption."""
    import secretflow
    import spu
    from secretflow.data import FedNdarray, PartitionWay
    from secretflow.device.driver import reveal
    from secretflow.ml.boost.sgb_v import Sgb

    secretflow.init(["active", "passive"], address="local", debug_mode=True)
    active, passive = map(secretflow.PYU, ("active", "passive"))
    cipher = {"schema": "ou", "key_pair": {"generate": {"bit_size": 2048}}}
    roles = {"sk_keeper": {"party": "active"}, "evaluators": [{"party": "passive"}]}
    heu = secretflow.HEU({**roles, "mode": "PHEU", "he_parameters": cipher}, spu.FieldType.FM128)

    def divided(rows: Any) -> Any:
        parts = {active: rows[:, :SPLIT], passive: rows[:, SPLIT:]}
        return FedNdarray({at: at(lambda of: of)(part) for at, part in parts.items()}, PartitionWay.VERTICAL)

    labels = FedNdarray({active: active(lambda of: of)(y)}, PartitionWay.VERTICAL)
    return reveal(Sgb(heu).train(params, divided(X), labels).predict(divided(test))).ravel()


def fate_party(ctx: Any) -> None:
    """Play guest or host of FATE; the guest writes the predictions into the folder of the task."""
    import pandas as pd
    from fate.arch.dataframe import PandasReader
    from fate.ml.ensemble import HeteroSecureBoostGuest, HeteroSecureBoostHost

    folder, guest = Path(sys.argv[sys.argv.index("--task") + 1]), ctx.is_on_guest
    given, params = np.load(folder / "table.npz"), json.loads((folder / "params.json").read_text())

    def frame(rows: Any, labels: Any) -> Any:
        part = pd.DataFrame(rows[:, :SPLIT] if guest else rows[:, SPLIT:]).add_prefix("x")
        part["sample_id"] = part["match_id"] = [str(row) for row in range(len(rows))]
        part = part.assign(y=labels.astype(int)) if guest else part
        names = {"sample_id_name": "sample_id", "match_id_name": "match_id", "label_name": "y" if guest else None}
        return PandasReader(**names, dtype="float64", partition=1).to_frame(ctx, part)

    train, test = frame(given["X"], given["y"]), frame(given["test"], np.zeros(len(given["test"])))
    if not guest:
        model = HeteroSecureBoostHost(**{name: params[name] for name in ("num_trees", "max_depth", "max_bin")})
        model.fit(ctx, train)
        model.predict(ctx, test)
        return
    ctx.cipher.set_phe(ctx.device, {"kind": "paillier", "key_length": 1024})
    model = HeteroSecureBoostGuest(**params)
    model.fit(ctx, train)
    found = model.predict(ctx, test).as_pd_df().sort_values("sample_id", key=lambda ids: ids.astype(int))
    details = [json.loads(str(of).strip('"').replace("'", '"')) for of in found["predict_detail"]]
    np.save(folder / "predictions.npy", [of["1"] for of in details])


def elsewhere(python: str, library: str) -> Callable[..., Any]:
    """Return a function that trains with a library that another interpreter has."""

    def train(params: dict[str, Any], X: Any, y: Any, test: Any) -> Any:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            np.savez(folder / "table.npz", X=X, y=y, test=test)
            (folder / "params.json").write_text(json.dumps(params))
            words = [python, __file__, "--play", library, "--task", name]
            parties = ["--parties", "guest:1", "host:2", "--data_dir", f"{name}/data", "--log_level", "ERROR"]
            words += parties if library == "fate" else []
            subprocess.run(words, check=True, capture_output=True)
            return np.load(folder / "predictions.npy")

    return train


def play(library: str, folder: Path) -> None:
    """Train here, as an interpreter that has the library."""
    if library == "fate":
        from fate.arch.launchers.multiprocess_launcher import launch

        launch(fate_party)
    given, params = np.load(folder / "table.npz"), json.loads((folder / "params.json").read_text())
    np.save(folder / "predictions.npy", train_secretflow(params, given["X"], given["y"], given["test"]))


def train_treaty(params: dict[str, Any], X: Any, y: Any, test: Any) -> Any:
    """Return the predictions of Treaty with the job file that `treaty convert` makes of the parameters."""
    import tomllib  # Python 3.10, which may play SecretFlow, lacks it

    import treaty

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "params.json")
        dag = {"parties": [{"role": role, "party_id": ["1"]} for role in ("guest", "host")]}
        dag["tasks"] = {"sbt": {"component_ref": "hetero_secureboost", "parameters": params}}
        file.write_text(json.dumps({"dag": dag} if "num_trees" in params else params))
        words = [str(Path(sys.executable).with_name("treaty")), "convert", str(file)]
        job = tomllib.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    system = treaty.SecureBoost(**job.get("secureboost", {}), allow_exact_sums=True)
    model = treaty.GBDTClassifier(system, **job["boosting"], min_child_samples=1)
    model.fit({"active": X[:, :SPLIT], "passive": X[:, SPLIT:]}, y.astype(int))
    return model.predict_proba({"active": test[:, :SPLIT], "passive": test[:, SPLIT:]})[:, 1]


def main() -> None:
    """Print, for each library and parameters, both AUCs and the largest difference of predictions."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("secretflow", "fate", "play", "task"):
        options.add_argument(f"--{name}")
    given, _ = options.parse_known_args()
    if given.play:
        play(given.play, Path(given.task))
        return
    from sklearn.metrics import roc_auc_score

    (X, y), (test, truth) = table(3000, 0), table(1000, 1)
    cases = [("XGBoost", train_xgboost, {**XGBOOST, "num_boost_round": 5}, 3000)]
    if given.secretflow:
        sgb = elsewhere(given.secretflow, "secretflow")
        cases += [("SecretFlow", sgb, of, 3000) for of in (SGB, OPEN_SGB, {**OPEN_SGB, **BY_LEAF})]
    if given.fate:
        cases += [("FATE", elsewhere(given.fate, "fate"), FATE, 500)]
    for name, train, params, rows in cases:
        theirs, ours = (of(params, X[:rows], y[:rows], test) for of in (train, train_treaty))
        scores = ", ".join(f"{of} {roc_auc_score(truth, p):.4f}" for of, p in ((name, theirs), ("Treaty", ours)))
        print(f"AUC: {scores}; largest difference {np.abs(theirs - ours).max():.1e}; {json.dumps(params)}", flush=True)


if __name__ == "__main__":
    main()
