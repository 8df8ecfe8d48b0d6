"""What one party can find out alone before a job begins: whether its own part will work, and what the job takes."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from treaty.data.binning import fit_bins
from treaty.data.reading import check_there
from treaty.data.table import Table
from treaty.errors import ConfigError, TreatyError
from treaty.machine.process import cores
from treaty.messaging.certificates import check_certificate, fingerprint, load_certificate, load_identity
from treaty.models.checkpoints import check_ledgers, checkpoint_file
from treaty.models.linear import preparation_of
from treaty.runs.connecting import check_writable, output_folders
from treaty.runs.job import Job, Member, store_of
from treaty.runs.job_files import check_training
from treaty.runs.rows import joined_in
from treaty.runs.table_files import describe, read_alone
from treaty.systems.alignment.leakage import add_alignment
from treaty.systems.expected import Expected, Shape, slowness
from treaty.systems.pooled.options import BoostingOptions
from treaty.systems.system import Roles
from treaty.systems.vertical.cipher_choice import in_words, rounded
from treaty.systems.vertical.exact_sums import expected_sides

# ---------------------------------------------------------------- what a job is expected to take

# taken for what a party cannot know alone: rows, if it has no table, and columns of each other party
ROWS, COLUMNS = 10_000, 10
# columns of each other party, and their most bins, at the ends of a range of bytes
LEAST, MOST = (3, 16), (30, 256)
# seconds in which processes start, load what is compiled, and write results
START = 5.0
# bytes of a process with its libraries, and of a value of a table while it is read, checked and binned
PROCESS, CELL = 370e6, 26.0
# bytes a second of the network that the time of transfer is stated for: 100 Mbit/s
LINK = 100e6 / 8

# columns as they are trained on, and bins of all; under sealed sums, columns split by halves of categories, and these
Size = tuple[int, int, int, int]
# by party, as far as they have stated them
Sizes = Mapping[str, Size]
_STATED = re.compile(r"about (\d{1,6}) columns in (\d{1,8}) bins(?: \((\d{1,6}) columns of (\d{1,8}) categories\))?")


def stated_sizes(text: str) -> Size | None:
    """Return the size of another party's table from its statement (`Expectation.in_public`); None if it has none."""
    found = _STATED.search(text)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3] or 0), int(found[4] or 0))


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is expected of a job at one party: for which sizes (`taken`), in seconds and bytes.

    `in_all` are the bytes between all parties, and `span` their range if other parties have few or many columns. `own`
    is the size of the party's own table, `shape` those of all.
    """

    taken: str
    shape: Shape
    seconds: float
    sent: float
    received: float
    in_all: float
    memory: float
    kept: float
    own: Size | None = None
    span: tuple[float, float] | None = None

    def in_public(self) -> str:
        """Return what the other parties are sent, to one digit: more would reveal the number of rows."""
        seconds, nbytes, memory = (float(f"{of:.0e}") for of in (self.seconds, self.sent + self.received, self.memory))
        text = f"expects about {in_words(seconds)}, {_mb(nbytes)} sent and received, {_gb(memory)} of memory"
        if self.own is None or not self.own[0]:
            return text
        # of bins and categories, two digits
        sizes = [int(float(f"{of:.{after}e}")) for of, after in zip(self.own, (0, 1, 0, 1), strict=True)]
        text += f", for about {sizes[0]} columns in {sizes[1]} bins"
        return text + (f" ({sizes[2]} columns of {sizes[3]} categories)" if sizes[2] else "")

    def findings(self) -> list[CheckFinding]:
        """Return time and bytes in words, after the sizes they are for."""
        network = (self.sent + self.received) / LINK
        seconds = (
            f"about {in_words(self.seconds)} within a factor of 3, if all machines are like this one; what is sent "
            f"takes {in_words(network)} more at 100 Mbit/s"
        )
        nbytes = f"{_mb(self.sent)} sent and {_mb(self.received)} received here, {_mb(self.in_all)} in all"
        if self.span is not None:
            least, most = map(_mb, self.span)
            nbytes += (
                f"; from {least}, where each other party has {LEAST[0]} columns of {LEAST[1]} bins, to {most} for "
                f"{MOST[0]} columns of as many bins as there may be"
            )
        said = {EXPECTED: self.taken, f"{EXPECTED} time": seconds, f"{EXPECTED} bytes": nbytes}
        first = CheckFinding(EXPECTED, True, said.pop(EXPECTED), self.in_public(), self.shape)
        return [first, *(CheckFinding(what, True, text) for what, text in said.items())]


def expect(
    job: Job, roles: Roles, name: str, table: Table | None, stated: Sizes | None = None, watched: int = 0
) -> Expectation:
    """Return what a training is expected to take at a party with this training table (None: it has none).

    `watched` are the rows of its eval tables. `stated` are sizes of other parties' tables; the rest are assumed to be
    of usual size. Raises ConfigError, or CryptoError, if there is no formula, or if the job is too large for its
    cipher.
    """
    stated, (own, common) = stated or {}, job.settings()
    shape, taken = _shape(job, roles, name, table, common, stated)
    shape = replace(shape, watched=watched, weighted=job.weight is not None)

    def taking(shape: Shape) -> tuple[Expected, float, float]:
        found = job.system.expected(roles, own, common, shape)
        if job.align is not None:
            add_alignment(found, roles, job.align.psi, shape)
        sent = sum(nbytes for (sender, _), nbytes in found.sent.items() if sender == name)
        return found, sent, sum(nbytes for (_, receiver), nbytes in found.sent.items() if receiver == name)

    found, sent, received = taking(shape)
    span: tuple[float, float] | None = None
    apart = not job.by_row and table is not None
    if apart:
        ends = []
        unknown = [owner for owner in shape.columns if owner != name and owner not in stated]
        for columns, bins in (LEAST, MOST):
            slots = dict.fromkeys(unknown, _slots(columns, common, bins))
            sized = replace(
                shape, columns={**shape.columns, **dict.fromkeys(unknown, columns)}, slots={**shape.slots, **slots}
            )
            ends.append(taking(sized))
        here = [sent + received for _, sent, received in ends]
        # a range is worth a word only if what this party sends and receives depends on others' columns
        if here[1] > 1.01 * here[0]:
            span = sum(ends[0][0].sent.values()), sum(ends[1][0].sent.values())
    values = 0 if table is None else table.n_rows * (2 + (len(table.schema.names) if table.folder is None else 0))
    return Expectation(
        taken, shape, START + found.seconds * slowness(), sent, received, sum(found.sent.values()),
        PROCESS + CELL * values + found.memory.get(name, 0.0), found.kept.get(name, 0.0),
        (shape.columns[name], shape.slots[name], *shape.halved[name]) if apart and name in shape.slots else None, span,
    )  # fmt: skip


def _shape(job: Job, roles: Roles, name: str, table: Table | None, common: Any, stated: Sizes) -> tuple[Shape, str]:
    """Return the sizes of a job's tables as far as a party knows them, and in words what it assumes of the rest."""
    rows, columns, slots, halved = ROWS, COLUMNS, _slots(COLUMNS, common), (0, 0)
    ciphers = job.settings()[0].ciphers
    if table is not None:
        rows, names = table.n_rows, table.schema.names
        if isinstance(common, BoostingOptions):
            bins = fit_bins(table, common.most_bins, 1, max_categories=common.most_categories)
            columns, slots = len(names), int(bins.offsets[-1])
            if ciphers is not None and ciphers.sealed:
                by_halves = bins.n_bins[table.schema.categorical & (bins.n_bins >= common.onehot_below)]
                halved = len(by_halves), int(by_halves.sum())
        else:
            regression = common.table == "regression"
            columns = slots = len(preparation_of(table).names(names, table.schema.categories) if regression else names)
    own, usual = (columns, slots, *halved), (COLUMNS, _slots(COLUMNS, common), 0, 0)
    others = own if job.by_row or table is None else usual
    sizes = {owner: own if owner == name else stated.get(owner, others) for owner in roles.owners}
    shape = Shape(
        rows=rows, columns={owner: size[0] for owner, size in sizes.items()},
        slots={owner: size[1] for owner, size in sizes.items()}, classes=job.classes,
        threads=cores(job.n_jobs), halved={owner: size[2:] for owner, size in sizes.items()},
    )  # fmt: skip
    if table is None:
        return shape, f"assumed for each party with a table: {rows:,} rows, {columns} columns"
    if job.by_row:
        return shape, f"{rows:,} rows and {columns} columns here; assumed for each other party: as many rows"
    text = [f"{rows:,} rows and {columns} columns here"]
    text += [f"as {owner} says, about {of[0]} columns in {of[1]} bins there" for owner, of in stated.items()]
    if not stated.keys() >= sizes.keys() - {name}:
        text.append(f"assumed for each {'further' if stated else 'other'} party: {COLUMNS} columns of numbers")
    return shape, "; ".join(text) + (", all of its rows in common" if job.align is not None else "")


