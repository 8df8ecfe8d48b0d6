"""Every system between nodes: from submission to predictions, with the model of the same job without nodes."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pyarrow.csv
import pytest
from numpy.typing import NDArray

from node.nodes import Organisation, columns_of, job_file, organisations, partners_of, wait_for, wait_until
from noise_keys import keep_key
from pace import within
from runs.small_jobs import EPOCHS, SYSTEMS, TREES, model, write_job
from treaty.data.table import Table
from treaty.errors import PeerLost
from treaty.models.checkpoints import ledger_folder
from treaty.models.trees import load_part
from treaty.runs.job import Job
from treaty.runs.job_files import load_job
from treaty.runs.processes import run_all
from treaty.serving.models import ServedModel

OPEN = {"encryption": "ou", "insecure_test_key_bits": 512, "allow_insecure": True, "allow_exact_sums": True} | TREES
TWO, FIVE = dict.fromkeys("ab", ""), dict.fromkeys("abcde", "")
HELPED = {"a": "", "b": "", "notary": "coordinator"}
ALONE = {"coordinator": False} | EPOCHS
LARGER = EPOCHS | {"batch_size": 400}  # of more parties labels could be solved for from small batches
CONSENTS = 'approve = false\nconsents = ["allow_exact_sums", "allow_insecure"]'
JOBS = {
    "secureboost, open sums, two": ("secureboost", OPEN, TWO),
    "secureboost, open sums, five": ("secureboost", OPEN, FIVE),
    "secureboost, sealed sums, two": ("secureboost", TREES, TWO),
    "secureboost, sealed sums, five": ("secureboost", TREES, FIVE),
    "fedxgboost-smm, dealer": ("fedxgboost-smm", {"backend": "dealer", "allow_exact_sums": True} | TREES,
                               {"a": "", "b": "", "c": "dealer"}),
    "fedxgboost-smm, dealer, five": ("fedxgboost-smm", {"backend": "dealer", "allow_exact_sums": True} | TREES,
                                     {**dict.fromkeys("abcd", ""), "e": "dealer"}),
    "fedxgboost-ldp, two": ("fedxgboost-ldp", *SYSTEMS["fedxgboost-ldp"]),
    "federboost-vertical, two": ("federboost-vertical", {"epsilon": 50.0} | TREES, TWO),
    "federboost-vertical, five": ("federboost-vertical", {"epsilon": 50.0} | TREES, FIVE),
    "federboost-horizontal, three": ("federboost-horizontal", TREES, dict.fromkeys("abc", "")),
    "federboost-horizontal, five": ("federboost-horizontal", TREES, FIVE),
    "fedxgb, ten": ("fedxgb", *SYSTEMS["fedxgb"]),
    "quasi-newton, coordinator": ("quasi-newton", EPOCHS, HELPED),
    "quasi-newton, two": ("quasi-newton", ALONE, TWO),
    "quasi-newton, coordinator, five": ("quasi-newton", LARGER, {**dict.fromkeys("abcd", ""), "notary": "coordinator"}),
    "sgd, coordinator": ("sgd", EPOCHS, HELPED),
    "sgd, two": ("sgd", ALONE, TWO),
    "sgd, coordinator, five": ("sgd", LARGER, {**dict.fromkeys("abcd", ""), "notary": "coordinator"}),
}  # fmt: skip


def job_for_nodes(folder: Path) -> Path:
    """Write what is left of a job file once addresses, keys and files are each node's own business."""
    lines = (folder / "job.toml").read_text().splitlines()
    own = re.compile(r"(address|certificate|key|n_jobs) = ")
    text = "\n".join(line for line in lines if not own.match(line))
    text = re.sub(r'"\w+_new\.csv"', '"new"', text)
    (folder / "nodes.toml").write_text(re.sub(r'"\w+\.csv"', '"rows"', text))
    return folder / "nodes.toml"


