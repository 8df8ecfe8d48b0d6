"""What is read from a passive party's transcript is true, and is all it can know."""

from __future__ import annotations

import numpy as np
import pytest

from systems.vertical.playing import OPTIONS, play_training, tables_and_labels
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.messages import Array, encode
from treaty.messaging.transcript import Transcript
from treaty.models.trees import forest_of
from treaty.runs.warm_up import compile_kernels
from treaty.systems.vertical.exact_sums import node_sets_from_transcript
from treaty.systems.vertical.messages import NamedRows, SumsRequest, TreeStart

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_kernels()


def nodes_of(played, tables, tree):
    """Return the rows (bool) of every node of a tree by walking it with all parties' splits, and its inner nodes."""
    n_rows = next(iter(tables.values())).n_rows
    rows = {0: np.ones(n_rows, np.bool_)}
    for node in np.flatnonzero(tree.left >= 0).tolist():
        owner = list(tables)[tree.source[node]]
        record = np.array([tree.record[node]], np.int32)
        packed = played.results[owner].splits.decide(tables[owner].matrix(), record)
        left = np.unpackbits(packed[0], count=n_rows).astype(np.bool_)
        child = int(tree.left[node])
        rows[child], rows[child + 1] = rows[node] & left, rows[node] & ~left
    return rows


def depth_of(tree):
    depth = np.zeros(len(tree.left), int)
    for node in np.flatnonzero(tree.left >= 0).tolist():
        depth[[tree.left[node], tree.left[node] + 1]] = depth[node] + 1
    return depth


def samples_of(transcript, n_rows):
    """Return the sampled rows (bool) of every tree."""
    starts = [entry.message(TreeStart) for entry in transcript.entries if entry.step == "TreeStart"]
    samples = np.ones((len(starts), n_rows), np.bool_)
    for sample, start in zip(samples, starts, strict=True):
        if start.rows is not None:
            sample[:] = False
            sample[np.frombuffer(start.rows.data, np.int32)] = True
    return samples


@pytest.mark.parametrize(
    "options",
    [{}, {"subsample": 0.6}, {"max_depth": 5, "min_child_samples": 1}],
    ids=["plain", "subsample", "deep"],
)
def test_cells_are_the_nodes_of_the_trees_as_far_as_the_party_was_told(options):
    tables, y = tables_and_labels()
    played = play_training(tables, y, random_state=3, **options)
    forest = forest_of(list(played.results.values()))
    least, deepest = options.get("min_child_samples", OPTIONS["min_child_samples"]), options.get("max_depth", 3)
    for source, name in enumerate(tables):
        if name == "p0":
            continue
        trees = node_sets_from_transcript(played.transcripts[name], len(y))
        samples = samples_of(played.transcripts[name], len(y))
        for seen, tree, sample in zip(trees, forest.trees, samples, strict=True):
            nodes, depth = nodes_of(played, tables, tree), depth_of(tree)
            found = set()
            for members in (cells == number for cells in seen for number in range(cells.max() + 1)):
                fitting = {n for n, rows in nodes.items() if np.array_equal(members & sample, rows & sample)}
                fitting = {n for n in fitting if not np.any(members & ~nodes[n])}
                assert fitting, "a cell that is no node"
                found |= fitting
            asked = {n for n in nodes if 0 < depth[n] < deepest and tree.count[n] >= 2 * least}
            own = tree.left[tree.source == source]
            assert asked | {*own} | {*(own + 1)} <= found


def test_partitions_grow_finer_and_tell_something_new():
    tables, y = tables_and_labels()
    played = play_training(tables, y)
    for seen in node_sets_from_transcript(played.transcripts["p1"], len(y)):
        cells_so_far = 1
        for coarse, fine in zip([np.zeros(len(y), np.int32), *seen], seen, strict=False):
            assert fine.dtype == np.int32
            assert fine.max() + 1 > cells_so_far
            cells_so_far = fine.max() + 1
            pairs = np.unique(np.stack([fine, coarse]), axis=1)
            assert len(np.unique(pairs[0])) == pairs.shape[1], "a fine cell in two coarse ones"


@pytest.mark.parametrize("options", [{}, {"subsample": 0.6}, {"max_depth": 5, "min_child_samples": 1}], ids="-".join)
def test_under_the_lattice_map_cells_are_children_of_own_splits_and_the_rest(options):
    tables, y = tables_and_labels()
    played = play_training(tables, y, encryption="lattice", reveal="node", max_bin=8, random_state=3, **options)
    forest, divided = forest_of(list(played.results.values())), 0
    for source, name in enumerate(tables):
        if name == "p0":
            continue
        trees = node_sets_from_transcript(played.transcripts[name], len(y))
        for seen, tree in zip(trees, forest.trees, strict=True):
            nodes = nodes_of(played, tables, tree)
            cells = [cell == number for cell in seen for number in range(cell.max() + 1)]
            own = tree.left[tree.source == source]
            for child in (*own, *(own + 1)):
                assert any(np.array_equal(cell, nodes[child]) for cell in cells)
            for leaf in np.flatnonzero(tree.left < 0):
                assert all(len(np.unique(cell[nodes[leaf]])) <= 1 for cell in cells), "a cell that parts a leaf"
            divided += len(own)
            assert bool(seen) == bool(len(own))
    assert divided


@pytest.mark.parametrize("reveal", ["column", None])
def test_under_the_lattice_map_no_cell_is_seen_where_columns_are_revealed(reveal):
    tables, y = tables_and_labels()
    played = play_training(tables, y, encryption="lattice", reveal=reveal, max_bin=8)
    assert len(played.results["p1"].splits)
    assert node_sets_from_transcript(played.transcripts["p1"], len(y)) == [[], []]


def test_trees_grown_alone_are_not_in_the_transcript():
    tables, y = tables_and_labels()
    played = play_training(tables, y, rl_trees=1)
    assert len(node_sets_from_transcript(played.transcripts["p1"], len(y))) == 1


def test_a_transcript_without_contents_is_refused():
    transcript = Transcript("shop")
    transcript.record("received", "bank", "TreeStart", 1, 100, b"dropped")
    with pytest.raises(ConfigError, match="with contents"):
        node_sets_from_transcript(transcript, 10)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (SumsRequest([Array.of(np.zeros(9, np.uint8)), Array.of(np.ones(1, np.int32))], True), r"SumsRequest\.payload"),
        (NamedRows(Array.of(np.zeros(11, np.uint8))), r"NamedRows\.nodes"),
    ],
    ids=["sums", "nodes"],
)
def test_a_recorded_message_of_another_table_is_refused(message, field):
    transcript = Transcript("shop", record_content=True)
    start = TreeStart(None, 10, Array.of(np.zeros(1, np.int32)), bytes(32), [])
    for one in (start, message):
        transcript.record("received", "bank", type(one).__name__, 1, 100, encode(one))
    with pytest.raises(PeerProtocolError, match=f"{field}.* from bank"):
        node_sets_from_transcript(transcript, 10)
