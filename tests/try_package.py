"""Try a built distribution as a user gets it: `python tests/try_package.py DIST [--extras]`, by `make package`.

In an environment of its own, without the checkout in sight: the wheel is installed without extras and has what it
should, and no more; a training between processes, a saved model and the command work; what needs an extra says which;
the source distribution, installed in its place, works too. With `--extras` each extra is installed by itself, and does
what it is for. The Python that runs this is the one that it is tried on: `python3.13 tests/try_package.py dist`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import sys
from importlib.metadata import version
import numpy as np
import treaty
assert treaty.__version__ == version("treaty-learn")
assert "site-packages" in treaty.__file__, treaty.__file__
rng = np.random.default_rng(0)
x = rng.normal(size=(300, 4))
y = (x.sum(axis=1) > 0).astype(int)
tables = {"bank": x[:, :2], "shop": x[:, 2:]}
model = treaty.GBDTClassifier(treaty.SecureBoost(allow_exact_sums=True), n_estimators=2, transport="tls")
model.fit(tables, y).save("model.treaty")
again = treaty.load("model.treaty")
assert (again.predict(tables) == model.predict(tables)).all()
assert not {"matplotlib", "fastapi", "ray", "shap", "xgboost"} & set(sys.modules)
"""
USES = {
    "report": "import treaty, numpy as np\n"
    "x = np.arange(80.0).reshape(40, 2)\n"
    "treaty.GBDTClassifier(n_estimators=1).fit(x, x[:, 0] > 30).report('out.html')\n"
    "assert '<svg' in open('out.html').read()",
    "web": "from treaty.serving import app",
    "dp": "import dp_accounting\nimport treaty.privacy.discrete_gaussian",
    "shap": "import treaty, numpy as np\n"
    "x = np.random.default_rng(0).normal(size=(60, 2))\n"
    "model = treaty.GBDTClassifier(n_estimators=2).fit(x, x[:, 0] > 0)\n"
    "assert model.explain(x).values.shape[0] == 60",
    "sql": "import adbc_driver_manager, adbc_driver_postgresql",
    "ray": "import ray\nimport treaty.cluster.shards",
}
"""What is tried with each extra alone. Left out: xgboost, whose build for Linux brings 300 MB for graphics cards."""
MISSING = {
    "report": "import treaty, numpy as np\n"
    "treaty.GBDTClassifier(n_estimators=1).fit(np.arange(80.0).reshape(40, 2), np.arange(40) > 9).report('out.html')",
}
"""What needs an extra, tried without it."""


def main() -> None:
    """Try the distribution in a folder."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("dist", type=Path)
    options.add_argument("--extras", action="store_true", help="Install each extra by itself, too; some minutes.")
    given = options.parse_args()
    (wheel,), (source,) = given.dist.glob("*.whl"), given.dist.glob("*.tar.gz")
    check_contents(wheel, source)
    with tempfile.TemporaryDirectory() as folder:
        base = environment(Path(folder) / "base", [str(wheel)])
        run([base, "-c", SCRIPT], folder)
        said = run([str(Path(base).with_name("treaty")), "--version"], folder)
        print(f"{wheel.name}: installs and trains: {said.strip()}")
        for extra, use in MISSING.items():
            refused = subprocess.run([base, "-c", use], cwd=folder, capture_output=True, text=True, check=False)
            assert f"treaty-learn[{extra}]" in refused.stderr, refused.stderr
        run([base, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", str(source.absolute())], folder)
        run([base, "-c", SCRIPT], folder)
        print(f"{source.name}: installs and trains")
        for extra, use in USES.items() if given.extras else ():
            run([environment(Path(folder) / extra, [f"{wheel}[{extra}]"]), "-c", use], folder)
            print(f"{wheel.name}[{extra}]: works")


def check_contents(wheel: Path, source: Path) -> None:
    """Compare what is in both archives with what is in the checkout."""
    package = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "treaty").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packed = {name for name in names if not name.startswith("treaty_learn-")}
    assert packed == package, f"in one alone: {sorted(packed ^ package)}"
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    with tarfile.open(source) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in package} <= files
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= files
    assert not any(name.startswith(("dist/", ".venv", "site/")) for name in files)


def environment(folder: Path, requirements: list[str]) -> str:
    """Make an environment with these distributions, of pinned versions, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(folder / "bin" / "python")
    pins = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-compile", *pins, *requirements], check=True)
    return python


def run(words: list[str], folder: str) -> str:
    """Run a command where the checkout is not in sight; return what it prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(words, cwd=folder, env=kept, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{words}: {done.stderr[-3000:]}"
    return done.stdout


if __name__ == "__main__":
    main()
