"""``treaty convert``: a job file from the parameters of XGBoost, FATE, NVFlare or SecretFlow."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from treaty.cli.logs import say
from treaty.errors import ConfigError
from treaty.files import explained
from treaty.runs.job import NAME, between_parties, checked_options
from treaty.systems.options import advice, called_here, converted, names_of
from treaty.trees.objectives import check_names, loss_class, loss_name

# what an option is called here where `called_here` does not know it
_NAMES = {
    "bin_num": "max_bin", "l1": "reg_alpha", "l2": "reg_lambda", "min_impurity_split": "min_split_loss",
    "min_leaf_node": "min_child_samples", "subsample_feature_rate": "colsample_bytree", "run_goss": "goss",
    "complete_secure": "rl_trees", "memory_M": "memory", "update_interval_L": "period", "num_class": "classes",
}  # fmt: skip
# the same of SecretFlow's SGB, whose parameters are known by these names
_SECRETFLOW = {
    "rowsample_by_tree": "subsample", "colsample_by_tree": "colsample_bytree", "bottom_rate": "other_rate",
    "enable_goss": "goss", "fixed_point_parameter": "fractional_bits",
    "first_tree_with_label_holder_feature": "rl_trees",
    **dict.fromkeys(("sketch_eps", "tree_growing_method", "max_leaf", "enable_early_stop"), ""),
}  # fmt: skip
# defaults that differ from Treaty's; SecretFlow has no least hess of a leaf, and under 0 sums cannot be sealed
_FATE = {"learning_rate": 0.3, "max_depth": 3, "max_bin": 32, "reg_lambda": 0.1}
_FATE_1, _FATE_2 = {"n_estimators": 5, "min_split_loss": 0.001}, {"n_estimators": 3, "min_split_loss": 0.01}
_DEFAULTS = {
    "XGBoost": {"learning_rate": 0.3, "max_depth": 6}, "FATE 1": _FATE | _FATE_1, "FATE 2": _FATE | _FATE_2,
    "SecretFlow": {"n_estimators": 10, "learning_rate": 0.3, "max_bin": 10, "min_child_weight": 0.01},
}  # fmt: skip
_LOSSES = {
    "cross_entropy": "logistic", "binary:bce": "logistic", "multi:ce": "softmax", "lse": "squared_error",
    "regression:l2": "squared_error", "lae": "absolute_error", "linear": "squared_error",
}  # fmt: skip
# why a parameter or component is not in the job file, and what to do: of all sources, or of one kind of model
_REASONS = {
    **dict.fromkeys(("encrypt_param", "he_param", "secure_training"), "sums are always encrypted or masked"),
    **dict.fromkeys(("validation_freqs", "datasplit", "trees.tol", "trees.n_iter_no_change"), "name eval_tables"),
    **dict.fromkeys(("validation_fraction", "enable_monitor"), "name eval_tables"),
    **dict.fromkeys(("gh_pack", "split_info_pack", "hist_sub", "batch_encoding_enabled"), "Treaty always does this"),
    "goss_start_iter": "goss draws rows for every tree",
    "min_sample_split": "set min_child_samples, the fewest rows of a leaf",
    "use_gpus": "training runs on the processor",
    "scale_pos_weight": "write weights into a column, and name it: weight = COLUMN",
    **dict.fromkeys(("monotone_constraints", "interaction_constraints"), "by names of columns: docs/growth.md"),
    **dict.fromkeys(
        ("heterofeaturebinning", "heterofeatureselection", "statistics", "featurecorrelation"),
        'run a job with protocol = "statistics" first',
    ),
    "featurescale": "owners standardise the columns of a linear model",
    **dict.fromkeys(("lr.alpha", "lr.penalty", "lr.learning_rate", "lr.tol", "lr.optimizer"), "see docs/logistic.md"),
    **dict.fromkeys(("lr.early_stop", "lr.threshold"), "see docs/logistic.md"),
}  # fmt: skip


@dataclass
class _Job:
    """A job file to be; `left` is what is not in it, and why."""

    source: str  # of `_DEFAULTS`
    parties: dict[str, str | None]  # the table of each; None for a coordinator
    protocol: str = "secureboost"
    fields: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def take(self, given: Mapping[str, Any], model: str = "") -> None:
        """Take parameters by their names here; list those without one, and values that Treaty refuses."""
        kind = between_parties(self.protocol).common
        known = [*names_of(kind), "n_jobs"]
        for theirs, value in ((each, of) for each, of in given.items() if of is not None):
            other = _NAMES.get(theirs) or _SECRETFLOW.get(theirs) or called_here(theirs, known) or ""
            name = theirs if theirs in known else other
            try:
                if reason := _REASONS.get(f"{model}.{theirs}") or _REASONS.get(theirs):
                    raise ConfigError(reason)
                if theirs == "objective":
                    loss = loss_name(_LOSSES.get(value, value))
                    if (takes := loss_class(loss).takes) != "classes":
                        self.fields["task"] = "ranking" if takes == "groups" else "regression"
                        self.common["objective"] = loss
                elif name == "rl_trees":
                    self.own |= {name: int(value)} if value else {}
                elif name in ("classes", "n_jobs"):
                    self.fields |= {} if value == 2 and name == "classes" else {name: value}
                elif name in known:
                    if name == "eval_metric":
                        value = value if isinstance(value, str) else ",".join(value)
                        check_names(value.split(","))
                    if name == "min_child_samples" and value == 1:
                        raise ConfigError("a leaf has 20 rows or more, for privacy; min_child_samples = 1 allows one")
                    value = 255 if name == "max_bin" and value == 256 else value
                    converted({name: value}, kind, f"[{kind.table}]")
                    self.common[name] = value
                else:
                    raise ConfigError(advice(theirs, known, None))
            except ConfigError as error:
                self.left.append(f"{theirs} = {json.dumps(value)}: {error}")

    def text(self, name: str, label: str, id_column: str) -> str:
        """Return the job file; ConfigError if its options contradict each other."""
        system = between_parties(self.protocol)
        common = {**(_DEFAULTS[self.source] if system.common.table == "boosting" else {}), **self.common}
        own, options = checked_options(system, self.own, common)
        self.left += [f"sums are open: {why}"] if (why := own.why_open(options)) else []
        head = {"name": name, "active": next(iter(self.parties)), "label": label, "protocol": self.protocol}
        tables = {"": head | self.fields, system.name: self.own, system.common.table: common}
        tables |= {} if system.split == "rows" else {"align": {"on": id_column}}
        for party, table in self.parties.items():
            files = {"address": f"{party}.example.org:7000", "certificate": f"{party}.cert.pem"}
            tables[f"parties.{party}"] = files | ({"role": "coordinator"} if table is None else {"table": table})
        lines = [f"# From {self.source}. Check the label, ids, tables, addresses and certificates."]
        for title, values in tables.items():
            lines += ["", f"[{title}]"] if title and values else []
            lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
        left = [f"# - {' '.join(of.split())}" for of in self.left]
        return "\n".join([*lines, *(["", "# Not converted:", *left] if left else [])])


def _of_fate(content: Mapping[str, Any]) -> _Job:
    """Read the conf of FATE 1, in either form, or the DAG of FATE 2."""
    if "dag" in content:
        source, dag = "FATE 2", content["dag"]
        roles = {each["role"]: each["party_id"] for each in dag["parties"]}
        tasks = {name: (each["component_ref"], each.get("parameters", {})) for name, each in dag["tasks"].items()}
        own = {name: of.get("tasks", {}).values() for name, of in dag.get("party_tasks", {}).items()}
        tables = {name: [each.get("parameters", {}) for each in of] for name, of in own.items()}
    else:
        source, roles, form = "FATE 1", content["role"], content.get("component_parameters", {})
        of_roles = form.get("role", content.get("role_parameters", {}))
        own = {f"{role}_{roles[role][int(k)]}": of for role, all_ in of_roles.items() for k, of in all_.items()}
        tasks = {name: (name, of) for name, of in form.get("common", content.get("algorithm_parameters", {})).items()}
        tables = {name: [each["table"] for each in of.values() if "table" in each] for name, of in own.items()}
    parties = [f"{role}_{each}" for role in ("guest", "host") for each in roles.get(role, [])]
    files = {name: next((of["name"] for of in tables.get(name, []) if "name" in of), "table") for name in parties}
    found, model = _Job(source, {name: f"{file}.csv" for name, file in files.items()}), ""
    for name, (component, given) in tasks.items():
        kind = re.sub(r"_\d+$", "", component).replace("_", "").lower()
        family = re.fullmatch(r"(?:hetero|coordinated|sshe|heterosshe)(lr|linr|poisson)", kind)
        if kind == "evaluation":
            found.take({"eval_metric": given.get("metrics")})
        elif not model and (family or kind in ("heterosecureboost", "homosecureboost")):
            model = name
            arbiters = [f"arbiter_{each}" for each in roles.get("arbiter", []) if "sshe" not in kind]
            _take_model(found, kind, family[1] if family else None, given, arbiters)
        elif not re.fullmatch("reader|dataio|datatransform|dataframetransformer|intersection|psi", kind):
            found.left.append(f"{name}: {_REASONS.get(kind, 'there is no such component')}")
    if not model:
        raise ValueError(f"no component hetero_secureboost or hetero_lr, but {', '.join(tasks)}")
    return found


def _take_model(found: _Job, kind: str, family: str | None, given: Mapping[str, Any], arbiters: list[str]) -> None:
    nested = ("tree_param", "objective_param", "sqn_param")
    flat = {name: of for name, of in given.items() if name not in (*nested, "task_type") and of != -1}
    flat |= {name: of for part in nested for name, of in given.get(part, {}).items()}
    penalties = flat.pop("criterion_params", {})
    flat |= penalties if isinstance(penalties, dict) else dict(zip(("l2", "l1"), penalties, strict=False))
    by_trees = "federboost-horizontal" if kind.startswith("homo") else "secureboost"
    found.protocol, found.own = ("quasi-newton", {"coordinator": bool(arbiters)}) if family else (by_trees, {})
    found.parties |= dict.fromkeys(arbiters[:1] if family else [])
    if family in ("linr", "poisson"):
        found.fields["task"], found.common["family"] = "regression", {"linr": "linear"}.get(family, family)
    found.take(flat, "lr" if family else "trees")
    if not family and "task" not in found.fields:
        found.common["base_score"] = 0.5  # where FATE starts; Treaty starts from the share of the label
    elif found.common.get("objective") == "squared_error":  # FATE's gradients are twice Treaty's
        usual = {"min_child_weight": 1.0, **_DEFAULTS[found.source], **found.common}
        doubled = ("reg_lambda", "reg_alpha", "min_split_loss", "min_child_weight")
        found.common |= {name: usual[name] / 2 for name in doubled if name in usual}


def _of_xgboost(content: Mapping[str, Any]) -> _Job:
    """Read parameters of XGBoost, or of NVFlare's controller of XGBoost."""
    flows = [of["args"] for of in content.get("workflows", [{"args": content}]) if "args" in of]
    given = dict(next(of for of in flows if "xgb_params" in of or of is content))
    for name in ("xgb_options", "params", "xgb_params"):
        given |= given.pop(name, None) or {}
    ranks = given.pop("client_ranks", None) or {f"rank{k}": k for k in range(given.pop("federated_world_size", 2))}
    protocol = "federboost-horizontal" if str(given.pop("data_split_mode", 1)) in ("0", "row") else "secureboost"
    found = _Job("XGBoost", dict.fromkeys(sorted(ranks, key=ranks.__getitem__), "table.csv"), protocol)
    if plugin := [name for name in given if re.match("federated_|dmlc_|xgboost_communicator", name)]:
        found.left.append(f"{', '.join(plugin)}: addresses and certificates are in [parties.NAME] (docs/jobs.md)")
    found.take({name: value for name, value in given.items() if name not in plugin})
    return found


