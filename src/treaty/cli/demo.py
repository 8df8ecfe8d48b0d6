"""``treaty demo``: its options; `demos` has what it plays."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

console = Console(markup=False)


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
            help="How many organisations the table is cut among. Default 3 (2 with --model logistic). With fedxgb: the "
            "number of edge servers; each has four users.",
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="breast (scikit-learn's, built in), or a CSV or Parquet file.")] = "breast",
    label: Annotated[str | None, typer.Option(help="Label column of a file: classes, or numbers to regress.")] = None,
    ids: Annotated[
        str | None, typer.Option("--id", help="A file's column, or several with commas, that is no feature: ids.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="How columns are cut: 'age,income/visits,spend' gives the first party two; in place of --parties."
        ),
    ] = None,
    transport: Annotated[
        Literal["grpc", "memory"] | None,
        typer.Option(
            help="memory: parties are threads of this process; grpc: a process each, mutual TLS (default memory)."
        ),
    ] = None,
    trees: Annotated[int | None, typer.Option(min=1, help="Boosting rounds. Default 20.")] = None,
    encryption: Annotated[
        str,
        typer.Option(
            help="With secureboost, quasi-newton and sgd: auto, lattice, ou (Okamoto-Uchiyama, 3072 bit) or paillier. "
            "With fedxgboost-smm its backend: lattice, dealer or ou."
        ),
    ] = "auto",
    report: Annotated[
        Path | None,
        typer.Option(help="Write a report of the run to this HTML file, beside training on the pooled table."),
    ] = None,
) -> None:
    """Train and predict between organisations on this machine and compare with XGBoost on the pooled table.

    The first party has the labels. With the built-in data a clinic (labels, some measurements), a laboratory and an
    imaging centre hold different columns of the same patients. Each lacks some of them and has them in an order of its
    own, so they first find those they share without showing each other their lists. Under federboost-horizontal three
    hospitals have patients of their own, with all measurements and labels; each is compared with what it gets alone.
    Under fedxgb people's rows stay on devices of their own; a server gets the model, and the devices nothing of it.
    With --model logistic a clinic and a laboratory fit a logistic regression together, beside scikit-learn's.
    """
    from treaty.runs.warm_up import trees_compiled_beside

    # begun before what the demo needs is imported, which takes a second
    with trees_compiled_beside(wanted=model == "trees") as compiling:
        from treaty.cli.demos import run_demo

        if report is not None:
            from treaty.report.page import check_possible

            check_possible(report)
        run_demo(
            console, model=model, protocol=protocol, parties=parties, data=data, label=label, ids=ids,
            split=split, transport=transport, trees=trees, encryption=encryption, first_time=compiling, report=report,
        )  # fmt: skip
