"""What one party can find out before a job begins: whether its own files and clock will do, and who answers."""

from __future__ import annotations

import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import load_pem_x509_certificate

from treaty.cluster.ray_shards import Cluster
from treaty.data.binning import fit_bins
from treaty.data.reading import check_there
from treaty.data.table import Table
from treaty.errors import ConfigError, TreatyError
from treaty.messaging.certificates import check_certificate, fingerprint, load_certificate, load_identity
from treaty.models.checkpoints import check_ledgers, checkpoint_file
from treaty.runs.expectations import Sizes, check_memory, check_store, expect
from treaty.runs.job import Job, Member, store_of
from treaty.runs.progress import check_writable, output_folders
from treaty.runs.rows import joined_in
from treaty.runs.table_files import describe, read_alone
from treaty.systems.system import Roles, System
from treaty.systems.vertical.exact_sums import expected_sides

# ---------------------------------------------------------------- what is checked of a job before it begins


def check_training(job: Job, name: str | None = None, *, resume: bool = False) -> Roles:
    """Refuse a training whose roles, options or tables cannot work; return who plays which role.

    Parameters
    ----------
    name : str or None
        Who is to run; None for all parties on this machine.

    Raises
    ------
    ConfigError
    """
    roles, system, (own, common) = job.roles(), job.system, job.settings()
    if simulated := system.only_simulated(own):
        raise ConfigError(simulated)
    if resume and "resume" in system.cannot:
        raise ConfigError(system.cannot["resume"])
    _check_identities(job, roles, system)
    kept = [party for party, member in job.parties.items() if member.keep_for_audit is not None]
    if kept and (reason := system.unaudited(own)):
        raise ConfigError(
            f"expected no keep_for_audit with protocol {job.protocol!r} and these options, got it at "
            f"{', '.join(kept)}: {reason}"
        )
    for party, member in job.parties.items():
        if member.most_recoverable is not None and (own.ciphers is None or own.mode == "paper"):
            raise ConfigError(
                f"{party} has a limit, most_recoverable, and nobody counts all that protocol {job.protocol!r} tells "
                "with these options: take the limit out, or a system whose sides of splits are counted (docs/sealed.md)"
            )
        cluster_of(member)
        if member.cluster is not None and roles.of[party] not in system.on_clusters(own):
            raise ConfigError(
                f"expected no cluster at {party}, got one, which would have nothing to do: it is the "
                f"{roles.of[party]} of protocol {job.protocol!r} with these options (docs/clusters.md)"
            )
    for party in roles.owners if name is None else [name]:
        if not job.by_row and party in roles.owners and job.parties[party].table is None:
            raise ConfigError(f"the job names no table of {party}: add parties.{party}.table")
    lead = job.active
    if name not in (None, lead) or job.parties[lead].eval_tables:
        return roles
    if getattr(common, "early_stopping_rounds", None) is not None:
        raise ConfigError(f"early_stopping_rounds needs rows to watch: name parties.{lead}.eval_tables")
    if roles.of[lead] in system.shows_columns and job.parties[lead].table is None:
        raise ConfigError(
            f"the {roles.of[lead]} says which columns and classes there are: expected parties.{lead}.table, examples "
            f"that it does not train on, or parties.{lead}.eval_tables, got neither"
        )
    return roles


def cluster_of(member: Member) -> Cluster | None:
    """Return a party's own cluster; None without one."""
    return None if member.cluster is None else Cluster(member.cluster, member.cluster_workers)


def _check_identities(job: Job, roles: Roles, system: System) -> None:
    """Refuse a helper that is one of the data parties under another name, as far as certificates tell."""
    keys = {name: _public_key(member.certificate) for name, member in job.parties.items() if member.certificate}
    for helper in roles.having(*system.apart):
        same = [name for name, key in keys.items() if name != helper and key == keys.get(helper)]
        if same:
            role = roles.of[helper]
            raise ConfigError(
                f"{helper}, the {role}, has the same key as {', '.join(same)}: who has data must not be the {role}; "
                f"take a third party, or {role} = false"
            )


def _public_key(path: str) -> bytes:
    key = load_pem_x509_certificate(load_certificate(path)).public_key()
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


# ---------------------------------------------------------------- local checks


ROOM = 100 << 20
"""Bytes that are to be free in every folder that a training writes to."""
# seconds by which a file may seem to be of the future
CLOCK_SLACK = 300.0
EXPECTED = "expected"
"""What findings about what a job takes begin with."""
PROBE_TIMEOUT = 5.0  # seconds for a peer to answer


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """What one check found: of what, whether it will do, and what was found or is to be done.

    `public` is what a node sends the other parties of a job: only what the job is expected to take.
    """

    what: str
    fine: bool
    said: str
    public: str = ""

    def __str__(self) -> str:
        """Return the line that a command prints."""
        return f"{'ok' if self.fine else 'WRONG':<6} {self.what}: {self.said}"


