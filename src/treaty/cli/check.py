"""Before a job: ``treaty demo``, ``treaty check`` and ``treaty disclosures``.

These commands print their help, or begin to compile, before they import what they need, which takes a second.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from rich.table import Table

from treaty.cli.logs import NODE_FILE, NodeFile, Trust, console, say, say_learned
from treaty.errors import ConfigError, TreatyError

if TYPE_CHECKING:
    from treaty.runs.job import Job

# seconds between two attempts to reach a peer
RETRY_INTERVAL = 1.0
# seconds to keep listening at the end, for peers that have just started their own check
LINGER = 3.0


def check(
    job: Annotated[Path, typer.Argument(help="The job file.")],
    party: Annotated[
        str | None, typer.Option("--as", help="Check as this party of a job without nodes. Default: as this node.")
    ] = None,
    wait: Annotated[
        str,
        typer.Option(help="How long to try to reach the other parties: 90s, 10m, 1h. Default: 0s; between nodes, 1m."),
    ] = "",
    with_peers: Annotated[
        bool,
        typer.Option(
            "--with-peers",
            help="Ask the nodes of all parties to check, too, and measure the links with them. No data is exchanged.",
        ),
    ] = False,
    node: NodeFile = NODE_FILE,
    trust: Trust = None,
) -> None:
    """Check a party's tables, folders, disk space, key, certificates and clock; then its peers and links.

    Nothing is trained, and no row is sent. With --as, this party listens during the check, so that parties that check
    at the same time reach each other: with --wait 10m, they may start within ten minutes. Without --as, the job is for
    nodes: this node's policy is checked, too, and its peers are those connected with the running node.

    With --as, or --with-peers, the latency and bandwidth of each link are measured, and for SecureBoost the output says
    how many seconds a tree takes over them with open sums, sealed sums, Okamoto-Uchiyama and, where the options allow
    them, hidden rows.

    Each line says ok, or WRONG and what to do. The output also says what each party would learn; `treaty disclosures`
    lists the messages.

    Exit code: 0 if all is well, 2 if something of this party is wrong, 1 if only other parties do not answer properly.

    Examples
    --------
    treaty check job.toml --as bank --wait 5m
    treaty check job.toml --with-peers
    """
    from treaty.cli.node import check_as_node
    from treaty.runs.job_files import load_job, seconds_of

    if party is None and node == NODE_FILE and not node.exists():
        names = ", ".join(load_job(job).parties)
        raise ConfigError(
            f"expected --as with the party to check as, one of {names}; for a job between nodes, --node with the "
            "node's settings"
        )
    # a job for nodes: this node checks its own part, its peers check theirs
    if party is None:
        here, there = check_as_node(job, node, with_peers=with_peers, patience=seconds_of("--wait", wait or "1m"))
        raise typer.Exit(0 if here and there else 1 if here else 2)
    if with_peers:
        raise ConfigError("expected --with-peers without --as: only nodes can ask their peers to check")
    described = load_job(job)
    if party not in described.parties:
        raise ConfigError(f"expected --as to be one of {', '.join(described.parties)}, got {party!r}")
    raise typer.Exit(_check_as(described, party, seconds_of("--wait", wait or "0s")))


def _check_as(described: Job, party: str, patience: float) -> int:
    """Print what is found of a party, its peers and its links; return the exit code."""
    from treaty.runs.connecting import listening
    from treaty.runs.link_checks import over_links, probe
    from treaty.runs.local_checks import CheckFinding, check_own
    from treaty.runs.report import learned_by
    from treaty.systems.vertical.cipher_choice import Link

    own = check_own(described, party)
    for finding in own:
        say(str(finding))
    # without a valid job, the party's peers are unknown
    if not own[0].fine:
        return 2
    say_learned(learned_by(described, described.roles()))
    others, links = [], dict[str, Link]()
    with ExitStack() as held:
        # as in a training, so that peers that check reach this party
        try:
            address = held.enter_context(listening(described, party)).address
            own.append(CheckFinding("listening", True, f"at {address}"))
        except TreatyError as error:
            own.append(CheckFinding("listening", False, str(error)))
        say(str(own[-1]))
        deadline = time.monotonic() + patience
        for peer in described.system.links(described.roles(), described.settings()[0])[party]:
            # a peer that is not up yet may start its own check within the time given
            finding, link = probe(described.parties, party, peer)
            while link is None and time.monotonic() < deadline:
                time.sleep(RETRY_INTERVAL)
                finding, link = probe(described.parties, party, peer)
            say(str(finding))
            others.append(finding)
            links |= {} if link is None else {peer: link}
        for finding in over_links(described, own, links):
            say(str(finding))
        if patience:
            time.sleep(LINGER)
    if not all(finding.fine for finding in own):
        return 2
    return 0 if all(finding.fine for finding in others) else 1


def plan(
    job: Annotated[Path, typer.Argument(help="The job file.")],
    rows: Annotated[int, typer.Option(min=1, help="Rows to train on, as far as their number is known.")],
    columns: Annotated[
        list[str] | None, typer.Option(help="A party's number of columns, PARTY=N (default 10); may be repeated.")
    ] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option(help="Of a label, gradient or value; may be repeated. Default: the job's.")
    ] = None,
    rarer: Annotated[float, typer.Option(min=1e-4, max=0.5, help="Share of the rarer class of two.")] = 0.5,
    trust: Trust = None,
) -> None:
    """Forecast what noise costs before any epsilon is spent: what a person pays, and how much less a model learns.

    The forecast follows from rows, columns, parties and epsilon alone: no table is read, and nothing is sent.

    Examples
    --------
    treaty plan job.toml --rows 20000 --epsilon 1 --epsilon 4
    """
    from treaty.runs.job_files import load_job
    from treaty.systems.expected import Shape

    described = load_job(job)
    system, roles, settings = described.system, described.roles(), described.settings()
    if system.forecast is None:
        raise ConfigError(
            f"no forecast for protocol {system.name!r}: what its noise costs has not been measured; train on public or "
            "made-up rows instead"
        )
    sizes = dict.fromkeys(roles.owners, 10)
    for given in columns or ():
        party, _, number = given.partition("=")
        if party not in sizes or not number.isdecimal():
            raise ConfigError(f"expected --columns PARTY=N of one of {', '.join(sizes)}, got {given!r}")
        sizes[party] = int(number)
    shape = Shape(rows=rows, columns=sizes, slots={}, classes=described.classes, rarer=rarer)
    asked: list[float | None] = [*epsilon] if epsilon else [None]
    for one in asked:
        if one is not None and not 0.0 < one < math.inf:
            raise ConfigError(f"expected --epsilon to be a finite number above 0, got {one}")
        found = system.forecast(roles, *settings, shape, one)
        paid = ", ".join(f"{amount:g} at {party}" for party, amount in found.epsilon.items())
        low, high = found.between
        of = "the job's epsilon" if one is None else f"epsilon {one:g}"
        say(
            f"{of}: a person pays {paid}; about {found.lost:.1%} of what a model without noise learns is lost "
            f"({low:.1%} to {high:.1%})"
        )


def disclosures(
    job: Annotated[str, typer.Argument(help="The job file, or the name of a protocol, such as secureboost.")],
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="With a protocol: one of its options, as NAME=VALUE; may be repeated."),
    ] = None,
    party: Annotated[
        list[str] | None,
        typer.Option(help="With a protocol: a party with rows, the active one first; may be repeated."),
    ] = None,
    model: Annotated[
        Literal["trees", "logistic", "statistics"] | None,
        typer.Option(help="Which of several protocols of the same name."),
    ] = None,
    align: Annotated[bool, typer.Option("--align", help="With a protocol: rows are aligned first.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, to be saved to a file.")] = False,
    trust: Trust = None,
) -> None:
    """Print what each party would learn in a job, and from which messages.

    The first part lists, by party or role, all that it learns beyond its own data. Then a table lists the messages sent
    under the job's options: from which role to which, what the receiver learns, in which form (nothing, encrypted,
    masked, noisy, aggregated, exact; control: about the job, not about rows), which option reduces it, and a reference.
    Nothing is trained, and no table is read.

    Examples
    --------
    treaty disclosures job.toml --markdown > disclosures.md
    treaty disclosures secureboost --set sums=open --party bank --party shop
    """
    from treaty.runs import report
    from treaty.runs.job_files import load_job

    if Path(job).suffix or Path(job).exists():
        if setting or party or model or align:
            raise ConfigError(
                "expected --set, --party, --model and --align only with the name of a protocol: a job file has them"
            )
        found = report.of_job(load_job(job))
    else:
        given = dict(map(_named, setting or []))
        found = report.disclosures(job, parties=party, model=model, align={} if align else None, **given)
    if markdown:
        print(found.markdown())
        return
    say_learned(found.learned)
    for what, lines in found.messages.items():
        say(f"\nMessages: {what}")
        table = Table("form", "message", "what the receiver learns", box=None, pad_edge=False)
        for line in lines:
            lessened = f" (lessened by {line.leakage.guard})" if line.leakage.guard else ""
            message = f"{line.message.__name__}\n{line.way}"
            table.add_row(line.leakage.form, message, f"{line.leakage.tells}{lessened}\n{line.reference}")
        console.print(table)


def _named(setting: str) -> tuple[str, Any]:
    """Split ``name=value``; the value is read as JSON, else taken as text."""
    name, equals, value = setting.partition("=")
    if not equals:
        raise ConfigError(f"expected --set NAME=VALUE, got {setting!r}")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, {"True": True, "False": False}.get(value, value)


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
        Literal["tls", "memory"] | None,
        typer.Option(
            help="memory: parties are threads of this process; tls: one process each, mutual TLS (default memory)."
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
    open_sums: Annotated[
        bool,
        typer.Option("--open", help="With secureboost: faster, as the party with the labels sees exact sums."),
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write a report of the run, compared with the pooled table, to this HTML file.")
    ] = None,
) -> None:
    """Train and predict between organisations on this machine and compare with XGBoost on the pooled table.

    The first party has the labels. With the built-in data, a clinic (labels, some measurements), a laboratory and an
    imaging centre hold different columns of the same patients. Each lacks some patients and has its own row order, so
    they first find the common ones without revealing their lists. Under federboost-horizontal, three hospitals have
    different patients with all measurements and labels; each is compared with training alone. Under fedxgb, people's
    rows stay on their own devices, and only a server gets the model. With --model logistic, a clinic and a laboratory
    fit a logistic regression, which is compared with scikit-learn's.

    Examples
    --------
    treaty demo --report out.html
    treaty demo --data credit.csv --label default --protocol federboost-horizontal
    """
    from treaty.runs.warm_up import trees_compiled_beside

    # compiling starts in a second process before the demo imports what it needs, which takes a second
    with trees_compiled_beside(wanted=model == "trees") as compiling:
        from treaty.cli.demos import run_demo

        if report is not None:
            from treaty.report.page import check_possible

            check_possible(report)
        run_demo(
            model=model, protocol=protocol, parties=parties, data=data, label=label, ids=ids,
            split=split, transport=transport, trees=trees, encryption=encryption, open_sums=open_sums,
            first_time=compiling, report=report,
        )  # fmt: skip
