"""Roles of a proxy towards a record, and the effect of each message on a record in each role. Pure.

A record is kept at two proxies. Claims are granted only in the roles UNMIRRORED and MIRROR; the
protocol makes the pairs MIRRORED + MIRROR and MIRROR + COPY, so one proxy of a pair grants.

    role        the stream           the peer of the record           grants claims
    UNMIRRORED  runs at this proxy   none                             yes
    MIRRORED    runs at this proxy   its mirror                       no
    MIRROR      runs elsewhere, or   its owner, or the holder of its  yes
                waits for a client   copy; none: it has to be copied
    COPY        runs elsewhere, or   the proxy that grants claims     no
                waits for a client
"""

from enum import Enum


class RecordRole(Enum):
    UNMIRRORED = "unmirrored"
    MIRRORED = "mirrored"
    MIRROR = "mirror"
    COPY = "copy"

    @property
    def is_owner(self) -> bool:
        return self in (RecordRole.UNMIRRORED, RecordRole.MIRRORED)

    @property
    def grants(self) -> bool:
        return ROLE_AFTER[RoleChange.GRANTED][self] is not None


class RoleChange(Enum):
    """Events of this proxy that change the role of a record in place."""

    MIRROR_ASSIGNED = "mirror_assigned"  # The owner has chosen a mirror.
    PEER_LOST = "peer_lost"  # The peer died, or dropped or refused the record.
    ENDED = "ended"  # The stream has stopped running here.
    GRANTED = "granted"  # The stream goes to another owner.
    COPIED = "copied"  # A peer has stored the copy that this proxy sent.


_UNMIRRORED, _MIRRORED, _MIRROR, _COPY = RecordRole

# Role of a record after each change, by its role before; None: the change does not occur in this
# role, or the claim is refused.
ROLE_AFTER: dict[RoleChange, dict[RecordRole, RecordRole | None]] = {
    change: dict(zip(RecordRole, row, strict=True))
    for change, row in {
        # from:                     UNMIRRORED    MIRRORED     MIRROR   COPY
        RoleChange.MIRROR_ASSIGNED: (_MIRRORED, _MIRRORED, None, None),
        RoleChange.PEER_LOST: (_UNMIRRORED, _UNMIRRORED, _MIRROR, _MIRROR),
        RoleChange.ENDED: (_MIRROR, _COPY, None, None),
        RoleChange.GRANTED: (_MIRROR, None, _MIRROR, None),
        RoleChange.COPIED: (None, None, _MIRROR, _MIRROR),
    }.items()
}


class Message(Enum):
    """Kinds of `Update` by their content."""

    HEADER = "header"  # An owner's record from its header on, for a new mirror.
    EVENTS = "events"  # An owner's further events.
    COPY = "copy"  # A whole record, from the only proxy that has the record.


class Relation(Enum):
    """Relation of an update's version to the version of the record under the same key."""

    OUTRANKED = "outranked"  # The record has a later owner.
    STALE = "stale"  # Same owner; the update belongs to an earlier mirror.
    CURRENT = "current"  # Same owner and mirror; a copy has nothing that the record lacks.
    AHEAD = "ahead"  # Same owner, later mirror; or a copy with more of the stream.
    NEWER = "newer"  # The update has a later owner.


class UpdateStep(Enum):
    """Steps of a proxy that receives an update; a table chooses them."""

    STORE = "store"  # Replace the record, in role MIRROR or COPY; a stream that runs here stops.
    APPEND = "append"
    ACKNOWLEDGE = "acknowledge"  # Keep the record, and accept the update.
    PAIR = "pair"  # Keep the record, and note the sender as its peer.
    ASK_HEADER = "ask_header"
    SUPERSEDE = "supersede"  # The sender must drop its record, or stop its stream.


_STORE, _APPEND, _ACK, _PAIR = (
    UpdateStep.STORE,
    UpdateStep.APPEND,
    UpdateStep.ACKNOWLEDGE,
    UpdateStep.PAIR,
)
_ASK, _SUPERSEDE = UpdateStep.ASK_HEADER, UpdateStep.SUPERSEDE

STEP_WITHOUT_RECORD: dict[Message, UpdateStep] = {
    Message.HEADER: _STORE,
    Message.EVENTS: _ASK,
    Message.COPY: _STORE,
}
STEPS: dict[tuple[Message, Relation], dict[RecordRole, UpdateStep]] = {
    key: dict(zip(RecordRole, row, strict=True))
    for key, row in {
        # role:                                UNMIRRORED  MIRRORED    MIRROR      COPY
        (Message.HEADER, Relation.OUTRANKED): (_SUPERSEDE, _SUPERSEDE, _SUPERSEDE, _SUPERSEDE),
        (Message.HEADER, Relation.STALE): (_ASK, _ASK, _ASK, _ASK),
        (Message.HEADER, Relation.CURRENT): (_STORE, _STORE, _STORE, _STORE),
        (Message.HEADER, Relation.AHEAD): (_STORE, _STORE, _STORE, _STORE),
        (Message.HEADER, Relation.NEWER): (_STORE, _STORE, _STORE, _STORE),
        (Message.EVENTS, Relation.OUTRANKED): (_SUPERSEDE, _SUPERSEDE, _SUPERSEDE, _SUPERSEDE),
        (Message.EVENTS, Relation.STALE): (_ASK, _ASK, _ASK, _ASK),
        (Message.EVENTS, Relation.CURRENT): (_ASK, _ASK, _APPEND, _APPEND),
        (Message.EVENTS, Relation.AHEAD): (_ASK, _ASK, _ASK, _ASK),
        (Message.EVENTS, Relation.NEWER): (_ASK, _ASK, _ASK, _ASK),
        # A copy does not come from an owner: a copy of the same owner never stops a stream that
        # runs here.
        (Message.COPY, Relation.OUTRANKED): (_SUPERSEDE, _SUPERSEDE, _SUPERSEDE, _SUPERSEDE),
        (Message.COPY, Relation.STALE): (_SUPERSEDE, _SUPERSEDE, _SUPERSEDE, _SUPERSEDE),
        (Message.COPY, Relation.CURRENT): (_ACK, _ACK, _PAIR, _PAIR),
        (Message.COPY, Relation.AHEAD): (_ACK, _ACK, _STORE, _STORE),
        (Message.COPY, Relation.NEWER): (_STORE, _STORE, _STORE, _STORE),
    }.items()
}
