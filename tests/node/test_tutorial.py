"""The lines of docs/deployment.md that two organisations run, one by one; and that the pages on nodes are right."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from terminal import compare_at_terminal
from treaty.models.trees import load_part
from treaty.node.policy import DataSet, Policy
from treaty.node.proposals import proposed
from treaty.node.settings import NodeLimits, Settings, load_settings
from treaty.node.store import TRANSITIONS, Store
from treaty.runs.processes import free_ports

ROOT = Path(__file__).parents[2]
PAGE, NODES, EXAMPLE = ROOT / "docs/deployment.md", ROOT / "docs/nodes.md", ROOT / "examples/two_organisations"
PATIENCE = 180.0

pytestmark = pytest.mark.timeout(600)


def lines_of_page():
    """Return who runs which line: blocks of the page that begin with ```sh NAME."""
    blocks = re.findall(r"^```sh (\w+)\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M)
    return [(name, line) for name, block in blocks for line in block.splitlines()]


@dataclass
class Machine:
    """An organisation: its folder, what it runs in, and what runs there."""

    name: str
    folder: Path
    tools: Path
    inside: list[str] = field(default_factory=list)
    ports: dict[str, int] = field(default_factory=dict)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    said: str = ""

    def at_its_ports(self, text):
        for usual, port in self.ports.items():
            text = text.replace(f":{usual}", f":{port}")
        return text

    @property
    def environment(self):
        path = f"{self.tools}:{os.environ['PATH']}"
        usual = {name: value for name, value in os.environ.items() if name != "TREATY_NODE"}
        return {**usual, "PATH": path, "COLUMNS": "200"}

    def start(self, line):
        """Start what runs until it is stopped; what already runs is stopped first, as by Ctrl-C."""
        what = " ".join(line.split()[:2])
        self.stop(what)
        with (self.folder / "terminal.log").open("ab") as log:
            self.running[what] = subprocess.Popen(
                [*self.inside, "bash", "-c", f"exec {line}"],
                cwd=self.folder, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def stop(self, what):
        process = self.running.pop(what, None)
        if process is not None:
            process.send_signal(signal.SIGINT)
            try:
                code = process.wait(60)
            finally:
                process.kill()
            assert code in (0, 130), self.log()

    def log(self):
        return (self.folder / "terminal.log").read_text()[-4000:]

    def run(self, line, fingerprint=None):
        """Run a line to its end; with a fingerprint at a terminal, at which a person compares it."""
        words, place = [*self.inside, "bash", "-c", line], {"cwd": self.folder, "env": self.environment}
        if fingerprint is not None:
            code, self.said = compare_at_terminal(words, fingerprint, **place)
            return code
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=PATIENCE, check=False, **place,
        )  # fmt: skip
        self.said = done.stdout
        return done.returncode


def play(machines):
    """Run the page's lines; return the ids of jobs and all that was said, by line."""
    ids, said = {}, []
    for name, written in lines_of_page():
        machine = machines[name]
        line = machine.at_its_ports(written)
        for word, job in ids.items():
            line = re.sub(rf"\b{word}\b", job[:12], line)
        if line.startswith(("treaty node", "treaty serve")):
            # without ports of its own the machine has all those that the page names
            place = f" --listen 127.0.0.1:{machine.ports['8000']}" if "serve" in line and machine.ports else ""
            machine.start(line + place)
            continue
        _run(machine, line, ids)
        said.append((name, written, machine.said))
        if line.startswith("treaty submit"):
            word = "PREDICTION" if "--predict" in line else "SERVICE" if "--serve" in line else "JOB"
            ids[word] = re.search(r"^hash ([0-9a-f]{64})$", machine.said, flags=re.M).group(1)
        if line.startswith(("treaty keys new", "treaty keys rotate")):  # the card goes by mail
            for other in machines.values():
                if other is not machine:
                    shutil.copy(machine.folder / f"keys/{name}.card", other.folder)
    return ids, said


def _run(machine, line, ids):
    """Run a line as a person would, who looks again where others are not there yet."""
    fingerprint = None
    if line.startswith("treaty keys trust"):
        assert machine.run(f"treaty keys show {line.split()[-1]}") == 0, machine.said
        fingerprint = re.search(r"^fingerprint +(SHA256:.*)$", machine.said, flags=re.M).group(1)
    deadline = time.monotonic() + PATIENCE / 2
    while True:
        if line.startswith("curl") and shutil.which("curl") is None:
            code, machine.said = fetched(machine, line)
        else:
            code = machine.run(line, fingerprint)
        there = True
        if line == "treaty jobs":
            there = all(job[:12] in machine.said for job in ids.values())
        elif "treaty_peer_up" in line:
            there = machine.said.endswith(" 1.0\n")
        elif line.startswith("curl"):  # the server says when it is ready
            there = code == 0 and '"predictions"' in machine.said
        if there:
            break
        assert time.monotonic() < deadline, f"{machine.name}: {line}\n{machine.said}\n{machine.log()}"
        time.sleep(0.5)
    assert code == 0, f"{machine.name}: {line}\n{machine.said}\n{machine.log()}"


def fetched(machine, line):
    """Ask as curl would, where there is none and the machine is this one."""
    words = shlex.split(line.partition(" | ")[0])
    if machine.inside:
        pytest.skip("no curl")
    data = (machine.folder / words[-1][1:]).read_bytes() if "-d" in words else None
    url = next(word for word in words if word.startswith("http"))
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            said = answer.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return 1, ""
    wanted = line.partition(" | grep ")[2].strip()
    kept = [each for each in said.splitlines() if wanted in each]
    return 0, "\n".join(kept) + "\n"