def check_own(job: Job, name: str, stated: Sizes | None = None) -> list[CheckFinding]:
    """Return what a party's own files, folders, key and clock are found to be; `stated` are sizes of others' tables."""
    member = job.parties[name]
    found = [_tried("job", partial(_roles, job, name))]
    read: dict[str, Table] = {}
    for what, path in _tables(job, name).items():
        found.append(_tried(what, partial(_table, job, name, path, read, training=True)))
    if member.predict_table is not None:
        found.append(_tried("rows to predict", partial(_table, job, name, member.predict_table, read, training=False)))
    for what, check in (("folders", _folders), ("disk space", _room), ("ledgers", _ledgers), ("key", _key)):
        found.append(_tried(what, partial(check, job, name)))
    for peer, other in job.parties.items():
        if peer != name and other.certificate is not None:
            found.append(_tried(f"certificate of {peer}", partial(_certificate, job, peer)))
    found.append(_tried("clock", partial(_clock, job, name)))
    if found[0].fine and (member.table is None or member.table in read):
        found += _expected(job, name, read.get(str(member.table)), stated)
    return found


def check_cheaply(job: Job, name: str) -> None:
    """Raise the first error of what can be known at once: folders, disk space, and whether tables are there."""
    check_writable(output_folders(job, name))
    _room(job, name)
    _ledgers(job, name)
    for path in _tables(job, name).values():
        check_file(name, path)


def check_file(name: str, path: str) -> None:
    """Raise DataError where a party's table is neither a file nor a folder of Parquet files."""
    check_there(path, name)


def probe(job: Job, name: str, peer: str) -> CheckFinding:
    """Return who answers at a peer's address, over TLS with both parties' certificates; nothing else is sent."""
    what, address = f"{peer} at {job.parties[peer].address}", job.parties[peer].address
    me, certificate = job.parties[name], job.parties[peer].certificate
    if address is None or certificate is None or me.key is None or me.certificate is None:
        return CheckFinding(what, False, f"the job must name its address and certificate, and the key of {name}")
    host, _, port = address.rpartition(":")
    try:
        context = _context(me.certificate, me.key)
        with socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT) as plain:
            plain.settimeout(PROBE_TIMEOUT)
            with context.wrap_socket(plain, server_hostname=peer) as secured:
                shown = secured.getpeercert(binary_form=True) or b""
                pinned = check_certificate(load_certificate(certificate), peer)
                if shown != pinned.public_bytes(Encoding.DER):
                    return CheckFinding(
                        what, False, f"answers with another certificate than {certificate}; {_compare(job, peer)}"
                    )
                # under TLS 1.3 a certificate of ours that is refused shows here
                accepted = secured.recv(1)
    except ssl.SSLError as error:
        return CheckFinding(
            what,
            False,
            f"TLS failed ({error.reason or error}): it pins another certificate of {name}, or is none of us",
        )
    except TreatyError as error:
        return CheckFinding(what, False, str(error))
    except OSError as error:
        return CheckFinding(
            what, False, f"nobody answers ({error.strerror or error}): start it, or see docs/network.md"
        )
    if not accepted:
        return CheckFinding(what, False, f"hung up: it pins another certificate of {name} than {me.certificate}")
    return CheckFinding(what, True, "answers, with the certificate that is pinned")


def peers_of(job: Job, name: str) -> list[str]:
    """Return whom a party is linked with in a training."""
    return job.system.links(job.roles(), job.settings()[0])[name]


