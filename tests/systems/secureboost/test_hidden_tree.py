"""Trees whose rows, margins, sums and totals are shared, against the plain grower's, and what such a tree refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from crypto.sealed.test_sealed import opened, play
from crypto.sealed.used import Used
from crypto.sealed.watching import again, assert_refuses_garbage, fill, filled, views
from marks import slow
from systems.secureboost.hidden_jobs import Columns, Job, assert_equal, grown_together, trees_of
from treaty.crypto.sums.lattice_sums import lattice_fields
from treaty.crypto.transfer.stock import Steps, Transfers, open_transfers
from treaty.errors import CryptoError
from treaty.systems.secureboost import hidden_tree
from treaty.systems.secureboost.hidden_tree import gradients, grow_together

Ends = tuple[Transfers, Transfers]


@pytest.fixture(scope="module")
def ends() -> Ends:
    return play(open_transfers(0), open_transfers(1))


@pytest.mark.parametrize("seed", [*range(30), *(slow(seed) for seed in range(30, 200))])
def test_trees_are_the_plain_growers(ends: Ends, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    job = Job.draw(ends, rng)
    if seed % 3 == 0:  # in several pieces
        monkeypatch.setattr(hidden_tree, "_ROWS_AT_ONCE", 50)
        monkeypatch.setattr(hidden_tree, "_CANDIDATES_AT_ONCE", 10)
    margins = np.clip(np.rint(rng.normal(0, rng.choice([0, 1, 6]), job.n) * 4096), -(9 << 12), 9 << 12).astype(np.int64)
    shares = job.share(margins, rng)
    for _ in range(2):
        grown = job.grown(shares)
        assert_equal(job, margins, grown)
        margins, shares = grown.opened, grown.margins


@pytest.mark.parametrize("seed", range(100, 106))
def test_trees_of_several_classes_grow_at_once_in_the_steps_of_one(ends: Ends, seed: int) -> None:
    """Each is the plain grower's; only what fills the stock takes steps more."""
    rng = np.random.default_rng(seed)
    job = Job.draw(ends, rng)
    jobs = [job, *(job.with_labels(rng.integers(0, 2, job.n)) for _ in range(2))]
    margins = [np.rint(rng.normal(0, 1, job.n) * 4096).astype(np.int64) for _ in jobs]
    shares = [job.share(of, rng) for of in margins]
    for _ in range(2):
        found = grown_together(jobs, shares)
        for of, before, grown in zip(jobs, margins, found, strict=True):
            assert_equal(of, before, grown)
        margins, shares = [grown.opened for grown in found], [grown.margins for grown in found]
    fill(ends)
    (alone, _), _ = views(lambda k: trees_of(jobs[:1], k, shares[:1]))
    fill(ends)
    (at_once, _), _ = views(lambda k: trees_of(jobs, k, shares))
    assert len(at_once) < 1.2 * len(alone)


def test_a_full_tree_has_nodes_of_both_parties_at_all_levels(ends: Ends) -> None:
    rng = np.random.default_rng(3)
    own = [Columns.draw(600, 4, 7, rng) for _ in range(2)]
    job = Job(ends, own, rng.integers(0, 2, 600), max_depth=6, min_child_weight=1e-3)
    margins = np.zeros(600, np.int64)
    tree = assert_equal(job, margins, job.grown(job.share(margins, rng)))
    assert np.count_nonzero(tree.left < 0) > 40
    assert {0, 1} <= set(tree.source.tolist())


@pytest.mark.parametrize("most", [1, 2, 4, 7, 255])
def test_gradients_are_those_of_the_plain_objective(ends: Ends, most: int) -> None:
    """To the unit, at every piece and beyond, with labels of either kind, and weights up to a power of two."""
    n, rng = 4000, np.random.default_rng(1)
    weights = rng.integers(1, most + 1, n)
    weights[:2] = most
    own = [Columns.draw(n, 1, 3, rng), Columns.draw(n, 1, 3, rng)]
    job = Job(ends, own, np.arange(n) & 1, weights=None if most == 1 else weights)
    margins = np.concatenate([np.arange(-128, 120) * 4096, rng.integers(-(10 << 12), 10 << 12, n - 248)])
    margins[300:400] = (120 << 12) - 1
    shares = job.share(margins, rng)
    found = play(*(gradients(end, shares[role]) for role, end in enumerate(job.ends)))
    fields, bits = lattice_fields(job.bounds, sealed=True)
    grad, hess = job.derivatives(margins)
    expected = [
        (1 + (int(h) << fields[1].shift) + (int(g) << fields[2].shift)) % (1 << bits)
        for g, h in zip(grad, hess, strict=True)
    ]
    assert opened(found, bits) == expected
    assert all(of.shape == (n, 1, 2) for of in found)


