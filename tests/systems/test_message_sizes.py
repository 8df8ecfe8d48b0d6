"""No number in a message, and no message, takes memory that nobody agreed to: peers that claim more are refused."""

from __future__ import annotations

import importlib
import pkgutil
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

import treaty
from treaty.errors import PeerProtocolError
from treaty.messaging.channel import memory_channels
from treaty.messaging.exchanges import Terms
from treaty.messaging.messages import (
    LISTED_BYTES,
    MOST_COLUMNS,
    MOST_SLOTS,
    PLAIN_BYTES,
    Array,
    Message,
    decode_body,
    encode,
    largest_body,
)
from treaty.messaging.party import Party
from treaty.systems.alignment.common_rows import JoinLayout, arranged
from treaty.systems.federboost_vertical.buckets import Buckets, NoisyColumns
from treaty.systems.fedxgb.messages import Sum, Task
from treaty.systems.fedxgb.shares import Dealer, WantedLeaves, WantedLevel, WantedRows
from treaty.systems.fedxgboost_ldp.scoring import ColumnCount
from treaty.systems.fedxgboost_smm.fedxgboost_smm import DealOrder
from treaty.systems.fedxgboost_smm.node_products import NodeRows, named_rows
from treaty.systems.horizontal.rows import RowsDescription
from treaty.systems.logistic.setup import TableSize, TrainingSizes
from treaty.systems.logistic.steps import EpochEnd
from treaty.systems.vertical.encrypted_columns import PassiveColumns
from treaty.systems.vertical.messages import (
    BinLayout,
    Hint,
    NamedRows,
    OpenedStep,
    SealedStep,
    SealedSumsRequest,
    Sums,
    SumsPiece,
    SumsRequest,
    read_nodes,
)

REFUSED = 60_000_000  # bytes that a test may take: a message, as it is made and as it is refused, and no more


@pytest.fixture
def parties() -> dict[str, Party]:
    """Bank and shop, connected with each other."""
    channels = memory_channels(["bank", "shop"])
    names = {"bank": "shop", "shop": "bank"}
    return {name: Party(name, "j", "p", channels[name], [names[name]], timeout=10) for name in names}


@pytest.mark.parametrize("kind", [SumsRequest, SumsPiece, SealedSumsRequest, SealedStep, OpenedStep, Sums, Hint])
def test_messages_with_numbers_of_all_rows_are_bounded_by_what_the_receiver_expects_alone(kind: type[Message]) -> None:
    """A million rows in a query take more than `LISTED_BYTES`."""
    assert largest_body(kind) is None


