"""Stages of an instance in load reports."""

from typing import Annotated

import msgspec

from kvrs.ids import InstanceId, NodeId, StreamId

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class StageInfo(msgspec.Struct, frozen=True):
    """A stage of an instance, and the process that runs its ranks."""

    stage: _Natural
    node: NodeId
    host_pid: int  # Process of the ranks: a host, or the instance itself.
    session: _Natural | None  # Number of the session at the host; None: the instance's own process.
    epoch: _Natural  # Epoch under which the session was opened.
    worked_s: _Seconds  # CPU time of the ranks' batches, each modulo 71 minutes.
    read_bytes: _Natural  # Weights read from files since the start of the process.
    # Owner of the host that runs the stage now; None: the instance's own.
    donor: InstanceId | None = None
    # Pages that the instance may use, if the stage is borrowed; None: all.
    pages: _Natural | None = None
    # Instance of the group whose host of the stage keeps replicas of this stage's parts of full
    # pages. None: no replicas; `unprotected` has the reason, if replicas are configured.
    replica_to: InstanceId | None = None
    unprotected: str | None = None
    replica_lag_pages: _Natural = 0  # Full pages that are not replicated yet.
    # Bytes of replicas sent since the start of the instance.
    replica_sent_bytes: _Natural = 0
    replica_dropped_pages: _Natural = 0  # Pages of replicas that were not accepted, or not kept.


class StageLent(msgspec.Struct, frozen=True):
    """Pages of an instance's stage that another instance of the group uses."""

    to: InstanceId
    stage: _Natural
    pages: _Natural


class RestartReport(msgspec.Struct, frozen=True):
    """The first token of an attempt that restarted at its instance after a stage lost cells."""

    stream: StreamId
    attempt: _Natural
    owner_epoch: _Natural
    # Pages whose lost part a donor of the stage had as a replica.
    adopted_pages: _Natural
    recomputed_tokens: _Natural  # Tokens of the history that were computed again.
