"""What is checked of a job before it begins."""

from __future__ import annotations

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import load_pem_x509_certificate

from treaty.cluster.ray_shards import Cluster
from treaty.errors import ConfigError
from treaty.messaging.certificates import load_certificate
from treaty.runs.job import Job, Member
from treaty.systems.system import Cast, System


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
    cast, system, (own, common) = job.cast(), job.system, job.settings()
    if simulated := system.only_simulated(own):
        raise ConfigError(simulated)
    if resume and "resume" in system.cannot:
        raise ConfigError(system.cannot["resume"])
    _check_identities(job, cast, system)
    kept = [party for party, member in job.parties.items() if member.keep_for_audit is not None]
    if kept and (reason := system.unaudited(own)):
        raise ConfigError(
            f"expected no keep_for_audit with protocol {job.protocol!r} and these options, got it at "
            f"{', '.join(kept)}: {reason}"
        )
    for party, member in job.parties.items():
        if member.most_recoverable is not None and (not hasattr(own, "ciphers") or own.mode == "paper"):
            raise ConfigError(
                f"{party} has a limit, most_recoverable, and nobody counts all that protocol {job.protocol!r} tells "
                "with these options: take the limit out, or a system whose sides of splits are counted (docs/sealed.md)"
            )
        cluster_of(member)
        if member.cluster is not None and cast.roles[party] not in system.on_clusters(own):
            raise ConfigError(
                f"expected no cluster at {party}, got one, which would have nothing to do: it is the "
                f"{cast.roles[party]} of protocol {job.protocol!r} with these options (docs/clusters.md)"
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


def cluster_of(member: Member) -> Cluster | None:
    """Return a party's own cluster; None without one."""
    return None if member.cluster is None else Cluster(member.cluster, member.cluster_workers)


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