@pytest.fixture
def measured() -> Iterator[None]:
    """Fail where the test takes more memory at once than `REFUSED`."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < REFUSED


def every_message() -> list[type[Message]]:
    for module in pkgutil.walk_packages(treaty.__path__, "treaty."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)

    def below(kind: type[Message]) -> Iterator[type[Message]]:
        for inner in kind.__subclasses__():
            yield inner
            yield from below(inner)

    return sorted({kind for kind in below(Message) if kind.__module__.startswith("treaty.")}, key=lambda k: k.__name__)


# ---------------------------------------------------------------- messages as a whole


def test_every_message_is_of_arrays_and_bytes_alone_or_has_a_bound() -> None:
    """What is decoded to more than its bytes are lists, tables, text; of arrays and bytes only their number matters."""
    kinds = every_message()
    assert len(kinds) > 120
    for kind in kinds:
        types = {field.name: msgspec.inspect.type_info(field.type) for field in msgspec.structs.fields(kind)}
        loose = [name for name, of in types.items() if _listed(of)]
        assert not loose or largest_body(kind) == LISTED_BYTES, kind.__name__


def _listed(of: Any) -> bool:
    if isinstance(of, msgspec.inspect.UnionType):
        return any(map(_listed, of.types))
    bounded = isinstance(of, msgspec.inspect.ListType) and of.max_length is not None
    return isinstance(of, msgspec.inspect.ListType | msgspec.inspect.DictType) and not bounded


def test_bounds_of_messages() -> None:
    assert largest_body(Terms) == largest_body(Task) == largest_body(RowsDescription) == LISTED_BYTES
    assert largest_body(ColumnCount) == largest_body(EpochEnd) == PLAIN_BYTES
    assert largest_body(BinLayout) is largest_body(Hint) is None


def test_a_list_that_would_take_a_gigabyte_is_refused_unread(measured: None) -> None:
    """A byte each on the wire, 64 in memory: 20 MB were 1.3 GB."""
    body = bytearray(encode(RowsDescription([], [], [], None)))
    at = body.index(b"categories") + len("categories")
    body[at : at + 1] = b"\xdd" + (17_000_000).to_bytes(4, "big") + b"\x90" * 17_000_000
    with pytest.raises(PeerProtocolError, match=r"expected at most 16777216 bytes, got 170\d* - at RowsDescription"):
        decode_body(bytes(body), RowsDescription, peer="shop")


def test_a_message_of_numbers_alone_is_short() -> None:
    body = encode(ColumnCount(3)) + bytes(PLAIN_BYTES)
    with pytest.raises(PeerProtocolError, match="expected at most 1048576 bytes"):
        decode_body(body, ColumnCount, peer="shop")


def test_arrays_of_a_message_are_counted_before_they_are_read(measured: None) -> None:
    body = bytearray(encode(Hint([])))
    body[-1:] = b"\xdd" + (1 << 20).to_bytes(4, "big") + b"\xc0" * (1 << 20)
    with pytest.raises(PeerProtocolError, match="length <= 65536"):
        decode_body(bytes(body), Hint, peer="shop")


# ---------------------------------------------------------------- sizes that are told

_MANY = 2**31 - 1


@pytest.mark.parametrize(
    "told",
    [
        ColumnCount(_MANY),
        TableSize(_MANY, _MANY, []),
        TableSize(2**31, 1, []),
        TableSize(1, 1, [2**31]),
        TrainingSizes("0" * 32, 5, [3, _MANY], False, False),
        Sum(0, _MANY),
        DealOrder(2**31, {"shop": 3}),
        DealOrder(5, {"shop": _MANY}),
    ],
    ids=lambda told: type(told).__name__,
)
def test_a_size_beyond_what_any_table_has_is_refused(told: Message) -> None:
    with pytest.raises(PeerProtocolError, match="Expected `int` <="):
        decode_body(encode(told), type(told), peer="shop")


@pytest.mark.parametrize(("features", "slots"), [(MOST_COLUMNS + 1, 1), (MOST_SLOTS // 256 + 1, 256)])
def test_an_owner_of_too_many_columns_or_slots_is_refused(parties: dict[str, Party], features: int, slots: int) -> None:
    offsets = np.arange(features + 1, dtype=np.int32) * np.int32(slots)
    parties["shop"].send("bank", BinLayout(Array.of(offsets), Array.of(np.zeros(features, np.bool_))))
    with pytest.raises(PeerProtocolError, match="expected at most"):
        PassiveColumns(parties["bank"], "shop", 100)


def test_nodes_are_compared_with_the_splits_before_they_are_counted(measured: None) -> None:
    """A row in node 2^31 - 1 took 16 GiB to count."""
    nodes = np.full(10, 2**32 - 1, np.uint32)
    nodes[3] = _MANY
    with pytest.raises(PeerProtocolError, match="expected nodes below 70000"):
        read_nodes(NamedRows(Array.of(nodes)), 70_000, 10, "bank")


def test_columns_of_one_bucket_which_take_no_bytes_are_bounded(parties: dict[str, Party], measured: None) -> None:
    """A thousand such columns at a million rows: a gigabyte from five kilobytes."""
    count = 1000
    arrays = np.ones(count, np.int32), np.zeros(count, np.bool_), np.zeros(count, np.bool_), np.ones(count), np.zeros(0)
    present, categorical, missing, epsilon, packed = map(Array.of, arrays)
    told = Buckets(present, categorical, missing, epsilon, msgspec.structs.replace(packed, dtype="uint8"))
    with pytest.raises(PeerProtocolError, match="few of them of one bucket"):
        NoisyColumns(parties["bank"], "shop", iter([told]), 1_000_000, 1)


def test_no_room_is_made_for_buckets_before_they_have_come(parties: dict[str, Party]) -> None:
    """Headers of 14 MB told of a terabyte of buckets."""
    count = 1 << 20
    arrays = np.full(count, 2, np.int32), np.zeros(count, np.bool_), np.zeros(count, np.bool_), np.ones(count)
    told = Buckets(*map(Array.of, arrays), Array.of(np.zeros(0, np.uint8)))  # type: ignore[call-arg]
    with pytest.raises(PeerProtocolError, match=r"got uint8 \(0,\) - at Buckets.packed from shop"):
        NoisyColumns(parties["bank"], "shop", iter([told]), 1_000_000, 1)


def test_more_nodes_than_rows_are_refused_before_they_are_made(parties: dict[str, Party], measured: None) -> None:
    with pytest.raises(PeerProtocolError, match="expected at most 10 nodes with rows"):
        named_rows(parties["shop"], "bank", NodeRows(1 << 40), 10)


def test_joined_rows_are_bounded(parties: dict[str, Party], measured: None) -> None:
    totals, repeats = np.array([_MANY]), np.array([_MANY])
    parties["bank"].send("shop", JoinLayout(Array.of(totals), Array.of(repeats)))
    with pytest.raises(PeerProtocolError, match="expected whole blocks of joined rows"):
        arranged(parties["shop"], "bank", np.array([1]), 100)


class _Wide:
    columns, bits = 1000, 8


@pytest.mark.parametrize(
    "wanted",
    [WantedRows(_MANY), WantedLevel(0, 0, 1 << 24, 1 << 24), WantedLeaves(_MANY, _MANY)],
    ids=lambda wanted: type(wanted).__name__,
)
def test_a_dealer_makes_no_more_numbers_than_are_used(
    parties: dict[str, Party], measured: None, wanted: Message
) -> None:
    dealer = Dealer(parties["shop"], ["bank", "edge", "shop"], _Wide())  # type: ignore[arg-type]
    parties["bank"].send("shop", wanted)
    with pytest.raises(PeerProtocolError, match=f"numbers at once - at {type(wanted).__name__} from bank"):
        dealer.serve()