@pytest.mark.parametrize("most", [1, 255])
@pytest.mark.parametrize("scale", [1, 1000])
def test_gradients_of_numbers_are_those_of_the_plain_objective(ends: Ends, most: int, scale: int) -> None:
    """To the unit, up to the largest margins and labels that are shared."""
    n, rng = 3000, np.random.default_rng(2)
    own = [Columns.draw(n, 1, 3, rng), Columns.draw(n, 1, 3, rng)]
    labels, weights = rng.integers(-scale, scale + 1, n), rng.integers(1, most + 1, n)
    labels[:4], weights[:4] = [-scale, scale, -scale, scale], most
    job = Job(ends, own, labels, weights=None if most == 1 else weights, objective="squared_error_steps")
    reach = 15 << 12
    margins = rng.integers(-reach, reach + 1, n)
    margins[:4] = [reach, -reach, -reach, reach]
    shares = job.share(margins, rng)
    found = play(*(gradients(end, shares[role]) for role, end in enumerate(job.ends)))
    fields, bits = lattice_fields(job.bounds, sealed=True)
    grad, hess = job.derivatives(margins)
    assert set(hess.tolist()) <= {k << 16 for k in range(1, 256)}
    expected = [
        (1 + (int(h) << fields[1].shift) + (int(g) << fields[2].shift)) % (1 << bits)
        for g, h in zip(grad, hess, strict=True)
    ]
    assert opened(found, bits) == expected


@pytest.mark.parametrize("seed", range(200, 208))
def test_trees_of_numbers_are_the_plain_growers(ends: Ends, seed: int) -> None:
    """Also where all margins are as large as can be."""
    rng = np.random.default_rng(seed)
    job = Job.draw(ends, rng, objective="squared_error_steps")
    margins = np.rint(rng.normal(0, 1, job.n) * 4096).astype(np.int64)
    if seed % 2:
        margins[:] = (14 << 12) * rng.choice([-1, 1])
    shares = job.share(margins, rng)
    for _ in range(2):
        grown = job.grown(shares)
        assert_equal(job, margins, grown)
        margins, shares = grown.opened, grown.margins


def test_columns_of_one_bin_give_a_tree_without_splits(ends: Ends) -> None:
    rng = np.random.default_rng(2)
    job = Job(ends, [Columns.draw(30, 2, 1, rng), Columns.draw(30, 1, 1, rng)], rng.integers(0, 2, 30))
    for of in job.own:
        of.codes[:], of.missing[:] = 0, False
    job = Job(ends, job.own, job.labels)
    margins = np.zeros(30, np.int64)
    tree = assert_equal(job, margins, job.grown(job.share(margins, rng)))
    assert len(tree.left) == 1


# ---------------------------------------------------------------- hashes