def _slots(columns: int, common: Any, bins: int = 256) -> int:
    return columns * (min(bins, common.most_bins) + 1) if isinstance(common, BoostingOptions) else columns


def check_memory(expected: Expectation) -> str:
    """Return how much memory a job takes; raise ConfigError if there is less."""
    free, text = free_memory(), f"about {_gb(expected.memory)} here"
    if free is None:
        return text
    if expected.memory > free:
        raise ConfigError(
            f"{text}, and {_gb(free)} are free: end other programs, take a machine with more, or fewer rows, columns "
            "or bins (max_bin)"
        )
    return f"{text}, of {_gb(free)} free"


def check_store(job: Job, name: str, expected: Expectation) -> str:
    """Return how much of its store a job takes; raise ConfigError if there is less room."""
    store = store_of(job, name)
    folder = next((of for of in (Path(str(store)), *Path(str(store)).absolute().parents) if of.exists()), None)
    if store is None or folder is None:
        return "nothing is kept for later jobs"
    text, free = f"{_mb(expected.kept)} kept for later jobs in {store}", shutil.disk_usage(folder).free
    if expected.kept > free:
        raise ConfigError(f"{text}, and {_mb(free)} are free: make room, or name another folder as store")
    return text


def free_memory() -> float | None:
    """Return bytes of memory that a process may still take; None if the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    # the limit of a container
    try:
        most, used = (Path(f"/sys/fs/cgroup/memory.{what}").read_text().strip() for what in ("max", "current"))
        return free if most == "max" else min(free, float(most) - float(used))
    except (OSError, ValueError):
        return free


def _mb(nbytes: float) -> str:
    return f"{rounded(nbytes / 1e6)} MB" if nbytes >= 1e5 else f"{rounded(nbytes / 1e3)} kB"


def _gb(nbytes: float) -> str:
    return f"{rounded(nbytes / 1e9)} GB"


# ---------------------------------------------------------------- a party's own files, folders, key and clock

# bytes that must be free in every folder that a training writes to
ROOM = 100 << 20
# seconds by which the time of a file may be in the future
CLOCK_SLACK = 300.0
# the first word of each finding about what a job takes
EXPECTED = "expected"


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """What one check found: of `what`, whether it is `fine`, and what was found or should be done.

    `public` is what a node sends the other parties of a job: only what the job is expected to take. `shape` are the
    sizes that this is about.
    """

    what: str
    fine: bool
    said: str
    public: str = ""
    shape: Shape | None = None

    def __str__(self) -> str:
        """Return the line that a command prints."""
        return f"{'ok' if self.fine else 'WRONG':<6} {self.what}: {self.said}"


def check_own(job: Job, name: str, stated: Sizes | None = None) -> list[CheckFinding]:
    """Check a party's own job, files, folders, key and clock; `stated` are sizes of others' tables."""
    member, read = job.parties[name], dict[str, Table]()

    def roles() -> str:
        return f"{job.name}, {job.protocol}; {name} is {check_training(job, name).of[name]}"

    def table(path: str, training: bool) -> str:
        rows, classes = read_alone(job.table_rules(name), path, training=training)
        read[path] = features = rows.features
        text = f"{path}: {describe(features.schema, features.n_rows)}"
        joined = joined_in(job.settings()[1], features) if training else []
        return "; ".join([text, *([f"classes: {', '.join(map(str, classes))}"] if classes else []), *joined])

    def folders() -> str:
        named = output_folders(job, name)
        check_writable(named)
        return f"can be written: {', '.join(map(str, named))}"

    def key() -> str:
        missing = [what for what in ("address", "key", "certificate") if getattr(member, what) is None]
        if missing or member.key is None or member.certificate is None:
            raise ConfigError(
                f"expected {', '.join(f'parties.{name}.{what}' for what in missing)} in the job, got none"
            )
        return f"fits the certificate, {_valid(load_identity(member.key, member.certificate, name).certificate, name)}"

    def certificate(path: str, peer: str) -> str:
        return _valid(load_certificate(path), peer)

    found = [_tried("job", roles)]
    found += [_tried(what, partial(table, path, True)) for what, path in _tables(job, name).items()]
    if member.predict_table is not None:
        found.append(_tried("rows to predict", partial(table, member.predict_table, False)))
    found += [_tried("folders", folders), _tried("disk space", partial(_room, job, name))]
    found += [_tried("ledgers", partial(_ledgers, job, name)), _tried("key", key)]
    for peer, other in job.parties.items():
        if peer != name and other.certificate is not None:
            found.append(_tried(f"certificate of {peer}", partial(certificate, other.certificate, peer)))
    found.append(_tried("clock", partial(_clock, member)))
    if found[0].fine and (member.table is None or member.table in read):
        watched = sum(read[path].n_rows for path in member.eval_tables if path in read)
        found += _expected(job, name, read.get(str(member.table)), stated, watched)
    return found


def check_cheaply(job: Job, name: str) -> None:
    """Raise the first error of the checks that take no time: folders, disk space, and whether tables exist."""
    check_writable(output_folders(job, name))
    _room(job, name)
    _ledgers(job, name)
    for path in _tables(job, name).values():
        check_there(path, name)


def _tried(what: str, check: Callable[[], str]) -> CheckFinding:
    try:
        return CheckFinding(what, True, check())
    except (TreatyError, OSError) as error:
        return CheckFinding(what, False, str(error))


def _tables(job: Job, name: str) -> dict[str, str]:
    """Return the tables that a party reads for a training; if rows are split, eval tables are the leader's."""
    member = job.parties[name]
    watched = member.eval_tables if not job.by_row or name == job.active else []
    own = {} if member.table is None else {"table": member.table}
    return own | {f"eval table {k}": path for k, path in enumerate(watched)}


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
    parts = Path(job.output) / f"{name}.part", checkpoint_file(job.checkpoints or job.output, name)
    check_ledgers(parts, store_of(job, name), name)
    return "agree with the earlier models"


