"""``treaty audit-gradients``: whether a passive party received the gradients that the labels imply."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from treaty.machine.process import cores as all_cores
from treaty.runs.progress import steps_bar
from treaty.systems.vertical.audit.replay import audit as compare

console = Console(markup=False)


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
