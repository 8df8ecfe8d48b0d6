"""Nodes as processes: jobs from submission to model, and what kills, restarts and people do to them."""

import re
import time

import numpy as np
import pyarrow.csv
import pytest

from node.nodes import columns_of, job_file, organisations, partners_of, wait_for, wait_until
from treaty.data.table import Table
from treaty.errors import PeerLost
from treaty.models.checkpoints import checkpoint_file
from treaty.models.linear import load_linear_part
from treaty.models.trees import load_part
from treaty.node.requests import UnknownIds
from treaty.serving.models import ServedModel

SMALL = "[boosting]\nn_estimators = 6\nmax_depth = 3\nrandom_state = 1\n"
LONG = "[boosting]\nn_estimators = 120\nmax_depth = 3\nrandom_state = 1\n[secureboost]\nallow_exact_sums = true\n"
EPOCHS = "[regression]\nmax_iter = 2\nbatch_size = 120\nperiod = 1\n[quasi-newton]\ncoordinator = false\n"
CONSENT = 'approve = false\nconsents = ["allow_exact_sums"]'
BOTH = ("bank", "shop")


@pytest.fixture
def made(tmp_path):
    """Yield what makes organisations, whose nodes are stopped at the end."""
    started = {}

    def make(names=BOTH, **options):
        tables = options.pop("tables", None) or columns_of(names)
        started.update(organisations(tmp_path, names, tables, **options))
        for organisation in started.values():
            organisation.start()
        return started

    yield make
    codes = {name: organisation.stop() for name, organisation in started.items()}
    assert not any(codes.values()), {name: started[name].log()[-2000:] for name, code in codes.items() if code}


def submitted(organisation, path, *more):
    return organisation.treaty("submit", str(path), *more).split()[1]


def model(organisation, job):
    part = load_part(next((organisation.state / "models").glob(f"{job}*/{organisation.name}.part")))
    return (None if part.forest is None else part.forest.trees, repr(part.splits))


def test_a_job_goes_from_submission_to_predictions_by_itself(made, tmp_path):
    nodes = made()
    job = submitted(nodes["bank"], job_file(tmp_path / "job.toml", BOTH, SMALL))
    rows = {name: wait_until(node, job, "finished", "failed") for name, node in nodes.items()}
    assert {row.state for row in rows.values()} == {"finished"}
    assert len({row.id for row in rows.values()}) == 1
    assert rows["bank"].proposal == rows["shop"].proposal
    assert {row.attempt for row in rows.values()} == {1}
    again = submitted(nodes["bank"], tmp_path / "job.toml", "--predict", job)
    for node in nodes.values():
        assert wait_until(node, again, "finished").attempt == 1
    (file,) = (nodes["bank"].state / "models").glob("*/bank.predict-*.csv")
    found = pyarrow.csv.read_csv(file).to_pydict()
    truth = pyarrow.csv.read_csv(nodes["bank"].folder / "rows.csv").to_pydict()
    labels = dict(zip(truth["id"], truth["y"], strict=True))
    probability = next(found[name] for name in found if name != "id")
    right = [(p > 0.5) == labels[row] for row, p in zip(found["id"], probability, strict=True)]
    assert sum(right) / len(right) > 0.75  # a guess has one half
    assert str(file) in nodes["bank"].treaty("show", again[:10])
    for name, node in nodes.items():
        other = BOTH[name == "bank"]
        assert "ok" in node.treaty("audit-log", "verify")
        assert "hung up" not in node.log()  # a start is nothing to warn of
        lines = [line.partition("Z ")[2] for line in node.treaty("logs", job).splitlines()]
        assert [line for line in lines if " rounds" in line] == [f"{name}: {k} of 6 rounds" for k in range(7)]
        assert re.fullmatch(rf"{name}: done; [\d,]+ bytes sent to {other}, [\d,]+ received from it", lines[-1])
        (told,) = [line for line in node.treaty("audit-log", "show", "--job", again).splitlines() if "played" in line]
        sent, received = (int(re.search(rf'{way} {{"{other}": (\d+)}}', told)[1]) for way in ("sent", "received"))
        assert 100 < sent < 100_000 > received > 100


@pytest.mark.slow
def test_nobody_trains_before_a_person_has_approved(made, tmp_path):
    nodes = made(policy="approve = true")
    job = submitted(nodes["bank"], job_file(tmp_path / "job.toml", BOTH, SMALL))
    wait_until(nodes["shop"], job, "proposed")
    wait_until(nodes["bank"], job, "approved")
    time.sleep(2.0)
    assert nodes["bank"].job(job).state == "approved"
    shown = nodes["shop"].treaty("show", job)
    assert nodes["bank"].job(job).id in shown
    assert "shop: which of its own splits were chosen" in shown
    assert "ok     peers" in shown
    nodes["shop"].treaty("approve", job)
    for node in nodes.values():
        wait_until(node, job, "finished")


