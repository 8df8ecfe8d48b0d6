"""What an audit of gradients costs: records that both parties keep while they train, and opening them afterwards.

Default of Credit Card Clients, 20 000 rows, features in halves, depth 3, 32 bins, both parties in threads of one
process. `gradient_audit.csv` holds processor seconds, which other work on the machine hardly changes: of both parties
for the training without and with records (medians of so many pairs in turn), and of the audit, which must find
nothing; and the records' sizes. Claims: (1) the records take less than what was estimated before the training; (2)
keeping them takes at most 1.5 times the training's processor time.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from data import arguments, default_of_credit_card_clients, report, verdict
from treaty.data.table import to_table
from treaty.messaging.party import Party
from treaty.models.trees import ModelPart
from treaty.runs.threads import play
from treaty.runs.warm_up import compile_kernels
from treaty.systems.observers import play_role
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.secureboost import secureboost
from treaty.systems.secureboost.options import SecureBoost
from treaty.systems.system import AuditFolder, LabelledRows, PartySpec, RoleInput, star
from treaty.systems.vertical import audit_record
from treaty.systems.vertical.audit_replay import audit
from treaty.systems.vertical.training import roles_by_column

ROWS, THREADS, BAR = 20_000, 2, 1.5
CIPHERS = [("lattice", None, 20, 5), ("ou", 3072, 4, 1), ("paillier", 2048, 1, 1)]  # bits, trees, pairs


def trained(tables: dict, y: np.ndarray, own: SecureBoost, common: BoostingOptions, folder: Path | None) -> float:
    """Train, with records where there is a folder; return processor seconds of both parties."""
    roles = roles_by_column(dict.fromkeys(tables, PartySpec()), "bank", own)

    def role(party: Party) -> ModelPart:
        lead = party.name == "bank"
        program = secureboost.active if lead else secureboost.passive
        data = LabelledRows(tables[party.name], y if lead else np.zeros(0))
        inputs = RoleInput(
            party=party, options=own, common=common, roles=roles, data=data, classes=[0, 1] if lead else None,
            threads=THREADS,
        )  # fmt: skip
        if folder is not None:
            audit_record.keep_for_audit(inputs, AuditFolder(folder / party.name, 1 << 34))
        return play_role(program, inputs)

    begun = time.process_time()
    play(dict.fromkeys(tables, role), star(roles, own), job="audit", protocol=own.system, timeout=3600)
    return time.process_time() - begun


def measured(cipher: str, bits: int | None, trees: int, rows: int, pairs: int) -> dict[str, object]:
    """Measure one cipher."""
    data = default_of_credit_card_clients()
    x, y = data.x[:rows], data.y[:rows].astype(float)
    middle = x.shape[1] // 2
    tables = {"bank": to_table(x[:, :middle], party="bank"), "shop": to_table(x[:, middle:], party="shop")}
    own = SecureBoost(encryption=cipher, key_bits=bits, allow_exact_sums=True)
    common = BoostingOptions(n_estimators=trees, max_depth=3, learning_rate=0.3, base_score=0.5, max_bin=32).checked(
        own
    )
    estimates: dict[str, int] = {}
    check_size = audit_record.check_size
    audit_record.check_size = lambda _, party, nbytes: estimates.update({party: nbytes})
    plain, kept, audits, sizes = [], [], [], {}
    for _ in range(pairs):
        with tempfile.TemporaryDirectory() as folder:
            plain.append(trained(tables, y, own, common, None))
            kept.append(trained(tables, y, own, common, Path(folder)))
            sizes = {name: sum(f.stat().st_size for f in (Path(folder) / name).iterdir()) for name in tables}
            begun = time.process_time()
            (found,) = audit(Path(folder) / "bank", Path(folder) / "shop", threads=THREADS)
            audits.append(time.process_time() - begun)
        if found.findings or found.notes or found.trees != trees:
            raise AssertionError(f"{cipher}: an honest training does not pass: {found.findings[:1]}")
    audit_record.check_size = check_size
    if any(sizes[name] > estimates[name] for name in tables):
        raise AssertionError(f"{cipher}: a record is larger than was estimated")
    ratio = median(b / a for a, b in zip(plain, kept, strict=True))
    return {
        "cipher": f"{cipher}-{bits}" if bits else cipher, "rows": rows, "trees": trees, "vectors": found.vectors,
        "training s": median(plain), "with records s": median(kept), "times": ratio,
        "active MB": sizes["bank"] / 1e6, "passive MB": sizes["shop"] / 1e6,
        "estimated active MB": estimates["bank"] / 1e6, "estimated passive MB": estimates["shop"] / 1e6,
        "audit s": median(audits), "audit s/tree": median(audits) / trees,
        "bar": f"times <= {BAR}: {verdict(ratio, BAR)}",
    }  # fmt: skip


def main() -> None:
    """Print and write the table."""
    quick = arguments(__doc__).parse_args().quick
    compile_kernels()
    report(
        "gradient_audit",
        [
            measured(cipher, bits, min(trees, 2) if quick else trees, 2000 if quick else ROWS, 1 if quick else pairs)
            for cipher, bits, trees, pairs in CIPHERS
        ],
        quick=quick,
    )


if __name__ == "__main__":
    main()
