"""Common bins of rows that nobody sees together: what a member refuses to answer or to take."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.federboost_horizontal.playing import dealt
from treaty.data.binning import fit_bins
from treaty.data.quantile_search import QuantileSearch, sorted_keys
from treaty.data.table import Schema, Table
from treaty.errors import PeerProtocolError
from treaty.messaging.messages import Array
from treaty.systems.horizontal.quantiles import (
    ProbeRequest,
    agreed_objective,
    answer_probes,
    most_probes,
    most_rounds,
    pack_bins,
    unpack_bins,
)
from treaty.trees.objectives import make_objective


def agreed_with(**changes):
    _, whole, _ = dealt("binary", 3)
    objective, bins = make_objective("logistic", whole.y, None), fit_bins(whole.table, 8)
    return msgspec.structs.replace(pack_bins(bins, objective), **changes), objective, whole.table.schema


@pytest.mark.parametrize(
    ("changes", "noise"),
    [
        ({"weight_bound": 2.0**-30}, True),
        ({"weight_bound": 2.0}, True),
        ({"weight_bound": 0.5}, False),
        *(({"clips": Array.of(np.array([clip]))}, False) for clip in (3.0, math.inf, math.nan)),
    ],
)
def test_bounds_that_would_outgrow_noise_or_sums_are_refused(changes, noise):
    agreed, objective, _ = agreed_with(**changes)
    with pytest.raises(PeerProtocolError, match="bounds"):
        agreed_objective(agreed, objective, noise=noise, peer="p0")
    told, objective, _ = agreed_with(weight_bound=1.0 if noise else 4.0)
    assert agreed_objective(told, objective, noise=noise, peer="p0").weight_bound == told.weight_bound


def test_more_or_endless_bins_are_refused():
    agreed, _, schema = agreed_with()
    assert unpack_bins(agreed, schema, (8, 8), "p0").n_bins.max() == 8
    with pytest.raises(PeerProtocolError, match="bins"):
        unpack_bins(agreed, schema, (7, 7), "p0")
    cuts = np.frombuffer(agreed.cuts.data, np.float32).copy()
    cuts[6] = np.inf
    with pytest.raises(PeerProtocolError, match="cuts"):
        unpack_bins(msgspec.structs.replace(agreed, cuts=Array.of(cuts)), schema, (8, 8), "p0")


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), st.integers(2, 12), st.integers(0, 2**32), st.booleans())
def test_an_honest_search_never_asks_more_than_members_allow_and_noise_counts(max_bin, distinct, seed, exact):
    rng = np.random.default_rng(seed)
    columns = [rng.choice(rng.normal(size=distinct), 200).astype(np.float32) for _ in range(2)]
    most = most_rounds({}, max_bin, exact=exact)
    ordered, search = sorted_keys(columns), QuantileSearch(2, max_bin, least_rows=1, exact=exact, most_rounds=most)
    search.present(np.array([200, 200]))
    while (probes := search.probes()) is not None:
        message = ProbeRequest(Array.of(probes.keys), Array.of(probes.offsets))
        search.take(answer_probes(message, ordered, most_probes(max_bin, exact=exact), "p0", 1))
    if exact:
        table = Table(Schema(("a", "b"), (None, None)), columns, 200)
        for ours, pooled in zip(search.cuts(), fit_bins(table, max_bin).cuts, strict=True):
            np.testing.assert_array_equal(ours, pooled)


def test_members_refuse_probes_beyond_the_search():
    ordered = sorted_keys([np.arange(9, dtype=np.float32)])
    for keys in (np.arange(9), np.array([4, 3]), np.array([4, 4])):
        message = ProbeRequest(Array.of(keys.astype(np.uint32)), Array.of(np.array([0, len(keys)], np.int32)))
        with pytest.raises(PeerProtocolError, match="at most 8 ascending probes"):
            answer_probes(message, ordered, most_probes(4), "p0", 1)
