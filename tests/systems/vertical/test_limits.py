"""A hostile active party that asks owners of columns for more than the job says: each counts, and refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from marks import all_but_first_slow, slow
from systems.role_inputs import inputs, split_options
from tables import cut, real_table
from treaty.data.table import Table, to_table
from treaty.errors import ConfigError, PeerError, PeerProtocolError
from treaty.messaging.exchanges import agree
from treaty.messaging.messages import Array, pack
from treaty.messaging.party import Party
from treaty.models.checkpoints import Keeper
from treaty.runs.threads import play
from treaty.systems import find_system
from treaty.systems.fedxgboost_smm import fedxgboost_smm as dealing
from treaty.systems.fedxgboost_smm import fedxgboost_smm as smm
from treaty.systems.pooled.continuing import CheckpointRequest
from treaty.systems.system import LabelledRows, RoleInput
from treaty.systems.vertical import training as leading
from treaty.systems.vertical.column_owner import ColumnOwner
from treaty.systems.vertical.messages import LinkProbe, SumsRequest
from treaty.systems.vertical.prediction import DecideRequest, RowSets
from treaty.systems.vertical.training import TrainingLimits, TreeLimits
from treaty.trees.ensemble import SplitTable
from treaty.trees.splits import SplitRules

SYSTEMS: dict[str, dict[str, Any]] = {
    "secureboost": {"encryption": "ou", "insecure_test_key_bits": 512},
    "secureboost lattice": {"encryption": "lattice"},
    "fedxgboost-smm": {"backend": "lattice"},
    "fedxgboost-smm dealer": {"backend": "dealer"},
    "fedxgboost-smm paper 1": {"mode": "paper", "allow_insecure": True, "version": 1, "max_bin": 4},
    "fedxgboost-smm paper 2": {"mode": "paper", "allow_insecure": True, "version": 2, "max_bin": 4},
    "fedxgboost-ldp": {"epsilon": 8.0},
    "federboost-vertical": {"epsilon": math.inf, "mode": "paper"},
}
COMMON = {"n_estimators": 1, "max_depth": 2, "min_child_samples": 5, "max_bin": 8, "learning_rate": 0.1}
NAMES = ["bank", "shop"]


def tables_of(task: str) -> tuple[dict[str, Table], np.ndarray]:
    X, y = real_table(task, rows=240)
    if task == "multiclass":
        X = X.iloc[:, ::-1]
    frames = dict(zip(NAMES, cut(X, 2).values(), strict=True))
    return {name: to_table(frame, party=name) for name, frame in frames.items()}, y.astype(float)


def train(
    which: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    task: str = "binary",
    agreed: Mapping[str, Any] | None = None,
    wanted: Mapping[str, Any],
    liars: tuple[str, ...] = ("bank",),
    change: Callable[[Any], Any] = lambda message: message,
    watched: bool = False,
    **fields: Any,
) -> dict[str, BaseException | None]:
    """Train with a bank that says `agreed` and does `wanted`; return what the shop (and a dealer) ended with.

    `n_classes` among the options is what a party's job says. `change` turns each of the bank's messages into another,
    or a list of them. With `watched` the training rows are an eval set, too.
    """
    system = find_system(which.split()[0])
    (tables, y), honest = tables_of(task), {**COMMON, **SYSTEMS[which], **(agreed or {})}
    roles = {"bank": "active", "shop": "passive"} | ({"dealer": "dealer"} if which.endswith("dealer") else {})
    classes = sorted(set(y.tolist()))
    ended: dict[str, BaseException | None] = {}

    def role_input(party: Party, given: Mapping[str, Any]) -> RoleInput:
        given = dict(given)
        n_classes = given.pop("n_classes", 2)
        own, common = split_options(given, system.options)
        labels = y if party.name == "bank" else np.zeros(0)
        data = LabelledRows(tables[party.name], labels) if party.name in tables else None
        return inputs(
            party, own, common, active="bank", owners=NAMES, roles=roles, data=data, n_classes=n_classes,
            classes=classes if party.name == "bank" else None, eval_sets=[data] if watched else [], **fields,
        )  # fmt: skip

    def say(party: Party, terms: Mapping[str, Any], **others: Any) -> None:
        if party.name in liars:
            honest_terms = {**role_input(party, honest).public_terms, "trees of a round": honest.get("n_classes", 1)}
            terms = {name: honest_terms.get(name, value) for name, value in terms.items()}
        agree(party, terms, **others)

    for module in (leading, smm, dealing):
        monkeypatch.setattr(module, "agree", say)

    def run(party: Party) -> Any:
        if party.name == "bank":
            send = party.send
            party.send = lambda to, message: [send(to, one) for one in _listed(change(message))]  # type: ignore[method-assign]
        try:
            mine = {**honest, **wanted} if party.name in liars else honest
            return system.train[roles[party.name]](role_input(party, mine))
        except BaseException as error:
            ended[party.name] = error
            raise

    links = {name: [other for other in roles if other != name] for name in roles}
    with suppress(PeerError, ConfigError):
        play(dict.fromkeys(roles, run), links, job="test", protocol=system.name, timeout=30.0)
    return ended


def _listed(messages: Any) -> list[Any]:
    return messages if isinstance(messages, list) else [messages]


def refused(error: BaseException | None, *words: str) -> None:
    """Check that it is the bank's fault, for one of some reasons."""
    assert isinstance(error, PeerProtocolError), error
    assert any(text in str(error) for text in words), error
    assert str(error).endswith("from bank"), error


