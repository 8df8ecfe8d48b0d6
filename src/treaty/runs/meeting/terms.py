"""What parties compare when they meet."""

from __future__ import annotations

import hashlib
from importlib.metadata import version

from treaty.runs.job import Align, Job
from treaty.systems.options import public_terms
from treaty.systems.system import Cast

LONGEST_TERM = 4000  # characters; of a longer one a digest is compared


def shared_terms(job: Job, name: str, cast: Cast, verb: str) -> dict[str, str]:
    """Return what a party's copy of a job must have in common with all others, by name, in words.

    `verb` is what it was started to do. Only what two parties both name is compared: where columns are split, eval
    tables are the owners' business alone.
    """
    members = [f"{who}{_place(member.role, member.edge)}" for who, member in job.parties.items()]
    align = job.align
    terms = {
        "version of Treaty": version("treaty-learn"),
        "command": f"treaty {verb}",
        "name": repr(job.name),
        "protocol": repr(job.protocol),
        "active": repr(job.active),
        "parties": ", ".join(members),
        "task": repr(job.task),
        "classes": str(job.classes),
        "weight": "named" if job.weight else "not named",
        "align": "none" if align is None else _rules(align),
        "align.psi": "none" if align is None else repr(align.psi),
        "align.log": "none" if align is None or align.log is None else "kept",
    }
    if job.by_row:
        terms["label"] = repr(job.label)
    elif name in cast.owners and verb == "train":
        terms["eval_tables"] = str(len(job.parties[name].eval_tables))
    terms |= {option: repr(value) for option, value in public_terms(*job.settings()).items() if option != "protocol"}
    return {term: _short(value) for term, value in terms.items()}


def _rules(align: Align) -> str:
    return f"on_duplicate {align.on_duplicate!r}, normalise {list(align.normalise)}, text {str(align.text).lower()}"


def _place(role: str | None, edge: str | None) -> str:
    words = " of ".join(word for word in (role, edge) if word)
    return f" ({words})" if words else ""


def _short(value: str) -> str:
    if len(value) <= LONGEST_TERM:
        return value
    return f"{value[:100]}... {len(value)} characters, SHA-256 {hashlib.sha256(value.encode()).hexdigest()}"
