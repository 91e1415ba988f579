"""Messages between proxies: records of streams that a client can resume at another proxy, and
prompts that were sent to instances.

Messages are MessagePack, because events are bytes. A stream is identified by the client's key, its
owner by the owner epoch, which rises with each change of owner, and its mirror by the mirror
number, which rises with each change of mirror. The only proxy with a record sends a copy to another
proxy; the copy grants no claim while its holder sees the sender live.
"""

from array import array
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import msgspec

from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Natural, Seconds
from kvrs.protocol.openai.chunks import EngineFacts
from kvrs.protocol.openai.requests import packed

Key = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


BYTES_PER_ID = 4


def pack_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids into 4 bytes each, little-endian like every machine with a supported GPU."""
    return packed(ids).tobytes()


def unpack_ids(content: bytes) -> "array[int]":
    ids = array("I")
    ids.frombytes(content)
    return ids


class StreamEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event as the client gets it, with its packed output ids; `seq` is the client's position
    after the event.
    """

    seq: Natural
    ids: bytes
    data: bytes


class KvLocation(msgspec.Struct, frozen=True, array_like=True):
    """An instance or agent with the first `pages` full pages of the history, in this epoch."""

    holder: InstanceId
    epoch: Natural
    pages: Natural


class StreamHeader(msgspec.Struct, frozen=True):
    """Facts that stay fixed while the stream has the same owner."""

    digest: bytes  # Digest of the request's path and body, which a repeated request must equal.
    seed: int | None
    deadlines: tuple[float | None, float | None, float | None]
    age_s: float  # Seconds since the client's first request for the stream.
    owned_s: float  # Seconds since this owner took the stream.
    tenant: Annotated[str, msgspec.Meta(max_length=64)] = ""  # Mark of the tenant, for fair shares.
    # Encoded `Stored` of a response, whose client never sends the request again.
    request: bytes = b""


class StreamState(msgspec.Struct, frozen=True):
    """State of the stream after the events of the same update."""

    finish_reason: str | None = None
    stop_reason: str | int | None = None
    text_sent: Natural | None = None
    usage_sent: bool = False
    cached_tokens: Natural | None = None
    facts: EngineFacts | None = None
    inexact: tuple[str, ...] = ()
    lacks_ids: bool = False  # The stream's text came without token ids, so it cannot be continued.
    complete: bool = False  # The output is complete; only the end of the response is missing.
    released: bool = False  # The owner has stopped: the client left, or the stream was handed over.
    kv_locations: tuple[KvLocation, ...] = ()


class Update(msgspec.Struct):
    """An update of a stream's record: the events from number `first_event` on, and the state after
    them. With a header and `first_event` 0 it replaces the record.
    """

    key: Key
    stream: StreamId
    owner: Name  # Id of the owner: one run of a proxy.
    owner_epoch: Natural
    mirror_no: Natural
    first_event: Natural
    events: list[StreamEvent]
    state: StreamState
    header: StreamHeader | None = None
    # Packed token ids of the prompt, sent with each update until one is acknowledged.
    prompt_ids: bytes | None = None
    head: bytes | None = None
    # Length of the chain of copies: 0 from the owner to its mirror, 1 from the mirror to a third
    # proxy, and so on.
    copy_hops: Natural = 0
    idle_s: float = 0.0  # In a copy: seconds since its sender last heard of the stream.


BYTES_PER_HASH = 8
MAX_HASH_BYTES = 1 << 16  # Most bytes of block hashes in one batch, over all its prompts.
MAX_SENT = 2048


class SentPrompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt that was sent to an instance. `hashes` are the packed hashes of its blocks
    (`kvrs/core/model/cluster_view.py`).
    """

    instance: InstanceId
    epoch: Natural  # The instance's epoch when the prompt was sent.
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    hashes: Annotated[bytes, msgspec.Meta(min_length=8, max_length=MAX_HASH_BYTES)]

    def __post_init__(self) -> None:
        if len(self.hashes) % BYTES_PER_HASH:
            raise ValueError(f"hashes of {len(self.hashes)} bytes")


class Batch(msgspec.Struct):
    """Body of `POST /kvrs/v1/mirror`."""

    sender: Name  # Id of the sending proxy.
    updates: list[Update]
    sent: Annotated[list[SentPrompt], msgspec.Meta(max_length=MAX_SENT)] = []


class AckStatus(StrEnum):
    STORED = "stored"
    # The receiver lacks the record or has an older version of it, so the header must be sent.
    HEADER_NEEDED = "header_needed"
    SUPERSEDED = "superseded"  # The receiver has a record with a higher owner epoch.
    FULL = "full"  # The receiver has no room for another record.


class UpdateAck(msgspec.Struct, frozen=True):
    status: AckStatus
    # Number of the stream's events that the receiver has; valid only with STORED.
    events: Natural = 0


class BatchAnswer(msgspec.Struct):
    run: Name
    acks: list[UpdateAck]  # Acknowledgements in the order of the updates.


class DrainOrder(msgspec.Struct, frozen=True):
    """Body of `POST /kvrs/v1/mirror/drain`: a worker passes an operator's order on to the other
    workers of its proxy.
    """

    instance: InstanceId
    # Time after which the remaining streams are moved. None: the end of the drain.
    drain_s: Seconds | None


MAX_MODEL = 1024  # Characters of a model's fingerprint.
MAX_MARK, MAX_MARKS = 128, 64  # Characters, and number.


class Hello(msgspec.Struct, omit_defaults=True):
    """Body and answer of `POST /kvrs/v1/mirror/hello`, and each report of
    `GET /kvrs/v1/mirror?watch=S`, in JSON.
    """

    id: Name
    run: Name
    leaving: bool = False  # The proxy is about to end: its streams and records go to other proxies.
    # Drain orders that are in force when another worker of this proxy starts; it carries them out
    # too.
    drains: list[DrainOrder] = []
    # Fingerprint of the model that the proxy serves, marks of the weights that count as right, and
    # the time of the operator's order that chose them (`kvrs/core/fleet/self_tests.py`).
    model: Annotated[str, msgspec.Meta(max_length=MAX_MODEL)] = ""
    weights: Annotated[list[Name], msgspec.Meta(max_length=MAX_MARKS)] = []
    weights_ordered_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Lookup(msgspec.Struct):
    """Body of `POST /kvrs/v1/mirror/lookup`."""

    key: Key


class RecordVersion(msgspec.Struct, frozen=True):
    """Version of a stream's record at a proxy, and whether the proxy grants claims to it."""

    stream: StreamId
    owner_epoch: Natural
    mirror_no: Natural
    grants: bool
    copy_hops: Natural = 0


class LookupAnswer(msgspec.Struct):
    version: RecordVersion | None


class ReadAnswer(msgspec.Struct):
    """Answer of `POST /kvrs/v1/mirror/read`: the whole record, which the proxy keeps."""

    record: Update | None
    runs: bool  # The stream is being served by this proxy now.


class Claim(msgspec.Struct):
    """Body of `POST /kvrs/v1/mirror/claim`: the claimant asks to become the stream's owner,
    provided that the record still has this version.
    """

    key: Key
    claimant: Name  # Id of the claimant: one run of a proxy.
    version: RecordVersion
    digest: bytes
    # The stream, and the last event that the client has (`after`), both from Last-Event-ID.
    stream: StreamId | None = None
    after: int = -1


class Refusal(StrEnum):
    BUSY = "busy"  # The stream was just granted to another claimant.
    OTHER_BODY = "other_body"
    OTHER_STREAM = "other_stream"
    # Events that the client has beyond the mirror cannot be regenerated exactly.
    INEXACT = "inexact"
    BEYOND = "beyond"  # The client claims to have events behind the end of the stream.
    UNKNOWN = "unknown"


class ClaimAnswer(msgspec.Struct):
    # The whole record with the claimant's owner epoch; None: refused.
    granted: Update | None = None
    refusal: Refusal | None = None
