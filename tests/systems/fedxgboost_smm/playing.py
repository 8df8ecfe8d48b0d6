"""Play smm_secure on small real tables with the contents of all messages recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from treaty.systems.tree_options import TreeOptions, tree_options

from systems.vertical.playing import tables_and_labels
from treaty.data.table import Table
from treaty.messaging.transcript import Transcript
from treaty.runs.threads import Played, play, star
from treaty.systems.fedxgboost_smm import dealer as smm_dealer
from treaty.systems.fedxgboost_smm import roles as smm_secure
from treaty.systems.pooled.training import Labelled

OPTIONS = {"protocol": "fedxgboost-smm", "backend": "dealer", "n_estimators": 2, "min_child_samples": 5, "max_bin": 6}
KEYS = {"dealer": {}, "lattice": {}, "ou": {"insecure_test_key_bits": 512}}


def options_of(**options: Any) -> TreeOptions:
    chosen = {**OPTIONS, **options}
    return tree_options({**chosen, **KEYS[chosen["backend"]]})


def play_secure(
    tables: Mapping[str, Table] | None = None,
    y: np.ndarray | None = None,
    *,
    replace: Mapping[str, Callable[..., Any]] | None = None,
    progress: Callable[[int, Any], None] | None = None,
    timeout: float = 30.0,
    **options: Any,
) -> Played:
    """Train with p0 active; `replace` puts another role in a party's place."""
    if tables is None or y is None:
        tables, y = tables_and_labels()
    chosen = options_of(**options)
    helper = smm_dealer.DEALER if chosen.has_dealer else None
    roles: dict[str, Any] = {
        name: lambda party, name=name: smm_secure.passive(party, tables[name], chosen, dealer=helper) for name in tables
    }
    roles["p0"] = lambda party: smm_secure.active(
        party, Labelled(tables["p0"], y), chosen, parties=list(tables), classes=[0, 1], dealer=helper, progress=progress
    )
    links = star("p0", tables, helper)
    if helper is not None:
        roles[helper] = lambda party: smm_dealer.dealer(party, chosen, lead="p0")
    return play(
        roles | dict(replace or {}), links, job="test", protocol="fedxgboost-smm", timeout=timeout, record_content=True
    )


def received(transcript: Transcript, kind: type, peer: str | None = None) -> list[Any]:
    """All messages of a class that a party got."""
    return [
        entry.message(kind)
        for entry in transcript.entries
        if entry.direction == "received" and entry.step == kind.__name__ and peer in (None, entry.peer)
    ]


def words(array: Any) -> np.ndarray:
    """An array of a recorded message."""
    return np.frombuffer(array.data, np.dtype(array.dtype)).reshape(array.shape)
