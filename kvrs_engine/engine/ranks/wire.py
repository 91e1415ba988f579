"""The messages between an instance's process and its ranks, over socket pairs."""

import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from kvrs.config.cluster import EngineSettings, Planner
from kvrs.errors import KvrsError
from kvrs.transfer.shared_memory import receive, rights
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.units import Unit
from kvrs_engine.scheduling.sequences import Chunk

_LENGTH_BYTES = 4
_MAX_BYTES = 1 << 28
_MAX_DESCRIPTORS = 250  # The kernel's limit is 253 per message.


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load the common weights of a rank's layers. The descriptors are the memory of its mutex
    (`Life`) and that of the KV cells.
    """

    rank: int
    model: str
    settings: dict[str, Any]  # Settings of the engine.
    first: int  # The layers of its stage: [first, last).
    last: int
    is_first: bool  # The stage begins with the embeddings.
    is_last: bool  # The stage ends with the LM head.
    # The first layout; the rank proves the forms for it and for later losses. None: no proofs.
    layout: Layout | None
    spreads: bool = False  # Remaining heads are spread after a loss.
    planner: Planner = "on_demand"  # `elastic.planner`.
    yields: bool = False  # Load at a lowered priority.
    bytes_per_s: float | None = None  # Rate at which files are read; None: no limit.


class UnitPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of a unit in a memory of this rank."""

    unit: Unit
    offset: int


class UnitMove(msgspec.Struct, frozen=True, array_like=True):
    """The source and the destination of a unit."""

    unit: Unit
    memory: int  # Index of the destination in the order's descriptors; 0: new memory.
    offset: int
    # Index of the source; 0: the files. Equal to `memory`: the unit is already in place.
    source: int
    source_offset: int


class FetchUnits(msgspec.Struct, frozen=True, tag="fetch"):
    """Fetch units one after the other, with an answer for each. The descriptors are the destination
    memory and the source memories; units of lost ranks may stay in place.
    """

    epoch: int
    moves: list[UnitMove]
    hashes: dict[str, bytes]  # Known hashes of units, by name.
    nice: int = 0  # Reduction of the priority.
    bytes_per_s: float | None = None  # Rate at which files are read; None: no limit.


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Use units that an earlier process has fetched. The descriptor is their memory."""

    units: list[UnitPlace]


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Join a formation. The descriptor is the formation's memory."""

    epoch: int
    layout: Layout
    stages: tuple[int, int]  # The local stages [first, end).


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """Drop the units outside the layout of the last formation, which serves now. Before this order,
    a further loss may lead back to an earlier layout.
    """


class WireChunk(msgspec.Struct, frozen=True, array_like=True):
    token_ids: Sequence[int]
    first_position: int
    pages: list[int]
    logits: int
    base: int


class Compute(msgspec.Struct, frozen=True, tag="compute"):
    """Compute a batch. The answer is a counter in the formation's memory."""

    epoch: int
    batch: int
    chunks: list[WireChunk]


Order = Load | FetchUnits | Attach | Join | Settle | Compute


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    arithmetic: bytes  # Equal for ranks whose results are equal for equal weights.
    leaves: dict[str, bytes]  # Hashes of the common weights.
    read_bytes: int = 0  # Bytes read from files.
    ahead_s: float = 0.0  # The part of the start for proofs for later losses.


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    epoch: int
    unit: Unit
    hash: bytes
    read_bytes: int  # Bytes read from files.
    was_damaged: bool = False  # The copy from another rank was wrong, and the unit was read.


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    epoch: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The rank ends because of faults of the configuration or of the machine."""

    faults: list[str]


Answer = Loaded | Fetched | Joined | Refused


class RankGoneError(KvrsError):
    """The other end of a socket pair has closed, or takes no messages."""


def batch_of(epoch: int, batch: int, chunks: Sequence[Chunk], page_size_tokens: int) -> Compute:
    wire = []
    for chunk in chunks:
        held = -(-(chunk.first_position + len(chunk.token_ids)) // page_size_tokens)
        wire.append(
            WireChunk(
                list(chunk.token_ids),
                chunk.first_position,
                list(chunk.pages[:held]),
                chunk.logits,
                chunk.base,
            )
        )
    return Compute(epoch, batch, wire)


def chunks_of(wire: Sequence[WireChunk]) -> list[Chunk]:
    return [
        Chunk(list(one.token_ids), one.first_position, one.pages, one.logits, one.base)
        for one in wire
    ]


def encode(message: Order | Answer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def settings_of(order: Load) -> EngineSettings:
    return EngineSettings.model_validate(order.settings)


def send(pair: socket.socket, frame: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a frame; raises RankGoneError if the other end is closed or takes nothing within the
    socket's timeout.
    """
    try:
        if descriptors:
            frame = frame[pair.sendmsg([frame], rights(descriptors)) :]
        pair.sendall(frame)
    except OSError as error:
        raise RankGoneError(f"no order was taken: {error}") from None


class Receiver:
    """Receives messages from one end of a socket pair, and their descriptors."""

    def __init__(self, pair: socket.socket, kinds: Any) -> None:
        self._pair = pair
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self.descriptors: list[int] = []

    def receive(self) -> Any:
        """Receive the next message.

        Raises:
            RankGoneError: the other end is closed, or sent nothing within the socket's timeout.
        """
        length = int.from_bytes(self._read(_LENGTH_BYTES), "little")
        assert length <= _MAX_BYTES, "both ends are ours"
        return self._decoder.decode(self._read(length))

    def _read(self, count: int) -> bytearray:
        body = bytearray(count)
        left = memoryview(body)
        while left:
            try:
                size = receive(self._pair, left, self.descriptors, _MAX_DESCRIPTORS)
            except OSError as error:
                raise RankGoneError(f"no answer: {error}") from None
            if not size:
                raise RankGoneError("the other end has closed")
            left = left[size:]
        return body
