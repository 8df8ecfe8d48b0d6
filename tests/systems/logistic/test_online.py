"""A linear model that predicts row by row, its parties staying connected."""

from __future__ import annotations

import numpy as np
import pytest

from systems.logistic.playing import options_of, roles_of
from systems.logistic.test_prediction import model
from treaty.data.table import Table
from treaty.errors import ConfigError, PeerProtocolError
from treaty.messaging.exchanges import agree
from treaty.messaging.messages import Array
from treaty.runs.threads import play
from treaty.systems.logistic.prediction import collect_margins, online_active, online_passive
from treaty.systems.system import LabelledRows, RoleInput, mesh
from treaty.systems.vertical.prediction import Asked, Finish, OnlineRows

ROWS = [[7], [0, 199, 7, 7], [3], list(range(200))]


def taken(table, rows):
    return Table(table.schema, [column[rows] for column in table.columns], len(rows))


def served(parts, tables, asked=ROWS, **replace):
    """Return what each request was told."""
    options, common = options_of(coordinator=False)
    found, told = roles_of(list(parts), options), []

    def requests():
        for rows in asked:
            yield None  # nothing just now
            yield Asked(np.array(rows, np.int32), taken(tables["p0"], rows), told.append)

    def run(party):
        inputs = RoleInput(
            party=party, options=options, common=common, roles=found,
            data=LabelledRows(tables[party.name], np.empty(0)),
            part=parts[party.name], requests=requests() if party.name == "p0" else None,
        )  # fmt: skip
        return online_active(inputs) if party.name == "p0" else online_passive(inputs)

    roles = {**dict.fromkeys(parts, run), **replace}
    play(roles, mesh(found, options), job="test", protocol="logistic", timeout=20.0)
    return told


@pytest.mark.parametrize("parties", [2, 3, 5])
def test_margins_of_rows_are_those_of_a_batch(parties):
    parts, tables = model(parties)
    expected = sum(parts[name].margins(tables[name]) for name in parts)
    told = served(parts, tables)
    assert len(told) == len(ROWS)
    for rows, found in zip(ROWS, told, strict=True):
        np.testing.assert_allclose(found.reshape(-1), expected[rows], rtol=0, atol=parties * 2.0**-33)


def test_other_rows_told_to_one_of_several_partners_make_noise():
    parts, tables = model(3)

    def cheats(party):
        agree(party, {"model": "m", "rows": 200})
        found = []
        for second in (5, 6):
            for peer, row in (("p1", 5), ("p2", second)):
                party.send(peer, OnlineRows(Array.of(np.array([row], np.int32))))
            found.append(float(collect_margins(party, ["p1", "p2"], np.zeros(1))[0]))
        for peer in ("p1", "p2"):
            party.send(peer, Finish())
        right = sum(parts[name].margins(tables[name])[5] for name in ("p1", "p2"))
        np.testing.assert_allclose(found[0], right, rtol=0, atol=1e-9)
        assert abs(found[1]) > 1e3  # uniform below 2^31: this small in one run of two million

    served(parts, tables, p0=cheats)


def test_other_models_and_rows_that_are_not_there_are_refused():
    parts, tables = model(2)

    def asks(party):
        agree(party, {"model": "m", "rows": 200})
        party.send("p1", OnlineRows(Array.of(np.array([200], np.int32))))
        party.receive("p1", Finish)

    with pytest.raises(PeerProtocolError, match="rows below 200"):
        served(parts, tables, p0=asks)
    parts["p1"].model_id = "other"
    with pytest.raises(ConfigError, match="same model everywhere"):
        served(parts, tables)
