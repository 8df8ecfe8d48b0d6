"""Jobs of parties with clusters give the models of those without, also when workers are lost."""

from __future__ import annotations

import gc
import os
import signal
import stat
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pandas as pd
import pytest

from cluster.local_shards import LocalShards
from runs import small_jobs
from runs.small_jobs import model, played, write_job
from treaty.cluster.shards import Cluster, Shards, opened
from treaty.errors import ClusterLost, ConfigError, CryptoError
from treaty.runs import party as runs
from treaty.runs.job_files import check_training

ROWS = 20_000  # more than a stripe, so that two workers have rows
TREES = {"n_estimators": 2, "max_depth": 3, "max_bin": 8, "min_child_samples": 5}
OPEN = {"allow_exact_sums": True}
KEY = {"insecure_test_key_bits": 512, "allow_insecure": True, "subsample": 0.7, "random_state": 1, **OPEN}
TWO = {"a": "", "b": ""}
JOBS = {
    "sealed": ("secureboost", TREES, TWO),
    "lattice": ("secureboost", {"encryption": "lattice", "sums": "open", **TREES}, {"a": "", "b": "", "c": ""}),
    "ou": ("secureboost", {"encryption": "ou", "sums": "open", **KEY, **TREES}, TWO),
    "paillier": ("secureboost", {"encryption": "paillier", "sums": "open", **KEY, **TREES}, TWO),
    "many categories": ("secureboost", {"encryption": "ou", "sums": "open", **KEY, **TREES}, TWO),
    "smm, ou": ("fedxgboost-smm", {"backend": "ou", **KEY, **TREES, "max_depth": 2}, TWO),
    "smm, lattice": ("fedxgboost-smm", {**OPEN, **TREES}, TWO),
    "columns": ("federboost-vertical", {"epsilon": 50.0, **TREES}, {"a": "", "b": "", "c": ""}),
    "rows": ("federboost-horizontal", {"subsample": 0.7, "random_state": 1, **TREES}, {"a": "", "b": "", "c": ""}),
    "regression": (
        "quasi-newton",
        {
            "encryption": "lattice",
            "coordinator": False,
            "batch_size": 5000,
            "max_iter": 2,
            "tol": 0.0,
            "random_state": 3,
        },
        TWO,
    ),
}


