"""Messages of every system changed at random on their way: who receives one refuses it by name, or goes on.

Each case trains a small job between threads and changes one message: a bit, its length, a field (to an extreme, another
type, nothing), an array (its element type, its shape with and without the bytes for it, its numbers), or it comes
twice. The job may end with one of Treaty's own errors, or go on, with another model where a number may as well be true.
What must not happen is any other exception, an end of the process, or no end within `PATIENCE` seconds; `peak` is the
most memory the process has taken, undisturbed and at the end.

An hour on two cores; `--quick`, and `make test-rest`, play a few cases of each system; `--seed` and `--cases` others.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
from sklearn.datasets import load_breast_cancer

import treaty
from data import replace
from treaty.errors import TreatyError
from treaty.messaging.channel import MemoryChannel
from treaty.runs import threads

PATIENCE = 120
TIMEOUT = 30.0  # of a job: seconds a party waits for a message, as that of a peer that was told of less than there is
CASES = 1500
EXTREMES = [0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63), 0.0, -1.0, 1e308, float("nan")]
STRANGE = [*EXTREMES, float("inf"), "", "x", "p1", "a" * 10_000, b"", b"\0" * 64, None, True, [], {}, [[]], {"x": 1}]
DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint32", "uint64", "float32", "float64", "object", ""]


def jobs() -> dict[str, Callable[[], Any]]:
    """Return what trains a small job of each system, and gives its model's predictions."""
    all_x, all_y = load_breast_cancer(return_X_y=True)
    x, y = all_x[:90, :6], all_y[:90]
    by_column = {f"p{k}": part for k, part in enumerate(np.array_split(x, 3, axis=1))}
    by_row = {f"p{k}": (x[k::3], y[k::3]) for k in range(3)}
    of_users = {f"p{k}": (x[k::6], y[k::6]) for k in range(6)}
    small = {"n_estimators": 2, "max_depth": 2, "min_child_samples": 5, "n_jobs": 1}
    short = {"insecure_test_key_bits": 512, "allow_insecure": True}
    exact = {"allow_exact_sums": True}

    def columns(system: Any) -> Callable[[], Any]:
        return lambda: treaty.GBDTClassifier(system, **small).fit(by_column, y).predict_proba(by_column)

    def rows(system: Any, tables: Any) -> Callable[[], Any]:
        return lambda: treaty.GBDTClassifier(system, **small).fit(tables).predict_proba(x)

    def regression(system: Any) -> Callable[[], Any]:
        # smaller batches are refused: labels could be solved for
        more = {f"p{k}": part for k, part in enumerate(np.array_split(all_x[:180, :6], 3, axis=1))}
        given = {"batch_size": 180, "max_iter": 2, "period": 1, "tol": 0.0, "random_state": 3, "n_jobs": 1}
        return lambda: treaty.LogisticRegression(system, **given).fit(more, all_y[:180]).predict_proba(more)

    return {
        "secureboost, lattice": columns(treaty.SecureBoost(encryption="lattice", **exact)),
        "secureboost, ou": columns(treaty.SecureBoost(encryption="ou", **exact, **short)),
        "fedxgboost-smm": columns(treaty.FedXGBoostSMM(**exact)),
        "fedxgboost-smm, dealer": columns(treaty.FedXGBoostSMM(backend="dealer", **exact)),
        "fedxgboost-ldp": columns(treaty.FedXGBoostLDP(mechanism="piecewise", epsilon=8.0)),
        "federboost-vertical": columns(treaty.FederBoostVertical()),
        "federboost-horizontal": rows(treaty.FederBoostHorizontal(), by_row),
        "fedxgb": rows(treaty.FedXGB(edges=2, expose="model"), of_users),
        "quasi-newton, lattice": regression(treaty.QuasiNewton()),
        "quasi-newton, ou": regression(treaty.QuasiNewton(encryption="ou", **short | {"insecure_test_key_bits": 1024})),
    }


@contextmanager
def one_changed(number: int, change: Callable[[bytes], list[bytes]]) -> Iterator[list[int]]:
    """Send the message of that number, over all parties, as what `change` makes of it; yields the running count."""
    send, count = MemoryChannel.send, [0]

    def sending(channel: MemoryChannel, to: str, frame: bytes, timeout: float, *, receipt: bool = False) -> None:
        count[0] += 1
        for one in change(bytes(frame)) if count[0] == number else [frame]:
            send(channel, to, one, timeout)

    MemoryChannel.send = sending  # type: ignore[method-assign]
    try:
        yield count
    finally:
        MemoryChannel.send = send  # type: ignore[method-assign]


