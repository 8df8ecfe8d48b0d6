"""The ``treaty`` command.

Exit codes: 0 done; 1 the job ended with an error, said on standard error, which may be any party's where all run here;
2 the command line, the job file or, with --as, this party's own table is wrong.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console

import treaty
from treaty.cli.audit import audit
from treaty.cli.audit_log import audit_log
from treaty.cli.bench import bench
from treaty.cli.check import check
from treaty.cli.disclosures import disclosures
from treaty.cli.forget import forget
from treaty.cli.jobs import explain, predict, train
from treaty.cli.keys import keys
from treaty.cli.logs import BY_SIGNAL, Ended, last_line
from treaty.cli.node import approve, cancel, jobs, logs, models, node, reject, submit
from treaty.cli.report import report
from treaty.cli.serve import serve
from treaty.cli.show import show
from treaty.database import set_aside
from treaty.errors import ConfigError, DataError, TreatyError
from treaty.privacy.ledger import cost, read_ledger, summary
from treaty.runs.processes import ended_by_signals
from treaty.runs.progress import steps_bar

app = typer.Typer(
    help="Train one model across organisations that may not pool their data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console()


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"treaty {treaty.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Train one model across organisations that may not pool their data."""


@app.command()
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
    label: Annotated[str | None, typer.Option(help="Label column of a file.")] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="How columns are cut: 'age,income/visits,spend' gives the first party two; in place of --parties."
        ),
    ] = None,
    transport: Annotated[
        Literal["grpc", "memory"] | None,
        typer.Option(help="grpc: one process each, mutual TLS; memory: threads. By default memory for fedxgb alone."),
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
            console, model=model, protocol=protocol, parties=parties, data=data, label=label, split=split,
            transport=transport, trees=trees, encryption=encryption, first_time=compiling, report=report,
        )  # fmt: skip


for command in (check, disclosures, train, predict, explain, serve, show, report, audit):
    app.command()(command)
for of_node in (node, submit, jobs, approve, reject, cancel, logs, models, forget):
    app.command(rich_help_panel="Nodes")(of_node)
app.add_typer(audit_log, name="audit-log")


@app.command()
def ledger(
    path: Annotated[Path, typer.Argument(help="The ledger's file, or its folder: NAME.noise in a job's store.")],
    delta: Annotated[
        float | None, typer.Option(help="Have an accountant add releases up at this delta, where that is less.")
    ] = None,
) -> None:
    """Print what noisy releases about a party's rows have cost so far, per value and per person.

    One line for each job, or model, and mechanism; the last line is for everything together.
    """
    entries = read_ledger(path)
    groups = dict.fromkeys((entry.job, entry.mechanism) for entry in entries)
    for job, mechanism in groups:
        own = [entry for entry in entries if (entry.job, entry.mechanism) == (job, mechanism)]
        console.print(f"{job}, {mechanism}, {summary(own)}: {cost(own, delta)}", soft_wrap=True, highlight=False)
    console.print(f"all: {cost(entries, delta)}", soft_wrap=True, highlight=False)


@app.command()
def begin_anew(
    path: Annotated[
        Path, typer.Argument(help="What is lost or damaged: NAME.noise, NAME.hints, NAME.queries, or a run log.")
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Set aside what a party must remember and has lost, so that its next job begins it anew.

    NAME.noise counts what noisy releases have cost people, and has the key of the noise: begun anew, people pay again
    for what is released again, up to epsilon_total once more. NAME.hints counts what answers under the lattice map
    have leaked. NAME.queries counts rows that users had predicted by a hidden model. A run log (NAME.jsonl, NAME.runs)
    counts alignments. Bring back a copy if there is one; what is damaged
    is moved, not deleted.
    """
    if not yes:
        typer.confirm(f"Forget what {path} has counted, so that all of it may be spent once more?", abort=True)
    for moved in set_aside(path):
        console.print(f"moved to {moved}", soft_wrap=True, highlight=False)


@app.command()
def audit_gradients(
    active: Annotated[Path, typer.Argument(help="Folder of the active party's records: its keep_for_audit.")],
    passive: Annotated[Path, typer.Argument(help="Folder of a passive party's records.")],
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Audit what is whole of records that a killed training left.")
    ] = False,
) -> None:
    """Tell whether a passive party received the gradients that the labels imply.

    For after a training whose parties had keep_for_audit in their job files. Opens all that the passive party recorded
    with the key and secrets that the active party recorded, and compares it with what follows from the labels, tree by
    tree. Whoever runs this sees labels and gradients in the active party's record: an auditor whom both trust, or the
    two together. Records of several trainings are put together by their numbers. docs/secureboost.md says what is
    checked and what is not.

    Ends with 0 where all is the same, 1 where something differs, 2 where a record is damaged or missing.
    """
    from treaty.compute import cores as all_cores
    from treaty.systems.vertical.audit.replay import audit as compare

    with steps_bar("auditing trees") as bar:
        verdicts = compare(active, passive, unfinished=unfinished, threads=all_cores(), progress=bar)
    for found in verdicts:
        what = f"{found.active} -> {found.passive}, job {found.job!r}, model {found.model_id[:8]}"
        for note in found.notes:
            console.print(f"{what}: {note}", soft_wrap=True, highlight=False)
        for finding in found.findings:
            console.print(f"{what}: {finding}", soft_wrap=True, highlight=False)
        compared = f"{found.trees} trees compared, {found.vectors} vectors opened"
        same = "all hold the gradients that the labels imply" if found.trees else "nothing could be compared"
        result = f"{len(found.findings)} differences" if found.findings else same
        console.print(f"{what}: {compared}: {result}", soft_wrap=True, highlight=False)
        signed = f"signed under the certificate {found.signed_by}" if found.signed_by else "nothing was signed"
        console.print(f"{what}: {signed}", soft_wrap=True, highlight=False)
    if any(found.findings or not found.trees for found in verdicts):
        raise typer.Exit(1)


app.add_typer(keys, name="keys")
app.add_typer(bench, name="bench")


def main() -> NoReturn:
    """Run the command line; errors Treaty raises on purpose are one message, not a traceback."""
    gc.freeze()  # hundreds of messages would have Python look through all that is loaded for garbage, again and again
    try:
        with ended_by_signals():
            app(standalone_mode=True)
    except (ConfigError, DataError) as error:
        print(last_line(error), file=sys.stderr)
        sys.exit(2)
    except (TreatyError, OSError) as error:
        print(last_line(error), file=sys.stderr)
        sys.exit(1)
    except SystemExit as ended:
        if ended.code in BY_SIGNAL:
            party = re.search(r" --as[ =](\S+)", " ".join(sys.argv))
            usual = Ended(int(ended.code), f"{BY_SIGNAL[int(ended.code)]}{f' at {party[1]}' if party else ''}")
            print(last_line(ended if isinstance(ended, Ended) else usual), file=sys.stderr)
            # at once: a call of gRPC that was cut off half-way can keep the interpreter from ending
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(ended.code))
        raise
    sys.exit(0)