def _of_secretflow(content: Mapping[str, Any]) -> _Job:
    """Read parameters of SecretFlow's `Sgb`; it has a leaf more than `max_leaf`, and its `base_score` is a margin."""
    given = {"objective": "logistic", "first_tree_with_label_holder_feature": True, **content}
    sizes = {"max_leaf": 15, "max_depth": 5, "stopping_rounds": 1, "stopping_tolerance": 0.0}
    sizes = {name: given.pop(name, usual) for name, usual in sizes.items()}
    by_leaf = given.pop("tree_growing_method", "level") == "leaf"
    given |= {"max_depth": 0, "max_leaves": sizes["max_leaf"] + 1} if by_leaf else {"max_depth": sizes["max_depth"]}
    if given.pop("enable_early_stop", False):
        given["early_stopping_rounds"] = sizes["stopping_rounds"]
        given["early_stopping_min_delta"] = sizes["stopping_tolerance"]
    if given.get("enable_goss"):
        given = {"top_rate": 0.3, "bottom_rate": 0.5, **given}
    if "sketch_eps" in given:
        given["max_bin"] = math.ceil(1 / given.pop("sketch_eps"))
    start = given.pop("base_score", 0.0)
    starts = {"logistic": 1 / (1 + math.exp(-start)), "tweedie": math.exp(start)}
    given["base_score"] = starts.get(given["objective"], start)
    given["eval_metric"] = {"roc_auc": "auc"}.get(given.get("eval_metric", ""), given.get("eval_metric"))
    found = _Job("SecretFlow", dict.fromkeys(("active", "passive"), "table.csv"))
    found.take(given)
    return found