@pytest.mark.parametrize("name", ["bank", "shop"])
def test_the_example_has_settings_and_a_job_for_them(name):
    settings = load_settings(EXAMPLE / name / "node.toml")
    job = json.loads(json.loads(proposed(EXAMPLE / "job.toml", "train"))["job"])
    assert {job["parties"][name]["table"], job["parties"][name]["predict_table"]} == set(settings.data)
    assert len(job["parties"]) == 1 + len(settings.peers)


def test_the_examples_of_the_page_on_nodes_are_read(tmp_path):
    settings, job = re.findall(r"^```toml\n(.*?)^```", NODES.read_text(), flags=re.S | re.M)
    (tmp_path / "node.toml").write_text(settings)
    (tmp_path / "job.toml").write_text(job)
    assert list(load_settings(tmp_path / "node.toml").data) == ["customers"]
    assert proposed(tmp_path / "job.toml", "train")


def test_the_page_on_nodes_names_every_field_and_state():
    text = NODES.read_text()
    fields = [name for kind in (Settings, NodeLimits, Policy) for name in kind.__struct_fields__]
    fields += [name for name in DataSet.__struct_fields__ if name not in ("name", "folder", "ledgers", "policy")]
    alone = {"peers", "data", "web", "limits"}
    missing = [name for name in fields if f"`{name}`" not in text and f"\n{name} = " not in text and name not in alone]
    assert not missing
    assert not [state for state in TRANSITIONS if f"`{state}`" not in text]


def test_the_page_on_deployment_names_every_metric(tmp_path):
    pytest.importorskip("prometheus_client")
    from treaty.node.web import registry

    with Store(tmp_path) as store:
        names = {metric.name for metric in registry(store, "bank", lambda row: None).collect()}
    named = set(re.findall(r"`?(treaty_[a-z_]+)", PAGE.read_text()))
    assert {name.removesuffix("_total") for name in named} == {name for name in names if name.startswith("treaty_")}


@pytest.fixture
def tools(tmp_path):
    """Return a folder of the commands that the page takes as installed."""
    pytest.importorskip("uvicorn", reason="the tutorial needs the extra web")
    folder = tmp_path / "tools"
    folder.mkdir()
    for name, command in {"treaty": f"{sys.executable} -m treaty", "python": sys.executable}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def machine(tmp_path, tools, name, bank_at, **more):
    """Put the page's files into a folder; the shop finds the bank at an address."""
    folder = tmp_path / name
    folder.mkdir()
    made = Machine(name, folder, tools, **more)
    settings = made.at_its_ports((EXAMPLE / name / "node.toml").read_text())
    (folder / "node.toml").write_text(settings.replace("bank.example.org", bank_at))
    shutil.copy(EXAMPLE / "make_tables.py", folder)
    if name == "bank":
        shutil.copy(EXAMPLE / "job.toml", folder)
    return made


def played_and_checked(machines):
    try:
        ids, said = play(machines)
        check(machines, ids, said)
    finally:
        for each in machines.values():
            for what in list(each.running):
                each.stop(what)


def check(machines, ids, said):
    bank = machines["bank"].folder
    for name, each in machines.items():
        with Store(each.folder / "state", create=False) as store:
            states = {word: store.job(job).state for word, job in ids.items()}
            assert states == {"JOB": "finished", "PREDICTION": "finished", "SERVICE": "cancelled"}
            assert not store.verify_audit()
        part = load_part(each.folder / "state/models" / ids["JOB"] / f"{name}.part")
        assert part.is_active == (name == "bank")
        assert len(part.splits)
    (predictions,) = (bank / "state/models" / ids["JOB"]).glob("bank.predict-*.csv")
    assert len(predictions.read_text().splitlines()) > 80
    by_line = {line: text for _, line, text in said}
    assert "whole" in by_line["treaty audit-log verify"]
    (served,) = [json.loads(text) for line, text in by_line.items() if "/predict" in line]
    assert not served["fallback"]
    assert 0.0 <= served["predictions"][0]["probability_1"] <= 1.0
    with Store(bank / "backup", create=False) as copy:
        assert copy.job(ids["PREDICTION"]).state == "finished"
        assert not copy.verify_audit()


@pytest.mark.slow
def test_on_one_machine(tmp_path, tools):
    ports = free_ports(4)
    machines = {
        "bank": machine(tmp_path, tools, "bank", "", ports={"7700": ports[0], "7780": ports[1], "8000": ports[2]}),
        "shop": machine(tmp_path, tools, "shop", "127.0.0.1", ports={"7700": ports[0], "7780": ports[3]}),
    }
    played_and_checked(machines)


@pytest.mark.slow
def test_on_two_machines(tmp_path, tools):
    """Each organisation has a network of its own, joined by one cable."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("no networks of their own can be made: that needs root, and ip (iproute2)")
    names = {name: f"treaty-{name}-{os.getpid()}" for name in ("bank", "shop")}
    address = {"bank": "10.203.77.1", "shop": "10.203.77.2"}
    try:
        try:
            for of in names.values():
                _ip("netns", "add", of)
            _ip(
                "-n",
                names["bank"],
                "link",
                "add",
                "cable",
                "type",
                "veth",
                "peer",
                "name",
                "cable",
                "netns",
                names["shop"],
            )
            for name, of in names.items():
                _ip("-n", of, "addr", "add", f"{address[name]}/24", "dev", "cable")
                _ip("-n", of, "link", "set", "cable", "up")
                _ip("-n", of, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no networks of their own can be made: {error.stderr.strip()}")
        machines = {
            name: machine(tmp_path, tools, name, address["bank"], inside=["ip", "netns", "exec", of])
            for name, of in names.items()
        }
        played_and_checked(machines)
    finally:
        for of in names.values():
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", of)


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
