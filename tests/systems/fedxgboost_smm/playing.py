"""Play FedXGBoost-SMM in safe mode on small real tables with the contents of all messages recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from systems.role_inputs import split_options
from systems.vertical.playing import role_input, star_of, tables_and_labels
from treaty.data.table import Table
from treaty.messaging.party import Party
from treaty.messaging.transcript import Transcript
from treaty.runs.threads import RunRecord, play
from treaty.systems.fedxgboost_smm import fedxgboost_smm as smm
from treaty.systems.fedxgboost_smm.fedxgboost_smm import DEALER, dealer
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.system import RoleInput

OPTIONS = {"backend": "dealer", "n_estimators": 2, "min_child_samples": 5, "max_bin": 6}
KEYS: dict[str, dict[str, Any]] = {
    "dealer": {"allow_exact_sums": True},
    "lattice": {"allow_exact_sums": True},
    "ou": {"allow_exact_sums": True, "insecure_test_key_bits": 512, "allow_insecure": True},
}


def options_of(**options: Any) -> dict[str, Any]:
    chosen = {**OPTIONS, **options}
    return {**chosen, **KEYS[chosen["backend"]]}


def secure_seat(
    party: Party, tables: Mapping[str, Table], y: np.ndarray, given: Mapping[str, Any], **fields: Any
) -> RoleInput:
    """RoleInput a party of safe mode, beside a dealer where options ask for one."""
    helpers = {DEALER: "dealer"} if given["backend"] == "dealer" else {}
    roles = {name: "active" if name == "p0" else "passive" for name in tables} | helpers
    return role_input(party, tables, y, given, FedXGBoostSMM, roles=roles, **fields)


def play_secure(
    tables: Mapping[str, Table] | None = None,
    y: np.ndarray | None = None,
    *,
    replace: Mapping[str, Callable[..., Any]] | None = None,
    progress: Callable[[int, Any], None] | None = None,
    timeout: float = 30.0,
    **options: Any,
) -> RunRecord:
    """Train with p0 active; `replace` puts another role in a party's place."""
    if tables is None or y is None:
        tables, y = tables_and_labels()
    given = options_of(**options)
    helpers = [DEALER] if split_options(given, FedXGBoostSMM)[0].has_dealer else []
    roles: dict[str, Any] = dict.fromkeys(tables, lambda party: smm.passive(secure_seat(party, tables, y, given)))
    roles["p0"] = lambda party: smm.active(secure_seat(party, tables, y, given, progress=progress))
    roles |= dict.fromkeys(helpers, lambda party: dealer(secure_seat(party, tables, y, given)))
    return play(
        roles | dict(replace or {}), star_of(tables, *helpers),
        job="test", protocol="fedxgboost-smm", timeout=timeout, record_content=True,
    )  # fmt: skip


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
