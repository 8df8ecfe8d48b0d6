"""Kernels compiled before parties need them: on a handful of made-up rows, by playing every protocol once."""

from __future__ import annotations

from typing import Any

import numpy as np

from treaty.crypto.psi import hashing, ristretto
from treaty.data.ids import read_ids
from treaty.data.table import Schema, Table
from treaty.privacy.mechanisms import MECHANISMS
from treaty.runs.crowds import EDGES, train_crowd_in_threads
from treaty.runs.threads import Role, play, star
from treaty.systems.alignment.blinded_lists import OwnList
from treaty.systems.federboost_horizontal import roles as federboost_horizontal
from treaty.systems.fedxgb.edge_sums import LEAST
from treaty.systems.fedxgboost_smm.dealer import DEALER, dealer
from treaty.systems.horizontal.members import Vouching
from treaty.systems.pooled.training import Labelled
from treaty.systems.tree_options import HORIZONTAL, tree_options
from treaty.systems.vertical.by_name import train_active, train_passive


def compile_kernels(protocol: str | None = None) -> None:
    """Compile what training uses, on a handful of made-up rows, so that the parties' processes find it cached.

    Parameters
    ----------
    protocol : str or None
        What it is for; None: every protocol.
    """
    rng = np.random.default_rng(0)
    columns = [rng.normal(size=64).astype(np.float32) for _ in range(2)]
    table = Table(Schema(("a", "b"), (None, None)), columns, 64)
    data = Labelled(table, rng.integers(0, 2, 64).astype(np.float64))
    if protocol not in HORIZONTAL:
        _compile_alignment()
    if protocol in (None, "secureboost", "fedxgboost-smm"):
        for cipher in ({"insecure_test_key_bits": 512}, {"encryption": "lattice"}):
            _compile_on_columns(data, {"protocol": "secureboost", "min_child_samples": 1, **cipher})
    if protocol in (None, "fedxgboost-smm"):
        _compile_on_columns(data, {"protocol": "fedxgboost-smm", "backend": "dealer", "min_child_samples": 1})
    if protocol in (None, "federboost-vertical"):
        _compile_on_columns(data, {"protocol": "federboost-vertical"})
    if protocol in (None, "fedxgboost-ldp"):
        _compile_on_columns(data, {"protocol": "fedxgboost-ldp", "min_child_samples": 1})
        for release in MECHANISMS.values():
            release(np.zeros(1), 1.0)
    if protocol in (None, "federboost-horizontal"):
        _compile_on_rows(data)
    if protocol in (None, "fedxgb"):
        _compile_in_crowd(data)


def _compile_alignment() -> None:
    ids = read_ids(["a"])
    OwnList(ids, b"compile", 1).blinded(slice(0, 1))
    hashing.digests(ids.data, ids.offsets, np.arange(1), bytes(32))
    ristretto.validate(ristretto.from_uniform(np.ones((1, 64), np.uint8)))


def _compile_on_columns(data: Labelled, given: dict[str, Any]) -> None:
    options = tree_options({"n_estimators": 1, "max_bin": 6, **given})
    helper = DEALER if options.has_dealer else None
    roles: dict[str, Role] = {
        "a": lambda party: train_active(
            party, data, options, parties=["a", "b"], classes=[0, 1], eval_sets=[data],
            threads=1, progress=None, keeper=None, kept=None, dealer=helper,
        ),
        "b": lambda party: train_passive(
            party, data.table, options, eval_tables=[data.table], threads=1, progress=None, keeper=None, kept=None,
            dealer=helper,
        ),
    }  # fmt: skip
    links = star("a", roles, helper)
    if helper is not None:
        roles[helper] = lambda party: dealer(party, options, lead="a")
    play(roles, links, job="compile", protocol=options.protocol)


def _compile_in_crowd(data: Labelled) -> None:
    options = tree_options({"protocol": "fedxgb", "n_estimators": 1, "max_depth": 1, "max_bin": 4})
    shards = {f"user{k}": data for k in range(LEAST * EDGES)}
    train_crowd_in_threads(shards, [data], [0, 1], data.table.schema, options, 1)


def _compile_on_rows(data: Labelled) -> None:
    options = tree_options({"protocol": "federboost-horizontal", "n_estimators": 1, "max_bin": 4})
    members = ["a", "b", "c"]
    roles: dict[str, Role] = {
        name: lambda party: federboost_horizontal.participate(
            party, data, options, members=members, classes=[0, 1], vouching=Vouching()
        )
        for name in members[1:]
    }
    roles["a"] = lambda party: federboost_horizontal.lead(
        party, data, options, members=members, classes=[0, 1], eval_sets=[data], vouching=Vouching()
    )
    play(roles, star("a", members), job="compile", protocol=options.protocol)