@pytest.mark.parametrize("which", all_but_first_slow(*SYSTEMS))
def test_an_honest_training_of_as_many_trees_as_agreed_goes_through(which, monkeypatch):
    assert train(which, monkeypatch, wanted={}) == {}


@pytest.mark.parametrize("which", SYSTEMS)
def test_an_owner_agreed_to_one_tree_takes_part_in_no_second(which, monkeypatch):
    ended = train(which, monkeypatch, wanted={"n_estimators": 20})
    words = "splits of at most 1 rounds" if which == "federboost-vertical" else "at most 1 trees"
    refused(ended["shop"], words)


@pytest.mark.parametrize("which", all_but_first_slow(*SYSTEMS))
def test_a_round_has_one_tree_where_the_job_says_two_classes(which, monkeypatch):
    ended = train(which, monkeypatch, task="multiclass", wanted={"n_classes": 3})
    words = "splits in the trees so far" if which == "federboost-vertical" else "at most 1 trees"
    refused(ended["shop"], words)


@pytest.mark.parametrize("which", all_but_first_slow(*SYSTEMS))
def test_three_classes_have_three_trees_a_round_and_no_fourth(which, monkeypatch):
    agreed = {"n_classes": 3}
    assert train(which, monkeypatch, task="multiclass", agreed=agreed, wanted={}) == {}
    ended = train(which, monkeypatch, task="multiclass", agreed=agreed, wanted={"n_estimators": 2})
    refused(ended["shop"], "at most 1 rounds" if which == "federboost-vertical" else "at most 3 trees")


@pytest.mark.parametrize("which", [slow(one) if "paper" in one or "smm" in one else one for one in SYSTEMS])
def test_trees_are_no_deeper_than_agreed(which, monkeypatch):
    words = {
        "federboost-vertical": "at most 3 splits in the trees so far",
        "fedxgboost-ldp": "a division with a level below it",
    }
    ended = train(which, monkeypatch, wanted={"max_depth": 4, "min_child_samples": 2, "min_child_weight": 0.0})
    found = [error for error in ended.values() if isinstance(error, PeerProtocolError)]  # a dealer may be the first
    refused(found[0], words.get(which, "2 levels in a tree at most"), "at most 3 vectors")


@pytest.mark.usefixtures("exact_sums_allowed")
def test_a_dealer_deals_for_no_more_nodes_than_the_trees_may_have(monkeypatch):
    """Also where all parties with data want more."""
    wanted = {"n_estimators": 20}
    ended = train("fedxgboost-smm dealer", monkeypatch, wanted=wanted, liars=("bank", "shop"))
    refused(ended["dealer"], "expected at most 3 vectors, as the job's options say - at DealRequest")


def test_labels_of_other_classes_than_the_job_says_are_refused_before_anything_is_sent(monkeypatch):
    ended = train("secureboost", monkeypatch, task="multiclass", wanted={})
    assert isinstance(ended["bank"], ConfigError)
    assert "expected labels of 2 classes, as the job says, got 3" in str(ended["bank"])
    assert "name classes = 3 in every party's job file" in str(ended["bank"])
    assert "3" not in str(ended["shop"]), "peers are told that it differs"


def test_parties_whose_jobs_name_other_numbers_of_classes_do_not_begin(monkeypatch):
    ended = train("secureboost", monkeypatch, liars=(), wanted={})
    assert ended == {}
    monkeypatch.setattr(RoleInput, "trees_a_round", property(lambda self: 1 if self.party.name == "bank" else 3))
    ended = train("secureboost", monkeypatch, liars=(), wanted={})
    assert "expected the same trees of a round everywhere, got 1 at bank and 3 at shop" in str(ended["shop"])


def test_a_checkpoint_is_asked_for_once_a_round(monkeypatch, tmp_path):
    twice = lambda m: [m, m] if isinstance(m, CheckpointRequest) else m  # noqa: E731
    keeper = Keeper(tmp_path / "kept", resume=False)
    ended = train("secureboost", monkeypatch, agreed={"n_estimators": 2}, wanted={}, change=twice, keeper=keeper)
    refused(ended["shop"], "a checkpoint a round, of 2 at most")


def test_the_link_is_measured_no_more_often_than_the_choice_of_a_cipher_takes(monkeypatch):
    asked = []

    def again(message):
        asked.append(isinstance(message, LinkProbe))
        return [message] * 3 if isinstance(message, LinkProbe) else message

    monkeypatch.setitem(SYSTEMS, "secureboost auto", {"encryption": "auto"})
    assert train("secureboost auto", monkeypatch, wanted={}) == {}
    ended = train("secureboost auto", monkeypatch, wanted={}, change=again)
    refused(ended["shop"], "a probe of the link too many")
    assert sum(asked) <= 5


