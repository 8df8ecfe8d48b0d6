"""Margins of a linear model that parties add up without showing their parts."""

from __future__ import annotations

import numpy as np
import pytest

from systems.logistic.playing import linear_tables, options_of, roles_of
from treaty.errors import ConfigError, DataError, PeerProtocolError
from treaty.messaging.messages import Array, decode_body, view
from treaty.models.linear import LinearPart, preparation_of
from treaty.runs.threads import play
from treaty.systems.logistic.prediction import MarginPart, predict_active, predict_passive
from treaty.systems.system import LabelledRows, RoleInput, mesh


def model(parties):
    tables, _ = linear_tables(parties, rows=200)
    rng, parts = np.random.default_rng(parties), {}
    for name, table in tables.items():
        made = preparation_of(table)
        parts[name] = LinearPart(
            model_id="m", party=name, schema=table.schema, preparation=made, coef=rng.standard_normal(made.n_columns),
            intercept=0.25 if name == "p0" else None, classes=[0, 1] if name == "p0" else None,
        )  # fmt: skip
    return parts, tables


def predicted(parts, tables, **replace):
    options, common = options_of(coordinator=False)
    found = roles_of(list(parts), options)

    def run(party):
        data = LabelledRows(tables[party.name], np.empty(0))
        own = RoleInput(party=party, options=options, common=common, roles=found, data=data, part=parts[party.name])
        return predict_active(own) if party.name == "p0" else predict_passive(own)

    roles = {**dict.fromkeys(parts, run), **replace}
    return play(roles, mesh(found, options), job="test", protocol="logistic", timeout=20.0, record_content=True)


@pytest.mark.parametrize("parties", [2, 3, 5])
def test_margins_are_the_sum_of_all_parts(parties):
    parts, tables = model(parties)
    expected = sum(parts[name].margins(tables[name]) for name in parts)
    np.testing.assert_allclose(predicted(parts, tables).results["p0"], expected, rtol=0, atol=parties * 2.0**-33)


def shown(played, peer):
    (entry,) = [e for e in played.transcripts["p0"].entries if e.step == "MarginPart" and e.peer == peer]
    values = decode_body(entry.content, MarginPart, peer=peer).values
    return view(values, np.uint64, (None,), peer=peer, what="values")


def test_active_party_sees_a_single_passive_partys_part_and_of_several_only_the_sum():
    parts, tables = model(2)
    np.testing.assert_allclose(
        shown(predicted(parts, tables), "p1").view(np.int64) * 2.0**-32, parts["p1"].margins(tables["p1"]), atol=1e-9
    )
    parts, tables = model(3)
    top = shown(predicted(parts, tables), "p1") >> np.uint64(61)
    counts = np.bincount(top.astype(np.int64), minlength=8)
    assert ((counts - 25) ** 2 / 25).sum() < 33.7  # chi-squared, 7 degrees: false alarm 2e-5


def test_parts_of_other_models_and_other_rows_are_refused():
    parts, tables = model(2)
    parts["p1"].model_id = "other"
    with pytest.raises(ConfigError, match=r"same model everywhere.*give all parties their parts of one training"):
        predicted(parts, tables)
    parts, tables = model(2)
    tables["p1"] = linear_tables(2, rows=190)[0]["p1"]
    with pytest.raises(ConfigError, match="same rows to predict"):
        predicted(parts, tables)


def test_unusable_numbers_are_refused():
    parts, tables = model(2)
    parts["p1"].coef *= 1e12
    with pytest.raises(DataError, match="below 2"):
        predicted(parts, tables)

    def short(party):
        from treaty.messaging.exchanges import agree

        agree(party, {"model": "m", "rows to predict": 200})
        party.send("p0", MarginPart(Array.of(np.zeros(199, np.uint64))))

    with pytest.raises(PeerProtocolError, match="at MarginPart"):
        predicted(*model(2), p1=short)
