"""The tables of what messages tell, held against the messages that small jobs of every system send."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from gc import collect
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import SimpleNamespace, new_class

import pytest

from systems.alignment.playing import run as align
from systems.fedxgb.secpred.hidden_models import play_prediction, shards, trained
from systems.routes import Played, Way, routes, routes_of, settings
from systems.toy.system import SYSTEM as TOY
from treaty.messaging.messages import Message, MessageLeakage
from treaty.runs import report
from treaty.systems import SYSTEMS, find_system
from treaty.systems.alignment.leakage import ROUTES as OF_ALIGNMENT
from treaty.systems.fedxgb.messages import CertifiedKeys
from treaty.systems.fedxgb.options import FedXGB
from treaty.systems.leakage import Route, Routes, sent

SHORT = {"insecure_test_key_bits": 768, "allow_insecure": True}
OU = {"encryption": "ou", "insecure_test_key_bits": 512, "allow_insecure": True}
KEYED = {"encryption": "ou", **SHORT}
EXACT = {"allow_exact_sums": True}
PAPER = {"mode": "paper", "allow_insecure": True}
SEALED = {"min_child_weight": 0.1}
ONE_TREE = {"n_estimators": 1, **SEALED}
GROUPS = {"interaction_constraints": [[f"party{k}.{name}" for k in range(3) for name in "ab"]]}

JOBS: dict[str, list[Played]] = {
    "secureboost": [
        Played({**OU, **EXACT}, 3, resumes=True),
        Played({**EXACT, "monotone_constraints": True}, 3),
        Played({"encryption": "lattice", "reveal": "node", **EXACT}),
        Played({"sums": "sealed", **ONE_TREE, **GROUPS}, 3),
        Played({"sums": "sealed", "reveal": "column", **ONE_TREE}),
        Played({"membership": "hidden", "objective": "logistic_pieces"}, 3, resumes=True),
        Played({"membership": "hidden", "objective": "logistic_pieces", "training_rows": "rounded"}),
        Played({"membership": "hidden", "objective": "logistic_pieces", "leaves": "shared"}),
        Played({**OU, "inference": "shared", **EXACT}, 3),
        Played({**PAPER, "encryption": "ou", "insecure_test_key_bits": 512}),
    ],
    "fedxgboost-smm": [
        Played(EXACT, resumes=True),
        Played({"backend": "ou", **SHORT, **EXACT}),
        Played({"reveal": "argmax", **ONE_TREE, **GROUPS}, 3),
        Played({"backend": "dealer", "monotone_constraints": True, **EXACT}),
        Played({"backend": "dealer", "reveal": "node", **EXACT}),
        Played({**PAPER, "monotone_constraints": True}, resumes=True),
        Played({**PAPER, "version": 2}),
    ],
    "fedxgboost-ldp": [
        Played(resumes=True),
        Played({"mechanism": "laplace", "epsilon": 3.0}),
        Played({"mechanism": "piecewise", "refit": True}),
        Played(PAPER),
    ],
    "federboost-vertical": [
        Played(resumes=True),
        Played({"monotone_constraints": True}),
    ],
    "federboost-horizontal": [
        Played(resumes=True),
        Played({"dropout": "accept"}),
        Played({"base_score": 0.1}),
        Played({"epsilon_total": 2.0}),
        Played({"validation_fraction": 0.3}),
        Played({"validation_fraction": 0.3, "epsilon_total": 2.0}),
    ],
    "fedxgb": [
        Played({"n_estimators": 1}),
        Played({"comparison": "shamir"}),
        Played({"expose": "model", "validation_fraction": 0.3}),
        Played({"expose": "model"}),
        Played({"expose": "paper", "allow_insecure": True}),
        Played({**PAPER, "expose": "model"}),
        Played({"epsilon_total": 2.0}),
    ],
    "quasi-newton": [
        Played(owners=3, evals=False),
        Played({**KEYED, "show_eval_margins": True, "calibrate": True}, 3),
        Played(KEYED, 2, evals=False),
        Played({"coordinator": False, **KEYED}, 3, evals=False),
        Played({"coordinator": False, "encryption": "lattice"}, 2, evals=False),
        Played({"show_weights": True}, 2, weighted=True, evals=False),
        Played({"family": "linear", "standard_errors": True, "coordinator": False, **KEYED}, 3, evals=False),
        Played({"family": "multiclass"}, 2, evals=False),
        Played({"family": "poisson", "coordinator": False, **OU, "insecure_test_key_bits": 1024}, 2, evals=False),
        Played({**PAPER, **KEYED}, 3, evals=False),
        Played({**PAPER, **KEYED, "calibrate": True}, 3, evals=False),
        Played({"standard_errors": True}, 2, evals=False),
        Played({"pdo": 20.0, "calibrate": True, "batch_size": None, "max_bin": 2}, 2, evals=False),
        Played(evals=False, resumes=True),
    ],
    "sgd": [Played(evals=False), Played({"coordinator": False, **KEYED}, evals=False)],
    "statistics": [
        Played({"allow_exact_sums": True}, 3),
        Played({"reveal": "passive", "correlation": "spearman", **EXACT}, 2, evals=False),
        Played({"correlation": "none"}),
    ],
}

SELDOM = {
    "TreeRows": "gradients of more than one message",
    "SumsPiece": "requests of more than one message",
    "SumVoid": "a participant is lost within a sum",
    "AbsenceNotice": "a user leaves",
    "LostUsers": "a user leaves",
    "KeyShares": "a user leaves",
    "KeptBatches": "a party has lost its folder",
}
"""Messages that the jobs above do not send, and when they are sent."""


def played(name: str, number: int, folder: Path) -> Iterator[tuple[str, Routes, set[Way]]]:
    """Play a job; yield of each of its phases the lines that hold, and the routes."""
    system, job = find_system(name), JOBS[name][number]
    options, common = settings(system, job)
    for phase, found in routes(system, job, folder).items():
        yield phase, sent(system.routes[phase], options, common), found


def untold(table: Routes, found: set[Way]) -> list[Way]:
    return sorted(route for route in found if not any(line.goes(*route) for line in table))


def below(kind: type[Message]) -> Iterator[type[Message]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from below(sub)


def all_tables() -> dict[str, Routes]:
    """Return all lines there are, by system, and those that systems share."""
    found = {"alignment": OF_ALIGNMENT, "runs": report.OF_RUNS}
    for model, named in SYSTEMS.items():
        for name in named:
            system = find_system(name, model)
            found[f"{name}, {model}"] = tuple(line for table in system.routes.values() for line in table)
            if system.service is not None:
                found[f"{name}, service"] = system.service.routes
    return found


@pytest.mark.always
@pytest.mark.parametrize("name", JOBS)
def test_every_message_has_a_line_and_every_line_a_message(name, tmp_path):
    """What the jobs above send is told of under their options; no line tells of what nobody sends, but for `SELDOM`."""
    system, met = find_system(name), set()
    for number, job in enumerate(JOBS[name]):
        folder = tmp_path / str(number)
        folder.mkdir()
        for phase, table, found in played(name, number, folder):
            assert untold(table, found) == [], f"{job}, {phase}: a message that no line of leakage.py tells of"
            met |= {(phase, line) for line in table if any(line.goes(*route) for route in found)}
    every = {(phase, line) for phase, table in system.routes.items() for line in table}
    unmet = {f"{phase}: {line.message.__name__}, {line.way}" for phase, line in every - met if not rare(line)}
    assert unmet == set() or name == "sgd"  # whose table is quasi-newton's


def rare(line: Route) -> bool:
    return line.message.__name__ in SELDOM


def test_every_system_is_played():
    assert set(JOBS) == {name for named in SYSTEMS.values() for name in named} - {"pooled"}
    assert find_system("sgd").routes is find_system("quasi-newton").routes


@pytest.mark.parametrize("options", [{}, {"psi": "kkrt"}, {"on_duplicate": "expand"}, {"result_to": "active"}])
def test_every_message_of_an_alignment_has_a_line(options):
    columns = {"p0": list("abcdef"), "p1": list("bcdefg"), "p2": list("cdefgh")}
    table = sent(OF_ALIGNMENT, SimpleNamespace(**{"psi": "ecdh", "on_duplicate": "error"} | options), None)
    found = routes_of([align(columns, **options)], {"p0": "active", "p1": "passive", "p2": "passive"})
    assert untold(table, found) == []
    assert {"Matches", "AlignmentEnd"} & {route.step for route in found}


@pytest.mark.parametrize("comparison", ["shamir", "additive"])
def test_every_message_of_a_prediction_on_shares_has_a_line(comparison):
    part, new = trained("binary", n_estimators=1, max_depth=2)
    tables = shards(part, new)
    record = play_prediction(part, tables, comparison=comparison)
    roles = {"server": "server", **{f"edge{k}": "edge" for k in range(3)}, **dict.fromkeys(tables, "user")}
    table = sent(find_system("fedxgb").service.routes, FedXGB(comparison=comparison), None)
    found = routes_of([record], roles)
    assert untold(table, found) == []
    assert [line.message.__name__ for line in table if not any(line.goes(*route) for route in found)] == []


def test_a_system_outside_the_package_is_held_to_its_table(tmp_path):
    job = Played()
    for phase, found in routes(TOY, job, tmp_path).items():
        assert untold(sent(TOY.routes[phase], *settings(TOY, job)), found) == []


def test_a_message_without_a_line_is_found(tmp_path):
    """Of a system with a message that its table leaves out, that message is named, and no other."""
    whole = TOY.routes["train"]
    found = routes(TOY, Played(), tmp_path)["train"]
    left_out = tuple(line for line in whole if line.message.__name__ != "ToySplits")
    assert untold(left_out, found) == [Way("ToySplits", "active", "passive")]
    wrong_way = tuple(
        replace(line, sender=line.receiver, receiver=line.sender) if line.message.__name__ == "ToySplits" else line
        for line in whole
    )
    assert untold(wrong_way, found) == [Way("ToySplits", "active", "passive")]


def unnamed() -> set[str]:
    """Return the classes of messages, of systems and runs, that no table names."""
    for package in ("treaty.systems", "treaty.runs"):
        for module in walk_packages(import_module(package).__path__, f"{package}."):
            import_module(module.name)
    named = {line.message for table in all_tables().values() for line in table}
    defined = {kind for kind in below(Message) if kind.__module__.startswith(("treaty.", "planted."))}
    written = {kind for kind in defined if kind.__module__ == "treaty.systems.vertical.audit_record"}
    assert len(written) == 4  # files of an audit, which nobody sends
    return {kind.__name__ for kind in defined - named - written - {CertifiedKeys}}  # a field of other messages


def test_every_class_of_message_is_named_by_a_table():
    assert unnamed() == set()


def test_every_class_of_message_states_what_it_tells_once():
    """At the class itself; of several statements each is that of some route, and a route's entry exists."""
    used: dict[type[Message], set[str]] = {}
    for table in all_tables().values():
        for line in table:
            used.setdefault(line.message, set()).add(line.variant)
    for message, variants in used.items():
        stated = vars(message)["leakage"]
        assert variants == ({""} if isinstance(stated, MessageLeakage) else set(stated)), message


def test_a_planted_class_of_message_is_found():
    def body(namespace):
        namespace["__module__"] = "planted.roles"

    planted = new_class("PlantedLabels", (Message,), exec_body=body)
    assert unnamed() == {"PlantedLabels"}
    del planted
    collect()
    assert unnamed() == set()


def test_lines_are_whole_and_their_pages_exist():
    docs = Path(report.__file__).parents[3] / "docs"
    headings = {
        path.name: {re.sub(r"^#+ ", "", line) for line in path.read_text().splitlines() if line.startswith("#")}
        for path in docs.glob("*.md")
    }
    for table in all_tables().values():
        for line in table:
            assert line.leakage.tells
            assert line.reference
            assert "\n" not in line.leakage.tells + line.leakage.guard
            for reference in line.reference.split("; "):
                if reference.startswith("docs/"):
                    page, _, heading = reference.removeprefix("docs/").partition(", ")
                    assert heading in headings[page], reference