# ---------------------------------------------------------------- counters


def limits(n_estimators=3, kept=0, alone=0, n_classes=2, rows=100, **common) -> TrainingLimits:
    given = {"n_estimators": n_estimators, "max_depth": 3, "min_child_samples": 10, **common}
    schema = to_table(np.zeros((rows, 1)), party="shop")
    role_input = inputs(
        Party.__new__(Party), find_system("secureboost").options(), given, active="bank", owners=NAMES,
        data=LabelledRows(schema, np.zeros(0)), n_classes=n_classes,
    )  # fmt: skip
    return TrainingLimits("bank", role_input, kept, alone)


@pytest.mark.parametrize(
    ("given", "trees"),
    [
        ({}, 3),
        ({"n_classes": 5}, 15),
        ({"kept": 2}, 1),
        ({"kept": 2, "n_classes": 4}, 4),
        ({"alone": 1}, 2),
        ({"alone": 2, "kept": 1}, 1),
        ({"kept": 3}, 0),
        ({"alone": 5}, 0),
    ],
)
def test_rounds_kept_and_rounds_without_this_party_are_taken_off(given, trees):
    counting = limits(**given)
    for _ in range(trees):
        counting.tree()
    with pytest.raises(PeerProtocolError, match=rf"at most {trees} trees, as the job's options say"):
        counting.tree()


def test_more_rounds_kept_than_the_job_has_are_refused():
    with pytest.raises(PeerProtocolError, match="at most 3 rounds kept"):
        limits(kept=4)


def test_splits_are_counted_by_rounds_levels_and_rows():
    counting = limits()
    counting.chosen(7, 0)
    with pytest.raises(PeerProtocolError, match="at most 7 splits"):
        counting.chosen(1, 0)
    counting = limits(n_classes=3, kept=1)
    counting.chosen(21, 1)
    counting.chosen(21, 3)
    with pytest.raises(PeerProtocolError, match="at most 42 splits"):
        counting.chosen(1, 3)
    few = limits(rows=45)  # four leaves of ten rows
    few.chosen(3, 0)
    with pytest.raises(PeerProtocolError, match="at most 3 splits"):
        few.chosen(1, 0)
    for splits, rounds in ((0, 0), (1, 4)):
        with pytest.raises(PeerProtocolError, match="splits of at most 3 rounds"):
            limits().chosen(splits, rounds)


def test_checkpoints_follow_rounds():
    counting = limits(kept=1)
    for wrong in (0, 1, 4):
        with pytest.raises(PeerProtocolError, match="a checkpoint a round"):
            limits(kept=1).checkpoint(wrong)
    counting.checkpoint(2)
    with pytest.raises(PeerProtocolError, match="a checkpoint a round"):
        counting.checkpoint(2)
    counting.checkpoint(3)


def numbers(*values: int) -> Array:
    return Array.of(np.array(values, np.int32))


def test_rows_are_decided_once_at_each_record():
    splits = SplitTable()
    for threshold in (1.0, 2.0, 3.0):
        splits.add(0, threshold, False)
    rows = RowSets("bank", [np.zeros((8, 1), np.float32), np.zeros((9, 1), np.float32)])
    for number, nbytes in enumerate((1, 2)):
        (decisions,) = rows.decide(DecideRequest(number, numbers(0, 2)), splits, 1)
        assert decisions.left.shape == (2, nbytes)
    for again in (numbers(2), numbers(1, 1), numbers()):
        with pytest.raises(PeerProtocolError, match="each record once for every row, got one again - at DecideRequest"):
            rows.decide(DecideRequest(0, again), splits, 1)
    rows.decide(DecideRequest(0, numbers(1)), splits, 1)


@pytest.mark.parametrize("which", ["secureboost", "fedxgboost-ldp", "federboost-vertical"])
def test_rows_watched_in_training_are_decided_once_a_record(which, monkeypatch):
    assert train(which, monkeypatch, wanted={}, watched=True) == {}
    again = lambda message: [message, message] if isinstance(message, DecideRequest) else message  # noqa: E731
    refused(train(which, monkeypatch, wanted={}, change=again, watched=True)["shop"], "each record once for every row")


def test_a_level_has_one_spare_node_where_vectors_are_about_two():
    """The last vector may be half empty; others are refused before they cost work."""
    worked = []

    def add(query):
        worked.append(len(query[0]))
        return 2 * len(query[0])

    limits = TreeLimits("bank", SplitRules(grad_unit=1.0, hess_unit=1.0, max_depth=3))
    limits.start(np.arange(2, dtype=np.int32), spare=1)
    server = SimpleNamespace(spare=1, add=add, answer=list)
    owner = ColumnOwner.__new__(ColumnOwner)  # with what it answers by alone
    owner._server, owner._limits, owner._active = server, limits, "bank"

    def ask(vectors, last):
        return owner.sums(SumsRequest(pack([np.zeros((vectors, 1), np.uint32)]), last))

    ask(1, True)  # the root
    ask(1, False)
    with pytest.raises(PeerProtocolError, match="1 to 2 nodes of this level"):
        ask(1, True)
    assert worked == [1, 1]