def with_predictions(folder: Path) -> Job:
    """Have a job predict rows that are near those that it is trained on."""
    for name in ("a", "b", "c", "d", "e"):
        if (folder / f"{name}.csv").exists():
            table = pd.read_csv(folder / f"{name}.csv")
            if len(table.columns) > 1:  # else it has no features, and a file needs a column
                table = table.drop(columns="y", errors="ignore")
            (1.01 * table).to_csv(folder / f"{name}_new.csv", index=False)
    text = (folder / "job.toml").read_text()
    text = re.sub(r'^table = "(\w+)\.csv"', r'table = "\1.csv"\npredict_table = "\1_new.csv"', text, flags=re.M)
    (folder / "job.toml").write_text(text)
    return load_job(folder / "job.toml")


def nodes_of(folder: Path, job: Job, listening: list[str] | None = None) -> dict[str, Organisation]:
    """Make the nodes of a job's parties, with their tables."""
    tables = {}
    for name in job.parties:
        if (folder / f"{name}.csv").exists():
            tables[name] = pyarrow.csv.read_csv(folder / f"{name}.csv")
    made = organisations(folder / "nodes", job.parties, tables, policy=CONSENTS, listening=listening)
    for node in made.values():
        text = node.settings.read_text().replace('id = "id"\n', "")
        if (folder / f"{node.name}_new.csv").exists():
            table = (folder / f"{node.name}_new.csv").resolve()
            _, _, policy = text.partition("[data.rows.policy]")
            text += f'[data.new]\ntable = "{table}"\n[data.new.policy]{policy}'
        node.settings.write_text(text)
    return made


def same_noise(folder: Path, nodes: dict[str, Organisation]) -> None:
    """Have a party draw the same noise with and without nodes."""
    for name, node in nodes.items():
        for store in (folder, node.state / "stores" / "rows"):
            keep_key(ledger_folder(store, name, "noise"), hashlib.sha256(name.encode()).digest())


def played(nodes: dict[str, Organisation], lead: str, file: Path, *more: str) -> str:
    """Submit a job, approve it where no data set's policy does, and wait for its end; return its id."""
    job = nodes[lead].treaty("submit", str(file), *more).split()[1]
    for node in nodes.values():
        if "[data.rows]" not in node.settings.read_text():
            wait_until(node, job, "proposed")
            node.treaty("approve", job)
    for node in nodes.values():
        row = wait_until(node, job, "finished", "failed", "rejected", patience=within(100))
        assert row.state == "finished", row.reason
    return row.id


def of_nodes(job: Job, nodes: dict[str, Organisation], trained: str, folder: Path) -> Job:
    """Return a job whose output has all parts that nodes keep."""
    folder.mkdir()
    for node in nodes.values():
        for file in (node.state / "models" / trained).glob(f"{node.name}.*"):
            (folder / file.name).write_bytes(file.read_bytes())
    return msgspec.structs.replace(job, output=str(folder))


def probabilities(file: Path) -> list[list[float]]:
    table = pyarrow.csv.read_csv(file)
    return [column.to_pylist() for column in table.columns]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def spaces(names: list[str]) -> Iterator[dict[str, str]]:
    """Yield network namespaces on a bridge, by name; skip the test where they cannot be made."""
    mark = f"tn{os.getpid() % 100_000}"
    made = {name: f"{mark}-{k}" for k, name in enumerate(names)}
    with ExitStack() as held:
        try:
            ip("link", "add", mark, "type", "bridge")
            held.callback(subprocess.run, ["ip", "link", "del", mark], check=False)
            ip("link", "set", mark, "up")
            for k, space in enumerate(made.values()):
                ip("netns", "add", space)
                held.callback(subprocess.run, ["ip", "netns", "del", space], check=False)
                ip("link", "add", f"{mark}{k}", "type", "veth", "peer", "name", "eth0", "netns", space)
                ip("link", "set", f"{mark}{k}", "master", mark, "up")
                ip("-n", space, "addr", "add", f"{address(k)}/24", "dev", "eth0")
                ip("-n", space, "link", "set", "eth0", "up")
                ip("-n", space, "link", "set", "lo", "up")
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces with veth pairs cannot be made here: {error}")
        yield made


def address(number: int) -> str:
    return f"10.78.0.{number + 1}"


