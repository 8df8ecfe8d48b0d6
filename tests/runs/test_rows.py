from __future__ import annotations

import logging

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tables import real_table
from treaty.data.table import to_table
from treaty.errors import NOTED, ConfigError, DataError
from treaty.privacy.ledger import Ledger, RunLog
from treaty.runs.job import Align, Job, Member
from treaty.runs.rows import open_rows
from treaty.runs.table_files import FileRows, labelled, read_ahead, read_rows, read_to_predict, with_noisy_labels
from treaty.runs.threads import play, star
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import LabelledRows


def opened_rows(party, job, **given):
    """Open the rows of a party's training table, aligned with the others'."""
    path = job.parties[party.name].table
    return open_rows(party, job, job.roles(), path, None, **given)


def test_labels_randomised_once_serve_every_alignment(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=500), "y": rng.choice(["no", "yes"], 500)})
    whole = pa.Table.from_pandas(frame)
    job = Job(name="t", active="bank", label="y", parties={"bank": Member(), "shop": Member()})
    options = SecureBoost(mechanism="label_rr", epsilon=1.0)
    path, ledger = tmp_path / "noisy", Ledger(None)

    def drawn(order):
        table = to_table(frame[["x"]].iloc[order])
        rows = FileRows(whole.take(pa.array(order)), table, whole, order)
        data, classes = with_noisy_labels(
            LabelledRows(table, np.zeros(len(order))),
            rows,
            job.table_rules(job.active),
            str(path),
            options,
            ledger,
            job.name,
        )
        assert classes == ["no", "yes"]
        return dict(zip(order.tolist(), data.y.tolist(), strict=True))

    first, second = (drawn(rng.permutation(500)[:400]) for _ in range(2))
    both = first.keys() & second.keys()
    assert len(both) > 300
    assert [(entry.job, entry.mechanism, entry.epsilon) for entry in ledger.entries()] == [("t", "label_rr", 1.0)]
    assert all(first[row] == second[row] for row in both)
    changed = np.mean([first[row] != (frame["y"][row] == "yes") for row in first])
    assert 0.15 < changed < 0.40  # 0.27 expected; wrong once in a million seeds


def test_alignments_of_a_job_are_limited_without_a_log(tmp_path):
    """Counted beside each party's table, and of the ids nothing is kept."""
    members = {}
    for name in ("bank", "shop"):
        (tmp_path / name).mkdir()
        pd.DataFrame({"id": np.arange(30), f"x of {name}": np.arange(30.0)}).to_csv(
            tmp_path / name / "t.csv", index=False
        )
        members[name] = Member(table=str(tmp_path / name / "t.csv"))
    job = Job(name="t", active="bank", label="y", parties=members, align=Align(on="id", max_runs=2))

    def opened(party):
        return opened_rows(party, job).features.n_rows

    def align():
        roles = dict.fromkeys(members, opened)
        return play(roles, star("bank", members), job="t", protocol="secureboost", timeout=60).results

    assert [align(), align()] == [{"bank": 30, "shop": 30}] * 2
    with pytest.raises(ConfigError, match=r"has started 2 alignments within 30 days, the limit is 2; raise max_runs"):
        align()
    for name in members:
        entries = RunLog(tmp_path / name / f"{name}.runs").entries()
        assert [entry.event for entry in entries] == ["started", "finished"] * 2
        assert {entry.own_commitment + entry.peer_commitment for entry in entries} == {b""}


