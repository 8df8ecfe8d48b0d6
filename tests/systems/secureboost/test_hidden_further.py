"""Trees on shared rows with further parties, who hold no shares, against the plain grower's; and what each receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from crypto.sealed.test_sealed import play
from crypto.sealed.watching import RARE, uniform
from systems.secureboost.hidden_jobs import Columns, Job, assert_equal, grown_together
from treaty.crypto.lattice.kernels import reduced
from treaty.crypto.parameters import DEGREE
from treaty.crypto.sums import shared_sums
from treaty.crypto.transfer.stock import Transfers, open_transfers
from treaty.systems.secureboost.hidden_further import Pads

Ends = tuple[Transfers, Transfers]


@pytest.fixture(scope="module")
def ends() -> Ends:
    return play(open_transfers(0), open_transfers(1))


@settings(max_examples=15)
@given(st.integers(0, 1 << 32), st.integers(1, 3), st.sampled_from(["logistic_pieces", "squared_error_steps"]))
def test_trees_with_further_parties_are_the_plain_growers(ends: Ends, seed: int, further: int, objective: str) -> None:
    rng = np.random.default_rng(seed)
    job = Job.draw(ends, rng, further, objective=objective)
    margins = np.rint(rng.normal(0, rng.choice([0, 1, 6]), job.n) * 4096).clip(-(9 << 12), 9 << 12).astype(np.int64)
    shares = job.share(margins, rng)
    for _ in range(2):
        grown = job.grown(shares)
        assert_equal(job, margins, grown)
        margins, shares = grown.opened, grown.margins


@pytest.mark.parametrize("seed", range(3))
def test_trees_of_several_classes_grow_at_once(ends: Ends, seed: int) -> None:
    rng = np.random.default_rng(seed)
    job = Job.draw(ends, rng, 1 + seed)
    jobs = [job, *(job.with_labels(rng.integers(0, 2, job.n)) for _ in range(2))]
    margins = [np.rint(rng.normal(0, 1, job.n) * 4096).astype(np.int64) for _ in jobs]
    for of, before, grown in zip(
        jobs, margins, grown_together(jobs, [job.share(of, rng) for of in margins]), strict=True
    ):
        assert_equal(of, before, grown)


def test_a_full_tree_has_nodes_of_all_parties(ends: Ends) -> None:
    rng = np.random.default_rng(3)
    own = [Columns.draw(600, 3, 7, rng) for _ in range(4)]
    job = Job(ends, own, rng.integers(0, 2, 600), max_depth=6, min_child_weight=1e-3, places=[2, 0, 3, 1])
    margins = np.zeros(600, np.int64)
    tree = assert_equal(job, margins, job.grown(job.share(margins, rng)))
    assert np.count_nonzero(tree.left < 0) > 40
    assert {0, 1, 2, 3} <= set(tree.source.tolist())


def test_vectors_and_hints_in_several_pieces_give_the_same_tree(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_sums, "_VECTOR_BYTES", 1)
    monkeypatch.setattr(shared_sums, "_HINT_BYTES", 1)
    rng = np.random.default_rng(4)
    own = [Columns.draw(DEGREE + 77, 1, 4, rng) for _ in range(3)]
    job = Job(ends, own, rng.integers(0, 2, DEGREE + 77), max_depth=2)
    margins = np.zeros(job.n, np.int64)
    assert_equal(job, margins, job.grown(job.share(margins, rng)))
    assert sum(name == "C0" and len(arrays) in (3, 5) for _, name, arrays in job.links.sent) >= 2 * 2


# ---------------------------------------------------------------- what each receives


def received(ends: Ends, codes: np.ndarray) -> dict[str, np.ndarray]:
    """Grow trees whose splits are nearly all a further party's; return what is under masks, by receiver."""
    n, none = len(codes), np.zeros(1, np.bool_)
    constant = Columns(np.zeros((n, 1), np.uint8), np.array([0, 2], np.int32), none, none)
    table = Columns(codes, np.arange(codes.shape[1] + 1, dtype=np.int32) * 9, *np.zeros((2, codes.shape[1]), np.bool_))
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, n)
    job = Job(ends, [constant, constant, table], labels, max_depth=5, min_child_weight=1e-3)
    found: dict[str, list[np.ndarray]] = {
        name: []
        for name in ("answers", "sums of answers", "opened", "passed on", "index", "sides", "numbers", "padded", "both")
    }
    first = list[np.ndarray]()
    for tree in range(8):
        job.links.sent.clear()
        job.grown(job.share(np.zeros(n, np.int64), rng))
        level = 0
        for sender, _, arrays in job.links.sent:
            if sender == "A" and len(arrays) == 3:
                found["numbers"].append(arrays[1].astype(np.uint32))
                found["padded"].append(arrays[2])
                found["both"].append(arrays[1] + arrays[2])  # which the active party sees
            elif sender != "A" and arrays[1].dtype == np.uint16:
                _, own, passed = arrays
                pad = Pads(job.seeds.of("B"), sender, job.trees, level).digits(passed.shape)
                level += 1
                found["answers"].append(own)
                found["passed on"].append(passed)
                found["opened"].append(reduced(passed.astype(np.int64) - pad))
                found["sums of answers"].append(reduced(own.astype(np.int64) + passed))
            elif sender != "A":
                # the trees are the same
                first += [arrays[1]] * (tree == 0)
                place = len(found["sides"]) % len(first)
                found["index"] += [arrays[1] ^ first[place]] * (tree > 0)
                found["sides"].append(arrays[2])
    return {name: np.concatenate([of.reshape(-1) for of in parts]) for name, parts in found.items()}


TABLES: dict[str, Callable[[int], np.ndarray]] = {
    "random": lambda n: np.random.default_rng(0).integers(0, 8, (n, 4)).astype(np.uint8),
    "in order": lambda n: np.stack([(np.arange(n) + n * k // 5) % n * 8 // n for k in range(4)], 1).astype(np.uint8),
}


def are_uniform(found: dict[str, np.ndarray]) -> dict[str, bool]:
    # of the lowest bits alone, as there are few
    counted = np.bincount(found.pop("index") & 3, minlength=4)
    assert counted.sum() > 80
    return {"index": bool(chisquare(counted).pvalue > RARE)} | {name: uniform(of) for name, of in found.items()}


@pytest.mark.parametrize("table", TABLES)
def test_what_each_receives_is_uniform(ends: Ends, table: str) -> None:
    found = received(ends, TABLES[table](400))
    assert all(are_uniform(found).values())


@pytest.mark.parametrize(("pad", "shown"), [
    ("words", ["padded", "both"]), ("numbers", ["index"]), ("lines", ["sides"]),
])  # fmt: skip
def test_what_has_no_pad_is_not_uniform(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, pad: str, shown: list[str]
) -> None:
    """As the test above would find."""
    honest = getattr(Pads, pad)

    def none(of: Pads, *given: Any) -> Any:
        drawn = honest(of, *given)
        return [line * 0 for line in drawn] if isinstance(drawn, list) else drawn * 0

    monkeypatch.setattr(Pads, pad, none)
    found = are_uniform(received(ends, TABLES["in order"](400)))
    assert [name for name, fine in found.items() if not fine] == shown
