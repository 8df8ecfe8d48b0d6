"""A node's database with jobs in every state, and what is shown of them, made up."""

from __future__ import annotations

import time
from pathlib import Path

from treaty.node.job_views import JobView, Progress
from treaty.node.store import JobRow, Store

TITLES = {
    "01" * 16: "Credit default, boosted trees (secureboost) between bank and clinic",
    "a1" * 16: "Readmission within 30 days, boosted trees between bank, clinic and telco",
    "b2" * 16: "Logistic regression between bank and telco",
    "c3" * 16: "Predictions for 12,000 customers by model 9f3c2a11",
    "d4" * 16: "Credit default, boosted trees between bank and clinic",
    "e5" * 16: "Churn, boosted trees between bank and telco",
    "f6" * 16: "Explanations for 100 customers by model 9f3c2a11",
}

USAGE = {
    "Privacy budget": {
        "credit": "epsilon 3.2 of at most 8 spent per person; with bank 2.1; with telco 1.1",
        "payments": "epsilon 0.5 spent per person; with bank 0.5",
    },
    "Disk": {"jobs": "120.4 MB", "models": "3.1 MB", "free": "81,004.2 MB"},
}


def made_up(folder: Path) -> Store:
    """Return a node's database in which much has happened."""
    store, now = Store(folder), time.time()
    ids = list(TITLES)
    states = ["proposed", "running", "waiting", "queued", "finished", "failed", "cancelled"]
    reasons = {
        "waiting": "telco is not connected; goes on from tree 12 when it is",
        "failed": "clinic: its table has other ids",
    }
    for hours, (id, state) in enumerate(zip(ids, states, strict=True)):
        verb = "predict" if "Predictions" in TITLES[id] else "explain" if "Explanations" in TITLES[id] else "train"
        job = JobRow(id, b"", b"", "bank", verb, state, reasons.get(state, ""), 1, 23, 60, created=now - 5000 * hours)
        store.add_job(job, event={"what": "received", "who": "bank"})
    store.set_peer("clinic", True)
    store.set_peer("telco", False, "telco.example.org:7700: nobody answers")
    return store


def describe(job: JobRow) -> JobView:
    """Return what is shown of a job."""
    parties = {"bank": job.state, "clinic": "approved" if job.state == "proposed" else job.state}
    finished, running = job.state == "finished", job.state in ("running", "waiting", "finished")
    return JobView(
        title=TITLES.get(job.id, job.id),
        states=parties | ({"telco": "waiting"} if "telco" in TITLES.get(job.id, "") else {}),
        hash="9f3c2a11" * 8,
        progress=Progress(job.rounds, job.total, seconds_left=260.0 if job.state == "running" else None)
        if running
        else None,
        disclosures=(
            "bank learns which of its rows clinic has, too",
            "clinic learns which rows are on which side of its own splits, and nothing of labels or gradients",
            "bank learns the number of clinic's columns, and by which record of it a node is split, not the column",
        ),
        verdict=(
            (True, "peers: bank may take part"),
            (True, "sums: sealed is allowed"),
            (False, "least_rows: 812 rows, at least 1,000 are asked for"),
        ),
        models=("/var/lib/node/models/d4/clinic.part",) if finished else (),
        sent={"clinic": 1_234_567, "telco": 800} if running else {},
        received={"clinic": 89_000_000} if running else {},
    )