@pytest.mark.parametrize("owner", ["table", "eval_tables"])
def test_what_the_training_table_is_to_drop_it_must_have(tmp_path, owner):
    path, other = str(tmp_path / "t.csv"), str(tmp_path / "new.csv")
    pd.DataFrame({"key": [1, 2], "x": [1.0, 2.0], "y": [0, 1]}).to_csv(path, index=False)
    pd.DataFrame({"x": [1.0, 2.0]}).to_csv(other, index=False)

    def read(drop, at):
        member = Member(table=path, drop=drop) if owner == "table" else Member(eval_tables=[path], drop=drop)
        job = Job(name="t", active="a", label="y", parties={"a": member}, protocol="federboost-horizontal")
        return read_rows(job.table_rules("a"), at).features.schema.names

    assert read(["key"], path) == ("x",)
    assert read(["key"], other) == ("x",)
    with pytest.raises(DataError, match=rf"^a: .*'keys', got .*, with .*; did you mean 'key'\? - at {path}"):
        read(["keys"], path)


def of_shop(folder, member=None, **fields):
    """Return a job, and a reader of files of the shop's, which has labels and rows of its own."""
    member = member or Member(table=str(folder / "t.csv"))
    job = Job(name="t", active="shop", label="y", parties={"shop": member}, protocol="federboost-horizontal", **fields)
    return job, lambda path, schema=None: read_rows(job.table_rules("shop"), str(path), schema)


def written(folder, frame, **cells):
    """Write a real table to CSV with single cells of a column replaced, {column: (row, cell)}."""
    frame = frame.astype(object)
    for column, (row, cell) in cells.items():
        frame.loc[row, column] = cell
    frame.to_csv(folder / "t.csv", index=False)
    return folder / "t.csv"


@pytest.mark.parametrize("cell", [" ", "12,5", "unknown"], ids=["blank", "decimal comma", "word"])
def test_a_cell_that_is_no_number_is_named_with_its_line(tmp_path, cell):
    """Of a real table: the whole column became a category, of which trees learned one value at a time."""
    X, y = real_table("binary")
    path = written(tmp_path, X.assign(y=y), **{"mean area": (102, cell)})
    with pytest.raises(DataError) as raised:
        of_shop(tmp_path)[1](path)
    assert f"column 'mean area' has numbers in 239 rows, but {cell!r} in line 104: correct" in str(raised.value)
    assert "parties.shop.categorical" in str(raised.value)
    assert cell not in raised.value.public.split("'")
    assert "area" not in raised.value.public


def test_columns_are_of_categories_where_the_job_says_so(tmp_path, caplog):
    X, y = real_table("binary")
    path = written(tmp_path, X.assign(y=y, zip=["1234", "9876", "ab1"] * 80))
    member = Member(table=str(path), categorical=["zip", "mean radius"])
    with caplog.at_level(logging.INFO):
        rows = of_shop(tmp_path, member)[1](path)
    kinds = dict(zip(rows.features.schema.names, rows.features.schema.kinds, strict=True))
    assert [name for name, kind in kinds.items() if kind == "categorical"] == ["mean radius", "zip"]
    assert "zip (3 categories)" in caplog.text
    with pytest.raises(DataError, match=r"'zap', got a file without it, with .*'mean radius'.*; did you mean 'zip'"):
        of_shop(tmp_path, Member(table=str(path), categorical=["zap"]))[1](path)
    again = of_shop(tmp_path, member)[1](path, rows.features.schema)
    assert np.array_equal(again.features.matrix(), rows.features.matrix())


def test_a_file_to_predict_has_numbers_where_training_had_some(tmp_path):
    X, y = real_table("binary")
    _, read = of_shop(tmp_path)
    schema = read(written(tmp_path, X.assign(y=y))).features.schema
    path = written(tmp_path, X.assign(**{"mean area": "high"}))
    with pytest.raises(DataError, match=r"'mean area' has numbers in 0 rows, but 'high' in line 2, .* and 237 more: "):
        read(path, schema)


def test_rows_to_predict_without_a_column_of_training_are_refused_before_anybody_is_met(tmp_path):
    X, y = real_table("binary")
    job, read = of_shop(tmp_path)
    schema = read(written(tmp_path, X.assign(y=y))).features.schema
    path = written(tmp_path, X.rename(columns={"mean area": "area"}))
    with pytest.raises(DataError) as raised:
        read_to_predict(job.table_rules("shop"), str(path), schema)
    assert "missing columns 'mean area' and columns unknown from training, to be dropped: 'area'" in str(raised.value)
    assert str(raised.value).endswith(f" - at {path}")
    assert "area" not in raised.value.public