def changed(frame: bytes, rng: random.Random) -> list[bytes]:
    """Return what is sent in place of a frame."""
    kind = rng.randrange(10)
    if kind == 0:
        return [frame, frame]
    if kind == 1:
        return [frame[: rng.randrange(len(frame))]]
    if kind == 2:
        at = rng.randrange(8 * len(frame))
        return [frame[: at // 8] + bytes([frame[at // 8] ^ 1 << at % 8]) + frame[at // 8 + 1 :]]
    envelope = msgspec.msgpack.decode(frame)
    whole = envelope if kind == 3 else {"body": envelope["body"]}
    places = list(_places(whole))
    arrays = [(holder, key) for holder, key in places if _is_array(holder[key])]
    if arrays and kind < 7:
        holder, key = rng.choice(arrays)
        holder[key] = _changed_array(holder[key], rng)
    elif places:
        holder, key = rng.choice(places)
        if isinstance(holder, dict) and rng.random() < 0.1:
            del holder[key]
        elif isinstance(holder[key], int) and rng.random() < 0.5:
            holder[key] += rng.choice([-1, 1])
        else:
            holder[key] = rng.choice(STRANGE)
    else:
        envelope["body"] = rng.choice(STRANGE)
    return [msgspec.msgpack.encode(whole if kind == 3 else envelope | whole)]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in nested maps and lists, as what holds it and its key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _is_array(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"dtype", "shape", "data"}


def _changed_array(array: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    dtype, shape, data = array["dtype"], list(array["shape"]), bytes(array["data"])
    kind = rng.randrange(6)
    if kind == 0:
        return {"dtype": rng.choice(DTYPES), "shape": shape, "data": data}
    if kind == 1 and shape:
        shape[rng.randrange(len(shape))] = rng.choice([0, 1, 2**31, 2**40, 2**62])
        return {"dtype": dtype, "shape": shape, "data": data}
    if kind == 2:
        return {"dtype": dtype, "shape": [*shape, 1], "data": data}
    values = np.frombuffer(data, dtype).reshape(shape).copy()
    if kind == 3 and shape:  # shorter or longer, with the bytes for it
        values = values[:-1] if rng.random() < 0.5 else np.concatenate([values, values[:1]])
    elif values.size:
        extreme = rng.choice([0, 1, -1, 127, 2**31 - 1, 2**62, -(2**63)])
        flat = values.reshape(-1)
        chosen = slice(None) if rng.random() < 0.3 else rng.randrange(flat.size)
        flat[chosen] = np.array(extreme).astype(dtype)
        if flat.dtype.kind == "f" and rng.random() < 0.5:
            flat[chosen] = np.nan
    return {"dtype": dtype, "shape": list(values.shape), "data": values.tobytes()}


def play(name: str, first: int, stop: int) -> None:
    """Play cases of a system; print each one's number before it and its end after it, for `main` in another process."""
    job = jobs()[name]
    threads.play = functools.partial(threads.play, timeout=TIMEOUT)
    with one_changed(0, lambda frame: [frame]) as count:
        true = job()
    messages = count[0]
    print("messages", messages, peak(), flush=True)
    for case in range(first, stop):
        rng = random.Random(f"{name} {case}")
        print("begins", case, flush=True)
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            with one_changed(rng.randrange(1, messages + 1), lambda frame, rng=rng: changed(frame, rng)):
                same = np.array_equal(job(), true)
            end = "went on" if same else "went on to another model"
        except TreatyError:
            end = "refused"
        except BaseException as error:
            end = f"foreign: {type(error).__name__}: {error}"[:300].replace("\n", " ")
        print("ended", end, flush=True)
    faulthandler.cancel_dump_traceback_later()
    print("peak", peak(), flush=True)


def peak() -> int:
    """MiB that this process has taken at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def watch(name: str, seed: int, cases: int) -> dict[str, Any]:
    """Play cases in processes of their own: one that hangs or crashes costs one case. Returned is the table's row."""
    ends: Counter[str] = Counter()
    begun, case, bad = time.monotonic(), seed, []
    messages = before = after = 0
    while case < seed + cases:
        process = subprocess.Popen(
            [sys.executable, __file__, "--play", name, "--seed", str(case), "--cases", str(seed + cases - case)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in process.stdout or ():
            word, _, rest = line.strip().partition(" ")
            if word == "begins":
                case = int(rest)
            elif word == "ended":
                ends[rest.partition(":")[0]] += 1
                bad += [f"{case}: {rest}"] if rest.startswith("foreign") else []
                case += 1
            elif word == "messages":
                messages, before = map(int, rest.split())
            elif word == "peak":
                after = max(after, int(rest))
        if process.wait():
            ends["hung or crashed"] += 1
            bad.append(f"{case}: no end, exit code {process.returncode}")
            case += 1
    for line in bad:
        print(f"{name}: {line}", flush=True)
    kinds = ["refused", "went on", "went on to another model", "foreign", "hung or crashed"]
    row = {"system": name, "messages of a job": messages, "cases": cases} | {kind: ends[kind] for kind in kinds}
    return row | {"peak MiB": before, "peak MiB at the end": after, "seconds": f"{time.monotonic() - begun:.0f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="names of systems, or parts of them")
    parser.add_argument("--quick", action="store_true", help="a few cases of each")
    parser.add_argument("--seed", type=int, default=0, help="the first case's number")
    parser.add_argument("--cases", type=int, default=CASES, help="of each system")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play:
        play(given.play, given.seed, given.seed + given.cases)
        return
    rows = []
    for name in jobs():
        if not given.only or any(part in name for part in given.only):
            rows.append(watch(name, given.seed, 5 if given.quick else given.cases))
            print(rows[-1], flush=True)
            if not given.quick and given.cases == CASES:
                replace("mutations", rows[-1:], "system")
    sys.exit(any(row["foreign"] or row["hung or crashed"] for row in rows))


if __name__ == "__main__":
    main()