def test_the_last_levels_numbers_are_summed_and_not_made_row_by_row(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be as many as those of all other levels."""
    rng = np.random.default_rng(3)
    job, honest, made = Job.draw(ends, rng, max_depth=4), hidden_tree.cut, []

    def cut(a: np.ndarray, bits: int) -> np.ndarray:
        made.append(a.size // (2 * len(a)) if len(a) == job.n else 0)
        return honest(a, bits)

    monkeypatch.setattr(hidden_tree, "cut", cut)
    job.grown(job.share(np.zeros(job.n, np.int64), rng))
    assert max(made) == 4


@pytest.mark.parametrize(
    ("weighted", "classes", "further"), [(False, 1, 0), (True, 1, 0), (False, 3, 0), (False, 1, 2), (False, 2, 1)]
)
def test_no_pad_of_a_tree_serves_twice(
    monkeypatch: pytest.MonkeyPatch, weighted: bool, classes: int, further: int
) -> None:
    """Under a key, a tweak is of one row; and two trees have different keys, which both ends derive alike.

    Nor does a stream of pads that the partner and a further party know, which both draw alike.
    """
    hashed = Used(monkeypatch).hashed
    ends, rng = play(open_transfers(0), open_transfers(1)), np.random.default_rng(5)
    own = [Columns.draw(100, 1, 6, rng) for _ in range(2 + further)]
    weights = rng.integers(1, 8, 100) if weighted else None
    job = Job(ends, own, rng.integers(0, 2, 100), max_depth=3, min_child_weight=1e-3, weights=weights)
    jobs = [job, *(job.with_labels(rng.integers(0, 2, 100)) for _ in range(classes - 1))]
    margins, keys = [job.share(np.zeros(100, np.int64), rng) for job in jobs], []
    for _ in range(2):
        before = set(hashed)
        margins = [grown.margins for grown in grown_together(jobs, margins)]
        assert len(set(hashed) - before) == 4  # of a tree: a sender's and a receiver's at either end
        fixed = np.zeros((1, 2), np.uint64)
        honest = [of.hash.rows(fixed, 1 << 60).tobytes() for end in ends for of in (end.sender, end.receiver)]
        assert honest[0] == honest[3] != honest[1] == honest[2]
        keys += honest[:2]
    assert len(set(keys)) == 4
    assert max(len(np.concatenate(parts)) for parts in hashed.values()) > 1 << 14
    weights = rng.integers(0, 1 << 64, 5, dtype=np.uint64) | np.uint64(1)
    for parts in hashed.values():
        of = np.concatenate(parts) * weights
        # numbers for tweak and row, and rows are random: rows of numbers would take minutes to sort
        pads, rows = of[:, [0, 3, 4]].sum(axis=1), of[:, :3].sum(axis=1)
        assert len(np.unique(pads)) == len(of)  # one pad, one use
        assert len(np.unique(rows)) == len(np.unique(of[:, 0]))  # one tweak, one row
    for name in job.further:
        at_partner, at_further = job.seeds.drawn[f"B {name}"], job.seeds.drawn[f"{name} B"]
        assert len(set(at_partner)) == len(at_partner)
        assert len(set(at_further)) == len(at_further)
        assert {*at_further} <= {*at_partner}
        assert sum(what.endswith("sums") for what in at_further) == 2 * classes * job.depth
    assert len({what for of in job.seeds.drawn.values() for what in of if what.endswith("sides")}) > 1 or not further


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("role", [0, 1])
def test_messages_of_other_types_and_shapes_are_refused_at_every_step(role: int) -> None:
    rng, ends = np.random.default_rng(7), filled()
    job = Job(ends, [Columns.draw(12, 1, 3, rng) for _ in range(2)], np.arange(12) & 1, max_depth=2, step=200)
    margins = job.share(np.zeros(12, np.int64), rng)

    def tree(k: int) -> Steps[Any]:
        return grow_together([replace(job.ends[k], transfers=again(ends[k]))], margins[k][None], [None])

    assert_refuses_garbage(tree, role, tries=1)


def changed(steps: Steps[Any], place: int, change: Any) -> Steps[Any]:
    """Take all steps of an end that is given other shares at its opening of that number."""
    came, openings = None, 0
    while True:
        try:
            sent = next(steps) if came is None else steps.send(came)
        except StopIteration as stop:
            return stop.value
        is_opening = isinstance(sent, hidden_tree.OpenedArrays)
        came = yield sent
        if is_opening:
            came = [change(array.copy()) for array in came] if openings == place else came
            openings += 1


@pytest.mark.parametrize("by", [3, 5, 1 << 15])
@pytest.mark.parametrize("role", [0, 1])
def test_owners_that_are_none_are_refused(role: int, by: int) -> None:
    rng, ends = np.random.default_rng(7), play(open_transfers(0), open_transfers(1))
    job = Job(ends, [Columns.draw(12, 1, 3, rng) for _ in range(2)], np.arange(12) & 1, step=200)
    margins = job.share(np.zeros(12, np.int64), rng)
    made = [job.tree(k, margins) for k in (0, 1)]
    made[role] = changed(made[role], 0, lambda shares: shares + np.uint64(by))
    with pytest.raises(CryptoError, match="expected shares of whose splits are best"):
        play(*made)


@pytest.mark.parametrize("by", [1 << 10, 1 << 31, (1 << 64) - (1 << 10)])
@pytest.mark.parametrize("role", [0, 1])
@pytest.mark.parametrize("swapped", [False, True])
def test_numbers_of_no_own_candidate_are_refused(role: int, by: int, swapped: bool) -> None:
    rng, ends = np.random.default_rng(8), play(open_transfers(0), open_transfers(1))
    none = np.zeros(1, np.bool_)
    own = [Columns(np.zeros((40, 1), np.uint8), np.array([0, 2], np.int32), none, none) for _ in range(2)]
    codes = (np.arange(40, dtype=np.uint8) % 4)[:, None]
    own[role] = Columns(codes, np.array([0, 5], np.int32), none, none)  # of the root's best split
    job = Job(ends, own, (codes[:, 0] > 1).astype(np.int64), swapped=swapped)
    margins = job.share(np.zeros(40, np.int64), rng)
    made = [job.tree(k, margins) for k in (0, 1)]
    made[role] = changed(made[role], 1, lambda shares: shares + np.uint64(by))
    with pytest.raises(CryptoError, match="expected shares of numbers of own candidates"):
        play(*made)


def test_an_owner_alone_is_sent_its_candidates_number(ends: Ends) -> None:
    """At an opening each end sends as many shares as the other has splits."""
    rng = np.random.default_rng(9)
    job = Job(ends, [Columns.draw(300, 2, 6, rng) for _ in range(2)], rng.integers(0, 2, 300), min_child_weight=1e-3)
    margins = job.share(np.zeros(300, np.int64), rng)
    openings: list[list[list[np.ndarray]]] = [[], []]

    def watch(role: int) -> Steps[Any]:
        steps, came = job.tree(role, margins), None
        while True:
            try:
                sent = next(steps) if came is None else steps.send(came)
            except StopIteration as stop:
                return stop.value
            came = yield sent
            if isinstance(sent, hidden_tree.OpenedArrays):
                openings[role].append(came)

    found = [of for _, of in views(watch)]
    for role, (levels, _, _) in enumerate(found):
        place = job.ends[role].place
        assert len(openings[role]) == 2 * len(levels)  # owners, then numbers, and nothing else is opened
        for level, (owners,), (numbers,) in zip(levels, openings[role][::2], openings[role][1::2], strict=True):
            assert len(owners) == len(level.owner)
            assert len(numbers) == np.count_nonzero(level.owner == place)
