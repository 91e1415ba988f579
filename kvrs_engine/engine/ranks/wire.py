"""Messages between the process of an instance and its ranks, over a pair of sockets."""

import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from kvrs.config.engine import EngineSettings
from kvrs.errors import KvrsError
from kvrs.transfer.shared_memory.passing import receive, rights
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.units import Unit
from kvrs_engine.scheduling.sequences import Chunk

_LENGTH_BYTES = 4
_MAX_BYTES = 1 << 28
_MAX_DESCRIPTORS = 250  # The kernel takes 253 in one message.


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load what a rank of these layers has beside units. With it come the memory of its life, and
    that of KV cells.
    """

    rank: int
    model: str
    settings: dict[str, Any]  # Of the engine.
    first: int  # The layers of its stage: [first, last).
    last: int
    is_first: bool  # Whether it begins with the embeddings.
    is_last: bool  # Whether it ends with the head.
    # In which it will compute: what it and those that losses make of it need is proven first.
    layout: Layout | None
    spreads: bool = False  # Whether heads that are left over are spread after a loss.
    yields: bool = False  # To whatever else runs on the machine.


class UnitPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a unit lies in a memory of this rank."""

    unit: Unit
    offset: int


class UnitMove(msgspec.Struct, frozen=True, array_like=True):
    """Where a unit comes from, and where it goes to."""

    unit: Unit
    # Among the descriptors that come with the order; 0: new memory.
    memory: int
    offset: int
    # As `memory`; 0: from the files. In the same memory it lies where it is to be.
    source: int
    source_offset: int


class FetchUnits(msgspec.Struct, frozen=True, tag="fetch"):
    """Get units, one after another, and answer each. With it come the memory for them, and those
    of other ranks; some of what ranks had that are gone stays where it is.
    """

    epoch: int
    moves: list[UnitMove]
    hashes: dict[str, bytes]  # Of those with known weights, by name.
    nice: int = 0  # By which the priority is lower than usual.


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Units that lie in a memory already, which comes with it: an earlier process got them."""

    units: list[UnitPlace]


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Compute in a formation from now on. With it comes the formation's memory."""

    epoch: int
    layout: Layout
    stages: tuple[int, int]  # [first, end): their cells and rows are in memory of this node.


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """The last formation serves: what its layout does not give this rank is gone. Until then a
    further loss may lead back to an earlier layout.
    """


class WireChunk(msgspec.Struct, frozen=True, array_like=True):
    token_ids: Sequence[int]
    first_position: int
    pages: list[int]
    logits: int
    base: int


class Compute(msgspec.Struct, frozen=True, tag="compute"):
    """Compute a batch. The answer is a count in the formation's memory."""

    epoch: int
    batch: int
    chunks: list[WireChunk]


Order = Load | FetchUnits | Attach | Join | Settle | Compute


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    arithmetic: bytes  # Equal for ranks exactly when their results are, of the same weights.
    leaves: dict[str, bytes]  # Hashes of what is no unit.
    read_bytes: int = 0  # From files.
    ahead_s: float = 0.0  # Of the start, for what it may need after losses.


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    epoch: int
    unit: Unit
    hash: bytes
    read_bytes: int  # From files.
    # It came from another rank's memory with other bytes than it must have, and was read instead.
    was_damaged: bool = False


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    epoch: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Faults of the configuration or of this machine. The rank ends."""

    faults: list[str]


Answer = Loaded | Fetched | Joined | Refused


class RankGoneError(KvrsError):
    """The other end of a pair has closed, or does not take messages any more."""


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
    """Raises RankGoneError: the other end is closed, or took nothing for the socket's timeout."""
    try:
        if descriptors:
            frame = frame[pair.sendmsg([frame], rights(descriptors)) :]
        pair.sendall(frame)
    except OSError as error:
        raise RankGoneError(f"no order was taken: {error}") from None


class Receiver:
    """Messages from one end of a pair, with the descriptors that came with them."""

    def __init__(self, pair: socket.socket, kinds: Any) -> None:
        self._pair = pair
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self.descriptors: list[int] = []

    def receive(self) -> Any:
        """The next message.

        Raises:
            RankGoneError: the other end is closed, or sent nothing for the socket's timeout.
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
