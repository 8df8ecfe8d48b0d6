"""A job as one node's process plays it: with its tables, key, addresses and folders in place of names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from treaty.node.keys.cards import Card
from treaty.node.keys.identity import Own
from treaty.node.proposals import Verb, data_sets, name_of
from treaty.node.rules.settings import Settings
from treaty.runs.job import Job


def tables_of(job: Job, verb: Verb, settings: Settings, snapshots: Path | None = None) -> dict[str, str]:
    """Return the files of the data sets that a job reads at this node, by the data sets' names: those it is judged by.

    A query's rows are kept in `snapshots` for the job, so that a later attempt has the same; None: where the newest
    ones are.

    Raises
    ------
    ConfigError
        If the job names a data set that this node does not have.
    """
    named = {of: settings.data_set(of) for of in data_sets(job, settings.name, verb)}
    return {
        of: data_set.path if data_set.sql is None or snapshots is None else str(snapshots / f"{of}.parquet")
        for of, data_set in named.items()
    }


def local_job(
    job: Job,
    job_id: str,
    verb: Verb,
    own: Own,
    cards: Mapping[str, Card],
    settings: Settings,
    tables: Mapping[str, str],
    addresses: Mapping[str, str],
) -> Job:
    """Return the job as this organisation's process is to play it.

    Parameters
    ----------
    cards : mapping of str to Card
        Of all other parties.
    tables : mapping of str to str
        See `tables_of`.
    addresses : mapping of str to str
        Where this party listens, and where it dials each party that it talks to.
    """
    name = own.name
    certificates = {party: card.certificate for party, card in cards.items()} | {name: own.card.certificate}
    parties = {
        party: msgspec.structs.replace(member, address=addresses.get(party), certificate=certificates[party])
        for party, member in job.parties.items()
    }
    given = job.parties[name]
    named = given.table if verb == "train" else given.predict_table
    main = None if named is None else settings.data_set(named)
    mine = parties[name] if main is None else main.member(parties[name], aligned=job.align is not None)
    mine = msgspec.structs.replace(
        mine,
        key=own.identity.key.decode(),
        table=tables[given.table] if verb == "train" and given.table is not None else None,
        eval_tables=[tables[of] for of in given.eval_tables] if verb == "train" else [],
        predict_table=tables[given.predict_table] if verb != "train" and given.predict_table is not None else None,
    )
    if main is not None and verb == "train":
        mine = msgspec.structs.replace(mine, most_recoverable=main.policy.most_recoverable)
    able = job.system.on_clusters(job.settings()[0])
    if main is not None and verb == "train" and job.cast().roles[name] in able:
        mine = msgspec.structs.replace(mine, cluster=main.cluster, cluster_workers=main.cluster_workers)
    store = None if main is None else main.store
    if name == job.active and store is not None and getattr(job.settings()[0], "mechanism", None) == "label_rr":
        kept = str(Path(store) / f"{name}.noisy_labels")  # beside the ledger, so that no later job draws them again
        mine = msgspec.structs.replace(mine, noisy_labels=kept)
    folder = Path(settings.folder)
    return msgspec.structs.replace(
        job,
        name=name_of(job, job_id),
        parties={**parties, name: mine},
        output=str(folder / "models"),
        checkpoints=str(folder / "checkpoints"),
        store=store,
    )