@pytest.mark.slow
def test_keys_may_be_replaced_while_a_job_waits(made, tmp_path):
    nodes = made(policy="approve = true")
    job = submitted(nodes["bank"], job_file(tmp_path / "job.toml", BOTH, SMALL))
    wait_until(nodes["shop"], job, "proposed")
    wait_until(nodes["bank"], job, "approved")
    for node in nodes.values():
        node.stop()
    for name, other in (BOTH, reversed(BOTH)):
        keys = nodes[name].folder / "keys"
        nodes[name].treaty("keys", "rotate", name, "--folder", str(keys))
        nodes[other].treaty("keys", "trust", str(keys / f"{name}.card"), "--folder", str(nodes[other].folder / "keys"))
    for node in nodes.values():
        node.start()
    nodes["shop"].treaty("approve", job)
    for node in nodes.values():
        wait_until(node, job, "finished")
    assert "approval signed again" in nodes["bank"].treaty("audit-log", "show")


@pytest.mark.slow
def test_a_rejected_job_has_ended_for_all(made, tmp_path):
    nodes = made(policy="approve = true")
    job = submitted(nodes["bank"], job_file(tmp_path / "job.toml", BOTH, SMALL))
    wait_until(nodes["shop"], job, "proposed")
    nodes["shop"].treaty("reject", job, "--reason", "not this quarter")
    assert "not this quarter" in wait_until(nodes["bank"], job, "rejected").reason
    assert "rejected already" in nodes["shop"].treaty("approve", job, code=2)


def test_a_policy_rejects_by_itself_and_says_which_rule(made, tmp_path):
    nodes = made(policy='approve = false\nsystems = ["federboost-vertical"]', tables=columns_of(BOTH))
    nodes["bank"].settings.write_text(
        nodes["bank"].settings.read_text().replace('systems = ["federboost-vertical"]', "")
    )
    job = submitted(nodes["bank"], job_file(tmp_path / "job.toml", BOTH, SMALL))
    reason = wait_until(nodes["bank"], job, "rejected").reason
    assert "systems" in reason
    assert "secureboost" not in reason  # what it allows is its own business


@pytest.mark.slow
@pytest.mark.parametrize("killed", BOTH)
def test_a_killed_node_is_restarted_and_the_model_is_that_of_an_undisturbed_run(made, tmp_path, killed):
    nodes = made(policy=CONSENT)
    job = job_file(tmp_path / "job.toml", BOTH, LONG)
    undisturbed = submitted(nodes["bank"], job)
    wait_until(nodes["bank"], undisturbed, "finished")
    disturbed = submitted(nodes["bank"], job)
    node = nodes[killed]
    wait_for("first trees", lambda: (row := nodes["bank"].job(disturbed)) and row.rounds > 3)
    node.kill()
    other = nodes[next(name for name in BOTH if name != killed)]
    wait_until(other, disturbed, "waiting", "queued")
    assert other.job(disturbed).rounds < 120
    node.start()
    for each in nodes.values():
        wait_until(each, undisturbed, "finished")
        wait_until(each, disturbed, "finished")
        assert model(each, undisturbed) == model(each, disturbed)
    assert nodes["bank"].job(disturbed).attempt > 1
    assert not checkpoint_file(nodes["bank"].state / "checkpoints" / nodes["bank"].job(disturbed).id, "bank").exists()


@pytest.mark.slow
def test_a_cancelled_job_ends_at_all_parties(made, tmp_path):
    nodes = made(policy=CONSENT)
    job = submitted(nodes["bank"], job_file(tmp_path / "job.toml", BOTH, LONG.replace("120", "5000")))
    wait_until(nodes["shop"], job, "running")
    nodes["shop"].treaty("cancel", job, "--reason", "a mistake")
    for node in nodes.values():
        assert "a mistake" in wait_until(node, job, "cancelled").reason
    again = submitted(nodes["bank"], job_file(tmp_path / "job.toml", BOTH, SMALL))  # places are free again
    for node in nodes.values():
        wait_until(node, again, "finished")


@pytest.mark.slow
def test_a_node_without_an_open_port_connects_out(made, tmp_path):
    nodes = made(listening=["shop"])
    job = submitted(nodes["bank"], job_file(tmp_path / "job.toml", BOTH, SMALL))
    for node in nodes.values():
        wait_until(node, job, "finished")
    assert "no port is open" in nodes["bank"].log()


