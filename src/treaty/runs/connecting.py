"""How the parties of a job begin and end together: they compare job files and connect; all keep the model, or none.

A training writes its files under other names (`staged_file`) until all parties have written theirs. Only then each
party gives its files their names. Files of an earlier training are kept, under the date when it ended.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from typing import TypeVar

from treaty.errors import ConfigError, PeerLost
from treaty.messaging.certificates import load_certificate, load_identity
from treaty.messaging.messages import Message, leaks
from treaty.messaging.party import Party, run_role
from treaty.messaging.tls_channel import Peer, TlsChannel
from treaty.runs.job import Job
from treaty.systems.options import public_terms
from treaty.systems.system import Phase, Roles, Service
from treaty.version import __version__

logger = getLogger(__name__)
Result = TypeVar("Result")

# seconds the parties wait for each other to start
CONNECT_TIMEOUT = 120.0
# characters; of a longer term a digest is compared
LONGEST_TERM = 4000
# round of the messages that end a training: after the rounds of any training
LAST_ROUND = 1 << 40


def shared_terms(job: Job, name: str, roles: Roles, verb: str) -> dict[str, str]:
    """Return what a party's copy of a job must have in common with all other copies, by name, as text.

    `verb` is the command that the party was started with. Two parties compare the terms that both have: if columns are
    split, only owners have eval tables.
    """
    align = job.align
    rules = "none"
    if align is not None:
        rules = f"on_duplicate {align.on_duplicate!r}, normalise {list(align.normalise)}"
        rules += f", text {str(align.text).lower()}"
    places = {who: " of ".join(filter(None, (member.role, member.edge))) for who, member in job.parties.items()}
    terms = {
        "version of Treaty": __version__,
        "command": f"treaty {verb}",
        "name": repr(job.name),
        "protocol": repr(job.protocol),
        "active": repr(job.active),
        "parties": ", ".join(f"{who} ({place})" if place else who for who, place in places.items()),
        "task": repr(job.task),
        "classes": str(job.classes),
        "weight": "named" if job.weight else "not named",
        "base_margin": "named" if job.base_margin else "not named",
        "from_model": "named" if job.from_model else "not named",
        "align": rules,
        "align.psi": "none" if align is None else repr(align.psi),
        "align.log": "none" if align is None or align.log is None else "kept",
    }
    if job.by_row:
        terms["label"] = repr(job.label)
    elif name in roles.owners and verb == "train":
        terms["eval_tables"] = str(len(job.parties[name].eval_tables))
    terms |= {option: repr(value) for option, value in public_terms(*job.settings()).items() if option != "protocol"}
    for term, value in terms.items():
        if len(value) > LONGEST_TERM:
            digest = hashlib.sha256(value.encode()).hexdigest()
            terms[term] = f"{value[:100]}... {len(value)} characters, SHA-256 {digest}"
    return terms


class Waiting:
    """Counts how long a party waits for each peer until all are connected, and reports it as a phase."""

    def __init__(self, job: Job, party: Party, phase: Phase | None) -> None:
        self._job, self._party, self._phase = job, party, phase
        self._last = time.monotonic()

    def __call__(self, missing: Collection[str]) -> None:
        """Note the peers that are missing now; none, once all are connected."""
        # a peer that stops while this party still dials it sends the reason, and then does not listen any more
        self._party.heed()
        now = time.monotonic()
        for peer in missing:
            self._party.waited[peer] += now - self._last
        self._last = now
        if self._phase is None:
            return
        first = [f"{peer} at {self._job.parties[peer].address}" for peer in list(missing)[:3]]
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        title = f"waiting for {', '.join(first)}{more}" if missing else "connected"
        total = len(self._party.peers)
        self._phase(title, total - len(missing), total)


def connected(
    job: Job,
    name: str,
    roles: Roles,
    verb: str,
    role: Callable[[Party], Result],
    *,
    phase: Phase | None = None,
    service: Service | None = None,
) -> Result:
    """Connect to the peers that the system links a party with, run its role, and disconnect in order.

    All parties must have been started with the command `verb`: "train", "predict", "explain" or "serve". `phase` is
    called with the peers that the party waits for. `service` is the prediction for parties without the model, if that
    is played instead of the system's own programs.
    """
    played, own = service or job.system, job.settings()[0]
    peers = played.links(roles, own)[name]
    vouched = job.system.vouched(roles, own, name) if verb == "train" or own.hides_decisions else []
    channel = _channel(job, name, peers, vouched, shared_terms(job, name, roles, verb))
    may_be_absent = [peer for peer in played.may_be_absent(roles, own) if name != peer]
    try:
        # a party that is connected waits for messages while others may still wait for connections
        timeout = max(job.timeout, 2.0 * (job.wait or 0.0))
        party = Party(name, job.name, job.system.name, channel, peers, timeout=timeout)
        party.may_lose(may_be_absent)
        waited = Waiting(job, party, phase)

        # within `run_role`, which tells the other peers if one cannot be reached
        def connect_and_play() -> Result:
            try:
                # half of the timeout at most, or the others give up first
                wait = job.wait or min(CONNECT_TIMEOUT, job.timeout / 2)
                channel.connect(timeout=wait, may_lose=may_be_absent, waiting=waited)
            except PeerLost:
                # a peer that stopped the job has sent the reason before it disconnected
                party.heed()
                raise
            waited(())
            return role(party)

        return run_role(party, connect_and_play)
    finally:
        channel.close()


def listening(job: Job, name: str) -> TlsChannel:
    """Return a party's end as in a training, which listens but connects to no peer."""
    roles, own, system = job.roles(), job.settings()[0], job.system
    return _channel(job, name, system.links(roles, own)[name], system.vouched(roles, own, name), {})