def drawn(_: str, rows: int) -> tuple[pd.DataFrame, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.integers(0, 6, (rows, 9)).astype(np.float64)
    x[rng.random((rows, 9)) < 0.05] = np.nan
    signal = np.nan_to_num(x[:, 0]) + np.nan_to_num(x[:, 4]) * np.nan_to_num(x[:, 8]) / 4
    return pd.DataFrame(x, columns=[f"c{k}" for k in range(9)]), (signal + rng.normal(0, 2, rows) > 5).astype(int)


def with_many_categories(of: str, rows: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Return columns of 400 categories at both parties: codes of two bytes."""
    x, y = drawn(of, rows)
    codes = np.random.default_rng(6).integers(0, 400, (2, rows))
    return x.assign(c1=np.char.add("k", codes[0].astype(str)), c7=np.char.add("k", codes[1].astype(str))), y


def without_gaps(of: str, rows: int) -> tuple[pd.DataFrame, np.ndarray]:
    x, y = drawn(of, rows)
    return x.fillna(0.0), y


@pytest.fixture
def play(monkeypatch, tmp_path):
    """Play a job twice, with and without clusters; return both models."""
    monkeypatch.setattr(small_jobs, "real_table", drawn)

    def both(name: str, cluster: str = "ray", workers: int | None = None):
        system, options, roles = JOBS[name]
        if name == "many categories":
            monkeypatch.setattr(small_jobs, "real_table", with_many_categories)
        if system == "quasi-newton":
            monkeypatch.setattr(small_jobs, "real_table", without_gaps)
        found = []
        for number, where in enumerate((None, cluster)):
            path: Path = tmp_path / str(number)
            path.mkdir()
            job = write_job(path, system, (options, roles), rows=ROWS)
            members = {
                party: member
                if system == "federboost-vertical" and party != job.active
                else msgspec.structs.replace(member, cluster=where, cluster_workers=where and workers)
                for party, member in job.parties.items()
            }
            if system == "federboost-vertical":  # whose noise is drawn once, and kept
                job = msgspec.structs.replace(job, store=str(tmp_path / "noise"))
            job = msgspec.structs.replace(job, parties=members)
            assert played(dict.fromkeys(job.parties, job)) == {}
            found.append(model(job))
        return found

    return both


@pytest.mark.parametrize("name", JOBS)
def test_models_are_those_without_a_cluster(play, monkeypatch, name):
    made = []

    @contextmanager
    def local(cluster):
        if cluster is None:
            yield None
            return
        made.append(LocalShards(3))
        yield made[-1]

    monkeypatch.setattr(runs, "opened", local)
    alone, together = play(name)
    assert alone == together
    assert any(shards.steps for shards in made)
    if name == "columns":  # all owners' are summed together
        assert {kept for kept in made[-1].names if kept.startswith("codes")} == {"codes of all"}


# ---------------------------------------------------------------- Ray itself


@pytest.fixture(scope="module")
def ray():
    """Ray, started once: parties of a test share it."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: it has no wheel for this Python yet")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 29)
    yield ray
    ray.shutdown()
    with warnings.catch_warnings(action="ignore"):  # it does not wait for the processes that it ends
        gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_workers_killed_in_a_tree_change_no_model(play, ray, monkeypatch, name):
    each, killed = Shards.each, []

    def killing(shards, step, *args):
        if not killed and step.__name__ in ("bin_sums", "vector_products", "bin_products_of"):
            killed.append(shards)
            os.kill(shards.processes()[1], signal.SIGKILL)
        return each(shards, step, *args)

    monkeypatch.setattr(Shards, "each", killing)
    alone, together = play(name, workers=3)
    assert alone == together
    assert killed[0].replaced == 1


def test_a_step_that_fails_says_why_and_workers_that_die_again_and_again_are_given_up(ray, monkeypatch):
    def failing(shard):
        raise ZeroDivisionError(shard.number)

    def dying(shard):
        os._exit(1)

    with opened(Cluster("ray", 2)) as shards:
        with pytest.raises(ZeroDivisionError):
            shards.each(failing)
        with pytest.raises(ClusterLost, match="lost 4 times in one step"):
            shards.each(dying)
    monkeypatch.setattr(ray, "wait", lambda waited, **_: ([], waited))
    with pytest.raises(ConfigError, match="0 of 2 workers of the cluster started within"), opened(Cluster("ray")):
        pass


def test_another_version_of_treaty_at_the_workers_is_refused(ray, monkeypatch):
    monkeypatch.setattr("treaty.cluster.shards.__version__", "9.9")
    with (
        pytest.raises(ConfigError, match=r"expected Treaty 9\.9 on all machines of the cluster"),
        opened(Cluster("ray")),
    ):
        pass


def test_a_worker_that_lacks_rows_is_replaced(ray, monkeypatch):
    rows = np.arange(50_000)
    monkeypatch.setattr("treaty.cluster.shards.PIECE_BYTES", 1 << 16)

    def total(shard):
        return shard.arrays["rows"].sum()

    def spoil(shard):
        shard.begin("rows", (10,), "int64")

    with opened(Cluster("ray", 2)) as shards:
        shards.keep("rows", rows)
        assert sum(shards.each(total)) == rows.sum()
        shards.each(spoil)
        assert sum(shards.each(total)) == rows.sum()
        assert shards.replaced == 2


def test_an_error_in_a_step_is_as_on_one_machine_and_names_no_machine(ray):
    def refusing(shard):
        raise CryptoError("a word is not below its prime - in a query")

    with opened(Cluster("ray", 2)) as shards, pytest.raises(CryptoError) as caught:
        shards.each(refusing)
    assert str(caught.value) == "a word is not below its prime - in a query"


