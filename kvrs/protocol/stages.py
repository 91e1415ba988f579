"""Stages of an instance, as load reports have them."""

from typing import Annotated

import msgspec

from kvrs.ids import InstanceId, NodeId, StreamId

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class StageInfo(msgspec.Struct, frozen=True):
    """A stage of an instance, and the process that has its ranks."""

    stage: _Natural
    node: NodeId
    host_pid: int  # That process: a host, or the instance's own.
    session: _Natural | None  # Its number at the host; None: it is the instance's own process.
    epoch: _Natural  # Under which the session was opened.
    worked_s: _Seconds  # Processor time of its ranks' batches, of each modulo 71 minutes.
    read_bytes: _Natural  # Of weights, from files, since the start of that process.
    donor: InstanceId | None = None  # Whose host has the stage now; None: its own.
    pages: _Natural | None = None  # That the instance may use, where it borrows; None: all.
    # Where its parts of full pages go as replicas: an instance of the group, which has them in its
    # own host of the stage. None: nowhere; then the reason, where replicas are kept at all.
    replica_to: InstanceId | None = None
    unprotected: str | None = None
    replica_lag_pages: _Natural = 0  # Full, and not there yet.
    replica_sent_bytes: _Natural = 0  # As the counter behind it since the start of the instance.
    replica_dropped_pages: _Natural = 0  # That were not taken, or not kept.


class StageLent(msgspec.Struct, frozen=True):
    """Pages of a stage of the instance that another one of its group uses."""

    to: InstanceId
    stage: _Natural
    pages: _Natural


class RestartReport(msgspec.Struct, frozen=True):
    """The next token of an attempt that began again at its instance, since cells of a stage were
    lost.
    """

    stream: StreamId
    attempt: _Natural
    owner_epoch: _Natural
    # Of its pages, those of which a donor of the stage had the lost part as a replica.
    adopted_pages: _Natural
    recomputed_tokens: _Natural  # Of the history until then.