@pytest.mark.slow
def test_leaves_of_a_model_are_refreshed_between_nodes(made, tmp_path):
    nodes = made()
    first = submitted(nodes["bank"], job_file(tmp_path / "job.toml", BOTH, SMALL))
    assert wait_until(nodes["bank"], first, "finished", "failed").state == "finished"
    update = SMALL + 'process_type = "update"\n'
    again = submitted(nodes["bank"], job_file(tmp_path / "job.toml", BOTH, update), "--from-model", first[:10])
    assert {wait_until(node, again, "finished", "failed").state for node in nodes.values()} == {"finished"}
    ours, theirs = (model(nodes["bank"], job)[0] for job in (again, first))
    assert len(ours) == len(theirs) == 6
    for mine, other in zip(ours, theirs, strict=True):  # the same rows
        np.testing.assert_array_equal(mine.value, other.value)
    assert "--from-model" in nodes["bank"].treaty(
        "submit", str(tmp_path / "job.toml"), "--from-model", first, "--predict", first, code=2
    )


@pytest.mark.slow
def test_a_job_is_checked_at_all_nodes_before_it_is_submitted(made, tmp_path):
    nodes = made(policy="approve = true")
    job = job_file(tmp_path / "job.toml", BOTH, SMALL)
    for node in nodes.values():
        wait_for("peer", lambda node=node: "peer up" in node.treaty("audit-log", "show", code=None))
    said = nodes["bank"].treaty("check", str(job), "--with-peers")
    assert "WRONG" not in said
    assert "shop: could take part; a person must approve it; expects about " in said
    assert "400 rows" in said
    (shop,) = [line for line in said.splitlines() if "shop: could take part" in line]
    told = re.search(
        r"about (.*) seconds, (.*) [kM]B sent and received, (.*) GB of memory, for about 3 columns in \d\d+ bins;", shop
    )
    assert told is not None, shop
    assert "as shop says, about 3 columns in" in said.partition("shop: could take part")[2]
    assert re.search(r"ok +shop at \S+: answers, .* ms there and back, .* Mbit/s", said)
    assert re.search(r"expected seconds a tree: open sums .*, sealed sums \(this job\) .*, Okamoto-Uchiyama", said)
    assert all(re.fullmatch(r"0?\.?[1-9][0,]*(\.0)?", number) for number in told.groups())  # one digit each
    assert not nodes["shop"].treaty("models")
    (nodes["shop"].folder / "rows.csv").write_text("id,shop_0\n1,one\n1,2\n")
    said = nodes["bank"].treaty("check", str(job), "--with-peers", code=1)
    assert "WRONG  shop" in said
    assert "shop_0" not in said  # columns of its own are its own business
    nodes["shop"].stop()
    wait_for("peer down", lambda: "away" in nodes["bank"].treaty("check", str(job), code=None))
    assert nodes["shop"].treaty("check", str(job), code=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "options", "load", "names"),
    [
        ({}, SMALL, load_part, BOTH),
        ({}, SMALL + '[secureboost]\ninference = "shared"\n', load_part, (*BOTH, "lab")),
        ({"protocol": '"quasi-newton"'}, EPOCHS, load_linear_part, BOTH),
    ],
    ids=["trees", "shared", "linear"],
)
def test_partners_that_stay_connected_are_asked_row_by_row(made, tmp_path, fields, options, load, names):
    nodes = made(names)
    file = job_file(tmp_path / "job.toml", names, options, **fields)
    job = submitted(nodes["bank"], file)
    wait_until(nodes["bank"], job, "finished")
    batch = submitted(nodes["bank"], file, "--predict", job)
    wait_until(nodes["bank"], batch, "finished")
    (written,) = (nodes["bank"].state / "models").glob("*/bank.predict-*.csv")
    expected = pyarrow.csv.read_csv(written).to_pydict()
    service = submitted(nodes["bank"], file, "--serve", job)
    wait_until(nodes["bank"], service, "running")
    part = load(next((nodes["bank"].state / "models").glob("*/bank.part")))
    served = ServedModel(part)
    own = pyarrow.csv.read_csv(nodes["bank"].folder / "rows.csv").to_pandas().set_index("id")
    asked = [int(row) for row in expected["id"][:40]]
    columns = own.loc[asked, part.schema.names].to_numpy(np.float32)
    table = Table(part.schema, list(np.ascontiguousarray(columns.T)), len(asked))
    partners = partners_of(nodes["bank"], nodes["bank"].job(service).id, list(names[1:]))

    def answers():
        try:
            return partners([str(row) for row in asked], table)
        except PeerLost:
            return None

    def right():
        found = served.predictions(wait_for("answer", lambda: (found := answers()) is not None and [found])[0])
        return all([row[name] for row in found] == of[:40] for name, of in expected.items() if name != "id")

    assert right()
    with pytest.raises(UnknownIds, match="999"):
        partners(["1", "999"], Table(part.schema, [column[:2] for column in table.columns], 2))
    nodes["shop"].kill()  # away, and back again: the service goes on by itself
    wait_for("no answer", lambda: answers() is None)
    nodes["shop"].start()
    assert right()
    partners.close()
    nodes["bank"].treaty("cancel", service)
    for node in nodes.values():
        wait_until(node, service, "cancelled")
