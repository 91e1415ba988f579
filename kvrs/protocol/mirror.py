"""What proxies say to each other of streams that a client can resume elsewhere. MessagePack, because events are bytes.

A stream is named by the client's key. Who writes it is said by its owner epoch, which rises whenever it goes to another owner;
which of several mirrors is the present one, by the mirror number, which rises whenever the owner takes another. Whoever is left
alone with a record sends a copy of it to another proxy, which grants nothing as long as it sees the sender live.
"""

from enum import StrEnum
from typing import Annotated

import msgspec

from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Natural

Key = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class Said(msgspec.Struct, frozen=True, array_like=True):
    """One event as the client gets it, the output ids that it brings, and where the client stands after it."""

    seq: Natural
    ids: list[Natural]
    data: bytes


class Held(msgspec.Struct, frozen=True, array_like=True):
    """The first `pages` full pages of the history are at this instance or agent, in this epoch."""

    holder: InstanceId
    epoch: Natural
    pages: Natural


class Opening(msgspec.Struct, frozen=True):
    """What does not change as long as the stream has this owner."""

    digest: bytes  # Of the request: path and body.
    seed: int | None
    deadlines: tuple[float | None, float | None, float | None]
    age_s: float  # Since the client first asked.
    owned_s: float  # Since the stream has this owner.


class Standing(msgspec.Struct, frozen=True):
    """How the stream stands after the events that come with it."""

    finish_reason: str | None = None
    stop_reason: str | int | None = None
    text_sent: Natural | None = None
    usage_sent: bool = False
    inexact: tuple[str, ...] = ()
    complete: bool = False  # Nothing is missing but the formal end.
    released: bool = False  # Its owner has let go of it: its client has gone, or it was handed over.
    held: tuple[Held, ...] = ()


class Update(msgspec.Struct):
    """Events from `first_event` on. With an opening it is the whole record, as far as it fits into one message."""

    key: Key
    stream: StreamId
    owner: Name  # One run of one proxy.
    owner_epoch: Natural
    mirror_no: Natural
    first_event: Natural
    events: list[Said]
    standing: Standing
    opening: Opening | None = None
    # From the first event on, and until that is acknowledged.
    prompt_ids: list[Natural] | None = None
    head: bytes | None = None
    copied: Natural = 0  # Through how many hands the record has gone, if it is not its owner or its mirror that says this.
    idle_s: float = 0.0  # Of a copy: since its stream was last heard of.


class Batch(msgspec.Struct):
    """Body of `POST /kvrs/v1/mirror`."""

    sender: Name  # The proxy's id.
    updates: list[Update]


class Ack(msgspec.Struct, frozen=True):
    """How many of its events the mirror has; -1: it does not know the stream in this form, and wants its opening."""

    events: int
    superseded: bool = False  # Another owner has it.
    full: bool = False  # There is no room for it.


class BatchAnswer(msgspec.Struct):
    run: Name
    acks: list[Ack]  # In the order of the updates.


class Hello(msgspec.Struct):
    """Body and answer of `POST /kvrs/v1/mirror/hello`, and what `GET /kvrs/v1/mirror?watch=S` says again and again, in JSON."""

    id: Name
    run: Name


class Look(msgspec.Struct):
    """Body of `POST /kvrs/v1/mirror/look`."""

    key: Key


class Seen(msgspec.Struct, frozen=True):
    stream: StreamId
    owner_epoch: Natural
    mirror_no: Natural
    grants: bool  # Whoever asks here may get the stream: it is its mirror, or whoever is left of those that had it.
    copied: Natural = 0


class LookAnswer(msgspec.Struct):
    seen: Seen | None


class Claim(msgspec.Struct):
    """Body of `POST /kvrs/v1/mirror/claim`: the stream, as it was seen, is to go to the claimant."""

    key: Key
    claimant: Name  # One run of one proxy.
    seen: Seen
    digest: bytes
    stream: StreamId | None = None  # As the client names it, with the place up to which it has it.
    after: int = -1


class Refusal(StrEnum):
    BUSY = "busy"  # Somebody else has just got it.
    OTHER_BODY = "other_body"
    OTHER_STREAM = "other_stream"
    INEXACT = "inexact"  # What the client has beyond the mirror cannot be made again for certain.
    BEYOND = "beyond"  # The client says that it has more than there is.
    UNKNOWN = "unknown"


class ClaimAnswer(msgspec.Struct):
    granted: Update | None = None  # The whole record, under its new epoch.
    refusal: Refusal | None = None
