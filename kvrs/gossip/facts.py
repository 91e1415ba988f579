"""What nodes tell each other of themselves, and the table in which a decision finds it: a look into a dictionary, no I/O.

A node's record is a set of entries, each with a kind and a name. The kind says how the value is read.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Generic, TypeVar

import msgspec

from kvrs.errors import GossipError
from kvrs.gossip.wire import MAX_VALUE_BYTES, Natural
from kvrs.ids import NodeId
from kvrs.protocol.gpus import GpuHealth
from kvrs.protocol.instance import Role, Seconds

Rate = Annotated[float, msgspec.Meta(ge=0)]
Cause = Annotated[str, msgspec.Meta(max_length=128)]


class Kind(IntEnum):
    INSTANCE = 1  # Named by the instance.
    LINK = 2  # Into this node; named by the node at the other end.
    SLOTS = 3  # Named by the instance that they lead into.
    HOLDER = 4  # Named by the agent.
    FAILURE = 5  # Named by who failed: an instance, or an agent.
    GPU = 6  # Named by the board's uuid.


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
    age_s: Seconds  # Since the last transfer that was measured, when this was written.


class SlotsFact(msgspec.Struct, frozen=True, array_like=True):
    free: Natural
    wait_s: Seconds  # Expected, until one is free.


class HolderFact(msgspec.Struct, frozen=True, array_like=True):
    capacity_bytes: Natural
    reserved_bytes: Natural


class FailureFact(msgspec.Struct, frozen=True, array_like=True):
    """By whose word it died is the node in whose record this stands."""

    epoch: Natural  # Which of its lives ended.
    cause: Cause
    age_s: Seconds  # Since it failed, when this was written.


Fact = InstanceFact | LinkFact | SlotsFact | HolderFact | FailureFact | GpuHealth

_TYPES: dict[int, type[Fact]] = {
    Kind.INSTANCE: InstanceFact,
    Kind.LINK: LinkFact,
    Kind.SLOTS: SlotsFact,
    Kind.HOLDER: HolderFact,
    Kind.FAILURE: FailureFact,
    Kind.GPU: GpuHealth,
}
_KINDS = {cls: Kind(kind) for kind, cls in _TYPES.items()}
_decoders = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in _TYPES.items()}
_encoder = msgspec.msgpack.Encoder()


def kind_of(fact: Fact) -> Kind:
    return _KINDS[type(fact)]


def encode_fact(fact: Fact) -> bytes:
    """Raises GossipError: too long, or a number that no reader would take."""
    value = _encoder.encode(fact)
    if len(value) > MAX_VALUE_BYTES:
        raise GossipError(f"a fact of {len(value)} bytes; allowed: at most {MAX_VALUE_BYTES}")
    decode_fact(_KINDS[type(fact)], value)
    return value


def decode_fact(kind: int, value: bytes) -> Fact:
    """Raises GossipError: a kind that is not known here, or a value of another shape."""
    try:
        fact: Fact = _decoders[kind].decode(value)
    except KeyError:
        raise GossipError(f"a fact of unknown kind {kind}") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise GossipError(f"a fact of kind {Kind(kind).name.lower()}: {error}") from None
    return fact


F = TypeVar("F", bound=Fact)


@dataclass(frozen=True, slots=True)
class Report(Generic[F]):
    """A fact, and when its owner wrote it, by the clock of whoever reads it here."""

    fact: F
    written_s: float


Table = dict[tuple[NodeId, str], Report[F]]


class Facts:
    """Of all nodes that are not held dead, by (whose word it is, what it is about)."""

    def __init__(self) -> None:
        self.instances: Table[InstanceFact] = {}
        self.links: Table[LinkFact] = {}
        self.slots: Table[SlotsFact] = {}
        self.holders: Table[HolderFact] = {}
        self.failures: Table[FailureFact] = {}
        self.gpus: Table[GpuHealth] = {}
        self.unread = 0  # Values that could not be read: malformed, or of a newer release.
        self._tables: dict[int, Table[Fact]] = {
            Kind.INSTANCE: self.instances,  # type: ignore[dict-item] # Which table holds which type is what _TYPES says.
            Kind.LINK: self.links,  # type: ignore[dict-item]
            Kind.SLOTS: self.slots,  # type: ignore[dict-item]
            Kind.HOLDER: self.holders,  # type: ignore[dict-item]
            Kind.FAILURE: self.failures,  # type: ignore[dict-item]
            Kind.GPU: self.gpus,  # type: ignore[dict-item]
        }

    def put(self, node: NodeId, kind: int, name: str, value: bytes | None, written_s: float) -> None:
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

    def all(self) -> Iterator[tuple[Kind, NodeId, str, Report[Fact]]]:
        """For people: kind, whose word, what about, and the report."""
        for kind, table in self._tables.items():
            yield from ((Kind(kind), node, name, report) for (node, name), report in table.items())

    def forget(self, node: NodeId) -> None:
        for table in self._tables.values():
            for key in [key for key in table if key[0] == node]:
                del table[key]