def _channel(job: Job, name: str, peers: Sequence[str], vouched: Sequence[str], terms: Mapping[str, str]) -> TlsChannel:
    """Return the party's end, which listens; ConfigError if the job lacks an address, key or certificate."""
    me = job.parties[name]
    needed = [(who, "address") for who in (name, *peers)] + [(name, "key")]
    needed += [(who, "certificate") for who in dict.fromkeys((name, *peers, *vouched))]
    missing = [f"parties.{who}.{what}" for who, what in needed if getattr(job.parties[who], what) is None]
    if missing or me.key is None or me.certificate is None or me.address is None:
        raise ConfigError(f"to run as {name} alone the job must name {', '.join(missing)}")
    pinned = {
        peer: Peer(str(job.parties[peer].address), load_certificate(str(job.parties[peer].certificate)))
        for peer in peers
    }
    identity = load_identity(me.key, me.certificate, name)
    return TlsChannel(
        name, me.listen or me.address, key=identity.key, certificate=identity.certificate, peers=pinned,
        reconnect=job.reconnect, inbox_limit=job.inbox_limit << 20, terms=terms, proxy=me.proxy,
        # a unix socket is a node's: its jobs' names are unique, for they contain their ids
        job=job.name if me.address.startswith("unix:") else "",
    )  # fmt: skip


@leaks("that the sender has written its part of the model", "control")
class PartKept(Message):
    """The sender has written its part of the model and its report."""


@leaks("that every party has written its part", "control")
class AllKept(Message):
    """Everybody with a part of the model has written it."""


def wait_until_all_kept(
    party: Party, roles: Roles, owners: list[str], may_lose: Iterable[str], patience: float, keep: Callable[[], None]
) -> None:
    """Return once every party with a part of the model has written it; call it when this one has written its own.

    `keep` puts this party's files in place. The active party waits for all, keeps its own, and then notifies all: no
    party hears of a model that the active party may still lose. Edge servers notify their users. A party that cannot
    write its part stops the job, as with any error, and all end with that error. Only a connection lost between the two
    messages can leave a party in doubt: it ends with an error although all parties have their parts.

    `owners` are the parties with a part, or with other files to keep until then; the active party can do without those
    that it `may_lose`. A user must take the message of its edge server within `patience` seconds.
    """
    if party.name not in owners:
        keep()
        return
    party.round = LAST_ROUND
    if party.name in roles.edges:
        party.receive(roles.edges[party.name], AllKept)
        keep()
        return
    if party.name != roles.active:
        # it may have come although the connection broke: then the answer has come, too, before the other end left
        with suppress(PeerLost):
            party.send(roles.active, PartKept())
        party.receive(roles.active, AllKept)
        keep()
        users = [user for user in party.peers if roles.edges.get(user) == party.name]
        party.send_each({user: AllKept() for user in users if user in owners}, timeout=patience)
        return
    # the active party: first all parts it insists on, then those that came in time, then its own, and the news to all
    others = [peer for peer in owners if peer in party.peers]
    expendable = set(may_lose)
    for peer in others:
        if peer not in expendable:
            party.receive(peer, PartKept)
    optional = [peer for peer in others if peer in expendable]
    reached = party.gather(optional, PartKept) if optional else {}
    keep()
    party.send_each({peer: AllKept() for peer in others if peer in reached or peer not in expendable})


def output_folders(job: Job, name: str) -> list[Path]:
    """Return the folders that a party's training writes to, as far as the job names them.

    A table's own folder, the default for files of later jobs, need not be writable: few systems write there.
    """
    member = job.parties[name]
    named = [job.output, job.checkpoints, job.store if member.table else None, member.keep_for_audit, member.record]
    named.append(None if job.align is None else job.align.log)
    named.append(None if member.noisy_labels is None else str(Path(member.noisy_labels).parent))
    return [Path(folder) for folder in dict.fromkeys(named) if folder]


def check_writable(folders: Iterable[Path]) -> None:
    """Make folders that do not exist, and try to write in all.

    The ConfigError names the folder; other parties only learn that files cannot be written.
    """
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".treaty-") as trial:
                trial.write(bytes(1 << 12))
                trial.flush()
        except OSError as error:
            wrong = f"{error.strerror}; make room, change its permissions or name another folder"
            if isinstance(error, FileExistsError | NotADirectoryError):
                wrong = "it, or a folder above it, is a file; move it, or name another folder"
            public = "its files cannot be written; it has the details"
            raise ConfigError(f"cannot write in {folder}: {wrong}", public=public) from None


def staged_file(path: Path) -> Path:
    """Return the name of a file of a finished training until all parties have written theirs."""
    return path.with_suffix(".staged" if path.suffix == ".part" else f".staged{path.suffix}")


def put_in_place(name: str, files: Iterable[Path]) -> None:
    """Give a party's staged files their names; add the date when it ended to the names of an earlier training's files.

    `bank.part` becomes `bank.2026-11-23T210538Z.part`, and its other files likewise.
    """
    files = list(files)
    staged = [path for path in files if staged_file(path).exists()]
    earlier = [path for path in files if path.exists()] if staged else []
    if earlier:
        ended = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime(earlier[0].stat().st_mtime))
        kept = [path.with_name(f"{name}.{ended}{path.name.removeprefix(name)}") for path in earlier]
        for path, dated in zip(earlier, kept, strict=True):
            # a second name, not a move: a file that will be replaced exists at any moment
            try:
                if path not in staged or dated.exists():
                    path.replace(dated)
                else:
                    os.link(path, dated)
            except OSError:  # a file system without links
                path.replace(dated)
        logger.warning("%s: an earlier training's files are kept: %s", name, ", ".join(map(str, kept)))
    for path in staged:
        staged_file(path).replace(path)
