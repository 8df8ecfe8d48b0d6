"""Time of a SecureBoost tree between two parties on this machine, both sharing its cores.

Claim: on Default of Credit Card Clients (20 000 training rows, 11 columns with the labels, 12 at the passive party;
depth 3, 32 bins, 20 trees) a tree takes at most 3 s (a) on one core with 2048-bit keys, (b) on two cores with 3072-bit
keys; (c) is (b) with each party in a process of its own over mutual TLS; (d) is (a) with Paillier, the
papers' cipher: at most 15 s and 11.7 MB per tree. XGBoost's time on the pooled table and peers' times from the same
kind of machine (one core, both parties on it) are beside. About 2 minutes; `--quick`: five trees.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from statistics import median

import numpy as np
import xgboost
from sklearn.metrics import roc_auc_score

from data import QUIET, arguments, cpu_of_others, default_of_credit_card_clients, report, seconds, verdict
from treaty import GBDTClassifier, SecureBoost
from treaty.crypto.additive.ciphers import generate_key, generate_paillier_key
from treaty.crypto.keystream import Keystream
from treaty.runs.warm_up import compile_kernels

ROWS = 20_000
CASES = [  # name, cipher, cores, key bits, transport, bar in seconds and in MB per tree
    ("a: one core", "ou", 1, 2048, "memory", 3.0, 6.2),
    ("b: two cores", "ou", 2, 3072, "memory", 3.0, None),
    ("c: two cores, two processes", "ou", 2, 3072, "tls", 3.0, None),
    ("d: one core", "paillier", 1, 2048, "memory", 15.0, 11.7),
]
PEERS = """Peers, same data and depth, one core, s/tree (test AUC of a full run where there was one):
  SecretFlow 1.14.0b0 SGB, OU-2048           4.49 (0.7720), 6.2 MB
  SecretFlow 1.14.0b0 SGB, Paillier-2048     25.4, 11.7 MB
  FATE 2.2.0 SecureBoost, Paillier-2048      261
  FedTree 1.0.5, Paillier with 512 bits      9.3
"""


def primitives(cipher: str, bits: int, threads: int) -> tuple[float, float]:
    """Rows encrypted and modular products per second."""
    from cipher_speed import products_per_second

    key = generate_key(bits) if cipher == "ou" else generate_paillier_key(bits)
    messages = Keystream().bits(79, 8192)
    ciphertexts = key.encrypt(messages, threads)
    encrypting = min(seconds(lambda: key.encrypt(messages, threads)) for _ in range(3))
    return len(messages) / encrypting, products_per_second(key.public.modulus, ciphertexts, threads)


def one_case(case: int, trees: int) -> dict[str, object]:
    """Measure in this process, pinned to the case's cores before any thread has started."""
    name, cipher, n_cores, bits, transport, slowest, largest = CASES[case]
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:n_cores]))
    data = default_of_credit_card_clients()
    order = np.random.default_rng(0).permutation(len(data.y))
    train, test = order[:ROWS], order[ROWS:]
    x, y = data.x.astype(np.float32), data.y
    settings = {"n_estimators": trees, "max_depth": 3, "max_bin": 32, "learning_rate": 0.3, "base_score": 0.5}

    def tables(rows: np.ndarray) -> dict[str, np.ndarray]:
        return {"active": x[rows, :11], "passive": x[rows, 11:]}

    compile_kernels()
    encrypted, products = primitives(cipher, bits, n_cores)

    model = GBDTClassifier(
        SecureBoost(encryption=cipher, key_bits=bits, allow_exact_sums=True),
        transport=transport,
        n_jobs=n_cores,
        **settings,
    )
    before = cpu_of_others()
    whole = seconds(lambda: model.fit(tables(train), y[train]))
    others = (cpu_of_others() - before) / whole
    central = xgboost.XGBClassifier(tree_method="hist", n_jobs=n_cores, **settings)
    central.fit(x[train], y[train])
    theirs = median(seconds(lambda: central.fit(x[train], y[train])) for _ in range(7))
    each = model.timings_["boosting"] / trees  # from the first gradients on: without key, process start and binning
    sent, back = (
        model.communication_[pair]["bytes"] / trees / 1e6 for pair in ("active -> passive", "passive -> active")
    )
    return {
        "case": name,
        "cipher": cipher,
        "key bits": bits,
        "rows": ROWS,
        "trees": trees,
        "s/tree": each,
        "<= s": f"{slowest:g}: {verdict(each, slowest)}",
        "set-up s": whole - each * trees,
        "MB/tree sent": sent,
        "MB/tree back": back,
        "<= MB": "" if largest is None else f"{largest:g}: {verdict(sent + back, largest)}",
        "XGBoost s/tree": theirs / trees,
        "times XGBoost": each * trees / theirs,
        "AUC": f"{roc_auc_score(y[test], model.predict_proba(tables(test))[:, 1]):.4f}",
        "XGBoost AUC": f"{roc_auc_score(y[test], central.predict_proba(x[test])[:, 1]):.4f}",
        "rows encrypted/s": round(encrypted),
        "products/s": round(products),
        "others' cores": round(max(0.0, others), 2),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    trees = 5 if options.quick else 20
    if options.case is not None:
        print(json.dumps(one_case(options.case, trees)))
        return
    rows = []
    for case in range(len(CASES)):
        command = [sys.executable, __file__, "--case", str(case), *(["--quick"] if options.quick else [])]
        said = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        rows.append(json.loads(said.splitlines()[-1]))
    report("secureboost_speed", rows, quick=options.quick)
    print(PEERS, end="")
    if any(row["others' cores"] > QUIET for row in rows):
        print("other processes were busy meanwhile: times are upper bounds")


if __name__ == "__main__":
    main()
