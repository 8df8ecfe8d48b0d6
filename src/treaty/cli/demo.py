"""``treaty demo``: its options, without the imports that take a second; `demos` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def demo(
    protocol: Annotated[
        str | None,
        typer.Option(
            help="With --model trees: secureboost, federboost-vertical, fedxgboost-smm or fedxgboost-ldp, split by "
            "column; federboost-horizontal, split by row; fedxgb, among users of a few rows; or pooled, on one table "
            "(default secureboost). With --model logistic: quasi-newton, sgd or pooled (default quasi-newton)."
        ),
    ] = None,
    model: Annotated[
        Literal["trees", "logistic"], typer.Option(help="Boosted trees, or logistic regression, split by column.")
    ] = "trees",
    parties: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=10,
            help="Number of organisations among which the table is split. Default 3 (2 with --model logistic). With "
            "fedxgb: number of edge servers; each has four users.",
        ),
    ] = None,
    data: Annotated[
        str, typer.Option(help="breast (scikit-learn's built-in data), or a CSV or Parquet file.")
    ] = "breast",
    label: Annotated[
        str | None, typer.Option(help="The file's label column: classes, or numbers for regression.")
    ] = None,
    ids: Annotated[
        str | None, typer.Option("--id", help="The file's id columns, separated by commas; they are not features.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="How columns are split: 'age,income/visits,spend' gives each party two; instead of --parties."
        ),
    ] = None,
    transport: Annotated[
        Literal["grpc", "memory"] | None,
        typer.Option(
            help="memory: parties are threads of this process; grpc: one process each, mutual TLS (default memory)."
        ),
    ] = None,
    trees: Annotated[int | None, typer.Option(min=1, help="Boosting rounds. Default 20.")] = None,
    encryption: Annotated[
        str,
        typer.Option(
            help="With secureboost, quasi-newton and sgd: auto, lattice, ou (Okamoto-Uchiyama, 3072 bit) or paillier. "
            "With fedxgboost-smm, its backend: lattice, dealer or ou."
        ),
    ] = "auto",
    report: Annotated[
        Path | None,
        typer.Option(help="Write a report of the run, compared with the pooled table, to this HTML file."),
    ] = None,
) -> None:
    """Train and predict between organisations on this machine and compare with XGBoost on the pooled table.

    The first party has the labels. With the built-in data, a clinic (labels, some measurements), a laboratory and an
    imaging centre hold different columns of the same patients. Each lacks some patients and has its own row order, so
    they first find the common ones without revealing their lists. Under federboost-horizontal, three hospitals have
    different patients with all measurements and labels; each is compared with training alone. Under fedxgb, people's
    rows stay on their own devices, and only a server gets the model. With --model logistic, a clinic and a laboratory
    fit a logistic regression, which is compared with scikit-learn's.
    """
    from treaty.runs.warm_up import trees_compiled_beside

    # Start compiling in a second process before importing what the demo needs, which takes a second.
    with trees_compiled_beside(wanted=model == "trees") as compiling:
        from treaty.cli.demos import run_demo

        if report is not None:
            from treaty.report.page import check_possible

            check_possible(report)
        run_demo(
            model=model, protocol=protocol, parties=parties, data=data, label=label, ids=ids,
            split=split, transport=transport, trees=trees, encryption=encryption, first_time=compiling, report=report,
        )  # fmt: skip