def test_a_column_of_dates_is_named_with_its_file(tmp_path):
    X, y = real_table("binary")
    path = written(tmp_path, X.assign(y=y, opened=pd.date_range("2020-01-01", periods=len(X)).strftime("%Y-%m-%d")))
    with pytest.raises(DataError) as raised:
        of_shop(tmp_path)[1](path)
    assert "column 'opened': date32[day], a date or time" in str(raised.value)
    assert str(raised.value).endswith(f" - at {path}")


def test_labels_of_a_file_to_predict_are_not_looked_at(tmp_path):
    X, y = real_table("binary")
    read = of_shop(tmp_path)[1]
    schema = read(written(tmp_path, X.assign(y=y))).features.schema
    X.assign(y=np.where(y == 1, "1", "pending")).to_csv(tmp_path / "new.csv", index=False)
    assert read(tmp_path / "new.csv", schema).features.n_rows == len(X)


def test_decimals_may_be_declared_categories_and_dates_may_not(tmp_path):
    X, y = real_table("binary")
    table = pa.Table.from_pandas(X.assign(y=y), preserve_index=False)
    zips = pa.array(np.arange(len(X)) % 7).cast(pa.decimal128(20, 0))
    days = pa.array(np.arange(len(X), dtype=np.int32)).cast(pa.date32())
    path = tmp_path / "t.parquet"
    pq.write_table(table.append_column("zip", zips).append_column("day", days), path)
    read = of_shop(tmp_path, Member(table=str(path), categorical=["zip"], drop=["day"]))[1]
    kinds = dict(zip(*(lambda schema: (schema.names, schema.kinds))(read(path).features.schema), strict=True))
    assert kinds["zip"] == "categorical"
    with pytest.raises(DataError, match=r"text, numbers or truth values as categories in 'day', got date32"):
        of_shop(tmp_path, Member(table=str(path), categorical=["day"]))[1](path)


def test_a_target_that_is_no_number_is_named_with_its_line(tmp_path):
    X, y = real_table("regression")
    path = written(tmp_path, X.assign(y=y), y=(7, "n.a."))
    with pytest.raises(DataError, match=r"column 'y' has numbers in 239 rows, but 'n\.a\.' in line 9: correct"):
        of_shop(tmp_path, task="regression")[1](path)


def test_ids_may_be_of_any_text_and_classes_where_that_is_declared(tmp_path):
    """A blank among labels of numbers was a class of its own, for which the error asked for one more class."""
    X, y = real_table("binary")
    frame = X.assign(y=np.where(y == 1, "1", "2+"), id=["A1", "17", "18"] * 80)
    member = Member(table=str(written(tmp_path, frame)), drop=["id"])
    with pytest.raises(DataError, match=r"column 'y' has numbers in \d+ rows, but '2\+' in line \d+"):
        of_shop(tmp_path, member)[1](member.table)
    member = Member(table=member.table, drop=["id"], categorical=["y"])
    job, read = of_shop(tmp_path, member)
    rows = read(member.table)
    assert "y" not in rows.features.schema.names
    assert labelled(rows, job.table_rules("shop"), member.table, None, None)[1] == ["1", "2+"]


def test_labels_with_fractions_are_a_regression(tmp_path):
    X, _ = real_table("binary")
    member = Member(table=str(written(tmp_path, X.assign(y=np.linspace(0, 1, len(X))))))
    job, read = of_shop(tmp_path, member)
    with pytest.raises(DataError, match=r"shop: column 'y': .* numbers with fractions; .*task = \"regression\""):
        labelled(read(member.table), job.table_rules("shop"), member.table, None, None)


