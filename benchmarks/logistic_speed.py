"""An epoch of logistic regression between two parties: packed ciphertexts, the lattice map, and Paillier by `phe`.

Default of Credit Card Clients, 24 000 rows, active party 11 columns and the intercept, passive party 12, batches of
1000, quasi-Newton with L = 4. Claims: (1) packed ciphertexts (Paillier, 2048 bits, the paper's messages, masked) take
at most a tenth of what element-wise Paillier takes by `phe` at 2048 bits; (2) the lattice map takes at most 0.5 s an
epoch on two cores.

`logistic_speed.csv`: seconds of an epoch of all parties together on this machine (median of the epochs after the
first), processor seconds of it, set-up, bytes in an epoch between the two and to and from the coordinator, and
of a round of a batch beside the paper's count of 3 |S| + 2 |S_H| / L ciphertexts. Of `phe` a part of the rows is timed,
every operation once, and scaled to an epoch; its bytes are counted, not sent. About three minutes; `--quick` one.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import phe
from numpy.typing import NDArray
from sklearn.model_selection import train_test_split

from data import arguments, default_of_credit_card_clients, report, verdict
from treaty.data.table import Table, to_table
from treaty.linear.lbfgs import batch_seed
from treaty.linear.training import Optimiser, train
from treaty.models.linear import preparation_of
from treaty.runs.threads import Run, train_in_threads
from treaty.runs.warm_up import compile_kernels
from treaty.systems import find_system
from treaty.systems.logistic.options import QuasiNewton, RegressionOptions
from treaty.systems.system import LabelledRows, roles_of

BATCH, PERIOD, THREADS, LEAD = 1000, 4, 2, "coordinator"
FORMS = {
    "lattice": {"encryption": "lattice"},
    "lattice, no coordinator": {"encryption": "lattice", "coordinator": False},
    "ou": {"encryption": "ou", "key_bits": 2048},
    "ou, no coordinator": {"encryption": "ou", "key_bits": 2048, "coordinator": False},
    "paillier": {"encryption": "paillier", "key_bits": 2048},
    "paillier, no coordinator": {"encryption": "paillier", "key_bits": 2048, "coordinator": False},
    "paillier, paper mode": {"encryption": "paillier", "key_bits": 2048, "mode": "paper", "allow_insecure": True},
}
LATTICE_BAR, PAILLIER_BAR = 0.5, 0.1
PAPERS_COUNT = 3 * BATCH + 2 * BATCH / PERIOD  # ciphertexts between A and B in a round


def tables() -> tuple[dict[str, Table], NDArray[np.float64]]:
    """Return both parties' 24 000 rows, and labels."""
    data = default_of_credit_card_clients()
    rows, _ = train_test_split(np.arange(len(data.y)), test_size=0.2, stratify=data.y, random_state=0)
    x, y = data.x[rows], data.y[rows].astype(np.float64)
    return {"active": to_table(x[:, :11], party="active"), "passive": to_table(x[:, 11:], party="passive")}, y


