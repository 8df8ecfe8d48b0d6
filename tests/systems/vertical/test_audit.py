"""The audit of gradients: an honest training passes under every cipher, and each way to cheat is found."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import numpy as np
import pytest

from systems.vertical.playing import OPTIONS, play_training, role_input, star_of, tables_and_labels
from tables import cut, real_table
from treaty.crypto.sums import additive_sums
from treaty.crypto.sums.additive_sums import AdditiveSumsClient
from treaty.crypto.sums.lattice_sums import LatticeSumsClient
from treaty.data.table import Schema, Table, to_table
from treaty.errors import ConfigError
from treaty.messaging.messages import Array
from treaty.runs.threads import play
from treaty.systems.fedxgboost_smm import fedxgboost_smm as smm
from treaty.systems.fedxgboost_smm.options import FedXGBoostSMM
from treaty.systems.observers import play_role
from treaty.systems.secureboost import secureboost
from treaty.systems.system import AuditFolder, LabelledRows, RoleInput
from treaty.systems.vertical import audit_record, encrypted_columns
from treaty.systems.vertical.audit_record import ActiveHeader, KeptTree, RecordFile, read_parts
from treaty.systems.vertical.audit_replay import audit
from treaty.systems.vertical.messages import TreeRows, TreeStart

pytestmark = pytest.mark.usefixtures("exact_sums_allowed")
LIMIT = 1 << 30
SHORT = {"insecure_test_key_bits": None, "allow_insecure": False}
CIPHERS = {
    "ou": {},
    "paillier": {"encryption": "paillier"},
    "paper": {"mode": "paper", "insecure_test_key_bits": None},
    "lattice": {"encryption": "lattice", **SHORT},
    "lattice-node": {"encryption": "lattice", "reveal": "node", **SHORT},
}


def kept(inputs: RoleInput, folder: Path, limit: int = LIMIT) -> RoleInput:
    """Have a party keep a record in a folder."""
    audit_record.keep_for_audit(inputs, AuditFolder(folder, limit))
    return inputs


def kept_training(folder: Path, *, rows: int = 240, bare: bool = False, **options):
    """Train with records in a folder of each party, p0 perhaps without columns; return the folders by party."""
    tables, y = tables_and_labels(2, rows)
    if bare:
        tables["p0"] = Table(Schema((), ()), [], rows)
    given = {**OPTIONS, **options}
    folders = {name: folder / name for name in tables}

    directed = "monotone_constraints" in given

    def role(program):
        def played(party):
            # against the trend of some columns, so that bounds hold at leaves
            names = tables[party.name].schema.names if directed else ()
            directions = {"directions": {name: (1, -1)[k % 2] for k, name in enumerate(names)}}
            return play_role(program, kept(role_input(party, tables, y, given, **directions), folders[party.name]))

        return played

    replace = {name: role(secureboost.active if name == "p0" else secureboost.passive) for name in tables}
    play_training(tables, y, replace=replace, **options)
    return folders


def findings_of(folders, passive="p1"):
    (verdict,) = audit(folders["p0"], folders[passive])
    return verdict.findings


@pytest.mark.parametrize(
    ("cipher", "options"),
    [
        ("ou", {}),
        ("lattice", {}),
        pytest.param("paillier", {}, marks=pytest.mark.slow),
        pytest.param("paper", {}, marks=pytest.mark.slow),
        pytest.param("lattice-node", {}, marks=pytest.mark.slow),
        ("ou", {"subsample": 0.7, "colsample_bytree": 0.5}),
        ("ou", {"subsample": 0.7, "random_state": 2, "num_parallel_tree": 2}),
        ("lattice", {"max_leaves": 5, "max_depth": None}),
        ("lattice", {"subsample": 0.7, "random_state": 2, "num_parallel_tree": 2}),
        ("lattice", {"subsample": 0.7, "colsample_bytree": 0.5}),
        pytest.param("ou", {"goss": True}, marks=pytest.mark.slow),
        pytest.param("lattice", {"goss": True}, marks=pytest.mark.slow),
        ("ou", {"rl_trees": 1}),
        ("ou", {"monotone_constraints": True}),
        pytest.param("lattice", {"monotone_constraints": True}, marks=pytest.mark.slow),
        pytest.param("lattice", {"purity_guard": 0.4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_honest_training_passes(tmp_path, cipher, options):
    folders = kept_training(tmp_path, n_estimators=3, **CIPHERS[cipher], **options)
    (verdict,) = audit(folders["p0"], folders["p1"])
    assert (verdict.findings, verdict.notes) == ([], [])
    assert verdict.trees == 3 * options.get("num_parallel_tree", 1) - options.get("rl_trees", 0)
    assert verdict.vectors >= verdict.trees


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["lattice", "ou"])
def test_an_honest_training_by_matrix_products_passes(tmp_path, backend):
    given = {"n_estimators": 2, "min_child_samples": 5, "backend": backend}
    given |= {"insecure_test_key_bits": 512, "allow_insecure": True} if backend == "ou" else {}
    tables, y = tables_and_labels(2, 150)
    folders = {name: tmp_path / name for name in tables}

    def role(name):
        program = smm.active if name == "p0" else smm.passive
        return lambda party: play_role(program, kept(role_input(party, tables, y, given, FedXGBoostSMM), folders[name]))

    play({name: role(name) for name in tables}, star_of(tables), job="test", protocol="fedxgboost-smm", timeout=60)
    (verdict,) = audit(folders["p0"], folders["p1"])
    assert (verdict.findings, verdict.notes, verdict.trees) == ([], [], 2)


@pytest.mark.slow
@pytest.mark.parametrize("cipher", ["ou", "lattice"])
@pytest.mark.parametrize("task", ["multiclass", "regression", "poisson", "quantile", "ndcg"])
def test_other_losses_and_weights_pass(tmp_path, task, cipher):
    X, y = real_table("multiclass" if task == "multiclass" else "regression", rows=150)
    tables = {name: to_table(part, party=name) for name, part in cut(X, 3).items()}
    folders = {name: tmp_path / name for name in tables}
    weight = np.random.default_rng(0).random(len(y)) + 0.5
    classes = np.unique(y).tolist() if task == "multiclass" else None
    given = {**OPTIONS, **CIPHERS[cipher], "n_estimators": 2}
    if task in ("poisson", "quantile", "ndcg"):
        given |= {"objective": task, "base_score": 150.0}
    if task == "ndcg":
        group = np.arange(len(y)) % 10
        y, weight = np.column_stack([np.floor(y / 90.0), group]), weight[group]

    def role(name):
        lead = name == "p0"
        data = LabelledRows(tables[name], y.astype(float) if lead else np.zeros(0), weight if lead else None)
        program = secureboost.active if lead else secureboost.passive
        fields = {"classes": classes if lead else None, "n_classes": len(classes or ()) or 2}
        return lambda party: play_role(
            program, kept(role_input(party, tables, y, given, data=data, **fields), folders[name])
        )

    play({name: role(name) for name in tables}, star_of(tables), job="test", protocol="secureboost", timeout=60)
    for passive in ("p1", "p2"):
        (verdict,) = audit(folders["p0"], folders[passive])
        assert (verdict.findings, verdict.trees) == ([], 2 * (3 if classes else 1))


# ---------------------------------------------------------------- active parties that cheat


def altered(grad):
    """Another gradient for one row."""
    changed = grad.copy()
    changed[7] += 1000
    return changed


@pytest.mark.parametrize("cipher", ["ou", "lattice"])
def test_the_gradient_of_one_row_altered_is_found(tmp_path, monkeypatch, cipher):
    """Altered from the second tree on, committed to and sent alike."""
    start_tree, trees = encrypted_columns.EncryptedGradients.start_tree, []

    def sending(gradients, peer, grad, hess, rows, columns):
        trees.append(grad)
        return start_tree(gradients, peer, altered(grad) if len(trees) > 1 else grad, hess, rows, columns)

    monkeypatch.setattr(encrypted_columns.EncryptedGradients, "start_tree", sending)
    if cipher == "lattice":  # or the active party itself would see that the sums do not add up
        monkeypatch.setattr(LatticeSumsClient, "_adds_up", lambda *_: True)
    findings = findings_of(kept_training(tmp_path, n_estimators=2, **CIPHERS[cipher]))
    assert not any(finding.startswith("tree 0:") for finding in findings)
    assert any("its commitment does not open to the gradients that the labels imply" in found for found in findings)
    expected = "1 of 240 rows were sent with other gradients" if cipher == "ou" else "1 of 240 rows, in "
    assert any(finding.startswith(f"tree 1: {expected}") for finding in findings), findings


@pytest.mark.parametrize("cipher", ["ou", "lattice"])
def test_gradients_sent_beside_an_honest_commitment_are_found(tmp_path, monkeypatch, cipher):
    kind = LatticeSumsClient if cipher == "lattice" else AdditiveSumsClient
    begin_tree = kind.begin_tree
    monkeypatch.setattr(kind, "begin_tree", lambda client, grad, hess: begin_tree(client, altered(grad), hess))
    monkeypatch.setattr(LatticeSumsClient, "_adds_up", lambda *_: True)
    findings = findings_of(kept_training(tmp_path, n_estimators=1, **CIPHERS[cipher]))
    assert len(findings) == 1
    assert findings[0].startswith("tree 0: 1 of 240 rows")


@pytest.mark.parametrize("more", [-40, 40])
def test_other_rows_than_were_drawn_are_found_where_they_come_in_pieces(tmp_path, monkeypatch, more):
    """Not told as a record that cannot be read, which would spare who sent them the finding."""
    rows, size = 40, 8 * 512 // 64
    monkeypatch.setattr(additive_sums, "PIECE_BYTES", rows * size)
    monkeypatch.setattr(additive_sums, "LEAST_ROWS", rows)
    add, seen = RecordFile.add, []

    def lying(file, part):
        if isinstance(part, TreeStart | TreeRows):
            seen.append(part)
        if isinstance(part, TreeStart):
            part = msgspec.structs.replace(part, rows=Array.of(np.arange(rows, dtype=np.int32)), n_rows=240 + more)
        if isinstance(part, TreeRows) and len(seen) == 2:
            if more < 0:
                return
            add(file, part)
        add(file, part)

    monkeypatch.setattr(RecordFile, "add", lying)
    folders = kept_training(tmp_path, n_estimators=1, **CIPHERS["ou"])
    assert len(seen) == 240 // rows
    findings = findings_of(folders)
    assert any("expected ciphertexts of 240 rows, all in range" in finding for finding in findings), findings


def test_a_node_of_chosen_rows_is_found(tmp_path, monkeypatch):
    """Under the lattice map nobody sees which rows are asked about: of a single one the sums would tell its bins."""
    query = LatticeSumsClient.query

    def asking(client, positions, starts):
        return (
            query(client, positions[:1], np.array([0, 1], np.int32))
            if len(starts) == 2
            else query(client, positions, starts)
        )

    monkeypatch.setattr(LatticeSumsClient, "query", asking)
    monkeypatch.setattr(LatticeSumsClient, "_adds_up", lambda *_: True)
    findings = findings_of(kept_training(tmp_path, n_estimators=1, **CIPHERS["lattice"]))
    assert any("sums were asked of rows that are no node of the tree" in finding for finding in findings), findings


@pytest.mark.parametrize(
    ("cipher", "fault", "said"),
    [
        ("ou", "key", "the numbers shown are not the private key of the public key"),
        ("lattice", "secrets", "the secrets shown do not belong to"),
        ("lattice", "missing secrets", "no secrets are shown for"),
        ("ou", "labels", "other gradients than the labels imply"),
        ("ou", "margins", "the run begins with other margins"),
        ("lattice", "leaves", "a row went another way than p1 decided"),
        ("ou", "leaves", "a row went another way than p1 decided"),
        ("ou", "nodes", "its nodes form no tree"),
        ("ou", "no leaf", "it does not have a leaf for each of 240 rows"),
        ("ou", "terms", "the two records do not have the same terms"),
    ],
)
def test_a_false_record_of_the_active_party_is_found(tmp_path, monkeypatch, cipher, fault, said):
    add = RecordFile.add

    def lying(file, part):
        if isinstance(part, ActiveHeader):
            if fault == "key":
                wrong = [hex(int(part.secret_numbers[0], 16) + 2), *part.secret_numbers[1:]]
                part = msgspec.structs.replace(part, secret_numbers=wrong)
            if fault == "labels":
                y = np.frombuffer(part.y.data).copy()
                y[3] = 1 - y[3]
                part = msgspec.structs.replace(part, y=Array.of(y))
            if fault == "margins":
                part = msgspec.structs.replace(part, margins=Array.of(np.full((1, 240), 0.25)))
            if fault == "terms":
                part = msgspec.structs.replace(part, terms={**part.terms, "max_depth": 4})
        if isinstance(part, KeptTree):
            leaf, left = np.frombuffer(part.leaf.data, np.uint8).copy(), np.frombuffer(part.left.data, np.int32).copy()
            if fault == "secrets":
                part = msgspec.structs.replace(part, secrets=[*part.secrets[1:], part.secrets[0]])
            if fault == "missing secrets":
                part = msgspec.structs.replace(part, secrets=part.secrets[:1])
            if fault == "leaves":  # all rows of one leaf and those of its sibling change places
                first = np.flatnonzero(left >= 0)[-1]
                pair = left[first], left[first] + 1
                part = msgspec.structs.replace(
                    part, leaf=Array.of(np.where(leaf == pair[0], pair[1], np.where(leaf == pair[1], pair[0], leaf)))
                )
            if fault == "nodes":
                left[0] = 5
                part = msgspec.structs.replace(part, left=Array.of(left))
            if fault == "no leaf":
                part = msgspec.structs.replace(part, leaf=Array.of(np.zeros_like(leaf)))
        add(file, part)

    monkeypatch.setattr(RecordFile, "add", lying)
    alone = {"max_depth": 1} if fault == "leaves" else {}
    if fault == "labels":  # others would give another start, which is found first
        alone["base_score"] = 0.5
    folders = kept_training(tmp_path, n_estimators=2, bare=fault == "leaves", **CIPHERS[cipher], **alone)
    findings = findings_of(folders)
    assert any(said in finding for finding in findings), findings


# ---------------------------------------------------------------- records


def test_records_are_readable_to_their_owner_alone_and_leave_the_model_as_it_is(tmp_path):
    tables, y = tables_and_labels(2)
    folders = kept_training(tmp_path, subsample=0.8, random_state=3)
    files = [next(folder.iterdir()) for folder in folders.values()]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600, 0o600]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders.values()] == [0o700, 0o700]
    assert len({file.stem.partition("-")[2] for file in files}) == 1
    (header, *parts) = read_parts(files[1])
    plain = play_training(tables, y, subsample=0.8, random_state=3).results["p0"]
    kept = [part for part in read_parts(files[0]) if isinstance(part, KeptTree)]
    for tree, found in zip(plain.forest.trees, kept, strict=True):
        np.testing.assert_array_equal(np.frombuffer(found.left.data, np.int32), tree.left)
    assert not any(isinstance(part, KeptTree) for part in (header, *parts))


def test_a_damaged_record_is_an_error_wherever_the_damage_is(tmp_path):
    folders = kept_training(tmp_path, rows=60, n_estimators=1, max_depth=1)
    rng = np.random.default_rng(0)
    for folder in folders.values():
        file = next(folder.iterdir())
        whole = file.read_bytes()
        for _ in range(60):
            place, bit = int(rng.integers(len(whole))), int(rng.integers(8))
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            with pytest.raises(ConfigError, match=r"damaged|breaks off|not a record for an audit"):
                audit(folders["p0"], folders["p1"])
        file.write_bytes(whole + b"x")
        with pytest.raises(ConfigError, match="something follows its end"):
            audit(folders["p0"], folders["p1"])
        file.write_bytes(whole)
    assert findings_of(folders) == []


def test_what_is_whole_of_a_record_that_breaks_off_is_audited_on_request(tmp_path):
    folders = kept_training(tmp_path, n_estimators=3)
    file = next(folders["p0"].iterdir())
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ConfigError, match=r"breaks off after .* whole parts.*--unfinished"):
        audit(folders["p0"], folders["p1"])
    (verdict,) = audit(folders["p0"], folders["p1"], unfinished=True)
    assert (verdict.findings, verdict.trees) == ([], 2)
    assert verdict.notes == ["tree 2 and those after it are not in the record of p0"]
    with pytest.raises(ConfigError, match="expected records that the active party kept for an audit, got none"):
        audit(folders["p1"], folders["p1"])
    with pytest.raises(ConfigError, match="expected records that a passive party kept for an audit, got none"):
        audit(folders["p0"], folders["p0"], unfinished=True)
    other = kept_training(tmp_path / "other", n_estimators=1)
    with pytest.raises(ConfigError, match="expected two records of one training, got none"):
        audit(other["p0"], folders["p1"])


@pytest.mark.parametrize("cipher", ["ou", "lattice"])
def test_records_too_large_are_refused_before_anything_is_encrypted(tmp_path, monkeypatch, cipher):
    tables, y = tables_and_labels(2)
    given = {**OPTIONS, **CIPHERS[cipher]}
    monkeypatch.setattr(encrypted_columns.EncryptedGradients, "start_tree", None)
    for small in tables:

        def role(party, small=small):
            program = secureboost.active if party.name == "p0" else secureboost.passive
            limit = 1000 if party.name == small else LIMIT
            inputs = role_input(party, tables, y, given)
            return play_role(program, kept(inputs, tmp_path / small / party.name, limit))

        with pytest.raises(ConfigError, match=f"{small}: expected a record for an audit of at most 0.000001 GB"):
            play_training(tables, y, replace=dict.fromkeys(tables, role), **CIPHERS[cipher])
        assert not list((tmp_path / small).rglob(f"{small}-*"))


@pytest.mark.parametrize(
    "cipher", ["ou", "lattice", *(pytest.param(name, marks=pytest.mark.slow) for name in ("paillier", "lattice-node"))]
)
def test_a_record_is_no_larger_than_was_estimated(tmp_path, monkeypatch, cipher):
    estimates = {}

    def noting(keeping, party, nbytes):
        estimates.setdefault(party, nbytes)

    monkeypatch.setattr(audit_record, "check_size", noting)
    for options in ({}, {"subsample": 0.5, "max_depth": 5, "min_child_samples": 3}):
        estimates.clear()
        folders = kept_training(tmp_path / str(len(options)), **CIPHERS[cipher], **options)
        for name, folder in folders.items():
            size = next(folder.iterdir()).stat().st_size
            assert size < estimates[name] + 20_000 < 3 * size + 2_000_000, (name, options)


def test_a_passive_party_keeps_no_record_that_nobody_can_open(tmp_path):
    tables, y = tables_and_labels(2)

    def keeping_alone(party):
        return play_role(secureboost.passive, kept(role_input(party, tables, y, OPTIONS), tmp_path))

    with pytest.raises(ConfigError, match=r"p1 is to keep a record for an audit, but p0 keeps none"):
        play_training(tables, y, replace={"p1": keeping_alone})
    assert not list(tmp_path.iterdir())