def _context(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # `probe` compares the certificate with the pinned one, byte by byte
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(certificate, key)
    return context


def _compare(job: Job, peer: str) -> str:
    return f"pinned for {peer} is {fingerprint(load_certificate(str(job.parties[peer].certificate)))}"


def _tried(what: str, check: Callable[[], str]) -> CheckFinding:
    try:
        return CheckFinding(what, True, check())
    except (TreatyError, OSError) as error:
        return CheckFinding(what, False, str(error))


def _expected(job: Job, name: str, table: Table | None, stated: Sizes | None) -> list[CheckFinding]:
    """Return what the training is expected to take here; `table` is its own one."""
    try:
        expected = expect(job, job.roles(), name, table, stated)
    except ConfigError as error:
        return [CheckFinding(EXPECTED, True, str(error))]
    except TreatyError as error:
        return [CheckFinding(EXPECTED, False, str(error))]
    found = [
        CheckFinding(EXPECTED, True, expected.taken, expected.in_public),
        CheckFinding(f"{EXPECTED} time", True, expected.time_in_words),
        CheckFinding(f"{EXPECTED} bytes", True, expected.bytes_in_words),
        _tried(f"{EXPECTED} memory", partial(check_memory, expected)),
    ]
    (own, common), roles = job.settings(), job.roles()
    if table is not None and name != job.active and own.mode == "safe" and own.ciphers is not None:
        codes = fit_bins(table, common.most_bins).transform(table)
        trees = job.classes if job.classes > 2 else 1
        share = expected_sides(codes, own.ciphers, common, trees, len(roles.owners))
        said = f"sides of splits will tell {job.active} some {share:.2g} of the bins here for certain (docs/sealed.md)"
        found.append(CheckFinding(f"{EXPECTED} sides", True, said, "counts what sides of its splits tell"))
    return found + ([_tried(f"{EXPECTED} store", partial(check_store, job, name, expected))] if expected.kept else [])


def _roles(job: Job, name: str) -> str:
    roles: Roles = check_training(job, name)
    return f"{job.name}, {job.protocol}; {name} is {roles.of[name]}"


def _tables(job: Job, name: str) -> dict[str, str]:
    """Return the tables that a party reads for a training; where rows are split, eval tables are the leader's."""
    member = job.parties[name]
    watched = member.eval_tables if not job.by_row or name == job.active else []
    own = {} if member.table is None else {"table": member.table}
    return own | {f"eval table {k}": path for k, path in enumerate(watched)}


def _table(job: Job, name: str, path: str, read: dict[str, Table], *, training: bool) -> str:
    rows, classes = read_alone(job.table_rules(name), path, training=training)
    read[path] = rows.features
    labels = f"; classes: {', '.join(map(str, classes))}" if classes else ""
    if training:
        labels += "".join(f"; {joined}" for joined in joined_in(job, rows.features))
    return f"{path}: {describe(rows.features.schema, rows.features.n_rows)}{labels}"


def _folders(job: Job, name: str) -> str:
    folders = output_folders(job, name)
    check_writable(folders)
    return f"can be written: {', '.join(map(str, folders))}"


def _room(job: Job, name: str) -> str:
    member, least = job.parties[name], []
    for folder in output_folders(job, name):
        kept = member.audit_gigabytes * 1e9 if str(folder) == member.keep_for_audit else 0.0
        kept += 2e6 * member.record_megabytes if str(folder) == member.record else 0.0
        free, needed = shutil.disk_usage(folder).free, ROOM + kept
        if free < needed:
            raise ConfigError(
                f"expected {needed / 1e9:.1f} GB free in {folder}, got {free / 1e9:.1f}; make room or name "
                "another folder",
                public="its disk is full; it has the details",
            )
        least.append(free)
    return f"{min(least) / 1e9:.1f} GB free"


def _ledgers(job: Job, name: str) -> str:
    part = Path(job.output) / f"{name}.part"
    check_ledgers((part, checkpoint_file(job.checkpoints or job.output, name)), store_of(job, name), name)
    return "as the earlier models know them"


def _key(job: Job, name: str) -> str:
    member = job.parties[name]
    missing = [what for what in ("address", "key", "certificate") if getattr(member, what) is None]
    if missing or member.key is None or member.certificate is None:
        raise ConfigError(f"expected {', '.join(f'parties.{name}.{what}' for what in missing)} in the job, got none")
    identity = load_identity(member.key, member.certificate, name)
    return f"fits the certificate, {_valid(identity.certificate, name)}; {fingerprint(identity.certificate)}"


def _certificate(job: Job, peer: str) -> str:
    certificate = load_certificate(str(job.parties[peer].certificate))
    return f"{_valid(certificate, peer)}; {fingerprint(certificate)}"


def _valid(certificate: bytes, name: str) -> str:
    return f"valid until {check_certificate(certificate, name).not_valid_after_utc:%Y-%m-%d}"


def _clock(job: Job, name: str) -> str:
    now = time.time()
    for path in _files(job, name):
        ahead = path.stat().st_mtime - now if path.exists() else 0.0
        if ahead > CLOCK_SLACK:
            raise ConfigError(f"{path} was changed {ahead / 60:.0f} minutes in the future: set this machine's clock")
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC; certificates are checked by it"


def _files(job: Job, name: str) -> Iterable[Path]:
    member = job.parties[name]
    named = (member.table, member.predict_table, member.key, member.certificate)
    return [Path(path) for path in named if path and not path.startswith("-----BEGIN ")]  # a PEM may stand for its file