def test_a_job_shows_common_ids_and_warns_of_few(tmp_path, caplog):
    members, shown = {}, []
    for name, ids in {"bank": range(300), "shop": range(280, 310)}.items():
        (tmp_path / name).mkdir()
        pd.DataFrame({"id": ids, f"x of {name}": 1.0}).to_csv(tmp_path / name / "t.csv", index=False)
        members[name] = Member(table=str(tmp_path / name / "t.csv"))
    job = Job(name="t", active="bank", label="y", parties=members, align=Align(on="id"))
    with caplog.at_level(logging.INFO):
        roles = dict.fromkeys(
            members,
            lambda party: opened_rows(party, job, phase=lambda *at: shown.append(at)),
        )
        play(roles, star("bank", members), job="t", protocol="secureboost", timeout=60)
    noted = [record.getMessage() for record in caplog.records if record.levelno == NOTED]  # on every terminal
    assert "shop: 20 of its 30 ids are common to all parties (66.7%)" in noted
    assert not any(said.startswith("bank: 20 of its") for said in noted)  # it is in the warning
    assert {title for title, _, _ in shown} == {f"aligning {count} ids in padded lists" for count in (30, 300)}
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert warned[0].startswith("bank: 20 of its 300 ids are common to all parties (6.7%). If you expected more, ")


def test_padding_zeros_of_ids_are_kept_and_parties_that_lack_them_are_told(tmp_path, caplog):
    """They were lost without a word: 00123 and 123 were one id, and predictions had neither zeros."""
    numbers = np.arange(300)
    padded, plain = [f"{number:05}" for number in numbers], list(map(str, numbers))

    def aligned(of_bank, of_shop, *, text=False):
        members = {}
        for name, ids in {"bank": of_bank, "shop": of_shop}.items():
            (tmp_path / name).mkdir(exist_ok=True)
            frame = pd.DataFrame({"id": ids, f"x of {name}": 1.0})
            path = tmp_path / name / ("t.csv" if isinstance(ids[0], str) else "t.parquet")
            frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path)
            members[name] = Member(table=str(path))
        job = Job(name="t", active="bank", label="y", parties=members, align=Align(on="id", text=text))
        roles = dict.fromkeys(members, lambda party: opened_rows(party, job))
        return play(roles, star("bank", members), job="t", protocol="secureboost", timeout=60).results

    with caplog.at_level(logging.INFO):
        assert sorted(aligned(padded, padded)["shop"].ids.to_pylist()) == padded
        assert "bank: t.csv: ids in 'id': text, 300 of 5 characters" in caplog.text
        with pytest.raises(
            ConfigError,
            match=r"got (text at bank and integer at shop|integer at shop and text at bank); restore padding",
        ):
            aligned(padded, plain)
        assert "shop: t.csv: ids in 'id': whole numbers, 200 of 3 digits, 90 of 2, 10 of 1" in caplog.text
    assert len(aligned(plain, numbers)["bank"].order) == 300  # a file with types
    assert len(aligned(plain, numbers, text=True)["bank"].order) == 300
    with pytest.raises(DataError, match="the usual causes are padding zeros"):
        aligned([f"1{id}" for id in padded], numbers, text=True)


def test_a_partners_column_that_is_called_like_the_label_is_refused(tmp_path):
    path = str(tmp_path / "t.csv")
    pd.DataFrame({"z": np.arange(9.0), "y": np.arange(9) % 2}).to_csv(path, index=False)
    for own, fine in (({}, False), ({"drop": ["y"]}, True), ({"columns": ["y", "z"]}, True)):
        parties = {"bank": Member(table=path), "shop": Member(table=path, **own)}
        job = Job(name="t", active="bank", label="y", parties=parties)
        assert read_ahead(job.table_rules("bank"), path).arrow.num_rows == 9
        if fine:
            assert read_ahead(job.table_rules("shop"), path).arrow.num_rows == 9
            continue
        with pytest.raises(DataError, match=r"shop: column 'y' has the name of the label of bank: drop it"):
            read_ahead(job.table_rules("shop"), path)
