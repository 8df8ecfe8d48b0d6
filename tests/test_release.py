"""What is released beside the code: bill of materials, checksums, signature, hosted checks, page of platforms."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import treaty

ROOT = Path(__file__).parent.parent
RELEASE = runpy.run_path(str(ROOT / "tests/make_release.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture
def dist(tmp_path):
    for name in (f"treaty_learn-{treaty.__version__}-py3-none-any.whl", f"treaty_learn-{treaty.__version__}.tar.gz"):
        tmp_path.joinpath(name).write_bytes(name.encode())
    return tmp_path


def test_the_bill_of_materials_has_what_a_user_installs(dist):
    materials, sums = RELEASE["complete"](dist, None)
    bill = json.loads(materials.read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    own = bill["metadata"]["component"]
    assert own["purl"] == f"pkg:pypi/treaty-learn@{treaty.__version__}"
    assert own["hashes"][0]["content"] == RELEASE["digest"](next(dist.glob("*.whl")))
    parts = {part["name"]: part for part in bill["components"]}
    pinned = RELEASE["pinned"]()
    assert {name: part.get("version") for name, part in parts.items()} == {name: pinned[name] for name in parts}
    direct = {re.match(r"[\w-]+", of)[0] for of in PROJECT["dependencies"]}
    assert {name for name in direct if parts[name]["scope"] == "required"} == direct
    assert parts["llvmlite"]["scope"] == "required"  # numba needs it
    assert parts["fastapi"]["scope"] == "optional"
    assert {"pytest", "ruff", "sphinx"} & set(parts) == set()
    assert parts["cryptography"]["licenses"] == [{"expression": "Apache-2.0 OR BSD-3-Clause"}]
    refs = {own["bom-ref"], *(part["bom-ref"] for part in parts.values())}
    assert {each["ref"] for each in bill["dependencies"]} == refs
    assert {ref for each in bill["dependencies"] for ref in each["dependsOn"]} < refs
    listed = dict(reversed(line.split("  ")) for line in sums.read_text().splitlines())
    assert listed == {path.name: RELEASE["digest"](path) for path in dist.iterdir() if path != sums}


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_a_key_signs_the_checksums(dist, tmp_path_factory):
    key = tmp_path_factory.mktemp("key") / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    *_, sums, signature = RELEASE["complete"](dist, key)
    keys = key.with_name("KEYS")
    keys.write_text(f"releases {key.with_suffix('.pub').read_text()}")
    command = RELEASE["__doc__"].split("\n    ")[1].split("\n")[0]
    command = command.replace("KEYS", str(keys)).replace("SHA256SUMS", str(sums))
    assert subprocess.run(command, shell=True, capture_output=True).returncode == 0
    sums.write_text(sums.read_text().replace("0", "1"))
    assert subprocess.run(command, shell=True, capture_output=True).returncode != 0
    assert RELEASE["complete"](dist, None) == [*_, sums]
    assert not signature.exists()  # an earlier one would be of other sums


def test_hosted_checks_run_what_make_has_and_nothing_secret():
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    targets = set(re.findall(r"^(\S+?):(?: |$)", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {"test"}
    run = set(re.findall(r"run: make ([\w-]+)", text))
    assert run <= targets
    local = set(re.findall(r"make ([\w-]+)", (ROOT / ".ci/run").read_text()))
    assert {"test", "lint", "type", "docs", "test-lowest"} <= run & local
    assert "secrets." not in text
    assert "contents: read" in text
    assert "write" not in re.sub("#.*", "", text)
    for action in re.findall(r"uses: (\S+)", text):
        assert re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", action)


OF_POSIX = {"fcntl", "resource", "AF_UNIX", "poll", "geteuid", "fchmod", "O_DIRECTORY", "SIGHUP"}
OF_LINUX = {"sched_getaffinity", "sched_setaffinity", "posix_fallocate", "posix_fadvise", "memfd_create", "O_TMPFILE"}


NOT_USED = {"pwd", "grp", "termios", "fork", "getuid", "SIGUSR1", "SO_REUSEPORT"}


@pytest.fixture(scope="module")
def sources():
    texts = {path.name: path.read_text() for path in ROOT.glob("src/**/*.py")}
    asked = OF_POSIX | OF_LINUX | NOT_USED
    return {name: ast.parse(text) for name, text in texts.items() if any(each in text for each in asked)}


def named(tree):
    """Yield the modules that a file imports, and the attributes of modules that it uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.attr


def test_the_page_of_platforms_names_the_calls_that_windows_lacks(sources):
    used = {name for tree in sources.values() for name in named(tree)}
    assert OF_POSIX <= used
    assert not NOT_USED & used
    page = (ROOT / "docs/platforms.md").read_text()
    assert [name for name in OF_POSIX if name not in page] == []


def test_calls_that_only_linux_has_are_asked_for_first(sources):
    found = [
        (file, node)
        for file, tree in sources.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and OF_LINUX & set(named(node))
    ]
    assert len(found) > 3
    assert [f"{file}: {node.name}" for file, node in found if "hasattr(os, " not in ast.unparse(node)] == []


def test_instructions_of_another_processor_with_the_same_name_are_not_used(tmp_path):
    script = "from treaty.crypto.transfer import aes; print(aes.HAS_AES)"
    of_arm = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+aes,+neon", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | of_arm, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
