"""``treaty serve``: predictions over HTTP."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
import typer
from numpy.typing import NDArray

from treaty.cli.logs import NODE_FILE, LogFile, NodeFile, Verbose, logged, say
from treaty.data.table import Table
from treaty.errors import ConfigError
from treaty.machine.process import cores
from treaty.node.proposals import Proposal
from treaty.node.settings import LOCAL, find_socket, is_loopback, load_settings
from treaty.node.store import Store
from treaty.node.worker import Partners as Asking
from treaty.node.worker import UnknownIds

if TYPE_CHECKING:
    from treaty.serving.service import Partners


def serve(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="The active party's part (NAME.part), the folder of a whole model, or a job of this node: one of "
            "`treaty submit --serve`, if partners are needed, or a training."
        ),
    ] = None,
    listen: Annotated[str, typer.Option(help="Where to listen: HOST:PORT.")] = "127.0.0.1:8000",
    host: Annotated[
        list[str] | None,
        typer.Option(help="A host name to accept besides localhost, such as that of a proxy on this machine."),
    ] = None,
    api_keys: Annotated[Path | None, typer.Option(help="File with the digests of accepted API keys.")] = None,
    new_key: Annotated[
        str | None, typer.Option(metavar="NAME", help="Make a key for NAME, add its digest to --api-keys, and exit.")
    ] = None,
    no_keys: Annotated[
        bool, typer.Option("--no-keys", help="Accept requests without keys, from other machines, too.")
    ] = False,
    fallback: Annotated[
        Literal["own"] | None,
        typer.Option(help="own: predict from own columns alone if partners are needed but absent. Less accurate."),
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="Certificate (PEM): serve HTTPS.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key (PEM).")] = None,
    node: NodeFile = NODE_FILE,
    max_rows: Annotated[int, typer.Option(min=1, help="Maximum rows of a request.")] = 10_000,
    max_bytes: Annotated[int, typer.Option(min=1, help="Maximum bytes of a request.")] = 8 << 20,
    max_requests: Annotated[int, typer.Option(min=1, help="Maximum concurrent requests; others get 503.")] = 64,
    verbose: Verbose = False,
    log_file: LogFile = None,
) -> None:
    """Serve a model's predictions over HTTP: POST /predict, GET /model, /docs, /metrics, /health.

    Without --api-keys, only this machine can send requests. No log contains values of rows. A model with splits of
    other parties cannot predict without them; docs/serving.md lists the options. A signal ends it, with exit code 0.
    """
    if new_key is not None:
        _make_key(new_key, api_keys)
        return
    if model is None:
        raise ConfigError("expected a model to serve: treaty serve MODEL")
    if (certificate is None) != (key is None):
        raise ConfigError("expected --certificate and --key together, or neither, got one of them")
    if api_keys is not None and no_keys:
        raise ConfigError("expected --api-keys or --no-keys, got both")
    try:
        from treaty.serving.app import listen as listen_at
        from treaty.serving.app import make_app, run, split_address
    except ModuleNotFoundError as error:
        raise ConfigError("treaty serve needs FastAPI: pip install 'treaty-learn[web]'") from error
    from treaty.serving.models import load_model
    from treaty.serving.service import PredictionService, RequestLimits, read_keys

    near = is_loopback(split_address(listen)[0])
    if api_keys is None and not no_keys and not near:
        raise ConfigError(
            f"{listen} can be reached from other machines: name --api-keys FILE (--new-key NAME makes one), or add "
            "--no-keys to serve everybody"
        )
    with logged(verbose, log_file):
        limits = RequestLimits(rows=max_rows, body_bytes=max_bytes, under_way=max_requests)
        path, partners = _of_node(model, node) if _names_job(model) else (model, None)
        loaded = load_model(path)
        service = PredictionService(loaded, limits, partners=partners, fallback=fallback == "own", threads=cores())
        keys = None if api_keys is None else read_keys(api_keys)
        service.warm_up()
        if keys is not None and certificate is None and not near:
            _warn("keys and rows travel unencrypted: give --certificate and --key, or put a proxy with TLS in front")
        if service.model.needs and not service.falls_back and partners is None:
            _warn(f"no prediction can be made without {', '.join(service.model.needs)}; /predict will answer 503")
        with listen_at(listen) as socket:

            def announce() -> None:
                of, port = socket.getsockname()[:2]
                at = f"{'http' if certificate is None else 'https'}://{f'[{of}]' if ':' in of else of}:{port}"
                who = "whoever reaches it" if keys is None else f"{len(keys)} keys"
                say(f"serving {service.model.part.party}'s model {service.model.part.model_id[:8]} at {at} to {who}")
                say(f"columns and examples: {at}/docs")

            hosts = LOCAL.union(name.lower() for name in host or ()) if near else None
            run(make_app(service, keys, hosts), socket, certificate=certificate, key=key, ready=announce)


def _names_job(model: Path) -> bool:
    return not model.exists() and re.fullmatch(r"[0-9a-f]{1,64}", str(model)) is not None


def _of_node(job: Path, node: Path) -> tuple[Path, Partners | None]:
    """Return the part that a node's job has left and, for a service, the function that asks the partners."""
    from treaty.serving.service import Refused

    settings = load_settings(node)
    state = Path(settings.folder)
    with Store(state, create=False) as store:
        row = store.job(str(job))
    proposal = msgspec.json.decode(row.proposal, type=Proposal)
    part = state / "models" / (proposal.model or row.id) / f"{settings.name}.part"
    if proposal.verb != "serve":
        return part, None
    asking = Asking(
        lambda: find_socket(state, row.id), [name for name in proposal.described().parties if name != row.submitter]
    )

    def partners(ids: Sequence[str], table: Table) -> NDArray[np.float64]:
        try:
            return asking(ids, table)
        except UnknownIds as error:
            raise Refused(422, str(error)) from None

    return part, partners


def _make_key(name: str, file: Path | None) -> None:
    """Print a new key, and store its digest, or print the line to store."""
    from treaty.serving.service import add_key, new_key

    if file is None:
        made, line = new_key(name)
        say(f"line for the file of keys: {line}")
    else:
        made = add_key(file, name)
        say(f"added {name} to {file}; restart the server to let it in")
    say(f"key (shown once, give it to {name} alone): {made}")


def _warn(text: str) -> None:
    print(f"treaty: {text}", file=sys.stderr)