def move(nodes: dict[str, Organisation], into: dict[str, str]) -> None:
    """Have nodes run in network namespaces, under addresses of these."""
    for name, node in nodes.items():
        text = node.settings.read_text()
        for k, other in enumerate(nodes.values()):
            text = text.replace(f"127.0.0.1:{other.port}", f"{address(k)}:{other.port}")
        node.settings.write_text(text)
        node.prefix = ["ip", "netns", "exec", into[name]]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("apart", [False, True], ids=["one network", "networks of their own"])
@pytest.mark.parametrize("what", JOBS)
def test_nodes_train_the_model_of_the_job_without_nodes(what, apart, tmp_path):
    system, options, roles = JOBS[what]
    job = write_job(tmp_path, system, (options, roles), 400 if options is LARGER else 180)
    if not job.by_row:
        job = with_predictions(tmp_path)
    nodes = nodes_of(tmp_path, job)
    if "epsilon" in options:
        same_noise(tmp_path, nodes)
    with ExitStack() as held:
        if apart:
            move(nodes, held.enter_context(spaces(list(nodes))))
        for node in nodes.values():
            held.callback(node.stop)
            node.start()
        file = job_for_nodes(tmp_path)
        trained = played(nodes, job.active, file)
        run_all(job, "train")
        assert model(of_nodes(job, nodes, trained, tmp_path / "found")) == model(job)
        if not job.by_row:
            predicted = played(nodes, job.active, file, "--predict", trained)
            run_all(job, "predict", arguments={job.active: ["--output", str(tmp_path / "predictions.csv")]})
            found = nodes[job.active].state / "models" / trained / f"{job.active}.predict-{predicted[:16]}.csv"
            assert probabilities(found) == probabilities(tmp_path / "predictions.csv")


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["a", "b"])
def test_nodes_in_networks_of_their_own_need_one_open_port(closed, tmp_path):
    write_job(tmp_path, "secureboost", (OPEN, TWO))
    job = with_predictions(tmp_path)
    nodes = nodes_of(tmp_path, job, listening=[name for name in TWO if name != closed])
    with ExitStack() as held:
        move(nodes, held.enter_context(spaces(list(nodes))))
        for node in nodes.values():
            held.callback(node.stop)
            node.start()
        file = job_for_nodes(tmp_path)
        trained = played(nodes, "a", file)
        played(nodes, "a", file, "--predict", trained)
        assert "no port is open" in nodes[closed].log()
        run_all(job, "train")
        assert model(of_nodes(job, nodes, trained, tmp_path / "found")) == model(job)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [("bank", "shop"), ("bank", "shop", "lab", "post", "mill")], ids=["two", "five"])
def test_organisations_in_networks_of_their_own_serve_what_they_predict_in_a_batch(names, tmp_path):
    tables = columns_of(names)
    nodes = organisations(tmp_path, names, tables)
    bank = nodes["bank"]
    with ExitStack() as held:
        move(nodes, held.enter_context(spaces(list(nodes))))
        for node in nodes.values():
            held.callback(node.stop)
            node.start()
        file = job_file(tmp_path / "job.toml", names, "[boosting]\nn_estimators = 5\nmax_depth = 3\n")
        trained = played(nodes, "bank", file)
        predicted = played(nodes, "bank", file, "--predict", trained)
        batch = pd.read_csv(bank.state / "models" / trained / f"bank.predict-{predicted[:16]}.csv").iloc[:30]
        service = wait_until(bank, bank.treaty("submit", str(file), "--serve", trained).split()[1], "running").id
        part = load_part(bank.state / "models" / trained / "bank.part")
        own = tables["bank"].to_pandas().set_index("id").loc[batch["id"], part.schema.names].to_numpy(np.float32)
        asked = [str(row) for row in batch["id"]]
        partners = partners_of(bank, service, names[1:])
        held.callback(partners.close)
        table = Table(part.schema, list(np.ascontiguousarray(own.T)), len(asked))

        def answer() -> list[NDArray[np.float64]] | None:
            try:
                return [partners(asked, table)]
            except PeerLost:  # until all are connected
                return None

        (margins,) = wait_for("answer", answer)
        for found, (_, expected) in zip(ServedModel(part).predictions(margins), batch.iterrows(), strict=True):
            assert [found[name] for name in batch.columns if name != "id"] == expected.drop("id").tolist()
