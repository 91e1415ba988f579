"""Facts that nodes publish about themselves, and the tables that decisions read them from, without
I/O.

A node's record is a set of entries, each with a kind and a name. The kind determines the encoding
of the value.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from kvrs.errors import GossipError
from kvrs.gossip.wire import MAX_VALUE_BYTES, Natural
from kvrs.ids import NodeId
from kvrs.protocol.gpus import GpuHealth
from kvrs.protocol.instance import Role, Seconds

Rate = Annotated[float, msgspec.Meta(ge=0)]
Cause = Annotated[str, msgspec.Meta(max_length=128)]


class FactKind(IntEnum):
    INSTANCE = 1  # Name: the instance.
    LINK = 2  # Into this node. Name: the node at the other end.
    SLOTS = 3  # Name: the target instance.
    HOLDER = 4  # Name: the agent.
    FAILURE = 5  # Name: the instance or agent that failed.
    GPU = 6  # Name: the board's uuid.


class InstanceFact(msgspec.Struct, frozen=True, array_like=True):
    role: Role
    epoch: Natural
    queued: Natural
    running: Natural
    queue_delay_s: Seconds
    free_pages: Natural


class LinkFact(msgspec.Struct, frozen=True, array_like=True):
    bytes_per_s: Rate  # EWMA.
    spread: Rate  # Its mean deviation, in the same unit.
    age_s: Seconds  # Since the last measured transfer, when this was written.


class SlotsFact(msgspec.Struct, frozen=True, array_like=True):
    free: Natural
    wait_s: Seconds  # Expected, until one is free.


class HolderFact(msgspec.Struct, frozen=True, array_like=True):
    capacity_bytes: Natural
    reserved_bytes: Natural


class FailureFact(msgspec.Struct, frozen=True, array_like=True):
    """A death, as observed by the node whose record this is in."""

    epoch: Natural  # Of the process that died.
    cause: Cause
    age_s: Seconds  # Since it failed, when this was written.


Fact = InstanceFact | LinkFact | SlotsFact | HolderFact | FailureFact | GpuHealth

_TYPES: dict[int, type[Fact]] = {
    FactKind.INSTANCE: InstanceFact,
    FactKind.LINK: LinkFact,
    FactKind.SLOTS: SlotsFact,
    FactKind.HOLDER: HolderFact,
    FactKind.FAILURE: FailureFact,
    FactKind.GPU: GpuHealth,
}
_KINDS = {cls: FactKind(kind) for kind, cls in _TYPES.items()}
_decoders = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in _TYPES.items()}
_encoder = msgspec.msgpack.Encoder()


def kind_of(fact: Fact) -> FactKind:
    return _KINDS[type(fact)]


def encode_fact(fact: Fact) -> bytes:
    """Raises GossipError: the fact is too long, or out of its bounds."""
    value = _encoder.encode(fact)
    if len(value) > MAX_VALUE_BYTES:
        raise GossipError(f"a fact of {len(value)} bytes; allowed: at most {MAX_VALUE_BYTES}")
    decode_fact(_KINDS[type(fact)], value)
    return value


def decode_fact(kind: int, value: bytes) -> Fact:
    """Raises GossipError: the kind is unknown, or the value of another shape."""
    try:
        fact: Fact = _decoders[kind].decode(value)
    except KeyError:
        raise GossipError(f"a fact of unknown kind {kind}") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise GossipError(f"a fact of kind {FactKind(kind).name.lower()}: {error}") from None
    return fact


F = TypeVar("F", bound=Fact)


@dataclass(frozen=True, slots=True)
class Report(Generic[F]):
    """A fact, and the time at which its owner wrote it, by this node's clock."""

    fact: F
    written_s: float


Table = dict[tuple[NodeId, str], Report[F]]


class Facts:
    """Facts of all reachable nodes, by (publishing node, name)."""

    def __init__(self) -> None:
        self.instances: Table[InstanceFact] = {}
        self.links: Table[LinkFact] = {}
        self.slots: Table[SlotsFact] = {}
        self.holders: Table[HolderFact] = {}
        self.failures: Table[FailureFact] = {}
        self.gpus: Table[GpuHealth] = {}
        self.unread = 0  # Values that could not be decoded: malformed, or of a newer release.
        self._tables: dict[int, Table[Any]] = {  # `_TYPES` has the type of each.
            FactKind.INSTANCE: self.instances,
            FactKind.LINK: self.links,
            FactKind.SLOTS: self.slots,
            FactKind.HOLDER: self.holders,
            FactKind.FAILURE: self.failures,
            FactKind.GPU: self.gpus,
        }

    def put(
        self, node: NodeId, kind: int, name: str, value: bytes | None, written_s: float
    ) -> None:
        table = self._tables.get(kind)
        if table is None:
            self.unread += 1
            return
        table.pop((node, name), None)
        if value is None:
            return
        try:
            table[node, name] = Report(decode_fact(kind, value), written_s)
        except GossipError:
            self.unread += 1

    def all(self) -> Iterator[tuple[FactKind, NodeId, str, Report[Fact]]]:
        """Kind, publishing node, name and report of every fact."""
        for kind, table in self._tables.items():
            yield from (
                (FactKind(kind), node, name, report) for (node, name), report in table.items()
            )

    def forget(self, node: NodeId) -> None:
        for table in self._tables.values():
            for key in [key for key in table if key[0] == node]:
                del table[key]
