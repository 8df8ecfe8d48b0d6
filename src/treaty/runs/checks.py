"""What is checked of a job before it begins, and what parties compare when they meet."""

from __future__ import annotations

import hashlib
from importlib.metadata import version

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import load_pem_x509_certificate

from treaty.errors import ConfigError
from treaty.messaging.certificates import load_certificate
from treaty.runs.job import Job
from treaty.systems.options import public_terms
from treaty.systems.system import Cast, System

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
        "align": "none" if align is None else f"on_duplicate {align.on_duplicate!r}, normalise {list(align.normalise)}",
        "align.log": "none" if align is None or align.log is None else "kept",
    }
    if job.by_row:
        terms["label"] = repr(job.label)
    elif name in cast.owners and verb == "train":
        terms["eval_tables"] = str(len(job.parties[name].eval_tables))
    terms |= {option: repr(value) for option, value in public_terms(*job.settings()).items() if option != "protocol"}
    return {term: _short(value) for term, value in terms.items()}


def _place(role: str | None, edge: str | None) -> str:
    words = " of ".join(word for word in (role, edge) if word)
    return f" ({words})" if words else ""


def _short(value: str) -> str:
    if len(value) <= LONGEST_TERM:
        return value
    return f"{value[:100]}... {len(value)} characters, SHA-256 {hashlib.sha256(value.encode()).hexdigest()}"


def check_training(job: Job, name: str | None = None, *, resume: bool = False) -> Cast:
    """Refuse a training whose roles, options or tables cannot work; return who plays which role.

    Parameters
    ----------
    name : str or None
        Who is to run; None for all parties on this machine.

    Raises
    ------
    ConfigError
    """
    cast, system, (_, common) = job.cast(), job.system, job.settings()
    simulated = system.only_simulated(job.settings()[0])
    if simulated:
        raise ConfigError(simulated)
    if resume and "resume" in system.cannot:
        raise ConfigError(system.cannot["resume"])
    _check_identities(job, cast, system)
    kept = [party for party, member in job.parties.items() if member.keep_for_audit is not None]
    if kept and (reason := system.unaudited(job.settings()[0])):
        raise ConfigError(
            f"expected no keep_for_audit with protocol {job.protocol!r} and these options, got it at "
            f"{', '.join(kept)}: {reason}"
        )
    for party in cast.owners if name is None else [name]:
        if not job.by_row and party in cast.owners and job.parties[party].table is None:
            raise ConfigError(f"the job names no table of {party}: add parties.{party}.table")
    lead = job.active
    if name not in (None, lead) or job.parties[lead].eval_tables:
        return cast
    if getattr(common, "early_stopping_rounds", None) is not None:
        raise ConfigError(f"early_stopping_rounds needs rows to watch: name parties.{lead}.eval_tables")
    if cast.roles[lead] in system.shows_columns and job.parties[lead].table is None:
        raise ConfigError(
            f"the {cast.roles[lead]} says which columns and classes there are: expected parties.{lead}.table, examples "
            f"that it does not train on, or parties.{lead}.eval_tables, got neither"
        )
    return cast


def _check_identities(job: Job, cast: Cast, system: System) -> None:
    """Refuse a helper that is one of the data parties under another name, as far as certificates tell."""
    keys = {name: _public_key(member.certificate) for name, member in job.parties.items() if member.certificate}
    for helper in cast.having(*system.apart):
        same = [name for name, key in keys.items() if name != helper and key == keys.get(helper)]
        if same:
            role = cast.roles[helper]
            raise ConfigError(
                f"{helper}, the {role}, has the same key as {', '.join(same)}: who has data must not be the {role}; "
                f"take a third party, or {role} = false"
            )


def _public_key(path: str) -> bytes:
    key = load_pem_x509_certificate(load_certificate(path)).public_key()
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
