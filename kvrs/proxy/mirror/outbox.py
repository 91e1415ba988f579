"""Replication of one stream from its owner to its mirror, and the events that its client may get.
Pure.
"""

import math
from dataclasses import dataclass
from enum import Enum

from kvrs.protocol.mirror import AckStatus, StreamEvent, Update, UpdateAck
from kvrs.proxy.mirror.records import Record
from kvrs.proxy.mirror.roles import RoleChange

# Largest size of a mirrored record in bytes: a larger one would not fit into one message.
_MAX_RECORD_BYTES = 32 << 20
# Time for which a mirror's answer is valid. An owner without a valid answer may have been paused,
# and its stream granted to another owner, so until the next answer its client gets only what the
# mirror has.
_ACK_VALID_S = 0.5


@dataclass(slots=True, eq=False)
class Outbox:
    """State of a stream at its mirror, and the next update to send."""

    record: Record
    mirror: str | None = None
    acked: int | None = None  # Number of events that the mirror has; None: not even the header.
    full: bool = False  # The mirror has no room for the record, or the record is too long.
    dirty: bool = True
    _sent_s: float = -math.inf  # Time at which the last update was sent.
    _acked_s: float = -math.inf  # Time at which the last acknowledged update was sent.

    def assign(self, mirror: str | None) -> None:
        """Replicate the stream to a new mirror from the beginning; None: to no mirror."""
        self.full = self.record.size_bytes > _MAX_RECORD_BYTES
        self.mirror = None if self.full else mirror
        self.acked, self.dirty = None, self.mirror is not None
        self.record.copy_hops = 0
        if self.mirror is None:
            self.record.change_role(RoleChange.PEER_LOST, None)
        else:
            self.record.change_role(RoleChange.MIRROR_ASSIGNED, self.mirror)
            self.record.mirror_no += 1

    def next(self, now_s: float) -> Update:
        self.dirty, self._sent_s = False, now_s
        return self.record.update(now_s, from_event=self.acked or 0, with_header=self.acked is None)

    def take(self, ack: UpdateAck) -> None:
        """Apply the mirror's answer to the last update."""
        assert ack.status is not AckStatus.SUPERSEDED
        is_stored = ack.status is AckStatus.STORED
        self.acked = min(ack.events, len(self.record.events)) if is_stored else None
        self._acked_s = self._sent_s
        self.full = ack.status is AckStatus.FULL or self.record.size_bytes > _MAX_RECORD_BYTES
        if self.full:
            self.mirror = None
            self.record.change_role(RoleChange.PEER_LOST, None)
            # The former mirror may keep a part of the stream, which the higher number marks as
            # outdated.
            self.record.mirror_no += 1
        elif not self._is_level:
            self.dirty = True

    @property
    def _is_level(self) -> bool:
        return self.acked == len(self.record.events)

    @property
    def settled(self) -> bool:
        """Return whether the mirror, if any, has everything."""
        return self.mirror is None or (not self.dirty and self._is_level)

    def waits(self, now_s: float, *, sync: bool) -> bool:
        """Return whether the client may get only what the mirror has."""
        return self.mirror is not None and (
            sync or self.acked is None or now_s > self._acked_s + _ACK_VALID_S
        )

    def sendable(self, now_s: float, *, sync: bool) -> int:
        """Number of events that may go to the client; 0 before the mirror has the header."""
        return self.acked or 0 if self.waits(now_s, sync=sync) else len(self.record.events)


class Delivery(Enum):
    """Treatment of an event for a client that has the stream up to some position."""

    SKIP = "skip"
    SEND = "send"
    CUT = "cut"  # The client has a part of the event, so only the rest may be sent.


def delivery_of(before: int, event: StreamEvent, after: int) -> Delivery:
    """Return what to do with an event that begins at `before`, for a client that has the stream up
    to `after`.
    """
    if event.seq <= after:
        return Delivery.SKIP
    return Delivery.CUT if max(before, 0) < after else Delivery.SEND