def _valid(certificate: bytes, name: str) -> str:
    ends = check_certificate(certificate, name).not_valid_after_utc
    return f"valid until {ends:%Y-%m-%d}; {fingerprint(certificate)}"


def _clock(member: Member) -> str:
    now = time.time()
    for named in (member.table, member.predict_table, member.key, member.certificate):
        # a PEM may stand in place of its file
        path = None if not named or named.startswith("-----BEGIN ") else Path(named)
        ahead = path.stat().st_mtime - now if path is not None and path.exists() else 0.0
        if ahead > CLOCK_SLACK:
            raise ConfigError(f"{path} was changed {ahead / 60:.0f} minutes in the future: set this machine's clock")
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC; compared with the dates of certificates"


def _expected(job: Job, name: str, table: Table | None, stated: Sizes | None, watched: int) -> list[CheckFinding]:
    """Return what the training is expected to take here; `table` is the party's own, `watched` rows of eval tables."""
    roles, (own, common) = job.roles(), job.settings()
    try:
        expected = expect(job, roles, name, table, stated, watched)
    except TreatyError as error:
        # without a formula nothing is wrong
        return [CheckFinding(EXPECTED, isinstance(error, ConfigError), str(error))]
    found = [*expected.findings(), _tried(f"{EXPECTED} memory", partial(check_memory, expected))]
    told = own.mode == "safe" and own.ciphers is not None and not own.hides_rows
    if told and table is not None and name != job.active:
        codes = fit_bins(table, common.most_bins, max_categories=common.most_categories).transform(table)
        trees = (job.classes if job.classes > 2 else 1) * common.num_parallel_tree
        goes_on = job.from_model is not None
        share = expected_sides(codes, own.ciphers, common, trees, len(roles.owners), decided=goes_on)
        said = f"sides of splits will show {job.active} about {share:.2g} of the bins here for certain (docs/sealed.md)"
        found.append(CheckFinding(f"{EXPECTED} sides", True, said, "counts what sides of its splits show"))
    return found + ([_tried(f"{EXPECTED} store", partial(check_store, job, name, expected))] if expected.kept else [])
