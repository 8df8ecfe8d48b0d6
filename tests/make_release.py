"""Complete a built distribution for a release: `python tests/make_release.py DIST [--key KEY]`, by `make release`.

Next to the wheel and the source distribution it writes a bill of materials (CycloneDX 1.6, JSON) of the packages that a
user installs, in the versions that are tested (constraints.txt), and SHA256SUMS. A private key of ssh-keygen signs
SHA256SUMS. With the public key in a file KEYS, in a line "releases ssh-ed25519 ...", users check the signature:

    ssh-keygen -Y verify -f KEYS -I releases -n treaty-release -s SHA256SUMS.sig < SHA256SUMS
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import tomllib
import uuid
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
NAMESPACE = "treaty-release"


def pinned() -> dict[str, str]:
    """Return the tested version of each package."""
    lines = (ROOT / "constraints.txt").read_text().split()
    return {str(canonicalize_name(name)): version for name, version in (line.split("==") for line in lines)}


def needed(requirements: list[str]) -> list[str]:
    """Return the names of those requirements that hold on this system."""
    here = [of for of in map(Requirement, requirements) if of.marker is None or of.marker.evaluate({"extra": ""})]
    return sorted({canonicalize_name(of.name) for of in here})


def graph(roots: list[str]) -> dict[str, list[str]]:
    """Return what each package needs, for the roots and all that they need; nothing for packages not installed here."""
    found: dict[str, list[str]] = {}
    left = list(roots)
    while left:
        name = left.pop()
        if name not in found:
            try:
                found[name] = needed(requires(name) or [])
            except PackageNotFoundError:
                found[name] = []
            left += found[name]
    return found


def licence(name: str) -> list[dict[str, Any]]:
    """Return the licence that a package states, or nothing."""
    try:
        said = metadata(name)
    except PackageNotFoundError:
        return []
    if said.get("License-Expression"):
        return [{"expression": said["License-Expression"]}]
    named = [line.rpartition(" :: ")[2] for line in said.get_all("Classifier", []) if line.startswith("License :: ")]
    short = (said.get("License") or "").partition("\n")[0][:80]
    return [{"license": {"name": named[0] if named else short}}] if named or short else []


def bill(version: str, wheel: Path | None) -> dict[str, Any]:
    """Return the bill of materials; packages that only an extra needs are optional."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own, versions = f"pkg:pypi/{project['name']}@{version}", pinned()
    direct = needed(project["dependencies"])
    extras = needed([of for extra in project["optional-dependencies"].values() for of in extra])
    always, every = graph(direct), graph([*direct, *extras])
    purls = {name: f"pkg:pypi/{name}@{versions[name]}" for name in every}
    components = [
        {
            "type": "library", "bom-ref": purls[name], "name": name, "version": versions[name], "purl": purls[name],
            "scope": "required" if name in always else "optional", "licenses": licence(name),
        }
        for name in sorted(every)
    ]  # fmt: skip
    digests = [] if wheel is None else [{"alg": "SHA-256", "content": digest(wheel)}]
    moment = datetime.fromtimestamp(float(os.environ.get("SOURCE_DATE_EPOCH", datetime.now(UTC).timestamp())), UTC)
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([own, digests, components]))}",
        "metadata": {
            "timestamp": f"{moment:%Y-%m-%dT%H:%M:%SZ}",
            "component": {
                "type": "library", "bom-ref": own, "name": project["name"], "version": version, "purl": own,
                "licenses": [{"expression": project["license"]}], "hashes": digests,
            },
        },
        "components": components,
        "dependencies": [
            {"ref": own, "dependsOn": [purls[name] for name in direct]},
            *({"ref": purls[name], "dependsOn": [purls[of] for of in every[name]]} for name in sorted(every)),
        ],
    }  # fmt: skip


def digest(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def complete(dist: Path, key: Path | None) -> list[Path]:
    """Write the bill of materials, the checksums and, with a key, their signature; return these files."""
    (wheel,) = dist.glob("*.whl")
    name, version = re.match(r"(\w+)-([^-]+)-", wheel.name).groups()
    materials, sums, signature = dist / f"{name}-{version}.cdx.json", dist / "SHA256SUMS", dist / "SHA256SUMS.sig"
    materials.write_text(json.dumps(bill(version, wheel), indent=2) + "\n")
    released = sorted([*dist.glob("*.whl"), *dist.glob("*.tar.gz"), materials])
    sums.write_text("".join(f"{digest(file)}  {file.name}\n" for file in released))
    signature.unlink(missing_ok=True)
    if key is None:
        return [materials, sums]
    subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(sums)], check=True)
    return [materials, sums, signature]


def main() -> None:
    """Complete the distribution in a folder."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("dist", type=Path)
    options.add_argument("--key", type=Path, help="Private key (ssh-keygen) that signs the checksums.")
    given = options.parse_args()
    for file in complete(given.dist, given.key):
        print(f"wrote {file}")
    if given.key is None:
        print("not signed: give --key FILE, or make release KEY=FILE")


if __name__ == "__main__":
    main()