def trained(
    parts: dict[str, Table], y: NDArray[np.float64], epochs: int, given: dict[str, object]
) -> dict[str, object]:
    """Train between threads; return times, bytes and how far the weights are from the pooled optimiser's."""
    system, options = find_system("quasi-newton"), QuasiNewton(**given)
    common = RegressionOptions(batch_size=BATCH, period=PERIOD, max_iter=epochs, tol=0.0, random_state=0)
    options.check(common)
    compile_kernels(system, options)
    moments: list[tuple[float, float]] = []
    run = Run(
        system=system, options=options, common=common, roles=roles_of(system, list(parts), None, options),
        data={"active": LabelledRows(parts["active"], y), "passive": LabelledRows(parts["passive"], np.zeros(0))},
        classes=[0, 1], n_jobs=THREADS,
        progress=lambda done, losses: moments.append((time.perf_counter(), time.process_time())),
    )  # fmt: skip
    started = time.perf_counter()
    played = train_in_threads(run, {})
    walls, cpus = (np.diff([moment[k] for moment in moments])[1:] for k in range(2))
    between, led = 0, 0
    for transcript in played.transcripts.values():
        for entry in transcript.entries:
            if entry.direction == "sent" and entry.round == epochs:
                if LEAD in (transcript.party, entry.peer):
                    led += entry.nbytes
                else:
                    between += entry.nbytes
    weights = np.concatenate(
        [played.results["active"].coef, played.results["passive"].coef, [played.results["active"].intercept]]
    )
    return {
        "s/epoch": median(walls), "cpu s/epoch": median(cpus), "set-up s": moments[0][0] - started,
        "A-B MB": between / 1e6, "C MB": led / 1e6, "A-B kB/round": between / (len(y) // BATCH) / 1e3,
        "of the paper's": between / (len(y) // BATCH) / (PAPERS_COUNT * 512),
        "off by": float(np.abs(weights - pooled(parts, y, common)).max()),
    }  # fmt: skip


def pooled(parts: dict[str, Table], y: NDArray[np.float64], common: RegressionOptions) -> NDArray[np.float64]:
    """Return the pooled optimiser's weights on the same batches."""
    X = np.hstack([preparation_of(table).matrix(table.columns, table.n_rows) for table in parts.values()])
    optimiser = Optimiser(
        memory=common.memory, period=PERIOD, batch_size=BATCH, learning_rate=QuasiNewton.first_rate,
        max_iter=common.max_iter, tol=0.0, seed=batch_seed(0),
    )  # fmt: skip
    return train(np.hstack([X, np.ones((len(y), 1))]), 2.0 * y - 1.0, optimiser).weights


def by_phe(rows: int, n_rows: int, columns: tuple[int, int]) -> dict[str, object]:
    """Time every operation on encrypted numbers of the published protocol once per row, and scale to an epoch."""
    public, private = phe.generate_paillier_keypair(n_length=2048)
    rng = np.random.default_rng(0)
    u_a, u_b, y = rng.standard_normal((3, rows))
    X = [rng.standard_normal((rows, n)) for n in columns]

    def clock() -> float:
        return time.process_time()

    begun = clock()
    hidden = [public.encrypt(x) for x in u_a.tolist()]  # step 1
    squares = [public.encrypt(x * x) for x in u_a.tolist()]
    margins = clock()
    d = [0.25 * u + (0.25 * b - 0.5 * label) for u, b, label in zip(hidden, u_b.tolist(), y.tolist(), strict=True)]
    for number in d:  # step 2, re-randomised
        number.obfuscate()
    residuals = clock()
    gradients = [
        sum((d[i] * float(x[i, k]) for i in range(1, rows)), d[0] * float(x[0, k]))
        for x in X
        for k in range(x.shape[1])
    ]
    products = clock()
    sum((0.125 * s + 0.25 * float(b) * u for s, u, b in zip(squares, hidden, u_b, strict=True)), public.encrypt(0.0))
    losses = clock()
    for number in gradients:
        private.decrypt(number)
    decrypted = clock()
    row = (margins - begun + residuals - margins + products - residuals + losses - products) / rows
    curvature = ((margins - begun) / 2 + residuals - margins + products - residuals) / rows
    rounds = n_rows // BATCH
    seconds = rounds * (BATCH * (row + curvature / PERIOD) + (decrypted - losses) * (1 + 1 / PERIOD))
    between = PAPERS_COUNT * 512
    return {
        "s/epoch": seconds, "cpu s/epoch": seconds, "set-up s": 0.0, "A-B MB": between * rounds / 1e6,
        "C MB": 2 * sum(columns) * 512 * rounds * (1 + 1 / PERIOD) / 1e6, "A-B kB/round": between / 1e3,
        "of the paper's": 1.0, "off by": float("nan"),
    }  # fmt: skip


def main() -> None:
    quick = arguments(__doc__).parse_args().quick
    parts, y = tables()
    timed = 20 if quick else 200
    elementwise = by_phe(timed, len(y), (12, 12))
    rows = [{"form": f"phe, {timed} rows timed and scaled", **elementwise, "times phe": 1.0, "bar": ""}]
    for form, given in FORMS.items():
        if quick and form.endswith(("paper mode", "no coordinator")) and "lattice" not in form:
            continue
        row = trained(parts, y, 3 if quick else 5, given)
        share = float(row["cpu s/epoch"]) / float(elementwise["cpu s/epoch"])  # type: ignore[arg-type]
        bar = ""
        if form.startswith("lattice"):
            bar = f"s/epoch <= {LATTICE_BAR:g}: {verdict(float(row['s/epoch']), LATTICE_BAR)}"  # type: ignore[arg-type]
        elif "paper" not in form:
            bar = f"times phe <= {PAILLIER_BAR:g}: {verdict(share, PAILLIER_BAR)}"
        rows.append({"form": form, **row, "times phe": share, "bar": bar})
    report("logistic_speed", rows, quick=quick)


if __name__ == "__main__":
    main()
