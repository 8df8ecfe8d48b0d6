"""Who answers at a peer's address, how fast the link with it is, and what a tree takes over such links."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding

from treaty.errors import ConfigError, TreatyError
from treaty.messaging.certificates import check_certificate, fingerprint, load_certificate, load_identity
from treaty.messaging.tls import HANDSHAKE_TIMEOUT, dial, measured, tls_context
from treaty.runs.job import Job, Member
from treaty.runs.local_checks import EXPECTED, CheckFinding
from treaty.systems.expected import slowness
from treaty.systems.vertical.cipher_choice import Link, rounded
from treaty.systems.vertical.expected_sums import seconds_of_a_tree
from treaty.systems.vertical.hidden_cost import seconds_of_a_hidden_tree

# seconds for a peer to answer
PROBE_TIMEOUT = 5.0
# what takes less of the seconds of each kind
_LESS = (
    "computing. Fewer columns, a lower max_bin or max_depth, or more cores reduce it",
    "waiting for messages. A nearer site or a lower max_depth reduces it",
    "sending. A faster line, fewer columns or a lower max_bin reduces it",
)
# how sums may be hidden, and what that shows in training
_KINDS = {
    "open": ("open sums", "show {active} the sums of every bin in every node (docs/secureboost.md)"),
    "sealed": ("sealed sums", "show {active} only the best splits, and which rows they send left"),
    "hidden": ("hidden rows", "show nobody which rows are in a node (docs/hidden.md)"),
    "ou": ("Okamoto-Uchiyama", "shows the same as open sums, and shows the other parties which rows are in a node"),
}


def probe(parties: Mapping[str, Member], name: str, peer: str, first: bytes = b"") -> tuple[CheckFinding, Link | None]:
    """Find out who answers at a peer's address, over TLS with both parties' certificates, and measure the link.

    No data is sent. `first` is sent in clear before TLS; see `node.door`.
    """
    me, other = parties[name], parties[peer]
    what = f"{peer} at {other.address}"
    wrong = partial(CheckFinding, what, False)
    if other.address is None or other.certificate is None or me.key is None or me.certificate is None:
        return wrong(f"the job must name its address and certificate, and the key of {name}"), None
    line, deadline = None, time.monotonic() + PROBE_TIMEOUT
    try:
        pinned = load_certificate(other.certificate)
        expected = check_certificate(pinned, peer).public_bytes(Encoding.DER)
        context = tls_context(load_identity(me.key, me.certificate, name), [pinned], listens=False)
        line = dial(other.address, context, expected, deadline, me.proxy, first)
        # under TLS 1.3, the peer's refusal of our certificate shows only here
        round_trip, byte = measured(line, time.monotonic() + HANDSHAKE_TIMEOUT)
    except ssl.SSLCertVerificationError:
        return wrong(f"answers with another certificate than the one pinned, {_print(other)}"), None
    except ssl.SSLError as error:
        said = f"TLS failed ({error.reason or error}): it pins another certificate of {name}, or is none of us"
        return wrong(said), None
    except TreatyError as error:
        return wrong(str(error)), None
    except OSError as error:
        if line is not None and not isinstance(error, TimeoutError):
            why = f"it pins another certificate of {name} than {_print(me)}, or has another version of Treaty"
            return wrong(f"does not answer as a party does ({error}): {why}"), None
        return wrong(f"no answer ({error.strerror or error}): start it, or see docs/network.md"), None
    finally:
        if line is not None:
            line.close()
    # no link counts as faster than 10 GB/s
    link = Link(round_trip / 2, max(1e-10, byte))
    said = f"{rounded(1e3 * round_trip)} ms there and back, {rounded(8e-6 / link.byte)} Mbit/s"
    return CheckFinding(what, True, f"answers, with the certificate that is pinned; {said}"), link


def over_links(job: Job, found: Iterable[CheckFinding], links: Mapping[str, Link]) -> list[CheckFinding]:
    """Return what a tree is expected to take over a party's links, by what hides its sums, and what takes less.

    Sizes are those of `found`, the findings of `check_own`. Other links are taken to be like these. Nothing is returned
    for systems without a choice of ciphers.
    """
    own, common = job.settings()
    shape = next((finding.shape for finding in found if finding.shape is not None), None)
    if not links or shape is None or own.ciphers is None or own.ciphers.blind or own.mode != "safe":
        return []
    slowest = Link(max(link.step for link in links.values()), max(link.byte for link in links.values()))
    of_all = {peer: links.get(peer, slowest) for peer in job.roles().owners if peer != job.active}
    slow, said, shown, advice = slowness(), [], [], ""
    # Paillier is none of them
    mine = "sealed" if own.ciphers.sealed else "open" if own.ciphers.may_hint else own.ciphers.cipher
    mine = "hidden" if own.hides_rows else mine
    kinds = seconds_of_a_tree(common, shape, of_all)
    if _may_hide_rows(own, common):
        kinds["hidden"] = seconds_of_a_hidden_tree(common, shape, job.active, of_all)
    for kind, (computing, *others) in kinds.items():
        parts = slow * computing, *others
        named, shows = _KINDS[kind]
        shown.append(f"{named} {shows.format(active=job.active)}")
        said.append(f"{named}{' (this job)' if kind == mine else ''} {sum(parts):.2g}")
        if kind == mine:
            advice = f"{max(parts) / sum(parts):.0%} of a tree's time in this job is {_LESS[parts.index(max(parts))]}. "
    text = f"{', '.join(said)}; within a factor of 3, with the columns above"
    advice += f"In training, {', '.join(shown)}"
    return [CheckFinding(f"{EXPECTED} {what}", True, of) for what, of in (("seconds a tree", text), ("advice", advice))]


def _may_hide_rows(own: Any, common: Any) -> bool:
    """Return whether a job's options allow ``membership="hidden"``."""
    if not hasattr(own, "membership"):
        return False
    with suppress(ConfigError):
        type(own)(membership="hidden").check(common)
        return True
    return False


def _print(member: Member) -> str:
    return fingerprint(load_certificate(str(member.certificate)))