# ---------------------------------------------------------------- workers that are lost


class OwnRay:
    """What `Shards` uses of Ray, in this process; `lost` names the workers that the next calls of a step lose."""

    class exceptions:
        class RayError(Exception):
            """A worker is lost."""

    def __init__(self) -> None:
        self.lost: list[int] = []

    def remote(self, **_):
        return lambda kind: SimpleNamespace(remote=lambda *args: self._actor(kind(*args), args[0]))

    def get(self, call):
        return call()

    def wait(self, calls):
        return calls, []

    def kill(self, actor):
        pass

    def _actor(self, worker, number):
        def run(*args):
            if number in self.lost:
                self.lost.remove(number)
                raise self.exceptions.RayError("it died")
            return worker.run(*args)

        def call(*args):
            worker.call(*args)
            return lambda: None

        return SimpleNamespace(
            run=SimpleNamespace(remote=lambda *args: lambda: run(*args)), call=SimpleNamespace(remote=call)
        )


def test_workers_are_replaced_three_times_in_a_step_and_then_given_up():
    ray, rows = OwnRay(), np.arange(50_000)
    shards = Shards(ray, 2, 1)
    shards.keep("rows", rows)

    def total(shard):
        return shard.arrays["rows"].sum()

    for replaced in (3, 6):  # of each step
        ray.lost = [1, 1, 1]
        assert sum(shards.each(total)) == rows.sum()
        assert (shards.replaced, ray.lost) == (replaced, [])
    ray.lost = [0] * 50
    with pytest.raises(ClusterLost, match="lost 4 times in one step"):
        shards.each(total)
    assert (shards.replaced, len(ray.lost)) == (9, 46)


# ---------------------------------------------------------------- job files


@pytest.mark.parametrize("address", ["dask", "ray:", "ray://", "ray://head", "ray://head:port"])
def test_other_clusters_are_refused(address):
    with pytest.raises(ConfigError, match='expected cluster = "ray", or "ray://host:port"'):
        Cluster(address)


def test_a_cluster_that_is_not_there_is_told_from_one_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="treaty-learn"), opened(Cluster("ray")):
        pass


def test_whatever_keeps_ray_from_starting_is_told_as_a_cluster_that_is_not_reached(ray, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("[Errno 13] /tmp/ray belongs to another user\nand more")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    told = "cannot reach the cluster 'ray': .* another user; see docs/clusters.md"
    with pytest.raises(ConfigError, match=told) as refused, opened(Cluster("ray")):
        pass
    assert refused.value.public == "its cluster cannot be reached"


def test_the_token_of_a_cluster_that_begins_here_is_its_owners_alone(ray, monkeypatch, tmp_path):
    token, seen = tmp_path / ".ray" / "auth_token", []

    def begun(*_, **__):
        seen.append((len(token.read_text()), stat.S_IMODE(token.stat().st_mode)))
        raise PermissionError("enough")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", begun)
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):
        with pytest.raises(ConfigError, match="enough"), opened(Cluster("ray")):
            pass
    assert seen == [(64, 0o600)] * 2
    token.unlink()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(ConfigError, match="cannot reach"), opened(Cluster("ray")):
        pass
    assert not token.exists()


def test_parties_that_cannot_use_a_cluster_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match="expected RAY_AUTH_MODE=token, got 'disabled'"), opened(Cluster("ray")):
        pass
    for system, party in (("sgd", "a"), ("federboost-vertical", "b"), ("quasi-newton", "notary")):
        (tmp_path / system).mkdir()
        job = write_job(tmp_path / system, system)
        members = {party: msgspec.structs.replace(job.parties[party], cluster="ray")}
        with pytest.raises(ConfigError, match=f"expected no cluster at {party}"):
            check_training(msgspec.structs.replace(job, parties=job.parties | members))