def convert(
    file: Annotated[Path, typer.Argument(help="JSON, or YAML if PyYAML is installed.")],
    parties: Annotated[str, typer.Option(help="The parties' names, with commas; the first has the labels.")] = "",
    label: Annotated[str, typer.Option(help="The column of labels.")] = "y",
    id_column: Annotated[str, typer.Option("--id", help="The column of ids, the same in all tables.")] = "id",
) -> None:
    """Print a job file for the parameters of another library.

    FILE has parameters of XGBoost ({"eta": 0.3, "data_split_mode": 0}) or of SecretFlow's Sgb, a conf of FATE 1
    (dsl_version 2) or a DAG of FATE 2, or it is the config_fed_server.json of an NVFlare job with XGBoost.

    The job file has the other library's defaults where Treaty's differ. Comments at its end list what is not converted,
    and why. Put in your columns, addresses and certificates, and run treaty check.

    Examples
    --------
    treaty convert params.json --parties bank,shop --label defaulted --id customer > job.toml
    treaty convert train_conf.json > job.toml
    """
    with explained(f"cannot read {file}"):
        data = file.read_bytes()
    try:
        content = (msgspec.yaml if file.suffix in (".yaml", ".yml") else msgspec.json).decode(data)
        loss = content.get("objective", "")
        by_sgb = loss in ("logistic", "linear") or (":" not in loss and content.keys() & _SECRETFLOW)
        by_fate = "dag" in content or "role" in content
        found = (_of_fate if by_fate else _of_secretflow if by_sgb else _of_xgboost)(content)
    except (ImportError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError, StopIteration) as error:
        of = "XGBoost, FATE, NVFlare or SecretFlow"
        raise ConfigError(f"expected parameters of {of}, got {error!r} - in {file}") from None
    names = [name.strip() for name in parties.split(",")] if parties else list(found.parties)
    found.parties = dict(zip(names, [*found.parties.values(), *["table.csv"] * len(names)], strict=False))
    if len(names) < 2 or not all(re.fullmatch(NAME, name) for name in names):
        raise ConfigError(f"expected two parties or more, of letters, digits, - and _, got {', '.join(names)}")
    say(found.text(file.stem, label, id_column))
